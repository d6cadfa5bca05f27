"""Requantize CuPy arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.cuda.engine.dequantize import dequantize
from fp4kit.cuda.engine.layouts import swizzle
from fp4kit.cuda.engine.quantize import quantize
from fp4kit.cuda.launch import requantize as kernels
from fp4kit.cuda.launch.geometry import as_aligned
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.requantize import may_keep_codes

FLOAT32 = np.dtype(np.float32)


def requantize(q: Quantized, target: Recipe) -> tuple[Quantized, Any]:
    """Return q quantized by another recipe, and how many of its values changed: int64 () on the device.

    The values of q are dequantized and quantized. If the recipes allow it, the device then checks whether scales of the
    target represent all values with the codes of q. If so, the result has the codes of q.
    """
    with imports.making_current(q.packed.device.id):
        values = dequantize(q, FLOAT32)
        may_keep = may_keep_codes(q, target)
        layout = "linear" if may_keep else q.scale_layout
        call = quantize_call("requantize", values, target, q.axis, QuantizeOptions(layout))
        result = replace(quantize(call), dtype=q.dtype)
        if may_keep:
            source = (
                as_aligned(q.packed),
                as_aligned(_layout_changed(q.block_scale, q.scale_layout, "linear", q.scale_shape)),
            )
            kernels.keep_codes(*source, q.recipe, result)
        before, after = (np.moveaxis(v, q.axis, -1) for v in (values, dequantize(result, FLOAT32)))
        changed = kernels.count_changed(before, after)
        scales = _layout_changed(result.block_scale, layout, q.scale_layout, result.scale_shape)
        return replace(result, block_scale=scales, scale_layout=q.scale_layout), changed


def _layout_changed(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Return scales copied to another layout, or the scales themselves if the layouts are equal."""
    return scales if source == target else swizzle(scales, source, target, shape)
