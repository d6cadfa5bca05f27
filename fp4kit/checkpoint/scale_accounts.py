"""Accounts of layers whose block scales are not those of the amax: codes that a recipe makes under the stored scales, and the
search of scales that found these, where one does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.call.search_scales import is_searched
from fp4kit.checkpoint.accounts import Case, Layout, Tally, amaxes, bytes_equal, chunks
from fp4kit.checkpoint.scale_search import ScaleSearch
from fp4kit.checkpoint.trials import sample_of
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import candidates_of, either, name_of
from fp4kit.ops.quantize import quantize
from fp4kit.ops.search_scales import search_scales
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe

SEARCH = ScaleSearch()


class Found(NamedTuple):
    """Recipes whose codes they are under the stored scales, what gives the scales ("" for nothing that is known), the bytes."""

    recipes: tuple[Recipe, ...]
    scales: str
    tally: Tally

    @property
    def names(self) -> tuple[str, ...]:
        """What made the layer, where its scales are known."""
        return tuple(f"{name_of(r)} with scales {self.scales}" for r in self.recipes)

    @property
    def sentence(self) -> str:
        """All this for people."""
        if self.scales:
            return f"{either(self.names)} made these bytes"
        made = either(tuple(name_of(r) for r in self.recipes[:3]))
        return f"searched scales: codes are those of {made} under the stored block scales, which no rule known here gives"


def scale_account(case: Case, plain: Layout) -> Found | None:
    """What a layer of blocks that lie in order has by its scales; None where its codes are not those of its scales."""
    layer, scale = case.layer, case.layer.tensor_scale
    in_order = layer.scale_layout == "linear" and layer.block_scale.size * layer.recipe.block_size == case.x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if plain.mishaps or not in_order or not usable:
        return None
    scaling = "none" if scale is None else "tensor"
    possible = [r for r in candidates_of(layer.recipe) if r.tensor_scaling == scaling and r.block_rows == 1]
    rows = sample_of(plain.shape, layer.recipe).rows
    possible = [r for r in possible if _codes_alike(case, plain, r, rows)]
    for r in (r for r in possible if is_searched(r) and not r.search):
        for amax in amaxes(case, r):
            if _searched_alike(case, plain, r, amax, rows) and (tally := _searched_tally(case, plain, r, amax)).all_bytes:
                return Found((r,), SEARCH.words, tally)
    possible = [r for r in possible if all(_codes_alike(case, plain, r, part) for part in chunks(plain, r))]
    return Found(tuple(possible), "", _tally(case.layer.codes.size, 0, case)) if possible else None


def _tally(codes: int, scales: int, case: Case) -> Tally:
    return Tally(codes, scales, case.layer.codes.size + case.layer.block_scale.size)


def _stored(case: Case, plain: Layout, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a byte, and scales of some rows."""
    codes = plain.reading.read(case.layer, rows, slice(0, plain.shape[1]))
    return codes, np.ascontiguousarray(case.layer.block_scale.reshape(plain.shape[0], -1)[rows]).view(np.uint8)


def _codes_alike(case: Case, plain: Layout, r: Recipe, rows: np.ndarray) -> bool:
    """Whether a recipe makes the codes of some rows under their scales."""
    codes, scales = _stored(case, plain, rows)
    with np.errstate(all="ignore"):
        q = quantize(np.ascontiguousarray(case.x[rows]), r, block_scale=scales, tensor_scale=case.layer.tensor_scale)
    return np.array_equal(unpacked(q.packed, r.element.packing), codes)


def _searched(case: Case, r: Recipe, amax: np.ndarray | None, rows: np.ndarray) -> Quantized:
    x = np.ascontiguousarray(case.x[rows])
    with np.errstate(all="ignore"):
        return quantize(x, r, tensor_amax=amax, block_amax=search_scales(x, r, tensor_amax=amax))


def _searched_alike(case: Case, plain: Layout, r: Recipe, amax: np.ndarray | None, rows: np.ndarray) -> bool:
    """Whether a search finds the scales of some rows."""
    q = _searched(case, r, amax, rows)
    return q.block_scale is not None and np.array_equal(q.block_scale, _stored(case, plain, rows)[1])


def _searched_tally(case: Case, plain: Layout, r: Recipe, amax: np.ndarray | None) -> Tally:
    """Bytes of the whole that a search gives."""
    found = [_equal(case, plain, r, amax, rows) for rows in chunks(plain, r)]
    return _tally(sum(codes for codes, _ in found), sum(scales for _, scales in found), case)


def _equal(case: Case, plain: Layout, r: Recipe, amax: np.ndarray | None, rows: np.ndarray) -> tuple[int, int]:
    codes, scales = _stored(case, plain, rows)
    q = _searched(case, r, amax, rows)
    equal, _ = bytes_equal(unpacked(q.packed, r.element.packing), codes, r)
    return equal, int(np.count_nonzero(q.block_scale == scales))
