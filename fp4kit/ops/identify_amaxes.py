"""Find the tensor amaxes from which a stored tensor scale can have been made.

identify quantizes with each of them when it tries a candidate recipe.
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
    """Find the amaxes that may have been the tensor amax of q, a quantized array made from x.

    computed: a cache of the amaxes of x. Its keys are the recipe fields and the Hadamard option on which an amax
    depends.
    """

    def __init__(self, q: Quantized, x: np.ndarray) -> None:
        self.q, self.x = q, x
        self.computed: dict[tuple[Any, ...], np.ndarray] = {}

    def amax_of_x(self, r: Recipe, hadamard: Hadamard = False) -> np.ndarray:
        """Return the tensor amax of x, as recipe r computes it after the given Hadamard transform.

        It has one entry per tensor, row or block, as r.tensor_scaling says, and may be NaN if x holds NaN.
        """
        key = (r.tensor_scaling, r.amax_nan, r.flush, r.block if r.tensor_scaling == "block" else None, hadamard)
        if key not in self.computed:
            self.computed[key] = compute_tensor_amax(np.moveaxis(self.x, self.q.axis, -1), r, SIGN_MASKS[hadamard])
        return self.computed[key]

    def for_recipe(self, r: Recipe, hadamard: Hadamard = False) -> Iterator[np.ndarray | None]:
        """Yield the amaxes to quantize with, the most likely first. None stands for the amax of x.

        Yield only None in three cases: r makes no tensor scale; r and q's recipe differ in whether tensor scales belong
        to tensors, rows or blocks; or q.tensor_scale or q.tensor_amax holds NaN.

        If q's recipe makes q.tensor_scale from q.tensor_amax, this amax is the only one. Otherwise, yield amaxes from
        which r makes q.tensor_scale. The first is the amax of x if it gives this scale, or else the amax that the scale
        implies. The others give an equal tensor scale, but an encode scale that differs from all before.
        """
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
        """Return one amax per tensor scale of q: that of x if r makes the scale from it, otherwise the implied amax.

        The implied amax is computed from the scale alone (see _implied). If an amax of x is NaN, or if r needs another
        number of scales than q has, all entries are implied amaxes.
        """
        q = self.q
        amax, implied = self.amax_of_x(r, hadamard), _implied(q.tensor_scale, r, q.dtype)
        if amax.shape != implied.shape or np.isnan(amax).any():
            return implied
        return np.where(same_scale(_decode_scale(amax, r, q), q.tensor_scale), amax, implied)


def amaxes_of(scale: np.ndarray, r: Recipe, dtype: np.dtype, likely: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield amaxes from which a recipe makes a stored tensor scale.

    The first amax is `likely`, or the amax that the scale implies if `likely` is None. The other amaxes give the stored
    scale too, but each gives an encode scale that no earlier amax gave. The encode scale is the number by which
    elements are multiplied.

    dtype: the dtype that was quantized.
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
    """Return the amax from which a recipe makes a tensor scale. If there is none, return scale * covered_range(r).

    covered_range(r) is the amax that a tensor scale of 1 covers. The product may be infinite.
    """
    implied = implied_amax(scale, r, dtype)
    with np.errstate(over="ignore"):
        return np.where(implied >= 0, implied, np.asarray(scale * covered_range(r), np.float32))


def _neighbors(amax: np.ndarray, scale: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield MAX_NEIGHBORS (16) arrays of float32 amaxes that all give `scale`, in ascending order, as stacks of arrays.

    All arrays are in one stack if there are few scales; otherwise, each is in a stack of its own, to save memory.

    The arrays begin at the smallest amax that gives the scale. If fewer than MAX_NEIGHBORS amaxes give it, the largest
    is repeated. Only amaxes near the implied one are tried (see amax_interval). Where none of these gives the scale,
    every array has the value of `amax`.
    """
    first, last = amax_interval(scale, r, dtype, NEAR)
    has_interval = (scale > 0) & np.isfinite(scale) & (first <= last)
    height = MAX_NEIGHBORS if scale.size <= FEW else 1
    for start in range(0, MAX_NEIGHBORS, height):
        steps = np.arange(start, start + height).reshape(-1, *(1,) * first.ndim)
        bits = np.minimum(first + steps, last).astype(np.int32)
        yield np.where(has_interval, bits.view(np.float32), amax)


def _decode_scale(amax: np.ndarray, r: Recipe, q: Quantized) -> np.ndarray:
    """Return the decode scale that the recipe r makes from each amax, to compare it with q.tensor_scale.

    q: the quantized array. Only q.dtype, the dtype of the elements before quantization, is used.
    """
    return tensor_scale(amax, r, q.dtype).decode
