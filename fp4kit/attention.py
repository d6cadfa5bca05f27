"""Quantize the operands of attention to NVFP4 as SageAttention3 does, and compute attention with these operands or with
K and V from a quantized KV cache.

Q, K and V are arrays (..., tokens, head_dim), usually (batch, heads, tokens, head_dim). P is the softmax of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import e, log2
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_flag, as_float32, explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_arrays, making_current, on_device, to_device, to_host
from fp4kit.arrays.returns import returns_in_library
from fp4kit.formats import E2M1, NVFP4
from fp4kit.layouts import pack
from fp4kit.ops.matmul import decibels, matmul
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes.schema import of_format
from fp4kit.reference.arith import exp2, flush, fma
from fp4kit.reference.codec import encode, encode_e4m3_scale
from fp4kit.types import Array
from fp4kit.units import Unit

__all__ = ["QKV", "QuantizedP", "attention", "error_budget", "kernel_scales", "quantize_p", "quantize_qkv"]

RECIPE = of_format(
    NVFP4,
    "nvfp4-sageattention3",
    "tensor_scaling=none block_rule=flashinfer_kv_page flush=True",
    source="SageAttention d1a57a5 sageattention3_blackwell/sageattn3/quantization/fp4_quantization_4d.cu",
    exact="codes and scales of the kernels for Q, K and V, with the approximate reciprocals of sm_90 (d1a57a5)",
)
TILE = 128  # tokens: a kernel multiplies TILE queries with TILE keys at a time, and pads their numbers to multiples
_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_LOG2_P, _LOG2_6 = np.array([-log2(2688), -log2(6)], np.float32)  # 2688 = 448 * 6, the largest P
Smooth = Literal["block", "tensor"] | None


class QKV(NamedTuple):
    """The quantized operands of attention, which quantize_qkv returns.

    Attributes:
        q: a Quantized (..., M, head_dim), with blocks along head_dim. M is the number of queries, padded to a multiple
            of 128.
        k: a Quantized (..., N, head_dim), with blocks along head_dim. N is the number of keys, padded to a multiple of
            128. Within every 32 rows, row 8a + 2b + c holds key 2a + 8b + c (a and b from 0 to 3, c 0 or 1).
        v: a Quantized (..., N, head_dim), with blocks along the tokens. v.packed has the shape (..., head_dim, N/2).
        delta_s: float32 (..., M/128, N), or (..., 1, N) for smooth="tensor": the product of the mean of Q and the
            smoothed keys, in the order of the keys. Scores are the product of q and k plus delta_s. None without
            smoothing.
        queries: the number of queries before padding.
        keys: the number of keys before padding.
    """

    q: Quantized
    k: Quantized
    v: Quantized
    delta_s: Any
    queries: int
    keys: int


class QuantizedP(NamedTuple):
    """The quantized P of one tile of scores, which quantize_p returns.

    Attributes:
        p: a Quantized (..., M, N) whose values are 2688 * exp(softmax_scale * (s - row_max)), quantized.
        row_max: float32 (..., M), the largest score of each row.
        row_sum: float32 (..., M), the sum of the values of each row before they are quantized. The factor 2688 cancels
            when P V is divided by it.
    """

    p: Quantized
    row_max: Any
    row_sum: Any


@explains_calls
@returns_in_library
@ieee("quantize_qkv")
@np.errstate(all="ignore")
def quantize_qkv(q: Array, k: Array, v: Array, *, smooth: Smooth = "block") -> QKV:
    """Quantize Q, K and V to NVFP4 as SageAttention3 does: smoothed, padded, and with the keys of K permuted.

        K' = K - mean of K over the tokens
        Q' = Q - mean of Q over every 128 tokens
        scale = E4M3(amax of 16 elements / 6);   code = E2M1(x * (1 / scale)), or x * 0 if scale is 0
        delta_s = mean of Q times K'^T

    Blocks of Q and K consist of 16 elements of a token. Blocks of V consist of 16 tokens of a channel. No operand has a
    tensor scale.

    Args:
        q: float16 or bfloat16 (..., queries, head_dim). head_dim is 64 or 128.
        k: (..., keys, head_dim), of the dtype and on the device of q.
        v: as k.
        smooth: "block" subtracts from Q the mean of every 128 tokens, as per_block_mean=True does. "tensor" subtracts
            the mean of all tokens, as per_block_mean=False does. Both count the zeros that pad Q. None smooths neither
            Q nor K, like the quantization kernels alone.

    Returns:
        A QKV with arrays in the library and on the device of q. kernel_scales returns scales in the order of the
            kernels.

    Raises:
        TypeError: q, k and v are not all float16 or all bfloat16.
        ValueError: shapes do not fit, head_dim is neither 64 nor 128, or there are no tokens.
        ValueError: smooth is unknown, or the arrays are on several devices.

    Numerics:
        - Elements round to nearest even, and -0 is kept. NaN gets code 7, and a block's amax ignores it, but a block of
          only NaN has the scale NaN (7F). An infinity gives scale 448 and code 7 with its sign. A block whose scale
          underflows has the codes 0 and 8.
        - A mean is a float64 sum in the order of the tokens, divided by their number, and rounded to float32 and then
          to the dtype of q. PyTorch and Triton add in another order and with fewer bits, so their means may differ in
          the last bit. For equal results, subtract their means yourself and pass smooth=None.
        - Differences are rounded to the dtype of q. delta_s is an exact sum, rounded to float32 and then to that dtype.
        - Smoothing is computed on the host.

    Exact:
        With smooth=None, the codes and scales equal those of SageAttention3's kernels for Q, K and V, built for a CPU.
        Its setup.py compiles them with --use_fast_math, so on a GPU the two divisions are approximate, and values next
        to a tie may differ. The smoothing and delta_s were derived from the source code, not recorded.

    Source:
        SageAttention d1a57a5, sageattn3/api.py and quantization/fp4_quantization_4d.cu.

    Examples:
        >>> import ml_dtypes, numpy as np
        >>> from fp4kit.attention import quantize_qkv
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 200, 64)).astype(ml_dtypes.bfloat16)
        >>> x = quantize_qkv(q, k, v)
        >>> x.k.shape, x.v.packed.shape, x.delta_s.shape
        ((2, 256, 64), (2, 64, 128), (2, 2, 256))
    """
    op = "quantize_qkv"
    given = import_arrays(op, q=q, k=k, v=v)
    _check_operands(op, given)
    if smooth not in ("block", "tensor", None):
        raise ValueError(f"{op}: smooth is {smooth!r:.60}; needs 'block', 'tensor' or None")
    queries, keys, delta_s = given[0].shape[-2], given[1].shape[-2], None
    hq, hk, hv = map(to_host, given)
    if smooth:
        hk = (hk.astype(np.float32) - _mean(hk)).astype(hk.dtype)
    hq, hk, hv = map(_padded, (hq, hk, hv))
    if smooth:
        grouped = hq.reshape(*hq.shape[:-2], -1, TILE if smooth == "block" else hq.shape[-2], hq.shape[-1])
        mean = _mean(grouped)
        hq = (grouped.astype(np.float32) - mean).astype(hq.dtype).reshape(hq.shape)
        products = matmul(mean[..., 0, :].astype(hq.dtype), hk, unit="exact", out_dtype=hq.dtype)
        delta_s = _put(products.astype(np.float32), given[0])
    hk = np.ascontiguousarray(_permuted(hk.swapaxes(-1, -2)).swapaxes(-1, -2))
    quantized = [_quantized(_put(x, given[0]), axis) for x, axis in ((hq, -1), (hk, -1), (hv, -2))]
    return QKV(quantized[0], quantized[1], quantized[2], delta_s, queries, keys)


def _check_operands(op: str, operands: tuple[Any, ...]) -> None:
    q, k, v = operands
    for name, x in zip("qkv", operands, strict=True):
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}; needs q, k and v to be all float16 or all bfloat16")
        if x.ndim < 2 or 0 in x.shape or x.shape[-1] not in (64, 128):
            raise ValueError(f"{op}: {name} is {x.shape}; needs (..., tokens, head_dim), head_dim 64 or 128, not empty")
    if k.shape != v.shape or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        shapes = f"q, k and v are {q.shape}, {k.shape} and {v.shape}"
        raise ValueError(f"{op}: {shapes}; k and v need one shape, and only the number of tokens of q may differ")


def _put(a: np.ndarray, like: Any) -> Any:
    """Return a NumPy array on the device of the array `like`."""
    if not on_device(like):
        return a
    with making_current(like.device.id):
        return to_device(a)


def _padded(x: np.ndarray) -> np.ndarray:
    """Return x with zeros after its tokens, so that their number is a multiple of TILE."""
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % TILE), (0, 0)])


def _mean(x: np.ndarray) -> np.ndarray:
    """Return the means of x over its tokens, float32, with an axis of length 1 for them."""
    mean = np.cumsum(x.astype(np.float64), axis=-2)[..., -1:, :] / x.shape[-2]
    return mean.astype(np.float32).astype(x.dtype).astype(np.float32)


def _permuted(x: Any) -> Any:
    """Return x with its last axis, the keys, in the order of the rows of QKV.k. A second call restores the order."""
    return x.reshape(*x.shape[:-1], -1, 4, 4, 2).swapaxes(-2, -3).reshape(x.shape)


def _quantized(x: Any, axis: int) -> Quantized:
    q = quantize(x, RECIPE, axis=axis)
    # RECIPE gives a block of only NaN the amax 0, the kernels NaN. No other block has the scale 0 and only codes 7.
    only_nan = (q.packed.reshape(*q.block_scale.shape, 8) == 0x77).all(-1) & (q.block_scale == 0)
    q.block_scale[only_nan] = 0x7F
    return q


@explains_calls
def kernel_scales(q: Quantized) -> Any:
    """Return the block scales of Q, K or V in the order in which SageAttention3's kernels store them.

        byte 256 (column / 4) + 16 (row mod 16) + 4 (row / 16) + column mod 4 of every 64 rows; quotients round down

    Args:
        q: the field q, k or v of a QKV.

    Returns:
        An array of uint8 in the shape and library of q.block_scale. The codes of the kernels are q.packed.

    Raises:
        ValueError: the rows of scales are not a multiple of 64, or their columns not a multiple of 4.

    Source:
        SageAttention d1a57a5, fp4_quantization_4d.cu, output_sf.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.attention import kernel_scales, quantize_qkv
        >>> x = quantize_qkv(*np.ones((3, 1, 128, 64), np.float16))
        >>> kernel_scales(x.v).shape
        (1, 64, 8)
    """
    *lead, rows, columns = q.block_scale.shape
    if rows % 64 or columns % 4:
        raise ValueError(f"kernel_scales: the scales are {rows} x {columns}; needs multiples of 64 and 4, as in a QKV")
    tiles = q.block_scale.reshape(*lead, rows // 64, 4, 16, columns // 4, 4)
    return tiles.swapaxes(-4, -2).reshape(q.block_scale.shape)


@explains_calls
@returns_in_library
@ieee("quantize_p")
@np.errstate(all="ignore")
def quantize_p(s: Array, softmax_scale: float) -> QuantizedP:
    """Quantize P, the softmax of a tile of scores, to NVFP4 in two levels, as SageAttention3 does.

        P     = 2^(s * t - (row_max * t - log2(2688)))           t = softmax_scale * log2(e)
        f     = 2^(max(s of 16 keys) * t - (row_max * t - log2(2688)) - log2(6))
        scale = E4M3(f);   code = E2M1(P / f)

    The first level makes the largest P of each row 2688, which is 448 * 6, so that the scales of 16 keys use the range
    of E4M3. The second level divides by f, not by the rounded scale.

    Args:
        s: float32 (..., M, N), the scores of a tile, in the order of the keys. N is a multiple of 32, and -infinity
            masks a key. SageAttention3's tiles have 128 keys.
        softmax_scale: the factor of the scores, a positive number, usually head_dim ** -0.5. It is rounded to float32,
            and so is t.

    Returns:
        A QuantizedP with arrays in the library and on the device of s.

    Raises:
        TypeError: s is not float32, or softmax_scale is not a number.
        ValueError: N is not a multiple of 32, s is 0-d or 1-d, or softmax_scale is not positive and finite.

    Numerics:
        - Each product and the subtraction that follows it are one fused multiply-add; other operations are float32 and
          round to nearest even. 2^x is rounded correctly, and a subnormal result is 0.
        - row_sum adds like the four threads of a row: thread i adds keys 32j + 8i to 32j + 8i + 7 in order, and the
          sums are added as (0 + 1) + (2 + 3).
        - Codes round to nearest even, and the scale saturates at 448. NaN and 0 / 0 give code 7: a block of masked keys
          has scale 0 and codes 7, which decode to 0.
        - A row of only -infinity, and a row with a score of +infinity, contain NaN.
        - It is computed on the host.

    Exact:
        Derived from the source code, not recorded. A GPU computes 2^x and P / f approximately, so that values next to a
        tie may differ.

    Source:
        SageAttention d1a57a5, sageattn3/blackwell/softmax_fused.h and mainloop_tma_ws.h.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.attention import quantize_p
        >>> x = quantize_p(np.zeros((1, 32), np.float32), 0.125)
        >>> x.p.dequantize()[0, :2], round(float(x.row_sum[0]))
        (array([2688., 2688.], dtype=float32), 86016)
    """
    op = "quantize_p"
    (given,) = import_arrays(op, s=s)
    if given.dtype != np.float32:
        raise TypeError(f"{op}: s is {given.dtype}; needs float32, the scores that a matrix unit adds up")
    if given.ndim < 2 or given.shape[-1] % 32 or 0 in given.shape:
        raise ValueError(f"{op}: s has shape {given.shape}; needs a nonempty (..., M, N) with N a multiple of 32")
    scale = as_float32(op, "softmax_scale", softmax_scale, "needs a number")
    if not 0 < scale < np.inf:
        raise ValueError(f"{op}: softmax_scale is {softmax_scale!r:.60}; needs a positive finite float32 number")
    p, row_max, sums, _ = _softmax(to_host(given), scale, *_start(given.shape[:-1]))
    return QuantizedP(p.with_parts(lambda a: _put(a, given)), _put(row_max, given), _put(_added(sums), given))


def _start(rows: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest score of each row and the sums of its four threads, before the first tile."""
    return np.full(rows, -np.inf, np.float32), np.zeros((*rows, 4), np.float32)


