"""Accumulate the amaxes, token counts and histograms of the experts of one layer, on the host or on a GPU.

Amaxes are compared by their bit patterns. For nonnegative float32 numbers this is the order of the values, and
infinity and NaN come last. So a NaN that was accumulated on a GPU is found when the totals are copied to the host, and
CuPy's flushing of subnormals has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.calibration.headroom import BINS, edges

LARGEST = np.finfo(np.float32).max.view(np.uint32)  # the bit pattern of the largest finite float32


def _library(array: Any) -> Any:
    """Return the module that an array belongs to: cupy for an array on a GPU, otherwise numpy."""
    return imports.cupy() if imports.on_device(array) else np


@dataclass
class Totals:
    """The totals that were collected for the experts of a layer. A layer without experts counts as one expert.

    Attributes:
        amax: uint32 (experts,), the bit patterns of the largest inputs; 0 if there was no nonzero input.
        tokens: int64 (experts,), the number of inputs (rows).
        histogram: int64 (experts, 512), the number of nonzero blocks per bin of block amaxes; None to count no blocks.
    """

    amax: Any
    tokens: Any
    histogram: Any

    @classmethod
    def empty(cls, experts: int, histogram: bool, xp: Any = np) -> Totals:
        """Return totals of zero, to which inputs can be added."""
        counts = xp.zeros((experts, BINS), xp.int64) if histogram else None
        return cls(xp.zeros(experts, xp.uint32), xp.zeros(experts, xp.int64), counts)

    def include(self, blocks: Any, expert: Any) -> None:
        """Add the inputs of one call of the layer to these totals, in place."""
        xp, tokens = _library(blocks), len(blocks)
        if not tokens:
            return
        per_token = blocks.max(axis=1)
        if isinstance(expert, int):
            self.amax[expert] = xp.maximum(self.amax[expert], per_token.max())
            self.tokens[expert] += tokens
        else:
            xp.maximum.at(self.amax, expert, per_token)
            self.tokens += xp.bincount(expert, minlength=len(self.tokens))
        if self.histogram is not None:
            self._count(xp, blocks, expert)

    def _count(self, xp: Any, blocks: Any, expert: Any) -> None:
        """Count one call's block amaxes in the histograms of their experts, in place."""
        bins = xp.searchsorted(xp.asarray(edges()), blocks.reshape(-1), side="right").reshape(blocks.shape)
        if isinstance(expert, int):
            self.histogram[expert] += xp.bincount(bins[blocks > 0], minlength=BINS)
        else:
            places = (expert[:, None] * BINS + bins)[blocks > 0]
            self.histogram += xp.bincount(places, minlength=self.histogram.size).reshape(self.histogram.shape)

    def add(self, other: Totals) -> None:
        """Add the totals of further inputs to these totals, in place: keep the larger amaxes, and sum the counts."""
        # If these totals have a histogram, ``other`` must have one.
        np.maximum(self.amax, other.amax, out=self.amax)
        self.tokens += other.tokens
        if self.histogram is not None:
            self.histogram += other.histogram

    def on_host(self) -> Totals:
        """Return a copy of these totals in host memory, as NumPy arrays."""
        parts = (self.amax, self.tokens, self.histogram)
        return Totals(*(None if part is None else np.array(imports.to_host(part)) for part in parts))
