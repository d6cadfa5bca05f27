"""Recognize layers of which no recipe gives all bytes, by what known methods leave in them: searched or calibrated
block scales, columns that were multiplied by factors, and codes that GPTQ or tuning rounded. The source is the original
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.hypotheses import (
    CHUNK,
    Hypothesis,
    LayerEvidence,
    Layout,
    amaxes,
    chunks,
    expected_parts,
    sample_of,
)
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.formats import ElementFormat
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of, candidates_of
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.search import FACTORS
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale


def recipes_under_stored_scales(evidence: LayerEvidence, plain: Layout) -> tuple[Recipe, ...]:
    """Return the recipes that reproduce all codes of a layer with its stored block scales and tensor scale."""
    layer = evidence.layer
    if plain.mishaps or not layer.in_order(evidence.x) or not layer.has_usable_scale:
        return ()
    scaling = "none" if layer.tensor_scale is None else "tensor"
    candidates = [
        r
        for r in evidence.recipes or candidates_of(layer.recipe)
        if r.tensor_scaling == scaling and r.block_rows == 1 and not r.search
    ]
    rows = sample_of(plain.shape, layer.recipe).rows
    tried = [
        (r, s) for r in candidates for s in _tensor_scales(evidence, r) if _codes_match(evidence, plain, r, s, rows)
    ]
    exact = [r for r, s in tried if all(_codes_match(evidence, plain, r, s, part) for part in chunks(plain, r))]
    return tuple(dict.fromkeys(exact))


def _tensor_scales(evidence: LayerEvidence, r: Recipe) -> Iterator[np.float32 | None]:
    """Yield the tensor scales with which the codes may have been made: the stored one, then others within 2 ulp of
    it.
    """
    stored = evidence.layer.tensor_scale
    yield stored
    if stored is None or r.tensor_rule is None:
        return
    with np.errstate(all="ignore"):
        scales = [np.float32(tensor_scale(np.asarray(a), r, evidence.x.dtype).decode) for a in evidence.amaxes]
        limit = 2 * np.spacing(np.float32(stored))
        yield from (scale for scale in dict.fromkeys(scales) if scale != stored and abs(scale - stored) <= limit)


def _codes_match(
    evidence: LayerEvidence, plain: Layout, r: Recipe, tensor_scale: np.float32 | None, rows: np.ndarray
) -> bool:
    """Return whether a recipe reproduces all codes of some rows, given their stored block scales and a tensor scale."""
    codes = plain.reading.read(evidence.layer, rows, slice(0, plain.shape[1]))
    scales = np.ascontiguousarray(evidence.layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(evidence.x[rows]), r, block_scale=scales, tensor_scale=tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), codes)


_WIDER = (2, 4, 8)  # numbers of blocks that may have got one amax
_MOST_WIDE = 0.75  # least share of blocks that have the scale of the wider amax, of those in which it differs
_UNROUNDED = 0.999  # least share of codes that the unrounded scales give; the order of divisions changes a few


def wide_blocks(
    evidence: LayerEvidence, plain: Layout, recipes: tuple[Recipe, ...]
) -> tuple[tuple[Recipe, ...], str] | None:
    """Return (recipes, fault) if block scales come from the amax of several neighboring blocks, otherwise None."""
    rows, size = sample_of(plain.shape, evidence.layer.recipe).rows, evidence.layer.recipe.block_size
    for count in _WIDER:
        if plain.shape[1] % (count * size):
            continue
        pairs = [(r, amax) for r in recipes for amax in amaxes(evidence, r)]
        found = dict.fromkeys(pair[0] for pair in pairs if _are_wide(evidence, plain, pair, count, rows))
        if found:
            return tuple(found), f"block scales come from the amaxes of {count} blocks, {count * size} elements"
    return None


def _are_wide(
    evidence: LayerEvidence, plain: Layout, recipe_amax: tuple[Recipe, np.ndarray | None], count: int, rows: np.ndarray
) -> bool:
    """Return whether the block scales of some rows come from the amaxes of ``count`` neighboring blocks."""
    size, columns = evidence.layer.recipe.block_size, slice(0, plain.shape[1])
    x = np.array(evidence.x[rows])
    blocks = x.reshape(len(rows), -1, count, size)
    with np.errstate(invalid="ignore"):  # NaN of the source
        blocks[..., 0] = np.abs(x).reshape(len(rows), -1, count * size).max(axis=-1)[..., None]
    raised = replace(evidence, x=x, other=None)
    own = expected_parts(evidence, plain, rows, columns, recipe_amax)[1]
    wide = expected_parts(raised, plain, np.arange(len(rows)), columns, recipe_amax)[1]
    stored = evidence.layer.block_scale.reshape(plain.shape[0], -1)[rows]
    differ = own != wide
    fits = differ.any() and ((stored == own) | (stored == wide)).all()
    return bool(fits and np.mean((stored == wide)[differ]) >= _MOST_WIDE)


def unrounded_scales(evidence: LayerEvidence, plain: Layout) -> str | None:
    """Return the name of the fault if codes were computed with the block scales before they were rounded."""
    r, rows = evidence.layer.recipe, sample_of(plain.shape, evidence.layer.recipe).rows
    if plain.mishaps or r.block_rows > 1:
        return None
    blocks = evidence.x[rows].astype(np.float32).reshape(len(rows), -1, r.block_size)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(r.element.max)
        codes = r.element.encode(np.nan_to_num(blocks / scale)).reshape(len(rows), -1)
    stored = plain.reading.read(evidence.layer, rows, slice(0, plain.shape[1]))
    known = (r.element.values[stored] != 0) | (r.element.values[codes] != 0)  # zeros of both signs are equal
    differ = known & (codes != stored)
    return _FAULT if differ.sum() <= (1 - _UNROUNDED) * differ.size else None


_FAULT = "codes were computed with the block scales before rounding"


FOUR_OVER_SIX = "nvfp4-modelopt-static-4over6 with block amaxes times 1 or 1.5 (four over six)"
IMPORTANCE = "auto-round's (nvfp4-auto-round-opt, iters=0), weighted by an importance matrix"
# The recipes that reproduce the codes if four over six, or auto-round's search, chose the block scales.
STATIC_4OVER6, AUTO_ROUND = "nvfp4-modelopt-static-4over6", "nvfp4-auto-round"
_STATIC, _AUTO_ROUND = RECIPES[STATIC_4OVER6], RECIPES["nvfp4-auto-round-opt"]
TUNED = "scales and codes by another rule, with every code near its quotient: tuned (auto-round), or another source"
TUNED_BY_AUTO_ROUND = "tuned by auto-round: scales and codes by another rule, with every code near its quotient"
_TIE = 1e-6  # relative difference of two errors that are equal up to the rounding of float32 sums
_CHOSEN = 0.9  # the smallest share of blocks in which four over six chose the smaller error
_WITHIN, _NEAREST = 0.98, 0.5  # the smallest shares of codes near their quotients, and nearest to them, if tuned
_LEAST = 0.25  # the smallest share of blocks in which a weighted search chose the smallest error without weights


class _Rows(NamedTuple):
    """Some rows of a layer, divided into blocks.

    x: the source, float64 (rows, blocks, block size).
    values: the decoded values of the stored codes and scales, float64 (rows, blocks, block size).
    scales: the stored scale codes (rows, blocks).
    rows: the numbers of the rows.
    """

    x: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]
    scales: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]

    @property
    def error(self) -> npt.NDArray[np.float64]:
        """The sum of (x - values)^2 over the elements of each block, float64 (rows, blocks)."""
        found: npt.NDArray[np.float64] = np.square(self.x - self.values).sum(axis=-1)
        return found


@ieee("identify")
def blocks_of_equal_error(evidence: LayerEvidence, hypothesis: Hypothesis) -> int | None:
    """Return in how many blocks the stored scale differs from the scale of a hypothesis, but gives an equal error."""
    if not hypothesis.recipe.search or hypothesis.mishaps:
        return None
    count, plain = 0, hypothesis.layout
    for part in _parts(evidence, plain):
        columns = slice(0, plain.shape[1])
        made = expected_parts(evidence, plain, part.rows, columns, (hypothesis.recipe, hypothesis.amax))
        codes, scales = made[0], np.asarray(made[1]).view(np.uint8)
        other = part._replace(values=_decoded(evidence, codes, scales), scales=scales)
        differ = scales != part.scales
        same_values = (other.values == part.values).all(axis=-1)
        a, b = part.error[differ], other.error[differ]
        if not same_values[~differ].all() or (np.abs(a - b) > _TIE * np.maximum(a, b)).any():
            return None
        count += int(np.count_nonzero(differ))
    return count


@ieee("identify")
def is_four_over_six(evidence: LayerEvidence, plain: Layout) -> bool:
    """Return whether every block scale is computed from the block's amax or 1.5 times the amax (four over six)."""
    tensor = _tensor_of(evidence, _STATIC)
    if tensor is None:
        return False
    counts = np.zeros(2, np.int64)
    good = total = 0
    for part in _parts(evidence, plain):
        amax = np.abs(part.x).max(axis=-1).astype(np.float32)
        tried = [_code(amax * np.float32(factor), tensor, _STATIC, evidence) for factor in (1, 1.5)]
        is_one = [part.scales == scales for scales in tried]
        if not (is_one[0] | is_one[1]).all():
            return False
        errors = [part._replace(values=_requantized(evidence, part, scales)).error for scales in tried]
        best = np.minimum(*errors)
        good += int(np.count_nonzero(part.error <= best * (1 + _TIE)))
        counts += [int(np.count_nonzero(one & ~other)) for one, other in (is_one, is_one[::-1])]
        total += part.scales.size
    return bool(counts.all()) and good >= _CHOSEN * total


