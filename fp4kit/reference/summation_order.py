"""Compute float32 sums in the order that producers use. The last bits of a sum depend on this order."""

from __future__ import annotations

import numpy as np


def sum_lanes(terms: np.ndarray) -> np.ndarray:
    """Return the sums of float32 terms over the last axis, added in the order that PyTorch uses on a CPU.

    The axis has at most 256 terms, a multiple of eight. If only the last axis is empty, the sums are 0. NumPy raises
    ValueError if another axis is empty.

    PyTorch adds vectors of eight terms into four partial sums. While at least four vectors are left, vector i goes to
    partial sum i % 4; the remaining vectors go to partial sum 0. Then the four partial sums are added in their order.
    Last, the eight lanes of the resulting vector are added in their order.
    """
    vectors = terms.reshape(*terms.shape[:-1], -1, 8)
    count = vectors.shape[-2]
    grouped = count - count % 4
    partial = [np.zeros((*vectors.shape[:-2], 8), np.float32) for _ in range(4)]
    for i in range(count):
        which = i % 4 if i < grouped else 0
        partial[which] = partial[which] + vectors[..., i, :]
    lanes = partial[0] + partial[1] + partial[2] + partial[3]
    error = lanes[..., 0]
    for i in range(1, 8):
        error = error + lanes[..., i]
    return error


def sum_halves(terms: np.ndarray, lanes: int) -> np.ndarray:
    """Return the sums of float32 terms over the last axis: lanes first, then halves, as threads of a GPU add.

    A lane is one of `lanes` partial sums. Term i is added to lane i % lanes, in order. Then the upper half of the lanes
    is added to the lower half, until one lane is left. The length of the axis is a multiple of lanes, which is a power
    of two. If only the last axis is empty, the sums are 0.
    """
    rows = terms.reshape(*terms.shape[:-1], -1, lanes)
    total = np.zeros((*rows.shape[:-2], lanes), np.float32)
    for i in range(rows.shape[-2]):
        total = total + rows[..., i, :]
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes:]
    return total[..., 0]
