"""Measure the error of quantized layers on a sample of their rows, so that a conversion can report it at once. The
error is given as SQNR, the signal-to-noise ratio in decibels: 10 log10(S / N), where S is the sum of squares of the
source, and N is the sum of squares of the differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.plan.adapter import LoraAdapter
from fp4kit.checkpoint.verify.loss import is_low, noise_of, zeros_of
from fp4kit.checkpoint.verify.reencode import Check, Settings, checks_of, origins_of, tally_of_rows, usual_db

_MOST_MATRICES, _MOST_ELEMENTS = 256, 1 << 23  # the largest sample, so that a conversion reports its error at once
_ROWS, _SPANS = 16, 4  # rows per span; spans per matrix if there are few matrices
_OUTLIER_DB = 3.0  # a layer this far below the median loses much more than the others


@dataclass(frozen=True)
class SampledError:
    """The SQNR of sampled layers.

    layers: (name, SQNR in decibels) per sampled layer, smallest SQNR first. Each expert of a stack is a layer, with its
        number in brackets in the name. Layers without error, such as those whose codes were kept, are left out.
    total: the number of quantized matrices in the checkpoint that have a counterpart in the source.
    is_whole: True if all rows of all layers were measured, so that verify finds the same numbers.
    """

    layers: tuple[tuple[str, float], ...]
    total: int
    is_whole: bool = False

    @property
    def median(self) -> float:
        """The median SQNR in decibels. ``layers`` must not be empty."""
        return median(db for _, db in self.layers)

    @property
    def outliers(self) -> tuple[str, ...]:
        """The names of the layers whose SQNR is at least 3 dB, a factor of two, below the median; worst first."""
        return tuple(name for name, db in self.layers if db <= self.median - _OUTLIER_DB)


def sampled_error(destination: str | Path, source: Source, adapter: LoraAdapter | None = None) -> SampledError:
    """Measure the SQNR of the layers of a checkpoint on some rows of each."""
    # At most 256 matrices are measured, and fewer if they are large; they are evenly spaced among all matrices.
    made = inspect_checkpoint(destination)
    weights = list(made.layers.values())
    rotations = transforms.resolved(made, made.weights).rotations
    checks = [
        check
        for check in checks_of(weights, origins_of(weights, source, rotations, adapter), Settings())
        if check.origin is not None
    ]
    found: dict[str, float] = {}
    sample = list(_sample(checks))
    # verify gives one number per stack, not one per expert
    is_whole = all(check.stored.experts == 1 and spans == ((0, check.stored.shape[-2]),) for check, spans in sample)
    with Readers() as readers:
        for check, spans in sample:
            db = tally_of_rows(check, readers, spans).sqnr_db
            if db is not None and math.isfinite(db):
                found[_name(check)] = db
    layers = tuple(sorted(found.items(), key=lambda item: item[1]))
    return SampledError(layers, len(checks), is_whole and len(sample) == len(checks))


def sampled_losses(
    destination: str | Path,
    source: Source,
    names: Collection[str],
    adapter: LoraAdapter | None = None,
    is_weighted: bool = False,
) -> tuple[tuple[str, str], ...]:
    """Judge on a sample of rows whether layers of a checkpoint have lost their values, by the limits of verify."""
    made = inspect_checkpoint(destination)
    weights = [weight for weight in made.layers.values() if weight.name in names]
    rotations = transforms.resolved(made, made.weights).rotations
    found = checks_of(weights, origins_of(weights, source, rotations, adapter), Settings())
    checks = [check for check in found if check.origin is not None]
    count = min(len(checks), _MOST_MATRICES)
    lost: dict[str, str] = {}
    with Readers() as readers:
        for check in (checks[i * len(checks) // count] for i in range(count)):
            form = check.stored.container
            assert form is not None
            tally, bits = tally_of_rows(check, readers, _spans(check, _SPANS)), form.element.bits
            usual = usual_db(check, readers) if is_low(tally, bits) and not is_weighted else None
            losses = [*zeros_of(tally), *noise_of(tally.sqnr_db, usual, bits, is_of_recipe=True)]
            for each in (each for each in losses if each.severity == "error"):
                lost.setdefault(_name(check), f"{each.text}: {each.count}" if each.count else each.text)
    return tuple(lost.items())


def _sample(checks: Sequence[Check]) -> Iterator[tuple[Check, tuple[tuple[int, int], ...]]]:
    """Yield (matrix, spans of rows) for the sample: at most 256 evenly spaced matrices, with one or four spans each."""
    if not checks:
        return
    mean = sum(_elements(check) for check in checks) / len(checks)
    count = max(min(len(checks), _MOST_MATRICES, int(_MOST_ELEMENTS / mean)), 1)
    spans = _SPANS if count * mean * _SPANS <= _MOST_ELEMENTS else 1
    for i in range(count):
        check = checks[i * len(checks) // count]
        yield check, _spans(check, spans)


def _elements(check: Check) -> int:
    """Return the number of elements that must be read to measure one span (range of rows) of a matrix."""
    rows, columns = check.stored.shape[-2:]
    is_turned = check.stored.transposed or (check.origin is not None and check.origin.weight.transposed)
    return columns * (rows if is_turned else min(rows, _ROWS))


def _spans(check: Check, count: int) -> tuple[tuple[int, int], ...]:
    """Return ``count`` evenly spaced spans (first row, end row) of a matrix, or one span of all rows if it is small."""
    rows, origin = check.stored.shape[-2], check.origin
    forms = (check.stored.container, None if origin is None else origin.weight.container)
    height = max(_ROWS, *(form.block[0] for form in forms if form is not None))
    if rows <= height * count:
        return ((0, rows),)
    starts = ((rows - height) * (2 * i + 1) // (2 * count) // height * height for i in range(count))
    return tuple((start, start + height) for start in starts)


def _name(check: Check) -> str:
    """Return the name of a layer, such as "mlp.up_proj", or "mlp.experts.up_proj[3]" for expert 3 of a stack."""
    return check.stored.name if check.stored.experts == 1 else f"{check.stored.name}[{check.expert}]"
