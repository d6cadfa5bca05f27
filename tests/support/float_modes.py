"""Set floating-point modes that fp4kit's results must not depend on: flushing of subnormals, and directed rounding."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from fp4kit import arithmetic

# WORD: the index of the control register among the 32-bit words of a fenv_t. BITS: {mode: bits to set in the register};
# empty on processors other than these two.
# x86-64: MXCSR is word 7, with FTZ (flush results) in bit 15, DAZ (flush operands) in bit 6, and the rounding direction
# in bits 13 and 14.
# aarch64: FPCR is word 0, with FZ (flush both) in bit 24 and the rounding direction in bits 22 and 23.
WORD, BITS = {
    "x86_64": (
        7,
        {"ftz": 1 << 15, "daz": 1 << 6, "both": 1 << 15 | 1 << 6, "down": 1 << 13, "up": 1 << 14, "zero": 3 << 13},
    ),
    "aarch64": (0, {"both": 1 << 24, "up": 1 << 22, "down": 1 << 23, "zero": 3 << 22}),
}.get(platform.machine(), (0, {}))
NEEDS_ENVIRONMENT = pytest.mark.skipif(arithmetic.environment() is None, reason="the environment cannot be set here")


def words() -> ctypes.Array:
    """Return this thread's floating-point environment (a fenv_t) as 32-bit words."""
    found = (ctypes.c_uint32 * 64)()
    arithmetic.environment()[0](found)
    return found


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Set the floating-point mode ``name``, a key of BITS, in this thread while the context lasts."""
    before, changed = words(), words()
    changed[WORD] |= BITS[name]
    _, set_ = arithmetic.environment()
    set_(changed)
    try:
        yield
    finally:
        set_(before)


def tiny(dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Return a (32, 128) matrix of the given dtype for which results change if subnormals are flushed to zero.

    Values grow from row to row. The first rows are subnormal, and the next ones have subnormal scales or products. The
    last four rows are ordinary.
    """
    rng = np.random.default_rng(seed)
    lowest = -24 if dtype == np.float16 else -149
    exponents = np.concatenate([np.linspace(lowest, lowest + 30, 28), [-10, 0, 10, 14]])
    x = (rng.standard_normal((32, 128)) * np.exp2(exponents)[:, None]).astype(dtype)
    x[0, :32] = np.array(2.0**lowest, dtype)  # only the smallest subnormal
    x[1, ::2] = -0.0
    return x
