"""Checks that every operation makes before any work. Each error says what came, what is needed and the way out."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.quantized import Quantized, scale_shape
from fp4kit.recipes import Recipe

FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))


def check_float(op: str, x: np.ndarray, name: str = "x") -> None:
    """x must be float32, float16 or bfloat16."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} is {x.dtype}; needs float32, float16 or bfloat16; "
            f"convert it first, e.g. {name}.astype(np.float32), so that the rounding is yours"
        )


def check_axis(op: str, axis: int, ndim: int) -> int:
    """axis as a non-negative number."""
    if ndim == 0:
        raise ValueError(f"{op}: x is 0-d; blocks run along an axis, so it needs at least one; use x.reshape(1)")
    axis = operator.index(axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} of a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    return axis % ndim


def check_length(op: str, axis: int, length: int, recipe: Recipe) -> None:
    """The length along the axis must be whole blocks (and whole bytes)."""
    multiple = recipe.length_multiple
    if length % multiple:
        raise ValueError(
            f"{op}: axis {axis} has length {length}; {recipe.id} needs a multiple of {multiple}; pad with fp4kit.layouts.pad"
        )


def check_has_codes(op: str, recipe: Recipe) -> None:
    """Fake-only recipes have no codes."""
    if recipe.fake_only:
        raise ValueError(f"{op}: {recipe.id} is a fake quantizer and has values only; use fp4kit.fake_quantize")


def check_out(op: str, name: str, out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """An output array given by the caller: shape, dtype, writable."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{op}: {name} is {type(out).__name__}; needs a numpy array, as x is")
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {out.shape}; needs {np.dtype(dtype)} {tuple(shape)}")
    if not out.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; needs a writable array")


def check_quantized(op: str, q: Any, name: str = "q", on_device: bool = False) -> None:
    """q must be a Quantized, of NumPy arrays unless the caller says that a GPU will do."""
    if not isinstance(q, Quantized):
        raise TypeError(f"{op}: {name} is {type(q).__name__}; needs a Quantized, as fp4kit.quantize returns")
    if not on_device and not isinstance(q.packed, np.ndarray):
        raise NotImplementedError(f"{op}: {name} is on a GPU, where {op} has no kernel yet; use its arrays' .get() on the CPU")


def tensor_amax_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Shape of tensor_amax for an array whose quantized axis is last: (), rows or blocks."""
    *lead, K = moved_shape
    return {"row": tuple(lead), "block": (*lead, K // recipe.block_size)}.get(recipe.tensor_scaling, ())


def check_tensor_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe) -> np.ndarray:
    """tensor_amax as float32 of its canonical shape: () or (E,) for "tensor", rows for "row", blocks for "block"."""
    if recipe.tensor_scaling == "none":
        raise ValueError(f"{op}: tensor_amax was given, but {recipe.id} has no tensor scale; leave it out")
    amax = reshape_amax(op, _real(op, "tensor_amax", amax), moved_shape, recipe)
    bad = ~(amax >= 0)
    if bad.any():
        what = "NaN" if np.isnan(amax).any() else "negative"
        raise ValueError(f"{op}: tensor_amax holds {int(bad.sum())} {what} value(s) of {amax.size}; needs amax >= 0")
    return amax


@ieee("amax")
def _real(op: str, name: str, amax: Any) -> np.ndarray:
    """A real number or array as float32; what is beyond its range becomes infinite, which the rules define."""
    array = np.asarray(amax)
    if array.dtype.kind not in "fiu" and array.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {array.dtype}; needs a real number or a float array")
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def check_clip_amax(op: str, amax: Any) -> np.ndarray:
    """The amax that a gradient is clipped at as float32, of any shape: not negative. NaN is one that no x is within."""
    amax = _real(op, "amax", amax)
    with np.errstate(invalid="ignore"):
        negative = int(np.count_nonzero(amax < 0))
    if negative:
        raise ValueError(f"{op}: amax holds {negative} negative value(s) of {amax.size}; needs amax >= 0, such as fp4kit.amax(x)")
    return amax


def reshape_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe) -> Any:
    """tensor_amax in its canonical shape; trailing axes of length 1 may be missing or left over."""
    wanted = tensor_amax_shape(moved_shape, recipe)
    allowed = [wanted]
    if recipe.tensor_scaling == "tensor":
        if amax.size == 1:
            return amax.reshape(())
        allowed = [(), (moved_shape[0],)] if len(moved_shape) > 2 else [()]
    for shape in allowed:
        trimmed = amax.shape
        while len(trimmed) > len(shape) and trimmed[-1] == 1:
            trimmed = trimmed[:-1]
        if trimmed == shape:
            return amax.reshape(shape)
    if recipe.tensor_scaling == "block" and amax.size == prod(wanted):
        return amax.reshape(wanted)
    raise ValueError(f"{op}: tensor_amax has shape {amax.shape}; {recipe.id} needs {' or '.join(map(str, allowed))}")


def check_block_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe) -> np.ndarray:
    """Calibrated block amaxes as float32 (..., K/block)."""
    if not recipe.static:
        raise ValueError(f"{op}: block_amax was given, but {recipe.id} takes it from x; leave it out or use a static recipe")
    amax = _real(op, "block_amax", amax)
    wanted = scale_shape(moved_shape, recipe)
    if amax.size != prod(wanted):
        raise ValueError(f"{op}: block_amax has shape {amax.shape}; {recipe.id} needs {wanted}")
    if np.isnan(amax).any() or (amax < 0).any():
        raise ValueError(f"{op}: block_amax holds NaN or negative values; needs amax >= 0")
    return amax.reshape(wanted)
