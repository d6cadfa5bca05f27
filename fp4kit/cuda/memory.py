"""How prepared calls handle the arrays of a library: addresses, new arrays, streams. CuPy's, and PyTorch's tensors on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from fp4kit import interop
from fp4kit.libraries import torch_arrays

FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)


class Memory(NamedTuple):
    """How a prepared call handles the arrays of a library: where they are, new ones, and the stream of its launches.

    empty, zeros: of a shape and a NumPy dtype. clear: makes a float32 0. stream(): the current one.
    """

    address: Callable[[Any], int]
    empty: Callable[[tuple[int, ...], np.dtype], Any]
    zeros: Callable[[tuple[int, ...], np.dtype], Any]
    clear: Callable[[Any, Any], None]
    stream: Callable[[], Any]

    def address_of(self, a: Any) -> int:
        """Pointer of an array, 0 for None."""
        return 0 if a is None else self.address(a)


def memory_of(a: Any) -> Memory:
    """Of a CuPy array or a tensor of PyTorch."""
    return _cupy_memory() if type(a).__module__ == "cupy" else _torch_memory(a.device)


def _cupy_memory() -> Memory:
    cupy = interop.cupy()
    clear = lambda a, stream: a.data.memset_async(0, FLOAT32.itemsize)  # noqa: E731
    return Memory(lambda a: a.data.ptr, cupy.ndarray, cupy.zeros, clear, cupy.cuda.get_current_stream)


@cache
def _torch_memory(device: Any) -> Memory:
    empty, zeros = (torch_arrays.maker(device, zeros) for zeros in (False, True))
    set_to = interop.cupy().cuda.runtime.memsetAsync
    clear = lambda a, stream: set_to(a.data_ptr(), 0, FLOAT32.itemsize, stream.ptr)  # noqa: E731
    return Memory(lambda a: a.data_ptr(), empty, zeros, clear, partial(torch_arrays.stream_of, device))
