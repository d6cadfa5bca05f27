"""Rounding of numbers to the codes of a format: one formula, in float32 and in float64, and the roundings by name.

With e = max(exponent of a, emin) and step = 2^(e - M),

    code = (e - emin) * 2^M + round(a / step)

because codes of a format with M mantissa bits are consecutive integers: a carry out of the mantissa lands in the exponent.
a / step is exact, so the only rounding is the one that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]  # a / step, not negative -> integers, as floats
_LAYOUTS = {np.dtype(np.float32): (np.int32, 23, 127), np.dtype(np.float64): (np.int64, 52, 1023)}  # bits, mantissa, bias


def _round_ties_to_zero(a: np.ndarray) -> np.ndarray:
    return np.ceil(a - a.dtype.type(0.5))  # exact: a < 2^(M+1) and M is small


def _round_ties_away(a: np.ndarray) -> np.ndarray:
    floor = np.floor(a)
    return floor + (a - floor >= a.dtype.type(0.5))


# rn: nearest, ties to even; rz: toward zero; rna / rnz: nearest, ties away from / toward zero.
ROUNDINGS: dict[str, Rounding] = {
    "rn": np.rint,
    "rz": np.floor,
    "rna": _round_ties_away,
    "rnz": _round_ties_to_zero,
}


def exponent_field(x: np.ndarray) -> np.ndarray:
    """Biased exponent of x (0 for zero and subnormals, 255 or 2047 for inf and NaN); the sign is ignored."""
    bits, mantissa, bias = _LAYOUTS[x.dtype]
    return (x.view(bits) >> mantissa) & (2 * bias + 1)


def power_of_two(exponent: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """2^exponent for exponents of normal numbers: -126 <= exponent <= 127 in float32."""
    bits, mantissa, bias = _LAYOUTS[np.dtype(dtype)]
    return ((exponent.astype(bits) + bias) << mantissa).view(dtype)


def codes_of(a: np.ndarray, emin: int, mantissa_bits: int, rounding: Rounding) -> np.ndarray:
    """Codes, as integers, of a >= 0 among the magnitudes of a format that goes on without end: the largest is the caller's.

    a: float32 or float64, no NaN, below 2^(127 + mantissa_bits) in float32 and 2^(1023 + mantissa_bits) in float64; if above zero, not
        so small that a / step underflows.
    """
    bits, _, bias = _LAYOUTS[a.dtype]
    exponent: np.ndarray = np.maximum(exponent_field(a) - bias, bits(emin))
    rounded = rounding(a * power_of_two(mantissa_bits - exponent, a.dtype))
    return (exponent - emin << mantissa_bits) + rounded.astype(bits)
