"""Define block rules, which compute the scale of a block from its amax, and the factor that scales its elements.

A rule named in recipes/rules.py is a pair of functions, here and in CUDA (cuda/kernels/rules/block_rules_*.cuh):
code_<rule>, which returns scale codes (uint8 bits of the scale format), and factor_<rule>, which returns the float32
factors. Both define the results for blocks of zeros and for NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp4kit.arithmetic import exponent_field
from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX, FLT_MIN, ElementFormat
from fp4kit.recipes import Recipe, rules
from fp4kit.reference import ascend
from fp4kit.reference.arith import (
    INV6,
    ONE,
    ZERO,
    Array,
    Dtype,
    divide_ftz,
    divide_full,
    log2,
    multiply_ftz,
    reciprocal_approx_ftz,
    reciprocal_or_zero,
    round_to,
)
from fp4kit.reference.codec import (
    decode,
    decode_scale,
    encode,
    encode_e4m3_scale,
    encode_e8m0_scale,
    encode_scale,
    exponent_up,
    inverse_e8m0,
    show,
)
from fp4kit.reference.tensor_rules import TensorScale, largest_element, nncf_scale, reciprocal_of_scale


class BlockRule(NamedTuple):
    """The two functions of a block rule, which quantization calls for blocks.

    A rule without a factor function of its own uses the default of its scale format: scale * tensor.decode for E4M3, by
    which elements are divided, and 2^(127 - code) for E8M0, by which elements are multiplied. recipe.apply says how the
    factor is used (Recipe.apply).

    Arguments and notation in all rules. All arithmetic is float32 and rounds to nearest even after every written
    operation, unless a rule says that it flushes subnormals or rounds to the input dtype.

    - amax: the largest magnitude of each block. In texts such as "inf gives 254", inf is an amax and 254 a code
    - tensor: the TensorScale of the blocks. tensor.encode multiplies elements before encoding, and tensor.decode
      multiplies values after decoding
    - dtype, the input dtype: the dtype of the elements. T(t): t rounded to it
    - scale: the value of the stored scale code
    - M and emax: the largest element value and its exponent
    - E4M3(t): the code of t, rounded to nearest even and saturated at 448
    - fp32(t): t rounded to float32
    - rcp(t): the approximate reciprocal, PTX rcp.approx.ftz.f32

    Attributes:
        code: code(amax, tensor, recipe, dtype) returns the scale codes (uint8) of blocks from their amaxes.
        factor: factor(codes, amax, tensor, recipe, dtype) returns the float32 factors that scale the elements of the
            blocks, from the scale codes.
    """

    code: Callable[[Array, TensorScale, Recipe, Dtype], Array]
    factor: Callable[[Array, Array, TensorScale, Recipe, Dtype], Array]


def _is_zero(amax: Array) -> Array:
    """Return a mask of the amaxes that are zero or subnormal. If subnormals are flushed, both count as zero."""
    return np.abs(amax) < FLT_MIN


# ---- E4M3 scales ----


def _product(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the default factor of E4M3 rules, which divides the elements: scale * tensor.decode."""
    return decode_scale(codes) * tensor.decode


def _minimum(recipe: Recipe) -> np.ufunc:
    """Return the function that takes the minimum of two numbers as the recipe's producer does if one of them is NaN."""
    return np.minimum if recipe.amax_nan == "propagate" else np.fmin  # as fminf, which drops the NaN of inf * 0


