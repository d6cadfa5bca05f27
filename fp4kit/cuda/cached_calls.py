"""Make cached calls (ops/engines.py) on a GPU, for CuPy arrays and PyTorch tensors, with little work on the host.
quantize, fake_quantize, dequantize, transpose and swizzle take a parsed call, and return a function that repeats it for
other arrays with the same shapes, dtypes and alignment. They return None if the call takes more than one launch on one
matrix, and one that computes an amax first. For tensors, memory comes from PyTorch's allocator, and launches go to
PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from math import prod
from operator import attrgetter, itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports, returns
from fp4kit.call.parse import Call
from fp4kit.cuda import matrix
from fp4kit.cuda.amax import tensor_amax_operands
from fp4kit.cuda.dispatch import LaunchRequest, check_formats, find_kernel, finds_outer_amaxes
from fp4kit.cuda.launch import Launch, aligned
from fp4kit.cuda.transforms import SQUARE_BLOCKS, swizzle_launch, transpose_launch
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import PARTS, Quantized, assembled, tensor_amax_shape, wanted_parts
from fp4kit.recipes import Recipe

PreparedCall = Callable[..., Any]  # repeats a call: takes its arrays, and returns the result
FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)


class NewArray(NamedTuple):
    """The description of an array that a call allocates.

    Attributes:
        shape: the shape of the array.
        dtype: its NumPy dtype, also for a PyTorch tensor.
        zeros: True to fill the array with zeros; False to leave it uninitialized.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    zeros: bool = False


class _Outputs(NamedTuple):
    """Arrays that a call writes: one entry of the first three fields per new array. A computed amax is the last array.

    names: the fields of `out` that are used in place of new arrays.
    arguments: the names of the kernel's arguments.
    build: build(arrays) returns the result, from a list that begins with the new arrays.
    """

    names: tuple[str, ...]
    new: tuple[NewArray, ...]
    arguments: tuple[str, ...]
    build: Callable[[list[Any]], Any]


# Maps the fields of a Quantized to the names of the kernels' arguments.
_KERNEL_NAMES = {"packed": "packed", "block_scale": "scales", "tensor_scale": "tensor_scale"}


def _codes(call: Call, amax: str, prefix: str = "") -> _Outputs:
    """Return the _Outputs of a call to quantize. `amax` is the name of the kernel's argument for the tensor_amax."""
    specs, fields = call.part_specs(), dict.fromkeys(PARTS) | call.result_fields()
    new = [NewArray(*spec, name == "block_scale" and call.layout != "linear") for name, spec in specs.items()]
    arguments = (amax if name == "tensor_amax" else prefix + _KERNEL_NAMES[name] for name in specs)

    def build(arrays: list[Any]) -> Quantized:
        q = assembled(fields)
        parts = q.__dict__
        for name, array in zip(specs, arrays):  # noqa: B905 - further arrays belong to the rowwise result
            parts[name] = array
        return q

    return _Outputs(tuple(specs), tuple(new), tuple(arguments), build)


def quantize(call: Call, x: Any, given: Any, both: bool = False) -> PreparedCall | None:
    """Return the call that repeats a parsed call to quantize, or None. It takes (x, tensor_amax, out or None)."""
    last, columns = call.x.ndim - 1, call.axis == call.x.ndim - 2
    if not (columns or call.axis == last) or (columns and call.recipe.tensor_scaling == "row"):
        return None
    # The kernel writes the amax that it computes, or a copy of the caller's amax, into the tensor_amax of each result.
    written = "tensor_amax" if _computes_amax(call) else "amax_out"
    request, row = matrix.launch_request(call, columns=columns), _codes(call._replace(axis=last, moved=call.x), written)
    if not columns:
        return _repeated(call, x, given, request, row)
    column = _codes(call, "column_amax_out" if both else written, "column_")
    if not both:
        return _repeated(call, x, given, request, column)
    count = len(column.new)

    def build(arrays: list[Any]) -> tuple[Quantized, Quantized]:
        return row.build(arrays[count:]), column.build(arrays)

    outputs = _Outputs((), column.new + row.new, column.arguments + row.arguments, build)
    return _repeated(call, x, given, request, outputs)


def fake_quantize(call: Call, x: Any, given: Any) -> PreparedCall | None:
    """Return the call that repeats a parsed call to fake_quantize, or None. It takes (x, tensor_amax)."""
    if call.axis != call.x.ndim - 1:
        return None
    outputs = _Outputs((), (NewArray(call.x.shape, call.x.dtype),), ("values",), itemgetter(0))
    if _computes_amax(call):
        amax = NewArray(tensor_amax_shape(call.x.shape, call.recipe), FLOAT32)
        outputs = outputs._replace(new=(*outputs.new, amax), arguments=("values", "tensor_amax"))
    return _repeated(call, x, given, matrix.launch_request(call, values=True), outputs)


