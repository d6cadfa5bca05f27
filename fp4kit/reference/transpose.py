"""transpose: codes and square-block scales of the columnwise copy from those of the rowwise one, without decoding."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import Packing
from fp4kit.layouts import packed, unpacked
from fp4kit.reference.blocks import TILE_ELEMENTS


def transpose_codes(stored: np.ndarray, packing: Packing) -> np.ndarray:
    """Packed codes of an (M, K) matrix -> those of the (K, M) one; M fills whole bytes."""
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
    """Scales of size x size blocks, stored once per row: (M, K/size) -> (K, M/size)."""
    return np.repeat(scales[::size].T, size, axis=0)
