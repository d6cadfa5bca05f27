"""Decide whether codes that no recipe gives still fit their source, as the codes of calibrated methods do. The source
is the original weight. Calibrated methods, such as GPTQ and AWQ, measure inputs of the layers to choose codes or
scales.

Checkpoints do not hold these inputs, so the bytes of a calibrated method (GPTQ, AWQ, SmoothQuant, SVDQuant, auto-round)
cannot be made again. But damaged bytes can still be told from the bytes of such a method:

- Every code is equal or adjacent to the code that its source value gets with the stored scales.
- GPTQ moves codes further, but rounds the first column that it takes to the nearest codes. Random damage hits all
  columns alike, so that no column stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.hypotheses import CHUNK
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.formats import ElementFormat
from fp4kit.layouts import unpacked

_BF16 = 2.0**-8  # largest relative error of a number that was rounded to bfloat16
LEAST_DB = 12.0  # the smallest signal-to-noise ratio of a layer that counts as sound
_LUCK = 0.01  # largest expected number of columns that random damage would leave without a wrong code


@dataclass(frozen=True)
class Fit:
    """A measure of how well the codes of a layer fit its source, given the stored scales.

    far: the number of codes that differ from the code of their source value by more than ``steps`` representable values
        (see fit_of). Codes whose stored scale is 0 are not counted.
    sqnr_db: the signal-to-noise ratio of the decoded values in decibels, with the source as the signal.
    """

    far: int
    sqnr_db: float

    @property
    def is_sound(self) -> bool:
        """True if no code is far from its source value, and the signal-to-noise ratio is at least 12 dB."""
        return self.far == 0 and self.has_signal

    @property
    def has_signal(self) -> bool:
        """True if the signal-to-noise ratio is at least 12 dB, so that the layer resembles its source."""
        return self.sqnr_db >= LEAST_DB


@ieee("identify")
def fit_of(
    layer: StoredLayer,
    x: npt.NDArray[np.generic],
    columns: npt.NDArray[np.float32] | None = None,
    rows: bool = False,
    steps: int = 1,
) -> Fit | None:
    """Measure how well the codes of a layer fit its source with the stored scales."""
    r = layer.recipe
    if not _is_comparable(layer, x):
        return None
    order, far, signal, noise = _order_of(r.element), 0, 0.0, 0.0
    for part in _decoded(layer, x.shape):
        wanted = x[part.rows].astype(np.float64) * (1.0 if columns is None else columns.astype(np.float64))
        with np.errstate(all="ignore"):
            values = r.element.values[part.codes].astype(np.float64) * part.factor
            if rows:
                sums = (np.sum(a * wanted, axis=1, keepdims=True) for a in (values, wanted))
                wanted = wanted * np.nan_to_num(np.divide(*sums), nan=1.0)
            quotient = np.clip(wanted / part.factor, -r.element.max, r.element.max).astype(np.float32)
            apart = np.abs(order[part.codes] - order[r.element.encode(quotient)]) > steps
            far += int(np.count_nonzero(apart & (part.factor != 0)))
            signal += float(np.sum(wanted**2))
            noise += float(np.sum((wanted - values) ** 2))
    return Fit(far, sqnr_db(signal, noise))


@dataclass(frozen=True)
class Likeness:
    """A measure of how much the decoded values of a layer are like its source.

    correlation: their correlation coefficient, from -1 to 1; 0 if either is constant.
    gain: the factor by which the source must be multiplied to fit the decoded values best.
    equal, far: the share of codes that are equal to the code of their source value, given the stored scales, and the
        share of codes more than one representable value away from it.
    """

    correlation: float
    gain: float
    equal: float
    far: float

    @property
    def is_same_size(self) -> bool:
        """True if the decoded values are not a multiple of the source, as they are if scales are wrong."""
        return is_near_one(self.gain, self.correlation)

    @property
    def is_rounded_otherwise(self) -> bool:
        """True if every code is at most one step away from that of its source value, which damage does not do."""
        return self.far <= _NEGLIGIBLE

    @property
    def is_of_another_version(self) -> bool:
        """True if the layer was probably made from another version of its source, such as a fine-tuned one."""
        return self.is_same_size and self.correlation >= LIKE and (self.far <= _LUCK or self.equal < _MANY_EQUAL)


def is_near_one(gain: float, correlation: float) -> bool:
    """Return whether a gain is 1, up to what the differences of two versions with this correlation explain."""
    return abs(gain - 1) <= MAX_GAIN + 1.2 * (1 - correlation**2)


LIKE = 0.8  # least correlation of two versions of a layer; equal signs alone give 0.64
MAX_GAIN = 0.03  # largest difference from 1 of the gain of a version with correlation 1
_NEGLIGIBLE = 1e-4  # share of codes that may be further away
_MANY_EQUAL = 0.7  # least share of equal codes if bytes are damaged


@ieee("identify")
def likeness_of(layer: StoredLayer, x: npt.NDArray[np.generic]) -> Likeness | None:
    """Compare the decoded values of a layer with its source."""
    r, n = layer.recipe, len(x)
    if not _is_comparable(layer, x):
        return None
    rows = np.unique(np.linspace(0, max(n - 1, 0), min(n, _MOST_ROWS)).astype(np.int64))
    scales = np.ascontiguousarray(layer.block_scale.reshape(n, -1)[rows])
    few = replace(layer, codes=np.ascontiguousarray(layer.codes[rows]), block_scale=scales)
    part = x[rows]
    order, sums, equal, far, total = _order_of(r.element), np.zeros(5), 0, 0, 0
    for decoded in _decoded(few, part.shape):
        wanted = part[decoded.rows].astype(np.float64)
        with np.errstate(all="ignore"):
            values = r.element.values[decoded.codes].astype(np.float64) * decoded.factor
            quotient = np.clip(wanted / decoded.factor, -r.element.max, r.element.max).astype(np.float32)
            steps = np.abs(order[decoded.codes] - order[r.element.encode(quotient)])
        kept = np.isfinite(values) & np.isfinite(wanted)
        a, b = values[kept], wanted[kept]
        sums += (a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
        equal, total = equal + int(np.count_nonzero(steps == 0)), total + steps.size
        far += int(np.count_nonzero(steps > 1))
    count = max(total, 1)
    a1, b1, aa, bb, ab = sums / count
    spread = (aa - a1 * a1) * (bb - b1 * b1)
    correlation = float((ab - a1 * b1) / np.sqrt(spread)) if spread > 0 else 0.0
    return Likeness(correlation, float(ab / bb) if bb > 0 else 0.0, equal / count, far / count)


_MOST_ROWS = 1024


def _is_comparable(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the codes of a layer can be decoded with its stored scales, row by row."""
    r, scale = layer.recipe, layer.tensor_scale
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    in_order = layer.shape == x.shape and layer.block_scale.size * r.block_size == x.size and r.block_rows == 1
    return r.scale is not None and usable and in_order and layer.scale_layout == "linear"


