"""Make cached calls (ops/engines.py) for arrays in host memory: one call to the C library with new addresses.
quantize, dequantize and fake_quantize return a function that repeats a parsed call for arrays of equal shapes, dtypes
and strides. That function returns None if it cannot compute the result: if an element is NaN or infinite, or a
tensor_amax cannot be read in place, or the thread's arithmetic is not IEEE's. Then cpu/engine.py computes the call. A
prototype holds the arguments of a call to the C library, without addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import is_ieee
from fp4kit.arrays import returns
from fp4kit.arrays.returns import giver
from fp4kit.call.parse import Call
from fp4kit.cpu.codec import are_looked_up, check_array, decode_call, encode_call, kernels_of, tensors_of
from fp4kit.cpu.coverage import tensor_key
from fp4kit.cpu.library import ELEMENTS_PER_CALL, EncodeCall, address, functions, threads_for
from fp4kit.quantized.container import Quantized, assembled, packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes.schema import faking

# Results of MIN_BYTES to MAX_BYTES are in memory that is aligned to huge pages, and is kept for the next result when
# the last array in it is freed, because the first write to a new page costs a page fault and fills it with zeros
# (docs/processors.md). malloc keeps freed memory below 32 MiB only. A process keeps at most one such buffer.
MIN_BYTES, MAX_BYTES = 1 << 22, 1 << 26  # size of the smallest and the largest result whose memory is reused
HUGE_PAGE = 1 << 21  # bytes, on x86-64; on other processors the alignment has no effect
_kept: list[np.ndarray] = []  # the memory that is kept for the next result: one array of bytes, or none


class _Owner:
    """The owner of the memory of an array and of all its views. NumPy refers to this object as their `base`.

    When the last of these arrays is freed, this object is freed, too. It then stores its memory in _kept, in place of
    any memory that is there.
    """

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, kept: list[np.ndarray] = _kept) -> None:
        kept[:] = [self.memory]


def reusable_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array of this shape and dtype."""
    nbytes = prod(shape) * dtype.itemsize
    if not MIN_BYTES <= nbytes <= MAX_BYTES:
        return np.empty(shape, dtype)
    memory: np.ndarray = np.asarray(_Owner(_memory(nbytes)))
    return memory[:nbytes].view(dtype).reshape(shape)


def _memory(nbytes: int) -> np.ndarray:
    """Return a byte array of at least nbytes: the kept memory if it fits, otherwise new memory."""
    try:
        found = _kept.pop()  # atomic: no other thread gets this memory
    except IndexError:
        return _new_memory(nbytes)
    return found if nbytes <= found.size <= 2 * nbytes else _new_memory(nbytes)


def _new_memory(nbytes: int) -> np.ndarray:
    """Return new memory: an uninitialized byte array (nbytes,) that begins at a multiple of HUGE_PAGE (2 MiB)."""
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    first = -memory.ctypes.data % HUGE_PAGE
    return memory[first : first + nbytes]


_FLOAT32 = np.dtype(np.float32)


class ArrayAccess(NamedTuple):
    """The functions by which a cached call handles the arrays of one library.

    Attributes:
        address: address(array) returns the address of the array's first element, or None if the argument is None.
        maker: maker(shape, dtype, reused) returns a function without arguments that makes a new uninitialized array.
            dtype is a NumPy dtype. If reused is True, the memory of a large array is reused after it is freed (see
            cpu/cached_calls.py).
        is_float32: is_float32(array) returns True for a contiguous, aligned float32 array, which the C library can read
            in place.
        to_bytes: to_bytes(array) returns the bytes of the array's elements in row-major order.
        move_last: move_last(array, axis) returns a view whose last axis is moved to `axis`, or the array itself if
            `axis` is already the last one.
        result: result(array) converts an array from a maker to the array that the caller gets. The field is None if no
            conversion is needed.
    """

    address: Callable[[Any], int | None]
    maker: Callable[[tuple[int, ...], np.dtype, bool], Callable[[], Any]]
    is_float32: Callable[[Any], bool]
    to_bytes: Callable[[Any], bytes]
    move_last: Callable[[Any, int], Any]
    result: Callable[[Any], Any] | None

    def amax_pointer(self, amax: Any) -> Any:
        """Return a pointer to the caller's tensor_amax, for the C library."""
        if isinstance(amax, (float, np.floating)):
            return ctypes.byref(ctypes.c_float(float(amax)))
        return self.address(amax) if self.is_float32(amax) else None


