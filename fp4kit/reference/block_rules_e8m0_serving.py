"""E8M0 block rules of vLLM, triton_kernels, AMD Quark, auto-round, fouroversix, SGLang, DeepGEMM and qwix.

A rule is a pair of functions (see block_rules.py): code_<rule> makes the scale codes of blocks from their amaxes, and
factor_<rule> makes the factors by which elements are multiplied, or divided where the docstring says so.

Notation: a code c stands for the scale 2^(c - 127); max and emax are the largest element value and its exponent; T(t)
is t rounded to the dtype of the elements, in which several of these producers compute.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E8M0
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.block_arith import exponent_up, inverse_e8m0, qwix_reciprocal, qwix_scale
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.rounding import exponent_field

NAN = np.float32(np.nan)
QUARK_ZERO = np.float32(2.0**-23)  # replaces a scale of 0: the machine epsilon of float32


def _clipped(exponent: np.ndarray) -> np.ndarray:
    """Return the E8M0 codes of 2^exponent, clamped to [-127, 127]. exponent is a float; NaN gives code 0."""
    return (np.clip(np.where(np.isnan(exponent), -127, exponent), -127, 127) + 127).astype(np.uint8)


# ---- from the bits of the amax ----


def _even_exponent(amax: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), where r is amax rounded to the element's mantissa bits.

    The result is int32, not clamped, and may be negative. It is 255 if r is infinite or amax is NaN.
    """
    bits = np.asarray(amax, np.float32).view(np.int32)
    field = (bits + (1 << 22 - recipe.element.mantissa_bits) >> 23) & 255
    return np.where((field == 255) | np.isnan(amax), 255, field - recipe.element.emax)


def code_e8m0_even_finite(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_even, but at most 254. Source: vLLM downcast_to_mxfp of mxfp4_utils.py."""
    return np.clip(_even_exponent(amax, recipe), 0, 254).astype(np.uint8)


def code_e8m0_quark_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_even_finite, but at least 1. NaN gives 127.

    So a scale of 2^-127 is stored as 2^-126. Source: Quark even_round, real quantization.
    """
    return np.where(np.isnan(amax), 127, np.clip(_even_exponent(amax, recipe), 1, 254)).astype(np.uint8)


def factor_e8m0_quark_even(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), except NaN if amax is NaN.

    If the scale was 2^-127, so that code 1 was stored in place of 0, the factor is still 2^127.
    """
    is_least = (codes == 1) & (_even_exponent(amax, recipe) < 1)
    return np.where(np.isnan(amax), NAN, np.where(is_least, np.float32(2.0**127), inverse_e8m0(codes)))


def code_e8m0_triton_up(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax / max, rounded up to a power of two that is at least 2^-126. Only amax = 0 gives code 0.

    inf gives 255 and NaN gives 0. Source: triton_kernels mxfp.py.
    """
    return (exponent_up(amax / recipe.element.max) & 255).astype(np.uint8)


def factor_e8m0_triton_up(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), or 0 for codes 0 and 255.

    With the factor 0, finite elements become zeros, and infinite ones become NaN.
    """
    return np.where((codes == 0) | (codes == 255), ZERO, inverse_e8m0(codes))


def code_e8m0_triton_down(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax / max, rounded down to a power of two. If the quotient is below 2^-126, the code is 0.

    inf and NaN give 255. Source: triton_kernels mxfp.py, ROUND_DOWN.
    """
    return exponent_field(amax / recipe.element.max).astype(np.uint8)


factor_e8m0_triton_down = factor_e8m0_triton_up


def code_e8m0_fouroversix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_triton_up. Source: fouroversix quantize_to_mxfp4, static_6.

    For NaN the producer's byte wraps to 0, which is also that rule's code.
    """
    return code_e8m0_triton_up(amax, tensor, recipe, dtype)


def code_e8m0_fouroversix_4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax / 4, rounded up to a power of two. Source: fouroversix quantize_to_mxfp4, static_4."""
    return (exponent_up(amax / np.float32(4)) & 255).astype(np.uint8)


def factor_e8m0_fouroversix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), or 0 for code 255, or NaN for code 0, because the producer divides zeros by 0."""
    return np.where(codes == 0, NAN, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_fouroversix_4 = factor_e8m0_fouroversix


def code_e8m0_even_normal(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_even_finite.

    The factor differs from that rule: elements with the scale 2^-127 become zeros, because a GPU flushes that scale.
    Source: vLLM downcast_to_mxfp (Triton).
    """
    return code_e8m0_even_finite(amax, tensor, recipe, dtype)


