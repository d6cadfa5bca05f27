"""Merge the update of an adapter into a quantized weight, slab by slab, so that as much of it as possible survives.

The tensor scale of the source is kept if it fits the merged values. Each block then gets the block scale, that of the
source or a new one, whose decoded values have the smaller squared error. So blocks without an update keep their codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.convert.quantize_rows import (
    column_weights,
    quantized_slab,
    stored_scales,
    survival,
    survival_of,
    with_codes,
    write_quantized,
)
from fp4kit.checkpoint.convert.rename import write_renamed, write_scalars
from fp4kit.checkpoint.convert.searched_rows import search_rows
from fp4kit.checkpoint.model.slabs import Readers, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.plan.job import MERGE, RENAME, REQUANTIZE, Job, Sink, Survival
from fp4kit.checkpoint.plan.scale_search import Losses
from fp4kit.formats import ElementFormat
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.tensor_rules import tensor_scale

_LOWEST_SHARE = 512  # a tensor scale that reaches over 512 times the amax leaves no normal E4M3 scale for it
_NEAREST_AMAX = 2.0**-7  # the largest relative difference of a tensor scale that the rule of a recipe may make


def write_merged(job: Job, readers: Readers, output: Sink, amax: np.float32) -> tuple[str, Losses, Survival]:
    """Write the merged weight of a job."""
    scale = tensor_scale_of(readers, job.weight, job.expert)
    if job.merge_scales == "new" or not keeps_tensor_scale(job.container.element, scale, job.new_recipe, amax):
        _, losses, survival, _ = write_quantized(job, readers, _WithoutInputScale(output), amax)
        write_scalars(job, readers, output, (INPUT_SCALE,))
        return REQUANTIZE, losses, survival
    if job.weight.update is None:
        write_renamed(job, readers, output)
        return RENAME, Losses(), Survival()
    losses, survival = Losses(), Survival()
    weights = column_weights(job, readers)
    fits = amax_for(scale, job.new_recipe)
    computes = job.merge_scales == "nearest" and (scale is None or fits is not None)
    for slab in slabs(readers, job.weight, job.expert, job.span, slab_rows_of(job), job.slab_bytes):
        x = values_of(job.weight, slab)

        def new(x: np.ndarray = x) -> Quantized:
            nonlocal losses
            if not job.search:
                return quantized_slab(x, job, fits)
            q, more = search_rows(x, job, np.float32(fits or 0), weights)
            losses = losses.plus(more)
            return q

        q = nearest(x, slab.scales, scale, job.new_recipe, new if computes else None, weights)
        put_rows(job, output, q.packed, stored_scales(q))
        survival = survival.plus(survival_of(job.weight, slab, dequantize(q, np.float32), q.packed))
    write_scalars(job, readers, output)
    return MERGE, losses, survival


def slab_rows_of(job: Job) -> int:
    """Return the number of rows of which the slabs of a job must be multiples."""
    return lcm(job.new_recipe.block_rows, job.container.slab_rows)


class _WithoutInputScale:
    """A Sink that does not accept the input scale, which a merge copies from the source."""

    def __init__(self, output: Sink) -> None:
        self._output = output

    def has(self, part: str) -> bool:
        """Return whether ``part`` is accepted."""
        return part != INPUT_SCALE and self._output.has(part)

    def put(self, part: str, array: Any) -> None:
        """Append to ``part``."""
        self._output.put(part, array)


def keeps_tensor_scale(element: ElementFormat, scale: np.float32 | None, recipe: Recipe, amax: np.float32) -> bool:
    """Return whether a tensor scale fits merged values of this amax; True without a tensor scale."""
    if scale is None:
        return True
    second, top = np.sort(element.values[np.isfinite(element.values)])[-2:]
    largest = recipe.scale.max if recipe.scale is not None else 1.0
    limit = np.float64(scale) * largest * (top + (top - second) / 2)
    return not amax or bool(limit / _LOWEST_SHARE <= amax < limit)


def amax_for(scale: np.float32 | None, recipe: Recipe) -> np.float32 | None:
    """Return the amax from which a recipe computes this tensor scale, or nearly; None if there is none."""
    if scale is None:
        return None

    def made(amax: np.float32) -> np.float64:
        return np.float64(np.asarray(tensor_scale(np.asarray(amax), recipe, np.dtype(np.float32)).decode).item())

    first = np.float32(np.float64(scale) / made(np.float32(1)))
    near = [first, *(np.nextafter(first, to) for to in (np.float32(0), np.float32(np.inf)))]
    best = min(near, key=lambda one: abs(made(one) - np.float64(scale)))
    return best if abs(made(best) / np.float64(scale) - 1) <= _NEAREST_AMAX else None


@ieee("merge_adapter")
def nearest(
    x: np.ndarray,
    scales: Any,
    scale: np.float32 | None,
    recipe: Recipe,
    new: Callable[[], Quantized] | None,
    weights: np.ndarray | None,
) -> Quantized:
    """Quantize rows with the tensor scale ``scale``, and per block the better of two block scales."""
    base = _with_scales(x, recipe, scales, scale)
    if new is None or (recipe.scale is None and scale is not None):
        return base
    found = new()
    other = _with_scales(x, recipe, found.block_scale if recipe.scale is not None else found.tensor_scale, scale)
    height, width = recipe.block_rows, recipe.block_size if recipe.block else x.shape[1]
    errors = []
    for q in (base, other):
        error = np.square(dequantize(q, np.float32).astype(np.float64) - x)
        error = error if weights is None else error * weights
        padded = np.pad(error, ((0, -len(x) % height), (0, -x.shape[1] % width)))
        errors.append(padded.reshape(-1, height, padded.shape[1] // width, width).sum((1, 3)))
    better = np.repeat(errors[1] < errors[0], height, 0)[: len(x)]  # (rows, blocks)
    by_byte = np.repeat(better, width * recipe.element.bits // 8, 1)[:, : base.packed.shape[1]]
    packed = np.where(by_byte, other.packed, base.packed)
    if recipe.scale is not None:
        return replace(base, packed=packed, block_scale=np.where(better, other.block_scale, base.block_scale))
    shape = base.tensor_scale.shape
    chosen = np.where(better.reshape(shape), other.tensor_scale, base.tensor_scale)
    return replace(base, packed=packed, tensor_scale=chosen)


def _with_scales(x: np.ndarray, recipe: Recipe, scales: Any, scale: np.float32 | None) -> Quantized:
    """Quantize rows with given scales: block scales and the tensor scale, or float32 scales of rows or blocks."""
    if recipe.scale is not None:
        return quantize(x, recipe, block_scale=np.ascontiguousarray(scales).view(np.uint8), tensor_scale=scale)
    if recipe.tensor_scaling == "tensor":
        return quantize(x, recipe, tensor_scale=scale)
    rows = np.asarray(scales, np.float32)
    if recipe.block is not None and len(rows) != len(x):
        rows = np.repeat(rows, recipe.block_rows, 0)[: len(x)]
    return quantize(x, recipe, tensor_scale=rows.reshape(len(x)) if recipe.block is None else rows)


def keeps(q: Quantized, largest: np.float32) -> bool:
    """Return whether the tensor scale of a quantized matrix fits merged values whose amax is ``largest``."""
    scale = np.float32(np.asarray(q.tensor_scale).item()) if q.recipe.tensor_scaling == "tensor" else None
    return keeps_tensor_scale(q.recipe.element, scale, q.recipe, largest)


def merged(q: Quantized, x: np.ndarray, scales: str, largest: np.float32) -> Quantized:
    """Quantize merged values as ``write`` does, with the scales of ``q`` if they fit, all as NumPy arrays."""
    recipe = q.recipe
    by_tensor = recipe.tensor_scaling == "tensor"
    if scales == "new" or not keeps(q, largest):
        return replace(quantize(x, recipe, tensor_amax=largest if by_tensor else None), dtype=q.dtype)
    scale = np.float32(np.asarray(q.tensor_scale).item()) if by_tensor else None
    fits = amax_for(scale, recipe)
    computes = scales == "nearest" and (scale is None or fits is not None)
    own = q.block_scale if recipe.scale is not None else q.tensor_scale
    new = partial(quantize, x, recipe, tensor_amax=fits) if computes else None
    return replace(nearest(x, own, scale, recipe, new, None), dtype=q.dtype)


def survival_of_merge(q: Quantized, base: np.ndarray, delta: np.ndarray, made: Quantized) -> Survival:
    """Return how much of the update ``delta`` of the values ``base`` of ``q`` is left in the result ``made``."""
    kept = survival(base, delta, dequantize(made, np.float32))
    return with_codes(kept, q.packed, made.packed, q.recipe.element.bits)
