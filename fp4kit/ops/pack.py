"""pack and unpack: 4-bit codes, one or two a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.interop import as_array


def pack(codes: Any) -> np.ndarray:
    """4-bit codes, two a byte: uint8 (..., K) with values below 16 -> uint8 (..., K/2), element 2j in the low nibble.

    Raises ValueError for an odd K, a 0-d array or a code above 15; TypeError for another dtype. Inverse: unpack.
    """
    array = _bytes("pack", codes)
    if array.size and array.max() > 15:
        raise ValueError(f"pack: the largest code is {array.max()}; 4-bit codes are 0 to 15")
    return layouts.pack(array)


def unpack(packed: Any) -> np.ndarray:
    """4-bit codes, one a byte: uint8 (..., K/2) -> uint8 (..., K). Inverse of pack; raises as pack does."""
    return layouts.unpack(_bytes("unpack", packed))


def _bytes(op: str, array: Any) -> np.ndarray:
    array = as_array(array, f"{op}: codes")
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: codes are {array.dtype}; needs uint8")
    if array.ndim == 0:
        raise ValueError(f"{op}: codes are 0-d; needs at least one axis")
    return array
