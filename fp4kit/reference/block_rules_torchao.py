"""Block rules of E8M0 scales of torchao's release 0.18: to_mx, mx_formats/mx_tensor.py. What a rule is: block_rules.py.

They differ from those of the development version, such as e8m0_floor, under a scale byte of 0, where an amax is
infinite or rounds to infinity, and in RCEIL a few ulp above max * 2^k.
"""

from __future__ import annotations

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.block_arith import inverse_e8m0
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.rounding import exponent_field

MIN_NORMAL_INVERSE = np.float32(2.0**126)  # of 2^-126, the least scale that elements are divided by


def _shifted(amax: np.ndarray, rounded: np.ndarray, recipe: Recipe, up: np.ndarray | int = 0) -> np.ndarray:
    """Return exponent(rounded) + up - emax as a code, 255 for NaN alone: the exponent field of an infinity counts as
    255.
    """
    codes = np.clip(exponent_field(rounded) + up - recipe.element.emax, 0, 255)
    return np.where(np.isnan(amax), 255, codes).astype(np.uint8)


def code_e8m0_floor_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """2^(floor(log2(amax)) - emax); inf -> 2^(128 - emax), NaN -> NaN. Source: torchao 0.18.0 to_mx FLOOR."""
    return _shifted(amax, np.asarray(amax, np.float32), recipe)


def code_e8m0_ceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """2^(ceil(log2(amax)) - emax), from the bits; inf -> 2^(128 - emax), NaN -> NaN. Source: torchao 0.18.0 to_mx
    CEIL.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted(amax, np.asarray(amax, np.float32), recipe, up=mantissa != 0)


def code_e8m0_even_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """e8m0_floor_018 after rounding amax to the mantissa of the element, to inf, too. Source: torchao 0.18.0 to_mx
    EVEN.
    """
    bits = np.where(np.isnan(amax), 0, np.asarray(amax, np.float32).view(np.int32))
    rounded = (bits + (1 << 22 - recipe.element.mantissa_bits)).astype(np.int32).view(np.float32)
    return _shifted(amax, rounded, recipe)


def factor_e8m0_floor_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """2^(127 - code), but 2^126 for code 0, which decodes to 2^-127; 0 for 255: elements are divided by an infinity
    there.
    """
    return np.where(codes == 0, MIN_NORMAL_INVERSE, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_ceil_018 = factor_e8m0_even_018 = factor_e8m0_floor_018


def code_e8m0_rceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """2^ceil(log2(amax / max)) with a float32 log2, clamped to [-127, 127]; NaN -> NaN. Source: torchao 0.18.0
    _to_mx_rceil.
    """
    exponent = np.ceil(log2(np.where(np.isnan(amax), ONE, amax / recipe.element.max)))
    return np.where(np.isnan(amax), 255, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def factor_e8m0_rceil_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """2^(127 - code), but 1 for code 0: elements of such blocks are zeros."""
    return np.where(codes == 0, ONE, inverse_e8m0(codes))
