"""Test block rules: their names, zeros, NaN, float16 and user-defined formats. Recorded outputs test all else."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from inputs import BF16, codes_of
from together import together
from variants import TE_CODES, blocks_at_ties

import fp4kit
from fp4kit.evidence.golden.check import all_bytes
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E3M2, E4M3, E5M2, E6M2, E8M0, NF4, ElementFormat, unsigned
from fp4kit.layouts import pack_gguf, pack_mlx, unpack_gguf, unpack_mlx
from fp4kit.ops.engines import specification
from fp4kit.recipes import RECIPES, rules
from fp4kit.reference.arith import INV6
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import decode, encode, encode_scale, first_of_least
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.tensor_rules import ONE, TensorScale, tensor_scale

# Rules whose factor also depends on the amax in two cases: the exponent exceeded a byte, so that the scale byte wrapped
# around, or the amax is not finite.
WRAPPING = ("e8m0_mlx", "e8m0_mlx_0321")
F32 = np.dtype(np.float32)


def test_products_of_te_are_in_its_order():
    x = blocks_at_ties(F32)
    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=3)
    assert q.block_scale[:, 0].tolist() == TE_CODES
    encode_scale = tensor_scale(np.float32(3), RECIPES["nvfp4-te"], F32).encode
    assert encode(x.max(axis=1) * encode_scale * INV6, E4M3).tolist() == [code - 1 for code in TE_CODES]


@together("name", [name for name in BLOCK_RULES if not rules.BLOCK_RULES[name].reads_amax])
def test_a_factor_depends_on_the_code_and_on_zeros_alone(name):
    """The factor of a block's elements depends only on its scale code and on whether the block is zero.

    The engines rely on this: they have a table of factors per scale code and a test for zero blocks.
    """
    own = fp4kit.custom_recipe("mine", E2M1, E4M3, 16, tensor_scale=True)
    r = next((r for r in RECIPES.values() if r.block_rule == name), own)
    tensor = tensor_scale(np.float32(3.7), r, F32)
    codes = np.arange(256, dtype=np.uint8)
    factors = {}
    for amax in (0.0, 1e-45, 1e-38, 2.0**-126, 1e-30, 1.0, 3e38, np.inf, np.nan):
        with np.errstate(all="ignore"):
            factors[amax] = BLOCK_RULES[name].factor(codes, np.full(256, amax, np.float32), tensor, r, F32)
    for amax, factor in factors.items():
        is_zero = name.startswith("flashinfer") and r.flush and amax < 2.0**-126
        if name in WRAPPING:
            is_zero = not np.isfinite(amax)
            # Leave out scale bytes that may have wrapped around, which test_block_rules_gguf_mlx.py tests.
            factor = np.where((codes >= 234) & (0 < amax < 2.0**-125), factors[1.0], factor)
        assert_same_bits(factor, np.zeros(256, np.float32) if is_zero else factors[1.0])


@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 5}])
def test_nan_saturates_before_any_rounding(rounding):
    x = np.ones((1, 32), np.float32)
    x[0, 3:5] = np.nan, -np.nan
    assert fp4kit.quantize(x, "mxfp8-flashinfer", **rounding).packed[0, 3:5].tolist() == [E4M3.max_code] * 2
    assert fp4kit.quantize(x, "mxfp8-te", **rounding).packed[0, 3:5].tolist() == [E4M3.nan_code] * 2


def test_qwix_multiplies_by_rounded_reciprocals():
    """qwix multiplies by the float32 reciprocal of the scale instead of dividing, as XLA does.

    Elements are at midpoints of E2M1 times a scale of 1.875, whose rounded reciprocal is too large, so ties round up.
    """
    x = np.float32(1.875) * np.array([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] * 2], np.float32)
    q = agree(fp4kit.quantize, x, "nvfp4-qwix")
    assert fp4kit.unpack(q.packed)[0, :8].tolist() == [7, 0, 2, 3, 4, 5, 6, 7]
    assert fp4kit.recipe("nvfp4-qwix-float16") is fp4kit.recipe("nvfp4-qwix")


# Scale bytes for amaxes next to max * 2^k, from qwix 0.1.8 (JAX 0.10.2, on a CPU) and from TE's reference quantizer
# (PyTorch 2.13).
BESIDE_POWERS = [
    ("mxfp4-te", np.float32, 6 * 2.0**-60, {-1: 67, 0: 67, 3: 67, 14: 67, 30: 68}),
    ("mxfp4-qwix", np.float32, 6 * 2.0**-8, {-1: 119, 0: 119, 1: 119, 2: 120}),
    ("mxfp4-qwix", np.float16, 6 * 2.0**13, {1: 140, 2: 141, 3: 141, 5: 141}),
    ("mxfp8-qwix", np.float32, 448 * 2.0**-8, {-1: 119, 0: 119, 1: 119, 2: 120}),
]


@pytest.mark.parametrize("name, dtype, amax, codes", BESIDE_POWERS)
def test_scales_beside_powers_of_two(name, dtype, amax, codes):
    bits = np.dtype(f"i{np.dtype(dtype).itemsize}")
    x = np.zeros((len(codes), 32), dtype)
    x[:, 7] = (np.array(amax, dtype).view(bits) + np.array(list(codes), bits)).view(dtype)
    assert agree(fp4kit.quantize, x, name).block_scale[:, 0].tolist() == list(codes.values())


def test_quotients_of_sglang_underflow_in_the_dtype():
    """In SGLang, quotients may underflow in the dtype of the input.

    3e-8 is about 2^-25, half of the smallest float16, so it becomes 0.

    Every zero has code 8.
    """
    x = np.zeros((1, 32), np.float16)
    x[0, :2] = 6 * 2.0**12, 2.0**-13
    for dtype, code in ((np.float16, 8), (np.float32, 0)):
        q = agree(fp4kit.quantize, x.astype(dtype), "mxfp4-sglang-util")
        assert q.block_scale.tolist() == [[139]]
        assert fp4kit.unpack(q.packed)[0, :3].tolist() == [7, code, 8]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_qwix_flushes_subnormals(dtype):
    """In qwix, an amax of 1e-18 gives the scale 0, whose reciprocal is infinite.

    Normal numbers then saturate, and zeros become NaN, which has code 8.
    """
    x = np.zeros((1, 16), dtype)
    x[0, :6] = 1e-18, 2.0**-126, -(2.0**-125), 2.0**-127, -(2.0**-127), -0.0
    q = agree(fp4kit.quantize, x, "nvfp4-qwix")
    assert q.block_scale.tolist() == [[0]]
    assert fp4kit.unpack(q.packed)[0, :7].tolist() == [7, 7, 15, 8, 8, 8, 8]


UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
BIASED = ElementFormat("E4M3B11", 4, 3, 11, specials="nan")
UE4M0 = ElementFormat("UE4M0", 4, 0, 3, signed=False)
FORMATS = (UE5M3, BIASED, UE4M0, E3M2, E4M3, E5M2, E6M2, E8M0)
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
SUBNORMAL = [(F16, 2.0**-24, (23, 29, 101)), (BF16, 2.0**-133, (6.8e6, 2.0**30))]


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


NONE = TensorScale(ONE, ONE, ONE)


def rows_of(amaxes, name, dtype=np.float32):
    """Return one row per amax: the amax followed by zeros."""
    x = np.zeros((len(amaxes), RECIPES[name].length_multiple), dtype)
    x[:, 0] = amaxes
    return x


def first_codes(q):
    return fp4kit.unpack(q.packed)[:, 0] if q.recipe.is_packed else q.packed[:, 0]


def scale_codes(amaxes, name, dtype=np.float32):
    return fp4kit.quantize(rows_of(amaxes, name, dtype), name).block_scale[:, 0].tolist()


def same_values(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


# ---- decoders, and bytes of files ----


@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu", "mxfp4-fouroversix-6"])
def test_float16_is_decoded_by_a_rule_of_its_own(name, golden, either_engine):
    """For recipes of MLX and fouroversix, decoding to float16 rounds the scale to float16 first.

    It becomes infinite from 2^16 on, and 0 below 2^-24.

    For such scales, rounding only the decoded value would give another result.
    """
    r, count = RECIPES[name], 2 ** RECIPES[name].element.bits
    q = all_bytes(r, np.dtype(np.float16))
    found = fp4kit.dequantize(q)[:, :count]
    if name == "mxfp4-mlx-cpu":  # its zeros also equal the recorded ones
        assert same_values(found, golden.get("mlx", "all_bytes/mxfp4/dequant_f16")).all()
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    with np.errstate(all="ignore"):
        once = dequantize_tile(codes, q.block_scale, replace(r, decode_rule="e8m0_mlx"), NONE)[:, :count].astype(
            np.float16
        )
    beyond = np.flatnonzero(~same_values(found, once).all(axis=1))
    assert {100, 101, 102, 143, 254} <= set(beyond.tolist()) and not set(range(103, 143)) & set(beyond.tolist())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize(
    "older", ["nvfp4-mlx-cpu-0322", "nvfp4-mlx-cpu-0322-global", "mxfp8-mlx-cpu-0322", "mxfp8-mlx-cpu-0321"]
)
def test_nan_codes_were_480_up_to_0_32_2(older, dtype, either_engine):
    """The decoders of MLX 0.32.1, 0.32.2 and 0.32.4 differ only for the E4M3 codes 7F and FF.

    These occur as scales or as elements.
    """
    r, newer = RECIPES[older], RECIPES[re.sub("-032.", "", older)]
    q = all_bytes(r, np.dtype(dtype))
    found, now = (fp4kit.dequantize(replace(q, recipe=recipe)) for recipe in (r, newer))
    codes = np.broadcast_to(q.block_scale, q.shape) if r.scale == E4M3 else q.packed
    is_nan, sign = codes & 0x7F == 0x7F, np.where(codes & 0x80, -1, 1).astype(np.float32)
    assert is_nan.any() and np.isnan(now[is_nan]).all() and same_values(found, now)[~is_nan].all()
    if r.scale == E4M3:
        expected = sign * 480 * decode(fp4kit.unpack(q.packed), E2M1)
    else:
        with np.errstate(over="ignore"):
            powers = np.ldexp(np.float32(1), q.block_scale.astype(np.int32) - 127).astype(dtype).astype(np.float32)
            expected = sign * 480 * np.repeat(powers, r.block_size, axis=1)
    with np.errstate(over="ignore"):
        assert same_values(found[is_nan], expected[is_nan].astype(dtype)).all()


@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu"])
def test_fake_values_of_float16_are_those_of_codes(name):
    x = np.exp2(np.random.default_rng(0).uniform(-24, 15.9, (64, 256))).astype(np.float16)
    assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(fp4kit.quantize(x, name)))


def test_bytes_of_files(golden):
    """All recorded GGUF blocks and MLX words are read and written with equal bytes.

    Some GGUF blocks were made by llama.cpp's converter from other producers' codes.
    """
    count = 0
    for file in ("gguf", "mlx"):
        for key in (key for key in golden.keys(file) if key.endswith("/raw")):
            raw, codes, scales = (
                golden.get(file, key.removesuffix("raw") + part) for part in ("raw", "codes", "scales")
            )
            format = "mxfp4" if "mxfp4" in key else "nvfp4"
            assert_same_bits(pack_gguf(codes, scales, format) if file == "gguf" else pack_mlx(codes), raw)
            found = unpack_gguf(raw, format) if file == "gguf" else (unpack_mlx(raw), scales)
            for ours, recorded in zip(found, (codes, scales), strict=True):
                assert_same_bits(ours, recorded)
            count += 1
    assert count == 76


# ---- the first of the nearest ----


def nearest_first(x, step, dtype=np.float32):
    """Return the code of x, by trying all 16 codes in order.

    The first code whose value times `step` has the smallest error, computed in `dtype`, is chosen.
    """
    best, least = 0, None
    for code, value in enumerate(E2M1.values):
        error = abs(dtype(dtype(value) * dtype(step)) - dtype(x))
        if least is None or error < least:
            best, least = code, error
    return best


HUGE = [2.0**k * f for k in range(30, 38) for f in (1, 1 + 2**-23, 1.25, 1.5, 1.99)]


@pytest.mark.parametrize("step", [448.0, 1.0, 2.0**-9, 2.0**125, 2.0**126])
def test_the_first_of_the_nearest(step):
    with np.errstate(all="ignore"):
        x = np.float32(np.append(HUGE, np.linspace(0, 7, 113)) * (step if step != 448 else 1))
        x = np.append(x, np.float32([0.0, np.inf, 3.4e38])).astype(np.float32)
        x = np.append(x, -x)
        ours = encode(x, E2M1, "first", "unsigned_zero", 0, np.float32(step))
        assert ours.tolist() == [nearest_first(value, step) for value in x]


def test_the_first_of_the_smallest_errors_rounds_ties_toward_zero():
    a = (
        np.random.default_rng(0)
        .integers(0, np.float32(2.0**20).view(np.int32), 50_000)
        .astype(np.int32)
        .view(np.float32)
    )
    assert_same_bits(first_of_least(a, E2M1, ONE), encode(a, E2M1, "rnz"))


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_errors_in_16_bits_give_the_same_codes(dtype):
    """MLX computes errors in the input dtype, which gives the codes of float32 for all numbers up to 8.5.

    No element exceeds that relative to the scale of its block.
    """
    top = int(np.array(8.5, dtype).view(np.uint16))
    y = np.arange(0, top + 1, 3, dtype=np.uint16).view(dtype)
    y = np.append(y, y[-3000:])
    table = np.abs(E2M1.values[:8].astype(dtype) - y[:, None])
    assert_same_bits(encode(y, E2M1, "first"), table.argmin(axis=1).astype(np.uint8))


# ---- llama.cpp ----


def ue4m3(d):
    """Return the unsigned E4M3 byte of the scale d, by the branches of llama.cpp's code; 0 for NaN and d <= 0."""
    if not d > 0:
        return 0
    d = min(d, np.float32(448))
    significand, exponent = np.frexp(d)
    field, mantissa = int(exponent) - 1 + 7, np.float32(significand * 2 - 1) * 8
    if field <= 0:
        return min(int(np.float32(d * np.float32(512)) + np.float32(0.5)), 7)
    code = (field << 3) + math.floor(mantissa + 0.5)
    return 0x7E if code >= 0x78 else code


