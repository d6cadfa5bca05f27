"""Search amaxes: try a grid of multiples of each amax, and keep the multiple with the smallest loss.
The loss is the sum of a power of the errors of fake quantization. An amax may cover a tensor, an expert, a row or a
block.

This search is for recipes without block scales, and for recipes with amax rules.

The grid and the choice come from Model-Optimizer 0.47, torch/quantization/calib/mse.py MseCalibrator. MseCalibrator
sums float32 errors in PyTorch's order. This search computes exact errors and sums them in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fp4kit.call.parse import Call
from fp4kit.call.search_scales import Search, SearchTerms
from fp4kit.reference.pow import power

CHUNK = 1 << 18  # elements whose losses are computed at once, to limit memory


def multiples(grid: tuple[float, float, float]) -> np.ndarray:
    """Return the multiples of an amax to try, from a grid (start, stop, step): float32, start and stop included.

    There are ceil((stop - start) / step) + 1 multiples, equally spaced. If start equals stop, the only multiple is
    start.

    The multiples equal those of torch.linspace. d is (stop - start) / (count - 1) in float32, and each multiple is
    rounded once:

    - In the first half, multiple i is start + i * d.
    - In the second half, multiple i is stop - (count - 1 - i) * d.
    """
    start, stop, step = grid
    first, last, count = np.float32(start), np.float32(stop), math.ceil((stop - start) / step) + 1
    if count == 1:
        return np.array([first])
    between, i = np.float64((last - first) / np.float32(count - 1)), np.arange(count)
    exact = np.where(i < count // 2, np.float64(first) + between * i, np.float64(last) - between * (count - 1 - i))
    return exact.astype(np.float32)


@np.errstate(all="ignore")
def search_amaxes(search: Search, amax: Any, fake_quantize: Callable[[Call], np.ndarray]) -> np.ndarray:
    """Return each amax times the multiple of the grid with the smallest loss: float32 in the shape of amax.

    Among equal losses, the first multiple of the grid is taken. A NaN loss counts as infinite. If the array has no
    elements, a copy of amax is returned.

    Args:
        search: the parsed call of search_scales, with the array, the grid and the loss.
        amax: the tensor amaxes; the block amaxes if the recipe has block scales.
        fake_quantize: a function that fake-quantizes a call with the amaxes that the call holds.
    """
    call, terms = search.call, search.terms
    assert terms.grid is not None
    x = call.x.astype(np.float32)
    call = call._replace(x=x, moved=np.moveaxis(x, call.axis, -1))
    factors = multiples(terms.grid)
    if not x.size:
        return np.array(amax, np.float32)
    is_per_block = call.recipe.scale is not None or call.recipe.tensor_scaling == "block"
    columns = call.recipe.block_size if is_per_block else x.shape[call.axis]
    losses = []
    for factor in factors:
        candidate = np.asarray(amax * factor, np.float32)
        given = {"tensor_amax" if call.recipe.scale is None else "block_amax": candidate}
        values = np.moveaxis(fake_quantize(call._replace(**given)), call.axis, -1)
        losses.append(_loss(call.moved, values, terms, columns).reshape(*np.shape(amax), -1))
    joined = _combined(np.stack(losses), terms.power)
    best = np.where(np.isnan(joined), np.inf, joined).argmin(axis=0)
    return np.asarray(amax * factors[best], np.float32)


def _loss(x: np.ndarray, values: np.ndarray, terms: SearchTerms, columns: int) -> np.ndarray:
    """Return one loss per part of a row of x: the sum of weight * |x - values|^power."""
    rows, quantized = (a.reshape(-1, columns) for a in (x, values))
    result, parts = np.empty(len(rows)), x.shape[-1] // columns
    weights = None if terms.weights is None else terms.weights.reshape(parts, columns)
    step = max(CHUNK // x.shape[-1], 1) * parts  # whole rows of x
    for first in range(0, len(rows), step):
        d = np.abs(rows[first : first + step].astype(np.float64) - quantized[first : first + step])
        powers = d if terms.power == np.inf else power(d, terms.power)
        if weights is not None:
            powers = (weights * powers.reshape(-1, parts, columns)).reshape(-1, columns)
        result[first : first + step] = _combined(powers, terms.power)
    return result


def _combined(terms: np.ndarray, power: float) -> np.ndarray:
    """Return the terms reduced along the last axis to one loss: their sum, or their maximum if power is infinite."""
    # The last axis must not be empty.
    result: np.ndarray = (np.maximum if power == np.inf else np.add).accumulate(terms, axis=-1)[..., -1]
    return result
