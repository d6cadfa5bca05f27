"""Rows made longer, and rows in another order."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index, index_of
from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import comes_home

_NO_AXIS = "pad: x is 0-d; needs at least one axis; use x.reshape(1)"


def _natural(op: str, name: str, n: Any, least: int) -> int:
    """n as an int; ValueError for what is none, or less than `least`."""
    try:
        number = index_of(n)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{op}: {name} is {n!r}; needs an integer of {least} or more")
    return number


@comes_home
def pad(x: Any, multiple: int, axis: int = -1) -> Any:
    """x with zeros appended along axis up to a multiple of `multiple`; x itself where nothing is missing.

    x: array of any library, of one dimension or more; the result is in its library. Raises ValueError for a multiple
    that is no positive integer, an axis that x does not have; TypeError for a masked array, or what is none.
    """
    if hasattr(x, "filled"):
        raise TypeError("pad: x is a masked array, whose mask would be lost; pass x.filled(0)")
    multiple, axis = _natural("pad", "multiple", multiple, 1), as_index("pad", "axis", axis)
    given, (x,) = x, import_arrays("pad", x=x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"pad: axis {axis} of a {x.ndim}-d array; needs {-x.ndim} to {x.ndim - 1}" if x.ndim else _NO_AXIS
        )
    missing = -x.shape[axis] % multiple
    if not missing:
        return given
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths)


def shuffle_rows(M: int, epilogue_tile: int) -> np.ndarray:
    """Row permutation of FlashInfer's shuffle_matrix_a: y = x[shuffle_rows(M, tile)], int64 (M,).

    Inside blocks of B = 32 rows (16 unless epilogue_tile % 128 == 0), new row 8 i + j is old row (B / 8) j + i.
    Raises ValueError unless M is a multiple of B, and epilogue_tile a positive integer.
    """
    M, epilogue_tile = _natural("shuffle_rows", "M", M, 0), _natural("shuffle_rows", "epilogue_tile", epilogue_tile, 1)
    block = 32 if epilogue_tile % 128 == 0 else 16
    if M % block:
        raise ValueError(f"shuffle_rows: M is {M}; needs a multiple of {block} for epilogue tile {epilogue_tile}")
    inside = np.arange(block).reshape(8, -1).T.reshape(-1)
    return (np.arange(0, M, block)[:, None] + inside).reshape(-1)
