"""Errors, and powers of them, for tests of what is raised to which power; whole numbers alone make these."""

from math import sqrt

import numpy as np

POWERS = (1.0, 1.5, 2.0, 2.4, 3.0, 3.999999999, 7.25, 16.0)


def errors() -> np.ndarray:
    """float64 of all exponents and of float32's, some beside powers of two and roots of them, 0, infinity and NaN."""
    i = np.arange(4000, dtype=np.uint64)
    significands = (i * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(12)
    wide = significands | (np.uint64(1) + i * np.uint64(7) % np.uint64(2046)) << np.uint64(52)
    usual = significands | (np.uint64(1000) + i % np.uint64(30)) << np.uint64(52)
    beside = [np.float64(x).view(np.uint64) + i[:5] - np.uint64(2) for x in (1, sqrt(2), sqrt(0.5), 2.0**-149, 2.0**127)]
    ends = np.array([0, np.inf, np.nan]).view(np.uint64)
    return np.concatenate([usual, wide, *beside, ends]).view(np.float64)
