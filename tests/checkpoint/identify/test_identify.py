"""Test identify's verdicts on files: most layers decide, exceptions are listed, and layers of zeros
contradict nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from changed_bytes import change
from exhaustive import by_default, exhaustive, half
from identified import identify_layers

import fp4kit
from fp4kit.checkpoint import Options, convert
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import NEAR, Fp8Layer, explain_fp8
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.identify.verdicts import MAX_FAILURES, CheckpointVerdict, LayerPair
from fp4kit.checkpoint.model.transforms import canonical
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.cli import main
from fp4kit.formats import E4M3, E5M2, ElementFormat
from fp4kit.layouts import swizzle_scales
from fp4kit.ops.identify import candidates_of
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import encode

BF16 = np.dtype(ml_dtypes.bfloat16)


def weights(seed, shape=(64, 128), size=0.02):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(BF16)


def layer(name, x, recipe="nvfp4-modelopt", amax=None, **fields):
    q = fp4kit.quantize(x, recipe, tensor_amax=amax)
    parts = StoredLayer(q.packed, q.block_scale, q.tensor_scale, RECIPES[recipe])
    return LayerPair(name, replace(parts, **{k: v for k, v in fields.items() if k in parts.__dataclass_fields__}), x)


def faulty(pair, change):
    return replace(pair, parts=change(pair.parts))


def swapped(parts):
    return replace(parts, codes=parts.codes >> 4 | parts.codes << 4)


RECIPES_OF_FILES = ("nvfp4-te", "nvfp4-modelopt", "nvfp4-compressed-tensors", "mxfp4-ocp", "mxfp8-te", "nvfp4-te-2d")


def model(recipe="nvfp4-modelopt", layers=6):
    return [layer(f"model.layers.{i}.mlp.down_proj", weights(i), recipe) for i in range(layers)]


@pytest.mark.parametrize("recipe", by_default(("nvfp4-te", "mxfp4-ocp"), RECIPES_OF_FILES))
def test_a_clean_file(recipe) -> None:
    verdict = identify_layers(model(recipe))
    assert recipe in verdict.recipes and verdict.recipe in verdict.recipes and verdict.mishap is None
    assert verdict.exceptions == () and len(verdict.layers) == 6
    assert f"made 6 layers{' (they agree on these layers)' if len(verdict.recipes) > 1 else ''}" in str(verdict)
    assert all(recipe in verdict.explanation.recipes for verdict in verdict.layers)


def test_recipes_that_agree_on_some_layers_are_told_apart_by_others() -> None:
    """The verdict names the recipes that explain most layers; layers on which recipes agree do not decide."""
    pairs = model("nvfp4-te", 5)
    alone = [set(identify_layers([pair]).recipes) for pair in pairs]
    assert set(identify_layers(pairs).recipes) == set.intersection(*alone)
    assert any(set.intersection(*alone) < some for some in alone)


def test_exceptions_are_listed() -> None:
    pairs = model()
    pairs[1] = faulty(pairs[1], swapped)
    pairs[3] = layer(pairs[3].name, weights(3), "nvfp4-te-4over6-mse-256")
    pairs[4] = replace(pairs[4], source=weights(99))
    verdict = identify_layers(pairs)
    assert [exception.name for exception in verdict.exceptions] == [pairs[i].name for i in (1, 3, 4)]
    assert verdict.mishap is None and "made 3 of 6 layers" in verdict.sentence
    lines = str(verdict).splitlines()
    assert len(lines) == 4 and "nibbles are swapped" in lines[1]
    assert "4over6-mse-256" in lines[2] and "nothing explains" in lines[3] and ", if " not in lines[3]


def test_zeros_contradict_no_mishap() -> None:
    pairs = model(layers=3)
    codes, scales = np.zeros((64, 64), np.uint8), np.zeros((64, 8), np.uint8)
    zeros = StoredLayer(codes, scales, np.float32(1), RECIPES["nvfp4-modelopt"])
    blank = [LayerPair(f"expert.{i}", zeros, np.zeros((64, 128), BF16)) for i in range(5)]
    verdict = identify_layers([*blank, *(faulty(pair, swapped) for pair in pairs)])
    assert verdict.mishap == "nibbles are swapped" and not verdict.exceptions
    assert identify_layers([*blank, *other_model(2)]).hint and not identify_layers(blank).hint
    assert identify_layers(blank).mishap is None and "nvfp4-te" in identify_layers(blank).recipes


def other_model(layers):
    """Return layer pairs of a model whose sources are the weights of another model, so that no recipe matches.

    layers: the number of layers.
    """
    return [replace(pair, source=weights(50 + i)) for i, pair in enumerate(model("mxfp4-ocp", layers))]


def test_nothing_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the source is that of another model, the verdict says that nothing matches.

    Costly attempts stop if no recipe explains the first layers.
    """
    tried: list[str] = []
    monkeypatch.setattr("fp4kit.checkpoint.identify.diagnose._permuted", lambda case, *rest: tried.append("rows"))
    monkeypatch.setattr("fp4kit.checkpoint.identify.diagnose._variation", lambda case, *rest: tried.append("variation"))
    pairs = [*other_model(MAX_FAILURES + 3), *model("mxfp4-ocp", 1), *other_model(1)]
    verdict = identify_layers(pairs[:-2])
    assert tried == ["rows", "variation"] * MAX_FAILURES
    assert verdict.sentence == f"nothing explains any of {MAX_FAILURES + 3} layers"
    said = "this is probably not the source: nothing matches"
    assert verdict.hint is not None and verdict.hint.startswith(said) and verdict.hint in str(verdict)
    assert str(verdict).count("(other orders were not tried, because 4 layers before failed)") == 3
    tried.clear()
    verdict = identify_layers(pairs)
    assert tried == ["rows", "variation"] * (MAX_FAILURES + 1)
    assert verdict.hint is None and len(verdict.exceptions) == len(pairs) - 1


