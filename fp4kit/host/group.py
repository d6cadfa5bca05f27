"""Run grouped operations (GroupedPlan and quantize_grouped) on NumPy arrays, one array after the other.

cuda/engine has classes of the same names for CuPy arrays, which need only one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fp4kit.call.amaxes import reshape_clip_amax
from fp4kit.call.grouped_errors import each
from fp4kit.call.parse import Call, check_codes, with_amaxes
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import tensor_amax_shape
from fp4kit.recipes import Recipe

# The type of a function run(operation, call, ...): it returns the result from the first host engine that supports it.
Run = Callable[..., Any]


class HostGroup:
    """N parsed calls on NumPy arrays, prepared once with amaxes and outputs, and run as often as needed.

    Every run overwrites the outputs of the previous run. An error of one call names its position among the arrays.

    Args:
        op: the public function that error messages name.
        calls: the parsed calls.
        r: the recipe of the calls.
        run: the function by which calls run on the first host engine that supports them.

    Attributes:
        vector: the amaxes of all arrays in one array, which the group computes; None if the caller passed the amaxes,
            or if the recipe has no tensor scale.
    """

    def __init__(self, op: str, calls: Sequence[Call], r: Recipe, run: Run) -> None:
        self._op, self._calls, self._recipe, self._run = op, calls, r, run
        self._codes: list[Quantized] | None = None
        self._values: list[Any] | None = None
        self._amaxes: list[np.ndarray] = []
        self.vector: np.ndarray | None = None
        if r.tensor_scaling != "none" and all(call.tensor_amax is None for call in calls):
            shapes = [tensor_amax_shape(call.moved.shape, r) for call in calls]
            self.vector = np.zeros(sum(map(prod, shapes)), np.float32)
            ends = np.cumsum([prod(shape) for shape in shapes], dtype=int)
            parts = np.split(self.vector, ends[:-1]) if shapes else []
            self._amaxes = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def computes_amaxes(self) -> bool:
        """Return True if the group computes amaxes, False if the caller passed them or the recipe needs none."""
        return self.vector is not None

    def amax(self) -> list[Any]:
        """Return the tensor amax of each array: the amax that the caller passed, or a view of `vector`."""
        if self.vector is None:
            return each(self._op, lambda c: with_amaxes(c, c.tensor_amax, None).tensor_amax, self._calls)
        for call, amax in zip(self._calls, self._amaxes, strict=True):
            amax[...] = compute_tensor_amax(call.moved, self._recipe, call.mask)
        return list(self._amaxes)

    def quantize(self, compute_amaxes: bool) -> list[Quantized]:
        """Quantize all arrays, and return one Quantized per array."""
        each(self._op, lambda call: check_codes(call, call.layout), self._calls)
        calls = self._with_amaxes(compute_amaxes)
        outs: Sequence[Quantized | None] = self._codes or [None] * len(calls)
        self._codes = [self._run("quantize", c._replace(out=out)) for c, out in zip(calls, outs, strict=True)]
        return self._codes

    def fake_quantize(self, compute_amaxes: bool) -> list[Any]:
        """Fake-quantize all arrays, and return one array of values per array."""
        values = [self._run("fake_quantize", call) for call in self._with_amaxes(compute_amaxes)]
        if self._values is None:
            self._values = values
        else:
            for target, value in zip(self._values, values, strict=True):
                target[...] = value
        return self._values

    def _with_amaxes(self, compute: bool) -> list[Call]:
        """Return the calls with their tensor amaxes: those of the caller, otherwise those in `vector`."""
        # An amax that is computed now and holds NaN is left out, because a call rejects a NaN amax.
        amaxes = [call.tensor_amax for call in self._calls]
        if self.vector is not None:
            amaxes = [None if np.isnan(a).any() else a for a in self.amax()] if compute else list(self._amaxes)
        return each(self._op, lambda call, a: with_amaxes(call, a, call.block_amax), self._calls, amaxes)


class HostClipGroup:
    """N calls to fake_quantize_backward on NumPy arrays, with the clip limit of each.

    calls: the parsed calls. amaxes: the clip limit of each call; None computes it from x in every run. run: the
    function by which calls run on the first host engine that supports them.
    """

    def __init__(self, calls: Sequence[Call], amaxes: Sequence[Any], run: Run) -> None:
        self._calls, self._amaxes, self._run = calls, amaxes, run

    def clip(self) -> list[Any]:
        """Return the clipped gradient of each call: a new array, or the gradient itself if it has no elements."""
        return [self._clip(call, amax) for call, amax in zip(self._calls, self._amaxes, strict=True)]

    def _clip(self, call: Call, amax: Any) -> Any:
        """Return the clipped gradient of one call."""
        if not call.grad.size:
            return call.grad
        limit = reshape_clip_amax(self._run("clip_amax", call), call) if amax is None else amax
        return self._run("clip", call, limit)
