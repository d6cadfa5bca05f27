"""Divide matrices into tiles of whole blocks, compute block amaxes, and repeat block values for each row.

A tile is a rectangle of whole blocks, small enough that the temporary arrays of a computation fit in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.recipes import Recipe

TILE_ELEMENTS = 1 << 15  # few enough that the temporary arrays fit in the cache and take only a few MiB


def tiles(shape: tuple[int, int], block: tuple[int, int] | None) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns), pairs of slices that divide a matrix into tiles of at most about 2^15 elements.

    Tiles begin at multiples of the block, and end at multiples of the block or at the edge of the matrix. They come row
    by row, from left to right. An empty matrix gives none. If one block has more than 2^15 elements, tiles have more.

    shape: the shape of the matrix.
    block: (rows, columns) of a block, or None if there are no blocks.
    """
    M, K = shape
    block_rows, block_columns = block or (1, 1)
    columns = max(min(K, TILE_ELEMENTS // block_rows) // block_columns, 1) * block_columns
    columns = K if columns + block_columns > K else columns
    rows = max(TILE_ELEMENTS // max(columns, 1) // block_rows, 1) * block_rows
    for row in range(0, M, rows):
        for column in range(0, K, max(columns, 1)):
            yield slice(row, min(row + rows, M)), slice(column, min(column + columns, K))


def reduce_amax(a: np.ndarray, recipe: Recipe, axis: int | tuple[int, ...] | None = -1) -> np.ndarray:
    """Return the maximum of float32 a >= 0 along axis: float32, without the reduced axes.

    An axis without elements gives 0.

    axis: one axis, a tuple of axes, or None. None reduces all axes, so the result has the shape ().

    The field recipe.amax_nan decides how NaN elements count:

    - "propagate": a NaN gives NaN.
    - "ignore": NaN elements are left out. If all elements are NaN, the result is 0.
    - "lanes": as "ignore", with one exception. If axis is -1 and all elements at odd indices are NaN, the result is
      NaN.
    """
    if recipe.amax_nan == "propagate":
        return np.max(a, axis=axis, initial=np.float32(0))
    nan = np.isnan(a)
    if not nan.any():
        return np.max(a, axis=axis, initial=np.float32(0))
    counted = np.where(nan, np.float32(0), a)
    if recipe.amax_nan != "lanes" or axis != -1:
        return np.max(counted, axis=axis, initial=np.float32(0))
    lanes = [np.where(nan[..., i::2].all(axis=-1), np.float32(np.nan), counted[..., i::2].max(axis=-1)) for i in (0, 1)]
    return np.where(lanes[0] > lanes[1], lanes[0], lanes[1])


def block_amax(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the amax of each block of float32 x (m, k), in the shape (ceil(m / block rows), k / block columns).

    If m is not a multiple of the block rows, the lowest blocks have fewer rows. If the recipe has no blocks, each row
    is a block. recipe.amax_nan decides how NaN elements count (see reduce_amax).
    """
    rows, columns = recipe.block or (1, x.shape[1])
    m, k = x.shape
    amax = reduce_amax(np.abs(x).reshape(m, k // columns, columns), recipe)
    if rows == 1:
        return amax
    padded = np.zeros((-(-m // rows) * rows, amax.shape[1]), np.float32)
    padded[:m] = amax
    return reduce_amax(padded.reshape(-1, rows, amax.shape[1]), recipe, axis=1)


def spread_rows(a: np.ndarray, recipe: Recipe, m: int) -> np.ndarray:
    """Return per-block values repeated for each row of elements: (m, blocks) from (ceil(m / block rows), blocks).

    Scales of blocks that span several rows are stored once per row of elements, so quantization computes them per block
    and then repeats them. If blocks have one row, `a` itself is returned.
    """
    rows = recipe.block_rows
    return a if rows == 1 else np.repeat(a, rows, axis=0)[:m]
