"""What goes wrong on the way from a quantizer to a file: orders of codes, of block scales, of rows; wrong tensor
scales.

A mishap is named by what a reader meets, and is undone here: stored bytes come back as the recipe made them. Orders of
rows are undone on the source instead, as the source row that each stored row was made from. Nothing here knows a
recipe's numbers. Sources: GGML's block_mxfp4 and block_nvfp4 (halves of 32 and 16); cuBLAS and FlashInfer scale layouts
(fp4kit.layouts); transformers' convert_llama_weights_to_hf.py, llama.cpp's convert_hf_to_gguf.py (rotary order);
gpt-oss (gate, up interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import Packing
from fp4kit.layouts import SCALE_LAYOUTS, padded_shape, shuffle_rows, swizzle_scales, unpacked, unswizzle_scales
from fp4kit.recipes import Recipe

ULPS = 2  # float32 steps that a reciprocal of a reciprocal may be off
WRONG_SCALE = "tensor scale is wrong"
HALVES = (16, 8, 32)  # distances of the elements that share a byte: GGML's MXFP4, its NVFP4, and twice the first
_GGML = {16: "GGML's order of MXFP4", 8: "GGML's order of NVFP4"}


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """The parts of one quantized layer as its file has them.

    codes: uint8 (N, bytes), two codes of 4 bits a byte, else one. block_scale: uint8 bit patterns of any shape.
    tensor_scale: float32, () or one a row, which multiplies on decode as the container declares it; None where the file
    has none. recipe: any of the format, for its elements, scales and block size. scale_layout: what the container
    declares. Raises ValueError for codes that are no matrix, and for a recipe without block scales; TypeError for other
    dtypes.
    """

    codes: np.ndarray
    block_scale: np.ndarray
    tensor_scale: Any
    recipe: Recipe
    scale_layout: str = "linear"

    def __post_init__(self) -> None:
        for name, part in (("codes", self.codes), ("block_scale", self.block_scale)):
            if part.dtype != np.uint8:
                raise TypeError(
                    f"identify: {name} are {part.dtype}; needs uint8 of their bits; use {name}.view(np.uint8)"
                )
        if self.codes.ndim != 2:
            raise ValueError(
                f"identify: codes have shape {self.codes.shape}; needs (rows, bytes); pass one layer of a stack"
            )
        if self.recipe.scale is None:
            raise ValueError(
                f"identify: {self.recipe.id} has no block scales; needs a block format; use fp4kit.identify"
            )
        if self.tensor_scale is not None:
            scale = np.asarray(self.tensor_scale, np.float32)
            object.__setattr__(self, "tensor_scale", scale.reshape(()) if scale.size == 1 else scale.reshape(-1))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, elements of a row)."""
        return self.codes.shape[0], _elements(self.codes.shape[1], self.recipe.element.packing)

    @property
    def blank(self) -> bool:
        """Whether all codes and block scales are zeros, of either sign: nothing tells an order then."""
        signs = 0x88 if self.recipe.element.packing.codes == 2 else self.recipe.element.sign_bit
        return not self.block_scale.any() and not any((rows & np.uint8(0xFF ^ signs)).any() for rows in self.codes)


def _elements(length: int, packing: Packing) -> int:
    return length // packing.bytes * packing.codes