def test_scales_of_nvfp4_in_gguf(either_engine):
    d = [2.0**k * (1 + i / 16) for k in range(-12, 10) for i in range(16)]
    d += [value * (1 + s * 2.0**-22) for value in (248, 256, 7.5 / 512, 0.5 / 512, 2.0**-6, 447) for s in (-1, 0, 1)]
    amaxes = np.float32(d) * np.float32(6)
    expected = [ue4m3(np.float32(amax / np.float32(6))) for amax in amaxes]
    assert scale_codes(amaxes, "nvfp4-gguf") == expected
    assert {0x77, 0x7E} < set(expected) and not {*range(0x78, 0x7E)} & set(expected)


def test_huge_elements_of_nvfp4_in_gguf(either_engine):
    x = np.float32([2.0**33, 1.5 * 2.0**34, 1.5 * 2.0**35, 1.5 * 2.0**36, 3e38])
    q = fp4kit.quantize(rows_of(x, "nvfp4-gguf"), "nvfp4-gguf")
    assert first_codes(q).tolist() == [7, 5, 7, 0, 0] and set(q.block_scale[:, 0].tolist()) == {0x7E}


ROUNDED_UP = {
    -1: 0,
    0: 0,
    1: 0,
    2: 0,
    -2: 1,
    -3: 1,
    3: 1,
    4: 1,
    -5: 2,
    -4: 2,
    5: 2,
    8: 2,
    -8: 5,
    9: 5,
    16: 5,
    -16: 11,
    17: 11,
    32: 11,
    -32: 22,
    33: 22,
    64: 22,
    65: 44,
    -64: 44,
    127: 44,
    -120: 44,
}


