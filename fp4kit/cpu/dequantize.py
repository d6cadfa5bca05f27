"""Decode (dequantize) matrices by the compiled library.
The library marks the tiles (parts of a matrix) that it cannot decode; the specification (fp4kit.reference) decodes
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cpu.coverage import decode_key
from fp4kit.cpu.encode import INPUTS, TILE_ELEMENTS, Tiles, blocks_of, bytes_of
from fp4kit.cpu.library import DecodeCall, address, functions, threads_for
from fp4kit.cpu.own_format import tables_of
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import decoding
from fp4kit.reference import dequantize as specification
from fp4kit.reference.tensor_rules import TensorScale, stored_tensor_scale

# With at least this many blocks, one table of values per scale code (256 tables) costs less than one table per block.
TABLES_FROM = 256


@lru_cache(256)
def decoder_of(r: Recipe, dtype: np.dtype) -> int:
    """Return the library's index of the compiled decoder for a recipe and an output dtype."""
    if r.is_custom:
        functions()
        return -1
    found = functions().fp4kit_decoder(decode_key(decoding(r, dtype)).encode())
    if found < 0:
        raise Declined(f"the CPU engine has no decoder for {r.id}")
    return found


def are_looked_up(r: Recipe) -> bool:
    """Return True if the library decodes large matrices of a recipe by look-ups in tables, one table per scale code."""
    return r.element.bits == 4 and r.scale is not None and r.tensor_scaling in ("none", "tensor")


def dequantize_matrix(
    packed: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale, out: np.ndarray
) -> None:
    """Decode the packed codes of a matrix, and write the values into out (M, K), rounded to the dtype of out."""
    tensor, packed = _spread(tensor.columns(recipe)), _in_rows(packed)
    scales = None if scales is None else _in_rows(scales)
    for rows, columns in _decode(packed, scales, recipe, tensor, out):
        blocks = blocks_of(columns, recipe)
        specification.dequantize_matrix(
            packed[rows, bytes_of(columns, recipe)],
            None if scales is None else scales[rows, blocks],
            recipe,
            tensor.cut(rows, blocks),
            out[rows, columns],
        )


def _in_rows(bytes_: np.ndarray) -> np.ndarray:
    """Return an array of bytes whose rows are contiguous, as the library needs: the array itself, or else a copy."""
    return bytes_ if bytes_.strides[-1] == 1 else np.ascontiguousarray(bytes_)


def _spread(tensor: TensorScale) -> TensorScale:
    """Return a TensorScale whose parts are contiguous float32 arrays of one shape, to which they are broadcast."""
    return TensorScale(*(np.ascontiguousarray(part, np.float32) for part in np.broadcast_arrays(*tensor)))


def _decode(
    packed: np.ndarray, scales: np.ndarray | None, r: Recipe, tensor: TensorScale, out: np.ndarray
) -> Iterator[tuple[slice, slice]]:
    """Decode a matrix by the library into out."""
    # The caller must decode these tiles by the specification.
    steps = out.strides[0] // out.itemsize, packed.strides[0], 0 if scales is None else scales.strides[0]
    call = decode_call(out.shape, out.dtype, r, *steps)
    tiles, own = (
        Tiles(call.rows, call.columns, call.tile_rows, call.tile_columns),
        tables_of(r) if r.is_custom else None,
    )
    for rows, columns in tiles.slabs():
        needs_fallback, blocks = np.zeros(tiles.count_tiles(rows, columns), np.uint8), blocks_of(columns, r)
        cut, codes, values = tensor.cut(rows, blocks), packed[rows, bytes_of(columns, r)], out[rows, columns]
        _set_tensor(call, cut)
        call.packed, call.scales = address(codes), address(None if scales is None else scales[rows, blocks])
        call.out, call.needs_fallback = address(values), address(needs_fallback)
        (call.rows, call.columns), call.threads = values.shape, threads_for(values.size, are_looked_up(r))
        if own is None:
            functions().fp4kit_decode(ctypes.byref(call))
        else:
            functions().fp4kit_decode_own(ctypes.byref(call), ctypes.byref(own.struct))
        yield from tiles.marked(rows, columns, needs_fallback)


def _set_tensor(call: DecodeCall, tensor: TensorScale) -> None:
    """Set the fields of a DecodeCall for its tensor scales."""
    call.encode, call.decode, call.amax = map(address, tensor)
    rows, blocks = tensor.decode.shape
    row_step, block_step = (step // 4 for step in tensor.decode.strides)
    call.row_step, call.block_step = row_step if rows > 1 else 0, block_step if blocks > 1 else 0


@lru_cache(64)
@np.errstate(all="ignore")
def _stored(r: Recipe, dtype: np.dtype, scale: bytes, amax: bytes | None) -> np.ndarray:
    """Return the tensor scales of a Quantized as one float32 array: encode scales, then decode scales, then amaxes."""
    given = None if amax is None else np.frombuffer(amax, np.float32)
    found = stored_tensor_scale(np.frombuffer(scale, np.float32), given, r, dtype)
    return np.concatenate([np.ravel(part) for part in np.broadcast_arrays(*found)], dtype=np.float32)


_ONES = np.ones(3, np.float32)


def tensors_of(q: Quantized, to_bytes: Callable[[Any], bytes] = np.ndarray.tobytes) -> np.ndarray:
    """Return the tensor scales of a Quantized as one float32 array: encode scales, then decode scales, then amaxes."""
    # The array is shared with later calls and must not be changed.
    if q.tensor_scale is None:
        return _ONES
    amax = None if q.tensor_amax is None else to_bytes(q.tensor_amax)
    return _stored(q.recipe, q.dtype, to_bytes(q.tensor_scale), amax)


def decode_call(
    shape: tuple[int, int], dtype: np.dtype, r: Recipe, out_step: int, packed_step: int, scales_step: int
) -> DecodeCall:
    """Return a prototype: a DecodeCall without addresses, for a matrix of values under one tensor scale."""
    M, K = shape
    block = r.block_size if r.block else max(K, 1)
    width = max(min(max(TILE_ELEMENTS // block, 1) * block, K), 1)
    return DecodeCall(
        rows=M,
        columns=K,
        packed_step=packed_step,
        scales_step=scales_step,
        out_step=out_step,
        tile_rows=max(TILE_ELEMENTS // width, 1),
        tile_columns=width,
        tables_from=TABLES_FROM,
        decoder=decoder_of(r, dtype),
        output=INPUTS[dtype],
        block=block,
    )
