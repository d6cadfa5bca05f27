"""Calls on a GPU that were checked before are launched at once: on small arrays, the checks cost more than the kernels.

The key of a call holds all that its checks and launches depend on: of each array its type, shape, dtype, strides, device and
alignment, and every other argument. So a call with the key of one that went the full way, and was right, is right too. Only
calls that are one launch on one whole matrix are kept; all others go the full way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda import fake, launch, loader
from fp4kit.cuda.geometry import Launch, address, aligned
from fp4kit.ops.prepare import Prepared
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe

MOST = 256  # calls that are kept; a program that uses more in turn finds them forgotten now and then
Key = tuple[Hashable, ...]
_CALLS: dict[Key, Callable[..., Any]] = {}


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Key of a call of op, None if it cannot have one; and the prepared call, None where the call has to go the full way.

    arrays: CuPy arrays, Quantized or None, the first one not None. others: all other arguments that a check depends on.
    """
    try:
        where = _array_facts(arrays[0])
        key = (op, where, loader.cupy().cuda.runtime.getDevice(), *map(_facts, arrays[1:]), *others, *map(type, others))
        return key, _CALLS.get(key)
    except (AttributeError, TypeError):  # an array of another library, or an argument that cannot be hashed
        return None, None


def keep(key: Key | None, call: Callable[..., Any] | None) -> None:
    """Keep a prepared call under its key, unless one of them is None."""
    if key is None or call is None:
        return
    if len(_CALLS) >= MOST:
        _CALLS.clear()
    _CALLS[key] = call


def _facts(a: Any) -> Hashable:
    if a is None:
        return None
    if type(a) is not Quantized:
        return _array_facts(a)
    parts = map(_facts, (a.packed, a.block_scale, a.tensor_scale, a.tensor_amax))
    return a.shape, a.dtype, a.axis, a.recipe, a.scale_layout, *parts


def _array_facts(a: Any) -> Hashable:
    """What checks and launches depend on, of a CuPy array. AttributeError for any other."""
    memory = a.data
    return type(a), a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _one_matrix(x: Any, axis: int, r: Recipe, layout: str, amax: Any) -> tuple[int, int] | None:
    """Shape of x as the one matrix, read where it is, that a single launch takes under one tensor scale; None if it is none."""
    whole = x.size and axis == x.ndim - 1 and x.flags.c_contiguous and x.device.id == loader.cupy().cuda.runtime.getDevice()
    plain = r.block_rows == 1 and r.tensor_scaling in ("none", "tensor") and (amax is None or amax.size == 1)
    joined = x.ndim <= 2 or layout == "linear"
    return (x.size // x.shape[-1], x.shape[-1]) if whole and plain and joined else None


def _amax(p: Prepared) -> Launch | None:
    """Launch for the tensor amax that the call does not give; None where it does, or needs none."""
    x, r = p.x, p.recipe
    if r.tensor_scaling == "none" or p.others["tensor_amax"] is not None:
        return None
    return launch.amax_launch(x.dtype, launch.COUNTED[r.amax_nan], False, aligned(x, 16), 1, x.size, x.device.id)


class QuantizeCall(NamedTuple):
    """quantize of one matrix into out."""

    quantize: Launch
    amax: Launch | None

    def __call__(self, x: Any, given: Any, out: Quantized) -> Quantized:
        at, amax = x.data.ptr, 0
        if out.tensor_amax is not None:
            amax = out.tensor_amax.data.ptr
            _set_amax(self.amax, at, given, out.tensor_amax.data)
        self.quantize(at, out.packed.data.ptr, address(out.block_scale), 0, amax, address(out.tensor_scale), 0, 0, 0)
        return out


def _set_amax(find_amax: Launch | None, x: int, given: Any, amax: Any) -> None:
    """Fill the memory of an amax: of x, or with the given one."""
    if find_amax is not None:
        amax.memset_async(0, 4)
        find_amax(x, amax.ptr)
    elif given.data.ptr != amax.ptr:
        amax.copy_from_device_async(given.data, 4)


def quantize(p: Prepared, layout: str) -> QuantizeCall | None:
    """The call that was prepared as p, without random bytes, Hadamard transform or block amaxes, and with out; None if unusual."""
    shape = _one_matrix(p.x, p.axis, p.recipe, layout, p.others["tensor_amax"])
    if shape is None:
        return None
    x, r = p.x, p.recipe
    whole = launch.whole_runs(x, None, *launch.rows_and_columns(shape, r))
    return QuantizeCall(launch.quantize_launch(r, x.dtype, shape, whole, layout, x.device.id), _amax(p))


class FakeQuantizeCall(NamedTuple):
    """fake_quantize of one matrix."""

    fake: Launch
    amax: Launch | None
    empty: Callable[..., Any]

    def __call__(self, x: Any, given: Any) -> Any:
        at, values = x.data.ptr, self.empty(x.shape, x.dtype)
        if self.amax is not None:
            given = self.empty((), np.float32)
            _set_amax(self.amax, at, None, given.data)
        self.fake(at, 0, 0, values.data.ptr, address(given), 0, 0, 0, 0)
        return values


def fake_quantize(p: Prepared, values: Any) -> FakeQuantizeCall | None:
    """The call that was prepared as p, of nearest rounding and without block amaxes, whose result was `values`."""
    shape = _one_matrix(p.x, p.axis, p.recipe, "linear", p.others["tensor_amax"])
    if shape is None:
        return None
    x, r = p.x, p.recipe
    whole = launch.whole_runs(x, values, *launch.rows_and_columns(shape, r))
    if r.fake_rule is None:
        call = launch.quantize_launch(r, x.dtype, shape, whole, "linear", x.device.id, fake=True)
    else:
        call = fake.fake_launch(r, x.dtype, shape, whole, x.device.id)
    return FakeQuantizeCall(call, _amax(p), loader.cupy().empty)


class DequantizeCall(NamedTuple):
    """dequantize of one matrix."""

    dequantize: Launch
    dtype: np.dtype
    empty: Callable[..., Any]

    def __call__(self, q: Quantized, out: Any) -> Any:
        values = self.empty(q.shape, self.dtype) if out is None else out
        self.dequantize(q.packed.data.ptr, address(q.block_scale), values.data.ptr, address(q.tensor_amax))
        return values


def dequantize(q: Quantized, values: Any) -> DequantizeCall | None:
    """The call that gave `values`, in its out or new."""
    r = q.recipe
    shape = _one_matrix(values, q.axis, r, q.scale_layout, q.tensor_amax)
    codes = [a for a in (q.packed, q.block_scale) if a is not None]
    if shape is None or not all(a.flags.c_contiguous and aligned(a, 16) for a in (*codes, values)):
        return None
    call = launch.dequantize_launch(r, q.scale_layout, q.dtype, values.dtype, shape, values.device.id)
    return DequantizeCall(call, values.dtype, loader.cupy().empty)
