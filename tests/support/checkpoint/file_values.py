"""Read the values of layers as fp4kit decodes them from checkpoint files."""

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


def decoded(path: Path) -> dict[str, np.ndarray]:
    """Return {name of the constant: its values in the shape that the graph gives it}, as fp4kit decodes them."""
    model, found = inspect_checkpoint(path), {}
    with Readers() as readers:
        for weight in model.layers.values():
            parts = [
                np.concatenate([values_of(weight, slab) for slab in slabs(readers, weight, expert)])
                for expert in range(weight.experts)
            ]
            values = np.stack(parts) if len(weight.shape) == 3 else parts[0]
            found[weight.tensor] = values.swapaxes(-1, -2) if weight.transposed else values
        for name, (file, entry) in model.tensors.items():
            if entry.note:
                found[name] = readers.of(file).read(entry).astype(np.float32)
    return found


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays have the same shape and bits, but for the bits of NaN."""
    nan = np.isnan(a) & np.isnan(b) if a.shape == b.shape else np.bool_(False)
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | nan).all())
