"""Test amaxes of -0, which `-x.min()` gives for an array of zeros.

All bits of the result, tensor_amax included, must be those that an amax of +0 gives.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from engine_cases import assert_equal
from inputs import ordinary

import fp4kit
from fp4kit.call.inputs import takes_e8m0_amaxes, tensor_amax_shape
from fp4kit.ops import engines as call_cache
from fp4kit.quantized.parts import scale_shape
from fp4kit.recipes import RECIPES

X = ordinary(0, (32, 128))
X[0] = 0
SCALED = [name for name, r in RECIPES.items() if r.tensor_scaling != "none"]
STATIC = [name for name, r in RECIPES.items() if r.static or takes_e8m0_amaxes(r)]


def zeros(shape):
    """Return two arrays of amaxes of the given shape: all +0, and all -0."""
    return np.zeros(shape, np.float32), np.full(shape, -0.0, np.float32)


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


@pytest.mark.parametrize("name", SCALED)
def test_minus_zero_tensor_amax(name, either_engine):
    r = RECIPES[name]
    forms = [zeros(tensor_amax_shape(X.shape, r))]
    if r.tensor_scaling == "tensor":
        forms += [(0.0, -0.0), (np.float32(0), np.float32(-0.0)), (np.float64(0), np.float64(-0.0))]
    for zero, negative in forms:
        same_for_both(lambda amax: fp4kit.fake_quantize(X, name, tensor_amax=amax), zero, negative)
        if not r.fake_only:
            same_for_both(lambda amax: fp4kit.quantize(X, name, tensor_amax=amax), zero, negative)


def test_minus_zero_replaces_the_amax_in_out(either_engine):
    """A cached call that writes into out also stores +0 as the amax."""
    out = fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.float32(3))
    expected = fp4kit.quantize(X, "nvfp4-te", tensor_amax=0.0)
    for _ in range(2):
        fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.full((), -0.0, np.float32), out=out)
        assert_equal(out, expected)


@pytest.mark.parametrize("name", ["nvfp4-mlx-cpu-global", "nvfp4-modelopt", "int8-modelopt"])
def test_minus_zero_amaxes_of_experts(name, either_engine):
    x, amaxes = np.stack([X, X, X]), np.float32([[2, 0, 1], [2, -0.0, 1]])
    same_for_both(lambda amax: fp4kit.quantize(x, name, tensor_amax=amax), *amaxes)


def test_minus_zero_for_both_directions(either_engine):
    same_for_both(lambda amax: fp4kit.quantize_both(X, "nvfp4-modelopt", tensor_amax=amax), 0.0, -0.0)


@pytest.mark.parametrize("name", STATIC)
def test_minus_zero_block_amaxes(name, either_engine):
    r = RECIPES[name]
    given = np.abs(ordinary(1, scale_shape(X.shape, r)))
    given.ravel()[::3] = 0
    negative = np.where(given == 0, np.float32(-0.0), given)
    options = {} if r.tensor_scaling == "none" else {"tensor_amax": given.max()}
    same_for_both(lambda amax: fp4kit.fake_quantize(X, name, block_amax=amax, **options), given, negative)
    if not r.fake_only:
        same_for_both(lambda amax: fp4kit.quantize(X, name, block_amax=amax, **options), given, negative)


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "nvfp4-mlx-cpu-global", "int8-modelopt-channel"])
def test_minus_zero_amaxes_of_groups(name):
    """Amaxes of -0 count as +0 in grouped calls, and in plans also if they are written after the plan was made.

    A plan reads its amax arrays when it runs.
    """
    zero, negative = zeros(tensor_amax_shape(X.shape, RECIPES[name]))
    same_for_both(lambda amax: fp4kit.quantize_grouped([X, X], name, tensor_amax=[amax, amax]), zero, negative)
    amaxes = [np.ones_like(zero), np.ones_like(zero)]
    plan = fp4kit.GroupedPlan([X, X], name, tensor_amax=amaxes)
    plan.quantize()
    amaxes[1][...] = negative
    assert_equal(plan.quantize(), fp4kit.quantize_grouped([X, X], name, tensor_amax=[amaxes[0], zero]))
    assert_equal(plan.amax(), [amaxes[0], zero])


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-modelopt", "nvfp4-qwix", "mxfp4-ocp"])
def test_minus_zero_amax_of_shards(name):
    r = RECIPES[name]
    amax = fp4kit.partial_amax(X.ravel(), X.shape, 0, name)
    amax[0, ::2] = 0
    negative = np.where(amax == 0, np.float32(-0.0), amax)

    def cast(blocks, **options):
        out = np.zeros((32, 64), np.uint8)
        fp4kit.partial_cast(X.ravel(), out, blocks, X.shape, 0, name, **options)
        return out

    assert_equal(cast(negative), cast(amax))
    if r.tensor_scaling != "none":
        assert_equal(cast(negative, tensor_amax=-0.0), cast(amax, tensor_amax=0.0))
    assert np.signbit(negative).any()  # the arrays of the caller are not written to


def test_minus_zero_amax_of_a_search(either_engine):
    search = partial(fp4kit.search_scales, X, "nvfp4-modelopt-static")
    same_for_both(lambda amax: search(tensor_amax=amax), 0.0, -0.0)


def test_subnormal_amaxes_in_other_arithmetic_modes():
    """If the processor flushes subnormals, a subnormal amax must still be used and returned unchanged."""
    amax = np.float32([1e-42] * 32)[:, None]
    given = amax.copy()
    q = fp4kit.quantize(X, "nvfp4-te-rowscaled", tensor_amax=given)
    assert_equal(q.tensor_amax, amax[:, 0])
    assert_equal(given, amax)
