"""JAX: arrays of what calls on its arrays give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fp4kit.arrays import imports


@contextmanager
def at_home(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Calls on x run as they do; gives what makes arrays on the device of x, which JAX may move elsewhere if it may
    move x.
    """

    yield lambda array: giver(x)(array)


def giver(x: Any) -> Callable[[Any], Any]:
    """Return a function that makes arrays on the device of x, which JAX may move elsewhere only if it may move x."""
    device, is_committed = x.device, getattr(x, "committed", True)

    def give(array: Any) -> Any:
        if is_committed:
            return array_of(array, device)
        with sys.modules["jax"].default_device(device):
            return array_of(array)

    return give


def facts(a: Any) -> Hashable:
    """Return all that the checks of a call depend on, for an array of JAX on one device of the host; TypeError for
    others.
    """
    kind = type(a)
    if kind.__name__ != "ArrayImpl" or a.is_deleted() or len(a.devices()) != 1 or a.device.platform != "cpu":
        raise TypeError(kind)
    view = np.asarray(a)  # waits for the values; its strides are those of the array's layout
    return kind, a.shape, a.dtype, view.strides, view.flags.num, a.device, getattr(a, "committed", True)


def array_of(array: Any, device: Any = None) -> Any:
    """An array with the values of a NumPy array, on a device, or on the memory of a CuPy array; anything else as it
    is.
    """
    if isinstance(array, np.ndarray):
        copy = np.array(array)  # JAX may keep the memory, which no other array shall have
        return sys.modules["jax"].device_put(copy, device)
    return _device_array(array) if type(array).__module__ == "cupy" else array


def _device_array(array: Any) -> Any:
    """Through DLPack, which orders the streams; as integers, because CuPy does not export every dtype."""
    jax: Any = sys.modules["jax"]
    array = imports.cupy().ascontiguousarray(array).reshape(array.shape)  # of a number it makes a row
    bits = jax.dlpack.from_dlpack(array.view(f"u{array.itemsize}"))
    return bits if array.dtype == np.uint8 else jax.lax.bitcast_convert_type(bits, array.dtype)