@ieee("identify")
def is_weighted_search(evidence: LayerEvidence, plain: Layout) -> bool:
    """Return whether auto-round's search with an importance matrix may have chosen the block scales."""
    # Every block scale must be one that auto-round tries.
    # In a sample, at least a quarter of the block scales must have the smallest error without weights. (Weights make
    # other scales better in many blocks, but not in all.) Return False if the layer is not NVFP4 with one tensor scale
    # that follows from a candidate amax.
    tensor = _tensor_of(evidence, _AUTO_ROUND)
    if tensor is None:
        return False
    for part in _parts(evidence, plain):
        missing = np.ones(part.scales.shape, bool)
        for scales in _tried(evidence, part, tensor):
            missing &= part.scales != scales
        if missing.any():
            return False
    sample = _rows_of(evidence, plain, sample_of(plain.shape, evidence.layer.recipe).rows)
    errors = (sample._replace(values=_requantized(evidence, sample, s)).error for s in _tried(evidence, sample, tensor))
    least = reduce(np.minimum, errors)
    return float(np.mean(sample.error <= least * (1 + _TIE))) >= _LEAST


@ieee("identify")
def is_rounded_near(evidence: LayerEvidence, plain: Layout) -> bool:
    """Return whether the codes of a layer look as if auto-round had tuned their rounding, judged by a sample."""
    layer = evidence.layer
    r, scale = layer.recipe, layer.tensor_scale
    usable = not plain.mishaps and layer.in_order(evidence.x) and layer.has_usable_scale
    if not usable or r.element.bits != _STATIC.element.bits:
        return False
    sample = _rows_of(evidence, plain, sample_of(plain.shape, r).rows)
    assert r.scale is not None
    factor = r.scale.values[sample.scales].astype(np.float64)[..., None] * (1.0 if scale is None else float(scale))
    kept = np.broadcast_to(factor > 0, sample.x.shape) & np.isfinite(sample.x)
    with np.errstate(all="ignore"):
        quotient, codes = ((part / factor)[kept] for part in (sample.x, sample.values))
    low, near, high = (_nearest_values(quotient + shift, r) for shift in (-0.5, 0, 0.5))
    within, nearest = np.mean((low <= codes) & (codes <= high)), np.mean(near == codes)
    return bool(within >= _WITHIN and nearest >= _NEAREST)