def access_to(array: Any) -> ArrayAccess:
    """Return the ArrayAccess for the library (NumPy, PyTorch or JAX) of an array in host memory."""
    if isinstance(array, np.ndarray):
        return NUMPY
    return _torch() if isinstance(array, returns.tensor_type()) else _jax(array)


def _is_float32(a: np.ndarray) -> bool:
    """Return whether a NumPy array is a contiguous, aligned float32 array."""
    return a.dtype == _FLOAT32 and a.flags.c_contiguous and a.flags.aligned


def _numpy_maker(shape: tuple[int, ...], dtype: np.dtype, reused: bool) -> Callable[[], Any]:
    """Return a function without arguments that makes a new uninitialized NumPy array of this shape and dtype."""
    return partial(reusable_empty if reused else np.empty, shape, dtype)


def _move_last(a: Any, axis: int) -> Any:
    """Return a view of an array with the last axis moved to `axis`, or the array itself if `axis` is the last one."""
    return a if axis == a.ndim - 1 else np.moveaxis(a, -1, axis)


NUMPY = ArrayAccess(address, _numpy_maker, _is_float32, np.ndarray.tobytes, _move_last, None)


@cache
def _torch() -> ArrayAccess:
    """Return the ArrayAccess for PyTorch tensors in host memory."""
    pointer, float32 = returns.address(), returns.dtype_named("float32")

    def address_of(a: Any) -> int | None:
        return None if a is None else pointer(a)

    def maker(shape: tuple[int, ...], dtype: np.dtype, reused: bool) -> Callable[[], Any]:
        if reused and prod(shape) * dtype.itemsize >= MIN_BYTES:
            return lambda: returns.tensor_of(reusable_empty(shape, dtype))
        return returns.maker(returns.host_device(), shape, dtype, False)

    def is_float32(a: Any) -> bool:
        return bool(a.dtype is float32 and a.is_contiguous() and not pointer(a) % _FLOAT32.alignment)

    def to_bytes(a: Any) -> bytes:
        return bytes(a.detach().numpy().tobytes())

    def move_last(a: Any, axis: int) -> Any:
        return a if axis == a.ndim - 1 else a.movedim(-1, axis)

    return ArrayAccess(address_of, maker, is_float32, to_bytes, move_last, None)


def _jax(like: Any) -> ArrayAccess:
    """Return the ArrayAccess for JAX arrays in host memory."""

    def address_of(a: Any) -> int | None:
        return address(a if a is None else np.asarray(a))

    def is_float32(a: Any) -> bool:
        return _is_float32(np.asarray(a))

    def to_bytes(a: Any) -> bytes:
        return np.asarray(a).tobytes()

    return ArrayAccess(address_of, _numpy_maker, is_float32, to_bytes, _move_last, giver(like))


MAX_TENSORS = 1 << 12  # the most tensor scales of a cached dequantize, because every call reads them in Python
_UINT8 = np.dtype(np.uint8)
PreparedCall = Callable[..., Any]  # repeats a call: takes its arrays, and returns the result or None


def _is_whole(*arrays: Any) -> bool:
    """Return True if every array is nonempty, contiguous and aligned. Arguments that are None are ignored."""
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


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


def _matrix_call(call: Call, packed_step: int, scales_step: int) -> tuple[EncodeCall, int] | None:
    """Return the prototype of a call (the C function's arguments without addresses) and the index of its tensor rule,
    which is -1 for a recipe without tensor scales. Return None if the library does not support the call.
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
    return prototype, tensor_rule


def quantize(call: Call, x: Any, given: Any, both: bool = False) -> PreparedCall | None:
    """Return the call that repeats a parsed call to quantize with nearest rounding and linear scales, or None.

    It takes (x, tensor_amax, out), where tensor_amax is None if the library computes it. If the library cannot compute
    the result, `out` may be partly overwritten.
    """
    r, out, shape = call.recipe, call.out, call.moved.shape
    parts = () if out is None else (out.packed, out.block_scale, out.tensor_scale, out.tensor_amax)
    if both or call.layout != "linear" or not _is_whole(*parts):
        return None
    packed, scales = packed_shape(shape, r), None if r.scale is None else scale_shape(shape, r)
    matrix_call = _matrix_call(call, packed[-1], 0 if scales is None else scales[-1])
    if matrix_call is None:
        return None
    (prototype, tensor_rule), access, tensors = matrix_call, access_to(x), None
    if tensor_rule >= 0:
        tensors = tensor_amax_shape(shape, r) if call.tensor_amax is None else call.tensor_amax.shape
    shapes = {"packed": packed, "block_scale": scales, "tensor_scale": tensors, "tensor_amax": tensors}
    codes = ("packed", "block_scale")
    kinds = {name: _UINT8 if name in codes else _FLOAT32 for name in shapes}
    new = {name: access.maker(made, kinds[name], False) for name, made in shapes.items() if made is not None}
    fields = {"shape": call.x.shape, "dtype": call.x.dtype, "axis": call.axis, "recipe": r, "scale_layout": "linear"}
    fields |= {name: None for name in shapes if name not in new}
    library, size, address, has_tensor = functions().fp4kit_quantize, call.x.size, access.address, tensor_rule >= 0

    def run(x: Any, given: Any, out: Quantized | None) -> Quantized | None:
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        q = assembled({name: make() for name, make in new.items()} | fields) if out is None else out
        tensor = (address(q.tensor_scale), address(q.tensor_amax)) if has_tensor else (None, None)
        packed, scales, threads = address(q.packed), address(q.block_scale), threads_for(size)
        if library(prototype, address(x), amax, packed, scales, *tensor, tensor_rule, threads):
            return None
        return q if access.result is None else q.with_parts(access.result)

    return run


def _moved_result(access: ArrayAccess, values: Any, axis: int) -> Any:
    """Return new values as the caller gets them: the last axis moved to `axis`, as an array of the caller's library."""
    moved = access.move_last(values, axis)
    return moved if access.result is None else access.result(moved)


