"""Read rows of weights from their files in slabs of bounded size, and decode them to float32. A slab is some
consecutive rows of one matrix, either unquantized values or codes with their scales. Weights may be stored transposed,
with reordered rows, or as rows of several other weights (members); ``slabs`` hides this from its callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.table import CODES, SCALES, TENSOR_SCALE, VALUES, Container
from fp4kit.checkpoint.model.weights import Q8_0, Located, LowRankUpdate, Weight, WeightRotation
from fp4kit.cpu.engine import low_rank_product
from fp4kit.formats import E8M0
from fp4kit.layouts import unpack, unpack_gguf, unpacked, unswizzle_scales
from fp4kit.recipes import RECIPES
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.storage.files import NUMPY_DTYPES, CheckpointError, SafetensorsFile, TensorReader, nbytes_of


# The update of a LoRA adapter is added as PEFT merges it: W + s (B A), with A [r, K] and B [N, r], all taken as
# float32. Every element of B A is a chain of fused multiply-adds in the order of the rank, as MKL computes it for
# PyTorch on x86-64 (the product of NumPy's OpenBLAS has these bits on some processors only). It is multiplied by s,
# then added to W in float32. An unquantized W keeps its dtype: the sum is rounded to it, once. For an embedding, PEFT
# also rounds the update to the dtype of W before it adds it. Source: peft 0.21 tuners/lora/layer.py merge, with
# adapters in float32 (default).
class UpdateRows(NamedTuple):
    """The update of some rows: b float32 [n, r], a float32 [r, K], and the factor of their product.

    With ``rounded``, the update is rounded to the dtype of the values before it is added.

    Values (n, K) that it is added to may be those of any rows, because row i of b belongs to row i of the values.
    """

    b: npt.NDArray[np.float32]
    a: npt.NDArray[np.float32]
    scale: np.float32
    rounded: bool = False

    @property
    def delta(self) -> npt.NDArray[np.float32]:
        """The update itself, float32 [n, K]."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(low_rank_product(self.b, self.a), self.scale, dtype=np.float32)

    @ieee("merge_adapter")
    def added_to(self, values: np.ndarray) -> np.ndarray:
        """Return values + delta, computed in float32 and rounded to the dtype of ``values``."""
        with np.errstate(over="ignore", invalid="ignore"):
            delta = self.delta.astype(values.dtype).astype(np.float32) if self.rounded else self.delta
            return (values.astype(np.float32, copy=False) + delta).astype(values.dtype, copy=False)


CHUNK_ELEMENTS = 1 << 16  # a chunk takes 512 KiB as float64, so its temporaries stay in the CPU cache


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield consecutive slices that cover the rows of a matrix, so that it can be processed in chunks."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def codes_of(form: Container, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack the codes of stored rows and return them as uint8 [N, K], one code per byte."""
    return np.asarray(unpacked(stored, form.element.packing))


def all_zero(form: Container, stored: npt.NDArray[np.uint8]) -> bool:
    """Return whether all packed codes are zeros, of either sign."""
    return not (stored & np.uint8(0x77 if form.element.bits == 4 else 0x7F)).any()


