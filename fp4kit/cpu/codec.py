"""Encode and decode matrices, compute their amaxes and transpose them by the compiled library.
The library computes one slab of a matrix per call, and a thread one tile of a slab at a time (source/README.md). The
library marks tiles that it cannot compute, because they hold NaN, infinities or factors outside of its limits; the
specification (fp4kit.reference), whose arguments the functions have, computes them. A sign mask is an int whose bit i
is 1 if a Hadamard transform first negates element i of each 16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import lcm
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit import formats
from fp4kit.call.parse import Declined
from fp4kit.cpu import library
from fp4kit.cpu.library import ELEMENTS_PER_CALL, OwnFormat, address, functions, threads_for
from fp4kit.formats import E2M1, E8M0, Codebook, ElementFormat, IntegerOrFloat, Packing, PairedMicroexponents, is_same
from fp4kit.host import engine as host
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import decoding, encodes_first, then_encodes, with_row_blocks
from fp4kit.reference import dequantize as decode_specification
from fp4kit.reference import four_over_six
from fp4kit.reference import quantize as specification
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import decode, spread_rows
from fp4kit.reference.stochastic import GivenNumbers, RandomStream
from fp4kit.reference.tensor_rules import TensorScale, stored_tensor_scale, tensor_scale

# Keys -----------------------------------------------------------------------------------------------------------------
# The engine contains one compiled rule per key. A key is a text that lists the fields of a recipe on which the results
# of a rule depend. A recipe is supported if all its keys are compiled, even if it is a variant that no table lists.


def rule_key(r: Recipe) -> str | None:
    """Return the key of a recipe's block rule, which computes a block's scale from its amax."""
    if r.block_rule is None or r.scale is None:
        return None
    if r.four_over_six:
        flags = [name for name in ("fast_error", "lane_sums", "keep_infinity", "flush") if getattr(r, name)]
        flags += [r.rounding] * (r.rounding != "rn")
        return " ".join(
            [r.block_rule, r.four_over_six, _name(r.element), _name(r.scale), str(r.scale_max), top_rule(r), *flags]
        )
    if rules.BLOCK_RULES[r.block_rule].whole:
        return f"{r.block_rule} {_name(r.element)} {r.fake_rule if r.fake_only else 'codes'}"
    propagate = "propagate" if r.amax_nan == "propagate" else "ignore"
    return (
        f"{r.block_rule} {_name(r.element)} {_name(r.scale)} {r.scale_max} {propagate}" + " infinity" * r.keep_infinity
    )


def tensor_key(r: Recipe) -> str | None:
    """Return the key of a recipe's tensor rule, which computes the tensor scale from the tensor amax."""
    return None if r.tensor_rule is None else f"{r.tensor_rule} {_name(computed_format(r))} {r.scale_max}"


def element_key(r: Recipe) -> str:
    """Return the key of a recipe's element arithmetic, which computes a code from a finite element and a finite
    factor.
    """
    flags = [name for name in ("flush", "round_scaled", "narrow") if getattr(r, name)]
    flags += ["stochastic_float16"] * (r.stochastic == "comfy_kitchen_fp8")
    flags += ["encode_first" if encodes_first(r) else "then_encode"] * then_encodes(r)
    return " ".join([_name(computed_format(r)), r.apply, r.rounding, r.sign, *flags])


def computed_format(r: Recipe) -> ElementFormat:
    """Return the element format by which the engine computes: E2M1 for IF4, otherwise that of the recipe."""
    return E2M1 if isinstance(r.element, IntegerOrFloat) else r.element


def decode_key(r: Recipe) -> str:
    """Return the key of a recipe's decoder, which computes a value from a code, a block scale and a tensor scale."""
    scale = "none" if r.scale is None else _name(r.scale)
    return f"{r.decode_rule} {_name(r.element)} {scale} {r.scale_max} {top_rule(r)}"


def top_rule(r: Recipe) -> str:
    """Return the name of a recipe's tensor rule if rules.TOPS lists it, otherwise "none"."""
    return r.tensor_rule if r.tensor_rule in rules.TOPS else "none"


def kept_factors(r: Recipe, dtype: np.dtype) -> tuple[float, float]:
    """Return (low, high): the limits of the factors with which the engine may encode, for a recipe and an input
    dtype.
    """
    if not r.repacked:
        return 0.0, math.inf
    f, info, is_power = r.element, ml_dtypes.finfo(dtype), r.scale == E8M0
    min_exponent = info.minexp - info.nmant
    max_power = -min_exponent if is_power else f.emin - f.mantissa_bits - min_exponent - 1
    min_factor = 2.0 ** (f.emax - (info.maxexp - 1) + (not is_power))
    return min_factor if is_power else -min_factor, 2.0 ** min(max_power, 127)


