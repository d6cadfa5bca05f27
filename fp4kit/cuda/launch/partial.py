"""Launchers of the partial kernels: amaxes of shards, scales from amaxes, codes of shards, codes into matrices.

Each kernel does its work for one matrix, with its arguments by value (`launch`), or for any number of matrices in one
launch, with a table of arguments in device memory (`prepare`). Arrays of all matrices are one buffer, in which each has
its place.
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
RUN = 16  # elements that a thread casts; matrices have rows of whole runs
# thread blocks a multiprocessor: on an H200 (2026-11-21) 16 take 6% longer, one for each piece of work up to 20%
PER_SM = 64


def _arguments(pointers: str, numbers: str) -> np.dtype:
    return np.dtype([(name, "u8") for name in pointers.split()] + [(name, "i8") for name in numbers.split()])


# The kernels' Arguments: see each .cu file.
ARGUMENTS: Mapping[str, np.dtype] = {
    "partial_amax": _arguments("values block_amax tensor_amax", "start end rows columns block_at tensor_at"),
    "partial_scales": _arguments(
        "block_amax tensor_amax factors scales tensor_scale", "rows columns block_at factor_at scale_at tensor_at"
    ),
    "partial_cast": _arguments("values packed factors tensor_amax", "start end columns run_at factor_at tensor_at"),
    "partial_place": _arguments("from to", "start end from_at to_at"),
}


def run_bytes(r: Recipe) -> int:
    """Bytes of the codes of a run."""
    return r.element.packing.length(RUN)


def arguments(kernel: str, count: int = 1, **fields: Any) -> np.ndarray:
    """Arguments of `count` matrices, each field a number, a CuPy array (its address) or one value a matrix; others are
    0.
    """
    table = np.zeros(count, ARGUMENTS[kernel])
    for name, value in fields.items():
        table[name] = value if isinstance(value, (int, np.ndarray)) else value.data.ptr
    return table


@cache
def _function(kernel: str, r: Recipe, dtype: np.dtype, grouped: bool, device: int) -> Any:
    source = instantiation(kernel, recipe_struct(r), Input=TYPES[dtype])
    return loader.function(source, f"{'grouped_' * grouped}{kernel}_kernel", device)


def launch(kernel: str, r: Recipe, dtype: np.dtype, table: np.ndarray, work: int, device: int) -> None:
    """Launch a kernel for one matrix. dtype: of the shards. work: blocks or runs of the matrix, whatever a thread
    takes.
    """
    plain = table.view(np.dtype((np.void, table.itemsize)))  # CuPy is quicker with it: see geometry.Launch
    _function(kernel, r, dtype, False, device)((grid(_ceil_div(work, THREADS), device, PER_SM),), (THREADS,), (plain,))


def prepare(
    kernel: str, r: Recipe, dtype: np.dtype, table: np.ndarray, work: np.ndarray, device: int, *held: Any
) -> GroupedLaunch:
    """The launch of a kernel for all matrices of a table. held: the arrays that the table points to."""
    function = _function(kernel, r, dtype, True, device)
    return prepare_group(function, table, np.ones(len(table), bool), piece_counts(RUN * work, device), held)


# ---- what the kernels take ----


def check_blocks(r: Recipe) -> None:
    """Raise Declined for blocks that the kernels do not have: theirs are those of quantize."""
    kernel_for(LaunchRequest(r, FLOAT32, (r.block_rows, r.block_size)))


def check_matrices(shapes: Sequence[tuple[int, int]], r: Recipe) -> None:
    """Raise Declined for blocks, or sizes of a matrix, that the kernels do not have: they number runs with 31 bits."""
    check_blocks(r)
    for M, K in shapes:
        if M * K >= RUN << 31:
            raise Declined(f"a matrix of {M * K} elements; the CUDA kernels take less than {RUN << 31}")


# ---- one matrix ----


def block_span(start: Any, end: Any, columns: Any, r: Recipe) -> tuple[Any, Any]:
    """First and last + 1 of the blocks that elements [start, end) of a matrix lie in, whole rows of blocks if they are
    tall.
    """
    height, width = r.block or (1, 1)
    if height == 1:
        return start // width, _ceil_div(end, width)
    wide = columns // width
    return start // columns // height * wide, _ceil_div(_ceil_div(end, columns), height) * wide


def run_count(start: Any, end: Any) -> Any:
    """Number of runs that elements [start, end) lie in."""
    return _ceil_div(end, RUN) - start // RUN


def _ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up."""
    return -(-a // b)


def amax_shard(x: Any, block_amax: Any, shape: tuple[int, int], start: int, r: Recipe) -> None:
    """Block amaxes of a shard, contiguous and not empty, into block_amax, which must hold zeros."""
    M, K = shape
    end = start + x.size
    first, last = block_span(start, end, K, r)
    table = arguments("partial_amax", values=x, block_amax=block_amax, start=start, end=end, rows=M, columns=K)
    launch("partial_amax", r, x.dtype, table, last - first, x.device.id)


def factor_rows(start: int, end: int, shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """First and last + 1 of the rows of blocks that elements [start, end) of a matrix lie in."""
    K = shape[1]
    return start // K // r.block_rows, _ceil_div(_ceil_div(end, K), r.block_rows)


def cast_shard(
    x: Any, packed: Any, block_amax: Any, tensor_amax: Any, factors: Any, shape: tuple[int, int], start: int, r: Recipe
) -> None:
    """Codes of a shard, contiguous and not empty, into packed, contiguous and at a multiple of 8 bytes.

    factors: float32, uninitialised, for the rows of blocks that factor_rows names.
    """
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
