"""Provide inputs on which fouroversix's codes wrap around.

If an element divided by its scale is 7 or more, fouroversix rounds it in steps of 2, as if E2M1 continued beyond 6. The
code then exceeds the 3 bits of its magnitude.
"""

from __future__ import annotations

import numpy as np

# {element divided by its scale: code that fouroversix 1.0.5 packs}, from its PyTorch back end on a CPU (torch 2.13).
CODES = {
    6.9: 7,
    7.0: 8,
    -7.0: 8,
    8.0: 8,
    9.0: 8,
    9.5: 8,
    10.0: 8,
    -10.0: 8,
    11.0: 9,
    12.0: 9,
    -12.0: 9,
    14.0: 9,
    -14.0: 9,
    15.0: 10,
    16.0: 10,
    -16.0: 10,
    20.0: 10,
    24.0: 11,
    -24.0: 11,
    31.0: 12,
    48.0: 13,
    64.0: 14,
    96.0: 15,
    126.0: 15,
}
# Block amaxes in units of 6 * 2^-9, where 2^-9 is the smallest scale. E4M3 rounds them to multiples of
# that scale: 0, 1, 2, 3, ... A block amax of 1.4999999 gets the scale 1. Its largest element is then
# 6 * 1.4999999 / 1 = 9 times the scale, beyond 6, the largest E2M1 value.
AMAXES = (0.4, 0.5, 0.6, 1.0, 1.3, 1.4, 1.4999999, 1.5, 2.3, 2.4, 2.5, 2.51, 3.4, 3.5, 4.4, 7.6)


def over_scales() -> np.ndarray:
    """Return float32 (1, 16 * n) with one block per key of CODES: that key times 448, and zeros.

    Under a tensor amax of 2688, all block scales are 448.
    """
    x = np.zeros((len(CODES), 16), np.float32)
    x[:, 3] = np.float32([*CODES]) * np.float32(448)
    return x.reshape(1, -1)


def tiny_scales(dtype: np.dtype, scale_max: int, rows: int = 32) -> np.ndarray:
    """Return rows of blocks whose amaxes are AMAXES in units of 6 * 2^-9. Their block scales are subnormal.

    Every 16th row begins with the tensor amax, 6 * scale_max, so that the tensor scale is 1.

    Args:
        dtype: the dtype of the result.
        scale_max: the largest block scale of the recipe, 448 or 256.
        rows: the number of rows.
    """
    rng = np.random.default_rng(rows)
    x = rng.uniform(-1, 1, (rows, 4 * len(AMAXES), 16))
    x[..., 0] = rng.choice([-1, 1], x.shape[:2])
    x = np.where(rng.random(x.shape) < 0.3, np.round(x), x)
    x *= 6 * (np.resize(AMAXES, x.shape[1]) * rng.choice([1, 1 + 2.0**-22, 1 - 2.0**-23], x.shape[:2]))[..., None]
    x = x.reshape(rows, -1) * 2.0**-9
    x[::16, 0] = 6 * scale_max
    return x.astype(dtype)
