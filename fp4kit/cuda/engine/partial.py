"""Compute the amaxes and codes of a shard (the part of a matrix that one process holds) that is a CuPy array."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import amax_shape
from fp4kit.cuda.launch import matrix, partial
from fp4kit.recipes import Recipe


def partial_amax(shard: Any, shape: tuple[int, int], start: int, r: Recipe) -> Any:
    """Return the amax of each block of a matrix, counting only the elements of one shard."""
    partial.check_matrices([shape], r)
    cupy = imports.cupy()
    with imports.making_current(shard.device.id):
        out = cupy.zeros(amax_shape(shape, r), np.float32)
        if shard.size:
            partial.amax_shard(cupy.ascontiguousarray(shard), out, shape, start, r)
        return out


def partial_cast(
    shard: Any, out: Any, block_amax: Any, shape: tuple[int, int], start: int, r: Recipe, amax: Any
) -> None:
    """Write the codes of a shard into out, the packed codes of a matrix, and change no other code of out."""
    partial.check_matrices([shape], r)
    cupy = imports.cupy()
    with imports.making_current(shard.device.id):
        block_amax = cupy.ascontiguousarray(block_amax)
        whole_amax = matrix.amax(block_amax) if r.tensor_scaling != "none" and amax is None else amax
        if not shard.size:
            return
        first, last = partial.factor_rows(start, start + shard.size, shape, r)
        factors = cupy.empty((last - first, block_amax.shape[1]), np.float32)
        direct = out.flags.c_contiguous and out.data.ptr % 8 == 0
        target = out if direct else out.copy(order="C")
        partial.cast_shard(cupy.ascontiguousarray(shard), target, block_amax, whole_amax, factors, shape, start, r)
        if not direct:
            out[...] = target
