"""Launch swizzle.cu, which copies block scales from one layout to another."""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, aligned, grid
from fp4kit.layouts import padded_shape

_ARGUMENTS = np.dtype([("in", "u8"), ("out", "u8"), ("matrices", "i8"), ("rows", "i8"), ("columns", "i8")])


def source(layout: str, target: str, quads: bool = True) -> str:
    """Return the C++ text that instantiates the kernel for copies from `layout` to `target`."""
    return instantiation("swizzle", kFrom=f"ScaleLayout::{layout}", kTo=f"ScaleLayout::{target}", kQuads=quads)


@cache
def _function(layout: str, target: str, quads: bool, device: int) -> Any:
    """Return the compiled kernel that copies from `layout` to `target`, as a CuPy function on a device."""
    return loader.function(source(layout, target, quads), "swizzle_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(layout: str, target: str, quads: bool, size: int, shape: tuple[int, int, int], device: int) -> Launch:
    """Return the prepared launch for B matrices of scales."""
    blocks = -(-size // (THREADS * (64 if quads else 4)))
    function = _function(layout, target, quads, device)
    return Launch(function, grid(blocks, device, UNLIMITED), _ARGUMENTS, *shape)


def swizzle(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> None:
    """Convert contiguous block scales from `layout` to the layout `target`, and write them into out."""
    launch_of(scales, layout, out, target, shape)(scales.data.ptr, out.data.ptr)


def launch_of(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> Launch:
    """Return the prepared launch that copies scales of the given shape from `layout` to `target`."""
    quads = "linear" in (layout, target) and aligned(scales, shape[-1]) and aligned(out, 16)
    size = max(prod(padded_shape(shape, name)) for name in (layout, target))
    return _launch(layout, target, quads, size, shape, scales.device.id)
