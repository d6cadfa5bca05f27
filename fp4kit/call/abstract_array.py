"""Define arrays without values: the shape and dtype that a compiler (torch.compile, jax.jit) knows while it traces.

When a call is parsed with an AbstractArray in place of an array, everything except values is checked. So errors appear
while the compiler traces, not when the compiled program runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any


@dataclass(frozen=True)
class AbstractArray:
    """An array without values: only its shape and dtype are known. Calls can be checked with it in place of an array.

    Each length is an int, or a compiler's symbol that supports the arithmetic of ints.
    """

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        return prod(self.shape)

    def reshape(self, *shape: Any) -> AbstractArray:
        """Return a new AbstractArray with the given shape."""
        return replace(self, shape=shape[0] if isinstance(shape[0], tuple) else shape)

    def repeat(self, count: Any, axis: int) -> AbstractArray:
        """Return an AbstractArray whose length along an axis is multiplied by count, as np.repeat does."""
        return replace(self, shape=(*self.shape[:axis], self.shape[axis] * count, *self.shape[axis + 1 :]))

    def transpose(self, order: Any) -> AbstractArray:
        """Return an AbstractArray with its axes in the given order. np.moveaxis calls this method."""
        return replace(self, shape=tuple(self.shape[axis] for axis in order))
