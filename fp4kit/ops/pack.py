"""pack and unpack: 4-bit codes, one or two a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.cuda import loader, pack_codes
from fp4kit.ops.prepare import import_arrays


def pack(codes: Any) -> Any:
    """4-bit codes, two a byte: uint8 (..., K) with values below 16 -> uint8 (..., K/2), element 2j in the low nibble.

    Returns an array where codes are: NumPy, or CuPy on a GPU.
    Raises ValueError for an odd K, a 0-d array or a code above 15; TypeError for another dtype. Inverse: unpack.
    On a GPU, where to look for codes above 15 would be to wait for the device, their high nibble is dropped instead.
    """
    array = _bytes("pack", codes)
    if not isinstance(array, np.ndarray):
        layouts.check_pairs(array.shape)
        return _on_device(pack_codes.pack, array, (*array.shape[:-1], array.shape[-1] // 2))
    if array.size and array.max() > 15:
        raise ValueError(f"pack: the largest code is {array.max()}; 4-bit codes are 0 to 15")
    return layouts.pack(array)


def unpack(packed: Any) -> Any:
    """4-bit codes, one a byte: uint8 (..., K/2) -> uint8 (..., K). Inverse of pack; returns and raises as pack does."""
    array = _bytes("unpack", packed)
    if not isinstance(array, np.ndarray):
        return _on_device(pack_codes.unpack, array, (*array.shape[:-1], 2 * array.shape[-1]))
    return layouts.unpack(array)


def _on_device(launch: Any, array: Any, shape: tuple[int, ...]) -> Any:
    cupy = loader.cupy()
    with cupy.cuda.Device(array.device.id):
        out = cupy.empty(shape, np.uint8)
        if out.size:
            launch(cupy.ascontiguousarray(array), out)
        return out


def _bytes(op: str, array: Any) -> Any:
    (array,) = import_arrays(op, codes=array)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: codes are {array.dtype}; needs uint8")
    if array.ndim == 0:
        raise ValueError(f"{op}: codes are 0-d; needs at least one axis")
    return array
