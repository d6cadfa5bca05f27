"""Test every form of source in every container, and zeros, NaN, infinities and tiny numbers.

Each byte equals that of fp4kit.quantize on the whole layer, or is copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import by_default, every, every_row, exhaustive, half
from oracle import load
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.convert.convert import ConversionReport, convert
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

FLOAT_TARGETS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-te-2d", "modelopt"),
    ("nvfp4-te-4over6-mse-256", "compressed-tensors"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp4-compressed-tensors", "deepseek-v4"),
    ("mxfp8-te", "modelopt"),
    ("mxfp8-te-2d", "sglang-mxfp8"),
    ("mxfp8-compressed-tensors", "compressed-tensors"),
    ("nvfp4-flashinfer", "deepseek-v4"),
]


@pytest.fixture(autouse=True)
def allow_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow every pair of recipe and container, because bytes must be right whether or not an engine loads them."""
    monkeypatch.setattr(support, "refusal", lambda *pair: None)


def check(report: ConversionReport, tensors: synthetic.Tensors, columns: bool = False) -> None:
    """Assert that the tensors of a converted model equal those that oracle.expected computes.

    report: the report of the conversion.
    tensors: the tensors of the source.
    columns: True if stacks are stored as [E, K, N].
    """
    plan = report.plan
    decoded = [tensor.name for tensor in plan.tensors if tensor.action == "dequantize"]
    kept = [tensor.name for tensor in plan.tensors if tensor.reason.endswith("as it is")]
    converted = [tensor.name for tensor in plan.converted if tensor.name not in (*decoded, *kept)]
    form = "" if plan.form is None else plan.form.format
    expected = oracle.expected(tensors, plan.recipe.id, form, converted, decoded, columns, plan.request.input_scale)
    found = oracle.load(report.destination)
    assert sorted(found) == sorted(expected)
    wrong = [name for name, tensor in expected.items() if found[name] != tensor]
    assert not wrong, wrong[:5]


def options_of(recipe: str, format: str) -> dict[str, Any]:
    """Return the options that a container needs: an input scale for DeepSeek-V4's NVFP4, otherwise none."""
    return {"input_scale": 0.3} if (recipe[:5], format) == ("nvfp4", "deepseek-v4") else {}


WITH_EXPERTS = ("moe", "fused", "deepseek", "mixtral", "vlm_moe")


@pytest.mark.parametrize("name", half(synthetic.MODELS))
@pytest.mark.parametrize(("recipe", "format"), FLOAT_TARGETS)
def test_numbers(tmp_path: Path, name: str, recipe: str, format: str) -> None:
    tensors = synthetic.MODELS[name](tmp_path / "m")
    if format == "deepseek-v4" and name not in WITH_EXPERTS:
        with synthetic.refused("0 tensors to convert"):
            convert(tmp_path / "m", tmp_path / "out", recipe, format=format, **options_of(recipe, format))
        return
    check(convert(tmp_path / "m", tmp_path / "out", recipe, format=format, **options_of(recipe, format)), tensors)


