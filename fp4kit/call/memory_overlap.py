"""Whether what a call writes lies apart from what it reads: an engine may write a part of a result before it read all
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from fp4kit.quantized.container import Quantized

_MOST_SUMS = 1 << 20  # of overlaps_itself
_MOST_WORK = 1000  # of NumPy's search for a byte of both, of two arrays with gaps; beyond it they count as one memory


def check_disjoint(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError where the memory of an output is that of an input, or of another output. What is no array has
    none.

    The input of an output's own name (tensor_scale and out.tensor_scale) may be it: it is written with what was read
    from it.
    """
    for name, out in outputs.items():
        for other, array in inputs.items():
            if name != f"out.{other}" and shares_memory(array, out):
                _refuse(op, name, other)
    for (name, out), (other, array) in combinations(outputs.items(), 2):
        if shares_memory(out, array):
            _refuse(op, other, name)


def _refuse(op: str, out: str, other: str) -> None:
    raise ValueError(f"{op}: {out} shares memory with {other}, which is read or written too; needs memory of its own")


class _Memory(NamedTuple):
    """Of a Quantized: its arrays, on a device the spans that each and all lie in, and whether all are apart from each
    other.
    """

    arrays: tuple[Any, ...]
    spans: tuple[tuple[int, int], ...]
    whole: tuple[int, int]
    parts_are_disjoint: bool


_KNOWN: WeakKeyDictionary[Quantized, _Memory] = (
    WeakKeyDictionary()
)  # of the outs, and what is decoded, of repeated calls


def _memory_of(q: Quantized) -> _Memory:
    found = _KNOWN.get(q)
    if found is None:
        arrays = tuple(part for part in q.parts().values() if part is not None)
        apart = not any(shares_memory(*pair) for pair in combinations(arrays, 2))
        spans = () if isinstance(q.packed, np.ndarray) else tuple(map(_span, arrays))
        whole = min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)
        found = _KNOWN[q] = _Memory(arrays, spans, whole, apart)
    return found


def are_disjoint(read: Any, out: Any) -> bool:
    """Whether the out of a call that was checked before, or one like it, is apart from what is read this time.

    One of the two is an array, of NumPy, CuPy or PyTorch, and the other one a Quantized; None as out is apart from
    anything.
    """
    if out is None:
        return True
    written = type(out) is Quantized
    array, memory = (read, _memory_of(out)) if written else (out, _memory_of(read))
    if written and not memory.parts_are_disjoint:
        return False
    if type(array) is np.ndarray:
        return not any(shares_memory(array, part) for part in memory.arrays)
    start, stop = _span(array)
    low, high = memory.whole
    return stop <= low or high <= start or not any(start < last and first < stop for first, last in memory.spans)


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common; on a device, whether the spans do that they lie in."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b) and _have_a_byte_in_common(a, b)
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _have_a_byte_in_common(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_MOST_WORK)  # type: ignore[arg-type]  # NumPy's stubs know its two names alone
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements of an array have a byte in common, by an exact test. strides: in bytes.

    Two elements overlap if |sum(d[k] * strides[k])| < itemsize for integers |d[k]| < shape[k] that are not all 0. Axes
    are taken one by one: `sums` holds the sums of those before, and an axis overlaps if a multiple of its stride is
    close to one of them. More than _MOST_SUMS of them, which take several axes that interleave, count as an overlap.
    """
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
            if len(sums) * 2 * length > _MOST_SUMS:
                return True
            sums = np.unique(np.add.outer(sums, step * np.arange(1 - length, length)))
    return False


def _interleaved_axes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Return (stride, length) of the axes that may overlap, short ones first; none for the strides of any usual view.

    Axes that continue one another are joined. The axis of the largest stride is left out if all others lie within that
    stride.
    """
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
    """Where an array of CuPy or PyTorch begins, and the address behind it; (0, 0) of anything else, and of no
    elements.
    """
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
