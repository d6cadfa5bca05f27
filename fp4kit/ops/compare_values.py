"""Compare two arrays of values in parts, so that arrays of any size need only a few MiB of temporary memory.

Each part is a box: a rectangular region of an array, given as a tuple of slices, one per axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from fp4kit.formats import bit_patterns

BOX_ELEMENTS = 1 << 16  # temporaries of a box, up to 50 bytes per element, stay in the second-level cache
Box = tuple[slice, ...]
First = tuple[tuple[int, ...], float, float]  # index and both values


def boxes(shape: Sequence[int], multiples: Sequence[int] | None = None) -> Iterator[Box]:
    """Yield boxes (tuples of slices) of at most BOX_ELEMENTS (2^16) elements that together cover an array."""
    smallest = [1] * len(shape) if multiples is None else multiples
    steps = list(smallest)
    for axis in reversed(range(len(shape))):
        others = prod(steps) // steps[axis]
        length = max(BOX_ELEMENTS // others // smallest[axis], 1) * smallest[axis]
        steps[axis] = min(length, -(-shape[axis] // smallest[axis]) * smallest[axis]) or 1
    starts = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(at, min(at + step, n)) for at, step, n in zip(corner, steps, shape, strict=True))


@dataclass
class Energy:
    """A sum of squares of an array, collected box by box, from which the SQNR of a comparison is computed.

    The sum of a box is stored as a pair (p, e), which means p * 4^e, so that squares of large and small float64 numbers
    neither overflow nor underflow.
    """

    parts: list[tuple[float, int]] = field(default_factory=list)

    def add(self, x: np.ndarray, scaled: bool) -> None:
        """Append the sum of the squares of x, a float64 array that holds the values of one box."""
        top = float(np.max(np.abs(x))) if scaled else 0.0
        exponent = int(np.frexp(top)[1]) if np.isfinite(top) else 0
        if exponent:
            x = np.ldexp(x, -exponent)
        self.parts.append((float(np.sum(x * x)), exponent))

    def total(self) -> tuple[np.float64, int]:
        """Return the sum over all boxes as a pair (p, e), which means p * 4^e."""
        top = max((e for p, e in self.parts if p), default=0)
        return np.sum([np.ldexp(p, 2 * (e - top)) for p, e in self.parts]), top


@dataclass
class Differences:
    """The differences between two arrays of values, collected box by box.

    Attributes:
        scaled: True if the values are float64, so that squares may overflow or underflow.
        differing: the number of values whose bits differ. Any two NaNs are equal.
        max_ulp: largest distance, in steps between neighboring floats. Pairs with a NaN are left out.
        max_error: largest |x - y|; NaN if a difference is NaN.
        first: the tuple (index, x, y) for the first value that differs, in row-major order; None if no value differs.
        signal: the sum of x^2, as an Energy, over the boxes passed to add_errors. `add` passes only boxes in which a
            value differs.
        noise: the sum of (x - y)^2, as an Energy, over the same boxes.
    """

    scaled: bool
    differing: int = 0
    max_ulp: int = 0
    max_error: float = 0.0
    first: First | None = None
    signal: Energy = field(default_factory=Energy)
    noise: Energy = field(default_factory=Energy)

    def add(self, x: np.ndarray, y: np.ndarray, box: Box) -> bool:
        """Compare x and y, the values of two arrays within a box, and add the differences found to this object."""
        differ = bit_patterns(x) != bit_patterns(y)
        if differ.any():
            differ &= ~(np.isnan(x) & np.isnan(y))
        count = int(np.count_nonzero(differ))
        if count:
            self.differing += count
            self._add_differing(x, y, differ, box)
            self.add_errors(x, y)
        return count > 0

    def add_errors(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add the sum of x^2 to `signal` and that of (x - y)^2 to `noise`, and update `max_error`."""
        # x and y are the values of two arrays within a box, which must not be empty.
        wide = x.astype(np.float64, copy=False)
        self.signal.add(wide, self.scaled)
        error = np.abs(wide - y)
        self.noise.add(error, self.scaled)
        self.max_error = float(np.maximum(self.max_error, np.max(error)))

    def _add_differing(self, x: np.ndarray, y: np.ndarray, differ: np.ndarray, box: Box) -> None:
        """Update `first` and `max_ulp` from x and y, the values of the two arrays within a box."""
        at = np.unravel_index(int(np.argmax(differ)), x.shape)
        place = tuple(int(i) + part.start for i, part in zip(at, box, strict=True))
        if self.first is None or place < self.first[0]:
            self.first = place, float(x[at]), float(y[at])
        nan = np.isnan(x) | np.isnan(y)
        if nan.any():
            x, y = x[~nan], y[~nan]
        self.max_ulp = max(self.max_ulp, int(distance(x, y).max(initial=0)))

    @property
    def sqnr(self) -> float:
        """The signal-to-noise ratio in dB: 10 log10(sum x^2 / sum (x - y)^2)."""
        (p, e), (q, f) = self.signal.total(), self.noise.total()
        return float(10 * np.log10(p / q) + 20 * np.log10(2.0) * (e - f))


def ordered(x: np.ndarray) -> np.ndarray:
    """Map floats to signed integers in the order of their values, so that neighboring floats differ by 1."""
    # The integers are as wide as the floats. -0 comes just below +0. x must not hold NaN.
    bits = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    width = 8 * x.dtype.itemsize
    return bits ^ (bits >> width - 1 & 2 ** (width - 1) - 1)  # reverse the order of negative numbers; keep the sign


def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return, per element, the number of steps between neighboring floats from x to y: 0 only if the bits are equal."""
    a, b = ordered(x), ordered(y)
    return bit_patterns(np.maximum(a, b)) - bit_patterns(np.minimum(a, b))


BoxReader = Callable[[Box], Any]  # a function that returns the values of an array within a box


def compare_values(
    read_x: BoxReader, read_y: BoxReader, shape: Sequence[int], multiples: Sequence[int], dtype: Any
) -> Differences:
    """Compare two arrays box by box, and return their Differences."""
    differences, equal_boxes = Differences(np.dtype(dtype) == np.float64), []
    with np.errstate(all="ignore"):
        for box in boxes(shape, multiples):
            x, y = (np.asarray(read(box), dtype, order="C") for read in (read_x, read_y))
            if not differences.add(x, y, box):
                equal_boxes.append(box)
        for box in equal_boxes if differences.differing else ():
            x = np.asarray(read_x(box), dtype, order="C")
            differences.add_errors(x, x)
    return differences
