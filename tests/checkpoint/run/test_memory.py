"""Test the peak memory of real converting processes, on matrices larger than that peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from exhaustive import exhaustive
from runs import environment

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
