"""Search of tensor amaxes by their error: the best of a grid of multiples, of tensors, experts or rows without block
scales.

Source: Model-Optimizer 0.47 torch/quantization/calib/mse.py MseCalibrator, whose grid and choice these are. It sums
float32 errors in PyTorch's order; here they are exact differences, added in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fp4kit.call.parse import Call
from fp4kit.call.search_scales import Search, Terms
from fp4kit.reference.pow import power

CHUNK = 1 << 18  # elements at a time


def multiples(grid: tuple[float, float, float]) -> np.ndarray:
    """float32 multiples from start to stop, both included: ceil((stop - start) / step) + 1, as torch.linspace makes
    them.

    start + i * step in the first half, stop - i * step from the end in the second, each rounded once, of a float32
    step.
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
    """amax * multiple of least loss, float32 in the shape of amax; the first of equals. Losses that are NaN count as
    infinite.
    """
    call, terms = search.call, search.terms
    assert terms.grid is not None
    x = call.x.astype(np.float32)
    call = call._replace(x=x, moved=np.moveaxis(x, call.axis, -1))
    factors = multiples(terms.grid)
    if not x.size:
        return np.array(amax, np.float32)
    losses = []
    for factor in factors:
        values = np.moveaxis(
            fake_quantize(call._replace(tensor_amax=np.asarray(amax * factor, np.float32))), call.axis, -1
        )
        losses.append(_loss(call.moved, values, terms).reshape(*np.shape(amax), -1))
    joined = _joined(np.stack(losses), terms.power)
    best = np.where(np.isnan(joined), np.inf, joined).argmin(axis=0)
    return np.asarray(amax * factors[best], np.float32)


def _loss(x: np.ndarray, values: np.ndarray, terms: Terms) -> np.ndarray:
    """The loss of each row of moved x, in float64."""
    rows, made = (a.reshape(-1, a.shape[-1]) for a in (x, values))
    found = np.empty(len(rows))
    step = max(CHUNK // x.shape[-1], 1)
    for first in range(0, len(rows), step):
        d = np.abs(rows[first : first + step].astype(np.float64) - made[first : first + step])
        powers = d if terms.power == np.inf else power(d, terms.power)
        found[first : first + step] = _joined(powers if terms.weights is None else terms.weights * powers, terms.power)
    return found


def _joined(terms: np.ndarray, power: float) -> np.ndarray:
    """Their sum over the last axis from the first to the last, or the largest."""
    found: np.ndarray = (np.maximum if power == np.inf else np.add).accumulate(terms, axis=-1)[..., -1]
    return found
