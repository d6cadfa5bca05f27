"""Provide the functions of host/engine.py, computed by a compiled C++ library: the CPU engine.
The specification is the NumPy code in fp4kit.reference, which host/engine.py runs.

The results equal the results of the specification in every bit. The library computes codes, scales and values by the
rules that the CUDA kernels also use (cuda/kernels/rules). The specification computes tiles that hold NaN or infinities.
For calls that the library does not support, the functions raise Declined. In this file, `reference` is host/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp4kit.call.parse import Call, Declined
from fp4kit.call.search_scales import Search
from fp4kit.cpu import coverage, encode, partial
from fp4kit.cpu import dequantize as decoding
from fp4kit.cpu import search_scales as searching
from fp4kit.cpu.library import functions
from fp4kit.cpu.matmul import matmul as matmul
from fp4kit.cpu.rotate import rotate as rotate
from fp4kit.host import engine as reference
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.parts import tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import NOISE_STOCHASTICS
from fp4kit.recipes.schema import faking
from fp4kit.reference.codec import stack


def tensor_amax(moved: np.ndarray, r: Recipe, mask: int | None = None) -> np.ndarray:
    """Return the tensor amaxes of an array, float32 in their canonical shape (call/inputs.py)."""
    # The specification computes them if the array is empty, or if encode.tensor_amax cannot compute one of them, for
    # example because an element is NaN or infinite.
    found = [encode.tensor_amax(part, r, mask) for part in stack(moved, r)] if moved.size else []
    finite = [amax for amax in found if amax is not None]
    if not moved.size or len(finite) < len(found):
        return reference.compute_tensor_amax(moved, r, mask)
    parts = np.stack(finite)
    parts = parts.max() if r.tensor_scaling in ("none", "tensor") else parts
    return np.asarray(parts, np.float32).reshape(tensor_amax_shape(moved.shape, r))


FAKE_ELEMENTS = 1 << 22  # fake_quantize holds the codes of this many elements at a time
_FUNCTIONS = reference.MatrixFunctions(
    tensor_amax,
    encode.quantize_matrix,
    encode.encode_matrix,
    decoding.dequantize_matrix,
    searching.search_matrix,
    searching.searched,
)


def quantize(call: Call) -> Quantized:
    """Quantize the array of a call."""
    _check(call, None if coverage.not_searched(call.recipe) or not call.recipe.search else 0)
    return reference.quantize(call, _FUNCTIONS)


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """Quantize an array along both axes, by two calls: return (quantize(row), quantize(column))."""
    return quantize(row), quantize(column)


def quantize_with_scales(call: Call) -> Quantized:
    """Quantize the array of a call with the scales that the caller passed: only codes are computed."""
    _check(call)
    return reference.quantize_with_scales(call, _FUNCTIONS)


def _check(call: Call, min_elements: int | None = None) -> None:
    """Raise Declined if the engine does not support a call, or is not faster than the specification for it."""
    if min_elements is None:
        min_elements = coverage.MIN_ELEMENTS[call.recipe.tensor_scaling]
    # The sizes are checked first, because the other checks take time.
    if call.x.size < min_elements or call.moved.shape[-1] < coverage.MIN_COLUMNS:
        raise Declined("the specification is as fast for so few elements")
    if encode.kernels_of(call.recipe).own is not None and call.random is not None:
        raise Declined("the CPU engine has no stochastic rounding for user-defined formats")
    if call.recipe.stochastic in NOISE_STOCHASTICS and call.random is not None:
        raise Declined(f"the CPU engine has no stochastic rounding for {call.recipe.id}")
    encode.check_array(call.x)


def dequantize(q: Quantized, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """Return the values of q, rounded to dtype: in `out` if given, otherwise in a new array of the shape of q."""
    decoding.decoder_of(q.recipe, dtype)
    if q.packed.size < coverage.MIN_CODE_BYTES:
        raise Declined("the specification is as fast for so few values")
    return reference.dequantize(q, dtype, out, _FUNCTIONS)


def requantize(q: Quantized, target: Recipe) -> tuple[Quantized, int, np.ndarray]:
    """Convert q to another recipe."""
    for r in (q.recipe, target):
        decoding.decoder_of(r, np.dtype(np.float32))
    encode.kernels_of(target)
    return reference.requantize(q, target, _FUNCTIONS)


def fake_quantize(call: Call) -> np.ndarray:
    """Return the fake-quantized values of a call, in a new array with the shape and dtype of call.x."""
    # The array is quantized and dequantized, FAKE_ELEMENTS (2^22) elements at a time, so that codes take little memory.
    if (reason := coverage.not_faked(call.recipe)) is not None:
        raise Declined(f"{call.recipe.id} has {reason}")
    _check(call)
    call = call._replace(recipe=faking(call.recipe))
    if call.tensor_amax is None and call.recipe.tensor_scaling != "none":
        call = call._replace(tensor_amax=tensor_amax(call.moved, call.recipe, call.mask))
    values = np.empty(call.moved.shape, call.x.dtype)
    whole = call._replace(x=call.moved, axis=call.moved.ndim - 1, out=None)
    for part, target in _slabs(whole, values):
        dequantize(quantize(part), target.dtype, target)
    return np.moveaxis(values, -1, call.axis)


def _slabs(call: Call, values: np.ndarray) -> Iterator[tuple[Call, np.ndarray]]:
    """Cut a call along its first axes."""
    x, r = call.x, call.recipe
    if x.size <= FAKE_ELEMENTS or x.ndim < 2 or isinstance(call.random, int):
        yield call, values
        return
    if x.ndim > 2 and x[0].size > FAKE_ELEMENTS:
        for i, one in enumerate(values):
            yield from _slabs(_cut(call, i), one)
        return
    multiple = r.block_rows if x.ndim == 2 else 1
    step = max(FAKE_ELEMENTS // x[0].size // multiple, 1) * multiple
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        yield _cut(call, rows), values[rows]


def _cut(call: Call, index: Any) -> Call:
    """Return a call for the part x[index] of the array of a call, with the amaxes and random bytes of this part."""
    # The quantized axis of `call` must be the last one.
    x, tensor, blocks, random = (
        a if a is None or not a.ndim else a[index] for a in (call.x, call.tensor_amax, call.block_amax, call.random)
    )
    tensor = tensor if tensor is None else np.asarray(tensor, np.float32)
    return call._replace(x=x, moved=x, axis=x.ndim - 1, tensor_amax=tensor, block_amax=blocks, random=random)


def transpose(packed: np.ndarray, scales: np.ndarray, q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Transpose each matrix of a Quantized q with square blocks."""
    functions()
    return reference.transpose(packed, scales, q, encode.transpose_codes)


