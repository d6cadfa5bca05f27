"""Test every field of the tables of containers, and containers that are only read."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import synthetic
from synthetic import BF16, E4M3, refused

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, WRITTEN, container_id, declarations
from fp4kit.checkpoint.containers.table import CODES, CONTAINERS, INPUT_SCALE, TENSOR_SCALE, Container
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.loaders.exclusions import READERS
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.formats import ElementFormat

NAME = "model.layers.0.mlp.down_proj"
SHAPE = (256, 384)


def written(
    root: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None, **declared: Any
) -> Path:
    """Write a model with the single layer NAME to the new directory `root`. Return the directory.

    tensors: {suffix: array} of the layer's parts, such as ".weight_scale".
    metadata: the metadata of the safetensors file.
    declared: the entries of quantization_config.
    """
    root.mkdir(parents=True)
    synthetic.write_file(root / "model.safetensors", {NAME + end: x for end, x in tensors.items()}, metadata)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": declared}))
    return root


def check(model: Path, wanted: np.ndarray, container: str) -> None:
    """Assert that the layer of a model is recognized as `container` and decodes to `wanted`.

    The values are compared in bfloat16, bit for bit except for the sign of 0.
    """
    assert [layer.dtype for layer in inspect_checkpoint(model).layers.values()] == [container]
    convert(model, model.parent / "bf16", format="bf16")
    found = oracle.arrays(oracle.load(model.parent / "bf16"))[f"{NAME}.weight"]
    zero = BF16.type(0)
    assert (found + zero).tobytes() == (wanted.astype(BF16) + zero).tobytes()


def fp8(seed: str = "w") -> np.ndarray:
    """Return random E4M3 codes in the shape SHAPE, without NaN."""
    codes = np.random.default_rng(3).integers(0, 256, SHAPE, np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes).view(E4M3)


SCALES = {  # kind -> (shape of the scales, how each is spread over the matrix)
    "": ((), lambda s: s),
    " per row": ((256, 1), lambda s: s),
    " 128x128": ((2, 3), lambda s: np.repeat(np.repeat(s, 128, 0), 128, 1)),
}


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors", "quark"])
def test_fp8(method: str, kind: str, dtype: Any, tmp_path: Path) -> None:
    """An FP8 layer decodes to code * scale in float32, which compressed-tensors rounds to the dtype of the scales.

    method: the quant_method of the config.
    kind: a key of SCALES.
    dtype: the dtype of the scales.
    """
    shape, spread = SCALES[kind]
    codes, scales = fp8(), np.exp(synthetic.random("s", shape, 1.0, np.dtype(np.float32))).astype(dtype)
    wanted = codes.astype(np.float32) * spread(scales.astype(np.float32))
    if method == "compressed-tensors":
        wanted = wanted.astype(dtype).astype(np.float32)
    parts = {".weight": codes, ".weight_scale": scales}
    declared: dict[str, Any] = {"quant_method": method}
    if method == "modelopt":
        declared["quant_algo"] = {"": "FP8", " per row": "FP8_PER_CHANNEL_PER_TOKEN", " 128x128": "FP8_PB_WO"}[kind]
        declared["ignore"] = ["lm_head"]
        parts |= {} if kind else {".input_scale": np.ones((), np.float32)}
    elif method == "compressed-tensors":
        strategy = {"": "tensor", " per row": "channel", " 128x128": "block"}[kind]
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
        declared |= {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}, "format": "float-quantized"}
    model = written(tmp_path / "m", parts, **declared)
    check(model, wanted, f"{method} FP8{kind}")
    errors = [issue.text for issue in verify(model).issues if issue.severity == "error"]
    flat = method == "modelopt" and kind == " per row"
    assert errors == ["weight_scale has shape [256, 1]; [256] is needed"] * flat


@pytest.mark.parametrize("shape", [(256,), (1,), (2, 1, 3, 1)])
def test_fp8_scales_of_other_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    """FP8 scales are accepted in further shapes: [N] per row, [1] per layer, and with axes of length 1 per block."""
    codes, scales = fp8(), np.exp(synthetic.random("s", shape, 1.0, np.dtype(np.float32)))
    kind = {256: " per row", 1: "", 6: " 128x128"}[scales.size]
    usual = SCALES[kind][0]
    wanted = codes.astype(np.float32) * SCALES[kind][1](scales.reshape(usual))
    model = written(tmp_path / "m", {".weight": codes, ".weight_scale": scales}, quant_method="modelopt")
    check(model, wanted, f"modelopt FP8{kind}")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_integers_under_float_scales_are_not_fp8(dtype: Any, tmp_path: Path) -> None:
    """A weight of dtype U8 or I8 with a float scale per row is refused, because its bytes could be integers."""
    parts = {".weight": fp8().view(dtype), ".weight_scale": np.ones((256, 1), np.float32)}
    with refused("packed weights or scales in a format that fp4kit does not read in models"):
        make_plan(written(tmp_path / "m", parts, quant_method="compressed-tensors"), format="bf16")


def nvfp4(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of an NVFP4 layer of Model-Optimizer."""
    q = fp4kit.quantize(x, "nvfp4-modelopt")
    return {
        ".weight": q.packed,
        ".weight_scale": np.asarray(q.block_scale).view(E4M3),
        ".weight_scale_2": np.asarray(q.tensor_scale),
    }


