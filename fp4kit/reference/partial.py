"""Compute block amaxes and codes of a shard, which is a range of elements of a flattened matrix.

A trainer shards its float32 weights over processes, so each process holds only the elements of its shard. A shard may
start and end inside a row, a block or a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp4kit.layouts import write_codes
from fp4kit.recipes import Recipe
from fp4kit.reference.blocks import TILE_ELEMENTS, block_amax
from fp4kit.reference.quantize import quantize_tile
from fp4kit.reference.tensor_rules import tensor_scale


class Segment(NamedTuple):
    """A part of a shard that forms a rectangle in the matrix.

    rows, columns: the rectangle, as slices of the matrix.
    elements: the slice of the shard that holds its elements, row by row.
    """

    rows: slice
    columns: slice
    elements: slice


def segments(start: int, length: int, K: int) -> Iterator[Segment]:
    """Yield segments that cover elements [start, start + length) of a flattened matrix with K columns.

    The first segment is part of a row, then come whole rows, then part of a row. Each of the three may be missing. A
    segment of whole rows has at most TILE_ELEMENTS elements, or one row if that is longer; more rows give several
    segments. A length of 0 gives no segment.
    """
    position = 0
    while position < length:
        row, column = divmod(start + position, K)
        remaining = length - position
        full_rows = max(min(remaining // K, TILE_ELEMENTS // K), 1) if column == 0 and remaining >= K else 0
        length_taken = full_rows * K if full_rows else min(K - column, remaining)
        columns = slice(0, K) if full_rows else slice(column, column + length_taken)
        yield Segment(slice(row, row + max(full_rows, 1)), columns, slice(position, position + length_taken))
        position += length_taken


def _padded(shard: np.ndarray, segment: Segment, size: int) -> tuple[np.ndarray, int]:
    """Return a segment of the shard as float32 (rows, columns of whole blocks), and the column of its first block."""
    rows, columns, elements = segment
    first = columns.start // size
    padded = np.zeros((rows.stop - rows.start, (-(-columns.stop // size) - first) * size), np.float32)
    offset = columns.start - first * size
    values = shard[elements].reshape(len(padded), -1)
    padded[:, offset : offset + values.shape[1]] = values
    return padded, first


@np.errstate(all="ignore")
def partial_amax(shard: np.ndarray, shape: tuple[int, int], start: int, recipe: Recipe) -> np.ndarray:
    """Return the amax of each block over the elements of the shard: float32 (ceil(M / block rows), K / block).

    The maximum over all shards is the amax of the whole block. Blocks without an element in the shard get 0. If the
    recipe has no blocks, each element is a block. recipe.amax_nan decides how NaN elements count.

    Args:
        shard: the elements, 1-d.
        shape: the (M, K) of the matrix.
        start: the index of the shard's first element in the flattened matrix.
    """
    height, width = recipe.block or (1, 1)
    M, K = shape
    out = np.zeros((-(-M // height), K // width), np.float32)
    row_recipe = replace(recipe, block=(1, width))
    for segment in segments(start, len(shard), K):
        padded, first = _padded(shard, segment, width)
        amax = block_amax(padded, row_recipe)
        tile_rows = np.arange(segment.rows.start, segment.rows.stop) // height
        starts = np.flatnonzero(np.diff(tile_rows, prepend=-1))
        target = out[tile_rows[0] : tile_rows[-1] + 1, first : first + amax.shape[1]]
        if height == 1:  # then a segment holds all elements of the shard in its blocks
            target[...] = amax
            continue
        combine = np.maximum if recipe.amax_nan == "propagate" else np.fmax
        combine(target, combine.reduceat(amax, starts, axis=0), out=target)
    return out


@np.errstate(all="ignore")
def partial_cast(
    shard: np.ndarray,
    out: np.ndarray,
    amax: np.ndarray,
    shape: tuple[int, int],
    start: int,
    recipe: Recipe,
    tensor_amax: np.ndarray | None,
) -> None:
    """Write the codes of the shard's elements into the packed codes `out` of the whole matrix. Keep all other codes.

    Args:
        shard: the elements, 1-d.
        out: the packed codes of the whole matrix: (M, K / 2), or (M, K) for elements with one byte per code.
        amax: the amaxes of whole blocks, combined from all shards, in the shape that partial_amax returns.
        shape: the (M, K) of the matrix.
        start: the index of the shard's first element in the flattened matrix.
        recipe: the recipe.
        tensor_amax: the amax of the whole matrix; None if the recipe has no tensor scale.
    """
    height, width = recipe.block or (1, 1)
    tensor = tensor_scale(tensor_amax, recipe, shard.dtype).columns(recipe)
    row_recipe = replace(recipe, block=(1, width))
    for segment in segments(start, len(shard), shape[1]):
        padded, first = _padded(shard, segment, width)
        rows = np.arange(segment.rows.start, segment.rows.stop) // height
        blocks = amax[rows, first : first + padded.shape[1] // width]
        codes, _ = quantize_tile(padded, row_recipe, tensor, shard.dtype, blocks, None)
        offset = segment.columns.start - first * width
        owned = codes[:, offset : offset + segment.columns.stop - segment.columns.start]
        write_codes(out, owned, segment.rows, segment.columns.start, recipe.element.packing)
