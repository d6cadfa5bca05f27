"""State roundings by values and distances, independently of the specification."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp4kit.reference.arith import reciprocal_approx_ftz

F32 = np.float32
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


def rcp(x):
    """PTX rcp.approx.ftz.f32 of sm_90."""
    return F32(reciprocal_approx_ftz(np.array(x, F32)))


def e4m3(x):
    """Round a float32 to E4M3, saturating. Return the value and the byte."""
    code = np.minimum(F32(x), F32(448)).astype(ml_dtypes.float8_e4m3fn)
    return F32(code), int(code.view(np.uint8))


def e2m1(x):
    """Round float32 numbers to E2M1, ties to even; 7 for NaN."""
    codes = nearest(np.abs(np.nan_to_num(x, posinf=6, neginf=-6)), E2M1) + 8 * np.signbit(x)
    return np.where(np.isnan(x), 7, codes).astype(np.uint8)


def tf32(x):
    """Return float32 x without its 13 low bits, as the matrix unit reads it."""
    return (np.asarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
