"""d^p of errors, in float64: the same bits on every machine, for it is made of +, -, *, / (each rounded once) and of
bits alone.

No producer has it. A C library's pow differs from another one's in its last bit, and so does CUDA's. In C++: power.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SQRT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # its bits: where significands begin
LN2, TWO_OVER_LN2 = float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.71547652b82fep+1")
ATANH = [TWO_OVER_LN2 / (2 * i + 1) for i in range(10)]  # what is cut off is below 2^-55 of the sum
EXP = [1 / math.factorial(i) for i in range(14)]  # and below 2^-57
PART = 1 << 13  # elements at a time, for which caches have room


def power(d: np.ndarray, p: float) -> np.ndarray:
    """d^n * 2^((p - n) log2 d), n = floor(p): float64, of d's shape.

    d: float64, 0 or normal numbers above; what a float32 is, and the difference of two. p: from 1 on.
    Numerics: d^n is made of products, from the left in the binary digits of n. 0 -> 0, inf -> inf, NaN -> NaN; overflow
    -> inf; what underflows is rounded as products are. Squares and d^1 are those of IEEE. The relative error is at most
    (n + 4 + 2 |(p - n) log2 d|) 2^-53, beside that of underflow.
    """
    found = np.array(d, np.float64, order="C")
    flat = found.reshape(-1)
    for first in range(0, flat.size, PART):
        part = flat[first : first + PART]
        part[...] = _power(part, int(p), p - int(p))
    return found


def _power(d: np.ndarray, n: int, fraction: float) -> np.ndarray:
    found = d
    for digit in f"{n:b}"[1:]:
        found = found * found
        if digit == "1":
            found = found * d
    return found * exp2(fraction * log2(d)) if fraction else found


def log2(d: np.ndarray) -> np.ndarray:
    """e + 2 / ln 2 * atanh((m - 1) / (m + 1)) of d = m * 2^e, m in [sqrt(1/2), sqrt(2)); finite of every d >= 0."""
    bits = d.view(np.int64)
    e = (bits - SQRT_HALF) >> 52
    m = (bits - (e << 52)).view(np.float64)
    f = (m - 1) / (m + 1)
    return e + f * polynomial(ATANH, f * f)


def exp2(t: np.ndarray) -> np.ndarray:
    """2^k * e^((t - k) ln 2), k the integer nearest to t, of -1023 (whose 2^k is 0 here) ... 1024 (infinity)."""
    k = np.rint(t)
    return polynomial(EXP, (t - k) * LN2) * ((k.astype(np.int64) + 1023) << 52).view(np.float64)


def polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    """c[0] + c[1] x + c[2] x^2 + ..., from the last coefficient on."""
    found = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        found *= x
        found += c
    return found
