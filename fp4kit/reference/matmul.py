"""Compute matrix products in the order and with the rounding of matrix units, or in other orders: the specification.
The product is C + A B^T, float32 (M, N). `a` and `b` are the decoded operands A (M, K) and B (N, K), and `c` is C.
Terms are numbers as pairs (significand, exponent).

A matrix unit computes D = C + sum over k of a_k * b_k in steps. Every step adds K products to C at once, and keeps only
some of the bits that an exact sum needs. Source: MMA-Sim (arXiv 2511.10909, package mmasim 2.1.1), whose authors tested
their model on each architecture.
"""

from __future__ import annotations

from functools import reduce
from math import fsum
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import Terms, as_terms
from fp4kit.reference.arith import ONE, ZERO, Array, Dtype, fma, round_to
from fp4kit.units import DotAdd, FloorDotAdd, IntegerAdd, Unit

LEAST_EXPONENT = -126  # the exponent of the smallest normal float32
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the NaN that a matrix unit returns


class Factor(NamedTuple):
    """One decoded operand of a matrix product: `a`, of shape (M, K), or `b`, of shape (N, K).

    Attributes:
        elements: the elements as Terms, (rows, K).
        scales: the block scales as Terms, (rows, K / block); None if the operand has no block scales.
        block: the number of elements that share a block scale.
        element: the name of the element format, such as "E2M1" or "bfloat16".
        chains: the float32 scales of chains (rows, K / promote); None without such scales.
    """

    elements: Terms
    scales: Terms | None
    block: int
    element: str = ""
    chains: Array | None = None

    def values(self) -> Array:
        """Return the exact products of elements and their block scales, as a float64 array of shape (rows, K)."""
        values = np.ldexp(*self.elements)
        return values if self.scales is None else values * np.ldexp(*self.scales).repeat(self.block, axis=-1)


# ---- one step of a matrix unit ----


