"""Launcher of quantize_patch.cu: a matrix along its columns, both ways from one read, or square blocks."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import THREADS, address, aligned, grid
from fp4kit.cuda.launch import WHOLE
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, recipe_struct
from fp4kit.recipes import Recipe

SIDE, SPAN_BYTES = 8, 32  # rows that a thread takes, and how much of them
_POINTERS = ("x", "packed", "scales", "column_packed", "column_scales", "values", "tensor_amax", "tensor_scale")
_ARGUMENTS = np.dtype([(n, "u8") for n in (*_POINTERS, "column_tensor_scale")] + [("rows", "i8"), ("columns", "i8")])
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
def _function(r: Recipe, dtype: np.dtype, whole: bool, layout: str, fake: bool, device: int) -> Any:
    source = instantiation("quantize_patch", recipe_struct(r, layout, fake=fake), Input=TYPES[dtype], kAligned=whole)
    return loader.function(source, "quantize_patch_kernel", device)


def quantize_patch(x: Any, r: Recipe, layout: str, amax: Any, row: Side | None, column: Side | None, values: Any = None) -> None:
    """Quantize a contiguous matrix (M, K), K a multiple of 32 bytes, rowwise, columnwise, or both.

    column: codes (K, M/2) or (K, M) and scales of the transposed matrix, M a multiple of the block. values: instead of codes,
    fake-quantized elements of square blocks.
    """
    rows, columns = x.shape
    whole = aligned(x, columns * x.dtype.itemsize) and (values is None or values.data.ptr % 16 == 0)
    device = x.device.id
    call = _function(r, x.dtype, whole, layout, values is not None, device)
    none = Side(None, None, None)
    (packed, scales, scale), (column_packed, column_scales, column_scale) = row or none, column or none
    arrays = (x, packed, scales, column_packed, column_scales, values, amax, scale, column_scale)
    arguments = np.array([(*map(address, arrays), rows, columns)], _ARGUMENTS)
    tall = r.block_size // SIDE  # patches above each other in a warp
    tile = (THREADS // 32 * tall * SIDE, 32 // tall * (SPAN_BYTES // x.dtype.itemsize))
    call((grid(-(-rows // tile[0]) * -(-columns // tile[1]), device, WHOLE),), (THREADS,), (arguments,))
