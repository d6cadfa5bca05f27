"""Make Collectors of the layers of a model without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.calibration import Collector
from fp4kit.checkpoint import make_plan


def measured(amaxes: Mapping[str, float], columns: int = 64) -> Collector:
    """Return a Collector of layers that each saw one token, all of whose inputs have the layer's amax.

    Args:
        amaxes: {layer: amax}; 0 stands for no token.
        columns: the number of inputs per token.
    """
    collector = Collector()
    for layer, amax in amaxes.items():
        if amax:
            collector.collect(layer, np.full((1, columns), amax, np.float32))
        else:
            collector.add_layer(layer, columns)
    return collector


def layers_of(root: Path, **options: Any) -> dict[str, int]:
    """Return {layer: K} of the layers that a conversion of the model in `root` with these options quantizes."""
    plan = make_plan(root, **options)
    return {piece.module: piece.weight.shape[-1] for tensor in plan.converted for piece in tensor.pieces}


def whole(root: Path, amaxes: Mapping[str, float] | None = None) -> Collector:
    """Return a Collector of all layers of a model. Layer number i has the amax 0.3 * (i + 1), or one of ``amaxes``."""
    collector = Collector()
    for i, (layer, columns) in enumerate(layers_of(root).items()):
        amax = (amaxes or {}).get(layer, 0.3 * (i + 1))
        collector = Collector.merge([collector, measured({layer: amax}, columns)])
    return collector