@cache
def _factors(form: Container) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return two float32 tables, (value per element code, value per scale byte), whose products are decoded values."""
    # The container must store its scales as bytes (E4M3 or E8M0), not as float32.
    assert form.scale is not None
    elements, scales = form.element.values, form.scale.values
    if not form.in_blocks:
        return elements, scales
    r, tensor = RECIPES[f"{form.kind}-gguf"], TensorScale(*np.ones((3, 1, 1), np.float32))
    smallest = np.full((256, r.block_size), np.flatnonzero(elements == r.element.min_subnormal)[0], np.uint8)
    values = dequantize_tile(smallest, np.arange(256, dtype=np.uint8)[:, None], r, tensor)[:, 0]
    return elements * 2 + np.float32(0), values


@cache
def values_of_bytes(form: Container) -> npt.NDArray[np.float32]:
    """Return the values of the codes in each byte, without scales: float32 (256, codes per byte)."""
    elements = form.element.values if form.scale is None else _factors(form)[0]
    return elements.take(codes_of(form, np.arange(256, dtype=np.uint8)[:, None]))


def scales_of(form: Container, scales: np.ndarray) -> npt.NDArray[np.float32]:
    """Return the float32 values of block scales, in the shape of ``scales``."""
    if form.scale is None:
        return scales
    values = _factors(form)[1].take(scales)
    with np.errstate(over="ignore"):  # in GGUF, the MXFP4 scale byte 255 is 2^128: infinity in float32
        return values * np.float32(2) if form.in_blocks else values


def factors_of(
    form: Container, block_scale: np.ndarray, tensor_scale: np.float32 | None, divisor: np.float32 | None = None
) -> npt.NDArray[np.float32]:
    """Return block_scale * tensor_scale as float32, or block_scale / divisor if a divisor is given."""
    scale = block_scale if form.scale is None else _factors(form)[1].take(block_scale)
    if divisor is not None:
        with np.errstate(divide="ignore", invalid="ignore"):  # a divisor of 0 gives infinity, which callers refuse
            scale = scale / np.float32(divisor)
    elif tensor_scale is not None:
        scale = scale * np.float32(tensor_scale)
    return _as_dtype(scale, form.arithmetic[0])


@ieee("decode")
def decode(
    form: Container,
    stored: npt.NDArray[np.uint8],
    block_scale: np.ndarray,
    tensor_scale: np.float32 | None,
    divisor: np.float32 | None = None,
) -> npt.NDArray[np.float32]:
    """Return the decoded values of stored codes, [N, K] float32: value(code) * (block_scale * tensor_scale)."""
    scale = factors_of(form, block_scale, tensor_scale, divisor)
    pairs = values_of_bytes(form).view(np.uint64 if form.element.packing.codes == 2 else np.float32)
    values: npt.NDArray[np.float32] = pairs.take(stored).view(np.float32)
    values *= per_element(form, scale, values.shape)
    return values if form.block[0] > 1 else _as_dtype(values, form.arithmetic[1])


def per_element(form: Container, of_blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a matrix of ``shape`` in which every element has the value of its block."""
    height, width = form.block
    rows = of_blocks if height == 1 else np.repeat(of_blocks, height, axis=0)[: shape[0]]
    return np.repeat(rows, width, axis=1)[:, : shape[1]]


def _as_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "F32":
        return values
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPES[dtype]).astype(np.float32)


# Bytes of source elements per slab. Larger slabs are slower: the allocator gets fresh pages from the system each time.
SLAB_BYTES = 2 << 20
WHOLE_EXPERT = 64 << 20  # largest transposed matrix, in bytes, that is read into memory as a whole


class Readers:
    """Read tensors from files that stay open between reads. Call ``close`` at the end, or use a with statement.

    Args:
        tick: a function to report progress, or None. The method ``bytes`` calls it after each read with the number of
            bytes read.
    """

    def __init__(self, tick: Callable[[int], None] | None = None) -> None:
        self._open: dict[Any, TensorReader] = {}
        self._tick = tick

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. A later read opens its file again."""
        for reader in self._open.values():
            reader.__exit__(None, None, None)
        self._open.clear()

    def of(self, file: SafetensorsFile) -> TensorReader:
        """Return the reader of a file. The file is opened on first use and stays open until ``close``."""
        if file.path not in self._open:
            self._open[file.path] = TensorReader(file)
        return self._open[file.path]

    def bytes(self, place: Located, start: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Read and return ``count`` bytes of a tensor, from its byte ``start`` on, as uint8."""
        data = self.of(place.file).read_bytes(place.entry, start, count)
        if self._tick is not None:
            self._tick(data.size)
        return data

    def array(self, place: Located) -> np.ndarray:
        """Read a whole tensor and return it as a new array of its shape and dtype. ``tick`` is not called."""
        return self.of(place.file).read(place.entry)

    def matrix(self, place: Located, index: int) -> np.ndarray:
        """Read and return ``tensor[index]``, such as one expert's matrix in a stack."""
        count, *shape = place.entry.shape
        size = place.entry.nbytes // count
        raw = self.of(place.file).read_bytes(place.entry, index * size, size)
        return raw.view(NUMPY_DTYPES[place.entry.dtype]).reshape(shape)


