"""Judge by magnitudes whether the scales of quantized layers were lost, multiplied or inverted. No source is needed.

The reach of a layer is the largest magnitude that its scales allow, which is near the layer's amax under any recipe.
A recipe that computes the tensor scale from the amax uses the upper end of the block scales: 448, or 256 for some
recipes with four over six.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.statistics import LARGEST_REACH, StoredCounts, tally
from fp4kit.checkpoint.model.unlike_layers import role_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.selection.fused_layers import shared_amax_groups
from fp4kit.storage.errors import listed

# Only a tensor scale brings block scales to the upper end of E4M3. Parts of fused layers may stay below it.
_UPPER_END = 128.0
# Ratios of magnitudes. Typical magnitudes of layers of one kind, which ignore outliers, differ by a factor below 8 in
# trained models; those of different kinds, or of embeddings, below 100. A tensor scale that is lost or inverted is off
# by 10^3 to 10^8, a factor of 448 too many or too few by 448, and exponents by 2^k.
_FAR_FROM_PEERS, _FAR, _CERTAIN = 12.0, 128.0, 16384.0
_DEVIATIONS = 8  # a matrix is doubtful if its log differs by more than this many median deviations
# The reach times sqrt(K), which is near the largest output for inputs of size 1. It is 1 to 300 in trained models and
# in models of standard normal weights. The limits count together with the ratio to unquantized matrices, or alone, if
# the model has none.
_LARGE, _SMALL = 100.0, 0.5
_LARGE_ALONE, _SMALL_ALONE = 1500.0, 0.02
# Layers have one tensor scale by chance if their weights are clipped, but then many blocks have the largest scale.
_FEWEST_GROUPS, _FEWEST_BLOCKS, _UNCLIPPED = 4, 512, 0.01
_MOST_MATRICES, _ROWS = 1024, 128  # how many matrices are sampled, evenly spaced, and how many of their leading rows
_MOST_REFERENCES = 8


class Magnitude(NamedTuple):
    """A quantized matrix: its name, container, rows' length, tensor scale as a multiplier, and stored counts."""

    name: str
    form: Container
    columns: int
    tensor_scale: float | None
    counts: StoredCounts

    @property
    def reach(self) -> float:
        """The largest magnitude that the scales allow in blocks that are not zero."""
        return self.counts.reach

    @property
    def typical(self) -> float:
        """The geometric mean of what the scales of blocks allow, which outliers hardly change; 0 if all are zero."""
        if not self.counts.scaled_blocks:
            return 0.0
        mean = 2.0 ** (self.counts.scale_logs / 1024 / self.counts.scaled_blocks)
        return mean * abs(self.tensor_scale or 1.0) * float(self.form.element.max)

    @property
    def is_neutral(self) -> bool:
        """True if the layer is NVFP4 without a tensor scale, or with a tensor scale of 1."""
        return self.form.kind == "nvfp4" and self.tensor_scale in (None, 1.0)

    @property
    def lacks_tensor_scale(self) -> bool:
        """True if block scales are at the upper end of E4M3, but no tensor scale brings values down."""
        return self.is_neutral and self.counts.largest_scale >= _UPPER_END

    @property
    def lacks_fp8_scale(self) -> bool:
        """True if FP8 codes reach their maximum under scales that are all 1."""
        return self.has_fp8_scale_1 and self.counts.at_max > 0

    @property
    def has_fp8_scale_1(self) -> bool:
        """True if the layer is FP8 and all its scales are 1."""
        scales = {self.counts.largest_scale, self.counts.smallest_scale, self.tensor_scale or 1.0}
        return self.form.scale is None and scales == {1.0}


@dataclass(frozen=True)
class Doubt:
    """A finding about scales: severity, the names of the matrices (() for the model), and a text."""

    severity: str
    names: tuple[str, ...]
    text: str

    @property
    def line(self) -> str:
        """The finding with the names of a few matrices."""
        return f"{listed(list(self.names))}: {self.text}" if self.names else self.text


