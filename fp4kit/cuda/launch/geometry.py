"""The parts that all launchers share: grid sizes, launches, addresses, alignment.

Kernels stride over the grid, so results do not depend on its size.
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
BLOCKS_PER_SM = 16  # thread blocks per multiprocessor, if a launcher does not choose another limit
MAX_THREADS = 2048  # threads that run on a multiprocessor at a time
MAX_ELEMENTS = 1 << 33  # elements per launch
MAX_COLUMNS = (1 << 32) - 1  # elements per row, for recipes with blocks
UNLIMITED = 1 << 16  # thread blocks per multiprocessor: in effect no limit, so that each takes one share of the work


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(imports.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def resident_blocks(device: int) -> int:
    """Return how many thread blocks run on a device at a time if only their threads limit that."""
    return multiprocessors(device) * (MAX_THREADS // THREADS)


def check_count(elements: int) -> None:
    """Raise ValueError if a matrix has too many elements. Kernels number runs of 4 elements with 32 bits."""
    if elements > MAX_ELEMENTS:
        raise ValueError(
            f"fp4kit.cuda: a matrix has {elements} elements; a kernel takes at most {MAX_ELEMENTS} (2^33); split the"
            " first axis"
        )


def check_columns(columns: int) -> None:
    """Raise ValueError if a row is too long for blocks. Kernels number the elements of a row with 32 bits."""
    if columns > MAX_COLUMNS:
        raise ValueError(
            f"fp4kit.cuda: a row has {columns} elements; a kernel takes at most 2^32 - 1; reshape x to shorter rows"
        )


def grid(work_blocks: int, device: int, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Return the number of thread blocks to launch, at least 1.

    Args:
        work_blocks: how many thread blocks have work if each takes one share.
        per_multiprocessor: the most thread blocks per multiprocessor. If that limits the grid, thread blocks take
            several shares one after another.
    """
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


class _Struct(np.ndarray):
    """A struct of kernel arguments that CuPy passes by value: an array with one element of raw bytes.

    At each launch, CuPy reads __array_interface__, to find the address. NumPy would create that dict every time: 6 us
    for an array with named fields, 1.5 us for raw bytes (host of an H200, November 2026). This class stores it once.
    """

    __array_interface__: Any = None  # hides NumPy's descriptor, so that an instance can store its own value

    @classmethod
    def of(cls, memory: bytearray) -> _Struct:
        """Return the struct whose bytes are those of `memory`."""
        plain = np.frombuffer(memory, np.dtype((np.void, len(memory))))
        struct = plain.view(cls)
        struct.__array_interface__ = plain.__array_interface__
        return struct


class _Slot(NamedTuple):
    """Memory for the arguments of one launch.

    Attributes:
        memory: the bytes, to be written.
        struct: the same bytes, as CuPy takes them.
        parameters: the address of a void*[1] that points to the bytes, as the driver takes them.
        held: the array at `parameters`, kept alive.
    """

    memory: bytearray
    struct: _Struct
    parameters: int
    held: Any

    @classmethod
    def of(cls, size: int) -> _Slot:
        """Allocate a slot for a struct of `size` bytes."""
        memory = bytearray(size)
        at = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        pointers = (ctypes.c_void_p * 1)(at)
        return cls(memory, _Struct.of(memory), ctypes.addressof(pointers), pointers)


class Launch:
    """A kernel with a fixed grid and fixed sizes. A call passes the other arguments and launches the kernel.

    Args:
        function: the CuPy function of the kernel.
        blocks: the number of thread blocks.
        fields: the dtype of the struct of arguments. Every field has 8 bytes.
        sizes: the values of the last fields.
        threads: threads per thread block.
    """

    __slots__ = ("_block", "_driver", "_free", "_function", "_grid", "_handle", "_layout", "_sizes")

    def __init__(
        self, function: Callable[..., None], blocks: int, fields: np.dtype, *sizes: int, threads: int = THREADS
    ) -> None:
        self._function, self._grid, self._block, self._sizes = function, (blocks,), (threads,), sizes
        # The driver's handle of the kernel, and the driver. Both are found at the first launch by the driver.
        self._handle: int | None = None
        self._driver: Any = None
        self._layout = Struct(f"{len(fields.names or ())}Q")
        self._free: list[_Slot] = []  # slots for reuse: the driver has copied their bytes

    def __call__(self, *values: int, stream: Any = None) -> None:
        """Launch the kernel.

        Args:
            values: the values of the first fields.
            stream: a stream of CuPy or PyTorch; CuPy's current stream if None.
        """
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
        """Launch by the driver's function, which skips CuPy's conversion of arguments.

        Return False, without a launch, if that fails: CuPy's function has no handle, or the thread has no CUDA context
        yet.
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
    """Return the address of a CuPy array, or 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Return whether all runs of run_bytes bytes, from the start of the array on, begin at multiples of 16 bytes.

    None stands for an array that will be allocated, which begins at such a multiple.
    """
    return (array is None or array.data.ptr % 16 == 0) and run_bytes % 16 == 0


def as_aligned(array: Any) -> Any:
    """Return the array, or a copy of it unless it is contiguous and begins at a multiple of 16 bytes.

    Return None for None.
    """
    if array is None:
        return None
    array = imports.cupy().ascontiguousarray(array)
    return array if array.data.ptr % 16 == 0 else array.copy()
