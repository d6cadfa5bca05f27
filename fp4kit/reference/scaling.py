"""Scale rules: from the amax of a tensor and of a block to the stored scale and the factor that elements meet.

A tensor rule maps tensor_amax to the encode and decode scale of a TensorScale; a block rule maps block_amax to
BlockScale(codes, factor). The factor multiplies elements, or divides them where the recipe says `apply="divide"`. All
arithmetic is float32 with one rn rounding per written operation, unless a rule says that it flushes subnormals (ftz) or
rounds to the input dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import E4M3, E8M0, FLT_MAX, FLT_MIN, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import INV6, divide_ftz, multiply_ftz, reciprocal_approx_ftz
from fp4kit.reference.codec import decode, encode, encode_e8m0, exponent_field

ONE = np.float32(1)
Pair = tuple[np.ndarray, np.ndarray]  # encode, decode
TINY_AMAX = np.float32(2.0**-24)  # Model-Optimizer's FP8 and INT fake quantizers treat a smaller amax as "no scale"


class TensorScale(NamedTuple):
    """encode: multiplies on the way in; decode: multiplies on the way out (the one that is stored); amax: what they cover."""

    encode: np.ndarray
    decode: np.ndarray
    amax: np.ndarray

    def columns(self, recipe: Recipe) -> TensorScale:
        """The same as matrices: (1, 1), (M, 1), or (M, blocks) where every block has its own."""
        per_block = recipe.tensor_scaling == "block"
        return TensorScale(*(p if per_block and np.ndim(p) == 2 else np.reshape(p, (-1, 1)) for p in self))

    def cut(self, rows: slice, blocks: slice) -> TensorScale:
        """The part that a tile needs, of what columns() gave."""
        parts = (p[rows] if len(p) > 1 else p for p in self)
        return TensorScale(*(p[:, blocks] if p.shape[1] > 1 else p for p in parts))


class BlockScale(NamedTuple):
    """codes: uint8 bit patterns of the scale format; factor: float32, what the elements are multiplied with or divided by."""

    codes: np.ndarray
    factor: np.ndarray


def round_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x rounded to dtype (rn), as float32. After a float32 operation the second rounding is innocuous for 8 and 11 bits."""
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


# ---- tensor rules: tensor_amax -> TensorScale ---------------------------------------------------------------------------


def full_range(recipe: Recipe) -> np.float32:
    """The amax that a tensor scale of 1 covers: element max times the largest block scale in use (2688 = 6 * 448)."""
    return np.float32(recipe.element.max * np.float32(recipe.scale_max))


