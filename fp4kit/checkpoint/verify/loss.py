"""Judge whether a quantized matrix has lost its values: zeros in place of the source's values, or an error far above
that of its format. Verify and conversions use the same limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp4kit.checkpoint.model.doubtful_codes import LOST_CODES
from fp4kit.checkpoint.model.statistics import StoredCounts
from fp4kit.formats import ElementFormat

# bits of a code -> how far below the usual SQNR, in decibels, a stored matrix may be. Calibration and similar
# algorithms change the SQNR by a few decibels; wrong scales, swapped nibbles and underflow change it by more.
MARGIN_DB = {4: 10.0, 8: 15.0}
# bits of a code -> an SQNR in decibels from which on a matrix is not compared with the usual SQNR of its format, which
# is at most 22 dB for 4-bit codes and 33 dB for 8-bit codes of normally distributed weights
SOUND_DB = {4: 12.0, 8: 18.0}


@dataclass(frozen=True)
class Loss:
    """A loss of values. The text names the kind of items that are counted if ``count`` is not 0."""

    severity: str
    text: str
    count: int = 0


def zeros_of(tally: StoredCounts) -> Iterator[Loss]:
    """Yield the losses of a matrix that is zero where its source is not, with the causes that the source proves."""
    lost = tally.flushed_blocks - tally.underflowed_blocks - tally.emptied_blocks
    if tally.emptied_blocks:
        yield Loss("error", _EMPTIED, tally.emptied_blocks)
    if lost:
        yield Loss("error", _LOST_SCALES, lost)
    used = tally.blocks - (tally.zero_blocks - tally.flushed_blocks)  # blocks that are not zero in the source
    if 2 * tally.underflowed_blocks > used:
        yield Loss("error", _MOSTLY_UNDERFLOWED, tally.underflowed_blocks)
    elif tally.underflowed_blocks:
        yield Loss("warning", _UNDERFLOWED, tally.underflowed_blocks)


def noise_of(found: float | None, usual_db: float | None, bits: int, is_of_recipe: bool) -> Iterator[Loss]:
    """Yield an error if the SQNR of a matrix is far below the usual one."""
    if found is None or usual_db is None or found >= usual_db - MARGIN_DB[bits]:
        return
    end = (
        "the recipe's scales cannot hold these values; use another recipe, or leave the layer unquantized"
        if is_of_recipe
        else "run fp4kit identify with this source"
    )
    below = f"{usual_db - found:.1f} dB below what {bits} bits usually give on this layer"
    yield Loss("error", f"SQNR is {found:.1f} dB, {below}; {end}")


_EMPTIED = (
    "blocks whose codes are all zero under scales that are not, although the source is not zero, so that the codes were"
    " lost"
)
_LOST_SCALES = (
    "blocks whose scales are zero although the source needs scales that the format has, so that the scales were lost"
)
_UNDERFLOWED = "blocks that are zero although the source is not, because their scales underflow"
_ADVICE = "use a recipe whose scales hold smaller values, or leave the layer unquantized"
_MOSTLY_UNDERFLOWED = (
    f"most blocks are zero although the source is not, because their scales underflow; {_ADVICE}; zero blocks"
)


def is_low(tally: StoredCounts, bits: int) -> bool:
    """Return whether the SQNR of a matrix is so low that it must be compared with the usual SQNR of its format."""
    return tally.sqnr_db is not None and tally.sqnr_db < SOUND_DB[bits]


def is_empty(tally: StoredCounts) -> bool:
    """Return whether all stored values of a matrix are zero."""
    return tally.blocks > 0 and tally.zero_blocks == tally.blocks


def emptiness_of(tally: StoredCounts, scale: ElementFormat | None, share: float) -> Iterator[Loss]:
    """Yield a finding about a matrix without a source if most of its blocks are zero."""
    if 2 * tally.zero_blocks <= tally.blocks:
        return
    low = 0.0 if scale is None else _NEAR_SMALLEST * float(scale.min_subnormal)
    tells = "verify with --source tells"
    if not is_empty(tally) and tally.largest_scale <= low:
        yield Loss("error", _UNDERFLOWED_ALONE, tally.zero_blocks)
    elif not is_empty(tally):
        text = f"most blocks are zero, which is a fault unless the layer is sparse; {tells}; zero blocks"
        yield Loss("warning", text, tally.zero_blocks)
    elif tally.smallest_scale < tally.largest_scale:
        yield Loss("error", LOST_CODES)
    elif share > 0.5:
        yield Loss("error", "all values are zero, as in most layers of this model, so the weights were lost")
    else:
        yield Loss("warning", f"all values are zero, which is a fault unless the layer was pruned; {tells}")


_NEAR_SMALLEST = 8  # a scale of at most this many times the smallest one has at most 3 significant bits
_UNDERFLOWED_ALONE = (
    "most blocks are zero, and all scales are near the smallest one of their format, so that the others underflowed;"
    " quantize the layer with a recipe whose scales hold smaller values; zero blocks"
)
