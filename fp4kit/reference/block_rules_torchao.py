"""Define the E8M0 block rules that torchao 0.18 uses in its function to_mx: pairs of functions.
code_<rule> returns the scale codes of blocks (uint8), computed from `amax`, their largest magnitudes; a code c stands
for 2^(c - 127). factor_<rule> returns the float32 factors that multiply elements (see block_rules.py). In texts such as
"inf gives 254", inf is a value of `amax` and 254 a code.

These rules differ from those of torchao's development version, such as e8m0_floor, in three cases:

- the scale code is 0
- an amax is infinite or rounds to infinity
- for mode RCEIL, an amax is a few ulp above M * 2^k, where M is the largest element value

Source: torchao mx_formats/mx_tensor.py.
"""

from __future__ import annotations

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.block_arith import inverse_e8m0
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.reference.trace import show
from fp4kit.rounding import exponent_field

MIN_NORMAL_INVERSE = np.float32(2.0**126)  # inverse of 2^-126, the smallest scale that elements are divided by


def _shifted(amax: np.ndarray, rounded: np.ndarray, recipe: Recipe, up: np.ndarray | int = 0) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(rounded)) - emax + up), or 255 if amax is NaN."""
    codes = np.clip(exponent_field(show("amax, rounded by the rule", rounded)) + up - recipe.element.emax, 0, 255)
    return np.where(np.isnan(amax), 255, codes).astype(np.uint8)


def code_e8m0_floor_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(amax)) - emax), as torchao 0.18.0 does with mode FLOOR.

    emax is the exponent of the largest element value. Exponents below -127, also that of amax = 0, give code 0. inf
    gives the code of 2^(128 - emax), and NaN gives 255 (NaN). tensor and dtype are not used.
    """
    return _shifted(amax, np.asarray(amax, np.float32), recipe)


def code_e8m0_ceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(ceil(log2(amax)) - emax), as torchao 0.18.0 does with mode CEIL.

    emax is the exponent of the largest element value. The logarithm is taken exactly, from the bits of amax. Exponents
    below -127, also that of amax = 0, give code 0. inf gives the code of 2^(128 - emax), and NaN gives 255 (NaN).
    tensor and dtype are not used.
    """
    mantissa = np.asarray(amax, np.float32).view(np.int32) & 0x7FFFFF
    return _shifted(amax, np.asarray(amax, np.float32), recipe, up=mantissa != 0)


def code_e8m0_even_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^(floor(log2(r)) - emax), as torchao 0.18.0 does with mode EVEN.

    r is amax rounded to the number of mantissa bits of an element, and emax is the exponent of the largest element
    value. Exponents below -127, also that of amax = 0, give code 0. If r is infinite, the code is that of 2^(128 -
    emax). NaN gives 255 (NaN). tensor and dtype are not used.
    """
    bits = np.where(np.isnan(amax), 0, np.asarray(amax, np.float32).view(np.int32))
    rounded = (bits + (1 << 22 - recipe.element.mantissa_bits)).astype(np.int32).view(np.float32)
    return _shifted(amax, rounded, recipe)


def factor_e8m0_floor_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in torchao 0.18.0: 2^(127 - code).

    Code 0 stands for 2^-127, but its factor is 2^126, because the smallest divisor of torchao is 2^-126. Code 255 has
    the factor 0, because torchao divides by infinity. amax, tensor, recipe and dtype are not used.
    """
    return np.where(codes == 0, MIN_NORMAL_INVERSE, np.where(codes == 255, ZERO, inverse_e8m0(codes)))


factor_e8m0_ceil_018 = factor_e8m0_even_018 = factor_e8m0_floor_018


def code_e8m0_rceil_018(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 code of 2^ceil(log2(amax / M)), as torchao 0.18.0 does with mode RCEIL.

    M is the largest element value. log2 is rounded to float32, and the exponent is clamped to [-127, 127]. So amax = 0
    gives code 0, and inf gives 254. NaN gives 255 (NaN). tensor and dtype are not used. Source: torchao _to_mx_rceil.
    """
    exponent = np.ceil(show("log2 of the scale", log2(np.where(np.isnan(amax), ONE, amax / recipe.element.max))))
    return np.where(np.isnan(amax), 255, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def factor_e8m0_rceil_018(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in torchao 0.18.0's mode RCEIL: 2^(127 - code).

    For code 0 the factor is 1. The elements of such a block are tiny, so they become zeros. Code 255 has the factor
    NaN. amax, tensor, recipe and dtype are not used.
    """
    return np.where(codes == 0, ONE, inverse_e8m0(codes))