def test_awq_multiplies_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = synthetic.random("awq", SHAPE)
    parts = nvfp4(x)
    factor = np.exp(synthetic.random("pre", (SHAPE[1],), 1.0, np.dtype(np.float32))).astype(BF16)
    plain = fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-modelopt"), np.float32)
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16}
    model = written(tmp_path / "m", {**parts, ".pre_quant_scale": factor}, **declared)
    check(model, plain * factor.astype(np.float32), "modelopt NVFP4_AWQ")
    zeroed = written(
        tmp_path / "zero", {**parts, ".pre_quant_scale": factor * (np.arange(len(factor)) > 1)}, **declared
    )
    with refused("2 factors per column (AWQ) are zero or negative"):
        convert(zeroed, tmp_path / "zeroed", format="bf16")
    with refused("is already quantized as modelopt NVFP4_AWQ"):
        make_plan(model, "nvfp4-te", format="compressed-tensors")
    convert(model, tmp_path / "kept", "nvfp4-modelopt", format="modelopt")
    have, kept = oracle.load(model), oracle.load(tmp_path / "kept")
    assert {name: kept[name] for name in have} == have
    config = json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4_AWQ" and "config_groups" not in config
    beside = json.loads((tmp_path / "kept" / "hf_quant_config.json").read_text())["quantization"]
    assert (beside["quant_algo"], beside["pre_quant_scale"], beside["has_zero_point"]) == ("NVFP4_AWQ", True, False)
    assert verify(tmp_path / "kept", model).clean
    other = written(tmp_path / "other", {**nvfp4(x[::-1]), ".pre_quant_scale": factor * 2}, **declared)
    capsys.readouterr()
    assert main(["compare", str(model), str(other)]) == 1  # no column of the table of layers counts the factors
    assert re.search(r"pre_quant_scale +bytes", capsys.readouterr().out)


def test_awq_with_a_source_is_compared_by_its_own_values(tmp_path: Path) -> None:
    """For AWQ, verify multiplies the decoded columns by pre_quant_scale before it compares them with the source.

    If the stored factors are inverted, verify reports an SQNR that is too low.
    """
    x = synthetic.random("awq", SHAPE)
    factor = np.exp2(np.arange(SHAPE[1]) % 3 - 1).astype(np.float32)
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    parts = nvfp4((x.astype(np.float32) / factor).astype(BF16))
    model = written(tmp_path / "m", {**parts, ".pre_quant_scale": factor.astype(BF16)}, **declared)
    synthetic.write_model(tmp_path / "s", {"model_type": "llama"}, {f"{NAME}.weight": x})
    report = verify(model, tmp_path / "s")
    assert report.clean, report.issues
    assert report.layers[0].tally.sqnr_db > 15
    wrong = written(tmp_path / "w", {**parts, ".pre_quant_scale": (1 / factor).astype(BF16)}, **declared)
    assert any("below what 4 bits usually give" in issue.text for issue in verify(wrong, tmp_path / "s").issues)


