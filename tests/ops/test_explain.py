"""Test fp4kit.explain: its last steps equal quantize, dequantize and fake_quantize in every bit, for every recipe."""

import dataclasses
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every, exhaustive
from inputs import seeded
from searched import searched_blocks

import fp4kit
from fp4kit.formats import E2M1, ElementFormat
from fp4kit.recipes import ALL_RECIPES, RECIPES
from fp4kit.reference.codec import show, traced, untraced

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def drawn(dtype, finite):
    """Return 32 rows of 128 elements: random values, ties, zeros, -0 and subnormals; NaN and inf if not finite."""
    x = np.tile(searched_blocks(np.float32)[:56].astype(np.float32), (1, 2))
    x = np.concatenate([x[0:8], x[16:24], x[32:40], x[48:56]])
    x[1, :32], x[2, 3], x[3] = 0, -0.0, x[3] * 1e-40
    x[4, 40:72] = np.float32(5.9) * 2.0 ** (12 - np.arange(32))
    if finite:
        return np.where(np.isfinite(x), x, 1).astype(dtype)
    x[5, 7], x[6, 9], x[7, 64:96] = np.nan, -np.inf, np.nan
    return x.astype(dtype)


def assert_last_steps_are_the_public_ones(x, recipe, count, drawing, /, **options):
    """Compare the steps of `count` drawn elements with the results of the public functions on the whole array."""
    r, options = RECIPES[recipe], seeded(recipe, x) | options
    if r.fake_only:
        values = fp4kit.fake_quantize(x, recipe, **options)
    else:
        q = fp4kit.quantize(x, recipe, **options)
        values = fp4kit.dequantize(q)
        codes = np.moveaxis(np.arange(x.size).reshape(x.shape), q.axis, -1)  # index in x -> index among the codes
        stored = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    rng = np.random.default_rng(drawing)
    for flat in rng.integers(x.size, size=count):
        at = np.unravel_index(flat, x.shape)
        found = fp4kit.explain(x, recipe, [int(i) for i in at], **options)
        result, width = found["result"], x.dtype.itemsize
        assert found.steps[0][-1] == result and found["element"].bits == int(x[at].view(f"u{width}"))
        expected = values[at]
        same = result.bits == int(expected.view(f"u{width}"))
        assert same or (np.isnan(expected) and np.isnan(result.value)), f"{recipe} {at}: {expected} and\n{found}"
        if not r.fake_only:
            place = np.unravel_index(int(np.flatnonzero(codes.reshape(-1) == flat)[0]), codes.shape)
            assert found["code"].bits == stored.reshape(codes.shape)[place], f"{recipe} {at}"
            if q.block_scale is not None:
                block = (*place[:-1], place[-1] // r.block_size)
                assert found["block scale"].bits == q.block_scale[block], f"{recipe} {at}"
            if q.tensor_scale is not None and q.tensor_scale.ndim == 0:
                assert found["tensor scale"].bits == int(q.tensor_scale.view("u4")) or np.isnan(q.tensor_scale)


@pytest.mark.parametrize("recipe", every(6, RECIPES))
def test_last_steps_are_those_of_the_public_functions(recipe):
    for i, dtype in enumerate(DTYPES):
        assert_last_steps_are_the_public_ones(drawn(dtype, finite=i > 0), recipe, 3, i)


@pytest.mark.parametrize("recipe", exhaustive(RECIPES))
def test_last_steps_of_many_elements(recipe):
    for dtype in DTYPES:
        for finite in (True, False):
            assert_last_steps_are_the_public_ones(drawn(dtype, finite), recipe, 30, 7)


@pytest.mark.parametrize("recipe", every(11, [r.id for r in RECIPES.values() if r.tensor_scaling == "tensor"]))
def test_a_given_tensor_amax_is_used(recipe):
    x = drawn(np.float32, True)
    assert_last_steps_are_the_public_ones(x, recipe, 3, 1, tensor_amax=np.float32(3.25))
    stacked = x.reshape(2, 16, 128)
    assert_last_steps_are_the_public_ones(stacked, recipe, 3, 2, tensor_amax=np.float32([1.5, 700]))


@pytest.mark.parametrize("recipe", every(7, RECIPES))
def test_another_axis_and_several_matrices(recipe):
    x = np.ascontiguousarray(np.moveaxis(drawn(np.float32, True).reshape(2, 16, 128), -1, 0))
    assert_last_steps_are_the_public_ones(x, recipe, 3, 3, axis=0)


@pytest.mark.parametrize("name", ["nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden"])
def test_block_amaxes_of_several_blocks_under_one_correction(name):
    """MS-EDEN corrects the scales of 32 elements together, so the amaxes of all their blocks are used."""
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    for columns in (8, 16, 32):
        r = dataclasses.replace(RECIPES[name], id="own", static=True, block=(1, columns))
        amaxes = np.linspace(0.5, 4, 2 * 64 // columns, dtype=np.float32).reshape(2, -1)
        options = {"tensor_amax": 4.0, "block_amax": amaxes, "rounding": "stochastic", "seed": 7}
        values = fp4kit.fake_quantize(x, r, **options)
        for at in np.ndindex(x.shape):
            assert fp4kit.explain(x, r, at, **options)["result"].value == values[at], (columns, at)


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt-static", "mxfp4-ocp"])
def test_block_amaxes_from_a_search_are_used(recipe):
    x = drawn(np.float32, True)
    amax = fp4kit.search_scales(x, recipe)
    assert_last_steps_are_the_public_ones(x, recipe, 8, 4, block_amax=amax)
    at = (0, 5)
    step = fp4kit.explain(x, recipe, at, block_amax=amax)["block amax"]
    assert step.value == amax[0, 5 // RECIPES[recipe].block_size]


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp4-ocp", "fp8-modelopt"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_stochastic_rounding_and_hadamard_transform(recipe, axis):
    """The last steps equal quantize with these options, and the random byte and the transformed element are steps."""
    rng = np.random.default_rng(5)
    x = drawn(np.float32, True).astype(ml_dtypes.bfloat16).reshape(4, 16, 64)
    x = np.ascontiguousarray(np.moveaxis(x, -1, axis))
    for options in (
        {"rounding": "stochastic", "seed": 7},
        {"rounding": "stochastic", "seed": rng.integers(0, 256, x.shape, np.uint8)},
        {"hadamard": True},
        {"hadamard": "no_signs", "rounding": "stochastic", "seed": 2**40 + 3},
    ):
        assert_last_steps_are_the_public_ones(x, recipe, 4, 1, axis=axis, **options)
        found = fp4kit.explain(x, recipe, (1, 2, 3), axis=axis, **options)
        assert ("random byte" in found.names) == ("seed" in options)
        assert ("element after the Hadamard transform" in found.names) == ("hadamard" in options)


def test_hadamard_needs_blocks_of_a_multiple_of_16_columns():
    r = dataclasses.replace(RECIPES["mxfp4-ocp"], id="blocks-of-24", block=(1, 24))
    with pytest.raises(ValueError, match=r"blocks-of-24 has blocks of 24 columns; hadamard needs a multiple of 16"):
        fp4kit.explain(np.ones((1, 48), np.float32), r, (0, 0), hadamard=True)


UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
CUSTOM = (
    fp4kit.custom_recipe("nf4", fp4kit.formats.NF4, "float32", 32),
    fp4kit.custom_recipe("e2m1_ue5m3", E2M1, UE5M3, 16, scale_rounding="up", tensor_scale=True),
)


@pytest.mark.parametrize("recipe", CUSTOM, ids=lambda r: r.id)
def test_formats_of_ones_own(recipe):
    x = drawn(np.float32, True)
    q, at = fp4kit.quantize(x, recipe), (20, 70)
    found = fp4kit.explain(x, recipe, at)
    assert found["result"].value == fp4kit.dequantize(q)[at] != 0
    assert found["code"].bits == fp4kit.unpack(q.packed)[at]
    if recipe.scale is not None:
        names = [step.name for step in found.steps[0]]
        assert "block scale before rounding" in names and found["block scale"].format == "UE5M3"


OTHERS = [id for id in ALL_RECIPES if id not in RECIPES]
LEVELED = [id for id in OTHERS if fp4kit.recipe(id).levels and not fp4kit.recipe(id).fake_only]
OF_LEVELS = {
    "bits": fp4kit.custom_recipe("bits", E2M1, levels=[(64, "E6M2"), (16, "exponent1"), (4, "exponent1")]),
    "dual": fp4kit.custom_recipe("dual", E2M1, levels=[(192, "float16"), (32, "E8M0")], scale_rounding="up"),
    "all": fp4kit.custom_recipe("all", E2M1, levels=[(256, "float32"), (64, "UE5M3"), (8, "exponent1")]),
}


@pytest.mark.parametrize("id", OTHERS)
def test_recipes_of_the_specification_alone(id):
    """The last steps are those of the public functions, also for an element in an incomplete outer block."""
    for i, dtype in enumerate(DTYPES):
        x = np.tile(drawn(dtype, finite=True), (1, 5))
        r = fp4kit.recipe(id)
        values = fp4kit.fake_quantize(x, id) if r.fake_only else fp4kit.quantize(x, id).dequantize()
        rng = np.random.default_rng(i)
        for at in zip(rng.integers(32, size=3).tolist(), rng.integers(640, size=3).tolist(), strict=True):
            found, width = fp4kit.explain(x, id, at)["result"], f"u{x.dtype.itemsize}"
            expected = values[at]
            assert found.bits == int(expected.view(width)) or (np.isnan(expected) and np.isnan(found.value)), (id, at)
        moved = fp4kit.explain(np.ascontiguousarray(x.T), id, at[::-1], axis=0)["result"]
        assert moved.bits == found.bits or np.isnan(found.value)


@pytest.mark.parametrize("name", [*LEVELED, *OF_LEVELS])
def test_each_level_is_shown_with_its_scale_code_and_bits(name):
    r = OF_LEVELS.get(name) or fp4kit.recipe(name)
    x = np.tile(drawn(np.float32, finite=True), (1, 5))
    q = fp4kit.quantize(x, r)
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    entries = q.block_scale.reshape(32, -1, r.scale_bytes)
    for row, column in ((0, 0), (17, 63), (30, 639), (9, 421)):
        found = fp4kit.explain(x, r, (row, column))
        block, inside = divmod(column, r.block_size)
        assert found["code"].bits == codes[row, column]
        step, entry = found["block scale"], entries[row, block]
        assert (step.format, step.bits, step.width) == (r.scale.name, entry[0], 8)
        assert step.value == r.scale.values[entry[0]]
        bits, start = np.unpackbits(entry[1:]), 0
        for level in r.exponent_levels:
            step = found[f"exponent bit per {level.columns}"]
            bit = int(bits[start + inside // level.columns])
            assert (step.format, step.bits, step.width, step.value) == ("exponent1", bit, 1, 2.0**bit)
            start += r.block_size // level.columns
        if r.tensor_scaling == "block":
            step = found[f"scale per {r.tensor_columns}"]
            assert step.value == q.tensor_scale[row, column // r.tensor_columns] and step.format == "float32"
            assert found[f"amax per {r.tensor_columns}"].value == q.tensor_amax[row, column // r.tensor_columns]


def test_a_search_of_the_whole_array_is_explained_for_the_whole_array():
    """In its own block alone, the element would get another scale."""
    x = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    id, differing = "mxfp4-msmodelslim-ceil-x-search", 0
    q = fp4kit.quantize(x, id)
    for row in range(64):
        found = fp4kit.explain(x, id, (row, 40))
        assert found["block scale"].bits == q.block_scale[row, 1] and found["result"].value == q.dequantize()[row, 40]
        differing += found["block scale"].bits != fp4kit.explain(x[row : row + 1, 32:], id, (0, 8))["block scale"].bits
    assert differing


def test_one_float32_scale_per_block_is_a_block_scale() -> None:
    nf4 = fp4kit.custom_recipe("nf4", fp4kit.formats.NF4, "bfloat16", 64)
    names = fp4kit.explain(np.linspace(-1, 2, 64, dtype=np.float32), nf4, 3).names
    assert {"block amax", "block scale"} < {*names} and not any(name.startswith("tensor") for name in names)
    assert "bfloat16 per 1 x 64 block" in str(nf4) and all(len(line.split()) > 1 for line in str(nf4).splitlines())


def test_every_block_recipe_shows_its_scale_before_rounding():
    """Each rule records at least one number between the block amax and the block scale."""
    x = drawn(np.float32, True)
    for recipe in (r for r in RECIPES.values() if r.scale is not None):
        names = [step.name for step in fp4kit.explain(x, recipe, (0, 5), **seeded(recipe, x)).steps[0]]
        before = names.index("block amax") + 1
        end = next((i for i, name in enumerate(names) if name.startswith(("block scale,", "factor"))), None)
        assert end is not None and any("tensor" not in name for name in names[before:end]), (recipe, names)


def test_two_recipes_part_where_their_bits_first_differ():
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    found = fp4kit.explain(x, ["mxfp4-ocp", "mxfp4-te"], 3)
    assert found.recipes == ("mxfp4-ocp", "mxfp4-te") and found.index == (3,)
    assert found.parting is None and "they part here" not in str(found)
    found = fp4kit.explain(x * np.float32(0.9), ["mxfp4-ocp", "mxfp4-te"], 3)  # amax 0.9: floor against ceil
    assert found.parting == "block scale"
    (line,) = [line for line in str(found).splitlines() if "they part here" in line]
    assert line.strip().startswith("block scale ") and "they part here" in found._repr_html_()
    values = [{step.name: step.value for step in steps}["block scale"] for steps in found.steps]
    assert values == [0.125, 0.25]


def test_steps_hold_numbers_and_bits():
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    found = fp4kit.explain(x, "nvfp4-te", -13)
    code = found["code"]
    assert (code.value, code.bits, code.format, code.width) == (-4.0, 0b1110, "E2M1", 4)
    assert str(code) == "-4  E2M1 1110" and str(found["block amax"]) == "1  float32 0x3f800000"
    assert E2M1.decode(code.bits) == code.value
    assert found["element"].value == float(x[3])
    assert repr(found) == "Explanation(element (3,), nvfp4-te: -0.666667)"
    with pytest.raises(KeyError, match=r"explain: there is no step .*; the steps are element, "):
        found["no such step"]


def test_errors_come_before_any_work():
    x = np.zeros((16, 32), np.float32)
    for index, error, text in (
        (3, IndexError, r"index \(3,\) has 1 integers; needs 2, because x has shape \(16, 32\)"),
        ((16, 0), IndexError, r"index \(16, 0\) is out of range; x has shape \(16, 32\)"),
        ((1.5, 0), TypeError, "index"),
    ):
        with pytest.raises(error, match=text):
            fp4kit.explain(x, "nvfp4-te", index)
    with pytest.raises(ValueError, match="recipe is an empty sequence; needs at least one recipe"):
        fp4kit.explain(x, [], (0, 0))
    with pytest.raises(ValueError, match="explain: mxfp4-modelopt-fake rounds to nearest only; got rounding="):
        fp4kit.explain(x, "mxfp4-modelopt-fake", (0, 0), rounding="stochastic", seed=1)
    with pytest.raises(ValueError, match=r"explain: .*nvfp4"):
        fp4kit.explain(x, "nvfp4-tea", (0, 0))
    with pytest.raises(ValueError, match="explain: axis 1 has length 30"):
        fp4kit.explain(x[:, :30], "nvfp4-te", (0, 0))


def test_a_trace_records_only_within_its_block():
    with traced() as steps:
        assert show("a", np.float32(1)) == 1
        with untraced():
            show("b", np.float32(2))
    show("c", np.float32(3))
    assert [step.name for step in steps] == ["a"]


@pytest.mark.parametrize(
    ("a", "b", "same"), [(0.0, -0.0, False), (-0.0, -0.0, True), (1.5, 1.5, True), (1.5, -1.5, False)]
)
def test_a_step_repeats_another_only_if_all_bits_do(a, b, same) -> None:
    module = import_module("fp4kit.ops.explain")
    assert module._same(a, b) == same and module._same(np.nan, np.nan) and not module._same(np.nan, a)


FORMATS = fp4kit.formats


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (fp4kit.custom_recipe("a", FORMATS.NF4, "bfloat16", 64), {"block encode scale", "block scale"}),
        (fp4kit.custom_recipe("b", FORMATS.INT4, "float32", (4, 32)), {"block encode scale", "block scale"}),
        (fp4kit.custom_recipe("c", FORMATS.E2M1, FORMATS.E8M0, 32), {"block scale before rounding", "block scale"}),
        ("int4-qat", {"block encode scale", "block scale"}),
        ("fp8-modelopt-channel", {"tensor encode scale", "tensor scale"}),
    ],
)
def test_scales_are_named_by_what_shares_them(recipe, names):
    """Float32 scales of blocks are block scales, although a Quantized stores them in tensor_scale."""
    found = fp4kit.explain(np.ones((4, 128), np.float32), recipe, (0, 0))
    assert {name for name in found.names if "scale" in name and "element" not in name} == names
