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
    """Look up a call of op."""
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
    """Compute the first call with a key, store its cached call for later calls, and return the result."""
    result = None if call is None else call(*arguments)
    if result is None:
        result = driver()
    if key is not None:
        if len(_CALLS) >= MAX_CALLS:
            _CALLS.clear()
        _CALLS[key] = call
    return result


def _facts(q: Quantized, facts_of: Callable[[Any], Hashable]) -> Hashable:
    """Return the facts of a Quantized that are part of a key."""
    scales, tensor_scale, amax = q.block_scale, q.tensor_scale, q.tensor_amax
    parts = facts_of(q.packed), scales is None or facts_of(scales), tensor_scale is None or facts_of(tensor_scale)
    return q.shape, q.dtype, q.axis, q.recipe, q.scale_layout, parts, amax is None or facts_of(amax)


def _facts_function(a: Any) -> tuple[Callable[[Any], Hashable], bool]:
    """Return the pair (function, is_host) for the library of the array `a`."""
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
    """Return the facts of a PyTorch tensor in host memory."""
    kind = type(a)
    return kind.__name__ if kind is float or kind is np.float32 else torch_arrays.facts(True)(a)


def _cupy_facts(a: Any) -> Hashable:
    """Return the facts of a CuPy array: type, shape, dtype, strides, alignment to 16 bytes, and device."""
    kind = type(a)
    if kind.__module__ != "cupy":
        raise TypeError(kind)
    memory = a.data
    return kind, a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _numpy_facts(a: Any) -> Hashable:
    """Return the facts of a NumPy array."""
    if type(a) in (float, np.float32):  # an amax, whose value neither the checks nor the cached call depend on
        return type(a).__name__
    if type(a) is not np.ndarray:
        raise TypeError(type(a))
    return np.ndarray, a.shape, a.dtype, a.strides, a.flags.num  # flags: alignment and writability
