"""Launcher of pack and unpack: 4-bit codes between one and two a byte, on the current stream."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import THREADS, UNLIMITED, aligned, grid
from fp4kit.cuda.stub import instantiation

_ARGUMENTS = np.dtype([("in", "u8"), ("out", "u8"), ("bytes", "i8")])
_BYTES_PER_THREAD = 32  # of packed codes: four loads


def source(whole: bool = True) -> str:
    """Instantiation; whole: arrays begin at multiples of 16 bytes."""
    return instantiation("pack_codes", kAligned=whole)


@cache
def _function(kernel: str, whole: bool, device: int) -> Any:
    return loader.function(source(whole), kernel, device)


def _launch(kernel: str, given: Any, out: Any, packed_bytes: int) -> None:
    device = out.device.id
    call = _function(kernel, aligned(given, 16) and aligned(out, 16), device)
    blocks = -(-packed_bytes // (_BYTES_PER_THREAD * THREADS))
    call((grid(blocks, device, UNLIMITED),), (THREADS,), (np.array([(given.data.ptr, out.data.ptr, packed_bytes)], _ARGUMENTS),))


def pack(codes: Any, packed: Any) -> None:
    """Contiguous codes, one a byte, into packed, two a byte. The high nibble of a code is not looked at."""
    _launch("pack_codes_kernel", codes, packed, packed.size)


def unpack(packed: Any, codes: Any) -> None:
    """Contiguous packed codes, two a byte, into codes, one a byte."""
    _launch("unpack_codes_kernel", packed, codes, packed.size)
