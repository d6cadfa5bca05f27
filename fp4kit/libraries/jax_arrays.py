"""JAX: arrays of what calls on its arrays give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fp4kit import interop


@contextmanager
def at_home(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Calls on x run as they do; gives what makes arrays on the device of x."""
    jax = sys.modules["jax"]

    def give(array: Any) -> Any:
        if isinstance(array, np.ndarray):
            return jax.device_put(np.array(array), x.device)  # JAX may keep the memory, which no other array shall have
        return _device_array(jax, array) if type(array).__module__ == "cupy" else array

    yield give


def _device_array(jax: Any, array: Any) -> Any:
    """Through DLPack, which orders the streams; as integers, because CuPy does not export every dtype."""
    array = interop.cupy().ascontiguousarray(array)
    bits = jax.dlpack.from_dlpack(array.view(f"u{array.itemsize}"))
    return bits if array.dtype == np.uint8 else jax.lax.bitcast_convert_type(bits, array.dtype)
