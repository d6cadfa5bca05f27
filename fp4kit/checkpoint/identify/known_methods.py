"""Recognize layers of which no recipe gives all bytes, by what known methods leave in them: searched or calibrated
block scales, columns that were multiplied by factors, and codes that GPTQ or tuning rounded. The source is the original
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain, islice
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify import hypotheses
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.hypotheses import Hypothesis, LayerEvidence, Layout
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.formats import ElementFormat
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of, are_equal, candidates_of
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, is_simple
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.search import FACTORS
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale


class _Part(NamedTuple):
    """Some rows of a layer that is stored in order, with any codes and block scales.

    source: the rows of the source (rows, K).
    codes: one code per byte (rows, K).
    scales: the scale codes (rows, blocks).
    """

    layer: StoredLayer
    source: np.ndarray
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def x(self) -> npt.NDArray[np.float64]:
        """The source as float64."""
        return self.source.astype(np.float64)

    @property
    def factor(self) -> npt.NDArray[np.float64]:
        """The product of block scale and tensor scale of each element."""
        r, tensor = self.layer.recipe, self.layer.tensor_scale
        assert r.scale is not None
        scales = r.scale.values[self.scales].astype(np.float64) * (1.0 if tensor is None else float(tensor))
        return np.repeat(scales, r.block_size, axis=1)

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """The decoded values."""
        values: npt.NDArray[np.float64] = self.layer.recipe.element.values[self.codes].astype(np.float64) * self.factor
        return values

    @property
    def errors(self) -> npt.NDArray[np.float64]:
        """The sum of (x - values)^2 over the elements of each block, float64 (rows, blocks)."""
        return _blocks(np.square(self.x - self.values), self.layer.recipe).sum(axis=-1)

    @property
    def amaxes(self) -> npt.NDArray[np.float32]:
        """The amax of each block of the source, (rows, blocks)."""
        return np.abs(_blocks(self.x, self.layer.recipe)).max(axis=-1).astype(np.float32)

    def with_scales(self, scales: npt.NDArray[np.uint8]) -> _Part:
        """Return the rows quantized again with given block scales."""
        q = quantize(
            np.ascontiguousarray(self.source), _STATIC, block_scale=scales, tensor_scale=self.layer.tensor_scale
        )
        return self._replace(codes=unpacked(q.packed, _STATIC.element.packing), scales=scales)


def _blocks(array: np.ndarray, r: Recipe) -> np.ndarray:
    """Return an array (rows, K) in blocks: (rows, blocks, block size)."""
    return array.reshape(len(array), -1, r.block_size)


def _part(layer: StoredLayer, x: np.ndarray, rows: np.ndarray) -> _Part:
    """Return some rows of a layer and of its source."""
    codes = unpacked(np.ascontiguousarray(layer.codes[rows]), layer.recipe.element.packing)
    scales = np.ascontiguousarray(layer.block_scale.reshape(len(layer.codes), -1)[rows])
    return _Part(layer, x[rows], codes, scales.view(np.uint8))


def _parts(layer: StoredLayer, x: np.ndarray) -> Iterator[_Part]:
    """Yield all rows of a layer that is stored in order, some rows at a time."""
    return (_part(layer, x, rows) for rows in hypotheses.chunks(x.shape, layer.recipe))


def _sample(evidence: LayerEvidence) -> _Part:
    """Return a sample of the rows of a layer, with all columns."""
    rows, _ = hypotheses.sample_of(evidence.x.shape, evidence.layer.recipe)
    return _part(evidence.layer, evidence.x, rows)


def recipes_under_stored_scales(plain: Layout) -> tuple[Recipe, ...]:
    """Return the recipes that reproduce all codes of a layer with its stored block scales and tensor scale."""
    evidence, layer = plain.evidence, plain.evidence.layer
    if plain.mishaps or not layer.in_order(evidence.x) or not layer.has_usable_scale:
        return ()
    scaling = "none" if layer.tensor_scale is None else "tensor"
    sample, found = _sample(evidence), []
    for r in evidence.recipes or candidates_of(layer.recipe):
        if r.tensor_scaling == scaling and r.block_rows == 1 and not r.search and is_simple(r):
            tried = [scale for scale in _tensor_scales(evidence, r) if _codes_match(sample, r, scale)]
            if any(all(_codes_match(part, r, scale) for part in _parts(layer, evidence.x)) for scale in tried):
                found.append(r)
    return tuple(found)


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


def _codes_match(part: _Part, r: Recipe, tensor_scale: np.float32 | None) -> bool:
    """Return whether a recipe reproduces all codes of some rows, given their stored block scales and a tensor scale."""
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(part.source), r, block_scale=part.scales, tensor_scale=tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), part.codes)


_WIDER = (2, 4, 8)  # numbers of blocks that may have got one amax
_MOST_WIDE = 0.75  # least share of blocks that have the scale of the wider amax, of those in which it differs
_UNROUNDED = 0.999  # least share of codes that the unrounded scales give; the order of divisions changes a few


def wide_blocks(plain: Layout, recipes: tuple[Recipe, ...]) -> tuple[tuple[Recipe, ...], str] | None:
    """Return (recipes, fault) if block scales come from the amax of several neighboring blocks, otherwise None."""
    size = plain.recipe.block_size
    for count in _WIDER:
        if plain.shape[1] % (count * size):
            continue
        found = [
            r for r in recipes if any(_are_wide(plain, r, amax, count) for amax in hypotheses.amaxes(plain.evidence, r))
        ]
        if found:
            return tuple(found), f"block scales come from the amaxes of {count} blocks, {count * size} elements"
    return None


def _are_wide(plain: Layout, r: Recipe, amax: np.ndarray | None, count: int) -> bool:
    """Return whether the block scales of a sample come from the amaxes of ``count`` neighboring blocks."""
    rows, _ = hypotheses.sample_of(plain.shape, plain.recipe)
    stored = _part(plain.evidence.layer, plain.evidence.x, rows).scales
    x = np.array(plain.evidence.x[rows])
    blocks = x.reshape(len(rows), -1, count, plain.recipe.block_size)
    with np.errstate(invalid="ignore"):  # NaN of the source
        blocks[..., 0] = np.abs(x).reshape(len(rows), stored.shape[1] // count, -1).max(axis=-1)[..., None]
    raised = replace(plain, evidence=replace(plain.evidence, x=x, other=None))
    own = hypotheses.expected_parts(plain, rows, r, amax)[1]
    wide = hypotheses.expected_parts(raised, np.arange(len(rows)), r, amax)[1]
    differ, is_wide = own != wide, np.asarray(stored == wide)
    fits = differ.any() and ((stored == own) | is_wide).all()
    return bool(fits and np.mean(is_wide[differ]) >= _MOST_WIDE)


def unrounded_scales(plain: Layout) -> str | None:
    """Return the name of the fault if codes were computed with the block scales before they were rounded."""
    r, rows = plain.recipe, hypotheses.sample_of(plain.shape, plain.recipe)[0]
    if plain.mishaps or r.block_rows > 1:
        return None
    blocks = _blocks(plain.evidence.x[rows].astype(np.float32), r)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(r.element.max)
        codes = r.element.encode(np.nan_to_num(blocks / scale)).reshape(len(rows), -1)
    stored = plain.read(rows)
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


@ieee("identify")
def blocks_of_equal_error(hypothesis: Hypothesis) -> int | None:
    """Return in how many blocks the stored scale differs from the scale of a hypothesis, but gives an equal error."""
    if not hypothesis.recipe.search or hypothesis.mishaps:
        return None
    count, evidence = 0, hypothesis.layout.evidence
    for made in hypothesis.predictions():
        part = _part(evidence.layer, evidence.x, made.rows)
        other = part._replace(codes=made.codes, scales=np.asarray(made.scales).view(np.uint8))
        differ = other.scales != part.scales
        same_values = np.asarray(_blocks(other.values == part.values, hypothesis.recipe).all(axis=-1))
        a, b = part.errors[differ], other.errors[differ]
        if not same_values[~differ].all() or (np.abs(a - b) > _TIE * np.maximum(a, b)).any():
            return None
        count += int(np.count_nonzero(differ))
    return count


@ieee("identify")
def is_four_over_six(evidence: LayerEvidence) -> bool:
    """Return whether every block scale is computed from the block's amax or 1.5 times the amax (four over six)."""
    tensor = _tensor_of(evidence, _STATIC)
    if tensor is None:
        return False
    counts = np.zeros(2, np.int64)
    good = total = 0
    for part in _parts(evidence.layer, evidence.x):
        tried = [_code(part.amaxes * np.float32(factor), tensor, _STATIC, evidence) for factor in (1, 1.5)]
        is_one = [part.scales == scales for scales in tried]
        if not (is_one[0] | is_one[1]).all():
            return False
        best = np.minimum(*(part.with_scales(scales).errors for scales in tried))
        good += int(np.count_nonzero(part.errors <= best * (1 + _TIE)))
        counts += [int(np.count_nonzero(one & ~other)) for one, other in (is_one, is_one[::-1])]
        total += part.scales.size
    return bool(counts.all()) and good >= _CHOSEN * total


