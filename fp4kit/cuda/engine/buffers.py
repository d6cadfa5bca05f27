"""Allocate arrays, read addresses and find streams for cached calls, with CuPy arrays or PyTorch tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports, returns

FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
# The most bytes of arrays that share one allocation. It is small, because each array keeps the whole allocation alive.
_MAX_SHARED_BYTES = 1 << 20
_ALIGNMENT = 256  # bytes; arrays in a shared allocation begin at its multiples, as separate allocations do


class NewArray(NamedTuple):
    """The description of an array that a call allocates.

    Attributes:
        shape: the shape of the array.
        dtype: its NumPy dtype, also for a PyTorch tensor.
        zeros: True to fill the array with zeros; False to leave it uninitialized.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    zeros: bool = False


class DeviceArrayAccess(NamedTuple):
    """The functions with which a cached call handles arrays of CuPy or of PyTorch.

    Functions that are implemented in C are used where possible, because a call to a Python function takes 0.25 us (host
    of an H200, November 2026).

    Attributes:
        address: address(array) returns the address of the array's first element.
        maker: maker(descriptions) returns a function without arguments that allocates one new array per NewArray.
        clear: clear(array, stream) sets a float32 array with one element to 0 on a stream.
        stream: stream() returns the current stream.
    """

    address: Callable[[Any], int]
    maker: Callable[[Sequence[NewArray]], Callable[[], list[Any]]]
    clear: Callable[[Any, Any], None]
    stream: Callable[[], Any]


def library_of(a: Any) -> DeviceArrayAccess:
    """Return the DeviceArrayAccess for the library of an array: CuPy or PyTorch."""
    return _cupy_library() if type(a).__module__ == "cupy" else _torch_library(a.device)


def _cupy_library() -> DeviceArrayAccess:
    """Return the DeviceArrayAccess of CuPy."""

    def clear(a: Any, stream: Any) -> None:
        """Set a float32 array with one element to 0 on the current stream, which `stream` must be."""
        a.data.memset_async(0, FLOAT32.itemsize)

    return DeviceArrayAccess(attrgetter("data.ptr"), _cupy_maker, clear, imports.cupy().cuda.get_current_stream)


def _cupy_maker(wanted: Sequence[NewArray]) -> Callable[[], list[Any]]:
    """Return a function without arguments that returns a list of new CuPy arrays, one per description in `wanted`."""
    # If there are several arrays, of at most _MAX_SHARED_BYTES (1 MiB) together, they share one allocation, because
    # allocating memory takes half of the time that it takes to make an array.
    cupy = imports.cupy()
    sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype, _ in wanted]
    if len(wanted) == 1 or sum(sizes) > _MAX_SHARED_BYTES:
        make = [partial(cupy.zeros if zeros else cupy.ndarray, shape, dtype) for shape, dtype, zeros in wanted]
        return lambda: [new() for new in make]
    places = [(new.shape, new.dtype, start) for new, start in zip(wanted, accumulate(sizes, initial=0), strict=False)]
    cleared = [i for i, new in enumerate(wanted) if new.zeros]
    allocate, array, size = cupy.cuda.alloc, _array_at(cupy), sum(sizes)

    def shared() -> list[Any]:
        """Allocate all arrays in one piece of memory, set the arrays of `cleared` to 0, and return the arrays."""
        memory = allocate(size)
        made = [array(shape, dtype, memory + start) for shape, dtype, start in places]
        for i in cleared:
            made[i].data.memset_async(0, made[i].nbytes)
        return made

    return shared


def _array_at(cupy: Any) -> Callable[..., Any]:
    """Return a fast equivalent of the class cupy.ndarray: a function of (shape, dtype, memory) that makes an array."""
    kind = cupy.ndarray
    new = kind.__mro__[1].__new__

    def array(shape: tuple[int, ...], dtype: np.dtype, memory: Any) -> Any:
        """Return a CuPy array that begins at `memory`, a pointer into an allocation, which the array keeps alive."""
        made = new(kind)
        made._init(shape, dtype, memory)
        return made

    memory = cupy.cuda.alloc(_ALIGNMENT) + 8
    facts = attrgetter(
        "shape", "dtype", "strides", "size", "nbytes", "flags.c_contiguous", "data.ptr", "data.device_id", "base"
    )
    for shape, dtype in (((2, 3), FLOAT32), ((), UINT8)):
        try:
            made = array(shape, dtype, memory)
            if type(made) is not kind or facts(made) != facts(kind(shape, dtype, memory)):
                return kind
        except (AttributeError, TypeError, ValueError):
            return kind
    return array


@cache
def _torch_library(device: Any) -> DeviceArrayAccess:
    """Return the DeviceArrayAccess of PyTorch tensors on a device."""
    set_to = imports.cupy().cuda.runtime.memsetAsync

    def maker(wanted: Sequence[NewArray]) -> Callable[[], list[Any]]:
        """Return a function without arguments that returns a list of new tensors, one per description in `wanted`."""
        make = [returns.maker(device, *new) for new in wanted]
        return lambda: [new() for new in make]

    def clear(a: Any, stream: Any) -> None:
        """Set a float32 tensor with one element to 0 on a stream."""
        set_to(a.data_ptr(), 0, FLOAT32.itemsize, stream.ptr)

    return DeviceArrayAccess(returns.address(), maker, clear, returns.streams_of(device))
