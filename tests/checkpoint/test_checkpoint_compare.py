"""Looking into checkpoints and comparing them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import compare_checkpoints, convert, open_checkpoint, schema
from fp4kit.checkpoint.inspect import quantization_summary


def test_inspect_directory(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert set(checkpoint.layers) == {tensor.name.removesuffix(".weight") for tensor in report.plan.converted}
    assert checkpoint.layers["model.layers.0.mlp.gate_proj"].shape == (96, 64)
    assert {layer.format for layer in checkpoint.layers.values()} == {schema.W4A16_NVFP4}
    assert checkpoint.unrecognised == ()
    assert sum(nbytes for _, nbytes in checkpoint.totals.values()) == report.plan.bytes_out
    assert sum(count for count, _ in checkpoint.totals.values()) == len(checkpoint.tensors)
    lines = dict(quantization_summary(checkpoint))
    assert lines["quant_algo"] == "W4A16_NVFP4" and lines["ignore"] == "2 patterns"
    assert lines["fp4kit"].endswith("recipe nvfp4-te")


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "mxfp8-te"])
def test_inspect_recognises_mx_formats(tmp_path: Path, recipe: str) -> None:
    synthetic.bert(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", recipe)
    layers = open_checkpoint(tmp_path / "out").layers
    assert len(layers) == 5 and {layer.format for layer in layers.values()} == {report.plan.format}


def test_inspect_file_without_configs(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "x.safetensors", {"a.weight_scale": np.zeros((4, 4), np.uint8)})
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.unrecognised == ("a",) and not checkpoint.layers
    assert quantization_summary(checkpoint) == []


def test_inspect_tells_configs_that_disagree(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")
    path = tmp_path / "out" / "hf_quant_config.json"
    text = json.loads(path.read_text())
    text["quantization"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(text))
    lines = dict(quantization_summary(open_checkpoint(tmp_path / "out")))
    assert lines["disagree"] == "config.json says W4A16_NVFP4, hf_quant_config.json NVFP4"


def test_inspect_of_nothing(tmp_path: Path) -> None:
    with refused("none: does not exist; a model directory or a .safetensors file is needed"):
        open_checkpoint(tmp_path / "none")


def test_compare_equal(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    comparison = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert comparison.equal and comparison.same == len(open_checkpoint(tmp_path / "a").tensors)


def test_compare_plain_tensors(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    y = x.copy()
    y[[1, 4]] = -y[[1, 4]]
    one = {"bytes": x, "dtype": x, "gone": x, "shape": x, "same": x}
    other: synthetic.Tensors = {"bytes": y, "dtype": x.astype(np.float16), "new": x, "shape": x.reshape(2, 3), "same": x}
    synthetic.write_file(tmp_path / "a.safetensors", one)
    synthetic.write_file(tmp_path / "b.safetensors", other)
    comparison = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(d.name, d.kind, d.detail) for d in comparison.tensors] == [
        ("bytes", "bytes", "2 of 24 bytes differ"),
        ("dtype", "dtype", "F32 [6] and F16 [6]"),
        ("gone", "missing", "F32 [6]"),
        ("new", "extra", "F32 [6]"),
        ("shape", "shape", "F32 [6] and F32 [2, 3]"),
    ]
    assert comparison.same == 1 and not comparison.equal and comparison.layers == ()


def test_compare_quantized_layers(tmp_path: Path) -> None:
    """Two recipes on one source, against the codes and scales of fp4kit.quantize."""
    x = synthetic.random("x", (40, 64), dtype=np.dtype("f4"))
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": x})
    recipes = ("nvfp4-te", "nvfp4-te-4over6-mse-256")
    for recipe in recipes:
        convert(tmp_path / "m", tmp_path / recipe, recipe)
    (layer,) = compare_checkpoints(tmp_path / recipes[0], tmp_path / recipes[1]).layers
    a, b = (fp4kit.quantize(x, recipe) for recipe in recipes)
    nibbles = (a.packed ^ b.packed)[..., None] & np.array([0x0F, 0xF0], np.uint8)
    assert (layer.name, layer.elements) == ("a", x.size)
    assert layer.codes == np.count_nonzero(nibbles) > 0
    assert layer.scales == np.count_nonzero(a.block_scale != b.block_scale) > 0
    assert layer.tensor_scales == (float(a.tensor_scale), float(b.tensor_scale))
    decoded = [fp4kit.dequantize(q, np.float32).astype(np.float64) for q in (a, b)]
    ratio = np.sum(decoded[0] ** 2) / np.sum((decoded[0] - decoded[1]) ** 2)
    assert layer.sqnr_db == pytest.approx(10 * np.log10(ratio), abs=1e-3)
    assert 0 < layer.values <= layer.elements


def test_compare_one_flipped_code(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file, entry = open_checkpoint(tmp_path / "b").tensors["encoder.layer.0.intermediate.dense.weight"]
    data = bytearray(file.path.read_bytes())
    data[entry.start] ^= 0x80
    file.path.write_bytes(data)
    comparison = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [difference.detail for difference in comparison.tensors] == ["1 of 4096 bytes differ"]
    (layer,) = comparison.layers
    assert (layer.codes, layer.scales, layer.values) == (1, 0, 1)
    assert layer.tensor_scales[0] == layer.tensor_scales[1]


def test_compare_formats(tmp_path: Path) -> None:
    """NVFP4 against MXFP4: shapes differ, values can still be compared; against MXFP8 all codes count as different."""
    synthetic.bert(tmp_path / "m")
    for recipe in ("nvfp4-te", "mxfp4-ocp", "mxfp8-te"):
        convert(tmp_path / "m", tmp_path / recipe, recipe)
    (layer, *_) = compare_checkpoints(tmp_path / "nvfp4-te", tmp_path / "mxfp4-ocp").layers
    assert layer.scales == 64 * 4 and layer.tensor_scales[1] is None and 10 < layer.sqnr_db < 30
    (layer, *_) = compare_checkpoints(tmp_path / "mxfp8-te", tmp_path / "mxfp4-ocp").layers
    assert layer.codes == layer.elements == 64 * 64
    assert math.isfinite(layer.sqnr_db)