@ieee("identify")
def is_weighted_search(evidence: LayerEvidence) -> bool:
    """Return whether auto-round's search with an importance matrix may have chosen the block scales."""
    # Every block scale must be one that auto-round tries.
    # In a sample, at least a quarter of the block scales must have the smallest error without weights. (Weights make
    # other scales better in many blocks, but not in all.) Return False if the layer is not NVFP4 with one tensor scale
    # that follows from a candidate amax.
    tensor = _tensor_of(evidence, _AUTO_ROUND)
    if tensor is None:
        return False

    def tried(part: _Part) -> Iterator[npt.NDArray[np.uint8]]:
        factors = FACTORS[_AUTO_ROUND.search]
        return (_code(part.amaxes * np.float32(factor), tensor, _AUTO_ROUND, evidence) for factor in factors)

    for part in _parts(evidence.layer, evidence.x):
        if not reduce(np.logical_or, (part.scales == scales for scales in tried(part))).all():
            return False
    sample = _sample(evidence)
    least = reduce(np.minimum, (sample.with_scales(scales).errors for scales in tried(sample)))
    return float(np.mean(sample.errors <= least * (1 + _TIE))) >= _LEAST


@ieee("identify")
def is_rounded_near(plain: Layout) -> bool:
    """Return whether the codes of a layer look as if auto-round had tuned their rounding, judged by a sample."""
    layer, element = plain.evidence.layer, plain.recipe.element
    usable = not plain.mishaps and layer.in_order(plain.evidence.x) and layer.has_usable_scale
    if not usable or element.bits != _STATIC.element.bits:
        return False
    sample = _sample(plain.evidence)
    factor = sample.factor
    kept = (factor > 0) & np.isfinite(sample.x)
    with np.errstate(all="ignore"):
        quotient, codes = ((part / factor)[kept] for part in (sample.x, sample.values))
    if not codes.size:
        return False
    low, near, high = (element.values[_nearest(quotient + shift, element)] for shift in (-0.5, 0, 0.5))
    within, nearest = np.mean((low <= codes) & (codes <= high)), np.mean(near == codes)
    return bool(within >= _WITHIN and nearest >= _NEAREST)


