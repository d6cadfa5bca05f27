"""What block rules of several modules share: the values that scale codes stand for, and exponents."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE
from fp4kit.reference.codec import decode
from fp4kit.reference.scaling import round_to
from fp4kit.rounding import exponent_field


def decode_scale(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3 scales."""
    return decode(codes, E4M3)


def inverse_e8m0(codes: np.ndarray) -> np.ndarray:
    """float32 2^(127 - code); 254 -> 2^-127 (a subnormal), 255 -> NaN."""
    exponent = 254 - codes.astype(np.int32)
    bits = np.where(exponent > 0, exponent << 23, 0x00400000)
    return np.where(codes == 255, np.float32(np.nan), bits.astype(np.int32).view(np.float32))


def exponent_up(x: np.ndarray) -> np.ndarray:
    """Exponent field of float32 x >= 0, and one more if it has mantissa bits: int32 0 ... 255, 256 for NaN."""
    return exponent_field(x) + ((x.view(np.int32) & 0x7FFFFF) != 0)


def qwix_scale(amax: np.ndarray, recipe: Recipe, dtype: np.dtype, by_reciprocal: bool) -> np.ndarray:
    """T(amax / max), or T(amax * T(1 / max)), as XLA on a CPU divides float16; 1 below the root of T's smallest normal.

    That is 2^-63, but 2^-7 of float16, whose smallest normal is 2^-14: there an amax below 0.047 has scale 1.
    """
    largest = recipe.element.max
    scale = round_to(amax * round_to(ONE / largest, dtype) if by_reciprocal else amax / largest, dtype)
    return np.where(scale < np.float32(2.0**-7 if dtype == np.float16 else 2.0**-63), ONE, scale)
