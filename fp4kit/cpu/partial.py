"""Compute partial_amax and partial_cast by the compiled library, on the shard of a matrix that one process holds.
The library computes the part of the shard that consists of whole rows of blocks. The specification computes the
elements of the shard before and after this part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.cpu import encode
from fp4kit.recipes import Recipe
from fp4kit.reference import quantize as specification
from fp4kit.reference.quantize import EncodeOptions


class _Cut(NamedTuple):
    """The part of a shard that consists of whole rows of blocks.

    It holds the shard's elements [first, last), which are the rows [row, row + rows) of the matrix. If there is no such
    part, rows and row are 0, and first and last are the length of the shard.
    """

    first: int
    last: int
    row: int
    rows: int


def _cut(length: int, start: int, shape: tuple[int, int], height: int) -> _Cut:
    """Return the _Cut of a shard of `length` elements that begins at element `start` of a matrix (M, K) = shape."""
    M, K = shape
    if not length:
        return _Cut(0, 0, 0, 0)
    row = -(-start // (K * height)) * height
    end = (start + length) // K
    end = end if end == M else end // height * height
    if end <= row:  # no whole row of blocks
        return _Cut(length, length, 0, 0)
    return _Cut(row * K - start, end * K - start, row, end - row)


def partial_amax(shard: np.ndarray, shape: tuple[int, int], start: int, r: Recipe) -> np.ndarray:
    """Return the amax of every block of a matrix, counting only the elements of one shard."""
    cut = _cut(len(shard), start, shape, r.block_rows)
    out = specification.partial_amax(shard[: cut.first], shape, start, r)
    if cut.rows:
        rows = slice(cut.row // r.block_rows, -(-(cut.row + cut.rows) // r.block_rows))
        out[rows] = encode.block_amax(shard[cut.first : cut.last].reshape(cut.rows, shape[1]), r)
    if cut.last < len(shard):
        tail = specification.partial_amax(shard[cut.last :], shape, start + cut.last, r)
        first = (start + cut.last) // shape[1] // r.block_rows
        out[first:] = tail[first:]
    return out


def partial_cast(
    shard: np.ndarray,
    out: np.ndarray,
    amax: np.ndarray,
    shape: tuple[int, int],
    start: int,
    recipe: Recipe,
    tensor_amax: np.ndarray | None,
) -> None:
    """Write the codes of a shard's elements into out, the packed codes of a matrix, and change no other code of out."""
    cut = _cut(len(shard), start, shape, recipe.block_rows)
    if out.strides[1] != 1:  # the library writes rows of contiguous bytes only
        cut = _Cut(len(shard), len(shard), 0, 0)
    specification.partial_cast(shard[: cut.first], out, amax, shape, start, recipe, tensor_amax)
    if cut.rows:
        x = shard[cut.first : cut.last].reshape(cut.rows, shape[1])
        blocks = amax[cut.row // recipe.block_rows : -(-(cut.row + cut.rows) // recipe.block_rows)]
        encode.quantize_matrix(x, recipe, tensor_amax, out[cut.row : cut.row + cut.rows], None, EncodeOptions(blocks))
    if cut.last < len(shard):
        specification.partial_cast(shard[cut.last :], out, amax, shape, start + cut.last, recipe, tensor_amax)
