"""Test that verify --source recognises smoothed norms and layers, and reports norms that changed otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
import synthetic

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.verify.verify import verify

NORM = "model.layers.0.input_layernorm.weight"
LAYERS = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def smoothed(root: Path, spread: float, undo: bool, noise: float = 0) -> tuple[Path, Path]:
    """Write a model whose first norm is divided by a power of two per column, and quantize it.

    Return (quantized model without a recorded recipe, source without the division).

    spread: the standard deviation of the exponents.
    undo: True to multiply the columns of the next layers by the factors, as SmoothQuant does.
    noise: the standard deviation of numbers by which the values of these layers are multiplied in addition.
    """
    tensors = synthetic.dense(root / "m", index=False)
    rng = np.random.default_rng(3)
    factor = np.exp2(np.round(rng.standard_normal(tensors[NORM].size) * spread)).astype(np.float32)
    changed = dict(tensors)
    changed[NORM] = (tensors[NORM].astype(np.float32) / factor).astype(synthetic.BF16)
    for name in LAYERS if undo else ():
        errors = 1 + noise * rng.standard_normal(tensors[name].shape)
        changed[name] = (tensors[name].astype(np.float32) * factor * errors).astype(synthetic.BF16)
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    synthetic.write_model(root / "s", config, changed)
    convert(root / "s", root / "q", "nvfp4-modelopt", format="modelopt")
    stored = oracle.arrays(oracle.load(root / "q"))
    synthetic.write_model(root / "bare", config, stored)  # without the record of a recipe
    return root / "bare", root / "m"


@pytest.mark.parametrize("spread", [0.7, 2.0])
def test_smoothed_layers_are_clean(spread: float, tmp_path: Path) -> None:
    model, source = smoothed(tmp_path, spread, undo=True)
    report = verify(model, source)
    texts = {issue.subject: issue.text for issue in report.issues if issue.severity == "warning"}
    assert "divided by a factor per column" in texts[NORM]
    errors = [issue for issue in report.issues if issue.severity == "error" and "SQNR" in issue.text]
    assert not errors and not [i for i in report.issues if i.severity == "error" and i.subject == NORM]


@pytest.mark.parametrize("noise, severity", [(0.03, "warning"), (0.13, "error")])
def test_layers_that_changed_in_addition_are_not_smoothed(noise: float, severity: str, tmp_path: Path) -> None:
    """With the noise of 0.13, the layers are 4 dB below the usual SQNR, so the factors do not explain the change."""
    model, source = smoothed(tmp_path, 2.0, undo=True, noise=noise)
    assert {issue.severity for issue in verify(model, source).issues if issue.subject == NORM} == {severity}


def test_a_norm_that_changed_otherwise_is_an_error(tmp_path: Path) -> None:
    model, source = smoothed(tmp_path, 2.0, undo=False)
    found = [issue for issue in verify(model, source).issues if issue.subject == NORM]
    assert [issue.severity for issue in found] == ["error"] and "differ from the source" in found[0].text


@pytest.mark.parametrize("column", range(3))
def test_a_norm_whose_factor_hardly_helps_its_layers_is_an_error(column: int, tmp_path: Path) -> None:
    """verify reports a norm that differs from the source in one column by a factor of 1 + 2^-7 as an error.

    Such a factor is not smoothing: it changes the SQNR of the layers by much less than 0.5 dB, up or down.
    """
    tensors = synthetic.dense(tmp_path / "m", index=False)
    norm = tensors[NORM].astype(np.float32)
    norm[column] *= 1 + 2**-7
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    synthetic.write_model(tmp_path / "s", config, {**tensors, NORM: norm.astype(synthetic.BF16)})
    convert(tmp_path / "s", tmp_path / "q", "nvfp4-modelopt", format="modelopt")
    synthetic.write_model(tmp_path / "bare", config, oracle.arrays(oracle.load(tmp_path / "q")))
    found = [issue for issue in verify(tmp_path / "bare", tmp_path / "m").issues if issue.subject == NORM]
    assert [issue.severity for issue in found] == ["error"]