def test_log2_rounds_up_a_few_ulp_below_powers_of_two(either_engine):
    for k, ulps in ROUNDED_UP.items():
        below = np.float32(2.0**k).view(np.int32) - np.int32([ulps + 1, max(ulps, 1), 0])
        codes = scale_codes(below.view(np.float32), "mxfp4-gguf")
        assert codes == [k - 1 + 125, k + 125 - (ulps == 0), k + 125], k


def test_log2_of_the_kernels_is_that_of_the_specification():
    """The compiled engine's formula for log2 equals the specification's.

    All powers of two and 60 floats on either side are tried.
    """
    bits = np.float32(2.0 ** np.arange(-149, 128)).view(np.int32)[:, None] + np.arange(-60, 61)
    amaxes = bits[(bits > 0) & (bits < 0x7F800000)].astype(np.int32).view(np.float32)
    rule, r = BLOCK_RULES["e8m0_gguf"], RECIPES["mxfp4-gguf"]
    with np.errstate(all="ignore"):
        assert scale_codes(amaxes, r.id) == rule.code(amaxes, NONE, r, F32).tolist()


def test_wrapped_bytes_of_gguf_are_blocks_of_zeros(either_engine):
    amaxes = np.float32(2.0 ** np.arange(-149, -125))
    q = fp4kit.quantize(rows_of(amaxes, "mxfp4-gguf"), "mxfp4-gguf")
    assert q.block_scale[:, 0].tolist() == list(range(232, 256)) and not q.packed.any()
    assert not fp4kit.dequantize(q).any()


