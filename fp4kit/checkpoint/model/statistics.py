"""Count what stored codes and scales contain, and compute their error against the source. The source x is the
unquantized layer, if it is available. A block is a group of elements that share one stored scale. An element of x is
saturated if it exceeds the largest value that its block can hold. A flushed block decodes to zeros although x is not
zero there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import log2, prod, sqrt
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import making_current, to_device
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.doubts import role_of
from fp4kit.checkpoint.model.slabs import (
    Readers,
    codes_of,
    decode,
    factors_of,
    per_element,
    row_chunks,
    scales_of,
    slabs,
    values_of,
    values_of_bytes,
)
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.cpu.engine import compare_stored
from fp4kit.formats import FLT_MIN, ElementFormat
from fp4kit.ops.amax import amax
from fp4kit.storage.files import FLOAT_DTYPES, NUMPY_DTYPES, listed


def sqnr_db(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio in decibels, 10 log10(signal / noise)."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True)
class StoredCounts:
    """Counts of what the codes and scales of a layer contain. Counts of several chunks or layers are added with ``+``.

    The numbers from ``elements`` to ``zero_scales`` describe the stored layer. Those from ``compared`` to ``noise``
    compare the layer with a source x, and are 0 if there is no source. The last three are no counts: with ``+``, the
    larger ``reach`` and ``largest_scale`` and the smaller ``smallest_scale`` remain.

    Attributes:
        elements: elements of the layer.
        blocks: block scales of the layer.
        at_max: codes with the largest magnitude.
        nan_codes: codes that are NaN.
        nan_scales: block scales that are NaN or infinite.
        negative_scales: block scales below 0.
        subnormal_scales: nonzero block scales whose magnitude is below the smallest normal number of the scale format
            or of float32, whichever is larger.
        zero_blocks: blocks that decode to zeros, because all codes or the block scale are zero.
        top_scales: block scales of the largest magnitude of their format; 0 for float32 scales.
        zero_scales: blocks among zero_blocks that have a nonzero code, so that only their scale is zero.
        compared: elements of x.
        nonfinite: elements of x that are NaN or infinite.
        saturated: elements whose code has the largest magnitude, m, and |x| > m * |block_scale * tensor_scale|.
        flushed_blocks: blocks among zero_blocks in which x has a nonzero element.
        underflowed_blocks: blocks among flushed_blocks in which x is too small for the smallest scale of the format, or
            for the smallest code under the stored scale.
        emptied_blocks: blocks among flushed_blocks that are not underflowed, and whose scale is not zero.
        hollow_blocks: blocks, not among zero_blocks, in which most of the nonzero elements of x, and at least 64 of
            them, decode to zero.
        signal: the sum of x^2 over finite x, in float64.
        noise: the sum of (x - decoded)^2 over finite x, in float64; inf if a finite x was stored as NaN or infinity.
        reach: the largest finite magnitude that an element can have under the stored scales, in blocks that are not all
            zero.
        scale_logs, scaled_blocks: the sum of log2 of the magnitudes of block scales that are finite and not zero, in
            1/1024 to be independent of the order, and the number of these scales.
        largest_scale, smallest_scale: the largest and the smallest magnitude of a finite block scale.
    """

    elements: int = 0
    blocks: int = 0
    at_max: int = 0
    nan_codes: int = 0
    nan_scales: int = 0
    negative_scales: int = 0
    subnormal_scales: int = 0
    top_scales: int = 0
    zero_blocks: int = 0
    zero_scales: int = 0
    compared: int = 0
    nonfinite: int = 0
    saturated: int = 0
    flushed_blocks: int = 0
    underflowed_blocks: int = 0
    emptied_blocks: int = 0
    hollow_blocks: int = 0
    signal: float = 0.0
    noise: float = 0.0
    reach: float = 0.0
    scale_logs: int = 0
    scaled_blocks: int = 0
    largest_scale: float = 0.0
    smallest_scale: float = math.inf

    def __add__(self, other: StoredCounts) -> StoredCounts:
        return total((self, other))

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-noise ratio in decibels, with the source x as the signal; None if there is no source."""
        return sqnr_db(self.signal, self.noise) if self.compared else None


