"""Test every block amax of float16 and bfloat16 under the rules of producers that compute in these dtypes.

The producers' steps are restated here from their sources.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, codes_of

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import decode, encode

F16 = np.dtype(np.float16)


def every_amax(dtype) -> np.ndarray:
    """Return all positive finite numbers of a 16-bit dtype in ascending order."""
    return np.arange(1, int(np.array(np.inf, dtype).view(np.uint16)), dtype=np.uint16).view(dtype)


def blocks_of(amaxes: np.ndarray) -> np.ndarray:
    """Return a block of 32 elements per amax: the amax, fractions of it of both signs, and zeros."""
    rng = np.random.default_rng(8)
    x = (rng.uniform(-1, 1, (len(amaxes), 32)) * amaxes.astype(np.float64)[:, None]).astype(amaxes.dtype)
    x[:, :4] = np.stack([amaxes, -amaxes, 0 * amaxes, -0 * amaxes], axis=1)
    return x


# ---- compressed-tensors ----


def masked_scales(amaxes: np.ndarray, element) -> np.ndarray:
    """Return the exponents of block scales, by the steps of compressed-tensors.

    Its functions round_to_power_2 and generate_mx_scales round the bits of a 16-bit amax to a power of two. If a scale
    underflows to 0 in the dtype, it becomes 1, and its exponent is 0.
    """
    dtype = amaxes.dtype
    mantissa = {F16: 10, BF16: 7}[dtype]
    add = 1 << mantissa - (3 if element.bits == 6 else 1) - 1
    rounded = ((amaxes.view(np.uint16) + add) >> mantissa << mantissa).astype(np.uint16).view(dtype).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.maximum(np.floor(np.log2(rounded)) - element.emax, -127)
    is_zero = np.exp2(exponents).astype(dtype) == 0
    return np.where(is_zero, 0, exponents)  # a scale of 0 is replaced by 1


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_scales_of_compressed_tensors(bits, dtype, either_engine):
    name = f"mxfp{bits}-compressed-tensors"
    amaxes, r = every_amax(dtype), RECIPES[name]
    amaxes = amaxes[amaxes < (1.9375 if bits == 6 else 1.75) * 2.0 ** (15 if dtype == F16 else 127)]
    q = fp4kit.quantize(blocks_of(amaxes), name)
    exponents = masked_scales(amaxes, r.element)
    np.testing.assert_array_equal(q.block_scale[:, 0], exponents + 127)
    if dtype == F16:
        is_lost = amaxes < (1 - 2.0 ** -(4 if bits == 6 else 2)) * 2.0**-14
        assert (q.block_scale[is_lost] == 127).all() and is_lost.sum() == (959 if bits == 6 else 767)
        codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
        assert bits == 8 or not (codes[is_lost] & (r.element.sign_bit - 1)).any()


# ---- auto-round ----

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BY_MX = [(4, ""), (4, "-rceil"), (4, "-rceil-v2"), (8, ""), (8, "-rceil")]


def without_packing(x: np.ndarray, name: str):
    """Return x quantized by auto-round's fake quantizer, before its packing computes the codes again.

    name: the recipe, which includes the packing.
    """
    return fp4kit.quantize(x, replace(RECIPES[name], repacked=False))


def pack_fp4(y: np.ndarray) -> np.ndarray:
    """Return packed codes, by the steps of _pack_fp4_to_uint8: the first of the smallest distances, and the sign bit.

    For NaN, the first distance counts as smallest, and the sign bit is that which x86 gives.
    """
    distance = np.abs(np.abs(y.astype(np.float64))[..., None] - FP4)
    codes = np.argmin(np.where(np.isnan(distance), 0, distance), axis=-1)
    return codes | (np.signbit(y) | np.isnan(y)) << 3


def pack_fp8(y: np.ndarray) -> np.ndarray:
    """Return codes as y.to(float8_e4m3fn) does for values of that format: saturating, and FF for the NaN of x86."""
    codes = np.clip(y.astype(np.float64), -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(y), 0xFF, codes)


@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(("bits", "rule"), BY_MX)
def test_auto_round_packs_values_of_the_dtype(bits, rule, dtype, either_engine):
    """QuantLinear.pack of auto-round divides T(value) by T(2^e), where T rounds to the dtype.

    In float16 both may be 0 or infinite; in any dtype values may be infinite.
    """
    name = f"mxfp{bits}-auto-round{rule}"
    amaxes = every_amax(BF16 if dtype == np.float32 else dtype)
    amaxes = np.concatenate([amaxes[:700], amaxes[5000:5300], amaxes[-1100:]]).astype(dtype)
    first, q = without_packing(blocks_of(amaxes), name), fp4kit.quantize(blocks_of(amaxes), name)
    assert_same_bits(q.block_scale, first.block_scale)
    with np.errstate(all="ignore"):
        scale = np.exp2(first.block_scale.astype(np.float64) - 127).astype(dtype)
        quotients = (fp4kit.dequantize(first, dtype) / scale).astype(dtype)
    np.testing.assert_array_equal(codes_of(q), (pack_fp4 if bits == 4 else pack_fp8)(quotients))
    tiny = np.flatnonzero(scale[:, 0] == 0)
    assert len(tiny) == ({"": 3, "-rceil": 3, "-rceil-v2": 3} if bits == 4 else {"": 255, "-rceil": 224})[rule] * (
        dtype == F16
    )
    overflows = np.isinf(fp4kit.dequantize(first, dtype).astype(np.float32)).any(axis=1)
    assert overflows.any() == (rule != "")


@pytest.mark.parametrize(("bits", "rule", "top"), [(4, "-rceil", 3), (4, "-rceil-v2", 3), (8, "-rceil", 224)])
def test_a_ratio_that_underflows_makes_nan(bits, rule, top, either_engine):
    """If amax / max underflows to 0 in float32, auto-round gives NaN.

    The logarithm is -inf, of which its straight-through ceiling makes NaN.
    """
    name = f"mxfp{bits}-auto-round{rule}"
    amaxes = (np.arange(1, 400, dtype=np.uint32)).view(np.float32)
    q = fp4kit.quantize(blocks_of(amaxes), name)
    is_lost = (codes_of(q) == (8 if bits == 4 else 0xFF)).all(axis=1)
    assert (q.block_scale == 0).all() and is_lost[:top].all() and not is_lost[top:].any()


# (dtype, its smallest positive number, tensor amaxes)
SUBNORMAL = [
    (F16, 2.0**-24, (23, 29, 101)),
    (BF16, 2.0**-133, (6.8e6, 2.0**30)),
]


@pytest.mark.parametrize(("dtype", "least", "tops"), SUBNORMAL, ids=str)
def test_auto_round_packs_nvfp4_of_subnormal_values(dtype, least, tops, either_engine):
    """auto-round's second pass starts from values that were rounded to the dtype.

    There, subnormal values are rounded or lost again.
    """
    rng, changed = np.random.default_rng(5), 0
    for top in tops:
        x = (rng.uniform(-1, 1, (256, 16)) * rng.integers(1, 17, (256, 1)) * least).astype(dtype)
        x[0, 0] = top * least
        first, q = without_packing(x, "nvfp4-auto-round"), fp4kit.quantize(x, "nvfp4-auto-round")
        with np.errstate(all="ignore"):
            scale = decode(q.block_scale, E4M3) * q.tensor_scale
            factor = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
            y = fp4kit.dequantize(first, dtype).astype(np.float32) * np.repeat(factor, 16, axis=1)
        y = np.where(np.isnan(y), np.float32(0), np.clip(y, -6, 6))
        np.testing.assert_array_equal(codes_of(q), encode(y, E2M1, "rn", "unsigned_zero"))
        changed += np.count_nonzero(codes_of(q) != codes_of(first))
    assert changed
