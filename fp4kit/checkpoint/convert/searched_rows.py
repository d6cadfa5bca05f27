"""Quantize rows with block scales found by a search, and compute the errors with and without the search. A job
describes the conversion of one weight; it names the recipe, the error that the search minimizes, and the device.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import making_current, to_device
from fp4kit.checkpoint.convert.searched_blocks import search_blocks
from fp4kit.checkpoint.model.slabs import row_chunks
from fp4kit.checkpoint.plan.job import Job
from fp4kit.checkpoint.plan.scale_search import BLOCK_RECIPES, Losses
from fp4kit.ops.amax import search_scales
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.types import Objective


def search_rows(x: np.ndarray, job: Job, amax: np.float32, weights: np.ndarray | None) -> tuple[Quantized, Losses]:
    """Quantize ``x`` with the block scales that give the smallest error under the objective ``job.search``."""
    if job.device is None:
        before, after = _both(x, job, amax, weights)
    else:
        with making_current(job.device):
            device_weights = None if weights is None else to_device(weights)
            before, after = (q.to("numpy") for q in _both(to_device(x), job, amax, device_weights))
    return after, _losses(x, before, after, weights)


def _both(x: Any, job: Job, amax: np.float32, weights: Any) -> tuple[Quantized, Quantized]:
    """Quantize ``x`` twice, and return (the result without the scale search, the result with it)."""
    r = job.new_recipe
    if r.id in BLOCK_RECIPES:
        return quantize(x, r), search_blocks(x, r, job.search, weights)
    found = search_scales(x, r, objective=cast(Objective, job.search), tensor_amax=amax, weights=weights)
    return quantize(x, r, tensor_amax=amax), quantize(x, r, tensor_amax=amax, block_amax=found)


@ieee("convert")
def _losses(x: np.ndarray, before: Quantized, after: Quantized, weights: np.ndarray | None) -> Losses:
    """Return three sums: of x^2, of the squared errors of ``before``, and of the squared errors of ``after``."""
    # Sums are taken over chunks of rows, in order, so that they are reproducible.
    values = [dequantize(q, np.float32) for q in (before, after)]
    found = Losses()
    for rows in row_chunks(*x.shape):
        wide = x[rows].astype(np.float64)
        found = found.plus(Losses(*(_squares(part, weights) for part in (wide, *(wide - y[rows] for y in values)))))
    return found


def _squares(x: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the sum of squares of ``x``, added in an order that does not depend on the machine."""
    if weights is None:
        flat = x.reshape(-1)
        return float(np.einsum("i,i->", flat, flat))
    return float(np.einsum("ij,ij,j->", x, x, weights.astype(np.float64)))
