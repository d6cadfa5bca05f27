"""Compare hypotheses about a stored layer with its bytes. A hypothesis says which recipe made the layer from its source
(the original weight), and which mishaps (faults such as swapped nibbles) changed it afterwards. A layout is a way to
read the codes, combined with an order of the rows.

A hypothesis consists of:

- a way to read the codes
- an order of rows, an order of codes within bytes, and an order of block scales
- a recipe and an amax

A hypothesis predicts the codes, block scales and tensor scale of the file. They are compared with the stored parts in
chunks of rows.
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
from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import (
    CodeOrder,
    CorruptedRows,
    Reading,
    StoredLayer,
    code_orders,
    name_of_rows,
    scale_orders,
)
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.formats import E8M0, FLT_MIN
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of, candidates_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.tensor_rules import tensor_scale

RecipeWithAmax = tuple[Recipe, np.ndarray | None]  # a recipe, and the tensor amax to quantize with, or None
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
    rows: the source row from which each stored row was made.
    shape: the shape of the matrix that is read, in elements.
    moved_after_quantizing: True if rows were moved after they were quantized, False if before. This matters only if
        blocks span several rows.
    """

    reading: Reading
    rows: CorruptedRows
    shape: tuple[int, int]
    moved_after_quantizing: bool = False

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The names of the mishaps (faults) that this layout undoes: in the codes, then in the order of rows."""
        return tuple(filter(None, (self.reading.mishap, self.rows.mishap)))


class MadeBy(NamedTuple):
    """The recipes and mishaps that gave the bytes of a layer, which are tried first on the next layer.

    recipes: the recipes that reproduce every byte; for an unexplained layer, those that explain a part of it.
    rows, codes, scales, tensor: the mishaps of the layout, of the order of codes, of block scales and of the tensor
        scale (without numbers).
    moved: True if rows were moved after they were quantized.
    dtype: the dtype to which the source was converted; "" if it was not.
    """

    recipes: tuple[Recipe, ...]
    rows: tuple[str, ...] = ()
    moved: bool = False
    codes: str | None = None
    scales: str | None = None
    tensor: str | None = None
    dtype: str = ""


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
    """

    layout: Layout
    codes: CodeOrder
    scales: int
    recipe: Recipe
    amax: np.ndarray | None
    scale_mishap: str | None = None
    tensor_mishap: str | None = None

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The names of all mishaps (faults) of this hypothesis, in the order in which they are undone; () if none."""
        return (*self.layout.mishaps, *filter(None, (self.codes.mishap, self.scale_mishap, self.tensor_mishap)))

    @property
    def how(self) -> MadeBy:
        """The recipe and the mishaps of this hypothesis."""
        moved, codes = self.layout.moved_after_quantizing, self.codes.mishap
        return MadeBy((self.recipe,), self.layout.mishaps, moved, codes, self.scale_mishap, self.tensor_mishap)

    @property
    def weight(self) -> int:
        """The number of mishaps (faults) in this hypothesis."""
        return len(self.mishaps) + ((self.tensor_mishap or "").startswith(corruptions.WRONG_SCALE))


@dataclass
class MatchCount:
    """The numbers of stored bytes of a layer that a hypothesis predicts correctly.

    codes, scales: the numbers of bytes of codes and of block scales that equal the prediction.
    total: the number of bytes of codes and block scales that were compared.
    tensor_scales_agree: True if all tensor scales agree with the hypothesis.
    """

    codes: int = 0
    scales: int = 0
    total: int = 0
    tensor_scales_agree: bool = True

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
    evidence: LayerEvidence, layout: Layout, rows: np.ndarray, columns: slice, recipe_amax: RecipeWithAmax
) -> tuple:
    """Quantize the source of some stored rows, and return the parts that these rows should have."""
    r, amax = recipe_amax
    index = layout.rows.source[rows]
    wanted = _whole_blocks(index, r.block_rows, len(evidence.x)) if layout.moved_after_quantizing else index
    if r.tensor_scaling == "row":
        amax = row_amaxes(evidence, layout, wanted)
    values = evidence.values(wanted, columns, layout.reading.source_transposed)
    with np.errstate(all="ignore"):
        q = quantize(values, r, tensor_amax=amax)
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


def row_amaxes(evidence: LayerEvidence, layout: Layout, index: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each source row in ``index``, ignoring NaN, as float32 (n,)."""
    found = np.zeros(len(index), np.float32)
    step = max(CHUNK // max(layout.shape[1], 1), 1)
    for start in range(0, len(index), step):
        part = evidence.values(index[start : start + step], slice(0, layout.shape[1]), layout.reading.source_transposed)
        found[start : start + step] = _largest(part, axis=1)
    return found


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


def stored_scales(layer: StoredLayer, layout: Layout) -> Iterator[corruptions.Scales]:
    """Yield the block scales of a layer in linear order: as declared, then with each possible fault undone."""
    shape = layout.shape[0], layout.shape[1] // layer.recipe.block_size
    for found in corruptions.scale_orders(layer.block_scale, layer.scale_layout, shape):
        yield found
        if found.mishap is None and layer.recipe.scale == E8M0:
            one = np.uint8(1)
            yield corruptions.Scales("block scales are twice as large", found.values - one, found.present)
            yield corruptions.Scales("block scales are half as large", found.values + one, found.present)
        if layer.some_rows:
            return


def tensor_mishap(
    evidence: LayerEvidence, scale: np.ndarray | None, recipe_amax: RecipeWithAmax, rows: np.ndarray
) -> str | None:
    """Return the name of the mishap (fault) of the stored tensor scale of some rows, or None if the scale is right."""
    stored = evidence.layer.tensor_scale
    part = stored if stored is None or not np.ndim(stored) else stored[rows]
    return corruptions.tensor_mishap(part, scale, recipe_amax[1])


# ---- compare all rows of a layer


def tensor_agrees(evidence: LayerEvidence, hypothesis: Hypothesis, scale: np.ndarray | None, rows: np.ndarray) -> bool:
    """Return whether the stored tensor scale of some rows agrees with a hypothesis."""
    return (
        hypothesis.tensor_mishap is not None
        or tensor_mishap(evidence, scale, (hypothesis.recipe, hypothesis.amax), rows) is None
    )


def chunks(layout: Layout, r: Recipe) -> Iterator[np.ndarray]:
    """Yield the numbers of all stored rows in order, as arrays of consecutive numbers, int64."""
    height = lcm(32, r.block_rows)
    size = CHUNK // (r.block_rows if layout.moved_after_quantizing else 1)
    step = max(size // max(layout.shape[1], 1) // height, 1) * height
    for start in range(0, layout.shape[0], step):
        yield np.arange(start, min(start + step, layout.shape[0]))


def bytes_equal(a: np.ndarray, b: np.ndarray, r: Recipe) -> tuple[int, int]:
    """Return (number of bytes that are equal in a and b, number of all bytes), counting bytes of packed codes."""
    same = a == b
    if r.element.packing.codes == 2:
        same = same.reshape(-1).view(np.uint16) == 0x0101  # both codes of a byte
    return int(np.count_nonzero(same)), same.size


def count_matches(evidence: LayerEvidence, hypothesis: Hypothesis, early: bool) -> MatchCount:
    """Count the stored bytes of a whole layer that a hypothesis predicts correctly."""
    layout, r = hypothesis.layout, hypothesis.recipe
    everywhere = slice(0, layout.shape[1])
    _, values, present = next(islice(stored_scales(evidence.layer, layout), hypothesis.scales, None))
    tally = MatchCount()
    for rows in chunks(layout, r):
        codes, scales, scale = expected_parts(evidence, layout, rows, everywhere, (r, hypothesis.amax))
        found = hypothesis.codes.undo(layout.reading.read(evidence.layer, rows, everywhere))
        equal, size = bytes_equal(codes, found, r)
        mask = np.ones(scales.shape, bool) if present is None else present[rows].astype(bool)
        tally.codes, tally.total = tally.codes + equal, tally.total + size + int(np.count_nonzero(mask))
        tally.scales += int(np.count_nonzero((scales == values[rows]) & mask))
        tally.tensor_scales_agree &= tensor_agrees(evidence, hypothesis, scale, rows)
        if early and not tally.all_bytes:
            break
    return tally


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
    nearest: the hypothesis with the highest score; None before a hypothesis is added.
    score: the score of ``nearest``: the share of the sample's bytes that it gives, minus 0.05 per mishap.
    codes_only: the hypotheses that reproduce all codes of the sample, although no order of block scales fits.
    scales_only: the hypotheses without a mishap that reproduce all block scales of the sample and the tensor scale, but
        not all codes.
    """

    exact: list[Hypothesis] = field(default_factory=list)
    nearest: Hypothesis | None = None
    score: float = -np.inf
    codes_only: list[Hypothesis] = field(default_factory=list)
    scales_only: list[Hypothesis] = field(default_factory=list)

    def add(self, hypothesis: Hypothesis, exact: bool, share: float) -> None:
        """Record a hypothesis that was compared with the sample."""
        if exact:
            self.exact.append(hypothesis)
        score = share - MISHAP_PENALTY * len(hypothesis.mishaps)
        if score > self.score:
            self.nearest, self.score = hypothesis, score


# ---- choose the rows and columns of the sample


class Sample(NamedTuple):
    """The rows and columns of a layer that form a sample.

    rows: the numbers of the stored rows, in whole blocks of rows.
    columns: the range of columns, from 0.
    """

    rows: np.ndarray
    columns: slice


def sample_of(shape: tuple[int, int], r: Recipe) -> Sample:
    """Return a sample of a layer of ``shape``: groups of rows, spread evenly from the first rows to the last."""
    height, width = lcm(32, *(c.block_rows for c in recipes_of(r))), lcm(64, r.block_size)
    columns = shape[1] if shape[1] <= max(SAMPLE_COLUMNS, width) else max(SAMPLE_COLUMNS // width, 1) * width
    groups = -(-shape[0] // height)
    count = min(max(SAMPLE // max(height * columns, 1), 2), groups)
    chosen = np.unique(np.linspace(0, max(groups - 1, 0), count).astype(np.int64))
    rows = (chosen[:, None] * height + np.arange(height)).ravel()
    return Sample(rows[rows < shape[0]], slice(0, columns))


def plain_layout(evidence: LayerEvidence) -> Layout | None:
    """Return the layout in which codes are read as declared and rows are in place; None if the shapes differ."""
    if evidence.layer.shape != evidence.x.shape:
        return None
    rows = CorruptedRows(None, np.arange(len(evidence.x)))
    return Layout(next(corruptions.readings(evidence.layer, evidence.x.shape)), rows, evidence.x.shape)


def layouts_of(evidence: LayerEvidence) -> Iterator[Layout]:
    """Yield a Layout for each way to read the codes that fits the source's shape, with each possible order of rows."""
    if evidence.layer.some_rows:
        plain = plain_layout(evidence)
        yield from () if plain is None else (plain,)
        return
    for reading in corruptions.readings(evidence.layer, evidence.x.shape):
        turned = reading.source_transposed
        shape = evidence.x.shape[::-1] if turned else evidence.x.shape
        if np.ndim(evidence.layer.tensor_scale) and len(evidence.layer.tensor_scale) != shape[0]:
            continue
        pair = evidence.other is not None and evidence.other.shape == evidence.x.shape
        orders = corruptions.row_orders(shape[0], evidence.heads, pair, evidence.second)
        yield from (Layout(reading, rows, shape) for rows in (orders[:1] if turned else orders))


def sign_agreement(codes: np.ndarray, values: np.ndarray, r: Recipe) -> float:
    """Return the share of the nonzero codes, from 0 to 1, that have the sign of their source value."""
    sign = np.uint8(r.element.sign_bit)
    counted = (codes & ~sign != 0) & ~np.isnan(values)
    wrong = ((codes & sign != 0) != np.signbit(values)) & counted
    return 1 - int(np.count_nonzero(wrong)) / max(int(np.count_nonzero(counted)), 1)


def _sampled_codes(evidence: LayerEvidence, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return (codes, source values) of a sample of a layer that is read in ``layout``."""
    rows, columns = sample_of(layout.shape, evidence.layer.recipe)
    values = evidence.values(layout.rows.source[rows], columns, layout.reading.source_transposed)
    return layout.reading.read(evidence.layer, rows, columns), values


def signs_agree(evidence: LayerEvidence, layout: Layout) -> float:
    """Return the share of nonzero codes in a sample, from 0 to 1, that have the sign of their source value."""
    return sign_agreement(*_sampled_codes(evidence, layout), evidence.layer.recipe)


def orders_by_sign(evidence: LayerEvidence, layout: Layout) -> list[CodeOrder]:
    """Return the orders of codes whose signs agree with the source, in a sample of the layer."""
    read, values = _sampled_codes(evidence, layout)
    orders = corruptions.code_orders(evidence.layer.recipe, read.shape[1])
    return [o for o in orders if sign_agreement(o.undo(read), values, evidence.layer.recipe) >= SIGNS_AGREE]


def try_layout(evidence: LayerEvidence, layout: Layout, orders: Iterable[CodeOrder], trial: SampleVerdict) -> None:
    """Compare a sample with every combination of recipe, amax, order of codes and order of block scales, in one
    layout.
    """
    layer, sample = evidence.layer, sample_of(layout.shape, evidence.layer.recipe)
    read = layout.reading.read(layer, sample.rows, sample.columns)
    codes = [(order, order.undo(read)) for order in orders]
    blocks = slice(0, sample.columns.stop // layer.recipe.block_size)
    scales = []  # (name of the fault or None, scales of the sample; -1 where the file has none)
    for mishap, values, present in stored_scales(layer, layout):
        part = values[sample.rows, blocks].astype(np.int16)
        scales.append((mishap, part if present is None else np.where(present[sample.rows, blocks], part, -1)))
    moved, rows = layout.rows.mishap is not None, len(evidence.x)
    for r in evidence.recipes or recipes_of(layer.recipe):
        # The halves of a gated pair can be quantized as one stacked matrix only if no block of rows spans both.
        try_both = moved and r.block_rows > 1 and (not rows % r.block_rows or (layout.rows.source < rows).all())
        for amax in amaxes(evidence, r):
            for variant in (layout, replace(layout, moved_after_quantizing=True)) if try_both else (layout,):
                _compare(evidence, variant, sample, (r, amax), codes, scales, trial)


@cache
def recipes_of(own: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes that may have made a layer: all recipes that have its format."""
    like = RECIPES["mxfp8-auto-round"]
    is_mxfp8 = (own.element, own.scale, own.block_size) == (like.element, like.scale, like.block_size)
    return (*candidates_of(own), *([replace(like, search="auto_round_powers")] if is_mxfp8 else []))


def _compare(
    evidence: LayerEvidence,
    layout: Layout,
    sample: Sample,
    recipe_amax: RecipeWithAmax,
    codes: list,
    scales: list,
    trial: SampleVerdict,
) -> None:
    """Quantize the sample with one recipe and amax, and compare the result with all orders of codes and block
    scales.
    """
    made_codes, made_scales, scale = expected_parts(evidence, layout, sample.rows, sample.columns, recipe_amax)
    tensor = tensor_mishap(evidence, scale, recipe_amax, sample.rows)
    in_codes = [(order, int(np.count_nonzero(made_codes == found))) for order, found in codes]
    in_scales = [(name, int(np.count_nonzero(made_scales == s)), int(np.count_nonzero(s >= 0))) for name, s in scales]
    weight = evidence.layer.recipe.element.packing.codes  # codes per byte
    for order, equal in in_codes:
        fits = False
        for number, (name, equal_scales, present) in enumerate(in_scales):
            exact = equal == made_codes.size and equal_scales == present
            share = (equal + equal_scales * weight) / max(made_codes.size + present * weight, 1)
            trial.add(Hypothesis(layout, order, number, *recipe_amax, name, tensor), exact, share)
            fits |= equal_scales == present
            if equal_scales == present and not exact and not any((*layout.mishaps, order.mishap, name, tensor)):
                trial.scales_only.append(Hypothesis(layout, order, number, *recipe_amax, name, tensor))
        if equal == made_codes.size and not fits and in_scales:
            trial.codes_only.append(Hypothesis(layout, order, 0, *recipe_amax, None, tensor))


@ieee("identify")
def exact_hypotheses(evidence: LayerEvidence, hypotheses: list[Hypothesis]) -> tuple[list[Hypothesis], MatchCount]:
    """Return (hypotheses that reproduce every byte of codes and block scales of the whole layer, their MatchCount)."""
    found: list[Hypothesis] = []
    tally = MatchCount()
    for hypothesis in sorted(hypotheses, key=lambda hypothesis: hypothesis.weight):
        if found and hypothesis.weight > found[0].weight:
            break
        counted = count_matches(evidence, hypothesis, early=True)
        if counted.all_bytes:
            wrong_scale = f"{corruptions.WRONG_SCALE} in some rows"
            found.append(hypothesis if counted.tensor_scales_agree else replace(hypothesis, tensor_mishap=wrong_scale))
            tally = counted
    fewest = min((hypothesis.weight for hypothesis in found), default=0)
    return [hypothesis for hypothesis in found if hypothesis.weight == fewest], tally


MAX_ROWS = 1 << 15  # layers with more rows are not searched, because all pairs of rows are compared
MAX_BLOCKS = 1 << 18  # in layers with more blocks, blocks are searched within their rows only
SIGN_COLUMNS = 256  # number of columns whose signs identify a row
ROWS_PER_STEP = 64  # number of rows whose source rows are searched at a time
FIRST_PROBES = 8  # number of rows to try first; a source that is a different model is rejected after these
SIGNED_ZERO_WEIGHT = np.float32(2.0**-6)  # added with its sign to each decoded value, so that signs of zeros count

# ---- search for permuted rows


def permuted_rows(evidence: LayerEvidence, plain: Layout) -> Iterator[tuple[Layout, CodeOrder]]:
    """Yield (layout, order of codes) for each order of codes in bytes in which stored rows are permuted source rows."""
    rows, height = plain.shape
    pair = evidence.other is not None and evidence.other.shape == evidence.x.shape
    sources = np.arange(2 * rows if pair else rows)
    columns = slice(0, min(height, SIGN_COLUMNS))
    if not 1 < rows <= MAX_ROWS or not height:
        return
    values = np.nan_to_num(evidence.values(sources, columns, False).astype(np.float32))
    values /= np.maximum(np.abs(values).max(axis=1, keepdims=True, initial=0), FLT_MIN)
    for order in code_orders(evidence.layer.recipe, columns.stop):
        probes = (np.arange(0, rows, -(-rows // count)) for count in (FIRST_PROBES, ROWS_PER_STEP))
        if any((_nearest_sources(evidence, plain, order, probe, values) == -1).any() for probe in probes):
            continue
        steps = (np.arange(i, min(i + ROWS_PER_STEP, rows)) for i in range(0, rows, ROWS_PER_STEP))
        index = _assign_zero_rows(
            np.concatenate([_nearest_sources(evidence, plain, order, part, values) for part in steps]), rows
        )
        if index is not None and not np.array_equal(index, np.arange(rows)):
            yield Layout(plain.reading, CorruptedRows(name_of_rows(index), index), plain.shape), order


def _nearest_sources(
    evidence: LayerEvidence, plain: Layout, order: CodeOrder, rows: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return, for each stored row, the number of the most similar source row among those whose signs agree, int64."""
    element, columns = evidence.layer.recipe.element, slice(0, values.shape[1])
    codes = order.undo(plain.reading.read(evidence.layer, rows, columns))
    decoded = np.nan_to_num(element.values[codes], posinf=0, neginf=0)
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


def permuted_scales(evidence: LayerEvidence, hypothesis: Hypothesis) -> str | None:
    """Return the name of the fault if the stored block scales are a permutation of those that a hypothesis predicts."""
    layout, everywhere = hypothesis.layout, slice(0, hypothesis.layout.shape[1])
    stored = _linear_scales(evidence, layout)
    if stored is None:
        return None
    surplus, in_rows = np.zeros(256, np.int64), True
    for rows in chunks(layout, hypothesis.recipe):
        codes, scales, scale = expected_parts(evidence, layout, rows, everywhere, (hypothesis.recipe, hypothesis.amax))
        right = np.array_equal(codes, hypothesis.codes.undo(layout.reading.read(evidence.layer, rows, everywhere)))
        if not right or not tensor_agrees(evidence, hypothesis, scale, rows):
            return None
        surplus += np.bincount(scales.ravel(), minlength=256) - np.bincount(stored[rows].ravel(), minlength=256)
        in_rows = in_rows and np.array_equal(np.sort(scales, axis=1), np.sort(stored[rows], axis=1))
    if surplus.any():
        return None
    return f"block scales are those of other blocks{' of the same row' if in_rows else ''}"


def _linear_scales(evidence: LayerEvidence, layout: Layout) -> np.ndarray | None:
    """Return the stored block scales as (N, B), read in the declared layout."""
    layer = evidence.layer
    shape = layout.shape[0], layout.shape[1] // layer.recipe.block_size
    first = next(iter(scale_orders(layer.block_scale, layer.scale_layout, shape)), None)
    return None if first is None or first.mishap or first.present is not None else first.values


def permuted_blocks(evidence: LayerEvidence, plain: Layout) -> Iterator[tuple[Hypothesis, str]]:
    """Yield (hypothesis, name of the fault) for each recipe and amax whose blocks are the stored blocks, permuted."""
    scales = _linear_scales(evidence, plain)
    if scales is None or not scales.size:
        return
    right = CodeOrder(None, lambda codes: codes)
    count = min(max(SAMPLE // plain.shape[1], 1), plain.shape[0])
    sample = next(chunks(plain, evidence.layer.recipe))[:count]
    for r in candidates_of(evidence.layer.recipe):
        for amax in amaxes(evidence, r):
            scale = expected_parts(evidence, plain, sample, slice(0, plain.shape[1]), (r, amax))[2]
            hypothesis = Hypothesis(
                plain, right, 0, r, amax, tensor_mishap=tensor_mishap(evidence, scale, (r, amax), sample)
            )
            if _same_blocks(evidence, hypothesis, scales, [sample], True) and r.block_rows == 1:
                if _same_blocks(evidence, hypothesis, scales, chunks(plain, r), True):
                    yield hypothesis, "blocks, codes and scales, are in other places of their rows"
            elif scales.size <= MAX_BLOCKS and plain.shape[0] * plain.shape[1] <= CHUNK * 8:
                if _same_blocks(evidence, hypothesis, scales, [np.arange(plain.shape[0])], False):
                    yield hypothesis, "blocks, codes and scales, are in other places"


def _same_blocks(
    evidence: LayerEvidence, hypothesis: Hypothesis, stored: np.ndarray, parts: Iterable[np.ndarray], in_rows: bool
) -> bool:
    """Return whether the stored blocks (codes and scale) are a permutation of the blocks that a hypothesis predicts."""
    layout, everywhere = hypothesis.layout, slice(0, hypothesis.layout.shape[1])
    for rows in parts:
        codes, scales, scale = expected_parts(evidence, layout, rows, everywhere, (hypothesis.recipe, hypothesis.amax))
        if not tensor_agrees(evidence, hypothesis, scale, rows):
            return False
        found = layout.reading.read(evidence.layer, rows, everywhere)
        a, b = _hashes(codes, scales), _hashes(found, stored[rows])
        if not in_rows:
            a, b = a.ravel(), b.ravel()
        if not np.array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1)):
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
