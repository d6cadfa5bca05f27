"""Find the tensor amaxes from which a stored tensor scale can have been made.

identify quantizes with each of these amaxes when it tries a candidate recipe. A tensor amax is the largest magnitude of
an array, row or block, from which a recipe computes the tensor scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp4kit.call.parse import TE_SIGN_MASK
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.implied_amax import FEW, NEAR, amax_interval, covered_range, implied_amax, same_scale
from fp4kit.reference.tensor_rules import tensor_scale
from fp4kit.types import Hadamard

MAX_NEIGHBORS = 16  # the most amaxes that are tried for one tensor scale
SIGN_MASKS: dict[Hadamard, int | None] = {False: None, True: TE_SIGN_MASK, "no_signs": 0}


class CandidateAmaxes:
    """The tensor amaxes with which a recipe may have made the quantized array q from the array x.

    q, x: a Quantized and an array, both in host memory. computed: a cache of the amaxes of x. Its keys are the recipe
    fields and the Hadamard option on which an amax depends.
    """

    def __init__(self, q: Quantized, x: np.ndarray) -> None:
        self.q, self.x = q, x
        self.computed: dict[tuple[Any, ...], np.ndarray] = {}

    def amax_of_x(self, r: Recipe, hadamard: Hadamard = False) -> np.ndarray:
        """Return the tensor amax of x, as recipe r computes it after the given Hadamard transform."""
        key = (r.tensor_scaling, r.amax_nan, r.flush, r.block if r.tensor_scaling == "block" else None, hadamard)
        if key not in self.computed:
            self.computed[key] = compute_tensor_amax(np.moveaxis(self.x, self.q.axis, -1), r, SIGN_MASKS[hadamard])
        return self.computed[key]

    def for_recipe(self, r: Recipe, hadamard: Hadamard = False) -> Iterator[np.ndarray | None]:
        """Yield the amaxes with which recipe r may have made q from x, the most likely first."""
        q = self.q
        # quantize rejects a NaN amax. So yield None, which makes quantize compute the amax from x.
        has_nan = any(a is not None and np.isnan(a).any() for a in (q.tensor_scale, q.tensor_amax))
        if r.tensor_rule is None or r.tensor_scaling != q.recipe.tensor_scaling or has_nan:
            yield None
            return
        if q.tensor_amax is not None and same_scale(_decode_scale(q.tensor_amax, q.recipe, q), q.tensor_scale).all():
            yield q.tensor_amax
            return
        yield from amaxes_of(q.tensor_scale, r, q.dtype, self._amax_of_x_or_implied(r, hadamard))

    def _amax_of_x_or_implied(self, r: Recipe, hadamard: Hadamard) -> np.ndarray:
        """Return one amax per tensor scale of q: that of x if r makes the scale from it, otherwise the implied amax."""
        q = self.q
        amax, implied = self.amax_of_x(r, hadamard), _implied(q.tensor_scale, r, q.dtype)
        if amax.shape != implied.shape or np.isnan(amax).any():
            return implied
        return np.where(same_scale(_decode_scale(amax, r, q), q.tensor_scale), amax, implied)


def amaxes_of(scale: np.ndarray, r: Recipe, dtype: np.dtype, likely: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield candidates for the amaxes from which recipe r made a stored tensor scale: arrays in the shape of
    `scale`.
    """
    amax = _implied(scale, r, dtype) if likely is None else likely
    yield amax
    seen = [tensor_scale(amax, r, dtype).encode]
    for neighbors in _neighbors(amax, scale, r, dtype):
        encodes = np.broadcast_to(tensor_scale(neighbors, r, dtype).encode, neighbors.shape)
        for i, encode in enumerate(encodes):
            if not any(np.array_equal(encode, other) for other in seen):
                seen.append(encode)
                yield neighbors[i, ...]


def _implied(scale: np.ndarray, r: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return, for each entry of `scale`, the amax from which recipe r makes this tensor scale."""
    implied = implied_amax(scale, r, dtype)
    with np.errstate(over="ignore"):
        return np.where(implied >= 0, implied, np.asarray(scale * covered_range(r), np.float32))


def _neighbors(amax: np.ndarray, scale: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield float32 amaxes that give `scale`: MAX_NEIGHBORS (16) arrays in ascending order, in stacks."""
    first, last = amax_interval(scale, r, dtype, NEAR)
    has_interval = (scale > 0) & np.isfinite(scale) & (first <= last)
    height = MAX_NEIGHBORS if scale.size <= FEW else 1
    for start in range(0, MAX_NEIGHBORS, height):
        steps = np.arange(start, start + height).reshape(-1, *(1,) * first.ndim)
        bits = np.minimum(first + steps, last).astype(np.int32)
        yield np.where(has_interval, bits.view(np.float32), amax)


def _decode_scale(amax: np.ndarray, r: Recipe, q: Quantized) -> np.ndarray:
    """Return the tensor scale that recipe r makes from each amax and by which decoding multiplies."""
    return tensor_scale(amax, r, q.dtype).decode
