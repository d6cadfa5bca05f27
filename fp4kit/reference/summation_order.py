"""Sums of float32 in the order of producers, on which their last bits depend."""

from __future__ import annotations

import numpy as np


def sum_lanes(terms: np.ndarray) -> np.ndarray:
    """Sums of up to 256 float32 as PyTorch adds them on a CPU: by vectors of eight, in four partial sums while four are
    left.

    Vector i of whole groups of four goes to sum i % 4, those that are left to sum 0; then the four sums are added in
    their order, and then the eight lanes.
    """
    vectors = terms.reshape(*terms.shape[:-1], -1, 8)
    count = vectors.shape[-2]
    whole = count - count % 4
    partial = [np.zeros((*vectors.shape[:-2], 8), np.float32) for _ in range(4)]
    for i in range(count):
        which = i % 4 if i < whole else 0
        partial[which] = partial[which] + vectors[..., i, :]
    lanes = partial[0] + partial[1] + partial[2] + partial[3]
    error = lanes[..., 0]
    for i in range(1, 8):
        error = error + lanes[..., i]
    return error
