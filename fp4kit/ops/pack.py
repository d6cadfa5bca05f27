"""pack and unpack: 4-bit codes, one or two a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import returns_in_library
from fp4kit.ops.engines import run


@returns_in_library
def pack(codes: Any) -> Any:
    """4-bit codes, two a byte: uint8 (..., K) with values below 16 -> uint8 (..., K/2), element 2j in the low nibble.

    Returns an array where codes are, in their library.
    Raises ValueError for an odd K, a 0-d array or a code above 15; TypeError for another dtype. Inverse: unpack.
    On a GPU, where to look for codes above 15 would be to wait for the device, their high nibble is dropped instead.

    >>> import fp4kit, numpy as np
    >>> fp4kit.pack(np.uint8([[1, 2, 3, 15]]))
    array([[ 33, 243]], dtype=uint8)
    """
    array = _bytes("pack", codes)
    layouts.check_pairs(array.shape)
    return run("pack", "pack", array, array)


@returns_in_library
def unpack(packed: Any) -> Any:
    """4-bit codes, one a byte: uint8 (..., K/2) -> uint8 (..., K). Inverse of pack; returns and raises as pack does.

    >>> import fp4kit, numpy as np
    >>> fp4kit.unpack(np.uint8([[0x21, 0xF3]]))
    array([[ 1,  2,  3, 15]], dtype=uint8)
    """
    array = _bytes("unpack", packed)
    return run("unpack", "unpack", array, array)


def _bytes(op: str, array: Any) -> Any:
    (array,) = import_arrays(op, codes=array)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: codes are {array.dtype}; needs uint8")
    if array.ndim == 0:
        raise ValueError(f"{op}: codes are 0-d; needs at least one axis")
    return array