def test_products_that_overflow_are_not_near(either_engine):
    """A candidate whose value overflows is never nearest.

    With the scale 2^126, the values 4 and 6 are infinite, so 3 is chosen.

    Next to 2^128, log2 rounds up to this scale.
    """
    q = fp4kit.quantize(rows_of([np.finfo(np.float32).max], "mxfp4-gguf"), "mxfp4-gguf")
    assert (q.block_scale[0, 0], first_codes(q)[0]) == (253, 5)


# ---- MLX ----


def exponent_of_mlx(amax, largest, dtype, old):
    """Return the exponent n of MLX's scale: the integer nearest to log2(s) for s = amax / largest in the input dtype.

    largest: the largest value of an element.
    old: True for MLX before 0.32.2; later versions add 1 if 2^n < s.
    """
    s = dtype(dtype(amax) / dtype(largest))
    if s == 0:
        return 0
    n = int(np.rint(np.float32(dtype(np.float32(np.log2(np.float64(s)))))))
    return n + (not old and 2.0**n < float(s))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu", "mxfp4-mlx-cpu-0321", "mxfp8-mlx-cpu-0321"])
def test_scales_of_mlx(name, dtype, either_engine):
    """quantize gives the scale bytes of MLX's steps, also if the exponent wraps around in the byte.

    Wrapping does not affect the largest element's code.
    """
    scalar, largest = np.dtype(dtype).type, RECIPES[name].element.max
    top = {4: 120.0, 2: 15.0 if dtype == np.float16 else 120.0}[np.dtype(dtype).itemsize]
    amaxes = np.exp2(np.random.default_rng(2).uniform(-24 if dtype == np.float16 else -148, top, 300)).astype(dtype)
    edges = (largest * 2.0 ** np.arange(-12, 7)).astype(dtype)  # s is a power of two or next to one
    bits = edges.view(unsigned(edges.dtype))
    amaxes = np.concatenate([amaxes, edges, (bits + 1).view(dtype), (bits - 1).view(dtype)])
    exponents = [exponent_of_mlx(amax, largest, scalar, name.endswith("0321")) for amax in amaxes]
    q = fp4kit.quantize(rows_of(amaxes, name, dtype), name)
    assert q.block_scale[:, 0].tolist() == [n + 127 & 0xFF for n in exponents]
    scaled = np.ldexp(amaxes.astype(np.float64), -np.array(exponents)).astype(np.float32)
    rounding = "first" if RECIPES[name].is_packed else "rn"
    assert_same_bits(first_codes(q), encode(scaled, RECIPES[name].element, rounding))
    assert dtype == np.float16 or any(n < -127 for n in exponents)


