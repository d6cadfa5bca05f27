"""Calls on arrays in host memory as call/call_cache.py keeps them: one call of the library, which gets only addresses.

Those of quantize, dequantize and fake_quantize on whole matrices are kept, whatever their strides and axis, and on
contiguous arrays. What holds NaN or infinities goes the full way, and so does a call in a thread whose arithmetic is
not IEEE's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import is_ieee
from fp4kit.call.amaxes import tensor_amax_shape
from fp4kit.call.parse import Call, Declined
from fp4kit.cpu.array_access import NUMPY, ArrayAccess, access_to
from fp4kit.cpu.coverage import tensor_key
from fp4kit.cpu.dequantize import are_looked_up, decode_call, tensors_of
from fp4kit.cpu.encode import check_array, encode_call, kernels_of
from fp4kit.cpu.library import ELEMENTS_PER_CALL, DecodeCall, EncodeCall, functions, threads_for
from fp4kit.quantized.container import Quantized, assembled
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes.schema import faking

MOST_TENSORS = 1 << 12  # tensor scales of a dequantize that is repeated: they are looked at whenever it is
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """quantize with nearest rounding and linear scales; tensor: index of the tensor rule, -1 without."""

    like: EncodeCall
    tensor: int
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
        tensor = (address(q.tensor_scale), address(q.tensor_amax)) if self.tensor >= 0 else (None, None)
        packed, scales, threads = address(q.packed), address(q.block_scale), threads_for(self.size)
        if self.library(self.like, address(x), amax, packed, scales, *tensor, self.tensor, threads):
            return None
        return q if access.result is None else q.with_parts(access.result)


def _is_whole(*arrays: Any) -> bool:
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


class _Like(NamedTuple):
    """What the calls of a kind share: the matrix and its kernels, and the index of the tensor rule, -1 without."""

    call: EncodeCall
    tensor: int


def _matrix(call: Call) -> np.ndarray | None:
    """x as one matrix, whose rows are quantized; None where it is none, or too large for one call of the library."""
    moved, r = call.moved, call.recipe
    if not 0 < moved.size <= ELEMENTS_PER_CALL or (
        moved.ndim > 2 and not (moved.flags.c_contiguous and r.block_rows == 1)
    ):
        return None
    matrix: np.ndarray = moved.reshape(-1, moved.shape[-1])
    covered = 1 if call.tensor_amax is None or r.tensor_scaling != "tensor" else call.tensor_amax.size
    return matrix if covered == 1 else None


def _like(call: Call, packed_step: int, scales_step: int) -> _Like | None:
    """That of a call on a matrix, None where it would not be one call of the library."""
    r, x = call.recipe, _matrix(call)
    plain = all(a is None for a in (call.random, call.mask, call.block_amax)) and not r.search
    if x is None or not plain or r.tensor_scaling == "block":
        return None
    key = tensor_key(r)
    try:
        found = functions()
        tensor = -1 if key is None else found.fp4kit_tensor_rule(key.encode())
        kernels = kernels_of(r)
        check_array(x)
    except Declined:
        return None
    if key is not None and tensor < 0:
        return None
    like = encode_call(x, kernels, packed_step, scales_step)
    like.tensor_step = r.tensor_scaling == "row"
    return _Like(like, tensor)


def quantize(call: Call, x: Any, both: bool = False) -> QuantizeCall | None:
    """What repeats a call that went the full way; None where it would not be one call of the library."""
    r, out, shape = call.recipe, call.out, call.moved.shape
    parts = () if out is None else (out.packed, out.block_scale, out.tensor_scale, out.tensor_amax)
    if both or call.layout != "linear" or not _is_whole(*parts):
        return None
    packed, scales = packed_shape(shape, r), None if r.scale is None else scale_shape(shape, r)
    like = _like(call, packed[-1], 0 if scales is None else scales[-1])
    if like is None:
        return None
    access, tensors = access_to(x), tensor_amax_shape(shape, r) if like.tensor >= 0 else None
    shapes = {"packed": packed, "block_scale": scales, "tensor_scale": tensors, "tensor_amax": tensors}
    codes = ("packed", "block_scale")
    kinds = {name: _UINT8 if name in codes else _FLOAT32 for name in shapes}
    new = {name: access.maker(made, kinds[name], False) for name, made in shapes.items() if made is not None}
    fields = {"shape": call.x.shape, "dtype": call.x.dtype, "axis": call.axis, "recipe": r, "scale_layout": "linear"}
    fields |= {name: None for name in shapes if name not in new}
    return QuantizeCall(*like, call.x.size, access, new, fields, functions().fp4kit_quantize)


@dataclass(frozen=True, slots=True)
class FakeQuantizeCall:
    """fake_quantize by codes and with nearest rounding; shape: that of the values with their axis last."""

    like: EncodeCall
    tensor: int
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
        if self.library(self.like, self.values, access.address(x), amax, access.address(out), self.tensor, threads):
            return None
        return _result(access, out, self.axis)


def _result(access: ArrayAccess, values: Any, axis: int) -> Any:
    """Return new values as the caller gets them: with the quantized axis where x has it, in the library of x."""
    moved = access.move_last(values, axis)
    return moved if access.result is None else access.result(moved)


def fake_quantize(call: Call, x: Any, values: Any) -> FakeQuantizeCall | None:
    """What repeats the call that gave `values`."""
    r, shape = call.recipe, call.moved.shape
    like = None if r.fake_rule is not None else _like(call, 0, 0)
    if like is None:
        return None
    try:
        found = functions().fp4kit_fake_quantize
        flat = np.moveaxis(values, call.axis, -1).reshape(-1, shape[-1])
        decode = decode_call(flat, faking(r), 0, None if r.scale is None else 0)
    except Declined:
        return None
    access = access_to(x)
    return FakeQuantizeCall(
        *like, decode, access, access.maker(shape, call.x.dtype, True), call.axis, call.x.size, found
    )


@dataclass(frozen=True, slots=True)
class DequantizeCall:
    """dequantize of linear scales; shape: that of the values with their axis last."""

    like: DecodeCall
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
        if self.library(self.like, packed, scales, tensor, access.address(values), threads):
            return None
        return _result(access, values, self.axis) if out is None else out


def dequantize(q: Quantized, like: Any, values: Any) -> DequantizeCall | None:
    """The call that gave `values`, in its out or new; None where it would not be one call of the library."""
    r, tensors = q.recipe, 1 if q.tensor_scale is None else q.tensor_scale.size
    few = values.size <= ELEMENTS_PER_CALL and tensors <= (1 if r.tensor_scaling == "tensor" else MOST_TENSORS)
    moved = np.moveaxis(values, q.axis, -1)  # of an out, perhaps strided
    if not (few and q.scale_layout == "linear" and _is_whole(q.packed, q.block_scale, moved)):
        return None
    flat = moved.reshape(prod(q.moved_shape[:-1]), q.moved_shape[-1])
    try:
        found = functions().fp4kit_dequantize
        call = decode_call(flat, r, q.packed.shape[-1], None if q.block_scale is None else q.block_scale.shape[-1])
    except Declined:
        return None
    call.row_step, call.block_step = {"row": (1, 0), "block": (tensors // len(flat), 1)}.get(r.tensor_scaling, (0, 0))
    access = access_to(like)
    new = access.maker(q.moved_shape, values.dtype, True)
    return DequantizeCall(call, access, new, q.axis, values.size, are_looked_up(r), found)


def _goes_the_full_way(*arguments: Any) -> None:
    """What is not repeated."""


transpose = swizzle = _goes_the_full_way
