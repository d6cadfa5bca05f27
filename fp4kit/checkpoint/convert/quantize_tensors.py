"""Quantize layers in memory, and yield the tensors that the checkpoint converter would write for them. The container is
the way in which the output format stores a layer: the names, dtypes and layout of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays import returns
from fp4kit.arrays.imports import to_device
from fp4kit.arrays.returns import library_of
from fp4kit.checkpoint.containers.table import CODES, INPUT_SCALE, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.convert.memory_rules import Rules
from fp4kit.checkpoint.convert.put_scalars import input_scale_of, usable_tensor_scale
from fp4kit.checkpoint.convert.quantize_rows import divisor_of, stored_scales
from fp4kit.checkpoint.convert.split_tensors import Named
from fp4kit.layouts import pack_mlx
from fp4kit.ops.amax import amax as amax_of
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.slicing import of_zeros
from fp4kit.storage.files import CheckpointError, shown


def quantized(members: list[Named], rules: Rules) -> Iterator[Named]:
    """Quantize layers that share a tensor scale, and yield all resulting (name, array) pairs: codes and scales."""
    largest = _largest_amax(members)
    shared = largest if rules.form.has_tensor_scale else None
    columns = {module: int(matrix.shape[-1]) for module, matrix in members}
    inputs = {} if rules.activations is None else rules.activations.of_layers(columns)
    for module, matrix in members:
        yield from _parts(module, matrix, shared, rules, inputs.get(module))


@ieee("convert_tensors")
def _largest_amax(members: list[Named]) -> np.float32:
    """Return the largest amax of (layer name, matrix) pairs. Raise CheckpointError if one is NaN or infinite."""
    return max(_finite_amax(module, matrix) for module, matrix in members)


def _finite_amax(module: str, matrix: Any) -> np.float32:
    """Return the amax of a matrix as a float32 on the host."""
    found = np.float32(float(amax_of(matrix)))
    if not np.isfinite(found):
        raise CheckpointError(
            f"{shown(module)}: holds NaN or infinity; repair it, or keep it unquantized with Wishes(keep=...)"
        )
    return found


def _parts(
    module: str, matrix: Any, shared: np.float32 | None, rules: Rules, input_amax: np.float32 | None
) -> Iterator[Named]:
    """Quantize one layer and yield its (name, array) pairs: codes, block scales, tensor scale and input scale."""
    form = rules.form
    q = quantize(matrix, rules.recipe, tensor_amax=shared)
    packed, scales_of_blocks = q.packed, q.block_scale
    if shared is not None and not shared.view(np.uint32):  # a subnormal may compare equal to 0
        q = of_zeros(q.to("numpy"))
        zeros = None if q.block_scale is None else _in_library(q.block_scale, packed)
        packed, scales_of_blocks = _in_library(q.packed, packed), zeros
    specs = form.specs(tuple(matrix.shape))
    yield module + form.suffixes[CODES], _typed(packed, form.codes_dtype).reshape(specs[CODES][1])
    if rules.recipe.scale is None and SCALES in form.suffixes:
        yield module + form.suffixes[SCALES], stored_scales(q).reshape(specs[SCALES][1])
    elif SCALES in form.suffixes:
        yield module + form.suffixes[SCALES], _typed(scales_of_blocks, form.scales_dtype)
    scales = [] if shared is None else [(TENSOR_SCALE, _stored_scale(module, q, shared, rules))]
    if rules.input_scale is not None:
        input_scale = np.float32(rules.input_scale)
        scales.append((INPUT_SCALE, np.float32(1) / input_scale if form.divides else input_scale))
    if input_amax is not None:
        scales.append((INPUT_SCALE, input_scale_of(form, input_amax)))
    for part, value in scales:
        array = np.full(form.tensor_scale_shape, value, np.float32)
        yield module + form.suffixes[part], _in_library(array, packed)


@ieee("convert_tensors")
def _stored_scale(module: str, q: Any, amax: np.float32, rules: Rules) -> np.float32:
    """Return the number that the container stores as tensor scale."""
    # The recipe computes the divisor if it can; otherwise, the divisor is the reciprocal of the scale.
    scale = np.float32(float(q.tensor_scale))
    divisor = divisor_of(rules.recipe, rules.form, amax, q.dtype)
    with np.errstate(divide="ignore", over="ignore"):
        stored = scale if not rules.form.divides else np.float32(1) / scale if divisor is None else divisor
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(module)}: tensor scale is {scale}; a positive normal float32 is needed; use another recipe"
        )
    return stored


def _typed(array: Any, dtype: str) -> Any:
    """Return a view of an array of bytes with the dtype that corresponds to the safetensors dtype ``dtype``."""
    if dtype == "U32":
        library = library_of(array)
        if library is None:
            return pack_mlx(array)
        return array.view(returns.dtype_named("uint32") if library.name == "torch" else np.uint32)
    names = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8"}
    if dtype not in names or type(array).__module__ == "cupy":
        return array
    library = library_of(array)
    if library is None:
        return array.view(getattr(ml_dtypes, names[dtype], np.int8))
    return array.view(returns.dtype_named(names[dtype])) if library.name == "torch" else array


def _in_library(value: np.ndarray, like: Any) -> Any:
    """Return the host array ``value`` in the library and on the device of the array ``like``."""
    # If ``like`` is a NumPy array, ``value`` is returned unchanged, otherwise as a copy.
    if isinstance(like, np.ndarray):
        return value
    library = library_of(like)
    if library is None:
        return to_device(value)
    with library.call_context(like) as give:
        return give(value)
