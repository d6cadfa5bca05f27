"""Test every form of source in every container: each byte equals that of fp4kit.quantize on the whole layer, or is
copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import synthetic
from exhaustive import by_default, half

from fp4kit.checkpoint.convert.convert import ConversionReport, convert
from fp4kit.checkpoint.loaders import support

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


@pytest.mark.parametrize("name", synthetic.MODELS)
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
# Every other target is for every run, the rest for exhaustive runs only.
SOME_TARGETS = [
    pytest.param(*target, marks=pytest.mark.exhaustive) if i % 2 else target
    for i, target in enumerate(QUANTIZED_TARGETS)
]
CONTAINERS = [*QUANTIZED_TARGETS[:6], ("mxfp4-ocp", "deepseek-v4")]


@pytest.mark.parametrize("origin", half(CONTAINERS), ids=str)
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
@pytest.mark.parametrize(("recipe", "format"), SOME_TARGETS)
def test_fp8_blocks(tmp_path: Path, powers: bool, recipe: str, format: str) -> None:
    tensors = synthetic.deepseek_fp8(tmp_path / "m", powers)
    more = options_of(recipe, format)
    report = convert(tmp_path / "m", tmp_path / "out", recipe, format=format, requantize=True, **more)
    check(report, tensors)
    assert ("carry" in report.actions) == (powers and recipe == "mxfp8-te" and format != "bf16")


@pytest.mark.parametrize(("recipe", "format"), QUANTIZED_TARGETS)
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
