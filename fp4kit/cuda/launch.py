"""Provide helpers for all launch modules: grid sizes, prepared launches, addresses and alignment checks.

Kernels use grid-stride loops, so their results do not depend on the size of the grid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports

THREADS = 256  # threads per thread block
BLOCKS_PER_SM = 16  # the most thread blocks per multiprocessor, unless a launcher chooses another limit
MAX_THREADS = 2048  # threads that run on a multiprocessor at a time
MAX_ELEMENTS = 1 << 33  # the most elements per launch
MAX_COLUMNS = (1 << 32) - 1  # the most elements per row, for recipes with blocks
# A limit of thread blocks per multiprocessor that is never reached, so each thread block processes one share of work.
UNLIMITED = 1 << 16


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(imports.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def resident_blocks(device: int) -> int:
    """Return how many thread blocks of THREADS (256) threads a device can run at once, limited only by their
    threads.
    """
    return multiprocessors(device) * (MAX_THREADS // THREADS)


def check_count(elements: int) -> None:
    """Raise ValueError if a matrix has more than 2^33 elements."""
    if elements > MAX_ELEMENTS:
        raise ValueError(
            f"fp4kit.cuda: a matrix has {elements} elements; a kernel takes at most {MAX_ELEMENTS} (2^33); split the"
            " first axis"
        )


def check_columns(columns: int) -> None:
    """Raise ValueError if a row has more than 2^32 - 1 elements, too many for the kernels' 32-bit indices."""
    if columns > MAX_COLUMNS:
        raise ValueError(
            f"fp4kit.cuda: a row has {columns} elements; a kernel takes at most 2^32 - 1; reshape x to shorter rows"
        )


def grid(work_blocks: int, device: int, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Return the number of thread blocks to launch, at least 1."""
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


class _Struct(np.ndarray):
    """A struct of kernel arguments that CuPy passes by value, stored as an array with one element of raw bytes.

    At each launch, CuPy reads the array's __array_interface__ to find its address. NumPy creates this dict at every
    access, which takes 6 us for an array with named fields and 1.5 us for raw bytes (host of an H200, November 2026).
    This class stores the dict once.
    """

    __array_interface__: Any = None  # hides NumPy's descriptor, so that an instance can store its own value

    @classmethod
    def of(cls, memory: bytearray) -> _Struct:
        """Return a struct that shares its bytes with `memory`: later changes of `memory` change the struct."""
        plain = np.frombuffer(memory, np.dtype((np.void, len(memory))))
        struct = plain.view(cls)
        struct.__array_interface__ = plain.__array_interface__
        return struct


class _Slot(NamedTuple):
    """Memory for the arguments of one launch, in the forms that CuPy and the CUDA driver need.

    Attributes:
        memory: the bytes, which each launch overwrites.
        struct: an array that shares these bytes, for launches by CuPy.
        parameters: the address of a void*[1] that points to these bytes, for launches by the driver.
        held: the void*[1], kept alive.
    """

    memory: bytearray
    struct: _Struct
    parameters: int
    held: Any

    @classmethod
    def of(cls, size: int) -> _Slot:
        """Return a new slot for a struct of `size` bytes, all zero."""
        memory = bytearray(size)
        at = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        pointers = (ctypes.c_void_p * 1)(at)
        return cls(memory, _Struct.of(memory), ctypes.addressof(pointers), pointers)


class Launch:
    """A prepared launch: a kernel with a fixed grid and fixed sizes. Call the object with array addresses to launch.

    Args:
        function: the CuPy function of the kernel.
        blocks: the number of thread blocks.
        fields: the dtype of the struct of the kernel's arguments. Every field has 8 bytes.
        sizes: the values of the last fields, such as the shape of the matrix.
        threads: the number of threads per thread block.
    """

    __slots__ = ("_block", "_driver", "_free", "_function", "_grid", "_handle", "_pack", "_size", "_sizes")

    def __init__(
        self, function: Callable[..., None], blocks: int, fields: np.dtype, *sizes: int, threads: int = THREADS
    ) -> None:
        self._function, self._grid, self._block, self._sizes = function, (blocks,), (threads,), sizes
        # The driver's handle of the kernel, and CuPy's driver module. _by_driver sets both when it is first called.
        self._handle: int | None = None
        self._driver: Any = None
        layout = Struct(f"{len(fields.names or ())}Q")
        self._pack, self._size = layout.pack_into, layout.size
        # Slots that can be reused. A launch returns its slot at once, because the driver copies the bytes.
        self._free: list[_Slot] = []

    def __call__(self, *values: int, stream: Any = None) -> None:
        """Launch the kernel, without waiting for it."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot.of(self._size)
        self._pack(slot.memory, 0, *values, *self._sizes)
        if stream is None:
            self._function(self._grid, self._block, (slot.struct,))
        elif not self._by_driver(slot, stream):
            self._function(self._grid, self._block, (slot.struct,), stream=stream)
        self._free.append(slot)

    def _by_driver(self, slot: _Slot, stream: Any) -> bool:
        """Launch the kernel by the CUDA driver's function, which skips CuPy's conversion of arguments, and return
        True.
        """
        if self._handle is None:
            self._handle = getattr(getattr(self._function, "kernel", self._function), "ptr", 0)
            self._driver = imports.cupy().cuda.driver if self._handle else None
        driver = self._driver
        if driver is None:
            return False
        try:
            driver.launchKernel(
                self._handle, self._grid[0], 1, 1, self._block[0], 1, 1, 0, stream.ptr, slot.parameters, 0
            )
        except driver.CUDADriverError:
            return False
        return True


def address(array: Any) -> int:
    """Return the address of a CuPy array's first element, or 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Return True if every row of an array begins at a multiple of 16 bytes, so that kernels can use vector
    accesses.
    """
    return (array is None or array.data.ptr % 16 == 0) and run_bytes % 16 == 0


def as_aligned(array: Any) -> Any:
    """Return an array that is contiguous and begins at a multiple of 16 bytes: the array itself, or else a copy of
    it.
    """
    if array is None:
        return None
    array = imports.cupy().ascontiguousarray(array)
    return array if array.data.ptr % 16 == 0 else array.copy()
