"""Quantized: codes, scales and what is needed to read them. Validates once, holds no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fp4kit.layouts import check_layout, padded_shape
from fp4kit.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: value = decode(code) * block_scale * tensor_scale, in the order that recipe.decode_rule states.

    With x' = x with the quantized axis moved last, of shape (..., K):
    packed: uint8 (..., K/2), element 2j in the low nibble; (..., K) for elements of more than 4 bits, one code a byte.
    block_scale: uint8 bit patterns (..., K/block), once per row also for 16x16 blocks; padded and permuted by scale_layout; None
        where the recipe has only float32 scales.
    tensor_scale: float32, multiplies on decode: () for the tensor, (E,) per expert, x'.shape[:-1] per row, (..., K/block) per
        block; None for recipes without one.
    tensor_amax: float32, same shape: the amax that tensor_scale was made from.
    shape, dtype: of x. axis: the axis of x along which blocks run, as a non-negative number. recipe, scale_layout.
    """

    packed: Any
    block_scale: Any
    tensor_scale: Any
    tensor_amax: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int
    recipe: Recipe
    scale_layout: str = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not -len(self.shape) <= self.axis < len(self.shape):
            raise ValueError(
                f"Quantized: axis {self.axis} of a {len(self.shape)}-d array; needs {-len(self.shape)} to {len(self.shape) - 1}"
            )
        object.__setattr__(self, "axis", self.axis % len(self.shape))
        check_layout(self.scale_layout)
        length, multiple = self.shape[self.axis], self.recipe.length_multiple
        if length % multiple:
            raise ValueError(f"Quantized: axis {self.axis} has length {length}; {self.recipe.id} needs a multiple of {multiple}")
        self._check("packed", self.packed, packed_shape(self.moved_shape, self.recipe))
        if self.recipe.scale is not None:
            self._check("block_scale", self.block_scale, padded_shape(self.scale_shape, self.scale_layout))

    def _check(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        if array is None or array.dtype != np.uint8 or tuple(array.shape) != tuple(shape):
            got = "None" if array is None else f"{array.dtype} {tuple(array.shape)}"
            raise ValueError(f"Quantized: {name} is {got}; {self.recipe.id} of {self.shape} needs uint8 {tuple(shape)}")

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """Shape of x with the quantized axis last."""
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.shape[self.axis])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the block scales in linear layout."""
        return scale_shape(self.moved_shape, self.recipe)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.packed, self.block_scale, self.tensor_scale)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(prod(self.shape), 1)
        return (
            f"Quantized({self.recipe.id}, shape={self.shape}, dtype={self.dtype}, axis={self.axis}, "
            f"scale_layout={self.scale_layout!r}, {bits:.3g} bits a value)"
        )


def packed_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Shape of the packed codes of an array whose quantized axis is last."""
    *lead, K = moved_shape
    return (*lead, K // 2 if recipe.is_packed else K)


def scale_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Shape of the linear block scales of an array whose quantized axis is last."""
    *lead, K = moved_shape
    return (*lead, K // recipe.block_size)
