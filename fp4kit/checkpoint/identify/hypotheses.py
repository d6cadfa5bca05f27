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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm
from typing import NamedTuple

import numpy as np

from fp4kit.checkpoint.identify import corruptions
from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, Reading, StoredLayer
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.formats import E8M0
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe
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
