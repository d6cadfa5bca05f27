"""Test the amax rules against their definition: ElementFormat.encode rounds scales, and nextafter those of 16 bits."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E3M2, E4M3, E5M2, E8M0, NF4, ElementFormat
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import encode_scale
from fp4kit.reference.tensor_rules import ONE, TensorScale, tensor_scale

UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
BIASED = ElementFormat("E4M3B11", 4, 3, 11, specials="nan")
UE4M0 = ElementFormat("UE4M0", 4, 0, 3, signed=False)
FORMATS = (UE5M3, BIASED, UE4M0, E3M2, E4M3, E5M2, E8M0)
F32 = np.dtype(np.float32)
ROUNDINGS = {"amax": ("rn", "rn"), "amax_up": ("rp", "rp"), "amax_down": ("rz", "rz")}


def numbers(fmt):
    """Return float32 numbers >= 0: every value of a format, every midpoint, and the neighbors of both."""
    v = fmt.magnitudes.astype(np.float32)
    with np.errstate(over="ignore"):
        grid = np.concatenate([v, fmt.midpoints.astype(np.float32), v[-1:] * np.float32(1.5), [0, 1e-45, 1e-38]])
        grid = np.concatenate([grid, np.nextafter(grid, np.float32(np.inf)), np.nextafter(grid, np.float32(0))])
    return np.unique(np.append(grid, [np.float32(3e38), np.inf])).astype(np.float32)


@together("fmt", FORMATS)
@together("rounding", ["rn", "rp", "rz"])
def test_scales_are_rounded_as_single_numbers(fmt, rounding):
    x = numbers(fmt)
    assert_same_bits(encode_scale(x, fmt, rounding), fmt.encode(x, rounding))
    assert encode_scale(np.float32([np.nan]), fmt, rounding).tolist() == [fmt.nan_code]


@together("fmt", FORMATS)
@together("name", ROUNDINGS)
def test_codes_and_factors(fmt, name):
    r = replace(fp4kit.custom_recipe("mine", NF4, fmt, 16), block_rule=name)
    amax = numbers(fmt)
    one = TensorScale(ONE, ONE, ONE)
    with np.errstate(all="ignore"):
        codes = BLOCK_RULES[name].code(amax, one, r, F32)
        factors = BLOCK_RULES[name].factor(codes, amax, one, r, F32)
        scales = fmt.decode(codes)
    assert_same_bits(codes, fmt.encode(amax, ROUNDINGS[name][0]))  # the largest value of NF4 is 1
    assert_same_bits(factors, np.float32(1) / np.maximum(scales, np.float32(1e-38)))


def test_formula_of_two_levels():
    """quantize and dequantize follow the formulas in the docstring of custom_recipe, with a tensor scale."""
    r = fp4kit.custom_recipe("mine", E2M1, UE5M3, 16, tensor_scale=True, scale_rounding="up")
    x = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    q = fp4kit.quantize(x, r)
    t = np.abs(x).max() / (np.float32(6) * UE5M3.max)
    assert q.tensor_scale == t
    amax = np.abs(x).reshape(8, 4, 16).max(-1)
    codes = UE5M3.encode(amax / np.float32(6) * (np.float32(1) / t), "rp")
    assert_same_bits(q.block_scale, codes)
    scale = UE5M3.decode(codes) * t
    elements = E2M1.encode(x.reshape(8, 4, 16) * (np.float32(1) / scale)[..., None])
    assert_same_bits(fp4kit.unpack(q.packed), elements.reshape(8, 64))
    values = E2M1.decode(elements) * scale[..., None]
    assert_same_bits(fp4kit.dequantize(q), values.reshape(8, 64))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_scales_of_16_bits(dtype):
    name, largest = np.dtype(dtype).name, np.float32(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800000, 4096, dtype=np.int32)
    amax = np.concatenate([bits.view(np.float32), rng.uniform(0, 7e4, 4096).astype(np.float32), [0, largest, np.inf]])
    amax = np.append(amax, rng.integers(0, np.int16(0x7BFF), 2048, dtype=np.int16).view(dtype).astype(np.float32))
    found = {}
    for suffix in ("", "_up", "_down"):
        r = replace(fp4kit.custom_recipe("mine", NF4, name, 16), tensor_rule=f"amax_{name}{suffix}")
        found[suffix] = tensor_scale(amax, r, F32)
        assert_same_bits(
            found[suffix].decode, found[suffix].decode.astype(dtype).astype(np.float32)
        )  # is exact in dtype
        assert_same_bits(found[suffix].encode, np.float32(1) / np.maximum(found[suffix].decode, np.float32(1e-38)))
        assert np.isnan(tensor_scale(np.float32(np.nan), r, F32).decode)
    near, up, down = (found[suffix].decode for suffix in ("", "_up", "_down"))
    inside = amax <= largest
    assert (down[inside] <= amax[inside]).all() and (up[inside] >= amax[inside]).all()
    assert (up[~inside] == largest).all() and (down[~inside] == largest).all() and (near[~inside] == largest).all()
    bits = [part[inside].astype(dtype).view(np.int16).astype(int) for part in (down, up)]
    assert (bits[1] - bits[0] == (down != up)[inside]).all()  # neighbors, or the number itself
    assert_same_bits(near[inside], np.minimum(amax[inside].astype(dtype).astype(np.float32), largest))


def test_blocks_of_zeros_and_tiny_blocks():
    x = np.zeros((1, 48), np.float32)
    x[0, 16:] = 1e-40  # a scale of 1e-40 counts as 1e-38
    q = fp4kit.quantize(x, fp4kit.custom_recipe("mine", NF4, "float32", 16))
    assert q.tensor_scale[0, 0] == 0 and np.unique(fp4kit.unpack(q.packed)[0, :16]).tolist() == [7]
    assert np.isfinite(fp4kit.dequantize(q)).all()
    up = fp4kit.quantize(x, fp4kit.custom_recipe("up", NF4, UE5M3, 16, scale_rounding="up"))
    assert up.block_scale.tolist() == [[0, 1, 1]]
    near = fp4kit.quantize(x, fp4kit.custom_recipe("near", NF4, UE5M3, 16))
    assert near.block_scale.tolist() == [[0, 0, 0]] and not fp4kit.dequantize(near).any()


@pytest.mark.parametrize("scale, expected", [("float32", np.nan), (E4M3, np.nan), (E3M2, 28.0)])
def test_nan_elements(scale, expected):
    x = np.ones((1, 32), np.float32)
    x[0, 3] = np.nan
    q = fp4kit.quantize(x, fp4kit.custom_recipe("mine", NF4, scale, 16))
    found = q.tensor_scale[0, 0] if q.block_scale is None else q.recipe.scale.decode(q.block_scale)[0, 0]
    np.testing.assert_equal(found, np.float32(expected))
    assert np.isfinite(fp4kit.dequantize(q)[0, 16:]).all()
    ignoring = replace(q.recipe, amax_nan="ignore", nan_code=7)
    assert fp4kit.dequantize(fp4kit.quantize(x, ignoring))[0, :5].tolist() == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39])
def test_given_scales_near_zero_count_as_1e_38(scale):
    """Elements of 0 stay 0, and others are multiplied with a finite factor."""
    x = np.float32([[0, -0.0, 1e-39, 5e-39, -1e-38, 1] + [0] * 10])
    r = fp4kit.custom_recipe("mine", NF4, "float32", 16)
    q = fp4kit.quantize(x, r, tensor_scale=np.float32([[scale]]))
    assert q.tensor_scale[0, 0] == np.float32(scale)
    assert_same_bits(fp4kit.unpack(q.packed), NF4.encode(x * (np.float32(1) / np.float32(1e-38))))
    assert fp4kit.unpack(q.packed)[0, :2].tolist() == [7, 7]
