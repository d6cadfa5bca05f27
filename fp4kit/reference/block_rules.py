"""Define block rules, which compute the scale of a block from its amax, and the factor that scales its elements.
Scale codes are uint8 and factors float32, in the shape of `amax`, the largest magnitudes of the blocks. `tensor` holds
the tensor scales, and `dtype` is the dtype of the elements. E4M3(x) is the code of x: to nearest even, above 448 the
code of 448. In texts such as "inf gives 254", inf is a value of `amax` and 254 a code.

A rule named in recipes/rules.py is a pair of functions, here and in CUDA (cuda/kernels/rules/block_rules_*.cuh):

    code_<rule>(amax, tensor, recipe, dtype)            the scale codes: uint8 bit patterns of the scale format
    factor_<rule>(codes, amax, tensor, recipe, dtype)   the factors: float32

recipe.apply says how the factor is used. Elements are multiplied by it ("multiply"), divided by it ("divide"), or
compared with the products of element values and the factor ("compare"). The two functions also define the results for
blocks of zeros and for NaN. A rule without a factor function of its own uses the default of its scale format. This is
scale * tensor.decode for E4M3, by which elements are divided, and 2^(127 - code) for E8M0, by which elements are
multiplied.

Arguments and notation in all block_rules modules:

- amax: the largest magnitude of each block
- tensor: the TensorScale of the blocks. tensor.encode multiplies elements before encoding, and tensor.decode
  multiplies values after decoding
- dtype, the input dtype: the dtype of the elements
- scale: the value of the stored scale code
- E4M3(t): the code of t, rounded to nearest even and saturated at 448
- fp32(t): t rounded to float32
- rcp(t): the approximate reciprocal, PTX rcp.approx.ftz.f32

All arithmetic is float32 and rounds to nearest even after every written operation, unless a rule says that it flushes
subnormals or rounds to the input dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp4kit.formats import E4M3, E8M0, FLT_MAX, FLT_MIN, ElementFormat
from fp4kit.recipes import Recipe, rules
from fp4kit.reference import (
    block_rules_amax,
    block_rules_e4m3_serving,
    block_rules_e8m0_serving,
    block_rules_gguf_mlx,
    block_rules_torchao,
)
from fp4kit.reference.arith import INV6, ONE, ZERO, divide_ftz, log2, multiply_ftz, reciprocal_approx_ftz
from fp4kit.reference.block_arith import decode_scale, encode_e4m3_scale, encode_e8m0_scale, inverse_e8m0
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.reference.trace import show
from fp4kit.rounding import exponent_field


class BlockRule(NamedTuple):
    """The two functions of a block rule, which quantization calls for blocks.

    Attributes:
        code: code(amax, tensor, recipe, dtype) returns the scale codes (uint8) of blocks from their amaxes.
        factor: factor(codes, amax, tensor, recipe, dtype) returns the float32 factors that scale the elements of the
            blocks, from the scale codes.
    """

    code: Callable[[np.ndarray, TensorScale, Recipe, np.dtype], np.ndarray]
    factor: Callable[[np.ndarray, np.ndarray, TensorScale, Recipe, np.dtype], np.ndarray]


def _is_zero(amax: np.ndarray) -> np.ndarray:
    """Return a mask of the amaxes that are zero or subnormal. If subnormals are flushed, both count as zero."""
    return np.abs(amax) < FLT_MIN


# ---- E4M3 scales ----


def _product(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the default factor of E4M3 rules, which divides the elements: scale * tensor.decode."""
    return decode_scale(codes) * tensor.decode


def _minimum(recipe: Recipe) -> np.ufunc:
    """Return the function that takes the minimum of two numbers as the recipe's producer does if one of them is NaN."""
    return np.minimum if recipe.amax_nan == "propagate" else np.fmin  # as fminf, which drops the NaN of inf * 0