# ---- how a matrix of codes is read
# ------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Codes of some stored rows, one a byte: read(layer, rows, columns). of_source: whether its shape is the
    source's.
    """

    mishap: str | None
    read: Callable[[StoredLayer, np.ndarray, slice], np.ndarray]
    source_transposed: bool = False


def _as_stored(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    return unpacked(layer.codes[rows][:, _bytes(layer, columns)], layer.recipe.element.packing)


def _bytes_transposed(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    turned = layer.codes[_bytes(layer, columns)][:, rows].T
    return unpacked(np.ascontiguousarray(turned), layer.recipe.element.packing)


def _codes_transposed(layer: StoredLayer, rows: np.ndarray, columns: slice) -> np.ndarray:
    if layer.recipe.element.packing.codes == 1:
        return _bytes_transposed(layer, rows, columns)
    pairs = layer.codes[columns][:, rows // 2]
    return np.ascontiguousarray((pairs >> (4 * (rows % 2)).astype(np.uint8) & np.uint8(15)).T)


def _bytes(layer: StoredLayer, columns: slice) -> slice:
    packing = layer.recipe.element.packing
    return slice(columns.start // packing.codes * packing.bytes, columns.stop // packing.codes * packing.bytes)


def readings(layer: StoredLayer, shape: tuple[int, int]) -> Iterator[Reading]:
    """The ways to read a layer whose source has a shape that fit the stored shape; the one without a mishap first."""
    r, turned = layer.recipe, shape[::-1]
    if layer.shape == shape:
        yield Reading(None, _as_stored)
    if layer.shape == turned and not turned[1] % r.length_multiple:
        yield Reading("quantized transposed: blocks run along the other axis of the source", _as_stored, True)
    if layer.shape == turned:
        yield Reading("codes are transposed", _codes_transposed)
    stored = layer.codes.shape
    if r.is_packed and (stored[1], _elements(stored[0], r.element.packing)) == shape:
        yield Reading("packed bytes are transposed", _bytes_transposed)


# ---- orders of codes in their bytes
# -----------------------------------------------------------------------------------------


class CodeOrder(NamedTuple):
    """undo(codes (n, K) as read) gives those of neighbours; K must be a multiple of `multiple`."""

    mishap: str | None
    undo: Callable[[np.ndarray], np.ndarray]
    multiple: int = 1


def _same(codes: np.ndarray) -> np.ndarray:
    return codes


def _swapped(codes: np.ndarray) -> np.ndarray:
    """The even element was in the high nibble."""
    return codes.reshape(len(codes), -1, 2)[..., ::-1].reshape(codes.shape)


def _from_halves(codes: np.ndarray, half: int, swap: bool) -> np.ndarray:
    """Elements j and j + half of each 2 * half shared a byte."""
    pairs = (_swapped(codes) if swap else codes).reshape(len(codes), -1, half, 2)
    return pairs.swapaxes(2, 3).reshape(codes.shape)


def code_orders(recipe: Recipe, columns: int) -> list[CodeOrder]:
    """Those that rows of `columns` elements can have; the right one first."""
    found = [CodeOrder(None, _same)]
    if recipe.element.packing.codes == 2:
        found.append(CodeOrder("nibbles are swapped", _swapped, 2))
        for half in HALVES:
            order = f" ({_GGML[half]})" if half in _GGML else ""
            name = f"elements j and j + {half} of each {2 * half} share a byte{order}"
            found.append(CodeOrder(name, partial(_from_halves, half=half, swap=False), 2 * half))
            found.append(CodeOrder(f"{name}, high nibble first", partial(_from_halves, half=half, swap=True), 2 * half))
    return [order for order in found if not columns % order.multiple]


# ---- orders of block scales
# -------------------------------------------------------------------------------------------------


class Scales(NamedTuple):
    """Linear block scales (N, B), and where a cut array still has them (None: everywhere)."""

    mishap: str | None
    values: np.ndarray
    known: np.ndarray | None = None


def scale_orders(stored: np.ndarray, declared: str, shape: tuple[int, int]) -> Iterator[Scales]:
    """Linear scales of `shape` under each order that the stored bytes may be in; first as declared, where that fits.

    One at a time, since all together would take many times the bytes. Orders: linear and the layouts of fp4kit.layouts,
    each also with its padding cut off; column by column; a layout taken away that was not there, or read as another;
    rows shuffled.
    """
    for layout in sorted(SCALE_LAYOUTS, key=lambda layout: layout != declared):
        mishap = None if layout == declared else f"block scales are {layout}, declared {declared}"
        yield from _in_layout(stored, layout, declared, shape, mishap)
    if stored.size == prod(shape):
        name = "block scales lie column by column"
        yield Scales(name, np.ascontiguousarray(stored.reshape(shape[::-1]).T))
        if declared == "linear":
            yield from _read_as_another(stored.reshape(shape), shape)
            yield from _shuffled(stored.reshape(shape))


def _in_layout(
    stored: np.ndarray, layout: str, declared: str, shape: tuple[int, int], mishap: str | None
) -> Iterator[Scales]:
    """In one layout: whole, or without its padding; linear ones: in an array that has the padding of the declared
    layout.
    """
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


def _read_as_another(stored: np.ndarray, shape: tuple[int, int]) -> Iterator[Scales]:
    """Linear scales that a reader made from a layout which was not theirs; only where neither has padding."""
    whole = [layout for layout in SCALE_LAYOUTS if padded_shape(shape, layout) == shape]
    for read in whole[1:]:
        for layout in whole:
            if layout != read:
                bytes_ = swizzle_scales(stored, read)
                yield Scales(f"block scales were {layout} and read as {read}", unswizzle_scales(bytes_, layout, shape))


def _shuffled(stored: np.ndarray) -> Iterator[Scales]:
    for tile, order in _shuffles(len(stored)):
        back = np.empty_like(stored)
        back[order] = stored
        yield Scales(f"rows of block scales are shuffled for FlashInfer (epilogue tile {tile})", back)


def _shuffles(rows: int) -> Iterator[tuple[int, np.ndarray]]:
    for tile, multiple in ((128, 32), (64, 16)):
        if rows and not rows % multiple:
            yield tile, shuffle_rows(rows, tile)


# ---- orders of rows
# ---------------------------------------------------------------------------------------------------------


class CorruptedRows(NamedTuple):
    """Stored row i was made from row source[i] of the source, or of the source and below it that of the other half."""

    mishap: str | None
    source: np.ndarray


def _stacks(rows: int) -> Iterator[CorruptedRows]:
    """Orders of a stack of two halves, gate and up."""
    half, pair = np.arange(rows).reshape(2, -1), np.arange(rows).reshape(-1, 2)
    yield CorruptedRows("halves of the rows (gate and up) are exchanged", half[::-1].ravel())
    yield CorruptedRows("halves of the rows (gate and up) are interleaved", half.T.ravel())
    yield CorruptedRows("halves of the rows (gate and up) are interleaved and exchanged", half[::-1].T.ravel())
    yield CorruptedRows("interleaved rows (gate and up) are stacked", pair.T.ravel())
    yield CorruptedRows("interleaved rows (gate and up) are stacked and exchanged", pair[:, ::-1].T.ravel())


def _rotary(rows: int, heads: int) -> Iterator[CorruptedRows]:
    """llama's q and k, whose rotary pairs are rows i and i + d/2 of a head of d, or neighbours."""
    if heads < 1 or rows % (2 * heads):
        return
    count = f"{heads} head{'s' * (heads > 1)}"
    pairs = np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    yield CorruptedRows(f"rows are in GGUF's and Meta's rotary order of q and k ({count})", pairs)
    halves = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    yield CorruptedRows(f"rows are permuted to Hugging Face's rotary order of q and k once too often ({count})", halves)


