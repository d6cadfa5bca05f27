"""Read quantized layers of a checkpoint as explain and explain_fp8 need them: a whole layer, or a sample of its rows.

A sample has groups of adjacent rows, because the blocks of some recipes span several rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import lcm
from zlib import crc32

import numpy as np

from fp4kit.checkpoint.containers.table import CODES, LOW_RANK_A, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer
from fp4kit.checkpoint.identify.try_hypotheses import recipes_of
from fp4kit.checkpoint.model.slabs import Readers, scales_of, slabs, tensor_scale_of
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.recipes import RECIPES, Recipe

RowRanges = tuple[tuple[int, int], ...]  # ranges of rows, in ascending order
SAMPLED_ROWS = 256  # number of rows that are read of a layer; layers with at most as many rows are read whole
_AT_ONCE = 4 << 20  # a layer of at most this many bytes is read at once; of a larger one, the sampled rows are read


def sample_spans(weight: Weight) -> RowRanges | None:
    """Return the rows of a matrix of a weight to compare with its source; None if only all rows will do."""
    form, rows = weight.container, weight.shape[-2]
    assert form is not None
    if rows <= SAMPLED_ROWS or LOW_RANK_A in weight.parts or not _is_regular(weight):
        return None
    is_fp8 = form.scale is None or form.block[0] > 1
    height = lcm(16, form.block[0]) if is_fp8 else lcm(*(r.block_rows for r in recipes_of(_any_recipe(form))), 4)
    count = max(SAMPLED_ROWS // height, 4)
    starts = np.linspace(0, rows, count + 1).astype(np.int64)[:-1] // height * height
    ends = np.append(starts[1:], rows)
    room = np.maximum((ends - starts) // height, 1)
    drawn = np.random.default_rng(crc32(weight.name.encode())).integers(0, room)
    drawn[0], drawn[-1] = 0, max(-(-(rows - starts[-1]) // height) - 1, 0)
    first = np.unique(starts + drawn * height)
    return tuple((int(start), int(min(start + height, rows))) for start in first)


def _is_regular(weight: Weight) -> bool:
    """Return whether the parts of a quantized weight have the shapes that its container needs."""
    form = weight.container
    assert form is not None
    if form.scale is None or form.block[0] > 1:
        return True
    shaped = form.in_blocks or weight.parts[SCALES].entry.shape in form.shapes_of_scales(weight.shape)
    return shaped and form.has_tensor_scale == (TENSOR_SCALE in weight.parts)


def rows_in(spans: RowRanges) -> np.ndarray:
    """Return the numbers of the rows in ``spans``."""
    return np.concatenate([np.arange(*span) for span in spans])


def some_rows(weight: Weight, expert: int, readers: Readers, spans: RowRanges | None) -> StoredLayer | Fp8Layer:
    """Read rows of one layer."""
    if spans is None:
        return _limited(stored_layer(weight, expert, readers))
    if weight.nbytes // weight.experts <= _AT_ONCE:
        return _limited(_selected(stored_layer(weight, expert, readers), rows_in(spans)))
    parts = [stored_layer(weight, expert, readers, span) for span in spans]
    codes = np.concatenate([part.codes for part in parts])
    if isinstance(parts[0], Fp8Layer):
        scales = [part.scales for part in parts if isinstance(part, Fp8Layer)]
        joined = scales[0] if parts[0].scaling == "tensor" else np.concatenate(scales)
        return replace(parts[0], codes=codes, scales=joined)
    block_scale = np.concatenate([part.block_scale for part in parts if isinstance(part, StoredLayer)])
    return _limited(replace(parts[0], codes=codes, block_scale=block_scale))


def _limited(layer: StoredLayer | Fp8Layer) -> StoredLayer | Fp8Layer:
    """Return a layer of which faults in the order of rows are not tried."""
    return replace(layer, some_rows=True) if isinstance(layer, StoredLayer) else layer


def _selected(layer: StoredLayer | Fp8Layer, rows: np.ndarray) -> StoredLayer | Fp8Layer:
    """Return some rows of a layer. For scales of square blocks, ``rows`` must be whole blocks of rows."""
    codes = np.ascontiguousarray(layer.codes[rows])
    if isinstance(layer, StoredLayer):
        scales = layer.block_scale.reshape(len(layer.codes), -1)[rows]
        return replace(layer, codes=codes, block_scale=np.ascontiguousarray(scales))
    if layer.scaling == "tensor":
        return replace(layer, codes=codes)
    return replace(
        layer, codes=codes, scales=layer.scales[rows if layer.scaling == "row" else np.unique(rows // layer.side)]
    )


def stored_layer(
    weight: Weight, expert: int, readers: Readers, span: tuple[int, int] | None = None
) -> StoredLayer | Fp8Layer:
    """Read one layer of a quantized weight, and return its parts with linear block scales and the low nibble first."""
    form = weight.container
    assert form is not None
    if form.scale is None or form.block[0] > 1:
        return _fp8_layer(weight, expert, readers, span)
    if _is_regular(weight):
        slab = next(slabs(readers, weight, expert, span, max_bytes=1 << 40))
        tensor_scale = slab.tensor_scale
        codes, scales = (np.ascontiguousarray(part).view(np.uint8) for part in (slab.codes, slab.scales))
    else:
        tensor_scale = tensor_scale_of(readers, weight, expert) if TENSOR_SCALE in weight.parts else None
        stored = (weight.parts[part] for part in (CODES, SCALES))
        codes, scales = (_share(readers, part, weight, expert).view(np.uint8) for part in stored)
        if weight.transposed:
            codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    rows = weight.shape[-2] if span is None else span[1] - span[0]
    return StoredLayer(codes.reshape(rows, -1), scales, tensor_scale, _any_recipe(form))


def _fp8_layer(weight: Weight, expert: int, readers: Readers, span: tuple[int, int] | None) -> Fp8Layer:
    """Read one layer of FP8 codes with one scale per tensor, per row or per square block."""
    form = weight.container
    assert form is not None
    slab = next(slabs(readers, weight, expert, span, max_bytes=1 << 40))
    codes = np.asarray(slab.codes).view(np.uint8).reshape(-1, weight.shape[-1])
    if form.is_cast:
        return Fp8Layer(codes, np.ones((1, 1), np.float32), "tensor", element=form.element, is_cast=True)
    if TENSOR_SCALE in weight.parts:
        tensor_scale = np.asarray(slab.tensor_scale, np.float32).reshape(1, 1)
        return Fp8Layer(codes, tensor_scale, "tensor", element=form.element)
    scales = np.asarray(scales_of(form, np.asarray(slab.scales)), np.float32)
    return (
        Fp8Layer(codes, scales, "block", form.block[0])
        if form.block[0] > 1
        else Fp8Layer(codes, scales, "row", element=form.element)
    )


def _share(readers: Readers, part: Located, weight: Weight, expert: int) -> np.ndarray:
    """Read the elements of a tensor that belong to one expert, for a stack of experts whose shapes are damaged."""
    experts, shape = weight.experts, part.entry.shape
    if len(weight.shape) == 3 and len(shape) > 1 and shape[0] == experts:
        return readers.matrix(part, expert)
    whole = readers.array(part)
    return whole if len(weight.shape) == 2 or whole.size % experts else whole.reshape(experts, -1)[expert]


@cache
def _any_recipe(form: Container) -> Recipe:
    """Return a recipe that stands for the format of a container: its element format, scale format and block size."""
    found = next((recipe for recipe in RECIPES.values() if form.stores(recipe)), None)
    return found or next(variant for variant in _variants(form) if form.stores(variant))


def _variants(form: Container) -> Iterator[Recipe]:
    """Yield the recipes with the container's element and scale formats, changed to have its block size."""
    for recipe in RECIPES.values():
        if (recipe.element, recipe.scale) == (form.element, form.scale):
            with suppress(ValueError):  # the recipe does not allow such blocks
                yield replace(recipe, block=form.block)