@pytest.mark.parametrize("inner", [64, 96])
@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "mxfp4-te", "mxfp4-modelopt"])
def test_interleaved_stacks(tmp_path: Path, recipe: str, inner: int) -> None:
    """Stacks of gpt-oss, [E, K, N], are quantized in blocks along K, and the rows of gate and up still alternate.

    If `inner` is 64, K equals N in down_proj, so that the shape alone does not identify the axes.
    """
    tensors = synthetic.gpt_oss(tmp_path / "m", inner)
    report = convert(tmp_path / "m", tmp_path / "out", recipe, format="gpt-oss")
    check(report, tensors, columns=True)
    assert report.actions["quantize"] == 2 * 2 * synthetic.EXPERTS
    blocks = oracle.load(tmp_path / "out")["model.layers.0.mlp.experts.down_proj_blocks"]
    assert blocks[:2] == ("U8", (synthetic.EXPERTS, 64, inner // 32, 16))


QUANTIZED_TARGETS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
    ("mxfp8-te", "compressed-tensors"),
    ("mxfp8-te", "sglang-mxfp8"),
    ("mxfp4-ocp", "deepseek-v4"),
    ("nvfp4-te", "deepseek-v4"),
    ("nvfp4-te", "bf16"),
]
SOME_TARGETS = every_row(2, QUANTIZED_TARGETS)
CONTAINERS = [*QUANTIZED_TARGETS[:6], ("mxfp4-ocp", "deepseek-v4")]


@pytest.mark.parametrize("origin", every(4, CONTAINERS), ids=str)
@pytest.mark.parametrize(("recipe", "format"), SOME_TARGETS)
@pytest.mark.parametrize("name", by_default(("deepseek",), ("deepseek", "moe")))
def test_each_container_into_each(tmp_path: Path, name: str, origin: tuple[str, str], recipe: str, format: str) -> None:
    """Converting a converted checkpoint keeps the codes if both containers can hold them.

    Otherwise the values are decoded and quantized again.
    """
    synthetic.MODELS[name](tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "first", origin[0], format=origin[1])
    tensors = oracle.arrays(oracle.load(tmp_path / "first"))
    more = options_of(recipe, format)
    check(convert(tmp_path / "first", tmp_path / "out", recipe, format=format, requantize=True, **more), tensors)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(("recipe", "format"), every_row(4, QUANTIZED_TARGETS))
def test_fp8_blocks(tmp_path: Path, powers: bool, recipe: str, format: str) -> None:
    tensors = synthetic.deepseek_fp8(tmp_path / "m", powers)
    more = options_of(recipe, format)
    report = convert(tmp_path / "m", tmp_path / "out", recipe, format=format, requantize=True, **more)
    check(report, tensors)
    assert ("carry" in report.actions) == (powers and recipe == "mxfp8-te" and format != "bf16")


@pytest.mark.parametrize(("recipe", "format"), SOME_TARGETS)
def test_deepseek_v4(tmp_path: Path, recipe: str, format: str) -> None:
    tensors = synthetic.deepseek_v4(tmp_path / "m")
    more = options_of(recipe, format)
    report = convert(tmp_path / "m", tmp_path / "out", recipe, format=format, requantize=True, **more)
    check(report, tensors)
    experts = 2 * synthetic.EXPERTS * 3
    wanted = {"mxfp4-ocp": "rename", "nvfp4-te": "cast"}.get(recipe)
    if wanted and format != "bf16":
        assert report.actions[wanted] >= experts


@pytest.mark.parametrize(("recipe", "format"), [("mxfp4-te", "gpt-oss"), ("nvfp4-te", "bf16")])
def test_gpt_oss(tmp_path: Path, recipe: str, format: str) -> None:
    tensors = synthetic.gpt_oss_mxfp4(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", recipe, format=format)
    check(report, tensors, columns=True)
    assert report.actions["rename" if format == "gpt-oss" else "dequantize"] == 4 * synthetic.EXPERTS


@pytest.mark.parametrize("model_type", ["llama4", "unheard_of"])
def test_orientation_by_shapes(tmp_path: Path, model_type: str) -> None:
    """Stacks of shapes [E, H, 2I] and [E, I, H] are taken as transposed for any model type, with gate as first half.

    E is the number of experts, H the hidden size, and I the intermediate size.
    """
    layer = "model.layers.0.mlp.experts"
    shapes = {f"{layer}.gate_up_proj": (4, 64, 192), f"{layer}.down_proj": (4, 96, 64)}
    tensors = {name: synthetic.random(name, shape) for name, shape in shapes.items()}
    synthetic.write_model(tmp_path / "m", {"model_type": model_type, "num_experts": 4}, tensors)
    check(convert(tmp_path / "m", tmp_path / "out", format="modelopt"), tensors, columns=True)


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


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_nan_of_a_copied_tensor(tmp_path: Path, dtype: Any) -> None:
    """Infinities of a copied tensor, such as those of a mask, are no fault."""
    w = np.ones((64, 64), dtype)
    tensors = {
        "a.up_proj.weight": w,
        "norm.weight": np.array([np.nan, 1, -np.nan, np.inf], dtype),
        "b#.mask": np.full_like(w, -np.inf),
    }
    synthetic.write_model(tmp_path / "m", {}, tensors)
    with refused("norm.weight: 2 of 4 values are NaN; repair the source, or use --nonfinite keep"):
        convert(tmp_path / "m", tmp_path / "out", "nvfp4-te")
    assert not (tmp_path / "out").exists()
    report = convert(tmp_path / "m", tmp_path / "out", "nvfp4-te", nonfinite="keep")
    assert report.nonfinite == {"norm.weight": 2}
    for found in (report.findings, verify(tmp_path / "out", tmp_path / "m").issues):
        errors = [(one.subject, one.text, one.count) for one in found if one.severity == "error"]
        assert errors == [("norm.weight", "values that are NaN", 2)]


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
