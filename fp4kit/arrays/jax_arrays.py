"""Convert results to JAX arrays, and collect the facts about JAX arguments that the call cache's keys contain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fp4kit.arrays import imports


@contextmanager
def call_context(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the function that converts results (NumPy or CuPy arrays) to JAX arrays on the device of the JAX array
    x.
    """

    yield lambda array: giver(x)(array)


def giver(x: Any) -> Callable[[Any], Any]:
    """Return a function that converts a NumPy or CuPy array to a JAX array on the device of the JAX array x."""
    device, is_committed = x.device, getattr(x, "committed", True)

    def give(array: Any) -> Any:
        if is_committed:
            return array_of(array, device)
        with sys.modules["jax"].default_device(device):
            return array_of(array)

    return give


def facts(a: Any) -> Hashable:
    """Return a hashable tuple of the facts about a JAX array that the checks of a call depend on, such as its shape."""
    kind = type(a)
    if kind.__name__ != "ArrayImpl" or a.is_deleted() or len(a.devices()) != 1 or a.device.platform != "cpu":
        raise TypeError(kind)
    view = np.asarray(a)  # waits for the values of `a`; the view has the strides of its layout
    return kind, a.shape, a.dtype, view.strides, view.flags.num, a.device, getattr(a, "committed", True)


def array_of(array: Any, device: Any = None) -> Any:
    """Return a JAX array made from a NumPy or CuPy array."""
    if isinstance(array, np.ndarray):
        copy = np.array(array)  # JAX may keep the memory, so no other array may share it
        return sys.modules["jax"].device_put(copy, device)
    return _device_array(array) if type(array).__module__ == "cupy" else array


def _device_array(array: Any) -> Any:
    """Return a JAX array on the memory of a CuPy array, or on that of a contiguous copy if it is not contiguous."""
    # The elements are exported as integers and then viewed in their dtype by JAX, because CuPy does not export every
    # dtype.
    jax: Any = sys.modules["jax"]
    array = imports.cupy().ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes a row of a 0-d array
    bits = jax.dlpack.from_dlpack(array.view(f"u{array.itemsize}"))
    return bits if array.dtype == np.uint8 else jax.lax.bitcast_convert_type(bits, array.dtype)
