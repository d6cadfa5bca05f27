"""Gradients of a group of CuPy arrays, clipped in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.cuda import grouped, loader
from fp4kit.cuda.grouped import Clip, Launch
from fp4kit.ops import on_device
from fp4kit.ops.fake_quantize import clip_amax
from fp4kit.ops.grouped_on_device import amax_launches, clear, cut, launch_all, readable
from fp4kit.ops.prepare import Prepared


class ClipGroup:
    """N arrays with gradients and amaxes, as prepare_backward gives them, and the launches that clip the gradients into outs."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        cupy = loader.cupy()
        self._copies: list[tuple[Any, Any]] = []
        self._device = cupy.cuda.Device(prepared[0].x.device.id)
        full = [p for p in prepared if p.x.size]
        with self._device:
            xs = [readable(p.moved, self._copies) for p in full]
            grads = [readable(np.moveaxis(p.others["grad"], p.axis, -1), self._copies) for p in full]
            outs = [cupy.empty(g.shape, g.dtype) for g in grads]
            limits = self._limits(full, xs)
            self._launches += clip_launches([Clip(*arrays) for arrays in zip(grads, xs, limits, outs, strict=True)])
            clipped = iter([cupy.moveaxis(out, -1, p.axis) for p, out in zip(full, outs, strict=True)])
        self.outs = [next(clipped) if p.x.size else p.others["grad"] for p in prepared]

    def _limits(self, prepared: Sequence[Prepared], xs: list[Any]) -> list[Any]:
        """The amaxes, contiguous; those that are not given in parts of one vector, with the launches that compute them."""
        given = [None if p.others["amax"] is None else readable(clip_amax(p), self._copies) for p in prepared]
        places = [i for i, amax in enumerate(given) if amax is None]
        rows = [on_device.covered_by_scales(xs[i], prepared[i].recipe) for i in places]
        shapes = [(x.shape[0] if by_row else 1,) for x, _, by_row in rows]
        self._vector = loader.cupy().zeros(sum(shape[0] for shape in shapes), np.float32)
        for i, amax in zip(places, cut(self._vector, shapes), strict=True):
            given[i] = amax
        self._launches: list[Launch] = amax_launches([*zip(rows, shapes, strict=True)], [given[i] for i in places])
        return given

    def clip(self) -> list[Any]:
        """Write the clipped gradients; those of arrays without elements are the gradients themselves."""
        with self._device:
            clear(self._vector)
            launch_all(self._copies, self._launches)
        return list(self.outs)


def clip_launches(clips: Sequence[Clip]) -> list[Launch]:
    """A launch for each pair of dtypes, of arrays and of gradients."""
    kinds = dict.fromkeys((c.x.dtype, c.grad.dtype) for c in clips)
    return [grouped.clip_group([c for c in clips if (c.x.dtype, c.grad.dtype) == kind]) for kind in kinds]
