"""Find the block amaxes of CuPy arrays whose scales give the smallest loss, or the best multiple of each amax.
A candidate is a block scale that may be chosen. The full search (search_full) tries every candidate. The pruned
searches (search, search_hessian) skip candidates that provably cannot win; _is_pruned says when they can be used. A
matrix is a tuple (x, block amaxes, tensor amax), where x holds the elements and is contiguous (M, K). The found amaxes
are written to the array of block amaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call, Declined
from fp4kit.call.search_scales import BLOCK_COLUMNS, MAX_OFFSET, Search
from fp4kit.cuda.amax import amax, tensor_amax
from fp4kit.cuda.compiler import Trait, recipe_struct
from fp4kit.cuda.dispatch import ON_THE_CPU, check_formats, kernel_for
from fp4kit.cuda.launch import (
    THREADS,
    GroupedLaunch,
    Launch,
    address,
    aligned,
    as_aligned,
    check_count,
    grid,
    piece_counts,
    prepare_rows,
    prepared,
    row_function,
    row_of,
)
from fp4kit.cuda.matrix import launch_request
from fp4kit.formats import E4M3, E8M0
from fp4kit.quantized.container import scale_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import decoding, searching
from fp4kit.reference.ascend import CHOICES
from fp4kit.reference.codec import is_per_expert, part_for_matrix
from fp4kit.reference.search import AROUND_FLOOR, CEIL_X_CONSTANTS, DEFAULT_TERMS, FACTORS, SearchTerms, multiples

_ALL_OFFSETS = (-MAX_OFFSET, MAX_OFFSET)
LANES, POWER_LANES = 32, 4  # threads that share a block in a full search (kLanes): for E4M3 scales, for E8M0 scales
MAX_BLOCK_COLUMNS = 1024  # the widest block of a full search of E8M0 scales
_WORD = (1 << 64) - 1  # x & _WORD gives the two's complement of a negative int x, as an unsigned 64-bit number


def search_scales(search: Search) -> Any:
    """Return the block amaxes whose scales give the smallest loss: float32 (..., M, K / block)."""
    call, r = search.call, search.call.recipe
    check_search(search)
    if search.terms.grid is not None:
        return search_amaxes(search)
    cupy = imports.cupy()
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        amaxes = tensor_amax(call, x)
        out = cupy.empty(scale_shape(x.shape, r), np.float32)
        terms = search.terms._replace(
            weights=as_aligned(search.terms.weights), hessian=as_aligned(search.terms.hessian)
        )
        for matrix in matrices_to_search(x, out, amaxes, r):
            search_matrix(*matrix, r, terms, mask=call.mask)
        return out


def matrices_to_search(x: Any, out: Any, amaxes: Any, r: Recipe) -> Iterator[tuple[Any, Any, Any]]:
    """Split an array into matrices to search."""
    if not x.size:
        return
    separate, K = is_per_expert(amaxes, r) or (x.ndim > 2 and x.shape[-2] % r.block_rows), x.shape[-1]
    B = prod(x.shape[:-2]) if separate else 1
    for i, (part, block_amaxes) in enumerate(
        zip(x.reshape(B, -1, K), out.reshape(B, -1, K // r.block_size), strict=True)
    ):
        yield part, block_amaxes, part_for_matrix(amaxes, r, i, (B, len(part)))


def check_search(search: Search) -> None:
    """Raise Declined if no CUDA kernel supports a search, with a message that says what is needed."""
    r, terms = search.call.recipe, search.terms
    if search.searches_e8m0 or terms.grid is not None:
        check_formats(r)
    if terms.grid is not None:
        return
    _check_transform(r, terms, search.call.mask)
    if search.searches_e8m0 and (r.block_size % BLOCK_COLUMNS or r.block_size > MAX_BLOCK_COLUMNS):
        needed = f"needs a multiple of {BLOCK_COLUMNS}, {MAX_BLOCK_COLUMNS} at most"
        raise Declined(f"no CUDA kernel searches blocks of {r.block_size} columns; {needed}; {ON_THE_CPU}")


def search_matrix(
    x: Any,
    out: Any,
    amax: Any,
    r: Recipe,
    terms: SearchTerms = DEFAULT_TERMS,
    unproven: Any = None,
    mask: int | None = None,
) -> None:
    """Find the block amaxes of a matrix x (M, K) that give the smallest loss, and write them into out, by one
    launch.
    """
    check_count(x.size)
    rows, columns = x.shape
    device, aligned_runs = x.device.id, aligned(x, 16)
    offsets = terms.offsets or (AROUND_FLOOR if r.scale == E8M0 else _ALL_OFFSETS)
    weighted, column_weights = terms.weights is not None, terms.weights if terms.hessian is None else terms.hessian
    struct = recipe_struct(r, sign_mask=mask)
    traits: tuple[Trait, ...] = (x.dtype, aligned_runs)
    sizes: tuple[int, ...] = (rows, columns, *(end & _WORD for end in offsets))
    if not _is_pruned(r, terms):
        lanes = POWER_LANES if r.scale == E8M0 else LANES
        work = -(-rows // r.block_rows) * (columns // r.block_size) * lanes
        traits += (weighted, terms.hessian is not None, *objective_traits(terms.power), terms.offsets is None)
        launch = prepared("search_full", work, (*sizes, float64_bits(terms.power)), device, traits, struct)
    elif terms.hessian is None:
        kernel = "search_weighted" if weighted else "search"
        launch = prepared(
            kernel, x.size // BLOCK_COLUMNS, sizes, device, (*traits, weighted, *_candidate_traits(*offsets)), struct
        )
    else:
        row, blocks = row_of("search_hessian", device), columns // BLOCK_COLUMNS
        most = grid(rows * columns, device, row.limit) // blocks  # thread blocks per Hessian
        function = row_function("search_hessian", device, struct, *traits)
        work = blocks * max(min(-(-rows // THREADS), most), 1)
        launch = Launch(function, work, row.arguments, *sizes)
    launch(*map(address, (x, amax, column_weights, out, unproven)))


def _is_pruned(r: Recipe, terms: SearchTerms) -> bool:
    """Return True if a pruned search can be used, which skips candidates that provably cannot win."""
    return r.scale == E4M3 and terms.power == 2 and r.block_rows == 1 and r.amax_nan == "propagate"


def _candidate_traits(lower: int, upper: int) -> tuple[bool, bool]:
    """Return the traits kAll and kEight of the kernel `search` for its candidates."""
    return (lower, upper) == _ALL_OFFSETS, lower <= -8 and upper >= 8


def with_searched_amaxes(call: Call) -> Call:
    """Run the search of a call's recipe."""
    r = call.recipe
    if not r.search or call.has_scales:
        return call
    without = call._replace(recipe=without_search(r))
    if r.search not in OWN_KERNELS:
        _check_transform(r, DEFAULT_TERMS, call.mask)
    kernel_for(launch_request(without)._replace(calibrated=True))  # may raise Declined, so call it first
    with imports.making_current(call.x.device.id):
        x = imports.cupy().ascontiguousarray(call.moved)
        amax, block_amaxes = tensor_amax(call, x), imports.cupy().empty(scale_shape(x.shape, r), np.float32)
        matrices = matrices_to_search(x, block_amaxes, amax, r)
        if r.search in OWN_KERNELS:
            for launch in factor_launches(matrices, r, call.mask):
                launch()
        else:
            for matrix in matrices:
                search_matrix(*matrix, r, mask=call.mask)
        return without._replace(tensor_amax=amax, block_amax=block_amaxes)


