"""Quantize, fake-quantize, decode and requantize CuPy arrays, along rows, columns or both."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.inputs import empty_quantized, without_sign
from fp4kit.call.parse import Call, QuantizeOptions, quantize_call
from fp4kit.cuda import matrix
from fp4kit.cuda.amax import empty_amax, tensor_amax
from fp4kit.cuda.compiler import recipe_struct
from fp4kit.cuda.dispatch import LaunchRequest, check_formats, find_kernel, kernel_for
from fp4kit.cuda.launch import address, as_aligned, prepared
from fp4kit.cuda.search import with_searched_amaxes
from fp4kit.cuda.transforms import swizzle
from fp4kit.quantized.container import Quantized, packed_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.recipes.schema import with_row_blocks
from fp4kit.reference.codec import is_per_expert, part_for_matrix
from fp4kit.reference.dequantize import differing, may_keep_codes, may_use_powers, under_powers_of_two
from fp4kit.reference.tensor_rules import encodes_by_amax, tensor_scale
from fp4kit.types import ScaleLayout


def quantize(call: Call) -> Quantized:
    """Quantize the array of a call."""
    original, call = call, with_searched_amaxes(call)
    request = matrix.launch_request(call, columns=call.axis == call.x.ndim - 2)
    if find_kernel(request) is None:
        request = matrix.launch_request(call)
    (
        kernel_for(request),
        matrix.matrix_count(call, request, call.tensor_amax),
    )  # may raise Declined: before any work
    with imports.making_current(call.x.device.id):
        x = imports.cupy().ascontiguousarray(call.x if request.columns else call.moved)
        request = matrix.with_kernel_amax(call, request, x)
        amax = empty_amax(x, call.recipe) if request.finds_amax else tensor_amax(call, x, request.columns)
        result = _allocate(original, amax, original.tensor_amax is not None) if call.out is None else call.out
        launch(call, request, x, amax, *((None, result) if request.columns else (result, None)))
    return result


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """Return the results of quantize for the rowwise and for the columnwise call, as two new Quantized."""
    request = matrix.launch_request(column, columns=True)
    one_amax = column.mask is None or row.tensor_amax is not None or row.recipe.tensor_scaling == "none"
    if find_kernel(request) is None or not one_amax:
        return quantize(row), quantize(column)
    with imports.making_current(row.x.device.id):
        x = imports.cupy().ascontiguousarray(row.x)
        request = matrix.with_kernel_amax(row._replace(mask=column.mask), request, x)
        amax = empty_amax(x, row.recipe) if request.finds_amax else tensor_amax(row, x)
        results = _allocate(row, amax, True), _allocate(column, amax, True)
        launch(column, request, x, amax, *results)
    return results


def _allocate(call: Call, amax: Any, own_amax: bool) -> Quantized:
    """Return a new Quantized for the result of a call, whose tensor_amax is `amax`, or uninitialized if `own_amax`."""
    # `amax` may belong to the caller or to another result.
    new = imports.cupy().empty
    amax = new(amax.shape, amax.dtype) if own_amax and amax is not None else amax
    return empty_quantized(call, amax, new, matrix.empty_scales)


def launch(
    call: Call, request: LaunchRequest, x: Any, amax: Any, row: Quantized | None, column: Quantized | None
) -> None:
    """Quantize contiguous x along its rows into `row`, along its columns into `column`, or in both directions."""
    if not x.size:
        return _fill_scales(call, amax, row, column)
    arrays = {"tensor_amax": amax}
    for prefix, q in (("", row), ("column_", column)):
        if q is not None:
            parts = {"packed": q.packed, "scales": q.block_scale, "tensor_scale": q.tensor_scale}
            parts["amax_out"] = None if q.tensor_amax is amax else q.tensor_amax
            arrays |= {prefix + name: array for name, array in parts.items()}
    return matrix.quantize_matrices(call, request, matrix.Matrix(x, **arrays))


def _fill_scales(call: Call, amax: Any, *results: Quantized | None) -> None:
    """Write the tensor scales and tensor amaxes of the results for an x without elements."""
    for q in results:
        if q is not None and q.tensor_scale is not None:
            scale = tensor_scale(without_sign(amax.get()), call.recipe, call.x.dtype)
            q.tensor_scale[...], q.tensor_amax[...] = imports.to_device(scale.decode), imports.to_device(scale.amax)


def quantize_with_scales(call: Call) -> Quantized:
    """Quantize call.moved with the scales that the caller passed."""
    request = matrix.launch_request(call)
    (
        kernel_for(request),
        matrix.matrix_count(call, request, call.tensor_scale),
    )  # may raise Declined: before any work
    with imports.making_current(call.x.device.id):
        result = _result(call)
        if call.x.size:
            scale, amax, x = result.tensor_scale, None, imports.cupy().ascontiguousarray(call.moved)
            if encodes_by_amax(call.recipe):
                amax = matrix.implied_amaxes(scale, None, call.recipe, call.x.dtype)
            arrays = matrix.Matrix(x, result.packed, result.block_scale, tensor_amax=amax, tensor_scale=scale)
            matrix.quantize_matrices(call, request, arrays)
    return result


def _result(call: Call) -> Quantized:
    """Return call.out, or a new Quantized if it is None, with copies of the caller's scales."""
    out, r, scales = call.out, call.recipe, (call.block_scale, call.tensor_scale)
    if out is None:
        packed = imports.cupy().empty(packed_shape(call.moved.shape, r), np.uint8)
        block_scale, tensor_scale = (None if a is None else a.copy(order="C") for a in scales)
        return Quantized(packed, block_scale, tensor_scale, None, call.x.shape, call.x.dtype, call.axis, r, call.layout)
    for target, given in zip((out.block_scale, out.tensor_scale), scales, strict=True):
        if given is not None:
            target[...] = given
    return out


