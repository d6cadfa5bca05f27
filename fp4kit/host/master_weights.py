"""Run the stages of cast_master_weights on NumPy arrays. training/master_weights.py describes the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.call.shards import Partition, amax_shape
from fp4kit.layouts import padded_shape, swizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference import partial
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import spread_rows
from fp4kit.reference.quantize import tensor_amax
from fp4kit.reference.tensor_rules import tensor_scale
from fp4kit.types import ScaleLayout

# The type of a function run(operation, ...): it returns the result from the first host engine that supports it.
Run = Callable[..., Any]


class HostStages:
    """The buffers of a MasterWeightsPlan in host memory, with one method per stage of cast_master_weights.

    Args:
        values: this process's shard of each matrix, 1-d.
        shapes: the rows and columns (M, K) of each whole matrix.
        r: the recipe.
        partition: where the shards of all processes begin and end.
        rank: the number of this process.
        columnwise: True to also make columnwise copies.
        layout: the layout of the block scales.
        run: the function by which operations run on the first host engine that supports them.

    Attributes:
        bits: the bit patterns of float32 amaxes: first the tensor amaxes, then the block amaxes. The processes reduce
            this array by maximum between the stages amax and scales.
        message: the bytes of codes that this process sends to the others.
        gathered: the messages of all processes, one after the other.
        counts: the length of each process's message, in bytes.
        quantized: the rowwise result of each matrix.
        columnwise: the columnwise copy of each matrix; empty if none is wanted.
    """

    def __init__(
        self,
        values: Sequence[np.ndarray],
        shapes: Sequence[tuple[int, int]],
        r: Recipe,
        partition: Partition,
        rank: int,
        columnwise: bool,
        layout: ScaleLayout,
        run: Run,
    ) -> None:
        self._run, self._layout = run, layout
        self._values, self._shapes, self._recipe, self._partition, self._rank = list(values), shapes, r, partition, rank
        blocks = [amax_shape(shape, r) for shape in shapes]
        ends = np.cumsum([len(shapes), *(rows * columns for rows, columns in blocks)])
        self.bits = np.zeros(int(ends[-1]), np.uint32)
        amaxes = np.split(self.bits.view(np.float32), ends)[1:-1]
        self._amaxes = [amax.reshape(shape) for amax, shape in zip(amaxes, blocks, strict=True)]
        self._tensor_amaxes = self.bits[: len(shapes)].view(np.float32)
        self._unit = r.element.packing.codes  # elements per byte; messages are cut at whole bytes
        lengths = partition.pieces(self._unit)
        self.counts = lengths.sum(axis=1).tolist()
        self.message = np.zeros(self.counts[rank], np.uint8)
        self.gathered = np.zeros(sum(self.counts), np.uint8)
        self.quantized = [self._allocate(*item) for item in zip(shapes, values, strict=True)]
        self.columnwise = [self._transposed(q) for q in self.quantized] if columnwise else []

    def _allocate(self, shape: tuple[int, int], values: np.ndarray) -> Quantized:
        """Return a Quantized with zeroed arrays for a matrix of the given shape."""
        r = self._recipe
        packed = np.zeros(packed_shape(shape, r), np.uint8)
        scales = np.zeros(padded_shape(scale_shape(shape, r), self._layout), np.uint8)
        scale, amax = (
            (None, None) if r.tensor_scaling == "none" else (np.zeros((), np.float32), np.zeros((), np.float32))
        )
        return Quantized(packed, scales, scale, amax, shape, values.dtype, -1, r, self._layout)

    def device(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing. In DeviceStages, this method makes the buffers' GPU current."""
        return nullcontext()

    def replace(self, values: Sequence[np.ndarray]) -> None:
        """Use the arrays `values` as shards from now on, without a check."""
        self._values = list(values)

    def _shards(self) -> list[tuple[int, np.ndarray, tuple[int, int], int]]:
        """Return one tuple per matrix: (its index, this process's shard, its shape (M, K), where the shard starts)."""
        starts = self._partition.starts[self._rank].tolist()
        return list(zip(range(len(starts)), self._values, self._shapes, starts, strict=True))

    @ieee("cast_master_weights")
    def amax(self) -> None:
        """Write the amaxes of this process's shards into `bits`."""
        for t, values, shape, start in self._shards():
            self._amaxes[t][...] = partial.partial_amax(values, shape, start, self._recipe)
            if self._recipe.tensor_scaling == "tensor":
                self._tensor_amaxes[t] = tensor_amax(values[None], self._recipe)

    @ieee("cast_master_weights")
    def scales(self) -> None:
        """Compute tensor scales and block scales from the reduced `bits`, and store them in `quantized`."""
        for t, (amax, q) in enumerate(zip(self._amaxes, self.quantized, strict=True)):
            if np.isnan(amax).any() or np.isnan(self._tensor_amaxes[t]):
                raise ValueError(
                    f"cast_master_weights: matrix {t} has NaN, for which {q.recipe.id} has no scale; needs values "
                    "without NaN"
                )
            tensor = tensor_scale(self._tensor_amaxes[t], q.recipe, q.dtype)
            with np.errstate(all="ignore"):
                codes = BLOCK_RULES[q.recipe.block_rule or ""].code(amax, tensor, q.recipe, q.dtype)
            q.block_scale[...] = swizzle_scales(spread_rows(codes, q.recipe, q.shape[0]), self._layout)
            if q.tensor_scale is not None:
                q.tensor_scale[...], q.tensor_amax[...] = tensor.decode, self._tensor_amaxes[t]

    @ieee("cast_master_weights")
    def cast(self) -> None:
        """Write the codes of this process's shards into `quantized`, and copy their bytes into `message`."""
        tensor_amaxes = None if self._recipe.tensor_scaling == "none" else self._tensor_amaxes
        message_offset = 0
        for t, values, shape, start in self._shards():
            packed, amax = self.quantized[t].packed, None if tensor_amaxes is None else tensor_amaxes[t]
            partial.partial_cast(values, packed, self._amaxes[t], shape, start, self._recipe, amax)
            first, last = start // self._unit, -(-(start + len(values)) // self._unit)
            self.message[message_offset : message_offset + last - first] = packed.reshape(-1)[first:last]
            message_offset += last - first

    def transpose(self) -> None:
        """Update `columnwise`, the columnwise copies of all matrices, from `quantized`. If it is empty, do nothing."""
        for q, copy in zip(self.quantized, self.columnwise, strict=True):
            moved = self._transposed(q)
            copy.packed[...], copy.block_scale[...] = moved.packed, moved.block_scale

    def _transposed(self, q: Quantized) -> Quantized:
        """Return a columnwise copy of q, one of the matrices in `quantized`: its transposed codes and block scales."""
        codes, scales = self._run("transpose", q.packed, q.block_scale, q)
        return replace(q, packed=codes, block_scale=scales, axis=0)

    def place(self) -> None:
        """Copy the codes of the other processes from `gathered` into `quantized`."""
        offsets = self._partition.offsets(self._unit)
        for rank, (starts, ends) in enumerate(zip(*self._partition, strict=True)):
            if rank == self._rank:
                continue
            for t, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                begin = sum(self.counts[:rank]) + int(offsets[rank, t])
                flat, piece = self.quantized[t].packed.reshape(-1), self.gathered[begin:]
                place_codes(flat, piece, start, end, self._unit)


def place_codes(flat: np.ndarray, piece: np.ndarray, start: int, end: int, unit: int) -> None:
    """Copy codes [start, end) of a flattened matrix into `flat`, the packed bytes of the whole matrix."""
    if start == end:
        return
    first, last = start // unit, -(-end // unit)
    mask = np.full(last - first, 0xFF, np.uint8)
    if start % unit:
        mask[0] &= 0xF0
    if end % unit:
        mask[-1] &= 0x0F
    edges = {0, last - first - 1}
    flat[first + 1 : last - 1] = piece[1 : last - first - 1]
    for i in edges:
        flat[first + i] = flat[first + i] & ~mask[i] | piece[i] & mask[i]
