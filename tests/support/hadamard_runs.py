"""Provide inputs for tests of the Hadamard transform y: runs, which are rows of 16 elements.

Each function of this file makes one kind of runs. It takes a Runs, which holds the dtype and the sign mask, and a
random generator. It returns an array (n, 16).

The fast path sums in float32 and then decides whether the rounded result is certain; if not, it computes exactly. The
runs lie on both sides of this decision.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from inputs import BF16

from fp4kit.reference.stochastic import HADAMARD_BLOCK as BLOCK
from fp4kit.reference.stochastic import TE_SIGN_MASK

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
SYLVESTER = np.array([[(-1) ** (i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)])
MANTISSA_BITS = {F16: 10, BF16: 7, F32: 23}
LEAST_EXPONENT = {F16: -24, BF16: -133, F32: -149}
MOST_EXPONENT = {F16: 15, BF16: 127, F32: 127}


class Runs(NamedTuple):
    """A maker of runs, which are rows of 16 elements, for tests of a Hadamard transform.

    Attributes:
        dtype: the dtype of the elements.
        mask: the sign mask of the transform; bit i is 1 if element i is negated.
    """

    dtype: np.dtype
    mask: int = TE_SIGN_MASK

    def signs(self, j: int) -> np.ndarray:
        """Return the 16 signs with which a run's elements are added to give y_j, element j of the transform."""
        return SYLVESTER[j] * (1 - 2 * (self.mask >> np.arange(BLOCK) & 1))

    def of_kind(self, kind: str) -> np.ndarray:
        """Return the runs (n, 16) that the function named `kind` makes, in the dtype of this object."""
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(KINDS[kind](self, np.random.default_rng(7)).astype(self.dtype, copy=False))


def signs(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return runs of 16 elements, (n, 16): all patterns of signs, for ones, zeros and the smallest subnormal."""
    patterns = 1.0 - 2.0 * (np.arange(1 << BLOCK)[:, None] >> np.arange(BLOCK) & 1)
    return np.concatenate([patterns, np.copysign(0.0, patterns), patterns * 2.0 ** LEAST_EXPONENT[case.dtype]])


def spread(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return random runs of 16 elements with many magnitudes: 400 runs for every number s below 48.

    In each run, the exponents of the elements differ by about s at most. Every third run contains zeros of both signs.
    """
    s = np.repeat(np.arange(48), 400)[:, None]
    x = rng.standard_normal((len(s), BLOCK)) * np.exp2(-rng.integers(0, s + 1, (len(s), BLOCK)))
    x[::3] *= rng.random(x[::3].shape) < 0.7
    return x * np.exp2(rng.integers(-30, 8, (len(s), 1)).astype(np.float64))


def normal(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return runs (4096, 16) of normally distributed values."""
    return rng.standard_normal((4096, BLOCK))


def bits(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return runs (8192, 16) of random bit patterns in the dtype: all magnitudes, infinities and NaN."""
    unsigned = np.dtype(f"u{case.dtype.itemsize}")
    return rng.integers(0, 2 ** (8 * unsigned.itemsize), (8192, BLOCK), unsigned).view(case.dtype)


def edges(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return runs of 16 elements, (n, 16), with values at both ends of the dtype's range.

    In the first runs, elements or results are subnormal. The next runs have the largest elements, so that some results
    overflow. The last runs contain infinities or NaN.
    """
    low = rng.integers(-300, 301, (4096, BLOCK)) * 2.0 ** (LEAST_EXPONENT[case.dtype] + rng.integers(0, 6, (4096, 1)))
    high = rng.standard_normal((4096, BLOCK)) * 2.0 ** (MOST_EXPONENT[case.dtype] + rng.integers(-4, 1, (4096, 1)))
    high = np.clip(high, *(s * float(ml_dtypes.finfo(case.dtype).max) for s in (-1, 1)))
    high[:1024] = np.sign(high[:1024]) * float(ml_dtypes.finfo(case.dtype).max)
    high[:256] = case.signs(3) * high[0, 0] * np.exp2(-rng.integers(0, 3, (256, BLOCK)))  # y_3 is 4 times an element
    few = rng.standard_normal((2048, BLOCK))
    few[np.arange(2048), rng.integers(0, BLOCK, 2048)] = rng.choice([np.inf, -np.inf, np.nan], 2048)
    few[::5, ::7] = np.inf
    return np.concatenate([low, high, few])


def ties(case: Runs, rng: np.random.Generator) -> np.ndarray:
    """Return runs of 16 elements for which one y_j of the transform is nearly halfway between two values of the dtype.

    y_j is 2^n + 2^(n - M - 1), plus or minus a quarter of an element's lowest bit, for n on both sides of 24; M is the
    number of mantissa bits. float32 holds y_j exactly for n < 24. For larger n, the float32 sum rounds to the midpoint,
    which then rounds the other way.
    """
    M, count = MANTISSA_BITS[case.dtype], 6000
    least, n = 2.0 ** rng.integers(-9, 4, (count, 1)), rng.integers(20, 28, (count, 1))
    x = np.zeros((count, BLOCK))
    x[:, :8] = 2.0 ** (n - 3)
    x[:, 8:9] = 2.0 ** (n - M - 1) * rng.choice([1, 3, -1], (count, 1))
    x[:, 9:10] = 2.0**M + 1
    x[:, 10:11] = -(2.0**M) - rng.choice([0, 2], (count, 1))
    rows = rng.integers(0, BLOCK, count)
    by_row = np.array([case.signs(j) for j in range(BLOCK)])[rows]
    return rng.permuted(x, axis=1) * by_row * least * rng.choice([-1, 1], (count, 1))


KINDS = {f.__name__: f for f in (signs, spread, normal, bits, edges, ties)}
