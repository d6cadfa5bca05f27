"""Memory, streams and graphs of the device that the host plays: see cupy_on_host.py.

An allocation is filled with 0xEE and lies between two guard pages, which nobody may touch. It starts at a multiple of
16 bytes, the largest alignment that kernels ask for, so at most 15 bytes separate its end from the guard page behind
it. Those bytes, and the ones between the guard page before it and its start, are its margins: a kernel must not write
them, and what it writes elsewhere must not depend on them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

UNIT = 512  # bytes that CuPy allocates in
PAGE = mmap.PAGESIZE
UNWRITTEN = 0xEE
ALIGNMENT = 16
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0
_lock = threading.Lock()


class Memory:
    """An allocation of `size` bytes between two guard pages."""

    live: ClassVar[WeakSet[Memory]] = WeakSet()
    margin: ClassVar[int] = UNWRITTEN  # what the margins of all of them hold
    is_input = False  # whether the host has put values there, which no kernel may change

    def __init__(self, size: int) -> None:
        room = -(-size // UNIT) * UNIT
        inner = -(-room // PAGE) * PAGE
        pages = np.frombuffer(mmap.mmap(-1, inner + 2 * PAGE), np.uint8)
        for guard in (0, PAGE + inner):
            assert _mprotect(pages.ctypes.data + guard, PAGE, _NO_ACCESS) == 0
        start = PAGE + inner - -(-size // ALIGNMENT) * ALIGNMENT
        self.bytes, self.size = pages[start : start + size], room
        self._around = pages[PAGE:start], pages[start + size : PAGE + inner]
        self.bytes.fill(UNWRITTEN)
        self.fill_margins()
        self.ptr = self.bytes.ctypes.data if size else 0
        with _lock:
            self.live.add(self)
        _graph_keeps(self)

    def holds(self, array: np.ndarray) -> bool:
        """Whether an array lies in this memory."""
        return bool(self.size) and 0 <= array.ctypes.data - self.ptr < self.size

    def fill_margins(self) -> None:
        """Fill the margins with their current value."""
        for rest in self._around:
            rest.fill(self.margin)

    def check_around(self) -> None:
        """Raise AssertionError if something was written before the first byte or behind the last one."""
        for rest, where in zip(self._around, ("before the start", "behind the end"), strict=True):
            assert (rest == self.margin).all(), f"a kernel wrote {where} of an array"


def live_memory() -> list[Memory]:
    """All that is allocated."""
    with _lock:
        return list(Memory.live)


@contextmanager
def margins_of(value: int) -> Iterator[None]:
    """Fill the margins of all that is allocated with another value."""
    for margin in (value, UNWRITTEN):
        Memory.margin = margin
        for memory in live_memory():
            memory.fill_margins()
        if margin == value:
            yield


def check_around_all() -> None:
    """Memory.check_around of all that lives."""
    for memory in live_memory():
        memory.check_around()


class MemoryPool:
    """cupy.cuda.MemoryPool: counts what it gave."""

    def __init__(self) -> None:
        self._given: WeakSet[Memory] = WeakSet()

    def malloc(self, size: int) -> Memory:
        """New memory."""
        memory = Memory(size)
        self._given.add(memory)
        return memory

    def used_bytes(self) -> int:
        """Bytes of what is still in use."""
        return sum(memory.size for memory in self._given)


_allocators: list[Callable[[int], Memory]] = [Memory]


def allocate(size: int) -> Memory:
    """Memory of the current allocator."""
    return _allocators[-1](size)


@contextmanager
def using_allocator(allocator: Callable[[int], Memory]) -> Iterator[None]:
    """cupy.cuda.using_allocator."""
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.pop()


class MemoryPointer:
    """cupy.cuda.MemoryPointer: `data` of an array, or an allocation."""

    def __init__(self, memory: Memory, ptr: int, device: int) -> None:
        self.mem, self.ptr, self.device_id = memory, ptr, device

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Fill bytes."""
        start = self.ptr - self.mem.ptr
        on_stream(lambda: self.mem.bytes[start : start + size].fill(value))

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset, self.device_id)


def alloc(size: int, device: int) -> MemoryPointer:
    """cupy.cuda.alloc on a device."""
    memory = allocate(size)
    return MemoryPointer(memory, memory.ptr, device)


# ---- streams and graphs ----


class Graph:
    """What a stream captured; memory that was allocated meanwhile is the graph's, as in a pool."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.memory: list[Memory] = []

    def launch(self, stream: Any = None) -> None:
        """Do the work."""
        for action in self.work:
            action()


_graph: Graph | None = None


def on_stream(action: Callable[[], Any]) -> None:
    """Do what a device does, or keep it for a graph."""
    if _graph is None:
        action()
    else:
        _graph.work.append(action)


def wait() -> None:
    """What every read by the host does. Raises RuntimeError while a graph is captured, as CUDA does."""
    if _graph is not None:
        raise RuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")


def is_capturing() -> bool:
    """Whether work is kept for a graph."""
    return _graph is not None


def _graph_keeps(memory: Memory) -> None:
    if _graph is not None:
        _graph.memory.append(memory)


class Stream:
    """cupy.cuda.Stream: all work is done when it is asked for, but for what is captured."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self._is_blocking = not non_blocking

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        global _graph
        _graph = None  # where a capture failed

    def begin_capture(self) -> None:
        """Keep the work from here on."""
        global _graph
        assert _graph is None
        _graph = Graph()

    def end_capture(self) -> Graph:
        """The work that was kept."""
        global _graph
        graph, _graph = _graph, None
        assert graph is not None
        return graph

    def synchronize(self) -> None:
        """Nothing is left to wait for."""
        wait()
