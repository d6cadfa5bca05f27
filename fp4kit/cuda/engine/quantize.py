"""Quantize CuPy arrays, along rows, columns or both."""

from __future__ import annotations

from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.inputs import without_sign
from fp4kit.call.outputs import empty_quantized
from fp4kit.call.parse import Call
from fp4kit.cuda.engine.amax import empty_amax, tensor_amax
from fp4kit.cuda.engine.matrices import launch_request, matrix_count, split_matrices, with_kernel_amax
from fp4kit.cuda.engine.search_scales import with_searched_amaxes
from fp4kit.cuda.launch.dispatch import LaunchRequest, find_kernel, kernel_for
from fp4kit.cuda.launch.matrix import Matrix, empty_scales, quantize_matrix
from fp4kit.quantized.container import Quantized
from fp4kit.reference.tensor_rules import tensor_scale


def quantize(call: Call) -> Quantized:
    """Quantize the array of a call."""
    original, call = call, with_searched_amaxes(call)
    request = launch_request(call, columns=_is_columnwise(call))
    if find_kernel(request) is None:
        request = launch_request(call)
    kernel_for(request), matrix_count(call, request, call.tensor_amax)  # both may raise Declined, so call them first
    with imports.making_current(call.x.device.id):
        x = imports.cupy().ascontiguousarray(call.x if request.columns else call.moved)
        request = with_kernel_amax(call, request, x)
        amax = empty_amax(x, call.recipe) if request.finds_amax else tensor_amax(call, x, request.columns)
        new = allocate if original.tensor_amax is None else _allocate_own
        result = new(original, amax) if call.out is None else call.out
        launch(call, request, x, amax, *((None, result) if request.columns else (result, None)))
    return result


def _is_columnwise(call: Call) -> bool:
    """Return True if the blocks of a call lie along the columns of its matrices, which is axis -2."""
    return call.axis == call.x.ndim - 2


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """Return the results of quantize for the rowwise and for the columnwise call, as two new Quantized."""
    request = launch_request(column, columns=True)
    one_amax = column.mask is None or row.tensor_amax is not None or row.recipe.tensor_scaling == "none"
    if find_kernel(request) is None or not one_amax:
        return quantize(row), quantize(column)
    with imports.making_current(row.x.device.id):
        x = imports.cupy().ascontiguousarray(row.x)
        request = with_kernel_amax(row._replace(mask=column.mask), request, x)
        amax = empty_amax(x, row.recipe) if request.finds_amax else tensor_amax(row, x)
        results = _allocate_own(row, amax), _allocate_own(column, amax)
        launch(column, request, x, amax, *results)
    return results


def allocate(call: Call, amax: Any) -> Quantized:
    """Return a new Quantized for the result of a call."""
    return empty_quantized(call, amax, imports.cupy().empty, empty_scales)


def _allocate_own(call: Call, amax: Any) -> Quantized:
    """Return a new Quantized for the result of a call, like allocate, but with a new, uninitialized tensor_amax."""
    # The new tensor_amax has the shape and dtype of `amax`, which is not used itself, because it may belong to the
    # caller or to another result.
    return allocate(call, None if amax is None else imports.cupy().empty(amax.shape, amax.dtype))


def launch(
    call: Call, request: LaunchRequest, x: Any, amax: Any, row: Quantized | None, column: Quantized | None
) -> None:
    """Quantize contiguous x along its rows into `row`, along its columns into `column`, or in both directions."""
    if not x.size:
        return _fill_scales(call, amax, row, column)
    seed = call.random if isinstance(call.random, int) else 0
    arrays = Matrix(x, tensor_amax=amax)
    if row is not None:
        arrays = arrays._replace(packed=row.packed, scales=row.block_scale, tensor_scale=row.tensor_scale)
        arrays = arrays._replace(amax_out=None if row.tensor_amax is amax else row.tensor_amax)
    if column is not None:
        parts = {
            "column_packed": column.packed,
            "column_scales": column.block_scale,
            "column_tensor_scale": column.tensor_scale,
        }
        arrays = arrays._replace(**parts, column_amax_out=None if column.tensor_amax is amax else column.tensor_amax)
    for matrix, part in split_matrices(call, request, arrays):
        quantize_matrix(matrix, part, seed)
    return None


def _fill_scales(call: Call, amax: Any, *results: Quantized | None) -> None:
    """Write the tensor scales and tensor amaxes of the results for an x without elements."""
    for q in results:
        if q is not None and q.tensor_scale is not None:
            scale = tensor_scale(without_sign(amax.get()), call.recipe, call.x.dtype)
            q.tensor_scale[...], q.tensor_amax[...] = imports.to_device(scale.decode), imports.to_device(scale.amax)
