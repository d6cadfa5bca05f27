"""Searches: a block's amax is chosen among candidates by the error that quantizing under it makes, not the largest magnitude.

A search of recipes/rules.py is a function of its name here,

    search_<name>(x, amax, tensor, recipe, dtype)   the chosen amaxes (rows, blocks), float32

of float32 elements x (rows, columns) and the largest magnitudes of their blocks (rows, blocks), under the tensor scale that the
call has. What follows is the recipe without its search, of blocks that have these amaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fp4kit.call.amaxes import is_per_expert, part_of
from fp4kit.call.parse import Call
from fp4kit.parts import scale_shape
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.blocks import block_amax, tiles
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.quantize import quantize_tile, widen
from fp4kit.reference.scaling import TensorScale, tensor_scale
from fp4kit.reference.search_scales import least_amaxes
from fp4kit.reference.stack import stack
from fp4kit.reference.sums import sum_lanes

AUTO_ROUND_POWERS = (1.0, 0.5, 2.0)
AUTO_ROUND_PERCENTS = (1.0, *(percent / 100 for percent in range(50, 152) if percent != 100))


def least_by_block(candidates: Iterable[np.ndarray], error: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of candidates in their order, by block, the first of least error; the first of all where that is NaN."""
    chosen: np.ndarray | None = None
    for candidate in candidates:
        found = error(candidate)
        if chosen is None:
            chosen, least = candidate, found
            continue
        better = found < least
        chosen, least = np.where(better, candidate, chosen), np.where(better, found, least)
    assert chosen is not None  # a search has a candidate
    return chosen


def _squares(x: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """The squared error of each block by its amax: float32, added as PyTorch does on a CPU."""

    def error(amax: np.ndarray) -> np.ndarray:
        difference = dequantize_tile(*quantize_tile(x, recipe, tensor, dtype, amax, None), recipe, tensor) - x
        return sum_lanes((difference * difference).reshape(len(x), -1, recipe.block_size))

    return error


def _search_auto_round(factors: Iterable[float]) -> Callable[..., np.ndarray]:
    def search(x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
        """amax * factor of least squared error, the first of equals."""
        return least_by_block((amax * np.float32(factor) for factor in factors), _squares(x, tensor, recipe, dtype))

    return search


search_auto_round_powers = _search_auto_round(AUTO_ROUND_POWERS)  # Source: auto-round data_type/mxfp.py quant_mx_opt_rtn
search_auto_round_percents = _search_auto_round(AUTO_ROUND_PERCENTS)  # Source: auto-round data_type/nvfp.py search_nvfp4_scale


def search_modelopt_sweep(x: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """The amax, of those that give an E4M3 scale, of least squared error. Source: Model-Optimizer nvfp4_fp8_scale_sweep."""
    return least_amaxes(x, np.float32(tensor.amax.reshape(())), recipe)


SEARCHES: dict[str, Callable[..., np.ndarray]] = {name: globals()[f"search_{name}"] for name in rules.SEARCHES}


@np.errstate(all="ignore")
def search_matrix(x: np.ndarray, recipe: Recipe, amax: np.ndarray | None, hadamard: int | None, out: np.ndarray) -> None:
    """The chosen block amaxes of x (M, K) into out (M, K / block), tile by tile. amax: of the tensor, as for quantize_matrix."""
    tensor, search = tensor_scale(amax, recipe, x.dtype).columns(recipe), SEARCHES[recipe.search]
    for rows, columns in tiles(x.shape, recipe.block):
        tile = widen(x[rows, columns], recipe, hadamard)
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        out[rows, blocks] = search(tile, block_amax(tile, recipe), tensor.cut(rows, blocks), recipe, x.dtype)


def searched(call: Call, amax: np.ndarray | None) -> Call:
    """The call with the block amaxes that its recipe's search chooses; as it is where there is none. amax: of the tensor."""
    r = call.recipe
    if not r.search or not call.x.size:
        return call
    x = stack(call.moved, r, is_per_expert(amax, r))
    chosen = np.empty((*x.shape[:2], x.shape[2] // r.block_size), np.float32)
    for i, matrix in enumerate(x):
        search_matrix(matrix, r, part_of(amax, r, i, x.shape[:2]), call.mask, chosen[i])
    return call._replace(block_amax=chosen.reshape(scale_shape(call.moved.shape, r)))
