"""Pad an axis with zeros, and permute rows as FlashInfer does."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index, index_of
from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import returns_in_library

_NO_AXIS = "pad: x is 0-d; needs at least one axis; use x.reshape(1)"


def _integer_from(op: str, name: str, n: Any, minimum: int) -> int:
    """Return n, an integer of any library, as an int."""
    try:
        number = index_of(n)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise ValueError(f"{op}: {name} is {n!r}; needs an integer of {minimum} or more")
    return number


@returns_in_library
def pad(x: Any, multiple: int, axis: int = -1) -> Any:
    """Append zeros along an axis, so that the length of the axis becomes a multiple of ``multiple``.

    Use it before quantize, which requires that the length is a multiple of the recipe's block size.

    Args:
        x: an array of any library, with at least one axis.
        multiple: a positive int. The new length is the old one, rounded up to a multiple of this number.
        axis: the axis to pad.

    Returns:
        A new array in the library of x, with the dtype of x; or x itself if its length already is a multiple.

    Raises:
        TypeError: x is a masked array or not an array, or axis is not an int.
        ValueError: multiple is not a positive int, or x does not have the axis.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> layouts.pad(np.float32([1, 2, 3]), 4)
        array([1., 2., 3., 0.], dtype=float32)
    """
    if hasattr(x, "filled"):
        raise TypeError("pad: x is a masked array, whose mask would be lost; pass x.filled(0)")
    multiple, axis = _integer_from("pad", "multiple", multiple, 1), as_index("pad", "axis", axis)
    original, (x,) = x, import_arrays("pad", x=x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"pad: axis {axis} is out of range for a {x.ndim}-d array; needs {-x.ndim} to {x.ndim - 1}"
            if x.ndim
            else _NO_AXIS
        )
    missing = -x.shape[axis] % multiple
    if not missing:
        return original
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths)


def shuffle_rows(M: int, epilogue_tile: int) -> np.ndarray:
    """Return the row order of FlashInfer's shuffle_matrix_a: y = x[shuffle_rows(M, epilogue_tile)].

    The rows are permuted within blocks of B rows: new row 8 i + j of a block is its old row (B / 8) j + i. B is 32 if
    epilogue_tile is a multiple of 128, otherwise 16.

    Args:
        M: number of rows, a multiple of B; 0 gives an empty array.
        epilogue_tile: FlashInfer's epilogue tile, a positive int.

    Returns:
        A NumPy array int64 (M,) of row indices: entry r is the old index of new row r.

    Raises:
        ValueError: M is not an int, is negative or is not a multiple of B; or epilogue_tile is not a positive int.

    Examples:
        >>> from fp4kit import layouts
        >>> layouts.shuffle_rows(16, 64)[:9].tolist()
        [0, 2, 4, 6, 8, 10, 12, 14, 1]
    """
    M = _integer_from("shuffle_rows", "M", M, 0)
    epilogue_tile = _integer_from("shuffle_rows", "epilogue_tile", epilogue_tile, 1)
    block = 32 if epilogue_tile % 128 == 0 else 16
    if M % block:
        raise ValueError(f"shuffle_rows: M is {M}; needs a multiple of {block} for epilogue tile {epilogue_tile}")
    inside = np.arange(block).reshape(8, -1).T.reshape(-1)
    return (np.arange(0, M, block)[:, None] + inside).reshape(-1)
