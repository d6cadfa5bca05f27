"""Implement fp4kit.pack and unpack, which store 4-bit codes two per byte or one per byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.ops.engines import run


@returns_in_library
def pack(codes: Any) -> Any:
    """Pack 4-bit codes, two per byte: element 2j in the low nibble, element 2j + 1 in the high nibble.

    Args:
        codes: uint8 (..., K), one code per byte, with values below 16; K is even.

    Returns:
        A new uint8 array (..., K/2), in the library and on the device of codes.

    Raises:
        TypeError: codes are not uint8.
        ValueError: K is odd, codes are 0-d, or a code is above 15. On a GPU, the values of codes are not checked,
            because that would wait for the device; bits above the lowest four are dropped.

    Exact:
        unpack(pack(codes)) equals codes.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.pack(np.uint8([[1, 2, 3, 15]]))
        array([[ 33, 243]], dtype=uint8)
    """
    array = _bytes("pack", codes)
    layouts.check_pairs(array.shape)
    return run("pack", "pack", on_device(array), array)


@returns_in_library
def unpack(packed: Any) -> Any:
    """Unpack 4-bit codes from two per byte to one per byte: the inverse of pack.

    Args:
        packed: uint8 (..., K/2), the first code of a byte in the low nibble.

    Returns:
        A new uint8 array (..., K), in the library and on the device of packed.

    Raises:
        TypeError: packed is not uint8.
        ValueError: packed is 0-d.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.unpack(np.uint8([[0x21, 0xF3]]))
        array([[ 1,  2,  3, 15]], dtype=uint8)
    """
    array = _bytes("unpack", packed)
    return run("unpack", "unpack", on_device(array), array)


def _bytes(op: str, array: Any) -> Any:
    """Return an array of codes, of any library, as a NumPy or CuPy array without a copy."""
    (array,) = import_arrays(op, codes=array)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: codes are {array.dtype}; needs uint8")
    if array.ndim == 0:
        raise ValueError(f"{op}: codes are 0-d; needs at least one axis")
    return array
