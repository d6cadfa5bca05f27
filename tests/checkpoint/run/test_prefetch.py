"""Test prefetching of files to the page cache: which pieces are read, how far ahead of the run, and that its threads
end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import until

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
