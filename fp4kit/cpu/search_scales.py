"""Find the block amaxes whose scales give the smallest loss, by the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fp4kit.call.parse import Call, Declined
from fp4kit.call.search_scales import BLOCK_COLUMNS, Search
from fp4kit.cpu.codec import Tiles, blocks_of, decoder_of, kernels_of, slab_call, tensor_rows
from fp4kit.cpu.coverage import not_searched, rule_key
from fp4kit.cpu.library import SearchFactorsCall, SearchQuestCall, SearchScalesCall, address, functions, threads_for
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import searching
from fp4kit.reference import search as factors_specification
from fp4kit.reference import search as specification
from fp4kit.reference.arith import moved_by, reciprocal_approx_ftz
from fp4kit.reference.search import SearchTerms
from fp4kit.reference.tensor_rules import tensor_scale

_CANDIDATES_PER_COST = 4  # this many candidates take about as long as encoding once


@np.errstate(all="ignore")
def search_factors(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """Find the best block amaxes of a matrix and write them into out, as reference.search_factors.search_matrix
    does.
    """
    factors = np.asarray(factors_specification.FACTORS[recipe.search], np.float32)
    kernels, decoder = kernels_of(recipe), decoder_of(searching(recipe), np.dtype(np.float32))
    factors_by_code = not rules.BLOCK_RULES[recipe.block_rule or ""].reads_amax
    tensor, step = tensor_rows(tensor_scale(amax, recipe, x.dtype), len(x))
    cost = 1 + len(factors) // _CANDIDATES_PER_COST
    tiles = Tiles.of(x, recipe.block_size, 1, hadamard)
    fields = {"factors": address(factors), "count": len(factors), "factors_by_code": factors_by_code}
    fields |= {"tensor_step": step, "block_rule": kernels.block_rule, "element": kernels.element, "decoder": decoder}
    fields |= {"block": recipe.block_size}
    for rows, columns in tiles.slabs(cost):
        cut, found = x[rows, columns], out[rows, blocks_of(columns, recipe)]
        needs_fallback = np.zeros(tiles.count_tiles(rows, columns), np.uint8)
        call = slab_call(SearchFactorsCall, tiles, cut, found, hadamard, **fields, threads=threads_for(cut.size * cost))
        call.encode, call.decode, call.amax = (address(part[rows] if step else part) for part in tensor)
        call.needs_fallback = address(needs_fallback)
        functions().fp4kit_search_factors(ctypes.byref(call))
        for tile_rows, tile_columns in tiles.marked(rows, columns, needs_fallback):
            part = amax if amax is None or not step else amax.reshape(-1)[tile_rows]
            target = out[tile_rows, blocks_of(tile_columns, recipe)]
            factors_specification.search_matrix(x[tile_rows, tile_columns], target, part, recipe, hadamard)


def search_quest(x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None) -> None:
    """Compute QuEST's block amaxes of a matrix and write them into out, as reference.search_factors.search_matrix
    does.
    """
    tiles = Tiles.of(x, recipe.block_size, 1, hadamard)
    for rows, columns in tiles.slabs(1):
        cut, found = x[rows, columns], out[rows, blocks_of(columns, recipe)]
        sizes = {"block": recipe.block_size, "emax": recipe.element.emax, "threads": threads_for(cut.size)}
        call = slab_call(SearchQuestCall, tiles, cut, found, hadamard, **sizes)
        functions().fp4kit_search_quest(ctypes.byref(call))


# The approximate time of a search, as a multiple of the time of encoding. The three searches are: a pruned search, a
# full search, and a full search with a power other than 1, 2 and infinity.
PRUNED_COST, FULL_COST, POWER_COST = 16, 256, 1024


@np.errstate(all="ignore")
def search_matrix(
    x: np.ndarray,
    out: np.ndarray,
    amax: np.ndarray,
    search: Search,
    unproven: np.ndarray | None = None,
    bounded: bool = True,
) -> None:
    """Find the best block amaxes of a matrix and write them into out, as reference.search_scales.search_matrix does."""
    r, terms = search.call.recipe, search.terms
    is_simple = terms.power in (1, 2, np.inf)
    cost = (PRUNED_COST if terms.power == 2 and terms.hessian is None else FULL_COST) if is_simple else POWER_COST
    rule, (lower, upper) = rule_of(r, terms.offsets), terms.offsets or (0, 0)
    candidates = _candidates(np.float32(amax.reshape(())), r, terms)
    counted = np.zeros(1, np.uint64) if unproven is None else unproven
    tiles = Tiles.of(x, BLOCK_COLUMNS, r.block_rows)
    fields: dict[str, Any] = {"unproven": address(counted)}
    fields |= zip(("amaxes", "scales", "reciprocals"), map(address, candidates), strict=True)
    fields |= {"lower": lower, "upper": upper, "power": terms.power, "tensor_amax": float(amax.reshape(()))}
    fields |= {"block_rule": rule, "block_rows": r.block_rows, "is_pruned": bounded}
    for rows, columns in tiles.slabs(cost):
        cut, blocks = x[rows, columns], slice(columns.start // BLOCK_COLUMNS, columns.stop // BLOCK_COLUMNS)
        weights = None if terms.weights is None else terms.weights[columns]
        hessian = None if terms.hessian is None else terms.hessian[blocks]
        call = slab_call(
            SearchScalesCall, tiles, cut, out[rows, blocks], **fields, threads=threads_for(cut.size * cost)
        )
        call.weights, call.hessian = map(address, (weights, hessian))
        functions().fp4kit_search_scales(ctypes.byref(call))


# {value of Recipe.search: the function that searches one matrix}, for searches other than the sweep of all scales
_OWN_SEARCHES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(factors_specification.FACTORS, search_factors),
    "quest": search_quest,
}


def searched(call: Call, amax: np.ndarray | None) -> Call:
    """Return the call with its field block_amax set to the block amaxes that the recipe's search chooses."""
    r, own = call.recipe, _OWN_SEARCHES.get(call.recipe.search)
    if not_searched(r) or (call.mask is not None and own is None):
        return factors_specification.searched(call, amax)
    search: Callable[..., None] = partial(search_matrix, search=Search(call))
    if own is not None:
        search = partial(own, recipe=r, hadamard=call.mask)
    return call._replace(block_amax=factors_specification.chosen_amaxes(call, amax, search))


def rule_of(r: Recipe, offsets: tuple[int, int] | None) -> int:
    """Return the library's index of the block rule that gives the scale code of a block's own amax."""
    if offsets is None:
        return -1
    key = rule_key(r) if r.block_rule == specification.OWN_RULE else None
    rule = -1 if key is None else functions().fp4kit_block_rule(key.encode())
    if rule < 0:
        raise Declined(f"the CPU engine cannot compute the scale codes that candidates={offsets} refer to for {r.id}")
    return rule


def _candidates(amax: np.float32, r: Recipe, terms: SearchTerms) -> np.ndarray:
    """Return the tables of a search, indexed by scale code, float32 (3, 128)."""
    # Entries for codes outside of 1 ... 126, which are never candidates, are 1.
    found = np.ones((3, 128), np.float32)
    codes = specification.CODES
    found[0, codes] = specification.candidate_amaxes(amax, r)
    found[1, codes] = scales = specification.scales_of(found[0, codes], amax, r, terms)
    found[2, codes] = reciprocal_approx_ftz(scales * moved_by(scales))
    return found
