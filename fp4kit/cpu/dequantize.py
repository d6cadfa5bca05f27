"""dequantize by look-up: the specification makes the values of all codes under all scales, and the library takes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cpu.matrix import UNIT, WIDTH
from fp4kit.cpu.native import ELEMENTS_PER_CALL, DecodeCall, library, threads_for
from fp4kit.recipes import Recipe
from fp4kit.reference import dequantize as specification
from fp4kit.reference.scaling import TensorScale

_SCALES = 256  # codes of a block scale


def check_recipe(r: Recipe) -> None:
    """Raise Declined for one that needs a table for each of many rows or blocks."""
    functions, why = library()
    if functions is None:
        raise Declined(f"the compiled engine is not there: {why}")
    if r.tensor_scaling == "block" or (r.tensor_scaling == "row" and r.scale is not None):
        raise Declined(f"the compiled engine has no tables for each {r.tensor_scaling} of {r.id}")


@np.errstate(all="ignore")
def dequantize_matrix(
    packed: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale, out: np.ndarray
) -> None:
    """reference.dequantize.dequantize_matrix."""
    rows = max(part.size for part in map(np.asarray, tensor))
    if rows == 1:
        found = tuple(np.float32(np.reshape(part, -1)[0]).tobytes() for part in tensor)
        _look_up(packed, scales, recipe, _table(recipe, out.dtype, found), out)
        return
    step = max((1 << 16) // _entries(recipe), 1)  # tables of so many rows at a time
    for first in range(0, len(out), step):
        cut = slice(first, first + step)
        part = TensorScale(*(p if p.size == 1 else p.reshape(-1)[cut] for p in map(np.asarray, tensor)))
        codes = np.broadcast_to(np.arange(_entries(recipe), dtype=np.uint8), (len(out[cut]), _entries(recipe)))
        values = specification.dequantize_tile(codes, None, recipe, part.columns(recipe)).astype(out.dtype)
        _look_up(packed[cut], None, recipe, _as_table(values, recipe), out[cut])


def _entries(r: Recipe) -> int:
    return 1 << r.element.packing.stored_bits


@lru_cache(16)
def _table(r: Recipe, dtype: np.dtype, tensor: tuple[bytes, ...]) -> np.ndarray:
    """Values (scale codes, element codes), or (1, element codes) without block scales, under one tensor scale given by its bytes."""
    part = TensorScale(*(np.frombuffer(p, np.float32) for p in tensor)).columns(r)
    if r.scale is None:
        codes, scales = np.arange(_entries(r), dtype=np.uint8)[None], None
    else:
        length = -(-_entries(r) // r.block_size) * r.block_size
        codes = np.broadcast_to((np.arange(length) % _entries(r)).astype(np.uint8), (_SCALES, length))
        scales = np.repeat(np.arange(_SCALES, dtype=np.uint8)[:, None], length // r.block_size, axis=1)
    values = specification.dequantize_tile(codes, scales, r, part)[:, : _entries(r)].astype(dtype)
    return _as_table(values, r)


def _as_table(values: np.ndarray, r: Recipe) -> np.ndarray:
    """Values (rows, codes) as the library has them: those of 4-bit codes by bytes, the lowest of all sixteen first."""
    values = np.ascontiguousarray(values)
    if r.element.packing.codes == 1:
        return values
    planes = values.view(np.uint8).reshape(*values.shape, values.itemsize).swapaxes(1, 2)
    return np.ascontiguousarray(planes).reshape(len(values), -1).view(values.dtype)


def _look_up(packed: np.ndarray, scales: np.ndarray | None, r: Recipe, table: np.ndarray, out: np.ndarray) -> None:
    """Values of a matrix; table: of all rows, or (no block scales) of each."""
    (M, K), four = out.shape, r.element.packing.codes == 2
    block = r.block_size if scales is not None else K
    width = min(max(WIDTH // block, 1) * block, K)
    step = max(ELEMENTS_PER_CALL // max(K, 1), 1)
    for first in range(0, M, step):
        cut = slice(first, min(first + step, M))
        codes, values, linear = packed[cut], out[cut], None if scales is None else scales[cut]
        rows = table[cut] if scales is None and len(table) > 1 else table
        call = DecodeCall(
            codes.ctypes.data, None if linear is None else linear.ctypes.data, rows.ctypes.data,
            table.strides[0] if rows is not table else 0, values.ctypes.data, cut.stop - cut.start, K, codes.strides[0],
            0 if linear is None else linear.strides[0], max(UNIT // max(width, 1), 1), max(width, 1), out.dtype.itemsize, int(four),
            block, threads_for(values.size),
        )  # fmt: skip
        library().functions.fp4kit_decode(ctypes.byref(call))
