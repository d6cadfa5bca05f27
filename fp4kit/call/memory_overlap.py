"""Check that the memory that a call writes is disjoint from the memory that it reads.

If they overlapped, results could be wrong, because an engine may write part of a result before it has read all inputs.
The span of an array is the range of addresses from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from fp4kit.quantized.container import Quantized

_MAX_SUMS = 1 << 20  # largest number of sums that overlaps_itself computes; beyond it, the array counts as overlapping
_MAX_WORK = 1000  # limit of NumPy's search for a shared byte; if it is reached, the arrays count as sharing memory


def check_disjoint(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError if an output shares memory with an input or with another output."""
    # An output named "out.NAME" may share memory with the input "NAME", such as tensor_scale, because the call writes
    # there only the values that it has read from there.
    for name, out in outputs.items():
        for other, array in inputs.items():
            if name != f"out.{other}" and shares_memory(array, out):
                _refuse(op, name, other)
    for (name, out), (other, array) in combinations(outputs.items(), 2):
        if shares_memory(out, array):
            _refuse(op, other, name)


def _refuse(op: str, out: str, other: str) -> None:
    """Raise the ValueError for an output named `out` that shares memory with the input or output named `other`."""
    raise ValueError(f"{op}: {out} shares memory with {other}, which is read or written too; needs memory of its own")


class _OccupiedMemory(NamedTuple):
    """The memory that a Quantized occupies.

    Attributes:
        arrays: its arrays, without those that are None.
        spans: on a device, the span (first address, address after the last byte) of each array; () in host memory.
        whole: on a device, the span that contains all arrays; (0, 0) in host memory.
        parts_are_disjoint: True if no two of its arrays share memory.
    """

    arrays: tuple[Any, ...]
    spans: tuple[tuple[int, int], ...]
    whole: tuple[int, int]
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
        return np.may_share_memory(a, b) and _have_a_byte_in_common(a, b)
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _have_a_byte_in_common(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have a byte in common. If NumPy's search exceeds its limit of work, return True."""
    try:
        return np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]  # NumPy's stubs allow no number
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements of an array have a byte in common."""
    # The result is exact, except that it is True if the test would need more than _MAX_SUMS (2^20) sums.
    axes = _interleaved_axes(shape, strides, itemsize)
    sums = np.zeros(1, np.int64)
    for i, (step, length) in enumerate(axes):
        if step == 0:
            return True
        below = sums // step
        for count in (below, below + 1):  # the multiples of step next to each sum
            close = np.abs(sums - count * step) < itemsize
            if (close & (count != 0) & (np.abs(count) < length)).any():
                return True
        if i + 1 < len(axes):
            if len(sums) * 2 * length > _MAX_SUMS:
                return True
            sums = np.unique(np.add.outer(sums, step * np.arange(1 - length, length)))
    return False


def _interleaved_axes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Return the axes along which elements may overlap, as a list of (absolute stride in bytes, length)."""
    if 0 in shape:
        return []
    axes: list[tuple[int, int]] = []
    for step, length in sorted((abs(step), length) for step, length in zip(strides, shape, strict=True) if length > 1):
        if axes and step == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0], axes[-1][1] * length)
        else:
            axes.append((step, length))
    while axes and axes[-1][0] >= itemsize + sum(step * (length - 1) for step, length in axes[:-1]):
        axes.pop()
    return sorted(axes, key=lambda axis: axis[1])


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
