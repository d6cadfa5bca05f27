"""Compare hypotheses about a stored layer with its bytes. A hypothesis says which recipe made the layer from its source
(the original weight), and which mishaps (faults such as swapped nibbles) changed it afterwards: a layout (a way to read
the codes and an order of rows), an order of codes within bytes, an order of block scales, a recipe and an amax. It
predicts the codes, block scales and tensor scale of the file, which are compared in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from math import lcm
from typing import NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.convert.rows import rescaled
from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, Reading, StoredLayer, code_orders
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.formats import E8M0, FLT_MIN
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of, candidates_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.tensor_rules import tensor_scale

CHUNK = 1 << 20  # elements of a layer that are compared at a time
# An amax that follows from the stored tensor scale is tried if its ratio to the layer's own amax lies in this range.
# For layers that share a tensor scale, the ratio is at most about 10.
AMAX_RATIO_RANGE = (2.0**-6, 2.0**10)


@dataclass(frozen=True, eq=False)
class LayerEvidence:
    """A stored layer, its source, and further facts that help to explain the layer.

    layer: the layer as its file stores it.
    x: the source (the original weight), of shape (N, K).
    other: the source of the other half, if the layer is half of a gated pair (gate and up); otherwise None.
    second: True if the layer is the second half (up).
    heads: possible numbers of attention heads if the layer is q or k; empty otherwise.
    amaxes: candidate tensor amaxes; the layer's own amax comes first.
    recipes: the recipes that may have made the layer.
    """

    layer: StoredLayer
    x: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[np.float32, ...] = ()
    recipes: tuple[Recipe, ...] = ()

    @property
    def has_pair(self) -> bool:
        """True if the source of the other half is known and has the shape of the layer's own."""
        return self.other is not None and self.other.shape == self.x.shape

    def values(self, index: np.ndarray, columns: slice, turned: bool) -> np.ndarray:
        """Return the rows ``index`` of the source, restricted to ``columns``."""
        if turned:
            return np.ascontiguousarray(self.x[columns][:, index].T)
        in_own_half = index < len(self.x)
        if self.other is None or in_own_half.all():
            return np.ascontiguousarray(self.x[index, columns])
        values = np.array(self.x[np.where(in_own_half, index, 0), columns])
        values[~in_own_half] = self.other[index[~in_own_half] - len(self.x), columns]
        return values


@dataclass(frozen=True, eq=False)
class Layout:
    """A way to read the codes of a layer, combined with an order of its rows.

    reading: the way to read the codes.
    order: the source row from which each stored row was made.
    shape: the shape of the matrix that is read, in elements.
    moved_after_quantizing: True if rows were moved after they were quantized, False if before. This matters only if
        blocks span several rows.
    """

    evidence: LayerEvidence
    reading: Reading
    order: CorruptedRows
    shape: tuple[int, int]
    moved_after_quantizing: bool = False

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The names of the mishaps (faults) that this layout undoes: in the codes, then in the order of rows."""
        return tuple(filter(None, (self.reading.mishap, self.order.mishap)))

    @property
    def recipe(self) -> Recipe:
        """Any recipe of the layer's format."""
        return self.evidence.layer.recipe

    @property
    def scales_shape(self) -> tuple[int, int]:
        """The shape of the block scales in linear order."""
        return self.shape[0], self.shape[1] // self.recipe.block_size

    def read(self, rows: np.ndarray, columns: slice | None = None) -> np.ndarray:
        """Return the codes of some rows, one per byte; of all columns by default."""
        return self.reading.read(self.evidence.layer, rows, columns or slice(0, self.shape[1]))

    def values(self, index: np.ndarray, columns: slice | None = None) -> np.ndarray:
        """Return the source rows ``index``; all columns by default."""
        return self.evidence.values(index, columns or slice(0, self.shape[1]), self.reading.source_transposed)

    def tensor_mishap(self, scale: np.ndarray | None, amax: np.ndarray | None, rows: np.ndarray) -> str | None:
        """Return the name of the mishap (fault) of the stored tensor scale of some rows, None if the scale is right."""
        stored = self.evidence.layer.tensor_scale
        part = stored if stored is None or not np.ndim(stored) else stored[rows]
        return corruptions.tensor_mishap(part, scale, amax)


