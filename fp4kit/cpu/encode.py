"""One matrix by the compiled library, with the arguments that the functions of the specification take.

What the library leaves undone, units that hold NaN, infinities or factors that are of no use, the specification does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cpu.buffers import address
from fp4kit.cpu.coverage import GRAIN, WIDTH, element_key, kept_factors, not_encoded, rule_key
from fp4kit.cpu.library import ELEMENTS_PER_CALL, AmaxCall, EncodeCall, SourceMatrix, functions, threads_for
from fp4kit.formats import Packing
from fp4kit.recipes import Recipe
from fp4kit.reference import four_over_six
from fp4kit.reference import quantize as specification
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.quantize import EncodeOptions
from fp4kit.reference.stochastic import RandomBytes, RandomStream
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale

UNIT = 1 << 15  # elements of a unit, about
TILE_COLUMNS, TILE_ROWS = 512, 64  # of a unit that is read across the rows of memory
INPUTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
_BITS = {
    0: (np.uint32, 0x7F800000),
    1: (np.uint16, 0x7C00),
    2: (np.uint16, 0x7F80),
}  # dtype of a magnitude's bits, infinity's


class Kernels(NamedTuple):
    """What of the library computes a recipe: its indices of the rule (-1: no block scales) and of the elements; blocks.

    kept: the least and the largest factor that it is used for, by kind of input.
    """

    rule: int
    element: int
    block: int
    block_rows: int
    kept: tuple[tuple[float, float], ...]


@lru_cache(256)
def kernels_of(r: Recipe) -> Kernels:
    """Those of a recipe. Raises Declined where the library has not all of them."""
    found = functions()
    if (reason := not_encoded(r)) is not None:
        raise Declined(f"{r.id} has {reason}")
    block, key = r.block_size if r.block else GRAIN, rule_key(r)
    rule = -1 if key is None else found.fp4kit_block_rule(key.encode())
    element = found.fp4kit_element(element_key(r).encode())
    if element < 0 or (key is not None and rule < 0):
        raise Declined(f"the compiled engine does not have the arithmetic of {r.id}")
    return Kernels(rule, element, block, r.block_rows, tuple(kept_factors(r, dtype) for dtype in INPUTS))


def check_array(x: np.ndarray) -> None:
    """Raise Declined for elements that do not lie at whole elements of memory."""
    if not x.flags.aligned or any(step % x.itemsize for step in x.strides):
        raise Declined("the compiled engine needs aligned elements")


class Shape(NamedTuple):
    """The units of a matrix."""

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, x: np.ndarray, block: int, block_rows: int, gathered: bool) -> Shape:
        """For whole blocks; gathered: elements are brought together first, in tiles that fill lines of the cache.

        Others are read row by row: of rows in pieces of half a page, a processor reads nothing ahead, and takes twice
        the time.
        """
        M, K = x.shape
        step = lcm(block, GRAIN)
        most = UNIT if block_rows == 1 else max(2 * UNIT // block_rows, WIDTH)
        width = max(min(TILE_COLUMNS if gathered else most, K) // step, 1) * step
        high = -(-TILE_ROWS // block_rows) if gathered else max(UNIT // (min(width, K) * block_rows), 1)
        return cls(M, K, high * block_rows, width)

    def parts(self, cost: int = 1) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of one call of the library at a time: whole units. cost: of the time that codes of an
        element take.
        """
        most = ELEMENTS_PER_CALL // cost
        across = max(most // self.height // self.width, 1) * self.width
        down = max(most // min(across, self.columns) // self.height, 1) * self.height
        for row in range(0, self.rows, down):
            for column in range(0, self.columns, across):
                yield slice(row, min(row + down, self.rows)), slice(column, min(column + across, self.columns))

    def units(self, rows: slice, columns: slice) -> Iterator[tuple[slice, slice]]:
        """Those of a part, in the order of the library."""
        for row in range(rows.start, rows.stop, self.height):
            for column in range(columns.start, columns.stop, self.width):
                yield (
                    slice(row, min(row + self.height, rows.stop)),
                    slice(column, min(column + self.width, columns.stop)),
                )

    def number(self, rows: slice, columns: slice) -> int:
        """How many they are."""
        return -(-(rows.stop - rows.start) // self.height) * -(-(columns.stop - columns.start) // self.width)


def source(x: np.ndarray, hadamard: int | None = None) -> SourceMatrix:
    """A matrix as the library takes it."""
    steps = (step // x.itemsize for step in x.strides)
    return SourceMatrix(address(x), *x.shape, *steps, -1 if hadamard is None else hadamard)


class _Scales(NamedTuple):
    """What stands over the elements of a matrix: the tensor's scale, block amaxes or factors that are given instead of
    found.
    """

    tensor: TensorScale
    block_amax: np.ndarray | None = None
    factors: np.ndarray | None = None


def encode_call(x: np.ndarray, kernels: Kernels, packed_step: int, scales_step: int) -> EncodeCall:
    """A call for a matrix like x, and one tensor scale, without addresses."""
    shape = Shape.of(x, kernels.block, kernels.block_rows, gathered=x.strides[1] != x.itemsize)
    like = source(x)
    like.data = None
    min_factor, max_factor = kernels.kept[INPUTS[x.dtype]]
    return EncodeCall(
        x=like,
        min_factor=min_factor,
        max_factor=max_factor,
        packed_step=packed_step,
        scales_step=scales_step,
        tile_rows=shape.height,
        tile_columns=shape.width,
        input=INPUTS[x.dtype],
        block_rule=kernels.rule,
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
    options: EncodeOptions,
) -> None:
    """reference.quantize.quantize_matrix."""
    tensor = tensor_scale(amax, recipe, x.dtype).columns(recipe)
    above = _Scales(tensor, options.block_amax)
    if recipe.tensor_scaling == "block":
        own = tensor.decode if recipe.apply == "divide" else tensor.encode
        above = _Scales(TensorScale(*(part[:1, :1] for part in tensor)), options.block_amax, own)
    for rows, columns in _encode(x, recipe, kernels_of(recipe), above, packed, scales, options):
        blocks = blocks_of(columns, recipe)
        specification.quantize_matrix(
            x[rows, columns],
            recipe,
            _cut(amax, rows, blocks),
            packed[rows, bytes_of(columns, recipe)],
            None if scales is None else scales[rows, blocks],
            cut_options(options, rows, columns, recipe),
        )


@np.errstate(all="ignore")
def encode_matrix(
    x: np.ndarray,
    recipe: Recipe,
    tensor: TensorScale,
    scales: np.ndarray | None,
    packed: np.ndarray,
    options: EncodeOptions,
) -> None:
    """reference.quantize.encode_matrix."""
    kernels = kernels_of(recipe)._replace(rule=-1, block_rows=1)
    for rows in _strips(x.shape, recipe.block_rows):
        part = TensorScale(*(a[rows] if a.ndim and len(a) > 1 else a for a in (np.asarray(p) for p in tensor)))
        cut = cut_options(options, rows, slice(0, x.shape[1]), recipe)
        _encode_rows(x[rows], recipe, kernels, part, None if scales is None else scales[rows], packed[rows], cut)


def _encode_rows(
    x: np.ndarray,
    r: Recipe,
    kernels: Kernels,
    tensor: TensorScale,
    scales: np.ndarray | None,
    packed: np.ndarray,
    options: EncodeOptions,
) -> None:
    above = _given_scales(x, r, tensor, scales, options.hadamard)
    for rows, columns in _encode(x, r, kernels, above, packed, None, options):
        blocks = blocks_of(columns, r)
        part = tensor.columns(r).cut(rows, blocks)
        specification.encode_matrix(
            x[rows, columns],
            r,
            part if r.tensor_scaling == "block" else TensorScale(*(p[:, 0] for p in part)),
            None if scales is None else scales[rows, blocks],
            packed[rows, bytes_of(columns, r)],
            cut_options(options, rows, columns, r),
        )
    if four_over_six.leaves_zero_blocks(r):
        zero = four_over_six.is_zero_block(_amax_by_row(x, r, options.hadamard))
        packed[np.repeat(zero, r.element.packing.length(r.block_size), axis=1)] = 0


def _given_scales(
    x: np.ndarray, r: Recipe, tensor: TensorScale, scales: np.ndarray | None, hadamard: int | None
) -> _Scales:
    """The factors under scales that there are."""
    tensor = tensor.columns(r)
    if r.block_rule is None or scales is None:
        own = tensor.decode if r.apply == "divide" else tensor.encode
        return _Scales(TensorScale(*(p[:, :1] for p in tensor)), factors=own if own.shape[1] > 1 else None)
    if r.four_over_six:
        factors = four_over_six.factor_of(scales, tensor, r)
    else:
        factors = BLOCK_RULES[r.block_rule].factor(scales, _amax_by_row(x, r, hadamard), tensor, r, x.dtype)
    return _Scales(TensorScale(*(p[:, :1] for p in tensor)), factors=np.broadcast_to(factors, scales.shape))


def _amax_by_row(x: np.ndarray, r: Recipe, hadamard: int | None) -> np.ndarray:
    """Block amaxes (M, blocks)."""
    elements = x if hadamard is None else specification.widen(x, r, hadamard)
    return np.repeat(block_amax(elements, r), r.block_rows, axis=0)[: len(x)]


def _encode(
    x: np.ndarray,
    r: Recipe,
    kernels: Kernels,
    above: _Scales,
    packed: np.ndarray,
    scales: np.ndarray | None,
    options: EncodeOptions,
) -> Iterator[tuple[slice, slice]]:
    """Codes and scales of a matrix; gives the rows and columns of the units that are not done."""
    shape = Shape.of(x, kernels.block, kernels.block_rows, x.strides[1] != x.itemsize or options.hadamard is not None)
    tensor = [np.ascontiguousarray(part.reshape(-1), np.float32) for part in above.tensor]
    step = max(part.size for part in tensor) > 1
    if step:
        tensor = [np.ascontiguousarray(np.broadcast_to(part, x.shape[0])) for part in tensor]
    factors, amax = (
        None if a is None else np.ascontiguousarray(a, np.float32) for a in (above.factors, above.block_amax)
    )
    for rows, columns in shape.parts():
        unusual = np.zeros(shape.number(rows, columns), np.uint8)
        given = slice(rows.start // kernels.block_rows, -(-rows.stop // kernels.block_rows)), blocks_of(columns, r)
        cut_factors, cut_amax = (None if a is None else a[given] for a in (factors, amax))
        cut_tensor = [part[rows] if step else part for part in tensor]
        codes, cut = packed[rows, bytes_of(columns, r)], x[rows, columns]
        scale_rows = None if scales is None else scales[rows, blocks_of(columns, r)]
        random = _Bytes.of(options.random, rows, columns)
        call = EncodeCall(
            source(cut, options.hadamard),
            *map(address, cut_tensor),
            int(step),
            address(cut_amax),
            address(cut_factors),
            next((a.strides[0] // 4 for a in (cut_amax, cut_factors) if a is not None), 0),
            *kernels.kept[INPUTS[x.dtype]],
            address(random.array),
            0 if random.array is None else random.array.strides[0],
            *random[1:],
            address(codes),
            address(scale_rows),
            codes.strides[0],
            0 if scale_rows is None else scale_rows.strides[0],
            address(unusual),
            shape.height,
            shape.width,
            INPUTS[x.dtype],
            kernels.rule,
            kernels.element,
            kernels.block,
            kernels.block_rows,
            threads_for(cut.size),
        )
        functions().fp4kit_encode(ctypes.byref(call))
        if unusual.any():
            yield from (unit for unit, flag in zip(shape.units(rows, columns), unusual, strict=True) if flag)


class _Bytes(NamedTuple):
    """Where random bytes come from: an array, or a seed, with the place of a part's first element in its stream and of
    a row.
    """

    array: np.ndarray | None = None
    seed: Any = None
    first: int = 0
    stride: int = 0

    @classmethod
    def of(cls, random: RandomBytes | None, rows: slice, columns: slice) -> _Bytes:
        """Of a part of a matrix."""
        part = None if random is None else random.cut(rows, columns)
        if isinstance(part, RandomStream):
            return cls(None, ctypes.pointer(ctypes.c_uint64(part.seed)), part.first, part.K)
        return cls() if part is None else cls(np.ascontiguousarray(part.bytes))


# ---- amaxes ----


@np.errstate(all="ignore")
def block_amax(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Largest magnitudes of the blocks of a matrix: float32 (ceil(M / block rows), K / block columns); as the recipe
    has NaN.
    """
    out = np.empty((-(-x.shape[0] // r.block_rows), x.shape[1] // r.block_size), np.float32)
    if largest(x, out, r.block_size, r.block_rows) is None:
        for rows in _strips(x.shape, r.block_rows):
            tile = np.ascontiguousarray(x[rows], np.float32)
            out[rows.start // r.block_rows : -(-rows.stop // r.block_rows)] = specification.block_amax(tile, r)
    return out


def tensor_amax(x: np.ndarray, r: Recipe, mask: int | None) -> np.ndarray | None:
    """reference.quantize.tensor_amax; None where it is to be found otherwise: of NaN, infinities, rows of no whole
    grains.
    """
    if r.tensor_scaling in ("none", "tensor"):
        return None if (found := largest(x, hadamard=mask)) is None else np.asarray(found)
    size = r.block_size if r.tensor_scaling == "block" else GRAIN
    if mask is not None or x.shape[1] % size or (size != 16 and size % GRAIN) or size > WIDTH:
        return None
    parts = []
    for rows in _strips(x.shape):
        blocks = np.empty((rows.stop - rows.start, x.shape[1] // size), np.float32)
        if largest(x[rows], blocks, size) is None:
            return None
        parts.append(blocks if r.tensor_scaling == "block" else blocks.max(axis=1))
    return np.concatenate(parts)


def largest(
    x: np.ndarray, out: np.ndarray | None = None, block: int = GRAIN, block_rows: int = 1, hadamard: int | None = None
) -> np.float32 | None:
    """The largest magnitude of a matrix; None where one is NaN or infinite. out: those of its blocks, if all are
    finite.
    """
    shape = Shape.of(x, block, block_rows, x.strides[1] != x.itemsize or hadamard is not None)
    kind, most = INPUTS[x.dtype], 0
    for rows, columns in shape.parts():
        cut = x[rows, columns]
        target = None if out is None else out[rows.start // block_rows :, columns.start // block :]
        call = AmaxCall(
            source(cut, hadamard),
            address(target),
            0 if out is None else out.strides[0] // 4,
            shape.height,
            shape.width,
            kind,
            block,
            block_rows,
            threads_for(cut.size, is_quick=True),
        )
        most = max(most, functions().fp4kit_amax(ctypes.byref(call)))
    bits, infinity = _BITS[kind]
    return np.float32(np.array(most, bits).view(x.dtype)) if most < infinity else None


# ---- codes ----


def transpose_codes(stored: np.ndarray, packing: Packing) -> np.ndarray:
    """reference.transpose.transpose_codes."""
    stored, four = np.ascontiguousarray(stored), packing.codes == 2
    M, K = stored.shape[0], stored.shape[1] // packing.bytes * packing.codes
    out = np.empty((K, packing.length(M)), np.uint8)
    functions().fp4kit_transpose(address(stored), address(out), M, K, int(four), threads_for(M * K))
    return out


# ---- parts ----


def _strips(shape: tuple[int, int], block_rows: int = 1) -> Iterator[slice]:
    """Rows of a matrix, some MB of elements at a time."""
    step = max((1 << 20) // max(shape[1], 1) // block_rows, 1) * block_rows
    return (slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step))


def blocks_of(columns: slice, r: Recipe) -> slice:
    """The blocks of some columns."""
    return slice(columns.start // r.block_size, columns.stop // r.block_size)


def bytes_of(columns: slice, r: Recipe) -> slice:
    """The bytes that hold the codes of some columns."""
    return slice(*map(r.element.packing.length, (columns.start, columns.stop)))


def _cut(amax: np.ndarray | None, rows: slice, blocks: slice) -> np.ndarray | None:
    """The part of a tensor_amax, one, one a row, or one a block, for some rows and blocks."""
    if amax is None or amax.size == 1:
        return amax
    return amax[rows] if amax.ndim == 1 or amax.shape[1] == 1 else amax[rows, blocks]


def cut_options(options: EncodeOptions, rows: slice, columns: slice, r: Recipe) -> EncodeOptions:
    """The options of some rows and columns of a matrix."""
    amax, random = options.block_amax, options.random
    if amax is not None:
        amax = amax[rows.start // r.block_rows : -(-rows.stop // r.block_rows), blocks_of(columns, r)]
    return EncodeOptions(amax, None if random is None else random.cut(rows, columns), options.hadamard)
