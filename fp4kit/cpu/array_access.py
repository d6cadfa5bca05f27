"""Read addresses and create arrays of NumPy, PyTorch and JAX in host memory, for cached calls (cached_calls.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import returns
from fp4kit.cpu import buffers
from fp4kit.cpu.library import address

_FLOAT32 = np.dtype(np.float32)


class ArrayAccess(NamedTuple):
    """The functions by which a cached call handles the arrays of one library.

    Attributes:
        address: address(array) returns the address of the array's first element, or None if the argument is None.
        maker: maker(shape, dtype, reused) returns a function without arguments that makes a new uninitialized array.
            dtype is a NumPy dtype. If reused is True, the memory of a large array is reused after it is freed (see
            cpu/buffers.py).
        is_float32: is_float32(array) returns True for a contiguous, aligned float32 array, which the C library can read
            in place.
        to_bytes: to_bytes(array) returns the bytes of the array's elements in row-major order.
        move_last: move_last(array, axis) returns a view whose last axis is moved to `axis`, or the array itself if
            `axis` is already the last one.
        result: result(array) converts an array from a maker to the array that the caller gets. The field is None if no
            conversion is needed.
    """

    address: Callable[[Any], int | None]
    maker: Callable[[tuple[int, ...], np.dtype, bool], Callable[[], Any]]
    is_float32: Callable[[Any], bool]
    to_bytes: Callable[[Any], bytes]
    move_last: Callable[[Any, int], Any]
    result: Callable[[Any], Any] | None

    def amax_pointer(self, amax: Any) -> Any:
        """Return a pointer to the caller's tensor_amax, for the C library."""
        if isinstance(amax, (float, np.floating)):
            return ctypes.byref(ctypes.c_float(float(amax)))
        return self.address(amax) if self.is_float32(amax) else None


def access_to(array: Any) -> ArrayAccess:
    """Return the ArrayAccess for the library (NumPy, PyTorch or JAX) of an array in host memory."""
    if isinstance(array, np.ndarray):
        return NUMPY
    return _torch() if isinstance(array, returns.tensor_type()) else _jax(array)


def _is_float32(a: np.ndarray) -> bool:
    """Return whether a NumPy array is a contiguous, aligned float32 array."""
    return a.dtype == _FLOAT32 and a.flags.c_contiguous and a.flags.aligned


def _numpy_maker(shape: tuple[int, ...], dtype: np.dtype, reused: bool) -> Callable[[], Any]:
    """Return a function without arguments that makes a new uninitialized NumPy array of this shape and dtype."""
    return partial(buffers.empty if reused else np.empty, shape, dtype)


def _move_last(a: Any, axis: int) -> Any:
    """Return a view of an array with the last axis moved to `axis`, or the array itself if `axis` is the last one."""
    return a if axis == a.ndim - 1 else np.moveaxis(a, -1, axis)


NUMPY = ArrayAccess(address, _numpy_maker, _is_float32, np.ndarray.tobytes, _move_last, None)


@cache
def _torch() -> ArrayAccess:
    """Return the ArrayAccess for PyTorch tensors in host memory."""
    pointer, float32 = returns.address(), returns.dtype_named("float32")

    def address_of(a: Any) -> int | None:
        return None if a is None else pointer(a)

    def maker(shape: tuple[int, ...], dtype: np.dtype, reused: bool) -> Callable[[], Any]:
        if reused and prod(shape) * dtype.itemsize >= buffers.MIN_BYTES:
            return lambda: returns.tensor_of(buffers.empty(shape, dtype))
        return returns.maker(returns.host_device(), shape, dtype, False)

    def is_float32(a: Any) -> bool:
        return bool(a.dtype is float32 and a.is_contiguous() and not pointer(a) % _FLOAT32.alignment)

    def to_bytes(a: Any) -> bytes:
        return bytes(a.detach().numpy().tobytes())

    def move_last(a: Any, axis: int) -> Any:
        return a if axis == a.ndim - 1 else a.movedim(-1, axis)

    return ArrayAccess(address_of, maker, is_float32, to_bytes, move_last, None)


def _jax(like: Any) -> ArrayAccess:
    """Return the ArrayAccess for JAX arrays in host memory."""

    def address_of(a: Any) -> int | None:
        return address(a if a is None else np.asarray(a))

    def is_float32(a: Any) -> bool:
        return _is_float32(np.asarray(a))

    def to_bytes(a: Any) -> bytes:
        return np.asarray(a).tobytes()

    return ArrayAccess(address_of, _numpy_maker, is_float32, to_bytes, _move_last, returns.giver(like))
