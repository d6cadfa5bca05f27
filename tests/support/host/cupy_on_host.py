"""A CuPy on the host: what fp4kit and its tests use of the module, over NumPy arrays that play the memory of a device.

Its array is no numpy.ndarray, does not become one unless asked (`get`), and takes none in arithmetic, as CuPy's. See
README.md.
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
rehearsing = False  # whether launches are only noted: libraries.py


# ---- the array ----


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """cupy.ndarray: a view of memory of a device."""

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
        """Where the array begins."""
        return MemoryPointer(self._memory, self._host.ctypes.data if self._memory.size else 0, self.device.id)

    @property
    def flags(self) -> Any:
        """Whether it is contiguous."""
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
        """Not a capsule, but what from_dlpack below takes: the memory is known to this module alone."""
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
        whole = index if any(i is Ellipsis for i in index) else (*index, ...)  # an element is a view, too
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
        """A copy on the host."""
        wait()
        return self._host.copy(order="K")

    def set(self, values: np.ndarray) -> None:
        """Copy from the host."""
        wait()
        assert self.shape == values.shape and self.dtype == values.dtype
        self._host[...] = values

    def item(self) -> Any:
        """The element of an array that has one."""
        return self.get().item()

    def tolist(self) -> Any:
        """All elements."""
        return self.get().tolist()

    def fill(self, value: Any) -> None:
        """Set every element."""
        self[...] = value

    def copy(self, order: str = "C") -> ndarray:
        """New memory with the same elements."""
        return _apply(np.array, self, order=order)


def _method(name: str) -> Callable[..., ndarray]:
    return lambda self, *arguments, **options: _apply(getattr(np.ndarray, name), self, *arguments, **options)


for _name in ("all", "any", "astype", "max", "min", "ravel", "reshape", "squeeze", "sum", "transpose", "view"):
    setattr(ndarray, _name, _method(_name))


def _bare(a: Any) -> Any:
    """NumPy's views of the arrays in an argument. Raises TypeError for an array of the host, as CuPy does."""
    if isinstance(a, ndarray):
        return a._host
    if isinstance(a, np.ndarray):
        raise TypeError(f"Unsupported type {type(a)}")
    return type(a)(map(_bare, a)) if isinstance(a, (list, tuple)) else a


def _arrays(arguments: Any) -> list[ndarray]:
    """The device's arrays among arguments."""
    if isinstance(arguments, ndarray):
        return [arguments]
    return [found for a in arguments for found in _arrays(a)] if isinstance(arguments, (list, tuple)) else []


def _quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A device gives no warnings."""
    with np.errstate(all="ignore"):
        return function(*arguments, **options)


def _apply(function: Callable[..., Any], *arguments: Any, **options: Any) -> ndarray:
    """What a function of NumPy gives of device arrays: a view where it is one, else new memory."""
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
    """Values of the host in new memory, in their own order of axes where they fill it."""
    new = ndarray(values.size, values.dtype)
    like = np.empty_like(values)
    new._host = np.ndarray(values.shape, values.dtype, new._memory.bytes, strides=like.strides)
    new._host[...] = values
    return new


# ---- the module's functions ----


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """The array itself, or a copy on the device."""
    if isinstance(a, ndarray):
        return a if dtype in (None, a.dtype) else a.astype(dtype)
    new = _placed(np.asarray(a, dtype))
    new._memory.is_input = True
    return new


def asnumpy(a: Any) -> np.ndarray:
    """A copy on the host."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def ascontiguousarray(a: ndarray) -> ndarray:
    """The array itself where it is contiguous, else a copy."""
    return a if a.flags.c_contiguous else a.copy()


def asfortranarray(a: ndarray) -> ndarray:
    """The array itself where its first axis is the innermost, else a copy that is so."""
    return a if a.flags.f_contiguous else a.copy(order="F")


def from_dlpack(a: Any) -> ndarray:
    """The array that another object exports, without a copy."""
    return a.__dlpack__().shared


def copyto(target: ndarray, source: Any) -> None:
    """Copy into an array."""
    target[...] = source


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """An array that nobody has written."""
    return ndarray(shape, dtype)


def empty_like(a: ndarray, shape: Any = None) -> ndarray:
    """An array of the dtype of another, and of its shape or a given one, that nobody has written."""
    return ndarray(a.shape if shape is None else shape, a.dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    """An array of one value."""
    new = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype)
    new.fill(value)
    return new


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """An array of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    """An array of ones."""
    return full(shape, 1, dtype)


def zeros_like(a: ndarray) -> ndarray:
    """Zeros of the shape and dtype of an array."""
    return zeros(a.shape, a.dtype)


def shape(a: Any) -> tuple[int, ...]:
    """Shape of an array."""
    return a.shape


def arange(*arguments: Any, **options: Any) -> ndarray:
    """As numpy.arange."""
    return _placed(np.arange(*arguments, **options))


def _function(function: Callable[..., Any]) -> Callable[..., ndarray]:
    return lambda *arguments, **options: _apply(function, *arguments, **options)


_SAME = "abs concatenate count_nonzero maximum moveaxis repeat rint searchsorted signbit tile where"
for _name in _SAME.split():
    globals()[_name] = _function(getattr(np, _name))
for _name in ("bool_", "uint8", "uint16", "uint32", "int64", "float16", "float32", "float64"):
    globals()[_name] = getattr(np, _name)


@contextmanager
def installed() -> Iterator[None]:
    """This module is what `import cupy` gives; fp4kit forgets that it found it."""
    found = imports.cupy
    try:
        with pytest.MonkeyPatch.context() as patch:  # not patch.dict, which forgets what is imported meanwhile
            patch.setitem(sys.modules, "cupy", sys.modules[__name__])
            yield
    finally:
        getattr(found, "cache_clear", lambda: None)()