def fake_quantize(call: Call) -> Any:
    """Return the fake-quantized values of a call, in a new array with the shape and dtype of call.x."""
    # If that kernel cannot compute the amax itself, another kernel computes it first.
    call = with_searched_amaxes(call)
    cupy, request = imports.cupy(), matrix.launch_request(call, values=True)
    (
        kernel_for(request),
        matrix.matrix_count(call, request, call.tensor_amax),
    )  # may raise Declined: before any work
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        values = cupy.empty(x.shape, x.dtype)
        request = matrix.with_kernel_amax(call, request, x)
        # The kernel fake_quantize computes the amaxes of blocks while it writes the values.
        by_kernel = call.tensor_amax is None and call.recipe.tensor_scaling == "block" and call.recipe.fake_rule
        amax = empty_amax(x, call.recipe) if request.finds_amax else None
        if not (request.finds_amax or by_kernel):
            amax = tensor_amax(call, x)
        if x.size:
            matrix.quantize_matrices(call, request, matrix.Matrix(x, values=values, tensor_amax=amax))
        return cupy.moveaxis(values, -1, call.axis)


def clip(call: Call, amax: Any) -> Any:
    """Return the clipped gradient, a new array: call.grad where |call.x| <= amax, otherwise 0."""
    cupy = imports.cupy()
    with imports.making_current(call.x.device.id):
        x, g, limit = (cupy.ascontiguousarray(a) for a in (call.moved, np.moveaxis(call.grad, call.axis, -1), amax))
        out = cupy.empty(g.shape, g.dtype)
        matrix.clip_gradient(g, x, limit, out)
        return cupy.moveaxis(out, -1, call.axis)


