"""Simulate CuPy on the CPU, for tests of GPU code without a GPU: the functions that fp4kit and its tests use.

Arrays are NumPy arrays in simulated device memory. Their class is not a numpy.ndarray: as in CuPy, only `get` converts
them, and arithmetic with NumPy arrays raises TypeError. See README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host.cuda_on_host import Device, cuda
from host.device_memory import Memory, MemoryPointer, allocate, is_capturing, on_stream, wait

from fp4kit.arrays import imports

__all__ = ["cuda", "ndarray"]

__version__ = "on the host"
DLPACK_CUDA = 2
rehearsing = False  # True while launches are only recorded (libraries.py)


# ---- the array ----


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """A stand-in for cupy.ndarray: a view of simulated device memory."""

    __module__ = "cupy"
    __array_priority__ = 100
    _host: np.ndarray
    _memory: Memory
    device: Device

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, order: str = "C") -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = allocate(size) if memptr is None else memptr.mem
        start = 0 if memptr is None else memptr.ptr - memory.ptr
        self._set(memory.bytes[start : start + size].view(dtype).reshape(shape, order=order), memory, Device())

    def _set(self, host: np.ndarray, memory: Memory, device: Device) -> ndarray:
        self._host, self._memory, self.device = host, memory, device
        return self

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    T = property(lambda self: self.transpose())

    @property
    def data(self) -> MemoryPointer:
        """Return the address at which the array begins."""
        return MemoryPointer(self._memory, self._host.ctypes.data if self._memory.size else 0, self.device.id)

    @property
    def flags(self) -> Any:
        """Return the flags that say whether the array is contiguous in row-major or in column-major order."""
        return SimpleNamespace(c_contiguous=self._host.flags.c_contiguous, f_contiguous=self._host.flags.f_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": self.strides,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, self.device.id

    def __dlpack__(self, **options: Any) -> Any:
        """Return an object that this module's from_dlpack accepts in place of a DLPack capsule."""
        return SimpleNamespace(shared=self[...])

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        if out is None:
            return _apply(ufunc, *inputs, **options)
        bare, target = _bare(inputs), out[0]
        on_stream(lambda: _quietly(ufunc, *bare, out=target._host, **options))
        return target

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        own = getattr(sys.modules[__name__], function.__name__, None)
        return NotImplemented if own is None else own(*arguments, **options)

    def __getitem__(self, index: Any) -> ndarray:
        index = index if isinstance(index, tuple) else (index,)
        whole = index if any(i is Ellipsis for i in index) else (*index, ...)  # so that a single element is a view, too
        return _apply(lambda a, *bare: a[bare], self, *whole)

    def __setitem__(self, index: Any, value: Any) -> None:
        index, value = _bare(index), _bare(value)
        on_stream(lambda: _quietly(self._host.__setitem__, index, value))

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __repr__(self) -> str:
        return f"on the device: {self._host!r}"

    def get(self, *arguments: Any, **options: Any) -> np.ndarray:
        """Return a copy on the host."""
        wait()
        return self._host.copy(order="K")

    def set(self, values: np.ndarray) -> None:
        """Copy values from the host. Raise AssertionError if they have another shape or dtype."""
        wait()
        assert self.shape == values.shape and self.dtype == values.dtype
        self._host[...] = values

    def item(self) -> Any:
        """Return the element of an array with one element."""
        return self.get().item()

    def tolist(self) -> Any:
        """Return all elements as a list."""
        return self.get().tolist()

    def fill(self, value: Any) -> None:
        """Set every element to `value`."""
        self[...] = value

    def take(self, indices: ndarray, *, out: ndarray) -> ndarray:
        """Store the elements at `indices` of a 1-d array in `out`, and return `out`."""
        out[...] = self[indices]
        return out

    def copy(self, order: str = "C") -> ndarray:
        """Return a copy in new memory, in the given memory order of NumPy ("C", "F", "A" or "K")."""
        return _apply(np.array, self, order=order)


def _method(name: str) -> Callable[..., ndarray]:
    return lambda self, *arguments, **options: _apply(getattr(np.ndarray, name), self, *arguments, **options)


for _name in (
    "all",
    "any",
    "astype",
    "max",
    "min",
    "ravel",
    "reshape",
    "squeeze",
    "sum",
    "swapaxes",
    "transpose",
    "view",
):
    setattr(ndarray, _name, _method(_name))


def _bare(a: Any) -> Any:
    """Return an argument with its device arrays, nested ones included, replaced by NumPy views of their memory.

    Raises:
        TypeError: for a NumPy array, as CuPy does.
    """
    if isinstance(a, ndarray):
        return a._host
    if isinstance(a, np.ndarray):
        raise TypeError(f"Unsupported type {type(a)}")
    return type(a)(map(_bare, a)) if isinstance(a, (list, tuple)) else a


