"""Reproduce float32 arithmetic of producers in NumPy: instructions of GPUs, sums in a stated order, and powers.

Names follow PTX: .ftz flushes subnormal operands and results to zero, and .rn rounds to nearest even. If a docstring
names a PTX instruction, such as mul.ftz.f32, the function reproduces that instruction in every bit.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401
import math
import zipfile  # noqa: F401
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4kit.formats import FLT_MIN

Array = np.ndarray  # the specification computes with NumPy arrays alone
Dtype = np.dtype
ONE, ZERO = np.float32(1), np.float32(0)
INV6 = np.float32(1) / np.float32(6)  # 0x3E2AAAAB; equals rcp.approx.ftz.f32(6) on sm_90


def flush(x: Array) -> Array:
    """Return float32 x with every subnormal replaced by a zero of its sign, as PTX .ftz does to operands and results.

    Zeros keep their sign, and infinities and NaN are unchanged.
    """
    return np.where(np.abs(x) < FLT_MIN, np.copysign(np.float32(0), x), x)


# A result is tiny, and therefore flushed, if it is below 2^-126 after rounding to 24 bits with an unbounded exponent.
# Measured on an H200, 2026-11-21: (1 - 2^-24) * 2^-126 gives 0, and (1 - 2^-26) * 2^-126 gives 2^-126.
TINY = np.float64(FLT_MIN) * (1 - 2.0**-25)


def _flush_result(result: Array, operation: np.ufunc, a: Array, b: Array) -> Array:
    """Return `result` with each tiny number replaced by a zero of the same sign, as PTX .ftz flushes results."""
    small = np.abs(result) <= FLT_MIN
    if not small.any():
        return result
    tiny = np.abs(operation(a, b, dtype=np.float64)) < TINY
    return np.where(small & tiny, np.copysign(np.float32(0), result), result)


def multiply_ftz(a: Array, b: Array) -> Array:
    """Return a * b as the PTX instruction mul.ftz.f32 does.

    Operands and result are float32. Subnormal operands count as zero, and subnormal results become zero, both with
    their sign. Other products are rounded to nearest even. Infinity and NaN follow IEEE arithmetic.
    """
    a, b = flush(a), flush(b)
    return _flush_result(a * b, np.multiply, a, b)


def divide_ftz(a: Array, b: Array) -> Array:
    """Return a / b as the PTX instruction div.rn.ftz.f32 does.

    Operands and result are float32. Subnormal operands count as zero, and subnormal results become zero, both with
    their sign. Other quotients are rounded to nearest even. Infinity, NaN and division by zero follow IEEE arithmetic.
    """
    a, b = flush(a), flush(b)
    return _flush_result(a / b, np.divide, a, b)


def reciprocal_or_zero(x: Array) -> Array:
    """Return float32 1 / x, or +0 where x is 0 or -0, as auto-round's function get_reciprocal does. NaN gives NaN."""
    return np.where(x == 0, ZERO, ONE / x)


@cache
def reciprocal_table() -> Array:
    """Return the measured errors of the PTX instruction rcp.approx.ftz.f32: int8 [2^23].

    Entry m, in ulp, is rcp.approx.ftz.f32(x) minus the correctly rounded 1 / x, for the float32 x in [1, 2) with
    mantissa bits m. It was measured on an H200 (sm_90).
    """

    with np.load(Path(__file__).with_name("rcp_approx_sm90.npz")) as file:
        return np.asarray(file["delta"])


