"""Test zeros, NaN, infinities and tiny numbers in conversions: each is treated as documented, and loaders can use all
scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import exhaustive
from oracle import load
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite

EXPERTS = "model.layers.1.mlp.experts"


def expected(tensors: synthetic.Tensors, converted: list[str], recipe: str, format: str) -> oracle.Loaded:
    return oracle.expected(tensors, recipe, format, [f"{name}.weight" for name in converted])


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-4over6-mse-256", "nvfp4-modelopt", "nvfp4-flashinfer"])
def test_zeros(tmp_path: Path, recipe: str) -> None:
    """A group of zeros gets the tensor scale 1 and zero codes, whatever the recipe.

    A gate of zeros shares the scale of its up projection.
    """
    tensors = synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="modelopt")
    loaded = load(tmp_path / "out")
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert loaded[f"{EXPERTS}.3.{name}.weight_scale_2"][2] == np.float32(1).tobytes()
        for part in ("weight", "weight_scale"):
            assert not any(loaded[f"{EXPERTS}.3.{name}.{part}"][2])
    amax = oracle.amax([tensors[f"{EXPERTS}.2.up_proj.weight"]])
    scale = fp4kit.quantize(tensors[f"{EXPERTS}.2.gate_proj.weight"], recipe, tensor_amax=amax).tensor_scale
    assert loaded[f"{EXPERTS}.2.gate_proj.weight_scale_2"][2] == scale.tobytes()


def test_zeros_of_mxfp4_become_zeros_of_nvfp4(tmp_path: Path) -> None:
    """The exponents of zero blocks have no meaning, so they must not prevent an exact cast to NVFP4."""
    codes = np.zeros((4, 32), np.uint8)
    codes[1] = 0x88  # -0
    tensors = {"a.weight_packed": codes, "a.weight_scale": np.full((4, 2), 3, np.uint8)}
    declared = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    synthetic.write_model(tmp_path / "m", {"quantization_config": declared}, tensors)
    report = convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    assert report.actions == {"cast": 1}
    assert load(tmp_path / "out") == {
        "a.weight": ("U8", (4, 32), codes.tobytes()),
        "a.weight_scale": ("F8_E4M3", (4, 4), bytes(16)),
        "a.weight_scale_2": ("F32", (), np.float32(1).tobytes()),
    }


def with_unusual(tmp_path: Path, dtype: Any) -> synthetic.Tensors:
    """Write a model whose gate projection has NaN and infinities to ``tmp_path / "m"``; return its tensors."""
    tensors = {
        f"mlp.{n}_proj.weight": synthetic.random(n, (8, 64), dtype=np.dtype(dtype)) for n in ("gate", "up", "down")
    }
    tensors["mlp.gate_proj.weight"][1, 2:5] = np.nan, np.inf, -np.inf
    synthetic.write_model(tmp_path / "m", {}, tensors)
    return tensors


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, *exhaustive([np.float16, np.float32])])
@pytest.mark.parametrize(
    ("recipe", "format"),
    [("nvfp4-te", "modelopt"), ("mxfp4-ocp", "compressed-tensors"), ("mxfp8-te", "compressed-tensors")],
)
def test_nonfinite_policies(tmp_path: Path, recipe: str, format: str, dtype: Any) -> None:
    tensors = with_unusual(tmp_path, dtype)
    with refused("mlp.gate_proj.weight: 3 of 512 values are NaN or infinite; repair the source"):
        convert(tmp_path / "m", tmp_path / "out", recipe, format=format)
    assert not (tmp_path / "out").exists()
    names = [name.removesuffix(".weight") for name in tensors]
    kept = convert(tmp_path / "m", tmp_path / "keep", recipe, format=format, nonfinite="keep")
    assert load(tmp_path / "keep") == expected(tensors, names, recipe, format) and kept.replaced == 0
    report = convert(tmp_path / "m", tmp_path / "saturate", recipe, format=format, nonfinite="saturate")
    assert report.replaced == 3
    largest = oracle.amax(
        tensors[f"mlp.{name}_proj.weight"] for name in (["gate", "up"] if "nvfp4" in recipe else ["gate"])
    )
    tensors["mlp.gate_proj.weight"][1, 2:5] = 0, largest, -largest
    assert load(tmp_path / "saturate") == expected(tensors, names, recipe, format)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8-te", "nvfp4-te"])
def test_nonfinite_codes(tmp_path: Path, recipe: str, fp8: bool) -> None:
    """A NaN code or scale of the source is treated like the NaN values that it decodes to.

    If NaN and infinities are saturated, the result has none.
    """
    if fp8:
        codes = synthetic.any_bytes("a", (8, 64), 0, 0x7F)
        codes[0, 5] = 0x7F
        tensors = {"a.weight": codes.view(synthetic.E4M3), "a.weight_scale_inv": np.full((1, 1), 0.5, np.float32)}
        declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    else:
        scales = synthetic.any_bytes("s", (8, 2), 120, 124)
        scales[1, 0] = 255
        tensors = {"a.weight_packed": synthetic.any_bytes("a", (8, 32)), "a.weight_scale": scales}
        declared = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    synthetic.write_model(tmp_path / "m", {"quantization_config": declared}, tensors)
    for format in ("compressed-tensors", "bf16"):
        with refused(f"{1 if fp8 else 32} of 512 values are NaN or infinite"):
            convert(tmp_path / "m", tmp_path / "out", recipe, format=format, requantize=True)
        report = convert(
            tmp_path / "m", tmp_path / format, recipe, format=format, requantize=True, nonfinite="saturate"
        )
        assert report.replaced == (1 if fp8 else 32)
        ((module, layer),) = next(iter(oracle.layers(oracle.arrays(load(tmp_path / format))).values())).items()
        assert module == "a" and np.isfinite(layer.x.astype(np.float32)).all()
        assert not layer.x[(0, slice(5, 6)) if fp8 else (1, slice(0, 32))].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_amax_and_nonfinite(dtype: type) -> None:
    x: np.ndarray = np.array([[1, -3.5, 0, 2]], dtype)
    assert amax_and_nonfinite(x) == (np.float32(3.5), 0)
    assert amax_and_nonfinite(np.array([[np.nan, -np.inf, 1, -np.nan]], dtype)) == (1, 3)
    smallest: np.ndarray = np.array([[1, 0]], f"u{x.itemsize}").view(dtype)
    assert amax_and_nonfinite(-smallest) == (smallest.astype(np.float32).max(), 0)
    assert amax_and_nonfinite(x * 0) == (0, 0)
