"""Accounts of a stored layer: which recipe made it of its source, and what went wrong on the way.

An account is a way to read the codes, an order of rows, of codes in their bytes, of block scales, a recipe and an amax.
What it makes is compared with what is stored in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm

import numpy as np

from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, Reading, StoredLayer
from fp4kit.layouts import unpacked
from fp4kit.ops.identify_amaxes import amaxes_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe
from fp4kit.reference.tensor_rules import tensor_scale

Given = tuple[Recipe, np.ndarray | None]  # a recipe, and the amax of the tensor that it is given
CHUNK = 1 << 20  # elements of the whole layer that are looked at at once
FARTHEST = (
    2.0**-6,
    2.0**10,
)  # amax of a scale that may be wrong, over the layer's own: layers that share one differ by 10


@dataclass(frozen=True, eq=False)
class LayerEvidence:
    """A stored layer and what is known of it: its source (N, K), that of its other half, heads, amaxes; its own is the
    first.
    """

    layer: StoredLayer
    x: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[np.float32, ...] = ()

    def values(self, index: np.ndarray, columns: slice, turned: bool) -> np.ndarray:
        """Rows of the source, and below it of the other half's; or columns, as rows."""
        if turned:
            return np.ascontiguousarray(self.x[columns][:, index].T)
        mine = index < len(self.x)
        if self.other is None or mine.all():
            return np.ascontiguousarray(self.x[index, columns])
        values = np.array(self.x[np.where(mine, index, 0), columns])
        values[~mine] = self.other[index[~mine] - len(self.x), columns]
        return values


@dataclass(frozen=True, eq=False)
class Layout:
    """How codes are read, and which source row each row was made from. late: rows were moved after they were
    quantized.
    """

    reading: Reading
    rows: CorruptedRows
    shape: tuple[int, int]
    late: bool = False

    @property
    def mishaps(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.reading.mishap, self.rows.mishap)))


@dataclass(frozen=True, eq=False)
class Account:
    """One explanation that is tried. scales: its number among mishaps.scale_orders."""

    layout: Layout
    codes: CodeOrder
    scales: int
    recipe: Recipe
    amax: np.ndarray | None
    scale_mishap: str | None = None
    tensor: str | None = None

    @property
    def mishaps(self) -> tuple[str, ...]:
        """What went wrong, in the order in which it is undone."""
        return (*self.layout.mishaps, *filter(None, (self.codes.mishap, self.scale_mishap, self.tensor)))

    @property
    def weight(self) -> int:
        """Number of mishaps; a tensor scale that is wrong without a known reason counts twice."""
        return len(self.mishaps) + ((self.tensor or "").startswith(corruptions.WRONG_SCALE))


@dataclass
class MatchCount:
    """Bytes that an account gives: of codes, of scales, and all that there are. tensor: whether tensor scales are as it
    says.
    """

    codes: int = 0
    scales: int = 0
    total: int = 0
    tensor: bool = True

    @property
    def all_bytes(self) -> bool:
        return self.codes + self.scales == self.total

    @property
    def share(self) -> float:
        return (self.codes + self.scales) / max(self.total, 1)


# ---- what a recipe makes
# ----------------------------------------------------------------------------------------------------


def made(case: LayerEvidence, layout: Layout, rows: np.ndarray, columns: slice, given: Given) -> tuple:
    """Codes (n, K), scales (n, B) and the tensor scale that a recipe gives for some stored rows."""
    r, amax = given
    index = layout.rows.source[rows]
    wanted = _whole_blocks(index, r.block_rows, len(case.x)) if layout.late else index
    if r.tensor_scaling == "row":
        amax = row_amaxes(case, layout, wanted)
    values = case.values(wanted, columns, layout.reading.source_transposed)
    with np.errstate(all="ignore"):
        q = quantize(values, r, tensor_amax=amax)
    codes, scales, scale = unpacked(q.packed, r.element.packing), q.block_scale, q.tensor_scale
    if not layout.late:
        return codes, scales, scale
    place = np.searchsorted(wanted, index)
    return codes[place], scales[place], scale[place] if np.ndim(scale) else scale


