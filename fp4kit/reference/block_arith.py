"""Define functions that several block_rules modules share: scale decoding, exponents, and the scales of qwix.
The amax of a block is its largest magnitude; its scale is computed from it.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE
from fp4kit.reference.codec import decode, encode, encode_e8m0
from fp4kit.reference.tensor_rules import round_to
from fp4kit.reference.trace import show
from fp4kit.rounding import exponent_field


def decode_scale(codes: np.ndarray) -> np.ndarray:
    """Return the float32 values of E4M3 scale codes. The codes 0x7F and 0xFF give NaN."""
    return decode(codes, E4M3)


def encode_e4m3_scale(scale: np.ndarray) -> np.ndarray:
    """Return the uint8 E4M3 codes of block scales, rounded to nearest even, saturated at 448. NaN gives a NaN code."""
    return encode(show("block scale before rounding", scale), E4M3)


def encode_e8m0_scale(scale: np.ndarray) -> np.ndarray:
    """Return the uint8 E8M0 codes of block scales, which are rounded up to powers of two.

    0 gives code 0 (2^-127), numbers above 2^127 and inf give 254, and NaN gives 255.
    """
    return encode_e8m0(show("block scale before rounding", scale), "rp")


def inverse_e8m0(codes: np.ndarray) -> np.ndarray:
    """Return the reciprocals of E8M0 scales, 2^(127 - code), from their codes: float32.

    Code 254 gives 2^-127, a subnormal, and code 255 gives NaN.
    """
    exponent = 254 - codes.astype(np.int32)
    bits = np.where(exponent > 0, exponent << 23, 0x00400000)
    return np.where(codes == 255, np.float32(np.nan), bits.astype(np.int32).view(np.float32))


def exponent_up(x: np.ndarray) -> np.ndarray:
    """Return exponent + 127 of float32 x >= 0 after rounding x up to a power of two: int32, in the shape of x.

    Nonzero subnormals are rounded up to 2^-126, which gives 1. Zero gives 0. inf, and numbers above 2^127, give 255.
    NaN gives 256.
    """
    x = show("block scale before rounding", x)
    return exponent_field(x) + ((x.view(np.int32) & 0x7FFFFF) != 0)


def qwix_reciprocal(x: np.ndarray | np.float32, dtype: np.dtype) -> np.ndarray:
    """Return 1 / x as qwix computes it on a CPU: rounded to float16 if dtype is float16, otherwise to float32.

    x is the float32 divisor, and 0 gives infinity. dtype is the dtype of the elements. qwix divides by x, but XLA on a
    CPU multiplies by this reciprocal instead. XLA computes bfloat16 in float32.
    """
    inverse = np.divide(ONE, x)
    return round_to(inverse, dtype) if dtype == np.float16 else inverse


def qwix_scale(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the scale of blocks in qwix: T(amax * qwix_reciprocal(M)), or 1 if this is below a threshold.

    T rounds to dtype, the dtype of the elements, and M is the largest element value. The threshold is the square root
    of the smallest normal of dtype: 2^-7 for float16, otherwise 2^-63. So a float16 block of E2M1 elements with an amax
    below 0.047 has scale 1.
    """
    scale = round_to(amax * qwix_reciprocal(recipe.element.max, dtype), dtype)
    return np.where(scale < np.float32(2.0**-7 if dtype == np.float16 else 2.0**-63), ONE, scale)
