"""Layers whose block scales no recipe gives, and whose codes are those of a recipe under them: searched or calibrated scales."""

from __future__ import annotations

import numpy as np

from fp4kit.checkpoint.accounts import Case, Layout, chunks
from fp4kit.checkpoint.trials import sample_of
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import candidates_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe


def under_stored_scales(case: Case, plain: Layout) -> tuple[Recipe, ...]:
    """The recipes that make all codes of a layer under its scales, of blocks that lie in order; none that search themselves."""
    layer, scale = case.layer, case.layer.tensor_scale
    in_order = layer.scale_layout == "linear" and layer.block_scale.size * layer.recipe.block_size == case.x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if plain.mishaps or not in_order or not usable:
        return ()
    scaling = "none" if scale is None else "tensor"
    found = [r for r in candidates_of(layer.recipe) if r.tensor_scaling == scaling and r.block_rows == 1 and not r.search]
    rows = sample_of(plain.shape, layer.recipe).rows
    found = [r for r in found if _codes_alike(case, plain, r, rows)]
    return tuple(r for r in found if all(_codes_alike(case, plain, r, part) for part in chunks(plain, r)))


def _codes_alike(case: Case, plain: Layout, r: Recipe, rows: np.ndarray) -> bool:
    """Whether a recipe makes the codes of some rows under their scales."""
    codes = plain.reading.read(case.layer, rows, slice(0, plain.shape[1]))
    scales = np.ascontiguousarray(case.layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(case.x[rows]), r, block_scale=scales, tensor_scale=case.layer.tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), codes)
