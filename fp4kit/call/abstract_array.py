"""Arrays without values: what a compiler knows of an array while it traces, so that calls are checked before they run.

The parse of a call takes an Outline in place of an array, and then checks everything but values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any


@dataclass(frozen=True)
class Outline:
    """Shape and dtype of an array. Lengths are ints, or symbols of a tracer that compute as ints do."""

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        return prod(self.shape)

    def reshape(self, *shape: Any) -> Outline:
        """The outline of as many elements in another shape."""
        return replace(self, shape=shape[0] if isinstance(shape[0], tuple) else shape)

    def repeat(self, count: Any, axis: int) -> Outline:
        """The outline of every entry along an axis so many times."""
        return replace(self, shape=(*self.shape[:axis], self.shape[axis] * count, *self.shape[axis + 1 :]))

    def transpose(self, order: Any) -> Outline:
        """The outline with its axes in another order, which is all that np.moveaxis needs."""
        return replace(self, shape=tuple(self.shape[axis] for axis in order))
