"""float32 arithmetic as GPUs do it, in NumPy: flushed subnormals and the approximate reciprocal of sm_90."""

from __future__ import annotations

import encodings.cp437  # noqa: F401  # np.load imports it and zipfile, and a fork meanwhile leaves an import lock held
import zipfile  # noqa: F401
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4kit.formats import FLT_MIN

ONE, ZERO = np.float32(1), np.float32(0)
INV6 = np.float32(1) / np.float32(6)  # 0x3E2AAAAB; equals rcp.approx.ftz.f32(6) on sm_90


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 -> zero of the same sign (what .ftz does to operands and results)."""
    return np.where(np.abs(x) < FLT_MIN, np.copysign(np.float32(0), x), x)


# A result is tiny, and flushed, if it is below 2^-126 after rounding to 24 bits with an unbounded exponent: measured on
# an H200, 2026-11-21, where (1 - 2^-24) * 2^-126 gives 0 and (1 - 2^-26) * 2^-126 gives 2^-126.
TINY = np.float64(FLT_MIN) * (1 - 2.0**-25)


def _flush_result(result: np.ndarray, operation: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The float32 result of an operation, zero where the exact one is tiny; float64 decides at the smallest normal."""
    small = np.abs(result) <= FLT_MIN
    if not small.any():
        return result
    tiny = np.abs(operation(a, b, dtype=np.float64)) < TINY
    return np.where(small & tiny, np.copysign(np.float32(0), result), result)


def multiply_ftz(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mul.ftz.f32: subnormal operands and results are zero; otherwise rn."""
    a, b = flush(a), flush(b)
    return _flush_result(a * b, np.multiply, a, b)


def divide_ftz(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.rn.ftz.f32: subnormal operands and results are zero; otherwise rn."""
    a, b = flush(a), flush(b)
    return _flush_result(a / b, np.divide, a, b)


def reciprocal_or_zero(x: np.ndarray) -> np.ndarray:
    """1 / x, 0 for 0: auto-round's get_reciprocal."""
    return np.where(x == 0, ZERO, ONE / x)


@cache
def reciprocal_table() -> np.ndarray:
    """The measured differences of rcp.approx.ftz.f32, by significand."""
    # int8 [2^23]: rcp.approx.ftz.f32 of 1.m minus the correctly rounded reciprocal, in ulp; measured on an H200
    # (sm_90).
    with np.load(Path(__file__).with_name("rcp_approx_sm90.npz")) as file:
        return np.asarray(file["delta"])


def reciprocal_approx_ftz(x: np.ndarray) -> np.ndarray:
    """rcp.approx.ftz.f32 as an H200 (sm_90) computes it: float32, same shape.

    Within 1 ulp of 1/x; which side follows a measured table over all 2^23 significands, the exponent only scales it.
    +-0 and subnormals -> +-inf; results below 2^-126 -> +-0; +-inf -> +-0; NaN -> NaN. Other architectures are unmeasured.
    """  # noqa: E501
    x = np.asarray(x, np.float32)
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / flush(x)
    ordinary = np.isfinite(exact) & np.isfinite(x)
    bits = x.view(np.int32)
    significand = (bits & 0x7FFFFF | 0x3F800000).view(np.float32)
    near = (np.float32(1) / significand).view(np.int32) + reciprocal_table()[bits & 0x7FFFFF]
    exponent = np.where(ordinary, ((bits >> 23) & 0xFF) - 127, 0)
    scaled = np.ldexp(near.view(np.float32).astype(np.float64), -exponent)  # exact
    magnitude = np.where(scaled < FLT_MIN, np.float32(0), scaled).astype(np.float32)
    return np.where(ordinary, np.copysign(magnitude, x), exact)


def narrow_float64(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 rounded once (rn) to float32, float16 or bfloat16: same shape.

    ml_dtypes rounds to float32 on the way to bfloat16. A float32 rounded to odd, whose last bit says that something was
    cut off, carries enough for the second rounding to be the only one that counts.
    """
    if dtype != ml_dtypes.bfloat16:
        return x.astype(dtype)
    near = x.astype(np.float32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != x)
    truncated = near.view(np.int32) - (np.abs(near.astype(np.float64)) > np.abs(x))
    odd = np.where(inexact, truncated | 1, near.view(np.int32)).astype(np.int32)
    return odd.view(np.float32).astype(dtype)


def log2(x: np.ndarray) -> np.ndarray:
    """Correctly rounded float32 log2."""
    with np.errstate(divide="ignore"):
        return np.log2(x.astype(np.float64)).astype(np.float32)


def moved_by(b: np.ndarray) -> np.ndarray:
    """The power of two that div.full.f32 moves both operands by: 2^24 for |b| < 2^-126, 2^-2 for |b| > 2^126, else
    1.
    """
    size = np.abs(b)
    return np.where(size > 2.0**126, np.float32(0.25), np.where(size < FLT_MIN, np.float32(2**24), ONE))


def divide_full(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.full.f32 as sm_90 computes it: a * rcp.approx(b), both moved by a power of two."""
    moved = moved_by(b)
    return (a * moved) * reciprocal_approx_ftz(b * moved)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once.

    The product is exact in float64. A sum rounded to odd there, whose last bit says that something was cut off, has
    enough bits for the second rounding to be the only one that counts.
    """
    product = np.asarray(a, np.float64) * b
    total = product + c
    back = total - product
    cut = (product - (total - back)) + (c - back)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = np.isfinite(total) & (cut != 0) & ((bits & 1).reshape(total.shape) == 0)
    step = np.where((cut > 0) == (total > 0), 1, -1)
    return (bits.reshape(total.shape) + np.where(inexact, step, 0)).view(np.float64).astype(np.float32)
