"""Calls that were checked before are done at once: on small arrays, the checks cost more than the work.

The key of a call holds all that its checks and its work depend on: of each array its type, shape, dtype, strides, device and
alignment, and every other argument. So a call with the key of one that went the full way, and was right, is right too. What is
kept under a key is made by an engine (cuda/prepared.py, cpu/prepared.py), and may return None: then the call goes the full way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any

import numpy as np

from fp4kit import interop
from fp4kit.libraries import torch_arrays
from fp4kit.quantized import Quantized

MOST = 256  # calls that are kept; a program that uses more in turn finds them forgotten now and then
Key = tuple[Hashable, ...]
_UNKNOWN: Any = object()
_CALLS: dict[Key, Callable[..., Any] | None] = {}  # None: such calls go the full way, and no engine is to be asked again
by_specification: ContextVar[bool] = ContextVar("by_specification", default=False)  # whether that alone computes on NumPy arrays


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Key of a call of op, None if nothing is to be kept; and the prepared call, None where the call has to go the full way.

    arrays: of NumPy or CuPy, or tensors of PyTorch on CUDA, Quantized of them, None for an array that is not given, beside those
    of NumPy a float; any others make a call without a key. others: all other arguments that a check depends on.
    """
    x = arrays[0]
    own = type(x)
    kind = type(x.packed) if own is Quantized else own
    if x is None or (kind is np.ndarray and by_specification.get()):
        return None, None
    try:
        facts = _numpy_facts if kind is np.ndarray else _cupy_facts if kind.__module__ == "cupy" else torch_arrays.facts()
        where = None if kind is np.ndarray else interop.cupy().cuda.runtime.getDevice()
        known = _facts(x, facts) if own is Quantized else facts(x)
        rest = tuple([None if a is None else _facts(a, facts) for a in arrays[1:]])
        key = (op, where, known, rest, others, tuple(map(type, others)))
        found = _CALLS.get(key, _UNKNOWN)
        return (key, None) if found is _UNKNOWN else (key if found else None, found)
    except (AttributeError, TypeError, RuntimeError):  # no such array, one without memory, or an argument without a hash
        return None, None


def keep(key: Key | None, call: Callable[..., Any] | None) -> None:
    """Keep a prepared call under its key, or that there is none; nothing without a key."""
    if key is None:
        return
    if len(_CALLS) >= MOST:
        _CALLS.clear()
    _CALLS[key] = call


def _facts(a: Any, facts: Callable[[Any], Hashable]) -> Hashable:
    """What checks and work depend on, of an array; facts: of those of one library, TypeError for others."""
    if type(a) is Quantized:
        scales, tensor_scale, amax = a.block_scale, a.tensor_scale, a.tensor_amax
        found = facts(a.packed), scales is None or facts(scales), tensor_scale is None or facts(tensor_scale)
        return a.shape, a.dtype, a.axis, a.recipe, a.scale_layout, found, amax is None or facts(amax)
    return facts(a)


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
