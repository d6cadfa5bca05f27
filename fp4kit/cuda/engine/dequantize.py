"""Dequantize CuPy arrays."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cuda.launch.geometry import as_aligned
from fp4kit.cuda.launch.matrix import dequantize_matrix
from fp4kit.cuda.launch.supported import check_formats
from fp4kit.quantized.container import Quantized
from fp4kit.recipes.schema import with_row_blocks
from fp4kit.reference.codec import is_per_expert, part_for_matrix


def dequantize(q: Quantized, dtype: np.dtype, out: Any = None) -> Any:
    """Return the values of q, rounded to dtype: in `out` if given, otherwise in a new array of the shape of q."""
    check_formats(q.recipe)
    cupy = imports.cupy()
    with imports.making_current(q.packed.device.id):
        direct = out is not None and q.axis == len(q.shape) - 1 and out.flags.c_contiguous and out.data.ptr % 16 == 0
        moved: Any = out if direct else cupy.empty(q.moved_shape, dtype)
        if moved.size:
            _dequantize_matrices(q, moved)
        values = cupy.moveaxis(moved, -1, q.axis)
        if out is None:
            return values
        if not direct:
            out[...] = values
        return out


def _dequantize_matrices(q: Quantized, moved: Any) -> None:
    """Write the values of q into `moved`, a contiguous, nonempty array that has the quantized axis last."""
    tensor_arrays = [a if a is None or a.flags.c_contiguous else a.copy() for a in (q.tensor_scale, q.tensor_amax)]
    K, separate = moved.shape[-1], q.scale_layout != "linear" or is_per_expert(q.tensor_scale, q.recipe)
    B = prod(moved.shape[:-2]) if moved.ndim > 2 and separate else 1
    packed, values = as_aligned(q.packed).reshape(B, -1), moved.reshape(B, -1)
    scales = None if q.block_scale is None else as_aligned(q.block_scale).reshape(B, -1)
    recipe = with_row_blocks(q.recipe)
    for i in range(B):
        scale, amax = (part_for_matrix(a, q.recipe, i, (B, moved.size // B // K)) for a in tensor_arrays)
        arrays = (packed[i], None if scales is None else scales[i], recipe, q.scale_layout, scale, amax)
        dequantize_matrix(*arrays, q.dtype, values[i].reshape(-1, K))
