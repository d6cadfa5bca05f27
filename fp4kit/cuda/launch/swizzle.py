"""Launcher of swizzle and unswizzle: block scales between layouts, on the current stream."""

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
    """Instantiation from a layout to another; quads: by 16 bytes of four rows, which one of the two being linear
    allows.
    """
    return instantiation("swizzle", kFrom=f"ScaleLayout::{layout}", kTo=f"ScaleLayout::{target}", kQuads=quads)


@cache
def _function(layout: str, target: str, quads: bool, device: int) -> Any:
    return loader.function(source(layout, target, quads), "swizzle_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(layout: str, target: str, quads: bool, size: int, shape: tuple[int, int, int], device: int) -> Launch:
    blocks = -(-size // (THREADS * (64 if quads else 4)))
    function = _function(layout, target, quads, device)
    return Launch(function, grid(blocks, device, UNLIMITED), _ARGUMENTS, *shape)


def swizzle(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> None:
    """Contiguous scales in a layout into out in layout `target`, another one; shape: the linear one, (B, R, C)."""
    launch_of(scales, layout, out, target, shape)(scales.data.ptr, out.data.ptr)


def launch_of(scales: Any, layout: str, out: Any, target: str, shape: tuple[int, int, int]) -> Launch:
    """Return the launch for such arrays, which is called with their addresses; out is None before it exists."""
    quads = "linear" in (layout, target) and aligned(scales, shape[-1]) and aligned(out, 16)
    size = max(prod(padded_shape(shape, name)) for name in (layout, target))
    return _launch(layout, target, quads, size, shape, scales.device.id)
