"""Calls on NumPy arrays as call/repeat.py keeps them: one call of the library, which is told the addresses alone.

Those of quantize, dequantize and fake_quantize on whole contiguous arrays are kept. What holds NaN or infinities goes the full
way, and so does a call in a thread whose arithmetic is not IEEE's.
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
from fp4kit.cpu.dequantize import are_looked_up, decode_call, tensors_of
from fp4kit.cpu.keys import tensor_key
from fp4kit.cpu.matrix import check_array, encode_call, kernels_of
from fp4kit.cpu.memory import empty
from fp4kit.cpu.native import ELEMENTS_PER_CALL, DecodeCall, EncodeCall, functions, threads_for
from fp4kit.parts import packed_shape, scale_shape
from fp4kit.quantized import Quantized, assembled

MOST_TENSORS = 1 << 12  # tensor scales of a dequantize that is repeated: they are looked at whenever it is
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """quantize along rows, with nearest rounding and linear scales; tensor: index of the tensor rule, -1 without."""

    like: EncodeCall
    tensor: int
    size: int
    packed: tuple[int, ...]
    scales: tuple[int, ...] | None
    tensors: tuple[int, ...]
    fields: dict[str, Any]
    library: Callable[..., int]

    def __call__(self, x: np.ndarray, given: None, out: Quantized | None) -> Quantized | None:
        if not is_ieee():
            return None
        q = self._new() if out is None else out
        scales = None if q.block_scale is None else q.block_scale.ctypes.data
        tensor = None, None
        if self.tensor >= 0:
            tensor = q.tensor_scale.ctypes.data, q.tensor_amax.ctypes.data
        threads = threads_for(self.size)
        undone = self.library(self.like, x.ctypes.data, q.packed.ctypes.data, scales, *tensor, self.tensor, threads)
        return None if undone else q

    def _new(self) -> Quantized:
        arrays = {
            "packed": np.empty(self.packed, _UINT8),
            "block_scale": None if self.scales is None else np.empty(self.scales, _UINT8),
            "tensor_scale": np.empty(self.tensors, _FLOAT32) if self.tensor >= 0 else None,
            "tensor_amax": np.empty(self.tensors, _FLOAT32) if self.tensor >= 0 else None,
        }
        return assembled(arrays | self.fields)


def _is_whole(*arrays: Any) -> bool:
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


class _Like(NamedTuple):
    """What the calls of a kind share: the matrix and its kernels, and the index of the tensor rule, -1 without."""

    call: EncodeCall
    tensor: int


def _like(call: Call, packed_step: int, scales_step: int) -> _Like | None:
    """That of a call on the rows of a whole array, None where it would not be one call of the library."""
    r, given = call.recipe, (call.random, call.mask, call.block_amax, call.tensor_amax)
    plain = all(a is None for a in given) and not r.search
    rows = call.axis == call.x.ndim - 1 and (call.x.ndim <= 2 or r.block_rows == 1)
    if not (plain and rows and r.tensor_scaling != "block" and _is_whole(call.x)) or call.x.size > ELEMENTS_PER_CALL:
        return None
    key = tensor_key(r)
    try:
        found = functions()
        tensor = -1 if key is None else found.fp4kit_tensor(key.encode())
        kernels = kernels_of(r)
        check_array(call.x)
    except Declined:
        return None
    if key is not None and tensor < 0:
        return None
    like = encode_call(call.x.reshape(-1, call.x.shape[-1]), kernels, packed_step, scales_step)
    like.tensor_step = r.tensor_scaling == "row"
    return _Like(like, tensor)


def quantize(call: Call, x: Any, both: bool = False) -> QuantizeCall | None:
    """What repeats a call that went the full way; None where it would not be one call of the library."""
    r, out, shape = call.recipe, call.out, call.x.shape
    parts = () if out is None else (out.packed, out.block_scale, out.tensor_scale, out.tensor_amax)
    if both or call.layout != "linear" or not _is_whole(*parts):
        return None
    packed, scales = packed_shape(shape, r), None if r.scale is None else scale_shape(shape, r)
    like = _like(call, packed[-1], 0 if scales is None else scales[-1])
    if like is None:
        return None
    fields = {"shape": shape, "dtype": call.x.dtype, "axis": call.axis, "recipe": r, "scale_layout": "linear"}
    return QuantizeCall(*like, call.x.size, packed, scales, tensor_amax_shape(shape, r), fields, functions().fp4kit_quantize)


@dataclass(frozen=True, slots=True)
class FakeQuantizeCall:
    """fake_quantize along rows, by codes and with nearest rounding."""

    like: EncodeCall
    tensor: int
    values: DecodeCall
    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    library: Callable[..., int]

    def __call__(self, x: np.ndarray, given: None) -> np.ndarray | None:
        if not is_ieee():
            return None
        out = empty(self.shape, self.dtype)
        undone = self.library(self.like, self.values, x.ctypes.data, out.ctypes.data, self.tensor, threads_for(self.size))
        return None if undone else out


def fake_quantize(call: Call, x: Any, values: Any) -> FakeQuantizeCall | None:
    """What repeats the call that gave `values`."""
    r, shape = call.recipe, call.x.shape
    like = None if r.fake_rule is not None else _like(call, 0, 0)
    if like is None:
        return None
    try:
        found = functions().fp4kit_fake_quantize
        decode = decode_call(np.reshape(values, (-1, shape[-1])), r, 0, None if r.scale is None else 0)
    except Declined:
        return None
    return FakeQuantizeCall(*like, decode, shape, call.x.dtype, call.x.size, found)


@dataclass(frozen=True, slots=True)
class DequantizeCall:
    """dequantize along rows of linear scales."""

    like: DecodeCall
    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    is_quick: bool
    library: Callable[..., int]

    def __call__(self, q: Quantized, out: np.ndarray | None) -> np.ndarray | None:
        if not is_ieee():
            return None
        values = empty(self.shape, self.dtype) if out is None else out
        scales = None if q.block_scale is None else q.block_scale.ctypes.data
        tensor = tensors_of(q).ctypes.data
        threads = threads_for(self.size, self.is_quick)
        undone = self.library(self.like, q.packed.ctypes.data, scales, tensor, values.ctypes.data, threads)
        return None if undone else values


def dequantize(q: Quantized, like: Any, values: Any) -> DequantizeCall | None:
    """The call that gave `values`, in its out or new; None where it would not be one call of the library."""
    r, tensors = q.recipe, 1 if q.tensor_scale is None else q.tensor_scale.size
    rows = q.axis == len(q.shape) - 1 and q.scale_layout == "linear"
    few = values.size <= ELEMENTS_PER_CALL and tensors <= (1 if r.tensor_scaling == "tensor" else MOST_TENSORS)
    if not (rows and few and _is_whole(q.packed, q.block_scale, values)):
        return None
    flat = values.reshape(prod(q.shape[:-1]), q.shape[-1])
    try:
        found = functions().fp4kit_dequantize
        call = decode_call(flat, r, q.packed.shape[-1], None if q.block_scale is None else q.block_scale.shape[-1])
    except Declined:
        return None
    call.row_step, call.block_step = {"row": (1, 0), "block": (tensors // len(flat), 1)}.get(r.tensor_scaling, (0, 0))
    return DequantizeCall(call, q.shape, values.dtype, values.size, are_looked_up(r), found)


def _goes_the_full_way(*arguments: Any) -> None:
    """What is not repeated."""


transpose = swizzle = _goes_the_full_way
