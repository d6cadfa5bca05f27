"""Compare hypotheses about a stored layer with its bytes.

A hypothesis says which recipe made the layer from its source, and what went wrong afterwards. It consists of a way to
read the codes, an order of rows, an order of codes in their bytes, an order of block scales, a recipe and an amax. The
parts that it predicts are compared with the stored ones in chunks of rows.
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

RecipeWithAmax = tuple[Recipe, np.ndarray | None]  # a recipe, and the tensor amax that it is given
CHUNK = 1 << 20  # elements of a layer that are compared at a time
# An amax implied by a tensor scale is tried if its ratio to the layer's own amax lies in this range. In layers that
# share a scale the ratio is up to about 10.
AMAX_RATIO_RANGE = (2.0**-6, 2.0**10)


@dataclass(frozen=True, eq=False)
class LayerEvidence:
    """Hold a stored layer and what is known of it.

    x: the source (N, K).
    other: the source of the other half of a gated pair, or None; second: True if the layer is the second half.
    heads: possible numbers of heads.
    amaxes: candidate tensor amaxes; the layer's own amax comes first.
    """

    layer: StoredLayer
    x: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[np.float32, ...] = ()

    def values(self, index: np.ndarray, columns: slice, turned: bool) -> np.ndarray:
        """Return rows of the source; an index of N or more means a row of the other half. If ``turned``, return columns
        as rows.
        """
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
    """Say how codes are read, and which source row each stored row was made from.

    shape: the shape of the layer that is read.
    moved_after_quantizing: True if rows were moved after they were quantized, False if before.
    """

    reading: Reading
    rows: CorruptedRows
    shape: tuple[int, int]
    moved_after_quantizing: bool = False

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The mishaps of the reading and of the order of rows."""
        return tuple(filter(None, (self.reading.mishap, self.rows.mishap)))


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """Hold one hypothesis about a layer.

    codes: the order of codes in their bytes.
    scales: the position of the order of block scales among corruptions.scale_orders.
    scale_mishap, tensor: what is wrong with the block scales and with the tensor scale, or None.
    """

    layout: Layout
    codes: CodeOrder
    scales: int
    recipe: Recipe
    amax: np.ndarray | None
    scale_mishap: str | None = None
    tensor: str | None = None

    @property
    def mishaps(self) -> tuple[str, ...]:
        """The mishaps of this hypothesis, in the order in which they are undone."""
        return (*self.layout.mishaps, *filter(None, (self.codes.mishap, self.scale_mishap, self.tensor)))

    @property
    def weight(self) -> int:
        """The number of mishaps; a tensor scale that is wrong for an unknown reason counts twice."""
        return len(self.mishaps) + ((self.tensor or "").startswith(corruptions.WRONG_SCALE))


@dataclass
class MatchCount:
    """Count the bytes that a hypothesis predicts: of codes, of block scales, and the total of both.

    tensor: True if the tensor scales are as the hypothesis says.
    """

    codes: int = 0
    scales: int = 0
    total: int = 0
    tensor: bool = True

    @property
    def all_bytes(self) -> bool:
        """True if every byte is predicted."""
        return self.codes + self.scales == self.total

    @property
    def share(self) -> float:
        """The share of bytes that are predicted."""
        return (self.codes + self.scales) / max(self.total, 1)


# ---- what a recipe makes


