"""What all launchers share: grids, launches, addresses, alignment. Kernels stride over the grid, so any size is
correct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports

THREADS = 256
BLOCKS_PER_SM = 16
MAX_THREADS = 2048  # of a multiprocessor
MAX_ELEMENTS = 1 << 33  # of one launch
MAX_COLUMNS = (1 << 32) - 1  # of a row of blocks
UNLIMITED = 1 << 16  # blocks per multiprocessor where each takes one piece of the work


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return int(imports.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def resident_blocks(device: int) -> int:
    """Thread blocks that a device runs at a time, where nothing but their threads limits it."""
    return multiprocessors(device) * (MAX_THREADS // THREADS)


def check_count(elements: int) -> None:
    """Raise ValueError for a matrix whose runs of 4 elements cannot be numbered in 32 bits, as kernels do."""
    if elements > MAX_ELEMENTS:
        raise ValueError(
            f"fp4kit.cuda: a matrix of {elements} elements; a kernel takes at most {MAX_ELEMENTS} (2^33); cut the"
            " first axis"
        )


def check_columns(columns: int) -> None:
    """Raise ValueError for a row of blocks whose elements cannot be numbered in 32 bits, as kernels do."""
    if columns > MAX_COLUMNS:
        raise ValueError(
            f"fp4kit.cuda: a row of {columns} elements; a kernel takes at most 2^32 - 1; reshape x to shorter rows"
        )


def grid(work_blocks: int, device: int, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Thread blocks to launch for work that keeps `work_blocks` busy once."""
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


class _Struct(np.ndarray):
    """A struct that CuPy passes by value: one element of plain bytes, whose interface is made once.

    CuPy asks for the __array_interface__ of the array in each launch, only for its address. NumPy would make it anew: 6
    us of the host's time where it has to spell out the fields of a record, 1.5 us for plain bytes (the host of an H200,
    November 2026).
    """

    __array_interface__: Any = None  # in the place of NumPy's descriptor, so that an instance can have its own

    @classmethod
    def of(cls, memory: bytearray) -> _Struct:
        """The struct in this memory."""
        plain = np.frombuffer(memory, np.dtype((np.void, len(memory))))
        struct = plain.view(cls)
        struct.__array_interface__ = plain.__array_interface__
        return struct


class _Slot(NamedTuple):
    """Memory of one launch's arguments: to be written, as CuPy takes them, and where the driver finds their address."""

    memory: bytearray
    struct: _Struct
    parameters: int  # address of a void*[1]
    held: Any

    @classmethod
    def of(cls, size: int) -> _Slot:
        """Of a struct of some bytes."""
        memory = bytearray(size)
        at = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        pointers = (ctypes.c_void_p * 1)(at)
        return cls(memory, _Struct.of(memory), ctypes.addressof(pointers), pointers)


class Launch:
    """A kernel with its grid and the last of its arguments, the sizes; a call adds the first ones and launches it.

    fields: dtype of the struct of arguments, all of 8 bytes. threads: of a block.
    """

    __slots__ = ("_block", "_driver", "_free", "_function", "_grid", "_handle", "_layout", "_sizes")

    def __init__(
        self, function: Callable[..., None], blocks: int, fields: np.dtype, *sizes: int, threads: int = THREADS
    ) -> None:
        self._function, self._grid, self._block, self._sizes = function, (blocks,), (threads,), sizes
        self._handle: int | None = None  # the driver's, and the driver: known when it is first wanted
        self._driver: Any = None
        self._layout = Struct(f"{len(fields.names or ())}Q")
        self._free: list[_Slot] = []  # memory that no thread is using, since the driver copied it

    def __call__(self, *values: int, stream: Any = None) -> None:
        """stream: where to, CuPy's or PyTorch's; CuPy's current one if None."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot.of(self._layout.size)
        self._layout.pack_into(slot.memory, 0, *values, *self._sizes)
        if stream is None:
            self._function(self._grid, self._block, (slot.struct,))
        elif not self._by_driver(slot, stream):
            self._function(self._grid, self._block, (slot.struct,), stream=stream)
        self._free.append(slot)

    def _by_driver(self, slot: _Slot, stream: Any) -> bool:
        """Without what CuPy's call does for arguments of any kind; False where a thread has no context yet."""
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
    """Pointer of a CuPy array, 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Return whether runs of run_bytes from the array's start all begin at multiples of 16 bytes.

    None stands for an array that is allocated later, which begins at such a multiple.
    """
    return (array is None or array.data.ptr % 16 == 0) and run_bytes % 16 == 0


def as_aligned(array: Any) -> Any:
    """A contiguous array at a multiple of 16 bytes, copied where it is not; None stays."""
    if array is None:
        return None
    array = imports.cupy().ascontiguousarray(array)
    return array if array.data.ptr % 16 == 0 else array.copy()
