"""Provide the functions of host/engine.py, computed by a compiled C++ library: the CPU engine.
The specification is the NumPy code in fp4kit.reference, which host/engine.py runs.

The results equal the results of the specification in every bit. The library computes codes, scales and values by the
rules that the CUDA kernels also use (cuda/kernels/rules). The specification computes tiles that hold NaN or infinities.
For calls that the library does not support, the functions raise Declined. In this file, `reference` is host/engine.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import as_terms
from fp4kit.call.matmul import (
    ADDERS,
    Addition,
    Decoding,
    MatmulCall,
    Operand,
    addition_of,
    decoding_of,
    multiply_integers,
    scale_decoding_of,
)
from fp4kit.call.parse import Call, Declined, Rotation
from fp4kit.call.search_scales import BLOCK_COLUMNS, Search
from fp4kit.cpu import codec, library
from fp4kit.cpu.library import ELEMENTS_PER_CALL, address, functions, threads_for
from fp4kit.host import engine as reference
from fp4kit.quantized.container import Quantized, tensor_amax_shape
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import faking, searching
from fp4kit.reference import quantize as partial_specification
from fp4kit.reference import search as specification
from fp4kit.reference.arith import moved_by, reciprocal_approx_ftz
from fp4kit.reference.ascend import CHOICES
from fp4kit.reference.codec import stack
from fp4kit.reference.matmul import low_rank_product as low_rank_product_of_specification
from fp4kit.reference.stochastic import hadamard_factor
from fp4kit.reference.tensor_rules import tensor_scale
from fp4kit.units import IntegerAdd


def tensor_amax(moved: np.ndarray, r: Recipe, mask: int | None = None) -> np.ndarray:
    """Return the tensor amaxes of an array, float32 in their canonical shape (call/inputs.py)."""
    # The specification computes them if the array is empty, or if codec.tensor_amax cannot compute one of them, for
    # example because an element is NaN or infinite.
    found = [codec.tensor_amax(part, r, mask) for part in stack(moved, r)] if moved.size else []
    finite = [amax for amax in found if amax is not None]
    if not moved.size or len(finite) < len(found):
        return reference.compute_tensor_amax(moved, r, mask)
    parts = np.stack(finite)
    parts = parts.max() if r.tensor_scaling in ("none", "tensor") else parts
    return np.asarray(parts, np.float32).reshape(tensor_amax_shape(moved.shape, r))


# For smaller arrays the specification is as fast, because of the Python work around a call to the library. These limits
# do not apply to cached calls (cached_calls.py). Two cores of an x86-64 machine with AVX-512, November 2026.
MIN_ELEMENTS = {"none": 1 << 12, "tensor": 1 << 12, "row": 1 << 15, "block": 1 << 11}  # to encode, by tensor_scaling
MIN_CODE_BYTES = 1 << 11  # the fewest bytes of codes to decode
MIN_AMAX_ELEMENTS = 1 << 11
MIN_COLUMNS = 16


FACTOR_SEARCH_BLOCKS = (16, 32)  # block sizes that source/search_factors.h supports


def not_searched(r: Recipe) -> str | None:
    """Return the reason why the engine cannot run the search of a recipe during quantize."""
    is_refused = r.search in specification.FACTORS and r.block_size not in FACTOR_SEARCH_BLOCKS
    return f"a search over blocks of {r.block_size} columns (the engine supports 16 and 32)" if is_refused else None


_CANDIDATES_PER_COST = 4  # this many candidates take about as long as encoding once


@np.errstate(all="ignore")
def search_factors(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """Find the best block amaxes of a matrix and write them into out, as reference.search_factors.search_matrix
    does.
    """
    factors = np.asarray(specification.FACTORS[recipe.search], np.float32)
    kernels, decoder = codec.kernels_of(recipe), codec.decoder_of(searching(recipe), np.dtype(np.float32))
    factors_by_code = not rules.BLOCK_RULES[recipe.block_rule or ""].reads_amax
    tensor, step = codec.tensor_rows(tensor_scale(amax, recipe, x.dtype), len(x))
    cost = 1 + len(factors) // _CANDIDATES_PER_COST
    tiles = codec.Tiles.of(x, recipe.block_size, 1, hadamard)
    fields = {"factors": address(factors), "count": len(factors), "factors_by_code": factors_by_code}
    fields |= {"tensor_step": step, "block_rule": kernels.block_rule, "element": kernels.element, "decoder": decoder}
    fields |= {"block": recipe.block_size}
    for rows, columns in tiles.slabs(cost):
        cut, found = x[rows, columns], out[rows, codec.blocks_of(columns, recipe)]
        needs_fallback = np.zeros(tiles.count_tiles(rows, columns), np.uint8)
        call = codec.slab_call(
            library.SearchFactorsCall, tiles, cut, found, hadamard, **fields, threads=threads_for(cut.size * cost)
        )
        call.encode, call.decode, call.amax = (address(part[rows] if step else part) for part in tensor)
        call.needs_fallback = address(needs_fallback)
        functions().fp4kit_search_factors(ctypes.byref(call))
        for tile_rows, tile_columns in tiles.marked(rows, columns, needs_fallback):
            part = amax if amax is None or not step else amax.reshape(-1)[tile_rows]
            target = out[tile_rows, codec.blocks_of(tile_columns, recipe)]
            specification.search_matrix(x[tile_rows, tile_columns], target, part, recipe, hadamard)


def _searched_by_block(name: str, cost: int, *outputs: np.ndarray) -> Callable[..., None]:
    """Return the function that finds the block amaxes of a matrix by the library's fp4kit_search_<name>, as
    reference.search_factors.search_matrix does, and writes them into out. cost: its time, relative to encoding.
    """

    def search(x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None) -> None:
        tiles = codec.Tiles.of(x, recipe.block_size, 1, hadamard)
        for rows, columns in tiles.slabs(cost):
            cut, found = x[rows, columns], out[rows, codec.blocks_of(columns, recipe)]
            sizes = {"block": recipe.block_size, "emax": recipe.element.emax, "threads": threads_for(cut.size * cost)}
            call = codec.slab_call(library.SearchQuestCall, tiles, cut, found, hadamard, **sizes)
            getattr(functions(), f"fp4kit_search_{name}")(ctypes.byref(call), *map(address, outputs))
            # The library's transform does not tell infinity from NaN.
            if hadamard is not None and not outputs and (infinite := ~np.isfinite(found).all(axis=1)).any():
                amaxes = np.empty((np.count_nonzero(infinite), found.shape[1]), np.float32)
                specification.search_matrix(cut[infinite], amaxes, amax, recipe, hadamard)
                found[infinite] = amaxes

    return search


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
    tiles = codec.Tiles.of(x, BLOCK_COLUMNS, r.block_rows)
    fields: dict[str, Any] = {"unproven": address(counted)}
    fields |= zip(("amaxes", "scales", "reciprocals"), map(address, candidates), strict=True)
    fields |= {"lower": lower, "upper": upper, "power": terms.power, "tensor_amax": float(amax.reshape(()))}
    fields |= {"block_rule": rule, "block_rows": r.block_rows, "is_pruned": bounded}
    for rows, columns in tiles.slabs(cost):
        cut, blocks = x[rows, columns], slice(columns.start // BLOCK_COLUMNS, columns.stop // BLOCK_COLUMNS)
        weights = None if terms.weights is None else terms.weights[columns]
        hessian = None if terms.hessian is None else terms.hessian[blocks]
        call = codec.slab_call(
            library.SearchScalesCall, tiles, cut, out[rows, blocks], **fields, threads=threads_for(cut.size * cost)
        )
        call.weights, call.hessian = map(address, (weights, hessian))
        functions().fp4kit_search_scales(ctypes.byref(call))


# {value of Recipe.search: the function that searches one matrix}, for searches other than the sweep of all scales
_OWN_SEARCHES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(specification.FACTORS, search_factors),
    "quest": _searched_by_block("quest", 1),
    **dict.fromkeys(CHOICES, _searched_by_block("powers", 2)),
}


@np.errstate(all="ignore")
def _search_ceil_x(call: Call) -> Call:
    """Return the call with the block amaxes that give its scales by the best constant of ceil_x for the whole array."""
    bins = np.zeros((len(specification.CEIL_X_CONSTANTS), 256), np.int64)
    search = partial(_searched_by_block("ceil_x", 2, bins), recipe=call.recipe, hadamard=call.mask)
    found = specification.chosen_amaxes(call, None, search)
    if call.mask is not None and not np.isfinite(found).all():  # the library's transform takes infinity for NaN
        return specification.searched(call, None)
    constant = specification.best_constant(np.cumsum(bins, axis=0), call.x.size, call.x.dtype)
    functions().fp4kit_ceil_x_amaxes(address(found), found.size, int(4 * constant) - 24, codec.INPUTS[call.x.dtype])
    return call._replace(block_amax=found)


def searched(call: Call, amax: np.ndarray | None) -> Call:
    """Return the call with its field block_amax set to the block amaxes that the recipe's search chooses."""
    r, own = call.recipe, _OWN_SEARCHES.get(call.recipe.search)
    if rules.SEARCHES[r.search].whole_array:
        return _search_ceil_x(call)
    if not_searched(r) or (call.mask is not None and own is None):
        return specification.searched(call, amax)
    search: Callable[..., None] = partial(search_matrix, search=Search(call))
    if own is not None:
        search = partial(own, recipe=r, hadamard=call.mask)
    return call._replace(block_amax=specification.chosen_amaxes(call, amax, search))


