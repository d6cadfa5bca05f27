"""Rotate blocks along an axis: Hadamard transforms of 16 to 512 elements, and products with given matrices.

Sums are in float32, in an order that this file states, so that every engine gives equal bits. The transform that
Transformer Engine applies before it quantizes has other roundings; it is in hadamard.py.
"""

from __future__ import annotations

import numpy as np

from fp4kit.call.parse import Rotation
from fp4kit.reference.stochastic import stream_bytes


def random_signs(size: int, seed: int) -> np.ndarray:
    """Return the signs that a seed gives: int8 (size,), each 1 or -1.

    Sign i is -1 if byte i of stream_bytes is at least 128.
    """
    return np.where(stream_bytes(seed, 0, size) >= 128, np.int8(-1), np.int8(1))


def hadamard_factor(size: int) -> np.float32:
    """Return the factor of a Hadamard transform of `size` elements: 1 / sqrt(size), rounded once to float32."""
    return np.float32(1 / np.sqrt(np.float64(size)))


@np.errstate(all="ignore")
def rotate(x: np.ndarray, r: Rotation) -> np.ndarray:
    """Return x (outer, length, inner) with every block along the middle axis rotated, in the shape and dtype of x.

    The elements are widened to float32, and those with a 1 in r.signs are negated. Then they are rotated: by a Hadamard
    transform with its factor, or by products with r.matrices if these are given. The results are rounded once to the
    dtype of x. If r.inverse is True, elements are negated after the rotation instead of before. NaN results are the
    positive quiet NaN.
    """
    outer, length, inner = x.shape
    y = x.astype(np.float32).reshape(outer, length // r.size, r.size, inner)
    signs = 1 if r.signs is None else (1 - 2 * r.signs.astype(np.float32)).reshape(-1, r.size, 1)
    if not r.inverse:
        y = y * signs
    y = _butterflies(y) * hadamard_factor(r.size) if r.matrices is None else _products(y, r.matrices)
    if r.inverse:
        y = y * signs
    return np.where(np.isnan(y), np.float32(np.nan), y).astype(x.dtype).reshape(x.shape)


def _butterflies(y: np.ndarray) -> np.ndarray:
    """Return the Hadamard transform of y (outer, blocks, size, inner) along its third axis, without its factor."""
    *lead, size, inner = y.shape
    distance = 1
    while distance < size:
        pairs = y.reshape(*lead, size // (2 * distance), 2, distance, inner)
        low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
        y = np.stack([low + high, low - high], axis=-3).reshape(y.shape)
        distance *= 2
    return y


def _products(y: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Return the sums over i of y_i M_ij for y (outer, blocks, size, inner), in the shape of y."""
    total = y[:, :, :1] * matrices[:, 0, :, None]
    for i in range(1, y.shape[2]):
        total = total + y[:, :, i : i + 1] * matrices[:, i, :, None]
    return total
