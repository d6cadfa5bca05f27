"""Pack and unpack codes: two 4-bit codes share a byte, the first code in the low nibble."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.formats import Packing


def pack(codes: Any) -> Any:
    """Pack 4-bit codes, two per byte.

    Code 2j goes to the low nibble of byte j, and code 2j + 1 to the high nibble. fp4kit.pack does the same for arrays
    of any library.

    Args:
        codes: uint8 (..., K), a NumPy or CuPy array with one code below 16 per byte. K is even. Codes are not checked.

    Returns:
        A new uint8 array (..., K/2).

    Raises:
        TypeError: codes are not a NumPy or CuPy array of uint8.
        ValueError: K is odd, or codes are 0-d.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> [hex(byte) for byte in layouts.pack(np.uint8([1, 2, 3, 4]))]
        ['0x21', '0x43']
    """
    check_bytes("pack", codes)
    check_pairs(codes.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the last length of `shape`, the shape of 4-bit codes, is even: two share a byte."""
    if shape[-1] % 2:
        raise ValueError(f"pack: the last axis has length {shape[-1]}; two codes share a byte, so it must be even")


def check_array(op: str, name: str, array: Any) -> None:
    """Raise TypeError unless `array` is a NumPy array or scalar, or a CuPy array."""
    if not isinstance(array, (np.ndarray, np.generic)) and type(array).__module__ != "cupy":
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{op}: {name} are a {kind}; needs an array of NumPy or CuPy")


def check_bytes(op: str, codes: Any, name: str = "codes") -> None:
    """Raise TypeError unless `codes` is a NumPy or CuPy array of uint8, and ValueError if it is 0-d."""
    check_array(op, name, codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"{op}: {name} are {codes.dtype}; needs uint8")
    if not codes.ndim:
        raise ValueError(f"{op}: {name} are 0-d; needs at least one axis")


def unpack(packed: Any) -> Any:
    """Unpack 4-bit codes, two per byte. This is the inverse of pack.

    Args:
        packed: uint8 (..., K/2), a NumPy or CuPy array.

    Returns:
        A new uint8 array (..., K) with one code per byte.

    Raises:
        TypeError: packed is not a NumPy or CuPy array of uint8.
        ValueError: packed is 0-d.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> layouts.unpack(np.uint8([0x21, 0x43])).tolist()
        [1, 2, 3, 4]
    """
    check_bytes("unpack", packed)
    codes = np.empty_like(packed, shape=(*packed.shape[:-1], packed.shape[-1] * 2))
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes


def packed(codes: Any, packing: Packing) -> Any:
    """Return codes as their element format stores them. 4-bit codes are packed into a new array, two per byte.

    Wider codes are stored one per byte, so `codes` itself is returned.

    codes: uint8 (..., K), one code per byte. packing: ElementFormat.packing.
    """
    return codes if packing.codes == 1 else pack(codes)


def unpacked(stored: Any, packing: Packing) -> Any:
    """Return stored codes with one code per byte: the inverse of `packed`.

    Bytes that hold two 4-bit codes are unpacked to a new array. If each byte holds one code, `stored` itself is
    returned.

    stored: uint8, the codes as their element format stores them.
    packing: ElementFormat.packing.
    """
    return stored if packing.codes == 1 else unpack(stored)


def write_codes(out: np.ndarray, codes: np.ndarray, rows: slice, column: int, packing: Packing) -> None:
    """Write a block of codes into `out`, a matrix of stored codes, in place.

    Other codes stay unchanged, even those that share a byte with a written one. Nothing is checked.

    Args:
        out: the matrix, as the element format stores it.
        codes: uint8 (m, n) with n >= 1, one code per byte.
        rows: a slice of the m rows of out to write to.
        column: the index of the first code to write, counted in codes.
        packing: ElementFormat.packing.
    """
    if packing.codes == 1:
        out[rows, column : column + codes.shape[1]] = codes
        return
    if column % 2:  # the first code goes to the high nibble of a byte whose low nibble must not change
        out[rows, column // 2] = out[rows, column // 2] & 0x0F | codes[:, 0] << 4
        codes, column = codes[:, 1:], column + 1
    whole = codes.shape[1] // 2
    out[rows, column // 2 : column // 2 + whole] = pack(codes[:, : 2 * whole])
    if codes.shape[1] % 2:
        byte = column // 2 + whole
        out[rows, byte] = out[rows, byte] & 0xF0 | codes[:, -1]


def contiguous(a: Any) -> Any:
    """Return a NumPy or CuPy array unchanged if it is contiguous, otherwise a contiguous copy."""
    return a if a.flags.c_contiguous else a.copy()
