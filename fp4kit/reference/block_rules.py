"""Block rules: from the amax of a block to its stored scale, and to the factor that its elements are scaled with.

A rule named in recipes/rules.py is a pair of functions, here and in CUDA (cuda/kernels/rules/block_rules_*.cuh):

    code_<rule>(amax, tensor, recipe, dtype)            the scale: uint8 bit patterns of the scale format
    factor_<rule>(codes, amax, tensor, recipe, dtype)   the factor: float32

recipe.apply says how the factor is used. Elements are multiplied by it ("multiply"), divided by it ("divide"), or
compared with the multiples value * factor ("compare"). The two functions also decide about zero blocks and NaN. A rule
without a factor function of its own uses the default of its scale format. This is scale * S_dec for E4M3, by which
elements are divided, and 2^(127 - code) for E8M0, by which elements are multiplied.

Notation in the docstrings of all block_rules modules:

- tensor: the TensorScale of the blocks
- S_enc (also gs) and S_dec: tensor.encode and tensor.decode
- scale: the value of the stored scale code
- max and emax: the largest element value and its exponent
- dtype, the input dtype: the dtype of the elements
- E4M3(t): the code of t, rounded to nearest even and saturated at 448
- fp32(t): t rounded to float32
- ftz: subnormal operands and results are flushed to zero
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
    block_rules_e4m3_serving,
    block_rules_e8m0_serving,
    block_rules_gguf_mlx,
    block_rules_torchao,
)
from fp4kit.reference.arith import INV6, ONE, ZERO, divide_ftz, log2, multiply_ftz, reciprocal_approx_ftz
from fp4kit.reference.block_arith import decode_scale, inverse_e8m0
from fp4kit.reference.codec import decode, encode, encode_e8m0
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.rounding import exponent_field


class BlockRule(NamedTuple):
    """Hold the two functions of a block rule: code makes the scale codes, and factor makes the factors from them."""

    code: Callable[[np.ndarray, TensorScale, Recipe, np.dtype], np.ndarray]
    factor: Callable[[np.ndarray, np.ndarray, TensorScale, Recipe, np.dtype], np.ndarray]


def _is_zero(amax: np.ndarray) -> np.ndarray:
    """Return whether an amax is zero in arithmetic that flushes subnormals: whether it is zero or subnormal."""
    return np.abs(amax) < FLT_MIN


# ---- E4M3 scales ----


def _product(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return scale * S_dec. Elements are divided by this factor."""
    return decode_scale(codes) * tensor.decode


def _minimum(recipe: Recipe) -> np.ufunc:
    """Return np.minimum, which gives NaN if one operand is NaN, or np.fmin, which gives the other operand.

    recipe.amax_nan says which of them the producer uses.
    """
    return np.minimum if recipe.amax_nan == "propagate" else np.fmin  # fminf drops the NaN of inf * 0


def code_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(min(amax * (S_enc * fp32(1/6)), FLT_MAX)). The product in the inner brackets comes first.

    Source: TE core_nvfp4.cuh.
    """
    return encode(_minimum(recipe)(amax * (tensor.encode * INV6), FLT_MAX), E4M3)


def factor_te(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return min(1 / (scale * S_dec), FLT_MAX).

    If the scale is 0, the factor is FLT_MAX. Then nonzero elements get the code of the largest value, although
    everything decodes to 0.
    """
    return _minimum(recipe)(ONE / (decode_scale(codes) * tensor.decode), FLT_MAX)


