"""Provide float32 values that cover every kind of bit pattern, for exhaustive tests of encoders."""

import numpy as np


def sweep():
    """Return float32 values over the whole range, infinities included, without NaN.

    They have all 65,536 patterns of the upper 16 bits, each with five patterns of the lower 16 bits.
    """
    high = np.arange(0x10000, dtype=np.uint32) << 16
    x = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).astype(np.uint32).view(np.float32)
    return x[~np.isnan(x)]


SWEEP = sweep()
ALL_16_BITS = np.arange(0x10000, dtype=np.uint16)
NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
