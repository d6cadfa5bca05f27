"""Check the arrays that a caller passes as `out`: their type, shape, dtype, device and memory.

The memory that a call writes must be disjoint from the memory that it reads, because an engine may write part of a
result before it has read all inputs. The span of an array is the range of addresses from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from fp4kit.arrays.imports import import_arrays, overlaps_itself
from fp4kit.arrays.returns import library_of
from fp4kit.call.inputs import description
from fp4kit.quantized.container import Quantized, check_is_quantized, packed_shape, scale_shape

ALIGNMENT = 16  # bytes: the largest store of a kernel


def check_out(op: str, name: str, out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise an error unless `out` is a writable NumPy array of this shape and dtype."""
    # The error is TypeError for anything that is not a NumPy array, and ValueError otherwise.
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{op}: {name} is {type(out).__name__}; needs a NumPy array, as x is")
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {out.shape}; needs {np.dtype(dtype)} {tuple(shape)}")
    if not out.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; needs a writable array")


def import_out(op: str, out: Any) -> Any:
    """Return the caller's `out`, an array or a Quantized, as a NumPy or CuPy array or a Quantized of such arrays."""
    library = library_of(out)
    if library is not None and not library.is_mutable:
        raise TypeError(f"{op}: out is an array of {library.name}, which cannot be written to; call without out")
    if isinstance(out, Quantized):
        imported = out.imported()
        for name, part in imported.parts().items():
            _check_places(op, f"out.{name}", part)
        return imported
    imported = out if library is None else import_arrays(op, out=out)[0]
    _check_places(op, "out", imported)
    return imported


def _check_places(op: str, name: str, array: Any) -> None:
    """Raise ValueError if two elements of an output array share memory, as in an expanded tensor."""
    if not hasattr(array, "flags") or array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        return  # CuPy arrays have no such flag, and can always be written to
    if overlaps_itself(array.shape, array.strides, array.dtype.itemsize):
        found = f"shape {array.shape}, strides {array.strides}"
        raise ValueError(
            f"{op}: {name} has elements that share memory, {found}; needs one place in memory for each element"
        )


