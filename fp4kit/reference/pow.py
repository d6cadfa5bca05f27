"""Compute powers d^p in float64, for the errors d of a scale search, with equal bits on every machine.

The pow functions of C libraries and of CUDA differ in the last bit, so they cannot be used. `power` uses only +, -, *,
/, each rounded once, and operations on bits. No producer computes such powers, so there is nothing to match. The C++
version is pow.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SQRT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # bits of sqrt(1/2), the lower end of the significands
LN2, TWO_OVER_LN2 = float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.71547652b82fep+1")
ATANH = [TWO_OVER_LN2 / (2 * i + 1) for i in range(10)]  # series of atanh; the remainder is below 2^-55 of the sum
EXP = [1 / math.factorial(i) for i in range(14)]  # series of exp; the remainder is below 2^-57 of the sum
PART = 1 << 13  # elements that are computed at once, few enough for the cache


def power(d: np.ndarray, p: float) -> np.ndarray:
    """Return d^p, computed as d^n * 2^((p - n) log2 d) with n = floor(p): float64, in the shape of d.

    Args:
        d: float64, zeros or positive normal numbers, such as float32 numbers and their differences.
        p: the power, at least 1.

    Numerics:
        d^n is a chain of products, by the binary digits of n from the left. 0 gives 0, inf gives inf, NaN gives NaN,
        and overflow gives inf. A result that underflows is rounded like a product. d^1 is d, and d^2 equals d * d.
        Except for underflow, the relative error is at most (n + 4 + 2 |(p - n) log2 d|) 2^-53.
    """
    result = np.array(d, np.float64, order="C")
    flat = result.reshape(-1)
    for first in range(0, flat.size, PART):
        part = flat[first : first + PART]
        part[...] = _power(part, int(p), p - int(p))
    return result


def _power(d: np.ndarray, n: int, fraction: float) -> np.ndarray:
    """Return d^n * 2^(fraction * log2 d), so d to the power n + fraction, for float64 d."""
    # n must be at least 1.
    result = d
    for digit in f"{n:b}"[1:]:
        result = result * result
        if digit == "1":
            result = result * d
    return result * exp2(fraction * log2(d)) if fraction else result


def log2(d: np.ndarray) -> np.ndarray:
    """Return log2(d) of float64 d >= 0.

    For d = m * 2^e with m in [sqrt(1/2), sqrt(2)), the result is e + 2 / ln 2 * atanh((m - 1) / (m + 1)). Zero,
    infinity and NaN give finite numbers without a meaning. `power` multiplies by d afterwards, which decides these
    cases.
    """
    bits = d.view(np.int64)
    e = (bits - SQRT_HALF) >> 52
    m = (bits - (e << 52)).view(np.float64)
    f = (m - 1) / (m + 1)
    return e + f * polynomial(ATANH, f * f)


def exp2(t: np.ndarray) -> np.ndarray:
    """Return 2^t of float64 t as 2^k * e^((t - k) ln 2), where k is the integer nearest to t.

    k must be from -1023 to 1024. If k is -1023, 0 is used for the factor 2^k; if k is 1024, infinity is used.
    """
    k = np.rint(t)
    return polynomial(EXP, (t - k) * LN2) * ((k.astype(np.int64) + 1023) << 52).view(np.float64)


def polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    """Return c[0] + c[1] x + c[2] x^2 + ... in a new float64 array, evaluated from the last coefficient to the first.

    There must be at least one coefficient.
    """
    result = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result *= x
        result += c
    return result
