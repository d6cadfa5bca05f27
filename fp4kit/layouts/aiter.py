"""Convert between linear order and the order in which aiter's MXFP4 kernels (AMD) read codes and scales.

In an (R, C) array of E8M0 block scales, with R padded to a multiple of 256 and C to a multiple of 8, scale (r, c) lies
at byte offset

    (((((r // 32) * (C // 8) + c // 8) * 4 + c % 4) * 16 + r % 16) * 2 + c % 8 // 4) * 2 + r % 32 // 16

In an (N, K / 2) array of packed codes, byte (n, k) lies at byte offset

    (((n // 16) * (K / 64) + k // 32) * 2 + k % 32 // 16) * 256 + (n % 16) * 16 + k % 16

Source: aiter utility/fp4_utils.py e8m0_shuffle and ops/shuffle.py shuffle_weight with layout (16, 16). These functions
were read, not run.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit.arguments import as_shape
from fp4kit.layouts import check_bytes, contiguous

_ROWS, _COLUMNS = 256, 8  # scales are padded to multiples of these
_SCALE_TILE = (2, 16, 2, 4)  # r % 32 // 16, r % 16, c % 8 // 4, c % 4
_CODE_ROWS, _CODE_BYTES = 16, 32  # codes come in tiles of 16 rows of 32 bytes


def padded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of shuffled scales: R padded to a multiple of 256, and C to a multiple of 8.

    Args:
        shape: the shape (..., R, C) of the scales in linear order.

    Raises:
        TypeError: shape is not a sequence of ints.
        ValueError: shape has fewer than two axes, or a negative length.

    Examples:
        >>> from fp4kit.layouts import aiter
        >>> aiter.padded_shape((100, 6))
        (256, 8)
    """
    return _padded("aiter.padded_shape", as_shape("aiter.padded_shape", shape))


def _padded(op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return padded_shape(shape). Raise ValueError, with a message that begins with op, for fewer than two axes."""
    if len(shape) < 2:
        raise ValueError(f"{op}: the scales have shape {shape}; needs (..., R, C), the rows and columns of a matrix")
    *lead, R, C = shape
    return (*lead, -(-R // _ROWS) * _ROWS, -(-C // _COLUMNS) * _COLUMNS)


def shuffle_scales(scales: Any) -> Any:
    """Rearrange linear block scales to the order that aiter's MXFP4 kernels read.

    The result equals e8m0_shuffle of aiter, except for the padding, which aiter leaves uninitialized.

    Args:
        scales: a NumPy or CuPy array (..., R, C), uint8. Each (R, C) matrix is rearranged separately.

    Returns:
        A new array in the shape that padded_shape gives, whose padding is zero.

    Raises:
        TypeError: scales are not a uint8 array of NumPy or CuPy.
        ValueError: scales have fewer than two axes.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.layouts import aiter
        >>> scales = np.arange(256, dtype=np.uint8).reshape(32, 8)
        >>> aiter.shuffle_scales(scales).reshape(-1)[:8].tolist()
        [0, 128, 4, 132, 8, 136, 12, 140]
    """
    check_bytes("aiter.shuffle_scales", scales, "scales")
    *lead, R, C = padded = _padded("aiter.shuffle_scales", scales.shape)
    full = np.zeros_like(scales, shape=padded)
    full[..., : scales.shape[-2], : scales.shape[-1]] = scales
    halves, rows, quads, columns = _SCALE_TILE
    tiles = full.reshape(prod(lead), R // 32, halves, rows, C // 8, quads, columns)
    return contiguous(tiles.transpose(0, 1, 4, 6, 3, 5, 2)).reshape(padded)


def unshuffle_scales(scales: Any, shape: tuple[int, ...]) -> Any:
    """Rearrange shuffled block scales to linear order, and drop the padding. This is the inverse of shuffle_scales.

    Args:
        scales: a NumPy or CuPy array of any shape, uint8, with as many entries as padded_shape(shape) has.
        shape: the shape (..., R, C) of the result.

    Returns:
        A new array of that shape.

    Raises:
        TypeError: scales are not a uint8 array of NumPy or CuPy, or shape is not a sequence of ints.
        ValueError: shape has fewer than two axes or a negative length, or scales do not have the size that it needs.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.layouts import aiter
        >>> scales = np.arange(48, dtype=np.uint8).reshape(8, 6)
        >>> np.array_equal(aiter.unshuffle_scales(aiter.shuffle_scales(scales), (8, 6)), scales)
        True
    """
    check_bytes("aiter.unshuffle_scales", scales, "scales")
    shape = as_shape("aiter.unshuffle_scales", shape)
    *lead, R, C = padded = _padded("aiter.unshuffle_scales", shape)
    if scales.size != prod(padded):
        raise ValueError(
            f"aiter.unshuffle_scales: scales have {scales.size} entries; shape {shape} needs {padded}, which is padded"
            f" to multiples of {_ROWS} rows and {_COLUMNS} columns"
        )
    halves, rows, quads, columns = _SCALE_TILE
    tiles = scales.reshape(prod(lead), R // 32, C // 8, columns, rows, quads, halves)
    full = tiles.transpose(0, 1, 6, 4, 2, 5, 3).reshape(padded)
    return contiguous(full[..., : shape[-2], : shape[-1]])


def shuffle_codes(packed: Any) -> Any:
    """Rearrange packed codes of a weight to the order that aiter's kernels for shuffled weights read.

    The result equals shuffle_weight(packed, layout=(16, 16)) of aiter.

    Args:
        packed: a NumPy or CuPy array (..., N, K / 2), uint8, with two codes per byte. N must be a multiple of 16, and
            K / 2 a multiple of 32. Each matrix is rearranged separately.

    Returns:
        A new array of the same shape.

    Raises:
        TypeError: packed is not a uint8 array of NumPy or CuPy.
        ValueError: packed has fewer than two axes, or N or K / 2 is not such a multiple.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.layouts import aiter
        >>> packed = np.arange(16, dtype=np.uint8)[:, None] + np.zeros((1, 32), np.uint8)  # the number of the row
        >>> aiter.shuffle_codes(packed).reshape(-1)[14:18].tolist()
        [0, 0, 1, 1]
    """
    N, K = _matrix_of_codes("aiter.shuffle_codes", packed)
    tiles = packed.reshape(prod(packed.shape[:-2]), N // _CODE_ROWS, _CODE_ROWS, K // _CODE_BYTES, 2, _CODE_BYTES // 2)
    return contiguous(tiles.transpose(0, 1, 3, 4, 2, 5)).reshape(packed.shape)


def unshuffle_codes(packed: Any) -> Any:
    """Rearrange packed codes from aiter's order to linear order."""
    N, K = _matrix_of_codes("aiter.unshuffle_codes", packed)
    tiles = packed.reshape(prod(packed.shape[:-2]), N // _CODE_ROWS, K // _CODE_BYTES, 2, _CODE_ROWS, _CODE_BYTES // 2)
    return contiguous(tiles.transpose(0, 1, 4, 2, 3, 5)).reshape(packed.shape)


def _matrix_of_codes(op: str, packed: Any) -> tuple[int, int]:
    """Return the lengths (N, K / 2) of the last two axes of packed codes."""
    check_bytes(op, packed, "packed")
    N, K = packed.shape[-2:] if packed.ndim > 1 else (1, 1)
    if N % _CODE_ROWS or K % _CODE_BYTES:
        raise ValueError(
            f"{op}: packed has shape {packed.shape}; needs (..., N, K / 2) with N a multiple of {_CODE_ROWS} and K / 2"
            f" a multiple of {_CODE_BYTES}"
        )
    return N, K
