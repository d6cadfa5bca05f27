"""Layouts of codes and scales: nibble order, scale swizzles, padding. Index maps, no arithmetic on values.

Scale (r, c) of an (R, C) array of block scales, tiled_columns = ceil(C / 4), lies at byte offset

    linear          r * C + c
    swizzled_128x4  ((r // 128) * tiled_columns + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    swizzled_8x4    ((r // 8) * tiled_columns + c // 4) * 32 + (r % 8) * 4 + c % 4

Rows are padded to 128 or 8, columns to 4, with zeros. Sources: cuBLAS block scaling factor layout (128x4); FlashInfer SfLayout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SCALE_LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8}
_TILE_COLUMNS = 4


def _ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def check_layout(layout: str) -> None:
    """Raise ValueError unless layout is one of SCALE_LAYOUTS."""
    if layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout: got {layout!r}; needs one of {', '.join(SCALE_LAYOUTS)}")


def padded_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of (..., R, C) scales in a layout: R padded to 128 or 8, C to 4; unchanged for "linear"."""
    check_layout(layout)
    if layout == "linear":
        return tuple(shape)
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
    if layout == "linear":
        return scales
    check_size(scales, layout, shape)
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
    padded = padded_shape(shape, layout)
    if scales.size != int(np.prod(padded)):
        raise ValueError(
            f"unswizzle: {tuple(scales.shape)} holds {scales.size} scales; "
            f"{layout} of {tuple(shape)} needs {padded}, padding included"
        )


def pack(codes: Any) -> Any:
    """uint8 codes (..., K), K even, values below 16 -> (..., K/2) bytes: element 2j in the low nibble, 2j + 1 in the high one."""
    check_pairs(codes.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the last axis of codes is a whole number of bytes."""
    if shape[-1] % 2:
        raise ValueError(f"pack: the last axis has length {shape[-1]}; two codes share a byte, so it must be even")


def unpack(packed: Any) -> Any:
    """(..., K/2) bytes -> uint8 codes (..., K); inverse of pack."""
    codes = np.empty_like(packed, shape=(*packed.shape[:-1], packed.shape[-1] * 2))
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes


def pad(x: Any, multiple: int, axis: int = -1) -> Any:
    """x with zeros appended along axis up to a multiple of `multiple`; x itself where nothing is missing."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths)


def shuffle_rows(M: int, epilogue_tile: int) -> np.ndarray:
    """Row permutation of FlashInfer's shuffle_matrix_a: y = x[shuffle_rows(M, tile)], int64 (M,).

    Inside blocks of B = 32 rows (16 unless epilogue_tile % 128 == 0), new row 8 i + j is old row (B / 8) j + i.
    """
    block = 32 if epilogue_tile % 128 == 0 else 16
    if M % block:
        raise ValueError(f"shuffle_rows: M is {M}; needs a multiple of {block} for epilogue tile {epilogue_tile}")
    inside = np.arange(block).reshape(8, -1).T.reshape(-1)
    return (np.arange(0, M, block)[:, None] + inside).reshape(-1)
