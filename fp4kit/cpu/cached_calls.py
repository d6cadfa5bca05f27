"""Make cached calls (ops/engines.py) for arrays in host memory: one call to the C library with new addresses.
quantize, dequantize and fake_quantize return a function that repeats a parsed call for arrays of equal shapes, dtypes
and strides. That function returns None if it cannot compute the result: if an element is NaN or infinite, or a
tensor_amax cannot be read in place, or the thread's arithmetic is not IEEE's. Then cpu/engine.py computes the call. A
prototype holds the arguments of a call to the C library, without addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import is_ieee
from fp4kit.arrays import returns
from fp4kit.call.parse import Call, Declined
from fp4kit.cpu.codec import (
    are_looked_up,
    check_array,
    decode_call,
    encode_call,
    faked_factors,
    kernels_of,
    not_faked,
    tensor_key,
    tensors_of,
)
from fp4kit.cpu.library import (
    ELEMENTS_PER_CALL,
    ELEMENTS_PER_THREAD,
    DecodeCall,
    EncodeCall,
    address,
    functions,
    specification_only,
    threads_for,
)
from fp4kit.formats import FLT_MAX
from fp4kit.quantized.container import PARTS, Quantized, assembled
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
    """Return an uninitialized array of this shape and dtype, in the kept memory if that fits."""
    nbytes = prod(shape) * dtype.itemsize
    if not MIN_BYTES <= nbytes <= MAX_BYTES:
        return np.empty(shape, dtype)
    try:
        found = _kept.pop()  # atomic: no other thread gets this memory
    except IndexError:
        found = np.empty(0, np.uint8)
    if not nbytes <= found.size <= 2 * nbytes:
        found = np.empty(nbytes + HUGE_PAGE, np.uint8)
        first = -found.ctypes.data % HUGE_PAGE
        found = found[first : first + nbytes]
    memory: np.ndarray = np.asarray(_Owner(found))
    return memory[:nbytes].view(dtype).reshape(shape)


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
        moveaxis: moveaxis(array, source, target) returns a view with one axis moved, as np.moveaxis does.
        result: result(array) converts an array from a maker to the array that the caller gets. The field is None if no
            conversion is needed.
    """

    address: Callable[[Any], int | None]
    maker: Callable[[tuple[int, ...], np.dtype, bool], Callable[[], Any]]
    is_float32: Callable[[Any], bool]
    to_bytes: Callable[[Any], bytes]
    moveaxis: Callable[[Any, int, int], Any]
    result: Callable[[Any], Any] | None

    def amax_pointer(self, amax: Any) -> Any:
        """Return a pointer to the caller's tensor_amax, for the C library; None for one that it cannot read."""
        if isinstance(amax, (float, np.floating)):
            return None if float(FLT_MAX) < amax < inf else ctypes.byref(ctypes.c_float(float(amax)))
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


NUMPY = ArrayAccess(address, _numpy_maker, _is_float32, np.ndarray.tobytes, np.moveaxis, None)


@cache
def _torch() -> ArrayAccess:
    """Return the ArrayAccess for PyTorch tensors in host memory."""
    pointer, float32 = returns.address(), returns.dtype_named("float32")

    def maker(shape: tuple[int, ...], dtype: np.dtype, reused: bool) -> Callable[[], Any]:
        if reused and prod(shape) * dtype.itemsize >= MIN_BYTES:
            return lambda: returns.tensor_of(reusable_empty(shape, dtype))
        return returns.maker(returns.host_device(), shape, dtype, False)

    return ArrayAccess(
        address=lambda a: None if a is None else pointer(a),
        maker=maker,
        is_float32=lambda a: a.dtype is float32 and a.is_contiguous() and not pointer(a) % _FLOAT32.alignment,
        to_bytes=lambda a: a.detach().numpy().tobytes(),
        moveaxis=lambda a, source, target: a.movedim(source, target),
        result=None,
    )


def _jax(like: Any) -> ArrayAccess:
    """Return the ArrayAccess for JAX arrays in host memory. New arrays are NumPy arrays, which `result` converts."""
    return NUMPY._replace(
        address=lambda a: address(a if a is None else np.asarray(a)),
        is_float32=lambda a: _is_float32(np.asarray(a)),
        to_bytes=lambda a: np.asarray(a).tobytes(),
        result=returns.giver(like),
    )


