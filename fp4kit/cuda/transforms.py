"""Transpose, swizzle, unswizzle, pack, unpack and rotate CuPy arrays."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Declined, Rotation
from fp4kit.cuda.launch import LAUNCHES, Launch, address, aligned, as_aligned, prepared
from fp4kit.layouts import check_pairs, check_size, padded_shape
from fp4kit.quantized.container import Quantized, packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.stochastic import hadamard_factor

SQUARE_BLOCKS = (16, 32, 64)  # the sizes of square blocks that the kernel transpose supports
# A tile of the kernel transpose, see transpose_codes.cuh: one row per thread of a thread block, and bytes of codes per
# row.
_TILE = (LAUNCHES["transpose"].threads, 128)
_BYTES_PER_THREAD = 32  # bytes of packed codes that a thread of pack_codes loads, in four parts


def transpose(packed: Any, scales: Any, q: Quantized) -> tuple[Any, Any]:
    """Transpose each matrix of a Quantized q with square blocks, in one launch."""
    cupy = imports.cupy()
    *lead, M, K = q.moved_shape
    shape = (*lead, K, M)
    check_square(q.recipe)
    with imports.making_current(packed.device.id):
        codes = cupy.empty(packed_shape(shape, q.recipe), np.uint8)
        block_scale = cupy.empty(padded_shape(scale_shape(shape, q.recipe), q.scale_layout), np.uint8)
        if codes.size:
            packed, scales = cupy.ascontiguousarray(packed), cupy.ascontiguousarray(scales)
            launch = transpose_launch(packed, scales, q.recipe, q.scale_layout, codes, block_scale, (prod(lead), M, K))
            launch(packed.data.ptr, scales.data.ptr, codes.data.ptr, block_scale.data.ptr)
        return codes, block_scale


def check_square(r: Recipe) -> None:
    """Raise Declined unless the kernel transpose supports the square blocks of a recipe."""
    size = r.block_size
    if size not in SQUARE_BLOCKS:
        raise Declined(
            f"blocks of {size}x{size} have no CUDA kernel; needs 16, 32 or 64; transpose q with its arrays' .get()"
        )


def swizzle(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from layout `source` to `target`, in one launch."""
    check_size(scales, source, shape)
    cupy = imports.cupy()
    with imports.making_current(scales.device.id):
        out = cupy.empty(padded_shape(shape, target), np.uint8)
        if out.size:
            *lead, R, C = shape
            scales = cupy.ascontiguousarray(scales)
            swizzle_launch(scales, source, out, target, (prod(lead), R, C))(scales.data.ptr, out.data.ptr)
        return out