def _computes_amax(call: Call) -> bool:
    """Return True if a call computes an amax: the recipe has a tensor scale, and the caller passed no amax."""
    return call.recipe.tensor_scaling != "none" and call.tensor_amax is None


def _repeated(call: Call, x: Any, given: Any, request: LaunchRequest, outputs: _Outputs) -> PreparedCall | None:
    """Return the call that quantizes or fake-quantizes one matrix. It takes (x, tensor_amax, out or None)."""
    choice, library, amax = find_kernel(request), library_of(x), call.tensor_amax
    finds_block_amaxes = amax is None and finds_outer_amaxes(request)
    if (
        choice is None
        or not _is_one_matrix(call.x, call.recipe, request.shape[0], amax, finds_block_amaxes)
        or (amax is not None and library.address(given) != amax.data.ptr)  # the parsed call holds a contiguous copy
        or matrix.matrix_count(call, request, amax) != 1
    ):
        return None
    request = matrix.with_kernel_amax(call, request, call.x)
    aligned_runs = matrix.has_aligned_runs(matrix.Matrix(call.x), request)  # a new array of values will be aligned
    launch = matrix.quantize_launch(choice, request, aligned_runs, call.x.device.id)
    find_amax: Launch | None = None
    by_row, raises, arguments = False, False, outputs.arguments
    if _computes_amax(call) and not request.finds_amax:
        operands = tensor_amax_operands(call.x, call.recipe)
        find_amax, by_row, raises = matrix.amax_launch(*operands), operands[2], matrix.raises_amax(*operands[::2])
        if not by_row:  # quantize reads it from a cell, as if the caller had passed it
            arguments = tuple(name.replace("tensor_amax", "amax_out") for name in arguments)
    # The last two addresses are the caller's tensor_amax, and 0 for arguments without an array. The order is reversed,
    # so that a new tensor_amax overrides the caller's.
    known = {name: i for i, name in reversed(tuple(enumerate(("x", *arguments, "tensor_amax", ""))))}
    pick = itemgetter(*(known.get(name, known[""]) for name in (*choice.arguments.pointers, *choice.arguments.words)))
    new, (names, _, _, build) = library.maker(outputs.new), outputs
    address, clear, current_stream = library.address, library.clear, library.stream
    runtime, device = imports.cupy().cuda.runtime, call.x.device.id

    def run(x: Any, given: Any, out: Quantized | None = None) -> Any:
        stream = current_stream()
        arrays = new() if out is None else [getattr(out, name) for name in names]
        addresses = [address(x), *map(address, arrays), 0 if given is None else address(given), 0]
        if find_amax is not None:
            amax = addresses[len(arrays)]  # that of the result
            if (by_row and raises) or (not by_row and runtime.streamIsCapturing(stream.ptr)):
                clear(arrays[-1], stream)
            elif not by_row:
                amax = _cells(device, stream.ptr, get_ident()).take()
            if not by_row:
                addresses[-2] = amax
            find_amax(addresses[0], amax, stream=stream)
        launch(*pick(addresses), stream=stream)
        return build(arrays) if out is None else out

    return run