def _nearest_values(quotient: npt.NDArray[np.float64], r: Recipe) -> npt.NDArray[np.float64]:
    """Return the value of the element format that is nearest to each quotient."""
    clipped = np.clip(quotient, -r.element.max, r.element.max).astype(np.float32)
    found: npt.NDArray[np.float64] = r.element.values[r.element.encode(clipped)].astype(np.float64)
    return found


def _tried(evidence: LayerEvidence, part: _Rows, tensor: TensorScale) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the scale codes that auto-round tries for some rows, one array (rows, blocks) per multiple of the amax."""
    amax = np.abs(part.x).max(axis=-1).astype(np.float32)
    for factor in FACTORS[_AUTO_ROUND.search]:
        yield _code(amax * np.float32(factor), tensor, _AUTO_ROUND, evidence)


def _tensor_of(evidence: LayerEvidence, r: Recipe) -> TensorScale | None:
    """Return the tensor scale that a recipe computes from one of the layer's candidate amaxes."""
    stored, own = evidence.layer.tensor_scale, evidence.layer.recipe
    parts = own.element, own.scale, own.block_size
    is_nvfp4 = parts == (_STATIC.element, _STATIC.scale, _STATIC.block_size)
    if stored is None or not is_nvfp4 or np.ndim(stored):
        return None
    found = (tensor_scale(np.asarray(amax), r, evidence.x.dtype) for amax in amaxes(evidence, r) if amax is not None)
    near = (one for one in found if abs(one.decode - stored) <= 2 * np.spacing(np.float32(stored)))
    return next(near, None)


