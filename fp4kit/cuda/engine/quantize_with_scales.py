"""Quantize CuPy arrays with scales that the caller passes: only codes are computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda.engine.matrices import launch_request, matrix_count, split_matrices
from fp4kit.cuda.launch.dispatch import kernel_for
from fp4kit.cuda.launch.matrix import Matrix, implied_amaxes, quantize_matrix
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.parts import packed_shape
from fp4kit.reference.tensor_rules import encodes_by_amax


def quantize_with_scales(call: Call) -> Quantized:
    """Quantize call.moved with the scales that the caller passed."""
    request = launch_request(call)
    kernel_for(request), matrix_count(call, request, call.tensor_scale)  # both may raise Declined, so call them first
    with imports.making_current(call.x.device.id):
        result = _result(call)
        if call.x.size:
            amax = (
                implied_amaxes(result.tensor_scale, None, call.recipe, call.x.dtype)
                if encodes_by_amax(call.recipe)
                else None
            )
            arrays = Matrix(
                imports.cupy().ascontiguousarray(call.moved),
                result.packed,
                result.block_scale,
                tensor_amax=amax,
                tensor_scale=result.tensor_scale,
            )
            seed = call.random if isinstance(call.random, int) else 0
            for matrix, part in split_matrices(call, request, arrays):
                quantize_matrix(matrix, part, seed)
    return result


def _result(call: Call) -> Quantized:
    """Return call.out, or a new Quantized if it is None, with copies of the caller's scales."""
    out, r, scales = call.out, call.recipe, (call.block_scale, call.tensor_scale)
    if out is None:
        packed = imports.cupy().empty(packed_shape(call.moved.shape, r), np.uint8)
        block_scale, tensor_scale = (_copied(a) for a in scales)
        return Quantized(packed, block_scale, tensor_scale, None, call.x.shape, call.x.dtype, call.axis, r, call.layout)
    for target, given in zip((out.block_scale, out.tensor_scale), scales, strict=True):
        if given is not None:
            target[...] = given
    return out


def _copied(a: Any) -> Any:
    """Return a contiguous copy of an array, or None for None."""
    return None if a is None else a.copy(order="C")
