"""Test the compiled engine on formats of one's own: drawn recipes and arrays, against the specification."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, VIEWS, agree, as_large_ones, counted
from exhaustive import exhaustive
from own_formats import UE5M3, check_drawn_calls, pairs_at_bounds

import fp4kit
from fp4kit.cpu.codec import tables_of
from fp4kit.formats import E2M1, E3M2, E4M3, E6M2, E8M0, INT8, MX4, NF4, ElementFormat
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import ONE, TensorScale

pytestmark = NEEDS_ENGINE


@pytest.fixture(autouse=True)
def small_arrays_like_large_ones(monkeypatch):
    as_large_ones(monkeypatch)


@pytest.mark.parametrize("seed", [*range(10), *exhaustive(range(10, 100))])
def test_drawn_calls(seed):
    check_drawn_calls(seed)


@pytest.mark.parametrize(
    ("element", "scale"), [*product([NF4, E2M1, INT8], [UE5M3, E6M2, "float16"]), (MX4, E8M0)], ids=str
)
def test_finite_elements_are_done_by_the_engine(element, scale, monkeypatch):
    """The engine computes finite elements itself. Otherwise the tests would compare the specification with itself."""
    x = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    r = fp4kit.custom_recipe("mine", element, scale, 32)
    with counted(monkeypatch) as shapes:
        q = fp4kit.quantize(x, r)
        fp4kit.quantize(x, r, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        fp4kit.dequantize(q)
        fp4kit.fake_quantize(x, r)
    assert shapes == []


@pytest.mark.parametrize("view", VIEWS)
def test_memory_layouts(view):
    x = VIEWS[view](np.random.default_rng(1).standard_normal((128, 256), dtype=np.float32))
    for axis in range(x.ndim):
        if x.shape[axis] % 16 == 0:
            agree(fp4kit.quantize, x, fp4kit.custom_recipe("mine", NF4, UE5M3, 16), axis=axis)


def test_pairs_follow_the_quantized_axis_and_every_bound():
    """Scaled elements of MX4 at every midpoint, at 1, and beside them, beside small and large partners."""
    x = pairs_at_bounds(np.dtype(np.float32))
    r = fp4kit.custom_recipe("mine", MX4, E8M0, 16, scale_rounding="down")
    agree(fp4kit.quantize, x, r)
    agree(fp4kit.quantize, np.asfortranarray(x.T), r, axis=0)
    agree(fp4kit.quantize, x.astype(ml_dtypes.bfloat16), r, hadamard=True)


def test_stochastic_rounding_and_hadamard():
    x = np.random.default_rng(2).standard_normal((64, 128), dtype=np.float32)
    r = fp4kit.custom_recipe("mine", E2M1, UE5M3, 16)
    agree(fp4kit.quantize, x, r, rounding="stochastic", seed=7)
    agree(fp4kit.quantize, x, r, hadamard=True)
    agree(fp4kit.fake_quantize, x, fp4kit.custom_recipe("mine", NF4, UE5M3, 16))


@pytest.mark.parametrize("scale", [UE5M3, E4M3, E8M0, E6M2, E3M2], ids=repr)
def test_pieces_hold_every_float(scale):
    """The tables give the specification's codes on both sides of every bound, and at random numbers."""
    r = fp4kit.custom_recipe("mine", E4M3, scale, 16, scale_rounding="up")
    bounds, codes, _, scale_bounds, scale_codes, _ = tables_of(r).arrays
    rng = np.random.default_rng(0)
    one = TensorScale(ONE, ONE, ONE)
    unit = replace(r, element=NF4)  # the largest value of NF4 is 1
    for first, limits, table, specified in (
        (-0x7F800001, bounds, codes, lambda x: encode(x, E4M3)),
        (0, scale_bounds, scale_codes, lambda x: BLOCK_RULES["amax_up"].code(x, one, unit, x.dtype)),
    ):
        used = limits[limits < 0x7FFFFFFF].astype(np.int64)
        keys = np.concatenate([used, used - 1, rng.integers(first, 0x7F800001, 1 << 16), [first, 0x7F800000]])
        bits = keys.astype(np.int32)
        x = (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(np.float32)
        assert np.array_equal(table[np.searchsorted(used, keys, side="right")], specified(x))


@pytest.mark.parametrize(
    "recipe",
    [
        replace(fp4kit.custom_recipe("mine", E4M3, E4M3, 32), nan_is_max=True),
        fp4kit.custom_recipe("mine", INT8, E4M3, 3),
        fp4kit.custom_recipe("mine", E2M1, ElementFormat("Codebook", 4, 3, 7, specials="nan"), 32),
    ],
    ids=["nan_is_max", "odd blocks", "a scale format named Codebook"],
)
def test_fields_that_other_formats_do_not_fit(recipe):
    """The engine makes tables from a copy of the recipe with another element format, which all recipes must allow."""
    x = np.random.default_rng(0).standard_normal((2000, recipe.block_size)).astype(np.float32)
    agree(fp4kit.dequantize, agree(fp4kit.quantize, x, recipe))
