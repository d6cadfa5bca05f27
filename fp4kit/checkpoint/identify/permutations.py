"""Orders that no table has: rows in any order, scales of other blocks, whole blocks in other places.

Rows find their source by signs, which are the same under every recipe; blocks by a hash of their codes and scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fp4kit.checkpoint.identify.corruptions import CodeOrder, CorruptedRows, code_orders, name_of_rows, scale_orders
from fp4kit.checkpoint.identify.hypotheses import (
    CHUNK,
    Account,
    LayerEvidence,
    Layout,
    amaxes,
    chunks,
    made,
    tensor_agrees,
    tensor_mishap,
)
from fp4kit.checkpoint.identify.try_hypotheses import SAMPLE, SIGNS_AGREE
from fp4kit.formats import FLT_MIN
from fp4kit.ops.identify import candidates_of

MOST_ROWS = 1 << 15  # of a layer whose rows are looked for: all pairs are compared
MOST_BLOCKS = 1 << 18  # of a layer whose blocks are looked for in other rows
COLUMNS = 256  # whose signs tell rows apart
PROBED = 64  # rows that are looked for at a time
FIRST = 8  # rows that are looked for first: of another model, hardly one is found
ZERO = np.float32(2.0**-6)  # what a signed zero counts for among other codes

# ---- rows
# -------------------------------------------------------------------------------------------------------------------


def permuted_rows(case: LayerEvidence, plain: Layout) -> Iterator[tuple[Layout, CodeOrder]]:
    """Layouts in which every stored row has the signs of another row of the source, or of the other half's."""
    rows, height = plain.shape
    pair = case.other is not None and case.other.shape == case.x.shape
    sources = np.arange(2 * rows if pair else rows)
    columns = slice(0, min(height, COLUMNS))
    if not 1 < rows <= MOST_ROWS or not height:
        return
    values = np.nan_to_num(case.values(sources, columns, False).astype(np.float32))
    values /= np.maximum(np.abs(values).max(axis=1, keepdims=True, initial=0), FLT_MIN)
    for order in code_orders(case.layer.recipe, columns.stop):
        probes = (np.arange(0, rows, -(-rows // count)) for count in (FIRST, PROBED))
        if any((_found(case, plain, order, probe, values) == -1).any() for probe in probes):
            continue
        steps = (np.arange(i, min(i + PROBED, rows)) for i in range(0, rows, PROBED))
        index = _spread(np.concatenate([_found(case, plain, order, part, values) for part in steps]), rows)
        if index is not None and not np.array_equal(index, np.arange(rows)):
            yield Layout(plain.reading, CorruptedRows(name_of_rows(index), index), plain.shape), order


def _found(case: LayerEvidence, plain: Layout, order: CodeOrder, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The likest source row of each stored row, of those with its signs; -1: none has them; -2 - row: its codes are
    zeros.
    """
    element, columns = case.layer.recipe.element, slice(0, values.shape[1])
    codes = order.undo(plain.reading.read(case.layer, rows, columns))
    mine = np.nan_to_num(element.values[codes], posinf=0, neginf=0)
    signs = np.sign(mine)
    mine += np.copysign(ZERO, mine)
    agree = signs @ np.where(np.signbit(values), np.float32(-1), np.float32(1)).T  # twice the agreements, less all
    size = np.count_nonzero(signs, axis=1)
    likeness = mine @ (values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), FLT_MIN)).T
    best = np.where(agree >= (2 * SIGNS_AGREE - 1) * size[:, None], likeness, -np.inf)
    likest = best.argmax(axis=1)
    return np.where(size == 0, -2 - likest, np.where(best.max(axis=1) > -np.inf, likest, -1))


def _spread(index: np.ndarray, rows: int) -> np.ndarray | None:
    """The same with rows of zeros given the likest source that is left; None where a row found no source, or two found
    one.
    """
    known = index[index >= 0]
    if (index == -1).any() or len(np.unique(known)) != len(known):
        return None
    left, index = [*np.setdiff1d(np.arange(rows), known)], index.copy()
    for row in np.flatnonzero(index < -1):
        if not left:
            return None
        likest = -2 - index[row]
        index[row] = likest if likest in left else left[0]
        left.remove(index[row])
    return index


# ---- blocks
# -----------------------------------------------------------------------------------------------------------------


def permuted_scales(case: LayerEvidence, account: Account) -> str | None:
    """What happened to block scales that are those of the account in other places, where all its codes are right."""
    layout, everywhere = account.layout, slice(0, account.layout.shape[1])
    stored = _linear_scales(case, layout)
    if stored is None:
        return None
    surplus, in_rows = np.zeros(256, np.int64), True
    for rows in chunks(layout, account.recipe):
        codes, scales, scale = made(case, layout, rows, everywhere, (account.recipe, account.amax))
        right = np.array_equal(codes, account.codes.undo(layout.reading.read(case.layer, rows, everywhere)))
        if not right or not tensor_agrees(case, account, scale, rows):
            return None
        surplus += np.bincount(scales.ravel(), minlength=256) - np.bincount(stored[rows].ravel(), minlength=256)
        in_rows = in_rows and np.array_equal(np.sort(scales, axis=1), np.sort(stored[rows], axis=1))
    if surplus.any():
        return None
    return f"block scales are those of other blocks{' of the same row' if in_rows else ''}"


def _linear_scales(case: LayerEvidence, layout: Layout) -> np.ndarray | None:
    """As declared, whole; None where they have another size."""
    layer = case.layer
    shape = layout.shape[0], layout.shape[1] // layer.recipe.block_size
    first = next(iter(scale_orders(layer.block_scale, layer.scale_layout, shape)), None)
    return None if first is None or first.mishap or first.known is not None else first.values


def permuted_blocks(case: LayerEvidence, plain: Layout) -> Iterator[tuple[Account, str]]:
    """Accounts that give every block, codes and scale, in another place: of its row, or of a small layer."""
    scales = _linear_scales(case, plain)
    if scales is None or not scales.size:
        return
    right = CodeOrder(None, lambda codes: codes)
    count = min(max(SAMPLE // plain.shape[1], 1), plain.shape[0])
    sample = next(chunks(plain, case.layer.recipe))[:count]
    for r in candidates_of(case.layer.recipe):
        for amax in amaxes(case, r):
            scale = made(case, plain, sample, slice(0, plain.shape[1]), (r, amax))[2]
            account = Account(plain, right, 0, r, amax, tensor=tensor_mishap(case, scale, (r, amax), sample))
            if _same_blocks(case, account, scales, [sample], True) and r.block_rows == 1:
                if _same_blocks(case, account, scales, chunks(plain, r), True):
                    yield account, "blocks, codes and scales, are in other places of their rows"
            elif scales.size <= MOST_BLOCKS and plain.shape[0] * plain.shape[1] <= CHUNK * 8:
                if _same_blocks(case, account, scales, [np.arange(plain.shape[0])], False):
                    yield account, "blocks, codes and scales, are in other places"


def _same_blocks(
    case: LayerEvidence, account: Account, stored: np.ndarray, parts: Iterable[np.ndarray], in_rows: bool
) -> bool:
    """Whether stored and made blocks are the same but for their order, in every row or in all of a part."""
    layout, everywhere = account.layout, slice(0, account.layout.shape[1])
    for rows in parts:
        codes, scales, scale = made(case, layout, rows, everywhere, (account.recipe, account.amax))
        if not tensor_agrees(case, account, scale, rows):
            return False
        found = layout.reading.read(case.layer, rows, everywhere)
        a, b = _hashes(codes, scales), _hashes(found, stored[rows])
        if not in_rows:
            a, b = a.ravel(), b.ravel()
        if not np.array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1)):
            return False
    return True


def _hashes(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint64 (n, B) of every block: sums of codes and scale by odd random weights, modulo 2^64."""
    blocks = codes.reshape(*scales.shape, -1)
    weights = np.random.default_rng(0).integers(1, 2**63, blocks.shape[-1] + 1, np.uint64) * np.uint64(2) + np.uint64(1)
    sums = scales * weights[-1]
    for j in range(blocks.shape[-1]):
        sums += blocks[..., j] * weights[j]
    return sums
