"""Allocate memory for large results, and reuse it after the results are freed.

Results of MIN_BYTES to MAX_BYTES are allocated in memory that is aligned to huge pages. When the last array that uses
such memory is freed, the memory is kept for the next result. A process keeps at most one such buffer.

The first write to a new page costs a page fault and fills the page with zeros. docs/processors.md states how much
longer decoding into new pages takes. malloc itself keeps freed memory below 32 MiB only.
"""

from __future__ import annotations

from math import prod

import numpy as np

MIN_BYTES, MAX_BYTES = 1 << 22, 1 << 26  # size of the smallest and the largest result whose memory is reused
HUGE_PAGE = 1 << 21  # bytes, on x86-64; on other processors the alignment has no effect
_kept: list[np.ndarray] = []  # the memory that is kept for the next result: one array of bytes, or none


class _Owner:
    """The owner of the memory of an array and of all its views. NumPy refers to this object as their `base`.

    When the last of these arrays is freed, this object is freed, too. It then stores its memory in _kept, in place of
    any memory that is there.
    """

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, kept: list[np.ndarray] = _kept) -> None:
        kept[:] = [self.memory]


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array of this shape and dtype."""
    nbytes = prod(shape) * dtype.itemsize
    if not MIN_BYTES <= nbytes <= MAX_BYTES:
        return np.empty(shape, dtype)
    memory: np.ndarray = np.asarray(_Owner(_memory(nbytes)))
    return memory[:nbytes].view(dtype).reshape(shape)


def _memory(nbytes: int) -> np.ndarray:
    """Return a byte array of at least nbytes: the kept memory if it fits, otherwise new memory."""
    try:
        found = _kept.pop()  # atomic: no other thread gets this memory
    except IndexError:
        return _new(nbytes)
    return found if nbytes <= found.size <= 2 * nbytes else _new(nbytes)


def _new(nbytes: int) -> np.ndarray:
    """Return new memory: an uninitialized byte array (nbytes,) that begins at a multiple of HUGE_PAGE (2 MiB)."""
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    first = -memory.ctypes.data % HUGE_PAGE
    return memory[first : first + nbytes]
