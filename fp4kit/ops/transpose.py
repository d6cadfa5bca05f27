"""transpose: the columnwise copy of a rowwise quantized array with square blocks, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda import transpose as launch
from fp4kit.layouts import padded_shape, swizzle_scales, unswizzle_scales
from fp4kit.ops import check
from fp4kit.ops.prepare import import_arrays
from fp4kit.quantized import Quantized, packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.transpose import transpose_codes, transpose_scales


def transpose(q: Quantized) -> Quantized:
    """The same values with blocks along the other one of the last two axes: codes and scales moved, nothing decoded.

    q: Quantized of a recipe with square blocks (16x16: nvfp4-te-2d, ...), axis -1 or -2 of x; x (..., M, K), M and K multiples of
        the block. Any scale layout; the result has the same.
    Returns Quantized with the other axis: packed (..., K, M/2) from (..., M, K/2), block_scale (..., K, M/block), both where
        those of q are; tensor_scale and tensor_amax are q's own.
    Raises ValueError for other recipes, axes or lengths, or arrays of several devices; on a GPU NotImplementedError for blocks of
        other sizes than 16, 32 and 64.
    Exact: equals quantize(x, recipe, axis=-2) byte for byte; transpose(transpose(q)) is q.
    """
    check.check_quantized("transpose", q, on_device=True)
    size = _block_size(q)
    packed, scales = import_arrays("transpose", packed=q.packed, block_scale=q.block_scale)
    *lead, M, K = q.moved_shape
    moved = _moved if isinstance(packed, np.ndarray) else _moved_on_device
    codes, block_scale = moved(packed, scales, q, (*lead, K, M), size)
    return replace(q, packed=codes, block_scale=block_scale, axis=2 * len(q.shape) - 3 - q.axis)


def _moved(packed: Any, scales: Any, q: Quantized, shape: tuple[int, ...], size: int) -> tuple[Any, Any]:
    """Codes and scales of x transposed to `shape`."""
    *_, K, M = shape
    B = prod(shape[:-2])
    packed = packed.reshape(B, M, packed.shape[-1])
    scales = unswizzle_scales(scales, q.scale_layout, q.scale_shape).reshape(B, M, K // size)
    codes = np.empty((B, K, M // 2 if q.recipe.is_packed else M), np.uint8)
    linear = np.empty((B, K, M // size), np.uint8)
    for i in range(B):
        codes[i] = transpose_codes(packed[i], q.recipe.is_packed)
        linear[i] = transpose_scales(scales[i], size)
    linear = linear.reshape(scale_shape(shape, q.recipe))
    return codes.reshape(packed_shape(shape, q.recipe)), swizzle_scales(linear, q.scale_layout)


def _moved_on_device(packed: Any, scales: Any, q: Quantized, shape: tuple[int, ...], size: int) -> tuple[Any, Any]:
    """_moved on the GPU of the arrays: one launch."""
    cupy = loader.cupy()
    *lead, K, M = shape
    if size not in launch.BLOCKS:
        raise NotImplementedError(
            f"transpose: blocks of {size}x{size} have no CUDA kernel; needs 16, 32 or 64; transpose q with its arrays' .get()"
        )
    with cupy.cuda.Device(packed.device.id):
        codes = cupy.empty(packed_shape(shape, q.recipe), np.uint8)
        block_scale = cupy.empty(padded_shape(scale_shape(shape, q.recipe), q.scale_layout), np.uint8)
        if codes.size:
            packed, scales = cupy.ascontiguousarray(packed), cupy.ascontiguousarray(scales)
            launch.transpose(packed, scales, q.recipe, q.scale_layout, codes, block_scale, (prod(lead), M, K))
        return codes, block_scale


def _block_size(q: Quantized) -> int:
    if len(q.shape) < 2 or q.axis < len(q.shape) - 2:
        raise ValueError(f"transpose: q has axis {q.axis} of a {len(q.shape)}-d array; needs one of the last two axes")
    return square_block("transpose", q.recipe, q.moved_shape[-2])


def square_block(op: str, r: Recipe, length: int) -> int:
    """Size of the square blocks of a recipe, of which the other axis, too, has whole ones."""
    rows, size = r.block or (1, 1)
    if rows != size or size == 1:
        raise ValueError(f"{op}: {r.id} has {rows}x{size} blocks; needs square ones, such as nvfp4-te-2d's 16x16")
    if length % size:
        raise ValueError(f"{op}: the other axis has length {length}; needs a multiple of {size}")
    return size