def check_values_out(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> None:
    """Raise an error unless `out`, the output of dequantize, is an array to which the values can be written."""
    if isinstance(like, np.ndarray):
        check_out(op, "out", out, shape, dtype)
    elif not isinstance(out, type(like)) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{op}: out is {description(out)}; needs a CuPy array of {dtype} {shape}")
    elif out.device != like.device:
        raise ValueError(f"{op}: out is on {out.device}; needs {like.device}, where q is")


def check_quantized_out(call: Any) -> None:
    """Raise an error unless the result of a call can be written to call.out, a Quantized."""
    op, out = call.op, call.out
    check_is_quantized(op, out, "out")
    for name, value in call.result_fields().items():
        if getattr(out, name) != value:
            text = repr if name == "recipe" else str  # str(recipe) takes many lines
            raise ValueError(f"{op}: out has {name} {text(getattr(out, name))}; needs {text(value)}")
    if call.tensor_scale is not None and out.tensor_amax is not None:
        raise ValueError(
            f"{op}: out has a tensor_amax, which a given tensor_scale does not determine; pass"
            " dataclasses.replace(out, tensor_amax=None)"
        )
    specs = call.part_specs()
    outputs = {f"out.{name}": getattr(out, name) for name in specs}
    for (name, array), (shape, dtype) in zip(outputs.items(), specs.values(), strict=True):
        if call.on_device:
            _check_device_out(op, name, array, shape, dtype, call.x)
        else:
            check_out(op, name, array, shape, dtype)
    names = ("block_amax", "block_scale", "tensor_scale", "tensor_amax")
    inputs = {"x": call.x, "seed": call.random} | {name: getattr(call, name) for name in names}
    check_disjoint(op, inputs, outputs)


def _check_device_out(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype, x: Any) -> None:
    """Raise ValueError unless a kernel can write to `array`, an output whose name in the message is `name`."""
    # The array must be a contiguous CuPy array of this shape and dtype on the device of x.
    fits = isinstance(array, type(x)) and (array.shape, array.dtype, array.device) == (shape, dtype, x.device)
    if not fits or not array.flags.c_contiguous:
        needed = f"a contiguous CuPy array of {dtype} {shape} on the device of x"
        raise ValueError(f"{op}: {name} is {description(array)}; needs {needed}")
    if array.ndim and array.data.ptr % ALIGNMENT:
        raise ValueError(f"{op}: {name} is at address {array.data.ptr:#x}; needs a multiple of {ALIGNMENT}")


def empty_quantized(call: Any, amax: Any, empty: Any, empty_scales: Any) -> Quantized:
    """Return a new Quantized for the result of a call, with uninitialized codes and scales, and `amax` as
    tensor_amax.
    """
    r, shape = call.recipe, call.moved.shape
    packed = empty(packed_shape(shape, r), np.uint8)
    scales = None if r.scale is None else empty_scales(scale_shape(shape, r), call.layout)
    decode_scale = None if amax is None else empty(amax.shape, np.float32)
    return Quantized(packed, scales, decode_scale, amax, call.x.shape, call.x.dtype, call.axis, r, call.layout)


_MAX_WORK = 1000  # limit of NumPy's search for a shared byte; if it is reached, the arrays count as sharing memory


def check_disjoint(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError if an output shares memory with an input or with another output."""
    # An output named "out.NAME" may share memory with the input "NAME", such as tensor_scale, because the call writes
    # there only the values that it has read from there.
    pairs = [(name, other) for name in outputs for other in inputs if name != f"out.{other}"]
    arrays = {**inputs, **outputs}
    for name, other in [*pairs, *((second, first) for first, second in combinations(outputs, 2))]:
        if shares_memory(arrays[other], arrays[name]):
            raise ValueError(
                f"{op}: {name} shares memory with {other}, which is read or written too; needs memory of its own"
            )


class _OccupiedMemory(NamedTuple):
    """The memory that a Quantized occupies."""

    arrays: tuple[Any, ...]  # without those that are None
    spans: tuple[tuple[int, int], ...]  # on a device: of each array; () in host memory
    whole: tuple[int, int]  # on a device: the span that contains all arrays; (0, 0) in host memory
    parts_are_disjoint: bool


# The memory of each Quantized that cached calls have written to or read from.
_MEMORIES: WeakKeyDictionary[Quantized, _OccupiedMemory] = WeakKeyDictionary()


def _memory_of(q: Quantized) -> _OccupiedMemory:
    """Return the memory that the arrays of a Quantized occupy."""
    memory = _MEMORIES.get(q)
    if memory is None:
        arrays = tuple(part for part in q.parts().values() if part is not None)
        disjoint = not any(shares_memory(*pair) for pair in combinations(arrays, 2))
        spans = () if isinstance(q.packed, np.ndarray) else tuple(map(_span, arrays))
        whole = min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)
        memory = _MEMORIES[q] = _OccupiedMemory(arrays, spans, whole, disjoint)
    return memory


def are_disjoint(read: Any, out: Any) -> bool:
    """Return whether a cached call may write to `out`: no byte is written twice, or written and also read."""
    # Public functions check this before each cached call with `out`, because the cache's key holds no addresses.
    if out is None:
        return True
    writes_quantized = type(out) is Quantized
    array, memory = (read, _memory_of(out)) if writes_quantized else (out, _memory_of(read))
    if writes_quantized and not memory.parts_are_disjoint:
        return False
    if type(array) is np.ndarray:
        return not any(shares_memory(array, part) for part in memory.arrays)
    start, stop = _span(array)
    low, high = memory.whole
    return stop <= low or high <= start or not any(start < last and first < stop for first, last in memory.spans)


def shares_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays share memory."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        try:
            return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _span(a: Any) -> tuple[int, int]:
    """Return the span of a CuPy or PyTorch array: its first address, and the address after its last byte."""
    if hasattr(a, "data_ptr"):
        start, is_dense, nbytes = a.data_ptr(), a.is_contiguous(), a.nbytes
    elif type(a).__module__ == "cupy":
        start, is_dense, nbytes = a.data.ptr, a.flags.c_contiguous, a.nbytes
    else:
        return 0, 0
    if not nbytes:
        return 0, 0
    if is_dense:
        return start, start + nbytes
    size = nbytes // prod(a.shape)
    steps = a.strides if hasattr(a, "strides") else [step * size for step in a.stride()]
    reach = [step * (n - 1) for step, n in zip(steps, a.shape, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + size
