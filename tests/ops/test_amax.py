"""Test amax per tensor, along axes, and per block of a recipe, against NumPy's maximum over blocks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from engine_cases import assert_equal
from exhaustive import sampled
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16, FINITE, INPUTS, NAMES, ORDINARY, as_strided, ordinary, seeded
from together import together

import fp4kit
from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.cuda.amax import columns_to_reduce
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.ops import engines as call_cache
from fp4kit.quantized.container import scale_shape, tensor_amax_shape
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import reciprocal_approx_ftz
from fp4kit.reference.quantize import segments

BLOCKED = [r.id for r in RECIPES.values() if r.block]


@together("x", FINITE.values())
@together("axis", [None, 0, 1, -1, (0, 1)])
def test_along_axes(x, axis):
    result = fp4kit.amax(x, axis=axis)
    assert isinstance(result, np.ndarray)
    assert_same_bits(result, np.asarray(np.abs(x.astype(np.float32)).max(axis=axis)))


def test_amax_of_a_large_array():
    """The amax of a large array, which is computed tile by tile along the first axis, equals NumPy's maximum."""
    for shape in [(600, 700), (1, 600_000), (600_000,), (3, 2, 100_000)]:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        assert_same_bits(fp4kit.amax(x), np.asarray(np.abs(x).max()))


def test_columns_that_need_no_transposed_copy():
    """columns_to_reduce returns a 3-d view of x whose middle axis a GPU reduces, so that no transposed copy is needed.

    It returns None if there is no such view, or if the matrices of the view are too small.
    """
    for shape in [(300, 70), (2, 3, 4), (3, 90, 64), (2, 3, 70, 40), (2, 0, 3), (4, 1)]:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        for axis in [0, 1, -2, (0, 1), (1, 2), (2, 1), (0, 2)]:
            if np.max(axis) < x.ndim and (found := columns_to_reduce(x, axis)):
                result = np.max(np.abs(found[0]), axis=1, initial=0).reshape(found[1])
                assert_same_bits(result, np.max(np.abs(x), axis=axis, initial=0))
    x = np.zeros((300, 70, 64), np.float32)
    seen = {axis: columns_to_reduce(x, axis) for axis in (None, (), 0, 1, -2, (1, 0), 2, (1, 2), (0, 0))}
    assert [axis for axis, found in seen.items() if found] == [0, 1, -2, (1, 0)]
    assert columns_to_reduce(x.T, 0) is None and columns_to_reduce(x[:, :2], 0) is None
    assert columns_to_reduce(x[:, :2].copy(), 1) is None


def test_amax_of_empty_and_one_element_arrays():
    assert_same_bits(fp4kit.amax(np.empty((0, 3), np.float32)), np.float32(0))
    assert_same_bits(fp4kit.amax(np.float32(-3)), np.float32(3))
    assert_same_bits(fp4kit.amax(np.empty((0, 64), BF16), "mxfp4"), np.empty((0, 2), np.float32))


def test_specials():
    assert np.isnan(fp4kit.amax(np.array([1, np.nan], np.float32)))
    assert fp4kit.amax(np.array([1, -np.inf], np.float32)) == np.inf
    assert_same_bits(fp4kit.amax(np.array([-0.0], np.float32)), np.float32(0))


