"""Calls on a GPU that were checked before are launched at once: on small arrays, the checks cost more than the kernels.

The key of a call holds all that its checks and launches depend on: of each array its type, shape, dtype, strides, device and
alignment, and every other argument. So a call with the key of one that went the full way, and was right, is right too. Only
calls that are one launch on one whole matrix are kept; all others go the full way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp4kit import interop
from fp4kit.call.parse import Call
from fp4kit.cuda import launch
from fp4kit.cuda.engine.matrices import work_of
from fp4kit.cuda.engine.quantize import allocate
from fp4kit.cuda.geometry import Launch, address, aligned
from fp4kit.cuda.launch import Matrix, is_whole, launch_by
from fp4kit.cuda.ways import way_of
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe

MOST = 256  # calls that are kept; a program that uses more in turn finds them forgotten now and then
AMAX_BYTES = 4  # float32
Key = tuple[Hashable, ...]
_CALLS: dict[Key, Callable[..., Any]] = {}


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Key of a call of op, None if it cannot have one; and the prepared call, None where the call has to go the full way.

    arrays: CuPy arrays, Quantized of them, or None for an array that is not given; any others make a call without a key.
    others: all other arguments that a check depends on.
    """
    if arrays[0] is None:
        return None, None
    try:
        facts = *map(_facts, arrays), *others, *map(type, others)
        key = (op, interop.cupy().cuda.runtime.getDevice(), *facts)
        return key, _CALLS.get(key)
    except (AttributeError, TypeError):  # no CuPy array, or an argument that cannot be hashed
        return None, None


def keep(key: Key | None, call: Callable[..., Any] | None) -> None:
    """Keep a prepared call under its key, unless one of them is None."""
    if key is None or call is None:
        return
    if len(_CALLS) >= MOST:
        _CALLS.clear()
    _CALLS[key] = call


def _facts(a: Any) -> Hashable:
    """What checks and launches depend on, of an array. TypeError for what is no CuPy array."""
    if a is None:
        return None
    if type(a) is Quantized:
        parts = map(_facts, (a.packed, a.block_scale, a.tensor_scale, a.tensor_amax))
        return a.shape, a.dtype, a.axis, a.recipe, a.scale_layout, *parts
    kind = type(a)
    if kind.__module__ != "cupy":
        raise TypeError(kind)
    memory = a.data
    return kind, a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _one_matrix(x: Any, axis: int, r: Recipe, layout: str, amax: Any) -> tuple[int, int] | None:
    """Shape of x as the one matrix, read where it is, that a single launch takes under one tensor scale; None if it is none."""
    whole = x.size and axis == x.ndim - 1 and x.flags.c_contiguous and x.device.id == interop.cupy().cuda.runtime.getDevice()
    plain = r.block_rows == 1 and r.tensor_scaling in ("none", "tensor") and (amax is None or amax.size == 1)
    joined = x.ndim <= 2 or layout == "linear"
    return (x.size // x.shape[-1], x.shape[-1]) if whole and plain and joined else None


def _amax(call: Call) -> Launch | None:
    """Launch for the tensor amax that the call does not give; None where it does, or needs none."""
    x, r = call.x, call.recipe
    if r.tensor_scaling == "none" or call.tensor_amax is not None:
        return None
    return launch.amax_launch(x.dtype, launch.COUNTED[r.amax_nan], False, aligned(x, 16), 1, x.size, x.device.id)


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """quantize of one matrix, into out or what allocate(tensor_amax) gives."""

    quantize: Launch
    amax: Launch | None
    allocate: Callable[[Any], Quantized]

    def __call__(self, x: Any, given: Any, out: Quantized | None) -> Quantized:
        at, amax = x.data.ptr, given
        if self.amax is not None:
            amax = _new_amax() if out is None else out.tensor_amax
            _find_amax(self.amax, at, amax.data)
        if out is None:
            out = self.allocate(None if amax is None else amax.reshape(()))
        scales, decode = address(out.block_scale), address(out.tensor_scale)
        amax_at, target = address(amax), address(out.tensor_amax)
        copy = 0 if target == amax_at else target  # by the kernel: a copy costs as much of the host's time as a launch
        self.quantize(at, out.packed.data.ptr, scales, 0, amax_at, decode, 0, 0, copy, 0, 0)
        return out


def _new_amax() -> Any:
    return interop.cupy().empty((), np.float32)


def _find_amax(find: Launch, x: int, amax: Any) -> None:
    amax.memset_async(0, AMAX_BYTES)
    find(x, amax.ptr)


def quantize(call: Call) -> QuantizeCall | None:
    """What repeats a call of nearest rounding, without Hadamard transform or block amaxes."""
    if _one_matrix(call.x, call.axis, call.recipe, call.layout, call.tensor_amax) is None:
        return None
    work = work_of(call)
    found = launch_by(way_of(work), work, is_whole(Matrix(call.x), work), call.x.device.id)
    like = SimpleNamespace(shape=call.x.shape, dtype=call.x.dtype)  # of the memory of x, nothing is kept
    kept = call._replace(x=like, moved=like, tensor_amax=None, out=None)
    return QuantizeCall(found, _amax(call), partial(allocate, kept))


@dataclass(frozen=True, slots=True)
class FakeQuantizeCall:
    """fake_quantize of one matrix."""

    fake: Launch
    amax: Launch | None
    empty: Callable[..., Any]

    def __call__(self, x: Any, given: Any) -> Any:
        at, values = x.data.ptr, self.empty(x.shape, x.dtype)
        if self.amax is not None:
            given = _new_amax()
            _find_amax(self.amax, at, given.data)
        self.fake(at, 0, 0, values.data.ptr, address(given), 0, 0, 0, 0, 0, 0)
        return values


def fake_quantize(call: Call, values: Any) -> FakeQuantizeCall | None:
    """What repeats a call of nearest rounding and without block amaxes, whose result was `values`."""
    if _one_matrix(call.x, call.axis, call.recipe, "linear", call.tensor_amax) is None:
        return None
    work = work_of(call, values=True)
    found = launch_by(way_of(work), work, is_whole(Matrix(call.x, values=values), work), call.x.device.id)
    return FakeQuantizeCall(found, _amax(call), interop.cupy().empty)


@dataclass(frozen=True, slots=True)
class DequantizeCall:
    """dequantize of one matrix."""

    dequantize: Launch
    dtype: np.dtype
    empty: Callable[..., Any]

    def __call__(self, q: Quantized, out: Any) -> Any:
        values = self.empty(q.shape, self.dtype) if out is None else out
        scales, tensor_scale, amax = map(address, (q.block_scale, q.tensor_scale, q.tensor_amax))
        self.dequantize(q.packed.data.ptr, scales, values.data.ptr, tensor_scale, amax)
        return values


def dequantize(q: Quantized, values: Any) -> DequantizeCall | None:
    """The call that gave `values`, in its out or new."""
    r = q.recipe
    shape = _one_matrix(values, q.axis, r, q.scale_layout, q.tensor_scale)
    codes = [a for a in (q.packed, q.block_scale) if a is not None]
    if shape is None or not all(a.flags.c_contiguous and aligned(a, 16) for a in (*codes, values)):
        return None
    call = launch.dequantize_launch(r, q.scale_layout, q.dtype, values.dtype, shape, values.device.id)
    return DequantizeCall(call, values.dtype, interop.cupy().empty)