_NAMES = tuple(field.name for field in fields(StoredCounts))
_NOT_SUMS: dict[str, Any] = {"reach": max, "largest_scale": max, "smallest_scale": min}


def total(parts: Iterable[StoredCounts]) -> StoredCounts:
    """Return the sum of the counts of several chunks or layers; all zeros if ``parts`` is empty."""
    columns = zip(*map(attrgetter(*_NAMES), parts), strict=True)
    return StoredCounts(*(_NOT_SUMS.get(name, sum)(column) for name, column in zip(_NAMES, columns, strict=False)))


class _Rows(NamedTuple):
    """Some stored rows: their container, packed codes, block scales, and tensor scale as a multiplier."""

    form: Container
    codes: npt.NDArray[np.uint8]
    scales: np.ndarray
    tensor_scale: np.float32 | None

    @property
    def magnitudes(self) -> npt.NDArray[np.float64]:
        """The magnitudes of the block scales."""
        return np.abs(scales_of(self.form, self.scales).astype(np.float64))

    @property
    def factor(self) -> float:
        """The magnitude of the tensor scale; 1 if there is none."""
        return 1.0 if self.tensor_scale is None else abs(float(self.tensor_scale))

    @property
    def limits(self) -> npt.NDArray[np.float32]:
        """The largest magnitude that each block can hold, rounded down."""
        exact = self.magnitudes * float(self.form.element.max) * self.factor
        largest = exact.astype(np.float32)
        return np.where(largest > exact, np.nextafter(largest, np.float32(0)), largest)

    def chunks(self) -> Iterator[tuple[slice, _Rows]]:
        """Yield (slice of rows, these rows) for chunks that do not cut blocks."""
        height = self.form.block[0]
        for part in row_chunks(len(self.codes), self.codes.shape[1] * 8 // self.form.element.bits, height):
            scales = self.scales[part.start // height : -(-part.stop // height)]
            yield part, self._replace(codes=self.codes[part], scales=scales)


@ieee("tally")
def tally(
    form: Container,
    codes: npt.NDArray[np.uint8],
    scales: np.ndarray,
    tensor_scale: np.float32 | None,
    x: np.ndarray | None = None,
    column_scale: npt.NDArray[np.float32] | None = None,
) -> StoredCounts:
    """Return counts of what the codes and scales of stored rows contain."""
    whole = _Rows(form, codes, scales, tensor_scale)
    with np.errstate(all="ignore"):
        # The limit of a block follows from its scale alone, so 256 limits serve all blocks with scale bytes.
        table = None if form.scale is None else whole._replace(scales=np.arange(256, dtype=np.uint8)).limits
        found = [_count_scales(whole)]
        for part, rows in whole.chunks():
            counts, zero = _count_stored(rows)
            found.append(counts)
            if x is not None:
                limits = rows.limits if table is None else table.take(rows.scales)
                values = x[part].astype(np.float32, copy=False)
                found.append(_compare_with_source(rows, values, zero, limits, column_scale))
    return total(found)


def _count_scales(rows: _Rows) -> StoredCounts:
    """Return StoredCounts with the numbers that need only the block scales."""
    scale = rows.form.scale
    counts: Any = 1
    values = rows.scales
    if scale is not None:
        of_bytes = np.bincount(rows.scales.reshape(-1), minlength=256)
        values, counts = np.flatnonzero(of_bytes), of_bytes[of_bytes > 0]
    values = scales_of(rows.form, values)
    magnitudes, finite = np.abs(values), np.isfinite(values)
    min_normal = float(FLT_MIN) if scale is None else max(float(scale.min_normal), float(FLT_MIN))
    used = finite & (magnitudes > 0)
    logs = np.rint(1024 * np.log2(np.where(used, magnitudes, 1), dtype=np.float64))
    return StoredCounts(
        blocks=rows.scales.size,
        nan_scales=int(np.sum(~finite * counts)),
        negative_scales=int(np.sum((values < 0) * counts)),
        subnormal_scales=int(np.sum((used & (magnitudes < min_normal)) * counts)),
        top_scales=0 if scale is None else int(np.sum((magnitudes == scale.max) * counts)),
        scale_logs=int(np.sum(logs * counts)),
        scaled_blocks=int(np.sum(used * counts)),
        largest_scale=float(magnitudes.max(initial=0, where=finite)),
        smallest_scale=float(magnitudes.min(initial=math.inf, where=finite)),
    )


def _count_stored(rows: _Rows) -> tuple[StoredCounts, npt.NDArray[np.bool_]]:
    """Return (StoredCounts with the numbers that need codes but no source, mask of the blocks that decode to zeros)."""
    element, empty = rows.form.element, _empty_blocks(rows.form, rows.codes)
    values = scales_of(rows.form, rows.scales)
    zero = empty | (values == 0)
    nan_codes = np.flatnonzero(np.isnan(element.values[: element.sign_bit])).tolist()
    return StoredCounts(
        elements=rows.codes.size * 8 // element.bits,
        at_max=_count_codes(element, rows.codes, [element.max_code]),
        nan_codes=_count_codes(element, rows.codes, nan_codes),
        zero_blocks=int(np.count_nonzero(zero)),
        zero_scales=int(np.count_nonzero(zero & ~empty)),
        reach=_reach_of(rows, values, ~zero),
    ), zero


# The largest value of float16. Trained weights are far smaller; values beyond it come from scales that are wrong.
LARGEST_REACH = 65504.0
# The smallest normal value of float16. The largest weights of a trained layer are far larger.
SMALLEST_REACH = 2.0**-14


def _reach_of(rows: _Rows, values: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_] | bool = True) -> float:
    """Return the largest finite magnitude that an element can have under the given scales; 0 if no block counts."""
    largest = float(np.where(np.isfinite(values) & counted, np.abs(values), 0).max(initial=0))
    return largest * (rows.factor if math.isfinite(rows.factor) else 1.0) * float(rows.form.element.max)


def reach_and_lost_blocks(
    form: Container, codes: npt.NDArray[np.uint8], scales: np.ndarray, tensor_scale: np.float32 | None
) -> tuple[float, int]:
    """Return two numbers by which doubt_about judges the scales of stored rows."""
    rows = _Rows(form, codes, scales, tensor_scale)
    values = scales_of(form, scales)
    reach, zero = _reach_of(rows, values), values == 0
    is_usual = SMALLEST_REACH <= reach <= LARGEST_REACH
    if is_usual and not zero.any():
        return reach, 0
    used = ~_empty_blocks(form, codes)
    return reach if is_usual else _reach_of(rows, values, used), int(np.count_nonzero(zero & used))


def doubt_about(reach: float, lost: int) -> str:
    """Return a warning if scales are probably wrong; "" if nothing is odd about them."""
    run = "run fp4kit identify with the unquantized source"
    if reach > LARGEST_REACH:
        what = "far beyond trained weights; scales that are stored as their reciprocals look so"
        power = f"{reach:e}".partition("e")[2]  # no digits, so that layers with equal faults have one text
        return f"its scales allow values above {f'1e{power}' if power else LARGEST_REACH}, {what}; {run}"
    if 0 < reach < SMALLEST_REACH:
        what = "far below trained weights; scales that are multiplied twice look so"
        return f"its scales allow only values up to {reach:.2g}, {what}; {run}"
    return f"the scales of {lost} blocks are 0 although their codes are not, so their values are lost" if lost else ""


def _count_codes(element: ElementFormat, codes: npt.NDArray[np.uint8], wanted: Iterable[int]) -> int:
    """Return how many codes (not bytes) equal one of ``wanted``, with the sign bit ignored."""
    magnitude = ((1 << element.bits) - 1) ^ element.sign_bit
    pairs = [(magnitude << shift, code << shift) for shift in range(0, 8, element.bits) for code in wanted]
    return sum(int(np.count_nonzero((codes & np.uint8(mask)) == np.uint8(code))) for mask, code in pairs)


def _empty_blocks(form: Container, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return a mask of the blocks whose codes are all +0 or -0, (rows of blocks, blocks per row)."""
    element = form.element
    magnitude = ((1 << element.bits) - 1) ^ element.sign_bit
    mask = sum(magnitude << shift for shift in range(0, 64, element.bits))
    height, width = form.block
    if height > 1 or width * element.bits % 64:
        return ~_reduced(form, np.logical_or, (codes_of(form, codes) & np.uint8(magnitude)) != 0)
    words = np.ascontiguousarray(codes).view(np.uint64).reshape(len(codes), -1, width * element.bits // 64)
    joined: Any = reduce(np.bitwise_or, (words[..., i] for i in range(words.shape[-1])))
    return np.asarray((joined & np.uint64(mask)) == 0)


def _reduced(form: Container, ufunc: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Return the values of each block combined by a function such as np.maximum, (rows of blocks, blocks per row)."""
    for axis, size in enumerate(form.block):
        values = ufunc.reduceat(values, np.arange(0, values.shape[axis], size), axis=axis)
    return values


def _compare_with_source(
    rows: _Rows,
    x: np.ndarray,
    zero: npt.NDArray[np.bool_],
    limits: npt.NDArray[np.float32],
    column_scale: npt.NDArray[np.float32] | None,
) -> StoredCounts:
    """Return StoredCounts with the numbers that compare stored rows with their source.

    limits: the largest magnitude that each block can hold.
    """
    form = rows.form
    signal, noise, nonfinite, saturated = _error_of(rows, x, limits, column_scale)
    flushed = _reduced(form, np.logical_or, per_element(form, zero, x.shape) & (x != 0)) if zero.any() else zero
    is_small = _is_too_small(rows, x if column_scale is None else x / column_scale) if flushed.any() else flushed
    is_small = flushed & is_small
    return StoredCounts(
        compared=x.size,
        nonfinite=nonfinite,
        saturated=saturated,
        flushed_blocks=int(np.count_nonzero(flushed)),
        underflowed_blocks=int(np.count_nonzero(is_small)),
        emptied_blocks=int(np.count_nonzero(flushed & ~is_small & (scales_of(form, rows.scales) != 0))),
        hollow_blocks=_count_hollow(rows, x, zero),
        signal=signal,
        noise=noise,
    )


_MANY = 64  # blocks of 16 or 32 weights are left out, because one larger weight is usual in them


def _count_hollow(rows: _Rows, x: np.ndarray, zero: npt.NDArray[np.bool_]) -> int:
    """Return StoredCounts.hollow_blocks of some rows."""
    if prod(rows.form.block) < _MANY or _count_codes(rows.form.element, rows.codes, [0]) < _MANY:
        return 0
    used = x != 0
    lost = used & (values_of_bytes(rows.form).take(rows.codes, axis=0).reshape(x.shape) == 0)
    lost, used = (_reduced(rows.form, np.add, each.astype(np.int64)) for each in (lost, used))
    return int(np.count_nonzero((2 * lost > used) & (lost >= _MANY) & ~zero))


def _error_of(
    rows: _Rows, x: np.ndarray, limits: npt.NDArray[np.float32], column_scale: npt.NDArray[np.float32] | None
) -> tuple[float, float, int, int]:
    """Return (sum of x^2, sum of (x - decoded)^2, number of non-finite x, number of saturated elements)."""
    form = rows.form
    if column_scale is None and form.block[0] == 1 and form.block[1] % 8 == 0 and form.arithmetic[1] == "F32":
        scales, top = factors_of(form, rows.scales, rows.tensor_scale), float(form.element.max) * (1 + form.in_blocks)
        found = compare_stored(rows.codes, values_of_bytes(form), top, scales, limits, x)
        if found is not None and math.isfinite(found[0]) and math.isfinite(found[1]):
            return *found[:2], 0, found[2]
    decoded = decode(form, rows.codes, rows.scales, rows.tensor_scale)
    limits = per_element(form, limits, x.shape)
    if column_scale is not None:
        decoded, limits = decoded * column_scale, limits * np.abs(column_scale)
    at_max = codes_of(form, rows.codes) & np.uint8(~form.element.sign_bit & 0xFF) == form.element.max_code
    return *_signal_and_noise(x, decoded), int(np.count_nonzero(at_max & (np.abs(x) > limits)))


def _is_too_small(rows: _Rows, x: np.ndarray) -> npt.NDArray[np.bool_]:
    """Return a mask of the blocks in which encoding x gives zeros, (rows of blocks, blocks per row)."""
    # The bounds are twice those of rounding to nearest, because some recipes round down.
    element, values = rows.form.element, rows.magnitudes
    amax = _reduced(rows.form, np.maximum, np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64))
    smallest = float(FLT_MIN if rows.form.scale is None else rows.form.scale.min_subnormal)
    bounds = np.where(values == 0, smallest * float(element.max), values * float(element.min_subnormal))
    return np.asarray((amax <= rows.factor * bounds) & np.isfinite(values))


def _signal_and_noise(x: npt.NDArray[np.float32], decoded: npt.NDArray[np.float32]) -> tuple[float, float, int]:
    """Return (sum of x^2, sum of (x - decoded)^2, number of non-finite x)."""
    wide = x.astype(np.float64)
    signal = _squares(wide)
    noise = _squares(np.subtract(wide, decoded, out=wide))
    if math.isfinite(signal) and math.isfinite(noise):
        return signal, noise, 0
    usable = np.isfinite(x)
    finite, stored = x[usable].astype(np.float64), decoded[usable]
    noise = _squares(finite - stored) if np.isfinite(stored).all() else math.inf
    return _squares(finite), noise, int(x.size - finite.size)


def _squares(x: npt.NDArray[np.float64]) -> float:
    """Return the sum of x^2 over all elements; 0.0 if there are none."""
    flat = x.reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def magnitude_bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of every element with the sign bit cleared, as a new array of unsigned integers of equal
    width.
    """
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return x.view(unsigned) & np.array((1 << (8 * x.dtype.itemsize - 1)) - 1, unsigned)


def amax_and_nonfinite(x: np.ndarray) -> tuple[np.float32, int]:
    """Return (largest |x| of the finite values as float32, number of NaN and infinite values) for a 2-D float array."""
    # If ``x`` has rows, it must also have columns.
    infinity = magnitude_bits(np.array([np.inf], x.dtype))[0]
    largest, bad = infinity & 0, 0
    for rows in row_chunks(len(x), x.shape[1]):
        bits = magnitude_bits(x[rows])
        top = bits.max()
        if top >= infinity:  # rare, so only such a chunk gets a second pass, which counts non-finite values
            finite = bits < infinity
            top, bad = bits[finite].max(initial=0), bad + bits.size - int(np.count_nonzero(finite))
        largest = max(largest, top)
    return np.array([largest]).view(x.dtype).astype(np.float32)[0], bad


def count_nan(data: npt.NDArray[np.uint8], dtype: str) -> int:
    """Return the number of NaN in the bytes of a tensor; 0 if its dtype is not F32, F16 or BF16."""
    if dtype not in FLOAT_DTYPES:
        return 0
    values = data.view(NUMPY_DTYPES[dtype])
    return int(np.count_nonzero(magnitude_bits(values) > magnitude_bits(np.array([np.inf], values.dtype))[0]))


def amax_and_nonfinite_on(device: int, x: np.ndarray) -> tuple[np.float32, int]:
    """Return what amax_and_nonfinite returns, computed on a GPU: (largest finite |x|, number of NaN and infinity)."""
    with making_current(device):
        found: Any = amax(to_device(x))
        largest = np.float32(found.get())
    return (largest, 0) if np.isfinite(largest) else amax_and_nonfinite(x)


# Magnitudes -----------------------------------------------------------------------------------------------------------
# By magnitudes it is judged whether scales were lost, multiplied or inverted, without a source. The reach of a layer is
# the largest magnitude that its scales allow, which is near the layer's amax under any recipe. A recipe that computes
# the tensor scale from the amax uses the upper end of the block scales: 448, or 256 for some recipes with four over
# six.

# Only a tensor scale brings block scales to the upper end of E4M3. Parts of fused layers may stay below it.
_UPPER_END = 128.0
# Ratios of magnitudes. Typical magnitudes of layers of one kind, which ignore outliers, differ by a factor below 8 in
# trained models; those of different kinds, or of embeddings, below 100. A tensor scale that is lost or inverted is off
# by 10^3 to 10^8, a factor of 448 too many or too few by 448, and exponents by 2^k.
_FAR_FROM_PEERS, _FAR, _CERTAIN = 12.0, 128.0, 16384.0
_DEVIATIONS = 8  # a matrix is doubtful if its log differs by more than this many median deviations
# The reach times sqrt(K), which is near the largest output for inputs of size 1. It is 1 to 300 in trained models and
# in models of standard normal weights. The limits count together with the ratio to unquantized matrices, or alone, if
# the model has none.
_LARGE, _SMALL = 100.0, 0.5
_LARGE_ALONE, _SMALL_ALONE = 1500.0, 0.02
# Layers have one tensor scale by chance if their weights are clipped, but then many blocks have the largest scale.
_FEWEST_GROUPS, _FEWEST_BLOCKS, _UNCLIPPED = 4, 512, 0.01
_MOST_MATRICES, _ROWS = 1024, 128  # how many matrices are sampled, evenly spaced, and how many of their leading rows
_MOST_REFERENCES = 8


class Magnitude(NamedTuple):
    """A quantized matrix: its name, container, rows' length, tensor scale as a multiplier, and stored counts."""

    name: str
    form: Container
    columns: int
    tensor_scale: float | None
    counts: StoredCounts

    @property
    def reach(self) -> float:
        """The largest magnitude that the scales allow in blocks that are not zero."""
        return self.counts.reach

    @property
    def typical(self) -> float:
        """The geometric mean of what the scales of blocks allow, which outliers hardly change; 0 if all are zero."""
        if not self.counts.scaled_blocks:
            return 0.0
        mean = 2.0 ** (self.counts.scale_logs / 1024 / self.counts.scaled_blocks)
        return mean * abs(self.tensor_scale or 1.0) * float(self.form.element.max)

    @property
    def is_neutral(self) -> bool:
        """True if the layer is NVFP4 without a tensor scale, or with a tensor scale of 1."""
        return self.form.kind == "nvfp4" and self.tensor_scale in (None, 1.0)

    @property
    def has_fp8_scale_1(self) -> bool:
        """True if the layer is FP8 and all its scales are 1."""
        scales = {self.counts.largest_scale, self.counts.smallest_scale, self.tensor_scale or 1.0}
        return self.form.scale is None and scales == {1.0}


class Doubt(NamedTuple):
    """A finding about scales: severity, the names of the matrices (() for the model), and a text."""

    severity: str
    names: tuple[str, ...]
    text: str

    @property
    def line(self) -> str:
        """The finding with the names of a few matrices."""
        return f"{listed(list(self.names))}: {self.text}" if self.names else self.text


def sampled_magnitudes(weights: Iterable[Weight], most: int = _MOST_MATRICES) -> list[Magnitude]:
    """Return the magnitudes of at most ``most`` evenly spaced quantized matrices, from their leading rows."""
    matrices = [(w, e) for w in weights if w.container is not None for e in range(w.experts)]
    count = min(len(matrices), most)
    found = []
    with Readers() as readers:
        for weight, expert in (matrices[i * len(matrices) // count] for i in range(count)):
            height = weight.form.block[0]
            end = min(weight.shape[-2], -(-_ROWS // height) * height)
            slab = next(slabs(readers, weight, expert, (0, end), max_bytes=1 << 40))
            counts = tally(weight.form, slab.codes, slab.scales, slab.tensor_scale)
            found.append(magnitude_of(weight, expert, slab.tensor_scale, counts))
    return found


def magnitude_of(
    weight: Weight, expert: int, tensor_scale: float | np.float32 | None, counts: StoredCounts
) -> Magnitude:
    """Return the magnitude of one matrix of a quantized weight, from the counts of its stored values."""
    name = weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"
    scale = None if tensor_scale is None else float(tensor_scale)
    return Magnitude(name, weight.form, weight.shape[-1], scale, counts)


def reference_of(weights: Iterable[Weight]) -> float | None:
    """Return the median amax of a few unquantized matrices, such as embeddings; None if there are none."""
    plain = [w for w in weights if w.container is None and len(w.shape) >= 2]
    count = min(len(plain), _MOST_REFERENCES)
    amaxes = []
    with Readers() as readers:
        for weight in (plain[i * len(plain) // count] for i in range(count)):
            slab = next(slabs(readers, weight, 0, (0, min(_ROWS, weight.shape[-2]))))
            values = np.abs(np.asarray(values_of(weight, slab), np.float32))
            amaxes.append(float(values.max(initial=0, where=np.isfinite(values))))
    return median(filter(None, amaxes)) if any(amaxes) else None


def doubts_of(found: Sequence[Magnitude], reference: float | None) -> Iterator[Doubt]:
    """Yield what is certainly (error) or probably (warning) wrong with the scales of quantized matrices."""
    # Block scales at the upper end of E4M3, but no tensor scale that brings values down.
    lost = [one for one in found if one.is_neutral and one.counts.largest_scale >= _UPPER_END]
    if lost:
        names = [one.name for one in found if one.is_neutral]
        end = max(one.counts.largest_scale for one in lost)
        yield Doubt("error", tuple(names), _LOST.format(end=end, reach=max(one.reach for one in lost)))
    unscaled = [one.name for one in found if one.has_fp8_scale_1 and one.counts.at_max > 0]
    if unscaled:
        yield Doubt("error", tuple(unscaled), _LOST_FP8)
    known = {*unscaled, *(one.name for one in found if lost and one.is_neutral)}
    # A cast has no scales, or scales of 1, so that what scales allow says nothing about it.
    of_fp8 = [one for one in found if one.form.scale is None]
    are_casts = all(one.has_fp8_scale_1 for one in of_fp8) and not any(one.counts.at_max for one in of_fp8)
    known |= {one.name for one in of_fp8 if are_casts or one.form.is_cast}
    # FP8 that was cast without a scale does not use the range of its codes, so that its reach says nothing.
    used = (one for one in found if one.form.scale is not None or one.counts.at_max)
    rest = [one for one in used if one.name not in known and one.reach > 0 and one.typical > 0]
    rest = [one for one in rest if one.tensor_scale is None or one.tensor_scale > 0]  # others are refused as negative
    yield from _unlike_peers(rest)
    yield from _unlike_model(rest, reference)
    yield from _one_tensor_scale(rest)


_LOST = (
    "no tensor scale other than 1, although block scales reach {end:g}, as they do only if the tensor scale follows"
    " from the largest weight, so that it was lost; values reach {reach:.3g}; take the tensor scales from another copy"
)
_LOST_FP8 = (
    "scales are 1 although codes reach the maximum of FP8, as they do only if the scale follows from the largest"
    " weight, so that it was lost; take the scales from another copy"
)
_CAUSES = "tensor or block scales were lost, inverted, or multiplied twice; run fp4kit verify with --source"


def _ratio(ratio: float) -> str:
    """Return a ratio as text, such as "450 times" or "1/450 of"."""
    return f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"


def _is_far(ratio: float, limit: float) -> bool:
    return not 1 / limit < ratio < limit


def _severity(ratio: float, reach: float) -> str:
    """Return "error" if no weights explain a ratio of magnitudes and a reach, otherwise "warning"."""
    # Weights may be tiny, as in a layer that was never trained, but none are beyond float16.
    return "error" if ratio > _CERTAIN and reach > LARGEST_REACH else "warning"


def _unlike_peers(found: Sequence[Magnitude]) -> Iterator[Doubt]:
    """Yield a finding for each matrix that is far from its kind, or whose kind is far from the median of all kinds."""
    kinds = defaultdict[Hashable, list[float]](list)
    for one in found:
        kinds[_kind(one)].append(log2(one.typical))
    middles = {kind: median(sizes) for kind, sizes in kinds.items()}
    middle = median(middles.values()) if len(kinds) > 3 else None
    limit = _limit((sizes for sizes in kinds.values() if len(sizes) > 2), _FAR_FROM_PEERS)
    apart = _limit([list(middles.values())], _FAR)
    for one in found:
        kind = _kind(one)
        few, ratio, peers = len(kinds[kind]) <= 2, one.typical / 2.0 ** middles[kind], "its kind"
        is_doubtful = not few and _is_far(ratio, limit)
        if not is_doubtful and middle is not None:
            of_kind = log2(one.typical) if few else middles[kind]
            is_doubtful = _is_far(2.0 ** (of_kind - middle), apart)
            ratio, peers = one.typical / 2.0**middle, "all kinds"
        if is_doubtful:
            text = f"its scales allow values up to {one.reach:.2g}, and typical ones are {_ratio(ratio)} the median of"
            yield Doubt(_severity(ratio, one.reach), (one.name,), f"{text} {peers}; {_CAUSES}")


def _limit(groups: Iterable[Sequence[float]], least: float) -> float:
    """Return the ratio to the median of a group from which on a matrix is doubtful: ``least``, or more if many
    differ.
    """
    away: list[float] = []
    for sizes in groups:
        away += sorted(abs(size - median(sizes)) for size in sizes)[1:]  # without the median itself
    return max(least, 2.0 ** (_DEVIATIONS * median(away))) if away else least


def _kind(one: Magnitude) -> tuple[str, str]:
    """Return what peers have in common: their role, and whether scales belong to blocks, rows or the layer."""
    return role_of(one.name.partition("[")[0]), one.form.kind


def _unlike_model(found: Sequence[Magnitude], reference: float | None) -> Iterator[Doubt]:
    """Yield a finding if most layers are far from the unquantized matrices and from usual magnitudes."""
    if not found:
        return
    middle, gain = median(one.reach for one in found), median(one.reach * sqrt(one.columns) for one in found)
    start = f"scales allow values up to {middle:.2g} in half of the quantized layers"
    if reference is None:
        if not _SMALL_ALONE <= gain <= _LARGE_ALONE:
            yield Doubt("warning", (), f"{start}, unlike those of trained models; {_CAUSES}")
        return
    ratio = middle / reference
    if _is_far(ratio, _FAR) and not _SMALL <= gain <= _LARGE:
        text = f"{start}, {_ratio(ratio)} the largest value of unquantized matrices; {_CAUSES}"
        yield Doubt(_severity(ratio, middle), (), text)


def _one_tensor_scale(found: Sequence[Magnitude]) -> Iterator[Doubt]:
    """Yield a warning if all layers have one tensor scale, and each uses it up to the largest block scale or code."""
    layers = [one for one in found if one.form.kind in ("nvfp4", "fp8 tensor") and one.tensor_scale is not None]
    groups = shared_amax_groups([one.name for one in layers])
    scales = {one.tensor_scale for one in layers}
    by_group: dict[str, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(2, np.int64))
    for one in layers:
        counts = one.counts
        used = (counts.at_max, counts.elements) if one.form.scale is None else (counts.top_scales, counts.blocks)
        by_group[groups.get(one.name, one.name)] += used
    if len(scales) != 1 or len(by_group) < _FEWEST_GROUPS:
        return
    if all(top and total >= _FEWEST_BLOCKS and top < _UNCLIPPED * total for top, total in by_group.values()):
        yield Doubt(
            "warning",
            (),
            f"all {len(layers)} layers have one tensor scale, {scales.pop():.3g}, and each uses it up to the maximum,"
            " as if all had one largest weight; tensor scales were probably overwritten; run fp4kit verify with"
            " --source",
        )