def _check_transform(r: Recipe, terms: SearchTerms, mask: int | None) -> None:
    """Raise Declined if elements are transformed before a search, but its kernel supports no Hadamard transform."""
    if mask is not None and (terms.hessian is not None or not _is_pruned(r, terms)):
        raise Declined(f"no CUDA kernel searches scales of {r.id} after a Hadamard transform; {ON_THE_CPU}")


@cache
def without_search(r: Recipe) -> Recipe:
    """Return a copy of a recipe without its search, for quantizing with the block amaxes that a search has found."""
    return replace(r, search="")


def group_launches(group: Sequence[tuple[Any, Any, Any]], r: Recipe, mask: int | None) -> list[Callable[[], None]]:
    """Return the launches of a recipe's search for the matrices in `group`, which have one dtype and device."""
    return list(factor_launches(group, r, mask)) if r.search in OWN_KERNELS else [search_group(group, r, mask)]


def search_group(group: Sequence[tuple[Any, Any, Any]], r: Recipe, mask: int | None = None) -> GroupedLaunch:
    """Return one prepared launch that finds the best block amaxes of all matrices in `group`."""
    # The recipe must support the pruned search (_is_pruned).
    first, device = group[0][0], group[0][0].device.id
    aligned_runs = [aligned(x, 16) for x, _, _ in group]
    column_weights, unproven = 0, 0  # null pointers: no weights, and searched blocks are not counted
    members = [
        (address(x), address(amax), column_weights, address(out), unproven, *x.shape, *_ALL_OFFSETS)
        for x, out, amax in group
    ]
    weighted = False
    traits = (first.dtype, all(aligned_runs), weighted, *_candidate_traits(*_ALL_OFFSETS))
    pieces, struct = piece_counts([x.size for x, _, _ in group], device), recipe_struct(r, sign_mask=mask)
    launch = prepare_rows("search", device, struct, traits, members, aligned_runs, pieces, tuple(group))
    # Not one thread block per piece: each thread block first makes tables of bounds, and then takes many pieces.
    return replace(launch, grid=grid(launch.grid, device, row_of("search", device).limit))


