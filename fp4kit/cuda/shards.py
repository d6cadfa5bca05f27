"""Quantize matrices that are sharded over several processes: partial_amax, partial_cast and master weights.
A shard is a range [start, end) of the elements of a flattened matrix, the part that one process holds. A run is 16
consecutive elements of a row. The kernels compute amaxes of a shard (partial_amax), scales and factors from amaxes
(partial_scales) and codes of a shard (partial_cast), and copy the codes of other processes (partial_place). For many
matrices, all arrays of one kind are in one buffer; arguments such as block_at say where an array begins in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Declined, Partition, amax_shape, declined_as_error
from fp4kit.cuda import matrix
from fp4kit.cuda.compiler import recipe_struct
from fp4kit.cuda.dispatch import LaunchRequest, kernel_for
from fp4kit.cuda.launch import (
    LAUNCHES,
    GroupedLaunch,
    address,
    function_of,
    grid,
    piece_counts,
    prepare_group,
    prepare_rows,
    row_of,
)
from fp4kit.cuda.transforms import transpose_struct, wide_copies, work_blocks
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized, packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.types import ScaleLayout

FLOAT32 = np.dtype(np.float32)
RUN = 16  # elements per run; every row of a matrix consists of whole runs


def run_bytes(r: Recipe) -> int:
    """Return the number of bytes that the packed codes of one run (16 elements) of a recipe take."""
    return r.element.packing.length(RUN)


def partial_arguments(kernel: str, count: int = 1, **fields: Any) -> np.ndarray:
    """Return a table of a kernel's arguments: an array of `count` structs, one per matrix."""
    table = np.zeros(count, LAUNCHES[kernel].arguments)
    for name, value in fields.items():
        table[name] = value if isinstance(value, (int, np.ndarray)) else value.data.ptr
    return table


def _partial_function(kernel: str, r: Recipe, dtype: np.dtype, entry: str, device: int, layout: str = "linear") -> Any:
    """Return a compiled partial kernel, which its file has for one matrix and for a group, as a CuPy function."""
    row = row_of(kernel, device)
    values = tuple(zip(row.traits.split(), (dtype, f"ScaleLayout::{layout}"), strict=False))
    return function_of(kernel, entry, device, recipe_struct(r), values, threads=row.threads)


def launch_partial(kernel: str, r: Recipe, dtype: np.dtype, table: np.ndarray, work: int, device: int) -> None:
    """Launch a partial kernel for one matrix on the current stream, without waiting for it."""
    plain = table.view(np.dtype((np.void, table.itemsize)))  # CuPy passes raw bytes faster, see Launch
    row = row_of(kernel, device)
    blocks = grid(_ceil_div(work, row.threads), device, row.limit)
    _partial_function(kernel, r, dtype, kernel, device)((blocks,), (row.threads,), (plain,))


def prepare_partial(
    kernel: str,
    r: Recipe,
    dtype: np.dtype,
    table: np.ndarray,
    work: np.ndarray,
    device: int,
    *held: Any,
    layout: str = "linear",
) -> GroupedLaunch:
    """Return the prepared launch of a partial kernel for all matrices in a table of arguments."""
    function = _partial_function(kernel, r, dtype, f"grouped_{kernel}", device, layout)
    pieces, threads = piece_counts(RUN * work, device), row_of(kernel, device).threads
    return prepare_group(function, table, np.ones(len(table), bool), pieces, held, threads=threads)


# ---- checks ----


def check_blocks(r: Recipe) -> None:
    """Raise Declined if the partial kernels do not support the blocks of a recipe."""
    kernel_for(LaunchRequest(r, FLOAT32, (r.block_rows, r.block_size)))


def check_matrices(shapes: Sequence[tuple[int, int]], r: Recipe) -> None:
    """Raise Declined if the partial kernels do not support the blocks of a recipe, or a shape (M, K) in `shapes`."""
    # A matrix must have fewer than 2^31 runs, because run numbers in the kernels have 31 bits.
    check_blocks(r)
    for M, K in shapes:
        if M * K >= RUN << 31:
            raise Declined(f"a matrix has {M * K} elements; the CUDA kernels take fewer than {RUN << 31}")


