"""Provide blocks at the edges of rules that compute exponents from rounded logarithms, as those for Ascend NPUs do."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
DIVISORS = 1, 0.875, 7.25, 6, 4  # the rules take the logarithms of amaxes divided by these
TOPS = 1.0, 13.0, 448.0
HALFWAY = np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])  # zero, and midpoints of E2M1


def amaxes(dtype: np.dtype, step: int = 1) -> np.ndarray:
    """Return every step-th finite magnitude of a 16-bit dtype; for float32, those within 30 ulp of c * 2^k, or drawn.

    c is one of DIVISORS, or c times the square root of 2, where a logarithm is halfway between two integers.
    """
    if dtype.itemsize == 2:
        every = np.arange(0, 0x8000, step, dtype=np.uint16).view(dtype)
        return every[np.isfinite(every.astype(np.float32))]
    near = np.outer([c * root for c in DIVISORS for root in (1, 2**0.5)], np.exp2(np.arange(-149.0, 129)))
    bits = near[(near >= 2.0**-149) & (near < 2.0**128)].astype(np.float32).view(np.int32)
    drawn = np.random.default_rng(9).integers(0, 0x7F800000, 5000)
    bits = np.concatenate([(bits[:, None] + np.arange(-30, 31)).ravel()[::step], drawn, [0, 1, 0x7F7FFFFF]])
    return bits[(bits >= 0) & (bits < 0x7F800000)].astype(np.int32).view(np.float32)


def blocks(dtype: np.dtype, step: int = 1, columns: int = 32) -> np.ndarray:
    """Return blocks with the given amaxes: (n, columns). Elements are drawn, next to midpoints, zeros, or tiny."""
    rng, a = np.random.default_rng(5), amaxes(dtype, step).astype(np.float32)[:, None]
    shape = len(a), columns
    power = np.exp2(np.floor(np.log2(np.maximum(a, np.float32(2.0**-149)).astype(np.float64))) - 2)
    ties = (rng.choice(HALFWAY, shape) * power).astype(np.float32)
    ties = (ties.view(np.int32) + rng.integers(-1, 2, shape) * (ties > 0)).astype(np.int32).view(np.float32)
    kind = rng.integers(0, 8, shape)
    x = np.where(kind < 4, rng.random(shape, np.float32) * a, np.where(kind < 7, ties, np.float32(2.0**-149)))
    x = np.minimum(x, a)
    x[:, 3] = a[:, 0]
    return (x * rng.choice(np.float32([-1, 1]), shape)).astype(dtype)


def every_element(dtype: np.dtype, top: float) -> np.ndarray:
    """Return blocks of 32 with the amax `top` and all magnitudes below it; for float32, those next to a bfloat16."""
    kind = DTYPES[1] if dtype == np.float32 else dtype
    a = np.arange(0x8000, dtype=np.uint16).view(kind).astype(np.float32)
    a = a[a < top].astype(dtype)
    a = np.concatenate([a, np.nextafter(a[1:], 0), np.nextafter(a[:-1], a[1:])]) if dtype == np.float32 else a
    x = np.zeros((-(-len(a) // 31), 32), dtype)
    x[:, 1:] = np.append(a, np.zeros(len(x) * 31 - len(a), dtype)).reshape(-1, 31)
    x[:, 0] = top
    x[1::2] *= -1
    return x


def nonfinite(dtype: np.dtype) -> np.ndarray:
    """Return a matrix (16, 256) with blocks of zeros, and with some NaN and infinities."""
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(16, 256)) * np.exp2(rng.integers(-18, 12, (16, 1)))).astype(dtype)
    x[2:4] = [[0], [-0.0]]
    x.reshape(-1)[rng.integers(0, x.size, 12)] = [np.nan, -np.nan, np.inf, -np.inf] * 3
    return x


def drawn_magnitudes(seed: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array (..., a multiple of 32) for which the best constant of ceil_x depends on the seed."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3 + seed, shape) * np.exp2(
        rng.integers(-9, 5, (*shape[:-1], 1)) + rng.random(shape[:-1])[..., None]
    )
    x[..., 0] *= 1 + seed % 3
    x[0, 0] *= 0 if seed % 4 == 0 else 1
    return x.astype(dtype)