def _nearest(quotient: npt.NDArray[np.float64], element: ElementFormat) -> np.ndarray:
    """Return the code whose value is nearest to each quotient."""
    return element.encode(np.clip(quotient, -element.max, element.max).astype(np.float32))


def _tensor_of(evidence: LayerEvidence, r: Recipe) -> TensorScale | None:
    """Return the tensor scale that a recipe computes from one of the layer's candidate amaxes."""
    stored, own = evidence.layer.tensor_scale, evidence.layer.recipe
    parts = own.element, own.scale, own.block_size
    is_nvfp4 = parts == (_STATIC.element, _STATIC.scale, _STATIC.block_size)
    if stored is None or not is_nvfp4 or np.ndim(stored):
        return None
    found = (
        tensor_scale(np.asarray(amax), r, evidence.x.dtype)
        for amax in hypotheses.amaxes(evidence, r)
        if amax is not None
    )
    near = (one for one in found if abs(one.decode - stored) <= 2 * np.spacing(np.float32(stored)))
    return next(near, None)


def _code(amax: np.ndarray, tensor: TensorScale, r: Recipe, evidence: LayerEvidence) -> npt.NDArray[np.uint8]:
    """Return the scale codes that a recipe computes from block amaxes."""
    rule = BLOCK_RULES[r.block_rule or ""]
    return np.asarray(rule.code(amax, tensor.columns(r, evidence.x.shape[1]), r, evidence.x.dtype)).view(np.uint8)