def test_zero_blocks_of_mlx(either_engine):
    x = np.zeros((2, 32), np.float32)
    x[:, ::2] = -0.0
    assert fp4kit.quantize(x, "mxfp4-mlx-cpu").block_scale.tolist() == [[127], [127]]
    assert set(fp4kit.quantize(x, "mxfp8-mlx-cpu").packed.reshape(-1).tolist()) == {0, 0x80}
    q = fp4kit.quantize(x, "nvfp4-mlx-cpu-global")
    assert set(q.block_scale.reshape(-1).tolist()) == {0xFE} and not q.packed.any()


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_nvfp4_of_mlx_rounds_twice_in_16_bits(dtype, either_engine):
    """In 16-bit dtypes T, MLX rounds twice: s = T(amax / 6), y = f32(T(x / scale) * S_enc).

    Multiplying x by one float32 factor would give other codes.
    """
    x = np.random.default_rng(4).standard_normal((512, 64)).astype(dtype)
    amax = np.abs(x.astype(np.float32)).max()
    enc = np.float32(2688) / amax
    q = fp4kit.quantize(x, "nvfp4-mlx-cpu-global")
    s = (np.abs(x).reshape(512, 4, 16).max(axis=2) / np.dtype(dtype).type(6)).astype(dtype).astype(np.float32) * enc
    assert_same_bits(q.block_scale, encode(s, E4M3))
    scales = np.repeat(E4M3.decode(q.block_scale), 16, axis=1).astype(dtype)
    y = (x / scales).astype(dtype).astype(np.float32) * enc
    assert_same_bits(fp4kit.unpack(q.packed), encode(y, E2M1, "first", "unsigned_zero"))
    wide = fp4kit.quantize(x.astype(np.float32), "nvfp4-mlx-cpu-global")
    assert 0 < np.count_nonzero(wide.packed != q.packed) < 0.05 * q.packed.size