def test_groups_of_32(tmp_path: Path) -> None:
    """Layers with an E4M3 scale per 32 elements are decoded if the config declares W4A8_NVFP4_FP8.

    If it declares NVFP4 with groups of 16, they are refused.
    """
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (SHAPE[0], SHAPE[1] // 2), np.uint8)
    scales = rng.integers(1, 0x7F, (SHAPE[0], SHAPE[1] // 32), np.uint8).view(E4M3)
    parts = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": np.float32(0.013)}
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(SHAPE)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[pairs & 7]
    values = np.where(pairs & 8, -values, values)
    scale = scales.astype(np.float32) * np.float32(0.013)
    wanted = values * np.repeat(scale, 32, axis=1)
    declared = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}
    check(written(tmp_path / "m", parts, **declared), wanted, "modelopt NVFP4 group 32")
    other = written(tmp_path / "n", parts, quant_method="modelopt", quant_algo="NVFP4", group_size=16)
    with refused("modelopt NVFP4 needs F8_E4M3 [256, 24], but"):
        make_plan(other, format="bf16")


@pytest.mark.parametrize("recipe", ["nvfp4-torchao", "mxfp4-torchao-rceil", "mxfp8-torchao-rceil"])
def test_torchao(recipe: str, tmp_path: Path) -> None:
    """Layers of torchao are decoded if the file's metadata names their class and says that scales are swizzled.

    Swizzled scales have the shape [32 * row tiles, 16 * column tiles]. Other metadata is refused.
    """
    x = synthetic.random("torchao", SHAPE)
    q = fp4kit.quantize(x, recipe, scale_layout="swizzled_128x4")
    dtype = E4M3 if recipe.startswith("nvfp4") else synthetic.E8M0
    scales = np.asarray(q.block_scale).reshape(-1)
    parts = {
        "._weight_qdata": q.packed.view(E4M3) if recipe.startswith("mxfp8") else q.packed,
        "._weight_scale": scales.reshape(64, -1).view(dtype),
    }
    if recipe.startswith("nvfp4"):
        parts["._weight_per_tensor_scale"] = np.asarray(q.tensor_scale)
    kind = "NVFP4Tensor" if recipe.startswith("nvfp4") else "MXTensor"
    entry = json.dumps({"_type": kind, "_data": {"is_swizzled_scales": True}})
    types = {"default": {"_type": "NVFP4WeightOnlyConfig", "_data": {"use_dynamic_per_tensor_scale": True}}}
    model = written(tmp_path / "m", parts, {f"{NAME}.weight": entry}, quant_method="torchao", quant_type=types)
    assert not any("attention" in text for text in make_plan(model, format="bf16").warnings)
    check(model, fp4kit.dequantize(q, np.float32), f"torchao {recipe.partition('-')[0].upper()}")
    linear = json.dumps({"_type": kind, "_data": {"is_swizzled_scales": False}})
    other = written(tmp_path / "n", parts, {f"{NAME}.weight": linear}, quant_method="torchao", quant_type={})
    with refused("declares scales that are not swizzled"):
        make_plan(other, format="bf16")
    for number, (entries, text) in enumerate(
        (
            ({}, "does not say whether scales are swizzled"),
            ({"is_swizzled_scales": True, "block_size": 64}, "in blocks of 64, but the tensors are torchao"),
            ({"is_swizzled_scales": True, "elem_dtype": {"_data": "float6_e3m2"}}, "but the tensors are torchao"),
        )
    ):
        entry = json.dumps({"_type": "MXTensor", "_data": entries})
        metadata = {f"{NAME}.weight": entry}
        with refused(text):
            make_plan(written(tmp_path / str(number), parts, metadata, quant_method="torchao"), format="bf16")
    with refused("has no entry of torchao, which would say whether its block scales are swizzled"):
        make_plan(written(tmp_path / "none", parts, {}, quant_method="torchao"), format="bf16")


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scales_that_zero_or_turn_values_are_refused(scale: float, tmp_path: Path) -> None:
    parts = nvfp4(synthetic.random("bad", SHAPE)) | {".weight_scale_2": np.float32(scale)}
    model = written(tmp_path / "m", parts, quant_method="modelopt", quant_algo="NVFP4")
    for form in ("bf16", "modelopt", "compressed-tensors"):
        with refused(f"tensor scale is {scale}, which"):
            convert(model, tmp_path / "out", "nvfp4-modelopt", format=form)
    convert(model, tmp_path / "out", "nvfp4-modelopt", format="bf16", nonfinite="keep")  # insists


def test_negative_block_scales_and_input_scales_are_refused(tmp_path: Path) -> None:
    parts = nvfp4(synthetic.random("bad", SHAPE))
    negative = parts[".weight_scale"].view(np.uint8).copy()
    negative[3, 5] |= 0x80
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    model = written(tmp_path / "m", {**parts, ".weight_scale": negative.view(E4M3)}, **declared)
    with refused("1 block scales are negative, which turns the signs of their blocks"):
        convert(model, tmp_path / "out", "nvfp4-modelopt", format="compressed-tensors")
    for number, value in enumerate((0.0, -0.5, np.nan, np.inf)):
        model = written(tmp_path / f"i{number}", {**parts, ".input_scale": np.float32(value)}, **declared)
        with refused(f"input scale is {np.float32(value)}; a positive normal float32 is needed"):
            convert(model, tmp_path / "out", "nvfp4-modelopt", format="compressed-tensors")


TABLES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "tables.json").read_text())


def plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value.name if isinstance(value, ElementFormat) else value


@pytest.mark.parametrize(("form", "row"), list(zip(CONTAINERS, TABLES["containers"], strict=True)), ids=str)
def test_every_field_of_a_container(form: Container, row: dict[str, Any]) -> None:
    assert {field.name: plain(getattr(form, field.name)) for field in fields(form)} == row


def test_every_cell_of_the_engines() -> None:
    cells = {
        (container, family, engine): support.cell(container, family, engine)
        for container in (*LOADED, *MIXTURES)
        for family in support.FAMILIES
        for engine in VERSIONS
    }
    found = {
        " | ".join(key): [cell.status, cell.how, cell.note]
        for key, cell in cells.items()
        if cell.status != "unknown" or cell.note
    }
    assert found == TABLES["cells"]


@pytest.mark.parametrize("kind", KINDS)
def test_best_format(kind: str) -> None:
    assert {family: support.best_format(kind, family) for family in support.FAMILIES} == TABLES["best"][kind]


def test_what_is_written_is_declared_and_read() -> None:
    assert {form.format for form in WRITTEN} == {*FORMATS} - {"bf16"}
    for form in WRITTEN:
        config, _ = declarations(form, ["lm_head"], False, {}, ["a.experts.0.w1"])
        assert config["quant_method"] and {one.engine for one in READERS[container_id(form, True)]} == {
            *form.engines
        }, form


def test_a_tensor_scale_implies_no_input_scale() -> None:
    suffixes = {CODES: ".weight", TENSOR_SCALE: ".scale"}
    form = Container("x", "x", "fp8 tensor", CONTAINERS[3].element, None, (1, 0), suffixes, "F8_E4M3", "F32")
    assert [one.name for one in form.outputs("a", (4, 8), has_input_scale=True)] == ["a.weight", "a.scale"]
    assert INPUT_SCALE not in form.specs((4, 8), True) and form.engines == ()