Span = tuple[int, int] | None  # (first row, row after the last one); None for all rows


class Slab(NamedTuple):
    """Consecutive rows of one matrix, either unquantized (values) or quantized (codes and scales).

    Codes and scales are in one arrangement, however the file stores them: the even element of a byte is in the low
    nibble, and scales are in linear order.

    Attributes:
        start: the index of the slab's first row in the matrix.
        values: unquantized values, (n, K) for n rows; None for a quantized matrix.
        codes: packed codes, bytes (n, K * bits / 8); None for an unquantized matrix.
        scales: block scales, (rows of blocks, blocks per row), as bytes or float32; None for an unquantized matrix.
        tensor_scale: the factor to multiply by on decode; None if there is none.
        divisor: the stored tensor scale if decoding divides by it, as compressed-tensors does; None otherwise.
        rotation: a Hadamard transform that values_of applies (see Weight.rotation); None if there is none.
        column_scale: float32 [K], the factors that decoded columns are multiplied by; None if there are none.
        low_rank: (B, A) of SVDQuant, float64 [n, r] and [r, K]; None if there are none. The product B A is added to the
            decoded values before the columns are multiplied.
        update: the update of an adapter to these rows, which values_of adds (see Weight.update); None if there is none.
    """

    start: int
    values: np.ndarray | None
    codes: Any = None
    scales: Any = None
    tensor_scale: np.float32 | None = None
    column_scale: npt.NDArray[np.float32] | None = None
    low_rank: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None
    divisor: np.float32 | None = None
    rotation: WeightRotation | None = None
    update: UpdateRows | None = None

    def rows(self, index: Any) -> Slab:
        """Return a slab with the rows that ``index``, a slice or an array, selects. A block has one row."""
        values, codes, scales = (part if part is None else part[index] for part in (self.values, *self[2:4]))
        low_rank = self.low_rank and (self.low_rank[0][index], self.low_rank[1])
        update = self.update and self.update._replace(b=self.update.b[index])
        return self._replace(values=values, codes=codes, scales=scales, low_rank=low_rank, update=update)


def scalar_of(readers: Readers, weight: Weight, part: str, expert: int = 0) -> np.float32:
    """Read the tensor scale or the input scale of one matrix, and return the stored number as float32."""
    stored = readers.array(weight.parts[part]).reshape(-1)
    return np.float32(stored[expert if stored.size > 1 else 0])


def tensor_scale_of(readers: Readers, weight: Weight, expert: int = 0) -> np.float32 | None:
    """Return the tensor scale of one matrix of a weight, as the factor to multiply by on decode."""
    form = weight.container
    if form is None or not form.has_tensor_scale:
        return None
    return form.multiplier(scalar_of(readers, weight, TENSOR_SCALE, expert))


def read_update(readers: Readers, update: LowRankUpdate) -> UpdateRows:
    """Read both matrices of an update, and return the update of all rows."""
    a, b = (readers.array(place).astype(np.float32) for place in (update.a, update.b))
    if update.turned:
        a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
    return UpdateRows(b, a, np.float32(update.scale), update.turned)


