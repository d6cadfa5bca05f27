"""Open a checkpoint through the package fp4kit.checkpoint, which is imported only when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe


def open_checkpoint(path: str | Path, recipe: str | Recipe | None = None) -> Mapping[str, Quantized]:
    """Open a checkpoint, and return its quantized layers by name. Codes and scales are read when a layer is looked up.

    Args:
        path: a model directory, a .safetensors file or a GGUF file.
        recipe: the recipe of the layers, which determines how they are decoded. None for the recipe that the checkpoint
            records, and for a recipe of the container's producer if none is recorded.

    Returns:
        A fp4kit.checkpoint.QuantizedLayers: a mapping from layer name to Quantized, whose error for an unknown name
        lists similar names. A stack of experts is one layer with the shape (experts, rows, columns).

    Raises:
        CheckpointError: there is no checkpoint at this path, or it is malformed.
        ValueError: no recipe has this id.

    Exact:
        Codes and scales are the bytes of the file, in linear order with the even element in the low nibble.

    Examples:
        >>> import numpy as np, tempfile, fp4kit, fp4kit.checkpoint
        >>> from safetensors.numpy import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up_proj.weight": np.ones((32, 64), np.float32)}, f"{folder}/w.safetensors")
        >>> made = fp4kit.checkpoint.convert(f"{folder}/w.safetensors", f"{folder}/w-nvfp4.safetensors", "nvfp4-te")
        >>> q = fp4kit.open_checkpoint(made.destination)["up_proj"]
        >>> q.shape, q.recipe.id, float(q.dequantize().max())
        ((32, 64), 'nvfp4-te', 1.0)
    """
    opened: Mapping[str, Quantized] = import_module("fp4kit.checkpoint").open_checkpoint(path, recipe)
    return opened