def rule_of(r: Recipe, offsets: tuple[int, int] | None) -> int:
    """Return the library's index of the block rule that gives the scale code of a block's own amax."""
    if offsets is None:
        return -1
    key = codec.rule_key(r) if r.block_rule == specification.OWN_RULE else None
    rule = -1 if key is None else functions().fp4kit_block_rule(key.encode())
    if rule < 0:
        raise Declined(f"the CPU engine cannot compute the scale codes that candidates={offsets} refer to for {r.id}")
    return rule


def _candidates(amax: np.float32, r: Recipe, terms: specification.SearchTerms) -> np.ndarray:
    """Return the tables of a search, indexed by scale code, float32 (3, 128)."""
    # Entries for codes outside of 1 ... 126, which are never candidates, are 1.
    found = np.ones((3, 128), np.float32)
    codes = specification.CODES
    found[0, codes] = specification.candidate_amaxes(amax, r)
    found[1, codes] = scales = specification.scales_of(found[0, codes], amax, r, terms)
    found[2, codes] = reciprocal_approx_ftz(scales * moved_by(scales))
    return found


FAKE_ELEMENTS = 1 << 22  # fake_quantize holds the codes of this many elements at a time
_FUNCTIONS = reference.MatrixFunctions(
    tensor_amax, codec.quantize_matrix, codec.encode_matrix, codec.dequantize_matrix, search_matrix, searched
)


