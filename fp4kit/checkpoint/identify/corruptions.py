"""List the faults that can happen to a layer's bytes between the quantizer and the file, and undo them. Such a fault is
called a mishap. Its name is a clause such as "nibbles are swapped". The source is the original weight of the layer.

There are four kinds of mishaps:

- a wrong order of codes, which is undone on the stored bytes
- a wrong order of block scales, which is undone on the stored bytes
- a wrong order of rows, for which an index says from which source row each stored row was made
- a wrong tensor scale

Nothing in this file depends on the arithmetic of a recipe.

Sources: GGML's block_mxfp4 and block_nvfp4 (halves of 32 and 16); cuBLAS and FlashInfer scale layouts (fp4kit.layouts);
transformers' convert_llama_weights_to_hf.py, llama.cpp's convert_hf_to_gguf.py (rotary order); gpt-oss (gate, up
interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import ElementFormat, Packing
from fp4kit.layouts import SCALE_LAYOUTS, padded_shape, shuffle_rows, swizzle_scales, unpacked, unswizzle_scales
from fp4kit.recipes import Recipe

ULPS = 2  # accepted difference of float32 scales in ulp, because the reciprocal of a reciprocal may be off by this
WRONG_SCALE = "tensor scale does not fit the source"
HALVES = (16, 8, 32)  # distance of two elements that share a byte: in GGML's MXFP4, in its NVFP4, and twice the first
_GGML = {16: "GGML's order of MXFP4", 8: "GGML's order of NVFP4"}


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """One quantized layer as its file stores it.

    codes: uint8 (N, bytes per row), with two 4-bit codes or one 8-bit code per byte.
    block_scale: uint8 bit patterns of the block scales, of any shape.
    tensor_scale: float32, a scalar or one number per row, as the multiplier on decode that the container declares; None
        if the file has none. An array of a single number becomes a scalar.
    recipe: any recipe of the format; only its element format, scale format and block size are used.
    scale_layout: the layout of the block scales that the container declares.
    some_rows: True if only some rows of the layer are here. Faults that move codes or scales between rows cannot be
        seen in them, and are not tried.
    own: the amax of all rows of the source, if only some rows are here; otherwise None.

    Raises TypeError for codes or block scales that are not uint8. Raises ValueError for codes that are not a matrix,
    and for a recipe without block scales.
    """

    codes: np.ndarray
    block_scale: np.ndarray
    tensor_scale: Any
    recipe: Recipe
    scale_layout: str = "linear"
    some_rows: bool = False
    own: np.float32 | None = None

    def __post_init__(self) -> None:
        for name, part in (("codes", self.codes), ("block_scale", self.block_scale)):
            if part.dtype != np.uint8:
                raise TypeError(
                    f"identify: {name} are {part.dtype}; their bits as uint8 are needed; pass {name}.view(np.uint8)"
                )
        if self.codes.ndim != 2:
            raise ValueError(
                f"identify: codes have shape {self.codes.shape}; (rows, bytes) is needed; pass one layer of a stack"
            )
        if self.recipe.scale is None:
            raise ValueError(
                f"identify: {self.recipe.id} has no block scales; a block format is needed here; use fp4kit.identify"
            )
        if self.tensor_scale is not None:
            scale = np.asarray(self.tensor_scale, np.float32)
            object.__setattr__(self, "tensor_scale", scale.reshape(()) if scale.size == 1 else scale.reshape(-1))

    def in_order(self, x: np.ndarray) -> bool:
        """Return whether block scales are declared in linear order, one per block of the source x."""
        return self.scale_layout == "linear" and self.block_scale.size * self.recipe.block_size == x.size

    @property
    def element(self) -> ElementFormat:
        """The format of the codes."""
        return self.recipe.element

    @property
    def has_usable_scale(self) -> bool:
        """True if the tensor scale is one positive finite number, or if there is none."""
        scale = self.tensor_scale
        return scale is None or (np.ndim(scale) == 0 and bool(0 < scale < np.inf))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the layer in elements: (rows, elements per row)."""
        return self.codes.shape[0], _elements(self.codes.shape[1], self.recipe.element.packing)

    @property
    def blank(self) -> bool:
        """True if all codes are zeros of either sign and all block scales are 0."""
        # In such a layer, a wrong order of bytes cannot be told from the right order.
        return not self.block_scale.any() and self.has_zero_codes

    @property
    def has_zero_codes(self) -> bool:
        """True if all codes are zeros of either sign."""
        signs = 0x88 if self.recipe.element.packing.codes == 2 else self.recipe.element.sign_bit
        return not any((rows & np.uint8(0xFF ^ signs)).any() for rows in self.codes)


