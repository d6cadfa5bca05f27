"""Try hypotheses on a sample of a layer, and try those that fit the sample on the whole layer. A hypothesis is a recipe
with a tensor amax, an order of rows, codes and block scales, and the mishaps (faults such as swapped nibbles) that
these imply. A layout is a way to read the codes, combined with an order of the rows.

The signs of codes do not depend on the recipe. So orders of rows and codes are selected by signs first, and recipes are
tried only in the selected orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import lcm

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, StoredLayer
from fp4kit.checkpoint.identify.hypotheses import (
    Hypothesis,
    LayerEvidence,
    Layout,
    MatchCount,
    RecipeWithAmax,
    amaxes,
    count_matches,
    expected_parts,
    stored_scales,
    tensor_mishap,
)
from fp4kit.ops.identify import candidates_of
from fp4kit.recipes import RECIPES, Recipe

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


@dataclass(frozen=True, eq=False)
class Sample:
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
    rows = evidence.x.shape[0]
    return Layout(next(corruptions.readings(evidence.layer, evidence.x.shape)), same_rows(rows), evidence.x.shape)


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
        pair = evidence.other is not None and evidence.other.shape == evidence.x.shape and not turned
        for rows in (
            corruptions.row_orders(shape[0], evidence.heads, pair, evidence.second)
            if not turned
            else [same_rows(shape[0])]
        ):
            yield Layout(reading, rows, shape)


def same_rows(rows: int) -> CorruptedRows:
    """Return the right order of ``rows`` rows: every row is in its place."""
    return CorruptedRows(None, np.arange(rows))


def sign_agreement(codes: np.ndarray, values: np.ndarray, r: Recipe) -> float:
    """Return the share of the nonzero codes, from 0 to 1, that have the sign of their source value."""
    sign = np.uint8(r.element.sign_bit)
    counted = (codes & ~sign != 0) & ~np.isnan(values)
    wrong = ((codes & sign != 0) != np.signbit(values)) & counted
    return 1 - int(np.count_nonzero(wrong)) / max(int(np.count_nonzero(counted)), 1)


def signs_agree(evidence: LayerEvidence, layout: Layout) -> float:
    """Return the share of nonzero codes, from 0 to 1, that have the sign of their source value, in a sample of a
    layer.
    """
    sample = sample_of(layout.shape, evidence.layer.recipe)
    read = layout.reading.read(evidence.layer, sample.rows, sample.columns)
    values = evidence.values(layout.rows.source[sample.rows], sample.columns, layout.reading.source_transposed)
    return sign_agreement(read, values, evidence.layer.recipe)


def orders_by_sign(evidence: LayerEvidence, layout: Layout) -> list[CodeOrder]:
    """Read a sample of the layer in ``layout``, and return the orders of codes whose signs agree with the source."""
    r, sample = evidence.layer.recipe, sample_of(layout.shape, evidence.layer.recipe)
    read = layout.reading.read(evidence.layer, sample.rows, sample.columns)
    values = evidence.values(layout.rows.source[sample.rows], sample.columns, layout.reading.source_transposed)
    orders = corruptions.code_orders(r, sample.columns.stop)
    return [order for order in orders if sign_agreement(order.undo(read), values, r) >= SIGNS_AGREE]


def try_layout(evidence: LayerEvidence, layout: Layout, orders: Iterable[CodeOrder], trial: SampleVerdict) -> None:
    """Compare a sample with every combination of recipe, amax, order of codes and order of block scales, in one
    layout.
    """
    layer, sample = evidence.layer, sample_of(layout.shape, evidence.layer.recipe)
    read = layout.reading.read(layer, sample.rows, sample.columns)
    codes = [(order, order.undo(read)) for order in orders]
    scales = list(_sampled_scales(layer, layout, sample))
    moved = layout.rows.mishap is not None
    for r in evidence.recipes or recipes_of(layer.recipe):
        try_both = moved and r.block_rows > 1 and _blocks_stay_whole(layout, len(evidence.x), r.block_rows)
        for amax in amaxes(evidence, r):
            for variant in (layout, replace(layout, moved_after_quantizing=True)) if try_both else (layout,):
                _compare(evidence, variant, sample, (r, amax), codes, scales, trial)


@cache
def recipes_of(own: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes that may have made a layer: all recipes that have its format."""
    like = RECIPES["mxfp8-auto-round"]
    is_mxfp8 = (own.element, own.scale, own.block_size) == (like.element, like.scale, like.block_size)
    return (*candidates_of(own), *([replace(like, search="auto_round_powers")] if is_mxfp8 else []))


def _blocks_stay_whole(layout: Layout, rows: int, height: int) -> bool:
    """Return whether the halves of a gated pair can be quantized as one stacked matrix without shifting blocks of
    rows.
    """
    return not rows % height or bool((layout.rows.source < rows).all())


def _sampled_scales(layer: StoredLayer, layout: Layout, sample: Sample) -> Iterator[tuple]:
    """Yield (name of the fault or None, scales of the sample as int16) for each order of block scales."""
    blocks = slice(0, sample.columns.stop // layer.recipe.block_size)
    for mishap, values, present in stored_scales(layer, layout):
        found = values[sample.rows, blocks].astype(np.int16)
        yield mishap, found if present is None else np.where(present[sample.rows, blocks], found, -1)


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
