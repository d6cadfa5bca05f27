"""Search block amaxes: choose the amax of each block among candidates, by the error of quantizing with it.
The scale of a block is then computed from the chosen amax instead of the block's largest magnitude.

The search "quest" computes the amax from the standard deviation of the block instead.

If a recipe names a search (Recipe.search), it quantizes with the chosen amaxes in place of the largest magnitudes. A
search is a function in this file:

    search_<name>(x, amax, tensor, recipe, dtype)   returns the chosen amaxes (rows, blocks), float32

- x: float32 elements (rows, columns)
- amax: the largest magnitudes of the blocks (rows, blocks)
- tensor: the tensor scale
- dtype: the dtype of the elements before they were converted to float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from fp4kit.call.parse import Call
from fp4kit.quantized.part_shapes import scale_shape
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import searching
from fp4kit.reference.arith import log2
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import block_amax, tiles
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.matrices import is_per_expert, part_for_matrix, stack
from fp4kit.reference.quantize import quantize_tile, widen
from fp4kit.reference.search_scales import best_amaxes
from fp4kit.reference.summation_order import sum_halves, sum_lanes
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale
from fp4kit.reference.trace import untraced

AUTO_ROUND_POWERS = (1.0, 0.5, 2.0)
AUTO_ROUND_PERCENTS = (1.0, *(percent / 100 for percent in range(50, 152) if percent != 100))
# {search: the multiples of the amax that it tries, in this order}
FACTORS = {"auto_round_powers": AUTO_ROUND_POWERS, "auto_round_percents": AUTO_ROUND_PERCENTS}


def best_by_block(
    candidates: Iterable[np.ndarray],
    error: Callable[[np.ndarray, np.ndarray], np.ndarray],
    code: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Return, for each block, the candidate amax with the smallest error.

    Among equal errors the first candidate is taken. If the error of the first candidate is NaN, the first candidate is
    taken too. A later candidate with a NaN error is never taken.

    Args:
        candidates: arrays of amaxes, one amax per block. There must be at least one.
        error: error(candidate, which) returns the errors of the blocks that the mask `which` selects, as a 1-d array.
        code: code(candidate) returns the scale codes that the amaxes give. Amaxes with the same code have the same
            error, so each code is tried only once per block. If code is None, every candidate is tried.
    """
    chosen: np.ndarray | None = None
    smallest_error: np.ndarray = np.zeros(0, np.float32)
    tried = None if code is None else TriedCodes(code)
    for candidate in candidates:
        untried = np.ones(candidate.shape, bool) if tried is None else tried.take_untried(candidate)
        errors = np.full(candidate.shape, np.inf, np.float32)
        errors[untried] = error(candidate, untried)
        if chosen is None:
            chosen, smallest_error = candidate, errors
            continue
        better = errors < smallest_error
        chosen, smallest_error = np.where(better, candidate, chosen), np.where(better, errors, smallest_error)
    assert chosen is not None  # candidates are never empty
    return chosen


class TriedCodes:
    """The scale codes that were already tried for each block, so that a search can skip them.

    This saves much time: quantizing 2^24 bfloat16 elements by nvfp4-auto-round-opt takes 10.5 s, instead of 43.3 s if
    every candidate is tried (x86-64, two cores, nothing else running, 2026-11-22, one run each).

    Args:
        code: code(amax) returns the scale codes (uint8) that amaxes give.
    """

    def __init__(self, code: Callable[[np.ndarray], np.ndarray]) -> None:
        self.code = code
        self.seen: np.ndarray | None = None

    def take_untried(self, amax: np.ndarray) -> np.ndarray:
        """Return a mask of the blocks whose amax gives a scale code that was not tried yet, and record the codes.

        A later call with amaxes that give these codes returns False for them.
        """
        codes = self.code(amax)[..., None]
        if self.seen is None:
            self.seen = np.zeros((*amax.shape, 256), bool)
        new = ~np.take_along_axis(self.seen, codes.astype(np.intp), axis=-1)
        np.put_along_axis(self.seen, codes.astype(np.intp), True, axis=-1)
        return new[..., 0]


