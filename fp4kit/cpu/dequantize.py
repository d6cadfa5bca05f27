"""dequantize by look-up: the specification makes the values of all codes under all scales, and the library takes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cpu.keys import WIDTH, not_decoded
from fp4kit.cpu.matrix import UNIT
from fp4kit.cpu.native import ELEMENTS_PER_CALL, DecodeCall, functions, threads_for
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference import dequantize as specification
from fp4kit.reference.implied import stored_tensor_scale
from fp4kit.reference.scaling import TensorScale

_SCALES = 256  # codes of a block scale
_ONE = np.float32(1).tobytes()


def check_recipe(r: Recipe) -> None:
    """Raise Declined for one that needs a table for each of many rows or blocks."""
    functions()
    if (reason := not_decoded(r)) is not None:
        raise Declined(f"{r.id} has {reason}")


@np.errstate(all="ignore")
def dequantize_matrix(
    packed: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale, out: np.ndarray
) -> None:
    """reference.dequantize.dequantize_matrix."""
    rows = max(part.size for part in map(np.asarray, tensor))
    if not _is_worth_tables(recipe, out.size // rows):
        specification.dequantize_matrix(packed, scales, recipe, tensor, out)
        return
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


def _is_worth_tables(r: Recipe, elements: int) -> bool:
    """Whether a table for so many elements costs less than their values. Without a tensor scale, one is made for all calls."""
    return r.tensor_scaling == "none" or elements >= 2 * _entries(r) * (1 if r.scale is None else _SCALES)


def _entries(r: Recipe) -> int:
    return 1 << r.element.packing.stored_bits


@lru_cache(16)
@np.errstate(all="ignore")
def _table(r: Recipe, dtype: np.dtype, tensor: tuple[bytes, ...]) -> np.ndarray:
    """Values (scale codes, element codes), (1, element codes) without block scales, under a tensor scale given by its bytes."""
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


@lru_cache(64)
@np.errstate(all="ignore")
def _stored(r: Recipe, dtype: np.dtype, scale: bytes, amax: bytes | None) -> TensorScale:
    """The tensor scale of a Quantized, whose scale and amax are given by their bytes."""
    known = None if amax is None else np.frombuffer(amax, np.float32)
    return stored_tensor_scale(np.frombuffer(scale, np.float32), known, r, dtype)


def is_worth_preparing(q: Quantized) -> bool:
    """Whether calls like dequantize(q) are quicker by tables that each needs of its own."""
    return _is_worth_tables(q.recipe, q.packed.size * q.recipe.element.packing.codes)


def table_of(q: Quantized, dtype: np.dtype) -> np.ndarray:
    """The table of a Quantized with at most one tensor scale."""
    if q.tensor_scale is None:
        return _table(q.recipe, dtype, (_ONE,) * 3)
    amax = None if q.tensor_amax is None else q.tensor_amax.tobytes()
    tensor = _stored(q.recipe, q.dtype, q.tensor_scale.tobytes(), amax)
    return _table(q.recipe, dtype, tuple(np.float32(part).tobytes() for part in tensor))


def decode_call(shape: tuple[int, int], r: Recipe, packed_step: int, scales_step: int | None, itemsize: int) -> DecodeCall:
    """A call for a contiguous matrix of values, without addresses. scales_step: None without block scales."""
    M, K = shape
    block = K if scales_step is None else r.block_size
    width = max(min(max(WIDTH // block, 1) * block, K), 1)
    four = int(r.element.packing.codes == 2)
    return DecodeCall(
        None, None, None, 0, None, M, K, packed_step, scales_step or 0, max(UNIT // width, 1), width, itemsize, four, block, 1
    )


def _look_up(packed: np.ndarray, scales: np.ndarray | None, r: Recipe, table: np.ndarray, out: np.ndarray) -> None:
    """Values of a matrix; table: of all rows, or (no block scales) of each."""
    M, K = out.shape
    step = max(ELEMENTS_PER_CALL // max(K, 1), 1)
    own = scales is None and len(table) > 1
    for first in range(0, M, step):
        cut = slice(first, min(first + step, M))
        codes, values, linear = packed[cut], out[cut], None if scales is None else scales[cut]
        call = decode_call(values.shape, r, codes.strides[0], None if linear is None else linear.strides[0], out.itemsize)
        call.table_step = table.strides[0] if own else 0
        rows = table[cut] if own else table
        addresses = (None if a is None else a.ctypes.data for a in (codes, linear, rows, values))
        functions().fp4kit_dequantize(ctypes.byref(call), *addresses, threads_for(values.size))
