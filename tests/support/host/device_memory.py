"""Simulate memory, streams and graphs of a device for cupy_on_host.py.

An allocation is filled with 0xEE and lies between two guard pages, which cannot be accessed. It starts at a multiple of
16 bytes, the largest alignment that kernels need, so up to 15 bytes separate its end from the guard page after it.
These bytes, and the bytes between the preceding guard page and its start, are its margins. A kernel must not write
margins, and its results must not depend on their values.
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

UNIT = 512  # CuPy's allocation unit in bytes
PAGE = mmap.PAGESIZE
UNWRITTEN = 0xEE
ALIGNMENT = 16
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0
_lock = threading.Lock()


class Memory:
    """One allocation of `size` bytes between two guard pages. A size of 0 has the address 0."""

    live: ClassVar[WeakSet[Memory]] = WeakSet()
    margin: ClassVar[int] = UNWRITTEN  # the byte that all margins are filled with now
    is_input = False  # True if the host has written values there, which no kernel may change

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
        """Return True if an array lies in this allocation."""
        return bool(self.size) and 0 <= array.ctypes.data - self.ptr < self.size

    def fill_margins(self) -> None:
        """Write the current value of `margin` to the margins: the bytes between the allocation and its guard pages."""
        for rest in self._around:
            rest.fill(self.margin)

    def check_around(self) -> None:
        """Raise AssertionError if a kernel wrote to the margins: the bytes between allocation and guard pages."""
        for rest, where in zip(self._around, ("before the start", "behind the end"), strict=True):
            assert (rest == self.margin).all(), f"a kernel wrote {where} of an array"


def live_memory() -> list[Memory]:
    """Return all live allocations."""
    with _lock:
        return list(Memory.live)


@contextmanager
def margins_of(value: int) -> Iterator[None]:
    """Fill the margins (the bytes beside each live allocation) with `value` while the context lasts.

    After an exception in the context, the margins keep the value.
    """
    for margin in (value, UNWRITTEN):
        Memory.margin = margin
        for memory in live_memory():
            memory.fill_margins()
        if margin == value:
            yield


def check_around_all() -> None:
    """Raise AssertionError if a kernel wrote to the margins (the bytes beside the memory) of any live allocation."""
    for memory in live_memory():
        memory.check_around()


class MemoryPool:
    """A stand-in for cupy.cuda.MemoryPool, which counts the bytes that it has allocated and that are still in use."""

    def __init__(self) -> None:
        self._given: WeakSet[Memory] = WeakSet()

    def malloc(self, size: int) -> Memory:
        """Return `size` bytes of new memory, which count as used until they are freed."""
        memory = Memory(size)
        self._given.add(memory)
        return memory

    def used_bytes(self) -> int:
        """Return the bytes of allocations that are still in use."""
        return sum(memory.size for memory in self._given)


_allocators: list[Callable[[int], Memory]] = [Memory]


def allocate(size: int) -> Memory:
    """Return `size` bytes of memory from the current allocator, which using_allocator may have replaced."""
    return _allocators[-1](size)


@contextmanager
def using_allocator(allocator: Callable[[int], Memory]) -> Iterator[None]:
    """Act as cupy.cuda.using_allocator: allocate memory by `allocator` while the context lasts."""
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.pop()


class MemoryPointer:
    """A stand-in for cupy.cuda.MemoryPointer that holds the address of an array's data or of an allocation.

    Args:
        memory: the allocation that the address is in.
        ptr: the address.
        device: the number of the device.
    """

    def __init__(self, memory: Memory, ptr: int, device: int) -> None:
        self.mem, self.ptr, self.device_id = memory, ptr, device

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Fill the first `size` bytes with a value."""
        start = self.ptr - self.mem.ptr
        on_stream(lambda: self.mem.bytes[start : start + size].fill(value))

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset, self.device_id)


def alloc(size: int, device: int) -> MemoryPointer:
    """Act as cupy.cuda.alloc: return `size` bytes of new memory on a given device."""
    memory = allocate(size)
    return MemoryPointer(memory, memory.ptr, device)


# ---- streams and graphs ----


class Graph:
    """A stand-in for a CUDA graph: the captured work, and the memory that was allocated during the capture."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.memory: list[Memory] = []

    def launch(self, stream: Any = None) -> None:
        """Do the captured work now, whatever the stream."""
        for action in self.work:
            action()


_graph: Graph | None = None


def on_stream(action: Callable[[], Any]) -> None:
    """Do device work now, or store it in the graph that is being captured."""
    if _graph is None:
        action()
    else:
        _graph.work.append(action)


def wait() -> None:
    """Synchronize with the device, as every read by the host does.

    Raises:
        RuntimeError: while a graph is being captured, as in CUDA.
    """
    if _graph is not None:
        raise RuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")


def is_capturing() -> bool:
    """Return True if work is being captured in a graph."""
    return _graph is not None


def _graph_keeps(memory: Memory) -> None:
    if _graph is not None:
        _graph.memory.append(memory)


class Stream:
    """A stand-in for cupy.cuda.Stream. Work is done when it is submitted, unless it is being captured."""

    ptr = 0

    def __init__(self, non_blocking: bool = False, priority: int = 0) -> None:
        self._is_blocking = not non_blocking

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        global _graph
        _graph = None  # ends the capture after an exception, too

    def begin_capture(self) -> None:
        """Start to capture work in a graph instead of doing it. Raise AssertionError during another capture."""
        global _graph
        assert _graph is None
        _graph = Graph()

    def end_capture(self) -> Graph:
        """End the capture and return the graph. Raise AssertionError if none has started."""
        global _graph
        graph, _graph = _graph, None
        assert graph is not None
        return graph

    def record(self, event: object) -> None:
        """Do nothing, because all work is done already."""

    wait_event = record

    def synchronize(self) -> None:
        """Do nothing, because all work is done already."""
        wait()