def _code(amax: np.ndarray, tensor: TensorScale, r: Recipe, evidence: LayerEvidence) -> npt.NDArray[np.uint8]:
    """Return the scale codes that a recipe computes from block amaxes."""
    name = r.block_rule or ""
    return np.asarray(BLOCK_RULES[name].code(amax, tensor.columns(r), r, evidence.x.dtype)).view(np.uint8)


def _parts(evidence: LayerEvidence, plain: Layout) -> Iterator[_Rows]:
    """Yield all rows of a layer as _Rows, some rows at a time."""
    # Block scales must be in linear order.
    yield from (_rows_of(evidence, plain, rows) for rows in chunks(plain, evidence.layer.recipe))


def _rows_of(evidence: LayerEvidence, plain: Layout, rows: npt.NDArray[np.int64]) -> _Rows:
    """Return some rows of a layer: the source, the decoded values, and the stored scale codes."""
    layer = evidence.layer
    codes = plain.reading.read(layer, rows, slice(0, plain.shape[1]))
    scales = np.ascontiguousarray(layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)
    x = evidence.x[rows].astype(np.float64).reshape(len(rows), -1, layer.recipe.block_size)
    return _Rows(x, _decoded(evidence, codes, scales), scales, rows)


def _decoded(evidence: LayerEvidence, codes: np.ndarray, scales: np.ndarray) -> npt.NDArray[np.float64]:
    """Return the decoded values of some rows with the stored tensor scale, float64 (rows, blocks, block size)."""
    r, tensor = evidence.layer.recipe, evidence.layer.tensor_scale
    assert r.scale is not None
    elements = r.element.values[codes].astype(np.float64).reshape(*scales.shape, r.block_size)
    factor = r.scale.values[scales].astype(np.float64) * (1.0 if tensor is None else float(tensor))
    found: npt.NDArray[np.float64] = elements * factor[..., None]
    return found


def _requantized(evidence: LayerEvidence, part: _Rows, scales: np.ndarray) -> npt.NDArray[np.float64]:
    """Quantize the source of some rows with given block scales, and return the decoded values."""
    x = np.ascontiguousarray(evidence.x[part.rows])
    q = quantize(x, _STATIC, block_scale=scales, tensor_scale=evidence.layer.tensor_scale)
    return _decoded(evidence, unpacked(q.packed, _STATIC.element.packing), scales)


