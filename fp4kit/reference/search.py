"""Search scales: choose amaxes among candidates by the error of quantizing with them.

Recipe.search names a search that quantize runs (search_<name>); fp4kit.search_scales runs search_e4m3, search_powers or
search_amaxes. Every candidate is quantized by the recipe's own arithmetic, or by the producer's kernel for the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import searching
from fp4kit.reference.arith import ONE, Array, Dtype, divide_full, fma, log2, round_to, sum_halves, sum_lanes
from fp4kit.reference.arith import power as raised
from fp4kit.reference.ascend import (
    CHOICES,
    amax_of_ceil_x,
    ceil_x_exponent,
    power_of_two,
    squared_error,
    under_power,
)
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import block_amax, decode, encode, is_per_expert, part_for_matrix, stack, tiles, untraced
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.quantize import quantize_tile, widen
from fp4kit.reference.tensor_rules import TensorScale, encoding_scale, largest_element, tensor_scale

CODES = np.arange(1, 127, dtype=np.uint8)  # the positive E4M3 codes
OWN_RULE = "modelopt_static"  # the block rule that makes the scale code of a block's own amax
SIXTH = ONE / np.float32(6)
CHUNK = 1 << 18  # elements that are searched at once, to limit memory

AROUND_FLOOR = (-1, 1)  # default offsets of E8M0 scales, relative to floor(log2(amax)) - floor(log2(largest element))


class SearchTerms(NamedTuple):
    """The loss and the candidates of a scale search for an array x of shape (..., K).

    Attributes:
        weights: float32 (K,), in the memory (host or device) of x; None for all ones.
        hessian: float32 (K/16, 16, 16), in the memory of x; None if weights are used.
        offsets: the smallest and the largest offset of the candidates from the scale that a block's own amax gives: in
            codes for E4M3, and in exponents for E8M0. None for the default of the scale format.
        power: the exponent of the loss, which is the sum of |difference|^power. If power is infinity, the loss is the
            largest |difference|.
        grid: start, stop and step of the multiples of the amax that are tried; None if offsets are tried instead.
    """

    weights: Any = None
    hessian: Any = None
    offsets: tuple[int, int] | None = None
    power: float = 2.0
    grid: tuple[float, float, float] | None = None


DEFAULT_TERMS = SearchTerms()


@np.errstate(all="ignore")
def search_e4m3(x: Array, out: Array, amax: Array, search: Any) -> None:
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


def best_amaxes(x: Array, amax: np.float32, r: Recipe, terms: SearchTerms = DEFAULT_TERMS) -> Array:
    """Return, for each block of float32 x (M, K), the candidate amax with the smallest loss.

    The result is float32 (ceil(M / block rows), K / 16). Among equal losses, the smallest amax is taken. If every loss
    of a block is NaN or infinite, it is the smallest candidate that terms allow.

    amax: the tensor amax.
    terms: the range of candidates and the loss.
    """
    candidates = candidate_amaxes(amax, r)
    low, high = _code_range(block_amax(x, r), amax, r, terms)
    best, code, first, last = np.full(low.shape, np.inf, np.float32), low, low.min(), high.max()
    for i, scale in zip(CODES[first - 1 : last], scales_of(candidates, amax, r, terms)[first - 1 : last], strict=True):
        loss = losses(x, scale, r, terms)
        better = (loss < best) & (low <= i) & (i <= high)
        best, code = np.where(better, loss, best), np.where(better, i, code)
    return candidates[code - 1]


def _code_range(amaxes: Array, amax: np.float32, r: Recipe, terms: SearchTerms) -> tuple[Array, Array]:
    """Return the smallest and the largest scale code that each block may get: two uint8 arrays."""
    # If terms.offsets is set, the code must lie in that range around the code that the block's own amax gives.
    if terms.offsets is None:
        return np.full(amaxes.shape, CODES[0]), np.full(amaxes.shape, CODES[-1])
    tensor = tensor_scale(np.asarray(amax), r, np.dtype(np.float32))
    own = BLOCK_RULES[OWN_RULE].code(amaxes, tensor, r, np.dtype(np.float32)).astype(np.int32)
    low, high = (np.clip(own + offset, CODES[0], CODES[-1]).astype(np.uint8) for offset in terms.offsets)
    return low, high


# ---- scales ----


def candidate_amaxes(amax: np.float32, r: Recipe) -> Array:
    """Return the block amaxes that give the positive E4M3 scales c: amax * (c * fp32(1 / N)), as float32 (126,).

    amax is the tensor amax, and N is r.scale_max, the largest block scale of the recipe. fp32 rounds to float32.
    """
    return amax * (decode(CODES, E4M3) * (ONE / np.float32(r.scale_max)))


def scales_of(candidates: Array, amax: np.float32, r: Recipe, terms: SearchTerms) -> Array:
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


def _through_e4m3(scales: Array, top: Array) -> Array:
    """Return float32 scales rounded to E4M3 under a common factor: E4M3(scale * factor) * (1 / factor)."""
    # The factor is 448 / top, so that `top` becomes 448, the largest E4M3 value.
    factor = np.float32(448) / np.where(top <= np.float32(2.0**-24), ONE, top)
    codes = encode(np.clip(scales * factor, np.float32(-448), np.float32(448)), E4M3)
    return decode(codes, E4M3) * (ONE / factor)


# ---- losses ----


def losses(x: Array, scale: np.float32, r: Recipe, terms: SearchTerms) -> Array:
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


def residual(a: Array, scale: np.float32) -> Array:
    """Return the error a - q * scale of quantizing a >= 0 with a scale, rounded once to float32.

    q is the E2M1 value nearest to div.full.f32(a, scale), at most 6. Ties go to the even code. The error may be
    negative. A NaN quotient counts as 6. If a is NaN, the error is NaN.
    """
    q = decode(encode(np.fmin(divide_full(a, np.full_like(a, scale)), np.float32(6)), E2M1), E2M1)
    return fma(-scale, q, a)


def squared(d: Array, weights: Array | None) -> Array:
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


def powers(d: Array, weights: Array | None, power: float) -> Array:
    """Return the sum of weight * d^power over the last axis for d >= 0, or the largest weight * d if power is infinite.

    If weights is None, each weight is 1. The terms are added in the order that `squared` uses. reference/arith.py
    computes d^power and rounds it to float32. The product of d^power and the weight is rounded once, and so is each
    sum.
    """
    terms = d if power in (1, np.inf) else raised(d, power).astype(np.float32)
    terms = (terms if weights is None else weights * terms).reshape(*d.shape[:-1], -1, 4)
    total = terms[..., 1]
    for i in (0, 2, 3):
        total = joined(total, terms[..., i], power)
    return tree_sum(total, power)


def joined(a: Array, b: Array, power: float) -> Array:
    """Combine the losses of two parts of a block: return their sum, or the larger loss if power is infinite."""
    return np.maximum(a, b) if power == np.inf else a + b


def quadratic(d: Array, hessian: Array) -> Array:
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


def tree_sum(parts: Array, power: float = 2.0) -> Array:
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


@np.errstate(all="ignore")
def search_powers(x: Array, out: Array, amax: Array | None, search: Any) -> None:
    """Choose for each block of x (M, K) the amax * 2^j with the smallest loss, and write it into out.

    j is an integer, and amax is the largest magnitude of the block. Among equal losses, the lowest j is taken. If no
    candidate has a finite loss, the amax itself is written.

    Args:
        x: float32, float16 or bfloat16.
        out: float32 (M, K / block).
        amax: the tensor amax, or None if the recipe has no tensor scale.
        search: the exponents to try and the loss.
    """
    r, terms = search.call.recipe, search.terms
    tensor = tensor_scale(amax, r, x.dtype).columns(r, x.shape[1])
    for rows, columns in tiles(x.shape, r.block):
        tile, blocks = widen(x[rows, columns]), slice(columns.start // r.block_size, columns.stop // r.block_size)
        weights = None if terms.weights is None else _padded_to_fours(terms.weights[columns].reshape(-1, r.block_size))
        out[rows, blocks] = _chosen(tile, r, tensor, x.dtype, terms._replace(weights=weights))


def _chosen(x: Array, r: Recipe, tensor: TensorScale, dtype: Dtype, terms: SearchTerms) -> Array:
    """Return for each block the amax * 2^j with the smallest loss."""
    own = block_amax(x, r)
    code: Array = np.asarray(quantize_tile(x, r, tensor, dtype, own, None)[1]).astype(np.int32)
    best, chosen = np.full(own.shape, np.inf, np.float32), own
    low, high = terms.offsets or AROUND_FLOOR
    floor = np.frexp(own)[1] - 1 - int(np.frexp(np.float64(r.element.max))[1] - 1) + E8M0.bias
    base = floor - code if terms.offsets is None else np.zeros_like(code)
    for step in range(low, high + 1):
        j = base + step
        candidate = np.ldexp(own, j)
        codes, scales = quantize_tile(x, r, tensor, dtype, candidate, None)
        d = _padded_to_fours(np.abs(dequantize_tile(codes, scales, r, tensor) - x).reshape(*own.shape, r.block_size))
        loss = squared(d, terms.weights) if terms.power == 2 else powers(d, terms.weights, terms.power)
        better = (loss < best) & (scales == code + j)
        best, chosen = np.where(better, loss, best), np.where(better, candidate, chosen)
    return chosen


def _padded_to_fours(a: Array) -> Array:
    """Return blocks (..., elements) padded with zeros to a multiple of four elements; `a` itself if none are
    missing.
    """
    missing = -a.shape[-1] % 4
    return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)]) if missing else a


def multiples(grid: tuple[float, float, float]) -> Array:
    """Return the multiples of an amax to try, from a grid (start, stop, step): float32, start and stop included.

    There are ceil((stop - start) / step) + 1 multiples, equally spaced. If start equals stop, the only multiple is
    start.

    The multiples equal those of torch.linspace. d is (stop - start) / (count - 1) in float32, and each multiple is
    rounded once:

    - In the first half, multiple i is start + i * d.
    - In the second half, multiple i is stop - (count - 1 - i) * d.
    """
    start, stop, step = grid
    first, last, count = np.float32(start), np.float32(stop), math.ceil((stop - start) / step) + 1
    if count == 1:
        return np.array([first])
    between, i = np.float64((last - first) / np.float32(count - 1)), np.arange(count)
    exact = np.where(i < count // 2, np.float64(first) + between * i, np.float64(last) - between * (count - 1 - i))
    return exact.astype(np.float32)


@np.errstate(all="ignore")
def search_amaxes(search: Any, amax: Any, fake_quantize: Callable[[Any], Array]) -> Array:
    """Return each amax times the multiple of the grid with the smallest loss: float32 in the shape of amax.

    Among equal losses, the first multiple of the grid is taken. A NaN loss counts as infinite. If the array has no
    elements, a copy of amax is returned.

    Args:
        search: the parsed call of search_scales, with the array, the grid and the loss.
        amax: the tensor amaxes; the block amaxes if the recipe has block scales.
        fake_quantize: a function that fake-quantizes a call with the amaxes that the call holds.
    """
    call, terms = search.call, search.terms
    assert terms.grid is not None
    x = call.x.astype(np.float32)
    call = call._replace(x=x, moved=np.moveaxis(x, call.axis, -1))
    factors = multiples(terms.grid)
    if not x.size:
        return np.array(amax, np.float32)
    is_per_block = call.recipe.scale is not None or call.recipe.tensor_scaling == "block"
    columns = call.recipe.block_size if is_per_block else x.shape[call.axis]
    losses = []
    for factor in factors:
        candidate = np.asarray(amax * factor, np.float32)
        given = {"tensor_amax" if call.recipe.scale is None else "block_amax": candidate}
        values = np.moveaxis(fake_quantize(call._replace(**given)), call.axis, -1)
        losses.append(_loss(call.moved, values, terms, columns).reshape(*np.shape(amax), -1))
    joined = _combined(np.stack(losses), terms.power)
    best = np.where(np.isnan(joined), np.inf, joined).argmin(axis=0)
    return np.asarray(amax * factors[best], np.float32)


def _loss(x: Array, values: Array, terms: SearchTerms, columns: int) -> Array:
    """Return one loss per part of a row of x: the sum of weight * |x - values|^power."""
    rows, quantized = (a.reshape(-1, columns) for a in (x, values))
    result, parts = np.empty(len(rows)), x.shape[-1] // columns
    weights = None if terms.weights is None else terms.weights.reshape(parts, columns)
    step = max(CHUNK // x.shape[-1], 1) * parts  # whole rows of x
    for first in range(0, len(rows), step):
        d = np.abs(rows[first : first + step].astype(np.float64) - quantized[first : first + step])
        powers = d if terms.power == np.inf else raised(d, terms.power)
        if weights is not None:
            powers = (weights * powers.reshape(-1, parts, columns)).reshape(-1, columns)
        result[first : first + step] = _combined(powers, terms.power)
    return result


def _combined(terms: Array, power: float) -> Array:
    """Return the terms reduced along the last axis to one loss: their sum, or their maximum if power is infinite."""
    # The last axis must not be empty.
    result: Array = (np.maximum if power == np.inf else np.add).accumulate(terms, axis=-1)[..., -1]
    return result


AUTO_ROUND_POWERS = (1.0, 0.5, 2.0)
AUTO_ROUND_PERCENTS = (1.0, *(percent / 100 for percent in range(50, 152) if percent != 100))
# {search: the multiples of the amax that it tries, in this order}
FACTORS = {"auto_round_powers": AUTO_ROUND_POWERS, "auto_round_percents": AUTO_ROUND_PERCENTS}


def _search_auto_round(factors: Iterable[float]) -> Callable[..., Array]:
    """Return a search function that tries each block's amax times each of the factors, as auto-round does."""

    def search(x: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
        """Return for each block the multiple of its amax with the smallest squared error.

        Among equal errors, the first multiple is taken. If the error of the first multiple is NaN, it is taken too.
        """
        # Equal scale codes give equal errors, so each code is tried only once per block. This saves much time:
        # quantizing 2^24 bfloat16 elements by nvfp4-auto-round-opt takes 10.5 s instead of 43.3 s (x86-64, two cores,
        # nothing else running, 2026-11-22, one run each).
        name = recipe.block_rule or ""
        skips = not rules.BLOCK_RULES[name].reads_amax
        tried = np.zeros((*amax.shape, 256), bool)
        blocks, own = x.reshape(len(x), -1, recipe.block_size), searching(recipe)
        chosen, smallest = np.zeros_like(amax), np.zeros(amax.shape, np.float32)
        for i, candidate in enumerate(amax * np.float32(factor) for factor in factors):
            untried = np.ones(amax.shape, bool)
            if skips:
                codes = BLOCK_RULES[name].code(candidate, tensor, recipe, dtype)[..., None].astype(np.intp)
                untried = ~np.take_along_axis(tried, codes, axis=-1)[..., 0]
                np.put_along_axis(tried, codes, True, axis=-1)
            errors = np.full(amax.shape, np.inf, np.float32)
            errors[untried] = _squares(blocks, untried, candidate, tensor, own, dtype)
            better = (errors < smallest) | (i == 0)
            chosen, smallest = np.where(better, candidate, chosen), np.where(better, errors, smallest)
        return chosen

    return search


def _squares(blocks: Array, which: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the squared errors of the blocks that a mask selects, quantized with the given amaxes."""
    rows = blocks[which]
    if not len(rows):
        return np.zeros(0, np.float32)
    parts = TensorScale(*(np.broadcast_to(p, which.shape)[which][:, None] if p.size > 1 else p for p in tensor))
    codes, scales = quantize_tile(rows, recipe, parts, dtype, amax[which][:, None], None)
    difference = dequantize_tile(codes, scales, recipe, parts) - rows
    return sum_lanes(difference * difference)


# Source: auto-round data_type/mxfp.py quant_mx_opt_rtn, data_type/nvfp.py search_nvfp4_scale
search_auto_round_powers = _search_auto_round(FACTORS["auto_round_powers"])
search_auto_round_percents = _search_auto_round(FACTORS["auto_round_percents"])


def search_modelopt_sweep(x: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return for each block the amax with the smallest squared error, among those that give a positive E4M3 scale.

    There are 126 such amaxes, one per positive E4M3 code. Among equal errors, the smallest amax is taken. x holds
    float32 elements, and tensor is the tensor scale. amax and dtype are not used. Source: Model-Optimizer
    nvfp4_fp8_scale_sweep.
    """
    return best_amaxes(x, np.float32(tensor.amax.reshape(())), recipe)


QUEST_FACTOR = np.float32(2.92247856 / 6)  # the best clipping value of a normal distribution, over 6
QUEST_OFFSET = np.float32(1e-8)
QUEST_LANES = 32  # lanes that first add the elements of a block


def search_quest(x: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return for each block the amax that gives QuEST's scale under the rule e8m0_floor: a power of two.

        std = sqrt(mean(x^2) - mean(x)^2)
        amax = 2^(floor(log2(QUEST_FACTOR * std + 1e-8)) + emax)

    emax is the exponent of the largest element value. log2 and every other operation are rounded to float32.
    summation_order.sum_halves computes the sums. If std or the amax is infinite or NaN, the result is NaN. The result
    is also NaN if rounding makes the difference negative, which happens only in blocks of nearly equal elements. x
    holds float32 elements. amax, tensor and dtype are not used. Source: FP-Quant, Triton pseudo-quantizer of MXFP4,
    method quest.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    count = np.float32(recipe.block_size)
    mean, square = sum_halves(blocks, QUEST_LANES) / count, sum_halves(blocks * blocks, QUEST_LANES) / count
    scale = QUEST_FACTOR * np.sqrt(square - mean * mean) + QUEST_OFFSET
    usual = np.isfinite(scale)
    exponent = np.floor(log2(np.where(usual, scale, np.float32(1)))).astype(np.int32)
    return np.where(usual, np.ldexp(np.float32(1), exponent + recipe.element.emax), np.float32(np.nan))


CEIL_X_CONSTANTS = np.arange(24, 49, dtype=np.float32) / np.float32(4)  # 6, 6.25 to 12


def ceil_x_constant(x: Array, recipe: Recipe, hadamard: int | None = None) -> tuple[float, Array]:
    """Return (c, block amaxes): the constant that msmodelslim's search of ceil_x chooses for x (M, K), and its amaxes.

        c = the first constant whose mean over the whole of x of (element - value)^2 is smallest
        scale = the power of two at or above amax / c

    Errors are rounded to the dtype of x, T, after every operation. The mean is T(sum / count). The errors of a block
    are added in float32 by sum_lanes, and the sums of blocks are added by their exponents (see best_constant), in any
    order. PyTorch adds float32 numbers in an order that depends on the number of threads. If every mean is infinite or
    NaN, c is 6. Source: msmodelslim AutoWeightQuantizer, ceil_x.
    """
    dtype, size = x.dtype, recipe.block_size
    bins = np.zeros((len(CEIL_X_CONSTANTS), 256), np.int64)
    amaxes = np.zeros((len(x), x.shape[1] // size), np.float32)
    for rows, columns in tiles(x.shape, recipe.block):
        tile = widen(x[rows, columns], hadamard)
        blocks = tile.reshape(len(tile), -1, size)
        amax = amaxes[rows, columns.start // size : columns.stop // size] = block_amax(tile, recipe)
        lowest = ceil_x_exponent(amax, CEIL_X_CONSTANTS[-1], dtype)
        steps = [np.nan_to_num(ceil_x_exponent(amax, c, dtype) - lowest).astype(int) for c in CEIL_X_CONSTANTS]
        errors = []  # per block, for each exponent that a constant gives, of which there are few
        for step in range(int(np.max(steps)) + 1):
            found = under_power(blocks, lowest + np.float32(step), recipe, dtype)
            errors.append(sum_lanes(squared_error(blocks, found, dtype)))
        for i, step in enumerate(steps):
            bits = np.choose(step, errors).view(np.uint32).ravel()
            fields = bits >> 23 & 0xFF
            significands = (bits & 0x7FFFFF) + (fields > 0) * 0x800000
            bins[i] += np.bincount(fields, significands, 256).astype(np.int64)
    return best_constant(bins, x.size, dtype), amaxes


def best_constant(bins: Array, count: int, dtype: Dtype) -> float:
    """Return the constant of ceil_x with the smallest mean error of `count` elements.

    The sum of the bins of a constant, each times its power of two, is computed in float64, the smallest power first.

    bins: int64 (constants, 256). Entry e is the sum of the 24-bit significands of all sums of blocks whose exponent
        field is e.
    """
    powers = np.ldexp(1.0, np.maximum(np.arange(255), 1) - 150)
    sums = np.add.accumulate(bins[:, :255] * powers, axis=1)[:, -1]
    means = round_to(sums.astype(np.float32) / np.float32(count), dtype)
    is_usable = np.isfinite(means) & (bins[:, 255] == 0)
    return float(CEIL_X_CONSTANTS[np.where(is_usable, means, np.float32(np.inf)).argmin()])


def search_msmodelslim_ceil_x(x: Array, recipe: Recipe, hadamard: int | None) -> Array:
    """Return block amaxes that give the scales of msmodelslim's search by the rule: float32 (M, blocks)."""
    constant, amaxes = ceil_x_constant(x, recipe, hadamard)
    return amax_of_ceil_x(ceil_x_exponent(amaxes, constant, x.dtype))


def search_msmodelslim_4over6(x: Array, amax: Array, tensor: TensorScale, recipe: Recipe, dtype: Dtype) -> Array:
    """Return 2^exponent for each block of x (m, k), with the exponents that msmodelslim's method chooses (m, blocks).

    CHOICES of reference/ascend.py tries two exponents per block. Blocks of zeros keep the amax 0 with elements E4M3.
    """
    found = CHOICES[recipe.search](x.reshape(len(x), -1, recipe.block_size), amax, recipe, dtype)
    return np.where((amax == 0) & (recipe.element == E4M3), amax, power_of_two(found.exponent))


search_msmodelslim_mse = search_msmodelslim_4over6

SEARCHES: dict[str, Callable[..., Array]] = {name: globals()[f"search_{name}"] for name in rules.SEARCHES}


@np.errstate(all="ignore")
def under_every_scale(x: Array, r: Recipe, outer: Array | None) -> tuple[Array, Array]:
    """Return the codes of block scales, and the values (scales, block) of the block x under each of them.

    The block is quantized with the amaxes from which the scales follow, under the tensor scale `outer`.
    """
    assert r.scale is not None
    tensor = encoding_scale(outer, r, x.dtype)
    amax = r.scale.magnitudes.astype(np.float64)[:, None] * float(largest_element(r)) * tensor.decode
    amax = amax[((amax > 0) & (amax <= FLT_MAX))[:, 0]].astype(np.float32)
    rows = np.broadcast_to(x.astype(np.float32), (len(amax), len(x)))
    codes, scales = quantize_tile(rows, r, tensor, x.dtype, amax, None)
    found, places = np.unique(np.asarray(scales)[:, 0], return_index=True)
    return found, dequantize_tile(codes, scales, r, tensor)[places]


@np.errstate(all="ignore")
def search_matrix(x: Array, out: Array, amax: Array | None, recipe: Recipe, hadamard: int | None) -> None:
    """Choose the block amaxes of x (M, K) by the recipe's search, tile by tile, and write them into out (M, K / block).

    amax: the tensor amax, or None if the recipe has no tensor scale.
    hadamard: the sign mask of a Hadamard transform that is applied to x first, or None.
    """
    tensor, search = tensor_scale(amax, recipe, x.dtype).columns(recipe, x.shape[1]), SEARCHES[recipe.search]
    for rows, columns in tiles(x.shape, recipe.block):
        tile = widen(x[rows, columns], hadamard)
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        out[rows, blocks] = search(tile, block_amax(tile, recipe), tensor.cut(rows, blocks), recipe, x.dtype)


def searched(call: Any, amax: Array | None) -> Any:
    """Return the call with its field block_amax set to the block amaxes that the recipe's search chooses.

    call: a call whose recipe has a search and whose array is not empty.
    amax: the tensor amax, or None if the recipe has no tensor scale.
    """
    r, search = call.recipe, partial(search_matrix, recipe=call.recipe, hadamard=call.mask)
    with untraced(), np.errstate(all="ignore"):
        if rules.SEARCHES[r.search].whole_array:
            found = SEARCHES[r.search](call.moved.reshape(-1, call.moved.shape[-1]), r, call.mask)
            return call._replace(block_amax=found.reshape(*call.moved.shape[:-1], -1))
        return call._replace(block_amax=chosen_amaxes(call, amax, search))


def chosen_amaxes(call: Any, amax: Array | None, search: Callable[..., None]) -> Array:
    """Return the block amaxes that a search chooses for all matrices of a call: float32 (..., M, K / block).

    An empty array of amaxes is returned without a search.

    search(matrix, out, tensor_amax): the function that writes the amaxes of one matrix into out.
    amax: the tensor amax of the call, or None if the recipe has no tensor scale.
    """
    r = call.recipe
    *lead, K = call.moved.shape
    chosen = np.zeros((*lead, K // r.block_size), np.float32)
    if chosen.size:
        x = stack(call.moved, r, is_per_expert(amax, r))
        parts = chosen.reshape(len(x), -1, chosen.shape[-1])
        for i, matrix in enumerate(x):
            search(matrix, parts[i], part_for_matrix(amax, r, i, x.shape[:2]))
    return chosen
