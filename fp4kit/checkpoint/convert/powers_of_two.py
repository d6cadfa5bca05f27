"""Convert MXFP4 and MXFP8 to FP8 or MXFP8: the same values, under scales that are powers of two where this is exact.
The recipe quantizes all other blocks. reference/dequantize.py decides and computes this for one array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.table import SCALES, Container
from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.convert.quantize_rows import check_scales, quantized_slab, stored_scales
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import RESCALE, Changes, Job, Sink
from fp4kit.formats import E8M0
from fp4kit.ops.quantize import dequantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.dequantize import changed_values, differing, in_blocks, under_powers_of_two
from fp4kit.storage.files import CheckpointError, shown

_SPAN = 14  # if the exponents of MXFP4 blocks within an FP8 block differ by at most this much, all codes are exact


def write_rescaled(job: Job, readers: Readers, output: Sink) -> Changes:
    """Write a job's weight, and return the numbers of blocks and values that changed, and the largest change."""
    changes = Changes()
    height = lcm(job.new_recipe.block_rows, job.container.slab_rows)
    for slab in slabs(readers, job.weight, job.expert, job.span, height, job.slab_bytes):
        x = np.ascontiguousarray(values_of(job.weight, slab), np.float32)
        q, more = _quantized_under_powers(x, job)
        check_scales(job, q)
        put_rows(job, output, q.packed, stored_scales(q))
        changes = changes.plus(more)
    return changes


def _quantized_under_powers(x: np.ndarray, job: Job) -> tuple[Quantized, Changes]:
    own = quantized_slab(x, job, None)
    changed = differing(x, dequantize(own, np.float32)) if own.recipe.scale is not None else None
    q = under_powers_of_two(x, own, changed)
    after = dequantize(q, np.float32)
    count, error = changed_values(x, after)
    blocks = in_blocks(differing(x, after), q.recipe).any(axis=(-3, -1)) if count else np.zeros(0)
    return q, Changes(int(np.count_nonzero(blocks)), count, float(error))


def check_rescaled(weights: Iterable[tuple[Weight, Container, Recipe]]) -> None:
    """Raise CheckpointError if values would change, with the numbers of blocks and values of the first such weight."""
    lossy: list[tuple[Weight, Recipe, Changes]] = []
    with Readers() as readers:
        for weight, form, recipe in weights:
            if _has_small_spans(readers, weight, recipe):
                continue
            job, changes = Job("", RESCALE, weight, (), recipe=recipe, form=form, nonfinite="keep"), Changes()
            for expert in range(1 if weight.members else weight.experts):
                changes = changes.plus(write_rescaled(replace(job, expert=expert), readers, _Nothing()))
            if changes.values:
                lossy.append((weight, recipe, changes))
    if lossy:
        raise _refused_rescaling(*lossy[0], len(lossy) - 1)


def _refused_rescaling(weight: Weight, recipe: Recipe, changes: Changes, others: int) -> CheckpointError:
    rows, width = recipe.block or (1, weight.shape[-1])
    total = weight.experts * -(-weight.shape[-2] // rows) * (weight.shape[-1] // width)
    what = f"blocks of {rows}x{width}" if recipe.block else "rows"
    more = f" (and {others} more layers)" if others else ""
    return CheckpointError(
        f"{shown(weight.tensor)}: {changes.values} values in {changes.blocks} of {total} {what} would change, because"
        f" the exponents within a block differ too much for {recipe.element.name} under one scale{more}; use"
        " --requantize to round the values of these blocks, or leave the layer out with --keep"
    )


def _has_small_spans(readers: Readers, weight: Weight, recipe: Recipe) -> bool:
    """Return whether an MXFP4 weight is exact, judged by its scales alone; False if that needs the codes."""
    have, place = weight.container, weight.parts.get(SCALES)
    if have is None or have.kind != "mxfp4":
        return False
    if recipe.scale is not None:
        return True  # a block of 32 E2M1 codes is exact in every MXFP8 recipe
    rows, columns = weight.shape[-2:]
    groups = columns // have.group_size
    if place is None or weight.members or weight.rotation or weight.order or have.in_blocks or have.swizzled:
        return False
    if weight.transposed or place.entry.shape[-2:] != (rows, groups):
        return False
    height, width = recipe.block or (1, columns)
    width //= have.group_size
    for expert in range(weight.experts):
        stored = readers.matrix(place, expert) if len(place.entry.shape) == 3 else readers.array(place)
        exponents = stored.view(np.uint8).astype(np.int16)
        for first in range(0, rows, height):
            tiles = exponents[first : first + height].reshape(-1, groups // width, width)
            spans = tiles.max(axis=(0, 2)) - tiles.min(axis=(0, 2))
            if spans.max(initial=0) > _SPAN or tiles.max(initial=0) == E8M0.nan_code:
                return False
    return True


class _Nothing:
    """A Sink that keeps nothing, to count what a conversion would change."""

    def has(self, part: str) -> bool:
        return False

    def put(self, part: str, array: Any) -> None:
        return None
