"""Define E8M0 block rules of serving engines and quantizers: pairs of functions (see block_rules.py).
code_<rule> returns the scale codes of blocks (uint8), computed from `amax`, their largest magnitudes; a code c stands
for 2^(c - 127). factor_<rule> returns float32 factors, which multiply elements or, where the docstring says so, divide
them. Results have the shape of `amax`. In texts such as "inf gives 254", inf is a value of `amax` and 254 a code.

The rules are those of vLLM, triton_kernels, AMD Quark, auto-round, fouroversix, SGLang, DeepGEMM, qwix, comfy-kitchen,
MSLK, aiter and DeepSeek.

Arguments are those of block_rules.py. Notation:

- a code c stands for the scale 2^(c - 127)
- M and emax: the largest element value and its exponent
- fp32(t): t rounded to float32
- T(t): t rounded to dtype, the dtype of the elements, in which several of these producers compute
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E2M1, E8M0, FLT_MIN
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import INV6, ONE, ZERO, log2
from fp4kit.reference.block_arith import exponent_up, inverse_e8m0, qwix_reciprocal, qwix_scale
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.reference.trace import show
from fp4kit.rounding import exponent_field

NAN = np.float32(np.nan)
QUARK_ZERO = np.float32(2.0**-23)  # replaces a scale of 0: the machine epsilon of float32


def _clipped(exponent: np.ndarray) -> np.ndarray:
    """Return the E8M0 codes of 2^exponent, with the exponent clamped to [-127, 127]. A NaN exponent gives code 0."""
    return (np.clip(np.where(np.isnan(exponent), -127, exponent), -127, 127) + 127).astype(np.uint8)


# ---- from the bits of the amax ----


def _even_exponent(amax: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), before it is clamped: int32."""
    bits = np.asarray(amax, np.float32).view(np.int32) + (1 << 22 - recipe.element.mantissa_bits)
    show("amax plus half a step", np.asarray(bits, np.int32).view(np.float32))
    field = (bits >> 23) & 255
    return np.where((field == 255) | np.isnan(amax), 255, field - recipe.element.emax)