MAX_ROWS = 512  # the largest number of rows from which factors are estimated
MIN_ROWS = 32  # layers with fewer rows are not examined
GAIN_DB = 0.5  # factors per column must improve the signal-to-noise ratio by this, compared with one common factor
MIN_DB = 12.0  # signal-to-noise ratio that the layer must have with factors
# Recipes whose ids end in one of these are tried, because their tools can scale weights per column.
PRODUCERS = ("-compressed-tensors", "-modelopt")
STEPS = 12  # the number of bfloat16 numbers that are tried on each side of an estimate


class ScaledRows(NamedTuple):
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
    q = Quantized(np.ascontiguousarray(layer.codes[:rows]), scales, scale, None, part.shape, x.dtype, 1, r)
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
    ways = ((np.multiply, near), (np.divide, inverse), (np.multiply, [np.float32(1) / f for f in inverse]))
    own, seen = found.q.recipe, set()
    for r in candidates_of(own):  # one for each rule of block scales
        fits = r.tensor_scaling == own.tensor_scaling and r.block_rows == 1 and r.id.endswith(PRODUCERS)
        if not fits or r.block_rule in seen:
            continue
        seen.add(r.block_rule)
        yield from (_chosen(found, r, operation, factors) for operation, factors in ways)


def _neighbors(factors: np.ndarray) -> list[np.ndarray]:
    """Return 25 arrays of bfloat16 numbers near the given positive factors, as float32, the nearest first."""
    bits = factors.astype(ml_dtypes.bfloat16).view(np.int16)
    steps = sorted(range(-STEPS, STEPS + 1), key=abs)
    return [(bits + np.int16(step)).view(ml_dtypes.bfloat16).astype(np.float32) for step in steps]


