"""Provide calls to hadamard and rotate, and arrays for them, for tests of all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.formats import FLOATS

SIZES = HADAMARD_SIZES
SPECIALS = (np.inf, -np.inf, np.nan, -0.0, 1e-45, -1e-40, 6e-8, 3.4e38, -6.5e4)


class RotationCall(NamedTuple):
    """A call to hadamard, or to rotate with random matrices.

    Attributes:
        shape, axis, dtype: the shape of x, the axis of the blocks, and the dtype of x.
        size: the number of elements of a block.
        signs: "none", "block" or "axis", for no signs, one sign per element of a block, or one sign per element of the
            axis.
        inverse: the argument `inverse` of the call.
        matrices: 0 for a call to hadamard. For rotate, the number of matrices, which is 1 or the number of blocks.
    """

    shape: tuple[int, ...]
    axis: int
    dtype: np.dtype
    size: int
    signs: str = "none"
    inverse: bool = False
    matrices: int = 0

    def arguments(self) -> tuple[Callable[..., Any], np.ndarray, tuple[Any, ...], dict[str, Any]]:
        """Return the call as (function, x, further positional arguments, keyword arguments)."""
        rng = np.random.default_rng(self.size)
        length = {"none": 0, "block": self.size, "axis": self.shape[self.axis]}[self.signs]
        signs = rng.choice(np.int8([-1, 1]), length) if length else None
        options = {"axis": self.axis, "signs": signs, "inverse": self.inverse}
        if not self.matrices:
            return fp4kit.hadamard, values(self.shape, self.dtype), (self.size,), options
        matrices = orthogonal(rng, self.matrices, self.size)
        return (
            fp4kit.rotate,
            values(self.shape, self.dtype),
            (matrices[0] if self.matrices == 1 else matrices,),
            options,
        )


def orthogonal(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Return `count` random orthogonal matrices, rounded to float32: (count, size, size)."""
    return np.linalg.qr(rng.standard_normal((count, size, size)))[0].astype(np.float32)


def values(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random values of many magnitudes. One element in 150 is infinite, NaN, -0, subnormal or very large."""
    rng = np.random.default_rng(len(shape) + sum(shape))
    with np.errstate(all="ignore"):
        x = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 8, shape))).astype(dtype)
        chosen = rng.random(shape) < 1 / 150
        x[chosen] = rng.choice(np.array(SPECIALS).astype(dtype), np.count_nonzero(chosen))
    return x


def calls() -> Iterator[RotationCall]:
    """Yield calls to hadamard and rotate that together take every path of an engine."""
    shapes = (((35, 1024), 1), ((1024, 19), 0), ((2, 512, 16), 1), ((512,), 0), ((0, 512), 1), ((512, 1, 3), -3))
    for (shape, axis), size, dtype in product(shapes, SIZES, FLOATS):
        for signs, inverse in (("none", False), ("block", False), ("axis", True)):
            yield RotationCall(shape, axis, dtype, size, signs, inverse)
    for (rows, columns), n, dtype in product(((19, 2), (1, 40), (33, 1)), (1, 3, 16, 22, 96), FLOATS):
        for count, signs, inverse in ((1, "none", False), (3, "axis", True), (3, "block", False)):
            yield RotationCall((rows, 3 * n, columns), 1, dtype, n, signs, inverse, count)