def reciprocal_approx_ftz(x: Array) -> Array:
    """Return the approximate reciprocal of x, as the instruction rcp.approx.ftz.f32 computes it on an H200 (sm_90).

    The result is float32, in the shape of x, within 1 ulp of 1 / x. A table that was measured for all 2^23 mantissas
    says in which direction it differs; the exponent only scales the result. Zeros and subnormals give infinity, and
    infinity and results below 2^-126 give zero, all with the sign of x. NaN gives NaN. Architectures other than sm_90
    may differ; they were not measured.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / flush(x)
    ordinary = np.isfinite(exact) & np.isfinite(x)
    bits = x.view(np.int32)
    significand = (bits & 0x7FFFFF | 0x3F800000).view(np.float32)
    inverse = (np.float32(1) / significand).view(np.int32) + reciprocal_table()[bits & 0x7FFFFF]
    exponent = np.where(ordinary, ((bits >> 23) & 0xFF) - 127, 0)
    scaled = np.ldexp(inverse.view(np.float32).astype(np.float64), -exponent)  # exact
    magnitude = np.where(scaled < FLT_MIN, np.float32(0), scaled).astype(np.float32)
    return np.where(ordinary, np.copysign(magnitude, x), exact)


def round_to(x: Array, dtype: Dtype) -> Array:
    """Return float32 x rounded to dtype (nearest even), stored as float32. Values that overflow dtype become infinite.

    If x is the result of a float32 operation, it has then been rounded twice. For bfloat16 and float16, whose
    significands have 8 and 11 bits, this equals a single rounding. If dtype is float32, x itself is returned.
    """
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


def narrow_float64(x: Array, dtype: Dtype) -> Array:
    """Return float64 x rounded once, to nearest even, to float32, float16 or bfloat16.

    NaN and infinities are kept, and numbers beyond the range of dtype become infinite. For float32 and float16 this is
    x.astype(dtype).

    For bfloat16 it replaces the conversion of ml_dtypes, which rounds to float32 before it rounds to bfloat16. To avoid
    that double rounding, x is first cut to float32 with its last bit set if anything was cut off (round to odd). Then
    only the second rounding counts.
    """
    if dtype != ml_dtypes.bfloat16:
        return x.astype(dtype)
    nearest = x.astype(np.float32)
    inexact = np.isfinite(nearest) & (nearest.astype(np.float64) != x)
    truncated = nearest.view(np.int32) - (np.abs(nearest.astype(np.float64)) > np.abs(x))
    odd = np.where(inexact, truncated | 1, nearest.view(np.int32)).astype(np.int32)
    return odd.view(np.float32).astype(dtype)


def log2(x: Array) -> Array:
    """Return log2(x) of float32 x, correctly rounded to float32. 0 gives -inf; NaN and negative numbers give NaN."""
    with np.errstate(divide="ignore"):
        return np.log2(x.astype(np.float64)).astype(np.float32)


def moved_by(b: Array) -> Array:
    """Return the power of two that div.full.f32 scales dividend and divisor by, to keep the reciprocal in range.

    The result is float32: 2^24 for |b| < 2^-126, 2^-2 for |b| > 2^126, and 1 otherwise, also for NaN.

    b: the divisor.
    """
    size = np.abs(b)
    return np.where(size > 2.0**126, np.float32(0.25), np.where(size < FLT_MIN, np.float32(2**24), ONE))


def divide_full(a: Array, b: Array) -> Array:
    """Return a / b as the PTX instruction div.full.f32 computes it on sm_90, which Triton uses for float32 division.

    a, b and the result are float32. The instruction scales both operands by a power of two (moved_by), and then
    computes a * rcp.approx(b). So the result need not be the float nearest to a / b. A nonzero a divided by 0 gives
    infinity, and 0 / 0 gives NaN.
    """
    moved = moved_by(b)
    return (a * moved) * reciprocal_approx_ftz(b * moved)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c for float32 a, b and c, rounded once to float32 (nearest even), as a fused multiply-add does.

    Overflow gives infinity, and infinity and NaN follow IEEE arithmetic. The product is exact in float64. The sum is
    rounded to float64 and then to float32. Only if the first result may be halfway between two float32 numbers, it is
    rounded to odd instead: its last bit is set if anything was cut off.
    """
    product = np.asarray(a, np.float64) * b
    total = np.asarray(product + c)
    # The 29 bits that float32 lacks are 1 and then zeros. In subnormal numbers, they are at other places.
    doubtful = (total.view(np.int64) & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < FLT_MIN)
    if doubtful.any():
        total[doubtful] = _to_odd(
            np.broadcast_to(product, total.shape)[doubtful], np.broadcast_to(c, total.shape)[doubtful]
        )
    return total.astype(np.float32)[()]


