"""Launcher of pack and unpack: 4-bit codes between one and two a byte, on the current stream."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, Launch, aligned, grid

_ARGUMENTS = np.dtype([("in", "u8"), ("out", "u8"), ("bytes", "i8")])
_BYTES_PER_THREAD = 32  # of packed codes: four loads


def source(whole: bool = True) -> str:
    """Instantiation; whole: arrays begin at multiples of 16 bytes."""
    return instantiation("pack_codes", kAligned=whole)


@cache
def _function(kernel: str, whole: bool, device: int) -> Any:
    return loader.function(source(whole), kernel, device)


@lru_cache(CACHE_SIZE)
def _launch(kernel: str, whole: bool, packed_bytes: int, device: int) -> Launch:
    blocks = -(-packed_bytes // (_BYTES_PER_THREAD * THREADS))
    return Launch(_function(kernel, whole, device), grid(blocks, device, UNLIMITED), _ARGUMENTS, packed_bytes)


def _run(kernel: str, given: Any, out: Any, packed_bytes: int) -> None:
    launch = _launch(kernel, aligned(given, 16) and aligned(out, 16), packed_bytes, out.device.id)
    launch(given.data.ptr, out.data.ptr)


def pack(codes: Any, packed: Any) -> None:
    """Contiguous codes, one a byte, into packed, two a byte. The high nibble of a code is not looked at."""
    _run("pack_codes_kernel", codes, packed, packed.size)


def unpack(packed: Any, codes: Any) -> None:
    """Contiguous packed codes, two a byte, into codes, one a byte."""
    _run("unpack_codes_kernel", packed, codes, packed.size)
