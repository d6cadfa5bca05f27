"""Test the compiled engine on formats of one's own: drawn recipes and arrays, against the specification."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, VIEWS, agree, as_large_ones, counted
from exhaustive import exhaustive

import fp4kit
from fp4kit.cpu.own_format import tables_of
from fp4kit.formats import (
    BNB_FP4,
    E1M2,
    E2M1,
    E2M3,
    E3M0,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FLOATS,
    INT4,
    INT8,
    NF4,
    Codebook,
    ElementFormat,
)
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import ONE, TensorScale

pytestmark = NEEDS_ENGINE
UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
ELEMENTS = (NF4, BNB_FP4, E2M1, E1M2, E3M0, INT4, INT8, E4M3, E5M2, E2M3, E3M2)
SCALES = (UE5M3, E4M3, E8M0, E3M2, E5M2, "float32", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def small_arrays_like_large_ones(monkeypatch):
    as_large_ones(monkeypatch)


def drawn_element(rng):
    """Return an element format: one of ELEMENTS, or a random Codebook that may repeat values or lack a zero."""
    if rng.random() < 0.6:
        return ELEMENTS[rng.integers(len(ELEMENTS))]
    table = rng.standard_normal(rng.integers(2, 17)) * 2.0 ** rng.integers(-20, 20)
    table[0] = 0 if rng.random() < 0.5 else table[-1]
    return Codebook(table, name="Drawn")


def drawn_scale(rng):
    """Return a scale format: one of SCALES, or a random float format, with or without a sign."""
    if rng.random() < 0.7:
        return SCALES[rng.integers(len(SCALES))]
    if rng.random() < 0.5:
        return ElementFormat("Biased", 4, 3, int(rng.integers(-3, 20)), str(rng.choice(["none", "nan", "ieee"])))
    bits = int(rng.integers(2, 7)), int(rng.integers(0, 3))
    return ElementFormat("Unsigned", *bits, int(rng.integers(0, 30)), signed=False)


def drawn_recipe(rng):
    """Return a random recipe with amax rules."""
    element, scale, rounding = drawn_element(rng), drawn_scale(rng), str(rng.choice(["nearest", "up", "down"]))
    columns = int(rng.choice([2, 16, 32, 64, 96, 128]))
    if isinstance(scale, str):
        rounding = "nearest" if scale == "float32" else rounding
        r = fp4kit.custom_recipe("mine", element, scale, columns, scale_rounding=rounding)
    else:
        block, has_tensor_scale = (int(rng.choice([1, 1, 1, 4, 16])), columns), bool(rng.random() < 0.3)
        r = fp4kit.custom_recipe("mine", element, scale, block, scale_rounding=rounding, tensor_scale=has_tensor_scale)
        if has_tensor_scale and block[0] == 1 and rng.random() < 0.5:
            r = replace(r, tensor_scaling="row")
    changes = {"amax_nan": str(rng.choice(["propagate", "ignore"]))}
    if element.is_integer:
        changes["narrow"] = bool(rng.random() < 0.5)
    elif not isinstance(element, Codebook):
        changes |= {
            "rounding": str(rng.choice(["rn", "rz", "rna", "rnz"])),
            "sign": str(rng.choice(["signbit", "negative", "not_positive", "unsigned_zero"])),
        }
    return replace(r, **changes)


def drawn_array(rng, r):
    """Return a random matrix with some of: rows of very different sizes, zeros, -0, ties, NaN, infinities, extremes."""
    dtype = FLOATS[rng.integers(3)]
    rows, columns, reach = int(rng.choice([1, 3, 16, 33])), int(rng.integers(1, 7)) * r.block_size, 40
    reach = 10 if dtype == np.float16 else reach
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-reach, reach, (rows, 1))
    if rng.random() < 0.3:
        x[rng.random(x.shape) < 0.3] *= rng.choice([0.0, -0.0])
    if rng.random() < 0.3:
        x *= rng.random((rows, 1)) < 0.5
    if rng.random() < 0.3:
        x = np.round(x * 4) / 4
    x = x.astype(dtype)
    if rng.random() < 0.2:
        x[rng.random(x.shape) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
    if rng.random() < 0.2:
        x[0] = ml_dtypes.finfo(dtype).max if rng.random() < 0.5 else ml_dtypes.finfo(dtype).smallest_subnormal
    return x


@pytest.mark.parametrize("seed", [*range(25), *exhaustive(range(25, 1000))])
def test_drawn_calls(seed):
    rng = np.random.default_rng(seed)
    r = drawn_recipe(rng)
    with np.errstate(all="ignore"):
        x = drawn_array(rng, r)
        q = agree(fp4kit.quantize, x, r)
        agree(fp4kit.dequantize, q)
        agree(fp4kit.dequantize, q, dtype=np.float16)
        agree(fp4kit.fake_quantize, x, r)
        packed = rng.integers(0, 256 if r.element.bits in (4, 8) else 64, q.packed.shape, dtype=np.uint8)
        other = replace(q, packed=packed)
        if q.block_scale is not None:
            codes = rng.integers(0, 2**r.scale.bits, q.block_scale.shape, dtype=np.uint8)
            other = replace(other, block_scale=codes)
        agree(fp4kit.dequantize, other)
        agree(fp4kit.quantize, x, r, block_scale=other.block_scale, tensor_scale=other.tensor_scale)
        if r.block_rule and r.block_rows == 1:
            amax = rng.random(q.block_scale.shape, np.float32) * np.float32(3)
            agree(fp4kit.quantize, x, r, block_amax=amax)


@pytest.mark.parametrize("element", [NF4, E2M1, INT8], ids=repr)
@pytest.mark.parametrize("scale", [UE5M3, "float16"], ids=str)
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


def test_stochastic_rounding_and_hadamard():
    x = np.random.default_rng(2).standard_normal((64, 128), dtype=np.float32)
    r = fp4kit.custom_recipe("mine", E2M1, UE5M3, 16)
    agree(fp4kit.quantize, x, r, rounding="stochastic", seed=7)
    agree(fp4kit.quantize, x, r, hadamard=True)
    agree(fp4kit.fake_quantize, x, fp4kit.custom_recipe("mine", NF4, UE5M3, 16))


@pytest.mark.parametrize("scale", [UE5M3, E4M3, E8M0, E3M2], ids=repr)
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
