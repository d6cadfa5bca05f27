"""Check the arguments of operations before any work.

op is the public function that the error message begins with. Each message says what came, what is needed and what to
do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.formats import FLOATS
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe


def check_float(op: str, x: np.ndarray, name: str = "x") -> None:
    """Raise TypeError unless the dtype of x is float32, float16 or bfloat16. name: the name of x in the message."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} is {x.dtype}; needs float32, float16 or bfloat16; "
            f"convert it first, e.g. {name}.astype(np.float32), so that you choose the rounding"
        )


def check_axis(op: str, axis: int, ndim: int) -> int:
    """Return an axis of an array with `ndim` axes as a non-negative int."""
    if ndim == 0:
        raise ValueError(
            f"{op}: x is 0-d; blocks run along an axis, so it needs at least one; pass the elements of at least one"
            " block in one array"
        )
    axis = axis if type(axis) is int else as_index(op, "axis", axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    return axis % ndim


def check_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...] | None:
    """Return the axes of a reduction, an int or a tuple, as a tuple of non-negative ints."""
    if axis is None:
        return None
    axes = tuple(check_axis(op, a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis {axis} names one axis twice; needs different axes")
    return axes


def check_length(op: str, axis: int, length: int, recipe: Recipe) -> None:
    """Raise ValueError unless the quantized axis has a length that the recipe allows."""
    # The length must be a multiple of recipe.length_multiple: whole blocks or, if the recipe has no blocks, whole bytes
    # of codes.
    multiple = recipe.length_multiple
    if length % multiple:
        raise ValueError(
            f"{op}: axis {axis} has length {length}; {recipe.id} needs a multiple of {multiple}; pad with"
            f" fp4kit.layouts.pad(x, {multiple}, axis={axis})"
        )


def check_has_codes(op: str, recipe: Recipe) -> None:
    """Raise ValueError if a recipe only fake-quantizes, because it then has values but no codes."""
    if recipe.fake_only:
        raise ValueError(f"{op}: {recipe.id} is a fake quantizer and has values only; use fp4kit.fake_quantize")


def check_values_dtype(op: str, dtype: Any) -> None:
    """Raise TypeError unless dtype, the dtype of dequantized values, is float32, float16 or bfloat16."""
    if dtype not in FLOATS:
        raise TypeError(
            f"{op}: dtype is {dtype}; needs float32, float16 or bfloat16; dequantize to float32 and convert the result"
        )


def check_quantized(op: str, q: Any, name: str = "q") -> Quantized:
    """Check that q is a Quantized, and return it with NumPy or CuPy arrays that share its memory."""
    check_is_quantized(op, q, name)
    return q.imported(op)


def check_is_quantized(op: str, q: Any, name: str = "q") -> None:
    """Raise TypeError unless q is a Quantized. Its arrays may be of any library. name: the name of q in the message."""
    if not isinstance(q, Quantized):
        raise TypeError(f"{op}: {name} is {type(q).__name__}; needs a Quantized, as fp4kit.quantize returns")


def description(value: Any) -> str:
    """Return text that describes a wrong value in a message."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{type(value).__module__}.{type(value).__name__} {value.dtype} {value.shape}"