def test_global_scale_is_the_tensors_amax():
    x = np.float32([[3.0] * 16, [-5.0] * 16])
    for name in ("nvfp4-mlx-cpu-global", "nvfp4-mlx-metal-global"):
        q = fp4kit.quantize(x, name)
        assert (q.tensor_amax, q.tensor_scale) == (5, np.float32(5) / np.float32(2688))
    assert fp4kit.quantize(x, "nvfp4-mlx-cpu").tensor_scale is None


def test_names_of_metal():
    assert (
        fp4kit.recipe("mxfp4-mlx-metal").id == "mxfp4-torchao-rceil"
        and fp4kit.recipe("mxfp8-mlx-metal").id == "mxfp8-te"
    )


def test_a_transform_decides_whether_a_byte_has_wrapped(either_engine):
    """With given scales, the amax of the transformed block decides whether a byte has wrapped.

    Here it is 2^-124, from elements of 2^-126.
    """
    x, scales = np.full((1, 32), 2.0**-126, np.float32), np.full((1, 1), 250, np.uint8)
    assert fp4kit.quantize(x, "mxfp4-mlx-cpu", block_scale=scales).packed.any()
    assert not fp4kit.quantize(x, "mxfp4-mlx-cpu", block_scale=scales, hadamard="no_signs").packed.any()


SHAPES = ((128, 128), (256, 384), (1, 256), (130, 128), (300, 256))
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def deepgemm(amax: np.float32) -> tuple[np.float32, np.float32]:
    """Return the factor and the scale of a block, as per_block_cast_to_fp8 of DeepGEMM computes them."""
    scale = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    return np.float32(1) / scale, scale


