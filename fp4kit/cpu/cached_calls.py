"""Make cached calls (ops/engines.py) for arrays in host memory: one call to the C library with new addresses.
A prototype holds the arguments of a call to the C library, without addresses.

A cached call repeats an earlier call on arrays of equal shapes, dtypes and strides, without checks and with little work
in Python. Calls of quantize, dequantize and fake_quantize can be cached for matrices with any strides and axis, and for
contiguous arrays of any shape. The functions that make a cached call raise Declined if the library does not support the
recipe, or if elements are not aligned.

A cached call returns None if it cannot compute the result. That is so if an element is NaN or infinite, or if the
library leaves a block to the specification for another reason. It is also so if the caller's tensor_amax is an array
that the library cannot read in place, or if the thread's arithmetic is not IEEE's (flushed subnormals, another rounding
mode). Then the caller runs the call by cpu/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import is_ieee
from fp4kit.call.parse import Call
from fp4kit.cpu.array_access import NUMPY, ArrayAccess, access_to
from fp4kit.cpu.coverage import tensor_key
from fp4kit.cpu.dequantize import are_looked_up, decode_call, tensors_of
from fp4kit.cpu.encode import check_array, encode_call, kernels_of
from fp4kit.cpu.library import ELEMENTS_PER_CALL, DecodeCall, EncodeCall, functions, threads_for
from fp4kit.quantized.container import Quantized, assembled
from fp4kit.quantized.parts import packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes.schema import faking

MAX_TENSORS = 1 << 12  # the most tensor scales of a cached dequantize, because every call reads them in Python
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class CpuQuantizeCall:
    """A cached call to quantize with nearest rounding and linear scales.

    Calling it with (x, tensor_amax, out) returns the result: `out` or, if that is None, a new Quantized. tensor_amax is
    None if the library computes it. The call returns None if the library cannot compute the result; `out` may then be
    partly overwritten.

    prototype: the arguments of the C function, without addresses.
    tensor_rule: index of the compiled tensor rule; -1 for a recipe without tensor scales.
    size: the number of elements of x. access: the functions that handle arrays of x's library.
    new: the functions that make the arrays of a result, by field. fields: the other fields of a result.
    library: the C function.
    """

    prototype: EncodeCall
    tensor_rule: int
    size: int
    access: ArrayAccess
    new: dict[str, Callable[[], Any]]
    fields: dict[str, Any]
    library: Callable[..., int]

    def __call__(self, x: Any, given: Any, out: Quantized | None) -> Quantized | None:
        access = self.access
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        q = assembled({name: make() for name, make in self.new.items()} | self.fields) if out is None else out
        address = access.address
        tensor = (address(q.tensor_scale), address(q.tensor_amax)) if self.tensor_rule >= 0 else (None, None)
        packed, scales, threads = address(q.packed), address(q.block_scale), threads_for(self.size)
        if self.library(self.prototype, address(x), amax, packed, scales, *tensor, self.tensor_rule, threads):
            return None
        return q if access.result is None else q.with_parts(access.result)


def _is_whole(*arrays: Any) -> bool:
    """Return True if every array is nonempty, contiguous and aligned. Arguments that are None are ignored."""
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


class _MatrixCall(NamedTuple):
    """The fields that CpuQuantizeCall and CpuFakeQuantizeCall share, as _matrix_call returns them.

    prototype: the arguments of the C function, without addresses.
    tensor_rule: index of the compiled tensor rule; -1 for a recipe without tensor scales.
    """

    prototype: EncodeCall
    tensor_rule: int


def _matrix(call: Call) -> np.ndarray | None:
    """Return a view of a call's array as one matrix (rows, K), in which each row is quantized."""
    moved, r = call.moved, call.recipe
    if not 0 < moved.size <= ELEMENTS_PER_CALL or (
        moved.ndim > 2 and not (moved.flags.c_contiguous and r.block_rows == 1)
    ):
        return None
    matrix: np.ndarray = moved.reshape(-1, moved.shape[-1])
    covered = 1 if call.tensor_amax is None or r.tensor_scaling != "tensor" else call.tensor_amax.size
    return matrix if covered == 1 else None


def _matrix_call(call: Call, packed_step: int, scales_step: int) -> _MatrixCall | None:
    """Return the prototype of a call (the C function's arguments without addresses) and the index of its tensor
    rule.
    """
    r, x = call.recipe, _matrix(call)
    is_plain = all(a is None for a in (call.random, call.mask, call.block_amax)) and not r.search
    if x is None or not is_plain or r.tensor_scaling == "block" or r.is_custom:
        return None
    key, found = tensor_key(r), functions()
    tensor_rule = -1 if key is None else found.fp4kit_tensor_rule(key.encode())
    kernels = kernels_of(r)
    check_array(x)
    if key is not None and tensor_rule < 0:
        return None
    prototype = encode_call(x, kernels, packed_step, scales_step)
    prototype.tensor_step = r.tensor_scaling == "row"
    return _MatrixCall(prototype, tensor_rule)