def partial_amax(shard: np.ndarray, shape: tuple[int, int], start: int, r: Recipe) -> np.ndarray:
    """Return the amax of every block of a matrix, counting only the elements of one shard (see ops/amax.py)."""
    encode.kernels_of(r)
    encode.check_array(shard)
    return partial.partial_amax(shard, shape, start, r)


def partial_cast(
    shard: np.ndarray, out: np.ndarray, block_amax: np.ndarray, shape: tuple[int, int], start: int, r: Recipe, amax: Any
) -> None:
    """Write the codes of a shard's elements into out, the packed codes of a matrix, and change no other code of out."""
    encode.kernels_of(r)
    encode.check_array(shard)
    reference.partial_cast(shard, out, block_amax, shape, start, r, amax, partial.partial_cast)


def amax(call: Call) -> np.ndarray:
    """Return the amax of each block of call.moved: float32 (..., ceil(M / block rows), K / block)."""
    _check(call, coverage.MIN_AMAX_ELEMENTS)
    if call.recipe.block is None or not call.x.size:
        raise Declined("the CPU engine computes amaxes only per block, and not of empty arrays")
    matrices = stack(call.moved, call.recipe)
    *lead, K = call.moved.shape
    height, width = call.recipe.block
    out = [encode.block_amax(part, call.recipe) for part in matrices]
    return np.stack(out).reshape((*lead[:-1], -(-lead[-1] // height), K // width) if lead else (K // width,))


def plain_amax(x: np.ndarray, axis: Any) -> np.ndarray:
    """Return the largest magnitude of a whole array as a float32 array of shape ()."""
    functions()
    if axis is not None or not x.size:
        raise Declined("the CPU engine computes amaxes only of whole arrays that are not empty")
    encode.check_array(x)
    found = encode.largest(x.reshape(1, -1) if x.flags.c_contiguous else _as_matrix(x))
    return reference.plain_amax(x, axis) if found is None else np.asarray(found)


def search_scales(search: Search) -> np.ndarray:
    """Return the block amaxes whose scales give the smallest loss: float32 (..., M, K / block)."""
    functions()
    if not search.searches_e4m3:
        raise Declined("the CPU engine searches only E4M3 block scales")
    searching.rule_of(search.call.recipe, search.terms.offsets)
    encode.check_array(search.call.x)
    return reference.search_scales(search, _FUNCTIONS)


def _as_matrix(x: np.ndarray) -> np.ndarray:
    """Return an array as a matrix: a 0-d or 1-d array as one row, a 2-d array itself."""
    if x.ndim > 2:
        raise Declined("the CPU engine supports non-contiguous arrays only up to two dimensions")
    return x.reshape(1, -1) if x.ndim < 2 else x


def _declining(name: str) -> Any:
    """Return a function, of any arguments, that raises Declined: the engine does not have the operation `name`."""

    def declined(*arguments: Any) -> Any:
        raise Declined(f"the CPU engine does not implement {name}")

    return declined


def __getattr__(name: str) -> Any:
    """Return a function that raises Declined, for an operation of host/engine.py that this module does not define."""
    if name in reference.__all__:
        return _declining(name)
    raise AttributeError(name)
