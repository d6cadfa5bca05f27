"""Recognize block scales that were searched or calibrated. No recipe reproduces such block scales, but some recipe
reproduces all codes if it is given these scales. The source is the original weight of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fp4kit.checkpoint.identify.hypotheses import LayerEvidence, Layout, amaxes, chunks, expected_parts
from fp4kit.checkpoint.identify.try_hypotheses import sample_of
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import candidates_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe
from fp4kit.reference.tensor_rules import tensor_scale


def recipes_under_stored_scales(evidence: LayerEvidence, plain: Layout) -> tuple[Recipe, ...]:
    """Return the recipes that reproduce all codes of a layer with its stored block scales and tensor scale."""
    layer, scale = evidence.layer, evidence.layer.tensor_scale
    in_order = layer.scale_layout == "linear" and layer.block_scale.size * layer.recipe.block_size == evidence.x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if plain.mishaps or not in_order or not usable:
        return ()
    scaling = "none" if scale is None else "tensor"
    candidates = [
        r
        for r in evidence.recipes or candidates_of(layer.recipe)
        if r.tensor_scaling == scaling and r.block_rows == 1 and not r.search
    ]
    rows = sample_of(plain.shape, layer.recipe).rows
    tried = [
        (r, s) for r in candidates for s in _tensor_scales(evidence, r) if _codes_match(evidence, plain, r, s, rows)
    ]
    exact = [r for r, s in tried if all(_codes_match(evidence, plain, r, s, part) for part in chunks(plain, r))]
    return tuple(dict.fromkeys(exact))


def _tensor_scales(evidence: LayerEvidence, r: Recipe) -> Iterator[np.float32 | None]:
    """Yield the tensor scales with which the codes may have been made: the stored one, then others within 2 ulp of
    it.
    """
    stored = evidence.layer.tensor_scale
    yield stored
    if stored is None or r.tensor_rule is None:
        return
    with np.errstate(all="ignore"):
        scales = [np.float32(tensor_scale(np.asarray(a), r, evidence.x.dtype).decode) for a in evidence.amaxes]
        limit = 2 * np.spacing(np.float32(stored))
        yield from (scale for scale in dict.fromkeys(scales) if scale != stored and abs(scale - stored) <= limit)


def _codes_match(
    evidence: LayerEvidence, plain: Layout, r: Recipe, tensor_scale: np.float32 | None, rows: np.ndarray
) -> bool:
    """Return whether a recipe reproduces all codes of some rows, given their stored block scales and a tensor scale."""
    codes = plain.reading.read(evidence.layer, rows, slice(0, plain.shape[1]))
    scales = np.ascontiguousarray(evidence.layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(evidence.x[rows]), r, block_scale=scales, tensor_scale=tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), codes)


_WIDER = (2, 4, 8)  # numbers of blocks that may have got one amax
_MOST_WIDE = 0.75  # least share of blocks that have the scale of the wider amax, of those in which it differs
_UNROUNDED = 0.999  # least share of codes that the unrounded scales give; the order of divisions changes a few


def wide_blocks(
    evidence: LayerEvidence, plain: Layout, recipes: tuple[Recipe, ...]
) -> tuple[tuple[Recipe, ...], str] | None:
    """Return (recipes, fault) if block scales come from the amax of several neighboring blocks, otherwise None."""
    rows, size = sample_of(plain.shape, evidence.layer.recipe).rows, evidence.layer.recipe.block_size
    for count in _WIDER:
        if plain.shape[1] % (count * size):
            continue
        pairs = [(r, amax) for r in recipes for amax in amaxes(evidence, r)]
        found = dict.fromkeys(pair[0] for pair in pairs if _are_wide(evidence, plain, pair, count, rows))
        if found:
            return tuple(found), f"block scales come from the amaxes of {count} blocks, {count * size} elements"
    return None


def _are_wide(
    evidence: LayerEvidence, plain: Layout, recipe_amax: tuple[Recipe, np.ndarray | None], count: int, rows: np.ndarray
) -> bool:
    """Return whether the block scales of some rows come from the amaxes of ``count`` neighboring blocks."""
    size, columns = evidence.layer.recipe.block_size, slice(0, plain.shape[1])
    x = np.array(evidence.x[rows])
    blocks = x.reshape(len(rows), -1, count, size)
    with np.errstate(invalid="ignore"):  # NaN of the source
        blocks[..., 0] = np.abs(x).reshape(len(rows), -1, count * size).max(axis=-1)[..., None]
    raised = replace(evidence, x=x, other=None)
    own = expected_parts(evidence, plain, rows, columns, recipe_amax)[1]
    wide = expected_parts(raised, plain, np.arange(len(rows)), columns, recipe_amax)[1]
    stored = evidence.layer.block_scale.reshape(plain.shape[0], -1)[rows]
    differ = own != wide
    fits = differ.any() and ((stored == own) | (stored == wide)).all()
    return bool(fits and np.mean((stored == wide)[differ]) >= _MOST_WIDE)


def unrounded_scales(evidence: LayerEvidence, plain: Layout) -> str | None:
    """Return the name of the fault if codes were computed with the block scales before they were rounded."""
    r, rows = evidence.layer.recipe, sample_of(plain.shape, evidence.layer.recipe).rows
    if plain.mishaps or r.block_rows > 1:
        return None
    blocks = evidence.x[rows].astype(np.float32).reshape(len(rows), -1, r.block_size)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(r.element.max)
        codes = r.element.encode(np.nan_to_num(blocks / scale)).reshape(len(rows), -1)
    stored = plain.reading.read(evidence.layer, rows, slice(0, plain.shape[1]))
    known = (r.element.values[stored] != 0) | (r.element.values[codes] != 0)  # zeros of both signs are equal
    differ = known & (codes != stored)
    return _FAULT if differ.sum() <= (1 - _UNROUNDED) * differ.size else None


_FAULT = "codes were computed with the block scales before rounding"
