"""Launcher of the amax of columns: from matrices as they lie, without a transposed copy."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, aligned, grid

_COLUMNS = np.dtype(
    [("x", "u8"), ("amax", "u8")] + [(name, "i8") for name in ("matrices", "rows", "columns", "lanes", "height")]
)
_WARP = 32
_ROWS = 16  # of a thread: enough loads under way, and few meetings of its stretch with others


@cache
def _function(dtype: np.dtype, whole: bool, device: int) -> Any:
    source = instantiation("amax_columns", Input=TYPES[dtype], kAligned=whole)
    return loader.function(source, "amax_columns_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(dtype: np.dtype, whole: bool, shape: tuple[int, int, int], device: int) -> Launch:
    matrices, rows, columns = shape
    width = 16 // dtype.itemsize if whole else 1  # columns of a thread
    lanes = min(1 << (-(-columns // width) - 1).bit_length(), _WARP)
    height = THREADS // lanes * _ROWS
    items = matrices * -(-rows // height) * -(-columns // (lanes * width))
    return Launch(_function(dtype, whole, device), grid(items, device, UNLIMITED), _COLUMNS, *shape, lanes, height)


def amax_columns(x: Any) -> Any:
    """Largest magnitude of each column of contiguous matrices (B, M, K): float32 (B, K), NaN where a column has one."""
    matrices, _, columns = x.shape
    out = imports.cupy().zeros((matrices, columns), np.float32)
    if x.size:
        launch = _launch(x.dtype, aligned(x, columns * x.dtype.itemsize), x.shape, x.device.id)
        launch(x.data.ptr, out.data.ptr)
    return out