def terms_of_step(a: Factor, b: Factor, step: DotAdd | FloorDotAdd) -> Terms:
    """Return the terms that one step of a matrix unit adds to C: Terms (M, N, K / group), or (M, N, K) without a group.

    a and b hold only the K elements of the step.

    - If group is 1, or if the step is a FloorDotAdd, which has no group, a term is one product times the block scales
      of its two elements. Its significand is the product of the significands of all these factors. It is not normalized
      again. Its exponent is the sum of their exponents.
    - If group > 1, a term is the exact sum p of `group` products, times the two block scales. Its significand is p
      times the significands of the block scales, and its exponent is the sum of the exponents of the block scales.

    A term is zero, and has the exponent zero_exponent, if its products are all zero or a block scale is zero. If p is
    zero because products cancel, the term keeps the exponent of its block scales.
    """
    s = a.elements.significand[:, None] * b.elements.significand
    e = a.elements.exponent[:, None] + b.elements.exponent
    zero = s == 0
    if isinstance(step, DotAdd) and step.group > 1:
        grouped = np.ldexp(s, e).reshape(*s.shape[:2], step.k // step.group, step.group)
        s, zero = grouped.sum(axis=-1), (grouped == 0).all(axis=-1)
        e = np.zeros(s.shape, np.int32)
    for scales, block, axis in ((a.scales, a.block, 1), (b.scales, b.block, 0)):
        if scales is not None:
            per_term = block * s.shape[-1] // a.elements.significand.shape[-1]
            scale_s, scale_e = (np.expand_dims(part.repeat(per_term, axis=-1), axis) for part in scales)
            s, e, zero = s * scale_s, e + scale_e, zero | (scale_s == 0)
    return Terms(s, np.where(zero, step.zero_exponent, e))


def shifted_sum(t: Terms, largest: Array, fraction_bits: int) -> Array:
    """Return the sum of Terms over the last axis, after truncating each term to a multiple of a power of two.

    Each term is truncated toward zero, to a multiple of 2^(largest - fraction_bits), where `largest` is an exponent.
    The result is an exact float64, in units of this power of two.
    """
    shift = t.exponent - largest[..., None] + fraction_bits
    total: Array = np.trunc(np.ldexp(t.significand, shift)).sum(axis=-1)
    return total


def truncated_sum(t: Terms, step: DotAdd) -> Array:
    """Return the sum of Terms over the last axis, rounded as an NVIDIA matrix unit does: float32.

    The terms are aligned to the largest exponent among them, and each is truncated toward zero to step.fraction_bits
    fraction bits. Their sum is exact. It is then normalized and truncated toward zero to step.output_bits fraction
    bits. For float16 sums, it is rounded to float16, to nearest even, instead.

    The smallest exponent of the result is -126, so smaller results are subnormal. A sum of zero is +0, and NaN is
    0x7FFFFFFF. A result of 2^128 or more is infinite.
    """
    largest = t.exponent.max(axis=-1)
    total = np.ldexp(shifted_sum(t, largest, step.fraction_bits), largest - step.fraction_bits)
    s, e = as_terms(total, LEAST_EXPONENT)
    if step.output == "float16":
        result = total.astype(np.float16).astype(np.float32)
    else:
        result = np.ldexp(np.trunc(np.ldexp(s, step.output_bits)), e - step.output_bits).astype(np.float32)
    return np.where(np.isnan(result), NAN, result + np.float32(0))  # -0 + 0 is +0


def floored_sum(t: Terms, c: Terms, step: FloorDotAdd) -> Array:
    """Return the sum of the products t and of c, rounded as an AMD CDNA3 matrix unit does: float32 (M, N).

    All sums are rounded down (floor); `step` says how many bits each of them keeps (see FloorDotAdd). A zero result
    keeps its sign, NaN is 0x7FFFFFFF, and a result of 2^128 or more is infinite.

    t: the products, Terms (M, N, K).
    c: the sums so far, Terms (M, N).
    """
    sums = [Terms(t.significand[..., i :: step.sums], t.exponent[..., i :: step.sums]) for i in range(step.sums)]
    F, largest = step.fraction_bits, [part.exponent.max(axis=-1) for part in sums]
    totals = [shifted_sum(part, top, F) for part, top in zip(sums, largest, strict=True)]
    e = np.maximum.reduce(largest)
    if step.sums > 1:
        totals = [np.floor(np.ldexp(total, top - e)) for total, top in zip(totals, largest, strict=True)]
    products = np.ldexp(sum(totals), -F)
    top = np.maximum(e, c.exponent)
    products = np.ldexp(np.floor(np.ldexp(products, e - top + step.sum_bits + 1)), -step.sum_bits - 1)
    c_part = np.ldexp(np.floor(np.ldexp(c.significand, c.exponent - top + F)), -F)
    if step.c_vanishes:
        c_part = np.where((c.exponent < top - F - 1) & np.isfinite(c_part), 0, c_part)
    s, e = as_terms(np.ldexp(products + c_part, top), LEAST_EXPONENT)
    result = np.ldexp(np.floor(np.ldexp(s, step.sum_bits)), e - step.sum_bits).astype(np.float32)
    return np.where(np.isnan(result), NAN, result)


def add_step(a: Factor, b: Factor, c: Array, step: DotAdd | FloorDotAdd) -> Array:
    """Return C plus the products of one step of a matrix unit: float32 (M, N). c is not changed.

    - A DotAdd adds as truncated_sum does. A C of zero has the exponent step.zero_exponent.
    - A FloorDotAdd adds as floored_sum does. If it has one sum and no block scales, a product of 2^128 or more counts
      as infinite.

    a, b: the operands, cut to the K elements of the step.
    c: C, float32 (M, N).
    """
    t, c_term = terms_of_step(a, b, step), as_terms(c, LEAST_EXPONENT)
    if isinstance(step, FloorDotAdd):
        if a.scales is None and step.sums == 1:  # products of 2^128 and more are infinite
            beyond = t.exponent + (np.abs(t.significand) >= 2) >= 128
            t = Terms(np.where(beyond, t.significand * np.inf, t.significand), t.exponent)
        return floored_sum(t, c_term, step)
    c_term = Terms(c_term.significand, np.where(c == 0, step.zero_exponent, c_term.exponent))
    both = (np.concatenate([x, y[..., None]], axis=-1) for x, y in zip(t, c_term, strict=True))
    return truncated_sum(Terms(*both), step)


def integer_sums(a: Array, b: Array, c: Array, step: IntegerAdd) -> Array:
    """Return C + A B^T of matrices of 8-bit integers, int32 (M, N): exact, and after every step wrapped or saturated.

    a: A, int8 or uint8 (M, K). b: B, int8 or uint8 (N, K). c: C, int32 (M, N).
    """
    total = c.astype(np.int64)
    for start in range(0, a.shape[-1], step.k):
        x, y = (part[:, start : start + step.k].astype(np.int64) for part in (a, b))
        total = total + x @ y.T
        total = np.clip(total, -(2**31), 2**31 - 1) if step.saturate else (total + 2**31) % 2**32 - 2**31
    return total.astype(np.int32)


# ---- a whole product ----


def _cut(f: Factor, start: int, stop: int) -> Factor:
    """Return the elements start to stop of every row of a Factor, with their block scales."""
    # start must be a multiple of the block length.
    elements = Terms(*(part[:, start:stop] for part in f.elements))
    if f.scales is None:
        return f._replace(elements=elements)
    scales = Terms(*(part[:, start // f.block : -(-stop // f.block)] for part in f.scales))
    return f._replace(elements=elements, scales=scales)


def chain(a: Factor, b: Factor, c: Array, step: DotAdd | FloorDotAdd) -> Array:
    """Return C + A B^T, added in ascending steps along K. Each step adds to the sums of the previous step.

    The result is float32 (M, N). K is a multiple of step.k. If K is 0, c itself is returned.
    """
    for start in range(0, a.elements.significand.shape[-1], step.k):
        c = add_step(_cut(a, start, start + step.k), _cut(b, start, start + step.k), c, step)
    return c


def promoted_chain(
    a: Factor, b: Factor, c: Array, step: DotAdd | FloorDotAdd, promote: int, in_turn: bool = False
) -> Array:
    """Return C + A B^T, added in chains of `promote` elements of K.

    Each chain starts at zero. The chains are added to C in the format of the step's sums, float32 or float16, to
    nearest even. The last chain may be shorter.
    If K is 0, c itself is returned. If chains have scales, each sum is added by a fused multiply-add, as cuBLASLt and
    DeepGEMM do for FP8 with a scale per 128 elements:

        c = fma(sum, scale_a * scale_b, c)            if the scales of b belong to square blocks
        c = fma(sum * scale_a, scale_b, c)            if in_turn

    step: the step that adds the elements of a chain. Its k divides promote and K.
    """
    for start in range(0, a.elements.significand.shape[-1], promote):
        stop = start + promote
        total = chain(_cut(a, start, stop), _cut(b, start, stop), np.zeros_like(c), step)
        if a.chains is not None and b.chains is not None:
            x, y = a.chains[:, start // promote, None], b.chains[:, start // promote]
            c = fma(total * x, np.broadcast_to(y, c.shape), c) if in_turn else fma(total, x * y, c)
            continue
        c = c + total
        c = c.astype(np.float16).astype(np.float32) if getattr(step, "output", "") == "float16" else c
    return c


# ---- sums in other orders ----


def sum_exact(a: Factor, b: Factor, c: Array) -> Array:
    """Return the exact value of C + A B^T, rounded once to float32, to nearest even.

    If a product or the element of C is infinite or NaN, the sum follows IEEE arithmetic instead.

    math.fsum rounds the exact sum to float64. A second rounding of this float64 could err at a tie. So an inexact
    float64 is first made odd: its last bit is set to 1 on the side of the exact sum. The rounding to float32 then sees
    whether the sum lies above or below a tie.
    """
    x, y, out = a.values(), b.values(), np.empty(c.shape, np.float32)
    for m in range(len(x)):
        for n in range(len(y)):
            parts = [*(x[m] * y[n]).tolist(), float(c[m, n])]
            out[m, n] = _sum_once(parts) if np.isfinite(parts).all() else np.sum(np.float64(parts))
    return out


def _sum_once(parts: list[float]) -> np.float32:
    """Return the exact sum of the finite numbers `parts`, rounded once to float32, to nearest even."""
    total = fsum(parts)
    rest = fsum([*parts, -total])
    bits = np.float64(total).view(np.int64)
    if rest and not bits & 1:
        total = np.nextafter(total, np.copysign(np.inf, rest))
    return np.float32(total)


def sum_float64(a: Factor, b: Factor, c: Array) -> Array:
    """Return C + A B^T (M, N), added in float64 with k ascending; the result is rounded to float32.

    The products (elements times their block scales, from a and b) are exact, and each addition is rounded. Infinity and
    NaN follow IEEE arithmetic.
    """
    x, y, total = a.values(), b.values(), c.astype(np.float64)
    for k in range(x.shape[-1]):
        total = total + x[:, None, k] * y[:, k]
    return total.astype(np.float32)


def sum_float32_blocks(a: Factor, b: Factor, c: Array) -> Array:
    """Return C + A B^T, added block by block in float32, as Transformer Engine's reference does for NVFP4.

    The result is float32 (M, N). The blocks are added in ascending order. Each block adds this term to C:

        (scale_a * scale_b) * (exact sum of the products of the block's elements)

    Both multiplications and the addition to C are rounded to float32. Both operands must have block scales and blocks
    of one size. If K is 0, c itself is returned. Source: reference_nvfp4.py of Transformer Engine.
    """
    x, y = (np.ldexp(*f.elements).astype(np.float32) for f in (a, b))
    scales = [np.ldexp(*f.scales).astype(np.float32) for f in (a, b) if f.scales is not None]
    for i in range(scales[0].shape[-1]):
        block = slice(i * a.block, (i + 1) * a.block)
        c = c + (scales[0][:, None, i] * scales[1][:, i]) * (x[:, block] @ y[:, block].T)
    return c


def sum_float32(a: Factor, b: Factor, c: Array) -> Array:
    """Return C + A B^T (M, N), added in float32 with k ascending, with each product and each sum rounded to float32.

    Elements times their block scales are rounded to float32 first. Infinity and NaN follow IEEE arithmetic. If K is 0,
    c itself is returned.
    """
    x, y = (f.values().astype(np.float32) for f in (a, b))
    for k in range(x.shape[-1]):
        c = c + x[:, None, k] * y[:, k]
    return c


def low_rank_product(b: Array, a: Array) -> Array:
    """Return B A, float32 (N, K): every element is a chain of fused multiply-adds in the order of the rank, from +0.

    So MKL computes it for PyTorch on x86-64, up to a rank of 128. b: float32 (N, r); a: float32 (r, K).
    """
    total = np.zeros((len(b), a.shape[1]), np.float32)
    for k in range(len(a)):
        total = fma(b[:, k : k + 1], a[k], total)
    return total


# ---- the CPU products of MLX and llama.cpp: a is an array, c is zeros ----


def _engine_parts(a: Factor, b: Factor) -> tuple[Array, Array, Array]:
    """Return (elements of a, elements of b, block scales of b), float32."""
    assert b.scales is not None
    x, y, scales = (np.ldexp(*terms).astype(np.float32) for terms in (a.elements, b.elements, b.scales))
    return x, y, scales


def sum_mlx_cpu(a: Factor, b: Factor, c: Array) -> Array:
    """Return A B^T as mx.quantized_matmul computes it on an x86-64 CPU: float32 (M, N) that the dtype of A holds.

    T rounds to the dtype of A, after every operation. The groups of B, which share a block scale, ascend:

        group = T(group + T(a_k * T(b_k)))         for each k of the group, from 0
        sum = T(sum + T(T(scale) * group))         for each group, from 0

    Source: MLX 0.32.4 backend/cpu/quantized.cpp.
    """
    dtype = np.dtype(getattr(ml_dtypes, a.element, a.element))
    x, y, scales = _engine_parts(a, b)
    scales = round_to(scales, dtype)
    for i in range(scales.shape[-1]):
        group = np.zeros_like(c)
        for k in range(i * b.block, (i + 1) * b.block):
            group = round_to(group + round_to(x[:, k, None] * y[:, k], dtype), dtype)
        c = round_to(c + round_to(scales[:, i] * group, dtype), dtype)
    return c


def _maxps(a: Array, b: Array) -> Array:
    """Return the larger of a and b, or b if one of them is NaN, as the instruction maxps does."""
    return np.where(a > b, a, b)


def quantize_q8_0(x: Array) -> tuple[Array, Array]:
    """Quantize rows to Q8_0, as llama.cpp does on AVX2. Return (codes, d): float32 (M, K) and (M, K / 32).

    Each block of 32 elements with the amax m has a scale d, which float16 holds:

        d = float16(m / 127),  code = rint(x * (127 / m)), or 0 if m is 0

    Codes lie in -128 to 127. As the instruction cvtps2dq gives, NaN and products from 2^31 on become -128. The amax is
    NaN or leaves NaN out by its position, as maxps does. Source: ggml-cpu/arch/x86/quants.c quantize_row_q8_0.
    """
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    amax = reduce(_maxps, np.moveaxis(np.abs(blocks).reshape(*blocks.shape[:2], 4, 8), 2, 0))
    amax = _maxps(amax[..., 4:], amax[..., :4])
    amax = _maxps(amax[..., :2], amax[..., 2:])
    amax = _maxps(amax[..., :1], amax[..., 1:])
    inverse = np.where(amax == 0, ZERO, np.float32(127) / np.where(amax == 0, ONE, amax))
    scaled = np.rint(blocks * inverse)
    codes = np.where(np.abs(scaled) < 2.0**31, np.clip(scaled, -128, 127), np.float32(-128))
    d = (amax[..., 0] / np.float32(127)).astype(np.float16).astype(np.float32)
    return codes.reshape(x.shape), d


def _ggml_parts(a: Factor, b: Factor) -> tuple[Array, Array, Array, Array]:
    """Return Q8_0 of a (codes, d), twice the elements of b, which are then integers, and the halved scales of b."""
    x, y, scales = _engine_parts(a, b)
    return *quantize_q8_0(x), y * 2, scales


def _add_block(x: Array, d: Array, y: Array, scales: Array, i: int, total: Array) -> Array:
    """Add block i of 32 products, whose sum is an exact integer, to `total` by a fused multiply-add."""
    part = slice(32 * i, 32 * i + 32)
    return fma(x[:, part] @ y[:, part].T + ZERO, d[:, i, None] * scales[:, i], total)  # an integer has no -0


def sum_ggml_avx2(a: Factor, b: Factor, c: Array) -> Array:
    """Return A B^T as ggml_vec_dot_mxfp4_q8_0 and ggml_vec_dot_nvfp4_q8_0 of llama.cpp compute it on AVX2.

    A is quantized to Q8_0, block by block of 32. Lane j of 8 holds the integer sum of products 4j to 4j + 3 of a block,
    and is added to an accumulator by a fused multiply-add:

        acc[j] = fma(sum, d * scale, acc[j])

    - MXFP4: even blocks have one set of accumulators, odd ones another; both are added at the end. If the number of
      blocks is odd, the integer sum of the whole last block is added to the result, also by fma.
    - NVFP4: one set. Lanes 0 to 3 have the block scale of the first 16 elements, lanes 4 to 7 that of the others.

    The lanes are added as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). In the lanes, a code -128, which stands for NaN or
    infinity, multiplies the magnitude of its element, because psignb cannot negate it.
    """
    x, d, y, scales = _ggml_parts(a, b)
    wrapped = np.where(x == -128, x, ZERO)
    count, is_mx = d.shape[-1], b.block == 32
    acc = np.zeros((1 + is_mx, 8, *c.shape), np.float32)
    paired = count - count % 2 if is_mx else count
    for i, j in np.ndindex(paired, 8):
        part, scale = slice(32 * i + 4 * j, 32 * i + 4 * j + 4), scales[:, i if is_mx else 2 * i + j // 4]
        total = (x - wrapped)[:, part] @ y[:, part].T + wrapped[:, part] @ np.abs(y[:, part]).T + ZERO
        acc[i % len(acc), j] = fma(total, d[:, i, None] * scale, acc[i % len(acc), j])
    lanes = acc[0] + acc[1] if is_mx else acc[0]
    lanes = lanes[4:] + lanes[:4]
    total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    return total if paired == count else _add_block(x, d, y, scales, count - 1, total)


def sum_ggml_avx2_repacked(a: Factor, b: Factor, c: Array) -> Array:
    """Return A B^T as llama.cpp computes it for MXFP4 weights that were repacked for AVX2 (mxfp4_8x8).

    A is quantized to Q8_0. Blocks ascend, and the exact sum of the products of a block is added by a fused
    multiply-add: acc = fma(sum, d * scale, acc). Source: ggml-cpu/arch/x86/repack.cpp ggml_gemm_mxfp4_8x8_q8_0, and
    ggml_gemv_mxfp4_8x8_q8_0 for single rows.
    """
    x, d, y, scales = _ggml_parts(a, b)
    return reduce(lambda total, i: _add_block(x, d, y, scales, i, total), range(d.shape[-1]), c)


_ORDERS = {
    "exact": sum_exact,
    "float64": sum_float64,
    "float32-blocks": sum_float32_blocks,
    "dequantized": sum_float32,
    "mlx-cpu": sum_mlx_cpu,
    "ggml-avx2": sum_ggml_avx2,
    "ggml-avx2-repacked": sum_ggml_avx2_repacked,
}


def sums(a: Factor, b: Factor, c: Array, unit: Unit, step: DotAdd | FloorDotAdd | None, in_turn: bool = False) -> Array:
    """Return C + A B^T, added up in the steps and with the rounding of a matrix unit: float32 (M, N).

    If K is 0, c itself may be returned.

    a, b: the operands A (M, K) and B (N, K).
    c: the matrix C, float32 (M, N).
    unit: the matrix unit.
    step: the step of the unit for these operands, whose K is a multiple of step.k. None if the unit has no steps, but
        an order such as "exact".
    in_turn: as in promoted_chain.
    """
    if unit.order is not None:
        return _ORDERS[unit.order](a, b, c)
    assert step is not None
    return chain(a, b, c, step) if unit.promote is None else promoted_chain(a, b, c, step, unit.promote, in_turn)


def scaled(total: Array, factor_a: Array | None, factor_b: Array | None, in_turn: bool = False) -> Array:
    """Return sums (M, N), multiplied in float32 by the product of the tensor scales of a and b.

    in_turn: multiply by the scale of b first, then by that of a.
    total: the sums.
    factor_a, factor_b: the tensor scales (M,) and (N,). None stands for 1. If both are None, `total` itself is
    returned.
    """
    if factor_a is not None and factor_b is not None:
        total = total * factor_b * factor_a[:, None] if in_turn else total * (factor_a[:, None] * factor_b)
    elif factor_a is not None:
        total = total * factor_a[:, None]
    elif factor_b is not None:
        total = total * factor_b
    return total


def rounded(total: Array, dtype: Dtype) -> Array:
    """Return float32 numbers in the dtype of a result, rounded to nearest even.

    NaN becomes 0x7FFFFFFF, or 0x7FFF in a 16-bit dtype.
    """
    result = total.astype(dtype)
    result.view(f"u{dtype.itemsize}")[np.isnan(total)] = 0x7FFFFFFF >> (32 - 8 * dtype.itemsize)
    return result