MAX_ROWS = 512  # the largest number of rows from which factors are estimated
MIN_ROWS = 32  # layers with fewer rows are not examined
GAIN_DB = 0.5  # factors per column must improve the signal-to-noise ratio by this, compared with one common factor
MIN_DB = 12.0  # signal-to-noise ratio that the layer must have with factors
# Recipes whose ids end in one of these are tried, because their tools can scale weights per column.
PRODUCERS = ("-compressed-tensors", "-modelopt")
STEPS = 12  # the number of bfloat16 numbers that are tried on each side of an estimate


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """The first rows of a layer, their source and the estimated factors of the columns.

    q: the stored rows.
    x: the source rows (n, K).
    factors: the estimated factor of each column, float32 (K,), so that the stored values are near x * factors.
    """

    q: Quantized
    x: np.ndarray
    factors: np.ndarray


def scaled_rows(layer: StoredLayer, x: np.ndarray) -> ScaledRows | None:
    """Estimate the factors by which the columns of a layer were multiplied, from its first rows."""
    r, scale, rows = layer.recipe, layer.tensor_scale, min(len(x), MAX_ROWS)
    if layer.shape != x.shape or not layer.in_order(x) or not layer.has_usable_scale or rows < MIN_ROWS:
        return None
    if (r.tensor_scaling == "tensor") != (scale is not None) or not np.isfinite(part := x[:rows]).all():
        return None
    scales = np.ascontiguousarray(layer.block_scale.reshape(len(x), -1)[:rows])
    codes = np.ascontiguousarray(layer.codes[:rows])
    q = Quantized(codes, scales, scale, None, part.shape, x.dtype, 1, r)
    with np.errstate(all="ignore"):
        d, s = np.asarray(dequantize(q, np.float32), np.float64), part.astype(np.float64)
        factors = np.nan_to_num((d * s).sum(0) / (s * s).sum(0), nan=1.0)
    if not np.isfinite(d).all() or not (factors > 0).all():
        return None
    common = float((d * s).sum() / (s * s).sum())  # one factor for all columns, as from a wrong tensor scale
    plain, scaled = (sqnr_db(float((d * d).sum()), float(((d - s * f) ** 2).sum())) for f in (common, factors))
    if scaled < max(MIN_DB, plain + GAIN_DB):
        return None
    return ScaledRows(q, np.ascontiguousarray(part), factors.astype(np.float32))


Scaling = Callable[[np.ndarray], np.ndarray]


def scalings(found: ScaledRows) -> Iterator[Scaling]:
    """Yield functions that scale the columns of the source as a tool may have done before it quantized the layer."""
    near, inverse = (_neighbors(f) for f in (found.factors, 1 / found.factors))
    own, seen = found.q.recipe, set()
    for r in candidates_of(own):  # one for each rule of block scales
        fits = r.tensor_scaling == own.tensor_scaling and r.block_rows == 1 and r.id.endswith(PRODUCERS)
        if not fits or r.block_rule in seen:
            continue
        seen.add(r.block_rule)
        yield _chosen(found, r, near, _multiplied)
        yield _chosen(found, r, inverse, _divided)
        yield _chosen(found, r, [np.float32(1) / f for f in inverse], _multiplied)