def _whole_blocks(index: np.ndarray, height: int, rows: int) -> np.ndarray:
    """Source rows of all blocks that hold some rows, ascending; each half of a pair has its own blocks."""
    start = index // rows * rows + index % rows // height * height
    every = (np.unique(start)[:, None] + np.arange(height)).ravel()
    return every[every < -(-(index.max(initial=0) + 1) // rows) * rows]


def row_amaxes(case: LayerEvidence, layout: Layout, index: np.ndarray) -> np.ndarray:
    """Largest magnitude of whole rows of the source, NaN left out: float32 (n,)."""
    found = np.zeros(len(index), np.float32)
    step = max(CHUNK // max(layout.shape[1], 1), 1)
    for start in range(0, len(index), step):
        part = case.values(index[start : start + step], slice(0, layout.shape[1]), layout.reading.source_transposed)
        found[start : start + step] = _largest(part, axis=1)
    return found


def _largest(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """In the dtype of the array, whose magnitudes are exact."""
    return np.asarray(np.fmax.reduce(np.abs(values), axis=axis, initial=0), np.float32)


def own_amax(x: np.ndarray) -> np.float32:
    """Largest magnitude of a matrix, NaN left out, in chunks of rows."""
    step = max(CHUNK // max(x.shape[1], 1), 1)
    return np.float32(max((float(_largest(x[i : i + step])) for i in range(0, len(x), step)), default=0.0))


def amaxes(case: LayerEvidence, r: Recipe) -> Sequence[np.ndarray | None]:
    """What a recipe may have been given: known amaxes that make the stored tensor scale; else all, and what the scale
    implies.
    """
    if r.tensor_rule is None or r.tensor_scaling != "tensor":
        return [None]
    own = case.amaxes[
        0
    ]  # a group is not of zeros where its member is not, though the scale of zeros may be the stored one
    known = [np.asarray(a) for a in case.amaxes if a != 0 or own == 0]
    stored, dtype = case.layer.tensor_scale, case.x.dtype
    if stored is not None:
        with np.errstate(all="ignore"):
            fitting = [a for a in known if corruptions.near(stored, tensor_scale(a, r, dtype).decode)]
        known = fitting or [*known, *_implied(stored, known[0], r, dtype)]
    return list({tensor_scale(a, r, dtype).encode.tobytes(): a for a in reversed(known)}.values())[::-1]


def _implied(stored: np.ndarray, own: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Amaxes of the stored scale, of its reciprocal, and the scale itself, where they can be those of the layer's
    group.
    """
    scale = np.asarray(stored).reshape(-1)[0]
    if not (np.asarray(stored) == scale).all() or not 0 < scale < np.inf:
        return
    with np.errstate(all="ignore"):
        guesses = [*amaxes_of(scale, r, dtype), *amaxes_of(np.float32(1) / scale, r, dtype), np.asarray(scale)]
        yield from (a for a in guesses if FARTHEST[0] * own <= a <= FARTHEST[1] * own)


def stored_scales(layer: StoredLayer, layout: Layout) -> Iterator[corruptions.Scales]:
    """Block scales of a layer in one order after the other (mishaps.scale_orders)."""
    shape = layout.shape[0], layout.shape[1] // layer.recipe.block_size
    return corruptions.scale_orders(layer.block_scale, layer.scale_layout, shape)


def tensor_mishap(case: LayerEvidence, scale: np.ndarray | None, given: Given, rows: np.ndarray) -> str | None:
    """What is wrong with the stored tensor scale of some rows."""
    stored = case.layer.tensor_scale
    part = stored if stored is None or not np.ndim(stored) else stored[rows]
    return corruptions.tensor_mishap(part, scale, given[1])


# ---- the whole layer
# --------------------------------------------------------------------------------------------------------


def tensor_agrees(case: LayerEvidence, account: Account, scale: np.ndarray | None, rows: np.ndarray) -> bool:
    """Whether an account that finds no fault with the tensor scale is right for some rows: it is of a sample."""
    return account.tensor is not None or tensor_mishap(case, scale, (account.recipe, account.amax), rows) is None


def chunks(layout: Layout, r: Recipe) -> Iterator[np.ndarray]:
    """Stored rows of a layer, in order, in whole blocks of rows."""
    height = lcm(32, r.block_rows)
    size = CHUNK // (r.block_rows if layout.late else 1)
    step = max(size // max(layout.shape[1], 1) // height, 1) * height
    for start in range(0, layout.shape[0], step):
        yield np.arange(start, min(start + step, layout.shape[0]))


def bytes_equal(a: np.ndarray, b: np.ndarray, r: Recipe) -> tuple[int, int]:
    """Bytes of codes that agree, and all."""
    same = a == b
    if r.element.packing.codes == 2:
        same = same.reshape(len(same), -1, 2).all(-1)
    return int(np.count_nonzero(same)), same.size


def count(case: LayerEvidence, account: Account, early: bool) -> MatchCount:
    """Bytes of the layer that an account gives. early: up to the first chunk that differs."""
    layout, r = account.layout, account.recipe
    everywhere = slice(0, layout.shape[1])
    _, values, known = next(islice(stored_scales(case.layer, layout), account.scales, None))
    tally = MatchCount()
    for rows in chunks(layout, r):
        codes, scales, scale = made(case, layout, rows, everywhere, (r, account.amax))
        found = account.codes.undo(layout.reading.read(case.layer, rows, everywhere))
        equal, size = bytes_equal(codes, found, r)
        there = np.ones(scales.shape, bool) if known is None else known[rows].astype(bool)
        tally.codes, tally.total = tally.codes + equal, tally.total + size + int(np.count_nonzero(there))
        tally.scales += int(np.count_nonzero((scales == values[rows]) & there))
        tally.tensor &= tensor_agrees(case, account, scale, rows)
        if early and not tally.all_bytes:
            break
    return tally
