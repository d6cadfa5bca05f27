"""amax: largest magnitude per tensor, along axes, or per block of a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.ops import amax_on_device, check, on_device
from fp4kit.ops.prepare import import_arrays, prepare, stack
from fp4kit.recipes import Recipe
from fp4kit.reference.blocks import TILE_ELEMENTS, block_amax, tiles


def amax(x: Any, recipe: str | Recipe | None = None, *, axis: Any = None) -> np.ndarray:
    """Largest |x|: of the whole array, along axes, or of each block that shares a block scale.

    amax(x)                       float32 (): the tensor's amax
    amax(x, axis=1)               float32: reduced over that axis, or those of a tuple, as np.max does: per row of (M, K)
    amax(x, recipe)               float32 (..., M / block rows, K / block): per block, blocks along the last axis
    amax(x, recipe, axis=0)       the same with blocks along axis 0, which comes last in the result

    x: float32, float16 or bfloat16, any shape; an empty reduction gives 0.
    Recipes without blocks give what their tensor scale covers: () or one per row.
    Raises TypeError for other dtypes; ValueError for lengths that are not whole blocks, or an axis out of range.
    Numerics: exact. NaN propagates, but recipes that ignore NaN in their amax do so here.
    """
    if recipe is None:
        return _plain_amax(x, axis)
    p = prepare("amax", x, recipe, -1 if axis is None else axis)
    if p.on_device:
        return on_device.amax(p)
    if p.recipe.block is None:
        from fp4kit.ops.quantize import compute_tensor_amax

        return compute_tensor_amax(p.moved, p.recipe)
    height, width = p.recipe.block
    *lead, K = p.moved.shape
    shape = (*lead[:-1], -(-lead[-1] // height), K // width) if lead else (K // width,)
    out = np.zeros(shape, np.float32)
    if not out.size:
        return out
    matrices = stack(p.moved, p.recipe)
    flat = out.reshape(len(matrices), -1, K // width)
    for i, matrix in enumerate(matrices):
        for rows, columns in tiles(matrix.shape, p.recipe.block):
            target = flat[i][rows.start // height : -(-rows.stop // height), columns.start // width : columns.stop // width]
            target[...] = block_amax(np.ascontiguousarray(matrix[rows, columns], np.float32), p.recipe)
    return out


def _plain_amax(x: Any, axis: Any) -> np.ndarray:
    (x,) = import_arrays("amax", x=x)
    check.check_float("amax", x)
    if not isinstance(x, np.ndarray):
        return amax_on_device.plain_amax(x, axis)
    with np.errstate(invalid="ignore"):  # what a signalling NaN raises
        if axis is not None:
            return np.asarray(np.max(np.abs(x), axis=axis, initial=0)).astype(np.float32)
        chunks = np.nditer(x, flags=["external_loop", "buffered", "zerosize_ok"], buffersize=TILE_ELEMENTS)
        return np.asarray(np.max([np.max(np.abs(chunk), initial=0) for chunk in chunks] or [0]), np.float32)
