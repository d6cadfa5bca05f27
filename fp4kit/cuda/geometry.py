"""What all launchers share: the size of a grid, addresses, alignment. Kernels stride over the grid, so any size is correct."""

from __future__ import annotations

from functools import cache
from typing import Any

from fp4kit.cuda import loader

THREADS = 256
BLOCKS_PER_SM = 16
UNLIMITED = 1 << 16  # blocks per multiprocessor where each takes one piece of the work


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return int(loader.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def grid(work_blocks: int, device: int, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Thread blocks to launch for work that keeps `work_blocks` busy once."""
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


def address(array: Any) -> int:
    """Pointer of a CuPy array, 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Whether runs of run_bytes from the array's start all begin at multiples of 16 bytes."""
    return array.data.ptr % 16 == 0 and run_bytes % 16 == 0