def code_te(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as Transformer Engine computes it.

        code = E4M3(min(amax * (tensor.encode * fp32(1/6)), FLT_MAX))

    tensor.encode is the encode scale of the tensor. Codes saturate at 448. The product in the inner parentheses is
    rounded first. If the product with amax is NaN, the code is a NaN code if recipe.amax_nan is "propagate", otherwise
    that of 448. dtype is not used. Source: TE core_nvfp4.cuh.
    """
    return encode_e4m3_scale(_minimum(recipe)(amax * (tensor.encode * INV6), FLT_MAX))


def factor_te(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block, as Transformer Engine computes it.

        factor = min(1 / (scale * tensor.decode), FLT_MAX)

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale is 0, the factor is
    FLT_MAX. Nonzero elements then get the code of the largest value, but all elements of the block decode to 0. If
    scale is NaN, the factor is FLT_MAX, or NaN if recipe.amax_nan is "propagate". amax and dtype are not used.
    """
    return _minimum(recipe)(ONE / (decode_scale(codes) * tensor.decode), FLT_MAX)


def code_flashinfer(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as FlashInfer computes it by default.

        code = E4M3(tensor.encode * (amax * rcp(6)))

    tensor.encode is the encode scale of the tensor, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results
    of every operation are flushed to zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not
    used.
    """
    return encode_e4m3_scale(multiply_ftz(tensor.encode, multiply_ftz(amax, reciprocal_approx_ftz(np.float32(6)))))


def factor_flashinfer(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block, as FlashInfer computes it by default.

        factor = rcp(scale * rcp(tensor.encode)), or 0 if amax is 0 or subnormal

    scale is the value of the scale code, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results of every
    operation are flushed to zero. For scale 0 and any other amax, the factor is infinite. A NaN scale gives NaN. recipe
    and dtype are not used.
    """
    factor = reciprocal_approx_ftz(multiply_ftz(decode_scale(codes), reciprocal_approx_ftz(tensor.encode)))
    return np.where(_is_zero(amax), ZERO, factor)


def code_flashinfer_precise(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as FlashInfer computes it without fast math.

        code = E4M3(amax * (tensor.encode * fp32(1/6))), or 0 if amax is 0 or subnormal

    tensor.encode is the encode scale of the tensor. Subnormal operands and results of every operation are flushed to
    zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not used.
    """
    return encode_e4m3_scale(np.where(_is_zero(amax), ZERO, multiply_ftz(amax, multiply_ftz(tensor.encode, INV6))))


def factor_flashinfer_precise(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block, as FlashInfer computes it without fast math.

        factor = min(1 / (scale * (1 / tensor.encode)), FLT_MAX), or 0 if amax is 0 or subnormal

    scale is the value of the scale code. Subnormal operands and results of every operation are flushed to zero. A scale
    of 0 or NaN gives FLT_MAX, and -0 gives -infinity. recipe and dtype are not used.
    """
    factor = divide_ftz(ONE, multiply_ftz(decode_scale(codes), divide_ftz(ONE, tensor.encode)))
    return np.where(_is_zero(amax), ZERO, np.fmin(factor, FLT_MAX))


def code_modelopt(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as Model-Optimizer computes it.

        code = E4M3(clamp(r, 2^-9, 448)),   r = amax / (6 * tensor.decode), or 1 if r is 0

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. The factor is the
    default, scale * tensor.decode, which divides the elements. NaN gives a NaN code. dtype is not used.
    """
    ratio = amax / (recipe.element.max * tensor.decode)
    return encode_e4m3_scale(np.clip(np.where(ratio == 0, ONE, ratio), E4M3.min_subnormal, E4M3.max))


def code_modelopt_static(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as Model-Optimizer computes it from calibrated block amaxes.

        code = E4M3(clamp(r * recipe.scale_max / (tensor.amax / 6), 2^-9, 448)),   r = amax / 6, or 1 if r is 0

    6 stands for the largest element value. A tensor amax of 0 gives the code of 448, and a NaN gives a NaN code. The
    elements are then divided by the default factor, scale * tensor.decode. dtype is not used.
    """
    ratio = amax / recipe.element.max
    ratio = np.where(ratio == 0, ONE, ratio) * np.float32(recipe.scale_max)
    return encode_e4m3_scale(np.clip(ratio / (tensor.amax / recipe.element.max), E4M3.min_subnormal, E4M3.max))


def code_torchao(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as torchao computes it.

        code = E4M3(clamp(amax / 6 / tensor.decode, 2^-6, 448))

    6 stands for the largest element value, tensor.decode is the decode scale of the tensor, and 2^-6 is the smallest
    normal value of E4M3. So a block of zeros gets the code of 2^-6. NaN gives a NaN code. dtype is not used.
    """
    ratio = amax / recipe.element.max / tensor.decode
    return encode_e4m3_scale(np.clip(ratio, E4M3.min_normal, E4M3.max))


def factor_torchao(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block, as torchao computes it: tensor.encode / scale.

    scale is the value of the scale code, and tensor.encode is 1 / tensor.decode. A NaN scale gives NaN. The rule's own
    codes are never 0; a code 0 that a caller passes gives an infinite factor. amax, recipe and dtype are not used.
    """
    return tensor.encode / decode_scale(codes)


def code_compressed_tensors(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as compressed-tensors computes it.

        code = E4M3(T(amax / 6) * tensor.encode), or the code of 0.125 if this code is 0

    T rounds to dtype, the dtype of the elements. 6 stands for the largest element value, and tensor.encode is the
    encode scale of the tensor. Codes saturate at 448, and NaN gives a NaN code.
    """
    codes = encode_e4m3_scale(round_to(amax / recipe.element.max, dtype) * tensor.encode)
    return np.where(codes == 0, encode(np.float32(0.125), E4M3), codes)


def factor_compressed_tensors(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor of each block's elements in compressed-tensors: scale / tensor.encode.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used.
    """
    return decode_scale(codes) / tensor.encode


# ---- E8M0 scales ----


def _inverse(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return 2^(127 - code), the default factor of E8M0 rules."""
    return inverse_e8m0(codes)


def _shifted_exponent(rounded: Array, element: ElementFormat, up: Array | int = 0) -> Array:
    """Return the E8M0 code of 2^(floor(log2(rounded)) - emax + up), clamped to the range of E8M0."""
    field = exponent_field(show("amax, rounded by the rule", np.asarray(rounded, np.float32)))
    codes = np.where(field == 255, 255, np.clip(field + up - element.emax, 0, 255))
    return codes.astype(np.uint8)


def _add_to_bits(x: Array, addend: int) -> Array:
    """Return x with an integer added to its bit pattern, so that a carry raises the exponent."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return np.where(bits > 0x7F800000, bits, bits + addend).astype(np.int32).view(np.float32)


def code_e8m0_floor(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as OCP MX v1.0 defines the scale.

    emax is the exponent of the largest element value. Exponents below -127, also that of amax = 0, give code 0
    (2^-127). inf and NaN give code 255 (NaN). tensor and dtype are not used.
    """
    return _shifted_exponent(amax, recipe.element)


def code_e8m0_ceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as torchao's mode CEIL does.

    emax is the exponent of the largest element value. The logarithm is taken exactly, from the bits of amax. Exponents
    below -127, also that of amax = 0, give code 0 (2^-127). inf and NaN give code 255 (NaN). tensor and dtype are not
    used.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted_exponent(amax, recipe.element, up=mantissa != 0)


def code_e8m0_even(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as torchao's mode EVEN does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. For E2M1, an amax of 1.75 * 2^k or more counts as 2^(k + 1). For E4M3 and E2M3, an amax of 1.9375 * 2^k or
    more does. amax = 0 gives code 0. If r is infinite or amax is NaN, the code is 255 (NaN). tensor and dtype are not
    used.
    """
    return _shifted_exponent(_add_to_bits(amax, 1 << 22 - recipe.element.mantissa_bits), recipe.element)


def code_e8m0_te(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax * fp32(1 / M), rounded up to a power of two, as Transformer Engine computes it.

    M is the largest element value. 0 gives code 0 (2^-127), inf gives 254, and NaN gives 255. tensor and dtype are not
    used. Source: TE float_to_e8m0.
    """
    return encode_e8m0_scale(amax * (ONE / recipe.element.max))


def code_e8m0_rceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax * fp32(1 / M), rounded up to a power of two, as torchao's mode RCEIL does.

    M is the largest element value. 0 gives code 0 (2^-127); inf and NaN give code 255 (NaN). tensor and dtype are not
    used.
    """
    codes = code_e8m0_te(amax, tensor, recipe, dtype)
    return np.where(np.isfinite(amax), codes, 255).astype(np.uint8)


def code_e8m0_te_reference(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), or 255 if amax is NaN, as TE's Python reference quantizer does.

    M is the largest element value. log2 is rounded to float32, and the exponent is clamped to [-127, 127]. So amax = 0
    gives code 0, and inf gives 254. The rule e8m0_modelopt differs only for NaN. tensor and dtype are not used. Source:
    TE reference_nvfp4.py cast_to_e8, with pow_2_scales.
    """
    return np.where(np.isnan(amax), np.uint8(255), code_e8m0_modelopt(amax, tensor, recipe, dtype))


def code_e8m0_flashinfer_fp4(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax * rcp(M), rounded up to a power of two, as FlashInfer computes it.

    M is the largest element value, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results of every operation
    are flushed to zero. 0 gives code 0, inf gives 254, and NaN gives 255. tensor and dtype are not used.
    """
    return encode_e8m0_scale(multiply_ftz(amax, reciprocal_approx_ftz(recipe.element.max)))


def factor_e8m0_flashinfer_fp4(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in FlashInfer: 2^(127 - code), or 0 in two cases.

    The factor is 0 for code 0, which occurs only if amax * rcp(M) is 0, where M is the largest element value. It is
    also 0 for codes 254 and 255, where 2^(127 - code) is subnormal and therefore flushed.

    FlashInfer's FP4 kernel computes ex2(127 - code) and checks for a product of 0. Its FP8 kernel computes rcp of the
    scale. Both give this factor. amax, tensor, recipe and dtype are not used.
    """
    return np.where((codes > 0) & (codes < 254), inverse_e8m0(codes), ZERO)


code_e8m0_flashinfer_fp8, factor_e8m0_flashinfer_fp8 = code_e8m0_flashinfer_fp4, factor_e8m0_flashinfer_fp4


def code_e8m0_modelopt(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as Model-Optimizer computes it. M is the largest element value.

    log2 is rounded to float32, and the exponent is clamped to [-127, 127]. amax = 0 and NaN give the exponent -127
    (code 0), and inf gives 127 (code 254).

    For an amax a few ulp above M * 2^k, the rounded log2 is k. The exponent is then one too small, and the block's
    largest value saturates. tensor and dtype are not used.
    """
    ratio = amax / recipe.element.max
    exponent = np.ceil(show("log2 of the scale", log2(np.where(ratio > 0, ratio, np.float32(2.0**-127)))))
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def code_e8m0_compressed_tensors(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as compressed-tensors computes it.

    r is amax rounded to one mantissa bit, or to three for 6-bit elements, and emax is the exponent of the largest
    element value. So an amax of 1.75 * 2^k or more counts as 2^(k + 1), or of 1.9375 * 2^k or more for 6-bit elements.
    Exponents below -127, also that of amax = 0, give code 0. If r is infinite or amax is NaN, the code is 255 (NaN), as
    in OCP MX; the producer stores 127 with zero codes.

    For float16 elements the producer rounds the bits of a float16. So an amax below 2^-14, a subnormal, becomes 2^-14
    or 0. A scale that is 0 in float16, such as that of amax = 0, is replaced by 1 (code 127). tensor is not used.
    """
    mantissa_bits = 3 if recipe.element.bits == 6 else 1
    if dtype == np.float16:
        amax = _rounded_subnormals(amax, mantissa_bits)
    codes = _shifted_exponent(_add_to_bits(amax, 1 << 22 - mantissa_bits), recipe.element)
    if dtype == np.float16:
        codes = np.where(decode(codes, E8M0).astype(np.float16) == 0, np.uint8(127), codes)
    return codes


def _rounded_subnormals(amax: Array, mantissa_bits: int) -> Array:
    """Return amax, with values below 2^-14, the smallest normal of float16, rounded to 2^-14 or 0."""
    # An amax is rounded up if amax + 2^(-15 - mantissa_bits) reaches 2^-14. compressed-tensors gets these results
    # because it adds an integer to the bits of a float16 and then clears the low bits.
    normal = np.float32(2.0**-14)
    rounds_up = amax + np.ldexp(normal, -1 - mantissa_bits) >= normal
    return np.where(amax < normal, np.where(rounds_up, normal, ZERO), amax)


NAN = np.float32(np.nan)
QUARK_ZERO = np.float32(2.0**-23)  # replaces a scale of 0: the machine epsilon of float32


def qwix_reciprocal(x: Array | np.float32, dtype: Dtype) -> Array:
    """Return 1 / x as qwix computes it on a CPU: rounded to float16 if dtype is float16, otherwise to float32.

    x is the float32 divisor, and 0 gives infinity. dtype is the dtype of the elements. qwix divides by x, but XLA on a
    CPU multiplies by this reciprocal instead. XLA computes bfloat16 in float32.
    """
    inverse = np.divide(ONE, x)
    return round_to(inverse, dtype) if dtype == np.float16 else inverse


def qwix_scale(amax: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the scale of blocks in qwix: T(amax * qwix_reciprocal(M)), or 1 if this is below a threshold.

    T rounds to dtype, the dtype of the elements, and M is the largest element value. The threshold is the square root
    of the smallest normal of dtype: 2^-7 for float16, otherwise 2^-63. So a float16 block of E2M1 elements with an amax
    below 0.047 has scale 1.
    """
    scale = round_to(amax * qwix_reciprocal(recipe.element.max, dtype), dtype)
    return np.where(scale < np.float32(2.0**-7 if dtype == np.float16 else 2.0**-63), ONE, scale)


def _clipped(exponent: Array) -> Array:
    """Return the E8M0 codes of 2^exponent, with the exponent clamped to [-127, 127]. A NaN exponent gives code 0."""
    return (np.clip(np.where(np.isnan(exponent), -127, exponent), -127, 127) + 127).astype(np.uint8)


# ---- from the bits of the amax ----


def _even_exponent(amax: Array, recipe: Recipe) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), before it is clamped: int32."""
    bits = np.asarray(amax, np.float32).view(np.int32) + (1 << 22 - recipe.element.mantissa_bits)
    show("amax plus half a step", np.asarray(bits, np.int32).view(np.float32))
    field = (bits >> 23) & 255
    return np.where((field == 255) | np.isnan(amax), 255, field - recipe.element.emax)


def code_e8m0_even_finite(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 0 to 254, as vLLM's Triton code does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. amax = 0 gives code 0 (2^-127), and an infinite or NaN amax gives 254. tensor and dtype are not used. Source:
    vLLM downcast_to_mxfp of mxfp4_utils.py, as Triton's interpreter runs it.
    """
    return np.clip(_even_exponent(amax, recipe), 0, 254).astype(np.uint8)


def code_e8m0_quark_even(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 1 to 254, as Quark does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. So a scale of 2^-127, also that of amax = 0, is stored as 2^-126. An infinite amax gives 254, and NaN gives
    127. tensor and dtype are not used. Source: Quark even_round, real quantization.
    """
    return np.where(np.isnan(amax), 127, np.clip(_even_exponent(amax, recipe), 1, 254)).astype(np.uint8)


def factor_e8m0_quark_even(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in Quark: 2^(127 - code), or NaN if amax is NaN.

    There is one exception: if amax gives a scale of 2^-127 or less, code 1 was stored in place of code 0, but the
    factor is still 2^127. tensor and dtype are not used.
    """
    was_raised = (codes == 1) & (_even_exponent(amax, recipe) < 1)
    return np.where(np.isnan(amax), NAN, np.where(was_raised, np.float32(2.0**127), inverse_e8m0(codes)))


def code_e8m0_triton_up(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as triton_kernels does with ROUND_UP.

    M is the largest element value. The power is at least 2^-126 unless amax / M is 0, which gives code 0. inf gives
    255, and NaN gives 0. tensor and dtype are not used. Source: triton_kernels mxfp.py.
    """
    return (exponent_up(amax / recipe.element.max) & 255).astype(np.uint8)


def factor_e8m0_triton_up(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in triton_kernels: 2^(127 - code).

    For codes 0 and 255, the factor is 0. The products are then zeros for finite elements, and NaN for infinite ones.
    amax, tensor, recipe and dtype are not used.
    """
    return np.where((codes == 0) | (codes == 255), ZERO, inverse_e8m0(codes))


def code_e8m0_triton_down(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / M, rounded down to a power of two, as triton_kernels does with ROUND_DOWN.

    M is the largest element value. If the quotient is below 2^-126, the code is 0. inf and NaN give 255. tensor and
    dtype are not used. Source: triton_kernels mxfp.py.
    """
    return exponent_field(show("block scale before rounding", amax / recipe.element.max)).astype(np.uint8)


factor_e8m0_triton_down = factor_e8m0_triton_up


def code_e8m0_fouroversix(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as fouroversix does with scale rule static_6.

    M is the largest element value. The power is at least 2^-126 unless amax / M is 0, which gives code 0. inf gives
    255. NaN gives 0, because the producer's byte wraps. tensor and dtype are not used. Source: fouroversix
    quantize_to_mxfp4.
    """
    return code_e8m0_triton_up(amax, tensor, recipe, dtype)


def code_e8m0_fouroversix_4(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / 4, rounded up to a power of two, as fouroversix does with scale rule static_4.

    The power is at least 2^-126 unless amax / 4 is 0, which gives code 0. inf gives 255. NaN gives 0, because the
    producer's byte wraps. tensor, recipe and dtype are not used. Source: fouroversix quantize_to_mxfp4.
    """
    return (exponent_up(amax / np.float32(4)) & 255).astype(np.uint8)


def factor_e8m0_fouroversix(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in fouroversix: 2^(127 - code).

    For code 255 the factor is 0. For code 0 it is NaN, because the producer divides zeros by 0. amax, tensor, recipe
    and dtype are not used.
    """
    return np.where(codes == 0, NAN, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_fouroversix_4 = factor_e8m0_fouroversix


def code_e8m0_even_normal(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped to codes from 0 to 254, as vLLM does on a GPU.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. The codes equal those of the rule e8m0_even_finite. Only the factor differs: elements with the scale 2^-127
    become zeros, because a GPU flushes that scale. tensor and dtype are not used. Source: vLLM downcast_to_mxfp
    (Triton).
    """
    return code_e8m0_even_finite(amax, tensor, recipe, dtype)


factor_e8m0_even_normal = factor_e8m0_triton_up


def code_e8m0_deepgemm(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of max(amax, 1e-4) / M, rounded up to a power of two, as DeepGEMM does.

    M is the largest element value. A block of zeros counts as one with amax 1e-4. The power is at most 2^127 (code
    254), also for an infinite or NaN amax. tensor and dtype are not used. Source: DeepGEMM utils/math.py ceil_to_ue8m0.
    """
    return np.clip(exponent_up(np.maximum(amax, np.float32(1e-4)) / recipe.element.max), 1, 254).astype(np.uint8)


# ---- from a logarithm, in float32 or in the dtype of the elements ----


def _auto_round(exponent: Array, amax: Array, at_zero: float) -> Array:
    """Return the E8M0 codes of 2^exponent, with the special cases of auto-round and SGLang."""
    codes = _clipped(np.where(amax == 0, np.float32(at_zero), exponent))
    return np.where(np.isfinite(amax), codes, np.uint8(0))


def _auto_round_factor(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in auto-round and SGLang: 2^(127 - code)."""
    return np.where(np.isfinite(amax), inverse_e8m0(codes), NAN)


def code_e8m0_auto_round(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as auto-round computes it.

    log2 is rounded to float32, and emax is the exponent of the largest element value. The exponent is clamped to [-127,
    127]. amax = 0 gives the code of 2^(1 - emax). An infinite or NaN amax gives code 0. tensor and dtype are not used.
    Source: auto-round data_type/mxfp.py quant_mx.
    """
    return _auto_round(
        np.floor(show("log2 of the amax", log2(amax))) - recipe.element.emax, amax, 1 - recipe.element.emax
    )


def code_e8m0_auto_round_rceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as auto-round's quant_mx_rceil computes it.

    log2 is rounded to float32, and M is the largest element value. The exponent is clamped to [-127, 127]. amax = 0
    gives the scale 2 (code 128). An infinite or NaN amax gives code 0. tensor and dtype are not used.
    """
    return _auto_round(np.ceil(show("log2 of the scale", log2(amax / recipe.element.max))), amax, 1)


def code_e8m0_auto_round_rceil_v2(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / 7.25)), as auto-round's quant_mx_rceil_v2 computes it.

    log2 is rounded to float32. The exponent is clamped to [-127, 127]. amax = 0 gives the scale 2 (code 128). An
    infinite or NaN amax gives code 0. tensor, recipe and dtype are not used.
    """
    return _auto_round(np.ceil(show("log2 of the scale", log2(amax / np.float32(7.25)))), amax, 1)


factor_e8m0_auto_round = _auto_round_factor


def _auto_round_up_factor(codes: Array, amax: Array, ratio: Array) -> Array:
    """Return 2^(127 - code), or NaN in two cases: amax is infinite or NaN, or ratio is 0 although amax is positive."""
    return np.where(np.isfinite(amax) & ((ratio != 0) | (amax == 0)), inverse_e8m0(codes), NAN)


def factor_e8m0_auto_round_rceil(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in auto-round's quant_mx_rceil: 2^(127 - code).

    The factor is NaN if amax is infinite or NaN. It is also NaN if a positive amax divided by the largest element value
    underflows to 0. tensor and dtype are not used.
    """
    return _auto_round_up_factor(codes, amax, amax / recipe.element.max)


def factor_e8m0_auto_round_rceil_v2(
    codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype
) -> Array:
    """Return the factor that multiplies the elements of each block in auto-round's quant_mx_rceil_v2: 2^(127 - code).

    The factor is NaN if amax is infinite or NaN. It is also NaN if a positive amax divided by 7.25 underflows to 0.
    tensor, recipe and dtype are not used.
    """
    return _auto_round_up_factor(codes, amax, amax / np.float32(7.25))


def _quark_scale(amax: Array, recipe: Recipe, dtype: Dtype, rounded: np.ufunc) -> Array:
    """Return the scale that Quark computes from an amax: s = T(2^(R(T(log2(amax))) - emax)), or 2^-23 if s is 0."""
    is_finite = np.isfinite(amax)
    logarithm = show("log2 of the amax", round_to(log2(np.where(is_finite, amax, ONE)), dtype))
    exponent = np.clip(rounded(logarithm), -200, 200).astype(np.int32)
    with np.errstate(all="ignore"):
        scale = round_to(np.ldexp(ONE, exponent - recipe.element.emax), dtype)
    return np.where(is_finite, np.where(scale == 0, QUARK_ZERO, scale), amax)


def _quark_code(scale: Array, amax: Array) -> Array:
    """Return the E8M0 codes that Quark stores for scales: from 1 (2^-126) to 254, or 127 if amax is infinite or NaN."""
    return np.where(np.isfinite(amax), np.clip(exponent_field(scale), 1, 254), 127).astype(np.uint8)


def _quark_factor(codes: Array, scale: Array, amax: Array) -> Array:
    """Return the divisor that Quark applies to the elements of each block."""
    return np.where(_quark_code(scale, amax) == codes, scale, decode(codes, E8M0))


def code_e8m0_quark_floor(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of s = T(2^(floor(T(log2(amax))) - emax)), as Quark computes it with scale mode floor.

    T rounds to the dtype of the elements, and emax is the exponent of the largest element value. If s is 0, as for amax
    = 0, it is replaced by 2^-23. Scales below 2^-126 are stored as 2^-126. An infinite or NaN amax gives 127. tensor is
    not used. Source: Quark get_scale.
    """
    return _quark_code(_quark_scale(amax, recipe, dtype, np.floor), amax)


def factor_e8m0_quark_floor(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor that Quark applies to the elements of each block with scale mode floor.

    - If the caller of quantize passed a code that amax does not give, the divisor is the value of this code.
    - Otherwise, an infinite or NaN amax is the divisor itself.
    - Otherwise, the divisor is the scale s of code_e8m0_quark_floor. An s below 2^-126 is not rounded up, although
      2^-126 is stored.

    tensor is not used.
    """
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.floor), amax)


def code_e8m0_quark_ceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of s = T(2^(ceil(T(log2(amax))) - emax)), as Quark computes it with scale mode ceil.

    T rounds to the dtype of the elements, and emax is the exponent of the largest element value. If s is 0, as for amax
    = 0, it is replaced by 2^-23. Scales below 2^-126 are stored as 2^-126. An infinite or NaN amax gives 127. tensor is
    not used. Source: Quark get_scale.
    """
    return _quark_code(_quark_scale(amax, recipe, dtype, np.ceil), amax)


def factor_e8m0_quark_ceil(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor that Quark applies to the elements of each block with scale mode ceil.

    - If the caller of quantize passed a code that amax does not give, the divisor is the value of this code.
    - Otherwise, an infinite or NaN amax is the divisor itself.
    - Otherwise, the divisor is the scale s of code_e8m0_quark_ceil. An s below 2^-126 is not rounded up, although
      2^-126 is stored.

    tensor is not used.
    """
    return _quark_factor(codes, _quark_scale(amax, recipe, dtype, np.ceil), amax)


def code_e8m0_sglang(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(T(log2(T(amax / M)))), as SGLang's MXFP4 utility computes it.

    T rounds to the dtype of the elements, and M is the largest element value. The exponent is clamped to [-127, 127].
    An amax that is 0, infinite or NaN gives code 0 (2^-127). tensor is not used. Source: SGLang mxfp4_tensor.py
    MXFP4QuantizeUtil.
    """
    ratio = round_to(amax / recipe.element.max, dtype)
    logarithm = show("log2 of the scale", round_to(log2(ratio), dtype))
    return _auto_round(np.ceil(np.maximum(logarithm, -127)), amax, -127)


def code_e8m0_sglang_kv(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
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


def code_e8m0_qwix(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
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


def factor_e8m0_qwix(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of a block in qwix: 2^(127 - code), or 0 if amax is infinite.

    Infinite and NaN amaxes both give code 255. For NaN, the factor is NaN. tensor, recipe and dtype are not used.
    """
    return np.where(np.isinf(amax), ZERO, inverse_e8m0(codes))


# ---- comfy-kitchen, MSLK, aiter and DeepSeek ----


def code_e8m0_comfy_kitchen(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(max(amax / M, 2^-127))), as comfy-kitchen computes it.

    log2 is rounded to float32, and M is the largest element value. The exponent is at most 127. amax = 0 gives code 0
    (2^-127). An infinite or NaN amax gives code 0 too, because the producer casts it to an integer. tensor and dtype
    are not used. Source: comfy-kitchen backends/eager/quantization.py quantize_mxfp8.
    """
    exponent = np.ceil(show("log2 of the scale", log2(np.maximum(amax / recipe.element.max, np.float32(2.0**-127)))))
    return np.where(np.isfinite(amax), _clipped(exponent), np.uint8(0))


def factor_e8m0_comfy_kitchen(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in comfy-kitchen: 2^(127 - code).

    For code 0 the factor is infinite, because comfy-kitchen takes it for the scale 0. If amax is 0 too, the factor is
    1. Code 255 gives NaN. tensor, recipe and dtype are not used.
    """
    return np.where(codes > 0, inverse_e8m0(codes), np.where(amax == 0, ONE, np.float32(np.inf)))


def _mslk_power(amax: Array, addend: int, recipe: Recipe) -> Array:
    """Return the E8M0 code of 2^(E - emax), as MSLK's MX4 kernel computes it."""
    bits = np.minimum(np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFFFF, 0x7F800000) + addend
    show("amax, rounded by the rule", bits.astype(np.int32).view(np.float32))
    return np.clip((bits >> 23) - recipe.element.emax, 0, 254 - recipe.element.emax).astype(np.uint8)


def code_e8m0_mslk_ceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as MSLK's MX4 kernel computes it with mode ceil.

    emax is the exponent of the largest element value. The logarithm is taken exactly. amax = 0 gives code 0. The scale
    is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not used. Source: MSLK
    quantize_kernels, triton_quantize_mx4.
    """
    return _mslk_power(amax, 0x7FFFFF, recipe)


def code_e8m0_mslk_even(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as MSLK's MX4 kernel computes it with mode even.

    emax is the exponent of the largest element value. r is 2^(k + 1) if amax is above 1.75 * 2^k, with k =
    floor(log2(amax)), and otherwise amax. An amax equal to that bound is not raised, unlike in the rule e8m0_even. amax
    = 0 gives code 0. The scale is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not
    used.
    """
    return _mslk_power(amax, 0x1FFFFF, recipe)


def code_e8m0_mslk_nearest(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(amax) + 0.5) - emax), as MSLK's MX4 kernel computes it with mode nearest.

    emax is the exponent of the largest element value. log2 and the sum are rounded to float32. amax = 0 counts as
    2^-126. The scale is at most 2^(127 - emax), also for an infinite or NaN amax. tensor and dtype are not used.
    """
    is_usual = (amax > 0) & np.isfinite(amax)
    logarithm = show("log2 of the amax", log2(np.where(is_usual, amax, np.float32(2.0**-126))))
    exponent = np.floor(logarithm + np.float32(0.5)) - recipe.element.emax
    codes = np.clip(exponent + 127, 0, 254 - recipe.element.emax)
    return np.where(is_usual | (amax == 0), codes, 254 - recipe.element.emax).astype(np.uint8)


def code_e8m0_aiter_up(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / M, rounded up to a power of two, as aiter does with mode RoundUp.

    M is the largest element value. The power is at least 2^-126, so only amax / M = 0 gives code 0. inf and NaN give
    255. tensor and dtype are not used. Source: aiter utility/fp4_utils.py f32_to_e8m0.
    """
    return np.minimum(exponent_up(amax / recipe.element.max), 255).astype(np.uint8)


def code_e8m0_aiter_ceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax / 2^emax, rounded up to a power of two, as aiter does with mode Ceil.

    emax is the exponent of the largest element value. The power is at least 2^-126, so only amax / 2^emax = 0 gives
    code 0. inf and NaN give 255. tensor and dtype are not used.
    """
    return np.minimum(exponent_up(amax / np.float32(2.0**recipe.element.emax)), 255).astype(np.uint8)


def code_e8m0_deepseek(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of max(amax, 6 * 2^-126) * fp32(1/6), rounded up to a power of two, as DeepSeek-V4 does.

    So the code is at least 1 (2^-126), also for a block of zeros. inf and NaN give 255. tensor, recipe and dtype are
    not used. Source: DeepSeek-V4 inference/kernel.py fp4_act_quant.
    """
    ratio = np.maximum(amax, E2M1.max * FLT_MIN) * INV6
    return np.minimum(exponent_up(ratio), 255).astype(np.uint8)


def code_e8m0_deepseek_fp8(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of max(amax, 1e-4) * fp32(1/M), rounded up to a power of two, as DeepSeek-V4 does for FP8.

    M is the largest element value. inf and NaN give 255. tensor and dtype are not used. Source: DeepSeek-V4
    inference/kernel.py act_quant.
    """
    ratio = np.maximum(amax, np.float32(1e-4)) * (ONE / recipe.element.max)
    return np.minimum(exponent_up(ratio), 255).astype(np.uint8)


# ---- JAX: jax.nn.scaled_dot_general ----
# XLA on a CPU flushes subnormals, and multiplies by a rounded reciprocal where the source divides by a scale.


def _jax_code(q: Array) -> Array:
    """Return the E8M0 codes of float32 q >= 0, rounded up to powers of two: inf gives 255 and NaN wraps to 0."""
    bits = np.asarray(show("block scale before rounding", q), np.float32).view(np.int32)
    field, mantissa = exponent_field(q), bits & 0x7FFFFF
    up = (mantissa > 0) & (field != 254) & ((field > 0) | (mantissa > 0x400000))
    return (field + up & 255).astype(np.uint8)


def _jax_value(codes: Array, dtype: Dtype) -> Array:
    """Return the values that JAX gives to E8M0 codes: 2^(code - 127) in dtype. 255 is inf; float16 code 0 is 2^-15."""
    values = np.where(codes == 255, np.float32(np.inf), np.ldexp(ONE, codes.astype(np.int32) - 127))
    return round_to(np.where((codes == 0) & (dtype == np.float16), np.float32(2.0**-15), values), dtype)


def _largest_inverse(recipe: Recipe, dtype: Dtype) -> Array:
    """Return 1 / M in float32, rounded to float16 for float16 elements. M is the largest element value."""
    return round_to(np.asarray(ONE / recipe.element.max), dtype if dtype == np.float16 else np.dtype(np.float32))


def code_e8m0_jax_011(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of T(amax * c), rounded up to a power of two, as JAX 0.11 computes it on a CPU.

    T rounds to the dtype of the elements. c is 1 / M, rounded to float16 for float16 elements and otherwise to float32;
    M is the largest element value. Subnormal operands and results are flushed to zero. 0 gives code 0, inf gives 255,
    and NaN gives 0, because the byte wraps. tensor is not used. Source: JAX cudnn/scaled_matmul_stablehlo.py quantize.
    """
    return _jax_code(round_to(multiply_ftz(amax, _largest_inverse(recipe, dtype)), dtype))


def factor_e8m0_jax_011(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in JAX 0.11 on a CPU: T(1 / T(2^(code - 127))).

    T rounds to the dtype of the elements. The value of code 255 is infinite, and that of code 0 is 2^-127, or 2^-15 for
    float16 elements. Subnormals are flushed, so code 0 gives an infinite factor for float32 and bfloat16, which turns
    zeros into NaN. amax, tensor and recipe are not used.
    """
    return round_to(divide_ftz(ONE, _jax_value(codes, dtype)), dtype)


code_e8m0_jax_011_jit = code_e8m0_jax_011


def factor_e8m0_jax_011_jit(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block as JAX 0.11 computes it on a CPU under jax.jit.

    It differs from that of e8m0_jax_011 only for code 0 and float32 elements, where XLA computes the constant 2^127.
    """
    factor = factor_e8m0_jax_011(codes, amax, tensor, recipe, dtype)
    return np.where(codes == 0, np.float32(2.0**127), factor) if dtype == np.float32 else factor


def code_e8m0_jax(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of amax * fp32(1 / M), rounded up to a power of two, as JAX computes it on a CPU since 0.12.

    It is the code of e8m0_jax_011 for float32 elements, whatever dtype is. M is the largest element value.
    """
    return code_e8m0_jax_011(amax, tensor, recipe, np.dtype(np.float32))


def factor_e8m0_jax(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block in JAX on a CPU since 0.12: that of e8m0_jax_011 for float32 elements."""
    return factor_e8m0_jax_011(codes, amax, tensor, recipe, np.dtype(np.float32))


code_e8m0_jax_jit = code_e8m0_jax


def factor_e8m0_jax_jit(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block under jax.jit since 0.12: that of e8m0_jax_011_jit for float32 elements."""
    return factor_e8m0_jax_011_jit(codes, amax, tensor, recipe, np.dtype(np.float32))


def code_e8m0_jax_gpu(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of T(amax / M), rounded up to a power of two, as JAX computes it on a GPU.

    T rounds to the dtype of the elements, and M is the largest element value. The quotient is that of PTX div.full.f32
    for float16 elements, and otherwise amax * fp32(1 / M). inf gives 255, and NaN gives 0. tensor is not used.
    """
    largest = recipe.element.max
    quotient = divide_full(amax, largest) if dtype == np.float16 else amax * (ONE / largest)
    return _jax_code(round_to(np.asarray(quotient), dtype))


def factor_e8m0_jax_gpu(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in JAX on a GPU: T(1 / T(2^(code - 127))).

    T and the values of codes are those of e8m0_jax_011, but subnormals are kept. amax, tensor and recipe are not used.
    """
    return round_to(ONE / _jax_value(codes, dtype), dtype)


def code_e8m0_jax_gpu_jit(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of T(amax * T(1 / M)), rounded up to a power of two, as JAX does on a GPU under jax.jit.

    T rounds to the dtype of the elements, and M is the largest element value. inf gives 255, and NaN gives 0. tensor is
    not used.
    """
    return _jax_code(round_to(amax * round_to(np.asarray(ONE / recipe.element.max), dtype), dtype))


factor_e8m0_jax_gpu_jit = factor_e8m0_jax_gpu


def code_jax(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as JAX computes it: E4M3((amax * tensor.encode) * fp32(1/6)).

    tensor.encode is the encode scale of the tensor. On a CPU, subnormal operands and results are flushed to zero. Codes
    saturate at 448, and NaN gives a NaN code. dtype is not used.
    """
    multiply = multiply_ftz if recipe.flush else np.multiply
    return encode_e4m3_scale(multiply(multiply(amax, tensor.encode), INV6))


def factor_jax(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block in JAX: 1 / scale, by which elements times tensor.encode are multiplied.

    scale is the value of the scale code. If scale is 0, the factor is infinite, which turns zeros into NaN. A NaN scale
    gives NaN. Only `codes` is read; the other parameters exist for a common signature.
    """
    return ONE / decode_scale(codes)


code_jax_jit = code_jax_gpu = code_jax
factor_jax_gpu = factor_jax


def factor_jax_jit(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in JAX on a CPU under jax.jit.

        factor = tensor.encode * (1 / scale)

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. Subnormal operands and
    results are flushed to zero. amax, recipe and dtype are not used.
    """
    return multiply_ftz(tensor.encode, ONE / decode_scale(codes))


# ---- miles, NNCF and oneDNN ----


def code_e8m0_miles_ceil(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as miles' branch kimi-k3 computes it.

    M is the largest element value. log2 is rounded to float32, and the exponent is clamped to [-127, 127]. amax = 0 and
    NaN give code 0, and inf gives 254. tensor and dtype are not used. Source: miles utils/mxfp4.py quantize_mxfp4.
    """
    return code_e8m0_modelopt(amax, tensor, recipe, dtype)


def factor_e8m0_miles_ceil(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 2^(127 - code), or NaN if amax is NaN.

    tensor, recipe and dtype are not used.
    """
    return np.where(np.isnan(amax), NAN, inverse_e8m0(codes))


def code_e8m0_miles_dsv4(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(max(log2(amax / M), -127)), as miles' mxfp4_quantize computes it.

    M is the largest element value, and log2 is rounded to float32. amax = 0 and NaN give code 0. inf gives code 0 too,
    because its byte wraps. tensor and dtype are not used.
    """
    return np.where(np.isinf(amax), np.uint8(0), code_e8m0_modelopt(amax, tensor, recipe, dtype))


def factor_e8m0_miles_dsv4(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 2^(127 - code), or 0 if amax is infinite.

    tensor, recipe and dtype are not used.
    """
    return np.where(np.isinf(amax), ZERO, inverse_e8m0(codes))


def code_e8m0_miles_even(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), clamped at code 0, as miles' newest version computes it.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. If r is infinite or NaN, the code is that of 2^(128 - emax). tensor and dtype are not used.
    """
    return np.maximum(np.minimum(_even_exponent(amax, recipe), 255 - recipe.element.emax), 0).astype(np.uint8)


def _nncf_code(exponent: Array) -> Array:
    """Return the E8M0 codes of 2^ceil(exponent), at least 2^-127 and at most 2^127. NaN gives 255."""
    codes = np.clip(np.ceil(show("log2 of the scale", exponent)), -127, 127) + 127
    return np.where(np.isnan(exponent), 255, np.nan_to_num(codes)).astype(np.uint8)


def code_e8m0_nncf(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(ln(s) * (1 / ln(2))), as NNCF computes it with OpenVINO: from 10000 elements on.

        s = max(amax, 2^-23) / M

    M is the largest element value. Both logarithms, the reciprocal and the product are rounded to float32, so some
    powers of two get the next larger scale. inf gives 254, and NaN gives 255. tensor and dtype are not used. Source:
    NNCF weight_compression/weight_lowering.py.
    """
    s = nncf_scale(amax, recipe.element.max, False)
    return _nncf_code(np.log(s.astype(np.float64)).astype(np.float32) * (ONE / np.float32(np.log(2))))


def code_e8m0_nncf_small(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(max(amax / M, 2^-23))), as NNCF computes it for fewer than 10000 elements.

    M is the largest element value, and log2 is rounded to float32. inf gives 254, and NaN gives 255. tensor and dtype
    are not used.
    """
    return _nncf_code(log2(nncf_scale(amax, recipe.element.max, True)))


def code_nncf(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as NNCF computes it from 10000 elements on.

        code = E4M3(float16(max(amax, 2^-23) / 6 / tensor.decode))

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. Both roundings are to
    nearest even. Quotients above 464, also NaN, give a NaN code. dtype is not used.
    """
    return _half_scale(factor_nncf(amax, amax, tensor, recipe, dtype) / tensor.decode)


def factor_nncf(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor of each block's elements in NNCF: max(amax, 2^-23) / 6, which the stored scale rounds.

    6 stands for the largest element value. codes, tensor and dtype are not used.
    """
    return nncf_scale(amax, recipe.element.max, False)


def code_nncf_small(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as NNCF computes it for fewer than 10000 elements.

    code = E4M3(float16(max(amax / 6, 2^-23) / tensor.decode)). Otherwise, this rule is code_nncf.
    """
    return _half_scale(factor_nncf_small(amax, amax, tensor, recipe, dtype) / tensor.decode)


def factor_nncf_small(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor of each block's elements in NNCF, for small tensors: max(amax / 6, 2^-23)."""
    return nncf_scale(amax, recipe.element.max, True)


def _half_scale(scale: Array) -> Array:
    """Return the E4M3 codes of block scales that are rounded to float16 first. Scales above 464 give a NaN code."""
    return encode(show("block scale before rounding", scale), E4M3, "rnh")


def code_onednn(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as oneDNN computes it: E4M3(float16(amax / 6)), or that of 1 for zeros.

    6 stands for the largest element value. Both roundings are to nearest even. Quotients above 464, also NaN, give a
    NaN code. tensor and dtype are not used. Source: oneDNN, ref matmul with dynamic_fp destination scales.
    """
    return _half_scale(np.where(amax == 0, ONE, amax / recipe.element.max))


factor_onednn = factor_jax


_INFINITY_BITS = 0x7F800000


def code_vllm(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as vLLM computes it.

        code = E4M3(clamp(tensor.encode * (amax * fp32(1/6)), -448, 448))

    tensor.encode is the encode scale of the tensor. The product in the inner parentheses is rounded first. NaN gives a
    NaN code. recipe and dtype are not used. Source: vLLM nvfp4_emulation_utils.py.
    """
    return encode_e4m3_scale(tensor.encode * (amax * INV6))


def factor_vllm(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in vLLM's emulation: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale * tensor.decode is
    0, the factor is 1 / 1e8. A NaN scale gives NaN. amax, recipe and dtype are not used.
    """
    scale = decode_scale(codes) * tensor.decode
    return ONE / np.where(scale == 0, np.float32(1e8), scale)


code_vllm_cuda = code_vllm


def factor_vllm_cuda(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in vLLM's Triton kernel.

        factor = tensor.encode * rcp(scale), or 0 if scale is 0

    scale is the value of the scale code, tensor.encode the encode scale of the tensor, and rcp is PTX
    rcp.approx.ftz.f32. A NaN scale gives NaN. amax, recipe and dtype are not used. Source: vLLM
    _nvfp4_quant_dequant_kernel.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, tensor.encode * reciprocal_approx_ftz(scale))


code_auto_round = code_vllm


def factor_auto_round(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in auto-round: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale * tensor.decode is
    0, the factor is 0. A NaN scale gives NaN. amax, recipe and dtype are not used. Source: auto-round
    data_type/nvfp.py.
    """
    return reciprocal_or_zero(decode_scale(codes) * tensor.decode)


def code_quark(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as AMD Quark computes it when it quantizes a loaded model.

        code = E4M3(amax / (6 * tensor.decode)), or the code of 1 if this code is 0

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. A quotient above 448,
    also an infinite one, gives the code of 448. A NaN quotient gives a NaN code. dtype is not used.
    """
    codes = encode_e4m3_scale(amax / (recipe.element.max * tensor.decode))
    return np.where(codes == 0, encode(ONE, E4M3), codes)


def factor_quark(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor of each block's elements in Quark: scale * tensor.decode, or 2^-23 if this product is 0.

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used. Source: Quark real_quantize_fp4_fp6_per_group.
    """
    scale = decode_scale(codes) * tensor.decode
    return np.where(scale == 0, QUARK_ZERO, scale)


def code_quark_file(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as AMD Quark computes it when it quantizes file to file.

    The scale is rounded twice:

        s = amax / 6, or 2^-23 if s is 0
        t = value of E4M3(s / tensor.decode) * tensor.decode
        code = E4M3(t / tensor.decode)

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. The code may be 0.
    Codes saturate at 448, and NaN gives a NaN code. dtype is not used.
    """
    scale = amax / recipe.element.max
    scale = decode_scale(encode_e4m3_scale(np.where(scale == 0, QUARK_ZERO, scale) / tensor.decode)) * tensor.decode
    return encode_e4m3_scale(scale / tensor.decode)


factor_quark_file = factor_quark


def code_fouroversix(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as fouroversix computes it with scale rule static_6.

        code = E4M3((amax / 6) * tensor.encode), or 0 if the whole tensor is zero

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. Codes saturate at 448,
    and NaN gives a NaN code. dtype is not used. Source: fouroversix pytorch/reference.py.
    """
    return _ratio_code(amax / recipe.element.max, tensor)


def code_fouroversix_4(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as fouroversix computes it with scale rule static_4.

        code = E4M3((amax / 4) * tensor.encode), or 0 if the whole tensor is zero

    This scale maps the block's amax to about 4, as an E2M1 value. tensor.encode is the encode scale of the tensor.
    Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not used. Source: fouroversix
    pytorch/reference.py.
    """
    return _ratio_code(amax / np.float32(4), tensor)


def _ratio_code(ratio: Array, tensor: TensorScale) -> Array:
    """Return E4M3(ratio * tensor.encode), or code 0 if the whole tensor is zero."""
    return encode_e4m3_scale(zero_of_zeros(ratio * tensor.encode, tensor))


def zero_of_zeros(ratio: Array, tensor: TensorScale) -> Array:
    """Return `ratio`, the block scales before they are encoded, or zeros if the amax of the tensor is 0.

    In a tensor of zeros, block amaxes are 0 and tensor.encode is infinite. Without this replacement, their product
    would make every block scale NaN.
    """
    return np.where(tensor.amax == 0, ZERO, ratio)


def factor_fouroversix(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in fouroversix: 1 / (tensor.decode * scale).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale is 0, the factor is
    0. A NaN scale gives NaN. An infinite factor becomes NaN, unless recipe.keep_infinity is set. amax and dtype are not
    used.
    """
    scale = decode_scale(codes)
    inverse = ONE / (tensor.decode * scale)
    inverse = np.where(np.isinf(inverse) & (not recipe.keep_infinity), NAN, inverse)
    return np.where(scale == 0, ZERO, inverse)


factor_fouroversix_4 = factor_fouroversix


# ---- TE's windows of 64 elements, and Hugging Face's kernels ----

code_te_1x64 = code_te


def factor_te_1x64(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block in TE's NVFP4Quantizer1x64Ref: tensor.encode / scale, or 0 if scale is 0.

    scale is the value of the scale code, and tensor.encode the encode scale of the window. A NaN scale gives NaN. amax,
    recipe and dtype are not used.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, tensor.encode / scale)


code_hf_kernels = code_fouroversix  # E4M3((amax / 6) * tensor.encode)


def factor_hf_kernels(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor of each block in nvfp4-gemm's quantize_reference: tensor.encode / max(scale, 1e-12).

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used.
    """
    return tensor.encode / np.maximum(decode_scale(codes), np.float32(1e-12))


def code_qwix(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as qwix 0.1.8 computes it with XLA on a CPU.

    The scale is block_arith.qwix_scale(amax, recipe, dtype): amax divided by the largest element value, or 1 for a very
    small amax and for 0. There is no tensor scale. Codes saturate at 448, and NaN gives a NaN code. tensor is not used.
    """
    return encode_e4m3_scale(qwix_scale(amax, recipe, dtype))


def factor_qwix(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in qwix: 1 / scale, as qwix_reciprocal computes it.

    scale is the value of the scale code. A scale of 0, which a caller may pass, gives an infinite factor. A NaN scale
    gives NaN. amax, tensor and recipe are not used.
    """
    return qwix_reciprocal(decode_scale(codes), dtype)


# ---- stores of KV caches ----


def code_vllm_kv(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as vLLM's KV cache kernel computes it.

        code = E4M3(tensor.encode * (amax * rcp(6)))

    tensor.encode is 1 / k_scale or 1 / v_scale, and rcp is PTX rcp.approx.ftz.f32. Codes saturate at 448, and NaN gives
    a NaN code. recipe and dtype are not used. Source: vLLM nvfp4_utils.cuh cvt_warp_fp16_to_fp4.
    """
    return encode_e4m3_scale(tensor.encode * (amax * reciprocal_approx_ftz(E2M1.max)))


def factor_vllm_kv(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in vLLM's KV cache kernel.

        factor = rcp(scale * rcp(tensor.encode)), or 0 if scale is 0

    scale is the value of the scale code, tensor.encode is 1 / k_scale or 1 / v_scale, and rcp is PTX
    rcp.approx.ftz.f32. A NaN scale gives NaN. If the product is subnormal, the factor is infinite. amax, recipe and
    dtype are not used.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, reciprocal_approx_ftz(scale * reciprocal_approx_ftz(tensor.encode)))


def code_flashinfer_kv(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as FlashInfer's nvfp4_kv_quant computes it.

        code = E4M3(rcp(tensor.decode) * (amax * rcp(6)))

    tensor.decode is the decode scale of the tensor, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results
    of every operation are flushed to zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not
    used. Source: FlashInfer csrc/fp4_kv_quantization.cu.
    """
    return encode_e4m3_scale(
        multiply_ftz(reciprocal_approx_ftz(tensor.decode), multiply_ftz(amax, reciprocal_approx_ftz(E2M1.max)))
    )


def factor_flashinfer_kv(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in FlashInfer's nvfp4_kv_quant.

        factor = rcp(scale * tensor.decode), or 0 if amax is 0 or subnormal

    scale is the value of the scale code, tensor.decode the decode scale of the tensor, and rcp is PTX
    rcp.approx.ftz.f32. Subnormal operands and results of every operation are flushed to zero. For scale 0 and any other
    amax, the factor is infinite. A NaN scale gives NaN. recipe and dtype are not used.
    """
    factor = reciprocal_approx_ftz(multiply_ftz(decode_scale(codes), tensor.decode))
    return np.where(np.abs(amax) < FLT_MIN, ZERO, factor)


def code_flashinfer_kv_page(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as FlashInfer's store into pages computes it.

        code = E4M3(amax * rcp(6 * tensor.decode))

    tensor.decode is the decode scale of the tensor, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results
    of every operation are flushed to zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not
    used. Source: FlashInfer page.cuh nvfp4_append_quantize_block, where -use_fast_math turns the quotient into this
    product.
    """
    return encode_e4m3_scale(multiply_ftz(amax, reciprocal_approx_ftz(multiply_ftz(E2M1.max, tensor.decode))))


def factor_flashinfer_kv_page(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in FlashInfer's store into pages.

        factor = rcp(scale * tensor.decode), or 0 if scale is 0 or NaN, or if amax is 0 or subnormal

    scale is the value of the scale code, tensor.decode the decode scale of the tensor, and rcp is PTX
    rcp.approx.ftz.f32. Subnormal operands and results of every operation are flushed to zero. recipe and dtype are not
    used.
    """
    scale = decode_scale(codes)
    factor = reciprocal_approx_ftz(multiply_ftz(scale, tensor.decode))
    return np.where((scale > 0) & ~_is_zero(amax), factor, ZERO)


code_flashinfer_cute = code_te


def factor_flashinfer_cute(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in FlashInfer's CuTe-DSL kernel without fast math.

        factor = min(1 / (scale * (1 / tensor.encode)), FLT_MAX)

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. If scale is 0 or NaN, the
    factor is FLT_MAX. Subnormals are kept, unlike in the CUDA kernel. amax, recipe and dtype are not used. Source:
    FlashInfer cute_dsl/fp4_common.py nvfp4_compute_output_scale_rn.
    """
    return np.fmin(ONE / (decode_scale(codes) * (ONE / tensor.encode)), FLT_MAX)


# ---- comfy-kitchen, MSLK, Nunchaku, aiter and DeepSeek ----


def code_comfy_kitchen(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as comfy-kitchen computes it: E4M3(amax / 6 / tensor.decode).

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. Codes saturate at 448,
    and NaN gives a NaN code. dtype is not used. Source: comfy-kitchen backends/eager/quantization.py quantize_nvfp4.
    """
    return encode_e4m3_scale(amax / recipe.element.max / tensor.decode)


def factor_comfy_kitchen(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor of each block's elements in comfy-kitchen: scale * tensor.decode, or NaN if this product is 0.

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. A NaN scale gives NaN, too.
    If the divisor is NaN, every element of the block gets the recipe's nan_code, which is 0: the producer replaces NaN
    by +0. amax, recipe and dtype are not used.
    """
    scale = decode_scale(codes) * tensor.decode
    return np.where(scale == 0, NAN, scale)


def code_comfyui(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as ComfyUI computes it for stochastic rounding.

        code = E4M3(T(T(amax / 6) / T(tensor.decode)))

    6 stands for the largest element value, tensor.decode is the decode scale of the tensor, and T rounds to dtype, the
    dtype of the elements. Codes saturate at 448, and NaN gives a NaN code. Source: ComfyUI comfy/float.py
    stochastic_round_quantize_nvfp4_block.
    """
    ratio = round_to(amax / recipe.element.max, dtype) / round_to(tensor.decode, dtype)
    return encode_e4m3_scale(round_to(ratio, dtype))


def factor_comfyui(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return T(scale * T(tensor.decode)), the divisor of each block's elements in ComfyUI.

    scale is the value of the scale code, tensor.decode the decode scale of the tensor, and T rounds to dtype, the dtype
    of the elements. The divisor may be 0: elements then become infinite, and zeros become NaN. A NaN scale gives NaN.
    amax and recipe are not used.
    """
    return round_to(decode_scale(codes) * round_to(tensor.decode, dtype), dtype)


def code_comfyui_cuda(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as ComfyUI computes it on a GPU for stochastic rounding.

        code = E4M3(T(T(amax * fp32(1/6)) / T(tensor.decode)))

    tensor.decode is the decode scale of the tensor, and T rounds to dtype, the dtype of the elements. Codes saturate at
    448, and NaN gives a NaN code. The rule comfyui differs only in amax / 6, which PyTorch on a GPU computes as a
    product with the reciprocal. recipe is not used.
    """
    return encode_e4m3_scale(round_to(round_to(amax * INV6, dtype) / round_to(tensor.decode, dtype), dtype))


factor_comfyui_cuda = factor_comfyui


def _mslk_code(scale: Array) -> Array:
    """Return the E4M3 codes of block scales, which are clamped to [2^-9, 448] first. NaN counts as 2^-9 (code 1)."""
    return encode_e4m3_scale(np.fmin(np.fmax(scale, E4M3.min_subnormal), E4M3.max))


def code_mslk(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as MSLK computes it.

        code = E4M3(clamp((amax / 6) * tensor.encode, 2^-9, 448))

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. A block of zeros has
    code 1 (2^-9), and so has a block whose product is NaN. dtype is not used. Source: MSLK quantize_kernels/nvfp4.py.
    """
    return _mslk_code(amax / recipe.element.max * tensor.encode)


def factor_mslk(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in MSLK: tensor.encode / scale.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. A scale of 0 gives an
    infinite factor, and a NaN scale gives NaN. Only the rule mslk_power or a caller gives a scale of 0, and only a
    caller gives a NaN scale. amax, recipe and dtype are not used.
    """
    return tensor.encode / decode_scale(codes)


def code_mslk_fast(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as MSLK computes it with fast math.

        code = E4M3(clamp((amax * fp32(1/6)) * tensor.encode, 2^-9, 448))

    tensor.encode is the encode scale of the tensor. A block of zeros has code 1 (2^-9), and so has a block whose
    product is NaN. recipe and dtype are not used.
    """
    return _mslk_code(amax * INV6 * tensor.encode)


def code_mslk_power(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as MSLK computes it for scales that are powers of two: E4M3(2^k).

    2^k is the product (amax / 4) * tensor.encode, rounded up to a power of two if its significand is above 1.75, and
    otherwise down. tensor.encode is the encode scale of the tensor.

    A product that is at most 0.75 * 2^-126 (such as 0, for a block of zeros), above 1.75 * 2^127 or NaN counts as 1.
    Other powers give code 0 if they are below 2^-9, and the code of 448 if they are above 448. recipe and dtype are not
    used. Source: MSLK quantize_kernels/nvfp4.py.
    """
    product = np.asarray(amax / np.float32(4) * tensor.encode, np.float32)
    power = (np.minimum(product.view(np.int32), _INFINITY_BITS) + 0x1FFFFF & _INFINITY_BITS).view(np.float32)
    return encode_e4m3_scale(np.where((power > 0) & np.isfinite(power), power, ONE))


factor_mslk_fast = factor_mslk_power = factor_mslk


def code_nunchaku(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return E4M3(amax * fp32(1/6)), the scale code of each block in Nunchaku.

    Codes saturate at 448. A NaN amax, which only a caller can pass, counts as infinite. tensor, recipe and dtype are
    not used. Source: Nunchaku gemm_w4a4.cuh quantize_w4a4_fp4_from_fpsum_warp.
    """
    return encode_e4m3_scale(_nunchaku_scale(amax))


def factor_nunchaku(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in Nunchaku: rcp(min(amax * fp32(1/6), 448)).

    rcp is PTX rcp.approx.ftz.f32. Its operand, the block scale, is not rounded to E4M3 first. If the scale is 0 or
    subnormal, the factor is infinite, and its products with zeros are NaN. If the caller of quantize passed a scale
    code other than the one that amax gives, the factor is rcp of this code's value. tensor, recipe and dtype are not
    used.
    """
    return reciprocal_approx_ftz(_scale_or_given(codes, _nunchaku_scale(amax)))


def _scale_or_given(codes: Array, scale: Array) -> Array:
    """Return the scale that each block is quantized with, as float32."""
    return np.where(encode_e4m3_scale(scale) == codes, scale, decode_scale(codes))


def _nunchaku_scale(amax: Array) -> Array:
    """Return min(amax * fp32(1/6), 448), or 448 if amax is NaN: the block scale before it is rounded to E4M3."""
    return show("block scale before rounding", np.fmin(amax * INV6, E4M3.max))


def code_aiter(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return E4M3(amax * fp32(1/6)), the scale code of each block in aiter's Triton kernel.

    Codes saturate at 448, and NaN gives a NaN code. tensor, recipe and dtype are not used. Source: aiter Triton
    _nvfp4_quant_op, compiled for an H100, where the division by 6 becomes this product.
    """
    return encode_e4m3_scale(show("block scale before rounding", amax * INV6))


def factor_aiter(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in aiter's Triton kernel: 1 / (amax * fp32(1/6)).

    The division is that of PTX div.full.f32. The divisor, the block scale, is not rounded to E4M3. If it is 0, the
    factor is infinite, and its products with zeros are NaN. If the caller of quantize passed a scale code other than
    the one that amax gives, the divisor is this code's value. tensor, recipe and dtype are not used.
    """
    scale = _scale_or_given(codes, np.asarray(amax * INV6, np.float32))
    return divide_full(np.ones_like(scale), scale)


def code_deepseek(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return E4M3(max(amax, 6 * 2^-9) / 6), the scale code of each block in DeepSeek-V4's compressed KV cache.

    6 stands for the largest element value. The code is at least 1, even for a block of zeros. Codes saturate at 448,
    and NaN gives a NaN code. The default factor divides elements by the value of the code. tensor and dtype are not
    used. Source: DeepSeek-V4 inference/kernel.py.
    """
    largest = recipe.element.max
    return encode_e4m3_scale(np.maximum(amax, largest * E4M3.min_subnormal) / largest)


_MIN_NORMAL = 2.0**-126
_FIRST_WRAPPED = 127 - 149 + 256  # the lowest byte that can be a wrapped one, because float32 exponents go down to -149


# ---- llama.cpp 0c1e57098 ----


def code_gguf(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as llama.cpp's ggml_fp32_to_ue4m3 makes it from d = amax / 6.

    6 stands for the largest element value. Rounding is to nearest, but ties go up. A d below 2^-6 has the code
    min(int(d * 512 + 0.5), 7), so it never rounds up to 2^-6, the smallest normal value. From d = 248 on, the code is
    that of 448. NaN gives code 0. tensor and dtype are not used.
    """
    d = show("block scale before rounding", np.where(amax > 0, amax / recipe.element.max, ZERO))
    low = np.minimum(d * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    high = ((np.minimum(d, E4M3.max).view(np.int32) + 0x80000) >> 20) - (127 - E4M3.bias << E4M3.mantissa_bits)
    codes = np.where(d < E4M3.min_normal, low, high)
    return np.where(codes >= encode(np.float32(256), E4M3), E4M3.max_code, codes).astype(np.uint8)


def factor_gguf(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the value of each block's scale code, which llama.cpp uses as the factor of the block.

    llama.cpp gives each element the code whose value * factor is nearest to the element. A NaN code, which only a
    caller can pass, gives NaN. Only `codes` is read; the other parameters exist for a common signature.
    """
    return decode(codes, E4M3)


def code_e8m0_gguf(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 scale code of each block, as llama.cpp computes it.

        code = low byte of (floor(log2f(amax)) - emax + 127), or 0 if amax is 0, infinite or NaN

    emax is the exponent of the largest element value. If amax is at most 44 ulp below a power of two, log2f rounds up
    to an integer. If amax is below 2^-125, the byte wraps to 255, 254, ..., as x86-64 casts negative numbers. tensor
    and dtype are not used. Source: quantize_row_mxfp4_ref.
    """
    positive = (amax > 0) & np.isfinite(amax)
    exponent = (
        np.floor(show("log2 of the amax", log2(np.where(positive, amax, ONE)))).astype(np.int32) - recipe.element.emax
    )
    return np.where(positive, exponent + 127 & 0xFF, 0).astype(np.uint8)


def factor_e8m0_gguf(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the value of each block's scale code, which llama.cpp uses as the factor of the block: 2^(code - 127).

    llama.cpp gives each element the code whose value * factor is nearest to the element. Code 255 gives an infinite
    factor. Then every finite element gets code 0. Only `codes` is read; the other parameters exist for a common
    signature.
    """
    return np.ldexp(ONE, codes.astype(np.int32) - 127)


# ---- MLX ----


def _saturated(scaled: Array, amax: Array) -> Array:
    """Return E4M3(scaled), but never a NaN code, because MLX saturates NaN too."""
    codes = np.where(np.isnan(scaled), E4M3.sign_bit | E4M3.max_code, encode_e4m3_scale(scaled))
    return np.where(np.isnan(amax), E4M3.max_code, codes).astype(np.uint8)


def code_mlx(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as MLX's CPU back end computes it: E4M3(T(amax / 6) * tensor.encode).

    T rounds to the dtype of the elements, 6 stands for the largest element value, and tensor.encode is the encode scale
    of the tensor. Codes saturate at 448. A NaN amax gives the code of 448, and a product 0 * inf gives that of -448,
    because MLX saturates NaN too.
    """
    return _saturated(round_to(amax / recipe.element.max, dtype) * tensor.encode, amax)


def factor_mlx(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor that MLX's CPU back end applies to each block: the magnitude of the block scale.

    The caller then multiplies the quotients by tensor.encode, the encode scale of the tensor. A NaN scale gives NaN.
    Only `codes` is read; the other parameters exist for a common signature.
    """
    return np.abs(decode(codes, E4M3))


def code_mlx_metal(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 scale code of each block, as MLX's Metal kernels compute it: E4M3((amax / 6) * tensor.encode).

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. Codes saturate at 448.
    A NaN amax gives the code of 448, and a product 0 * inf gives that of -448. dtype is not used.
    """
    return _saturated(amax / recipe.element.max * tensor.encode, amax)


def factor_mlx_metal(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in MLX's Metal kernels: tensor.encode / |scale|.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. If scale is 0, the factor is
    0. A NaN scale gives NaN. Only `codes` and `tensor` are read; the other parameters exist for a common signature.
    """
    scale = np.abs(decode(codes, E4M3))
    return np.where(scale == 0, ZERO, tensor.encode / scale)


def _wrapped(exponent: Array, s: Array, dtype: Dtype) -> Array:
    """Return the E8M0 codes that MLX stores for the scales 2^exponent: the low byte of exponent + 127."""
    codes = np.where(s == 0, 127, exponent + 127 & 0xFF)
    return np.where(np.isfinite(s), codes, 128 if dtype == np.float32 else 0).astype(np.uint8)


def _defined(s: Array) -> Array:
    """Return s with 1 in place of each number that is 0, negative, infinite or NaN, so that all logarithms are
    finite.
    """
    return np.where((s > 0) & np.isfinite(s), s, ONE)


def code_e8m0_mlx(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 scale code of each block, as MLX 0.32.2 and later compute it on a CPU.

        code = low byte of (ceil(log2(s)) + 127),   s = T(amax / M)

    T rounds to the dtype of the elements, and M is the largest element value. s = 0 gives 127. If s <= 2^-128, the byte
    wraps to 255, 254, ..., which decode as huge scales. If s is infinite or NaN, the code is 128 for float32 elements,
    otherwise 0. tensor is not used.
    """
    s = round_to(amax / recipe.element.max, dtype)
    significand, exponent = np.frexp(show("block scale before rounding", _defined(s)))
    return _wrapped(exponent - (significand == 0.5), s, dtype)


def factor_e8m0_mlx(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the divisor that MLX's CPU back end applies to the elements of each block: 2^n.

    n is code - 127. If the byte wrapped around because the exponent was below -127, n is that exponent: code - 127 -
    256. A code of 234 or more counts as wrapped if amax is positive and amax divided by the largest element value is
    below 2^-127. If amax is infinite or NaN, the divisor is 0. tensor and dtype are not used.
    """
    wraps = (codes >= _FIRST_WRAPPED) & (amax > 0) & (amax / recipe.element.max < np.float32(_MIN_NORMAL / 2))
    power = np.ldexp(ONE, codes.astype(np.int32) - 127 - np.where(wraps, 256, 0))
    return np.where(np.isfinite(amax), power, ZERO)


def code_e8m0_mlx_0321(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 scale code of each block, as MLX up to 0.32.1 computes it on a CPU.

        code = low byte of (rint(T(log2(s))) + 127),   s = T(amax / M)

    T rounds to the dtype of the elements, and M is the largest element value. s = 0 gives 127. If s is infinite or NaN,
    the code is 128 for float32 elements, otherwise 0. Exponents below -127 wrap to 255, 254, ... tensor is not used.

    Later versions round the exponent up instead. With the nearest exponent, scaled E2M1 elements can reach 8.5 and then
    saturate.
    """
    s = round_to(amax / recipe.element.max, dtype)
    exponent = np.rint(show("log2 of the scale", round_to(log2(_defined(s)), dtype))).astype(np.int32)
    return _wrapped(exponent, s, dtype)


factor_e8m0_mlx_0321 = factor_e8m0_mlx


def code_e8m0_mlx_metal_0321(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 scale code of each block, as MLX up to 0.32.1 computes it on Metal: round(log2(amax / M)) + 127.

    M is the largest element value. The logarithm is rounded to float32, then to the nearest integer, ties away from
    zero, and clamped to [-127, 127]. So amax = 0 gives code 0. inf and NaN give code 255. tensor and dtype are not
    used.
    """
    exponent = show("log2 of the scale", log2(amax / recipe.element.max)).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(exponent) + 0.5), exponent)
    return np.where(np.isfinite(amax), np.clip(np.nan_to_num(rounded), -127, 127) + 127, 255).astype(np.uint8)


def factor_e8m0_mlx_metal_0321(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in MLX up to 0.32.1 on Metal: 2^(127 - code).

    Code 255 counts as an infinite scale there, so its factor is 0. amax, tensor, recipe and dtype are not used.
    """
    return np.where(codes == 255, ZERO, inverse_e8m0(codes))


MIN_NORMAL_INVERSE = np.float32(2.0**126)  # inverse of 2^-126, the smallest scale that elements are divided by


def _shifted(amax: Array, rounded: Array, recipe: Recipe, up: Array | int = 0) -> Array:
    """Return the E8M0 code of 2^(floor(log2(rounded)) - emax + up), or 255 if amax is NaN."""
    codes = np.clip(exponent_field(show("amax, rounded by the rule", rounded)) + up - recipe.element.emax, 0, 255)
    return np.where(np.isnan(amax), 255, codes).astype(np.uint8)


def code_e8m0_floor_018(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as torchao 0.18.0 does with mode FLOOR.

    emax is the exponent of the largest element value. Exponents below -127, also that of amax = 0, give code 0. inf
    gives the code of 2^(128 - emax), and NaN gives 255 (NaN). tensor and dtype are not used.
    """
    return _shifted(amax, np.asarray(amax, np.float32), recipe)


def code_e8m0_ceil_018(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as torchao 0.18.0 does with mode CEIL.

    emax is the exponent of the largest element value. The logarithm is taken exactly, from the bits of amax. Exponents
    below -127, also that of amax = 0, give code 0. inf gives the code of 2^(128 - emax), and NaN gives 255 (NaN).
    tensor and dtype are not used.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted(amax, np.asarray(amax, np.float32), recipe, up=mantissa != 0)


def code_e8m0_even_018(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as torchao 0.18.0 does with mode EVEN.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. Exponents below -127, also that of amax = 0, give code 0. If r is infinite, the code is that of 2^(128 -
    emax). NaN gives 255 (NaN). tensor and dtype are not used.
    """
    bits = np.where(np.isnan(amax), 0, np.asarray(amax, np.float32).view(np.int32))
    rounded = (bits + (1 << 22 - recipe.element.mantissa_bits)).astype(np.int32).view(np.float32)
    return _shifted(amax, rounded, recipe)


def factor_e8m0_floor_018(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in torchao 0.18.0: 2^(127 - code).

    Code 0 stands for 2^-127, but its factor is 2^126, because the smallest divisor of torchao is 2^-126. Code 255 has
    the factor 0, because torchao divides by infinity. amax, tensor, recipe and dtype are not used.
    """
    return np.where(codes == 0, MIN_NORMAL_INVERSE, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_ceil_018 = factor_e8m0_even_018 = factor_e8m0_floor_018


def code_e8m0_rceil_018(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as torchao 0.18.0 does with mode RCEIL.

    M is the largest element value. log2 is rounded to float32, and the exponent is clamped to [-127, 127]. So amax = 0
    gives code 0, and inf gives 254. NaN gives 255 (NaN). tensor and dtype are not used. Source: torchao _to_mx_rceil.
    """
    exponent = np.ceil(show("log2 of the scale", log2(np.where(np.isnan(amax), ONE, amax / recipe.element.max))))
    return np.where(np.isnan(amax), 255, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def factor_e8m0_rceil_018(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block in torchao 0.18.0's mode RCEIL: 2^(127 - code).

    For code 0 the factor is 1. The elements of such a block are tiny, so they become zeros. Code 255 has the factor
    NaN. amax, tensor, recipe and dtype are not used.
    """
    return np.where(codes == 0, ONE, inverse_e8m0(codes))


Code = Callable[[Array, TensorScale, Recipe, Dtype], Array]


def _code(rounding: str) -> Code:
    """Return a function code(amax, tensor, recipe, dtype) that computes block scale codes: S(amax / M *
    tensor.encode).
    """

    def code(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
        """Return the scale code of each block: S(amax / M * tensor.encode).

        S() gives a code of the scale format, M is the largest magnitude of an element, times 2 per level of exponent
        bits, and tensor.encode is the encode scale of the tensor, or 1 without a tensor scale. A NaN amax gives the NaN
        of the scale format, or its largest value if it has no NaN. dtype is not used.
        """
        assert recipe.scale is not None
        scale = show("block scale before rounding", amax / largest_element(recipe) * tensor.encode)
        return encode_scale(scale, recipe.scale, rounding)

    return code


code_amax, code_amax_up, code_amax_down = _code("rn"), _code("rp"), _code("rz")


def factor_amax(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If the magnitude of their
    product is below 1e-38, the factor is the reciprocal of 1e-38, the largest possible. A NaN scale gives NaN. amax and
    dtype are not used.
    """
    assert recipe.scale is not None
    return reciprocal_of_scale(decode(codes, recipe.scale) * tensor.decode)


factor_amax_up = factor_amax_down = factor_amax


# ---- rules of HiFloat4 and msmodelslim, whose exponents are those of reference/ascend.py ----


def code_e8m0_hifloat4_native(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of HiFloat4's MX scale: 2^(floor(log2(amax + 9.6e-7)) - emax), at most 2^(127 - emax).

    emax is the exponent of the largest element value. Every operation is rounded to dtype, log2 to float32 first. NaN
    gives 255. HiFloat4 has no codes; these are the codes of its values. tensor is not used.
    """
    exponent = ascend.hifloat4_exponent(amax, recipe.element, dtype)
    return np.where(np.isnan(exponent), 255, np.nan_to_num(exponent) + 127).astype(np.uint8)


def factor_e8m0_hifloat4_native(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 1 / T(scale), where T rounds to dtype.

    It is 0 or infinite if the scale is infinite or 0 in float16, and NaN for code 255. amax and tensor are not used.
    """
    return ONE / round_to(decode(codes, E8M0), dtype)


def code_hifloat4_native(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E4M3 code of HiFloat4's NVFP4 scale: E4M3(T(amax / 6)), where T rounds to dtype.

    NaN gives the NaN code. HiFloat4 has no codes; these are the codes of its values. tensor is not used.
    """
    return encode_e4m3_scale(round_to(amax / recipe.element.max, dtype))


def factor_hifloat4_native(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that divides the elements of each block: the scale, or 1 if it is 0, as all values are then 0.

    amax, tensor and dtype are not used.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ONE, scale)


def _in_float32(rule: Callable[..., Array]) -> Callable[..., Array]:
    return lambda first, *arguments: rule(first, *arguments[:-1], np.dtype(np.float32))


code_e8m0_hifloat4, factor_e8m0_hifloat4, code_hifloat4, factor_hifloat4 = map(
    _in_float32,
    (code_e8m0_hifloat4_native, factor_e8m0_hifloat4_native, code_hifloat4_native, factor_hifloat4_native),
)


def code_e8m0_msmodelslim(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of the power of two at or below amax / 3.5, as msmodelslim's method minmax computes it.

        exponent = floor(log2(amax / 0.875 + 9.6e-7)) - 2, at most 125

    Every operation is rounded to dtype, log2 to float32 first. If amax / 0.875 is infinite, the exponent is 125. NaN
    gives code 0. tensor is not used. Source: msmodelslim AutoWeightQuantizer.
    """
    return ascend.scale_bytes(ascend.minmax_exponent(amax, dtype))


def factor_e8m0_msmodelslim(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 1 / T(2^(code - 127)), where T rounds to dtype.

    It is 0 if the power is infinite in float16, and NaN for code 0. amax and tensor are not used.
    """
    exponent = codes.astype(np.float32) - np.float32(127)
    return ascend.inverse_power(np.where(codes == 0, np.float32(np.nan), exponent), dtype)


def code_e8m0_msmodelslim_ceil_x(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of the power of two at or above amax / 7.25, as msmodelslim's method ceil_x computes it.

        exponent = ceil(log2(amax / 7.25 + 9.6e-7)), at most 125

    Every operation is rounded to dtype, log2 to float32 first. NaN gives code 0. tensor is not used. Source:
    msmodelslim AutoWeightQuantizer.
    """
    return ascend.scale_bytes(ascend.ceil_x_exponent(amax, ascend.CEIL_X, dtype))


factor_e8m0_msmodelslim_ceil_x = factor_e8m0_msmodelslim


def code_e8m0_msmodelslim_fp8(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as msmodelslim computes it for MXFP8.

    emax is the exponent of the largest element value. log2 is rounded to float32 and then to dtype. Exponents below
    -127 and blocks of zeros give code 0, and so do infinity and NaN. tensor is not used. Source: msmodelslim
    AutoWeightQuantizer.
    """
    return ascend.scale_bytes(ascend.fp8_exponent(amax, recipe.element, dtype))


def factor_e8m0_msmodelslim_fp8(codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the factor that multiplies the elements of each block: 1 / T(2^(code - 127)), where T rounds to dtype.

    If the power is 0 in float16, the factor is 2^127, under which every element saturates, as it does when it is
    divided by 0. Blocks of zeros have the factor 1. An amax that is infinite or NaN gives NaN. tensor is not used.
    """
    factor = ascend.inverse_power(codes.astype(np.float32) - np.float32(127), dtype)
    factor = np.where(np.isfinite(round_to(amax, dtype)), factor, np.float32(np.nan))
    return np.where(amax == 0, ONE, factor)


def code_e8m0_msmodelslim_power(amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the E8M0 code of the power of two at or below amax, modulo 256: floor(log2(amax)) + 127.

    The searches of msmodelslim give such powers as amaxes. With elements E4M3, smaller powers than 2^-127 and 0 give
    code 0; otherwise 0 gives code 127. Infinity and NaN give code 0. tensor and dtype are not used.
    """
    return ascend.scale_bytes(ascend.power_exponent(amax, recipe.element))


def factor_e8m0_msmodelslim_power(
    codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype
) -> Array:
    """Return the factor that multiplies the elements of each block: 1 / T(2^(code - 127)), where T rounds to dtype.

    Code 255, of 2^-128, has the factor 0. The codes of smaller powers are large, so that all elements of their blocks
    become zeros too. An amax of 0 has the factor 1, infinity 0, and NaN has NaN. tensor is not used.
    """
    factor = ascend.inverse_power(codes.astype(np.float32) - np.float32(127), dtype)
    factor = np.where((codes == 255) | np.isinf(amax), ZERO, factor)
    return np.where(amax == 0, ONE, np.where(np.isnan(amax), amax, factor))


_FACTORS = {"E4M3": _product, "E8M0": _inverse}  # default factors, by scale format


def _rule(name: str, scale: str) -> BlockRule:
    return BlockRule(globals()[f"code_{name}"], globals().get(f"factor_{name}") or _FACTORS[scale])


BLOCK_RULES = {
    name: _rule(name, rule.scale) for name, rule in rules.BLOCK_RULES.items() if not (rule.chooses or rule.whole)
}