def code_e8m0_even_finite(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 0 to 254, as vLLM's Triton code does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. amax = 0 gives code 0 (2^-127), and an infinite or NaN amax gives 254. tensor and dtype are not used. Source:
    vLLM downcast_to_mxfp of mxfp4_utils.py, as Triton's interpreter runs it.
    """
    return np.clip(_even_exponent(amax, recipe), 0, 254).astype(np.uint8)


def code_e8m0_quark_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 1 to 254, as Quark does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. So a scale of 2^-127, also that of amax = 0, is stored as 2^-126. An infinite amax gives 254, and NaN gives
    127. tensor and dtype are not used. Source: Quark even_round, real quantization.
    """
    return np.where(np.isnan(amax), 127, np.clip(_even_exponent(amax, recipe), 1, 254)).astype(np.uint8)


def factor_e8m0_quark_even(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in Quark: 2^(127 - code), or NaN if amax is NaN.

    There is one exception: if amax gives a scale of 2^-127 or less, code 1 was stored in place of code 0, but the
    factor is still 2^127. tensor and dtype are not used.
    """
    was_raised = (codes == 1) & (_even_exponent(amax, recipe) < 1)
    return np.where(np.isnan(amax), NAN, np.where(was_raised, np.float32(2.0**127), inverse_e8m0(codes)))


def code_e8m0_triton_up(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as triton_kernels does with ROUND_UP.

    M is the largest element value. The power is at least 2^-126 unless amax / M is 0, which gives code 0. inf gives
    255, and NaN gives 0. tensor and dtype are not used. Source: triton_kernels mxfp.py.
    """
    return (exponent_up(amax / recipe.element.max) & 255).astype(np.uint8)


def factor_e8m0_triton_up(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in triton_kernels: 2^(127 - code).

    For codes 0 and 255, the factor is 0. The products are then zeros for finite elements, and NaN for infinite ones.
    amax, tensor, recipe and dtype are not used.
    """
    return np.where((codes == 0) | (codes == 255), ZERO, inverse_e8m0(codes))


def code_e8m0_triton_down(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / M, rounded down to a power of two, as triton_kernels does with ROUND_DOWN.

    M is the largest element value. If the quotient is below 2^-126, the code is 0. inf and NaN give 255. tensor and
    dtype are not used. Source: triton_kernels mxfp.py.
    """
    return exponent_field(show("block scale before rounding", amax / recipe.element.max)).astype(np.uint8)


factor_e8m0_triton_down = factor_e8m0_triton_up


def code_e8m0_fouroversix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as fouroversix does with scale rule static_6.

    M is the largest element value. The power is at least 2^-126 unless amax / M is 0, which gives code 0. inf gives
    255. NaN gives 0, because the producer's byte wraps. tensor and dtype are not used. Source: fouroversix
    quantize_to_mxfp4.
    """
    return code_e8m0_triton_up(amax, tensor, recipe, dtype)


def code_e8m0_fouroversix_4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / 4, rounded up to a power of two, as fouroversix does with scale rule static_4.

    The power is at least 2^-126 unless amax / 4 is 0, which gives code 0. inf gives 255. NaN gives 0, because the
    producer's byte wraps. tensor, recipe and dtype are not used. Source: fouroversix quantize_to_mxfp4.
    """
    return (exponent_up(amax / np.float32(4)) & 255).astype(np.uint8)


def factor_e8m0_fouroversix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in fouroversix: 2^(127 - code).

    For code 255 the factor is 0. For code 0 it is NaN, because the producer divides zeros by 0. amax, tensor, recipe
    and dtype are not used.
    """
    return np.where(codes == 0, NAN, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_fouroversix_4 = factor_e8m0_fouroversix


def code_e8m0_even_normal(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 0 to 254, as vLLM does on a GPU.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. The codes equal those of the rule e8m0_even_finite. Only the factor differs: elements with the scale 2^-127
    become zeros, because a GPU flushes that scale. tensor and dtype are not used. Source: vLLM downcast_to_mxfp
    (Triton).
    """
    return code_e8m0_even_finite(amax, tensor, recipe, dtype)


factor_e8m0_even_normal = factor_e8m0_triton_up


def code_e8m0_deepgemm(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of max(amax, 1e-4) / M, rounded up to a power of two, as DeepGEMM does.

    M is the largest element value. A block of zeros counts as one with amax 1e-4. The power is at most 2^127 (code
    254), also for an infinite or NaN amax. tensor and dtype are not used. Source: DeepGEMM utils/math.py ceil_to_ue8m0.
    """
    return np.clip(exponent_up(np.maximum(amax, np.float32(1e-4)) / recipe.element.max), 1, 254).astype(np.uint8)


# ---- from a logarithm, in float32 or in the dtype of the elements ----


def _auto_round(exponent: np.ndarray, amax: np.ndarray, at_zero: float) -> np.ndarray:
    """Return the E8M0 codes of 2^exponent, with the special cases of auto-round and SGLang."""
    codes = _clipped(np.where(amax == 0, np.float32(at_zero), exponent))
    return np.where(np.isfinite(amax), codes, np.uint8(0))


def _auto_round_factor(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in auto-round and SGLang: 2^(127 - code)."""
    return np.where(np.isfinite(amax), inverse_e8m0(codes), NAN)


def code_e8m0_auto_round(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as auto-round computes it.

    log2 is rounded to float32, and emax is the exponent of the largest element value. The exponent is clamped to [-127,
    127]. amax = 0 gives the code of 2^(1 - emax). An infinite or NaN amax gives code 0. tensor and dtype are not used.
    Source: auto-round data_type/mxfp.py quant_mx.
    """
    return _auto_round(
        np.floor(show("log2 of the amax", log2(amax))) - recipe.element.emax, amax, 1 - recipe.element.emax
    )


def code_e8m0_auto_round_rceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as auto-round's quant_mx_rceil computes it.

    log2 is rounded to float32, and M is the largest element value. The exponent is clamped to [-127, 127]. amax = 0
    gives the scale 2 (code 128). An infinite or NaN amax gives code 0. tensor and dtype are not used.
    """
    return _auto_round(np.ceil(show("log2 of the scale", log2(amax / recipe.element.max))), amax, 1)


def code_e8m0_auto_round_rceil_v2(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(amax / 7.25)), as auto-round's quant_mx_rceil_v2 computes it.

    log2 is rounded to float32. The exponent is clamped to [-127, 127]. amax = 0 gives the scale 2 (code 128). An
    infinite or NaN amax gives code 0. tensor, recipe and dtype are not used.
    """
    return _auto_round(np.ceil(show("log2 of the scale", log2(amax / np.float32(7.25)))), amax, 1)


factor_e8m0_auto_round = _auto_round_factor


def _auto_round_up_factor(codes: np.ndarray, amax: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return 2^(127 - code), or NaN in two cases: amax is infinite or NaN, or ratio is 0 although amax is positive."""
    return np.where(np.isfinite(amax) & ((ratio != 0) | (amax == 0)), inverse_e8m0(codes), NAN)


def factor_e8m0_auto_round_rceil(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in auto-round's quant_mx_rceil: 2^(127 - code).

    The factor is NaN if amax is infinite or NaN. It is also NaN if a positive amax divided by the largest element value
    underflows to 0. tensor and dtype are not used.
    """
    return _auto_round_up_factor(codes, amax, amax / recipe.element.max)


def factor_e8m0_auto_round_rceil_v2(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in auto-round's quant_mx_rceil_v2: 2^(127 - code).

    The factor is NaN if amax is infinite or NaN. It is also NaN if a positive amax divided by 7.25 underflows to 0.
    tensor, recipe and dtype are not used.
    """
    return _auto_round_up_factor(codes, amax, amax / np.float32(7.25))


def _quark_scale(amax: np.ndarray, recipe: Recipe, dtype: np.dtype, rounded: np.ufunc) -> np.ndarray:
    """Return the scale that Quark computes from an amax: s = T(2^(R(T(log2(amax))) - emax)), or 2^-23 if s is 0."""
    is_finite = np.isfinite(amax)
    logarithm = show("log2 of the amax", round_to(log2(np.where(is_finite, amax, ONE)), dtype))
    exponent = np.clip(rounded(logarithm), -200, 200).astype(np.int32)
    with np.errstate(all="ignore"):
        scale = round_to(np.ldexp(ONE, exponent - recipe.element.emax), dtype)
    return np.where(is_finite, np.where(scale == 0, QUARK_ZERO, scale), amax)


def _quark_code(scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return the E8M0 codes that Quark stores for scales: from 1 (2^-126) to 254, or 127 if amax is infinite or NaN."""
    return np.where(np.isfinite(amax), np.clip(exponent_field(scale), 1, 254), 127).astype(np.uint8)


def _quark_factor(codes: np.ndarray, scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return the divisor that Quark applies to the elements of each block."""
    return np.where(_quark_code(scale, amax) == codes, scale, decode(codes, E8M0))


def code_e8m0_quark_floor(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of s = T(2^(floor(T(log2(amax))) - emax)), as Quark computes it with scale mode floor.

    T rounds to the dtype of the elements, and emax is the exponent of the largest element value. If s is 0, as for amax
    = 0, it is replaced by 2^-23. Scales below 2^-126 are stored as 2^-126. An infinite or NaN amax gives 127. tensor is
    not used. Source: Quark get_scale.
    """
    return _quark_code(_quark_scale(amax, recipe, dtype, np.floor), amax)


def factor_e8m0_quark_floor(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor that Quark applies to the elements of each block with scale mode floor.

    - If the caller of quantize passed a code that amax does not give, the divisor is the value of this code.
    - Otherwise, an infinite or NaN amax is the divisor itself.
    - Otherwise, the divisor is the scale s of code_e8m0_quark_floor. An s below 2^-126 is not rounded up, although
      2^-126 is stored.

    tensor is not used.
    """
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.floor), amax)


def code_e8m0_quark_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of s = T(2^(ceil(T(log2(amax))) - emax)), as Quark computes it with scale mode ceil.

    T rounds to the dtype of the elements, and emax is the exponent of the largest element value. If s is 0, as for amax
    = 0, it is replaced by 2^-23. Scales below 2^-126 are stored as 2^-126. An infinite or NaN amax gives 127. tensor is
    not used. Source: Quark get_scale.
    """
    return _quark_code(_quark_scale(amax, recipe, dtype, np.ceil), amax)


def factor_e8m0_quark_ceil(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor that Quark applies to the elements of each block with scale mode ceil.

    - If the caller of quantize passed a code that amax does not give, the divisor is the value of this code.
    - Otherwise, an infinite or NaN amax is the divisor itself.
    - Otherwise, the divisor is the scale s of code_e8m0_quark_ceil. An s below 2^-126 is not rounded up, although
      2^-126 is stored.

    tensor is not used.
    """
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.ceil), amax)


def code_e8m0_sglang(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(T(log2(T(amax / M)))), as SGLang's MXFP4 utility computes it.

    T rounds to the dtype of the elements, and M is the largest element value. The exponent is clamped to [-127, 127].
    An amax that is 0, infinite or NaN gives code 0 (2^-127). tensor is not used. Source: SGLang mxfp4_tensor.py
    MXFP4QuantizeUtil.
    """
    ratio = round_to(amax / recipe.element.max, dtype)
    logarithm = show("log2 of the scale", round_to(log2(ratio), dtype))
    return _auto_round(np.ceil(np.maximum(logarithm, -127)), amax, -127)


def code_e8m0_sglang_kv(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 scale code of each block, as SGLang's KV cache computes it.

        d = max(T(amax / M), T(1e-10))
        scale = 2^ceil(T(log2(d)))

    T rounds to the dtype of the elements, and M is the largest element value. The exponent is limited to [-127, 127].
    If T(1e-10) is 0, as for float16, amax = 0 gives code 0 (2^-127). An infinite or NaN amax gives code 0, too. tensor
    is not used. Source: SGLang kvfp4_tensor.py.
    """
    ratio = np.maximum(round_to(amax / recipe.element.max, dtype), round_to(np.full_like(amax, 1e-10), dtype))
    logarithm = show("log2 of the scale", round_to(log2(ratio), dtype))
    return np.where(np.isfinite(amax), _clipped(np.ceil(logarithm)), np.uint8(0))


factor_e8m0_sglang = factor_e8m0_sglang_kv = _auto_round_factor


def code_e8m0_qwix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(T(T(log s) * reciprocal(T(log 2)))), as qwix 0.1.8 computes it with XLA on a CPU.

    s is block_arith.qwix_scale of amax, reciprocal is block_arith.qwix_reciprocal, and T rounds to the dtype of the
    elements. For amax = 0, s is 1 (code 127). If s is infinite or NaN, the code is 255. tensor is not used.

    Exact: XLA computes log by a polynomial for vectors and by libm for single elements. Neither is correctly rounded,
    but the log here is. For every s, all three give the same exponent.
    """
    scale = qwix_scale(amax, recipe, dtype)
    log_of_2 = round_to(np.float32(np.log(2)), dtype)
    with np.errstate(all="ignore"):
        logarithm = round_to(np.log(scale.astype(np.float64)).astype(np.float32), dtype)
        log2_of_scale = round_to(logarithm * qwix_reciprocal(log_of_2, dtype), dtype)
        exponent = np.ceil(show("log2 of the scale", log2_of_scale))
    return np.where(np.isfinite(scale), _clipped(exponent), np.uint8(255))


def factor_e8m0_qwix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of a block in qwix: 2^(127 - code), or 0 if amax is infinite.

    Infinite and NaN amaxes both give code 255. For NaN, the factor is NaN. tensor, recipe and dtype are not used.
    """
    return np.where(np.isinf(amax), ZERO, inverse_e8m0(codes))


# ---- comfy-kitchen, MSLK, aiter and DeepSeek ----


def code_e8m0_comfy_kitchen(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(max(amax / M, 2^-127))), as comfy-kitchen computes it.

    log2 is rounded to float32, and M is the largest element value. The exponent is at most 127. amax = 0 gives code 0
    (2^-127). An infinite or NaN amax gives code 0 too, because the producer casts it to an integer. tensor and dtype
    are not used. Source: comfy-kitchen backends/eager/quantization.py quantize_mxfp8.
    """
    exponent = np.ceil(show("log2 of the scale", log2(np.maximum(amax / recipe.element.max, np.float32(2.0**-127)))))
    return np.where(np.isfinite(amax), _clipped(exponent), np.uint8(0))


def factor_e8m0_comfy_kitchen(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in comfy-kitchen: 2^(127 - code).

    For code 0 the factor is infinite, because comfy-kitchen takes it for the scale 0. If amax is 0 too, the factor is
    1. Code 255 gives NaN. tensor, recipe and dtype are not used.
    """
    return np.where(codes > 0, inverse_e8m0(codes), np.where(amax == 0, ONE, np.float32(np.inf)))


def _mslk_code(amax: np.ndarray, addend: int, recipe: Recipe) -> np.ndarray:
    """Return the E8M0 code of 2^(E - emax), as MSLK's MX4 kernel computes it."""
    bits = np.minimum(np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFFFF, 0x7F800000) + addend
    show("amax, rounded by the rule", bits.astype(np.int32).view(np.float32))
    return np.clip((bits >> 23) - recipe.element.emax, 0, 254 - recipe.element.emax).astype(np.uint8)


def code_e8m0_mslk_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as MSLK's MX4 kernel computes it with mode ceil.

    emax is the exponent of the largest element value. The logarithm is taken exactly. amax = 0 gives code 0. The scale
    is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not used. Source: MSLK
    quantize_kernels, triton_quantize_mx4.
    """
    return _mslk_code(amax, 0x7FFFFF, recipe)


def code_e8m0_mslk_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as MSLK's MX4 kernel computes it with mode even.

    emax is the exponent of the largest element value. r is 2^(k + 1) if amax is above 1.75 * 2^k, with k =
    floor(log2(amax)), and otherwise amax. An amax equal to that bound is not raised, unlike in the rule e8m0_even. amax
    = 0 gives code 0. The scale is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not
    used.
    """
    return _mslk_code(amax, 0x1FFFFF, recipe)


def code_e8m0_mslk_nearest(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(amax) + 0.5) - emax), as MSLK's MX4 kernel computes it with mode nearest.

    emax is the exponent of the largest element value. log2 and the sum are rounded to float32. amax = 0 counts as
    2^-126. The scale is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not used.
    """
    is_usual = (amax > 0) & np.isfinite(amax)
    logarithm = show("log2 of the amax", log2(np.where(is_usual, amax, np.float32(2.0**-126))))
    exponent = np.floor(logarithm + np.float32(0.5)) - recipe.element.emax
    codes = np.clip(exponent + 127, 0, 254 - recipe.element.emax)
    return np.where(is_usual | (amax == 0), codes, 254 - recipe.element.emax).astype(np.uint8)


def code_e8m0_aiter_up(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as aiter does with mode RoundUp.

    M is the largest element value. The power is at least 2^-126, so only amax / M = 0 gives code 0. inf and NaN give
    255. tensor and dtype are not used. Source: aiter utility/fp4_utils.py f32_to_e8m0.
    """
    return np.minimum(exponent_up(amax / recipe.element.max), 255).astype(np.uint8)


def code_e8m0_aiter_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax / 2^emax, rounded up to a power of two, as aiter does with mode Ceil.

    emax is the exponent of the largest element value. The power is at least 2^-126, so only amax / 2^emax = 0 gives
    code 0. inf and NaN give 255. tensor and dtype are not used.
    """
    return np.minimum(exponent_up(amax / np.float32(2.0**recipe.element.emax)), 255).astype(np.uint8)


def code_e8m0_deepseek(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of max(amax, 6 * 2^-126) * fp32(1/6), rounded up to a power of two, as DeepSeek-V4 does.

    So the code is at least 1 (2^-126), also for a block of zeros. inf and NaN give 255. tensor, recipe and dtype are
    not used. Source: DeepSeek-V4 inference/kernel.py fp4_act_quant.
    """
    ratio = np.maximum(amax, E2M1.max * FLT_MIN) * INV6
    return np.minimum(exponent_up(ratio), 255).astype(np.uint8)


def code_e8m0_deepseek_fp8(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of max(amax, 1e-4) * fp32(1/M), rounded up to a power of two, as DeepSeek-V4 does for FP8.

    M is the largest element value. inf and NaN give 255. tensor and dtype are not used. Source: DeepSeek-V4
    inference/kernel.py act_quant.
    """
    ratio = np.maximum(amax, np.float32(1e-4)) * (ONE / recipe.element.max)
    return np.minimum(exponent_up(ratio), 255).astype(np.uint8)
