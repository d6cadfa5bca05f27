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
    """Return the C++ text of the instantiation that copies from `layout` to `target`.

    Args:
        quads: copy 16 bytes of four rows at a time, which needs one of the layouts to be linear.
    """
    return instantiation("swizzle", kFrom=f"ScaleLayout::{layout}", kTo=f"ScaleLayout::{target}", kQuads=quads)


@cache
def _function(layout: str, target: str, quads: bool, device: int) -> Any:
    """Return the compiled kernel."""
    return loader.function(source(layout, target, quads), "swizzle_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(layout: str, target: str, quads: bool, size: int, shape: tuple[int, int, int], device: int) -> Launch:
    """Return the launch for `size` bytes and matrices of linear shape (B, R, C)."""
    blocks = -(-size // (THREADS * (64 if quads else 4)))
    function = _function(layout, target, quads, device)
    return Launch(function, grid(blocks, device, UNLIMITED), _ARGUMENTS, *shape)


def swizzle(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> None:
    """Copy contiguous scales from `layout` into out, in another layout, `target`.

    Args:
        shape: the shape of the scales in the linear layout, (B, R, C). Launches on the current stream.
    """
    launch_of(scales, layout, out, target, shape)(scales.data.ptr, out.data.ptr)


def launch_of(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> Launch:
    """Return the launch for such arrays. Call it with their addresses. out: None if it is allocated later."""
    quads = "linear" in (layout, target) and aligned(scales, shape[-1]) and aligned(out, 16)
    size = max(prod(padded_shape(shape, name)) for name in (layout, target))
    return _launch(layout, target, quads, size, shape, scales.device.id)