def _to_odd(product: Array, c: Array) -> Array:
    """Return the float64 sums of float64 `product` and float32 c, rounded to odd."""
    total = product + c
    back = total - product
    cut = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (cut != 0) & (bits & 1 == 0)
    return (bits + np.where(inexact, np.where((cut > 0) == (total > 0), 1, -1), 0)).view(np.float64)


def sum_lanes(terms: Array) -> Array:
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


def sum_halves(terms: Array, lanes: int) -> Array:
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


SQRT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # bits of sqrt(1/2), the lower end of the significands
LN2, TWO_OVER_LN2 = float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.71547652b82fep+1")
ATANH = [TWO_OVER_LN2 / (2 * i + 1) for i in range(10)]  # series of atanh; the remainder is below 2^-55 of the sum
EXP = [1 / math.factorial(i) for i in range(14)]  # series of exp; the remainder is below 2^-57 of the sum
PART = 1 << 13  # elements that are computed at once, few enough for the cache


def power(d: Array, p: float) -> Array:
    """Return d^p, computed as d^n * 2^((p - n) log2 d) with n = floor(p): float64, in the shape of d.

    Args:
        d: float64, zeros or positive normal numbers, such as float32 numbers and their differences.
        p: the power, at least 1.

    Numerics:
        d^n is a chain of products, by the binary digits of n from the left. 0 gives 0, inf gives inf, NaN gives NaN,
        and overflow gives inf. A result that underflows is rounded like a product. d^1 is d, and d^2 equals d * d.
        Except for underflow, the relative error is at most (n + 4 + 2 |(p - n) log2 d|) 2^-53.
    """
    result = np.array(d, np.float64, order="C")
    flat = result.reshape(-1)
    for first in range(0, flat.size, PART):
        part = flat[first : first + PART]
        part[...] = _power(part, int(p), p - int(p))
    return result


def _power(d: Array, n: int, fraction: float) -> Array:
    """Return d^n * 2^(fraction * log2 d), so d to the power n + fraction, for float64 d."""
    # n must be at least 1.
    result = d
    for digit in f"{n:b}"[1:]:
        result = result * result
        if digit == "1":
            result = result * d
    return result * exp2(fraction * _log2_of_float64(d)) if fraction else result


def _log2_of_float64(d: Array) -> Array:
    """Return log2(d) of float64 d >= 0.

    For d = m * 2^e with m in [sqrt(1/2), sqrt(2)), the result is e + 2 / ln 2 * atanh((m - 1) / (m + 1)). Zero,
    infinity and NaN give finite numbers without a meaning. `power` multiplies by d afterwards, which decides these
    cases.
    """
    bits = d.view(np.int64)
    e = (bits - SQRT_HALF) >> 52
    m = (bits - (e << 52)).view(np.float64)
    f = (m - 1) / (m + 1)
    return e + f * _polynomial(ATANH, f * f)


def exp2(t: Array) -> Array:
    """Return 2^t of float64 t as 2^k * e^((t - k) ln 2), where k is the integer nearest to t.

    k must be from -1023 to 1024. If k is -1023, 0 is used for the factor 2^k; if k is 1024, infinity is used.
    """
    k = np.rint(t)
    return _polynomial(EXP, (t - k) * LN2) * ((k.astype(np.int64) + 1023) << 52).view(np.float64)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    """Return c[0] + c[1] x + c[2] x^2 + ... in a new float64 array, evaluated from the last coefficient to the first.

    There must be at least one coefficient.
    """
    result = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result *= x
        result += c
    return result
