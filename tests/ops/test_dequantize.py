"""Test dequantize: values are codes times scales, multiplied in the producer's order.

Quantizing the values again, and scaling by powers of two, must change nothing.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BF16, FINITE, NAMES, ORDINARY, codes_of, element_values, in_float32, scale_values

import fp4kit
from fp4kit.evidence.golden.check import all_bytes
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E8M0
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.codec import decode

HALF = {name for name in NAMES if RECIPES[name].decode_rule == "e8m0_float16"}
MX = [name for name in NAMES if RECIPES[name].scale is E8M0 and name not in HALF]
recipes = pytest.mark.parametrize("name", NAMES)


def same_values(a, b):
    """Return whether two arrays are equal as numbers: -0 equals +0, and NaN equals NaN."""
    return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HALF])
@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE)
def test_values_are_code_times_scales(name, x):
    """dequantize returns decode(code) * block_scale * tensor_scale, up to the roundings of the decode rule.

    x is divided by 4096, because some intermediate products overflow for large amaxes:

    - fouroversix computes code * block_scale * tensor_amax, which overflows for an amax above FLT_MAX / 2688.
    - TE computes tensor_amax * block_scale, which overflows for an amax above FLT_MAX / 448.
    """
    r = in_float32(RECIPES[name])
    q = fp4kit.quantize(x.astype(np.float32) / 4096, r)
    exact = element_values(q).astype(np.float64)
    if r.scale is not None:
        scales = scale_values(q).astype(np.float64)
        if name == "mxfp8-comfy-kitchen":  # scale code 0 stands for 0
            scales[q.block_scale == 0] = 0
        if r.decode_rule == "e8m0_nncf":  # scales from 2^16 on are infinite in float16
            with np.errstate(over="ignore"):
                scales = scales.astype(np.float16).astype(np.float64)
        with np.errstate(invalid="ignore"):
            exact *= np.repeat(scales, r.block_size, axis=1)
    ours = fp4kit.dequantize(q)
    if q.tensor_scale is None:
        assert same_values(ours, exact.astype(np.float32))  # one product, exact or rounded once
        return
    scale = np.asarray(q.tensor_scale, np.float64)
    scale = {"tensor": scale, "row": scale.reshape(-1, 1)}.get(r.tensor_scaling, scale)
    exact *= np.repeat(scale, r.block_size, axis=1) if r.tensor_scaling == "block" else scale
    normal = np.abs(exact) >= 2.0**-100
    assert normal.mean() > 0.05
    assert np.all(np.abs(ours - exact)[normal] <= 4 * 2.0**-24 * np.abs(exact)[normal])  # at most four roundings


def test_the_order_of_decoding():
    """dequantize multiplies in float32 in the order of each producer, which decides the last bit of a value."""

    def parts(name):
        q = fp4kit.quantize(ORDINARY, name)
        values = decode(codes_of(q), q.recipe.element)
        scales = (
            None
            if q.block_scale is None
            else np.repeat(decode(q.block_scale, q.recipe.scale), q.recipe.block_size, axis=1)
        )
        return fp4kit.dequantize(q), values, scales, q.tensor_amax, q.tensor_scale

    y, values, scales, amax, _ = parts("nvfp4-te")
    assert_same_bits(y, values * (scales * amax * (np.float32(1) / np.float32(2688))))
    y, values, scales, _, tensor_scale = parts("nvfp4-modelopt")
    assert_same_bits(y, (values + np.float32(0)) * (scales * tensor_scale))  # code 8 is +0
    y, values, scales, amax, _ = parts("nvfp4-compressed-tensors")
    assert_same_bits(y, values * (scales / (np.float32(1) / amax * np.float32(2688))))
    y, values, _, amax, _ = parts("int8-modelopt")
    assert_same_bits(y, values / (np.float32(127) / amax))
    y, values, _, amax, _ = parts("fp8-modelopt")
    assert_same_bits(y, values * (np.float32(1) / (np.float32(448) / amax)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("variant", ["", "-static", "-static-4over6", "-mse"])
def test_code_8_is_a_plain_zero_in_nvfp4_of_modelopt(variant, dtype, either_engine):
    """With the decode rule "modelopt", code 8 decodes as +0 * scale, as in NVFP4QTensor.dequantize.

    Other rules decode it as -0 * scale, so the sign of the result is opposite. All other codes are unaffected.
    """
    r = RECIPES[f"nvfp4-modelopt{variant}"]
    q = all_bytes(r, np.dtype(dtype))
    found, product = (
        fp4kit.dequantize(replace(q, recipe=replace(r, decode_rule=rule))) for rule in ("modelopt", "product")
    )
    assert r.decode_rule == "modelopt"
    is_eight = fp4kit.unpack(q.packed) == 8
    assert_same_bits(found[~is_eight], product[~is_eight])
    is_number = ~np.isnan(product[is_eight].astype(np.float32))
    assert (np.signbit(found[is_eight]) != np.signbit(product[is_eight]))[is_number].all() and is_number.sum() == 254


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("bits", [4, 8])
def test_byte_255_is_infinite_in_mx_of_modelopt(bits, dtype, either_engine):
    """Scale byte 255 is infinite, because exp2(255 - 127) overflows float32; 0 times it is NaN.

    In MXFP4QTensor, code 8 stays -0.
    """
    q = all_bytes(RECIPES[f"mxfp{bits}-modelopt"], np.dtype(dtype))
    found, ocp = (
        fp4kit.dequantize(replace(q, recipe=replace(q.recipe, decode_rule=rule))) for rule in ("e8m0_infinite", "e8m0")
    )
    assert q.recipe.decode_rule == "e8m0_infinite"
    assert same_values(found[:255], ocp[:255]) and (bits == 8 or np.signbit(found[127, 8]))
    values = decode(codes_of(q), q.recipe.element)[255]
    expected = np.where(values == 0, np.float32(np.nan), np.copysign(np.float32(np.inf), values))
    assert same_values(found[255], np.where(np.isnan(values), values, expected))


@recipes
def test_dequantize_to_other_dtypes_rounds_the_float32_value(name):
    """Recipes with decode rules for 16-bit results round the scales first, to the dtype of the result."""
    q = fp4kit.quantize(ORDINARY, name)
    exact = fp4kit.dequantize(q)
    assert exact.dtype == np.float32
    for dtype in (np.float16, BF16):
        if DECODE_RULES[q.recipe.decode_rule].bfloat16:
            scales = q.tensor_scale.astype(dtype).astype(np.float32)
            if q.block_scale is not None:
                scales = (decode(q.block_scale, q.recipe.scale) * scales).astype(dtype).astype(np.float32)
                scales = np.repeat(scales, q.recipe.block_size, axis=1)
            exact = decode(codes_of(q), q.recipe.element) * scales
        with np.errstate(over="ignore"):
            assert_same_bits(fp4kit.dequantize(q, dtype), exact.astype(dtype))


# These recipes raise amaxes below a smallest value, so tiny inputs do not scale with their amax.
WITH_SMALLEST_AMAX = (
    *("mxfp4-sglang-kv", "mxfp4-deepgemm", "mxfp8-deepgemm", "mxfp4-qwix", "mxfp8-qwix"),
    *("mxfp8-deepseek-v4", "mxfp4-fp-quant-quest"),
)


@pytest.mark.parametrize("name", [name for name in MX if name not in WITH_SMALLEST_AMAX])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_powers_of_two_shift_mx_scales_only(name, seed):
    x = np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)
    k = np.arange(-60, 61)[:, None, None]
    q, scaled = fp4kit.quantize(x, name), fp4kit.quantize(np.ldexp(x, k), name)
    assert_same_bits(scaled.packed, np.broadcast_to(q.packed, scaled.packed.shape))
    assert_same_bits(scaled.block_scale, (q.block_scale.astype(int) + k).astype(np.uint8))
    assert_same_bits(fp4kit.dequantize(scaled), np.ldexp(fp4kit.dequantize(q), k))


# Recipes with a tensor scale whose codes stay if x is scaled by a power of two. Those with a smallest scale are left
# out. Amaxes below must exceed 2^-24, the smallest amax of Model-Optimizer's FP8 and INT rules.
WITH_SMALLEST_SCALE = ("int4-qat", "fp8-deepseek-v4", "fp8-deepgemm-block")
SHIFTABLE = [name for name in NAMES if RECIPES[name].tensor_scaling != "none" and name not in WITH_SMALLEST_SCALE]


@pytest.mark.parametrize("name", SHIFTABLE)
@settings(max_examples=10)
@given(k=st.integers(-10, 60), seed=st.integers(0, 2**32))
def test_powers_of_two_shift_tensor_scales_only(name, k, seed):
    x = np.random.default_rng(seed).standard_normal((32, max(32, RECIPES[name].block_size))).astype(np.float32)
    q, scaled = fp4kit.quantize(x, name), fp4kit.quantize(np.ldexp(x, k), name)
    assert_same_bits(scaled.packed, q.packed)
    assert_same_bits(scaled.tensor_amax, np.ldexp(q.tensor_amax, k))
    assert same_values(fp4kit.dequantize(scaled), np.ldexp(fp4kit.dequantize(q), k))
    if q.block_scale is not None:
        assert_same_bits(scaled.block_scale, q.block_scale)
