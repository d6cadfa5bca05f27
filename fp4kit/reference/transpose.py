"""Transpose codes and the scales of square blocks, without decoding."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import Packing
from fp4kit.layouts import packed, unpacked
from fp4kit.reference.blocks import TILE_ELEMENTS


def transpose_codes(stored: np.ndarray, packing: Packing) -> np.ndarray:
    """Transpose a matrix (M, K) of stored codes, and return the stored codes of the matrix (K, M).

    The M codes of a row of the result must fill whole bytes.

    stored: uint8, one row per row of the matrix.
    packing: the packing of the element format (ElementFormat.packing): how many codes share how many bytes.
    """
    (M, wide), codes = stored.shape, packing.codes
    K = wide // packing.bytes * codes
    out = np.empty((K, packing.length(M)), np.uint8)
    step = max(TILE_ELEMENTS // max(M, 1), 1) * packing.bytes
    for start in range(0, wide, step):
        part = unpacked(stored[:, start : start + step], packing)
        first = start // packing.bytes * codes
        out[first : first + part.shape[1]] = packed(part.T, packing)
    return out


def transpose_scales(scales: np.ndarray, size: int) -> np.ndarray:
    """Return the block scales of the transposed matrix, for square blocks of size x size elements.

    Scales are stored once per row of elements, so the shape changes from (M, K/size) to (K, M/size). M must be a
    multiple of size.
    """
    return np.repeat(scales[::size].T, size, axis=0)