@together("name", BLOCKED)
@together("x", FINITE.values())
def test_amax_of_blocks(name, x):
    height, width = RECIPES[name].block
    expected = np.abs(x.astype(np.float32)).reshape(128 // height, height, 128 // width, width).max(axis=(1, 3))
    assert_same_bits(fp4kit.amax(x, name), expected)
    assert_same_bits(fp4kit.amax(np.asfortranarray(x), name), expected)
    assert_same_bits(fp4kit.amax(np.ascontiguousarray(x.T), name, axis=0), expected)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d", "mxfp8-te-2d"])
def test_amax_of_blocks_in_more_dimensions(name):
    x = ordinary(1, (2, 3, 40, 64))  # with 40 rows the last blocks of 16 or 32 are short
    height, width = RECIPES[name].block
    padded = np.pad(x, ((0, 0), (0, 0), (0, -40 % height), (0, 0)))
    expected = np.abs(padded).reshape(2, 3, -1, height, 64 // width, width).max(axis=(3, 5))
    assert_same_bits(fp4kit.amax(x, name), expected)
    assert_same_bits(fp4kit.amax(as_strided(x), name), expected)
    assert_same_bits(fp4kit.amax(x[0, 0, :1], name)[0], fp4kit.amax(x[0, 0, 0], name))


def test_nan_counts_as_the_recipe_says():
    x = np.ones((1, 32), np.float32)
    x[0, :2] = np.nan, 5
    assert fp4kit.amax(x, "nvfp4-te").tolist() == [[5, 1]]  # a comparison with NaN is false
    assert np.isnan(fp4kit.amax(x, "nvfp4-te-reference")[0, 0])
    assert fp4kit.amax(x, "nvfp4-flashinfer").tolist() == [[5, 1]]
    x[0, 1:16:2] = np.nan  # one SIMD lane holds only NaN
    assert fp4kit.amax(x, "nvfp4-te").tolist() == [[1, 1]]
    assert np.isnan(fp4kit.amax(x, "nvfp4-flashinfer")[0, 0])


def test_recipes_without_blocks():
    assert_same_bits(fp4kit.amax(ORDINARY, "fp8-modelopt"), fp4kit.amax(ORDINARY))
    assert_same_bits(fp4kit.amax(ORDINARY, "int8-modelopt-channel"), fp4kit.amax(ORDINARY, axis=1))
    assert_same_bits(fp4kit.amax(ORDINARY, "int8-modelopt-channel", axis=0), fp4kit.amax(ORDINARY, axis=0))


@pytest.mark.parametrize("name", BLOCKED)
def test_tiles_do_not_matter(name, monkeypatch):
    x = INPUTS["nonfinite"]
    whole = fp4kit.amax(x, name)
    monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", 64)
    assert_same_bits(fp4kit.amax(x, name), whole)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.float8_e4m3fn], ids=str)
def test_other_dtypes(dtype):
    with pytest.raises(TypeError, match=r"^amax: x is .*; needs float32, float16 or bfloat16; convert it first"):
        fp4kit.amax(np.zeros((2, 32), dtype))


def test_errors():
    with pytest.raises(ValueError, match=r"^amax: axis 1 has length 40; mxfp4-ocp needs a multiple of 32"):
        fp4kit.amax(np.zeros((2, 40), np.float32), "mxfp4")
    with pytest.raises(ValueError, match=r"axis 2 .*2"):
        fp4kit.amax(np.zeros((2, 40), np.float32), axis=2)


@together("dtype, bits", [(np.float32, 0x7F800001), (np.float16, 0x7C01), (BF16, 0x7F81)])
@together("axis", [None, 0, 1])
def test_a_signalling_nan_gives_nan_and_no_warning(dtype, bits, axis):
    x = np.ones((2, 160), dtype)
    x.view(f"u{x.itemsize}")[:, 3] = bits
    assert np.isnan(fp4kit.amax(x, axis=axis)).any()


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling != "none"])
@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE)
def test_the_amax_that_is_computed_can_be_given(name, x):
    q = fp4kit.quantize(x, name)
    assert q.tensor_amax.dtype == q.tensor_scale.dtype == np.float32
    assert q.tensor_amax.shape == q.tensor_scale.shape
    assert_same_bits(fp4kit.quantize(x, name, tensor_amax=q.tensor_amax), q)


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling == "tensor"])
def test_forms_of_a_tensor_amax(name):
    q = fp4kit.quantize(ORDINARY, name, tensor_amax=np.float32(40))
    for amax in (40, 40.0, np.float64(40), np.full((1, 1), 40, BF16), np.array([40])):
        assert_same_bits(fp4kit.quantize(ORDINARY, name, tensor_amax=amax), q)
    assert q.tensor_amax.shape == () and q.tensor_amax == 40
    assert not np.array_equal(q.tensor_scale, fp4kit.quantize(ORDINARY, name).tensor_scale)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_amax_is_the_amax(name):
    r = RECIPES[name]
    a = np.abs(ORDINARY)
    blocks = a.reshape(128, -1, r.block_size) if r.block else a[:, None]
    tall = np.maximum.reduceat(blocks.max(axis=-1), np.arange(0, 128, r.block_rows)).repeat(r.block_rows, axis=0)
    expected = {"tensor": a.max(), "row": a.max(axis=1), "block": tall, "none": None}[r.tensor_scaling]
    amax = fp4kit.quantize(ORDINARY, name).tensor_amax
    assert (amax is None) == (expected is None)
    if expected is not None:
        assert_same_bits(amax, np.asarray(expected))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling == "tensor"])