def tensor_te_reference(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = min(2688 / amax, FLT_MAX), 1 if that is 0 (amax = inf); decode = 1 / encode. NaN stays NaN."""
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    encode_scale = np.where(encode_scale == 0, ONE, encode_scale)
    return encode_scale, ONE / encode_scale


def tensor_te(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """tensor_te_reference, and 1 for amax = 0."""
    encode_scale = np.where(amax == 0, ONE, tensor_te_reference(amax, recipe, dtype)[0])
    return encode_scale, ONE / encode_scale


def tensor_te_primary_weight(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = min(2688 / max(amax, FLT_MIN), FLT_MAX), 1 unless amax > 0; inf gives 0, which decodes as 1."""
    encode_scale = np.minimum(full_range(recipe) / np.maximum(amax, FLT_MIN), FLT_MAX)
    encode_scale = np.where(amax > 0, encode_scale, ONE)
    return encode_scale, ONE / np.where(encode_scale <= 0, ONE, encode_scale)


def tensor_flashinfer(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """make_nvfp4_global_scale: encode = min(2688 / amax, FLT_MAX), FLT_MAX for amax = 0; decode = 1 / encode."""
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    return encode_scale, ONE / encode_scale


def tensor_divided(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """decode = amax / 2688, encode = 1 / decode (0 and NaN are not guarded)."""
    decode_scale = amax / full_range(recipe)
    return ONE / decode_scale, decode_scale


def tensor_compressed_tensors(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = rnd(rnd(1 / max(amax, tiny)) * 2688), both roundings to the input dtype; inf and NaN -> 1; decode = 1 / encode."""
    tiny = np.float32(ml_dtypes.finfo(dtype).tiny)
    reciprocal = round_to(ONE / np.maximum(amax, tiny), dtype)
    encode_scale = round_to(reciprocal * full_range(recipe), dtype)
    encode_scale = np.where(np.isfinite(encode_scale), encode_scale, ONE)
    return encode_scale, ONE / encode_scale


def tensor_fp8_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = 448 / amax (amax <= 2^-24 counts as 1), decode = 1 / encode."""
    encode_scale = recipe.element.max / np.where(amax <= TINY_AMAX, ONE, amax)
    return encode_scale, ONE / encode_scale


def tensor_int_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = (2^(bits-1) - 1) / amax, 0 where amax <= 2^-24; decode = amax / (2^(bits-1) - 1), 0 there."""
    zero = amax <= TINY_AMAX
    safe = np.where(zero, ONE, amax)
    encode_scale = np.where(zero, np.float32(0), recipe.element.max / safe)
    return encode_scale, np.where(zero, np.float32(0), safe / recipe.element.max)


def tensor_int4_qat(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """decode = max(amax / 7, 1e-5); encode = 1 / decode (elements are divided by decode)."""
    decode_scale = np.maximum(amax / recipe.element.max, np.float32(1e-5))
    return ONE / decode_scale, decode_scale


# ---- block rules, E4M3 scales: block_amax, TensorScale -> BlockScale ----------------------------------------------------


def _decode_scale(codes: np.ndarray) -> np.ndarray:
    return decode(codes, E4M3)


def block_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """scale = E4M3(min(amax * (S_enc * fp32(1/6)), FLT_MAX)); factor = min(1 / (scale * S_dec), FLT_MAX).

    A scale that rounds to 0 gives factor FLT_MAX: codes saturate although they decode to 0. Source: TE core_nvfp4.cuh.
    """
    minimum = np.minimum if recipe.amax_nan == "propagate" else np.fmin  # fminf drops the NaN of inf * 0
    codes = encode(minimum(amax * (tensor.encode * INV6), FLT_MAX), E4M3)
    return BlockScale(codes, minimum(ONE / (_decode_scale(codes) * tensor.decode), FLT_MAX))


def block_flashinfer(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """scale = E4M3(gs * (amax * rcp(6))); factor = rcp(scale * rcp(gs)), 0 for amax = 0. ftz; rcp = rcp.approx.ftz.f32."""
    codes = encode(multiply_ftz(tensor.encode, multiply_ftz(amax, reciprocal_approx_ftz(np.float32(6)))), E4M3)
    factor = reciprocal_approx_ftz(multiply_ftz(_decode_scale(codes), reciprocal_approx_ftz(tensor.encode)))
    return BlockScale(codes, np.where(np.abs(amax) < FLT_MIN, np.float32(0), factor))


def block_flashinfer_precise(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """block_te with ftz arithmetic; amax = 0 gives scale 0 and factor 0."""
    zero = np.abs(amax) < FLT_MIN
    scale = np.where(zero, np.float32(0), multiply_ftz(amax, multiply_ftz(tensor.encode, INV6)))
    codes = encode(scale, E4M3)
    factor = divide_ftz(ONE, multiply_ftz(_decode_scale(codes), divide_ftz(ONE, tensor.encode)))
    return BlockScale(codes, np.where(zero, np.float32(0), np.fmin(factor, FLT_MAX)))


def block_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """r = amax / (6 * S_dec), 1 where r = 0; scale = E4M3(clamp(r, 2^-9, 448)); divide by scale * S_dec."""
    ratio = amax / (recipe.element.max * tensor.decode)
    codes = encode(np.clip(np.where(ratio == 0, ONE, ratio), E4M3.min_subnormal, E4M3.max), E4M3)
    return BlockScale(codes, _decode_scale(codes) * tensor.decode)


def block_modelopt_static(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """r = amax / 6 (0 -> 1); scale = E4M3(clamp(r * N / (tensor_amax / 6), 2^-9, 448)), N = scale_max.

    Elements are divided by scale * S_dec.
    """
    ratio = amax / recipe.element.max
    ratio = np.where(ratio == 0, ONE, ratio) * np.float32(recipe.scale_max)
    codes = encode(np.clip(ratio / (tensor.amax / recipe.element.max), E4M3.min_subnormal, E4M3.max), E4M3)
    return BlockScale(codes, _decode_scale(codes) * tensor.decode)


def block_torchao(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """scale = E4M3(clamp(amax / 6 / S_dec, 2^-6, 448)); factor = (1 / S_dec) / scale. 2^-6 is the smallest normal of E4M3."""
    ratio = amax / recipe.element.max / tensor.decode
    codes = encode(np.clip(ratio, E4M3.min_normal, E4M3.max), E4M3)
    return BlockScale(codes, tensor.encode / _decode_scale(codes))


def block_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """scale = E4M3(clamp(rnd(amax / 6) * gs, +-448)), 0 -> 0.125; divide by scale / gs. rnd rounds to the input dtype."""
    ratio = round_to(amax / recipe.element.max, dtype) * tensor.encode
    codes = encode(ratio, E4M3)
    codes = np.where(codes == 0, encode(np.float32(0.125), E4M3), codes)
    return BlockScale(codes, _decode_scale(codes) / tensor.encode)


# ---- block rules, E8M0 scales -------------------------------------------------------------------------------------------


def inverse_e8m0(codes: np.ndarray) -> np.ndarray:
    """float32 2^(127 - code); 254 -> 2^-127 (a subnormal), 255 -> NaN."""
    exponent = 254 - codes.astype(np.int32)
    bits = np.where(exponent > 0, exponent << 23, 0x00400000)
    return np.where(codes == 255, np.float32(np.nan), bits.astype(np.int32).view(np.float32))


def _with_inverse(codes: np.ndarray) -> BlockScale:
    return BlockScale(codes, inverse_e8m0(codes))


def _shifted_exponent(rounded: np.ndarray, element: ElementFormat, up: np.ndarray | int = 0) -> BlockScale:
    """exponent(rounded) + up - emax, clamped to the range of E8M0; NaN (255) where rounded is not finite."""
    field = exponent_field(np.asarray(rounded, np.float32))
    codes = np.where(field == 255, 255, np.clip(field + up - element.emax, 0, 255))
    return _with_inverse(codes.astype(np.uint8))


def _add_to_bits(x: np.ndarray, addend: int) -> np.ndarray:
    """Add to the bit pattern: a carry moves into the exponent. NaN stays NaN."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return np.where(bits > 0x7F800000, bits, bits + addend).astype(np.int32).view(np.float32)


def block_e8m0_floor(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """2^(floor(log2(amax)) - emax): OCP MX v1.0. inf and NaN -> NaN."""
    return _shifted_exponent(amax, recipe.element)


def block_e8m0_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """2^(ceil(log2(amax)) - emax), from the bits. inf and NaN -> NaN."""
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted_exponent(amax, recipe.element, up=mantissa != 0)


def block_e8m0_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """floor after rounding amax to the mantissa of the element: up from 1.75 for E2M1, 1.9375 for E4M3 and E2M3."""
    return _shifted_exponent(_add_to_bits(amax, 1 << 22 - recipe.element.mantissa_bits), recipe.element)


def _rceil(amax: np.ndarray, element: ElementFormat) -> np.ndarray:
    return encode_e8m0(amax * (ONE / element.max), "rp")


def block_e8m0_rceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """ceil to a power of two of amax * fp32(1 / max); inf and NaN -> NaN. Source: torchao RCEIL."""
    codes = _rceil(amax, recipe.element)
    return _with_inverse(np.where(np.isfinite(amax), codes, 255).astype(np.uint8))


def block_e8m0_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """ceil to a power of two of amax * fp32(1 / max); inf -> 254, NaN -> 255. Source: TE float_to_e8m0."""
    return _with_inverse(_rceil(amax, recipe.element))


def block_e8m0_te_reference(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """ceil to a power of two of amax / max (a division), clamped to 2^127. Source: TE reference quantizer, pow_2_scales."""
    return _with_inverse(encode_e8m0(amax / recipe.element.max, "rp"))


def block_e8m0_flashinfer_fp4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """t = amax * rcp(6), ceil to a power of two; factor = ex2(127 - code), 0 for t = 0. ftz: code 254 has factor 0."""
    ratio = multiply_ftz(amax, reciprocal_approx_ftz(recipe.element.max))
    codes = encode_e8m0(ratio, "rp")
    factor = np.where(codes < 254, inverse_e8m0(codes), np.float32(0))
    return BlockScale(codes, np.where(ratio == 0, np.float32(0), factor))


def block_e8m0_flashinfer_fp8(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """t = amax * rcp(448), ceil to a power of two; factor = rcp of the scale, 0 for code 0 and, by ftz, from code 254 on."""
    codes = encode_e8m0(multiply_ftz(amax, reciprocal_approx_ftz(recipe.element.max)), "rp")
    factor = np.where((codes > 0) & (codes < 254), inverse_e8m0(codes), np.float32(0))
    return BlockScale(codes, factor)


def _log2(x: np.ndarray) -> np.ndarray:
    """Correctly rounded float32 log2."""
    with np.errstate(divide="ignore"):
        return np.log2(x.astype(np.float64)).astype(np.float32)


def block_e8m0_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """ceil(log2(amax / max)) with a float32 log2, clamped to [-127, 127]; amax = 0 and NaN -> -127.

    The float32 log2 makes the exponent one too small for an amax a few ulp above max * 2^k (then the largest value saturates).
    """
    ratio = amax / recipe.element.max
    exponent = np.ceil(_log2(np.where(ratio > 0, ratio, np.float32(2.0**-127))))
    return _with_inverse((np.clip(exponent, -127, 127) + 127).astype(np.uint8))


def block_e8m0_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> BlockScale:
    """floor after rounding amax to one mantissa bit (up from 1.75; E2M3: three bits), minus emax (E2M1 and E6: 2, E4M3: 8).

    float16: a scale below its range counts as 1. Not finite: as OCP, a NaN scale (the producer stores 127 with zero codes).
    """
    mantissa_bits = 3 if recipe.element.bits == 6 else 1
    codes = _shifted_exponent(_add_to_bits(amax, 1 << 22 - mantissa_bits), recipe.element).codes
    if dtype == np.float16:
        codes = np.where(decode(codes, E8M0).astype(np.float16) == 0, np.uint8(127), codes)
    return _with_inverse(codes)


TENSOR_RULES: dict[str, Callable[[np.ndarray, Recipe, np.dtype], Pair]] = {
    "te": tensor_te,
    "te_reference": tensor_te_reference,
    "te_primary_weight": tensor_te_primary_weight,
    "flashinfer": tensor_flashinfer,
    "divided": tensor_divided,
    "compressed_tensors": tensor_compressed_tensors,
    "fp8_modelopt": tensor_fp8_modelopt,
    "int_modelopt": tensor_int_modelopt,
    "int4_qat": tensor_int4_qat,
}

BLOCK_RULES: dict[str, Callable[[np.ndarray, TensorScale, Recipe, np.dtype], BlockScale]] = {
    "te": block_te,
    "flashinfer": block_flashinfer,
    "flashinfer_precise": block_flashinfer_precise,
    "modelopt": block_modelopt,
    "modelopt_static": block_modelopt_static,
    "torchao": block_torchao,
    "compressed_tensors": block_compressed_tensors,
    "e8m0_floor": block_e8m0_floor,
    "e8m0_ceil": block_e8m0_ceil,
    "e8m0_even": block_e8m0_even,
    "e8m0_rceil": block_e8m0_rceil,
    "e8m0_te": block_e8m0_te,
    "e8m0_te_reference": block_e8m0_te_reference,
    "e8m0_flashinfer_fp4": block_e8m0_flashinfer_fp4,
    "e8m0_flashinfer_fp8": block_e8m0_flashinfer_fp8,
    "e8m0_modelopt": block_e8m0_modelopt,
    "e8m0_compressed_tensors": block_e8m0_compressed_tensors,
}


def tensor_scale(amax: np.ndarray | None, recipe: Recipe, dtype: np.dtype) -> TensorScale:
    """The recipe's tensor rule applied to tensor_amax (float32, any shape); ones where the recipe has no tensor scale."""
    if recipe.tensor_rule is None or amax is None:
        return TensorScale(ONE, ONE, ONE)
    amax = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        return TensorScale(*TENSOR_RULES[recipe.tensor_rule](amax, recipe, dtype), amax)
