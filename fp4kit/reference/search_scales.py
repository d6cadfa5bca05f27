"""Search E4M3 block scales: try every candidate, with the float32 operations of Model-Optimizer's Triton kernels.
A candidate is a block amax that gives one of the 126 positive E4M3 scales. The best candidate gives the smallest loss.
The loss is a sum over the errors of the block's elements, or a quadratic form of the errors with a Hessian.

Source: Model-Optimizer 0.47 torch/kernels/quantization/gemm/nvfp4_fp8_sweep.py, as Triton 3.6 compiles it for sm_90.
"""

from __future__ import annotations

import numpy as np

from fp4kit.call.search_scales import DEFAULT_TERMS, Search, SearchTerms
from fp4kit.formats import E2M1, E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, divide_full, fma
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import block_amax
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.pow import power as raised
from fp4kit.reference.tensor_rules import tensor_scale

CODES = np.arange(1, 127, dtype=np.uint8)  # the positive E4M3 codes
OWN_RULE = "modelopt_static"  # the block rule that makes the scale code of a block's own amax
SIXTH = ONE / np.float32(6)
CHUNK = 1 << 18  # elements that are searched at once, to limit memory


@np.errstate(all="ignore")
def search_matrix(x: np.ndarray, out: np.ndarray, amax: np.ndarray, search: Search) -> None:
    """Find for each block of x (M, K) the amax whose scale gives the smallest loss, and write it into out.

    There is one candidate amax for each of the 126 positive E4M3 scale codes; ``search`` may allow fewer. Among equal
    losses, the smallest amax is taken. If all losses of a block are NaN or infinite, the smallest allowed candidate is
    taken.

    x: a matrix of floats. K must not be 0.
    out: float32 (M, K / 16). If blocks span several rows, the amax is written into each of their rows.
    amax: the tensor amax, one number.
    search: the parsed call, with the recipe, the range of candidates and the loss.
    """
    r = search.call.recipe
    rows = max(CHUNK // x.shape[1] // r.block_rows, 1) * r.block_rows
    for first in range(0, len(x), rows):
        part = x[first : first + rows].astype(np.float32)
        chosen = best_amaxes(part, np.float32(amax.reshape(())), r, search.terms)
        out[first : first + rows] = np.repeat(chosen, r.block_rows, axis=0)[: len(part)]


def best_amaxes(x: np.ndarray, amax: np.float32, r: Recipe, terms: SearchTerms = DEFAULT_TERMS) -> np.ndarray:
    """Return, for each block of float32 x (M, K), the candidate amax with the smallest loss.

    The result is float32 (ceil(M / block rows), K / 16). Among equal losses, the smallest amax is taken. If every loss
    of a block is NaN or infinite, it is the smallest candidate that terms allow.

    amax: the tensor amax.
    terms: the range of candidates and the loss.
    """
    candidates = candidate_amaxes(amax, r)
    low, high = _code_range(block_amax(x, r), amax, r, terms)
    best, code = np.full(low.shape, np.inf, np.float32), low
    for i, scale in zip(CODES, scales_of(candidates, amax, r, terms), strict=True):
        loss = losses(x, scale, r, terms)
        better = (loss < best) & (low <= i) & (i <= high)
        best, code = np.where(better, loss, best), np.where(better, i, code)
    return candidates[code - 1]


def _code_range(amaxes: np.ndarray, amax: np.float32, r: Recipe, terms: SearchTerms) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest scale code that each block may get: two uint8 arrays."""
    # If terms.offsets is set, the code must lie in that range around the code that the block's own amax gives.
    if terms.offsets is None:
        return np.full(amaxes.shape, CODES[0]), np.full(amaxes.shape, CODES[-1])
    tensor = tensor_scale(np.asarray(amax), r, np.dtype(np.float32))
    own = BLOCK_RULES[OWN_RULE].code(amaxes, tensor, r, np.dtype(np.float32)).astype(np.int32)
    low, high = (np.clip(own + offset, CODES[0], CODES[-1]).astype(np.uint8) for offset in terms.offsets)
    return low, high


# ---- scales ----


def candidate_amaxes(amax: np.float32, r: Recipe) -> np.ndarray:
    """Return the block amaxes that give the positive E4M3 scales c: amax * (c * fp32(1 / N)), as float32 (126,).

    amax is the tensor amax, and N is r.scale_max, the largest block scale of the recipe. fp32 rounds to float32.
    """
    return amax * (decode(CODES, E4M3) * (ONE / np.float32(r.scale_max)))


def scales_of(candidates: np.ndarray, amax: np.float32, r: Recipe, terms: SearchTerms) -> np.ndarray:
    """Return, for each candidate amax, the float32 scale that divides the elements: float32 (126,).

    The scale is candidate * fp32(1 / 6), where fp32 rounds to float32. If the loss uses a Hessian, the scale is then
    rounded to E4M3 under the tensor scale, as the producer's kernel for Hessians does. A scale of 0 is replaced by 1.

    amax: the tensor amax.
    terms: the loss.
    """
    scales = candidates * SIXTH
    if terms.hessian is not None:
        scales = _through_e4m3(scales, amax * np.float32(448 / r.scale_max) * SIXTH)
    return np.where(scales == 0, ONE, scales)


def _through_e4m3(scales: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return float32 scales rounded to E4M3 under a common factor: E4M3(scale * factor) * (1 / factor)."""
    # The factor is 448 / top, so that `top` becomes 448, the largest E4M3 value.
    factor = np.float32(448) / np.where(top <= np.float32(2.0**-24), ONE, top)
    codes = encode(np.clip(scales * factor, np.float32(-448), np.float32(448)), E4M3)
    return decode(codes, E4M3) * (ONE / factor)


# ---- losses ----


def losses(x: np.ndarray, scale: np.float32, r: Recipe, terms: SearchTerms) -> np.ndarray:
    """Return the loss of quantizing each block of float32 x (M, K), if every block has the scale `scale`.

    The result is float32 (ceil(M / block rows), K / 16). The losses of the rows of a block are added in order, or their
    maximum is taken if the power is infinite.

    terms: the power, weights or Hessian that define the loss.
    """
    runs = x.reshape(len(x), -1, r.block_size)
    d = residual(np.abs(runs), scale)
    if terms.hessian is not None:
        rows = quadratic(np.where(runs >= 0, d, -d), terms.hessian)
    else:
        weights = None if terms.weights is None else terms.weights.reshape(-1, r.block_size)
        rows = squared(d, weights) if terms.power == 2 else powers(np.abs(d), weights, terms.power)
    total = rows[:: r.block_rows].copy()
    for i in range(1, r.block_rows):
        next_row = rows[i :: r.block_rows]
        total[: len(next_row)] = joined(total[: len(next_row)], next_row, terms.power)
    return total


def residual(a: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the error a - q * scale of quantizing a >= 0 with a scale, rounded once to float32.

    q is the E2M1 value nearest to div.full.f32(a, scale), at most 6. Ties go to the even code. The error may be
    negative. A NaN quotient counts as 6. If a is NaN, the error is NaN.
    """
    q = decode(encode(np.fmin(divide_full(a, np.full_like(a, scale)), np.float32(6)), E2M1), E2M1)
    return fma(-scale, q, a)


def squared(d: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return the float32 sum of weight * d^2 over the last axis, added in the order that the GPU kernel uses.

    If weights is None, each weight is 1. Each group of four neighbors is summed by fma, in the order second, first,
    third, fourth. The sums of the groups are then added by `tree_sum`. The length of the axis must be a multiple of
    four.
    """
    weighted = d if weights is None else weights * d
    d, weighted = (part.reshape(*part.shape[:-1], -1, 4) for part in (d, weighted))
    total = weighted[..., 1] * d[..., 1]
    for i in (0, 2, 3):
        total = fma(weighted[..., i], d[..., i], total)
    return tree_sum(total)


def powers(d: np.ndarray, weights: np.ndarray | None, power: float) -> np.ndarray:
    """Return the sum of weight * d^power over the last axis for d >= 0, or the largest weight * d if power is infinite.

    If weights is None, each weight is 1. The terms are added in the order that `squared` uses. reference/pow.py
    computes d^power and rounds it to float32. The product of d^power and the weight is rounded once, and so is each
    sum.
    """
    terms = d if power in (1, np.inf) else raised(d, power).astype(np.float32)
    terms = (terms if weights is None else weights * terms).reshape(*d.shape[:-1], -1, 4)
    total = terms[..., 1]
    for i in (0, 2, 3):
        total = joined(total, terms[..., i], power)
    return tree_sum(total, power)


def joined(a: np.ndarray, b: np.ndarray, power: float) -> np.ndarray:
    """Combine the losses of two parts of a block: return their sum, or the larger loss if power is infinite."""
    return np.maximum(a, b) if power == np.inf else a + b


def quadratic(d: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return the quadratic form d^T H d over the last axis, where d are the errors of a block and H is the Hessian.

    d^T H is computed by fma. Pairs of neighbors are then summed by fma, starting with the second neighbor, and the sums
    of the pairs are added by `tree_sum`.

    d: float32 (rows, blocks, block).
    hessian: float32 (blocks, block, block), one matrix per block along K.
    """
    total = np.zeros_like(d)
    for i in range(d.shape[-1]):
        total = fma(d[..., i : i + 1], hessian[:, i, :], total)
    pairs = d[..., 1::2] * total[..., 1::2]
    return tree_sum(fma(d[..., 0::2], total[..., 0::2], pairs))


def tree_sum(parts: np.ndarray, power: float = 2.0) -> np.ndarray:
    """Return the sum of parts over the last axis, or their maximum if power is infinite.

    Parts are added in the order that the GPU kernel uses. In each round the second half of the parts is added to the
    first half, until one sum is left. If the count is odd, the middle part is carried over to the next round. A single
    part is returned unchanged.
    """
    while (count := parts.shape[-1]) > 1:
        half = (count + 1) // 2
        pairs = joined(parts[..., : count - half], parts[..., half:], power)
        parts = pairs if count % 2 == 0 else np.concatenate([pairs, parts[..., half - 1 : half]], axis=-1)
    return parts[..., 0]