def _softmax(s: np.ndarray, softmax_scale: np.float32, row_max: np.ndarray, sums: np.ndarray) -> tuple[Any, ...]:
    """Return (P, row_max, sums, factor) after a tile of scores, from row_max and the sums of threads before it.

    The factor multiplies what earlier tiles contributed to the output.
    """
    t = np.array(float(softmax_scale) * log2(e), np.float32)
    tops = np.fmax.reduce(s.reshape(*s.shape[:-1], -1, 16), axis=-1)
    new_max = np.fmax(row_max, np.fmax.reduce(tops, axis=-1))
    factor = _ex2((row_max - new_max) * t)
    top = -fma(new_max, t, _LOG2_P)[..., None]
    p, f = _ex2(fma(s, t, top)), _ex2(fma(tops, t, top) + _LOG2_6)
    sums = sums * factor[..., None]
    threads = p.reshape(*s.shape[:-1], -1, 4, 8)
    for i in range(threads.shape[-3]):
        for j in range(8):
            sums = sums + threads[..., i, :, j]
    codes = encode(p.reshape(*f.shape, 16) / f[..., None], E2M1).reshape(s.shape)
    quantized = Quantized.from_parts(pack(codes), encode_e4m3_scale(f), recipe=RECIPE, dtype=np.float32)
    return quantized, new_max, sums, factor


