"""Test amax per tensor, along axes, and per block of a recipe, against NumPy's maximum over blocks."""

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, FINITE, INPUTS, ORDINARY, as_strided, ordinary
from together import together

import fp4kit
from fp4kit.cuda.amax import columns_to_reduce
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

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
