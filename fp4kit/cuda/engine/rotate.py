"""Rotate blocks of CuPy arrays along an axis, by a Hadamard transform or by given matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Rotation
from fp4kit.cuda.launch import rotate as launcher


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
            launcher.rotate(x, out.reshape(r.shape), r.size, signs, matrices, r.inverse)
        return out
