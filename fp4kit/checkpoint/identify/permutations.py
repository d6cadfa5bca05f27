"""Search for orders that have no name: rows in any order, block scales of other blocks, whole blocks in other places.
The source is the original weight. A hypothesis is a recipe, with an order of rows, codes and scales, that may have made
the layer from it. A layout is a way to read the codes, combined with an order of the rows.

The source row of a stored row is found by the signs of its codes, which do not depend on the recipe. Blocks are matched
by a hash of codes and scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, code_orders, name_of_rows, scale_orders
from fp4kit.checkpoint.identify.hypotheses import (
    CHUNK,
    Hypothesis,
    LayerEvidence,
    Layout,
    amaxes,
    chunks,
    expected_parts,
    tensor_agrees,
    tensor_mishap,
)
from fp4kit.checkpoint.identify.try_hypotheses import SAMPLE, SIGNS_AGREE
from fp4kit.formats import FLT_MIN
from fp4kit.ops.identify import candidates_of

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