def code_flashinfer(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(gs * (amax * rcp(6))). Every operation flushes subnormals."""
    return encode(multiply_ftz(tensor.encode, multiply_ftz(amax, reciprocal_approx_ftz(np.float32(6)))), E4M3)


def factor_flashinfer(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return rcp(scale * rcp(gs)), or 0 if amax is 0. Every operation flushes subnormals."""
    factor = reciprocal_approx_ftz(multiply_ftz(decode_scale(codes), reciprocal_approx_ftz(tensor.encode)))
    return np.where(_is_zero(amax), ZERO, factor)


def code_flashinfer_precise(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(amax * (S_enc * fp32(1/6))), or code 0 if amax is 0. Every operation flushes subnormals."""
    return encode(np.where(_is_zero(amax), ZERO, multiply_ftz(amax, multiply_ftz(tensor.encode, INV6))), E4M3)


def factor_flashinfer_precise(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return min(1 / (scale * (1 / S_enc)), FLT_MAX), or 0 if amax is 0. Every operation flushes subnormals."""
    factor = divide_ftz(ONE, multiply_ftz(decode_scale(codes), divide_ftz(ONE, tensor.encode)))
    return np.where(_is_zero(amax), ZERO, np.fmin(factor, FLT_MAX))


def code_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(clamp(r, 2^-9, 448)), where r = amax / (6 * S_dec). If r is 0, it is replaced by 1.

    The default factor, scale * S_dec, divides the elements.
    """
    ratio = amax / (recipe.element.max * tensor.decode)
    return encode(np.clip(np.where(ratio == 0, ONE, ratio), E4M3.min_subnormal, E4M3.max), E4M3)


def code_modelopt_static(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(clamp(r * N / (tensor_amax / 6), 2^-9, 448)), where r = amax / 6 and N = recipe.scale_max.

    If r is 0, it is replaced by 1. The default factor, scale * S_dec, divides the elements.
    """
    ratio = amax / recipe.element.max
    ratio = np.where(ratio == 0, ONE, ratio) * np.float32(recipe.scale_max)
    return encode(np.clip(ratio / (tensor.amax / recipe.element.max), E4M3.min_subnormal, E4M3.max), E4M3)


def code_torchao(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(clamp(amax / 6 / S_dec, 2^-6, 448)). 2^-6 is the smallest normal of E4M3."""
    ratio = amax / recipe.element.max / tensor.decode
    return encode(np.clip(ratio, E4M3.min_normal, E4M3.max), E4M3)


def factor_torchao(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return (1 / S_dec) / scale."""
    return tensor.encode / decode_scale(codes)


def code_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(rnd(amax / 6) * gs), where rnd rounds to the input dtype. Code 0 is replaced by the code of 0.125."""
    codes = encode(round_to(amax / recipe.element.max, dtype) * tensor.encode, E4M3)
    return np.where(codes == 0, encode(np.float32(0.125), E4M3), codes)


def factor_compressed_tensors(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return scale / gs. Elements are divided by this factor."""
    return decode_scale(codes) / tensor.encode


# ---- E8M0 scales ----


def _inverse(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return 2^(127 - code), the reciprocal of the scale. Elements are multiplied by this factor."""
    return inverse_e8m0(codes)


def _shifted_exponent(rounded: np.ndarray, element: ElementFormat, up: np.ndarray | int = 0) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(rounded)) - emax + up), clamped to the range of E8M0.

    The code is 255 (NaN) if rounded is infinite or NaN.
    """
    field = exponent_field(np.asarray(rounded, np.float32))
    codes = np.where(field == 255, 255, np.clip(field + up - element.emax, 0, 255))
    return codes.astype(np.uint8)


def _add_to_bits(x: np.ndarray, addend: int) -> np.ndarray:
    """Return x with addend added to its bit pattern, so that a carry raises the exponent. NaN stays NaN."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return np.where(bits > 0x7F800000, bits, bits + addend).astype(np.int32).view(np.float32)


def code_e8m0_floor(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(floor(log2(amax)) - emax), as in OCP MX v1.0. inf and NaN give NaN."""
    return _shifted_exponent(amax, recipe.element)


def code_e8m0_ceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(ceil(log2(amax)) - emax), computed from the bits. inf and NaN give NaN."""
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted_exponent(amax, recipe.element, up=mantissa != 0)


def code_e8m0_even(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_floor for an amax that is first rounded to the mantissa bits of the element.

    By this rounding, an amax reaches the next power of two from 1.75 times a power of two on for E2M1, and from 1.9375
    times on for E4M3 and E2M3.
    """
    return _shifted_exponent(_add_to_bits(amax, 1 << 22 - recipe.element.mantissa_bits), recipe.element)


def code_e8m0_te(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax * fp32(1 / max), rounded up to a power of two. inf gives code 254, and NaN gives 255.

    Source: TE float_to_e8m0.
    """
    return encode_e8m0(amax * (ONE / recipe.element.max), "rp")


def code_e8m0_rceil(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax * fp32(1 / max), rounded up to a power of two. inf and NaN give code 255 (NaN).

    Source: torchao RCEIL.
    """
    codes = code_e8m0_te(amax, tensor, recipe, dtype)
    return np.where(np.isfinite(amax), codes, 255).astype(np.uint8)


def code_e8m0_te_reference(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of the rule e8m0_modelopt, except 255 if amax is NaN.

    Source: TE reference_nvfp4.py cast_to_e8, with pow_2_scales.
    """
    return np.where(np.isnan(amax), np.uint8(255), code_e8m0_modelopt(amax, tensor, recipe, dtype))


def code_e8m0_flashinfer_fp4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of amax * rcp(max), rounded up to a power of two. Every operation flushes subnormals."""
    return encode_e8m0(multiply_ftz(amax, reciprocal_approx_ftz(recipe.element.max)), "rp")


def factor_e8m0_flashinfer_fp4(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), except 0 for code 0 and for codes 254 and 255.

    Because subnormals are flushed, code 0 occurs only if amax * rcp(max) is 0. From code 254 on, the factor 2^-127 is
    flushed. The FP4 kernel computes ex2(127 - code) and checks for a product of 0. The FP8 kernel computes rcp of the
    scale. Both give this factor.
    """
    return np.where((codes > 0) & (codes < 254), inverse_e8m0(codes), ZERO)


code_e8m0_flashinfer_fp8, factor_e8m0_flashinfer_fp8 = code_e8m0_flashinfer_fp4, factor_e8m0_flashinfer_fp4


def code_e8m0_modelopt(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(log2(amax / max)). log2 is rounded to float32, and the exponent clamped to [-127, 127].

    amax = 0 and NaN give exponent -127. For an amax a few ulp above max * 2^k, the rounded log2 is k. The exponent is
    then one too small, and the block's largest value saturates.
    """
    ratio = amax / recipe.element.max
    exponent = np.ceil(log2(np.where(ratio > 0, ratio, np.float32(2.0**-127))))
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def code_e8m0_compressed_tensors(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(floor(log2(r)) - emax), where r is amax rounded to one mantissa bit.

    An amax of 1.75 * 2^k or more rounds to 2^(k + 1). For 6-bit elements, r has three mantissa bits.

    For float16 elements the producer masks the bits of float16. So a subnormal amax rounds to 2^-14 or to 0, and a
    scale of 0 counts as 1. An amax that is infinite or NaN gives a NaN scale, as in OCP MX; the producer stores 127
    with zero codes.
    """
    mantissa_bits = 3 if recipe.element.bits == 6 else 1
    if dtype == np.float16:
        amax = _rounded_subnormals(amax, mantissa_bits)
    codes = _shifted_exponent(_add_to_bits(amax, 1 << 22 - mantissa_bits), recipe.element)
    if dtype == np.float16:
        codes = np.where(decode(codes, E8M0).astype(np.float16) == 0, np.uint8(127), codes)
    return codes


def _rounded_subnormals(amax: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """Return amax with values below 2^-14, the smallest normal of float16, rounded to 2^-14 or 0.

    An amax rounds up if amax + 2^(-15 - mantissa_bits) reaches 2^-14. The producer gets these results by an addition to
    the float16 bits, which it then masks.
    """
    normal = np.float32(2.0**-14)
    rounds_up = amax + np.ldexp(normal, -1 - mantissa_bits) >= normal
    return np.where(amax < normal, np.where(rounds_up, normal, ZERO), amax)


_FACTORS = {"E4M3": _product, "E8M0": _inverse}  # default factor by scale format, for rules without their own


_MODULES = (block_rules_gguf_mlx, block_rules_e8m0_serving, block_rules_e4m3_serving, block_rules_torchao)
_FUNCTIONS = {name: value for module in _MODULES for name, value in vars(module).items()} | globals()


def _rule(name: str, scale: str) -> BlockRule:
    """Return the code and factor functions of the rule `name`.

    scale: the rule's scale format. It has a default factor function, for rules without their own.
    """
    return BlockRule(_FUNCTIONS[f"code_{name}"], _FUNCTIONS.get(f"factor_{name}", _FACTORS[scale]))


BLOCK_RULES = {name: _rule(name, rule.scale) for name, rule in rules.BLOCK_RULES.items() if name != "four_over_six"}
