"""Checks that every operation makes before any work. Each error says what came, what is needed and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.formats import FLOATS
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe


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
    axis = axis if type(axis) is int else as_index(op, "axis", axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} of a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    return axis % ndim


def check_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...] | None:
    """Axes that are reduced as non-negative numbers: one, or those of a tuple, each once; None stays."""
    if axis is None:
        return None
    axes = tuple(check_axis(op, a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis {axis} names one axis twice; needs different ones")
    return axes


def check_length(op: str, axis: int, length: int, recipe: Recipe) -> None:
    """The length along the axis must be whole blocks (and whole bytes)."""
    multiple = recipe.length_multiple
    if length % multiple:
        raise ValueError(
            f"{op}: axis {axis} has length {length}; {recipe.id} needs a multiple of {multiple}; pad with"
            " fp4kit.layouts.pad"
        )


def check_has_codes(op: str, recipe: Recipe) -> None:
    """Fake-only recipes have no codes."""
    if recipe.fake_only:
        raise ValueError(f"{op}: {recipe.id} is a fake quantizer and has values only; use fp4kit.fake_quantize")


def check_values_dtype(op: str, dtype: Any) -> None:
    """Values are float32, float16 or bfloat16."""
    if dtype not in FLOATS:
        raise TypeError(
            f"{op}: dtype is {dtype}; needs float32, float16 or bfloat16; convert the float32 result further"
        )


def check_quantized(op: str, q: Any, name: str = "q") -> Quantized:
    """q, which must be a Quantized, with NumPy or CuPy arrays."""
    check_is_quantized(op, q, name)
    return q.imported(op)


def check_is_quantized(op: str, q: Any, name: str = "q") -> None:
    """q must be a Quantized, of arrays of any library."""
    if not isinstance(q, Quantized):
        raise TypeError(f"{op}: {name} is {type(q).__name__}; needs a Quantized, as fp4kit.quantize returns")