def _chosen(found: ScaledRows, r: Recipe, operation: np.ufunc, candidates: list[np.ndarray]) -> Scaling:
    """Return a function that scales each column of a matrix (N, K) by the candidate factor that fits the column best:
    in float32, rounded to the dtype of the matrix.
    """

    def scaled(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
        return operation(x.astype(np.float32), factors).astype(x.dtype)

    wrong = np.stack([_wrong(found, r, scaled(found.x, factors)) for factors in candidates])
    best = np.stack(candidates)[np.argmin(wrong, axis=0), np.arange(found.x.shape[1])]
    return lambda x: scaled(x, best)


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


class Fit(NamedTuple):
    """A measure of how well the codes of a layer fit its source, given the stored scales.

    far: the number of codes that differ from the code of their source value by more than ``steps`` representable values
        (see fit_of). Codes whose stored scale is 0 are not counted.
    has_signal: True if the signal-to-noise ratio is at least 12 dB, so that the layer resembles its source.
    """

    far: int = 0
    has_signal: bool = False

    @property
    def is_sound(self) -> bool:
        """True if no code is far from its source value, and the layer resembles its source."""
        return self.far == 0 and self.has_signal


@ieee("identify")
def fit_of(
    layer: StoredLayer,
    x: npt.NDArray[np.generic],
    columns: npt.NDArray[np.float32] | None = None,
    rows: bool = False,
    steps: int = 1,
) -> Fit:
    """Measure how well the codes of a layer fit its source with the stored scales; Fit() if they cannot be compared."""
    if not _is_comparable(layer, x):
        return Fit()
    element, far, signal, noise = layer.recipe.element, 0, 0.0, 0.0
    for part in _parts(layer, x):
        wanted, factor = part.x * (1.0 if columns is None else columns.astype(np.float64)), part.factor
        with np.errstate(all="ignore"):
            values = part.values
            if rows:
                sums = (np.sum(a * wanted, axis=1, keepdims=True) for a in (values, wanted))
                wanted = wanted * np.nan_to_num(np.divide(*sums), nan=1.0)
            apart = _steps(part.codes, wanted / factor, element) > steps
            far += int(np.count_nonzero(apart & (factor != 0)))
            signal += float(np.sum(wanted**2))
            noise += float(np.sum((wanted - values) ** 2))
    return Fit(far, sqnr_db(signal, noise) >= LEAST_DB)


_PROBED = 1 << 14  # about as many elements are compared first


@ieee("identify")
def is_decoded(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the source already holds the values that a layer decodes to."""
    if not _is_comparable(layer, x):
        return False
    probe = islice(hypotheses.chunks(x.shape, layer.recipe, _PROBED), 1)
    parts = chain((_part(layer, x, rows) for rows in probe), _parts(layer, x))
    return all(are_equal(part.values, part.x) for part in parts) and bool(x.any())


class Likeness(NamedTuple):
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
    def is_of_another_version(self) -> bool:
        """True if the layer was probably made from another version of its source, such as a fine-tuned one."""
        return is_like(self.correlation, self.gain) and (self.far <= _LUCK or self.equal < _MANY_EQUAL)


def is_like(correlation: float, gain: float) -> bool:
    """Return whether two versions of a layer may have this correlation and gain.

    If scales are wrong, the gain differs from 1 by more than the differences of two versions explain.
    """
    return correlation >= LIKE and abs(gain - 1) <= MAX_GAIN + 1.2 * (1 - correlation**2)


LIKE = 0.8  # least correlation of two versions of a layer; equal signs alone give 0.64
MAX_GAIN = 0.03  # largest difference from 1 of the gain of a version with correlation 1
NEGLIGIBLE = 1e-4  # share of codes that may be further than one step away; damage moves more
_MANY_EQUAL = 0.7  # least share of equal codes if bytes are damaged
_MOST_ROWS = 1024


@ieee("identify")
def likeness_of(layer: StoredLayer, x: npt.NDArray[np.generic]) -> Likeness | None:
    """Compare the decoded values of a layer with its source."""
    if not _is_comparable(layer, x):
        return None
    rows = np.unique(np.linspace(0, max(len(x) - 1, 0), min(len(x), _MOST_ROWS)).astype(np.int64))
    sums, equal, far, total = np.zeros(5), 0, 0, 0
    for chosen in hypotheses.chunks((len(rows), x.shape[1]), layer.recipe):
        part = _part(layer, x, rows[chosen])
        with np.errstate(all="ignore"):
            values, wanted = part.values, part.x
            steps = _steps(part.codes, wanted / part.factor, layer.recipe.element)
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


def _is_comparable(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the codes of a layer can be decoded with its stored scales, row by row."""
    in_order = layer.shape == x.shape and layer.in_order(x) and layer.recipe.block_rows == 1
    return layer.recipe.scale is not None and layer.has_usable_scale and in_order


@ieee("identify")
def is_gptq(layer: StoredLayer, x: npt.NDArray[np.generic]) -> bool:
    """Return whether the codes of a layer look like GPTQ's."""
    # The layer must be one that fit_of can compare.
    wrong, element = np.zeros(x.shape[1], np.int64), layer.recipe.element
    for part in _parts(layer, x):
        factor = part.factor
        with np.errstate(all="ignore"):
            quotient = np.clip(part.x / factor, -element.max, element.max)
        differ = [_steps(part.codes, quotient * error, element) != 0 for error in (1 - _BF16, 1 + _BF16)]
        wrong += np.count_nonzero(differ[0] & differ[1] & (factor != 0), axis=0)
    expected = x.shape[1] * (1 - wrong.mean() / len(x)) ** len(x)
    return 0 < np.count_nonzero(wrong == 0) <= max(4, x.shape[1] // 20) and bool(expected <= _LUCK)


def _steps(codes: npt.NDArray[np.uint8], quotient: npt.NDArray[np.float64], element: ElementFormat) -> np.ndarray:
    """Return how many representable values each code is away from the code that is nearest to its quotient."""
    # Equal values, such as zeros of both signs, have equal ranks.
    rank = np.unique(element.values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.abs(rank[codes] - rank[_nearest(quotient, element)])
