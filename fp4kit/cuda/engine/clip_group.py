"""Clip the gradients of a group of CuPy arrays.

One launch clips all arrays whose x have one dtype and whose gradients have one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda.engine.group import clear, contiguous_or_copy, cut, launch_all, tensor_amax_launches
from fp4kit.cuda.launch import grouped
from fp4kit.cuda.launch.grouped import Clip, GroupedLaunch
from fp4kit.quantized.parts import tensor_amax_shape


class CudaClipGroup:
    """Gradients on one GPU and the launches that clip them. The launches are prepared once and can run repeatedly.

    Args:
        calls: parsed calls to fake_quantize_backward.
        amaxes: the clip limit of each call; None to compute the limit from call.x.

    Attributes:
        outs: the clipped gradient of each call, which clip() overwrites. If a call has no elements, its entry is the
            gradient itself.
    """

    def __init__(self, calls: Sequence[Call], amaxes: Sequence[Any]) -> None:
        cupy = imports.cupy()
        self._copies: list[tuple[Any, Any]] = []
        self._device = cupy.cuda.Device(calls[0].x.device.id)
        nonempty = [(call, amax) for call, amax in zip(calls, amaxes, strict=True) if call.x.size]
        with self._device:
            xs = [contiguous_or_copy(call.moved, self._copies) for call, _ in nonempty]
            grads = [contiguous_or_copy(np.moveaxis(call.grad, call.axis, -1), self._copies) for call, _ in nonempty]
            outs = [cupy.empty(g.shape, g.dtype) for g in grads]
            limits = self._limits(nonempty, xs)
            self._launches += clip_launches([Clip(*arrays) for arrays in zip(grads, xs, limits, outs, strict=True)])
            clipped = iter([cupy.moveaxis(out, -1, call.axis) for (call, _), out in zip(nonempty, outs, strict=True)])
        self.outs = [next(clipped) if call.x.size else call.grad for call in calls]

    def _limits(self, nonempty: Sequence[tuple[Call, Any]], xs: list[Any]) -> list[Any]:
        """Return the clip limit of each nonempty call, as a contiguous array, and set _vector and _launches."""
        given = [None if amax is None else contiguous_or_copy(amax, self._copies) for _, amax in nonempty]
        computed = [i for i, amax in enumerate(given) if amax is None]
        shapes = [(prod(tensor_amax_shape(xs[i].shape, nonempty[i][0].recipe)),) for i in computed]
        self._vector = imports.cupy().zeros(sum(shape[0] for shape in shapes), np.float32)
        for i, amax in zip(computed, cut(self._vector, shapes), strict=True):
            given[i] = amax
        self._launches: list[Callable[[], None]] = []
        if computed:
            r = nonempty[computed[0]][0].recipe
            self._launches += tensor_amax_launches([xs[i] for i in computed], [given[i] for i in computed], r)
        return given

    def clip(self) -> list[Any]:
        """Clip the gradients, and return them: the arrays in `outs`, which the next call overwrites."""
        with self._device:
            clear(self._vector)
            launch_all(self._copies, self._launches)
        return list(self.outs)


def clip_launches(clips: Sequence[Clip]) -> list[GroupedLaunch]:
    """Return the prepared launches that clip gradients: one per pair (dtype of x, dtype of the gradient)."""
    kinds = dict.fromkeys((c.x.dtype, c.grad.dtype) for c in clips)
    return [grouped.clip_group([c for c in clips if (c.x.dtype, c.grad.dtype) == kind]) for kind in kinds]
