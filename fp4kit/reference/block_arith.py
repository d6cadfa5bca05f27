"""What block rules of several modules share: the values that scale codes stand for, and exponents."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.reference.codec import decode
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