def expected_parts(
    evidence: LayerEvidence, layout: Layout, rows: np.ndarray, columns: slice, recipe_amax: RecipeWithAmax
) -> tuple:
    """Return codes (n, K), block scales (n, B) and tensor scale that a recipe gives for some stored rows."""
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
    """Return the source rows of all blocks that contain some of the rows, ascending; each half of a pair has its own
    blocks.
    """
    start = index // rows * rows + index % rows // height * height
    every = (np.unique(start)[:, None] + np.arange(height)).ravel()
    return every[every < -(-(index.max(initial=0) + 1) // rows) * rows]


def row_amaxes(evidence: LayerEvidence, layout: Layout, index: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each whole source row, ignoring NaN: float32 (n,)."""
    found = np.zeros(len(index), np.float32)
    step = max(CHUNK // max(layout.shape[1], 1), 1)
    for start in range(0, len(index), step):
        part = evidence.values(index[start : start + step], slice(0, layout.shape[1]), layout.reading.source_transposed)
        found[start : start + step] = _largest(part, axis=1)
    return found


def _largest(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the largest magnitude, ignoring NaN, computed in the array's own dtype, in which magnitudes are exact."""
    return np.asarray(np.fmax.reduce(np.abs(values), axis=axis, initial=0), np.float32)


def own_amax(x: np.ndarray) -> np.float32:
    """Return the largest magnitude of a matrix, ignoring NaN, computed in chunks of rows."""
    step = max(CHUNK // max(x.shape[1], 1), 1)
    return np.float32(max((float(_largest(x[i : i + step])) for i in range(0, len(x), step)), default=0.0))


def amaxes(evidence: LayerEvidence, r: Recipe) -> Sequence[np.ndarray | None]:
    """Return the amaxes that a recipe may have been given, or [None] if it uses none.

    These are the candidates that give the stored tensor scale. If none does, they are all candidates and those that the
    stored scale implies.
    """
    if r.tensor_rule is None or r.tensor_scaling != "tensor":
        return [None]
    # An amax of 0 is a candidate only if the layer itself is zero, because a group is not zero if a member is not.
    own = evidence.amaxes[0]
    candidates = [np.asarray(a) for a in evidence.amaxes if a != 0 or own == 0]
    stored, dtype = evidence.layer.tensor_scale, evidence.x.dtype
    if stored is not None:
        with np.errstate(all="ignore"):
            fitting = [a for a in candidates if corruptions.within_ulps(stored, tensor_scale(a, r, dtype).decode)]
        candidates = fitting or [*candidates, *_implied(stored, candidates[0], r, dtype)]
    return list({tensor_scale(a, r, dtype).encode.tobytes(): a for a in reversed(candidates)}.values())[::-1]


def _implied(stored: np.ndarray, own: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the amaxes implied by the stored scale, by its reciprocal, and the scale itself, if they lie in
    AMAX_RATIO_RANGE.
    """
    scale = np.asarray(stored).reshape(-1)[0]
    if not (np.asarray(stored) == scale).all() or not 0 < scale < np.inf:
        return
    with np.errstate(all="ignore"):
        guesses = [*amaxes_of(scale, r, dtype), *amaxes_of(np.float32(1) / scale, r, dtype), np.asarray(scale)]
        yield from (a for a in guesses if AMAX_RATIO_RANGE[0] * own <= a <= AMAX_RATIO_RANGE[1] * own)


def stored_scales(layer: StoredLayer, layout: Layout) -> Iterator[corruptions.Scales]:
    """Yield the block scales of a layer in one order after another (corruptions.scale_orders)."""
    shape = layout.shape[0], layout.shape[1] // layer.recipe.block_size
    return corruptions.scale_orders(layer.block_scale, layer.scale_layout, shape)


def tensor_mishap(
    evidence: LayerEvidence, scale: np.ndarray | None, recipe_amax: RecipeWithAmax, rows: np.ndarray
) -> str | None:
    """Return what is wrong with the stored tensor scale of some rows, or None."""
    stored = evidence.layer.tensor_scale
    part = stored if stored is None or not np.ndim(stored) else stored[rows]
    return corruptions.tensor_mishap(part, scale, recipe_amax[1])


# ---- the whole layer


def tensor_agrees(evidence: LayerEvidence, hypothesis: Hypothesis, scale: np.ndarray | None, rows: np.ndarray) -> bool:
    """Return whether the tensor scale of some rows agrees with the hypothesis.

    A hypothesis that reports a wrong tensor scale agrees with any. One that reports none was only checked on the
    sample.
    """
    return (
        hypothesis.tensor is not None
        or tensor_mishap(evidence, scale, (hypothesis.recipe, hypothesis.amax), rows) is None
    )


def chunks(layout: Layout, r: Recipe) -> Iterator[np.ndarray]:
    """Yield the stored rows of a layer in order, in whole blocks of rows."""
    height = lcm(32, r.block_rows)
    size = CHUNK // (r.block_rows if layout.moved_after_quantizing else 1)
    step = max(size // max(layout.shape[1], 1) // height, 1) * height
    for start in range(0, layout.shape[0], step):
        yield np.arange(start, min(start + step, layout.shape[0]))


def bytes_equal(a: np.ndarray, b: np.ndarray, r: Recipe) -> tuple[int, int]:
    """Return how many bytes of codes agree, and how many there are."""
    same = a == b
    if r.element.packing.codes == 2:
        same = same.reshape(len(same), -1, 2).all(-1)
    return int(np.count_nonzero(same)), same.size


def count_matches(evidence: LayerEvidence, hypothesis: Hypothesis, early: bool) -> MatchCount:
    """Count the bytes of the layer that a hypothesis predicts. early: stop after the first chunk that differs."""
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
        tally.tensor &= tensor_agrees(evidence, hypothesis, scale, rows)
        if early and not tally.all_bytes:
            break
    return tally
