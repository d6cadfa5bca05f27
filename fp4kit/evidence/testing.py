"""Provide helpers for tests, notebooks and benchmarks: bitwise comparison, and inputs that expose mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.formats import E2M1, bit_patterns
from fp4kit.quantized.container import PARTS, Quantized


def assert_same_bits(actual: Any, expected: Any, name: str = "array") -> None:
    """Raise AssertionError unless two arrays, or two Quantized objects, have equal shape, dtype and bits.

    NaNs are compared by their bits too. The message gives the number of differences, the coordinate of the first one,
    and both bit patterns there. The fields of a Quantized that are not arrays, such as its layout, are not compared.

    Args:
        actual: the array or Quantized to check.
        expected: what ``actual`` must equal.
        name: what the message calls the array.
    """
    if isinstance(actual, Quantized) or isinstance(expected, Quantized):
        assert type(actual) is type(expected), f"{name}: {type(actual).__name__} and {type(expected).__name__}"
        for part in PARTS:
            a, b = getattr(actual, part), getattr(expected, part)
            assert (a is None) == (b is None), f"{part}: {a!r} and {b!r}"
            if a is not None:
                assert_same_bits(a, b, part)
        return
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
    x, y = bit_patterns(a), bit_patterns(b)
    differ = x != y
    if differ.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), x.shape))
        count = int(np.count_nonzero(differ))
        raise AssertionError(
            f"{name}: {count} of {x.size} differ, first at {at}: {int(x[at]):#x} ({a[at]}) and {int(y[at]):#x}"
            f" ({b[at]})"
        )


def adversarial_blocks(dtype: Any = np.float32, block: int = 32, seed: int = 0) -> np.ndarray:
    """Return finite blocks that hit the edge cases of every quantization rule, as an array of shape (rows, 4 * block).

    They contain:
        - ties of E2M1 and their neighbors, at many scales;
        - blocks whose amax is at or next to 6 * 2^k, steps of 448, and powers of two;
        - signed zeros, subnormals, single outliers, and the largest finite values.

    Args:
        dtype: dtype of the result.
        block: number of elements per block.
        seed: seed of the random parts.
    """
    rows = [row for part in _adversarial(np.random.default_rng(seed), 4 * block) for row in part]
    finite = float(ml_dtypes.finfo(dtype).max)
    return np.clip(np.asarray(rows, np.float64), -finite, finite).astype(dtype)


def _adversarial(rng: np.random.Generator, k: int) -> Iterator[np.ndarray]:
    """Yield the rows of adversarial_blocks in groups: float64 arrays (rows, k), before they are clipped and cast."""
    grid = np.concatenate([E2M1.midpoints, E2M1.magnitudes.astype(np.float64)])
    for exponent in (-140, -126, -30, -14, -7, 0, 1, 7, 30, 100, 125):
        signs = rng.choice([-1.0, 1.0], (4, k))
        near = 1 + rng.choice([0, 2.0**-23, -(2.0**-24), 2.0**-8, -(2.0**-9)], (4, k))
        ties = signs * rng.choice(grid, (4, k)) * near
        ties[:, 0] = 6 * rng.choice([1, 1 + 2.0**-23, 1 - 2.0**-24, 7 / 6, 8 / 6], 4)
        yield ties * 2.0**exponent
    yield rng.standard_normal((8, k)) * np.exp2(rng.integers(-20, 20, (8, 1)))
    yield np.where(rng.random((4, k)) < 0.05, 1e4, 1e-4) * rng.standard_normal((4, k))
    yield np.zeros((1, k))
    yield np.copysign(np.zeros((1, k)), rng.choice([-1.0, 1.0], (1, k)))
    yield np.full((1, k), np.finfo(np.float32).max) * rng.choice([-1.0, 1.0], (1, k))
    yield np.full((1, k), 2.0**-149) * rng.integers(-3, 4, (1, k))
