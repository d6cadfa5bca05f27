"""Find the search that chose the block scales of a layer if no recipe reproduces all of them. A search tries several
scales per block and keeps the one with the smallest error. A hypothesis is a recipe, with an order of rows, codes and
scales, that may have made the layer from its source (the original weight).

Three facts can be recognized:

- A recipe that searches reproduces all bytes, except in blocks where another scale has an equal error. Tools add the
  errors of a block in different orders, so that they choose differently.
- Four over six of Model-Optimizer: every block scale is computed from the block's amax or from 1.5 times the amax.
  The choice between them depends on how the tool computes errors, on a GPU or on a CPU.
- auto-round's search with an importance matrix: every block scale is one that it tries. The choice depends on the
  matrix, which the checkpoint does not hold.

Sources: Model-Optimizer 0.47 configs/ptq/presets/model/nvfp4_four_over_six and calib/mse.py; auto-round 0.15.1
data_type/nvfp.py search_nvfp4_scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.identify.hypotheses import Hypothesis, LayerEvidence, Layout, amaxes, chunks, expected_parts
from fp4kit.checkpoint.identify.try_hypotheses import sample_of
from fp4kit.layouts import unpacked
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.search import FACTORS
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale

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
    in_order = layer.scale_layout == "linear" and layer.block_scale.size * r.block_size == evidence.x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if plain.mishaps or not in_order or not usable or r.element.bits != _STATIC.element.bits:
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


def _is_nvfp4(evidence: LayerEvidence) -> bool:
    """Return whether a layer has the elements, block scales and block size of NVFP4, and at most one tensor scale."""
    r = evidence.layer.recipe
    parts = r.element, r.scale, r.block_size
    return parts == (_STATIC.element, _STATIC.scale, _STATIC.block_size) and np.ndim(evidence.layer.tensor_scale) == 0


def _tensor_of(evidence: LayerEvidence, r: Recipe) -> TensorScale | None:
    """Return the tensor scale that a recipe computes from one of the layer's candidate amaxes."""
    stored = evidence.layer.tensor_scale
    if stored is None or not _is_nvfp4(evidence):
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
