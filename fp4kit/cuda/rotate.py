"""Launch the kernels that rotate blocks along an axis by a Hadamard transform or by given matrices.
Arrays are reshaped to (outer, length, inner), so that the blocks lie along the middle axis. Signs of -1 or 1 multiply
the elements before the rotation or, for an inverse rotation, the results.

hadamard_rows.cu computes Hadamard transforms of blocks whose elements are neighbors in memory. hadamard_columns.cu
computes Hadamard transforms of other blocks. Both need aligned arrays. rotate.cu does the rest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Rotation
from fp4kit.cuda.launch import address, as_aligned, prepared
from fp4kit.reference.stochastic import hadamard_factor

TILE = 4096  # elements that a thread block of rotate.cu or hadamard_rows.cu takes at a time
COLUMNS_TILE = 8192  # elements that a thread block of hadamard_columns.cu takes at a time
MAX_ROW = 1 << 31  # elements; hadamard_rows.cu takes only rows that are shorter than this


def _takes_hadamard(x: Any, out: Any) -> bool:
    """Return True if hadamard_rows.cu or hadamard_columns.cu can transform x (outer, length, inner) into out."""
    # If inner is 1, both arrays must begin at multiples of 16 bytes, and length must be below MAX_ROW (2^31).
    _, length, inner = x.shape
    if inner == 1:
        return length < MAX_ROW and x.data.ptr % 16 == 0 and out.data.ptr % 16 == 0
    return inner * x.itemsize % 4 == 0 and x.data.ptr % 4 == 0 and out.data.ptr % 4 == 0


def launch_rotate(x: Any, out: Any, size: int, signs: Any, matrices: Any, inverse: bool) -> None:
    """Rotate the blocks along the middle axis of x, and write the results into out, on the current stream."""
    (outer, length, inner), device, has_signs = x.shape, x.device.id, signs is not None
    struct = f"constexpr int kSize = {size};\nconstexpr float kFactor = {float(hadamard_factor(size)).hex()}f;\n"
    if matrices is not None or not _takes_hadamard(x, out):
        lanes = TILE // size
        groups = -(-outer // lanes) if inner == 1 else outer * -(-inner // lanes)
        matrix_step = 0 if matrices is None or len(matrices) == 1 else size * size
        traits = (x.dtype, inner == 1, has_signs, matrices is not None, inverse)
        launch = prepared("rotate", groups * (length // size), (*x.shape, matrix_step), device, traits, struct)
        launch(*map(address, (x, out, signs, as_aligned(matrices))))
        return
    transform_traits = (x.dtype, has_signs, inverse)
    if inner == 1:
        sizes = (outer * length, length)
        launch = prepared("hadamard_rows", -(-outer * length // TILE), sizes, device, transform_traits, struct)
    else:
        tiles = outer * (length // size) * -(-inner * size // COLUMNS_TILE)
        launch = prepared("hadamard_columns", tiles, x.shape, device, transform_traits, struct)
    launch(*map(address, (x, out, signs)))


@lru_cache(64)
def _signs(signs: bytes, device: int) -> Any:
    """Return the signs of a Hadamard transform as a uint8 array on the current device: 1 for negative, 0 for
    positive.
    """
    # The copy is complete when this function returns, because later calls may use the array on other streams.
    cupy = imports.cupy()
    array = cupy.asarray(np.frombuffer(signs, np.uint8))
    cupy.cuda.get_current_stream().synchronize()
    return array


def rotate(r: Rotation) -> Any:
    """Rotate the blocks of the array in a Rotation."""
    cupy, device = imports.cupy(), r.x.device.id
    with imports.making_current(device):
        x = cupy.ascontiguousarray(r.x).reshape(r.shape)
        out = cupy.empty(r.x.shape, r.x.dtype)
        if x.size:
            signs = None if r.signs is None else _signs(r.signs.tobytes(), device)
            matrices = None if r.matrices is None else cupy.asarray(r.matrices)
            launch_rotate(x, out.reshape(r.shape), r.size, signs, matrices, r.inverse)
        return out