def faked_factors(r: Recipe, dtype: np.dtype) -> tuple[float, float]:
    """Return the limits of the factors under which r's fake rule gives decoded codes (FakeRule.by_codes)."""
    is_narrow = dtype == np.float16 and r.fake_rule != "mx_hifloat4"  # which has float32 powers for float16 too
    return (2.0**-15, 2.0**24) if is_narrow else (2.0**-127, 2.0**127)


# A block has 16 columns or a multiple of SEGMENT: source/blocks.h.
SEGMENT = 32
PANEL_COLUMNS = 2048  # columns of a panel, and of a block, at most: kPanelColumns of source/blocks.h
MAX_BLOCK_ROWS = 16  # rows of a 4over6 block, at most: kMaxBlockRows of source/four_over_six.h


@lru_cache(256)
def not_encoded(r: Recipe) -> str | None:
    """Return the reason why the engine cannot encode blocks of the shape that a recipe has, or None if it can."""
    if r.specification_only:
        return "levels of the specification alone"
    if r.four_over_six and (r.block_size != 16 or r.block_rows > MAX_BLOCK_ROWS):
        return (
            f"4over6 with blocks of {r.block_rows}x{r.block_size} (the engine supports 16 columns and at most"
            f" {MAX_BLOCK_ROWS} rows)"
        )
    if r.block and ((r.block_size != 16 and r.block_size % SEGMENT) or r.block_size > PANEL_COLUMNS):
        return (
            f"blocks of {r.block_size} columns (the engine supports 16, and multiples of {SEGMENT} up to"
            f" {PANEL_COLUMNS})"
        )
    return None


_OF_FAKE_RULES = ("product", "e8m0", "hif4")  # decode rules by which codes have the values of a fake rule


@lru_cache(256)
def not_faked(r: Recipe) -> str | None:
    """Return the reason why the engine cannot fake-quantize by a recipe, or None if it can."""
    by_codes = r.fake_rule is not None and rules.FAKE_RULES[r.fake_rule].by_codes
    if r.fake_rule is not None and not (by_codes and (r.fake_only or not r.levels) and r.decode_rule in _OF_FAKE_RULES):
        return "a fake_rule, which is a separate formula for the values"
    return not_encoded(r)


def not_encoded_under_scales(r: Recipe) -> str | None:
    """Return the reason why the engine cannot encode by a recipe under scales that the caller passes."""
    return "in IF4, a given scale may select INT4 elements" if isinstance(r.element, IntegerOrFloat) else None


def _name(f: ElementFormat) -> str:
    """Return the name of a format for use in a key, such as "E2M1"."""
    known = getattr(formats, f.name, None)
    if isinstance(known, ElementFormat) and is_same(f, known):
        return f.name
    return f"other {f.name} {f.mantissa_bits}"  # of rules for any E1M<n>; no other rule for such formats has a key


# Tables of user-defined formats. Rounding to codes is monotone, so each code belongs to one interval of floats (a
# piece). The pieces are found by the specification, so results equal its results. The key of a float is an integer,
# and keys have the order of the floats, with -0 before 0.
_LAST = 0x7F800000  # the key of infinity
_UNUSED = 0x7FFFFFFF  # a bound above every key


class Tables(NamedTuple):
    """The tables of a recipe: the struct for the library, and the arrays to which the struct points.

    element: the index of the compiled element arithmetic that is used instead of tables, because it is faster; 1 if
        there is none.
    """

    struct: OwnFormat
    arrays: tuple[np.ndarray, ...]
    element: int


@lru_cache(64)
def tables_of(r: Recipe) -> Tables:
    """Return the tables by which the library encodes and decodes a recipe with an amax rule (one of custom_recipe)."""
    size = 16 if r.element.bits == 4 else 256
    arrays = [*_element_pieces(r, size), _values(r.element, size)]
    if r.scale is not None:
        arrays += [*_pieces(lambda x: _scale_codes(x, r), 0, 256), _values(r.scale, 256)]
    addresses = [*map(address, arrays), *[None] * (6 - len(arrays))]
    element = -1 if isinstance(r.element, Codebook) else functions().fp4kit_element(element_key(r).encode())
    struct = OwnFormat(*addresses, float(r.element.amax_target), element < 0, size == 16, r.scale is not None)
    struct.has_pairs = isinstance(r.element, PairedMicroexponents)
    return Tables(struct, tuple(arrays), max(element, 1))


