"""Read the values of single layers as fp4kit decodes them from checkpoint files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of


def read_values(root: Path, layer: str) -> np.ndarray:
    """Return the values (N, K) of a layer of a checkpoint. If the layer is quantized, the values are float32."""
    weight = inspect_checkpoint(root).layers[layer]
    with Readers() as readers:
        return np.concatenate([values_of(weight, slab) for slab in slabs(readers, weight)])