def code_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as Transformer Engine computes it.

        code = E4M3(min(amax * (tensor.encode * fp32(1/6)), FLT_MAX))

    tensor.encode is the encode scale of the tensor. Codes saturate at 448. The product in the inner parentheses is
    rounded first. If the product with amax is NaN, the code is a NaN code if recipe.amax_nan is "propagate", otherwise
    that of 448. dtype is not used. Source: TE core_nvfp4.cuh.
    """
    return encode_e4m3_scale(_minimum(recipe)(amax * (tensor.encode * INV6), FLT_MAX))


def factor_te(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the factor that multiplies the elements of each block, as Transformer Engine computes it.

        factor = min(1 / (scale * tensor.decode), FLT_MAX)

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale is 0, the factor is
    FLT_MAX. Nonzero elements then get the code of the largest value, but all elements of the block decode to 0. If
    scale is NaN, the factor is FLT_MAX, or NaN if recipe.amax_nan is "propagate". amax and dtype are not used.
    """
    return _minimum(recipe)(ONE / (decode_scale(codes) * tensor.decode), FLT_MAX)


def code_flashinfer(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as FlashInfer computes it by default.

        code = E4M3(tensor.encode * (amax * rcp(6)))

    tensor.encode is the encode scale of the tensor, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results
    of every operation are flushed to zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not
    used.
    """
    return encode_e4m3_scale(multiply_ftz(tensor.encode, multiply_ftz(amax, reciprocal_approx_ftz(np.float32(6)))))


def factor_flashinfer(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block, as FlashInfer computes it by default.

        factor = rcp(scale * rcp(tensor.encode)), or 0 if amax is 0 or subnormal

    scale is the value of the scale code, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results of every
    operation are flushed to zero. For scale 0 and any other amax, the factor is infinite. A NaN scale gives NaN. recipe
    and dtype are not used.
    """
    factor = reciprocal_approx_ftz(multiply_ftz(decode_scale(codes), reciprocal_approx_ftz(tensor.encode)))
    return np.where(_is_zero(amax), ZERO, factor)


def code_flashinfer_precise(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as FlashInfer computes it without fast math.

        code = E4M3(amax * (tensor.encode * fp32(1/6))), or 0 if amax is 0 or subnormal

    tensor.encode is the encode scale of the tensor. Subnormal operands and results of every operation are flushed to
    zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not used.
    """
    return encode_e4m3_scale(np.where(_is_zero(amax), ZERO, multiply_ftz(amax, multiply_ftz(tensor.encode, INV6))))


def factor_flashinfer_precise(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block, as FlashInfer computes it without fast math.

        factor = min(1 / (scale * (1 / tensor.encode)), FLT_MAX), or 0 if amax is 0 or subnormal

    scale is the value of the scale code. Subnormal operands and results of every operation are flushed to zero. A scale
    of 0 or NaN gives FLT_MAX, and -0 gives -infinity. recipe and dtype are not used.
    """
    factor = divide_ftz(ONE, multiply_ftz(decode_scale(codes), divide_ftz(ONE, tensor.encode)))
    return np.where(_is_zero(amax), ZERO, np.fmin(factor, FLT_MAX))


def code_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as Model-Optimizer computes it.

        code = E4M3(clamp(r, 2^-9, 448)),   r = amax / (6 * tensor.decode), or 1 if r is 0

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. The factor is the
    default, scale * tensor.decode, which divides the elements. NaN gives a NaN code. dtype is not used.
    """
    ratio = amax / (recipe.element.max * tensor.decode)
    return encode_e4m3_scale(np.clip(np.where(ratio == 0, ONE, ratio), E4M3.min_subnormal, E4M3.max))


def code_modelopt_static(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as Model-Optimizer computes it from calibrated block amaxes.

        code = E4M3(clamp(r * recipe.scale_max / (tensor.amax / 6), 2^-9, 448)),   r = amax / 6, or 1 if r is 0

    6 stands for the largest element value. A tensor amax of 0 gives the code of 448, and a NaN gives a NaN code. The
    elements are then divided by the default factor, scale * tensor.decode. dtype is not used.
    """
    ratio = amax / recipe.element.max
    ratio = np.where(ratio == 0, ONE, ratio) * np.float32(recipe.scale_max)
    return encode_e4m3_scale(np.clip(ratio / (tensor.amax / recipe.element.max), E4M3.min_subnormal, E4M3.max))


def code_torchao(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as torchao computes it.

        code = E4M3(clamp(amax / 6 / tensor.decode, 2^-6, 448))

    6 stands for the largest element value, tensor.decode is the decode scale of the tensor, and 2^-6 is the smallest
    normal value of E4M3. So a block of zeros gets the code of 2^-6. NaN gives a NaN code. dtype is not used.
    """
    ratio = amax / recipe.element.max / tensor.decode
    return encode_e4m3_scale(np.clip(ratio, E4M3.min_normal, E4M3.max))


def factor_torchao(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block, as torchao computes it: tensor.encode / scale.

    scale is the value of the scale code, and tensor.encode is 1 / tensor.decode. A NaN scale gives NaN. The rule's own
    codes are never 0; a code 0 that a caller passes gives an infinite factor. amax, recipe and dtype are not used.
    """
    return tensor.encode / decode_scale(codes)


def code_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as compressed-tensors computes it.

        code = E4M3(T(amax / 6) * tensor.encode), or the code of 0.125 if this code is 0

    T rounds to dtype, the dtype of the elements. 6 stands for the largest element value, and tensor.encode is the
    encode scale of the tensor. Codes saturate at 448, and NaN gives a NaN code.
    """
    codes = encode_e4m3_scale(round_to(amax / recipe.element.max, dtype) * tensor.encode)
    return np.where(codes == 0, encode(np.float32(0.125), E4M3), codes)


def factor_compressed_tensors(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor of each block's elements in compressed-tensors: scale / tensor.encode.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used.
    """
    return decode_scale(codes) / tensor.encode


# ---- E8M0 scales ----


def _inverse(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return 2^(127 - code), the default factor of E8M0 rules."""
    return inverse_e8m0(codes)


def _shifted_exponent(rounded: np.ndarray, element: ElementFormat, up: np.ndarray | int = 0) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(rounded)) - emax + up), clamped to the range of E8M0."""
    field = exponent_field(show("amax, rounded by the rule", np.asarray(rounded, np.float32)))
    codes = np.where(field == 255, 255, np.clip(field + up - element.emax, 0, 255))
    return codes.astype(np.uint8)


def _add_to_bits(x: np.ndarray, addend: int) -> np.ndarray:
    """Return x with an integer added to its bit pattern, so that a carry raises the exponent."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return np.where(bits > 0x7F800000, bits, bits + addend).astype(np.int32).view(np.float32)


def code_e8m0_floor(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as OCP MX v1.0 defines the scale.

    emax is the exponent of the largest element value. Exponents below -127, also that of amax = 0, give code 0
    (2^-127). inf and NaN give code 255 (NaN). tensor and dtype are not used.
    """
    return _shifted_exponent(amax, recipe.element)


def code_e8m0_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as torchao's mode CEIL does.

    emax is the exponent of the largest element value. The logarithm is taken exactly, from the bits of amax. Exponents
    below -127, also that of amax = 0, give code 0 (2^-127). inf and NaN give code 255 (NaN). tensor and dtype are not
    used.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted_exponent(amax, recipe.element, up=mantissa != 0)


def code_e8m0_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as torchao's mode EVEN does.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. For E2M1, an amax of 1.75 * 2^k or more counts as 2^(k + 1). For E4M3 and E2M3, an amax of 1.9375 * 2^k or
    more does. amax = 0 gives code 0. If r is infinite or amax is NaN, the code is 255 (NaN). tensor and dtype are not
    used.
    """
    return _shifted_exponent(_add_to_bits(amax, 1 << 22 - recipe.element.mantissa_bits), recipe.element)


def code_e8m0_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax * fp32(1 / M), rounded up to a power of two, as Transformer Engine computes it.

    M is the largest element value. 0 gives code 0 (2^-127), inf gives 254, and NaN gives 255. tensor and dtype are not
    used. Source: TE float_to_e8m0.
    """
    return encode_e8m0_scale(amax * (ONE / recipe.element.max))


def code_e8m0_rceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax * fp32(1 / M), rounded up to a power of two, as torchao's mode RCEIL does.

    M is the largest element value. 0 gives code 0 (2^-127); inf and NaN give code 255 (NaN). tensor and dtype are not
    used.
    """
    codes = code_e8m0_te(amax, tensor, recipe, dtype)
    return np.where(np.isfinite(amax), codes, 255).astype(np.uint8)


def code_e8m0_te_reference(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), or 255 if amax is NaN, as TE's Python reference quantizer does.

    M is the largest element value. log2 is rounded to float32, and the exponent is clamped to [-127, 127]. So amax = 0
    gives code 0, and inf gives 254. The rule e8m0_modelopt differs only for NaN. tensor and dtype are not used. Source:
    TE reference_nvfp4.py cast_to_e8, with pow_2_scales.
    """
    return np.where(np.isnan(amax), np.uint8(255), code_e8m0_modelopt(amax, tensor, recipe, dtype))


def code_e8m0_flashinfer_fp4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of amax * rcp(M), rounded up to a power of two, as FlashInfer computes it.

    M is the largest element value, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results of every operation
    are flushed to zero. 0 gives code 0, inf gives 254, and NaN gives 255. tensor and dtype are not used.
    """
    return encode_e8m0_scale(multiply_ftz(amax, reciprocal_approx_ftz(recipe.element.max)))


def factor_e8m0_flashinfer_fp4(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in FlashInfer: 2^(127 - code), or 0 in two cases.

    The factor is 0 for code 0, which occurs only if amax * rcp(M) is 0, where M is the largest element value. It is
    also 0 for codes 254 and 255, where 2^(127 - code) is subnormal and therefore flushed.

    FlashInfer's FP4 kernel computes ex2(127 - code) and checks for a product of 0. Its FP8 kernel computes rcp of the
    scale. Both give this factor. amax, tensor, recipe and dtype are not used.
    """
    return np.where((codes > 0) & (codes < 254), inverse_e8m0(codes), ZERO)


code_e8m0_flashinfer_fp8, factor_e8m0_flashinfer_fp8 = code_e8m0_flashinfer_fp4, factor_e8m0_flashinfer_fp4


def code_e8m0_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as Model-Optimizer computes it. M is the largest element value.

    log2 is rounded to float32, and the exponent is clamped to [-127, 127]. amax = 0 and NaN give the exponent -127
    (code 0), and inf gives 127 (code 254).

    For an amax a few ulp above M * 2^k, the rounded log2 is k. The exponent is then one too small, and the block's
    largest value saturates. tensor and dtype are not used.
    """
    ratio = amax / recipe.element.max
    exponent = np.ceil(show("log2 of the scale", log2(np.where(ratio > 0, ratio, np.float32(2.0**-127)))))
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def code_e8m0_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
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


def _rounded_subnormals(amax: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """Return amax, with values below 2^-14, the smallest normal of float16, rounded to 2^-14 or 0."""
    # An amax is rounded up if amax + 2^(-15 - mantissa_bits) reaches 2^-14. compressed-tensors gets these results
    # because it adds an integer to the bits of a float16 and then clears the low bits.
    normal = np.float32(2.0**-14)
    rounds_up = amax + np.ldexp(normal, -1 - mantissa_bits) >= normal
    return np.where(amax < normal, np.where(rounds_up, normal, ZERO), amax)


_FACTORS = {"E4M3": _product, "E8M0": _inverse}  # default factors, by scale format


_MODULES = (
    block_rules_gguf_mlx,
    block_rules_e8m0_serving,
    block_rules_e4m3_serving,
    block_rules_torchao,
    block_rules_amax,
)
_FUNCTIONS = {name: value for module in _MODULES for name, value in vars(module).items()} | globals()


def _rule(name: str, scale: str) -> BlockRule:
    """Return the BlockRule with the given name: the functions code_<name> and factor_<name> of the block_rules
    modules.
    """
    return BlockRule(_FUNCTIONS[f"code_{name}"], _FUNCTIONS.get(f"factor_{name}") or _FACTORS[scale])


BLOCK_RULES = {name: _rule(name, rule.scale) for name, rule in rules.BLOCK_RULES.items() if not rule.chooses}