def _arrays(arguments: Any) -> list[ndarray]:
    """Return the device arrays among the arguments, nested ones included; [] if there are none."""
    if isinstance(arguments, ndarray):
        return [arguments]
    return [found for a in arguments for found in _arrays(a)] if isinstance(arguments, (list, tuple)) else []


def _quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function without NumPy's warnings, because a device gives none."""
    with np.errstate(all="ignore"):
        return function(*arguments, **options)


def _apply(function: Callable[..., Any], *arguments: Any, **options: Any) -> ndarray:
    """Apply a NumPy function to device arrays. The result shares memory with an argument if NumPy's result does."""
    bare, bare_options = _bare(arguments), {name: _bare(value) for name, value in options.items()}
    found = np.asarray(_quietly(function, *bare, **bare_options))
    given = _arrays(arguments)
    for a in given:
        if found.size and a._memory.holds(found):
            return ndarray.__new__(ndarray)._set(found, a._memory, a.device)
    with given[0].device if given else Device():
        new = _placed(found)
    if is_capturing():
        on_stream(lambda: new._host.__setitem__(..., _quietly(function, *bare, **bare_options)))
    return new


def _placed(values: np.ndarray) -> ndarray:
    """Copy host values to new device memory. The axis order is kept if the values are dense."""
    new = ndarray(values.size, values.dtype)
    like = np.empty_like(values)
    new._host = np.ndarray(values.shape, values.dtype, new._memory.bytes, strides=like.strides)
    new._host[...] = values
    return new


# ---- the module's functions ----


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """Return `a` itself if it is a device array of this dtype, or of any dtype if dtype is None.

    Otherwise copy it to new device memory.
    """
    if isinstance(a, ndarray):
        return a if dtype in (None, a.dtype) else a.astype(dtype)
    new = _placed(np.asarray(a, dtype))
    new._memory.is_input = True
    return new


def asnumpy(a: Any) -> np.ndarray:
    """Return a copy of a device array as a NumPy array; return a NumPy array unchanged."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def ascontiguousarray(a: ndarray) -> ndarray:
    """Return the array itself if it is contiguous, else a contiguous copy."""
    return a if a.flags.c_contiguous else a.copy()


def broadcast_to(a: ndarray, shape: Any) -> ndarray:
    """Return a read-only view of an array in a larger shape, with steps of 0 along repeated axes."""
    return _apply(lambda x: np.broadcast_to(x, shape), a)


def asfortranarray(a: ndarray) -> ndarray:
    """Return the array itself if it is contiguous in column-major order, else a copy in that order."""
    return a if a.flags.f_contiguous else a.copy(order="F")


def from_dlpack(a: Any) -> ndarray:
    """Return the array that another object exports, without a copy."""
    return a.__dlpack__().shared


def copyto(target: ndarray, source: Any) -> None:
    """Copy the elements of `source`, a device array or a number, into `target`."""
    target[...] = source


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Return a new array whose elements are not initialized."""
    return ndarray(shape, dtype)


def empty_like(a: ndarray, shape: Any = None) -> ndarray:
    """Return a new array with the dtype of `a`, and the shape of `a` or a given one. Elements are not initialized."""
    return ndarray(a.shape if shape is None else shape, a.dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    """Return an array filled with one value."""
    new = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype)
    new.fill(value)
    return new


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Return an array of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    """Return an array of ones."""
    return full(shape, 1, dtype)


def zeros_like(a: ndarray, shape: Any = None) -> ndarray:
    """Return zeros with the dtype of an array, and with its shape unless another shape is given."""
    return zeros(a.shape if shape is None else shape, a.dtype)


def shape(a: Any) -> tuple[int, ...]:
    """Return the shape of an array."""
    return a.shape


def arange(*arguments: Any, **options: Any) -> ndarray:
    """Return the result of numpy.arange as a device array."""
    return _placed(np.arange(*arguments, **options))


def _function(function: Callable[..., Any]) -> Callable[..., ndarray]:
    return lambda *arguments, **options: _apply(function, *arguments, **options)


_SAME = "abs clip concatenate count_nonzero maximum minimum moveaxis pad repeat rint searchsorted signbit tile where"
for _name in _SAME.split():
    globals()[_name] = _function(getattr(np, _name))
for _name in ("bool_", "uint8", "uint16", "uint32", "int64", "float16", "float32", "float64"):
    globals()[_name] = getattr(np, _name)


@contextmanager
def installed() -> Iterator[None]:
    """Make `import cupy` return this module while the context lasts.

    At the end, fp4kit forgets which cupy it imported. If fp4kit has imported another cupy before, it keeps using that
    one.
    """
    found = imports.cupy
    try:
        with pytest.MonkeyPatch.context() as patch:  # not patch.dict, which would drop modules imported meanwhile
            patch.setitem(sys.modules, "cupy", sys.modules[__name__])
            yield
    finally:
        getattr(found, "cache_clear", lambda: None)()
