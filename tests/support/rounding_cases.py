"""Provide inputs whose block scales depend on the order and the precision of a producer's operations."""

from __future__ import annotations

import numpy as np

# Block amax -> the E4M3 code of the block scale that Transformer Engine stores for a tensor amax of 3. The engine
# computes the scale as block_amax * (encode_scale * (1/6)) in float32, where encode_scale = 448 * 6 / 3 = 896. Here 896
# * (1/6) rounds to slightly above 149.33333, so 0.140625 times it is slightly above 21. This is a midpoint of E4M3, so
# the scale rounds up. In the other order, 0.140625 * 896 is exactly 126, and 126 / 6 = 21 rounds down to the even code.
TE_SCALES = {0.140625: 91, 0.28125: 99, 0.5625: 107, 1.125: 115, 2.25: 123}


def underflowing() -> np.ndarray:
    """Return a float64 matrix (16, 256) whose later rows have block scales that underflow in AMD Quark's recipes.

    Row i is about 2^(-3 i). A block scale underflows when it is divided by the tensor scale. If the caller scales the
    matrix to tiny values, the product of block scale and tensor scale becomes subnormal as well.
    """
    x = np.random.default_rng(0).standard_normal((16, 256)) * np.exp2(-np.arange(16) * 3)[:, None]
    x[1, :16] = 0
    return x