def row_orders(rows: int, heads: Sequence[int] = (), other: bool = False, second: bool = False) -> list[CorruptedRows]:
    """Orders that the rows of a layer may be in; the right one first, none twice.

    heads: numbers of heads that q or k may have. other: whether the source of the other half of a gated pair is known,
    of as many rows; second: whether this layer is the second half (up).
    """
    found = [CorruptedRows(None, np.arange(rows)), *(order for count in heads for order in _rotary(rows, count))]
    if other:
        found += _halves_of_pair(rows, second)
    if rows and not rows % 2:
        found += _stacks(rows)
    found += (
        CorruptedRows(f"rows are shuffled for FlashInfer (epilogue tile {tile})", index)
        for tile, index in _shuffles(rows)
    )
    seen: dict[bytes, CorruptedRows] = {}
    for order in found:
        seen.setdefault(order.source.tobytes(), order)
    return list(seen.values())


def _halves_of_pair(rows: int, second: bool) -> Iterator[CorruptedRows]:
    """What one half of a pair holds where the stack of both was in another order, or cut in another place."""
    for mishap, index in _stacks(2 * rows):
        mine = index[rows:] if second else index[:rows]
        name = (
            "holds the other half of its pair: gate and up are exchanged"
            if "interleaved" not in (mishap or "")
            else mishap
        )
        yield CorruptedRows(name, (mine + rows) % (2 * rows) if second else mine)


def name_of_rows(index: np.ndarray) -> str:
    """A name for an order of rows that was found without one: a rotary order of some heads, or none."""
    for heads in range(1, len(index) // 2 + 1):
        known = (order for order in _rotary(len(index), heads) if np.array_equal(order.source, index))
        if (order := next(known, None)) is not None and order.mishap:
            return order.mishap
    return "rows are permuted"


# ---- tensor scales
# ----------------------------------------------------------------------------------------------------------


def near(a: Any, b: Any) -> bool:
    """Whether float32 scales agree within ULPS steps, or are both NaN."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    steps = np.abs(a.astype(np.float32).view(np.int32).astype(np.int64) - b.astype(np.float32).view(np.int32))
    return bool((np.where(np.isnan(a) | np.isnan(b), np.isnan(a) & np.isnan(b), steps <= ULPS)).all())


def tensor_mishap(stored: Any, right: Any, amax: Any) -> str | None:
    """What is wrong with a stored tensor scale where `right` made the codes, of a tensor of that amax; None: nothing.

    Within 2 ulp all is well: compressed-tensors stores a divisor, and the reciprocal of a reciprocal is off by as much.
    """
    ones = np.float32(1)
    if right is None or stored is None:
        needless = stored is None or near(stored, ones)
        missing = (
            f"tensor scale is missing, needs {_shown(right)}" if right is not None and not near(right, ones) else None
        )
        return missing if needless else f"{WRONG_SCALE}, needs none, not {_shown(stored)}"
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / right
    if near(stored, right):
        return None
    if near(stored, inverse):
        return "tensor scale is inverted: a divisor stands where a multiplier is declared"
    if near(stored, ones):
        return f"tensor scale is dropped (1), needs {_shown(right)}"
    if amax is not None and near(stored, amax):
        return f"tensor scale is the amax, as MLX stores it, needs {_shown(right)}"
    return f"{WRONG_SCALE}, needs {_shown(right)}, not {_shown(stored)}"


def _shown(scale: Any) -> str:
    first = np.asarray(scale).reshape(-1)[:1]
    return f"{first[0]:.9g}" if first.size else "none"
