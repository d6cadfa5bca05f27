"""Launcher of the clip mask of fake_quantize's gradient."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, address, grid

CLIP = np.dtype([(name, "u8") for name in ("grad", "x", "amax", "out")] + [("count", "i8"), ("covered", "i8")])


@cache
def _clip_function(dtype: np.dtype, grad: np.dtype, whole: bool, device: int) -> Any:
    source = instantiation("clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=whole)
    return loader.function(source, "clip_kernel", device)


@lru_cache(CACHE_SIZE)
def _clip_launch(dtype: np.dtype, grad: np.dtype, whole: bool, count: int, covered: int, device: int) -> Launch:
    blocks = -(-count * max(dtype.itemsize, grad.itemsize) // (16 * THREADS))
    return Launch(_clip_function(dtype, grad, whole, device), grid(blocks, device, UNLIMITED), CLIP, count, covered)


def clip_gradient(grad: Any, x: Any, amax: Any, out: Any) -> None:
    """grad where |x| <= amax, else 0, into out. grad, x, out: contiguous, of one size; out of grad's dtype.

    amax: float32; each covers as many neighbouring elements of x as the next, so its size divides that of x.
    """
    whole = all(a.data.ptr % 16 == 0 for a in (grad, x, out))
    launch = _clip_launch(x.dtype, grad.dtype, whole, x.size, x.size // amax.size, x.device.id)
    launch(*map(address, (grad, x, amax, out)))
