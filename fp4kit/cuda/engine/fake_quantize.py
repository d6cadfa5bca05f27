"""Fake-quantize CuPy arrays, and clip gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda.engine.amax import empty_amax, tensor_amax
from fp4kit.cuda.engine.matrices import launch_request, matrix_count, split_matrices, with_kernel_amax
from fp4kit.cuda.engine.search_scales import with_searched_amaxes
from fp4kit.cuda.launch.clip import clip_gradient
from fp4kit.cuda.launch.dispatch import kernel_for
from fp4kit.cuda.launch.matrix import Matrix, quantize_matrix


def fake_quantize(call: Call) -> Any:
    """Return the fake-quantized values of a call, in a new array with the shape and dtype of call.x."""
    # If that kernel cannot compute the amax itself, another kernel computes it first.
    call = with_searched_amaxes(call)
    cupy, request = imports.cupy(), launch_request(call, values=True)
    kernel_for(request), matrix_count(call, request, call.tensor_amax)  # both may raise Declined, so call them first
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        values = cupy.empty(x.shape, x.dtype)
        request = with_kernel_amax(call, request, x)
        if request.finds_amax:
            amax = empty_amax(x, call.recipe)
        else:
            amax = None if kernel_computes_amaxes(call) else tensor_amax(call, x)
        if x.size:
            seed = call.random if isinstance(call.random, int) else 0
            for matrix, part in split_matrices(call, request, Matrix(x, values=values, tensor_amax=amax)):
                quantize_matrix(matrix, part, seed)
        return cupy.moveaxis(values, -1, call.axis)


def kernel_computes_amaxes(call: Call) -> bool:
    """Return True if the kernel fake_quantize computes the amaxes of blocks while it writes the values."""
    return call.tensor_amax is None and call.recipe.tensor_scaling == "block" and call.recipe.fake_rule is not None


def clip(call: Call, amax: Any) -> Any:
    """Return the clipped gradient, a new array: call.grad where |call.x| <= amax, otherwise 0."""
    cupy = imports.cupy()
    with imports.making_current(call.x.device.id):
        x, g, limit = (cupy.ascontiguousarray(a) for a in (call.moved, np.moveaxis(call.grad, call.axis, -1), amax))
        out = cupy.empty(g.shape, g.dtype)
        clip_gradient(g, x, limit, out)
        return cupy.moveaxis(out, -1, call.axis)