@pytest.mark.parametrize("view", ["contiguous", "strided"])
def test_an_amax_for_each_expert(name, view):
    x = ordinary(8, (4, 32, 128))
    amax = np.array([3, 50, 0.5, 700], np.float32)
    seen = x if view == "contiguous" else as_strided(x)
    q = fp4kit.quantize(seen, name, tensor_amax=amax)
    assert q.tensor_scale.shape == (4,)
    assert_same_bits(fp4kit.quantize(x, name, tensor_amax=amax.reshape(4, 1, 1)), q)
    values = fp4kit.dequantize(q)
    for i in range(4):
        one = fp4kit.quantize(x[i], name, tensor_amax=amax[i])
        assert_same_bits(q.packed[i], one.packed)
        assert_same_bits(q.tensor_scale[i : i + 1], one.tensor_scale.reshape(1))
        if q.block_scale is not None:
            assert_same_bits(q.block_scale[i], one.block_scale)
        assert_same_bits(values[i], fp4kit.dequantize(one))


@pytest.mark.parametrize(
    "name", [r.id for r in RECIPES.values() if r.tensor_scaling == "tensor" and not seeded(r, ORDINARY)]
)
def test_fake_quantize_with_an_amax_for_each_expert(name):
    x, amax = ordinary(8, (4, 32, 128)), np.array([3, 50, 0.5, 700], np.float32)
    values = fp4kit.fake_quantize(x, name, tensor_amax=amax)
    for i in range(4):
        assert_same_bits(values[i], fp4kit.fake_quantize(x[i], name, tensor_amax=amax[i]))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].static])
def test_block_amaxes_can_be_given(name):
    x = ordinary(10, (2, 16, 64))
    q, amax = fp4kit.quantize(x, name), np.abs(x).reshape(2, 16, 4, 16).max(axis=-1)
    for given_amax in (amax, amax.reshape(-1, 1), amax.astype(np.float64)):
        assert_same_bits(fp4kit.quantize(x, name, block_amax=given_amax), q)
    half = fp4kit.quantize(x, name, block_amax=amax / 2)
    assert not np.array_equal(half.block_scale, q.block_scale)


@pytest.mark.parametrize("elements", [1 << 18, 64])
def test_block_amaxes_of_tall_blocks(elements, monkeypatch):
    """For blocks of several rows, block_amax has a row per row of x, like block_scale; rows of one block are equal.

    The last blocks may be short.
    """
    monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", elements)
    r = replace(RECIPES["nvfp4-modelopt-static"], block=(16, 16))
    for rows in (64, 40):
        x = ordinary(11, (rows, 64))
        amax = np.repeat(fp4kit.amax(x, r), 16, axis=0)[:rows]
        assert_same_bits(fp4kit.quantize(x, r, block_amax=amax), fp4kit.quantize(x, r))
        stacked = fp4kit.quantize(np.stack([x, x]), r, block_amax=np.stack([amax, amax / 2]))
        assert_same_bits(stacked.packed[1], fp4kit.quantize(x, r, block_amax=amax / 2).packed)


