"""Hold prepared work in host memory: grouped operations, and the stages of cast_master_weights.

cuda/engine has classes with the same methods for arrays on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.call.inputs import reshape_clip_amax
from fp4kit.call.parse import Call, Partition, amax_shape, check_codes, each, with_amaxes
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.layouts import padded_shape, swizzle_scales
from fp4kit.quantized.container import Quantized, packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import spread_rows
from fp4kit.reference.quantize import partial_amax, partial_cast, tensor_amax
from fp4kit.reference.tensor_rules import tensor_scale
from fp4kit.types import ScaleLayout

# run(op, operation, on_device, *arguments) of ops/engines.py
Run = Callable[..., Any]


class HostGroup:
    """N parsed calls on NumPy arrays, prepared once with amaxes and outputs, and run as often as needed.

    Every run overwrites the outputs of the previous run. An error of one call names its position among the arrays.

    Args:
        op: the public function that error messages name.
        calls: the parsed calls.
        r: the recipe of the calls.
        run: the function by which calls run on the first host engine that supports them.

    Attributes:
        vector: the amaxes of all arrays in one array, which the group computes; None if the caller passed the amaxes,
            or if the recipe has no tensor scale.
    """

    def __init__(self, op: str, calls: Sequence[Call], r: Recipe, run: Run) -> None:
        self._op, self._calls, self._recipe, self._run = op, calls, r, run
        self._codes: list[Quantized] = []
        self._values: list[Any] = []
        self._amaxes: list[np.ndarray] = []
        self.vector: np.ndarray | None = None
        if r.tensor_scaling != "none" and all(call.tensor_amax is None for call in calls):
            shapes = [tensor_amax_shape(call.moved.shape, r) for call in calls]
            ends = np.cumsum([0, *map(prod, shapes)])
            self.vector = np.zeros(int(ends[-1]), np.float32)
            parts = np.split(self.vector, ends)[1:-1]
            self._amaxes = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def computes_amaxes(self) -> bool:
        """Return True if the group computes amaxes, False if the caller passed them or the recipe needs none."""
        return self.vector is not None

    def amax(self) -> list[Any]:
        """Return the tensor amax of each array: the amax that the caller passed, or a view of `vector`."""
        if self.vector is None:
            return each(self._op, lambda c: with_amaxes(c, c.tensor_amax, None).tensor_amax, self._calls)
        for call, amax in zip(self._calls, self._amaxes, strict=True):
            amax[...] = compute_tensor_amax(call.moved, self._recipe, call.mask)
        return list(self._amaxes)

    def quantize(self, compute_amaxes: bool) -> list[Quantized]:
        """Quantize all arrays, and return one Quantized per array."""
        each(self._op, lambda call: check_codes(call, call.layout), self._calls)
        calls = self._with_amaxes(compute_amaxes)
        outs: Sequence[Quantized | None] = self._codes or [None] * len(calls)
        self._codes = [
            self._run(call.op, "quantize", False, call._replace(out=out)) for call, out in zip(calls, outs, strict=True)
        ]
        return self._codes

    def fake_quantize(self, compute_amaxes: bool) -> list[Any]:
        """Fake-quantize all arrays, and return one array of values per array."""
        values = [self._run(call.op, "fake_quantize", False, call) for call in self._with_amaxes(compute_amaxes)]
        self._values = self._values or values
        for target, value in zip(self._values, values, strict=True):
            target[...] = value
        return self._values

    def _with_amaxes(self, compute: bool) -> list[Call]:
        """Return the calls with their tensor amaxes: those of the caller, otherwise those in `vector`."""
        # An amax that is computed now and holds NaN is left out, because a call rejects a NaN amax.
        amaxes = [call.tensor_amax for call in self._calls]
        if self.vector is not None:
            amaxes = [None if np.isnan(a).any() else a for a in self.amax()] if compute else list(self._amaxes)
        return each(self._op, lambda call, a: with_amaxes(call, a, call.block_amax), self._calls, amaxes)


class HostClipGroup:
    """N calls to fake_quantize_backward on NumPy arrays, with the clip limit of each.

    calls: the parsed calls. amaxes: the clip limit of each call; None computes it from x in every run. run: the
    function by which calls run on the first host engine that supports them.
    """

    def __init__(self, calls: Sequence[Call], amaxes: Sequence[Any], run: Run) -> None:
        self._calls, self._amaxes, self._run = calls, amaxes, run

    def clip(self) -> list[Any]:
        """Return the clipped gradient of each call: a new array, or the gradient itself if it has no elements."""
        clipped = []
        for call, limit in zip(self._calls, self._amaxes, strict=True):
            if limit is None and call.grad.size:
                limit = reshape_clip_amax(self._run(call.op, "clip_amax", False, call), call)
            clipped.append(self._run(call.op, "clip", False, call, limit) if call.grad.size else call.grad)
        return clipped


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
        ends = np.cumsum([len(shapes), *map(prod, blocks)])
        self.bits = np.zeros(int(ends[-1]), np.uint32)
        amaxes = np.split(self.bits.view(np.float32), ends)[1:-1]
        self._amaxes = [amax.reshape(shape) for amax, shape in zip(amaxes, blocks, strict=True)]
        self._tensor_amaxes = self.bits[: len(shapes)].view(np.float32)
        self._unit = r.element.packing.codes  # elements per byte; messages are cut at whole bytes
        self.counts = partition.pieces(self._unit).sum(axis=1).tolist()
        self.message = np.zeros(self.counts[rank], np.uint8)
        self.gathered = np.zeros(sum(self.counts), np.uint8)
        self.quantized = []
        for shape, value in zip(shapes, values, strict=True):
            packed = np.zeros(packed_shape(shape, r), np.uint8)
            scales = np.zeros(padded_shape(scale_shape(shape, r), layout), np.uint8)
            scale, amax = (None if r.tensor_scaling == "none" else np.zeros((), np.float32) for _ in range(2))
            self.quantized.append(Quantized(packed, scales, scale, amax, shape, value.dtype, -1, r, layout))
        self.columnwise = [self._transposed(q) for q in self.quantized] if columnwise else []

    def device(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing. In DeviceStages, this method makes the buffers' GPU current."""
        return nullcontext()

    def replace(self, values: Sequence[np.ndarray]) -> None:
        """Use the arrays `values` as shards from now on, without a check."""
        self._values = list(values)

    def _shards(self) -> Iterator[tuple[int, np.ndarray, tuple[int, int], int]]:
        """Return one tuple per matrix: (its index, this process's shard, its shape (M, K), where the shard starts)."""
        starts = self._partition.starts[self._rank].tolist()
        return zip(range(len(starts)), self._values, self._shapes, starts, strict=True)

    @ieee("cast_master_weights")
    def amax(self) -> None:
        """Write the amaxes of this process's shards into `bits`."""
        for t, values, shape, start in self._shards():
            self._amaxes[t][...] = partial_amax(values, shape, start, self._recipe)
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
        message_offset = 0
        for t, values, shape, start in self._shards():
            packed = self.quantized[t].packed
            amax = None if self._recipe.tensor_scaling == "none" else self._tensor_amaxes[t]
            partial_cast(values, packed, self._amaxes[t], shape, start, self._recipe, amax)
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
        codes, scales = self._run("cast_master_weights", "transpose", False, q.packed, q.block_scale, q)
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
    flat[first + 1 : last - 1] = piece[1 : last - first - 1]
    for i in {0, last - first - 1}:
        flat[first + i] = flat[first + i] & ~mask[i] | piece[i] & mask[i]
