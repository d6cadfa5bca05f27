"""Transpose codes and the scales of square blocks, without decoding."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import Packing
from fp4kit.layouts import packed, unpacked
from fp4kit.reference.blocks import TILE_ELEMENTS


def transpose_codes(stored: np.ndarray, packing: Packing) -> np.ndarray:
    """Return the packed codes of the transpose (K, M) of an (M, K) matrix.

    M codes must fill whole bytes.
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
    """Return the transposed scales of size x size blocks, stored once per row: (M, K/size) gives (K, M/size)."""
    return np.repeat(scales[::size].T, size, axis=0)