def _ex2(x: np.ndarray) -> np.ndarray:
    """Return 2^x rounded to float32, where a subnormal result is 0."""
    powers = exp2(np.clip(np.nan_to_num(x.astype(np.float64)), -1000, 1000))
    return flush(np.where(np.isnan(x), np.float32(np.nan), powers.astype(np.float32)))


def _added(sums: np.ndarray) -> np.ndarray:
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


@explains_calls
@returns_in_library
@ieee("attention")
def attention(
    q: Any, k: Any, v: Any, *, smooth: Smooth = "block", causal: bool = False, unit: str | Unit = "sm100"
) -> Any:
    """Return softmax(Q K^T / sqrt(head_dim)) V as SageAttention3 computes it, or FlashInfer with a quantized KV cache.

    If k and v are arrays, all operands are quantized in the way of SageAttention3:

        S = Q' K'^T + delta_s;   O = O * 2^((old row_max - row_max) * t) + P V;   result = O / row_sum

    The keys are processed in tiles of 128, from the last tile to the first. quantize_qkv states Q', K', V and delta_s,
    and quantize_p states P, row_max, row_sum and t, for softmax_scale = head_dim ** -0.5.

    If k and v are Quantized, they are decoded first, as FlashInfer's kernel fa2 decodes an NVFP4 KV cache:

        S = Q K'^T;   P = T(2^(S * t - row_max * t));   result = T(T(P V' / sum of P) * v_scale)
        t = head_dim ** -0.5 * q_scale * k_scale * log2(e)

    The tensor scales of Q, K and V are q_scale, k_scale and v_scale, or 1. K' and V' are the values without them. T
    rounds to the dtype of q.

    Args:
        q: float16 or bfloat16 (..., queries, head_dim), where head_dim is 64 or 128. If k and v are Quantized, head_dim
            may be any other, and q a Quantized of float16 or bfloat16 numbers, such as FP8 with a tensor scale.
        k: (..., keys, head_dim), of the dtype and on the device of q. Or a Quantized with at most one tensor scale,
            whose third last axis may be shorter than that of q: then each head of k is for several heads of q in a row.
        v: as k.
        smooth: as in quantize_qkv. It is not used if k and v are Quantized.
        causal: True if query i attends only to the keys from 0 to i + keys - queries. The others are masked.
        unit: the Unit or its id whose sums Q K^T and P V have, as in fp4kit.matmul. It needs an order of addition, such
            as "exact", or an instruction for NVFP4. If k and v are Quantized, it needs an instruction for the dtype of
            q instead.

    Returns:
        A new array (..., queries, head_dim) of the dtype of q, in its library and on its device.

    Raises:
        TypeError: as in quantize_qkv, or only one of k and v is Quantized.
        ValueError: as in quantize_qkv, or the unit is unknown or does not multiply these operands.
        ValueError: causal is True, and there are fewer keys than queries. Or k and v are arrays, and the difference is
            not a multiple of 128.

    Numerics:
        - A masked score is -infinity, and its P is 0. Keys that only pad a tile are masked.
        - Arrays: S starts from delta_s, and P V from zero. O * factor + P V is one fused multiply-add. O is multiplied
          by 1 / row_sum, or by 0 if row_sum is 0 or NaN, and then rounded to the dtype of q. So a score of NaN makes
          its row 0, or NaN if all 16 scores of its block are NaN. Queries skip tiles of 128 masked keys.
        - Quantized: P V' is multiplied by 1 / sum of P. t is rounded to float32 before it is multiplied by log2(e), and
          after. S * t - row_max * t is one fused multiply-add, and 2^x is as in quantize_p. The sum of P adds as P V',
          by products with 1. For NVFP4, float16 and bfloat16 represent K' and V' exactly. NaN in a row of S gives NaN.
        - P and the sums of O are computed on the host; products are computed on the device of q.

    Exact:
        An emulation, which has not been compared with a GPU.

        - Arrays: SageAttention3 runs on sm_120, and fp4kit has no unit that was compared with sm_120. Its kernel masks
          keys by their row in the permuted K, so its result differs if causal is True, or if the number of keys is not
          a multiple of 32. FlashInfer's port of the kernel masks the keys that are masked here.
        - Quantized: all keys are one tile here. The kernel's tiles depend on the GPU, and it computes 2^x and 1 / sum
          approximately. So P, the sums and the result may differ in the last bits.

    Source:
        SageAttention d1a57a5, sageattn3/blackwell/mainloop_tma_ws.h. FlashInfer fb28d72, attention/prefill.cuh and
        sm120/nvfp4_attention_sm120/compute/mainloop.cuh.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.attention import attention
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 200, 64)).astype(np.float16)
        >>> out = attention(q, k, v, causal=True)
        >>> out.shape, out.dtype
        ((4, 200, 64), dtype('float16'))
        >>> cached = [fp4kit.quantize(x, "nvfp4-flashinfer-kv") for x in (k, v)]
        >>> attention(q[:, -1:], *cached).shape  # one query, the last
        (4, 1, 64)
    """
    op, causal = "attention", as_flag("attention", "causal", causal)
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        return _from_cache(op, q, k, v, causal, unit)[0]
    given = import_arrays(op, q=q, k=k, v=v)
    return _put(_forward(op, quantize_qkv(*given, smooth=smooth), causal, unit)[0], given[0])


