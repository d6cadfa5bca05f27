"""Shrink arrays of failing cases: which parts of an axis to keep, and which elements to set to zero or one.
shrink.py tries the arrays in order, and keeps the first one that still makes the case fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np

from fp4kit.evidence.fuzz.arrays import DTYPES, DrawnArray
from fp4kit.formats import bit_patterns

MAX_ONE_BY_ONE = 24  # elements are set to 1 one by one if at most this many are nonzero


def parts(n: int, unit: int) -> Iterator[slice]:
    """Yield slices of an axis of length ``n``, to try keeping only that part of the axis."""
    for step in sorted({unit, lcm(unit, 16) if n > 16 else unit}):
        half = n // 2 // step * step
        for part in (slice(0, step), slice(0, half), slice(half, n), slice(0, n - step), slice(step, n)):
            if 0 < len(range(*part.indices(n))) < n:
                yield part


def simpler_values(a: DrawnArray) -> Iterator[DrawnArray]:
    """Yield arrays with more zeros: first without nonzero elements, then with ever smaller groups of elements set
    to 0.
    """
    values = a.values()
    bits = bit_patterns(values).reshape(-1)
    (nonzero,) = np.nonzero(bits)
    size = len(nonzero)
    while size:
        for start in range(0, len(nonzero), size):
            yield _with_bits(a, bits, nonzero[start : start + size], 0)
        size //= 2
    one = _ones(a, bits)
    for i in nonzero[: MAX_ONE_BY_ONE if len(nonzero) <= MAX_ONE_BY_ONE else 0]:
        if bits[i] != one[i]:
            yield _with_bits(a, bits, np.array([i]), int(one[i]))


def _ones(a: DrawnArray, bits: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array in which every element except +0 is replaced by 1."""
    return np.where(bits != 0, np.ones((), DTYPES[a.dtype]).view(bits.dtype), bits)


def _with_bits(a: DrawnArray, bits: np.ndarray, at: np.ndarray, value: int) -> DrawnArray:
    """Return the array with the bit patterns ``bits``, except for ``value`` at the flat indices ``at``."""
    changed = bits.copy()
    changed[at] = value
    return a.with_values(changed.view(DTYPES[a.dtype]).reshape(a.shape), a.view)
