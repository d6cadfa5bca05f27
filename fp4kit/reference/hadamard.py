"""Apply the randomized Hadamard transform to blocks of 16, as Transformer Engine does before it quantizes columns."""

from __future__ import annotations

import numpy as np

from fp4kit.call.parse import HADAMARD_BLOCK, TE_SIGN_MASK
from fp4kit.reference.arith import narrow_float64


@np.errstate(all="ignore")
def hadamard_blocks(x: np.ndarray, sign_mask: int = TE_SIGN_MASK) -> np.ndarray:
    """Return y_j = 1/4 sum_i s_i H_ij x_i for each block of 16 along the last axis, in the shape and dtype of x.

    H is Sylvester's Hadamard matrix of order 16. s_i is -1 if bit i of sign_mask is set, otherwise 1. The transform
    spreads outliers over their block, so that they cost less accuracy.

    Args:
        x: float32, float16 or bfloat16. The length of the last axis must be a multiple of 16.
        sign_mask: 16 bits; 0 for no sign changes. The default is that of Transformer Engine.

    Numerics:
        Computed in float64 by butterflies over distances 1, 2, 4 and 8, in this order. The result is rounded once to
        the dtype of x, so that every device gives the same bits. Elements that are not finite follow IEEE arithmetic
        (inf - inf is NaN).

    Exact:
        Equals TE's bfloat16 transform.
    """
    signs = 1.0 - 2.0 * ((sign_mask >> np.arange(HADAMARD_BLOCK)) & 1)
    y = x.reshape(*x.shape[:-1], -1, HADAMARD_BLOCK).astype(np.float64) * signs
    for distance in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], -1, 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(y.shape)
    return narrow_float64(y / 4, x.dtype).reshape(x.shape)