MAX_LOSSES = 1 << 25  # the most losses in memory at a time; there is one loss per row and multiple


def search_amaxes(search: Search) -> Any:
    """Return each amax times the multiple that gives the smallest loss: float32 in the shape of the amaxes."""
    call, r, cupy = search.call, search.call.recipe, imports.cupy()
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        tensor = tensor_amax(call, x)
        amaxes = tensor if r.scale is None else amax(call._replace(moved=x))
        if not x.size:
            return cupy.abs(amaxes)  # the sign bit of a given -0 is ignored
        out = cupy.empty(amaxes.shape, np.float32)
        assert search.terms.grid is not None
        factors = cupy.asarray(multiples(search.terms.grid))
        columns = r.block_size if r.block else x.shape[-1]
        search_multiples(x.reshape(-1, columns), amaxes, tensor, out, r, search.terms, factors)
        return out


def search_multiples(x: Any, amaxes: Any, tensor: Any, out: Any, r: Recipe, terms: SearchTerms, factors: Any) -> None:
    """Find the multiple of each amax that gives the smallest loss, and write the amax times this multiple into out."""
    # The multiples are tried in batches, so that at most MAX_LOSSES losses are in memory.
    check_count(x.size)
    cupy, device, (rows, columns) = imports.cupy(), x.device.id, x.shape
    batch = min(max(MAX_LOSSES // rows, 1), factors.size)
    losses, least = cupy.empty((rows, batch), np.float64), cupy.empty(amaxes.shape, np.float64)
    arrays = tuple(map(address, (x, amaxes, tensor, terms.weights, factors, losses, least, out)))
    traits = (x.dtype, terms.weights is not None, r.fake_rule is not None, *objective_traits(terms.power))
    struct = recipe_struct(decoding(r, np.dtype(np.float32)))
    parts = 1 if terms.weights is None else terms.weights.size // columns
    covered = rows // amaxes.size, rows if tensor is None else rows // tensor.size
    for first in range(0, factors.size, batch):
        count = min(batch, factors.size - first)
        sizes = (rows, columns, *covered, parts, first, count, float64_bits(terms.power))
        for kernel, work in (("row_losses", rows * count), ("least_losses", amaxes.size * 32)):
            prepared(kernel, work, sizes, device, traits, struct)(*arrays)


def objective_traits(power: float) -> tuple[bool, bool, bool]:
    """Return the traits kMagnitudes, kLargest and kPowers for a loss: the sum of |error|^power, or the largest |error|
    if power is inf.
    """
    return power == 1, power == np.inf, power not in (1, 2, np.inf)


def float64_bits(power: float) -> int:
    """Return the 64 bits of a number as a float64, as an int, because a Launch takes only ints as arguments."""
    return int(np.float64(power).view(np.uint64))


OWN_KERNELS = {  # {Recipe.search: its kernels}
    **dict.fromkeys(FACTORS, "search_factors"),
    **dict.fromkeys(CHOICES, "search_msmodelslim"),
    "quest": "search_quest",
    "msmodelslim_ceil_x": "ceil_x_errors ceil_x",
}


def factor_launches(
    matrices: Iterable[tuple[Any, Any, Any]], r: Recipe, mask: int | None = None
) -> Iterator[Callable[[], None]]:
    """Yield one function per matrix."""
    for x, out, tensor in matrices:
        check_count(x.size)
        struct = recipe_struct(searching(r), sign_mask=mask) + (f"\n{factors_text(r)}" if r.search in FACTORS else "")
        work, traits = x.size // r.block_size, (x.dtype, aligned(x, 16))
        names = OWN_KERNELS[r.search].split()
        launches = [prepared(name, work, x.shape, x.device.id, traits, struct) for name in names]
        yield partial(_launch_search, launches, "bins" in row_of(names[0], x.device.id).names, x, tensor, out)


def _launch_search(launches: Sequence[Launch], takes_bins: bool, *arrays: Any) -> None:
    """Run the kernels of a search. If there are two, they share bins of errors."""
    bins = imports.cupy().zeros((len(CEIL_X_CONSTANTS), 256), np.uint64) if len(launches) > 1 else None
    for launch in launches:
        launch(*map(address, (*arrays, bins) if takes_bins else arrays))


def factors_text(r: Recipe) -> str:
    """Return the definition of the C++ array kFactors, the multiples that a recipe's search tries."""
    values = (f"{float(np.float32(factor)).hex()}f" for factor in FACTORS[r.search])
    return f"static __device__ const float kFactors[] = {{{', '.join(values)}}};"
