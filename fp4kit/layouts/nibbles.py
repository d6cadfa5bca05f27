"""Codes and bytes: two codes of 4 bits share one, the first in the low nibble."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.formats import Packing


def pack(codes: Any) -> Any:
    """uint8 codes (..., K), K even, values below 16 -> (..., K/2) bytes: element 2j in the low nibble, 2j + 1 in the
    high one.
    """
    check_bytes("pack", codes)
    check_pairs(codes.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the last axis of codes is a whole number of bytes."""
    if shape[-1] % 2:
        raise ValueError(f"pack: the last axis has length {shape[-1]}; two codes share a byte, so it must be even")


def check_array(op: str, name: str, array: Any) -> None:
    """Raise TypeError, which begins with op, unless it is an array of NumPy or CuPy, whose functions the layouts
    use.
    """
    if not isinstance(array, (np.ndarray, np.generic)) and type(array).__module__ != "cupy":
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{op}: {name} are a {kind}; needs an array of NumPy or CuPy")


def check_bytes(op: str, codes: Any, name: str = "codes") -> None:
    """Raise TypeError, which begins with op, unless codes are uint8; ValueError unless they have an axis."""
    check_array(op, name, codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"{op}: {name} are {codes.dtype}; needs uint8")
    if not codes.ndim:
        raise ValueError(f"{op}: {name} are 0-d; needs at least one axis")


def unpack(packed: Any) -> Any:
    """(..., K/2) bytes -> uint8 codes (..., K); inverse of pack."""
    check_bytes("unpack", packed)
    codes = np.empty_like(packed, shape=(*packed.shape[:-1], packed.shape[-1] * 2))
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes


def packed(codes: Any, packing: Packing) -> Any:
    """uint8 codes (..., K), one a byte -> bytes as a format packs them (ElementFormat.packing)."""
    return codes if packing.codes == 1 else pack(codes)


def unpacked(stored: Any, packing: Packing) -> Any:
    """Inverse of packed."""
    return stored if packing.codes == 1 else unpack(stored)


def write_codes(out: np.ndarray, codes: np.ndarray, rows: slice, column: int, packing: Packing) -> None:
    """Put codes (m, n) at (rows, column) of a packed matrix, touching no bit of another."""
    if packing.codes == 1:
        out[rows, column : column + codes.shape[1]] = codes
        return
    if column % 2:  # the first element is the high nibble of a byte whose low nibble is not ours
        out[rows, column // 2] = out[rows, column // 2] & 0x0F | codes[:, 0] << 4
        codes, column = codes[:, 1:], column + 1
    whole = codes.shape[1] // 2
    out[rows, column // 2 : column // 2 + whole] = pack(codes[:, : 2 * whole])
    if codes.shape[1] % 2:
        byte = column // 2 + whole
        out[rows, byte] = out[rows, byte] & 0xF0 | codes[:, -1]