def test_a_quantized_source_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said only if the decoded values of the source do not explain most layers."""
    synthetic.write_model(tmp_path / "m", {}, {f"a.{i}.down_proj.weight": weights(i) for i in range(3)})
    convert(tmp_path / "m", tmp_path / "source", "nvfp4-te", format="modelopt")
    for name, made_from, options in (("q", "m", {}), ("again", "source", {"requantize": True})):
        convert(tmp_path / made_from, tmp_path / name, "mxfp4-ocp", **options)
    assert main(["identify", str(tmp_path / "q"), "--source", str(tmp_path / "source")]) == 1
    hint = "the source is quantized (modelopt NVFP4); give the unquantized model that this was made from"
    assert capsys.readouterr().out.splitlines()[0] == hint
    assert main(["identify", str(tmp_path / "again"), "--source", str(tmp_path / "source")]) == 0
    assert "is quantized" not in capsys.readouterr().out
    verdict = replace(identify_layers([*model("mxfp4-ocp", 3), *other_model(1)]), decoded="modelopt NVFP4")
    assert not verdict.is_clean and not verdict and verdict.hint is None


def test_all_names_each_set_of_recipes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_model(tmp_path / "m", {}, {f"a.{i}.down_proj.weight": weights(i) for i in range(9)})
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    assert main(["identify", str(tmp_path / "q"), "--source", str(tmp_path / "m"), "--all"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    sets = re.findall(r"any of set (\d+) made these bytes", out)
    assert len(sets) == 9 and out.count("nvfp4-te-reference") == 1 + len({*sets}) < 9
    assert re.findall(r" set (\d+): nvfp4-te, ", out) == sorted({*sets})


def test_the_command_says_that_nothing_matches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("m", "other"):
        synthetic.write_model(tmp_path / name, {}, {"a.mlp.down_proj.weight": synthetic.random(name, (64, 128))})
    convert(tmp_path / "m", tmp_path / "q", "mxfp4-ocp")
    assert main(["identify", str(tmp_path / "q"), "--source", str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "nothing explains any of 1 layer" and lines[0].startswith("this is probably not the source: ")
    assert main(["identify", str(tmp_path / "q"), "--source", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hint"] is None


def test_a_source_of_other_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in (("m", 64), ("other", 96)):
        tensors = {f"a.{i}.down_proj.weight": weights(i, (rows, 128)) for i in range(7)}
        synthetic.write_model(tmp_path / name, {}, tensors)
    for recipe in ("nvfp4-te", "fp8-modelopt-channel"):
        convert(tmp_path / "m", tmp_path / recipe, recipe, format="modelopt")
        assert main(["identify", str(tmp_path / recipe), "--source", str(tmp_path / "other")]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("this is probably not the source: nothing matches, and 7 layers with other shapes")
        assert lines[1] == "PROBLEM: codes have other shapes than the source, 7 of 7 layers" and len(lines) == 6
        assert lines[5].startswith("a.0.down_proj and 6 more  -") and "shape (96, 128)" in lines[5]


def test_changed_layers_get_the_recipe_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_model(tmp_path / "m", {}, {f"a.{i}.down_proj.weight": weights(i) for i in range(3)})
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-modelopt", format="modelopt")
    change(tmp_path / "q", "2.down_proj.weight_scale_2", lambda x: x * 2)
    change(tmp_path / "q", "1.down_proj.weight_scale", lambda x: np.where(np.arange(x.size) == 20, 0x7F, x), np.uint8)
    assert main(["identify", str(tmp_path / "q"), "--source", str(tmp_path / "m")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "PROBLEM: few bytes differ from a recipe's, 1 of 3 layers " in out and "nothing explains" not in out
    assert re.search(r" made all but 1 of 4,608 bytes; first: block scales, row 2, column 64: NaN in the file, \d", out)
    # the recipes of the majority come first among those that explain the changed layers
    assert re.search(
        r"a.1.down_proj - nvfp4-modelopt .*a.2.down_proj nvfp4-modelopt nvfp4-modelopt \(M\S+ or \d+ ", out
    )


def test_quantizations_where_nothing_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing matches in the first layers, identify only quantizes two samples per recipe in each further layer.

    One sample is quantized with the recipe's own scales, and one with the stored scales.
    """
    calls, right = [], fp4kit.quantize
    for module in ("hypotheses", "known_methods"):
        monkeypatch.setattr(
            f"fp4kit.checkpoint.identify.{module}.quantize", lambda *a, **k: (calls.append(a), right(*a, **k))[1]
        )
    strange = [replace(pair, source=weights(50 + i)) for i, pair in enumerate(model("mxfp4-ocp", MAX_FAILURES + 3))]
    identify_layers(strange[:MAX_FAILURES])
    first = len(calls)
    identify_layers(strange)
    assert 0 < len(calls) - 2 * first <= 3 * (2 * len(tuple(candidates_of(RECIPES["mxfp4-ocp"]))) + 1)


