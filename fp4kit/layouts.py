"""Layouts of codes and scales: nibble order, scale swizzles, padding. Index maps, no arithmetic on values.

Scale (r, c) of an (R, C) array of block scales, tiled_columns = ceil(C / 4), lies at byte offset

    linear          r * C + c
    swizzled_128x4  ((r // 128) * tiled_columns + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    swizzled_8x4    ((r // 8) * tiled_columns + c // 4) * 32 + (r % 8) * 4 + c % 4

Rows are padded to 128 or 8, columns to 4, with zeros. Sources: cuBLAS block scaling factor layout (128x4); FlashInfer SfLayout.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from fp4kit.formats import Packing

SCALE_LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8}
_TILE_COLUMNS = 4


def _ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def check_layout(op: str, layout: str) -> None:
    """Raise ValueError, which begins with op, unless layout is one of SCALE_LAYOUTS."""
    if layout not in SCALE_LAYOUTS:
        raise ValueError(f"{op}: scale_layout is {layout!r}; needs one of {', '.join(SCALE_LAYOUTS)}")


def tile_rows(layout: str) -> int:
    """Rows of scales whose bytes lie together in a layout: 1, 128 or 8."""
    return _TILE_ROWS.get(layout, 1)


def padded_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of (..., R, C) scales in a layout: R padded to 128 or 8, C to 4; unchanged for "linear"."""
    check_layout("padded_shape", layout)
    if layout == "linear":
        return tuple(shape)
    if len(shape) < 2:
        raise ValueError(f"padded_shape: shape is {tuple(shape)}; {layout} needs (..., R, C), the rows and columns of a matrix")
    *lead, R, C = shape
    return (*lead, _ceil_to(R, _TILE_ROWS[layout]), _ceil_to(C, _TILE_COLUMNS))


def swizzle_scales(scales: Any, layout: str) -> Any:
    """(..., R, C) linear scales -> the same bytes in `layout`, shape padded_shape; each (R, C) matrix by itself, padding zero."""
    padded = padded_shape(scales.shape, layout)
    if layout == "linear":
        return scales
    *lead, R, C = padded
    full = np.zeros_like(scales, shape=padded)
    full[..., : scales.shape[-2], : scales.shape[-1]] = scales
    if layout == "swizzled_8x4":
        tiles = full.reshape(*lead, R // 8, 8, C // 4, 4)
        return np.ascontiguousarray(tiles.swapaxes(-3, -2)).reshape(padded)
    tiles = full.reshape(*lead, R // 128, 4, 32, C // 4, 4)  # row = tile * 128 + quarter * 32 + lane
    order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
    return np.ascontiguousarray(tiles.transpose(order)).reshape(padded)


def unswizzle_scales(scales: Any, layout: str, shape: tuple[int, ...]) -> Any:
    """Inverse of swizzle_scales: bytes in `layout` (any shape of the padded size) -> (..., R, C) = shape, padding dropped."""
    check_size(scales, layout, shape)
    if layout == "linear":
        return scales.reshape(shape)
    *lead, R, C = padded = padded_shape(shape, layout)
    if layout == "swizzled_8x4":
        full = scales.reshape(*lead, R // 8, C // 4, 8, 4).swapaxes(-3, -2).reshape(padded)
    else:
        tiles = scales.reshape(*lead, R // 128, C // 4, 32, 4, 4)
        order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
        full = tiles.transpose(order).reshape(padded)
    return np.ascontiguousarray(full[..., : shape[-2], : shape[-1]])


def check_size(scales: Any, layout: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless scales, of any shape, are as many as those of linear `shape` in a layout, padding included."""
    if min(shape, default=0) < 0:
        raise ValueError(f"unswizzle: shape is {tuple(shape)}; needs lengths >= 0, (..., R, C) of the linear scales")
    padded = padded_shape(shape, layout)
    if scales.size != int(np.prod(padded)):
        raise ValueError(
            f"unswizzle: {tuple(scales.shape)} holds {scales.size} scales; "
            f"{layout} of {tuple(shape)} needs {padded}, padding included"
        )


def pack(codes: Any) -> Any:
    """uint8 codes (..., K), K even, values below 16 -> (..., K/2) bytes: element 2j in the low nibble, 2j + 1 in the high one."""
    _check_bytes("pack", codes)
    check_pairs(codes.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the last axis of codes is a whole number of bytes."""
    if shape[-1] % 2:
        raise ValueError(f"pack: the last axis has length {shape[-1]}; two codes share a byte, so it must be even")


def _check_bytes(op: str, codes: Any) -> None:
    if codes.dtype != np.uint8:
        raise TypeError(f"{op}: codes are {codes.dtype}; needs uint8")
    if not codes.ndim:
        raise ValueError(f"{op}: codes are 0-d; needs at least one axis")


def unpack(packed: Any) -> Any:
    """(..., K/2) bytes -> uint8 codes (..., K); inverse of pack."""
    _check_bytes("unpack", packed)
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


_NO_AXIS = "pad: x is 0-d; needs at least one axis; use x.reshape(1)"


def _natural(op: str, name: str, n: Any, least: int) -> int:
    """n as an int; ValueError for what is none, or less than `least`."""
    try:
        number = operator.index(n)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{op}: {name} is {n!r}; needs an integer of {least} or more")
    return number


def pad(x: Any, multiple: int, axis: int = -1) -> Any:
    """x with zeros appended along axis up to a multiple of `multiple`; x itself where nothing is missing.

    x: NumPy or CuPy array of one dimension or more. Raises ValueError for a multiple that is no positive integer, an axis that x
    does not have; TypeError for a masked array.
    """
    if hasattr(x, "filled"):
        raise TypeError("pad: x is a masked array, whose mask would be lost; pass x.filled(0)")
    multiple = _natural("pad", "multiple", multiple, 1)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"pad: axis {axis} of a {x.ndim}-d array; needs {-x.ndim} to {x.ndim - 1}" if x.ndim else _NO_AXIS)
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths)


def shuffle_rows(M: int, epilogue_tile: int) -> np.ndarray:
    """Row permutation of FlashInfer's shuffle_matrix_a: y = x[shuffle_rows(M, tile)], int64 (M,).

    Inside blocks of B = 32 rows (16 unless epilogue_tile % 128 == 0), new row 8 i + j is old row (B / 8) j + i.
    Raises ValueError unless M is a multiple of B, and epilogue_tile a positive integer.
    """
    M, epilogue_tile = _natural("shuffle_rows", "M", M, 0), _natural("shuffle_rows", "epilogue_tile", epilogue_tile, 1)
    block = 32 if epilogue_tile % 128 == 0 else 16
    if M % block:
        raise ValueError(f"shuffle_rows: M is {M}; needs a multiple of {block} for epilogue tile {epilogue_tile}")
    inside = np.arange(block).reshape(8, -1).T.reshape(-1)
    return (np.arange(0, M, block)[:, None] + inside).reshape(-1)