MAX_TENSORS = 1 << 12  # the most tensor scales of a cached dequantize, because every call reads them in Python
PreparedCall = Callable[..., Any]  # repeats a call: takes its arrays, and returns the result or None


def _is_whole(*arrays: Any) -> bool:
    """Return True if every array is nonempty, contiguous and aligned. Arguments that are None are ignored."""
    return all(a is None or (a.size and a.flags.c_contiguous and a.flags.aligned) for a in arrays)


def _matrix_call(call: Call, packed_step: int, scales_step: int) -> tuple[EncodeCall, int] | None:
    """Return the prototype of a call (the C function's arguments without addresses) and the index of its tensor rule,
    which is -1 for a recipe without tensor scales. Return None if the library does not support the call.
    """
    r, moved = call.recipe, call.moved
    is_plain = all(a is None for a in (call.random, call.mask, call.block_amax)) and not r.search
    is_one_matrix = moved.ndim <= 2 or (moved.flags.c_contiguous and r.block_rows == 1)
    has_one_amax = call.tensor_amax is None or r.tensor_scaling != "tensor" or call.tensor_amax.size == 1
    if not (is_plain and is_one_matrix and has_one_amax and 0 < moved.size <= ELEMENTS_PER_CALL):
        return None
    if r.tensor_scaling == "block" or r.is_custom:
        return None
    x, key, found = moved.reshape(-1, moved.shape[-1]), tensor_key(r), functions()
    tensor_rule = -1 if key is None else found.fp4kit_tensor_rule(key.encode())
    kernels = kernels_of(r)
    check_array(x)
    if key is not None and tensor_rule < 0:
        return None
    prototype = encode_call(x, kernels, packed_step, scales_step)
    prototype.tensor_step = r.tensor_scaling == "row"
    return prototype, tensor_rule


def _code_call(call: Call) -> tuple[EncodeCall, int] | None:
    """Return the prototype and tensor rule of a call to quantize, as _matrix_call does."""
    specs = call.part_specs()
    steps = (specs[name][0][-1] if name in specs else 0 for name in ("packed", "block_scale"))
    return _matrix_call(call, *steps) if call.layout == "linear" else None