def _squares(x: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> Callable[..., np.ndarray]:
    """Return a function error(amax, which) that measures how well candidate amaxes quantize the blocks of x."""
    blocks, recipe = x.reshape(len(x), -1, recipe.block_size), searching(recipe)

    def error(amax: np.ndarray, which: np.ndarray) -> np.ndarray:
        rows = blocks[which]
        if not len(rows):
            return np.zeros(0, np.float32)
        parts = TensorScale(*(np.broadcast_to(p, which.shape)[which][:, None] if p.size > 1 else p for p in tensor))
        codes, scales = quantize_tile(rows, recipe, parts, dtype, amax[which][:, None], None)
        difference = dequantize_tile(codes, scales, recipe, parts) - rows
        return sum_lanes(difference * difference)

    return error


def _code_of(tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a function code(amax) that gives the scale codes of amaxes; None if equal codes may have different
    errors.
    """
    name = recipe.block_rule or ""
    if rules.BLOCK_RULES[name].reads_amax:
        return None
    return lambda amax: BLOCK_RULES[name].code(amax, tensor, recipe, dtype)


def _search_auto_round(factors: Iterable[float]) -> Callable[..., np.ndarray]:
    """Return a search function that tries each block's amax times each of the factors, as auto-round does."""

    def search(x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
        """Return for each block the multiple of its amax with the smallest squared error.

        Among equal errors, the first multiple is taken.
        """
        return best_by_block(
            (amax * np.float32(factor) for factor in factors),
            _squares(x, tensor, recipe, dtype),
            _code_of(tensor, recipe, dtype),
        )

    return search


# Source: auto-round data_type/mxfp.py quant_mx_opt_rtn, data_type/nvfp.py search_nvfp4_scale
search_auto_round_powers = _search_auto_round(FACTORS["auto_round_powers"])
search_auto_round_percents = _search_auto_round(FACTORS["auto_round_percents"])


def search_modelopt_sweep(
    x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return for each block the amax with the smallest squared error, among those that give a positive E4M3 scale.

    There are 126 such amaxes, one per positive E4M3 code. Among equal errors, the smallest amax is taken. x holds
    float32 elements, and tensor is the tensor scale. amax and dtype are not used. Source: Model-Optimizer
    nvfp4_fp8_scale_sweep.
    """
    return best_amaxes(x, np.float32(tensor.amax.reshape(())), recipe)


QUEST_FACTOR = np.float32(2.92247856 / 6)  # the best clipping value of a normal distribution, over 6
QUEST_OFFSET = np.float32(1e-8)
QUEST_LANES = 32  # lanes that first add the elements of a block


def search_quest(x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
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


SEARCHES: dict[str, Callable[..., np.ndarray]] = {name: globals()[f"search_{name}"] for name in rules.SEARCHES}


@np.errstate(all="ignore")
def search_matrix(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """Choose the block amaxes of x (M, K) by the recipe's search, tile by tile, and write them into out (M, K / block).

    amax: the tensor amax, or None if the recipe has no tensor scale.
    hadamard: the sign mask of a Hadamard transform that is applied to x first, or None.
    """
    tensor, search = tensor_scale(amax, recipe, x.dtype).columns(recipe), SEARCHES[recipe.search]
    for rows, columns in tiles(x.shape, recipe.block):
        tile = widen(x[rows, columns], recipe, hadamard)
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        out[rows, blocks] = search(tile, block_amax(tile, recipe), tensor.cut(rows, blocks), recipe, x.dtype)


def searched(call: Call, amax: np.ndarray | None) -> Call:
    """Return the call with its field block_amax set to the block amaxes that the recipe's search chooses.

    call: a call whose recipe has a search and whose array is not empty.
    amax: the tensor amax, or None if the recipe has no tensor scale.
    """
    search = partial(search_matrix, recipe=call.recipe, hadamard=call.mask)
    with untraced():
        return call._replace(block_amax=chosen_amaxes(call, amax, search))


def chosen_amaxes(call: Call, amax: np.ndarray | None, search: Callable[..., None]) -> np.ndarray:
    """Return the block amaxes that a search chooses for all matrices of a call: float32 (..., M, K / block).

    An empty array of amaxes is returned without a search.

    search(matrix, out, tensor_amax): the function that writes the amaxes of one matrix into out.
    amax: the tensor amax of the call, or None if the recipe has no tensor scale.
    """
    r = call.recipe
    chosen = np.zeros(scale_shape(call.moved.shape, r), np.float32)
    if chosen.size:
        x = stack(call.moved, r, is_per_expert(amax, r))
        parts = chosen.reshape(len(x), -1, chosen.shape[-1])
        for i, matrix in enumerate(x):
            search(matrix, parts[i], part_for_matrix(amax, r, i, x.shape[:2]))
    return chosen