@np.errstate(all="ignore")
def _forward(
    op: str, x: QKV, causal: bool, unit: Any, keep: Callable[..., None] = lambda *tile: None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (attention, 1 / row_sum). Call keep(rows, keys, s, p, factor) after each tile, where rows is an index."""
    shape, on, shift = x.q.shape, x.q.packed, x.keys - x.queries
    if causal and (shift < 0 or shift % TILE):
        needed = f"needs keys - queries to be 0 or a multiple of {TILE}, because the kernel pads both"
        raise ValueError(f"{op}: causal is True, for {x.queries} queries and {x.keys} keys; {needed}")
    scale = np.float32(shape[-1] ** -0.5)
    (row_max, sums), out = _start(shape[:-1]), np.zeros(shape, np.float32)
    for start in range(x.k.shape[-2] - TILE, -1, -TILE):
        keys, delta_s = slice(start, start + TILE), None
        row = (..., slice(max(start - shift, 0) if causal else 0, shape[-2]))  # earlier queries skip the tile
        rows = (*row, slice(None))
        if x.delta_s is not None:
            first = _permuted(to_host(x.delta_s[..., keys]))
            delta_s = _put(first.repeat(shape[-2] // first.shape[-2], axis=-2)[rows], on)
        s = _permuted(to_host(matmul(x.q[rows], x.k[..., keys, :], unit=unit, c=delta_s)))
        s[..., max(x.keys - start, 0) :] = -np.inf
        if causal and start >= shift:
            s[..., _later(*s.shape[-2:])] = -np.inf
        p, row_max[row], sums[rows], factor = _softmax(s, scale, row_max[row], sums[rows])
        product = to_host(matmul(p.with_parts(lambda a: _put(a, on)), x.v[..., keys, :], unit=unit))
        out[rows] = fma(out[rows], factor[..., None], product)
        keep(rows, keys, s, p, factor)
    total = _added(sums)[..., None]
    inverse = np.where((total == 0) | np.isnan(total), np.float32(0), np.float32(1) / total)
    return (out * inverse)[..., : x.queries, :].astype(x.q.dtype), inverse


def _later(queries: int, keys: int, shift: int = 0) -> np.ndarray:
    """Return a bool array (queries, keys), True for the keys after query + shift."""
    return ~np.tri(queries, keys, shift, dtype=bool)


@np.errstate(all="ignore")
def _from_cache(op: str, q: Any, k: Any, v: Any, causal: bool, unit: Any) -> tuple[Any, ...]:
    """Return (attention, P, 1 / sum of P, scores, tensor scales of the scores, v, its tensor scale)."""
    q, score_scale = _values(op, "q", q)
    if q.dtype not in _DTYPES:
        raise TypeError(f"{op}: q is {q.dtype}; needs float16 or bfloat16, or a Quantized of such numbers")
    (k, k_scale), (v, v_scale) = _values(op, "k", k, q.dtype), _values(op, "v", v, q.dtype)
    score_scale, shift = score_scale * k_scale, k.shape[-2] - q.shape[-2]
    k, v = _per_query_head(k, q), _per_query_head(v, q)
    fits = k.shape == v.shape == (*q.shape[:-2], k.shape[-2], q.shape[-1])
    if not fits or 0 in (*q.shape, *k.shape) or (causal and shift < 0):
        shapes = f"{q.shape}, {k.shape} and {v.shape}, with each head of k and v repeated for the heads of q"
        needed = "needs one shape, except that the number of tokens of q may differ; with causal, it may be smaller"
        raise ValueError(f"{op}: q, k and v are {shapes}; {needed}")
    t = np.asarray(np.float32(q.shape[-1] ** -0.5 * score_scale) * np.float32(log2(e)))
    s = to_host(matmul(q, k, unit=unit))
    if causal:
        s[..., _later(q.shape[-2], k.shape[-2], shift)] = -np.inf
    p = _ex2(fma(s, t, -t * np.fmax.reduce(s, axis=-1, keepdims=True))).astype(q.dtype)
    ones = np.ones((*v.shape[:-2], 1, v.shape[-2]), q.dtype)  # their products with P add up to the sum of P
    columns = np.concatenate([to_host(v).swapaxes(-1, -2), ones], axis=-2)
    out = to_host(matmul(_put(p, q), _put(columns, q), unit=unit))
    inverse = np.float32(1) / out[..., -1:]
    result = (out[..., :-1] * inverse).astype(q.dtype)
    if v_scale != 1:
        result = (result.astype(np.float32) * np.float32(v_scale)).astype(q.dtype)
    return _put(result, q), p, inverse, s, score_scale, v, v_scale


def _values(op: str, name: str, x: Any, dtype: Any = None) -> tuple[Any, float]:
    """Return the values of q, or of a Quantized, without the tensor scale, in `dtype`; and the tensor scale."""
    if not isinstance(x, Quantized):
        if name != "q":
            raise TypeError(f"{op}: {name} is not Quantized; needs k and v to be both arrays or both Quantized")
        return import_arrays(op, q=x)[0], 1.0
    x, scale = x.imported(op), 1.0
    if x.tensor_scale is not None:
        if x.tensor_scale.size != 1:
            raise ValueError(f"{op}: {name} has {x.tensor_scale.size} tensor scales; needs at most one")
        scale, one = x.tensor_scale.item(), np.ones(x.tensor_scale.shape, np.float32)
        x = replace(x, tensor_scale=_put(one, x.packed), tensor_amax=None)
    return dequantize(x, dtype or x.dtype), scale


def _per_query_head(x: Any, q: Any) -> Any:
    """Return K or V with each head repeated for the heads of q that share it."""
    group = q.shape[-3] // max(x.shape[-3], 1) if min(x.ndim, q.ndim) > 2 else 1
    return x.repeat(group, axis=-3) if group > 1 else x


@explains_calls
@ieee("error_budget")
@np.errstate(all="ignore")
def error_budget(
    q: Array,
    k: Array,
    v: Array,
    *,
    operands: tuple[Any, Quantized, Quantized] | None = None,
    smooth: Smooth = "block",
    causal: bool = False,
    unit: str | Unit = "sm100",
) -> dict[str, float]:
    """Split the error of attention(q, k, v), or of attention(*operands), into its sources.

    Let S be the scores that the unit adds up from quantized Q and K, P' the quantized P divided by its sum, and V' the
    quantized V. softmax() includes the factor head_dim ** -0.5 and the mask. The total error is the sum of four errors:

        scores         softmax(S) V - softmax(Q K^T) V
        p              P' V - softmax(S) V
        v              P' V' - P' V
        accumulation   attention(...) - P' V'
        total          attention(...) - softmax(Q K^T) V

    Each error e is reported in dB, relative to the exact output: 10 log10(sum (softmax(Q K^T) V)^2 / sum e^2).

    Args:
        q: as in attention. With operands, q, k and v are the numbers that were quantized, of any dtype.
        k: as q.
        v: as q.
        operands: the arguments q, k and v of attention, if K and V come from a KV cache: k and v are Quantized. None
            stands for the arrays q, k and v.
        smooth: as in attention.
        causal: as in attention.
        unit: as in attention.

    Returns:
        {source: ratio} for these five sources, in this order. A larger ratio means a smaller error. inf means no error,
        and NaN that a sum of squares is not finite.

    Raises:
        TypeError: as in attention.
        ValueError: as in attention.

    Numerics:
        Everything except attention itself is computed in float64 on the host, where the order of sums is not fixed. The
        call needs four float64 arrays of the size of all scores.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.attention import error_budget
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = rng.standard_normal((3, 4, 256, 64)).astype(np.float16)
        >>> {source: round(ratio, 1) for source, ratio in error_budget(q, k + np.float16(3), v).items()}
        {'scores': 17.3, 'p': 20.6, 'v': 20.3, 'accumulation': 73.7, 'total': 14.3}
        >>> round(error_budget(q, k + np.float16(3), v, smooth=None)["total"], 1)  # the mean of K stays in its blocks
        8.7
        >>> cached = [fp4kit.quantize(x, "nvfp4-flashinfer-kv") for x in (k, v)]
        >>> {source: round(ratio, 1) for source, ratio in error_budget(q, k, v, operands=(q, *cached)).items()}
        {'scores': 20.0, 'p': 74.8, 'v': 20.2, 'accumulation': 70.6, 'total': 17.1}
    """
    op, causal = "error_budget", as_flag("error_budget", "causal", causal)
    given = import_arrays(op, q=q, k=k, v=v)
    if operands is not None:
        if [a.shape for a in given] != [x.shape for x in operands]:
            raise ValueError(f"{op}: the operands have other shapes than q, k and v; needs those that were quantized")
        result, p, inverse, s, score_scale, stored, v_scale = _from_cache(op, *operands, causal, unit)
        weights, scores = p.astype(np.float64) * inverse, s.astype(np.float64) * score_scale
        values = to_host(stored).astype(np.float64) * v_scale
    else:
        x = quantize_qkv(*given, smooth=smooth)
        weights, scores = (np.full((*x.q.shape[:-1], x.k.shape[-2]), start) for start in (0.0, -np.inf))

        def keep(rows: Any, keys: slice, s: np.ndarray, p: Quantized, factor: np.ndarray) -> None:
            weights[rows] *= factor[..., None]
            weights[(*rows[:2], keys)], scores[(*rows[:2], keys)] = dequantize(p), s

        result, inverse = _forward(op, x, causal, unit, keep)
        weights, scores = ((a[..., : x.queries, : x.keys]) for a in (weights * inverse, scores))
        values = to_host(dequantize(x.v, np.float32))[..., : x.keys, :].astype(np.float64)
    hq, hk, hv = (_per_query_head(to_host(a).astype(np.float64), given[0]) for a in given)
    exact_scores = hq @ hk.swapaxes(-1, -2)
    if causal:
        exact_scores[..., _later(hq.shape[-2], hk.shape[-2], hk.shape[-2] - hq.shape[-2])] = -np.inf
    exact, from_scores = (_softmax64(s, hq.shape[-1] ** -0.5) @ hv for s in (exact_scores, scores))
    steps = (exact, from_scores, weights @ hv, weights @ values, to_host(result).astype(np.float64), exact)
    signal, *noise = (float(np.square(a).sum()) for a in (exact, *(b - a for a, b in pairwise(steps))))
    return dict(zip(("scores", "p", "v", "accumulation", "total"), (decibels(signal, n) for n in noise), strict=True))


def _softmax64(s: np.ndarray, scale: float) -> np.ndarray:
    p = np.exp((s - s.max(axis=-1, keepdims=True)) * scale)
    return p / p.sum(axis=-1, keepdims=True)
