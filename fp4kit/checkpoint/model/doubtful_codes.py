"""Recognize layers whose codes do not seem to belong to their block scales, or whose nibbles are swapped, without the
unquantized source. Let e be the root mean square of the codes of a block, and s its scale. A recipe computes s from the
largest element; if this element is unusually large, s is large and the other codes are small. So log s and log e have a
negative correlation: -0.45 to -0.95 in layers that tools wrote, near 0 if the scales belong to other blocks. Except for
CERTAIN, the checks cause warnings only. They are silent for weights whose blocks look alike, such as uniform ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.slabs import Readers, Slab, codes_of, scales_of, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight, located
from fp4kit.formats import ElementFormat
from fp4kit.layouts import SCALE_LAYOUTS, padded_shape, swizzle_scales, unswizzle_scales
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorEntry

_Floats = npt.NDArray[np.float64]

_ROWS = 128  # a sample has a multiple of this many rows: the height of a tile of swizzled scales
_ELEMENTS = 1 << 19  # a sample has as many times _ROWS rows as fit into this many elements, but at least _ROWS
FEWEST_BLOCKS = 64  # no statistic of fewer blocks is used
# Another order is reported if its correlation is at most _FITS, and at least _GAIN below that of the stored order.
_FITS, _GAIN = -0.4, 0.3
# {bits of a code: share of the format's largest magnitude that some code of every sound layer reaches}. Recipes that
# round scales up use the least of the range: their largest codes are 3 of 6 for uniform weights, and 160 of 448 for
# ternary weights.
_LEAST_SHARE = {4: 0.5, 8: 0.25}
# Findings that nothing but lost data explains: errors, unlike all others
LOST_CODES = "all codes are zero under block scales that differ, so the codes were lost"
LOST_COLUMNS = (
    "scales are zero in all rows of some columns of blocks, although the codes there are not, so the scales were lost"
)
EMPTY = "all codes are zero, which is a fault unless the layer was pruned"
CERTAIN = (LOST_CODES, LOST_COLUMNS)
_FEWEST_ROWS = 16  # fewer rows do not show that a whole column of scales is zero
_FEWEST_MAGNITUDES = 4  # equal scales are usual for weights with fewer magnitudes, such as ternary ones


class _Sample(NamedTuple):
    """The codes and scales of the leading rows of a layer, from which the checks of this file compute statistics.

    Attributes:
        form: the layer's container.
        codes: one code per byte, uint8 (rows, K).
        scales: block scales in linear order, not decoded: bytes or float32, (rows of blocks, blocks per row).
        square: True if the layer has as many rows as columns.
    """

    form: Container
    codes: npt.NDArray[np.uint8]
    scales: np.ndarray
    square: bool


def doubt_of(readers: Readers, weight: Weight, expert: int = 0, empty: bool = False) -> str:
    """Return a warning if the codes of a quantized matrix do not seem to belong to its scales; "" if nothing is odd."""
    # The text contains nothing specific to the layer, so that a report can list all layers with the same warning
    # together.
    form, (rows, columns) = weight.container, weight.shape[-2:]
    assert form is not None
    slab = _leading_rows(readers, weight, expert)
    doubt = doubt_about_rows(form, slab, rows == columns)
    return EMPTY if empty and not doubt and _all_zero(form, slab) else doubt


def is_empty(readers: Readers, weight: Weight) -> bool:
    """Return whether all codes of the leading rows of a quantized weight are zero."""
    assert weight.container is not None
    return _all_zero(weight.container, _leading_rows(readers, weight, 0))


def _all_zero(form: Container, slab: Slab) -> bool:
    assert slab.codes is not None
    return _are_zero(form, codes_of(form, slab.codes))


def _are_zero(form: Container, codes: npt.NDArray[np.uint8]) -> bool:
    return not (codes & np.uint8(~form.element.sign_bit & 0xFF)).any()


def _leading_rows(readers: Readers, weight: Weight, expert: int) -> Slab:
    """Read the rows that the checks of this file examine."""
    form, (rows, columns) = weight.container, weight.shape[-2:]
    assert form is not None
    count = min(rows, max(_ELEMENTS // (columns * _ROWS), 1) * _ROWS)
    height = form.block[0]
    return next(slabs(readers, weight, expert, (0, min(rows, -(-count // height) * height)), max_bytes=1 << 40))


def doubt_about_rows(form: Container, slab: Slab, square: bool = False) -> str:
    """Return a warning if the codes of leading rows do not seem to belong to their scales; "" if nothing is odd."""
    assert slab.codes is not None and slab.scales is not None
    sample = _Sample(form, codes_of(form, slab.codes), slab.scales, square)
    with np.errstate(all="ignore"):
        found: Iterable[str] = (_lost_codes(sample), _lost_columns(sample), _whole_numbers(sample), _unreached(sample))
        found = (*found, _equal_scales(sample), _other_order(sample))
        return next(filter(None, (*found, _reciprocal_columns(sample, slab))), "")


@cache
def _magnitudes(element: ElementFormat) -> _Floats:
    """Return a float64 table: code of an element format -> magnitude of its value; 0 for NaN and infinity."""
    values = np.abs(element.values.astype(np.float64))
    return np.where(np.isfinite(values), values, 0.0)


def _in_blocks(sample: _Sample) -> _Floats:
    """Return the magnitudes of a sample's codes by block, as float64."""
    height, width = sample.form.block
    rows, columns = (size // step * step for size, step in zip(sample.codes.shape, (height, width), strict=True))
    values = _magnitudes(sample.form.element)[sample.codes[:rows, :columns]]
    split = values.reshape(rows // height, height, columns // width, width)
    return split.swapaxes(1, 2).reshape(*split.shape[::2], height * width)


def _scales(sample: _Sample, stored: np.ndarray, shape: tuple[int, ...]) -> _Floats:
    """Return the values of a sample's block scales as float64, without the scales of partial blocks."""
    return scales_of(sample.form, stored)[: shape[0], : shape[1]].astype(np.float64)


def _is_scaled_by_block(form: Container) -> bool:
    """Return whether each block or row has a scale of its own, which follows from its largest element."""
    return form.kind != "fp8 tensor"


# Each check returns a warning, or "" if nothing is odd ---------------------------------------------------------------


def _lost_codes(sample: _Sample) -> str:
    # Zeros give all blocks of a recipe one scale.
    scales = np.asarray(scales_of(sample.form, sample.scales))
    return LOST_CODES if _are_zero(sample.form, sample.codes) and scales.size and scales.min() < scales.max() else ""


def _lost_columns(sample: _Sample) -> str:
    """Return LOST_COLUMNS if all rows of some columns of blocks, but not of all, have zero scales over other codes."""
    blocks = _in_blocks(sample)
    scales = _scales(sample, sample.scales, blocks.shape)
    if len(scales) < _FEWEST_ROWS:
        return ""
    lost, sound = ((scales == 0) & (blocks.max(-1) > 0)).all(0), (scales != 0).any(0)
    return LOST_COLUMNS if lost.any() and sound.any() else ""


def _whole_numbers(sample: _Sample) -> str:
    """Return a warning if float32 scales are whole numbers, like E8M0 bytes that were converted to floats; else ""."""
    if sample.form.scale is not None or not _is_scaled_by_block(sample.form):
        return ""
    scales = sample.scales.astype(np.float64)
    if ((scales == np.rint(scales)) & (scales >= 16) & (scales <= 254)).all():
        return (
            "block scales are whole numbers from 16 to 254, as E8M0 bytes are if they are converted to floats, although"
            " scales of trained weights are far below 1; store the powers of two 2^(byte - 127), or the bytes as"
            " F8_E8M0"
        )
    return ""


def _unreached(sample: _Sample) -> str:
    """Return a warning if no block has a code of a large magnitude; "" otherwise."""
    form = sample.form
    if not _is_scaled_by_block(form):
        return ""
    blocks = _in_blocks(sample)
    scales, largest = _scales(sample, sample.scales, blocks.shape), blocks.max(-1)
    # Blocks under the smallest scale may have small codes, because their elements are even smaller.
    smallest = 0.0 if form.scale is None else float(form.scale.min_normal)
    used = (largest > 0) & np.isfinite(scales) & (np.abs(scales) > smallest)
    least = _LEAST_SHARE[form.element.bits] * float(form.element.max)
    if np.count_nonzero(used) < FEWEST_BLOCKS or largest[used].max() >= least:
        return ""
    return (
        f"no block reaches a code of magnitude {least:g}, though scales follow from the largest element of their block;"
        " codes were cut, or scales replaced by larger ones; run fp4kit identify with the unquantized source"
    )


def _equal_scales(sample: _Sample) -> str:
    """Return a warning if all block scales are equal although the codes need different scales; otherwise ""."""
    form, blocks = sample.form, _in_blocks(sample)
    scales = _scales(sample, sample.scales, blocks.shape)
    used = (blocks.max(-1) > 0) & np.isfinite(scales) & (scales != 0)
    found = blocks[used]
    if len(found) < FEWEST_BLOCKS or not _is_scaled_by_block(form) or len(np.unique(scales[used])) > 1:
        return ""
    if len(np.unique(found)) <= _FEWEST_MAGNITUDES:
        return ""
    squares = np.square(found)
    f = squares.shape[1] * squares.mean(1).var() / squares.var(axis=1).mean()
    top = found >= 0.9 * float(form.element.max)
    expected, without = len(found) * (1 - top.mean()) ** top.shape[1], np.count_nonzero(~top.any(1))
    if f > max(1.5, 1 + 8 * np.sqrt(2 / len(found))) or (expected >= 20 and 4 * without < expected):
        return (
            "all block scales are equal, although the codes are those of blocks with different scales; the scales were"
            " overwritten or lost; take the layer from another copy, or quantize it again"
        )
    return ""


def _correlation(sample: _Sample, scales: np.ndarray, blocks: _Floats) -> float:
    """Return the correlation of log s and log e over blocks, after subtracting means (see _without_means)."""
    s, e = _scales(sample, scales, blocks.shape), np.square(blocks).mean(-1)
    used = np.isfinite(s) & (s > 0) & (e > 0)
    if np.count_nonzero(used) < FEWEST_BLOCKS:
        return 0.0
    a, b = (_without_means(np.log(np.where(used, x, 1)), used) for x in (s, e))
    spread = a.std() * b.std()
    return float((a * b).mean() / spread) if spread > 1e-9 else 0.0


def _without_means(x: _Floats, used: npt.NDArray[np.bool_]) -> _Floats:
    """Return the used entries, flat, after subtracting the mean of each column and then the mean of each row."""
    for axis in (0, 1) if x.shape[1] >= 4 else (0,):
        count = np.maximum(used.sum(axis=axis, keepdims=True), 1)
        x = x - np.where(used, x, 0).sum(axis=axis, keepdims=True) / count
    found: _Floats = x[used]
    return found


def _other_order(sample: _Sample) -> str:
    """Return a warning if block scales fit the codes only in another layout, or only if the codes are transposed."""
    form, blocks = sample.form, _in_blocks(sample)
    if form.block[0] > 1 or form.scale is None or form.in_blocks:
        return ""
    stored = _correlation(sample, sample.scales, blocks)
    limit = min(_FITS, stored - _GAIN)
    declared = "swizzled_128x4" if form.swizzled else "linear"
    for layout, scales in _relaid(sample, declared):
        if _correlation(sample, scales, blocks) <= limit:
            return (
                f"block scales fit the codes only if they are {layout}, but {declared} ones are declared; rearrange"
                " them with fp4kit.swizzle or fp4kit.unswizzle, or declare their layout"
            )
    if sample.square:
        size = min(sample.codes.shape) // form.block[1] * form.block[1]
        turned = sample._replace(codes=np.ascontiguousarray(sample.codes[:size, :size].T))
        blocks = _in_blocks(turned)
        if blocks.size and _correlation(turned, sample.scales, blocks) <= limit:
            return "block scales fit the codes only if the codes are transposed; transpose the codes, not their bytes"
    return ""


def _relaid(sample: _Sample, declared: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (layout, scales) for each layout that the stored bytes may have, except the declared one."""
    linear = np.ascontiguousarray(sample.scales)
    shape = linear.shape
    raw = swizzle_scales(linear, declared) if padded_shape(shape, declared) == shape else None
    for layout in SCALE_LAYOUTS:
        if raw is not None and layout != declared and padded_shape(shape, layout) == shape:
            yield layout, unswizzle_scales(raw, layout, shape)


def _reciprocal_columns(sample: _Sample, slab: Slab) -> str:
    """Return a warning if the factors per column (AWQ) seem to be stored as their reciprocals; "" otherwise."""
    factors, height = slab.column_scale, sample.form.block[0]
    if factors is None or slab.low_rank is not None or height > 1 or len(sample.codes) < FEWEST_BLOCKS:
        return ""  # in SVDQuant, the columns of the whole matrix are scaled, and the codes store only a part of it
    blocks = _in_blocks(sample)
    values = blocks * _scales(sample, sample.scales, blocks.shape)[..., None]
    sizes = np.sqrt(np.square(values).mean(0)).reshape(-1)
    factors = np.abs(factors[: sizes.size].astype(np.float64))
    used = np.isfinite(factors) & (factors > 0) & np.isfinite(sizes) & (sizes > 0)
    if np.count_nonzero(used) < FEWEST_BLOCKS:
        return ""
    a, b = (np.log(x[used]) - np.log(x[used]).mean() for x in (factors, sizes))
    if a.std() < 0.05 or (a * b).mean() < 0.5 * a.var() or (a * b).mean() < 0.5 * a.std() * b.std():
        return ""
    return (
        "pre_quant_scale makes the columns less alike, as its reciprocal does; multiplication by it must undo the"
        " scaling of the columns; store the reciprocals, or run fp4kit identify with the unquantized source"
    )


# Swapped nibbles ------------------------------------------------------------------------------------------------------
# Swapped nibbles exchange neighboring columns within their block, so codes still fit their scales. But in trained
# models, the sizes of a layer's columns are correlated with tensors that nibbles do not touch: the weight of the norm
# before the layer, and the columns of unquantized layers that read the same vector. If such a correlation exists only
# after neighboring columns are exchanged, the nibbles are swapped. A profile is the logarithm of each column's
# magnitude, shifted and scaled to mean 0 and standard deviation 1. Random weights have no such correlation.

_PROFILE_ROWS = 128  # number of a layer's first rows from which the sizes of its columns are computed
_MOST_LAYERS, _MOST_REFERENCES = 512, 64  # how many layers, and how many references, are read per number of columns
# A correlation over K columns counts if it is above 0.4 and above 6 sigma, with sigma = 1 / sqrt(K). Profiles of random
# weights stay below 6 sigma.
_LEAST, _SIGMAS = 0.4, 6.0
_SWAP_GAIN = 0.25  # the correlation must be larger by this, and by 6 sigma, than that of the columns as stored


SWAPPED_NIBBLES = (
    "neighboring columns seem to be exchanged, because only then their sizes follow those of norms or of unquantized"
    " layers; swapped nibbles look so; run fp4kit identify with the unquantized source"
)


def swapped_layers(
    weights: Iterable[Weight], tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]]
) -> list[Weight]:
    """Return the layers whose nibbles seem to be swapped; [] if there are none."""
    weights = [*weights]
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.container is not None and weight.container.element.bits == 4 and len(weight.shape) == 2:
            layers[weight.shape[-1]].append(weight)
    found = []
    with Readers() as readers:
        for columns, own in layers.items():
            references = dict(_references(weights, tensors, columns, readers)) if columns >= _PROFILE_ROWS else {}
            examined = own[:_MOST_LAYERS] if references else []
            found += [weight for weight in examined if _is_swapped(_sizes(weight, readers), references.values())]
    return found


def _references(
    weights: Iterable[Weight],
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]],
    columns: int,
    readers: Readers,
) -> Iterator[tuple[str, _Floats]]:
    """Yield (name, profile) for tensors to compare columns with: norms and unquantized matrices."""
    norms = [
        located(file, entry)
        for name, (file, entry) in tensors.items()
        if "norm" in name.lower() and entry.shape == (columns,) and entry.dtype in FLOAT_DTYPES
    ]
    plain = [w for w in weights if w.dtype in FLOAT_DTYPES and len(w.shape) == 2 and w.shape[-1] == columns]
    for place in norms[:_MOST_REFERENCES]:
        yield from _if_varied(place.entry.name, np.abs(readers.array(place).astype(np.float64)))
    for weight in plain[:_MOST_REFERENCES]:
        yield from _if_varied(weight.tensor, _sizes(weight, readers))


def _if_varied(name: str, sizes: _Floats) -> Iterator[tuple[str, _Floats]]:
    """Yield (name, profile) once, or nothing if the columns do not vary enough to tell their order."""
    usable = np.isfinite(sizes) & (sizes > 0)
    if 2 * np.count_nonzero(usable) > sizes.size:
        profile = np.where(usable, np.log(np.where(usable, sizes, 1)), 0)
        profile[usable] -= profile[usable].mean()
        if profile.std() > 1e-3:
            yield name, profile / profile.std()


def _sizes(weight: Weight, readers: Readers) -> _Floats:
    """Return the root mean square of each column over the first rows (at most 128) of a weight: float64 (K,)."""
    count = min(_PROFILE_ROWS, weight.shape[-2])
    slab = next(slabs(readers, weight, 0, (0, count), max_bytes=1 << 40))
    with np.errstate(all="ignore"):
        values = values_of(weight, slab._replace(column_scale=None)).astype(np.float64)
        sizes: _Floats = np.sqrt(np.square(values).mean(0))
    return sizes


def _is_swapped(sizes: _Floats, references: Iterable[_Floats]) -> bool:
    """Return whether a layer's columns match a reference only if neighboring columns are exchanged."""
    # The correlation with the best reference must be large if neighbors are exchanged, and clearly larger than without
    # the exchange (see _LEAST, _GAIN and _SIGMAS).
    profile = next((found for _, found in _if_varied("", sizes)), None)
    if profile is None:
        return False
    exchanged = profile.reshape(-1, 2)[:, ::-1].reshape(-1)
    others = [*references]
    stored, swapped = (max(abs(float((own * one).mean())) for one in others) for own in (profile, exchanged))
    noise = _SIGMAS / np.sqrt(sizes.size)
    return swapped >= max(_LEAST, noise) and swapped >= stored + max(_SWAP_GAIN, noise)
