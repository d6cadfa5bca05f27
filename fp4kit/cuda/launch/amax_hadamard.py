"""Launch amax_hadamard.cu, which computes the tensor amax of a matrix after a Hadamard transform along its columns.
A sign mask is an int whose bit i is 1 if the Hadamard transform first negates element i of each 16.

quantize_both and quantize with axis=-2 use this kernel, because it needs no transposed copy.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, Launch, grid
from fp4kit.cuda.launch.matrix import AMAX, transform_struct
from fp4kit.reference.stochastic import HADAMARD_BLOCK

_WORD = 4  # bytes that a thread loads per row, if they are aligned


@cache
def _function(dtype: np.dtype, counted: str, aligned_runs: bool, mask: int, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    struct = transform_struct(mask)
    source = instantiation(
        "amax_hadamard", struct, Input=TYPES[dtype], kCounted=f"AmaxInput::{counted}", kAligned=aligned_runs
    )
    return loader.function(source, "amax_hadamard_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(
    dtype: np.dtype, counted: str, aligned_runs: bool, rows: int, columns: int, mask: int, device: int
) -> Launch:
    """Return the prepared launch of amax_hadamard.cu for a matrix (rows, columns)."""
    wide = -(-columns // (THREADS * (_WORD // dtype.itemsize if aligned_runs else 1)))
    function, patch_rows = _function(dtype, counted, aligned_runs, mask, device), rows // HADAMARD_BLOCK
    return Launch(function, grid(patch_rows * wide, device), AMAX, rows, columns)


def amax_hadamard(x: Any, counted: str, mask: int) -> Any:
    """Return the largest magnitude of a matrix after a Hadamard transform along its columns: float32 ()."""
    # An empty x gives 0. launch.matrix.amax would return the same value for a transposed copy of x with this mask; here
    # x is not copied.
    rows, columns = x.shape
    out = imports.cupy().zeros((), np.float32)
    if x.size:
        aligned_runs = x.data.ptr % _WORD == 0 and columns * x.dtype.itemsize % _WORD == 0
        _launch(x.dtype, counted, aligned_runs, rows, columns, mask, x.device.id)(x.data.ptr, out.data.ptr)
    return out