def test_signs_of_the_source_without_its_numbers() -> None:
    """If nothing matches but the signs of codes agree with the source, the verdict does not suggest another model."""
    pair = model(layers=1)[0]
    found = identify_layers([replace(pair, source=np.copysign(weights(50), pair.source))])
    assert found.recipes == () and found.hint is None and "nothing explains" in str(found)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te"])
@pytest.mark.parametrize("shape", [(1, 32, 32), (0,), (1,), (32,), (32, 32), (), (3, 5)])
def test_block_scales_of_a_size_that_fits_no_layout(recipe: str, shape: tuple[int, ...]) -> None:
    pair = layer("w", weights(1, (32, 64)), recipe)
    found = identify_layers([faulty(pair, lambda parts: replace(parts, block_scale=np.ones(shape, np.uint8)))])
    needed = 32, 64 // RECIPES[recipe].block_size
    said = f"block scales have shape {shape}; codes of shape (32, 64) need {needed}, or these in a known layout"
    assert found.layers[0].explanation.sentence == f"nothing explains these bytes: {said}" and found.recipes == ()


@pytest.mark.parametrize("form", ["nvfp4-te", "mxfp4-ocp"])
@pytest.mark.parametrize("scales", ["of a matrix", "of a stack", "flat", "of another size", "none"])
def test_a_stored_shape_of_one_expert(tmp_path: Path, form: str, scales: str) -> None:
    """identify accepts codes of a single expert, stored as [1, 32, 32].

    Block scales may have any shape if their number is right.
    """
    x = weights(1, (32, 64))
    q = fp4kit.quantize(x, form)
    shape = {"of a matrix": q.block_scale.shape, "of a stack": (1, *q.block_scale.shape), "flat": (q.block_scale.size,)}
    wrong = np.ones((1, 32, 32) if scales == "of another size" else (0,), np.uint8)
    stored = q.block_scale.reshape(shape[scales]) if scales in shape else wrong
    tensors = {"a.weight": q.packed.reshape(1, 32, 32), "a.weight_scale": stored}
    if form == "nvfp4-te":
        tensors |= {"a.weight_scale": stored.view(synthetic.E4M3), "a.weight_scale_2": q.tensor_scale.reshape(1)}
    synthetic.write_model(tmp_path / "q", {}, tensors)
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": x})
    verdict = identify_checkpoint(tmp_path / "q", tmp_path / "m")
    assert (form in verdict.recipes) == (scales in shape), str(verdict)
    assert scales in shape or "nothing explains these bytes: block scales have shape" in str(verdict)


