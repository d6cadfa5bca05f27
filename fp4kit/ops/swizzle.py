"""swizzle and unswizzle: block scales between linear and tiled layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit import layouts
from fp4kit.interop import import_arrays
from fp4kit.ops.engines import run
from fp4kit.quantized import Quantized


def swizzle(q_or_scales: Any, layout: str) -> Any:
    """Block scales in another layout: of a Quantized (any layout to any), or of an array of linear scales (..., R, C).

    layout: "linear", "swizzled_128x4" or "swizzled_8x4"; fp4kit.layouts gives the offsets. Padding is zero.
    Returns a Quantized, or uint8 (..., R padded, C padded), each (R, C) matrix by itself; NumPy or CuPy, as the scales are.
    Raises ValueError for an unknown layout or an array of less than two dimensions; TypeError unless the scales are uint8.
    """
    layouts.check_layout("swizzle", layout)
    if isinstance(q_or_scales, Quantized):
        q = q_or_scales
        _check_has_scales("swizzle", q)
        if len(q.shape) < 2 and layout != "linear":
            raise ValueError(f"swizzle: q is 1-d; {layout} scales need the rows of a matrix; quantize x.reshape(1, -1)")
        return replace(q, block_scale=change_layout(q.block_scale, q.scale_layout, layout, q.scale_shape), scale_layout=layout)
    scales = _scales("swizzle", q_or_scales, 2)
    return change_layout(scales, "linear", layout, scales.shape)


def unswizzle(q_or_scales: Any, layout: str | None = None, shape: tuple[int, ...] | None = None) -> Any:
    """Linear block scales: of a Quantized, or of an array in `layout` whose linear shape (..., R, C) is `shape`.

    Returns a Quantized with scale_layout "linear", or uint8 of `shape`; padding is dropped. Inverse of swizzle.
    Raises ValueError if the array has another size than shape with its padding, or layout or shape is missing for an array.
    """
    if isinstance(q_or_scales, Quantized):
        q = q_or_scales
        _check_has_scales("unswizzle", q)
        scales = change_layout(q.block_scale, q.scale_layout, "linear", q.scale_shape)
        return replace(q, block_scale=scales, scale_layout="linear")
    if layout is None or shape is None:
        raise ValueError("unswizzle: an array of scales needs layout and shape (its linear one); a Quantized knows both")
    layouts.check_layout("unswizzle", layout)
    scales, shape = _scales("unswizzle", q_or_scales, 0), tuple(shape)
    layouts.check_size(scales, layout, shape)
    return change_layout(scales, layout, "linear", shape).reshape(shape)


def change_layout(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Scales whose linear shape (..., R, C) is `shape`, from one layout to another; themselves where it is the same one."""
    if source == target:
        return scales
    return run("swizzle", "swizzle", scales, scales, source, target, shape)


def _check_has_scales(op: str, q: Quantized) -> None:
    if q.block_scale is None:
        raise ValueError(f"{op}: {q.recipe.id} has no block scales")


def _scales(op: str, scales: Any, ndim: int) -> Any:
    (array,) = import_arrays(op, scales=scales)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: scales are {array.dtype}; needs uint8 bit patterns; use scales.view(np.uint8)")
    if array.ndim < ndim:
        raise ValueError(f"{op}: scales are {array.ndim}-d; needs (..., R, C)")
    return array
