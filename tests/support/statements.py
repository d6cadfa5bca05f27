"""State roundings by values and distances, independently of the specification."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def nearest(a, values):
    """Return the indices of the values nearest to a >= 0; ties go to even indices, and a saturates at the largest.

    values: ascending, with differences that float64 holds exactly.
    """
    distance = np.abs(np.minimum(a, values[-1]).astype(np.float64)[..., None] - values)
    tied = distance == distance.min(-1, keepdims=True)
    even = tied & (np.arange(len(values)) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))


def tf32(x):
    """Return float32 x without its 13 low bits, as the matrix unit reads it."""
    return (np.asarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
