"""transpose: codes and square-block scales of the columnwise copy from those of the rowwise one, without decoding."""

from __future__ import annotations

import numpy as np

from fp4kit.layouts import pack, unpack
from fp4kit.reference.blocks import TILE_ELEMENTS


def transpose_codes(packed: np.ndarray, is_packed: bool) -> np.ndarray:
    """Codes (M, K/2) two a byte -> (K, M/2), M even; one a byte: (M, K) -> (K, M)."""
    if not is_packed:
        return np.ascontiguousarray(packed.T)
    M, half = packed.shape
    out = np.empty((2 * half, M // 2), np.uint8)
    width = max(TILE_ELEMENTS // max(M, 1), 1)
    for start in range(0, half, width):
        columns = slice(start, min(start + width, half))
        out[2 * columns.start : 2 * columns.stop] = pack(unpack(packed[:, columns]).T)
    return out


def transpose_scales(scales: np.ndarray, size: int) -> np.ndarray:
    """Scales of size x size blocks, stored once per row: (M, K/size) -> (K, M/size)."""
    return np.repeat(scales[::size].T, size, axis=0)