class MadeBy(NamedTuple):
    """The recipes and mishaps that gave the bytes of a layer, which are tried first on the next layer.

    recipes: the recipes that reproduce every byte; for an unexplained layer, those that explain a part of it.
    rows, codes, scales, tensor: the mishaps of the layout, of the order of codes, of block scales and of the tensor
        scale (without numbers).
    moved: True if rows were moved after they were quantized.
    dtype: the dtype to which the source was converted; "" if it was not.
    rescaled: True if block scales were rescaled to the stored tensor scale.
    """

    recipes: tuple[Recipe, ...]
    rows: tuple[str, ...] = ()
    moved: bool = False
    codes: str | None = None
    scales: str | None = None
    tensor: str | None = None
    dtype: str = ""
    rescaled: bool = False


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One hypothesis about how a stored layer was made.

    layout: how the codes are read, and in which row order.
    codes: the order of codes within bytes.
    scales: the order of block scales: the position (from 0) of this order among those that stored_scales yields.
    recipe: the recipe that made the layer.
    amax: the tensor amax that the recipe was given; None if it needs none.
    scale_mishap: what went wrong with the block scales, by name; None if nothing.
    tensor_mishap: what went wrong with the tensor scale, by name; None if nothing.
    rescaled_from: the tensor scale that the recipe gave, if block scales were then rescaled to the stored one.
    """

    layout: Layout
    codes: CodeOrder
    scales: int
    recipe: Recipe
    amax: np.ndarray | None
    scale_mishap: str | None = None
    tensor_mishap: str | None = None
    rescaled_from: np.float32 | None = None

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The names of all mishaps (faults) of this hypothesis, in the order in which they are undone; () if none."""
        return (*self.layout.mishaps, *filter(None, (self.codes.mishap, self.scale_mishap, self.tensor_mishap)))

    @property
    def weight(self) -> int:
        """The number of mishaps (faults) in this hypothesis. A tensor scale that is wrong for no known reason has 2."""
        return len(self.mishaps) + ((self.tensor_mishap or "").startswith(corruptions.WRONG_SCALE))

    @property
    def how(self) -> MadeBy:
        """The recipe and the mishaps of this hypothesis."""
        moved, codes = self.layout.moved_after_quantizing, self.codes.mishap
        mishaps = codes, self.scale_mishap, self.tensor_mishap
        return MadeBy((self.recipe,), self.layout.mishaps, moved, *mishaps, rescaled=self.rescaled_from is not None)

    def predictions(self, parts: Iterable[np.ndarray] | None = None) -> Iterator[_Prediction]:
        """Yield what the hypothesis predicts for each part (the numbers of some rows; all rows by default)."""
        layout = self.layout
        # If rows were moved, the whole blocks of their source rows are quantized.
        size = CHUNK // (self.recipe.block_rows if layout.moved_after_quantizing else 1)
        for rows in chunks(layout.shape, self.recipe, size) if parts is None else parts:
            codes, scales, scale = expected_parts(layout, rows, self.recipe, self.amax)
            if self.rescaled_from is None:
                agrees = self.tensor_mishap is not None or layout.tensor_mishap(scale, self.amax, rows) is None
            else:
                assert self.recipe.scale is not None
                stored, agrees = layout.evidence.layer.tensor_scale, True
                scales = rescaled(self.recipe.scale, scales, self.rescaled_from, stored)[0]
            yield _Prediction(rows, codes, scales, agrees, self.codes.undo(layout.read(rows)))


class _Prediction(NamedTuple):
    """The codes and block scales that a hypothesis predicts for some rows, beside the stored codes."""

    rows: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    tensor_scale_agrees: bool
    stored: np.ndarray


@dataclass
class MatchCount:
    """The numbers of stored bytes of a layer that a hypothesis predicts correctly.

    codes, scales: the numbers of bytes of codes and of block scales that equal the prediction.
    total: the number of bytes of codes and block scales that were compared.
    tensor_scales_agree: True if all tensor scales agree with the hypothesis.
    first: the place and the values of the first byte that differs, as text; "" if none does.
    """

    codes: int = 0
    scales: int = 0
    total: int = 0
    tensor_scales_agree: bool = True
    first: str = ""

    @property
    def all_bytes(self) -> bool:
        """True if every compared byte of codes and block scales equals the prediction, or if no byte was compared."""
        return self.codes + self.scales == self.total

    @property
    def share(self) -> float:
        """The share of the compared bytes that equal the prediction, from 0 to 1; 0 if none were compared."""
        return (self.codes + self.scales) / max(self.total, 1)


# ---- compute the parts that a hypothesis predicts


