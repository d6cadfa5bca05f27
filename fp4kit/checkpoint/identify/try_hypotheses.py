"""Trials of accounts: on a sample of a layer those that may be right, then on the whole layer those that are.

Signs are the same under every recipe, so they choose the orders of rows and codes; recipes are tried in those alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, StoredLayer
from fp4kit.checkpoint.identify.hypotheses import (
    Account,
    Given,
    LayerEvidence,
    Layout,
    MatchCount,
    amaxes,
    count,
    made,
    stored_scales,
    tensor_mishap,
)
from fp4kit.ops.identify import candidates_of
from fp4kit.recipes import Recipe

SAMPLE = 1 << 16  # elements on which accounts are tried first
WIDEST = 1024  # columns of the sample
SIGNS_AGREE = 0.99  # share of codes that are not zero whose sign is the source's
WORTH = 0.05  # share of the sample that a mishap must add to an account that is not whole


@dataclass
class SampleVerdict:
    """What a sample says: accounts that give all of it, and the one that gives most."""

    whole: list[Account] = field(default_factory=list)
    nearest: Account | None = None
    worth: float = -np.inf
    codes_only: list[Account] = field(default_factory=list)  # give all codes, and no order of scales fits

    def add(self, account: Account, whole: bool, share: float) -> None:
        """Keep an account if it gives all, or more than those before, a mishap being worth a share."""
        if whole:
            self.whole.append(account)
        worth = share - WORTH * len(account.mishaps)
        if worth > self.worth:
            self.nearest, self.worth = account, worth


# ---- the sample
# -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sample:
    """Some stored rows, in whole blocks of rows, and the first columns."""

    rows: np.ndarray
    columns: slice


def sample_of(shape: tuple[int, int], r: Recipe) -> Sample:
    """Groups of rows spread over the matrix, the first and the last among them."""
    height, width = lcm(32, *(c.block_rows for c in candidates_of(r))), lcm(64, r.block_size)
    columns = shape[1] if shape[1] <= max(WIDEST, width) else max(WIDEST // width, 1) * width
    groups = -(-shape[0] // height)
    count = min(max(SAMPLE // max(height * columns, 1), 2), groups)
    chosen = np.unique(np.linspace(0, max(groups - 1, 0), count).astype(np.int64))
    rows = (chosen[:, None] * height + np.arange(height)).ravel()
    return Sample(rows[rows < shape[0]], slice(0, columns))


def layouts_of(case: LayerEvidence, r: Recipe) -> Iterator[Layout]:
    """All ways to read the codes, in all orders of rows; the right one first, where the shapes agree."""
    for reading in corruptions.readings(case.layer, case.x.shape):
        turned = reading.source_transposed
        shape = case.x.shape[::-1] if turned else case.x.shape
        if np.ndim(case.layer.tensor_scale) and len(case.layer.tensor_scale) != shape[0]:
            continue
        pair = case.other is not None and case.other.shape == case.x.shape and not turned
        for rows in (
            corruptions.row_orders(shape[0], case.heads, pair, case.second) if not turned else [same_rows(shape[0])]
        ):
            yield Layout(reading, rows, shape)


def same_rows(rows: int) -> CorruptedRows:
    """Rows as they are."""
    return CorruptedRows(None, np.arange(rows))


def sign_agreement(codes: np.ndarray, values: np.ndarray, r: Recipe) -> float:
    """Share of codes that are not zero whose sign is that of the value; 1 where all are zero."""
    sign = np.uint8(r.element.sign_bit)
    counted = (codes & ~sign != 0) & ~np.isnan(values)
    wrong = ((codes & sign != 0) != np.signbit(values)) & counted
    return 1 - int(np.count_nonzero(wrong)) / max(int(np.count_nonzero(counted)), 1)


def orders_by_sign(case: LayerEvidence, layout: Layout) -> list[CodeOrder]:
    """The orders of codes under which the signs of a sample are the source's."""
    r, sample = case.layer.recipe, sample_of(layout.shape, case.layer.recipe)
    read = layout.reading.read(case.layer, sample.rows, sample.columns)
    values = case.values(layout.rows.source[sample.rows], sample.columns, layout.reading.source_transposed)
    orders = corruptions.code_orders(r, sample.columns.stop)
    return [order for order in orders if sign_agreement(order.undo(read), values, r) >= SIGNS_AGREE]


