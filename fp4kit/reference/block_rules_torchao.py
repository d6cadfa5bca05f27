"""E8M0 block rules of torchao 0.18: to_mx in mx_formats/mx_tensor.py. block_rules.py explains rules and notation.

They differ from the rules of torchao's development version, such as e8m0_floor, in three cases: under a scale byte of
0; for an amax that is infinite or rounds to infinity; and, for RCEIL, a few ulp above max * 2^k.
"""

from __future__ import annotations

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.block_arith import inverse_e8m0
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.rounding import exponent_field

MIN_NORMAL_INVERSE = np.float32(2.0**126)  # inverse of 2^-126, the smallest scale that elements are divided by


def _shifted(amax: np.ndarray, rounded: np.ndarray, recipe: Recipe, up: np.ndarray | int = 0) -> np.ndarray:
    """Return the code exponent(rounded) + up - emax, or 255 for NaN.

    The exponent field of an infinity counts as 255.
    """
    codes = np.clip(exponent_field(rounded) + up - recipe.element.emax, 0, 255)
    return np.where(np.isnan(amax), 255, codes).astype(np.uint8)


def code_e8m0_floor_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(floor(log2(amax)) - emax); inf gives 2^(128 - emax), NaN gives NaN.

    Source: torchao 0.18.0 to_mx FLOOR.
    """
    return _shifted(amax, np.asarray(amax, np.float32), recipe)


def code_e8m0_ceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^(ceil(log2(amax)) - emax), computed from the bits; inf gives 2^(128 - emax), NaN gives NaN.

    Source: torchao 0.18.0 to_mx CEIL.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted(amax, np.asarray(amax, np.float32), recipe, up=mantissa != 0)


def code_e8m0_even_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return e8m0_floor_018's code after rounding amax to the mantissa of the element, where it may become inf.

    Source: torchao 0.18.0 to_mx EVEN.
    """
    bits = np.where(np.isnan(amax), 0, np.asarray(amax, np.float32).view(np.int32))
    rounded = (bits + (1 << 22 - recipe.element.mantissa_bits)).astype(np.int32).view(np.float32)
    return _shifted(amax, rounded, recipe)


def factor_e8m0_floor_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), except 2^126 for code 0, which decodes to 2^-127, and 0 for code 255.

    Under code 255 torchao divides the elements by infinity.
    """
    return np.where(codes == 0, MIN_NORMAL_INVERSE, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_ceil_018 = factor_e8m0_even_018 = factor_e8m0_floor_018


def code_e8m0_rceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code of 2^ceil(log2(amax / max)) with a float32 log2, clamped to [-127, 127]; NaN gives NaN.

    Source: torchao 0.18.0 _to_mx_rceil.
    """
    exponent = np.ceil(log2(np.where(np.isnan(amax), ONE, amax / recipe.element.max)))
    return np.where(np.isnan(amax), 255, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def factor_e8m0_rceil_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(127 - code), except 1 for code 0, because the elements of such blocks are zeros."""
    return np.where(codes == 0, ONE, inverse_e8m0(codes))
