"""Quantize matrices that are sharded over several processes: partial_amax, partial_cast and master weights.
A shard is a range [start, end) of the elements of a flattened matrix, the part that one process holds. A run is 16
consecutive elements of a row. The kernels compute amaxes of a shard (partial_amax) and its codes and scales
(partial_cast), and store the codes and scales that all processes have sent in the matrices (partial_place). For many
matrices, all arrays of one kind are in one buffer; arguments such as block_at say where an array begins in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def partial_arguments(kernel: str, shape: tuple[int, ...] = (1,), **fields: Any) -> np.ndarray:
    """Return a table of a kernel's arguments: an array of structs, one per shard."""
    table = np.zeros(shape, LAUNCHES[kernel].arguments)
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


def blocks_before(start: Any, columns: Any, r: Recipe) -> Any:
    """Return the number of blocks whose first element comes before element `start` of a flattened matrix."""
    height, width = r.block or (1, 1)
    row, column = start // columns, start % columns
    return _ceil_div(row, height) * (columns // width) + np.where(row % height, 0, _ceil_div(column, width))


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
    cupy, K, end, device = imports.cupy(), shape[1], start + shard.size, shard.device.id
    with imports.making_current(device):
        block_amax, x = cupy.ascontiguousarray(block_amax), cupy.ascontiguousarray(shard)
        amax = matrix.amax(block_amax) if r.tensor_scaling != "none" and amax is None else amax
        if not shard.size:
            return
        direct = out.flags.c_contiguous and out.data.ptr % 8 == 0
        target = out if direct else out.copy(order="C")
        places = {"values": x, "packed": target, "block_amax": block_amax, "tensor_amax": 0 if amax is None else amax}
        table = partial_arguments("partial_cast", **places, start=start, end=end, columns=K)
        launch_partial("partial_cast", r, x.dtype, table, run_count(start, end), device)
        if not direct:
            out[...] = target


ALIGNMENT = 256  # bytes; the part of a buffer that belongs to a matrix begins at a multiple of it
MAX_PADDING = 1.1  # messages are padded to one length if this takes at most this factor of bytes (_message_sizes)
CHUNK = 3 << 25  # elements; a process sends its codes in messages of about this many, to overlap them with the cast


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
        in_place: True if the message of this process may be a part of the array that receives those of all.

    The attributes messages, quantized and columnwise are those of HostStages (host/engine.py).
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
        in_place: bool,
    ) -> None:
        self._values, self._recipe, self._partition, self._rank = list(values), r, partition, rank
        self._layout, self._in_place = layout, in_place
        self._dtypes, self._device = [v.dtype for v in values], values[0].device.id
        self._rows, self._columns = np.array(shapes, np.int64).T
        with self.device():
            self._allocate(shapes)
            self.quantized = self._views(shapes, self._packed, self._scales)
            self._prepare_messages()
            self._prepare_shards()
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
        self._bits = cupy.zeros(count + int(self._blocks.sum()), np.uint32)
        self._tensor_amax, self._block_amax = self._bits[:count].view(np.float32), self._bits[count:].view(np.float32)
        self._tensor_scale = cupy.zeros(count, np.float32)
        amax = 0 if r.tensor_scaling == "none" else self._tensor_amax
        self._fields = {"tensor_amax": amax, "tensor_at": np.arange(count), "columns": self._columns}
        # The entries of _bits that processes share: the amaxes of tensors, and of blocks that may have several owners.
        starts, ends = self._partition
        first, last = block_span(starts, starts, np.maximum(self._columns, 1), r)
        spans = zip(*((edge + count + self._block_at)[starts < ends].tolist() for edge in (first, last)), strict=True)
        shared = np.unique(np.concatenate([np.arange(count), *(np.arange(*span) for span in spans)]))
        self._shared, self._shared_bits = cupy.asarray(shared), cupy.zeros(len(shared), np.uint32)
        self.reduce(lambda bits: bits)  # so that CuPy loads its kernels before cast is captured in a graph
        self._packed_at, size = _offsets([int(np.prod(packed_shape(s, r))) for s in shapes])
        self._packed = cupy.zeros(size, np.uint8)
        self._scale_at, size = _offsets([int(np.prod(padded_shape(scale_shape(s, r), self._layout))) for s in shapes])
        self._scales = cupy.zeros(size, np.uint8)

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
        """Prepare a kernel for shards of all matrices, and return its launches: one per dtype that has work."""
        table, row = partial_arguments(kernel, work.shape, **fields).reshape(-1), row_of(kernel, self._device)
        dtypes, work, launches = self._dtypes * (work.size // len(self._dtypes)), work.reshape(-1), []
        for dtype in sorted(set(dtypes), key=str):
            chosen = np.array([d == dtype for d in dtypes]) & (work > 0)
            if chosen.any():
                pieces, aligned = piece_counts(RUN * work[chosen], self._device), np.ones(chosen.sum(), bool)
                function = _partial_function(kernel, self._recipe, dtype, f"grouped_{kernel}", self._device, layout)
                launches.append(prepare_group(function, table[chosen], aligned, pieces, held, threads=row.threads))
        return launches

    def _prepare_messages(self) -> None:
        """Allocate the messages, one per chunk, and prepare the launches of the place stage."""
        # A message holds the codes of a chunk of the shards, then the scale codes of the blocks that begin in it. With
        # one process, it has no codes, because the cast stage writes them into the matrices.
        cupy, size, alone = imports.cupy(), self._recipe.element.packing.length(RUN), len(self._partition.starts) == 1
        longest = int(self._partition.pieces(1).sum(axis=1).max())
        self._chunks = self._partition.split(1 if alone else max(longest // CHUNK + 1, 1))
        # With priority, because a cast has more thread blocks than the device can hold.
        self._side = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._events = [[cupy.cuda.Event(disable_timing=True) for _ in range(2)] for _ in self._chunks]
        self.messages, self._targets, self._run_place = list[tuple[Any, list[int], Any]](), [], []
        to_at = self._packed_at // size
        common = {"to": self._packed, "to_at": to_at, "scales": self._scales, "scale_at": self._scale_at}
        common |= self._fields | {"rows": self._rows, "tensor_scale": self._tensor_scale}
        for part in self._chunks:
            blocks = Partition(*(blocks_before(edge, np.maximum(self._columns, 1), self._recipe) for edge in part))
            codes = part.pieces(RUN).sum(axis=1, keepdims=True) * (0 if alone else size)
            counts = _message_sizes((codes[:, 0] + blocks.pieces(1).sum(axis=1)).tolist())
            gathered, begins = cupy.zeros(sum(counts), np.uint8), (np.cumsum(counts) - counts)[:, None]
            message = gathered[int(begins[self._rank, 0]) :][: counts[self._rank]]
            message = message if alone or self._in_place else message.copy()
            self.messages.append((message, counts, gathered))
            # Minus the index of the first run or block, because kernels count from the start of a matrix.
            run_at, code_at = part.offsets(RUN) - part.starts // RUN, codes + blocks.offsets(1) - blocks.starts
            target = (self._packed, to_at) if alone else (message, run_at[self._rank])
            self._targets.append((*target, message, code_at[self._rank]))
            fields = common | {"from": 0 if alone else gathered, "from_at": run_at + begins // size}
            fields |= {"scale_codes": gathered, "code_at": code_at + begins}
            fields |= {"start": part.starts, "end": part.ends, "first": blocks.starts, "last": blocks.ends}
            work = np.where(part.starts < part.ends, run_count(*part), 0)
            work[0] = np.maximum(work[0], 1)  # a matrix without elements also has a tensor scale
            self._run_place.append(self._by_dtype("partial_place", work, fields, layout=self._layout))

    def _prepare_shards(self) -> None:
        """Prepare the launches of the two stages that read the shards: amax and cast."""
        starts, ends = self._partition.starts[self._rank], self._partition.ends[self._rank]
        values = np.array([(v.data.ptr, v.itemsize) for v in self._values], np.uint64)
        common = self._fields | {"block_amax": self._block_amax, "block_at": self._block_at}
        first, last = block_span(starts, ends, np.maximum(self._columns, 1), self._recipe)
        fields = common | {"values": values[:, 0], "start": starts, "end": ends, "rows": self._rows}
        self._run_amax = self._by_dtype("partial_amax", np.where(starts < ends, last - first, 0), fields, self._values)
        self._run_cast = []
        for part, target in zip(self._chunks, self._targets, strict=True):
            start, end = part.starts[self._rank], part.ends[self._rank]
            fields = common | dict(zip(("packed", "run_at", "scale_codes", "code_at"), target, strict=True))
            address = values[:, 0] + values[:, 1] * (start - starts).astype(np.uint64)
            fields |= {"values": address, "start": start, "end": end}
            work = np.where(start < end, run_count(start, end), 0)
            self._run_cast.append(self._by_dtype("partial_cast", work, fields, self._values))

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
        """Compute the tensor amaxes and block amaxes of this process's shards."""
        # Only the shared entries need zeros, because the kernel raises them; it stores those of blocks it owns alone.
        self._shared_bits.data.memset_async(0, self._shared_bits.nbytes)
        self._bits[self._shared] = self._shared_bits
        _run(self._run_amax)

    def reduce(self, all_reduce_max: Callable[[Any], Any]) -> None:
        """Replace the shared amaxes by their maximum over the group."""
        self._bits[self._shared] = all_reduce_max(self._bits.take(self._shared, out=self._shared_bits))

    def cast(self) -> None:
        """Write the codes and scale codes of this process's shards into the messages."""
        # NaN amaxes raise no error, because a check would wait for the device.
        _run(*self._run_cast)

    def place(self) -> None:
        """Store tensor scales, and the codes and scales of the messages of all processes, in `quantized`."""
        _run(*self._run_place)

    def overlap(self, gather: Callable[..., Any]) -> None:
        """Run the stages cast, gather and place, and send each message on a second stream while the next is cast."""
        current = imports.cupy().cuda.get_current_stream()
        for launches, message, (cast, sent) in zip(self._run_cast, self.messages, self._events, strict=True):
            _run(launches)
            current.record(cast)
            self._side.wait_event(cast)
            with self._side:
                gather(*message)
            self._side.record(sent)
        for launches, (_, sent) in zip(self._run_place, self._events, strict=True):
            current.wait_event(sent)
            _run(launches)

    def transpose(self) -> None:
        """Update the columnwise copies of all matrices from `quantized`. Do nothing if there are no copies."""
        if self._run_transpose is not None:
            self._run_transpose()


def _run(*groups: Sequence[GroupedLaunch]) -> None:
    """Run launches in order."""
    for group in groups:
        for launch in group:
            launch()


def _message_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the length of each process's message in bytes, with padding."""
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    longest = max(padded)
    return [longest] * len(sizes) if longest * len(sizes) <= MAX_PADDING * sum(padded) else padded


def _offsets(sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """Lay out arrays one after the other in one buffer."""
    padded = -(-np.array(sizes, np.int64) // ALIGNMENT) * ALIGNMENT
    return np.cumsum(padded) - padded, int(padded.sum())