def dequantize(q: Quantized, dtype: np.dtype, out: Any = None) -> Any:
    """Return the values of q, rounded to dtype: in `out` if given, otherwise in a new array of the shape of q."""
    check_formats(q.recipe)
    cupy = imports.cupy()
    with imports.making_current(q.packed.device.id):
        direct = out is not None and q.axis == len(q.shape) - 1 and out.flags.c_contiguous and out.data.ptr % 16 == 0
        moved: Any = out if direct else cupy.empty(q.moved_shape, dtype)
        if moved.size:
            _dequantize_matrices(q, moved)
        values = cupy.moveaxis(moved, -1, q.axis)
        if out is None:
            return values
        if not direct:
            out[...] = values
        return out


def _dequantize_matrices(q: Quantized, moved: Any) -> None:
    """Write the values of q into `moved`, a contiguous, nonempty array that has the quantized axis last."""
    tensor_arrays = [a if a is None or a.flags.c_contiguous else a.copy() for a in (q.tensor_scale, q.tensor_amax)]
    K, separate = moved.shape[-1], q.scale_layout != "linear" or is_per_expert(q.tensor_scale, q.recipe)
    B = prod(moved.shape[:-2]) if moved.ndim > 2 and separate else 1
    packed, values = as_aligned(q.packed).reshape(B, -1), moved.reshape(B, -1)
    scales = None if q.block_scale is None else as_aligned(q.block_scale).reshape(B, -1)
    recipe = with_row_blocks(q.recipe)
    for i in range(B):
        scale, amax = (part_for_matrix(a, q.recipe, i, (B, moved.size // B // K)) for a in tensor_arrays)
        arrays = (packed[i], None if scales is None else scales[i], recipe, q.scale_layout, scale, amax)
        matrix.dequantize_matrix(*arrays, q.dtype, values[i].reshape(-1, K))


def count_changed(x: Any, y: Any) -> tuple[Any, Any]:
    """Return (number of values that differ, int64 (); largest change, float32 ()) for two contiguous float32 arrays."""
    zeros = imports.cupy().zeros
    changed, largest = zeros((), np.int64), zeros((), np.float32)
    if x.size:
        launch = prepared("count_changed", -(-x.size // 4), (x.size,), x.device.id, ())
        launch(*map(address, (x, y, changed, largest)))
    return changed, largest


FLOAT32 = np.dtype(np.float32)


def requantize(q: Quantized, target: Recipe) -> tuple[Quantized, Any, Any]:
    """Convert q to another recipe."""
    with imports.making_current(q.packed.device.id):
        values = dequantize(q, FLOAT32)
        result, layout = _requantized(q, target, values)
        before, after = (np.moveaxis(v, q.axis, -1) for v in (values, dequantize(result, FLOAT32)))
        changes = count_changed(before, after)
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
    scales = as_aligned(_layout_changed(q.block_scale, q.scale_layout, "linear", q.scale_shape))
    source = as_aligned(q.packed), scales, imports.cupy().zeros(3, np.uint32)  # the last one gets the range of scales

    def launch(kernel: str, *arrays: Any) -> None:
        traits = (q.dtype, DECODE_RULES[q.recipe.decode_rule].unsigned_zero)
        sizes, device = (scales.size, q.recipe.block_size), q.packed.device.id
        prepare = prepared(kernel, scales.size, sizes, device, traits, recipe_struct(target))
        prepare(*map(address, (*source, *arrays)))

    # Overwrite the tensor amax with one that lets the target keep codes of the source. Afterwards, overwrite the blocks
    # whose new scale the target can represent with the codes of the source.
    amax = tensor_amax(call, imports.cupy().ascontiguousarray(call.moved))
    for kernel in ("requantize_range", "requantize_amax"):
        launch(kernel, None, None, None, amax)  # None: only requantize_keep stores codes and scales
    result = replace(quantize(call._replace(tensor_amax=amax)), dtype=q.dtype)
    launch("requantize_keep", result.packed, result.block_scale, result.tensor_scale, result.tensor_amax)
    return result, "linear"


def _layout_changed(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Return scales copied from layout `source` to `target`; unchanged if they are equal, or there are no scales."""
    return scales if scales is None or source == target else swizzle(scales, source, target, shape)
