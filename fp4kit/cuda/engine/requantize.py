"""Requantize CuPy arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.cuda.engine.amax import tensor_amax
from fp4kit.cuda.engine.dequantize import dequantize
from fp4kit.cuda.engine.layouts import swizzle
from fp4kit.cuda.engine.quantize import quantize
from fp4kit.cuda.launch import requantize as kernels
from fp4kit.cuda.launch.geometry import as_aligned
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.dequantize import differing, may_keep_codes, may_use_powers, under_powers_of_two
from fp4kit.types import ScaleLayout

FLOAT32 = np.dtype(np.float32)


def requantize(q: Quantized, target: Recipe) -> tuple[Quantized, Any, Any]:
    """Convert q to another recipe."""
    with imports.making_current(q.packed.device.id):
        values = dequantize(q, FLOAT32)
        result, layout = _requantized(q, target, values)
        before, after = (np.moveaxis(v, q.axis, -1) for v in (values, dequantize(result, FLOAT32)))
        changes = kernels.count_changed(before, after)
        scales = _layout_changed(result.block_scale, layout, q.scale_layout, result.scale_shape)
        return replace(result, block_scale=scales, scale_layout=q.scale_layout), *changes


def _requantized(q: Quantized, target: Recipe, values: Any) -> tuple[Quantized, ScaleLayout]:
    """Return q quantized by the recipe `target`, and the layout of the new scales."""
    if may_use_powers(q, target):
        call = quantize_call("requantize", values, target, q.axis)
        own, changed = quantize(call), None
        if target.scale is not None:
            changed = imports.cupy().moveaxis(differing(values, dequantize(own, FLOAT32)), q.axis, -1)
        return replace(under_powers_of_two(call.moved, own, changed), dtype=q.dtype), "linear"
    if not may_keep_codes(q, target):
        call = quantize_call("requantize", values, target, q.axis, QuantizeOptions(q.scale_layout))
        return replace(quantize(call), dtype=q.dtype), q.scale_layout
    call = quantize_call("requantize", values, target, q.axis)
    codes, scales = q.packed, _layout_changed(q.block_scale, q.scale_layout, "linear", q.scale_shape)
    source = kernels.source_of(as_aligned(codes), as_aligned(scales), q.recipe, q.dtype)
    amax = tensor_amax(call, imports.cupy().ascontiguousarray(call.moved))
    kernels.power_amax(source, target, amax)
    result = replace(quantize(call._replace(tensor_amax=amax)), dtype=q.dtype)
    kernels.keep_codes(source, result)
    return result, "linear"


def _layout_changed(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Return scales copied from layout `source` to `target`; unchanged if they are equal, or there are no scales."""
    return scales if scales is None or source == target else swizzle(scales, source, target, shape)
