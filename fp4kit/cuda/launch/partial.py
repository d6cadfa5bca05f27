"""Launch the partial kernels, which quantize matrices that are sharded over several processes.
A shard is a range [start, end) of the elements of a flattened matrix, the part that one process holds. A run is 16
consecutive elements of a row.

These are the kernels:

- partial_amax computes the amaxes of blocks and of the tensor from a shard.
- partial_scales computes the scales of a matrix, and the factors of its blocks, from the amaxes.
- partial_cast computes codes from a shard and the factors of blocks.
- partial_place copies the codes that other processes sent into the matrices.

`launch` launches a kernel for one matrix and passes its arguments by value. `prepare` prepares a launch for many
matrices, with a table of arguments in device memory. For many matrices, all arrays of one kind are in one buffer;
arguments such as block_at say where the array of a matrix begins in the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.cuda.launch.dispatch import LaunchRequest, kernel_for
from fp4kit.cuda.launch.geometry import THREADS, grid
from fp4kit.cuda.launch.grouped import GroupedLaunch, piece_counts, prepare_group
from fp4kit.recipes import Recipe

FLOAT32 = np.dtype(np.float32)
RUN = 16  # elements per run; every row of a matrix consists of whole runs
# The most thread blocks per multiprocessor. With 16, kernels take 6% longer; without a limit, up to 20% longer (H200,
# 2026-11-21).
PER_SM = 64


def _arguments(pointers: str, numbers: str) -> np.dtype:
    """Return the NumPy dtype of a struct that holds pointers, followed by numbers."""
    return np.dtype([(name, "u8") for name in pointers.split()] + [(name, "i8") for name in numbers.split()])


# The structs of the kernels' arguments. The .cu file of a kernel describes its fields.
ARGUMENTS: Mapping[str, np.dtype] = {
    "partial_amax": _arguments("values block_amax tensor_amax", "start end rows columns block_at tensor_at"),
    "partial_scales": _arguments(
        "block_amax tensor_amax factors scales tensor_scale", "rows columns block_at factor_at scale_at tensor_at"
    ),
    "partial_cast": _arguments("values packed factors tensor_amax", "start end columns run_at factor_at tensor_at"),
    "partial_place": _arguments("from to", "start end from_at to_at"),
}


def run_bytes(r: Recipe) -> int:
    """Return the number of bytes that the packed codes of one run (16 elements) of a recipe take."""
    return r.element.packing.length(RUN)


def arguments(kernel: str, count: int = 1, **fields: Any) -> np.ndarray:
    """Return a table of a kernel's arguments: an array of `count` structs, one per matrix."""
    table = np.zeros(count, ARGUMENTS[kernel])
    for name, value in fields.items():
        table[name] = value if isinstance(value, (int, np.ndarray)) else value.data.ptr
    return table


@cache
def _function(kernel: str, r: Recipe, dtype: np.dtype, grouped: bool, device: int, layout: str = "linear") -> Any:
    """Return a compiled partial kernel as a CuPy function on a device."""
    names = {"kLayout": f"ScaleLayout::{layout}"} if kernel == "partial_scales" else {}
    source = instantiation(kernel, recipe_struct(r), Input=TYPES[dtype], **names)
    return loader.function(source, f"{'grouped_' * grouped}{kernel}_kernel", device)


def launch(kernel: str, r: Recipe, dtype: np.dtype, table: np.ndarray, work: int, device: int) -> None:
    """Launch a partial kernel for one matrix on the current stream, without waiting for it."""
    plain = table.view(np.dtype((np.void, table.itemsize)))  # CuPy passes raw bytes faster, see geometry.Launch
    _function(kernel, r, dtype, False, device)((grid(_ceil_div(work, THREADS), device, PER_SM),), (THREADS,), (plain,))


def prepare(
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
    function = _function(kernel, r, dtype, True, device, layout)
    return prepare_group(function, table, np.ones(len(table), bool), piece_counts(RUN * work, device), held)


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
    table = arguments("partial_amax", values=x, block_amax=block_amax, start=start, end=end, rows=M, columns=K)
    launch("partial_amax", r, x.dtype, table, last - first, x.device.id)


def factor_rows(start: int, end: int, shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """Return the range (first, last) of the rows of blocks that contain the elements [start, end) of a matrix."""
    K = shape[1]
    return start // K // r.block_rows, _ceil_div(_ceil_div(end, K), r.block_rows)


def cast_shard(
    x: Any, packed: Any, block_amax: Any, tensor_amax: Any, factors: Any, shape: tuple[int, int], start: int, r: Recipe
) -> None:
    """Write the codes of a shard into `packed`, the packed codes of the whole matrix, and change no other code."""
    M, K = shape
    end, device = start + x.size, x.device.id
    first, last = factor_rows(start, end, shape, r)
    wide = K // r.block_size
    amaxes = {"block_amax": block_amax, "tensor_amax": 0 if tensor_amax is None else tensor_amax}
    rows = min(last * r.block_rows, M) - first * r.block_rows
    table = arguments("partial_scales", **amaxes, factors=factors, rows=rows, columns=K, block_at=first * wide)
    launch("partial_scales", r, x.dtype, table, (last - first) * wide, device)
    places = {"start": start, "end": end, "columns": K, "factor_at": -first * wide}
    pointers = {"values": x, "packed": packed, "factors": factors, "tensor_amax": amaxes["tensor_amax"]}
    table = arguments("partial_cast", **pointers, **places)
    launch("partial_cast", r, x.dtype, table, run_count(start, end), device)
