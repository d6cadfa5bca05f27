"""The cache of calls: a later call with the same key needs no checks, which cost more than the work on small arrays.

The key holds whatever the checks and the work depend on: the type, shape, dtype, strides, device and alignment of each
array, and every other argument. If a call passed its checks, then every call with its key passes them. An engine makes
the cached call (cuda/engine/cached_calls.py, cpu/cached_calls.py). A cached call returns None if it cannot do a call;
then the call is parsed, and the engine's driver does it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any

import numpy as np

from fp4kit.arrays import imports, jax_arrays, torch_arrays
from fp4kit.quantized.container import Quantized

MAX_CALLS = 256  # cached calls; one more clears the cache
Key = tuple[Hashable, ...]
_UNKNOWN: Any = object()
_CALLS: dict[
    Key, Callable[..., Any] | None
] = {}  # None: the driver does such calls, and no engine is asked for a cached call again
specification_only: ContextVar[bool] = ContextVar(
    "specification_only", default=False
)  # whether that alone computes on NumPy arrays


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Return the key of a call of op, and its cached call.

    The key is None if no cached call is to be made. The cached call is None if there is none yet, or none can be made.

    arrays: of NumPy, CuPy, PyTorch or JAX, all of one library, and Quantized of them; None for an array that is not
    given; on the host a float as a tensor_amax. A call with any others has no key. others: all other arguments that a
    check depends on.
    """
    x = arrays[0]
    own = type(x)
    try:
        facts, on_host = _facts_of(x.packed if own is Quantized else x)
        if on_host and specification_only.get():
            return None, None
        where = None if on_host else imports.cupy().cuda.runtime.getDevice()
        known = _facts(x, facts) if own is Quantized else facts(x)
        rest = tuple([None if a is None else _facts(a, facts) for a in arrays[1:]])
        key = (op, where, known, rest, others, tuple(map(type, others)))
        found = _CALLS.get(key, _UNKNOWN)
        return (key, None) if found is _UNKNOWN else (key if found else None, found)
    except (
        AttributeError,
        TypeError,
        RuntimeError,
    ):  # no such array, one without memory, or an argument without a hash
        return None, None


def run_first(
    key: Key | None, call: Callable[..., Any] | None, arguments: tuple[Any, ...], driver: Callable[[], Any]
) -> Any:
    """Run the first call with a key: by its new cached call, or by the driver if that is None or returns None.

    Then store the cached call, unless an error was raised. A `call` of None is stored, too: such calls have none.
    """
    result = None if call is None else call(*arguments)
    if result is None:
        result = driver()
    if key is not None:
        if len(_CALLS) >= MAX_CALLS:
            _CALLS.clear()
        _CALLS[key] = call
    return result


def _facts(a: Any, facts: Callable[[Any], Hashable]) -> Hashable:
    """What checks and work depend on, of an array; facts: of those of one library, TypeError for others."""
    if type(a) is Quantized:
        scales, tensor_scale, amax = a.block_scale, a.tensor_scale, a.tensor_amax
        found = facts(a.packed), scales is None or facts(scales), tensor_scale is None or facts(tensor_scale)
        return a.shape, a.dtype, a.axis, a.recipe, a.scale_layout, found, amax is None or facts(amax)
    return facts(a)


def _facts_of(a: Any) -> tuple[Callable[[Any], Hashable], bool]:
    """Return the function that gives the facts of an array like `a`, and whether the array is in host memory."""
    kind = type(a)
    if kind is np.ndarray:
        return _numpy_facts, True
    if kind.__module__ == "cupy":
        return _cupy_facts, False
    if getattr(a, "is_cuda", False):
        return torch_arrays.facts(), False
    return (_torch_host_facts if getattr(a, "is_cpu", False) else jax_arrays.facts), True


def _torch_host_facts(a: Any) -> Hashable:
    kind = type(a)
    return kind.__name__ if kind is float or kind is np.float32 else torch_arrays.facts(True)(a)


def _cupy_facts(a: Any) -> Hashable:
    kind = type(a)
    if kind.__module__ != "cupy":
        raise TypeError(kind)
    memory = a.data
    return kind, a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _numpy_facts(a: Any) -> Hashable:
    if type(a) in (float, np.float32):  # an amax, whose value nothing that is kept depends on
        return type(a).__name__
    if type(a) is not np.ndarray:
        raise TypeError(type(a))
    return np.ndarray, a.shape, a.dtype, a.strides, a.flags.num  # flags: alignment, and whether it can be written to
