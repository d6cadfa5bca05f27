"""Launch transpose.cu, which transposes the codes and block scales of stacked matrices with square blocks.
Two flags choose the instantiation. If wide_codes is True, rows of codes are copied 16 bytes at a time. If wide_scales
is True, scales are copied four bytes at a time. Both need aligned arrays. For linear scales, wide_scales also needs
rows of scales with multiples of four scales, before and after the transpose.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, aligned, grid
from fp4kit.recipes import Recipe

_POINTERS = ("codes", "scales", "codes_out", "scales_out")
ARGUMENTS = np.dtype([(name, "u8") for name in _POINTERS] + [(name, "i8") for name in ("matrices", "rows", "columns")])
_TILE = (256, 128)  # rows of a tile, and bytes of codes per row, see transpose_codes.cuh
BLOCKS = (16, 32, 64)  # the sizes of square blocks that the kernel supports


def source(bits: int, block: int, layout: str, wide_codes: bool = True, wide_scales: bool = True) -> str:
    """Return the C++ text that instantiates the kernel for codes of `bits` bits in square blocks of `block` columns."""
    return instantiation("transpose", kernel_structs(bits, block, layout, wide_scales), kAligned=wide_codes)


def kernel_structs(bits: int, block: int, layout: str, wide_scales: bool = True) -> str:
    """Return the definition of the C++ struct S, the options of the kernel."""
    struct = f"struct S {{ static constexpr int kBits = {bits}, kBlock = {block}; "
    struct += f"static constexpr ScaleLayout kLayout = ScaleLayout::{layout}; "
    return struct + f"static constexpr bool kScaleWords = {str(wide_scales).lower()}; }};"


@cache
def _function(bits: int, block: int, layout: str, wide_codes: bool, wide_scales: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    return loader.function(source(bits, block, layout, wide_codes, wide_scales), "transpose_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(
    bits: int, block: int, layout: str, wide_codes: bool, wide_scales: bool, shape: tuple[int, int, int], device: int
) -> Launch:
    """Return the prepared launch of transpose.cu for a stack of matrices of the shape (B, M, K)."""
    function = _function(bits, block, layout, wide_codes, wide_scales, device)
    return Launch(function, grid(work_blocks(bits, block, layout, shape), device, UNLIMITED), ARGUMENTS, *shape)


def transpose(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> None:
    """Transpose the codes and scales of B matrices (M, K), and write them into out and scales_out."""
    launch = launch_of(codes, scales, r, layout, out, scales_out, shape)
    launch(codes.data.ptr, scales.data.ptr, out.data.ptr, scales_out.data.ptr)


def launch_of(
    codes: Any, scales: Any, r: Recipe, layout: str, out: Any, scales_out: Any, shape: tuple[int, int, int]
) -> Launch:
    """Return the prepared launch that transposes matrices of the given shape, with scales in the given layout."""
    wide_codes, wide_scales = wide_copies(codes, scales, r, layout, out, scales_out, shape)
    return _launch(r.element.packing.stored_bits, r.block_size, layout, wide_codes, wide_scales, shape, codes.device.id)


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