def _element_pieces(r: Recipe, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces (intervals that round to one code each) of elements after scaling, as (bounds, codes)."""
    e = r.element
    if not isinstance(e, PairedMicroexponents):
        return _pieces(lambda x: _element_codes(x, r), -_LAST - 1, size)
    parts = [_pieces(partial(e.nearest_under, microexponent=bit), -_LAST - 1, 8) for bit in (False, True)]
    bounds = np.concatenate([parts[0][0], np.array([_UNUSED], np.int32), parts[1][0]])
    return bounds, np.concatenate([parts[0][1], parts[1][1]])


def _element_codes(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the codes to which the specification rounds elements x, float32 (n,), that are already scaled."""
    one = np.ones(1, np.float32)
    tensor = tensor_scale(None, r, x.dtype)
    return specification.encode_elements(x.reshape(1, 1, -1), one, r, x.dtype, None, tensor).reshape(-1)


def _scale_codes(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the codes to which the specification rounds scales x, float32 (n,), under a recipe with an amax rule."""
    assert r.block_rule is not None
    one = np.ones((), np.float32)
    return BLOCK_RULES[r.block_rule].code(x, TensorScale(one, one, one), _with_unit_element(r), x.dtype)


@lru_cache(64)
def _with_unit_element(r: Recipe) -> Recipe:
    """Return a copy of a recipe whose element format has only the values 0 and 1, so that the largest element is 1."""
    unit = Codebook((0.0, 1.0), name="Fp4kitUnit")
    return replace(
        r, element=unit, block=(1, 2), rounding="rn", sign="signbit", nan_code=None, nan_is_max=False, narrow=False
    )


def _values(f: ElementFormat, size: int) -> np.ndarray:
    """Return the float32 values of codes 0 to size - 1 in a format. Bits beyond the width of the format are ignored."""
    return decode(np.arange(size, dtype=np.uint8), f)


def _pieces(encode: Callable[[np.ndarray], np.ndarray], first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces (intervals that round to one code each) as (bounds, codes): int32 (size - 1,), uint8
    (size,).
    """
    low, high = np.array([first], np.int64), np.array([_LAST], np.int64)  # intervals whose ends have different codes
    found = []
    while low.size:
        differ = encode(_floats(low)) != encode(_floats(high))
        low, high = low[differ], high[differ]
        adjacent = high - low == 1
        found.append(high[adjacent])
        low, high = low[~adjacent], high[~adjacent]
        middle = (low + high) // 2
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    starts = np.unique(np.concatenate([np.array([first], np.int64), *found]))
    bounds, codes = np.full(size - 1, _UNUSED, np.int32), np.zeros(size, np.uint8)
    bounds[: len(starts) - 1], codes[: len(starts)] = starts[1:], encode(_floats(starts))
    return bounds, codes


def _floats(keys: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that have the given keys."""
    bits = keys.astype(np.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(np.float32)


TILE_ELEMENTS = 1 << 15  # the approximate number of elements of a tile
TILE_COLUMNS, TILE_ROWS = 512, 64  # size of a tile whose elements are gathered (see Tiles.of)
INPUTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
# Maps the number of an input dtype (see INPUTS) to the integer dtype of an element's bits and the bits of infinity.
_BITS = {0: (np.uint32, 0x7F800000), 1: (np.uint16, 0x7C00), 2: (np.uint16, 0x7F80)}


class Kernels(NamedTuple):
    """The facts of a recipe that a call to the library needs.

    block_rule: index of the compiled block rule; -1 for a recipe without block scales.
    element: index of the compiled element arithmetic.
    block, block_rows: the columns and rows of a block; 32 and 1 for a recipe without blocks.
    kept: for each input dtype, the smallest and the largest factor that the library may use (kept_factors).
    own: the tables of a recipe with amax rules (those of custom_recipe), for which block_rule is 1 or -1; None for
        other recipes.
    """

    block_rule: int
    element: int
    block: int
    block_rows: int
    kept: tuple[tuple[float, float], ...]
    own: Tables | None = None


@lru_cache(256)
def kernels_of(r: Recipe) -> Kernels:
    """Return the Kernels of a recipe."""
    found = functions()
    if (reason := not_encoded(r)) is not None:
        raise Declined(f"{r.id} has {reason}")
    block = r.block_size if r.block else SEGMENT
    if r.is_custom:
        no_limits, own = ((0.0, math.inf),) * len(INPUTS), tables_of(r)
        return Kernels(-1 if r.block_rule is None else 1, own.element, block, r.block_rows, no_limits, own)
    key = rule_key(r)
    block_rule = -1 if key is None else found.fp4kit_block_rule(key.encode())
    is_whole = r.block_rule is not None and rules.BLOCK_RULES[r.block_rule].whole
    element = 1 if is_whole else found.fp4kit_element(element_key(r).encode())
    if element < 0 or (key is not None and block_rule < 0):
        raise Declined(f"the CPU engine has no compiled rules for {r.id}")
    return Kernels(block_rule, element, block, r.block_rows, tuple(kept_factors(r, dtype) for dtype in INPUTS))


def check_array(x: np.ndarray) -> None:
    """Raise Declined unless the library can read an array: all elements at addresses that are multiples of their
    size.
    """
    # The strides must be multiples of the element size, too.
    if not x.flags.aligned or any(step % x.itemsize for step in x.strides):
        raise Declined("the CPU engine needs aligned elements")


Cut = tuple[slice, slice]  # some rows and some columns of a matrix


class Tiles(NamedTuple):
    """The division of a matrix of `rows` x `columns` into tiles of at most `tile_rows` x `tile_columns`.

    The library numbers tiles in the order of `tiles`. Methods give a slab or a tile as a pair of slices: its rows and
    its columns.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int

    @classmethod
    def of(cls, x: np.ndarray, block: int, block_rows: int, hadamard: int | None = None) -> Tiles:
        """Return a division of the matrix x (M, K) into tiles of whole blocks, with the shape that is read fastest."""
        # Tiles are as wide as possible, because the processor does not prefetch rows of half a page, and encoding such
        # rows takes twice as long.
        (M, K), step = x.shape, lcm(block, SEGMENT)
        gathered = x.strides[1] != x.itemsize or hadamard is not None
        max_columns = TILE_ELEMENTS if block_rows == 1 else max(2 * TILE_ELEMENTS // block_rows, PANEL_COLUMNS)
        tile_columns = max(min(TILE_COLUMNS if gathered else max_columns, K) // step, 1) * step
        if gathered:
            rows_of_blocks = -(-TILE_ROWS // block_rows)
        else:
            rows_of_blocks = max(TILE_ELEMENTS // (min(tile_columns, K) * block_rows), 1)
        return cls(M, K, rows_of_blocks * block_rows, tile_columns)

    def slabs(self, cost: int = 1) -> Iterator[Cut]:
        """Yield the slabs of the matrix as (rows, columns)."""
        max_elements = ELEMENTS_PER_CALL // cost
        across = max(max_elements // self.tile_rows // self.tile_columns, 1) * self.tile_columns
        down = max(max_elements // min(across, self.columns) // self.tile_rows, 1) * self.tile_rows
        for row in range(0, self.rows, down):
            for column in range(0, self.columns, across):
                yield slice(row, min(row + down, self.rows)), slice(column, min(column + across, self.columns))

    def tiles(self, rows: slice, columns: slice) -> Iterator[Cut]:
        """Yield the tiles of a slab in the library's order: from left to right, then from top to bottom."""
        for row in range(rows.start, rows.stop, self.tile_rows):
            for column in range(columns.start, columns.stop, self.tile_columns):
                yield (
                    slice(row, min(row + self.tile_rows, rows.stop)),
                    slice(column, min(column + self.tile_columns, columns.stop)),
                )

    def count_tiles(self, rows: slice, columns: slice) -> int:
        """Return the number of tiles in a slab. rows, columns: the slab."""
        return -(-(rows.stop - rows.start) // self.tile_rows) * -(-(columns.stop - columns.start) // self.tile_columns)

    def marked(self, rows: slice, columns: slice, marks: np.ndarray) -> Iterator[Cut]:
        """Yield the tiles of a slab that the library has marked, because it cannot compute them."""
        if marks.any():
            yield from (tile for tile, mark in zip(self.tiles(rows, columns), marks, strict=True) if mark)


def source(x: np.ndarray, hadamard: int | None = None) -> library.SourceMatrix:
    """Return the SourceMatrix that describes a matrix to the library: its address, shape and strides in elements."""
    steps = (step // x.itemsize for step in x.strides)
    return library.SourceMatrix(address(x), *x.shape, *steps, 0 if hadamard is None else 1 + hadamard)


def slab_call(
    kind: Any, tiles: Tiles, x: np.ndarray, out: np.ndarray | None, hadamard: int | None = None, **fields: Any
) -> Any:
    """Return the struct `kind` for a call to the library that writes one float32 number per block of a slab to out."""
    step, (tile_rows, tile_columns) = 0 if out is None else out.strides[0] // 4, tiles[2:]
    places = {"x": source(x, hadamard), "out": address(out), "out_step": step, "input": INPUTS[x.dtype]}
    return kind(**places, tile_rows=tile_rows, tile_columns=tile_columns, **fields)


def encode_call(
    x: np.ndarray, kernels: Kernels, packed_step: int, scales_step: int, hadamard: int | None = None
) -> library.EncodeCall:
    """Return a prototype: an EncodeCall for matrices with the shape, strides and dtype of x, but without addresses."""
    tiles = Tiles.of(x, kernels.block, kernels.block_rows, hadamard)
    matrix = source(x, hadamard)
    matrix.data = None
    min_factor, max_factor = kernels.kept[INPUTS[x.dtype]]
    return library.EncodeCall(
        x=matrix,
        min_factor=min_factor,
        max_factor=max_factor,
        packed_step=packed_step,
        scales_step=scales_step,
        tile_rows=tiles.tile_rows,
        tile_columns=tiles.tile_columns,
        input=INPUTS[x.dtype],
        block_rule=kernels.block_rule,
        element=kernels.element,
        block=kernels.block,
        block_rows=kernels.block_rows,
    )


@np.errstate(all="ignore")
def quantize_matrix(
    x: np.ndarray,
    recipe: Recipe,
    amax: np.ndarray | None,
    packed: np.ndarray,
    scales: np.ndarray | None,
    options: specification.EncodeOptions,
) -> None:
    """Quantize a matrix x (M, K), and write its codes into packed and its block scales into scales."""
    tensor, factors = tensor_scale(amax, recipe, x.dtype).columns(recipe, x.shape[1]), None
    if recipe.tensor_scaling == "block":
        factors, amax = tensor.decode if recipe.apply == "divide" or recipe.levels else tensor.encode, tensor.amax
        factors = np.broadcast_to(factors, (len(x), x.shape[1] // recipe.block_size))
        tensor = TensorScale(*(part[:1, :1] for part in tensor))
    r = with_row_blocks(recipe)
    for tile in _encode(x, r, kernels_of(r), packed, scales, options, tensor, factors):
        elements, codes, block_scales = _cut(r, tile, x, packed, scales)
        part = amax
        if amax is not None and amax.size > 1:
            rows, blocks = tile[0], blocks_of(tile[1], r)
            part = amax[rows] if amax.ndim == 1 or amax.shape[1] == 1 else amax[rows, blocks]
        specification.quantize_matrix(elements, r, part, codes, block_scales, cut_options(options, *tile, r))


def fake_matrix(
    x: np.ndarray,
    r: Recipe,
    amaxes: tuple[np.ndarray | None, np.ndarray | None],
    values: np.ndarray,
    random: Any,
) -> None:
    """Fake-quantize a matrix by codes, as host.engine.fake_matrix does without; that one computes the other tiles."""
    kernels = kernels_of(r)._replace(kept=tuple(faked_factors(r, dtype) for dtype in INPUTS))
    tensor = tensor_scale(None, r, x.dtype).columns(r, x.shape[1])
    for rows in _row_slices(x.shape):
        part, amax = x[rows], None if amaxes[1] is None else amaxes[1][rows]
        widths = r.element.packing.length(x.shape[1]), x.shape[1] // r.block_size * r.scale_bytes
        packed, scales = (np.zeros((len(part), width), np.uint8) for width in widths)  # marked tiles may keep zeros
        options = specification.EncodeOptions(amax)
        left = [*_encode(part, r, kernels, packed, scales, options, tensor, None)]
        dequantize_matrix(packed, scales, r, tensor, values[rows])
        for tile in left:
            found = None, cut_options(options, *tile, r).block_amax
            host.fake_matrix(part[tile], r, found, values[rows][tile], None)


@np.errstate(all="ignore")
def encode_matrix(
    x: np.ndarray,
    recipe: Recipe,
    tensor: TensorScale,
    scales: np.ndarray | None,
    packed: np.ndarray,
    options: specification.EncodeOptions,
) -> None:
    """Encode a matrix x (M, K) under given scales, and write its codes into packed."""
    if (reason := not_encoded_under_scales(recipe)) is not None:
        raise Declined(f"{recipe.id} has {reason}")
    kernels, height = kernels_of(recipe)._replace(block_rule=-1, block_rows=1), recipe.block_rows
    for part in _row_slices(x.shape, height):
        elements, codes, given = x[part], packed[part], None if scales is None else scales[part]
        of_rows = TensorScale(*(a[part] if a.ndim and len(a) > 1 else a for a in map(np.asarray, tensor))).columns(
            recipe, x.shape[1]
        )
        cut = cut_options(options, part, slice(0, x.shape[1]), recipe)
        factors = _given_factors(elements, recipe, of_rows, given, options.hadamard)
        first = TensorScale(*(p[:, :1] for p in of_rows))
        for rows, columns in _encode(elements, recipe, kernels, codes, None, cut, first, factors):
            # Whole blocks, because a tile may end within a block, whose amax some rules read.
            tile = slice(rows.start // height * height, -(-rows.stop // height) * height), columns
            tile_x, tile_codes, tile_scales = _cut(recipe, tile, elements, codes, given)
            scale = of_rows.cut(tile[0], blocks_of(columns, recipe))
            if recipe.tensor_scaling != "block":
                scale = TensorScale(*(p[:, 0] for p in scale))
            rest = cut_options(cut, *tile, recipe)
            specification.encode_matrix(tile_x, recipe, scale, tile_scales, tile_codes, rest)
        if four_over_six.leaves_zero_blocks(recipe):
            zero = four_over_six.is_zero_block(_amax_by_row(elements, recipe, options.hadamard), recipe)
            codes[np.repeat(zero, recipe.element.packing.length(recipe.block_size), axis=1)] = 0


def _given_factors(
    x: np.ndarray, r: Recipe, tensor: TensorScale, scales: np.ndarray | None, hadamard: int | None
) -> np.ndarray | None:
    """Return the factors for encoding each block under given scales; None if they are those of the tensor scale."""
    if r.block_rule is None or scales is None:
        factors = tensor.decode if r.apply == "divide" else tensor.encode
        return factors if factors.shape[1] > 1 else None
    if r.four_over_six:
        factors = four_over_six.factor_of(scales, tensor, r)
    else:
        factors = BLOCK_RULES[r.block_rule].factor(scales, _amax_by_row(x, r, hadamard), tensor, r, x.dtype)
    return np.broadcast_to(factors, scales.shape)


def _amax_by_row(x: np.ndarray, r: Recipe, hadamard: int | None) -> np.ndarray:
    """Return the block amaxes of x, repeated for each row of a block: float32 (M, blocks)."""
    elements = x if hadamard is None else specification.widen(x, hadamard)
    return np.repeat(block_amax(elements, r), r.block_rows, axis=0)[: len(x)]


def tensor_rows(tensor: TensorScale, rows: int) -> tuple[list[np.ndarray], bool]:
    """Return (parts, step): the parts of a TensorScale as contiguous float32 vectors, with one entry or one per row."""
    parts = [np.ascontiguousarray(part, np.float32).reshape(-1) for part in tensor]
    step = max(part.size for part in parts) > 1
    return [np.ascontiguousarray(np.broadcast_to(part, rows if step else 1)) for part in parts], step


def _encode(
    x: np.ndarray,
    r: Recipe,
    kernels: Kernels,
    packed: np.ndarray,
    scales: np.ndarray | None,
    options: specification.EncodeOptions,
    scale: TensorScale,
    factors: np.ndarray | None,
) -> Iterator[Cut]:
    """Encode a matrix by the library, and yield the rows and columns of each tile that the library cannot encode."""
    # The caller must encode these tiles by the specification.
    call = encode_call(x, kernels, packed.strides[0], 0 if scales is None else scales.strides[0], options.hadamard)
    tiles, (tensor, step) = Tiles(len(x), x.shape[1], call.tile_rows, call.tile_columns), tensor_rows(scale, len(x))
    of_blocks = [None if a is None else np.ascontiguousarray(a, np.float32) for a in (options.block_amax, factors)]
    call.tensor_step = int(step)
    call.block_step = next((a.strides[0] // 4 for a in of_blocks if a is not None), 0)
    for rows, columns in tiles.slabs():
        needs_fallback = np.zeros(tiles.count_tiles(rows, columns), np.uint8)
        blocks = slice(rows.start // kernels.block_rows, -(-rows.stop // kernels.block_rows)), blocks_of(columns, r)
        cut, *outputs = _cut(r, (rows, columns), x, packed, scales)
        call.x, call.threads = source(cut, options.hadamard), threads_for(cut.size)
        call.encode, call.decode, call.amax = (address(part[rows] if step else part) for part in tensor)
        call.block_amax, call.factors = (None if a is None else address(a[blocks]) for a in of_blocks)
        call.packed, call.scales, call.needs_fallback = map(address, (*outputs, needs_fallback))
        random = None if options.random is None else options.random.cut(rows, columns)
        if isinstance(random, RandomStream):
            call.seed = ctypes.pointer(ctypes.c_uint64(random.seed))
            call.stream_first, call.stream_stride = random.first, random.K
        elif isinstance(random, GivenNumbers):
            numbers = np.ascontiguousarray(random.numbers)
            call.random, call.random_step = address(numbers), numbers.strides[0]
        if kernels.own is None:
            functions().fp4kit_encode(ctypes.byref(call))
        else:
            functions().fp4kit_encode_own(ctypes.byref(call), ctypes.byref(kernels.own.struct))
        yield from tiles.marked(rows, columns, needs_fallback)


# ---- amaxes ----


@np.errstate(all="ignore")
def block_amax(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the amaxes of the blocks of a matrix: float32 (ceil(M / block_rows), K / block_size)."""
    out = np.empty((-(-x.shape[0] // r.block_rows), x.shape[1] // r.block_size), np.float32)
    if largest(x, out, r.block_size, r.block_rows) is None:
        for rows in _row_slices(x.shape, r.block_rows):
            tile = np.ascontiguousarray(x[rows], np.float32)
            out[rows.start // r.block_rows : -(-rows.stop // r.block_rows)] = specification.block_amax(tile, r)
    return out


def tensor_amax(x: np.ndarray, r: Recipe, mask: int | None) -> np.ndarray | None:
    """Return the tensor amaxes of a matrix (M, K), as reference.quantize.tensor_amax does."""
    if r.tensor_scaling in ("none", "tensor"):
        return None if (found := largest(x, hadamard=mask)) is None else np.asarray(found)
    size = r.block_size if r.tensor_scaling == "block" else SEGMENT
    if mask is not None or x.shape[1] % size or (size != 16 and size % SEGMENT) or size > PANEL_COLUMNS:
        return None
    parts, height = [], r.block_rows
    for rows in _row_slices(x.shape, height):
        blocks = np.empty((-(-(rows.stop - rows.start) // height), x.shape[1] // size), np.float32)
        if largest(x[rows], blocks, size, height) is None:
            return None
        per_row = spread_rows(blocks, r, rows.stop - rows.start)
        if r.levels:
            per_row = np.maximum.reduceat(per_row, np.arange(0, per_row.shape[1], r.tensor_columns // size), axis=1)
        parts.append(per_row if r.tensor_scaling == "block" else blocks.max(axis=1))
    return np.concatenate(parts)


def largest(
    x: np.ndarray, out: np.ndarray | None = None, block: int = SEGMENT, block_rows: int = 1, hadamard: int | None = None
) -> np.float32 | None:
    """Return the largest magnitude of a matrix, or None if an element is NaN or infinite."""
    tiles = Tiles.of(x, block, block_rows, hadamard)
    input_kind, amax_bits = INPUTS[x.dtype], 0
    for rows, columns in tiles.slabs():
        cut = x[rows, columns]
        target = None if out is None else out[rows.start // block_rows :, columns.start // block :]
        threads = threads_for(cut.size, is_quick=True)
        sizes = {"block": block, "block_rows": block_rows, "threads": threads}
        call = slab_call(library.AmaxCall, tiles, cut, target, hadamard, **sizes)
        amax_bits = max(amax_bits, functions().fp4kit_amax(ctypes.byref(call)))
    bits_dtype, infinity = _BITS[input_kind]
    return np.float32(np.array(amax_bits, bits_dtype).view(x.dtype)) if amax_bits < infinity else None


# ---- codes ----


def transpose_codes(stored: np.ndarray, packing: Packing) -> np.ndarray:
    """Return the packed codes of the transpose of a matrix (M, K): a new uint8 array (K, bytes per row)."""
    stored, is_nibble = np.ascontiguousarray(stored), packing.codes == 2
    M, K = stored.shape[0], stored.shape[1] // packing.bytes * packing.codes
    out = np.empty((K, packing.length(M)), np.uint8)
    functions().fp4kit_transpose(address(stored), address(out), M, K, int(is_nibble), threads_for(M * K))
    return out


# ---- parts ----


def _row_slices(shape: tuple[int, int], block_rows: int = 1) -> Iterator[slice]:
    """Yield slices that divide the rows of a matrix into parts of about 2^20 elements that do not cut blocks."""
    step = max((1 << 20) // max(shape[1], 1) // block_rows, 1) * block_rows
    return (slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step))


def blocks_of(columns: slice, r: Recipe) -> slice:
    """Return the slice of block numbers for some columns. columns: a slice that begins and ends at blocks."""
    return slice(columns.start // r.block_size, columns.stop // r.block_size)


def _cut(r: Recipe, cut: Cut, x: np.ndarray, packed: np.ndarray, scales: np.ndarray | None) -> list[Any]:
    """Return the parts of x, packed and scales that belong to some rows and columns of a matrix, as views."""
    rows, columns = cut
    codes = slice(*map(r.element.packing.length, (columns.start, columns.stop)))
    scales_at = slice(*(end // r.block_size * r.scale_bytes for end in (columns.start, columns.stop)))
    return [x[rows, columns], packed[rows, codes], None if scales is None else scales[rows, scales_at]]


def cut_options(
    options: specification.EncodeOptions, rows: slice, columns: slice, r: Recipe
) -> specification.EncodeOptions:
    """Return the EncodeOptions for some rows and columns of a matrix: the block amaxes and random numbers there."""
    amax, random = options.block_amax, options.random
    if amax is not None:
        amax = amax[rows.start // r.block_rows : -(-rows.stop // r.block_rows), blocks_of(columns, r)]
    return specification.EncodeOptions(amax, None if random is None else random.cut(rows, columns), options.hadamard)


# With at least this many blocks, one table of values per scale code (256 tables) costs less than one table per block.
TABLES_FROM = 256


@lru_cache(256)
def decoder_of(r: Recipe, dtype: np.dtype) -> int:
    """Return the library's index of the compiled decoder for a recipe and an output dtype."""
    if r.specification_only:
        raise Declined(f"{r.id} has levels of the specification alone")
    if r.is_custom:
        functions()
        return -1
    found = functions().fp4kit_decoder(decode_key(decoding(r, dtype)).encode())
    if found < 0:
        raise Declined(f"the CPU engine has no decoder for {r.id}")
    return found


def are_looked_up(r: Recipe) -> bool:
    """Return True if the library decodes large matrices of a recipe by look-ups in tables, one table per scale code."""
    return r.element.bits == 4 and r.scale is not None and r.tensor_scaling in ("none", "tensor")


def dequantize_matrix(
    packed: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale, out: np.ndarray
) -> None:
    """Decode the packed codes of a matrix, and write the values into out (M, K), rounded to the dtype of out."""
    parts = np.broadcast_arrays(*tensor.columns(recipe, out.shape[1]))
    tensor = TensorScale(*(np.ascontiguousarray(part, np.float32) for part in parts))
    # The library needs rows of contiguous bytes.
    packed = packed if packed.strides[-1] == 1 else np.ascontiguousarray(packed)
    scales = scales if scales is None or scales.strides[-1] == 1 else np.ascontiguousarray(scales)
    steps = out.strides[0] // out.itemsize, packed.strides[0], 0 if scales is None else scales.strides[0]
    call, own = decode_call(out.shape, out.dtype, recipe, *steps), tables_of(recipe) if recipe.is_custom else None
    row_step, block_step = (
        step // 4 if size > 1 else 0 for step, size in zip(tensor.decode.strides, tensor.decode.shape, strict=True)
    )
    call.row_step, call.block_step = row_step, block_step
    tiles = Tiles(call.rows, call.columns, call.tile_rows, call.tile_columns)
    for rows, columns in tiles.slabs():
        needs_fallback = np.zeros(tiles.count_tiles(rows, columns), np.uint8)
        values, *codes = _cut(recipe, (rows, columns), out, packed, scales)
        call.packed, call.scales, call.out, call.needs_fallback = map(address, (*codes, values, needs_fallback))
        call.encode, call.decode, call.amax = map(address, tensor.cut(rows, blocks_of(columns, recipe)))
        (call.rows, call.columns), call.threads = values.shape, threads_for(values.size, are_looked_up(recipe))
        if own is None:
            functions().fp4kit_decode(ctypes.byref(call))
        else:
            functions().fp4kit_decode_own(ctypes.byref(call), ctypes.byref(own.struct))
        for tile in tiles.marked(rows, columns, needs_fallback):
            part, codes, block_scales = _cut(recipe, tile, out, packed, scales)
            scale = tensor.cut(tile[0], blocks_of(tile[1], recipe))
            decode_specification.dequantize_matrix(codes, block_scales, recipe, scale, part)


@lru_cache(64)
@np.errstate(all="ignore")
def _stored(r: Recipe, dtype: np.dtype, scale: bytes, amax: bytes | None) -> np.ndarray:
    """Return the tensor scales of a Quantized as one float32 array: encode scales, then decode scales, then amaxes."""
    given = None if amax is None else np.frombuffer(amax, np.float32)
    found = stored_tensor_scale(np.frombuffer(scale, np.float32), given, r, dtype)
    return np.concatenate([np.ravel(part) for part in np.broadcast_arrays(*found)], dtype=np.float32)


_ONES = np.ones(3, np.float32)


def tensors_of(q: Quantized, to_bytes: Callable[[Any], bytes] = np.ndarray.tobytes) -> np.ndarray:
    """Return the tensor scales of a Quantized as one float32 array: encode scales, then decode scales, then amaxes."""
    # The array is shared with later calls and must not be changed.
    if q.tensor_scale is None:
        return _ONES
    amax = None if q.tensor_amax is None else to_bytes(q.tensor_amax)
    return _stored(q.recipe, q.dtype, to_bytes(q.tensor_scale), amax)


def decode_call(
    shape: tuple[int, int], dtype: np.dtype, r: Recipe, out_step: int, packed_step: int, scales_step: int
) -> library.DecodeCall:
    """Return a prototype: a DecodeCall without addresses, for a matrix of values under one tensor scale."""
    M, K = shape
    block = r.block_size if r.block else max(K, 1)
    width = max(min(max(TILE_ELEMENTS // block, 1) * block, K), 1)
    return library.DecodeCall(
        rows=M,
        columns=K,
        packed_step=packed_step,
        scales_step=scales_step,
        out_step=out_step,
        tile_rows=max(TILE_ELEMENTS // width, 1),
        tile_columns=width,
        tables_from=TABLES_FROM,
        decoder=decoder_of(r, dtype),
        output=INPUTS[dtype],
        block=block,
    )
