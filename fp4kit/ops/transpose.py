"""transpose: the columnwise copy of a rowwise quantized array with square blocks, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp4kit.layouts import swizzle_scales, unswizzle_scales
from fp4kit.ops import check
from fp4kit.quantized import Quantized
from fp4kit.reference.transpose import transpose_codes, transpose_scales


def transpose(q: Quantized) -> Quantized:
    """The same values with blocks along the other one of the last two axes: codes and scales moved, nothing decoded.

    q: Quantized of a recipe with square blocks (16x16: nvfp4-te-2d, ...), axis -1 or -2 of x; x (..., M, K), M and K multiples of
        the block. Any scale layout; the result has the same.
    Returns Quantized with the other axis: packed (..., K, M/2) from (..., M, K/2), block_scale (..., K, M/block).
    Raises ValueError for other recipes, axes or lengths.
    Exact: equals quantize(x, recipe, axis=-2) byte for byte; transpose(transpose(q)) is q.
    """
    check.check_quantized("transpose", q)
    size = _block_size(q)
    *lead, M, K = q.moved_shape
    packed = q.packed.reshape(-1, M, q.packed.shape[-1])
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape).reshape(-1, M, K // size)
    codes = np.empty((len(packed), K, M // 2 if q.recipe.is_packed else M), np.uint8)
    moved = np.empty((len(packed), K, M // size), np.uint8)
    for i in range(len(packed)):
        codes[i] = transpose_codes(packed[i], q.recipe.is_packed)
        moved[i] = transpose_scales(scales[i], size)
    shape = (*lead, K)
    other = 2 * len(q.shape) - 3 - q.axis
    linear = moved.reshape(*shape, M // size)
    return replace(q, packed=codes.reshape(*shape, -1), block_scale=swizzle_scales(linear, q.scale_layout), axis=other)


def _block_size(q: Quantized) -> int:
    rows, size = q.recipe.block or (1, 1)
    if rows != size or size == 1:
        raise ValueError(f"transpose: {q.recipe.id} has {rows}x{size} blocks; needs square ones, such as nvfp4-te-2d's 16x16")
    if len(q.shape) < 2 or q.axis < len(q.shape) - 2:
        raise ValueError(f"transpose: q has axis {q.axis} of a {len(q.shape)}-d array; needs one of the last two axes")
    if q.moved_shape[-2] % size:
        raise ValueError(f"transpose: the other axis has length {q.moved_shape[-2]}; needs a multiple of {size}")
    return size