def _value_calls(call: Call) -> tuple[EncodeCall, DecodeCall, int] | None:
    """Return the prototypes that encode and decode, and the tensor rule, of a call to fake_quantize; or None."""
    shape, r = call.moved.shape, call.recipe
    if not_faked(r) is not None or (matrix_call := _matrix_call(call, 0, 0)) is None:
        return None
    encode, tensor_rule = matrix_call
    if r.fake_rule is not None:
        encode.min_factor, encode.max_factor = faked_factors(r, call.x.dtype)
    K = shape[-1]
    return encode, decode_call((call.x.size // K, K), call.x.dtype, faking(r), K, 0, 0), tensor_rule


def quantize(call: Call, x: Any, given: Any, both: bool = False) -> PreparedCall | None:
    """Return the call that repeats a parsed call to quantize with nearest rounding and linear scales, or None.

    It takes (x, tensor_amax, out), where tensor_amax is None if the library computes it. If the library cannot compute
    the result, `out` may be partly overwritten.
    """
    out, specs = call.out, call.part_specs()
    if both or not (out is None or _is_whole(*out.parts().values())) or (matrix_call := _code_call(call)) is None:
        return None
    (prototype, tensor_rule), access = matrix_call, access_to(x)
    new = {name: access.maker(*spec, False) for name, spec in specs.items()}
    fields = dict.fromkeys(PARTS) | call.result_fields()
    library, size, address = functions().fp4kit_quantize_matrix, call.x.size, access.address
    has_tensor = tensor_rule >= 0

    def run(x: Any, given: Any, out: Quantized | None) -> Quantized | None:
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        q = assembled(fields | {name: make() for name, make in new.items()}) if out is None else out
        tensor = (address(q.tensor_scale), address(q.tensor_amax)) if has_tensor else (None, None)
        packed, scales, threads = address(q.packed), address(q.block_scale), threads_for(size)
        if library(prototype, address(x), amax, packed, scales, *tensor, tensor_rule, threads):
            return None
        return q if access.result is None else q.with_parts(access.result)

    return run


def _moved_result(access: ArrayAccess, values: Any, axis: int) -> Any:
    """Return new values as the caller gets them: the last axis moved to `axis`, as an array of the caller's library."""
    moved = values if axis == values.ndim - 1 else access.moveaxis(values, -1, axis)
    return moved if access.result is None else access.result(moved)


def fake_quantize(call: Call, x: Any, given: Any) -> PreparedCall | None:
    """Return the call that repeats a parsed call to fake_quantize by codes, or None.

    It takes (x, tensor_amax), where tensor_amax is None if the library computes it.
    """
    shape, size, axis = call.moved.shape, call.x.size, call.axis
    if (calls := _value_calls(call)) is None:
        return None
    (prototype, decode, tensor_rule), library = calls, functions().fp4kit_fake_quantize
    access = access_to(x)
    new, address = access.maker(shape, call.x.dtype, True), access.address

    def run(x: Any, given: Any) -> Any:
        amax = None if given is None else access.amax_pointer(given)
        if not is_ieee() or (given is not None and amax is None):
            return None
        out, threads = new(), threads_for(size)
        if library(prototype, decode, address(x), amax, address(out), None, tensor_rule, threads):
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
    is_refused = r.is_custom or r.tensor_rule == "msmodelslim"
    if is_refused or not (is_small and q.scale_layout == "linear" and _is_whole(q.packed, q.block_scale, moved)):
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


def together(
    calls: Sequence[Call], amaxes: Sequence[np.ndarray | None], outs: Sequence[Any], are_given: bool
) -> Callable[[], list[int]]:
    """Return a function that runs parsed calls of a group on their memory, and returns the indices of those left over.

    amaxes: float32, in canonical shapes. The function reads them if are_given, otherwise it writes them.
    outs: what to write to: a Quantized per call; or an array of values with the quantized axis last; or None if only
        amaxes are wanted.
    """
    prototypes: dict[Any, tuple[EncodeCall, DecodeCall | None, int] | None] = {}
    matrices, indices, runs, size_before = list[list[int]](), list[int](), list[list[int]](), 0
    for i, (call, amax, out) in enumerate(zip(calls, amaxes, outs, strict=True)):
        x, size = call.x, call.x.size
        key = x.shape, x.strides, x.dtype, x.flags.num, amax is None or amax.shape
        if key not in prototypes:
            prototypes[key] = _prototypes(call, out)
        if (found := prototypes[key]) is None:
            continue
        encode, values, tensor_rule = found
        arrays = [x, amax if are_given else None, out, None, None, amax]
        if isinstance(out, Quantized):
            arrays[2:] = out.packed, out.block_scale, out.tensor_scale, out.tensor_amax
        pointers = [ctypes.addressof(encode), 0 if values is None else ctypes.addressof(values)]
        matrices.append([*pointers, *(address(a) or 0 for a in arrays), tensor_rule])
        indices.append(i)
        # Small matrices share the threads; a larger one has all threads for itself.
        if runs and max(size, size_before) < 2 * ELEMENTS_PER_THREAD and runs[-1][2] + size <= ELEMENTS_PER_CALL:
            runs[-1][1:] = runs[-1][1] + 1, runs[-1][2] + size
        else:
            runs.append([len(matrices) - 1, 1, size])
        size_before = size
    table = np.array(matrices, np.intp).reshape(len(matrices), 9)  # GroupedMatrix of source/c_api.cpp
    others, marks = sorted({*range(len(calls))} - {*indices}), np.zeros(len(matrices), np.uint8)
    memory = calls, amaxes, outs, prototypes  # to which the addresses in `table` refer

    def run() -> list[int]:
        if not is_ieee() or specification_only.get():
            return list(range(len(memory[0])))
        for first, count, size in runs:
            functions().fp4kit_group(address(table[first:]), count, address(marks[first:]), threads_for(size))
        return others + [indices[i] for i in np.flatnonzero(marks)]

    return run


def _prototypes(call: Call, out: Any) -> tuple[EncodeCall, DecodeCall | None, int] | None:
    """Return the prototypes and the tensor rule by which the library computes a call of `together`, or None."""
    try:
        if isinstance(out, np.ndarray):
            return _value_calls(call)
        found = _matrix_call(call, 0, 0) if out is None else _code_call(call)
    except Declined:
        return None
    return None if found is None else (found[0], None, found[1])