# ---- one matrix ----


def block_span(start: Any, end: Any, columns: Any, r: Recipe) -> tuple[Any, Any]:
    """Return the range (first, last) of the blocks that contain the elements [start, end) of a flattened matrix."""
    height, width = r.block or (1, 1)
    if height == 1:
        return start // width, _ceil_div(end, width)
    wide = columns // width
    return start // columns // height * wide, _ceil_div(_ceil_div(end, columns), height) * wide


def run_count(start: Any, end: Any) -> Any:
    """Return the number of runs (16 elements each) that contain the elements [start, end) of a flattened matrix."""
    # The range must not be empty. start and end may be arrays with one entry per matrix.
    return _ceil_div(end, RUN) - start // RUN


def _ceil_div(a: Any, b: Any) -> Any:
    """Return a / b, rounded up, for integers or arrays of integers."""
    return -(-a // b)


def amax_shard(x: Any, block_amax: Any, shape: tuple[int, int], start: int, r: Recipe) -> None:
    """Compute the amax of each block over the elements of one shard, and write it to block_amax."""
    # block_amax has one entry per block of the whole matrix, and must hold zeros.
    M, K = shape
    end = start + x.size
    first, last = block_span(start, end, K, r)
    table = partial_arguments("partial_amax", values=x, block_amax=block_amax, start=start, end=end, rows=M, columns=K)
    launch_partial("partial_amax", r, x.dtype, table, last - first, x.device.id)


WHOLE_CODES, WORD_SCALES = 1, 2  # flags in a member's `aligned`, see compiler.GROUPED


# (codes, scales, codes of the transposed copy, its scales, shape (M, K)) of a matrix: four contiguous arrays
TransposeMatrix = tuple[Any, Any, Any, Any, tuple[int, int]]


def transpose_group(matrices: Sequence[TransposeMatrix], r: Recipe) -> GroupedLaunch:
    """Return a prepared launch that transposes the codes and scales of all matrices into their output arrays."""
    shapes = [(1, *m[4]) for m in matrices]
    wide = [wide_copies(*m[:2], r, "linear", *m[2:4], shape) for m, shape in zip(matrices, shapes, strict=True)]
    members = [(*map(address, m[:4]), *shape) for m, shape in zip(matrices, shapes, strict=True)]
    device, struct = matrices[0][0].device.id, transpose_struct(r, "linear", True)
    pieces, flags = np.array([work_blocks(r, "linear", shape) for shape in shapes]), np.array(wide)
    traits, flags = (bool(flags.all()),), flags @ (WHOLE_CODES, WORD_SCALES)
    return prepare_rows("transpose", device, struct, traits, members, flags, pieces, tuple(matrices))


def partial_amax(shard: Any, shape: tuple[int, int], start: int, r: Recipe) -> Any:
    """Return the amax of each block of a matrix, counting only the elements of one shard."""
    check_matrices([shape], r)
    cupy = imports.cupy()
    with imports.making_current(shard.device.id):
        out = cupy.zeros(amax_shape(shape, r), np.float32)
        if shard.size:
            amax_shard(cupy.ascontiguousarray(shard), out, shape, start, r)
        return out


def partial_cast(
    shard: Any, out: Any, block_amax: Any, shape: tuple[int, int], start: int, r: Recipe, amax: Any
) -> None:
    """Write the codes of a shard into out, the packed codes of a matrix, and change no other code of out."""
    check_matrices([shape], r)
    cupy, (M, K), end, device = imports.cupy(), shape, start + shard.size, shard.device.id
    with imports.making_current(device):
        block_amax, x = cupy.ascontiguousarray(block_amax), cupy.ascontiguousarray(shard)
        amax = matrix.amax(block_amax) if r.tensor_scaling != "none" and amax is None else amax
        if not shard.size:
            return
        direct = out.flags.c_contiguous and out.data.ptr % 8 == 0
        target = out if direct else out.copy(order="C")
        # The rows of blocks that contain elements of the shard, and the number of blocks before them.
        first, last = start // K // r.block_rows, _ceil_div(_ceil_div(end, K), r.block_rows)
        wide = K // r.block_size
        factors = cupy.empty((last - first, wide), np.float32)
        common = {"tensor_amax": 0 if amax is None else amax, "factors": factors, "columns": K}
        rows = min(last * r.block_rows, M) - first * r.block_rows
        places = {"block_amax": block_amax, "rows": rows, "block_at": first * wide}
        table = partial_arguments("partial_scales", **common, **places)
        launch_partial("partial_scales", r, x.dtype, table, (last - first) * wide, device)
        places = {"values": x, "packed": target, "start": start, "end": end, "factor_at": -first * wide}
        table = partial_arguments("partial_cast", **common, **places)
        launch_partial("partial_cast", r, x.dtype, table, run_count(start, end), device)
        if not direct:
            out[...] = target


ALIGNMENT = 256  # bytes; the part of a buffer that belongs to a matrix begins at a multiple of it
MAX_PADDING = 1.1  # messages are padded to one length if this takes at most this factor of bytes (_message_sizes)


class DeviceStages:
    """The buffers of a MasterWeightsPlan on a GPU, with one method per stage of cast_master_weights.

    Args:
        values: this process's shard of each matrix: contiguous CuPy arrays, 1-d.
        shapes: the rows and columns (M, K) of each whole matrix.
        r: the recipe.
        partition: where the shards of all processes begin and end.
        rank: the number of this process.
        columnwise: True to also make columnwise copies.
        layout: the layout of the block scales.

    The attributes bits, message, gathered, counts, quantized and columnwise are those of HostStages (host/engine.py).
    """

    def __init__(
        self,
        values: Sequence[Any],
        shapes: Sequence[tuple[int, int]],
        r: Recipe,
        partition: Partition,
        rank: int,
        columnwise: bool,
        layout: ScaleLayout,
    ) -> None:
        self._values, self._recipe, self._partition, self._rank = list(values), r, partition, rank
        self._layout = layout
        self._dtypes, self._device = [v.dtype for v in values], values[0].device.id
        self._rows, self._columns = np.array(shapes, np.int64).T
        with self.device():
            self._allocate(shapes)
            self.quantized = self._views(shapes, self._packed, self._scales)
            self._prepare_scales()
            self._prepare_shards()
            self._prepare_place()
            self._prepare_columnwise(shapes, columnwise)

    @staticmethod
    def check(values: Sequence[Any], shapes: Sequence[tuple[int, int]], r: Recipe) -> None:
        """Check the shards `values` and the shapes (M, K) of their matrices before any work."""
        with declined_as_error("cast_master_weights"):
            check_matrices(shapes, r)
        for i, v in enumerate(values):
            if not v.flags.c_contiguous:
                raise ValueError(
                    f"cast_master_weights: values of shard {i} are strided; needs a contiguous array on a GPU; make a "
                    "contiguous copy"
                )

    # ---- preparation

    def _allocate(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Allocate the buffers for amaxes, scales, codes and messages of all matrices."""
        cupy, r, count = imports.cupy(), self._recipe, len(shapes)
        self._blocks = np.array([np.prod(amax_shape(s, r)) for s in shapes], np.int64)
        self._block_at = np.cumsum(self._blocks) - self._blocks
        self.bits = cupy.zeros(count + int(self._blocks.sum()), np.uint32)
        self._tensor_amax, self._block_amax = self.bits[:count].view(np.float32), self.bits[count:].view(np.float32)
        self._tensor_scale = cupy.zeros(count, np.float32)
        self._factors = cupy.empty(self._block_amax.size, np.float32)
        self._packed_at, size = _offsets([int(np.prod(packed_shape(s, r))) for s in shapes])
        self._packed = cupy.zeros(size, np.uint8)
        self._scale_at, size = _offsets([int(np.prod(padded_shape(scale_shape(s, r), self._layout))) for s in shapes])
        self._scales = cupy.zeros(size, np.uint8)
        sizes = self._partition.pieces(RUN).sum(axis=1) * run_bytes(r)
        self.counts = _message_sizes(sizes.tolist())
        self.message = cupy.zeros(self.counts[self._rank], np.uint8)
        self.gathered = cupy.zeros(sum(self.counts), np.uint8)

    def _views(self, shapes: Sequence[tuple[int, int]], packed: Any, scales: Any, axis: int = -1) -> list[Quantized]:
        """Return one Quantized per matrix."""
        views, r = [], self._recipe
        for t, shape in enumerate(shapes):
            moved = shape if axis == -1 else shape[::-1]
            codes, bytes_ = packed_shape(moved, r), padded_shape(scale_shape(moved, r), self._layout)
            scale, amax = (a[t : t + 1].reshape(()) for a in (self._tensor_scale, self._tensor_amax))
            if r.tensor_scaling == "none":
                scale = amax = None
            at, scale_at = int(self._packed_at[t]), int(self._scale_at[t])
            part = packed[at : at + int(np.prod(codes))].reshape(codes)
            scale_part = scales[scale_at : scale_at + int(np.prod(bytes_))].reshape(bytes_)
            views.append(Quantized(part, scale_part, scale, amax, shape, self._dtypes[t], axis, r, self._layout))
        return views

    def _by_dtype(
        self, kernel: str, work: np.ndarray, fields: dict[str, Any], *held: Any, layout: str = "linear"
    ) -> list[GroupedLaunch]:
        """Prepare a kernel for all matrices, and return its launches: one per dtype of the shards that has work."""
        table = partial_arguments(kernel, len(work), **fields)
        launches = []
        for dtype in sorted(set(self._dtypes), key=str):
            chosen = np.array([d == dtype for d in self._dtypes]) & (work > 0)
            if chosen.any():
                arguments = table[chosen], work[chosen], self._device
                launches.append(prepare_partial(kernel, self._recipe, dtype, *arguments, *held, layout=layout))
        return launches

    def _prepare_scales(self) -> None:
        """Prepare the launches of the scales stage, which compute the scales of all matrices, also of empty ones."""
        fields = {"block_amax": self._block_amax, "factors": self._factors, "scales": self._scales}
        if self._recipe.tensor_scaling != "none":
            fields |= {"tensor_amax": self._tensor_amax, "tensor_scale": self._tensor_scale}
        places = {"block_at": self._block_at, "factor_at": self._block_at, "scale_at": self._scale_at}
        places |= {"tensor_at": np.arange(len(self._blocks)), "rows": self._rows, "columns": self._columns}
        # A matrix without elements also needs a launch, because it has a tensor scale.
        work = np.maximum(self._blocks, 1)
        self._run_scales = self._by_dtype("partial_scales", work, fields | places, layout=self._layout)

    def _prepare_shards(self) -> None:
        """Prepare the launches of the two stages that read the shards: amax and cast."""
        # With one process, the cast stage writes codes into the matrices themselves; otherwise into `message`.
        starts, ends = self._partition.starts[self._rank], self._partition.ends[self._rank]
        size = run_bytes(self._recipe)
        common = {"values": np.array([v.data.ptr for v in self._values], np.uint64), "start": starts, "end": ends}
        common |= {"columns": self._columns}
        fields = {"block_amax": self._block_amax, "rows": self._rows, "block_at": self._block_at}
        if self._recipe.tensor_scaling != "none":
            common |= {"tensor_amax": self._tensor_amax, "tensor_at": np.arange(len(starts))}
        first, last = block_span(starts, ends, np.maximum(self._columns, 1), self._recipe)
        self._run_amax = self._by_dtype(
            "partial_amax", np.where(starts < ends, last - first, 0), common | fields, self._values
        )
        target, run_at = self._packed, self._packed_at // size
        if len(self._partition.starts) > 1:
            offsets = self._partition.offsets(RUN)[self._rank]
            # Minus starts // RUN, because the kernel counts runs from the start of a matrix, not of its shard.
            target, run_at = self.message, offsets - starts // RUN
        fields = {"packed": target, "factors": self._factors, "run_at": run_at, "factor_at": self._block_at}
        work = np.where(starts < ends, run_count(starts, ends), 0)
        self._run_cast = self._by_dtype("partial_cast", work, common | fields, self._values)

    def _prepare_place(self) -> None:
        """Set _run_place to the launch of the place stage, or to None if there is one process or no element."""
        starts, ends = (edge.reshape(-1) for edge in self._partition)
        chosen = starts < ends
        self._run_place: GroupedLaunch | None = None
        if len(self._partition.starts) == 1 or not chosen.any():
            return
        begins = np.cumsum(self.counts) - self.counts
        message_at = begins[:, None] // run_bytes(self._recipe)
        from_at = (self._partition.offsets(RUN) + message_at).reshape(-1) - starts // RUN
        to_at = np.tile(self._packed_at // run_bytes(self._recipe), len(self._partition.starts))
        fields = {"from": self.gathered, "to": self._packed, "start": starts, "end": ends}
        table = partial_arguments("partial_place", len(starts), **fields, from_at=from_at, to_at=to_at)[chosen]
        work = run_count(starts, ends)[chosen]
        self._run_place = prepare_partial("partial_place", self._recipe, self._dtypes[0], table, work, self._device)

    def _prepare_columnwise(self, shapes: Sequence[tuple[int, int]], columnwise: bool) -> None:
        """Allocate the columnwise copies and prepare the launch of the transpose stage."""
        self.columnwise: list[Quantized] = []
        self._run_transpose: GroupedLaunch | None = None
        if columnwise:
            cupy = imports.cupy()
            packed, scales = cupy.empty_like(self._packed), cupy.empty_like(self._scales)
            self.columnwise = self._views(shapes, packed, scales, axis=0)
            pairs = zip(self.quantized, self.columnwise, shapes, strict=True)
            arrays = [(q.packed, q.block_scale, c.packed, c.block_scale, shape) for q, c, shape in pairs]
            matrices = [m for m in arrays if m[0].size]
            if matrices:
                self._run_transpose = transpose_group(matrices, self._recipe)

    def device(self) -> Any:
        """Return a context manager that makes the device of the buffers current."""
        return imports.cupy().cuda.Device(self._device)

    def replace(self, values: Sequence[Any]) -> None:
        """Use the arrays `values` as the shards from now on, and prepare the launches that read them again."""
        # The new arrays must have the shapes, dtypes and device of the current shards, which is not checked.
        self.check(values, (), self._recipe)
        self._values = list(values)
        with self.device():
            self._prepare_shards()

    # ---- stages

    def amax(self) -> None:
        """Write the tensor amaxes and block amaxes of this process's shards into `bits`."""
        self.bits.data.memset_async(0, self.bits.nbytes)
        _run(self._run_amax)

    def scales(self) -> None:
        """Compute tensor scales and block scales from the reduced `bits`, and store them in `quantized`."""
        # NaN amaxes raise no error, because a check would wait for the device.
        _run(self._run_scales)

    def cast(self) -> None:
        """Write the codes of this process's shards into `message`, or into `quantized` if there is one process."""
        _run(self._run_cast)

    def place(self) -> None:
        """Copy the codes of all processes from `gathered` into `quantized`."""
        # With one process, do nothing, because the cast stage has already stored the codes there.
        if self._run_place is not None:
            self._run_place()

    def transpose(self) -> None:
        """Update the columnwise copies of all matrices from `quantized`. Do nothing if there are no copies."""
        if self._run_transpose is not None:
            self._run_transpose()


def _run(launches: Sequence[GroupedLaunch]) -> None:
    """Run launches in order."""
    for launch in launches:
        launch()


def _message_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the length of each process's message in bytes, with padding, or [0] if there is only one process."""
    if len(sizes) == 1:
        return [0]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    longest = max(padded)
    return [longest] * len(sizes) if longest * len(sizes) <= MAX_PADDING * sum(padded) else padded


def _offsets(sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """Lay out arrays one after the other in one buffer."""
    padded = -(-np.array(sizes, np.int64) // ALIGNMENT) * ALIGNMENT
    return np.cumsum(padded) - padded, int(padded.sum())
