"""Outputs that the caller gives: of the right kind, shape and dtype, where the call's arrays are."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import library_of
from fp4kit.call.checks import check_is_quantized
from fp4kit.call.memory_overlap import check_disjoint, overlaps_itself
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape, tensor_amax_shape

ALIGNMENT = 16  # bytes: what a kernel stores at a time


def check_out(op: str, name: str, out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """An array of the host for a result: shape, dtype, writable."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{op}: {name} is {type(out).__name__}; needs a numpy array, as x is")
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {out.shape}; needs {np.dtype(dtype)} {tuple(shape)}")
    if not out.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; needs a writable array")


def import_out(op: str, out: Any) -> Any:
    """An array, or a Quantized, to write to, as NumPy's or CuPy's. Raises TypeError where a library's cannot be written
    to.

    ValueError where elements overlap, as in an expanded tensor, because the last one written would stay.
    """
    library = library_of(out)
    if library is not None and not library.is_mutable:
        raise TypeError(f"{op}: out is an array of {library.name}, which cannot be written to; leave out out")
    if isinstance(out, Quantized):
        found = out.imported()
        for name, part in found.parts().items():
            _check_places(op, f"out.{name}", part)
        return found
    found = out if library is None else import_arrays(op, out=out)[0]
    _check_places(op, "out", found)
    return found


def _check_places(op: str, name: str, array: Any) -> None:
    """Raise ValueError if elements of an array overlap. What is no array, or cannot be written to, has an error of its
    own.
    """
    if not hasattr(array, "flags") or array.flags.c_contiguous or not _is_writeable(array):
        return
    if overlaps_itself(array.shape, array.strides, array.dtype.itemsize):
        kept = f"strides {array.strides}; needs memory of each element's own"
        raise ValueError(f"{op}: {name} has elements that overlap each other, shape {array.shape}, {kept}")


def _is_writeable(array: Any) -> bool:
    return not isinstance(array, np.ndarray) or array.flags.writeable


def check_values_out(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> None:
    """An array for values, of the kind and on the device of `like`; None is fine."""
    if out is None:
        return
    if isinstance(like, np.ndarray):
        check_out(op, "out", out, shape, dtype)
    elif not isinstance(out, type(like)) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{op}: out needs a CuPy array of {dtype} {shape}")
    elif out.device != like.device:
        raise ValueError(f"{op}: out is on {out.device}; needs {like.device}, where q is")


def check_quantized_out(call: Any) -> None:
    """The Quantized that a call shall write to: of its recipe, shape, dtype, axis and layout, every array as needed."""
    op, out, r = call.op, call.out, call.recipe
    check_is_quantized(op, out, "out")
    wanted = {"recipe": r, "shape": call.x.shape, "dtype": call.x.dtype, "axis": call.axis, "scale_layout": call.layout}
    for name, value in wanted.items():
        found = getattr(out, name)
        if found != value:
            found, value = (repr(part) if name == "recipe" else part for part in (found, value))  # one line
            raise ValueError(f"{op}: out has {name} {found}; needs {value}")
    if call.tensor_scale is not None and out.tensor_amax is not None:
        raise ValueError(
            f"{op}: out has a tensor_amax, which tensor_scale does not tell; needs replace(out, tensor_amax=None)"
        )
    for name, (shape, dtype) in parts(call).items():
        if call.on_device:
            _check_device_out(op, f"out.{name}", getattr(out, name), shape, dtype, call.x)
        else:
            check_out(op, f"out.{name}", getattr(out, name), shape, dtype)
    inputs = {"x": call.x, "seed": call.random}
    given = {name: getattr(call, name) for name in ("block_amax", "block_scale", "tensor_scale", "tensor_amax")}
    check_disjoint(op, inputs | given, {f"out.{name}": getattr(out, name) for name in parts(call)})


def parts(call: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each array of a result of quantize, by its name in Quantized."""
    shape, r = call.moved.shape, call.recipe
    found: dict[str, tuple[tuple[int, ...], Any]] = {"packed": (packed_shape(shape, r), np.dtype(np.uint8))}
    if r.scale is not None:
        found["block_scale"] = (padded_shape(scale_shape(shape, r), call.layout), np.dtype(np.uint8))
    if r.tensor_scaling != "none":
        given = call.tensor_amax if call.tensor_scale is None else call.tensor_scale
        covered = tensor_amax_shape(shape, r) if given is None else given.shape
        names = ("tensor_scale", "tensor_amax") if call.tensor_scale is None else ("tensor_scale",)
        found |= {name: (covered, np.dtype(np.float32)) for name in names}
    return found


def _check_device_out(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype, x: Any) -> None:
    """An array of a device for a kernel: on the device of x, contiguous, at a multiple of what is stored at a time."""
    fits = isinstance(array, type(x)) and (array.shape, array.dtype, array.device) == (shape, dtype, x.device)
    if not fits or not array.flags.c_contiguous:
        raise ValueError(f"{op}: {name} needs a contiguous CuPy array of {dtype} {shape} on the device of x")
    if array.ndim and array.data.ptr % ALIGNMENT:
        raise ValueError(f"{op}: {name} is at address {array.data.ptr:#x}; needs a multiple of {ALIGNMENT}")


def empty_quantized(call: Any, amax: Any, empty: Any, empty_scales: Any) -> Quantized:
    """A new Quantized for a call. amax: None without a tensor scale. empty(shape, dtype), empty_scales(shape,
    layout).
    """
    r, shape = call.recipe, call.moved.shape
    packed = empty(packed_shape(shape, r), np.uint8)
    scales = None if r.scale is None else empty_scales(scale_shape(shape, r), call.layout)
    decode_scale = None if amax is None else empty(amax.shape, np.float32)
    return Quantized(packed, scales, decode_scale, amax, call.x.shape, call.x.dtype, call.axis, r, call.layout)