def _elements(length: int, packing: Packing) -> int:
    """Return the number of elements in ``length`` bytes of packed codes."""
    return length // packing.bytes * packing.codes


# ---- ways to read a matrix of codes


class Reading(NamedTuple):
    """One way to read the codes of a layer: as they are stored, or with a fault undone.

    mishap: the name of the mishap (fault) that this way of reading corrects; None if it reads the codes as they are
        stored.
    read: a function (layer, row numbers, range of columns) -> codes of these rows and columns, one code per byte.
    source_transposed: True if the codes that ``read`` returns belong to the transposed source, because the source was
        transposed before it was quantized.
    """

    mishap: str | None
    read: Callable[[StoredLayer, np.ndarray, slice], np.ndarray]
    source_transposed: bool = False


def _as_stored(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    """Return the codes of some rows and columns of a layer in the stored order, one code per byte."""
    return unpacked(layer.codes[rows][:, _bytes(layer, columns)], layer.recipe.element.packing)


def _bytes_transposed(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    """Return codes of the original matrix from a layer whose codes were packed, and whose bytes were then
    transposed.
    """
    turned = layer.codes[_bytes(layer, columns)][:, rows].T
    return unpacked(np.ascontiguousarray(turned), layer.recipe.element.packing)


def _codes_transposed(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    """Return codes of the original matrix from a layer whose codes were transposed, and were then packed."""
    if layer.recipe.element.packing.codes == 1:
        return _bytes_transposed(layer, rows, columns)
    pairs = layer.codes[columns][:, rows // 2]
    return np.ascontiguousarray((pairs >> (4 * (rows % 2)).astype(np.uint8) & np.uint8(15)).T)


def _bytes(layer: StoredLayer, columns: slice) -> slice:
    """Return the range of bytes within a row that hold the codes of ``columns``."""
    packing = layer.recipe.element.packing
    return slice(columns.start // packing.codes * packing.bytes, columns.stop // packing.codes * packing.bytes)


def readings(layer: StoredLayer, shape: tuple[int, int]) -> Iterator[Reading]:
    """Yield the ways to read the codes of a stored layer as a matrix that fit the shape of its source, in this order:

    - as stored, without a mishap, if both shapes are equal
    - as stored, for a layer that was quantized transposed, if it has the shape of the transposed source
    - with the codes transposed, if it has the shape of the transposed source
    - with the packed bytes transposed, if this gives the shape of the source

    Nothing is yielded if no shape fits. Wrong orders of codes within rows are not among these ways (see code_orders).

    shape: the shape of the source.
    """
    r, turned = layer.recipe, shape[::-1]
    if layer.shape == shape:
        yield Reading(None, _as_stored)
    if layer.some_rows:
        return
    if layer.shape == turned and not turned[1] % r.length_multiple:
        yield Reading("quantized transposed: blocks run along the other axis of the source", _as_stored, True)
    if layer.shape == turned:
        yield Reading("codes are transposed", _codes_transposed)
    stored = layer.codes.shape
    if r.is_packed and (stored[1], _elements(stored[0], r.element.packing)) == shape:
        yield Reading("packed bytes are transposed", _bytes_transposed)


# ---- orders of codes within bytes


class CodeOrder(NamedTuple):
    """One order that the codes may have within the rows of a layer.

    mishap: the name of the mishap (fault) that ``undo`` undoes; None for the right order.
    undo: a function that puts codes (n, K), as they are read, into the order of the elements.
    multiple: the order is possible only if K is a multiple of this number.
    """

    mishap: str | None
    undo: Callable[[np.ndarray], np.ndarray]
    multiple: int = 1


def _swapped(codes: np.ndarray) -> np.ndarray:
    """Exchange each pair of neighboring codes. This undoes storing even elements in the high nibbles."""
    return codes.reshape(len(codes), -1, 2)[..., ::-1].reshape(codes.shape)


def _from_halves(codes: np.ndarray, half: int, swap: bool) -> np.ndarray:
    """Return the codes in the order of the elements, for codes in which distant elements of a group share a byte."""
    pairs = (_swapped(codes) if swap else codes).reshape(len(codes), -1, half, 2)
    return pairs.swapaxes(2, 3).reshape(codes.shape)


def code_orders(recipe: Recipe, columns: int) -> list[CodeOrder]:
    """Return the orders that codes in rows of ``columns`` elements can have."""
    found = [CodeOrder(None, lambda codes: codes)]
    if recipe.element.packing.codes == 2:
        found.append(CodeOrder("nibbles are swapped", _swapped, 2))
        for half in HALVES:
            order = f" ({_GGML[half]})" if half in _GGML else ""
            name = f"elements j and j + {half} of each {2 * half} share a byte{order}"
            found.append(CodeOrder(name, partial(_from_halves, half=half, swap=False), 2 * half))
            found.append(CodeOrder(f"{name}, high nibble first", partial(_from_halves, half=half, swap=True), 2 * half))
    return [order for order in found if not columns % order.multiple]


# ---- orders of block scales


class Scales(NamedTuple):
    """The block scales of a layer, read in one of the orders that the stored bytes may have.

    mishap: the name of the mishap (fault) that was undone; None if the scales are in the declared layout.
    values: the block scales in linear order (N, B).
    present: a mask (N, B) of the scales that the file has; None if the file has all scales. Some scales are lost if
        padding was cut off in the wrong place.
    """

    mishap: str | None
    values: np.ndarray
    present: np.ndarray | None = None


def scale_orders(stored: np.ndarray, declared: str, shape: tuple[int, int]) -> Iterator[Scales]:
    """Yield the block scales of a layer in linear order, once for each order that the stored bytes may have."""
    # The results are made one at a time, because together they would need many times the memory of the stored bytes.
    for layout in sorted(SCALE_LAYOUTS, key=lambda layout: layout != declared):
        mishap = None if layout == declared else f"block scales are {layout}, declared {declared}"
        yield from _in_layout(stored, layout, declared, shape, mishap)
    if stored.size == prod(shape):
        name = "block scales lie column by column"
        yield Scales(name, np.ascontiguousarray(stored.reshape(shape[::-1]).T))
    if stored.size != prod(shape) or declared != "linear":
        return
    stored = stored.reshape(shape)
    unpadded = [layout for layout in SCALE_LAYOUTS if padded_shape(shape, layout) == shape]
    for read in unpadded[1:]:
        bytes_ = swizzle_scales(stored, read)
        for layout in (layout for layout in unpadded if layout != read):
            yield Scales(f"block scales were {layout} and read as {read}", unswizzle_scales(bytes_, layout, shape))
    for tile, order in _shuffles(len(stored)):
        back = np.empty_like(stored)
        back[order] = stored
        yield Scales(f"rows of block scales are shuffled for FlashInfer (epilogue tile {tile})", back)


def _in_layout(
    stored: np.ndarray, layout: str, declared: str, shape: tuple[int, int], mishap: str | None
) -> Iterator[Scales]:
    """Yield the scales in linear order for each way in which the stored bytes may be in ``layout``."""
    padded = padded_shape(shape, layout)
    if stored.size == prod(padded):
        yield Scales(mishap, unswizzle_scales(stored, layout, shape))
    elif layout == "linear" and stored.size == prod(padded_shape(shape, declared)):
        yield Scales(mishap, stored.reshape(padded_shape(shape, declared))[: shape[0], : shape[1]])
        yield Scales(f"{mishap}, padding at the end", stored.reshape(-1)[: prod(shape)].reshape(shape))
    elif stored.size == prod(shape):
        cut = f"{mishap or f'block scales are {layout}'}, with the padding cut off"
        box, start = np.zeros(padded, bool), np.zeros(padded, bool)
        box[: shape[0], : shape[1]] = True
        start.reshape(-1)[: prod(shape)] = True
        for kept in (box, start):
            full = np.zeros(padded, np.uint8)
            full[kept] = stored.reshape(-1)
            yield Scales(cut, unswizzle_scales(full, layout, shape), unswizzle_scales(kept, layout, shape))


def _shuffles(rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (tile, order of rows) for each shuffle of FlashInfer that fits a number of rows."""
    for tile, multiple in ((128, 32), (64, 16)):
        if rows and not rows % multiple:
            yield tile, shuffle_rows(rows, tile)


# ---- orders of rows


class CorruptedRows(NamedTuple):
    """One order that the rows of a stored layer may have.

    mishap: the name of the mishap (fault); None for the right order.
    source: for each stored row, the number of the source row from which it was made. Each half of a gated pair (gate
        and up) has N rows. If the layer is one half, a number n >= N means row n - N of the source of the other half.
    """

    mishap: str | None
    source: np.ndarray


def _stacks(rows: int) -> list[CorruptedRows]:
    """Return the five wrong orders that the rows of a matrix may have if it stacks gate and up."""
    half, pair = np.arange(rows).reshape(2, -1), np.arange(rows).reshape(-1, 2)
    orders = (
        ("halves of the rows (gate and up) are exchanged", half[::-1]),
        ("halves of the rows (gate and up) are interleaved", half.T),
        ("halves of the rows (gate and up) are interleaved and exchanged", half[::-1].T),
        ("interleaved rows (gate and up) are stacked", pair.T),
        ("interleaved rows (gate and up) are stacked and exchanged", pair[:, ::-1].T),
    )
    return [CorruptedRows(mishap, index.ravel()) for mishap, index in orders]


def _rotary(rows: int, heads: int) -> Iterator[CorruptedRows]:
    """Yield the wrong orders that the rows of llama's q and k may have, for a given number of heads."""
    if heads < 1 or rows % (2 * heads):
        return
    count = f"{heads} head{'s' * (heads > 1)}"
    pairs = np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    yield CorruptedRows(f"rows are in GGUF's and Meta's rotary order of q and k ({count})", pairs)
    halves = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    yield CorruptedRows(f"rows are permuted to Hugging Face's rotary order of q and k once too often ({count})", halves)


def row_orders(rows: int, heads: Sequence[int] = (), other: bool = False, second: bool = False) -> list[CorruptedRows]:
    """Return the orders that the rows of a layer may have, without duplicates."""
    found = [CorruptedRows(None, np.arange(rows)), *(order for count in heads for order in _rotary(rows, count))]
    for name, index in _stacks(2 * rows) if other else ():  # half of a gated pair, cut out of a wrong stack of both
        own = index[rows:] if second else index[:rows]
        is_split = "interleaved" in str(name)
        mishap = name if is_split else "holds the other half of its pair: gate and up are exchanged"
        found.append(CorruptedRows(mishap, (own + rows) % (2 * rows) if second else own))
    if rows and not rows % 2:
        found += _stacks(rows)
    shuffled = "rows are shuffled for FlashInfer (epilogue tile {})"
    found += (CorruptedRows(shuffled.format(tile), index) for tile, index in _shuffles(rows))
    seen: dict[bytes, CorruptedRows] = {}
    for order in found:
        seen.setdefault(order.source.tobytes(), order)
    return list(seen.values())


def name_of_rows(index: np.ndarray) -> str:
    """Return the name of the mishap (fault) for an order of rows that was found by search."""
    for heads in range(1, len(index) // 2 + 1):
        matches = (order for order in _rotary(len(index), heads) if np.array_equal(order.source, index))
        if (order := next(matches, None)) is not None and order.mishap:
            return order.mishap
    if np.array_equal(index, np.roll(np.arange(len(index)), shift := -int(index[0]))):
        shift = min(shift % len(index), shift % len(index) - len(index), key=abs)
        return f"rows are rotated by {shift}"
    return "rows are permuted"


# ---- mishaps of tensor scales


def within_ulps(a: Any, b: Any) -> bool:
    """Return whether two float32 scales differ by at most 2 ulp (ULPS)."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    steps = np.abs(a.astype(np.float32).view(np.int32).astype(np.int64) - b.astype(np.float32).view(np.int32))
    return bool((np.where(np.isnan(a) | np.isnan(b), np.isnan(a) & np.isnan(b), steps <= ULPS)).all())


def tensor_mishap(stored: Any, right: Any, amax: Any) -> str | None:
    """Return the name of the mishap (fault) of a stored tensor scale, or None if the tensor scale is right."""
    # A difference of 2 ulp is accepted, because compressed-tensors stores a divisor, and the reciprocal of a reciprocal
    # may be off by as much.
    ones = np.float32(1)
    if right is None or stored is None:
        if stored is not None and not within_ulps(stored, ones):
            return f"{WRONG_SCALE} ({_shown(stored)} is stored, none is needed)"
        is_missing = right is not None and not within_ulps(right, ones)
        return f"tensor scale is missing ({_shown(right)} is needed)" if is_missing else None
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / right
    needed = f"({_shown(right)} is needed)"
    known = (
        (right, None),
        (inverse, "tensor scale is inverted: its reciprocal is stored"),
        (ones, f"tensor scale is 1, as if it were missing {needed}"),
        (amax, f"tensor scale is the amax, as MLX stores it {needed}"),
    )
    for scale, mishap in known:
        if scale is not None and within_ulps(stored, scale):
            return mishap
    return f"{WRONG_SCALE} ({_shown(stored)} is stored, {_shown(right)} is needed)"


def _shown(scale: Any) -> str:
    """Return the first number of a scale array as text with nine digits, or "none" if the array is empty."""
    first = np.asarray(scale).reshape(-1)[:1]
    return f"{first[0]:.9g}" if first.size else "none"
