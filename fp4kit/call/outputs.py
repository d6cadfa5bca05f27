"""Check the arrays that a caller passes as `out`: their type, shape, dtype, device and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import library_of
from fp4kit.call.checks import check_is_quantized, description
from fp4kit.call.memory_overlap import check_disjoint, overlaps_itself
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape, tensor_amax_shape

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
    if not hasattr(array, "flags") or array.flags.c_contiguous or not _is_writeable(array):
        return
    if overlaps_itself(array.shape, array.strides, array.dtype.itemsize):
        found = f"shape {array.shape}, strides {array.strides}"
        raise ValueError(
            f"{op}: {name} has elements that share memory, {found}; needs one place in memory for each element"
        )


def _is_writeable(array: Any) -> bool:
    """Return whether an array, of NumPy or CuPy, can be written to. CuPy arrays always can."""
    return not isinstance(array, np.ndarray) or array.flags.writeable


def check_values_out(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> None:
    """Raise an error unless `out`, the output of dequantize, is None or an array to which the values can be written."""
    if out is None:
        return
    if isinstance(like, np.ndarray):
        check_out(op, "out", out, shape, dtype)
    elif not isinstance(out, type(like)) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{op}: out is {description(out)}; needs a CuPy array of {dtype} {shape}")
    elif out.device != like.device:
        raise ValueError(f"{op}: out is on {out.device}; needs {like.device}, where q is")


def check_quantized_out(call: Any) -> None:
    """Raise an error unless the result of a call can be written to call.out, a Quantized."""
    op, out, r = call.op, call.out, call.recipe
    check_is_quantized(op, out, "out")
    wanted = {"recipe": r, "shape": call.x.shape, "dtype": call.x.dtype, "axis": call.axis, "scale_layout": call.layout}
    for name, value in wanted.items():
        found = getattr(out, name)
        if found != value:
            found, value = (
                repr(part) if name == "recipe" else part for part in (found, value)
            )  # repr, because str(recipe) takes many lines
            raise ValueError(f"{op}: out has {name} {found}; needs {value}")
    if call.tensor_scale is not None and out.tensor_amax is not None:
        raise ValueError(
            f"{op}: out has a tensor_amax, which a given tensor_scale does not determine; pass"
            " dataclasses.replace(out, tensor_amax=None)"
        )
    for name, (shape, dtype) in part_specs(call).items():
        if call.on_device:
            _check_device_out(op, f"out.{name}", getattr(out, name), shape, dtype, call.x)
        else:
            check_out(op, f"out.{name}", getattr(out, name), shape, dtype)
    names = ("block_amax", "block_scale", "tensor_scale", "tensor_amax")
    inputs = {"x": call.x, "seed": call.random} | {name: getattr(call, name) for name in names}
    check_disjoint(op, inputs, {f"out.{name}": getattr(out, name) for name in part_specs(call)})


def part_specs(call: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shapes and dtypes of the arrays in a call's result, as {name: (shape, dtype)}."""
    shape, r = call.moved.shape, call.recipe
    specs: dict[str, tuple[tuple[int, ...], Any]] = {"packed": (packed_shape(shape, r), np.dtype(np.uint8))}
    if r.scale is not None:
        specs["block_scale"] = (padded_shape(scale_shape(shape, r), call.layout), np.dtype(np.uint8))
    if r.tensor_scaling != "none":
        amax_or_scale = call.tensor_amax if call.tensor_scale is None else call.tensor_scale
        tensor_shape = tensor_amax_shape(shape, r) if amax_or_scale is None else amax_or_scale.shape
        names = ("tensor_scale", "tensor_amax") if call.tensor_scale is None else ("tensor_scale",)
        specs |= {name: (tensor_shape, np.dtype(np.float32)) for name in names}
    return specs


def _check_device_out(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype, x: Any) -> None:
    """Raise ValueError unless a kernel can write to `array`, an output whose name in the message is `name`."""
    # The array must be a contiguous CuPy array of this shape and dtype on the device of x.
    fits = isinstance(array, type(x)) and (array.shape, array.dtype, array.device) == (shape, dtype, x.device)
    if not fits or not array.flags.c_contiguous:
        found = description(array)
        needed = f"a contiguous CuPy array of {dtype} {shape} on the device of x"
        raise ValueError(f"{op}: {name} is {found}; needs {needed}")
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
