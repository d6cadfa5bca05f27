"""Where arrays lie; and memory of large results: whole huge pages, and that of a result that is gone serves the next
one.

A page that is new costs a fault and is filled with zeros: 4096 x 4096 bfloat16 are decoded in 1.4 ms into pages that
are there, and in 3.1 into new ones (two cores of an x86-64 machine, November 2026). malloc keeps what was freed below
32 MiB; here one piece of at most MOST bytes is kept in a process, so that a loop over layers, or over steps, does not
ask for new pages each time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from math import prod

import numpy as np

LEAST, MOST = 1 << 22, 1 << 26  # bytes of a result that it is done for
HUGE_PAGE = 1 << 21  # bytes; elsewhere they are larger, or there are none
_kept: list[np.ndarray] = []  # bytes that nothing else holds: one piece, or none


class _Owner:
    """What an array has as its base: as long as it, or a view of it, is there. Then its memory is kept, in the place of
    other.
    """

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, kept: list[np.ndarray] = _kept) -> None:
        kept[:] = [self.memory]


def _reader() -> Callable[[np.ndarray], int]:
    """What gives the address of an array's first element.

    ndarray.ctypes makes an object for that, in 0.8 us, of which a call has five. NumPy's ABI has the address behind the
    head of every Python object, where compiled extensions read it (PyArray_DATA); in CPython it takes 0.13 us.
    """
    head, read = object.__basicsize__, ctypes.c_size_t.from_address

    def found(a: np.ndarray) -> int:
        return read(id(a) + head).value

    probes = np.zeros(3)[1:], np.zeros((), np.uint8), np.zeros((2, 2), np.float32).T[::-1]
    is_so = sys.implementation.name == "cpython" and all(found(a) == a.ctypes.data for a in probes)
    return found if is_so else lambda a: int(a.ctypes.data)


_read = _reader()


def address(a: np.ndarray | None) -> int | None:
    """Of an array's first element; None for none."""
    return None if a is None else _read(a)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """np.empty(shape, dtype), which does not own its data where it is large."""
    nbytes = prod(shape) * dtype.itemsize
    if not LEAST <= nbytes <= MOST:
        return np.empty(shape, dtype)
    memory: np.ndarray = np.asarray(_Owner(_memory(nbytes)))
    return memory[:nbytes].view(dtype).reshape(shape)


def _memory(nbytes: int) -> np.ndarray:
    """The piece that is kept, if no more than half of it were idle; else a new one."""
    try:
        found = _kept.pop()  # no other thread has it from here on
    except IndexError:
        return _new(nbytes)
    return found if nbytes <= found.size <= 2 * nbytes else _new(nbytes)


def _new(nbytes: int) -> np.ndarray:
    """Bytes that begin where a huge page does."""
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    first = -_read(memory) % HUGE_PAGE
    return memory[first : first + nbytes]
