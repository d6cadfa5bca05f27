"""Count the codes and scales of a Quantized, chunk by chunk. GPU arrays are copied to the host once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.formats import Codebook, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpack, unswizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe

CHUNK_BYTES = 1 << 20  # codes per chunk; with the int64 copy that bincount makes, a chunk takes 9 MiB


@dataclass(frozen=True)
class Statistics:
    """Statistics of the codes and scales of a Quantized.

    Attributes:
        values: number of values.
        saturated: values whose code has the largest magnitude of the format, or a larger one.
        nan: values whose code is NaN.
        blocks: number of blocks, 0 for a recipe without blocks.
        zero_blocks: blocks whose codes are all zero.
        scales: the distinct block scales as float32. For a recipe without block scales, the distinct tensor scales.
        counts: how often each scale occurs.
    """

    values: int
    saturated: int
    nan: int
    blocks: int
    zero_blocks: int
    scales: np.ndarray
    counts: np.ndarray


def statistics(q: Quantized) -> Statistics:
    """Return the statistics of a Quantized, counted over all of its codes and scales."""
    if isinstance(q.recipe.element, IntegerOrFloat):
        return _statistics_of_if4(q, q.recipe.element)
    (packed,) = import_arrays("statistics", packed=q.packed)
    by_byte, blocks, zeros = np.zeros(256, np.int64), 0, 0
    for chunk in _chunks(packed, q.recipe.block_rows):
        by_byte += np.bincount(chunk.reshape(-1), minlength=256)
        if q.recipe.block:
            empty = _zero_blocks(chunk, q.recipe)
            blocks, zeros = blocks + empty.size, zeros + int(np.count_nonzero(empty))
    by_code, values = _by_code(by_byte, q.recipe.element), q.recipe.element.values
    saturated, nan = int(by_code[np.abs(values) >= q.recipe.element.max].sum()), int(by_code[np.isnan(values)].sum())
    return Statistics(prod(q.shape), saturated, nan, blocks, zeros, *_scales(q))


def _statistics_of_if4(q: Quantized, fmt: IntegerOrFloat) -> Statistics:
    """Return the statistics of a Quantized with elements IF4."""
    packed, stored = import_arrays("statistics", packed=q.packed, scales=q.block_scale)
    scales = unswizzle_scales(to_host(stored), q.scale_layout, q.scale_shape).reshape(-1, q.scale_shape[-1])
    row = saturated = blocks = zeros = 0
    for chunk in _chunks(packed, q.recipe.block_rows):
        used = scales[row : row + len(chunk)]
        values = fmt.values_of(unpack(chunk).reshape(*used.shape, q.recipe.block_size), used)
        saturated += int(np.count_nonzero(np.abs(values) >= fmt.max))
        empty = _zero_words(values, q.recipe)
        blocks, zeros, row = blocks + empty.size, zeros + int(np.count_nonzero(empty)), row + len(chunk)
    return Statistics(prod(q.shape), saturated, 0, blocks, zeros, *_scales(q))


def _chunks(packed: Any, block_rows: int) -> Iterator[np.ndarray]:
    """Yield the stored codes in chunks (rows, bytes) of at most 1 MiB, as NumPy arrays."""
    *_, rows, width = packed.shape if packed.ndim > 1 else (1, *packed.shape)
    if not packed.size:
        return
    rows = packed.size // width if block_rows == 1 else rows
    matrices = packed.reshape(-1, rows, width)
    step = max(CHUNK_BYTES // (width * block_rows), 1) * block_rows
    for matrix in matrices:
        for start in range(0, rows, step):
            chunk = matrix[start : start + step]
            yield to_host(chunk)


def _by_code(by_byte: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Convert counts per byte value (256 counts) to counts per element code of ``fmt``, in code order."""
    if fmt.packing.codes == 1:
        return by_byte[: 2**fmt.bits]
    pairs = by_byte.reshape(16, 16)  # high nibble, low nibble
    return pairs.sum(0) + pairs.sum(1)


def _zero_blocks(codes: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where a block has only zeros, of either sign."""
    fmt = recipe.element
    if isinstance(fmt, Codebook):
        pairs = np.array([fmt.values[byte & 15] != 0 or fmt.values[byte >> 4] != 0 for byte in range(256)])
        return _zero_words(pairs[codes].reshape(len(codes), -1, fmt.packing.length(recipe.block_size)), recipe)
    zero = 0xFF if fmt.is_integer else ~fmt.sign_bit & 0xFF
    mask = zero & 0x0F | (zero & 0x0F) << 4 if fmt.packing.codes > 1 else zero
    length = fmt.packing.length(recipe.block_size)
    wide = np.uint64 if length % 8 == 0 else np.uint8  # a block of NVFP4 is one 8-byte word
    words = np.ascontiguousarray(codes).view(wide) & np.array([mask] * np.dtype(wide).itemsize, np.uint8).view(wide)
    return _zero_words(words.reshape(len(codes), -1, length // words.itemsize), recipe)


def _zero_words(words: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where every word of a block is 0 or False."""
    used = np.asarray(words.any(-1))
    if recipe.block_rows > 1:
        used = np.logical_or.reduceat(used, np.arange(0, len(used), recipe.block_rows), axis=0)
    return ~used


def _scales(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct block scales of q as float32, and how often each occurs."""
    part = q.block_scale if q.block_scale is not None else q.tensor_scale
    (part,) = import_arrays("statistics", scales=part)
    part = to_host(part)
    if q.block_scale is None or q.recipe.scale is None:
        return np.unique(part, return_counts=True)
    linear = unswizzle_scales(part, q.scale_layout, q.scale_shape)
    if isinstance(q.recipe.element, IntegerOrFloat):
        linear = q.recipe.element.scale_codes(linear)
    counts = np.bincount(linear.reshape(-1), minlength=256)
    values = np.resize(q.recipe.scale.values, 256)
    return values[counts > 0], counts[counts > 0]


def by_exponent(scales: np.ndarray, counts: np.ndarray, max_bars: int = 16) -> tuple[tuple[str, int], ...]:
    """Return a histogram of the scales, grouped by floor(log2(|scale|)), as (label, count) bars in increasing order."""
    # If there would be more than ``max_bars`` bars besides those, neighboring exponents share a bar.
    sizes = np.abs(scales)
    nonzero = (sizes > 0) & np.isfinite(sizes)
    exponents, place = np.unique(np.frexp(sizes[nonzero])[1] - 1, return_inverse=True)
    sums = np.zeros(len(exponents), np.int64)
    np.add.at(sums, place, counts[nonzero])
    special = {"0": sizes == 0, "inf": np.isinf(sizes), "NaN": np.isnan(sizes)}
    zero, inf, nan = ([(name, int(counts[where].sum()))] if where.any() else [] for name, where in special.items())
    return (*zero, *_binned(dict(zip(exponents.tolist(), sums.tolist(), strict=True)), max_bars), *inf, *nan)


def _binned(counts: dict[int, int], max_bars: int) -> Iterator[tuple[str, int]]:
    """Yield the bars (label, count) of a histogram of exponents."""
    width = 1
    while len({e // width for e in counts}) > max_bars:
        width *= 2
    lows = sorted({e // width * width for e in counts})
    if lows and (lows[-1] - lows[0]) // width < max_bars:
        lows = list(range(lows[0], lows[-1] + 1, width))
    for low in lows:
        label = f"2^{low}" if width == 1 else f"2^{low} to 2^{low + width - 1}"
        yield label, sum(counts.get(e, 0) for e in range(low, low + width))