def _multiplied(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return x with its columns multiplied by ``factors`` in float32, rounded to the dtype of x."""
    return (x.astype(np.float32) * factors).astype(x.dtype)


def _divided(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return x with its columns divided by ``factors`` in float32, rounded to the dtype of x."""
    return (x.astype(np.float32) / factors).astype(x.dtype)


def _neighbors(factors: np.ndarray) -> list[np.ndarray]:
    """Return 25 arrays of bfloat16 numbers near the given positive factors, as float32, the nearest first."""
    bits = factors.astype(ml_dtypes.bfloat16).view(np.int16)
    steps = sorted(range(-STEPS, STEPS + 1), key=abs)
    return [(bits + np.int16(step)).view(ml_dtypes.bfloat16).astype(np.float32) for step in steps]


def _chosen(found: ScaledRows, r: Recipe, candidates: list[np.ndarray], apply: Callable) -> Scaling:
    """Return a function that scales each column of a matrix (N, K) by the candidate factor that fits the column
    best.
    """
    wrong = np.stack([_wrong(found, r, apply(found.x, factors)) for factors in candidates])
    best = np.stack(candidates)[np.argmin(wrong, axis=0), np.arange(found.x.shape[1])]
    return lambda x: apply(x, best)


def _wrong(found: ScaledRows, r: Recipe, x: np.ndarray) -> np.ndarray:
    """Return, per column, how many stored codes and block scales differ from those that a recipe gives, int64 (K,)."""
    q = found.q
    amax = None if q.tensor_scale is None else next(amaxes_of(q.tensor_scale, r, x.dtype))
    with np.errstate(all="ignore"):
        made = quantize(x, r, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        scales = quantize(x, r, tensor_amax=amax).block_scale
    assert scales is not None and q.block_scale is not None
    codes = [unpacked(packed, r.element.packing) for packed in (made.packed, q.packed)]
    wrong = np.count_nonzero(codes[0] != codes[1], axis=0)
    blocks = np.abs(x.astype(np.float32)).reshape(len(x), -1, r.block_size)
    columns = np.argmax(blocks, axis=2) + np.arange(blocks.shape[1]) * r.block_size
    np.add.at(wrong, columns[scales.reshape(columns.shape) != q.block_scale.reshape(columns.shape)], 1)
    return wrong


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
    for part in _decoded_chunks(layer, x.shape):
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
    for decoded in _decoded_chunks(few, part.shape):
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
    in_order = layer.shape == x.shape and layer.in_order(x) and layer.recipe.block_rows == 1
    return layer.recipe.scale is not None and layer.has_usable_scale and in_order


@ieee("identify")
def is_gptq(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the codes of a layer look like GPTQ's."""
    # The layer must be one that fit_of can compare.
    wrong = np.zeros(x.shape[1], np.int64)
    encode, largest = layer.recipe.element.encode, layer.recipe.element.max
    for part in _decoded_chunks(layer, x.shape):
        with np.errstate(all="ignore"):
            quotient = np.clip(x[part.rows].astype(np.float64) / part.factor, -largest, largest)
        order = _order_of(layer.recipe.element)
        low, high = (order[encode((quotient * factor).astype(np.float32))] for factor in (1 - _BF16, 1 + _BF16))
        found = order[part.codes]
        wrong += np.count_nonzero((found != low) & (found != high) & (part.factor != 0), axis=0)
    expected = x.shape[1] * (1 - wrong.mean() / len(x)) ** len(x)
    return 0 < np.count_nonzero(wrong == 0) <= max(4, x.shape[1] // 20) and bool(expected <= _LUCK)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The codes and scales of some rows of a layer.

    rows: the range of rows.
    codes: the codes (rows, K), one per byte.
    factor: the product of block scale and tensor scale of each element, float64 (rows, K).
    """

    rows: slice
    codes: npt.NDArray[np.uint8]
    factor: npt.NDArray[np.float64]


def _decoded_chunks(layer: StoredLayer, shape: tuple[int, ...]) -> Iterator[_Chunk]:
    """Yield all rows of a layer, in ranges of rows that have about CHUNK elements each."""
    # Codes and scales are not checked here, so the layer must be one that fit_of can compare.
    r, step = layer.recipe, max(CHUNK // max(shape[1], 1), 1)
    assert r.scale is not None
    tensor = 1.0 if layer.tensor_scale is None else float(layer.tensor_scale)
    for rows in (slice(start, start + step) for start in range(0, shape[0], step)):
        codes = unpacked(np.ascontiguousarray(layer.codes[rows]), r.element.packing)
        scales = r.scale.values[layer.block_scale.reshape(shape[0], -1)[rows]].astype(np.float64) * tensor
        yield _Chunk(rows, codes, np.repeat(scales, r.block_size, axis=1))


def _order_of(element: ElementFormat) -> npt.NDArray[np.int64]:
    """Return the rank of each code's value in an element format, as int64. Equal values have equal ranks."""
    return np.unique(element.values, return_inverse=True)[1].reshape(-1).astype(np.int64)