def quantize(call: Call) -> Quantized:
    """Quantize the array of a call."""
    _check(call, None if not_searched(call.recipe) or not call.recipe.search else 0)
    return reference.quantize(call, _FUNCTIONS)


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """Quantize an array along both axes, by two calls: return (quantize(row), quantize(column))."""
    return quantize(row), quantize(column)


def quantize_with_scales(call: Call) -> Quantized:
    """Quantize the array of a call with the scales that the caller passed: only codes are computed."""
    _check(call)
    return reference.quantize_with_scales(call, _FUNCTIONS)


def _check(call: Call, min_elements: int | None = None) -> None:
    """Raise Declined if the engine does not support a call, or is not faster than the specification for it."""
    if min_elements is None:
        min_elements = MIN_ELEMENTS[call.recipe.tensor_scaling]
    # The sizes are checked first, because the other checks take time.
    if call.x.size < min_elements or call.moved.shape[-1] < MIN_COLUMNS:
        raise Declined("the specification is as fast for so few elements")
    is_own, r = codec.kernels_of(call.recipe).own is not None, call.recipe
    if call.random is not None and (is_own or r.stochastic in rules.NOISE_STOCHASTICS):
        raise Declined(f"the CPU engine has no stochastic rounding for {r.id}")
    codec.check_array(call.x)


