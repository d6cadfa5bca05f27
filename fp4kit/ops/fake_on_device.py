"""fake_quantize by a fake_rule, and the clip mask of its gradient, on CuPy arrays: on their device and its current stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.cuda import fake as kernels
from fp4kit.cuda import launch, limits, loader
from fp4kit.ops import on_device
from fp4kit.ops.prepare import Prepared
from fp4kit.recipes import Recipe


def check_supported(op: str, r: Recipe) -> None:
    """Formats and block shapes that the kernel has."""
    limits.check_formats(op, r)
    if not kernels.takes_blocks(r) or r.amax_nan == "lanes":
        rows, columns = r.block or (1, 1)
        what = f"blocks of {rows}x{columns}" if not kernels.takes_blocks(r) else "amax_nan='lanes'"
        raise NotImplementedError(
            f"{op}: {what} with fake_rule={r.fake_rule!r} have no CUDA kernel; needs one row of 16, 32, 64, 128, 256 or 512 "
            "columns, and amax_nan 'ignore' or 'propagate'; compute on the CPU with cupy.asnumpy(x)"
        )


def fake_quantize(op: str, p: Prepared) -> Any:
    """ops.fake_quantize by p.recipe.fake_rule, on the device of p.x."""
    check_supported(op, p.recipe)
    on_device.check_block_amax(op, p)
    cupy = loader.cupy()
    with loader.making_current(p.x.device.id):
        x = cupy.ascontiguousarray(p.moved)
        values = cupy.empty(x.shape, x.dtype)
        amax = _tensor_amax(op, p, x)
        if x.size:
            for m in on_device.matrices(p, x, "linear", None, None, amax, None, None, None, values):
                kernels.fake_matrix(m.x, p.recipe, m.amax, m.values, m.block_amax)
        return cupy.moveaxis(values, -1, p.axis)


def _tensor_amax(op: str, p: Prepared, x: Any) -> Any:
    """What fake_matrix takes: given, or computed from contiguous x; None where the kernel takes that of each block itself."""
    if p.recipe.tensor_scaling == "block" and p.others.get("tensor_amax") is None:
        return None
    return on_device.tensor_amax(op, p, x, None)


def clip_amax(op: str, p: Prepared) -> Any:
    """What fake_quantize_backward clips at without an amax: what the recipe's tensor scale covers, or the whole array."""
    cupy = loader.cupy()
    with loader.making_current(p.x.device.id):
        x = cupy.ascontiguousarray(p.moved)
        if p.recipe.tensor_scaling == "none":
            return launch.amax(x, launch.COUNTED[p.recipe.amax_nan])
        return on_device.tensor_amax(op, p, x, None)


def clip(grad: Any, p: Prepared, amax: Any) -> Any:
    """grad where |p.x| <= amax, else 0; grad of p.x's shape, amax as _clip_amax of ops.fake_quantize gives it."""
    cupy = loader.cupy()
    with loader.making_current(p.x.device.id):
        x, g, limit = (cupy.ascontiguousarray(a) for a in (p.moved, np.moveaxis(grad, p.axis, -1), amax))
        out = cupy.empty(g.shape, g.dtype)
        kernels.clip_gradient(g, x, limit, out)
        return cupy.moveaxis(out, -1, p.axis)