def transformers(amax: np.float32) -> tuple[np.float32, np.float32]:
    """Return the factor and the scale of a block, as Fp8Quantize of transformers computes them.

    PyTorch computes 448 / amax as the reciprocal of amax, times 448. `fp4kit recipes --live` calls transformers itself.
    """
    if not amax > 0:
        return np.float32(1), np.float32(1)
    factor = np.float32(1) / amax * np.float32(448)
    return factor, np.float32(1) / factor


def quantized(x: np.ndarray, rule) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and the scales, one per block, of x in blocks of 128x128."""
    x = x.astype(np.float32)
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-len(x) // 128), x.shape[1] // 128), np.float32)
    for i, j in np.ndindex(scales.shape):
        rows, columns = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        block = x[rows, columns]
        factor, scales[i, j] = rule(np.abs(block).max())
        scaled = np.clip(block * factor, -448, 448)  # ml_dtypes gives NaN beyond the largest value
        codes[rows, columns] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def inputs(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Return elements whose magnitude varies from block to block. Large arrays have a block of zeros, inf and NaN."""
    rng = np.random.default_rng(sum(shape))
    per_block = np.exp2(rng.integers(-20, 14, (-(-shape[0] // 128), shape[1] // 128)))
    x = rng.standard_normal(shape) * per_block.repeat(128, 0)[: shape[0]].repeat(128, 1)
    if shape[1] > 128:
        x[:128, :128] = 0
        x[0, 3] = -0.0
        x[-1, -1] = np.inf
    if shape[0] > 256:
        x[200, 5] = np.nan
    return x.astype(dtype)


def without_nan_signs(codes: np.ndarray) -> np.ndarray:
    """Return codes with every NaN as 0x7F, because processors differ in the sign of inf * 0."""
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


@pytest.mark.parametrize("rule", [deepgemm, transformers])
@np.errstate(all="ignore")
def test_codes_scales_and_values(rule) -> None:
    """Codes and scales are the producer's, on every engine; the last blocks may have fewer rows."""
    name = f"fp8-{rule.__name__}-block"
    for shape in SHAPES:
        for dtype in DTYPES:
            x = inputs(shape, dtype)
            codes, scales = quantized(x, rule)
            per_row = scales.repeat(128, 0)[: shape[0]]
            q = fp4kit.quantize(x, name)
            with specification():
                specified = fp4kit.quantize(x, name)
            for found in (q, specified):
                assert np.array_equal(without_nan_signs(found.packed), without_nan_signs(codes)), (shape, dtype)
                assert np.array_equal(found.tensor_scale, per_row, equal_nan=True), (shape, dtype)
            values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * per_row.repeat(128, 1)
            assert np.array_equal(fp4kit.dequantize(q, np.float32), values, equal_nan=True), (shape, dtype)
            assert np.array_equal(
                fp4kit.fake_quantize(x, name).astype(np.float32),
                values.astype(dtype).astype(np.float32),
                equal_nan=True,
            )


# The powers of two 2^k for which ceil(ln(2^k) * (1 / ln(2))) is k + 1, where OpenVINO rounds each step to float32
RAISED = {-125, -124, -120, -119, -114, -109, -108, -104, -103, -98, -93, -62, -60, -57, -54, -52, -49, -31, -30, -27}
RAISED |= {-26, -15, -13}


@pytest.mark.parametrize(("id", "largest"), [("mxfp4-nncf", 6), ("mxfp8-nncf", 448)])
def test_nncf_multiplies_by_the_reciprocal_of_ln_2(id, largest):
    ks = [k for k in range(-126, 128) if 2.0**-23 <= largest * 2.0**k < 2.0**128]
    x = np.zeros((len(ks), 32), np.float32)
    x[:, 5] = [largest * 2.0**k for k in ks]
    for scales in (fp4kit.quantize(x, id).block_scale, specified(x, id).block_scale):
        raised = scales[:, 0].astype(int) - 127 - ks
        assert {k for k, more in zip(ks, raised, strict=True) if more} == RAISED & {*ks}
        assert set(raised) <= {0, 1}


def specified(x, id):
    with specification():
        return fp4kit.quantize(x, id)
