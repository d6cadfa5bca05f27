"""Launcher of quantize_patch.cu: a matrix along its columns, both ways from one read, or square blocks."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import Launch, address, aligned, grid
from fp4kit.cuda.launch import LAUNCHES, WHOLE
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, recipe_struct
from fp4kit.recipes import Recipe

SPAN_BYTES = 32  # what rows are multiples of
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 128, 128, 256  # of a thread block: columns of square blocks, bytes of a row of others
BAND_SHIFT = 3  # bands of 2^3 tiles: as fast as 2^4, both 4% faster than rows of tiles (both ways, H200, 2026-11-21)
_POINTERS = ("x", "packed", "scales", "column_packed", "column_scales", "values", "tensor_amax", "tensor_scale")
_SIZES = [(n, "i8") for n in ("rows", "columns", "shift")]
_ARGUMENTS = np.dtype([(n, "u8") for n in (*_POINTERS, "column_tensor_scale")] + _SIZES)
_BLOCKS = ((1, 16), (1, 32), (16, 16), (32, 32))


class Side(NamedTuple):
    """The arrays of one direction: codes, block scales, and where the tensor scale goes (None without one)."""

    packed: Any
    scales: Any
    tensor_scale: Any


def supports(r: Recipe) -> bool:
    """Whether the kernel has a recipe: float elements in blocks under one tensor scale or none, one scale a block."""
    one_scale = r.tensor_scaling in ("none", "tensor") and r.four_over_six is None
    return r.block in _BLOCKS and one_scale and not r.element.is_integer


@cache
def _function(r: Recipe, dtype: np.dtype, whole: bool, layout: str, fake: bool, mask: int | None, device: int) -> Any:
    struct = recipe_struct(r, layout, fake=fake, sign_mask=mask)
    source = instantiation("quantize_patch", struct, Input=TYPES[dtype], kAligned=whole)
    return loader.function(source, "quantize_patch_kernel", device)


@lru_cache(LAUNCHES)
def _launch(
    r: Recipe, dtype: np.dtype, shape: tuple[int, int], whole: bool, layout: str, fake: bool, mask: int | None, device: int
) -> Launch:
    rows, columns = shape
    tall, wide = -(-rows // TILE_ROWS), -(-columns // (TILE_COLUMNS if r.block_rows > 1 else TILE_BYTES // dtype.itemsize))
    shift = min((tall - 1).bit_length(), BAND_SHIFT)
    blocks = wide * ((tall + (1 << shift) - 1 >> shift) << shift)
    function = _function(r, dtype, whole, layout, fake, mask, device)
    return Launch(function, grid(blocks, device, WHOLE), _ARGUMENTS, rows, columns, shift)


def quantize_patch(
    x: Any, r: Recipe, layout: str, amax: Any, row: Side | None, column: Side | None, values: Any = None, mask: int | None = None
) -> None:
    """Quantize a contiguous matrix (M, K), K a multiple of 32 bytes, rowwise, columnwise, or both.

    column: codes (K, M/2) or (K, M) and scales of the transposed matrix, M a multiple of the block. values: instead of codes,
    fake-quantized elements of square blocks. mask: sign mask of a Hadamard transform of the columns, in blocks of 1x16.
    """
    whole = aligned(x, x.shape[1] * x.dtype.itemsize) and (values is None or values.data.ptr % 16 == 0)
    none = Side(None, None, None)
    (packed, scales, scale), (column_packed, column_scales, column_scale) = row or none, column or none
    arrays = (x, packed, scales, column_packed, column_scales, values, amax, scale, column_scale)
    launch = _launch(r, x.dtype, x.shape, whole, layout, values is not None, mask, x.device.id)
    launch(*map(address, arrays))
