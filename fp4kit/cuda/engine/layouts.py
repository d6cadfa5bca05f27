"""Transpose, swizzle, unswizzle, pack and unpack CuPy arrays."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.arrays import imports
from fp4kit.call.parse import Declined
from fp4kit.cuda.launch import pack_codes
from fp4kit.cuda.launch import swizzle as swizzle_launcher
from fp4kit.cuda.launch import transpose as transpose_launcher
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.parts import packed_shape, scale_shape


def transpose(packed: Any, scales: Any, q: Quantized) -> tuple[Any, Any]:
    """Transpose each matrix of a Quantized q with square blocks, in one launch."""
    cupy, size = imports.cupy(), q.recipe.block_size
    *lead, M, K = q.moved_shape
    shape = (*lead, K, M)
    if size not in transpose_launcher.BLOCKS:
        raise Declined(
            f"blocks of {size}x{size} have no CUDA kernel; needs 16, 32 or 64; transpose q with its arrays' .get()"
        )
    with imports.making_current(packed.device.id):
        codes = cupy.empty(packed_shape(shape, q.recipe), np.uint8)
        block_scale = cupy.empty(padded_shape(scale_shape(shape, q.recipe), q.scale_layout), np.uint8)
        if codes.size:
            packed, scales = cupy.ascontiguousarray(packed), cupy.ascontiguousarray(scales)
            dimensions = (prod(lead), M, K)
            transpose_launcher.transpose(packed, scales, q.recipe, q.scale_layout, codes, block_scale, dimensions)
        return codes, block_scale


def swizzle(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from layout `source` to `target`, in one launch."""
    layouts.check_size(scales, source, shape)
    cupy = imports.cupy()
    with imports.making_current(scales.device.id):
        out = cupy.empty(padded_shape(shape, target), np.uint8)
        if out.size:
            *lead, R, C = shape
            swizzle_launcher.swizzle(cupy.ascontiguousarray(scales), source, out, target, (prod(lead), R, C))
        return out


def pack(codes: Any) -> Any:
    """Return a new array with two 4-bit codes per byte, from an array with one code per byte."""
    # The high nibbles of `codes` are dropped without a check, because a check would wait for the device.
    layouts.check_pairs(codes.shape)
    return _repack(pack_codes.pack, codes, (*codes.shape[:-1], codes.shape[-1] // 2))


def unpack(packed: Any) -> Any:
    """Return a new array with one 4-bit code per byte, from an array with two codes per byte."""
    return _repack(pack_codes.unpack, packed, (*packed.shape[:-1], 2 * packed.shape[-1]))


def _repack(launch: Any, array: Any, shape: tuple[int, ...]) -> Any:
    """Return a new uint8 array of the given shape, filled by launch(array, new array)."""
    cupy = imports.cupy()
    with imports.making_current(array.device.id):
        out = cupy.empty(shape, np.uint8)
        if out.size:
            launch(cupy.ascontiguousarray(array), out)
        return out
