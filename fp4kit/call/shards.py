"""Check calls that quantize a shard of a matrix, and describe which elements each process owns.

A shard is a contiguous range of elements of the flattened matrix. It may begin and end inside a row or a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_index, as_shape
from fp4kit.call.checks import check_float, check_has_codes, check_length
from fp4kit.formats import PairedMicroexponents
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import has_tall_scales


def check_castable(op: str, r: Recipe) -> None:
    """Raise ValueError if a recipe cannot quantize a shard by itself."""
    if isinstance(r.element, PairedMicroexponents):
        raise ValueError(f"{op}: pairs of {r.element} elements share a bit; use quantize on the whole matrix")
    if r.four_over_six or r.search:
        raise ValueError(f"{op}: {r.id} chooses scales from whole blocks; use quantize on the whole matrix")


def check_shard(op: str, shard: Any, shape: Any, start: Any, r: Recipe) -> tuple[int, int]:
    """Return the shape (M, K) of a shard's matrix as two ints."""
    check_float(op, shard, "shard")
    check_has_codes(op, r)
    if shard.ndim != 1:
        raise ValueError(
            f"{op}: shard is {shard.ndim}-d; needs the 1-d slice of the flattened matrix; use shard.reshape(-1)"
        )
    shape = as_shape(op, shape)
    if len(shape) != 2:
        raise ValueError(f"{op}: shape is {shape}; needs (M, K) of the whole matrix")
    if r.block is None or r.tensor_scaling not in ("none", "tensor"):
        raise ValueError(
            f"{op}: {r.id} has no blocks, or more than one tensor scale; needs blocks and at most one tensor scale, as"
            " nvfp4-te-2d has"
        )
    M, K = shape
    check_length(op, 1, K, r)
    start = as_index(op, "start", start)
    if start < 0 or start + len(shard) > M * K:
        raise ValueError(
            f"{op}: shard is elements [{start}, {start + len(shard)}) of a matrix of {M * K}; needs a slice inside it"
        )
    return M, K


def amax_shape(shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """Return the shape of the block amaxes of a matrix (M, K): (ceil(M / block rows), K / block columns)."""
    return -(-shape[0] // r.block_rows), shape[1] // r.block_size


def square_block(op: str, r: Recipe, length: int) -> int:
    """Return the side length of a recipe's square blocks, such as 16 for blocks of 16x16."""
    rows, size = r.block or (1, 1)
    if has_tall_scales(r):
        raise ValueError(f"{op}: {r.id} has float32 scales; needs block scales of one byte, such as nvfp4-te-2d's")
    if rows != size or size == 1:
        raise ValueError(f"{op}: {r.id} has {rows}x{size} blocks; needs square blocks, such as nvfp4-te-2d's 16x16")
    if length % size:
        raise ValueError(f"{op}: the other axis has length {length}; needs a multiple of {size}")
    return size


class Partition(NamedTuple):
    """The first and last elements of the shards of all processes. Each process owns one shard of each matrix.

    A shard is a range of elements of a flattened matrix, and may be empty.

    Attributes:
        starts, ends: int64 (processes, matrices), the index of the first element of each shard in its flattened
            matrix, and the index after its last element.
    """

    starts: np.ndarray
    ends: np.ndarray

    def pieces(self, unit: int) -> np.ndarray:
        """Return how many units of ``unit`` elements each shard touches: int64 (processes, matrices)."""
        return -(-self.ends // unit) - self.starts // unit

    def offsets(self, unit: int) -> np.ndarray:
        """Return how many units of ``unit`` elements precede each shard in the memory of its process."""
        lengths = self.pieces(unit)
        return np.cumsum(lengths, axis=1) - lengths
