"""Cache calls. A repeated call then skips the checks, which take longer than the work itself if arrays are small.

- Key: everything that the checks and the work depend on, except values. For each array, these are its facts: type,
  shape, dtype, strides, device and alignment. All other arguments are part of the key as they are. If one call passes
  its checks, every call with an equal key passes them too.
- Cached call: a function that an engine makes for a key (cuda/engine/cached_calls.py, cpu/cached_calls.py). It takes
  the arrays and returns the result, or None if it cannot compute this call.
- Driver: the function that computes a parsed call. It runs if there is no cached call or the cached call returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any

import numpy as np

from fp4kit.arrays import imports, jax_arrays, torch_arrays
from fp4kit.quantized.container import Quantized

MAX_CALLS = 256  # the largest number of entries; adding another one first clears the cache
Key = tuple[Hashable, ...]
_UNKNOWN: Any = object()
# The cached call of each key. None records that the engine cannot make one, so that it does not try again.
_CALLS: dict[Key, Callable[..., Any] | None] = {}
# True if only the specification computes on NumPy arrays, as within fp4kit.specification().
specification_only: ContextVar[bool] = ContextVar("specification_only", default=False)


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Look up a call of op. Return the pair (key, cached call), in which either may be None.

    There are three results:

    - (key, None): the call is the first with its key. The caller passes the key to run_first.
    - (key, cached call): the call is cached.
    - (None, None): there is no cached call and none is to be stored. Either the call cannot be cached, or an earlier
      call with this key found that no engine can make one, or the call is on the host within `with
      fp4kit.specification()`.

    Args:
        op: the public function.
        arrays: the array arguments: arrays of NumPy, CuPy, PyTorch or JAX, or Quantized of such arrays, all of one
            library. After the first, an entry may also be None if it is not given, or on the host a float (a
            tensor_amax). With any other entry the call cannot be cached.
        others: all other arguments that a check depends on.
    """
    x = arrays[0]
    kind = type(x)
    try:
        facts_of, on_host = _facts_function(x.packed if kind is Quantized else x)
        if on_host and specification_only.get():
            return None, None
        current_device = None if on_host else imports.cupy().cuda.runtime.getDevice()
        facts = [None if a is None else _facts(a, facts_of) if type(a) is Quantized else facts_of(a) for a in arrays]
        key = (op, current_device, others, *facts, *map(type, others))
        cached = _CALLS.get(key, _UNKNOWN)
        return (key, None) if cached is _UNKNOWN else (key if cached else None, cached)
    except (AttributeError, TypeError, RuntimeError):
        return None, None  # an array of another library, an array without memory, or an argument that is not hashable


def run_first(
    key: Key | None, call: Callable[..., Any] | None, arguments: tuple[Any, ...], driver: Callable[[], Any]
) -> Any:
    """Compute the first call with a key, store its cached call for later calls, and return the result.

    The new cached call computes the result. If there is none or it returns None, the driver does. If an error is
    raised, nothing is stored.

    Args:
        key: the key, as find returned it; None to store nothing.
        call: the new cached call; None if no engine can make one. None is stored too, so that later calls do not try
            again.
        arguments: the arguments of the cached call.
        driver: the function without arguments that computes the call.
    """
    result = None if call is None else call(*arguments)
    if result is None:
        result = driver()
    if key is not None:
        if len(_CALLS) >= MAX_CALLS:
            _CALLS.clear()
        _CALLS[key] = call
    return result


def _facts(q: Quantized, facts_of: Callable[[Any], Hashable]) -> Hashable:
    """Return the facts of a Quantized that are part of a key.

    They are its shape, dtype, axis, recipe and scale layout, and the facts of its arrays. The result is hashable.

    facts_of: a function that returns the facts of one library's arrays and raises TypeError for anything else.
    """
    scales, tensor_scale, amax = q.block_scale, q.tensor_scale, q.tensor_amax
    parts = facts_of(q.packed), scales is None or facts_of(scales), tensor_scale is None or facts_of(tensor_scale)
    return q.shape, q.dtype, q.axis, q.recipe, q.scale_layout, parts, amax is None or facts_of(amax)


def _facts_function(a: Any) -> tuple[Callable[[Any], Hashable], bool]:
    """Return the pair (function, is_host) for the library of the array `a`.

    function(array) returns the facts (shape, dtype, strides, ...) of an array of that library, and raises TypeError or
    AttributeError for anything else. is_host is True if `a` is in host memory. Raise TypeError if `a` is None.
    """
    kind = type(a)
    if kind is np.ndarray:
        return _numpy_facts, True
    if kind.__module__ == "cupy":
        return _cupy_facts, False
    if a is None:
        raise TypeError(kind)
    if getattr(a, "is_cuda", False):
        return torch_arrays.facts(), False
    return (_torch_host_facts if getattr(a, "is_cpu", False) else jax_arrays.facts), True


def _torch_host_facts(a: Any) -> Hashable:
    """Return the facts of a PyTorch tensor in host memory. For a float or np.float32, return the name of its type.

    A float is a tensor_amax, whose value is not part of the key. Raise TypeError or AttributeError for anything else.
    """
    kind = type(a)
    return kind.__name__ if kind is float or kind is np.float32 else torch_arrays.facts(True)(a)


def _cupy_facts(a: Any) -> Hashable:
    """Return the facts of a CuPy array: type, shape, dtype, strides, alignment to 16 bytes, and device.

    Raise TypeError for anything else.
    """
    kind = type(a)
    if kind.__module__ != "cupy":
        raise TypeError(kind)
    memory = a.data
    return kind, a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _numpy_facts(a: Any) -> Hashable:
    """Return the facts of a NumPy array. For a float or np.float32 (a tensor_amax), return the name of its type.

    Raise TypeError for anything else.
    """
    if type(a) in (float, np.float32):  # an amax, whose value neither the checks nor the cached call depend on
        return type(a).__name__
    if type(a) is not np.ndarray:
        raise TypeError(type(a))
    return np.ndarray, a.shape, a.dtype, a.strides, a.flags.num  # flags: alignment and writability