@ieee("identify")
def is_gptq(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the codes of a layer look like GPTQ's."""
    # The layer must be one that fit_of can compare.
    wrong = np.zeros(x.shape[1], np.int64)
    encode, largest = layer.recipe.element.encode, layer.recipe.element.max
    for part in _decoded(layer, x.shape):
        with np.errstate(all="ignore"):
            quotient = np.clip(x[part.rows].astype(np.float64) / part.factor, -largest, largest)
        order = _order_of(layer.recipe.element)
        low, high = (order[encode((quotient * factor).astype(np.float32))] for factor in (1 - _BF16, 1 + _BF16))
        found = order[part.codes]
        wrong += np.count_nonzero((found != low) & (found != high) & (part.factor != 0), axis=0)
    expected = x.shape[1] * (1 - wrong.mean() / len(x)) ** len(x)
    return 0 < np.count_nonzero(wrong == 0) <= max(4, x.shape[1] // 20) and bool(expected <= _LUCK)


@dataclass(frozen=True, eq=False)
class _Decoded:
    """The codes and scales of some rows of a layer.

    rows: the range of rows.
    codes: the codes (rows, K), one per byte.
    factor: the product of block scale and tensor scale of each element, float64 (rows, K).
    """

    rows: slice
    codes: npt.NDArray[np.uint8]
    factor: npt.NDArray[np.float64]


def _decoded(layer: StoredLayer, shape: tuple[int, ...]) -> Iterator[_Decoded]:
    """Yield all rows of a layer, in ranges of rows that have about CHUNK elements each."""
    # Codes and scales are not checked here, so the layer must be one that fit_of can compare.
    r, step = layer.recipe, max(CHUNK // max(shape[1], 1), 1)
    assert r.scale is not None
    tensor = 1.0 if layer.tensor_scale is None else float(layer.tensor_scale)
    for rows in (slice(start, start + step) for start in range(0, shape[0], step)):
        codes = unpacked(np.ascontiguousarray(layer.codes[rows]), r.element.packing)
        scales = r.scale.values[layer.block_scale.reshape(shape[0], -1)[rows]].astype(np.float64) * tensor
        yield _Decoded(rows, codes, np.repeat(scales, r.block_size, axis=1))


def _order_of(element: ElementFormat) -> npt.NDArray[np.int64]:
    """Return the rank of each code's value in an element format, as int64. Equal values have equal ranks."""
    return np.unique(element.values, return_inverse=True)[1].reshape(-1).astype(np.int64)
