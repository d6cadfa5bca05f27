"""Identify layers that are in memory, as identify does with those of files."""

from collections.abc import Iterable, Sequence

from fp4kit.checkpoint.identify.verdicts import (
    CheckpointVerdict,
    LayerPair,
    LayerSeries,
    checkpoint_verdict,
    verdict_of,
)


def identify_layers(layers: Iterable[LayerPair], unpaired: Sequence[str] = ()) -> CheckpointVerdict:
    series = LayerSeries()
    return checkpoint_verdict(tuple(verdict_of(layer, series.explain(layer)) for layer in layers), unpaired)
