"""Find, for each block, the multiple of its amax that gives the smallest error, by the compiled library.
A sign mask is an int whose bit i is 1 if the Hadamard transform first negates element i of each 16.

auto-round's recipes use this search. For FP-Quant's method quest, search_quest computes the amax from the elements of
the block alone.
"""

from __future__ import annotations

import ctypes

import numpy as np

from fp4kit.cpu.dequantize import decoder_of
from fp4kit.cpu.encode import INPUTS, Tiles, blocks_of, kernels_of, source
from fp4kit.cpu.library import SearchFactorsCall, SearchQuestCall, address, functions, threads_for
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import searching
from fp4kit.reference import search as specification
from fp4kit.reference.tensor_rules import tensor_scale

_CANDIDATES_PER_COST = 4  # this many candidates take about as long as encoding once


@np.errstate(all="ignore")
def search_matrix(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """Find the best block amaxes of a matrix and write them into out, as reference.search_factors.search_matrix
    does.
    """
    factors = np.asarray(specification.FACTORS[recipe.search], np.float32)
    kernels, decoder = kernels_of(recipe), decoder_of(searching(recipe), np.dtype(np.float32))
    factors_by_code = not rules.BLOCK_RULES[recipe.block_rule or ""].reads_amax
    tensor = [np.ascontiguousarray(part, np.float32).reshape(-1) for part in tensor_scale(amax, recipe, x.dtype)]
    step, cost = int(max(part.size for part in tensor) > 1), 1 + len(factors) // _CANDIDATES_PER_COST
    tensor = [np.ascontiguousarray(np.broadcast_to(part, len(x) if step else 1)) for part in tensor]
    tiles = Tiles.of(x, recipe.block_size, 1, x.strides[1] != x.itemsize or hadamard is not None)
    for rows, columns in tiles.slabs(cost):
        cut, found = x[rows, columns], out[rows, blocks_of(columns, recipe)]
        needs_fallback = np.zeros(tiles.count_tiles(rows, columns), np.uint8)
        tensor_rows = [part[rows] if step else part for part in tensor]
        call = SearchFactorsCall(
            source(cut, hadamard),
            *map(address, (*tensor_rows, factors)),
            step,
            len(factors),
            address(found),
            out.strides[0] // out.itemsize,
            address(needs_fallback),
            tiles.tile_rows,
            tiles.tile_columns,
            INPUTS[x.dtype],
            kernels.block_rule,
            kernels.element,
            decoder,
            recipe.block_size,
            factors_by_code,
            threads_for(cut.size * cost),
        )
        functions().fp4kit_search_factors(ctypes.byref(call))
        for tile_rows, tile_columns in tiles.marked(rows, columns, needs_fallback):
            part = amax if amax is None or not step else amax.reshape(-1)[tile_rows]
            target = out[tile_rows, blocks_of(tile_columns, recipe)]
            specification.search_matrix(x[tile_rows, tile_columns], target, part, recipe, hadamard)


def search_quest(x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None) -> None:
    """Compute QuEST's block amaxes of a matrix and write them into out, as reference.search_factors.search_matrix
    does.
    """
    tiles = Tiles.of(x, recipe.block_size, 1, x.strides[1] != x.itemsize or hadamard is not None)
    for rows, columns in tiles.slabs(1):
        cut, found = x[rows, columns], out[rows, blocks_of(columns, recipe)]
        call = SearchQuestCall(
            source(cut, hadamard),
            address(found),
            out.strides[0] // out.itemsize,
            tiles.tile_rows,
            tiles.tile_columns,
            INPUTS[x.dtype],
            recipe.block_size,
            recipe.element.emax,
            threads_for(cut.size),
        )
        functions().fp4kit_search_quest(ctypes.byref(call))
