"""How prepared calls handle the arrays of a library: addresses, new arrays, streams. CuPy's, and PyTorch's tensors on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fp4kit import interop
from fp4kit.libraries import torch_arrays

FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)


class Memory(NamedTuple):
    """How a prepared call handles the arrays of a library: where they are, new ones, and the stream of its launches.

    Functions of C where that can be: one of Python takes a quarter of a microsecond of the host of an H200 (November 2026).
    address(array). maker(shape, dtype, zeros): makes such arrays, () each; dtype is NumPy's. clear(array, stream): a float32
    becomes 0. stream(): the current one.
    """

    address: Callable[[Any], int]
    maker: Callable[[tuple[int, ...], np.dtype, bool], Callable[[], Any]]
    clear: Callable[[Any, Any], None]
    stream: Callable[[], Any]


def memory_of(a: Any) -> Memory:
    """Of a CuPy array or a tensor of PyTorch."""
    return _cupy_memory() if type(a).__module__ == "cupy" else _torch_memory(a.device)


def _cupy_memory() -> Memory:
    cupy = interop.cupy()

    def maker(shape: tuple[int, ...], dtype: np.dtype, zeros: bool) -> Callable[[], Any]:
        return partial(cupy.zeros if zeros else cupy.ndarray, shape, dtype)

    def clear(a: Any, stream: Any) -> None:
        a.data.memset_async(0, FLOAT32.itemsize)

    return Memory(attrgetter("data.ptr"), maker, clear, cupy.cuda.get_current_stream)


@cache
def _torch_memory(device: Any) -> Memory:
    set_to = interop.cupy().cuda.runtime.memsetAsync

    def clear(a: Any, stream: Any) -> None:
        set_to(a.data_ptr(), 0, FLOAT32.itemsize, stream.ptr)

    return Memory(torch_arrays.address(), partial(torch_arrays.maker, device), clear, torch_arrays.streams_of(device))