def dequantize(q: Quantized, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """Return the values of q, rounded to dtype: in `out` if given, otherwise in a new array of the shape of q."""
    codec.decoder_of(q.recipe, dtype)
    if q.packed.size < MIN_CODE_BYTES:
        raise Declined("the specification is as fast for so few values")
    return reference.dequantize(q, dtype, out, _FUNCTIONS)


def requantize(q: Quantized, target: Recipe) -> tuple[Quantized, int, np.ndarray]:
    """Convert q to another recipe."""
    for r in (q.recipe, target):
        codec.decoder_of(r, np.dtype(np.float32))
    codec.kernels_of(target)
    return reference.requantize(q, target, _FUNCTIONS)


def fake_quantize(call: Call) -> np.ndarray:
    """Return the fake-quantized values of a call, in a new array with the shape and dtype of call.x."""
    # The array is quantized and dequantized, FAKE_ELEMENTS (2^22) elements at a time, so that codes take little memory.
    if (reason := codec.not_faked(call.recipe)) is not None:
        raise Declined(f"{call.recipe.id} has {reason}")
    _check(call)
    if call.recipe.fake_rule is not None:
        if call.recipe.search and call.block_amax is None and call.x.size:
            call = searched(call, None)
        return reference.fake_quantize(call, codec.fake_matrix)
    call = call._replace(recipe=faking(call.recipe))
    if call.tensor_amax is None and call.recipe.tensor_scaling != "none":
        call = call._replace(tensor_amax=tensor_amax(call.moved, call.recipe, call.mask))
    values = np.empty(call.moved.shape, call.x.dtype)
    whole = call._replace(x=call.moved, axis=call.moved.ndim - 1, out=None)
    for part, target in _slabs(whole, values):
        dequantize(quantize(part), target.dtype, target)
    return np.moveaxis(values, -1, call.axis)


def _slabs(call: Call, values: np.ndarray) -> Iterator[tuple[Call, np.ndarray]]:
    """Cut a call along its first axes."""
    x, r = call.x, call.recipe
    if x.size <= FAKE_ELEMENTS or x.ndim < 2 or isinstance(call.random, int):
        yield call, values
        return
    if x.ndim > 2 and x[0].size > FAKE_ELEMENTS:
        for i, one in enumerate(values):
            yield from _slabs(_part_of(call, i), one)
        return
    multiple = r.block_rows if x.ndim == 2 else 1
    step = max(FAKE_ELEMENTS // x[0].size // multiple, 1) * multiple
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        yield _part_of(call, rows), values[rows]


def _part_of(call: Call, index: Any) -> Call:
    """Return a call for the part x[index] of the array of a call, with the amaxes and random bytes of this part."""
    # The quantized axis of `call` must be the last one.
    x, tensor, blocks, random = (
        a if a is None or not a.ndim else a[index] for a in (call.x, call.tensor_amax, call.block_amax, call.random)
    )
    tensor = tensor if tensor is None else np.asarray(tensor, np.float32)
    return call._replace(x=x, moved=x, axis=x.ndim - 1, tensor_amax=tensor, block_amax=blocks, random=random)


def transpose(packed: np.ndarray, scales: np.ndarray, q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Transpose each matrix of a Quantized q with square blocks."""
    functions()
    return reference.transpose(packed, scales, q, codec.transpose_codes)


def partial_cast(
    shard: np.ndarray, out: np.ndarray, block_amax: np.ndarray, shape: tuple[int, int], start: int, r: Recipe, amax: Any
) -> None:
    """Write the codes of a shard's elements into out, the packed codes of a matrix, and change no other code of out."""
    codec.kernels_of(r)
    codec.check_array(shard)
    reference.partial_cast(shard, out, block_amax, shape, start, r, amax, _cast_shard)


def amax(call: Call) -> np.ndarray:
    """Return the amax of each block of call.moved: float32 (..., ceil(M / block rows), K / block)."""
    _check(call, MIN_AMAX_ELEMENTS)
    if call.recipe.block is None or not call.x.size:
        raise Declined("the CPU engine computes amaxes only per block, and not of empty arrays")
    matrices = stack(call.moved, call.recipe)
    *lead, K = call.moved.shape
    height, width = call.recipe.block
    out = [codec.block_amax(part, call.recipe) for part in matrices]
    return np.stack(out).reshape((*lead[:-1], -(-lead[-1] // height), K // width) if lead else (K // width,))


def plain_amax(x: np.ndarray, axis: Any) -> np.ndarray:
    """Return the largest magnitude of a whole array as a float32 array of shape ()."""
    functions()
    if axis is not None or not x.size:
        raise Declined("the CPU engine computes amaxes only of whole arrays that are not empty")
    codec.check_array(x)
    if x.ndim > 2 and not x.flags.c_contiguous:
        raise Declined("the CPU engine supports non-contiguous arrays only up to two dimensions")
    found = codec.largest(x.reshape(1, -1) if x.ndim < 2 or x.flags.c_contiguous else x)
    return reference.plain_amax(x, axis) if found is None else np.asarray(found)


def clip_amax(call: Call) -> np.ndarray:
    """Return the amaxes from which a call would compute its tensor scales, in their canonical shape."""
    functions()
    codec.check_array(call.x)
    return tensor_amax(call.moved, call.recipe, call.mask)


def search_scales(search: Search) -> np.ndarray:
    """Return the block amaxes whose scales give the smallest loss: float32 (..., M, K / block)."""
    functions()
    if not search.searches_e4m3:
        raise Declined("the CPU engine searches only E4M3 block scales")
    rule_of(search.call.recipe, search.terms.offsets)
    codec.check_array(search.call.x)
    return reference.search_scales(search, _FUNCTIONS)


class _Cut(NamedTuple):
    """The part of a shard that consists of whole rows of blocks.

    It holds the shard's elements [first, last), which are the rows [row, row + rows) of the matrix. If there is no such
    part, rows and row are 0, and first and last are the length of the shard.
    """

    first: int
    last: int
    row: int = 0
    rows: int = 0

    @classmethod
    def of(cls, length: int, start: int, shape: tuple[int, int], height: int) -> _Cut:
        """Return the _Cut of a shard of `length` elements that begins at element `start` of a matrix (M, K) = shape."""
        M, K = shape
        row = -(-start // (K * height)) * height if length else 0
        end = (start + length) // K if length else 0
        end = end if end == M else end // height * height
        return cls(row * K - start, end * K - start, row, end - row) if end > row else cls(length, length)

    def blocks(self, r: Recipe) -> slice:
        """Return the slice of the matrix's rows of blocks in this part."""
        return slice(self.row // r.block_rows, -(-(self.row + self.rows) // r.block_rows))


def partial_amax(shard: np.ndarray, shape: tuple[int, int], start: int, r: Recipe) -> np.ndarray:
    """Return the amax of every block of a matrix, counting only the elements of one shard (see ops/amax.py)."""
    codec.kernels_of(r)
    codec.check_array(shard)
    cut = _Cut.of(len(shard), start, shape, r.block_rows)
    out = partial_specification.partial_amax(shard[: cut.first], shape, start, r)
    if cut.rows:
        out[cut.blocks(r)] = codec.block_amax(shard[cut.first : cut.last].reshape(cut.rows, shape[1]), r)
    if cut.last < len(shard):
        tail = partial_specification.partial_amax(shard[cut.last :], shape, start + cut.last, r)
        first = (start + cut.last) // shape[1] // r.block_rows
        out[first:] = tail[first:]
    return out


def _cast_shard(
    shard: np.ndarray,
    out: np.ndarray,
    amax: np.ndarray,
    shape: tuple[int, int],
    start: int,
    r: Recipe,
    tensor_amax: np.ndarray | None,
) -> None:
    """Write the codes of a shard's elements into out, the packed codes of a matrix, and change no other code of out."""
    cut, common = _Cut.of(len(shard), start, shape, r.block_rows), (r, tensor_amax)
    if out.strides[1] != 1:  # the library writes rows of contiguous bytes only
        cut = _Cut(len(shard), len(shard))
    partial_specification.partial_cast(shard[: cut.first], out, amax, shape, start, *common)
    if cut.rows:
        x, options = (
            shard[cut.first : cut.last].reshape(cut.rows, shape[1]),
            partial_specification.EncodeOptions(amax[cut.blocks(r)]),
        )
        codec.quantize_matrix(x, *common, out[cut.row : cut.row + cut.rows], None, options)
    if cut.last < len(shard):
        partial_specification.partial_cast(shard[cut.last :], out, amax, shape, start + cut.last, *common)


TERMS_PER_CALL = 1 << 30  # multiplications per call to the library; Python can handle Ctrl-C between calls


def low_rank_product(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return B A, float32 (N, K), as reference.matmul.low_rank_product computes it. b: (N, r); a: (r, K)."""
    found = library.library().functions
    if found is None:
        return low_rank_product_of_specification(b, a)
    b, a = np.ascontiguousarray(b), np.ascontiguousarray(a)
    (rows, rank), columns = b.shape, a.shape[1]
    out = np.empty((rows, columns), np.float32)
    arrays = map(address, (b, a, out))
    found.fp4kit_low_rank(*arrays, rows, rank, columns, threads_for(out.size))
    return out


def compare_stored(
    codes: np.ndarray, elements: np.ndarray, top: float, scales: np.ndarray, limits: np.ndarray, x: np.ndarray
) -> tuple[float, float, int] | None:
    """Return (sum of x^2, sum of (x - element * scale)^2, number of saturated elements); None without the library.

    codes: stored bytes, whose values are `elements`, float32 (256, codes per byte). scales, limits: float32, one per
    block of consecutive elements, a multiple of 8. x: float32. An element is saturated if its magnitude is `top`, and
    |x| is beyond the limit of its block.
    """
    found = library.library().functions
    if found is None:
        return None
    codes, scales, limits, x = map(np.ascontiguousarray, (codes, scales, limits, x))
    sums, per_byte = np.empty(2), elements.shape[1]
    arrays = map(address, (codes, elements, scales, limits, x, sums))
    saturated = found.fp4kit_compare_stored(*arrays, scales.size, x.size // max(scales.size, 1), per_byte, top)
    return float(sums[0]), float(sums[1]), saturated


def matmul(calls: list[MatmulCall]) -> list[np.ndarray]:
    """Return one result per call: call.out if it is given, otherwise a new array (batch, M, N) of call.out_dtype."""
    # The work is divided into calls to the library of about 2^30 multiplications (TERMS_PER_CALL), because Python can
    # handle Ctrl-C only between them.
    outs = [np.empty(call.shape, call.out_dtype) if call.out is None else call.out for call in calls]
    parts: list[library.ProductCall] = []
    terms = 0
    for call, out in zip(calls, outs, strict=True):
        if isinstance(call.step, IntegerAdd):
            multiply_integers(call, out)
            continue
        for part in _parts(call, out):
            count = part.rows * part.columns * max(part.length, 1)
            if parts and terms + count > TERMS_PER_CALL:
                _run(parts, terms)
                parts, terms = [], 0
            parts.append(part)
            terms += count
    _run(parts, terms)
    return outs


def _run(parts: list[library.ProductCall], terms: int) -> None:
    """Compute parts of matrix products by one call to the library, which writes the results that the parts name."""
    functions().fp4kit_matmul((library.ProductCall * len(parts))(*parts), len(parts), threads_for(terms))


_INPUTS = {str(dtype): number for dtype, number in codec.INPUTS.items()}


def _parts(call: MatmulCall, out: np.ndarray) -> Iterator[library.ProductCall]:
    """Yield the parts of a call, which together compute its result."""
    adder, *fields = addition_of(call)
    part = library.ProductCall(length=call.a.k, output=codec.INPUTS[call.out_dtype], adder=ADDERS.index(adder))
    for name, value in zip(Addition._fields[1:], fields, strict=True):
        setattr(part, name, value)
    if call.a.element in _INPUTS:
        part.input = _INPUTS[call.a.element]
    batch, M, N = call.shape
    rows = max(TERMS_PER_CALL // max(N * call.a.k, 1), 1)
    for i in range(batch):
        part.b, part.columns = _operand(call.b, i, 0, call.unit.order), N
        for start in range(0, M, rows):
            target = out[i, start : start + rows]
            part.a, part.rows = _operand(call.a, i, start, call.unit.order), len(target)
            part.c = None if call.c is None else address(call.c[i, start:])
            part.out = address(target)
            yield library.ProductCall.from_buffer_copy(part)


@lru_cache
@np.errstate(all="ignore")
def _tables(decode: Callable[..., Decoding], *form: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return two float64 arrays with one entry per code of a format: its value, and 2^exponent of the value."""
    decoding = decode(*form)
    return decoding.values, np.ldexp(1.0, as_terms(*decoding).exponent)


def _operand(x: Operand, i: int, start: int, order: str | None) -> library.ProductOperand:
    """Return matrix i of an operand from row `start` on, in the form that the library takes. order: of the unit."""
    i = min(i, x.codes.shape[0] - 1)
    values, powers = _tables(decoding_of, x.element)
    operand = library.ProductOperand(
        values=address(values),
        powers=address(powers),
        codes=address(x.codes[i, start:]),
        codes_step=x.codes.strides[1],
        code_bits=4 if x.element == "E2M1" else 8 * x.codes.itemsize,
        block=x.block,
    )
    if x.scales is not None and x.scale is not None:
        operand.scale_values, operand.scale_powers = map(address, _tables(scale_decoding_of, x.scale, order))
        operand.scales, operand.scales_step = address(x.scales[i, start:]), x.scales.strides[1]
    if x.chains is not None:
        operand.chains, operand.chains_step = address(x.chains[i, start:]), x.chains.strides[1] // 4
    if x.factor is not None:
        operand.factors, operand.factors_step = address(x.factor[i, start:]), x.factor.strides[1] // 4
    return operand


def rotate(r: Rotation) -> np.ndarray:
    """Rotate the blocks of r.x, and return the result as a new array with the shape and dtype of r.x."""
    found = functions()
    codec.check_array(r.x)
    x = np.ascontiguousarray(r.x).reshape(r.shape)
    out = np.empty(x.shape, x.dtype)
    step = 0 if r.matrices is None or len(r.matrices) == 1 else r.size * r.size
    rows = max(ELEMENTS_PER_CALL // max(prod(r.shape[1:]), 1), 1)
    for first in range(0, len(x) if x.size else 0, rows):
        part, target = x[first : first + rows], out[first : first + rows]
        call = library.RotateCall(
            address(part),
            address(target),
            address(r.signs),
            address(r.matrices),
            *part.shape,
            step,
            float(hadamard_factor(r.size)) if r.matrices is None else 1.0,
            codec.INPUTS[x.dtype],
            r.size,
            r.inverse,
            threads_for(part.size),
        )
        found.fp4kit_rotate(call)
    return out.reshape(r.x.shape)


COVERAGE: dict[str, Callable[[Recipe], str | None]] = {
    "quantize, and other operations that compute codes": codec.not_encoded,
    "quantize with given block scales": codec.not_encoded_under_scales,
    "fake_quantize": codec.not_faked,
    "the search of block amaxes": not_searched,
}
COVERAGE_COLUMNS = ("operation", "recipes", "why")


def uncovered_rows(recipes: Iterable[Recipe]) -> list[tuple[str, str, str]]:
    """Return what the engine leaves to the specification, as rows of a table for the documentation."""
    found: dict[tuple[str, str], list[str]] = {}
    for operation, why in COVERAGE.items():
        for r in recipes:
            reason = None if r.fake_only and operation != "fake_quantize" else why(r)
            if reason is not None:
                found.setdefault((operation, reason), []).append(r.id)
    return [(operation, ", ".join(ids), reason) for (operation, reason), ids in found.items()]
