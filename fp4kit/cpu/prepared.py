"""Calls on NumPy arrays as call/repeat.py keeps them: one call of the library, which is told the addresses alone.

Those of quantize and dequantize on whole contiguous arrays are kept. What holds NaN or infinities goes the full way, and so does
a call in a thread whose arithmetic is not IEEE's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fp4kit.arithmetic import is_ieee
from fp4kit.call.parse import Call, Declined
from fp4kit.cpu.dequantize import check_recipe, decode_call, is_worth_preparing, table_of
from fp4kit.cpu.keys import tensor_key
from fp4kit.cpu.matrix import check_array, encode_call, kernels_of
from fp4kit.cpu.native import ELEMENTS_PER_CALL, DecodeCall, EncodeCall, library, threads_for
from fp4kit.parts import packed_shape, scale_shape
from fp4kit.quantized import Quantized, assembled

_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """quantize along rows, with nearest rounding and linear scales; tensor: index of the tensor rule, -1 without."""

    like: EncodeCall
    tensor: int
    size: int
    packed: tuple[int, ...]
    scales: tuple[int, ...] | None
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
        return assembled(
            packed=np.empty(self.packed, _UINT8),
            block_scale=None if self.scales is None else np.empty(self.scales, _UINT8),
            tensor_scale=np.empty((), _FLOAT32) if self.tensor >= 0 else None,
            tensor_amax=np.empty((), _FLOAT32) if self.tensor >= 0 else None,
            **self.fields,
        )


def _is_whole(*arrays: Any) -> bool:
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


def quantize(call: Call, x: Any, both: bool = False) -> QuantizeCall | None:
    """What repeats a call that went the full way; None where it would not be one call of the library."""
    r, out, plain = call.recipe, call.out, call.random is None and call.mask is None and call.block_amax is None
    rows = call.axis == call.x.ndim - 1 and (call.x.ndim <= 2 or r.block_rows == 1)
    parts = () if out is None else (out.packed, out.block_scale, out.tensor_scale, out.tensor_amax)
    one = call.layout == "linear" and call.tensor_amax is None and r.tensor_scaling in ("none", "tensor")
    if both or not (plain and rows and one and _is_whole(call.x, *parts)) or call.x.size > ELEMENTS_PER_CALL:
        return None
    try:
        kernels = kernels_of(r)
        check_array(call.x)
    except Declined:
        return None
    key, functions = tensor_key(r), library().functions
    tensor = -1 if key is None else functions.fp4kit_tensor(key.encode())
    if key is not None and tensor < 0:
        return None
    shape = call.x.shape
    packed, scales = packed_shape(shape, r), None if r.scale is None else scale_shape(shape, r)
    like = encode_call(call.x.reshape(-1, shape[-1]), kernels, packed[-1], 0 if scales is None else scales[-1])
    fields = {"shape": shape, "dtype": call.x.dtype, "axis": call.axis, "recipe": r, "scale_layout": "linear"}
    return QuantizeCall(like, tensor, call.x.size, packed, scales, fields, functions.fp4kit_quantize)


@dataclass(frozen=True, slots=True)
class DequantizeCall:
    """dequantize along rows of linear scales."""

    like: DecodeCall
    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    library: Callable[..., None]

    def __call__(self, q: Quantized, out: np.ndarray | None) -> np.ndarray | None:
        if not is_ieee():
            return None
        values = np.empty(self.shape, self.dtype) if out is None else out
        scales = None if q.block_scale is None else q.block_scale.ctypes.data
        table = table_of(q, self.dtype)
        self.library(self.like, q.packed.ctypes.data, scales, table.ctypes.data, values.ctypes.data, threads_for(self.size))
        return values


def dequantize(q: Quantized, like: Any, values: Any) -> DequantizeCall | None:
    """The call that gave `values`, in its out or new; None where it would not be one call of the library."""
    r, one = q.recipe, q.tensor_scale is None or q.tensor_scale.size == 1
    rows = q.axis == len(q.shape) - 1 and q.scale_layout == "linear" and r.tensor_scaling in ("none", "tensor")
    fits = values.size <= ELEMENTS_PER_CALL and is_worth_preparing(q)
    if not (one and rows and fits and _is_whole(q.packed, q.block_scale, values)):
        return None
    try:
        check_recipe(r)
    except Declined:
        return None
    shape = prod(q.shape[:-1]), q.shape[-1]
    call = decode_call(shape, r, q.packed.shape[-1], None if q.block_scale is None else q.block_scale.shape[-1], values.itemsize)
    return DequantizeCall(call, q.shape, values.dtype, values.size, library().functions.fp4kit_dequantize)


def fake_quantize(*arguments: Any) -> None:
    """Goes the full way."""


transpose = swizzle = fake_quantize