def test_no_layers() -> None:
    assert identify_layers([]).sentence == "there are no quantized layers" and identify_layers([]).exceptions == ()


def pairs_of(gate, up, recipe="nvfp4-te", moved=None):
    """Yield LayerPairs for gate_proj and up_proj, which are quantized together and then split.

    gate, up: the source matrices.
    moved: for each stored row, its index in [gate; up]; None for the usual order.
    """
    amax = np.float32(max(np.abs(gate).max(), np.abs(up).max())) if RECIPES[recipe].tensor_rule else None
    q = fp4kit.quantize(np.concatenate([gate, up]), recipe, tensor_amax=amax)
    rows = np.arange(2 * len(gate)) if moved is None else moved
    for i, (name, x, other) in enumerate((("gate_proj", gate, up), ("up_proj", up, gate))):
        half = rows[i * len(gate) : (i + 1) * len(gate)]
        parts = StoredLayer(q.packed[half], q.block_scale[half], q.tensor_scale, RECIPES[recipe])
        yield LayerPair(name, parts, x, other, bool(i), amaxes=() if amax is None else (amax,))


@pytest.mark.parametrize(
    "recipe", by_default(("mxfp4-ocp", "nvfp4-te-2d"), ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-te-2d"))
)
def test_pairs(recipe) -> None:
    gate, up = weights(1), weights(2, size=0.16)
    rows = np.arange(128)
    for moved, mishap in (
        (None, None),
        (np.roll(rows, 64), "holds the other half of its pair: gate and up are exchanged"),
        (rows.reshape(2, -1).T.ravel(), "halves of the rows (gate and up) are interleaved"),
        (rows.reshape(-1, 2).T.ravel(), "interleaved rows (gate and up) are stacked"),
    ):
        verdict = identify_layers(pairs_of(gate, up, recipe, moved))
        assert recipe in verdict.recipes and verdict.mishap == mishap and not verdict.exceptions


def test_queries_and_keys() -> None:
    """identify finds the row order of q and k, and their numbers of heads, which differ, if these are not given."""
    q, k = layer("q_proj", weights(3)), layer("k_proj", weights(4, (32, 128)))
    for known in (True, False):
        found = []
        for pair, heads in ((q, 4), (k, 2)):
            rows = np.arange(len(pair.source)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
            parts = replace(pair.parts, codes=pair.parts.codes[rows], block_scale=pair.parts.block_scale[rows])
            found.append(replace(pair, parts=parts, heads=(heads,) if known else ()))
        names = [verdict.explanation.mishap for verdict in identify_layers(found).layers]
        assert names == [f"rows are in GGUF's and Meta's rotary order of q and k ({heads} heads)" for heads in (4, 2)]


@pytest.mark.parametrize("nonfinite", ["keep", "saturate"])
@pytest.mark.parametrize("recipe", ["nvfp4-te", *exhaustive(["mxfp4-ocp", "mxfp8-te"])])
def test_nan_and_infinities_of_the_source(recipe: str, nonfinite: str, tmp_path: Path, recwarn: Any) -> None:
    """identify recognizes both ways to treat NaN and infinities of the source.

    They are kept, or infinities become the amax of the group.

    Here gate has the larger amax, and up the infinity.
    """
    tensors = {f"a.mlp.{part}_proj.weight": synthetic.random(part, (64, 128)) for part in ("gate", "up", "down")}
    gate, up, down = tensors.values()
    gate[0, 0], up[3, 5], down[:2, 7] = 1, np.inf, np.nan
    synthetic.write_model(tmp_path / "m", {}, tensors)
    format = "modelopt" if recipe != "mxfp4-ocp" else None
    convert(tmp_path / "m", tmp_path / "q", recipe, format=format, nonfinite=nonfinite)
    verdict = identify_checkpoint(tmp_path / "q", tmp_path / "m")
    assert recipe in verdict.recipes and verdict.mishap is None and not verdict.exceptions
    told = {layer.name: "NaN and infinities replaced" in layer.explanation.sentence for layer in verdict.layers}
    assert told["a.mlp.down_proj"] == (nonfinite == "saturate") and not told["a.mlp.gate_proj"]
    compare_checkpoints(tmp_path / "m", tmp_path / "q")
    assert not recwarn.list


@pytest.mark.exhaustive
def test_searched_scales_under_a_divisor(tmp_path: Path) -> None:
    """identify finds searched scales in compressed-tensors' format, which stores a divisor instead of the tensor scale.

    Inverting the divisor may change the scale by an ulp, which decides ties. The codes were computed under the scale
    before it was stored.
    """
    tensors = synthetic.dense(tmp_path / "m")
    lengths = {name: x.shape[-1] for name, x in tensors.items() if x.ndim == 2}
    columns = {name: np.abs(synthetic.random(name, (k,), 1, np.dtype("f4"))) for name, k in lengths.items()}
    synthetic.write_file(tmp_path / "w", columns)
    options = {"format": "compressed-tensors", "search": ScaleSearch.of("mse", str(tmp_path / "w"))}
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-modelopt-static", **options)
    verdict = identify_checkpoint(tmp_path / "q", tmp_path / "m")
    assert all(layer.explanation.searched for layer in verdict.layers)
    assert "searched scales in 14 layers" in verdict.sentence


F32 = np.dtype(np.float32)


def weight(rows: int = 192, columns: int = 320, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(BF16)


def quantized(
    x: np.ndarray, scaling: str, scale_dtype: np.dtype, quotient_dtype: np.dtype, amax: float = 0
) -> Fp8Layer:
    """Return x quantized to FP8 with a plain loop over blocks, with the roundings that tools use.

    scaling: "tensor", "row" or "block" (128 x 128).
    scale_dtype: the dtype to which scales are rounded.
    quotient_dtype: the dtype to which x / scale is rounded before encoding.
    amax: the smallest amax of a block.
    """
    rows, columns = x.shape
    height, width = {"tensor": (rows, columns), "row": (1, columns), "block": (128, 128)}[scaling]
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    codes = np.zeros(x.shape, np.uint8)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            part = x[place].astype(np.float32)
            scale = np.float32(max(np.abs(part).max(), amax)) / np.float32(448)
            scales[i, j] = scale.astype(scale_dtype).astype(np.float32)
            codes[place] = encode((part / scales[i, j]).astype(quotient_dtype).astype(np.float32), E4M3)
    return Fp8Layer(codes, scales, scaling)


@pytest.mark.parametrize("quotient", [F32, BF16], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16], ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_rules_of_fp8_are_named(scaling: str, scale: np.dtype, quotient: np.dtype) -> None:
    x = weight()
    layer = quantized(x, scaling, scale, quotient)
    found = explain_fp8(layer, x)
    where = {"tensor": "per tensor", "row": "per row", "block": "per 128x128 block"}[scaling]
    rounded = " rounded to bfloat16" * (scale == BF16)
    assert found.rules == (f"FP8 {where} (amax / 448{rounded}, codes nearest to the quotient in {quotient})",)
    assert found.explained and found.codes_equal == x.size and found.scales_equal == layer.scales.size


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_one_changed_code_or_scale_is_not_explained(scaling: str) -> None:
    x = weight()
    layer = quantized(x, scaling, F32, F32)
    layer.codes[100, 200] ^= 1
    assert not explain_fp8(layer, x).explained
    layer.codes[100, 200] ^= 1
    layer.scales[0, 0] *= np.float32(1.5)
    assert not explain_fp8(layer, x).explained


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
def test_a_model_near_the_source_is_called_near(element: ElementFormat) -> None:
    x = weight()
    other = (x * (1 + 0.02 * np.random.default_rng(3).standard_normal(x.shape))).astype(np.float32)
    scale = np.abs(other).max() / np.float32(element.max)
    layer = Fp8Layer(encode(other / scale, element), scale.reshape(1, 1), "tensor", element=element)
    found = explain_fp8(layer, x.astype(np.float32))
    assert not found.explained and found.cause == NEAR and found.correlation > 0.99


def test_the_amax_of_a_group_is_tried() -> None:
    x = weight()
    layer = quantized(x, "tensor", F32, BF16, amax=9)
    assert explain_fp8(layer, x, (9.0,)).explained
    given = explain_fp8(layer, x)
    assert not given.explained and given.searched and "given scales" in given.sentence
    assert given.method == "given scales" and identify_layers([LayerPair("a", layer, x)]).is_clean
    clipped = Fp8Layer(np.where(x < 0, 0xFE, 0x7E).astype(np.uint8), layer.scales / 1e6, "tensor")
    found = explain_fp8(clipped, x)
    assert found.searched and found.method is None
    problem = "FP8 per tensor under given scales, but codes do not fit as they should, 1 of 1 layer"
    assert identify_layers([LayerPair("a", clipped, x)]).problems == (problem,)


def test_layers_of_several_formats_have_one_verdict_each() -> None:
    x = weight()
    rows = [LayerPair(f"r{i}", quantized(x, "row", F32, F32), x) for i in range(3)]
    tensor = LayerPair("t", quantized(x, "tensor", BF16, BF16), x)
    verdict = identify_layers([*rows, tensor])
    assert (
        verdict.is_clean
        and verdict
        and verdict.sentence
        == (
            "FP8 per row (amax / 448, codes nearest to the quotient in float32) in 3 layers;"
            " fp8-compressed-tensors made 1 layer"
        )
    )
    broken = LayerPair("b", quantized(x, "row", F32, F32), weight(seed=1))
    assert [layer.name for layer in identify_layers([*rows, tensor, broken]).exceptions] == ["b"]


def test_layers_without_a_counterpart_are_named_and_counted() -> None:
    x = weight()
    pair = LayerPair("a", quantized(x, "row", F32, F32), x)
    verdict = identify_layers([pair], [f"layer.{i}" for i in range(6)])
    assert not verdict.is_clean and verdict.unpaired == tuple(f"layer.{i}" for i in range(6))
    end = "6 layers without a counterpart in the source, of 7: layer.0, layer.1, layer.2, layer.3 and 2 more"
    assert verdict.sentence.endswith(f"; {end}")
    assert identify_layers([pair]).is_clean and not CheckpointVerdict((), None, ()).is_clean


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.block_sparse_moe.experts.1.w1", "model.layers.0.mlp.experts.1.gate_proj"),
        ("model.layers.0.block_sparse_moe.experts.1.w2", "model.layers.0.mlp.experts.1.down_proj"),
        ("model.layers.0.block_sparse_moe.experts.1.w3", "model.layers.0.mlp.experts.1.up_proj"),
        ("_orig_mod.model.layers.0.self_attn.q_proj", "module.model.layers.0.self_attn.q_proj"),
    ],
)
def test_names_of_one_layer_have_one_key(names: tuple[str, str]) -> None:
    assert len({canonical(name) for name in names}) == 1
    assert canonical("model.layers.0.mlp.w1") == "model.layers.0.mlp.w1"  # w1 means gate only among experts


def test_heads_of_kv_b_proj(tmp_path: Path) -> None:
    """mlx-lm splits kv_b_proj into heads, half of which it stores transposed."""
    heads, nope, value, rank = 3, 32, 64, 64
    x = synthetic.random("kv_b", (heads * (nope + value), rank))
    config = {"model_type": "deepseek_v3", "qk_nope_head_dim": nope, "v_head_dim": value}
    synthetic.write_model(tmp_path / "m", config, {"model.layers.0.self_attn.kv_b_proj.weight": x})
    keys, values = np.split(x.reshape(heads, nope + value, rank), [nope], axis=1)
    parts = {}
    for leaf, stack in (("embed_q", keys.swapaxes(1, 2)), ("unembed_out", values)):
        q = fp4kit.quantize(np.ascontiguousarray(stack), "mxfp4-mlx-cpu")
        name = f"model.layers.0.self_attn.{leaf}"
        parts |= {f"{name}.weight": q.packed.view(np.uint32), f"{name}.scales": q.block_scale}
    own = {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    synthetic.write_model(tmp_path / "q", {**config, **own}, parts)
    verdict = identify_checkpoint(tmp_path / "q", tmp_path / "m")
    assert "mxfp4-mlx-cpu" in verdict.recipes and verdict.is_clean and len(verdict.layers) == 2 * heads


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_scales_that_are_stored_as_reciprocals(scaling: str) -> None:
    """A scale that is a divisor on decode is named; scales that are wrong otherwise are not called inverted."""
    x = weight()
    layer = quantized(x, scaling, F32, F32)
    turned = Fp8Layer(layer.codes, np.float32(1) / layer.scales, scaling)
    assert "scales are inverted" in str(explain_fp8(turned, x).cause)
    doubled = Fp8Layer(layer.codes, layer.scales * np.float32(2), scaling)
    assert explain_fp8(doubled, x).cause is None


# ---- files

FILES = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-modelopt", "compressed-tensors"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
]


def rewritten(root, change):
    """Write a copy of a checkpoint with other tensors.

    change: called as change(name, array) for each tensor. It returns the new array, or None to drop the tensor.
    """
    tensors = {name: change(name, np.asarray(x)) for name, x in oracle.arrays(oracle.load(root)).items()}
    config = json.loads((root / "config.json").read_text())
    synthetic.write_model(root / "bad", config, {name: x for name, x in tensors.items() if x is not None})
    return root / "bad"


# Every model with one recipe, and every recipe with at least one model.
CONVERSIONS = list(zip(synthetic.MODELS, cycle(FILES), strict=False))
USUAL_CONVERSION = ("dense", FILES[2])


@pytest.mark.parametrize("conversion", by_default([USUAL_CONVERSION], dict.fromkeys((USUAL_CONVERSION, *CONVERSIONS))))
def test_every_conversion_is_recognised(tmp_path, conversion):
    name, (recipe, form) = conversion
    synthetic.MODELS[name](tmp_path / "in")
    report = convert(tmp_path / "in", tmp_path / "out", recipe, format=form)
    done = []
    verdict = identify_checkpoint(tmp_path / "out", tmp_path / "in", Options(progress=done.append))
    assert recipe in verdict.recipes and verdict.mishap is None and verdict.exceptions == ()
    assert len(verdict.layers) == report.actions["quantize"] and sum(done) > 0


def tensor_scale(new):
    return lambda name, x: new(x) if name.endswith(("weight_scale_2", "weight_global_scale")) else x


def swizzled_scales(name, x):
    return swizzle_scales(x.view(np.uint8), "swizzled_128x4").view(x.dtype) if name.endswith("weight_scale") else x


INVERTED = "tensor scale is inverted: its reciprocal is stored"
FAULTS = {
    "nibbles are swapped": lambda name, x: x << 4 | x >> 4 if x.dtype == np.uint8 and name.endswith(PACKED) else x,
    INVERTED: tensor_scale(lambda x: 1 / x),
    "tensor scale is missing": tensor_scale(lambda x: None),
    "block scales are swizzled_128x4, declared linear": swizzled_scales,
    "tensor scale is 1, as if it were missing": tensor_scale(np.ones_like),
}
PACKED, FORMS = ("weight", "packed"), ("modelopt", "compressed-tensors")
PAIRS = [(words, FORMS[(i + turn) % 2]) for turn in range(2) for i, words in enumerate(FAULTS)]


@pytest.mark.parametrize("pair", by_default(PAIRS[: len(FAULTS)], PAIRS), ids="-".join)
def test_faults_in_files_are_named(tmp_path, pair):
    mishap, form = pair
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "nvfp4-modelopt", format=form)
    verdict = identify_checkpoint(rewritten(tmp_path / "out", FAULTS[mishap]), tmp_path / "in")
    assert "nvfp4-modelopt" in verdict.recipes and (verdict.mishap, verdict.is_clean) == (mishap, False), str(verdict)
    assert f"; then: {mishap}" in verdict.sentence and verdict.problems[0].startswith(f"{mishap}, ")
    assert mishap == "tensor scale is missing" or not verdict.exceptions  # then the amax of groups is not tried


