"""The fast engine of the host: functions of reference.engine by compiled loops, for what those cover; it declines all else.

Its results are the specification's in every bit: elements and scales are computed by the kernels' own rules (cuda/kernels/rules),
values are looked up in tables that the specification makes, and blocks with NaN or infinities go to the specification.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.call.parse import Call, Declined
from fp4kit.cpu import dequantize as decoding
from fp4kit.cpu import matrix
from fp4kit.cpu.native import library
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference import engine as reference
from fp4kit.reference.stack import stack


def tensor_amax(moved: np.ndarray, r: Recipe, mask: int | None = None) -> np.ndarray:
    """reference.engine.compute_tensor_amax."""
    if r.tensor_scaling in ("none", "tensor") and moved.size:
        found = [matrix.largest(part, hadamard=mask) for part in stack(moved, r)]
        if None not in found:
            return np.asarray(max(found), np.float32)
    return reference.compute_tensor_amax(moved, r, mask)


_MATRICES = reference.Matrices(tensor_amax, matrix.quantize_matrix, matrix.encode_matrix, decoding.dequantize_matrix)


def quantize(call: Call) -> Quantized:
    """reference.engine.quantize."""
    _check(call)
    return reference.quantize(call, _MATRICES)


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """quantize of the rowwise and of the columnwise call."""
    _check(row)
    return quantize(row), quantize(column)


def quantize_with_scales(call: Call) -> Quantized:
    """reference.engine.quantize_with_scales."""
    _check(call)
    return reference.quantize_with_scales(call, _MATRICES)


def _check(call: Call) -> None:
    matrix.kernels_of(call.recipe)
    matrix.check_array(call.x)


def dequantize(q: Quantized, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """reference.engine.dequantize."""
    decoding.check_recipe(q.recipe)
    return reference.dequantize(q, dtype, out, _MATRICES)


def amax(call: Call) -> np.ndarray:
    """reference.engine.amax."""
    _check(call)
    if call.recipe.block is None or not call.x.size:
        raise Declined("the specification has the amax of what has no blocks")
    matrices = stack(call.moved, call.recipe)
    *lead, K = call.moved.shape
    height, width = call.recipe.block
    out = [matrix.block_amax(part, call.recipe) for part in matrices]
    return np.stack(out).reshape((*lead[:-1], -(-lead[-1] // height), K // width) if lead else (K // width,))


def plain_amax(x: np.ndarray, axis: Any) -> np.ndarray:
    """reference.engine.plain_amax."""
    if axis is not None or not x.size or library().functions is None:
        raise Declined("the specification reduces along axes")
    matrix.check_array(x)
    found = matrix.largest(x.reshape(1, -1) if x.flags.c_contiguous else _as_matrix(x))
    return reference.plain_amax(x, axis) if found is None else np.asarray(found)


def _as_matrix(x: np.ndarray) -> np.ndarray:
    if x.ndim > 2:
        raise Declined("the compiled engine takes a matrix where memory is not contiguous")
    return x.reshape(1, -1) if x.ndim < 2 else x


def _falls_to_the_specification(name: str) -> Any:
    def declined(*arguments: Any) -> Any:
        raise Declined(f"the compiled engine has no {name}")

    return declined


def __getattr__(name: str) -> Any:
    """Operations that are the specification's alone."""
    if name in reference.__all__:
        return _falls_to_the_specification(name)
    raise AttributeError(name)
