"""amax without a recipe on CuPy arrays: which rows or columns it reduces, and whether they lie in memory so."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.cuda import launch, loader
from fp4kit.cuda.amax_columns import amax_columns
from fp4kit.cuda.geometry import THREADS


def plain_amax(x: Any, axis: Any) -> Any:
    """ops.amax without a recipe."""
    with loader.making_current(x.device.id):
        columns = reduced_columns(x, axis)
        if columns is not None:
            matrices, shape = columns
            return amax_columns(matrices).reshape(shape)
        rows, shape = reduced_rows(x, axis)
        return launch.amax(rows, by_row=axis is not None).reshape(shape)


def reduced_columns(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]] | None:
    """x as matrices (B, M, K) to reduce to (B, K), where it lies so and each keeps a thread block busy; as reduced_rows."""
    reduced = sorted(_axes(x, axis))
    if not reduced or not x.flags.c_contiguous or reduced != [*range(reduced[0], x.ndim - 1)][: len(reduced)]:
        return None
    lead, rest = x.shape[: reduced[0]], x.shape[reduced[-1] + 1 :]
    B, M, K = (int(np.prod(part)) for part in (lead, x.shape[reduced[0] : reduced[-1] + 1], rest))
    return (x.reshape(B, M, K), lead + rest) if B == 1 or M * K >= 16 * THREADS else None


def _axes(x: Any, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return ()
    return tuple(range(x.ndim)[a] for a in (axis if isinstance(axis, tuple) else (axis,)))


def reduced_rows(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]]:
    """x contiguous, in rows (n, m) that are each reduced to one number where axis is not None; and the shape of the result."""
    cupy = loader.cupy()
    if axis is None:
        return cupy.ascontiguousarray(x), ()
    reduced = _axes(x, axis)
    kept = tuple(a for a in range(x.ndim) if a not in reduced)
    shape = tuple(x.shape[a] for a in kept)
    n = int(np.prod(shape))
    return cupy.ascontiguousarray(x.transpose(*kept, *reduced)).reshape(n, int(np.prod([x.shape[a] for a in reduced]))), shape
