"""Test prefetching of files to the page cache, and the peak memory of converting processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from exhaustive import exhaustive
from runs import environment, until

from fp4kit.checkpoint import executors as prefetch
from fp4kit.storage.files import SafetensorsFile


def threads_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Return a list to which each thread that `module` starts from now on is appended."""
    begun: list[threading.Thread] = []

    class Noted(threading.Thread):
        def start(self) -> None:
            begun.append(self)
            super().start()

    monkeypatch.setattr(module, "Thread", Noted)
    return begun


def watch(monkeypatch: pytest.MonkeyPatch, noted: Callable[[Path, int], None]) -> None:
    """Before each request to the system to read ahead (posix_fadvise), call noted(path of the file, offset)."""
    ask = os.posix_fadvise

    def watched(descriptor: int, start: int, count: int, advice: int) -> None:
        assert (count, advice) == (prefetch.STEP, os.POSIX_FADV_WILLNEED)
        noted(Path(os.readlink(f"/proc/self/fd/{descriptor}")), start)
        ask(descriptor, start, count, advice)

    monkeypatch.setattr(os, "posix_fadvise", watched)


@pytest.mark.parametrize("piece", [64, 256])
@pytest.mark.parametrize(("stop_at", "read"), [(None, "aaaabbbbccc"), ("b", "aaaab"), ("a", "a")])
def test_files_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str | None, read: str, piece: int
) -> None:
    """Prefetcher reads files ahead in order, piece by piece, until it is stopped.

    Missing files and directories are skipped.

    stop_at: the file at which it is stopped, or None.
    read: the names of the files that are read ahead, one per request.
    piece: the number of bytes that a thread takes at a time.
    """
    monkeypatch.setattr(prefetch, "PIECE", piece)
    monkeypatch.setattr(prefetch, "STEP", 64)
    monkeypatch.setattr(prefetch, "THREADS", 1)
    stopped, found, bytes_of = threading.Event(), [], {"a": 200, "b": 256, "c": 129}

    def noted(path: Path, start: int) -> None:
        if path.name == stop_at:
            stopped.set()
        if path.name in bytes_of:
            found.append((path.name, start))

    watch(monkeypatch, noted)
    for name, size in bytes_of.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(prefetch, "Event", lambda: stopped)
    threads = threads_of(prefetch, monkeypatch)
    files = [
        SafetensorsFile(tmp_path / name, name, bytes_of.get(name, 70), (), {})
        for name in ("a", "none", "folder", "b", "c")
    ]
    with prefetch.Prefetcher(files, 1, print):
        until(lambda: not any(thread.is_alive() for thread in threads))
    assert "".join(name for name, _ in found) == read
    assert found == [(name, start) for name in sorted(bytes_of) for start in range(0, bytes_of[name], 64)][: len(found)]


def test_reading_ahead_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several threads, each piece is read once, and all threads end when they are joined."""
    monkeypatch.setattr(prefetch, "PIECE", 64)
    monkeypatch.setattr(prefetch, "STEP", 64)
    taken: list[int] = []
    watch(monkeypatch, lambda path, start: taken.append(start))
    (tmp_path / "a").write_bytes(bytes(64 * 5000))
    file, threads = SafetensorsFile(tmp_path / "a", "a", 64 * 5000, (), {}), threads_of(prefetch, monkeypatch)
    with prefetch.Prefetcher([file], 1, print):
        until(lambda: not any(thread.is_alive() for thread in threads))
    assert sorted(taken) == list(range(0, 64 * 5000, 64))
    with prefetch.Prefetcher([file], 1, print):
        pass
    assert len(threads) == 2 * prefetch.THREADS and not any(thread.is_alive() for thread in threads)


def test_no_further_than_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetching stays within a window (here 640 bytes) ahead of the run, and skips pieces that the run has passed."""
    monkeypatch.setattr(prefetch, "PIECE", 64)
    monkeypatch.setattr(prefetch, "STEP", 64)
    monkeypatch.setattr(prefetch, "THREADS", 1)
    monkeypatch.setattr(
        prefetch.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 64, "SC_PHYS_PAGES": 10 * prefetch.WINDOW_DIVISOR}[name]
    )
    monkeypatch.setattr(prefetch, "_LIMIT", tmp_path / "none")
    begun: list[int] = []
    watch(monkeypatch, lambda path, start: begun.append(start))
    (tmp_path / "a").write_bytes(bytes(6400))
    told: list[int] = []
    with prefetch.Prefetcher([SafetensorsFile(tmp_path / "a", "a", 6400, (), {})], 2 * 6400, told.append) as tick:
        until(lambda: len(begun) == 11)  # offsets 0 to 640
        tick(2 * 640)
        until(lambda: len(begun) == 21)
        tick(2 * 3200)  # the run is at offset 3840
        until(lambda: begun[-1] == 4480)
        assert told == [1280, 6400]
    assert begun == [*range(0, 1281, 64), *range(3840, 4481, 64)]
    monkeypatch.undo()
    monkeypatch.setattr(prefetch, "_LIMIT", tmp_path / "memory.max")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert prefetch.memory() == whole
    for text, memory in {"max\n": whole, "1048576\n": 1 << 20, str(2 * whole): whole}.items():
        (tmp_path / "memory.max").write_text(text)  # the limit of a container
        assert prefetch.memory() == memory