def sampled_magnitudes(weights: Iterable[Weight], most: int = _MOST_MATRICES) -> list[Magnitude]:
    """Return the magnitudes of at most ``most`` evenly spaced quantized matrices, from their leading rows."""
    matrices = [(w, e) for w in weights if w.container is not None for e in range(w.experts)]
    count = min(len(matrices), most)
    found = []
    with Readers() as readers:
        for weight, expert in (matrices[i * len(matrices) // count] for i in range(count)):
            form, rows = weight.container, weight.shape[-2]
            assert form is not None
            end = min(rows, -(-_ROWS // form.block[0]) * form.block[0])
            slab = next(slabs(readers, weight, expert, (0, end), max_bytes=1 << 40))
            assert slab.codes is not None and slab.scales is not None
            counts = tally(form, slab.codes, slab.scales, slab.tensor_scale)
            found.append(magnitude_of(weight, expert, slab.tensor_scale, counts))
    return found


def magnitude_of(
    weight: Weight, expert: int, tensor_scale: float | np.float32 | None, counts: StoredCounts
) -> Magnitude:
    """Return the magnitude of one matrix of a quantized weight, from the counts of its stored values."""
    form = weight.container
    assert form is not None
    name = weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"
    scale = None if tensor_scale is None else float(tensor_scale)
    return Magnitude(name, form, weight.shape[-1], scale, counts)


def reference_of(weights: Iterable[Weight]) -> float | None:
    """Return the median amax of a few unquantized matrices, such as embeddings; None if there are none."""
    plain = [w for w in weights if w.container is None and len(w.shape) >= 2]
    count = min(len(plain), _MOST_REFERENCES)
    amaxes = []
    with Readers() as readers:
        for weight in (plain[i * len(plain) // count] for i in range(count)):
            for slab in slabs(readers, weight, 0, (0, min(_ROWS, weight.shape[-2]))):
                values = np.abs(np.asarray(values_of(weight, slab), np.float32))
                amaxes.append(float(values.max(initial=0, where=np.isfinite(values))))
                break
    amaxes = [amax for amax in amaxes if amax > 0]
    return median(amaxes) if amaxes else None


def doubts_of(found: Sequence[Magnitude], reference: float | None) -> Iterator[Doubt]:
    """Yield what is certainly (error) or probably (warning) wrong with the scales of quantized matrices."""
    lost = [one for one in found if one.lacks_tensor_scale]
    if lost:
        names = [one.name for one in found if one.is_neutral]
        end = max(one.counts.largest_scale for one in lost)
        yield Doubt("error", tuple(names), _LOST.format(end=end, reach=max(one.reach for one in lost)))
    unscaled = [one.name for one in found if one.lacks_fp8_scale]
    if unscaled:
        yield Doubt("error", tuple(unscaled), _LOST_FP8)
    known = {*unscaled, *(one.name for one in found if lost and one.is_neutral)}
    # A cast has no scales, or scales of 1, so that what scales allow says nothing about it.
    of_fp8 = [one for one in found if one.form.scale is None]
    are_casts = all(one.has_fp8_scale_1 for one in of_fp8) and not any(one.counts.at_max for one in of_fp8)
    known |= {one.name for one in of_fp8 if are_casts or one.form.is_cast}
    # FP8 that was cast without a scale does not use the range of its codes, so that its reach says nothing.
    used = (one for one in found if one.form.scale is not None or one.counts.at_max)
    rest = [one for one in used if one.name not in known and one.reach > 0 and one.typical > 0]
    rest = [one for one in rest if one.tensor_scale is None or one.tensor_scale > 0]  # others are refused as negative
    yield from _unlike_peers(rest)
    yield from _unlike_model(rest, reference)
    yield from _one_tensor_scale(rest)


_LOST = (
    "no tensor scale other than 1, although block scales reach {end:g}, as they do only if the tensor scale follows"
    " from the largest weight, so that it was lost; values reach {reach:.3g}; take the tensor scales from another copy"
)
_LOST_FP8 = (
    "scales are 1 although codes reach the maximum of FP8, as they do only if the scale follows from the largest"
    " weight, so that it was lost; take the scales from another copy"
)
_CAUSES = "tensor or block scales were lost, inverted, or multiplied twice; run fp4kit verify with --source"


def _ratio(ratio: float) -> str:
    """Return a ratio as text, such as "450 times" or "1/450 of"."""
    return f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"


def _is_far(ratio: float, limit: float) -> bool:
    """Return whether a ratio of magnitudes is too large or too small for sound layers."""
    return not 1 / limit < ratio < limit


def _severity(ratio: float, reach: float) -> str:
    """Return "error" if no weights explain a ratio of magnitudes and a reach, otherwise "warning"."""
    # Weights may be tiny, as in a layer that was never trained, but none are beyond float16.
    return "error" if ratio > _CERTAIN and reach > LARGEST_REACH else "warning"


def _unlike_peers(found: Sequence[Magnitude]) -> Iterator[Doubt]:
    """Yield a finding for each matrix that is far from its kind, or whose kind is far from the median of all kinds."""
    kinds = defaultdict[Hashable, list[float]](list)
    for one in found:
        kinds[_kind(one)].append(log2(one.typical))
    middles = {kind: median(sizes) for kind, sizes in kinds.items()}
    middle = median(middles.values()) if len(kinds) > 3 else None
    limit = _limit((sizes for sizes in kinds.values() if len(sizes) > 2), _FAR_FROM_PEERS)
    apart = _limit([list(middles.values())], _FAR)
    for one in found:
        kind = _kind(one)
        few, ratio, peers = len(kinds[kind]) <= 2, one.typical / 2.0 ** middles[kind], "its kind"
        is_doubtful = not few and _is_far(ratio, limit)
        if not is_doubtful and middle is not None:
            of_kind = log2(one.typical) if few else middles[kind]
            is_doubtful = _is_far(2.0 ** (of_kind - middle), apart)
            ratio, peers = one.typical / 2.0**middle, "all kinds"
        if is_doubtful:
            text = f"its scales allow values up to {one.reach:.2g}, and typical ones are {_ratio(ratio)} the median of"
            yield Doubt(_severity(ratio, one.reach), (one.name,), f"{text} {peers}; {_CAUSES}")


def _limit(groups: Iterable[Sequence[float]], least: float) -> float:
    """Return the ratio to the median of a group from which on a matrix is doubtful: ``least``, or more if many
    differ.
    """
    away: list[float] = []
    for sizes in groups:
        away += sorted(abs(size - median(sizes)) for size in sizes)[1:]  # without the median itself
    return max(least, 2.0 ** (_DEVIATIONS * median(away))) if away else least


def _kind(one: Magnitude) -> tuple[str, str]:
    """Return what peers have in common: their role, and whether scales belong to blocks, rows or the layer."""
    return role_of(one.name.partition("[")[0]), one.form.kind


def _unlike_model(found: Sequence[Magnitude], reference: float | None) -> Iterator[Doubt]:
    """Yield a finding if most layers are far from the unquantized matrices and from usual magnitudes."""
    if not found:
        return
    middle, gain = median(one.reach for one in found), median(one.reach * sqrt(one.columns) for one in found)
    start = f"scales allow values up to {middle:.2g} in half of the quantized layers"
    if reference is None:
        if not _SMALL_ALONE <= gain <= _LARGE_ALONE:
            yield Doubt("warning", (), f"{start}, unlike those of trained models; {_CAUSES}")
        return
    ratio = middle / reference
    if _is_far(ratio, _FAR) and not _SMALL <= gain <= _LARGE:
        text = f"{start}, {_ratio(ratio)} the largest value of unquantized matrices; {_CAUSES}"
        yield Doubt(_severity(ratio, middle), (), text)


def _one_tensor_scale(found: Sequence[Magnitude]) -> Iterator[Doubt]:
    """Yield a warning if all layers have one tensor scale, and each uses it up to the largest block scale or code."""
    layers = [one for one in found if one.form.kind in ("nvfp4", "fp8 tensor") and one.tensor_scale is not None]
    groups = shared_amax_groups([one.name for one in layers])
    scales = {one.tensor_scale for one in layers}
    if len(scales) != 1 or len({groups.get(one.name, one.name) for one in layers}) < _FEWEST_GROUPS:
        return
    by_group: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one in layers:
        counts, (top, total) = one.counts, by_group[groups.get(one.name, one.name)]
        top += counts.at_max if one.form.scale is None else counts.top_scales
        total += counts.elements if one.form.scale is None else counts.blocks
        by_group[groups.get(one.name, one.name)] = top, total
    if all(top and total >= _FEWEST_BLOCKS and top < _UNCLIPPED * total for top, total in by_group.values()):
        yield Doubt(
            "warning",
            (),
            f"all {len(layers)} layers have one tensor scale, {scales.pop():.3g}, and each uses it up to the maximum,"
            " as if all had one largest weight; tensor scales were probably overwritten; run fp4kit verify with"
            " --source",
        )
