"""Launch the two kernels of pack_codes.cu: pack 4-bit codes, stored one per byte, to two per byte; or unpack them."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, aligned, grid

_ARGUMENTS = np.dtype([("in", "u8"), ("out", "u8"), ("bytes", "i8")])
_BYTES_PER_THREAD = 32  # bytes of packed codes; a thread loads them in four parts


def source(aligned_runs: bool = True) -> str:
    """Return the C++ text that instantiates both kernels."""
    return instantiation("pack_codes", kAligned=aligned_runs)


@cache
def _function(kernel: str, aligned_runs: bool, device: int) -> Any:
    """Return one of the two compiled kernels as a CuPy function on a device."""
    return loader.function(source(aligned_runs), kernel, device)


@lru_cache(CACHE_SIZE)
def _launch(kernel: str, aligned_runs: bool, packed_bytes: int, device: int) -> Launch:
    """Return the prepared launch of one of the two kernels for `packed_bytes` bytes of packed codes."""
    blocks = -(-packed_bytes // (_BYTES_PER_THREAD * THREADS))
    return Launch(_function(kernel, aligned_runs, device), grid(blocks, device, UNLIMITED), _ARGUMENTS, packed_bytes)


def _run(kernel: str, given: Any, out: Any, packed_bytes: int) -> None:
    """Launch one of the two kernels, which reads `given` and writes `out`, on the current stream."""
    launch = _launch(kernel, aligned(given, 16) and aligned(out, 16), packed_bytes, out.device.id)
    launch(given.data.ptr, out.data.ptr)


def pack(codes: Any, packed: Any) -> None:
    """Pack 4-bit codes, one per byte, into `packed`, two per byte."""
    # `codes` has twice as many elements as `packed`, which must not be empty.
    _run("pack_codes_kernel", codes, packed, packed.size)


def unpack(packed: Any, codes: Any) -> None:
    """Unpack 4-bit codes, two per byte, into `codes`, one per byte."""
    # `codes` has twice as many elements as `packed`, which must not be empty.
    _run("unpack_codes_kernel", packed, codes, packed.size)