def test_systems_without_posix_fadvise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    (tmp_path / "a").write_bytes(bytes(100))
    threads, told = threads_of(prefetch, monkeypatch), list[int]()
    with prefetch.Prefetcher([SafetensorsFile(tmp_path / "a", "a", 100, (), {})], 200, told.append) as tick:
        tick(7)
    assert not threads and told == [7]


MIB = 1 << 20
STACK = "model.layers.0.mlp.experts.gate_up_proj"
HIDDEN = 16384


def write_sparse(root: Path, config: dict[str, object], tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    """Write a model of zeros as sparse files, which take no disk space.

    tensors: {name: (dtype, shape, bytes per element)}.
    """
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + prod(shape) * size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_local_experts": 2, **config}))
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(root / "model.safetensors", 8 + len(text) + end)


def plain(root: Path) -> None:
    """Write a stack [E, N, K] of bfloat16 with 256 MiB."""
    write_sparse(root, {"model_type": "qwen3_moe"}, {STACK: ("BF16", (1, HIDDEN // 2, HIDDEN), 2)})


def turned(root: Path) -> None:
    """Write a stack [E, K, N] of bfloat16 with 256 MiB per expert, which is transposed while it is read."""
    write_sparse(root, {"model_type": "gpt_oss"}, {STACK: ("BF16", (1, HIDDEN // 2, HIDDEN), 2)})


def codes(root: Path) -> None:
    """Write a stack in gpt-oss's MXFP4 that decodes to [E, K, N] of bfloat16 with 256 MiB per expert."""
    shape = (1, HIDDEN // 2, HIDDEN // 32)
    declared = {"quantization_config": {"quant_method": "mxfp4"}, "model_type": "gpt_oss"}
    write_sparse(root, declared, {f"{STACK}_blocks": ("U8", (*shape, 16), 1), f"{STACK}_scales": ("U8", shape, 1)})


def copied(root: Path) -> None:
    """Write a model with an embedding of 512 MiB, which is copied, and a small layer, which is quantized."""
    small = ("BF16", (64, 64), 2)
    tensors = {
        "model.embed_tokens.weight": ("BF16", (HIDDEN, HIDDEN), 2),
        "model.layers.0.self_attn.o_proj.weight": small,
    }
    write_sparse(root, {"model_type": "llama"}, tensors)


CASES = {
    "plain": (plain, "nvfp4-te", None),
    "turned": (turned, "mxfp4-ocp", "gpt-oss"),
    "codes": (codes, "mxfp4-ocp", "bf16"),
    "copied": (copied, "nvfp4-te", None),
}
SCRIPT = """
import re, sys
from fp4kit.checkpoint import convert
source, out, recipe, form = sys.argv[1:]
convert(source, out, recipe, format=form or None)
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])  # ru_maxrss has the peak of the parent too
"""


@pytest.mark.parametrize("case", exhaustive(CASES))
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, case: str) -> None:
    """A process that converts matrices of 256 MiB has a peak memory below 200 MiB, 70 of which are Python and NumPy.

    A stack of 100 GB would only have more matrices of the tested size.
    """
    make, recipe, form = CASES[case]
    make(tmp_path / "m")
    command = [sys.executable, "-c", SCRIPT, tmp_path / "m", tmp_path / "out", recipe, form or ""]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) << 10 < 200 * MIB, f"{int(result.stdout) >> 10} MiB"
