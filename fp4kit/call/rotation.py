"""Parse the arguments of hadamard and rotate into a Rotation.

In all functions, op is the public function that errors begin with.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_flag, as_index
from fp4kit.arrays.imports import import_arrays, is_array, to_host
from fp4kit.call.checks import check_axis, check_float

HADAMARD_SIZES = (16, 32, 64, 128, 256, 512)
MAX_MATRIX = 128  # the largest number of rows of a matrix that rotates blocks
# The largest accepted absolute value of an element of M M^T - I. If every element of an orthogonal M is rounded to
# bfloat16, M M^T changes by at most 2 * 2^-9 + 2^-18, since each element changes by at most a relative 2^-9.
ORTHOGONAL_WITHIN = 2.0**-7


class Rotation(NamedTuple):
    """A parsed call to hadamard or rotate: what an engine needs, already checked.

    Attributes:
        x: the array, NumPy or CuPy.
        shape: (outer, length, inner), the shape to which the engine reshapes x. `size` elements along the middle axis
            are a block.
        size: the number of elements of a block.
        signs: uint8 (length,) in host memory, 1 for a sign of -1 and 0 for a sign of 1; None if all signs are 1.
        matrices: float32 (1, size, size) for all blocks or (length / size, size, size), contiguous, in host memory;
            None for a Hadamard transform.
        inverse: True if signs are applied after the rotation instead of before. The matrices of an inverse call are
            already transposed.
    """

    x: Any
    shape: tuple[int, int, int]
    size: int
    signs: np.ndarray | None
    matrices: Any
    inverse: bool


def hadamard_call(op: str, x: Any, size: Any, axis: int, signs: Any, inverse: Any) -> Rotation:
    """Check the arguments of a call to hadamard, and return its Rotation."""
    (x,) = import_arrays(op, x=x)
    check_float(op, x)
    size = check_hadamard_size(op, size)
    axis = _checked_axis(op, x, axis, size)
    negative = None if signs is None else _negative(op, signs, size, x.shape[axis])
    return _rotation(x, axis, size, negative, None, as_flag(op, "inverse", inverse))


def matrix_call(op: str, x: Any, matrices: Any, axis: int, signs: Any, inverse: Any) -> Rotation:
    """Check the arguments of a call to rotate, and return its Rotation."""
    (x,) = import_arrays(op, x=x)
    check_float(op, x)
    (matrices,) = import_arrays(op, matrices=matrices)
    check_float(op, matrices, "matrices")
    inverse = as_flag(op, "inverse", inverse)
    size = _matrix_size(op, matrices.shape)
    axis = _checked_axis(op, x, axis, size)
    blocks = x.shape[axis] // size
    if matrices.ndim == 3 and len(matrices) != blocks:
        raise ValueError(
            f"{op}: matrices has {len(matrices)} matrices of {size}x{size}; needs {blocks}, one per block of"
            f" axis {axis} of x, or one matrix ({size}, {size}) for all blocks"
        )
    stacked = to_host(matrices).astype(np.float32).reshape(-1, size, size)
    _check_orthogonal(op, stacked)
    negative = None if signs is None else _negative(op, signs, size, x.shape[axis])
    stacked = np.ascontiguousarray(stacked.swapaxes(1, 2) if inverse else stacked)
    return _rotation(x, axis, size, negative, stacked, inverse)


def check_hadamard_size(op: str, size: Any) -> int:
    """Return the size of a Hadamard transform as an int."""
    size = as_index(op, "size", size)
    if size not in HADAMARD_SIZES:
        raise ValueError(f"{op}: size is {size}; needs 16, 32, 64, 128, 256 or 512")
    return size


def _checked_axis(op: str, x: Any, axis: int, size: int) -> int:
    """Return the axis of x as a non-negative int."""
    axis = check_axis(op, axis, x.ndim)
    if x.shape[axis] % size:
        raise ValueError(
            f"{op}: axis {axis} has length {x.shape[axis]}; blocks of {size} need a multiple of {size}; pad with"
            " fp4kit.layouts.pad"
        )
    return axis


def _matrix_size(op: str, shape: tuple[int, ...]) -> int:
    """Return n for matrices of the shape (n, n) or (blocks, n, n). Raise ValueError for other shapes or n > 128."""
    if len(shape) not in (2, 3) or shape[-1] != shape[-2] or not 1 <= shape[-1] <= MAX_MATRIX:
        raise ValueError(
            f"{op}: matrices has shape {tuple(shape)}; needs (n, n) or (number of blocks, n, n), with n from 1 to"
            f" {MAX_MATRIX}"
        )
    return shape[-1]


def _check_orthogonal(op: str, matrices: np.ndarray) -> None:
    """Raise ValueError unless every matrix M is orthogonal, as far as bfloat16 can hold orthogonal matrices."""
    wide = matrices.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.max(np.abs(wide @ wide.swapaxes(-1, -2) - np.eye(wide.shape[-1])), initial=0)
    if not error <= ORTHOGONAL_WITHIN:
        raise ValueError(
            f"{op}: matrices is not orthogonal: an element of M M^T - I is {error:.3g}; needs at most"
            f" {ORTHOGONAL_WITHIN}, because the inverse uses the transpose"
        )


def _negative(op: str, signs: Any, size: int, length: int) -> np.ndarray:
    """Return the argument signs of hadamard or rotate as uint8 in its given shape: 1 for the sign -1, and 0 for 1."""
    try:
        found = np.asarray(to_host(import_arrays(op, signs=signs)[0]) if is_array(signs) else signs, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{op}: signs is {signs!r:.60}; needs numbers, each 1 or -1") from None
    if found.shape not in ((size,), (length,)):
        raise ValueError(
            f"{op}: signs has shape {found.shape}; needs ({size},) for every block or ({length},) for the whole axis"
        )
    if not (np.abs(found) == 1).all():
        raise ValueError(f"{op}: signs holds {found[np.abs(found) != 1][0]:g}; needs 1 or -1")
    return (found < 0).astype(np.uint8)


def _rotation(x: Any, axis: int, size: int, negative: np.ndarray | None, matrices: Any, inverse: bool) -> Rotation:
    """Return the Rotation of an array along an axis whose length is a multiple of `size`."""
    outer, length, inner = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    repeated = (negative is None or len(negative) == size) and (matrices is None or len(matrices) == 1)
    if repeated:
        return Rotation(x, (outer * (length // size), size, inner), size, negative, matrices, inverse)
    if negative is not None and len(negative) < length:
        negative = np.tile(negative, length // size)
    return Rotation(x, (outer, length, inner), size, negative, matrices, inverse)
