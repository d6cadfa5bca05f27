"""Searches: a block's amax is chosen among candidates by the error that quantizing under it makes, not the largest
magnitude.

A search of recipes/rules.py is a function of its name here,

    search_<name>(x, amax, tensor, recipe, dtype)   the chosen amaxes (rows, blocks), float32

of float32 elements x (rows, columns) and the largest magnitudes of their blocks (rows, blocks), under the tensor scale
that the call has. What follows is the recipe without its search, of blocks that have these amaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from fp4kit.call.amaxes import is_per_expert, part_of
from fp4kit.call.parse import Call
from fp4kit.quantized.part_shapes import scale_shape
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import block_amax, tiles
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.matrices import stack
from fp4kit.reference.quantize import quantize_tile, widen
from fp4kit.reference.search_scales import least_amaxes
from fp4kit.reference.summation_order import sum_lanes
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale

AUTO_ROUND_POWERS = (1.0, 0.5, 2.0)
AUTO_ROUND_PERCENTS = (1.0, *(percent / 100 for percent in range(50, 152) if percent != 100))
FACTORS = {"auto_round_powers": AUTO_ROUND_POWERS, "auto_round_percents": AUTO_ROUND_PERCENTS}  # of the amax, by search


def least_by_block(
    candidates: Iterable[np.ndarray],
    error: Callable[[np.ndarray, np.ndarray], np.ndarray],
    code: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Of candidates in their order, by block, the first of least error; the first of all where that is NaN.

    error(candidate, which): of the blocks where `which` is set, a row of them. code(candidate): scale codes, where
    blocks of one scale have one error, so that each scale is tried once; None: each candidate is.
    """
    chosen: np.ndarray | None = None
    least: np.ndarray = np.zeros(0, np.float32)
    tried = None if code is None else Tried(code)
    for candidate in candidates:
        new = np.ones(candidate.shape, bool) if tried is None else tried.news(candidate)
        found = np.full(candidate.shape, np.inf, np.float32)
        found[new] = error(candidate, new)
        if chosen is None:
            chosen, least = candidate, found
            continue
        better = found < least
        chosen, least = np.where(better, candidate, chosen), np.where(better, found, least)
    assert chosen is not None  # a search has a candidate
    return chosen


class Tried:
    """The scales of blocks that were tried.

    2^24 bfloat16 elements by nvfp4-auto-round-opt: 10.5 s, and 43.3 with every candidate tried (x86-64, two cores,
    nothing else running, 2026-11-22, one run each).
    """

    def __init__(self, code: Callable[[np.ndarray], np.ndarray]) -> None:
        self.code = code
        self.seen: np.ndarray | None = None

    def news(self, amax: np.ndarray) -> np.ndarray:
        """Blocks that have a scale by this amax which they have not had; from now on they have."""
        codes = self.code(amax)[..., None]
        if self.seen is None:
            self.seen = np.zeros((*amax.shape, 256), bool)
        new = ~np.take_along_axis(self.seen, codes.astype(np.intp), axis=-1)
        np.put_along_axis(self.seen, codes.astype(np.intp), True, axis=-1)
        return new[..., 0]


def _squares(x: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> Callable[..., np.ndarray]:
    """The squared error of blocks by their amaxes: float32, added as PyTorch does on a CPU."""
    blocks, recipe = x.reshape(len(x), -1, recipe.block_size), replace(recipe, repacked=False)

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
    """The scale codes of amaxes, where these are all that the codes of elements depend on."""
    name = recipe.block_rule or ""
    if rules.BLOCK_RULES[name].reads_amax:
        return None
    return lambda amax: BLOCK_RULES[name].code(amax, tensor, recipe, dtype)


def _search_auto_round(factors: Iterable[float]) -> Callable[..., np.ndarray]:
    def search(x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
        """amax * factor of least squared error, the first of equals."""
        return least_by_block(
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
    """The amax, of those that give an E4M3 scale, of least squared error. Source: Model-Optimizer
    nvfp4_fp8_scale_sweep.
    """
    return least_amaxes(x, np.float32(tensor.amax.reshape(())), recipe)


SEARCHES: dict[str, Callable[..., np.ndarray]] = {name: globals()[f"search_{name}"] for name in rules.SEARCHES}


@np.errstate(all="ignore")
def search_matrix(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """The chosen block amaxes of x (M, K) into out (M, K / block), tile by tile. amax: of the tensor, as for
    quantize_matrix.
    """
    tensor, search = tensor_scale(amax, recipe, x.dtype).columns(recipe), SEARCHES[recipe.search]
    for rows, columns in tiles(x.shape, recipe.block):
        tile = widen(x[rows, columns], recipe, hadamard)
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        out[rows, blocks] = search(tile, block_amax(tile, recipe), tensor.cut(rows, blocks), recipe, x.dtype)


def searched(call: Call, amax: np.ndarray | None) -> Call:
    """The call with the block amaxes that its recipe's search chooses; as it is where there is none. amax: of the
    tensor.
    """
    if not call.recipe.search or not call.x.size:
        return call
    search = partial(search_matrix, recipe=call.recipe, hadamard=call.mask)
    return call._replace(block_amax=chosen_amaxes(call, amax, search))


def chosen_amaxes(call: Call, amax: np.ndarray | None, search: Callable[..., None]) -> np.ndarray:
    """What search(matrix, out, amax of its tensor) finds for the matrices of a call: float32 (..., M, K / block)."""
    r = call.recipe
    chosen = np.zeros(scale_shape(call.moved.shape, r), np.float32)
    if chosen.size:
        x = stack(call.moved, r, is_per_expert(amax, r))
        parts = chosen.reshape(len(x), -1, chosen.shape[-1])
        for i, matrix in enumerate(x):
            search(matrix, parts[i], part_of(amax, r, i, x.shape[:2]))
    return chosen
