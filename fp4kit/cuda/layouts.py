"""Transpose, swizzle, unswizzle, pack and unpack CuPy arrays."""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.arrays import imports
from fp4kit.call.parse import Declined
from fp4kit.cuda import compiler
from fp4kit.cuda.compiler import instantiation
from fp4kit.cuda.dispatch import CACHE_SIZE
from fp4kit.cuda.launch import THREADS, UNLIMITED, Launch, aligned, grid
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.parts import packed_shape, scale_shape
from fp4kit.recipes import Recipe


def transpose(packed: Any, scales: Any, q: Quantized) -> tuple[Any, Any]:
    """Transpose each matrix of a Quantized q with square blocks, in one launch."""
    cupy, size = imports.cupy(), q.recipe.block_size
    *lead, M, K = q.moved_shape
    shape = (*lead, K, M)
    if size not in SQUARE_BLOCKS:
        raise Declined(
            f"blocks of {size}x{size} have no CUDA kernel; needs 16, 32 or 64; transpose q with its arrays' .get()"
        )
    with imports.making_current(packed.device.id):
        codes = cupy.empty(packed_shape(shape, q.recipe), np.uint8)
        block_scale = cupy.empty(padded_shape(scale_shape(shape, q.recipe), q.scale_layout), np.uint8)
        if codes.size:
            packed, scales = cupy.ascontiguousarray(packed), cupy.ascontiguousarray(scales)
            dimensions = (prod(lead), M, K)
            launch_transpose(packed, scales, q.recipe, q.scale_layout, codes, block_scale, dimensions)
        return codes, block_scale


