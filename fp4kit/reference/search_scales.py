"""Search of block scales by their error: every candidate in turn, in the float32 operations of Model-Optimizer's Triton
kernels.

Source: Model-Optimizer 0.47 torch/kernels/quantization/gemm/nvfp4_fp8_sweep.py, as Triton 3.6 compiles it for sm_90.
"""

from __future__ import annotations

import numpy as np

from fp4kit.call.search_scales import PLAIN, Search, Terms
from fp4kit.formats import E2M1, E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, divide_full, fma
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import block_amax
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.pow import power as raised
from fp4kit.reference.tensor_rules import tensor_scale

CODES = np.arange(1, 127, dtype=np.uint8)  # E4M3 above 0
OWN_RULE = "modelopt_static"  # of the code of a block's own amax
SIXTH = ONE / np.float32(6)
CHUNK = 1 << 18  # elements at a time


@np.errstate(all="ignore")
def search_matrix(x: np.ndarray, out: np.ndarray, amax: np.ndarray, search: Search) -> None:
    """For each block of x (M, K) the amax, of the 126 that give an E4M3 scale, whose loss is least, the first of
    equals.

    out: float32 (M, K / 16), that of a block in each of its rows.
    """
    r = search.call.recipe
    rows = max(CHUNK // x.shape[1] // r.block_rows, 1) * r.block_rows
    for first in range(0, len(x), rows):
        part = x[first : first + rows].astype(np.float32)
        chosen = least_amaxes(part, np.float32(amax.reshape(())), r, search.terms)
        out[first : first + rows] = np.repeat(chosen, r.block_rows, axis=0)[: len(part)]


def least_amaxes(x: np.ndarray, amax: np.float32, r: Recipe, terms: Terms = PLAIN) -> np.ndarray:
    """The same of float32 x, whose tensor has an amax: one for each block."""
    candidates = candidate_amaxes(amax, r)
    low, high = _span(block_amax(x, r), amax, r, terms)
    best, code = np.full(low.shape, np.inf, np.float32), low
    for i, scale in zip(CODES, scales_of(candidates, amax, r, terms), strict=True):
        loss = losses(x, scale, r, terms)
        better = (loss < best) & (low <= i) & (i <= high)
        best, code = np.where(better, loss, best), np.where(better, i, code)
    return candidates[code - 1]


def _span(amaxes: np.ndarray, amax: np.float32, r: Recipe, terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """First and last code that blocks may have: all, or those around the code of their own amax."""
    if terms.offsets is None:
        return np.full(amaxes.shape, CODES[0]), np.full(amaxes.shape, CODES[-1])
    tensor = tensor_scale(np.asarray(amax), r, np.dtype(np.float32))
    own = BLOCK_RULES[OWN_RULE].code(amaxes, tensor, r, np.dtype(np.float32)).astype(np.int32)
    low, high = (np.clip(own + offset, CODES[0], CODES[-1]).astype(np.uint8) for offset in terms.offsets)
    return low, high


# ---- scales
# -----------------------------------------------------------------------------------------------------------------


def candidate_amaxes(amax: np.float32, r: Recipe) -> np.ndarray:
    """float32 (126,): amax * (c * fp32(1 / N)) for the E4M3 scales c above 0, N = scale_max."""
    return amax * (decode(CODES, E4M3) * (ONE / np.float32(r.scale_max)))


def scales_of(candidates: np.ndarray, amax: np.float32, r: Recipe, terms: Terms) -> np.ndarray:
    """What elements are divided by: candidate * fp32(1 / 6), with a Hessian through E4M3 under the tensor's scale; 1
    for 0.
    """
    scales = candidates * SIXTH
    if terms.hessian is not None:
        scales = _through_e4m3(scales, amax * np.float32(448 / r.scale_max) * SIXTH)
    return np.where(scales == 0, ONE, scales)


def _through_e4m3(scales: np.ndarray, top: np.ndarray) -> np.ndarray:
    """E4M3 values of scales under 448 / top, 448 where top is at most 2^-24. Source: Model-Optimizer fake_e4m3fy
    (CUDA).
    """
    factor = np.float32(448) / np.where(top <= np.float32(2.0**-24), ONE, top)
    codes = encode(np.clip(scales * factor, np.float32(-448), np.float32(448)), E4M3)
    return decode(codes, E4M3) * (ONE / factor)


# ---- losses
# -----------------------------------------------------------------------------------------------------------------


def losses(x: np.ndarray, scale: np.float32, r: Recipe, terms: Terms) -> np.ndarray:
    """The loss of each block of float32 x (M, K) under one scale: float32 (ceil(M / block rows), K / 16)."""
    runs = x.reshape(len(x), -1, r.block_size)
    d = left_of(np.abs(runs), scale)
    if terms.hessian is not None:
        rows = quadratic(np.where(runs >= 0, d, -d), terms.hessian)
    else:
        weights = None if terms.weights is None else terms.weights.reshape(-1, r.block_size)
        rows = squared(d, weights) if terms.power == 2 else powers(np.abs(d), weights, terms.power)
    total = rows[:: r.block_rows].copy()
    for i in range(1, r.block_rows):
        more = rows[i :: r.block_rows]
        total[: len(more)] = joined(total[: len(more)], more, terms.power)
    return total


def left_of(a: np.ndarray, scale: np.float32) -> np.ndarray:
    """a - q * scale, rounded once, of a >= 0: q the E2M1 value nearest to div.full.f32(a, scale), ties to even
    codes.
    """
    q = decode(encode(np.fmin(divide_full(a, np.full_like(a, scale)), np.float32(6)), E2M1), E2M1)
    return fma(-scale, q, a)


def squared(d: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """sum of d^2, or of weight * d^2, over the last axis: of four neighbours by fma, the second first, then folded."""
    weighted = d if weights is None else weights * d
    d, weighted = (part.reshape(*part.shape[:-1], -1, 4) for part in (d, weighted))
    total = weighted[..., 1] * d[..., 1]
    for i in (0, 2, 3):
        total = fma(weighted[..., i], d[..., i], total)
    return folded(total)


def powers(d: np.ndarray, weights: np.ndarray | None, power: float) -> np.ndarray:
    """sum of weight * d^power of d >= 0 over the last axis, or its largest weight * d, in the order of squared.

    A power is that of reference/pow.py, rounded to float32; the product with the weight and each sum are rounded once.
    """
    terms = d if power in (1, np.inf) else raised(d, power).astype(np.float32)
    terms = (terms if weights is None else weights * terms).reshape(*d.shape[:-1], -1, 4)
    total = terms[..., 1]
    for i in (0, 2, 3):
        total = joined(total, terms[..., i], power)
    return folded(total, power)


def joined(a: np.ndarray, b: np.ndarray, power: float) -> np.ndarray:
    """Losses of two parts together: their sum, or the larger one."""
    return np.maximum(a, b) if power == np.inf else a + b


def quadratic(d: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """d^T H d over the last axis: d^T H by fma, then pairs, the second first, then folded."""
    total = np.zeros_like(d)
    for i in range(d.shape[-1]):
        total = fma(d[..., i : i + 1], hessian[:, i, :], total)
    pairs = d[..., 1::2] * total[..., 1::2]
    return folded(fma(d[..., 0::2], total[..., 0::2], pairs))


def folded(parts: np.ndarray, power: float = 2.0) -> np.ndarray:
    """Sums over the last axis, as threads exchange them: halves are joined until one is left; an odd one in the middle
    waits.
    """
    while (count := parts.shape[-1]) > 1:
        half = (count + 1) // 2
        pairs = joined(parts[..., : count - half], parts[..., half:], power)
        parts = pairs if count % 2 == 0 else np.concatenate([pairs, parts[..., half - 1 : half]], axis=-1)
    return parts[..., 0]
