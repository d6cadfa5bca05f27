"""Layers whose block scales no recipe gives, and whose codes are those of a recipe under them: searched or calibrated
scales.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.checkpoint.identify.hypotheses import LayerEvidence, Layout, chunks
from fp4kit.checkpoint.identify.try_hypotheses import sample_of
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import candidates_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe
from fp4kit.reference.tensor_rules import tensor_scale


def under_stored_scales(case: LayerEvidence, plain: Layout) -> tuple[Recipe, ...]:
    """The recipes that make all codes of a layer under its scales, of blocks that lie in order; none that search
    themselves.
    """
    layer, scale = case.layer, case.layer.tensor_scale
    in_order = layer.scale_layout == "linear" and layer.block_scale.size * layer.recipe.block_size == case.x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if plain.mishaps or not in_order or not usable:
        return ()
    scaling = "none" if scale is None else "tensor"
    found = [
        r for r in candidates_of(layer.recipe) if r.tensor_scaling == scaling and r.block_rows == 1 and not r.search
    ]
    rows = sample_of(plain.shape, layer.recipe).rows
    tried = [(r, s) for r in found for s in _tensor_scales(case, r) if _codes_alike(case, plain, r, s, rows)]
    whole = [r for r, s in tried if all(_codes_alike(case, plain, r, s, part) for part in chunks(plain, r))]
    return tuple(dict.fromkeys(whole))


def _tensor_scales(case: LayerEvidence, r: Recipe) -> Iterator[np.float32 | None]:
    """The stored tensor scale; then those of known amaxes that it is off by 2 ulp, as an inverted divisor may be."""
    stored = case.layer.tensor_scale
    yield stored
    if stored is None or r.tensor_rule is None:
        return
    with np.errstate(all="ignore"):
        made = dict.fromkeys(np.float32(tensor_scale(np.asarray(a), r, case.x.dtype).decode) for a in case.amaxes)
        yield from (one for one in made if one != stored and abs(one - stored) <= 2 * np.spacing(np.float32(stored)))


def _codes_alike(
    case: LayerEvidence, plain: Layout, r: Recipe, tensor_scale: np.float32 | None, rows: np.ndarray
) -> bool:
    """Whether a recipe makes the codes of some rows under their scales, and a tensor scale."""
    codes = plain.reading.read(case.layer, rows, slice(0, plain.shape[1]))
    scales = np.ascontiguousarray(case.layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(case.x[rows]), r, block_scale=scales, tensor_scale=tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), codes)