class _Cells:
    """Float32 zeros in device memory, for the tensor amaxes that one thread computes on one stream, one after another.

    Many of them are cleared at once. A memset per call would take 2 us of the device's time (H200, 2026-11-29).
    """

    # A kernel that reads x once was tried instead of two launches. Its thread blocks keep 26 MB in shared memory, meet
    # at a counter, and then encode. For nvfp4-te from bfloat16 (us; H200, 2026-11-29):
    #     x in MiB                  8      32     64     128    256
    #     two launches              7.9    21.5   40.8   75.8   143.6
    #     with a memset before      10.2   23.6   43.9   78.8   146.3
    #     one launch                8.8    22.3   41.3   77.0   150.0

    # So many that work of an earlier stream with the same address is done before a cell that it cleared is taken.
    _QUARTER = 1024

    def __init__(self, stream: int) -> None:
        cuda, size = imports.cupy().cuda, 4 * self._QUARTER * 4
        self._memory, self._stream, self._taken = cuda.Memory(size), stream, 0
        self._clear = cuda.runtime.memsetAsync
        self._clear(self._memory.ptr, 0, size, stream)

    def take(self) -> int:
        """Return the address of the next cell. It may be used until half of all cells are taken after it."""
        i, quarter = self._taken, self._QUARTER
        self._taken = (i + 1) % (4 * quarter)
        if i % quarter == 0:
            start = (i // quarter + 2) % 4 * quarter
            self._clear(self._memory.ptr + 4 * start, 0, 4 * quarter, self._stream)
        return int(self._memory.ptr) + 4 * i


@cache
def _cells(device: int, stream: int, thread: int) -> _Cells:
    """Return the cells of a thread for a stream of the current device, which must be `device`."""
    return _Cells(stream)


def _is_one_matrix(x: Any, r: Recipe, rows: int, amax: Any, finds_block_amaxes: bool = False) -> bool:
    """Return True if one launch on the current device can read x in place, as one matrix."""
    if (r.tensor_scaling == "block" and not finds_block_amaxes) or not _are_contiguous_here(x):
        return False
    return amax is None or (amax.flags.c_contiguous and amax.size == (rows if r.tensor_scaling == "row" else 1))


def _are_contiguous_here(*arrays: Any) -> bool:
    """Return True if kernels can read arrays in place: if each is nonempty, contiguous and on the current device."""
    device = imports.cupy().cuda.runtime.getDevice()
    return all(a.size and a.flags.c_contiguous and a.device.id == device for a in arrays)


def dequantize(q: Quantized, given: Quantized, dtype: np.dtype, out: Any) -> PreparedCall | None:
    """Return the call that repeats a call to dequantize, or None. It takes (q, out or None)."""
    r, shape = q.recipe, (prod(q.shape[:-1]), q.shape[-1])
    is_one_matrix = _is_one_matrix(q.packed, r, shape[0], q.tensor_scale) and q.axis == len(q.shape) - 1
    is_joined = len(q.shape) <= 2 or q.scale_layout == "linear"
    arrays = [a for a in (q.packed, q.block_scale, out) if a is not None]
    is_in_order = all(a.flags.c_contiguous and aligned(a, 16) for a in arrays)
    if matrix.implies_amaxes(r) or not is_one_matrix or not is_joined or not is_in_order:
        return None
    check_formats(r)
    launch = matrix.dequantize_launch(r, q.scale_layout, q.dtype, dtype, shape, q.packed.device.id)
    library = library_of(given.packed)
    address, current_stream, new = library.address, library.stream, library.maker([NewArray(q.shape, dtype)])

    def run(q: Quantized, out: Any) -> Any:
        stream = current_stream()
        (values,) = new() if out is None else (out,)
        scales, tensor_scale, amax = q.block_scale, q.tensor_scale, q.tensor_amax
        launch(
            address(q.packed),
            0 if scales is None else address(scales),
            address(values),
            0 if tensor_scale is None else address(tensor_scale),
            0 if amax is None else address(amax),
            stream=stream,
        )
        return values

    return run


def transpose(q: Quantized, given: Quantized, axis: int) -> PreparedCall | None:
    """Return the call that repeats a call to transpose, or None."""
    if q.recipe.block_size not in SQUARE_BLOCKS or not _are_contiguous_here(q.packed, q.block_scale):
        return None
    *lead, M, K = q.moved_shape
    launch = transpose_launch(q.packed, q.block_scale, q.recipe, q.scale_layout, None, None, (prod(lead), M, K))
    _, packed, scales, _ = wanted_parts(q.shape, axis, q.recipe, q.scale_layout)
    return _moved(given.packed, launch, {"packed": packed, "block_scale": scales or ()}, axis=axis)


def swizzle(q: Quantized, given: Quantized, layout: str) -> PreparedCall | None:
    """Return the call that repeats a call to swizzle or unswizzle, or None."""
    if not _are_contiguous_here(q.block_scale) or q.scale_layout == layout:
        return None
    *lead, R, C = q.scale_shape
    launch = swizzle_launch(q.block_scale, q.scale_layout, None, layout, (prod(lead), R, C))
    return _moved(given.block_scale, launch, {"block_scale": padded_shape(q.scale_shape, layout)}, scale_layout=layout)


def _moved(like: Any, launch: Launch, shapes: dict[str, tuple[int, ...]], **fields: Any) -> PreparedCall:
    """Return the call that copies arrays of a Quantized, those in `shapes`, in another order: q -> Quantized."""
    library = library_of(like)
    new = library.maker([NewArray(shape, UINT8) for shape in shapes.values()])
    address, current_stream = library.address, library.stream

    def run(q: Quantized) -> Quantized:
        stream = current_stream()
        made, old = dict(zip(shapes, new(), strict=True)), vars(q)
        launch(*(address(old[name]) for name in made), *map(address, made.values()), stream=stream)
        return assembled({**old, **fields, **made})

    return run


# The most bytes of arrays that share one allocation. It is small, because each array keeps the whole allocation alive.
_MAX_SHARED_BYTES = 1 << 20
_ALIGNMENT = 256  # bytes; arrays in a shared allocation begin at its multiples, as separate allocations do


class DeviceArrayAccess(NamedTuple):
    """The functions with which a cached call handles arrays of CuPy or of PyTorch.

    Functions that are implemented in C are used where possible, because a call to a Python function takes 0.25 us (host
    of an H200, November 2026).

    Attributes:
        address: address(array) returns the address of the array's first element.
        maker: maker(descriptions) returns a function without arguments that allocates one new array per NewArray.
        clear: clear(array, stream) sets a float32 array to 0 on a stream.
        stream: stream() returns the current stream.
    """

    address: Callable[[Any], int]
    maker: Callable[[Sequence[NewArray]], Callable[[], list[Any]]]
    clear: Callable[[Any, Any], None]
    stream: Callable[[], Any]


def library_of(a: Any) -> DeviceArrayAccess:
    """Return the DeviceArrayAccess for the library of an array: CuPy or PyTorch."""
    return _cupy_library() if type(a).__module__ == "cupy" else _torch_library(a.device)


def _cupy_library() -> DeviceArrayAccess:
    """Return the DeviceArrayAccess of CuPy."""

    def clear(a: Any, stream: Any) -> None:
        """Set a float32 array to 0 on the current stream, which `stream` must be."""
        a.data.memset_async(0, a.nbytes)

    return DeviceArrayAccess(attrgetter("data.ptr"), _cupy_maker, clear, imports.cupy().cuda.get_current_stream)


def _cupy_maker(wanted: Sequence[NewArray]) -> Callable[[], list[Any]]:
    """Return a function without arguments that returns a list of new CuPy arrays, one per description in `wanted`."""
    # If there are several arrays, of at most _MAX_SHARED_BYTES (1 MiB) together, they share one allocation, because
    # allocating memory takes half of the time that it takes to make an array.
    cupy = imports.cupy()
    sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype, _ in wanted]
    if len(wanted) == 1 or sum(sizes) > _MAX_SHARED_BYTES:
        make = [partial(cupy.zeros if zeros else cupy.ndarray, shape, dtype) for shape, dtype, zeros in wanted]
        return lambda: [new() for new in make]
    places = [(new.shape, new.dtype, start) for new, start in zip(wanted, accumulate(sizes, initial=0), strict=False)]
    cleared = [i for i, new in enumerate(wanted) if new.zeros]
    allocate, array, size = cupy.cuda.alloc, _array_at(cupy), sum(sizes)

    def shared() -> list[Any]:
        """Allocate all arrays in one piece of memory, set the arrays of `cleared` to 0, and return the arrays."""
        memory = allocate(size)
        made = [array(shape, dtype, memory + start) for shape, dtype, start in places]
        for i in cleared:
            made[i].data.memset_async(0, made[i].nbytes)
        return made

    return shared


