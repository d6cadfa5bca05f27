"""Count block amaxes in a histogram over their logarithm, and derive an amax with headroom from it.
A histogram has 512 bins of equal width over log2 of the block amax, from -40 to 40. Block amaxes outside this range
are counted in the first or the last bin, and zeros are not counted. A block is 16 consecutive inputs of one token.

A bin is found by comparing bit patterns with the smallest amax of each bin. So every array library counts alike, and
no logarithm is computed per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.formats import E4M3, NVFP4

BINS, BLOCK = 512, NVFP4.block_size
_LOW, _HIGH = -40.0, 40.0  # log2 of the block amaxes at both ends of the histogram
_NORMAL_RANGE = E4M3.max / float(E4M3.min_normal)  # 28672: the range of normal block scales
_IGNORED = 1e6  # blocks below the upper end by more than this factor do not determine the anchor
_SEARCHED = 256  # bit patterns to either side of the exact edge among which the edge of the float32 rule lies


def _bins_of(amaxes: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the number of the bin, from 0 to 511, of each positive block amax, as int64 in the shape of ``amaxes``."""
    log2 = np.log2(amaxes.astype(np.float64)).astype(np.float32)
    fraction = (log2 - np.float32(_LOW)) / np.float32(_HIGH - _LOW)
    return np.clip(np.floor(fraction * np.float32(BINS)).astype(np.int64), 0, BINS - 1)


@cache
@ieee("headroom")
def edges() -> npt.NDArray[np.uint32]:
    """Return the lower edges of bins 1 ..."""
    exact = np.exp2(_LOW + np.arange(1, BINS) * ((_HIGH - _LOW) / BINS)).astype(np.float32)
    bits = exact.view(np.uint32)[:, None] + np.arange(-_SEARCHED, _SEARCHED, dtype=np.int64)
    inside = _bins_of(bits.astype(np.uint32).view(np.float32)) >= np.arange(1, BINS)[:, None]
    assert not inside[:, 0].any() and inside[:, -1].all()
    found = bits[np.arange(BINS - 1), inside.argmax(axis=1)].astype(np.uint32)
    found.flags.writeable = False
    return found


def bin_of(amax: np.float32) -> int:
    """Return the number of the bin, from 0 to 511, that counts a positive block amax."""
    return int(np.searchsorted(edges(), np.float32(amax).view(np.uint32), side="right"))


@dataclass(frozen=True)
class Headroom:
    """Choose an amax that is usually far above the collected inputs, so that larger inputs do not saturate.

    The rule is Model-Optimizer's nvfp4_act_headroom:

        upper  = upper_percentile of the block amaxes
        anchor = anchor_percentile of the block amaxes from the bin of upper / 1e6 on
        amax   = max(rho * anchor, upper)

    With amax = rho * anchor, a block as small as the anchor gets the block scale 448 / rho, which is low in the range
    of E4M3. The rest of the range is headroom for larger inputs. A percentile is the center of the first bin whose
    cumulated count reaches that share of all blocks.

    Args:
        anchor_percentile: the percentile of the anchor, above 0 and at most 100.
        upper_percentile: the percentile of the upper end, above 0 and at most 100. 100 stands for the largest block
            amax itself, so that no collected input saturates.
        rho: the factor of the anchor, above 0 and below 28672, the ratio of the largest and the smallest normal E4M3
            number.

    Raises:
        ValueError: if an argument is out of range.

    Exact:
        Equals Model-Optimizer 0.47 with PyTorch on a CPU, for up to 2^24 blocks per layer. Beyond that, Model-Optimizer
        sums counts in float32, whose rounding depends on the device; fp4kit rounds the exact sums to float32. With
        several ranks, Model-Optimizer takes the largest of the ranks' amaxes. fp4kit merges the ranks' histograms
        first, which gives the amax of all their inputs together.

    Source:
        Model-Optimizer 0.47, modelopt/torch/quantization/calib/nvfp4_act_headroom.py.

    Examples:
        >>> from fp4kit.calibration import Headroom
        >>> Headroom(rho=1024.0)
        Headroom(anchor_percentile=1.0, upper_percentile=99.99, rho=1024.0)
    """

    anchor_percentile: float = 1.0
    upper_percentile: float = 99.99
    rho: float = 16384.0

    def __post_init__(self) -> None:
        for name in ("anchor_percentile", "upper_percentile"):
            if not 0 < getattr(self, name) <= 100:
                raise ValueError(f"Headroom: {name} is {getattr(self, name)}; needs a number above 0 and at most 100")
        if not 0 < self.rho < _NORMAL_RANGE:
            raise ValueError(f"Headroom: rho is {self.rho}; needs a number above 0 and below {_NORMAL_RANGE:g}")

    @ieee("Headroom.amax")
    def amax(self, histogram: npt.NDArray[np.int64], largest: np.float32) -> np.float32:
        """Return the amax with headroom of one layer.

        Args:
            histogram: int64 (512,), the number of nonzero blocks per bin.
            largest: the largest block amax.

        Returns:
            float32: max(rho * anchor, upper), by the formulas in Headroom. It is 0 if no block is nonzero. It is
            ``largest`` if there is no anchor, because the bin of upper / 1e6 and all higher bins are empty.
        """
        upper = float(largest) if self.upper_percentile >= 100 else _percentile(histogram, self.upper_percentile, 0)
        if not upper:
            return np.float32(0)
        first = bin_of(np.float32(upper / _IGNORED)) if np.float32(upper / _IGNORED) > 0 else 0
        anchor = _percentile(histogram, self.anchor_percentile, first)
        return np.float32(max(self.rho * anchor, upper)) if anchor else np.float32(largest)


def _percentile(histogram: npt.NDArray[np.int64], percentile: float, first: int) -> float:
    """Return a percentile of the block amaxes: the amax at the (logarithmic) center of the first bin that reaches
    it.
    """
    counts = histogram.astype(np.float32).astype(np.float64)
    counts[:first] = 0
    sums = np.cumsum(counts).astype(np.float32)
    if sums[-1] <= 0:
        return 0.0
    target = np.float32(percentile / 100.0) * sums[-1]
    found = min(int(np.searchsorted(sums, target)), BINS - 1)
    return float(2.0 ** (_LOW + (found + 0.5) / BINS * (_HIGH - _LOW)))