def fake_quantize(call: Call, x: Any, given: Any) -> PreparedCall | None:
    """Return the call that repeats a parsed call to fake_quantize by a recipe without a fake_rule, or None.

    It takes (x, tensor_amax), where tensor_amax is None if the library computes it.
    """
    r, shape, size, axis = call.recipe, call.moved.shape, call.x.size, call.axis
    matrix_call = None if r.fake_rule is not None else _matrix_call(call, 0, 0)
    if matrix_call is None:
        return None
    (prototype, tensor_rule), library, K = matrix_call, functions().fp4kit_fake_quantize, shape[-1]
    decode = decode_call((size // K, K), call.x.dtype, faking(r), K, 0, 0)
    access = access_to(x)
    new, address = access.maker(shape, call.x.dtype, True), access.address

    def run(x: Any, given: Any) -> Any:
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        out, threads = new(), threads_for(size)
        if library(prototype, decode, address(x), amax, address(out), tensor_rule, threads):
            return None
        return _moved_result(access, out, axis)

    return run


def dequantize(q: Quantized, given: Quantized, dtype: np.dtype, out: np.ndarray | None) -> PreparedCall | None:
    """Return the call that repeats a call to dequantize for linear scales, or None.

    It takes (q, out). If the library cannot compute the values, `out` may be partly overwritten.
    """
    r, tensors, size = q.recipe, 1 if q.tensor_scale is None else q.tensor_scale.size, prod(q.shape)
    is_small = 0 < size <= ELEMENTS_PER_CALL and tensors <= (1 if r.tensor_scaling == "tensor" else MAX_TENSORS)
    moved = None if out is None else np.moveaxis(out, q.axis, -1)  # may be strided
    if r.is_custom or not (is_small and q.scale_layout == "linear" and _is_whole(q.packed, q.block_scale, moved)):
        return None
    library, rows, K = functions().fp4kit_dequantize, size // q.moved_shape[-1], q.moved_shape[-1]
    scales_step = 0 if q.block_scale is None else q.block_scale.shape[-1]
    prototype = decode_call((rows, K), dtype, r, K, q.packed.shape[-1], scales_step)
    prototype.row_step, prototype.block_step = {"row": (1, 0), "block": (tensors // rows, 1)}.get(
        r.tensor_scaling, (0, 0)
    )
    access, axis, is_quick = access_to(given.packed), q.axis, are_looked_up(r)
    new, address = access.maker(q.moved_shape, dtype, True), access.address

    def run(q: Quantized, out: Any) -> Any:
        if not is_ieee():
            return None
        values = new() if out is None else out
        packed, scales = address(q.packed), address(q.block_scale)
        tensor = NUMPY.address(tensors_of(q, access.to_bytes))
        threads = threads_for(size, is_quick)  # looking up values is so quick that fewer threads are used
        if library(prototype, packed, scales, tensor, address(values), threads):
            return None
        return _moved_result(access, values, axis) if out is None else out

    return run


def _not_cached(*arguments: Any) -> None:
    """Return None for any arguments, because transpose and swizzle are never cached on the CPU."""


transpose = swizzle = _not_cached