def _array_at(cupy: Any) -> Callable[..., Any]:
    """Return a fast equivalent of the class cupy.ndarray: a function of (shape, dtype, memory) that makes an array."""
    kind = cupy.ndarray
    new = kind.__mro__[1].__new__

    def array(shape: tuple[int, ...], dtype: np.dtype, memory: Any) -> Any:
        """Return a CuPy array that begins at `memory`, a pointer into an allocation, which the array keeps alive."""
        made = new(kind)
        made._init(shape, dtype, memory)
        return made

    memory = cupy.cuda.alloc(_ALIGNMENT) + 8
    facts = attrgetter(
        "shape", "dtype", "strides", "size", "nbytes", "flags.c_contiguous", "data.ptr", "data.device_id", "base"
    )
    for shape, dtype in (((2, 3), FLOAT32), ((), UINT8)):
        try:
            made = array(shape, dtype, memory)
            if type(made) is not kind or facts(made) != facts(kind(shape, dtype, memory)):
                return kind
        except (AttributeError, TypeError, ValueError):
            return kind
    return array


@cache
def _torch_library(device: Any) -> DeviceArrayAccess:
    """Return the DeviceArrayAccess of PyTorch tensors on a device."""
    set_to = imports.cupy().cuda.runtime.memsetAsync

    def maker(wanted: Sequence[NewArray]) -> Callable[[], list[Any]]:
        """Return a function without arguments that returns a list of new tensors, one per description in `wanted`."""
        make = [returns.maker(device, *new) for new in wanted]
        return lambda: [new() for new in make]

    def clear(a: Any, stream: Any) -> None:
        """Set a float32 tensor to 0 on a stream."""
        set_to(a.data_ptr(), 0, a.nbytes, stream.ptr)

    return DeviceArrayAccess(returns.address(), maker, clear, returns.streams_of(device))