def expected_parts(
    layout: Layout, rows: np.ndarray, r: Recipe, amax: np.ndarray | None, columns: slice | None = None
) -> tuple:
    """Quantize the source of some stored rows, and return the codes, block scales and tensor scale they should have."""
    index = layout.order.source[rows]
    wanted = _whole_blocks(index, r.block_rows, len(layout.evidence.x)) if layout.moved_after_quantizing else index
    if r.tensor_scaling == "row":
        amax = _row_amaxes(layout, wanted)
    with np.errstate(all="ignore"):
        q = quantize(layout.values(wanted, columns), r, tensor_amax=amax)
    codes, scales, scale = unpacked(q.packed, r.element.packing), q.block_scale, q.tensor_scale
    if not layout.moved_after_quantizing:
        return codes, scales, scale
    place = np.searchsorted(wanted, index)
    return codes[place], scales[place], scale[place] if np.ndim(scale) else scale


def _whole_blocks(index: np.ndarray, height: int, rows: int) -> np.ndarray:
    """Return the numbers of all source rows that are in a block with one of the rows ``index``, in ascending order."""
    start = index // rows * rows + index % rows // height * height
    every = (np.unique(start)[:, None] + np.arange(height)).ravel()
    return every[every < -(-(index.max(initial=0) + 1) // rows) * rows]


def _row_amaxes(layout: Layout, index: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each source row in ``index``, ignoring NaN, as float32 (n,)."""
    step = max(CHUNK // max(layout.shape[1], 1), 1)
    parts = (layout.values(index[start : start + step]) for start in range(0, len(index), step))
    return np.concatenate([np.zeros(0, np.float32), *(_largest(part, axis=1) for part in parts)])


def _largest(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the largest magnitudes of an array along ``axis`` as float32; over all elements if ``axis`` is None."""
    return np.asarray(np.fmax.reduce(np.abs(values), axis=axis, initial=0), np.float32)


def own_amax(x: np.ndarray) -> np.float32:
    """Return the largest magnitude of a matrix as float32, ignoring NaN; 0 if the matrix is empty or has only NaN."""
    if x.size and not (found := amax_and_nonfinite(x))[1]:
        return found[0]
    step = max(CHUNK // max(x.shape[1], 1), 1)
    return np.float32(max((float(_largest(x[i : i + step])) for i in range(0, len(x), step)), default=0.0))


def amaxes(evidence: LayerEvidence, r: Recipe) -> Sequence[np.ndarray | None]:
    """Return the tensor amaxes with which a recipe may have made the layer."""
    if r.tensor_rule is None or r.tensor_scaling != "tensor":
        return [None]
    # The amax of a group is at least the amax of each layer in it, so 0 is possible only if the layer's own amax is 0.
    own = evidence.amaxes[0]
    candidates = [np.asarray(a) for a in dict.fromkeys(evidence.amaxes) if a != 0 or own == 0]
    stored, dtype = evidence.layer.tensor_scale, evidence.x.dtype
    if stored is not None:
        with np.errstate(all="ignore"):
            fitting = [a for a in candidates if corruptions.within_ulps(stored, tensor_scale(a, r, dtype).decode)]
        candidates = fitting or [*candidates, *_implied(stored, candidates[0], r, dtype)]
    if len(candidates) == 1:
        return candidates
    return list({tensor_scale(a, r, dtype).encode.tobytes(): a for a in reversed(candidates)}.values())[::-1]


def _implied(stored: np.ndarray, own: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the amaxes that follow from a stored tensor scale if it is right, is inverted, or is the amax itself."""
    scale = np.asarray(stored).reshape(-1)[0]
    if not (np.asarray(stored) == scale).all() or not 0 < scale < np.inf:
        return
    with np.errstate(all="ignore"):
        guesses = [*amaxes_of(scale, r, dtype), *amaxes_of(np.float32(1) / scale, r, dtype), np.asarray(scale)]
        yield from (a for a in guesses if AMAX_RATIO_RANGE[0] * own <= a <= AMAX_RATIO_RANGE[1] * own)


NEGATIVE_SCALES = "block scales are negative"


def stored_scales(layout: Layout) -> Iterator[corruptions.Scales]:
    """Yield the block scales of a layer in linear order: as declared, then with each possible fault undone."""
    layer = layout.evidence.layer
    for found in corruptions.scale_orders(layer.block_scale, layer.scale_layout, layout.scales_shape):
        yield found
        sign = np.uint8(layer.recipe.scale.sign_bit if layer.recipe.scale is not None else 0)
        if (found.values & sign).any():
            yield found._replace(mishap=NEGATIVE_SCALES, values=found.values & ~sign)
        if found.mishap is None and layer.recipe.scale == E8M0:
            one = np.uint8(1)
            yield found._replace(mishap="block scales are twice as large", values=found.values - one)
            yield found._replace(mishap="block scales are half as large", values=found.values + one)
        if layer.some_rows:
            return


# ---- compare all rows of a layer


def chunks(shape: tuple[int, ...], r: Recipe, elements: int = CHUNK) -> Iterator[np.ndarray]:
    """Yield the numbers of all stored rows in order, as arrays of consecutive numbers, int64."""
    height = lcm(32, r.block_rows)
    step = max(elements // max(shape[1], 1) // height, 1) * height
    for start in range(0, shape[0], step):
        yield np.arange(start, min(start + step, shape[0]))


def count_matches(hypothesis: Hypothesis, early: bool = False) -> MatchCount:
    """Count the stored bytes of a layer that a hypothesis predicts correctly, until the first fault if ``early``."""
    _, values, present = next(islice(stored_scales(hypothesis.layout), hypothesis.scales, None))
    tally = MatchCount()
    for found in hypothesis.predictions():
        same = found.codes == found.stored
        if hypothesis.recipe.element.packing.codes == 2:
            same = same.reshape(-1).view(np.uint16) == 0x0101  # both codes of a byte
        mask = np.ones(found.scales.shape, bool) if present is None else present[found.rows].astype(bool)
        tally.codes += int(np.count_nonzero(same))
        tally.scales += int(np.count_nonzero((found.scales == values[found.rows]) & mask))
        tally.total += same.size + int(np.count_nonzero(mask))
        tally.tensor_scales_agree &= found.tensor_scale_agrees
        if not tally.first and not tally.all_bytes:
            tally.first = _difference(hypothesis.recipe, found, np.where(mask, values[found.rows], found.scales))
        if early and not tally.all_bytes:
            break
    return tally


_MOST_RANGES = 4  # ranges of adjacent rows that were changed together
_LEAST_EQUAL = 0.25  # least share of rows that a recipe made, if the others were changed


class ChangedRows(NamedTuple):
    """The rows of a layer that a hypothesis does not predict, which form a few ranges.

    place: the ranges as text, such as "rows 0 to 63".
    number: the number of rows.
    is_zero: True if all codes of these rows are zero.
    tally: the bytes that the hypothesis predicts.
    """

    place: str
    number: int
    is_zero: bool
    tally: MatchCount


def changed_ranges(hypothesis: Hypothesis) -> ChangedRows | None:
    """Return the rows that a hypothesis does not predict, if they are at most 4 ranges; None otherwise."""
    _, values, present = next(islice(stored_scales(hypothesis.layout), hypothesis.scales, None))
    if present is not None:
        return None
    element, rows, wrong, blank = hypothesis.recipe.element, hypothesis.layout.shape[0], [], []
    for found in hypothesis.predictions():
        differ = (found.codes != found.stored).any(axis=1) | (found.scales != values[found.rows]).any(axis=1)
        starts = np.count_nonzero(np.diff(differ, prepend=False) & differ)
        if not found.tensor_scale_agrees or starts > _MOST_RANGES:
            return None
        wrong.append(differ)
        blank.append(~(element.values[found.stored] != 0).any(axis=1))
    changed, zero = np.concatenate(wrong), np.concatenate(blank)
    first = np.flatnonzero(np.diff(changed, prepend=False) & changed)
    last = np.flatnonzero(np.diff(changed, append=False) & changed)
    if not 0 < len(first) <= _MOST_RANGES or np.count_nonzero(~changed & ~zero) < _LEAST_EQUAL * rows:
        return None
    ranges = (f"{a} to {b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True))
    count = int(np.count_nonzero(changed))
    place = f"row{'s' * (count > 1)} {' and '.join(ranges)}"
    return ChangedRows(place, count, bool(zero[changed].all()), count_matches(hypothesis))


def _difference(r: Recipe, found: _Prediction, scales: np.ndarray) -> str:
    """Return the place and the values of the first code, otherwise the first block scale, that differs."""
    assert r.scale is not None
    part, have, want, width = "codes", found.stored, found.codes, 1
    if np.array_equal(have, want):
        part, have, want, width = "block scales", scales, found.scales, r.block_size
    i, j = divmod(int(np.argmax(have != want)), have.shape[1])
    sides = (side[i, j] if width == 1 else r.scale.values[side[i, j]] for side in (have, want))
    stored, expected = (f"{side:.9g}".replace("nan", "NaN") for side in sides)
    return f"{part}, row {found.rows[i]}, column {j * width}: {stored} in the file, {expected} expected"


SAMPLE = 1 << 16  # number of elements of a sample
SAMPLE_COLUMNS = 1024  # largest number of columns of a sample
SIGNS_AGREE = 0.99  # an order is selected if at least this share of nonzero codes has the sign of the source
# A hypothesis with one more mishap (fault) is preferred only if it reproduces at least this much more of the sample's
# bytes.
MISHAP_PENALTY = 0.05


@dataclass
class SampleVerdict:
    """The hypotheses that fit a sample of a layer.

    exact: the hypotheses that reproduce every byte of the sample.
    best: the hypotheses with the highest score, in the order in which they were added.
    score: the score of ``best``: the share of the sample's bytes that it gives, minus 0.05 per mishap.
    codes_only: the hypotheses that reproduce all codes of the sample, although no order of block scales fits.
    scales_only: the hypotheses without a mishap that reproduce all block scales of the sample and the tensor scale, but
        not all codes.
    """

    exact: list[Hypothesis] = field(default_factory=list)
    best: list[Hypothesis] = field(default_factory=list)
    score: float = -np.inf
    codes_only: list[Hypothesis] = field(default_factory=list)
    scales_only: list[Hypothesis] = field(default_factory=list)

    @property
    def nearest(self) -> Hypothesis | None:
        """The first hypothesis with the highest score; None before a hypothesis is added."""
        return self.best[0] if self.best else None


def sample_of(shape: tuple[int, int], r: Recipe) -> tuple[np.ndarray, slice]:
    """Return (row numbers, columns) of a sample of a layer: groups of whole blocks of rows, from the first to the last
    row.
    """
    height, width = lcm(32, *(c.block_rows for c in recipes_of(r))), lcm(64, r.block_size)
    columns = shape[1] if shape[1] <= max(SAMPLE_COLUMNS, width) else max(SAMPLE_COLUMNS // width, 1) * width
    groups = -(-shape[0] // height)
    count = min(max(SAMPLE // max(height * columns, 1), 2), groups)
    chosen = np.unique(np.linspace(0, max(groups - 1, 0), count).astype(np.int64))
    rows = (chosen[:, None] * height + np.arange(height)).ravel()
    return rows[rows < shape[0]], slice(0, columns)


def plain_layout(evidence: LayerEvidence) -> Layout | None:
    """Return the layout in which codes are read as declared and rows are in place; None if the shapes differ."""
    shape = evidence.x.shape
    if evidence.layer.shape != shape:
        return None
    rows = CorruptedRows(None, np.arange(shape[0]))
    return Layout(evidence, next(corruptions.readings(evidence.layer, shape)), rows, shape)


def layouts_of(evidence: LayerEvidence) -> Iterator[Layout]:
    """Yield a Layout for each way to read the codes that fits the source's shape, with each possible order of rows."""
    if evidence.layer.some_rows:
        yield from filter(None, [plain_layout(evidence)])
        return
    for reading in corruptions.readings(evidence.layer, evidence.x.shape):
        turned = reading.source_transposed
        shape = evidence.x.shape[::-1] if turned else evidence.x.shape
        if np.ndim(evidence.layer.tensor_scale) and len(evidence.layer.tensor_scale) != shape[0]:
            continue
        orders = corruptions.row_orders(shape[0], evidence.heads, evidence.has_pair, evidence.second)
        yield from (Layout(evidence, reading, rows, shape) for rows in (orders[:1] if turned else orders))


def sign_agreement(layout: Layout) -> list[tuple[CodeOrder, float]]:
    """Return, for each order of codes, the share of nonzero codes in a sample that have the sign of their source."""
    rows, columns = sample_of(layout.shape, layout.recipe)
    read, values = layout.read(rows, columns), layout.values(layout.order.source[rows], columns)
    sign, found = np.uint8(layout.recipe.element.sign_bit), []
    for order in code_orders(layout.recipe, read.shape[1]):
        codes = order.undo(read)
        counted = (codes & ~sign != 0) & ~np.isnan(values)
        wrong = ((codes & sign != 0) != np.signbit(values)) & counted
        found.append((order, 1 - int(np.count_nonzero(wrong)) / max(int(np.count_nonzero(counted)), 1)))
    return found


def try_layout(layout: Layout, orders: Iterable[CodeOrder], trial: SampleVerdict) -> None:
    """Compare a sample with every combination of recipe, amax, order of codes and order of block scales, in one
    layout.
    """
    evidence, own = layout.evidence, layout.recipe
    rows, columns = sample_of(layout.shape, own)
    read = layout.read(rows, columns)
    codes = [(order, order.undo(read)) for order in orders]
    blocks = slice(0, columns.stop // own.block_size)
    scales = []  # (name of the fault or None, scales of the sample; -1 where the file has none)
    for mishap, values, present in stored_scales(layout):
        part = values[rows, blocks].astype(np.int16)
        scales.append((mishap, part if present is None else np.where(present[rows, blocks], part, -1)))
    moved, count = layout.order.mishap is not None, len(evidence.x)
    for r in evidence.recipes or recipes_of(own):
        # The halves of a gated pair can be quantized as one stacked matrix only if no block of rows spans both.
        fits = not count % r.block_rows or (layout.order.source < count).all()
        variants = [layout]
        if moved and r.block_rows > 1 and fits:
            variants.append(replace(layout, moved_after_quantizing=True))
        for amax in amaxes(evidence, r):
            for variant in variants:
                made = expected_parts(variant, rows, r, amax, columns)
                tensor = variant.tensor_mishap(made[2], amax, rows)
                _compare(Hypothesis(variant, codes[0][0], 0, r, amax, None, tensor), made, codes, scales, trial)


@cache
def recipes_of(own: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes that may have made a layer: all recipes that have its format."""
    like = RECIPES["mxfp8-auto-round"]
    is_mxfp8 = (own.element, own.scale, own.block_size) == (like.element, like.scale, like.block_size)
    return (*candidates_of(own), *([replace(like, search="auto_round_powers")] if is_mxfp8 else []))


def _compare(hypothesis: Hypothesis, made: tuple, codes: list, scales: list, trial: SampleVerdict) -> None:
    """Compare what a hypothesis predicts for the sample with all orders of codes and of block scales."""
    size, weight = made[0].size, hypothesis.layout.recipe.element.packing.codes  # codes per byte
    in_scales = [(name, int(np.count_nonzero(made[1] == s)), int(np.count_nonzero(s >= 0))) for name, s in scales]
    for order, found in codes:
        equal = int(np.count_nonzero(made[0] == found))
        for number, (name, equal_scales, present) in enumerate(in_scales):
            one = replace(hypothesis, codes=order, scales=number, scale_mishap=name)
            if equal == size and equal_scales == present:
                trial.exact.append(one)
            elif equal_scales == present and not one.mishaps:
                trial.scales_only.append(one)
            share = (equal + equal_scales * weight) / max(size + present * weight, 1)
            score = share - MISHAP_PENALTY * len(one.mishaps)
            if score > trial.score:
                trial.best, trial.score = [], score
            if score == trial.score:
                trial.best.append(one)
        if equal == size and in_scales and all(equal_scales != present for _, equal_scales, present in in_scales):
            trial.codes_only.append(replace(hypothesis, codes=order))


@ieee("identify")
def exact_hypotheses(hypotheses: list[Hypothesis]) -> tuple[list[Hypothesis], MatchCount]:
    """Return (hypotheses that reproduce every byte of codes and block scales of the whole layer, their MatchCount)."""
    found: list[Hypothesis] = []
    tally = MatchCount()
    for hypothesis in sorted(hypotheses, key=lambda hypothesis: hypothesis.weight):
        if found and hypothesis.weight > found[0].weight:
            break
        counted = count_matches(hypothesis, early=True)
        if counted.all_bytes:
            wrong_scale = f"{corruptions.WRONG_SCALE} in some rows"
            found.append(hypothesis if counted.tensor_scales_agree else replace(hypothesis, tensor_mishap=wrong_scale))
            tally = counted
    fewest = min((hypothesis.weight for hypothesis in found), default=0)
    return [hypothesis for hypothesis in found if hypothesis.weight == fewest], tally


def rescaled_hypotheses(plain: Layout, recipes: Iterable[Recipe]) -> Iterator[Hypothesis]:
    """Yield the hypotheses that a layer was rescaled from a smaller tensor scale, and that fit its first rows.

    fp4kit reconcile rescales layers so, to give the parts of a fused layer one tensor scale.
    """
    evidence, order = plain.evidence, code_orders(plain.recipe, plain.shape[1])[0]
    stored = evidence.layer.tensor_scale
    if (
        stored is None
        or not evidence.layer.has_usable_scale
        or plain.mishaps
        or not evidence.layer.in_order(evidence.x)
    ):
        return
    sample = np.arange(min(max(SAMPLE // plain.shape[1] // 32, 1) * 32, plain.shape[0]))
    scales = next(stored_scales(plain)).values[sample]
    for r in (one for one in recipes if one.tensor_scaling == "tensor" and one.scale is not None):
        for amax in dict.fromkeys(evidence.amaxes):
            with np.errstate(all="ignore"):
                own = np.float32(tensor_scale(np.asarray(amax), r, evidence.x.dtype).decode)
                twice = np.float32(1) / (np.float32(1) / own)  # where a divisor is stored
            if not 0 < own < stored:
                continue
            for scale in dict.fromkeys((own, twice)):
                one = Hypothesis(plain, order, 0, r, np.asarray(amax), rescaled_from=scale)
                found = next(one.predictions([sample]))
                if np.array_equal(found.codes, found.stored) and np.array_equal(found.scales, scales):
                    yield one


MAX_ROWS = 1 << 15  # layers with more rows are not searched, because all pairs of rows are compared
MAX_BLOCKS = 1 << 18  # in layers with more blocks, blocks are searched within their rows only
SIGN_COLUMNS = 256  # number of columns whose signs identify a row
ROWS_PER_STEP = 64  # number of rows whose source rows are searched at a time
FIRST_PROBES = 8  # number of rows to try first; a source that is a different model is rejected after these
SIGNED_ZERO_WEIGHT = np.float32(2.0**-6)  # added with its sign to each decoded value, so that signs of zeros count


# ---- search for permuted rows


def permuted_rows(plain: Layout) -> Iterator[tuple[Layout, CodeOrder]]:
    """Yield (layout, order of codes) for each order of codes in bytes in which stored rows are permuted source rows."""
    rows, height = plain.shape
    columns = slice(0, min(height, SIGN_COLUMNS))
    if not 1 < rows <= MAX_ROWS or not height:
        return
    sources = np.arange(2 * rows if plain.evidence.has_pair else rows)
    values = np.nan_to_num(plain.evidence.values(sources, columns, False).astype(np.float32))
    values /= np.maximum(np.abs(values).max(axis=1, keepdims=True, initial=0), FLT_MIN)
    for order in code_orders(plain.recipe, columns.stop):
        probes = (np.arange(0, rows, -(-rows // count)) for count in (FIRST_PROBES, ROWS_PER_STEP))
        if any((_nearest_sources(plain, order, probe, values) == -1).any() for probe in probes):
            continue
        steps = (np.arange(i, min(i + ROWS_PER_STEP, rows)) for i in range(0, rows, ROWS_PER_STEP))
        nearest = np.concatenate([_nearest_sources(plain, order, part, values) for part in steps])
        index = _assign_zero_rows(nearest, rows)
        if index is not None and not np.array_equal(index, np.arange(rows)):
            yield replace(plain, order=CorruptedRows(corruptions.name_of_rows(index), index)), order


def _nearest_sources(plain: Layout, order: CodeOrder, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, for each stored row, the number of the most similar source row among those whose signs agree, int64.
    It is -1 if there is none, and -2 - number for rows of zeros.
    """
    codes = order.undo(plain.read(rows, slice(0, values.shape[1])))
    decoded = np.nan_to_num(plain.recipe.element.values[codes], posinf=0, neginf=0)
    signs = np.sign(decoded)
    decoded += np.copysign(SIGNED_ZERO_WEIGHT, decoded)
    # Number of signs that agree, minus number of signs that differ.
    agree = signs @ np.where(np.signbit(values), np.float32(-1), np.float32(1)).T
    size = np.count_nonzero(signs, axis=1)
    likeness = decoded @ (values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), FLT_MIN)).T
    best = np.where(agree >= (2 * SIGNS_AGREE - 1) * size[:, None], likeness, -np.inf)
    nearest = best.argmax(axis=1)
    return np.where(size == 0, -2 - nearest, np.where(best.max(axis=1) > -np.inf, nearest, -1))


def _assign_zero_rows(index: np.ndarray, rows: int) -> np.ndarray | None:
    """Assign a source row to each all-zero stored row: the most similar one if it is unused, else the first unused
    one.
    """
    assigned = index[index >= 0]
    if (index == -1).any() or len(np.unique(assigned)) != len(assigned):
        return None
    unused, index = [*np.setdiff1d(np.arange(rows), assigned)], index.copy()
    for row in np.flatnonzero(index < -1):
        if not unused:
            return None
        nearest = -2 - index[row]
        index[row] = nearest if nearest in unused else unused[0]
        unused.remove(index[row])
    return index


# ---- search for permuted block scales and blocks


def permuted_scales(hypothesis: Hypothesis) -> str | None:
    """Return the name of the fault if the stored block scales are a permutation of those that a hypothesis predicts."""
    stored = _linear_scales(hypothesis.layout)
    if stored is None:
        return None
    surplus, in_rows = np.zeros(256, np.int64), True
    for found in hypothesis.predictions():
        if not np.array_equal(found.codes, found.stored) or not found.tensor_scale_agrees:
            return None
        scales, own = found.scales, stored[found.rows]
        surplus += np.bincount(scales.ravel(), minlength=256) - np.bincount(own.ravel(), minlength=256)
        in_rows = in_rows and np.array_equal(np.sort(scales, axis=1), np.sort(own, axis=1))
    if surplus.any():
        return None
    return f"block scales are those of other blocks{' of the same row' if in_rows else ''}"


def has_scales_in_place(hypothesis: Hypothesis) -> bool:
    """Return whether a hypothesis predicts all codes of permuted rows, if their block scales were not moved."""
    layout, stored = hypothesis.layout, _linear_scales(hypothesis.layout)
    plain = replace(layout, order=CorruptedRows(None, np.arange(layout.shape[0])))
    pairs = zip(hypothesis.predictions(), replace(hypothesis, layout=plain).predictions(), strict=True)
    return stored is not None and all(
        np.array_equal(codes.codes, codes.stored) and np.array_equal(scales.scales, stored[scales.rows])
        for codes, scales in pairs
    )


def _linear_scales(layout: Layout) -> np.ndarray | None:
    """Return the stored block scales as (N, B), read in the declared layout."""
    layer = layout.evidence.layer
    first = next(corruptions.scale_orders(layer.block_scale, layer.scale_layout, layout.scales_shape), None)
    return None if first is None or first.mishap or first.present is not None else first.values


def permuted_blocks(plain: Layout) -> Iterator[tuple[Hypothesis, str]]:
    """Yield (hypothesis, name of the fault) for each recipe and amax whose blocks are the stored blocks, permuted."""
    scales = _linear_scales(plain)
    if scales is None or not scales.size:
        return
    right = CodeOrder(None, lambda codes: codes)
    count = min(max(SAMPLE // plain.shape[1], 1), plain.shape[0])
    sample = next(chunks(plain.shape, plain.recipe))[:count]
    for r in candidates_of(plain.recipe):
        for amax in amaxes(plain.evidence, r):
            tensor = plain.tensor_mishap(expected_parts(plain, sample, r, amax)[2], amax, sample)
            one = Hypothesis(plain, right, 0, r, amax, tensor_mishap=tensor)
            if _same_blocks(one, scales, [sample], True) and r.block_rows == 1:
                if _same_blocks(one, scales, chunks(plain.shape, r), True):
                    yield one, "blocks, codes and scales, are in other places of their rows"
            elif scales.size <= MAX_BLOCKS and plain.shape[0] * plain.shape[1] <= CHUNK * 8:
                if _same_blocks(one, scales, [np.arange(plain.shape[0])], False):
                    yield one, "blocks, codes and scales, are in other places"


def _same_blocks(hypothesis: Hypothesis, stored: np.ndarray, parts: Iterable[np.ndarray], in_rows: bool) -> bool:
    """Return whether the stored blocks (codes and scale) are a permutation of the blocks that a hypothesis predicts."""
    for found in hypothesis.predictions(parts):
        a, b = _hashes(found.codes, found.scales), _hashes(found.stored, stored[found.rows])
        if not in_rows:
            a, b = a.ravel(), b.ravel()
        if not found.tensor_scale_agrees or not np.array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1)):
            return False
    return True


def _hashes(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of every block, (n, B), so that blocks can be compared in any order."""
    blocks = codes.reshape(*scales.shape, -1)
    weights = np.random.default_rng(0).integers(1, 2**63, blocks.shape[-1] + 1, np.uint64) * np.uint64(2) + np.uint64(1)
    sums = scales * weights[-1]
    for j in range(blocks.shape[-1]):
        sums += blocks[..., j] * weights[j]
    return sums
