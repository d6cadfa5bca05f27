"""Summarize a verification in words: layers as expected, what the errors mean, and what was not checked. SQNR is the
signal-to-noise ratio of the quantized values in decibels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport
from fp4kit.storage.errors import shown

DECIBELS = (
    "SQNR is the ratio of the squared weights to the squared errors. At 20 dB, the error is 10% of the weights; 6 dB"
    " more halve it. Weights with a normal distribution have about 20.4 dB in NVFP4, 18.9 dB in"
    " MXFP4, and 31.5 dB in FP8 or MXFP8."
)


def worst_first(report: VerifyReport) -> list[LayerReport]:
    """Return the layers sorted: those with errors first, then those with warnings, then all others."""
    ranks: dict[str, int] = {}
    for issue in report.issues:
        rank = 0 if issue.severity == "error" else 1
        ranks[issue.subject] = min(rank, ranks.get(issue.subject, 2))

    def key(layer: LayerReport) -> tuple[int, float]:
        db = layer.tally.sqnr_db
        return ranks.get(layer.name, 2), math.inf if db is None or math.isnan(db) else db

    return sorted(report.layers, key=key)


def error_of(db: float) -> str:
    """Return the root-mean-square error at a SQNR as a percentage of the weights, such as "9.4%"."""
    return f"{100 * 10 ** (-db / 20):.3g}%"


def median_and_worst(report: VerifyReport) -> tuple[float, float, str] | None:
    """Return (median SQNR, smallest SQNR, name of the layer with the smallest), both in decibels."""
    found = [(layer.tally.sqnr_db, layer.name) for layer in report.layers if layer.tally.sqnr_db is not None]
    finite = [(db, name) for db, name in found if math.isfinite(db)]
    return (median(db for db, _ in finite), *min(finite)) if finite else None


def summary_of(report: VerifyReport) -> Iterator[str]:
    """Yield one to three lines that summarize a report; none if it has no layers."""
    if not report.layers:
        return
    named = {issue.subject for issue in report.issues}
    total, faulty = len(report.layers), sum(layer.name in named for layer in report.layers)
    text = f"{total - faulty} of {_layers(total)} as expected"
    if faulty:
        worst = worst_first(report)[0]
        why = next(issue.sentence for issue in report.issues if issue.subject == worst.name)
        text += f"; the worst: {shown(worst.name)}: {shown(why)}"
    yield text
    found = median_and_worst(report)
    if found is not None:
        middle, least, name = found
        yield (
            f"SQNR: median {middle:.2f} dB, an error of {error_of(middle)} of the weights; worst {least:.2f} dB in"
            f" {shown(name)}"
        )
    if report.parallel is not None:
        yield report.parallel.line


def unchecked(report: VerifyReport) -> list[str]:
    """Return one text per thing that the verification did not check; [] if it checked everything that it can."""
    found = []
    if report.source is None and report.layers:
        found.append("the values, which need --source SRC")
    if report.manifest == "none":
        found.append("checksums of the files, because there is no manifest")
    if report.source is not None:
        alone = sum(not layer.compared for layer in report.layers)
        if alone:
            found.append(f"the bytes of {_layers(alone)}, which were not encoded again")
    return found


def _layers(count: int) -> str:
    """Return a number of layers as text, such as "1 layer" or "12 layers"."""
    return f"{count} layer{'s' * (count != 1)}"