def slabs(
    readers: Readers,
    weight: Weight,
    expert: int = 0,
    span: Span = None,
    height: int = 1,
    max_bytes: int | None = None,
) -> Iterator[Slab]:
    """Yield the rows of one matrix of a weight as slabs, from the first row to the last."""
    if weight.order is not None:
        yield from _in_order(readers, weight, expert, span, height, max_bytes)
        return
    if weight.members:
        yield from _of_members(readers, weight, span, height, max_bytes)
        return
    rows, columns = weight.shape[-2:]
    first, end = (0, rows) if span is None else span
    itemsize, form = 4, weight.container
    if form is not None:
        height = max(height, form.block[0])
    elif weight.dtype != Q8_0:
        itemsize = NUMPY_DTYPES[weight.dtype].itemsize
    common = _beside_rows(readers, weight, expert)
    rows_of = _ROWS & set(weight.parts) if weight.transposed else ()
    transposed = {part: _TransposedReader(readers, weight.parts[part], rows, expert) for part in rows_of}
    nbytes = SLAB_BYTES if max_bytes is None else max_bytes
    if any(part.whole is None for part in transposed.values()):
        # Use few, large slabs, because each slab reads a short range of every stored column.
        nbytes = WHOLE_EXPERT // 4
    step = max(nbytes // (columns * itemsize * height), 1) * height
    for start in range(first, end, step):
        count = min(step, end - start)
        slab = common.rows(slice(start, start + count))._replace(start=start)
        if transposed:
            read: dict[str, Any] = {part: one.rows(start, count) for part, one in transposed.items()}
            yield slab._replace(**read)
        elif form is None:
            yield slab._replace(values=_values(readers, weight, expert, start, count))
        else:
            codes, scales = _codes(readers, weight, expert, start, count)
            yield slab._replace(codes=codes, scales=scales)


def _beside_rows(readers: Readers, weight: Weight, expert: int) -> Slab:
    """Return what all slabs of a matrix have in common: a slab of all rows, without their values, codes and scales."""
    form, low_rank, divisor, place = weight.container, None, None, weight.parts.get(table.COLUMN_SCALE)
    column_scale = None if place is None else readers.array(place).reshape(-1).astype(np.float32)
    if table.LOW_RANK_A in weight.parts:
        parts = table.LOW_RANK_B, table.LOW_RANK_A
        b, a = (readers.array(weight.parts[part]).astype(np.float64) for part in parts)
        low_rank = b, a
    if form is not None and form.divides and form.has_tensor_scale:
        divisor = scalar_of(readers, weight, TENSOR_SCALE, expert)
    update = None if weight.update is None else read_update(readers, weight.update)
    scale = tensor_scale_of(readers, weight, expert)
    return Slab(0, None, None, None, scale, column_scale, low_rank, divisor, weight.rotation, update)


def _in_order(
    readers: Readers, weight: Weight, expert: int, span: Span, height: int, max_bytes: int | None
) -> Iterator[Slab]:
    """Yield the slabs of a weight whose rows must be reordered within each attention head (see Weight.order)."""
    order, (first, end) = weight.order, span or (0, weight.shape[-2])
    assert order is not None
    blocks = 1 if weight.container is None else weight.container.block[0]
    whole = first // order.head * order.head, -(-end // order.head) * order.head
    plain, step = replace(weight, order=None), lcm(height, order.head, blocks)
    whole = (whole[0] // blocks * blocks, min(-(-whole[1] // blocks) * blocks, weight.shape[-2]))
    found = (_joined(readers, weight),) if weight.members else slabs(readers, plain, expert, whole, step, max_bytes)
    for slab in found:
        stored = slab
        if blocks > 1:  # blocks that span several rows are decoded before their rows are reordered
            values = values_of(weight, slab._replace(update=None, rotation=None))
            slab = slab._replace(values=values, codes=None, scales=None)
        count = len(slab.codes if slab.values is None else slab.values)
        low, high = max(first - slab.start, 0), min(end - slab.start, count)
        ordered = slab.rows(order.sources(count)[low:high])._replace(start=slab.start + low)
        yield ordered if blocks == 1 else ordered._replace(codes=stored.codes, scales=stored.scales)


def _of_members(readers: Readers, weight: Weight, span: Span, height: int, max_bytes: int | None) -> Iterator[Slab]:
    """Yield the rows of a composed matrix as slabs, member by member (see Weight.members)."""
    # A slab never holds rows of two members, and it has the tensor scale of its member.
    first, end = span or (0, weight.shape[-2])
    at = 0
    for member, expert, (begin, stop) in weight.members:
        low, high = max(first - at, 0), min(end - at, stop - begin)
        if low < high:
            for slab in slabs(readers, member, expert, (begin + low, begin + high), height, max_bytes):
                yield slab._replace(start=slab.start - begin + at)
        at += stop - begin


def _joined(readers: Readers, weight: Weight) -> Slab:
    """Return one slab with the rows of all members of a weight, in order (see Weight.members)."""
    found = [slab for member in weight.members for slab in slabs(readers, *member)]
    assert not any(slab.rotation for slab in found)
    codes, scales = (np.concatenate([getattr(slab, part) for slab in found]) for part in ("codes", "scales"))
    return Slab(0, None, codes, scales)


_ROWS = {VALUES, CODES, SCALES}  # tensors of a layer with one row per matrix row (or per row of blocks)


def _values(readers: Readers, weight: Weight, expert: int, start: int, count: int) -> np.ndarray:
    """Read and return rows of an unquantized matrix in their stored dtype."""
    rows, columns = weight.shape[-2:]
    if weight.dtype == Q8_0:
        return decode_q8_0(_whole_rows(readers, weight.located, expert * rows + start, count), columns)
    return _lines(readers, weight.located, expert * rows + start, count, columns)


def _lines(readers: Readers, place: Located, start: int, count: int, width: int) -> np.ndarray:
    """Read and return ``count`` rows of a tensor whose rows have ``width`` elements, as an array of its dtype."""
    dtype = NUMPY_DTYPES[place.entry.dtype]
    raw = readers.bytes(place, start * width * dtype.itemsize, count * width * dtype.itemsize)
    return raw.view(dtype).reshape(count, width)


def _whole_rows(readers: Readers, place: Located, start: int, count: int) -> npt.NDArray[np.uint8]:
    """Read and return the bytes of ``count`` rows of a tensor, (count, bytes per row)."""
    width = nbytes_of(place.entry.dtype, place.entry.shape[-1:])
    return readers.bytes(place, start * width, count * width).reshape(count, width)


def decode_q8_0(raw: npt.NDArray[np.uint8], columns: int) -> npt.NDArray[np.float32]:
    """Return the float32 values of Q8_0 rows, (rows, columns)."""
    blocks = raw.reshape(len(raw), -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):  # an infinite scale times 0 is NaN
        return (blocks[..., 2:].view(np.int8).astype(np.float32) * scales).reshape(len(raw), columns)


def encode_q8_0(values: np.ndarray) -> npt.NDArray[np.uint8]:
    """Return rows in Q8_0, as bytes (rows, bytes per row), as llama.cpp quantizes them (quantize_row_q8_0_ref)."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(len(values), -1, 32)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        scaled = blocks * np.where(scales == 0, np.float32(0), np.float32(1) / scales)
        stored = scales.astype(np.float16)
    if not np.isfinite(stored).all():
        raise CheckpointError("Q8_0 holds no NaN, no infinities and no values above 8.3 million; use another dtype")
    whole = np.trunc(scaled)
    codes = (whole + np.copysign(np.abs(scaled - whole) >= 0.5, scaled)).astype(np.int8)  # ties away from zero
    return np.concatenate([stored.view(np.uint8), codes.view(np.uint8)], axis=-1).reshape(len(values), -1)


def _codes(readers: Readers, weight: Weight, expert: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Read and return (packed codes, block scales) of rows of a quantized matrix, arranged as in a Slab."""
    container, (rows, columns) = weight.form, weight.shape[-2:]
    if container.in_blocks:
        return unpack_gguf(_whole_rows(readers, weight.parts[CODES], expert * rows + start, count), container.kind)
    width = columns * container.element.bits // 8
    codes = readers.bytes(weight.parts[CODES], (expert * rows + start) * width, count * width).reshape(count, width)
    if container.high_first:
        codes = (codes << np.uint8(4)) | (codes >> np.uint8(4))
    high, wide = container.block
    line, lines = -(-columns // wide), -(-count // high)
    if SCALES not in weight.parts:
        return codes, np.ones((lines, line), np.float32)
    place = weight.parts[SCALES]
    if container.swizzled:
        return codes, _swizzled(readers, place, line, start, count)
    scales = _lines(readers, place, -(-rows // high) * expert + start // high, lines, line)
    if table.OUTER_SCALE in weight.parts:
        width = -(-columns // table.OUTER_COLUMNS)
        outer = _lines(readers, weight.parts[table.OUTER_SCALE], rows * expert + start, count, width)
        with np.errstate(all="ignore"):  # scales may be NaN or infinite
            return codes, E8M0.values[scales] * np.repeat(outer, table.OUTER_COLUMNS // wide, axis=1)[:, :line]
    return codes, scales if container.scale is not None else scales.astype(np.float32, copy=False)


def inner_of(weight: Weight) -> Weight:
    """Return a weight of dual-level MXFP4 without its outer scales, which is plain MXFP4."""
    parts = {part: weight.parts[part] for part in (CODES, SCALES)}
    return replace(weight, container=table.container("msmodelslim mxfp4"), parts=parts)


def outer_scales(readers: Readers, weight: Weight, expert: int) -> npt.NDArray[np.float32]:
    """Return the outer scales of a matrix of dual-level MXFP4, float32 [N, ceil(K / 512)]."""
    stored = readers.array(weight.parts[table.OUTER_SCALE]).astype(np.float32)
    return stored.reshape(weight.experts, weight.shape[-2], -1)[expert]


def _swizzled(readers: Readers, place: Located, line: int, start: int, count: int) -> np.ndarray:
    """Read swizzled block scales, and return the scales of ``count`` rows in linear order, (count, line)."""
    # The tensor must belong to a single layer, not to a stack.
    first, end = start // 128 * 128, -(-(start + count) // 128) * 128
    width = -(-line // 4) * 4
    raw = readers.bytes(place, first * width, (end - first) * width)
    linear = unswizzle_scales(raw, "swizzled_128x4", (end - first, line))
    return np.ascontiguousarray(linear[start - first : start - first + count])


class _TransposedReader:
    """Read rows of one matrix of a stack that is stored transposed, as [E, K, N].

    A matrix of at most WHOLE_EXPERT bytes, or of 4-bit codes in pairs, is read when this object is made, and stays in
    memory. Rows of a larger matrix are read on each call of ``rows``, with one read per column.

    Args:
        readers: where to read the tensor from.
        place: the tensor of the stack.
        rows: the number of rows of the matrix, N.
        expert: the index of the matrix in the stack.
    """

    def __init__(self, readers: Readers, place: Located, rows: int, expert: int) -> None:
        self._readers, self._place = readers, place
        self._dtype = NUMPY_DTYPES[place.entry.dtype]
        self._rows, self._columns = rows, place.entry.shape[-2]
        self._first = expert * self._rows * self._columns
        self.whole: np.ndarray | None = None  # the matrix [K, N], if it is small
        self._in_pairs = 2 * place.entry.shape[-1] == rows  # a byte holds the 4-bit codes of two rows of the matrix
        if self._in_pairs:
            count = self._columns * rows // 2
            self.whole = unpack(readers.bytes(place, expert * count, count).reshape(self._columns, -1))
        elif self._rows * self._columns * self._dtype.itemsize <= WHOLE_EXPERT:
            self.whole = self._read(0, self._rows * self._columns).reshape(self._columns, self._rows)

    def _read(self, start: int, count: int) -> np.ndarray:
        """Read and return ``count`` elements of the stored matrix [K, N], 1-D, from element ``start`` on."""
        size = self._dtype.itemsize
        return self._readers.bytes(self._place, (self._first + start) * size, count * size).view(self._dtype)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return the rows [start, start + count) of the matrix as a contiguous array, (count, K)."""
        if self.whole is not None:
            part = np.ascontiguousarray(self.whole[:, start : start + count].T)
            return part[:, ::2] | part[:, 1::2] << np.uint8(4) if self._in_pairs else part
        found = np.empty((count, self._columns), self._dtype)
        for k in range(self._columns):
            found[:, k] = self._read(k * self._rows + start, count)
        return found


def values_of(weight: Weight, slab: Slab) -> np.ndarray:
    """Return the values of a slab (some rows of a matrix), of shape (rows, K)."""
    values = slab.values
    if values is None:
        with np.errstate(over="ignore", invalid="ignore"):  # infinite scales may overflow, or be multiplied by 0
            values = _decoded(weight.form, slab)
            if slab.low_rank is not None:
                b, a = slab.low_rank
                values = (values + b @ a).astype(np.float32)
            if slab.column_scale is not None:
                values *= slab.column_scale
            values = _rounded(values, weight)
    values = values if slab.update is None else slab.update.added_to(values)
    return values if slab.rotation is None else slab.rotation.of(values)


def _decoded(form: Container, slab: Slab) -> npt.NDArray[np.float32]:
    """Return the values of codes and scales, decoded in chunks, so that little memory is needed beside the result."""
    height, columns = form.block[0], slab.codes.shape[1] * 8 // form.element.bits
    result = np.empty((len(slab.codes), columns), np.float32)
    for part in row_chunks(len(result), columns, height):
        scales = slab.scales[part.start // height : -(-part.stop // height)]
        result[part] = decode(form, slab.codes[part], scales, slab.tensor_scale, slab.divisor)
    return result


def _rounded(values: npt.NDArray[np.float32], weight: Weight) -> npt.NDArray[np.float32]:
    """Return decoded values, rounded to the dtype of the stored scales if the container requires it
    (Container.rounds).
    """
    place = weight.parts.get(SCALES, weight.parts.get(TENSOR_SCALE))
    if not weight.form.rounds or place is None or place.entry.dtype == "F32":
        return values
    return values.astype(NUMPY_DTYPES[place.entry.dtype]).astype(np.float32)


def columns_of(weight: Weight, slab: Slab, first: int, end: int) -> Slab:
    """Return a slab with only the columns [first, end) of ``slab``, which is not changed."""
    # ``first`` and ``end`` must not cut a block, neither of the codes (if the slab is quantized) nor of a rotation.
    update = slab.update and slab.update._replace(a=slab.update.a[:, first:end])
    if slab.values is not None:
        return slab._replace(values=slab.values[:, first:end], update=update)
    bits, wide = weight.form.element.bits, weight.form.block[1]
    return slab._replace(
        codes=np.ascontiguousarray(slab.codes[:, first * bits // 8 : end * bits // 8]),
        scales=slab.scales[:, first // wide : -(-end // wide)],
        column_scale=None if slab.column_scale is None else slab.column_scale[first:end],
        low_rank=slab.low_rank and (slab.low_rank[0], slab.low_rank[1][:, first:end]),
        update=update,
    )


def trouble_with_scales(weight: Weight, slab: Slab) -> str:
    """Return the reason why the scales of a slab (some quantized rows) cannot be right, or "" if they can."""
    negative = int(np.count_nonzero(scales_of(weight.form, slab.scales) < 0))
    if negative:
        return f"{negative} block scales are negative, which turns the signs of their blocks"
    factors, scale = slab.column_scale, slab.tensor_scale
    if factors is not None and (factors <= 0).any():
        return f"{int(np.count_nonzero(factors <= 0))} factors per column (AWQ) are zero or negative"
    if scale is None or not np.isfinite(scale) or scale > 0:
        return ""
    if scale < 0 or not all_zero(weight.form, slab.codes):
        return f"tensor scale is {scale}, which {'turns all signs' if scale < 0 else 'makes all values 0'}"
    return ""


def count_nonfinite(weight: Weight, slab: Slab) -> int:
    """Return the number of NaN and infinite values in a slab (some quantized rows), found without decoding."""
    element = weight.form.element
    rows, columns = len(slab.codes), weight.shape[-1]
    factors = (slab.tensor_scale, slab.column_scale)
    if any(factor is not None and not np.isfinite(factor).all() for factor in factors):
        return rows * columns
    bad_scales = ~np.isfinite(scales_of(weight.form, slab.scales))
    found = int(np.count_nonzero(bad_scales)) * prod(weight.form.block)
    if element.bits == 8:
        found += int(np.count_nonzero(~np.isfinite(element.values)[slab.codes]))
    return min(found, rows * columns)