MAX = float(np.finfo(np.float32).max)
# {recipe: {tensor amax: decode scale}}. The quotients are exact or rounded to float32.
TENSOR_SCALES = {
    "nvfp4-te": {0: 1, 2688: 1, 5376: 2, 21: 1 / 128, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-reference": {0: 1 / MAX, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-2d": {0: 1, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-4over6-mse-256": {0: 1 / MAX, 1536: 1, 3072: 2},
    "nvfp4-flashinfer": {0: 1 / MAX, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: np.inf},
    "nvfp4-modelopt": {0: 0, 2688: 1, 5376: 2, np.inf: np.inf},
    "nvfp4-torchao": {0: 0, 2688: 1, 5376: 2, np.inf: np.inf},
    "nvfp4-compressed-tensors": {0: 1, 2.0**-126: 1, 2688 * 2.0**-7: 1 / 128, np.inf: np.inf},
    "fp8-modelopt": {0: 1 / 448, 448: 1, 2.0**-24: 1 / 448, 448 * 2.0**-33: 1 / 448, 448 * 2.0**-32: 2.0**-32},
    "int8-modelopt": {0: 0, 127: 1, 2.0**-24: 0, 127 * 2.0**-30: 2.0**-30, 127 * 2.0**-32: 0},
    "int4-modelopt-channel": {0: 0, 7: 1, 2.0**-24: 0, 7 * 2.0**-26: 2.0**-26},
    "int4-qat": {0: 1e-5, 7: 1, 6e-5: 1e-5, 7 * 2.0**-16: 2.0**-16},
}


@together("name", TENSOR_SCALES)
def test_tensor_scales_by_hand(name):
    for amax, expected in TENSOR_SCALES[name].items():
        shape = {"tensor": (), "row": (1,), "block": (1, 1)}[RECIPES[name].tensor_scaling]
        q = fp4kit.quantize(np.zeros((1, 128), np.float32), name, tensor_amax=np.full(shape, amax, np.float32))
        assert_same_bits(q.tensor_scale, np.full(shape, expected, np.float32), f"tensor_scale of {amax}")
        assert_same_bits(q.tensor_amax, np.full(shape, amax, np.float32))


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt-static", "mxfp4-ocp"])
def test_block_amaxes_of_the_other_axis_are_refused(recipe):
    """Block amaxes for blocks along the other axis are rejected, because they are equally many but in another order.

    Flat block amaxes, and ones with joined leading axes, are accepted.
    """
    x = ORDINARY[:64]
    rows, columns = fp4kit.amax(x, recipe), fp4kit.amax(x, recipe, axis=0)
    assert columns.size == rows.size and columns.shape != rows.shape
    for wrong in (columns, rows.T):
        text = f"quantize: block_amax has shape {wrong.shape}; {recipe} needs {rows.shape}"
        with pytest.raises(ValueError, match=re.escape(text)):
            fp4kit.quantize(x, recipe, block_amax=wrong)
    expected = fp4kit.quantize(x, recipe, block_amax=rows)
    for right in (rows.reshape(-1), rows.reshape(-1, 1), rows[..., None], rows.reshape(4, 16, -1)):
        assert_same_bits(fp4kit.quantize(x, recipe, block_amax=right), expected)
    stacked = fp4kit.quantize(x.reshape(4, 16, -1), recipe, block_amax=rows)
    assert_same_bits(stacked.packed.reshape(expected.packed.shape), expected.packed)


def test_tensor_amaxes_of_blocks_of_the_other_axis_are_refused():
    x = np.resize(ORDINARY, (256, 128))
    rows, columns = (fp4kit.quantize(x, "int4-qat", axis=axis).tensor_amax for axis in (1, 0))
    with pytest.raises(ValueError, match=r"quantize: tensor_amax has shape \(128, 2\); int4-qat needs \(256, 1\)"):
        fp4kit.quantize(x, "int4-qat", tensor_amax=columns)
    expected = fp4kit.quantize(x, "int4-qat")
    for right in (rows, rows.reshape(-1), rows[None]):
        assert_same_bits(fp4kit.quantize(x, "int4-qat", tensor_amax=right), expected)


X = ordinary(0, (32, 128))
X[0] = 0
SCALED = [name for name, r in RECIPES.items() if r.tensor_scaling != "none"]
STATIC = [name for name, r in RECIPES.items() if r.static or takes_e8m0_amaxes(r)]


def same_for_both(call, zero, negative):
    """Assert that `call` gives the same bits for amaxes of +0 and of -0, as a first call and as a cached call.

    call: a function that takes the amax and makes a call with it.
    zero, negative: amaxes of +0 and of -0, as `zeros` returns them.
    """
    call_cache._CALLS.clear()
    expected = call(zero)
    for amax in (negative, zero, negative):
        assert_equal(call(amax), expected)
    call_cache._CALLS.clear()
    assert_equal(call(negative), expected)


@pytest.mark.parametrize("name", sorted({*SCALED, *STATIC}))
def test_minus_zero_amaxes(name, either_engine):
    """A tensor amax or block amaxes of -0 count as +0, as arrays and as numbers."""
    r, given = RECIPES[name], []
    shape = tensor_amax_shape(X.shape, r)
    if name in SCALED:
        given += [("tensor_amax", np.zeros(shape, np.float32), np.full(shape, -0.0, np.float32))]
    if r.tensor_scaling == "tensor":
        given += [("tensor_amax", number(0.0), number(-0.0)) for number in (float, np.float32, np.float64)]
    if name in STATIC:
        blocks = np.abs(ordinary(1, scale_shape(X.shape, r)))
        blocks.ravel()[::3] = 0
        given += [("block_amax", blocks, np.where(blocks == 0, np.float32(-0.0), blocks))]
    for argument, zero, negative in given:
        for f in (fp4kit.fake_quantize, fp4kit.quantize)[: 2 - r.fake_only]:
            same_for_both(lambda amax, f=f, of=argument: f(X, name, **{of: amax}, **seeded(name, X)), zero, negative)


def cast(name, blocks, **options):
    out = np.zeros((32, 64), np.uint8)
    fp4kit.partial_cast(X.ravel(), out, blocks, X.shape, 0, name, **options)
    return out


BLOCKS = {name: fp4kit.amax(X, name) for name in ("nvfp4-te-2d", "nvfp4-modelopt", "nvfp4-qwix", "mxfp4-ocp")}
BLOCK_ZEROS = {name: np.where(np.arange(amax.shape[1]) % 2, amax, 0) for name, amax in BLOCKS.items()}
ZEROS_OF = {"rows": np.zeros(32, np.float32), "experts": np.float32([2, 0, 1]), "number": 0.0}
WITH_AMAX = {
    "experts": lambda amax: fp4kit.quantize(np.stack([X, X, X]), "nvfp4-modelopt", tensor_amax=amax),
    "experts of integers": lambda amax: fp4kit.quantize(np.stack([X, X, X]), "int8-modelopt", tensor_amax=amax),
    "number in both directions": lambda amax: fp4kit.quantize_both(X, "nvfp4-modelopt", tensor_amax=amax),
    "number of a search": lambda amax: fp4kit.search_scales(X, "nvfp4-modelopt-static", tensor_amax=amax),
    "number of a group": lambda amax: fp4kit.quantize_grouped([X, X], "nvfp4-modelopt", tensor_amax=[amax, amax]),
    "rows of a group": lambda amax: fp4kit.quantize_grouped([X], "int8-modelopt-channel", tensor_amax=[amax]),
    "number of a shard": lambda amax: cast("nvfp4-modelopt", BLOCKS["nvfp4-modelopt"], tensor_amax=amax),
} | {f"{name} blocks of a shard": lambda amax, name=name: cast(name, amax) for name in BLOCKS}


@pytest.mark.parametrize("kind", WITH_AMAX)
def test_minus_zero_in_other_calls(kind, either_engine):
    first = kind.split()[0]
    zero = BLOCK_ZEROS[first] if first in BLOCKS else ZEROS_OF[first]
    negative = -0.0 if first == "number" else np.where(zero == 0, np.float32(-0.0), zero)
    same_for_both(WITH_AMAX[kind], zero, negative)
    assert np.signbit(negative).any()  # the arrays of the caller are not written to


def test_minus_zero_in_out_and_in_plans(either_engine):
    """A cached call that writes into out stores +0, and a plan, which reads its amax arrays when it runs, uses +0."""
    out, zero = fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.float32(3)), np.zeros((), np.float32)
    for _ in range(2):
        fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.full((), -0.0, np.float32), out=out)
        assert_equal(out, fp4kit.quantize(X, "nvfp4-te", tensor_amax=0.0))
    amaxes = [np.ones_like(zero), np.ones_like(zero)]
    plan = fp4kit.GroupedPlan([X, X], "nvfp4-modelopt", tensor_amax=amaxes)
    plan.quantize()
    amaxes[1][...] = -0.0
    assert_equal(plan.quantize(), fp4kit.quantize_grouped([X, X], "nvfp4-modelopt", tensor_amax=[amaxes[0], zero]))
    assert_equal(plan.amax(), [amaxes[0], zero])


