"""View an array of any number of dimensions as a stack of matrices, and select the tensor amax of each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp4kit.recipes import Recipe


def stack(a: np.ndarray, recipe: Recipe, per_matrix: bool = False) -> Any:
    """Return a view of an array (..., M, K) as a sequence of matrices, for functions that handle one matrix at a time.

    An array of one dimension counts as a single row. Usually, all rows are joined into a single matrix, which saves
    calls. In three cases, there is one matrix per leading index instead:

    - blocks span several rows
    - joining would need a copy, because `a` is not contiguous
    - per_matrix is True

    The result has a length, a shape (B, M, K) and indices, and can be iterated. It is an array, or a _StackView for an
    array of more than three dimensions that is not joined.
    """
    if a.ndim == 1:
        return a[None, None]
    tall = recipe.block_rows > 1
    if a.ndim == 2 or (a.flags.c_contiguous and not tall and not per_matrix):
        return a.reshape(1, -1, a.shape[-1])
    if a.ndim == 3:
        return a
    return _StackView(a)


def is_per_expert(amax: Any, recipe: Recipe) -> bool:
    """Return whether a tensor_amax, or tensor_scale, has one entry per expert: shape (E,).

    amax must have its canonical shape (see call/inputs.py). None gives False.
    """
    return amax is not None and amax.ndim > 0 and recipe.tensor_scaling == "tensor"


def part_for_matrix(amax: Any, recipe: Recipe, i: int, shape: tuple[int, int]) -> Any:
    """Return the part of a tensor_amax, or tensor_scale, for matrix i in a stack; None if `amax` is None.

    The result has one of these shapes: () for the whole tensor, (1,) for the matrix's expert, (rows, 1) for one entry
    per row, (rows, blocks) for one entry per block.

    amax: the tensor_amax in its canonical shape: (), (E,) for E experts, or one entry per row or per block.
    shape: (number of matrices, rows per matrix). The matrices of one expert are adjacent.
    """
    if amax is None or amax.ndim == 0:
        return amax
    if is_per_expert(amax, recipe):
        expert = i * amax.shape[0] // shape[0]
        return amax[expert : expert + 1]
    return amax.reshape(*shape, -1)[i]


class _StackView:
    """Give access to the matrices of an array of more than three dimensions, as if it were an array (B, M, K).

    `stack` uses it for arrays that are not contiguous, because reshape would copy them.
    """

    def __init__(self, a: np.ndarray) -> None:
        self._array = a
        self._lead = a.shape[:-2]
        self.shape = (int(np.prod(self._lead)), *a.shape[-2:])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> np.ndarray:
        return self._array[np.unravel_index(i, self._lead)]
