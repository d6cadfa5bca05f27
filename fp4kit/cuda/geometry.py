"""What all launchers share: grids, launches, addresses, alignment. Kernels stride over the grid, so any size is correct."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import numpy as np

from fp4kit.cuda import loader

THREADS = 256
BLOCKS_PER_SM = 16
MOST_ELEMENTS = 1 << 34  # of one launch
UNLIMITED = 1 << 16  # blocks per multiprocessor where each takes one piece of the work


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return int(loader.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def check_count(elements: int) -> None:
    """Raise ValueError for a matrix whose runs of 4 elements cannot be numbered in 32 bits, as kernels do."""
    if elements > MOST_ELEMENTS:
        raise ValueError(
            f"fp4kit.cuda: a matrix of {elements} elements; a kernel takes at most {MOST_ELEMENTS} (2^34); cut the first axis"
        )


def grid(work_blocks: int, device: int, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Thread blocks to launch for work that keeps `work_blocks` busy once."""
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


class Launch:
    """A kernel with its grid and the last of its arguments, the sizes; a call adds the first ones and launches it.

    fields: dtype of the struct of arguments, all of 8 bytes. CuPy asks an array that it passes by value for its
    __array_interface__, which spells out the fields of a record: 6 us of the host's time, and under 1 us for plain bytes.
    """

    __slots__ = ("_bytes", "_function", "_grid", "_pack", "_sizes")

    def __init__(self, function: Callable[..., None], blocks: int, fields: np.dtype, *sizes: int) -> None:
        self._function, self._grid, self._sizes = function, (blocks,), sizes
        self._pack, self._bytes = Struct(f"{len(fields)}Q").pack, np.dtype((np.void, fields.itemsize))

    def __call__(self, *values: int) -> None:
        arguments = np.frombuffer(self._pack(*values, *self._sizes), self._bytes)
        self._function(self._grid, (THREADS,), (arguments,))


def address(array: Any) -> int:
    """Pointer of a CuPy array, 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Whether runs of run_bytes from the array's start all begin at multiples of 16 bytes."""
    return array.data.ptr % 16 == 0 and run_bytes % 16 == 0