def try_layout(case: LayerEvidence, layout: Layout, orders: Iterable[CodeOrder], trial: SampleVerdict) -> None:
    """Every recipe, amax, order of codes and of scales in one layout, on a sample."""
    layer, sample = case.layer, sample_of(layout.shape, case.layer.recipe)
    read = layout.reading.read(layer, sample.rows, sample.columns)
    codes = [(order, order.undo(read)) for order in orders]
    scales = list(_sampled_scales(layer, layout, sample))
    moved = layout.rows.mishap is not None
    for r in candidates_of(layer.recipe):
        late = moved and r.block_rows > 1 and _blocks_stay_whole(layout, len(case.x), r.block_rows)
        for amax in amaxes(case, r):
            for where in (layout, replace(layout, late=True)) if late else (layout,):
                _compare(case, where, sample, (r, amax), codes, scales, trial)


def _blocks_stay_whole(layout: Layout, rows: int, height: int) -> bool:
    """Whether blocks of rows are where quantize puts them: below a half that ends within one, they are not."""
    return not rows % height or bool((layout.rows.source < rows).all())


def _sampled_scales(layer: StoredLayer, layout: Layout, sample: Sample) -> Iterator[tuple]:
    """Of each order of scales: its name, and those of the sample; unknown ones are -1."""
    blocks = slice(0, sample.columns.stop // layer.recipe.block_size)
    for mishap, values, known in stored_scales(layer, layout):
        found = values[sample.rows, blocks].astype(np.int16)
        yield mishap, found if known is None else np.where(known[sample.rows, blocks], found, -1)


def _compare(
    case: LayerEvidence, layout: Layout, sample: Sample, given: Given, codes: list, scales: list, trial: SampleVerdict
) -> None:
    """What a recipe makes of the sample against all orders of codes and of scales."""
    made_codes, made_scales, scale = made(case, layout, sample.rows, sample.columns, given)
    tensor = tensor_mishap(case, scale, given, sample.rows)
    in_codes = [(order, int(np.count_nonzero(made_codes == found))) for order, found in codes]
    in_scales = [(name, int(np.count_nonzero(made_scales == s)), int(np.count_nonzero(s >= 0))) for name, s in scales]
    weight = case.layer.recipe.element.packing.codes  # codes of a byte
    for order, equal in in_codes:
        fits = False
        for number, (name, same, known) in enumerate(in_scales):
            whole = equal == made_codes.size and same == known
            share = (equal + same * weight) / max(made_codes.size + known * weight, 1)
            trial.add(Account(layout, order, number, *given, name, tensor), whole, share)
            fits |= same == known
        if equal == made_codes.size and not fits and in_scales:
            trial.codes_only.append(Account(layout, order, 0, *given, None, tensor))


@ieee("identify")
def first_whole(case: LayerEvidence, accounts: list[Account]) -> tuple[list[Account], MatchCount]:
    """Of the accounts that give every byte, those with the fewest mishaps, and their tally."""
    found: list[Account] = []
    tally = MatchCount()
    for account in sorted(accounts, key=lambda account: account.weight):
        if found and account.weight > found[0].weight:
            break
        counted = count(case, account, early=True)
        if counted.all_bytes:
            told = account if counted.tensor else replace(account, tensor=f"{corruptions.WRONG_SCALE} in some rows")
            found, tally = [*found, told], counted
    least = min((account.weight for account in found), default=0)
    return [account for account in found if account.weight == least], tally
