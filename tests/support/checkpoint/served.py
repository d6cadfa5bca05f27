"""Decode quantized layers of a directory as loaders do, from the stored tensors alone.

Nothing of fp4kit is used but its tables of code values and its swizzle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import oracle

from fp4kit import Recipe, unswizzle

Stored = Mapping[str, np.ndarray]
_SCALES = (".weight_scale", ".weight_scale_inv", ".scales", ".scale")


def weights(root: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return {layer: its float32 values} of all quantized layers in a directory.

    recipe: the recipe that made their codes.
    """
    stored = {name: _bytes(x) for name, x in oracle.arrays(oracle.load(root)).items()}
    modules = {name.removesuffix(s): name for name in stored for s in _SCALES if name.endswith(s)}
    found = {module: _values(module, stored, stored[name], recipe) for module, name in modules.items()}
    stacks = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    return found | {stack: _stack(stored[f"{stack}_blocks"], stored[f"{stack}_scales"], recipe) for stack in stacks}


def _stack(codes: np.ndarray, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the float32 values (E, K, N) of a stack of gpt-oss: transformers' convert_moe_packed_tensors.

    codes: (E, N, blocks, 16). scale: (E, N, blocks).
    """
    assert recipe.scale is not None
    values = recipe.element.values[np.stack((codes & 15, codes >> 4), -1)].reshape(*scale.shape, -1)
    values = values * recipe.scale.values[scale][..., None]
    return values.reshape(*scale.shape[:2], -1).swapaxes(1, 2)


def _bytes(x: np.ndarray) -> np.ndarray:
    """Return codes and scales of 8 bits as uint8, and any other array unchanged."""
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x


def _values(module: str, stored: Stored, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the float32 values (N, K) of one layer."""
    name = next(name for name in (f"{module}.weight_packed", f"{module}.weight") if name in stored)
    codes, comfy = stored[name].view(np.uint8), f"{module}.comfy_quant" in stored
    if recipe.is_packed:
        nibbles = (codes >> 4, codes & 15) if comfy else (codes & 15, codes >> 4)
        codes = np.stack(nibbles, -1).reshape(len(codes), -1)
    values = recipe.element.values[codes]
    if recipe.scale is None and recipe.block:  # FP8 with one scale per block
        return values * scale.repeat(recipe.block_rows, 0)[: len(values)].repeat(recipe.block_size, 1)
    if recipe.scale is None:  # FP8 with one scale per layer or per row
        return values * scale.reshape(-1, 1)
    if comfy:
        scale = unswizzle(scale, "swizzled_128x4", (len(values), values.shape[1] // recipe.block_size))
    block = recipe.scale.values[scale]
    if f"{module}.weight_global_scale" in stored:  # compressed-tensors divides: _dequantize in its forward_helpers.py
        block = block / stored[f"{module}.weight_global_scale"]
    elif f"{module}.weight_scale_2" in stored:
        block = block * stored[f"{module}.weight_scale_2"]
    return (values.reshape(*block.shape, -1) * block[..., None]).reshape(values.shape)
