"""Implement fp4kit.swizzle and unswizzle, which convert block scales between linear and tiled layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import numpy as np

from fp4kit import layouts
from fp4kit.arguments import as_shape
from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.call_cache import find, run_first
from fp4kit.ops.engines import new_cached_call, run
from fp4kit.quantized.container import Quantized
from fp4kit.types import ArrayT, ScaleLayout


@overload
def swizzle(q_or_scales: Quantized, layout: ScaleLayout) -> Quantized: ...
@overload
def swizzle(q_or_scales: ArrayT, layout: ScaleLayout) -> ArrayT: ...
def swizzle(q_or_scales: Any, layout: ScaleLayout) -> Any:
    """Convert block scales to another layout, such as the tiled layout that Blackwell's matrix instructions read.

    Args:
        q_or_scales: a Quantized in any layout, or an array of linear scales, uint8 (..., R, C).
        layout: the layout to return: "linear", "swizzled_128x4" or "swizzled_8x4". fp4kit.layouts states the byte
            offsets.

    Returns:
        For a Quantized, a new Quantized with its scales in that layout, which shares all other arrays with the
        argument. For an array, uint8 (..., R padded, C padded); each (R, C) matrix is laid out by itself, and the
        padding is zero. The result is in the library and on the device of the scales. If the scales have the layout
        already, they are not copied.

    Raises:
        TypeError: the scales are not uint8.
        ValueError: the layout is unknown; an array has fewer than two dimensions; or a Quantized has no block scales,
            or is 1-d and the layout is tiled.

    Exact:
        unswizzle is the inverse, bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4")
        >>> q.block_scale.shape, fp4kit.swizzle(q, "swizzled_128x4").block_scale.shape
        ((32, 4), (128, 4))
    """
    if isinstance(q_or_scales, Quantized):
        return _change("swizzle", q_or_scales, layout)
    return _swizzle_scales(q_or_scales, layout)


@returns_in_library
def _swizzle_scales(scales: Any, layout: str) -> Any:
    """Return an array of linear block scales in the given layout, padded."""
    layouts.check_layout("swizzle", layout)
    scales = _scales("swizzle", scales, 2)
    return change_layout(scales, "linear", layout, scales.shape)


def _change(op: str, q: Quantized, layout: ScaleLayout) -> Quantized:
    """Return q with its block scales in the given layout."""
    key, cached = find(op, (q,), layout)
    return _change_fully(q, op, layout, key) if cached is None else cached(q)


@returns_in_library
def _change_fully(original: Quantized, op: str, layout: ScaleLayout, key: Any) -> Quantized:
    """Check the arguments of swizzle or unswizzle, and return a copy of `original` with its scales in the given
    layout.
    """
    layouts.check_layout(op, layout)
    q = original.imported()
    if q.block_scale is None:
        raise ValueError(f"{op}: {q.recipe.id} has no block scales; needs a recipe with block scales")
    if len(q.shape) < 2 and layout != "linear":
        raise ValueError(f"{op}: q is 1-d; {layout} scales need the rows of a matrix; quantize x.reshape(1, -1)")

    def driver() -> Quantized:
        scales = change_layout(q.block_scale, q.scale_layout, layout, q.scale_shape)
        return replace(q, block_scale=scales, scale_layout=layout)

    cached = None if key is None else new_cached_call("swizzle", on_device(q.packed), q, original, layout)
    result: Quantized = run_first(key, cached, (original,), driver)
    return result


@overload
def unswizzle(
    q_or_scales: Quantized, layout: ScaleLayout | None = None, shape: tuple[int, ...] | None = None
) -> Quantized: ...
@overload
def unswizzle(
    q_or_scales: ArrayT, layout: ScaleLayout | None = None, shape: tuple[int, ...] | None = None
) -> ArrayT: ...
def unswizzle(q_or_scales: Any, layout: ScaleLayout | None = None, shape: tuple[int, ...] | None = None) -> Any:
    """Convert block scales back to linear layout: the inverse of swizzle.

    Args:
        q_or_scales: a Quantized, or an array of scales in `layout`, uint8.
        layout: the layout of an array. Leave it out for a Quantized, which knows its layout.
        shape: the shape (..., R, C) of the array in linear layout. Leave it out for a Quantized.

    Returns:
        For a Quantized, a new Quantized with scale_layout "linear". For an array, a uint8 array of shape `shape`. The
        padding is dropped. If the scales are linear already, they are not copied.

    Raises:
        TypeError: the scales are not uint8.
        ValueError: the size of the array does not fit `shape` with its padding; the layout is unknown; layout or shape
            is missing for an array, or given for a Quantized; or a Quantized has no block scales.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4", scale_layout="swizzled_8x4")
        >>> fp4kit.unswizzle(q).scale_layout
        'linear'
    """
    if isinstance(q_or_scales, Quantized):
        if layout is not None or shape is not None:
            raise ValueError(
                "unswizzle: layout or shape was given for a Quantized, which has both; leave them out, or pass its"
                " block_scale"
            )
        return _change("unswizzle", q_or_scales, "linear")
    return _unswizzle_scales(q_or_scales, layout, shape)


@returns_in_library
def _unswizzle_scales(scales: Any, layout: str | None, shape: tuple[int, ...] | None) -> Any:
    """Return an array of block scales, which are in layout `layout`, in linear layout and shape `shape`."""
    if layout is None or shape is None:
        raise ValueError(
            "unswizzle: layout or shape is missing; an array of scales needs its layout and its linear shape; a"
            " Quantized needs neither"
        )
    layouts.check_layout("unswizzle", layout)
    scales, shape = _scales("unswizzle", scales, 0), as_shape("unswizzle", shape)
    layouts.check_size(scales, layout, shape)
    return change_layout(scales, layout, "linear", shape).reshape(shape)


def change_layout(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from layout `source` to layout `target`."""
    if source == target:
        return scales
    return run("swizzle", "swizzle", on_device(scales), scales, source, target, shape)


def _scales(op: str, scales: Any, ndim: int) -> Any:
    """Return an array of block scales, of any library, as a NumPy or CuPy array without a copy."""
    (array,) = import_arrays(op, scales=scales)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: scales are {array.dtype}; needs uint8 bit patterns; use scales.view(np.uint8)")
    if array.ndim < ndim:
        raise ValueError(f"{op}: scales are {array.ndim}-d; needs (..., R, C)")
    return array
