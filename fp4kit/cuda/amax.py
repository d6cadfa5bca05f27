"""Compute amaxes of CuPy arrays: per tensor, row, block or column.
AmaxOperands are the first three arguments of matrix.amax: an array, which of its elements count ("all", "no_nan" or
"finite"), and whether each row has its own amax. Functions that return them let groups.py compute many amaxes in one
launch. A sign mask is an int whose bit i is 1 if a Hadamard transform first negates element i of each 16.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda import matrix
from fp4kit.cuda.launch import THREADS, Launch, aligned, prepared
from fp4kit.cuda.shards import amax_shard, check_blocks
from fp4kit.quantized.container import tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import has_tall_scales
from fp4kit.reference.stochastic import HADAMARD_BLOCK

AmaxOperands = tuple[Any, str, bool]  # (array, elements that count, whether each row has its own amax)
# Maps the amax_nan of a recipe to the elements that count for the amax of a row or block. Infinity counts for these
# amaxes even if the recipe's tensor amax counts only finite elements.
_COUNTED_BY_ROW = {name: counted.replace("finite", "no_nan") for name, counted in matrix.COUNTED.items()}


def tensor_amax(call: Call, x: Any, columnwise: bool = False) -> Any:
    """Return the tensor amax of a call, on the device."""
    r = call.recipe
    if call.tensor_amax is not None or r.tensor_scaling == "none":
        return call.tensor_amax
    if columnwise and call.mask is not None and x.size:
        return amax_hadamard(x.reshape(-1, x.shape[-1]), matrix.COUNTED[r.amax_nan], call.mask)
    return computed_tensor_amax(x, r, call.mask)


def computed_tensor_amax(x: Any, r: Recipe, mask: int | None = None) -> Any:
    """Compute the tensor amaxes of contiguous x."""
    shape = tensor_amax_shape(x.shape, r)
    if r.levels and x.size and x.shape[-1] % r.tensor_columns:  # the last outer block of a row is incomplete
        blocks, count = x.shape[-1] // r.block_size, r.tensor_columns // r.block_size
        amaxes = imports.cupy().zeros((x.size // x.shape[-1], shape[-1] * count), np.float32)
        amaxes[:, :blocks] = matrix.amax(*block_amax_operands(x, r), mask).reshape(-1, blocks)
        return matrix.amax(amaxes.reshape(-1, count), by_row=True).reshape(shape)
    if not has_tall_scales(r):
        return matrix.amax(*tensor_amax_operands(x, r), mask).reshape(shape)
    rows, blocks = x.shape[-2] if x.ndim > 1 else 1, shape[-1]
    amaxes = _tall_maxima(x, r, mask)
    stretched = imports.cupy().broadcast_to(amaxes[:, :, None], (*amaxes.shape[:2], r.block_rows, blocks))
    per_row = stretched.reshape(len(amaxes), amaxes.shape[1] * r.block_rows, blocks)[:, :rows]
    return imports.cupy().ascontiguousarray(per_row).reshape(shape)


def _tall_maxima(x: Any, r: Recipe, mask: int | None = None) -> Any:
    """Return the amax of each block, for blocks of several rows: float32 (matrices, ceil(M / block rows), K /
    block).
    """
    *lead, M, K = x.shape if x.ndim > 1 else (1, *x.shape)
    B, tall, blocks = prod(lead), -(-M // r.block_rows), K // r.block_size
    per_row = imports.cupy().zeros((B, tall * r.block_rows, blocks), np.float32)
    if x.size:
        per_row[:, :M] = matrix.amax(*block_amax_operands(x, r), mask).reshape(B, M, blocks)
    return amax_columns(per_row.reshape(B * tall, r.block_rows, blocks)).reshape(B, tall, blocks)


def empty_amax(x: Any, r: Recipe) -> Any:
    """Return an uninitialized float32 array into which a kernel will write the tensor amaxes of x."""
    return imports.cupy().empty(tensor_amax_shape(x.shape, r), np.float32)


def tensor_amax_operands(x: Any, r: Recipe) -> AmaxOperands:
    """Return the arguments with which matrix.amax computes the tensor amaxes of contiguous x."""
    if r.tensor_scaling not in ("row", "block"):
        return x, matrix.COUNTED[r.amax_nan], False
    if r.tensor_scaling == "block":
        return x.reshape(x.size // r.tensor_columns, r.tensor_columns), _COUNTED_BY_ROW[r.amax_nan], True
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]), _COUNTED_BY_ROW[r.amax_nan], True


def block_amax_operands(x: Any, r: Recipe) -> AmaxOperands:
    """Return the arguments with which matrix.amax computes the amaxes of blocks of contiguous x."""
    # The last axis of x must consist of whole blocks.
    return x.reshape(x.size // r.block_size, r.block_size), _COUNTED_BY_ROW[r.amax_nan], True


def clip_amax(call: Call) -> Any:
    """Return the clip limit that fake_quantize_backward uses if the caller passes none: a float32 array on the
    device.
    """
    with imports.making_current(call.x.device.id):
        return computed_tensor_amax(imports.cupy().ascontiguousarray(call.moved), call.recipe)


def amax(call: Call) -> Any:
    """Return the amax of each block of call.moved: float32 (..., ceil(M / block rows), K / block)."""
    with imports.making_current(call.x.device.id):
        x = imports.cupy().ascontiguousarray(call.moved)
        if has_tall_scales(call.recipe):
            amaxes = _tall_maxima(x, call.recipe)
            return amaxes.reshape(*x.shape[:-2], *amaxes.shape[1:] if x.ndim > 1 else amaxes.shape[2:])
        if needs_block_kernel(call.recipe):
            return _block_maxima(x, call.recipe)
        rows, shape = amax_operands(call, x)
        return matrix.amax(*rows).reshape(shape)


def needs_block_kernel(r: Recipe) -> bool:
    """Return True if block amaxes need the kernel partial_amax, in which one thread reads a whole block."""
    return r.block is not None and (r.block_rows > 1 or r.amax_nan == "lanes")


def _block_maxima(x: Any, r: Recipe) -> Any:
    """Return the amax of each block of contiguous x (..., M, K): float32 (..., ceil(M / block rows), K / block)."""
    check_blocks(r)
    *lead, M, K = x.shape if x.ndim > 1 else (1, *x.shape)
    out = imports.cupy().zeros((*lead, -(-M // r.block_rows), K // r.block_size), np.float32)
    B = prod(lead) if M % r.block_rows else 1  # if no block crosses matrices, join them to one tall matrix
    if x.size:
        for part, amaxes in zip(x.reshape(B, -1), out.reshape(B, -1), strict=True):
            amax_shard(part, amaxes, (part.size // K, K), 0, r)
    return out if x.ndim > 1 else out[0]


def amax_operands(call: Call, x: Any) -> tuple[AmaxOperands, tuple[int, ...]]:
    """Return (operands, shape) for a call to fp4kit.amax: arguments for matrix.amax, and the result's shape."""
    r = call.recipe
    if r.block is None:
        return tensor_amax_operands(x, r), tensor_amax_shape(x.shape, r)
    return block_amax_operands(x, r), (*x.shape[:-1], x.shape[-1] // r.block_size)


# ---- without a recipe ----


def plain_amax(x: Any, axis: Any) -> Any:
    """Return the largest |x| as a float32 array, for a call to fp4kit.amax without a recipe."""
    with imports.making_current(x.device.id):
        columns = columns_to_reduce(x, axis)
        if columns is not None:
            matrices, shape = columns
            return amax_columns(matrices).reshape(shape)
        rows, shape = rows_to_reduce(x, axis)
        return matrix.amax(rows, by_row=axis is not None).reshape(shape)


def plain_amax_operands(x: Any, axis: Any) -> tuple[AmaxOperands, tuple[int, ...]]:
    """Return (operands, shape) for plain_amax(x, axis): arguments for matrix.amax, and the shape of the
    result.
    """
    rows, shape = rows_to_reduce(x, axis)
    return (rows, "all", axis is not None), shape


def columns_to_reduce(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return (view, shape): x as matrices (B, M, K), to be reduced along M, and the shape of plain_amax's result."""
    reduced = sorted(_axes(x, axis))
    if not reduced or not x.flags.c_contiguous or reduced != [*range(reduced[0], x.ndim - 1)][: len(reduced)]:
        return None
    lead, rest = x.shape[: reduced[0]], x.shape[reduced[-1] + 1 :]
    B, M, K = (prod(part) for part in (lead, x.shape[reduced[0] : reduced[-1] + 1], rest))
    return (x.reshape(B, M, K), lead + rest) if B == 1 or M * K >= 16 * THREADS else None


def _axes(x: Any, axis: Any) -> tuple[int, ...]:
    """Return the axes of x to reduce, as nonnegative ints; () if axis is None. axis: an int or a tuple of ints."""
    if axis is None:
        return ()
    return tuple(range(x.ndim)[a] for a in (axis if isinstance(axis, tuple) else (axis,)))


def rows_to_reduce(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]]:
    """Return (rows, shape): x as contiguous rows (n, m), one row per amax, and the shape of plain_amax's result."""
    # The rows are a view of x if possible, otherwise a copy.
    cupy = imports.cupy()
    if axis is None:
        return cupy.ascontiguousarray(x), ()
    reduced = _axes(x, axis)
    kept = tuple(a for a in range(x.ndim) if a not in reduced)
    shape = tuple(x.shape[a] for a in kept)
    m = prod(x.shape[a] for a in reduced)
    return cupy.ascontiguousarray(x.transpose(*kept, *reduced)).reshape(prod(shape), m), shape


_WARP = 32  # threads per warp
_ROWS = 16  # rows per thread: many enough for several loads at a time and for few atomic updates per column


def amax_columns(x: Any) -> Any:
    """Return the largest magnitude in each column of contiguous matrices x (B, M, K): float32 (B, K)."""
    matrices, rows, columns = x.shape
    out = imports.cupy().zeros((matrices, columns), np.float32)
    if x.size:
        is_aligned = aligned(x, columns * x.dtype.itemsize)
        width = 16 // x.dtype.itemsize if is_aligned else 1  # columns per thread
        lanes = min(1 << (-(-columns // width) - 1).bit_length(), _WARP)
        height = THREADS // lanes * _ROWS
        items = matrices * -(-rows // height) * -(-columns // (lanes * width))
        sizes = (matrices, rows, columns, lanes, height)
        launch = prepared("amax_columns", items, sizes, x.device.id, (x.dtype, is_aligned))
        launch(x.data.ptr, out.data.ptr)
    return out


_WORD = 4  # bytes that a thread loads per row, if they are aligned


def amax_hadamard(x: Any, counted: str, mask: int) -> Any:
    """Return the largest magnitude of a matrix after a Hadamard transform along its columns: float32 ()."""
    # An empty x gives 0. matrix.amax would return the same value for a transposed copy of x with this mask; here
    # x is not copied.
    out = imports.cupy().zeros((), np.float32)
    if x.size:
        hadamard_amax_launch(x, counted, mask)(x.data.ptr, out.data.ptr)
    return out


def hadamard_amax_launch(x: Any, counted: str, mask: int) -> Launch:
    """Return the prepared launch of amax_hadamard."""
    rows, columns = x.shape
    is_aligned = x.data.ptr % _WORD == 0 and columns * x.dtype.itemsize % _WORD == 0
    wide = -(-columns // (THREADS * (_WORD // x.dtype.itemsize if is_aligned else 1)))
    work, traits = rows // HADAMARD_BLOCK * wide, (x.dtype, f"AmaxInput::{counted}", is_aligned)
    return prepared("amax_hadamard", work, (rows, columns), x.device.id, traits, matrix.transform_struct(mask))
