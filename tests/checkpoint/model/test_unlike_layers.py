"""Test warnings about layers that lack a tensor or have another dtype than the other layers of their kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import synthetic

from fp4kit.checkpoint import make_plan
from fp4kit.checkpoint.verify.verify import verify

BF16 = ml_dtypes.bfloat16
CONFIG = {"model_type": "llama", "hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}}
NAMES = [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]


def model() -> synthetic.Tensors:
    """Return three FP8 layers of one kind with biases and input scales, as compressed-tensors stores them."""
    found: synthetic.Tensors = {}
    for name in NAMES:
        found[f"{name}.weight"] = synthetic.random(name, (64, 64), 100.0, np.dtype(ml_dtypes.float8_e4m3fn))
        found[f"{name}.bias"] = np.zeros(64, BF16)
        for scale in ("weight_scale", "input_scale"):
            found[f"{name}.{scale}"] = np.array([0.001], np.float32)
    return found


def drop(part: str, *names: str) -> Callable[[synthetic.Tensors], None]:
    def change(tensors: synthetic.Tensors) -> None:
        for name in names:
            del tensors[f"{name}.{part}"]

    return change


def cast(tensors: synthetic.Tensors) -> None:
    name = f"{NAMES[2]}.weight_scale"
    tensors[name] = tensors[name].astype(BF16)


def half(tensors: synthetic.Tensors) -> None:
    name = f"{NAMES[2]}.bias"
    tensors[name] = tensors[name].view(np.float16)


def matrix(tensors: synthetic.Tensors) -> None:
    tensors[f"{NAMES[0]}.bias"] = np.zeros((64, 1), BF16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict, None),
        (drop("bias", *NAMES), None),
        (drop("bias", NAMES[1]), f"{NAMES[1]}: no bias, but 2 of 3 layers of this kind have one"),
        (drop("input_scale", *NAMES[:2]), f"{NAMES[2]}: has input_scale, but 2 of 3 layers of this kind have none"),
        (cast, f"{NAMES[2]}: tensor scale in BF16, but in F32 in 2 of 3 layers of this format"),
        (half, f"{NAMES[2]}: bias in F16, but in BF16 in 2 of 3 layers of this format"),
        (matrix, f"{NAMES[0]} [64, 64]: has 64 rows, but its bias is BF16 [64, 1]"),
    ],
)
def test_layers_that_differ_from_their_kind(
    change: Callable[[synthetic.Tensors], object], text: str | None, tmp_path: Path
) -> None:
    tensors = model()
    change(tensors)
    synthetic.write_model(tmp_path / "m", CONFIG, tensors)
    warnings = make_plan(tmp_path / "m", format="bf16").warnings
    assert [warning[: len(text or "")] for warning in warnings] == ([text] if text else [])
    issues = [issue for issue in verify(tmp_path / "m").issues if issue.text in warnings]
    assert [issue.severity for issue in issues] == ["warning"] * len(warnings)
