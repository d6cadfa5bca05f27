"""Launch clip.cu, which applies the clip mask of fake_quantize_backward."""

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
def _clip_function(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    source = instantiation("clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=aligned_runs)
    return loader.function(source, "clip_kernel", device)


@lru_cache(CACHE_SIZE)
def _clip_launch(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, count: int, covered: int, device: int) -> Launch:
    """Return the prepared launch of clip.cu for arrays of `count` elements."""
    blocks = -(-count * max(dtype.itemsize, grad.itemsize) // (16 * THREADS))
    return Launch(
        _clip_function(dtype, grad, aligned_runs, device), grid(blocks, device, UNLIMITED), CLIP, count, covered
    )


def clip_gradient(grad: Any, x: Any, amax: Any, out: Any) -> None:
    """Write the clipped gradient into out: grad where |x| <= amax, otherwise +0."""
    aligned_runs = all(a.data.ptr % 16 == 0 for a in (grad, x, out))
    launch = _clip_launch(x.dtype, grad.dtype, aligned_runs, x.size, x.size // amax.size, x.device.id)
    launch(*map(address, (grad, x, amax, out)))