def quantize(call: Call, x: Any, given: Any, both: bool = False) -> CpuQuantizeCall | None:
    """Return a CpuQuantizeCall that repeats a parsed call to quantize."""
    r, out, shape = call.recipe, call.out, call.moved.shape
    parts = () if out is None else (out.packed, out.block_scale, out.tensor_scale, out.tensor_amax)
    if both or call.layout != "linear" or not _is_whole(*parts):
        return None
    packed, scales = packed_shape(shape, r), None if r.scale is None else scale_shape(shape, r)
    matrix_call = _matrix_call(call, packed[-1], 0 if scales is None else scales[-1])
    if matrix_call is None:
        return None
    access, tensors = access_to(x), None
    if matrix_call.tensor_rule >= 0:
        tensors = tensor_amax_shape(shape, r) if call.tensor_amax is None else call.tensor_amax.shape
    shapes = {"packed": packed, "block_scale": scales, "tensor_scale": tensors, "tensor_amax": tensors}
    codes = ("packed", "block_scale")
    kinds = {name: _UINT8 if name in codes else _FLOAT32 for name in shapes}
    new = {name: access.maker(made, kinds[name], False) for name, made in shapes.items() if made is not None}
    fields = {"shape": call.x.shape, "dtype": call.x.dtype, "axis": call.axis, "recipe": r, "scale_layout": "linear"}
    fields |= {name: None for name in shapes if name not in new}
    return CpuQuantizeCall(*matrix_call, call.x.size, access, new, fields, functions().fp4kit_quantize)


@dataclass(frozen=True, slots=True)
class CpuFakeQuantizeCall:
    """A cached call to fake_quantize with nearest rounding, for recipes without a fake_rule.

    Calling it with (x, tensor_amax) returns the values in a new array, or None if the library cannot compute them.
    tensor_amax is None if the library computes it.

    prototype: the arguments of the C function, without addresses.
    tensor_rule: index of the compiled tensor rule; -1 for a recipe without tensor scales.
    size: the number of elements of x. access: the functions that handle arrays of x's library.
    values: the prototype of the call that decodes. library: the C function.
    new: a function that makes the array of values, with the quantized axis last. axis: the quantized axis of x.
    """

    prototype: EncodeCall
    tensor_rule: int
    values: DecodeCall
    access: ArrayAccess
    new: Callable[[], Any]
    axis: int
    size: int
    library: Callable[..., int]

    def __call__(self, x: Any, given: Any) -> Any:
        access = self.access
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        out, threads = self.new(), threads_for(self.size)
        address = access.address
        if self.library(self.prototype, self.values, address(x), amax, address(out), self.tensor_rule, threads):
            return None
        return _result(access, out, self.axis)


def _result(access: ArrayAccess, values: Any, axis: int) -> Any:
    """Return new values as the caller gets them: the last axis moved to `axis`, as an array of the caller's library."""
    moved = access.move_last(values, axis)
    return moved if access.result is None else access.result(moved)


def fake_quantize(call: Call, x: Any, given: Any) -> CpuFakeQuantizeCall | None:
    """Return a CpuFakeQuantizeCall that repeats a parsed call to fake_quantize."""
    r, shape = call.recipe, call.moved.shape
    matrix_call = None if r.fake_rule is not None else _matrix_call(call, 0, 0)
    if matrix_call is None:
        return None
    found, K = functions().fp4kit_fake_quantize, shape[-1]
    decode = decode_call((call.x.size // K, K), call.x.dtype, faking(r), K, 0, 0)
    access = access_to(x)
    return CpuFakeQuantizeCall(
        *matrix_call, decode, access, access.maker(shape, call.x.dtype, True), call.axis, call.x.size, found
    )


@dataclass(frozen=True, slots=True)
class CpuDequantizeCall:
    """A cached call to dequantize for linear scales.

    Calling it with (q, out) returns the values: in `out` or, if `out` is None, in a new array. It returns None if the
    library cannot compute them; `out` may then be partly overwritten.

    prototype: the arguments of the C function, without addresses.
    access: the functions that handle arrays of q's library. library: the C function.
    new: a function that makes the array of values, with the quantized axis last. axis: the quantized axis of q.
    size: the number of values. is_quick: True if values are looked up in tables (dequantize.are_looked_up), which is so
    quick that fewer threads are used.
    """

    prototype: DecodeCall
    access: ArrayAccess
    new: Callable[[], Any]
    axis: int
    size: int
    is_quick: bool
    library: Callable[..., int]

    def __call__(self, q: Quantized, out: Any) -> Any:
        if not is_ieee():
            return None
        access = self.access
        values = self.new() if out is None else out
        packed, scales = access.address(q.packed), access.address(q.block_scale)
        tensor = NUMPY.address(tensors_of(q, access.to_bytes))
        threads = threads_for(self.size, self.is_quick)
        if self.library(self.prototype, packed, scales, tensor, access.address(values), threads):
            return None
        return _result(access, values, self.axis) if out is None else out


def dequantize(q: Quantized, given: Quantized, dtype: np.dtype, out: np.ndarray | None) -> CpuDequantizeCall | None:
    """Return a CpuDequantizeCall that repeats a call to dequantize."""
    r, tensors, size = q.recipe, 1 if q.tensor_scale is None else q.tensor_scale.size, prod(q.shape)
    is_small = 0 < size <= ELEMENTS_PER_CALL and tensors <= (1 if r.tensor_scaling == "tensor" else MAX_TENSORS)
    moved = None if out is None else np.moveaxis(out, q.axis, -1)  # may be strided
    if r.is_custom or not (is_small and q.scale_layout == "linear" and _is_whole(q.packed, q.block_scale, moved)):
        return None
    found, rows, K = functions().fp4kit_dequantize, size // q.moved_shape[-1], q.moved_shape[-1]
    scales_step = 0 if q.block_scale is None else q.block_scale.shape[-1]
    call = decode_call((rows, K), dtype, r, K, q.packed.shape[-1], scales_step)
    call.row_step, call.block_step = {"row": (1, 0), "block": (tensors // rows, 1)}.get(r.tensor_scaling, (0, 0))
    access = access_to(given.packed)
    new = access.maker(q.moved_shape, dtype, True)
    return CpuDequantizeCall(call, access, new, q.axis, size, are_looked_up(r), found)


def _not_cached(*arguments: Any) -> None:
    """Return None for any arguments, because transpose and swizzle are never cached on the CPU."""


transpose = swizzle = _not_cached