def pack(codes: Any) -> Any:
    """Return a new array with two 4-bit codes per byte, from an array with one code per byte."""
    # The high nibbles of `codes` are dropped without a check, because a check would wait for the device.
    check_pairs(codes.shape)
    return _repack("pack_codes", codes, (*codes.shape[:-1], codes.shape[-1] // 2))


def unpack(packed: Any) -> Any:
    """Return a new array with one 4-bit code per byte, from an array with two codes per byte."""
    return _repack("unpack_codes", packed, (*packed.shape[:-1], 2 * packed.shape[-1]))


def _repack(kernel: str, array: Any, shape: tuple[int, ...]) -> Any:
    """Return a new uint8 array of the given shape, which a kernel fills from an array."""
    cupy = imports.cupy()
    with imports.making_current(array.device.id):
        out = cupy.empty(shape, np.uint8)
        if out.size:
            array = cupy.ascontiguousarray(array)
            packed_bytes = min(array.size, out.size)
            work = -(-packed_bytes // _BYTES_PER_THREAD)
            is_aligned = aligned(array, 16) and aligned(out, 16)
            prepared(kernel, work, (packed_bytes,), out.device.id, (is_aligned,))(array.data.ptr, out.data.ptr)
        return out


def swizzle_launch(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> Launch:
    """Return the prepared launch that copies scales of the given shape from `layout` to `target`."""
    quads = "linear" in (layout, target) and aligned(scales, shape[-1]) and aligned(out, 16)
    size = max(prod(padded_shape(shape, name)) for name in (layout, target))
    traits = (f"ScaleLayout::{layout}", f"ScaleLayout::{target}", quads)
    return prepared("swizzle", -(-size // (64 if quads else 4)), shape, scales.device.id, traits)


def transpose_launch(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> Launch:
    """Return the prepared launch that transposes matrices of the given shape, with scales in the given layout."""
    wide_codes, wide_scales = wide_copies(codes, scales, r, layout, out, scales_out, shape)
    struct = transpose_struct(r, layout, wide_scales)
    return prepared("transpose", work_blocks(r, layout, shape), shape, codes.device.id, (wide_codes,), struct)


def transpose_struct(r: Recipe, layout: str, wide_scales: bool) -> str:
    """Return the definition of the C++ struct S, the options of the kernel transpose."""
    struct = f"struct S {{ static constexpr int kBits = {r.element.packing.stored_bits}, kBlock = {r.block_size}; "
    struct += f"static constexpr ScaleLayout kLayout = ScaleLayout::{layout}; "
    return struct + f"static constexpr bool kScaleWords = {str(wide_scales).lower()}; }};"


def wide_copies(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> tuple[bool, bool]:
    """Return the flags (wide_codes, wide_scales), which choose the instantiation of the kernel transpose.

    If wide_codes is True, rows of codes are copied 16 bytes at a time. If wide_scales is True, scales are copied four
    bytes at a time.
    """
    _, M, K = shape
    bits = r.element.packing.stored_bits
    wide_codes = all(aligned(array, length * bits // 8) for array, length in ((codes, K), (out, M)))
    wide_scales = aligned(scales, 16) and aligned(scales_out, 16)
    return wide_codes, wide_scales and (
        layout != "linear" or (M // r.block_size % 4 == 0 and K // r.block_size % 4 == 0)
    )


def work_blocks(r: Recipe, layout: str, shape: tuple[int, int, int]) -> int:
    """Return how many thread blocks can share the work of the kernel transpose for matrices (B, M, K)."""
    B, M, K = shape
    bits, block, (rows, line) = r.element.packing.stored_bits, r.block_size, _TILE
    tiles = B * -(-M // rows) * -(-K // (line * 8 // bits))
    squares = B * (M // block // 4) * (K // block // 4) if layout == "linear" else 0  # one thread per 4 x 4 scales
    large = B * -(-M // (4 * block * block)) * -(-K // 512) if layout == "swizzled_8x4" else 0  # LargeScaleTile
    return tiles + -(-squares // LAUNCHES["transpose"].threads) + large


# Rotations ------------------------------------------------------------------------------------------------------------
# Blocks along an axis are rotated by a Hadamard transform or by given matrices. Arrays are reshaped to (outer, length,
# inner), so that the blocks lie along the middle axis. Signs of -1 or 1 multiply the elements before the rotation or,
# for an inverse rotation, the results. hadamard_rows.cu computes Hadamard transforms of blocks whose elements are
# neighbors in memory, hadamard_columns.cu those of other blocks. Both need aligned arrays. rotate.cu does the rest.

TILE = 4096  # elements that a thread block of rotate.cu or hadamard_rows.cu takes at a time
COLUMNS_TILE = 8192  # elements that a thread block of hadamard_columns.cu takes at a time
MAX_ROW = 1 << 31  # elements; hadamard_rows.cu takes only rows that are shorter than this


def _takes_hadamard(x: Any, out: Any) -> bool:
    """Return True if hadamard_rows.cu or hadamard_columns.cu can transform x (outer, length, inner) into out."""
    # If inner is 1, both arrays must begin at multiples of 16 bytes, and length must be below MAX_ROW (2^31).
    _, length, inner = x.shape
    if inner == 1:
        return length < MAX_ROW and x.data.ptr % 16 == 0 and out.data.ptr % 16 == 0
    return inner * x.itemsize % 4 == 0 and x.data.ptr % 4 == 0 and out.data.ptr % 4 == 0


def launch_rotate(x: Any, out: Any, size: int, signs: Any, matrices: Any, inverse: bool) -> None:
    """Rotate the blocks along the middle axis of x, and write the results into out, on the current stream."""
    (outer, length, inner), device, has_signs = x.shape, x.device.id, signs is not None
    struct = f"constexpr int kSize = {size};\nconstexpr float kFactor = {float(hadamard_factor(size)).hex()}f;\n"
    if matrices is not None or not _takes_hadamard(x, out):
        lanes = TILE // size
        groups = -(-outer // lanes) if inner == 1 else outer * -(-inner // lanes)
        matrix_step = 0 if matrices is None or len(matrices) == 1 else size * size
        traits = (x.dtype, inner == 1, has_signs, matrices is not None, inverse)
        launch = prepared("rotate", groups * (length // size), (*x.shape, matrix_step), device, traits, struct)
        launch(*map(address, (x, out, signs, as_aligned(matrices))))
        return
    transform_traits = (x.dtype, has_signs, inverse)
    if inner == 1:
        sizes = (outer * length, length)
        launch = prepared("hadamard_rows", -(-outer * length // TILE), sizes, device, transform_traits, struct)
    else:
        tiles = outer * (length // size) * -(-inner * size // COLUMNS_TILE)
        launch = prepared("hadamard_columns", tiles, x.shape, device, transform_traits, struct)
    launch(*map(address, (x, out, signs)))


@lru_cache(64)
def _signs(signs: bytes, device: int) -> Any:
    """Return the signs of a Hadamard transform as a uint8 array on the current device: 1 for negative, 0 for
    positive.
    """
    # The copy is complete when this function returns, because later calls may use the array on other streams.
    cupy = imports.cupy()
    array = cupy.asarray(np.frombuffer(signs, np.uint8))
    cupy.cuda.get_current_stream().synchronize()
    return array


def rotate(r: Rotation) -> Any:
    """Rotate the blocks of the array in a Rotation."""
    cupy, device = imports.cupy(), r.x.device.id
    with imports.making_current(device):
        x = cupy.ascontiguousarray(r.x).reshape(r.shape)
        out = cupy.empty(r.x.shape, r.x.dtype)
        if x.size:
            signs = None if r.signs is None else _signs(r.signs.tobytes(), device)
            matrices = None if r.matrices is None else cupy.asarray(r.matrices)
            launch_rotate(x, out.reshape(r.shape), r.size, signs, matrices, r.inverse)
        return out
