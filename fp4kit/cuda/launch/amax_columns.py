"""Launch amax_columns.cu, which computes the largest magnitude per matrix column without a transposed copy."""

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
_WARP = 32  # threads per warp
_ROWS = 16  # rows per thread: many enough for several loads at a time and for few atomic updates per column


@cache
def _function(dtype: np.dtype, aligned_runs: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    source = instantiation("amax_columns", Input=TYPES[dtype], kAligned=aligned_runs)
    return loader.function(source, "amax_columns_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(dtype: np.dtype, aligned_runs: bool, shape: tuple[int, int, int], device: int) -> Launch:
    """Return the prepared launch of amax_columns.cu for a stack of matrices of the shape (B, M, K)."""
    matrices, rows, columns = shape
    width = 16 // dtype.itemsize if aligned_runs else 1  # columns per thread
    lanes = min(1 << (-(-columns // width) - 1).bit_length(), _WARP)
    height = THREADS // lanes * _ROWS
    items = matrices * -(-rows // height) * -(-columns // (lanes * width))
    return Launch(
        _function(dtype, aligned_runs, device), grid(items, device, UNLIMITED), _COLUMNS, *shape, lanes, height
    )


def amax_columns(x: Any) -> Any:
    """Return the largest magnitude in each column of contiguous matrices x (B, M, K): float32 (B, K)."""
    matrices, _, columns = x.shape
    out = imports.cupy().zeros((matrices, columns), np.float32)
    if x.size:
        launch = _launch(x.dtype, aligned(x, columns * x.dtype.itemsize), x.shape, x.device.id)
        launch(x.data.ptr, out.data.ptr)
    return out