factor_e8m0_even_normal = factor_e8m0_triton_up


def code_e8m0_deepgemm(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of max(amax, 1e-4) / max, rounded up to a power of two that is at most 2^127.

    Source: DeepGEMM utils/math.py ceil_to_ue8m0.
    """
    return np.clip(exponent_up(np.maximum(amax, np.float32(1e-4)) / recipe.element.max), 1, 254).astype(np.uint8)


# ---- from a logarithm, in float32 or in the dtype of the elements ----


def _auto_round(exponent: np.ndarray, amax: np.ndarray, at_zero: float) -> np.ndarray:
    """Return the codes of 2^exponent. If amax is 0, at_zero is the exponent.

    An amax that is infinite or NaN gives code 0, because the producer casts NaN to an integer.
    """
    codes = _clipped(np.where(amax == 0, np.float32(at_zero), exponent))
    return np.where(np.isfinite(amax), codes, np.uint8(0))


def _auto_round_factor(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), or NaN if amax is infinite or NaN."""
    return np.where(np.isfinite(amax), inverse_e8m0(codes), NAN)


def code_e8m0_auto_round(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(floor(log2(amax)) - emax), with log2 rounded to float32.

    amax = 0 gives the code of 2^(1 - emax). Source: auto-round data_type/mxfp.py quant_mx.
    """
    return _auto_round(np.floor(log2(amax)) - recipe.element.emax, amax, 1 - recipe.element.emax)


def code_e8m0_auto_round_rceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(log2(amax / max)), with log2 rounded to float32. amax = 0 gives the code of 2.

    Source: auto-round quant_mx_rceil.
    """
    return _auto_round(np.ceil(log2(amax / recipe.element.max)), amax, 1)


def code_e8m0_auto_round_rceil_v2(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(log2(amax / 7.25)), with log2 rounded to float32. amax = 0 gives the code of 2.

    Source: auto-round quant_mx_rceil_v2.
    """
    return _auto_round(np.ceil(log2(amax / np.float32(7.25))), amax, 1)


factor_e8m0_auto_round = _auto_round_factor


def _auto_round_up_factor(codes: np.ndarray, amax: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return 2^(127 - code), or NaN if amax is infinite or NaN, or if it is positive and its ratio is 0.

    ratio is amax divided by max or 7.25. If it underflows to 0, the producer computes log2(0) = -inf.
    """
    return np.where(np.isfinite(amax) & ((ratio != 0) | (amax == 0)), inverse_e8m0(codes), NAN)


def factor_e8m0_auto_round_rceil(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return _auto_round_up_factor for the ratio amax / max."""
    return _auto_round_up_factor(codes, amax, amax / recipe.element.max)


def factor_e8m0_auto_round_rceil_v2(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return _auto_round_up_factor for the ratio amax / 7.25."""
    return _auto_round_up_factor(codes, amax, amax / np.float32(7.25))


def _quark_scale(amax: np.ndarray, recipe: Recipe, dtype: np.dtype, rounded: np.ufunc) -> np.ndarray:
    """Return the scale that Quark makes of amax: s = T(2^(rounded(T(log2(amax))) - emax)), or 2^-23 if s is 0.

    rounded: np.floor or np.ceil. If amax is infinite or NaN, amax itself is returned.
    """
    is_finite = np.isfinite(amax)
    exponent = np.clip(rounded(round_to(log2(np.where(is_finite, amax, ONE)), dtype)), -200, 200).astype(np.int32)
    with np.errstate(all="ignore"):
        scale = round_to(np.ldexp(ONE, exponent - recipe.element.emax), dtype)
    return np.where(is_finite, np.where(scale == 0, QUARK_ZERO, scale), amax)


def _quark_code(scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return the code of a scale, at least 1 (2^-126), or 127 if amax is infinite or NaN."""
    return np.where(np.isfinite(amax), np.clip(exponent_field(scale), 1, 254), 127).astype(np.uint8)


def _quark_factor(codes: np.ndarray, scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return the factor by which Quark divides elements.

    It is `scale`, which was made from amax, if `codes` is the code of that scale. Otherwise it is the value of the
    given code.
    """
    return np.where(_quark_code(scale, amax) == codes, scale, decode(codes, E8M0))


def code_e8m0_quark_floor(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of s = T(2^(floor(T(log2(amax))) - emax)). If s is 0, it is replaced by 2^-23.

    Scales below 2^-126 are stored as 2^-126. Source: Quark get_scale.
    """
    return _quark_code(_quark_scale(amax, recipe, dtype, np.floor), amax)


def factor_e8m0_quark_floor(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return s of code_e8m0_quark_floor, even if it was stored as 2^-126. Elements are divided by it.

    If the given code is not the one that amax gives, return the value of the code.
    """
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.floor), amax)


def code_e8m0_quark_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_quark_floor, with the ceiling of log2(amax) in place of the floor."""
    return _quark_code(_quark_scale(amax, recipe, dtype, np.ceil), amax)


def factor_e8m0_quark_ceil(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor of the rule e8m0_quark_floor, with the ceiling of log2(amax) in place of the floor."""
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.ceil), amax)


def code_e8m0_sglang(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(max(T(log2(T(amax / max))), -127)). An infinite or NaN amax gives code 0.

    Source: SGLang mxfp4_tensor.py MXFP4QuantizeUtil.
    """
    ratio = round_to(amax / recipe.element.max, dtype)
    return _auto_round(np.ceil(np.maximum(round_to(log2(ratio), dtype), -127)), amax, -127)


def code_e8m0_sglang_kv(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(T(log2(d))), where d = max(T(amax / max), T(1e-10)).

    An infinite or NaN amax gives code 0. Source: SGLang kvfp4_tensor.py.
    """
    ratio = np.maximum(round_to(amax / recipe.element.max, dtype), round_to(np.full_like(amax, 1e-10), dtype))
    return np.where(np.isfinite(amax), _clipped(np.ceil(round_to(log2(ratio), dtype))), np.uint8(0))


factor_e8m0_sglang = factor_e8m0_sglang_kv = _auto_round_factor


def code_e8m0_qwix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(T(T(log s) * reciprocal(T(log 2)))), or 255 if s is infinite or NaN.

    s is block_arith.qwix_scale of amax, and reciprocal is block_arith.qwix_reciprocal.

    Exact: XLA computes log by a polynomial for vectors and by libm for single elements. Neither log is correctly
    rounded, as the one here is, but for every s all three give equal exponents. Source: qwix 0.1.8, as XLA on a CPU
    computes it.
    """
    scale = qwix_scale(amax, recipe, dtype)
    log_of_2 = round_to(np.float32(np.log(2)), dtype)
    with np.errstate(all="ignore"):
        logarithm = round_to(np.log(scale.astype(np.float64)).astype(np.float32), dtype)
        exponent = np.ceil(round_to(logarithm * qwix_reciprocal(log_of_2, dtype), dtype))
    return np.where(np.isfinite(scale), _clipped(exponent), np.uint8(255))


def factor_e8m0_qwix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), or 0 if amax is infinite."""
    return np.where(np.isinf(amax), ZERO, inverse_e8m0(codes))