def test_subnormal_amaxes_in_other_arithmetic_modes():
    """If the processor flushes subnormals, a subnormal amax must still be used and returned unchanged."""
    amax = np.float32([1e-42] * 32)[:, None]
    given = amax.copy()
    q = fp4kit.quantize(X, "nvfp4-te-rowscaled", tensor_amax=given)
    assert_equal(q.tensor_amax, amax[:, 0])
    assert_equal(given, amax)


SHARDED = ("nvfp4-te-2d", "nvfp4-te", "nvfp4-modelopt", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te", "mxfp8-te-2d")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def _cast(x: np.ndarray, name: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the block amaxes and codes of x by the recipe `name`, computed shard by shard.

    The output is filled with wrong bits first, so that missing codes are found. cuts: the indices at which the flat
    matrix is divided into shards.
    """
    flat, edges = x.reshape(-1), [0, *sorted(cuts), x.size]
    pairs = list(pairwise(edges))
    parts = [fp4kit.partial_amax(flat[a:b], x.shape, a, name) for a, b in pairs]
    amax = np.max(parts, axis=0)
    out = np.full(fp4kit.quantize(x, name).packed.shape, 0xA5, np.uint8)
    for a, b in pairs:
        fp4kit.partial_cast(flat[a:b], out, amax, x.shape, a, name)
    return amax, out


@sampled(
    100,
    600,
    name=st.sampled_from(SHARDED),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    fractions=st.lists(st.floats(0, 1), max_size=5),
    seed=st.integers(0, 99),
)
def test_any_cuts_give_the_whole(name, dtype, rows, blocks, fractions, seed) -> None:
    K = blocks * fp4kit.recipe(name).block_size
    x = np.random.default_rng(seed).standard_normal((rows, K)).astype(dtype)
    amax, out = _cast(x, name, [int(f * x.size) for f in fractions])
    assert_same_bits(amax, fp4kit.amax(x, name))
    assert_same_bits(out, fp4kit.quantize(x, name).packed)


def test_neighbouring_nibbles_stay() -> None:
    x = np.full(64, 3, np.float32)
    amax = np.full((1, 4), 6, np.float32)
    out = np.zeros((1, 32), np.uint8)
    fp4kit.partial_cast(x[5:6], out, amax, (1, 64), 5, "nvfp4-te-2d")
    assert out[0, 2] == 0x50 and np.count_nonzero(out) == 1
    out[:] = 0xFF
    fp4kit.partial_cast(x[4:5], out, amax, (1, 64), 4, "nvfp4-te-2d")
    assert out[0, 2] == 0xF5 and np.count_nonzero(out != 0xFF) == 1


def test_tensor_amax_given_and_strided_out() -> None:
    x = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32)
    whole = fp4kit.quantize(x, "nvfp4-te-2d", tensor_amax=9.0)
    out = np.zeros((32, 64), np.uint8)[:, ::2]
    fp4kit.partial_cast(x.ravel(), out, fp4kit.amax(x, "nvfp4-te-2d"), x.shape, 0, "nvfp4-te-2d", tensor_amax=9.0)
    assert_same_bits(np.ascontiguousarray(out), whole.packed)


@pytest.mark.parametrize("name", SHARDED)
def test_infinities(name) -> None:
    """partial_cast gives the bytes of quantize for a matrix with infinities, whose blocks have infinite amaxes.

    For the recipe that takes its tensor amax over finite elements only, that amax is given.
    """
    x = np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32)
    x[3, 5], x[20, 40] = np.inf, -np.inf
    whole, amax = fp4kit.quantize(x, name), fp4kit.amax(x, name)
    out = np.zeros_like(whole.packed)
    limit = whole.tensor_amax if name == "nvfp4-flashinfer" else None
    fp4kit.partial_cast(x.ravel(), out, amax, x.shape, 0, name, tensor_amax=limit)
    assert_same_bits(out, whole.packed)


@given(start=st.integers(0, 200), length=st.integers(0, 400), K=st.integers(1, 50))
def test_segments_cover_the_slice_once(start, length, K) -> None:
    covered = []
    for rows, columns, elements in segments(start, length, K):
        assert columns.stop <= K and (rows.stop - rows.start == 1 or (columns.start, columns.stop) == (0, K))
        count = (rows.stop - rows.start) * (columns.stop - columns.start)
        assert elements.stop - elements.start == count and rows.start * K + columns.start == start + elements.start
        covered += range(elements.start, elements.stop)
    assert covered == list(range(length))


SHARD, amax_of = np.ones(64, np.float32), fp4kit.partial_amax
AMAX = np.ones((1, 4), np.float32)
OUT = np.zeros((4, 8), np.uint8)


@together(
    "call, error, message",
    [
        (lambda: amax_of(SHARD, (4, 16), 1, "nvfp4-te-2d"), ValueError, "elements [1, 65) of a matrix of"),
        (lambda: amax_of(SHARD, (4, 16), -1, "nvfp4-te-2d"), ValueError, "elements [-1, 63) of a matrix of"),
        (lambda: amax_of(SHARD, (8, 8), 0, "nvfp4-te-2d"), ValueError, "axis 1 has length 8; nvfp4-te-2d"),
        (lambda: amax_of(SHARD[None], (4, 16), 0, "nvfp4-te-2d"), ValueError, "shard is 2-d; needs the 1-d"),
        (lambda: amax_of(SHARD, (64,), 0, "nvfp4-te-2d"), ValueError, "shape is (64,); needs (M, K) of the"),
        (lambda: amax_of(SHARD.astype(int), (4, 16), 0, "nvfp4-te-2d"), TypeError, "shard is int64; needs"),
        (lambda: amax_of(SHARD, (4, 16), 0, "fp8-modelopt"), ValueError, "fp8-modelopt has no blocks, or"),
        (lambda: amax_of(SHARD, (4, 16), 0, "nvfp4-te-rowscaled"), ValueError, "nvfp4-te-rowscaled has no"),
        (lambda: _call(OUT[:, :4]), ValueError, "out is uint8 (4, 4); needs uint8 (4, 8)"),
        (lambda: _call(OUT.astype(np.int8)), ValueError, "out is int8 (4, 8); needs uint8 (4, 8)"),
        (lambda: _call(OUT, AMAX), ValueError, "block_amax is float32 (1, 4); nvfp4-te-2d needs float32 (1, 1)"),
        (lambda: _call(OUT, AMAX[:, :1] * np.nan), ValueError, "block_amax is float32 with NaN"),
        (
            lambda: _call(OUT, np.float32([[1], [np.inf], [2], [np.inf]]), "nvfp4-flashinfer"),
            ValueError,
            "block_amax holds 2 infinite value(s)",
        ),
        (lambda: _call(OUT, name="nvfp4-te-4over6-mae-256-2d"), ValueError, "chooses scales from whole blocks"),
    ],
)
def test_errors_of_shards(call, error, message) -> None:
    before = OUT.copy()
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert_same_bits(OUT, before)


def _call(out: np.ndarray, amax: np.ndarray = AMAX[:, :1], name: str = "nvfp4-te-2d") -> None:
    fp4kit.partial_cast(SHARD, out, amax, (4, 16), 0, name)


F32 = np.float32
X_STATIC = np.random.default_rng(0).standard_normal((128, 64)).astype(ml_dtypes.bfloat16)
MULTIPLIES = ("nvfp4-vllm-static", "nvfp4-flashinfer-static", "nvfp4-comfy-kitchen-static")


def test_the_scale_of_an_amax_equals_the_amax():
    """The amax itself need not be found, but every byte of the result must equal, in either direction."""
    amaxes = np.exp(np.random.default_rng(1).uniform(-8, 8, 25)).astype(np.float32)
    for amax in [*amaxes, F32(5.25), F32(448)]:
        for recipe in MULTIPLIES:
            q = fp4kit.quantize_static(X_STATIC, recipe, input_scale=input_scale(amax))
            assert q.equals(fp4kit.quantize(X_STATIC, recipe, tensor_amax=q.tensor_amax))
            assert_same_bits(q.packed, fp4kit.quantize(X_STATIC, recipe, tensor_amax=amax).packed)
            assert q.tensor_scale == input_scale(amax)
        q = fp4kit.quantize_static(X_STATIC, "nvfp4-vllm-static-divisor", input_global_scale=input_global_scale(amax))
        expected = fp4kit.quantize(X_STATIC, "nvfp4-vllm-static-divisor", tensor_amax=amax)
        assert_same_bits(q.packed, expected.packed)
        assert_same_bits(q.block_scale, expected.block_scale)
        assert_same_bits(q.tensor_scale, expected.tensor_scale)


@np.errstate(all="ignore")
def stated(x, scale):
    """Return (codes, block scales) of rows as the kernels of vLLM and FlashInfer make them with the scale 1 / scale."""
    gs, blocks = F32(1) / scale, x.astype(np.float32).reshape(-1, 16)
    base = np.minimum(gs * (np.abs(blocks).max(1) * reciprocal_approx_ftz(F32(6))), F32(448))
    scales = base.astype(ml_dtypes.float8_e4m3fn)
    factor = reciprocal_approx_ftz(scales.astype(np.float32) * reciprocal_approx_ftz(gs))
    factor[scales == 0] = 0
    codes = np.clip(blocks * factor[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), -1), scales.view(np.uint8).reshape(len(x), -1)


def test_scales_that_no_amax_gives():
    """Between two quotients amax / 2688 lies a float32 number that no amax gives; it is used as it is."""
    scale = F32(1.9) / 1024
    amax = scale * F32(2688)
    near = {np.nextafter(amax, F32(end)) / F32(2688) for end in (0, 9)} | {amax / F32(2688)}
    scale = next(s for s in (scale, np.nextafter(scale, F32(0)), np.nextafter(scale, F32(9))) if s not in near)
    for recipe in MULTIPLIES[:2]:
        q = fp4kit.quantize_static(X_STATIC, recipe, input_scale=scale)
        packed, scales = stated(X_STATIC, scale)
        assert_same_bits(q.packed, packed)
        assert_same_bits(q.block_scale, scales)
        assert q.tensor_scale == scale
        assert q.tensor_amax is None
    whole = fp4kit.quantize_static(X_STATIC, MULTIPLIES[0], input_scale=scale)
    again = fp4kit.quantize_static(X_STATIC, MULTIPLIES[0], input_scale=scale, scale_layout="swizzled_128x4")
    assert_same_bits(again.block_scale.reshape(-1), fp4kit.swizzle(whole, "swizzled_128x4").block_scale.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_comfy_kitchen_uses_the_scale_as_it_is(dtype):
    """The scale is not rounded to the dtype of x for codes and block scales. Decoding rounds every step."""
    x = X_STATIC.astype(dtype)
    for scale in F32([0.01, 0.0123, 1.9 / 1024, 3e-5, 7]):
        q = fp4kit.quantize_static(x, "nvfp4-comfy-kitchen-static", input_scale=scale)
        blocks = x.astype(np.float32).reshape(-1, 16)
        scales = np.minimum(np.abs(blocks).max(1) / F32(6) / scale, F32(448)).astype(ml_dtypes.float8_e4m3fn)
        assert_same_bits(q.block_scale, scales.view(np.uint8).reshape(len(x), -1))
        factors = scales.astype(np.float32) * scale
        with np.errstate(all="ignore"):
            y = np.where(factors[:, None] == 0, F32(0), blocks / factors[:, None])
        codes = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        assert_same_bits(q.packed, (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), -1))
        assert q.tensor_scale == scale
        products = (scale.astype(dtype) * scales.astype(dtype)).astype(dtype)
        values = (codes.view(ml_dtypes.float4_e2m1fn).astype(dtype) * products[:, None]).astype(dtype)
        assert_same_bits(fp4kit.dequantize(q), values.reshape(x.shape))


def test_the_library_of_the_result_is_that_of_x():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for scale in (0.001, torch.tensor([1.9 / 1024]), np.float32(0.25)):
        q = fp4kit.quantize_static(x, "nvfp4-vllm-static", input_scale=scale)
        assert isinstance(q.packed, torch.Tensor)
        expected = fp4kit.quantize_static(x.numpy(), "nvfp4-vllm-static", input_scale=float(scale))
        assert_same_bits(q.packed.numpy(), expected.packed)


MISTAKES = [
    (dict(), ValueError, "no scale was given; needs either input_scale or input_global_scale"),
    (dict(input_scale=1, input_global_scale=1), ValueError, "both scales were given"),
    (dict(input_global_scale=512.0), ValueError, "input_global_scale was given, but nvfp4-vllm-kv takes"),
    (dict(recipe="nvfp4-vllm-static-divisor", input_scale=1), ValueError, "takes input_global_scale; for"),
    (dict(recipe="nvfp4-flashinfer-token", input_scale=1), ValueError, "takes no static input scale; needs a recipe"),
    (dict(input_scale=0), ValueError, "input_scale is 0; needs a positive float32 number"),
    (dict(input_scale=float("nan")), ValueError, "input_scale is nan"),
    (dict(input_scale=1e60), ValueError, "input_scale is 1e+60"),
    (dict(input_scale="1"), TypeError, "input_scale is '1'; needs a number, or an array of one element"),
    (dict(input_scale=np.complex64(1)), TypeError, "input_scale is np.complex64(1+0j); needs a number"),
    (dict(input_scale=np.array(["1"])), TypeError, "needs a number, or an array of one element"),
    (dict(input_scale=10**400), ValueError, "input_scale is 1000"),
    (dict(input_scale=np.ones(2)), TypeError, "needs a number, or an array of one element"),
    (dict(recipe="nvfp4-vllm-static-divisor", input_global_scale=-1), ValueError, "input_global_scale is -1; needs a"),
    (dict(recipe="nvfp4-vllm-static-divisor", input_global_scale=np.nan), ValueError, "input_global_scale is nan"),
]


def test_mistakes_are_named():
    for changed, kind, message in MISTAKES:
        with pytest.raises(kind, match=re.escape(message)):
            fp4kit.quantize_static(X_STATIC, **{"recipe": "nvfp4-vllm-static", **changed})
