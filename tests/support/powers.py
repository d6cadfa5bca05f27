"""Provide errors and exponents for tests of search objectives that raise errors to a power, such as p2.4."""

from math import sqrt

import numpy as np
from searched import STATIC

from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import power
from fp4kit.reference.search import DEFAULT_TERMS, candidate_amaxes, residual, scales_of

POWERS = (1.0, 1.5, 2.0, 2.4, 3.0, 3.999999999, 7.25, 16.0)


def errors() -> np.ndarray:
    """Return float64 errors that are made from integers only, so that they are equal on every machine.

    The first 4000 errors have ordinary magnitudes, and the next 4000 errors have any exponents. They are followed by
    neighbors of 1, sqrt(2), sqrt(1/2), 2^-149 and 2^127, and by 0, infinity and NaN.
    """
    i = np.arange(4000, dtype=np.uint64)
    significands = (i * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(12)
    wide = significands | (np.uint64(1) + i * np.uint64(7) % np.uint64(2046)) << np.uint64(52)
    usual = significands | (np.uint64(1000) + i % np.uint64(30)) << np.uint64(52)
    beside = [
        np.float64(x).view(np.uint64) + i[:5] - np.uint64(2) for x in (1, sqrt(2), sqrt(0.5), 2.0**-149, 2.0**127)
    ]
    ends = np.array([0, np.inf, np.nan]).view(np.uint64)
    return np.concatenate([usual, wide, *beside, ends]).view(np.float64)


def nearly_equal(p: float, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a row of blocks, and weights of its elements, for which rounding decides between two scales.

    The recipe is STATIC and the tensor amax is 4. In each block, three elements are not zero. The largest has no weight
    and fixes one candidate for the scale. The other two elements have weights. One of them has its larger error under
    this candidate, and the other one under the next candidate.

    Args:
        p: the exponent of the errors.
        blocks: the number of blocks.
    """
    rng, r, amax = np.random.default_rng(0), RECIPES[STATIC], np.float32(4)
    candidates, codes = candidate_amaxes(amax, r), rng.integers(40, 110, 4 * blocks)
    scales = scales_of(candidates, amax, r, DEFAULT_TERMS)
    pairs = (rng.random((2, 4 * blocks)) * candidates[codes - 1]).astype(np.float32)
    (a, b), (a_next, b_next) = (
        power(np.abs(residual(pairs, scales[codes - 1 + i])).astype(np.float64), p) for i in (0, 1)
    )
    with np.errstate(all="ignore"):
        ratio = (a - a_next) / (b_next - b)
    chosen = np.flatnonzero((ratio > 1e-3) & (ratio < 1e3))[:blocks]
    x, weights = np.zeros((2, blocks, 16), np.float32)
    x[:, 0], x[:, 5], x[:, 11] = candidates[codes[chosen] - 1], *pairs[:, chosen]
    weights[:, 5], weights[:, 11] = 1, ratio[chosen]
    return x.reshape(1, -1), weights.reshape(-1)