INPUT_SCALES = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}
UNUSABLE = {"0.0": 0, "nan": np.nan, "-1.0": -1, "inf": np.inf, "missing": None}


@pytest.mark.parametrize("value", half(UNUSABLE))
@pytest.mark.parametrize("form", INPUT_SCALES)
def test_input_scales_that_are_unusable_are_problems(
    form: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are reported with and without the source, in the words of verify."""
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", format=form, input_scale=1.0)
    name, commands = INPUT_SCALES[form], [["--source", str(tmp_path / "in")], []]
    commands.append([*commands[0], "--layers", "*.0.mlp.gate_proj"])
    assert [main(["identify", str(tmp_path / "out"), *more]) for more in commands] == [0, 0, 0]
    layer, scale = "model.layers.0.mlp.up_proj", UNUSABLE[value]

    def changed(tensor: str, x: np.ndarray) -> np.ndarray | None:
        own = tensor == f"{layer}.{name}"
        return x if not own else None if scale is None else np.full_like(x, scale)

    path = str(rewritten(tmp_path / "out", changed))
    capsys.readouterr()
    assert main(["verify", path]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if f"{layer}: {name} is {value}" in line]
    lines = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    for more, count in zip(commands, (len(lines), len(lines), 0), strict=True):
        assert main(["identify", path, *more]) == bool(count)
        problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM: ")]
        assert [one.removeprefix("PROBLEM: ") for one in problems] == lines[:count]
    assert lines


def test_models_without_layers_in_common(tmp_path):
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    with synthetic.refused("no quantized layer of a known format"):
        identify_checkpoint(tmp_path / "in", tmp_path / "out")
    synthetic.bert(tmp_path / "bert")
    with synthetic.refused("give the model that it was made from"):
        identify_checkpoint(tmp_path / "out", tmp_path / "bert")