def swizzle(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from layout `source` to `target`, in one launch."""
    layouts.check_size(scales, source, shape)
    cupy = imports.cupy()
    with imports.making_current(scales.device.id):
        out = cupy.empty(padded_shape(shape, target), np.uint8)
        if out.size:
            *lead, R, C = shape
            launch_swizzle(cupy.ascontiguousarray(scales), source, out, target, (prod(lead), R, C))
        return out


def pack(codes: Any) -> Any:
    """Return a new array with two 4-bit codes per byte, from an array with one code per byte."""
    # The high nibbles of `codes` are dropped without a check, because a check would wait for the device.
    layouts.check_pairs(codes.shape)
    return _repack(launch_pack, codes, (*codes.shape[:-1], codes.shape[-1] // 2))


def unpack(packed: Any) -> Any:
    """Return a new array with one 4-bit code per byte, from an array with two codes per byte."""
    return _repack(launch_unpack, packed, (*packed.shape[:-1], 2 * packed.shape[-1]))


def _repack(launch: Any, array: Any, shape: tuple[int, ...]) -> Any:
    """Return a new uint8 array of the given shape, filled by launch(array, new array)."""
    cupy = imports.cupy()
    with imports.making_current(array.device.id):
        out = cupy.empty(shape, np.uint8)
        if out.size:
            launch(cupy.ascontiguousarray(array), out)
        return out


_SWIZZLE = np.dtype([("in", "u8"), ("out", "u8"), ("matrices", "i8"), ("rows", "i8"), ("columns", "i8")])


def swizzle_source(layout: str, target: str, quads: bool = True) -> str:
    """Return the C++ text that instantiates the kernel for copies from `layout` to `target`."""
    return instantiation("swizzle", kFrom=f"ScaleLayout::{layout}", kTo=f"ScaleLayout::{target}", kQuads=quads)


@cache
def _swizzle_function(layout: str, target: str, quads: bool, device: int) -> Any:
    """Return the compiled kernel that copies from `layout` to `target`, as a CuPy function on a device."""
    return compiler.function(swizzle_source(layout, target, quads), "swizzle_kernel", device)


@lru_cache(CACHE_SIZE)
def _swizzle_launch(
    layout: str, target: str, quads: bool, size: int, shape: tuple[int, int, int], device: int
) -> Launch:
    """Return the prepared launch for B matrices of scales."""
    blocks = -(-size // (THREADS * (64 if quads else 4)))
    function = _swizzle_function(layout, target, quads, device)
    return Launch(function, grid(blocks, device, UNLIMITED), _SWIZZLE, *shape)


def launch_swizzle(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> None:
    """Convert contiguous block scales from `layout` to the layout `target`, and write them into out."""
    swizzle_launch(scales, layout, out, target, shape)(scales.data.ptr, out.data.ptr)


def swizzle_launch(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> Launch:
    """Return the prepared launch that copies scales of the given shape from `layout` to `target`."""
    quads = "linear" in (layout, target) and aligned(scales, shape[-1]) and aligned(out, 16)
    size = max(prod(padded_shape(shape, name)) for name in (layout, target))
    return _swizzle_launch(layout, target, quads, size, shape, scales.device.id)


_POINTERS = ("codes", "scales", "codes_out", "scales_out")
TRANSPOSE = np.dtype([(name, "u8") for name in _POINTERS] + [(name, "i8") for name in ("matrices", "rows", "columns")])
_TILE = (256, 128)  # rows of a tile, and bytes of codes per row, see transpose_codes.cuh
SQUARE_BLOCKS = (16, 32, 64)  # the sizes of square blocks that the kernel supports


def transpose_source(bits: int, block: int, layout: str, wide_codes: bool = True, wide_scales: bool = True) -> str:
    """Return the C++ text that instantiates the kernel for codes of `bits` bits in square blocks of `block` columns."""
    return instantiation("transpose", transpose_struct(bits, block, layout, wide_scales), kAligned=wide_codes)


def transpose_struct(bits: int, block: int, layout: str, wide_scales: bool = True) -> str:
    """Return the definition of the C++ struct S, the options of the kernel."""
    struct = f"struct S {{ static constexpr int kBits = {bits}, kBlock = {block}; "
    struct += f"static constexpr ScaleLayout kLayout = ScaleLayout::{layout}; "
    return struct + f"static constexpr bool kScaleWords = {str(wide_scales).lower()}; }};"


@cache
def _transpose_function(bits: int, block: int, layout: str, wide_codes: bool, wide_scales: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    return compiler.function(transpose_source(bits, block, layout, wide_codes, wide_scales), "transpose_kernel", device)


@lru_cache(CACHE_SIZE)
def _transpose_launch(
    bits: int, block: int, layout: str, wide_codes: bool, wide_scales: bool, shape: tuple[int, int, int], device: int
) -> Launch:
    """Return the prepared launch of transpose.cu for a stack of matrices of the shape (B, M, K)."""
    function = _transpose_function(bits, block, layout, wide_codes, wide_scales, device)
    return Launch(function, grid(work_blocks(bits, block, layout, shape), device, UNLIMITED), TRANSPOSE, *shape)


def launch_transpose(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> None:
    """Transpose the codes and scales of B matrices (M, K), and write them into out and scales_out."""
    launch = transpose_launch(codes, scales, r, layout, out, scales_out, shape)
    launch(codes.data.ptr, scales.data.ptr, out.data.ptr, scales_out.data.ptr)


def transpose_launch(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> Launch:
    """Return the prepared launch that transposes matrices of the given shape, with scales in the given layout."""
    wide_codes, wide_scales = wide_copies(codes, scales, r, layout, out, scales_out, shape)
    return _transpose_launch(
        r.element.packing.stored_bits, r.block_size, layout, wide_codes, wide_scales, shape, codes.device.id
    )


def wide_copies(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> tuple[bool, bool]:
    """Return the flags (wide_codes, wide_scales), which choose the instantiation of the kernel."""
    _, M, K = shape
    bits = r.element.packing.stored_bits
    wide_codes = all(aligned(array, length * bits // 8) for array, length in ((codes, K), (out, M)))
    wide_scales = aligned(scales, 16) and aligned(scales_out, 16)
    return wide_codes, wide_scales and (
        layout != "linear" or (M // r.block_size % 4 == 0 and K // r.block_size % 4 == 0)
    )


def work_blocks(bits: int, block: int, layout: str, shape: tuple[int, int, int]) -> int:
    """Return how many thread blocks can share the work for matrices (B, M, K) with `bits` bits per code."""
    B, M, K = shape
    rows, line = _TILE
    tiles = B * -(-M // rows) * -(-K // (line * 8 // bits))
    squares = B * (M // block // 4) * (K // block // 4) if layout == "linear" else 0  # one thread per 4 x 4 scales
    large = B * -(-M // (4 * block * block)) * -(-K // 512) if layout == "swizzled_8x4" else 0  # LargeScaleTile
    return tiles + -(-squares // THREADS) + large


_PACK = np.dtype([("in", "u8"), ("out", "u8"), ("bytes", "i8")])
_BYTES_PER_THREAD = 32  # bytes of packed codes; a thread loads them in four parts


def pack_source(aligned_runs: bool = True) -> str:
    """Return the C++ text that instantiates both kernels."""
    return instantiation("pack_codes", kAligned=aligned_runs)


@cache
def _pack_function(kernel: str, aligned_runs: bool, device: int) -> Any:
    """Return one of the two compiled kernels as a CuPy function on a device."""
    return compiler.function(pack_source(aligned_runs), kernel, device)


@lru_cache(CACHE_SIZE)
def _pack_launch(kernel: str, aligned_runs: bool, packed_bytes: int, device: int) -> Launch:
    """Return the prepared launch of one of the two kernels for `packed_bytes` bytes of packed codes."""
    blocks = -(-packed_bytes // (_BYTES_PER_THREAD * THREADS))
    return Launch(_pack_function(kernel, aligned_runs, device), grid(blocks, device, UNLIMITED), _PACK, packed_bytes)


def _launch_packing(kernel: str, given: Any, out: Any, packed_bytes: int) -> None:
    """Launch one of the two kernels, which reads `given` and writes `out`, on the current stream."""
    launch = _pack_launch(kernel, aligned(given, 16) and aligned(out, 16), packed_bytes, out.device.id)
    launch(given.data.ptr, out.data.ptr)


def launch_pack(codes: Any, packed: Any) -> None:
    """Pack 4-bit codes, one per byte, into `packed`, two per byte."""
    # `codes` has twice as many elements as `packed`, which must not be empty.
    _launch_packing("pack_codes_kernel", codes, packed, packed.size)


def launch_unpack(packed: Any, codes: Any) -> None:
    """Unpack 4-bit codes, two per byte, into `codes`, one per byte."""
    # `codes` has twice as many elements as `packed`, which must not be empty.
    _launch_packing("unpack_codes_kernel", packed, codes, packed.size)
