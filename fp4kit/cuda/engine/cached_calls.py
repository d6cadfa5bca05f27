"""Cached calls on a GPU: each is one launch on one whole matrix, after another one for its amax where needed.

All other calls are done by the drivers, the other modules of this package. Arrays are CuPy arrays, or tensors of
PyTorch: then memory comes from PyTorch's allocator, and launches go to PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda.engine.buffers import FLOAT32, UINT8, ArrayLibrary, NewArray, library_of
from fp4kit.cuda.engine.matrices import launch_request, matrix_count, with_kernel_amax
from fp4kit.cuda.launch import matrix
from fp4kit.cuda.launch import swizzle as swizzle_launcher
from fp4kit.cuda.launch import transpose as transpose_launcher
from fp4kit.cuda.launch.dispatch import Arguments, LaunchRequest, find_kernel
from fp4kit.cuda.launch.geometry import Launch, aligned
from fp4kit.cuda.launch.matrix import Matrix, has_aligned_runs, quantize_launch
from fp4kit.cuda.launch.supported import check_formats
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import PARTS, Quantized, assembled
from fp4kit.quantized.part_shapes import wanted_parts

_NEW_AMAX = NewArray((), FLOAT32)


class QuantizedResult(NamedTuple):
    """The Quantized that a call makes: its fields without arrays that are made, the names of these, and the amax beside
    them.
    """

    fields: dict[str, Any]
    names: tuple[str, ...]
    wanted: tuple[NewArray, ...]
    amax: NewArray | None

    @classmethod
    def of(cls, call: Call, axis: int) -> QuantizedResult:
        """Of a call, with blocks along an axis."""
        shape, r = call.x.shape, call.recipe
        _, packed, scales, _ = wanted_parts(shape, axis, r, call.layout)
        fields = {"shape": shape, "dtype": call.x.dtype, "axis": axis, "recipe": r, "scale_layout": call.layout}
        covered = () if call.tensor_amax is None else call.tensor_amax.shape
        wanted = {"packed": NewArray(packed, UINT8)}
        if scales is not None:
            wanted["block_scale"] = NewArray(scales, UINT8, zeros=call.layout != "linear")
        if r.tensor_scaling != "none":
            wanted["tensor_scale"] = NewArray(covered, FLOAT32)
        return cls(dict.fromkeys(PARTS) | fields, tuple(wanted), tuple(wanted.values()), wanted.get("tensor_scale"))

    def make(self, arrays: list[Any], amax: Any) -> Quantized:
        """A new one of these arrays, or of as many of the first as it wants, and this amax."""
        q = assembled(self.fields)
        parts = q.__dict__
        parts.update(zip(self.names, arrays))  # noqa: B905 - further ones are of the columns, or amaxes
        parts["tensor_amax"] = amax
        return q


def _is_one_matrix(x: Any, r: Any, amax: Any) -> bool:
    """Whether an array is read where it is, on the current device, under at most one tensor scale."""
    return _are_contiguous_here(x) and r.tensor_scaling in ("none", "tensor") and (amax is None or amax.size == 1)


class Amax(NamedTuple):
    """The amax that a call does not give: found by a launch of its own, or (None) by that of the codes."""

    launch: Launch | None

    def find(self, memory: ArrayLibrary, x: int, amax: Any, stream: Any) -> None:
        """Into amax, where a launch is needed."""
        if self.launch is not None:
            memory.clear(amax, stream)
            self.launch(x, memory.address(amax), stream=stream)


def _amax(call: Call, request: LaunchRequest) -> Amax | None:
    """Of a call; None where it gives the amax, or needs none."""
    x, r = call.x, call.recipe
    if r.tensor_scaling == "none" or call.tensor_amax is not None:
        return None
    if request.finds_amax:
        return Amax(None)
    return Amax(matrix.amax_launch(x.dtype, matrix.COUNTED[r.amax_nan], False, aligned(x, 16), 1, x.size, x.device.id))


_KERNEL_NAMES = {
    "packed": "packed",
    "block_scale": "scales",
    "tensor_scale": "tensor_scale",
}  # a Quantized's, as kernels name them
_GIVEN = ("tensor_amax", "")  # addresses that follow those of x and of new arrays; "": 0


def _argument_picker(arguments: Arguments, new: Sequence[str]) -> Callable[[list[int]], tuple[int, ...]]:
    """What takes the arguments of a kernel before the sizes from the addresses of x, of new arrays by name, and of
    _GIVEN.
    """
    known = {
        name: i for i, name in reversed(tuple(enumerate(("x", *new, *_GIVEN))))
    }  # an amax that is new, not a given one
    return itemgetter(*(known.get(name, known[""]) for name in (*arguments.pointers, *arguments.words)))


def _names(result: QuantizedResult | None, prefix: str = "") -> tuple[str, ...]:
    """The arrays of a result, as kernels name them."""
    return () if result is None else tuple(prefix + _KERNEL_NAMES[name] for name in result.names)


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """quantize or quantize_both of one matrix, into out or new arrays: along rows, along columns, or both.

    new: makes the arrays of row and column, and then their amaxes, in the other order: found, or a copy of the given
    one.
    """

    memory: ArrayLibrary
    amax: Amax | None
    launch: Launch
    pick: Callable[[list[int]], tuple[int, ...]]
    row: QuantizedResult | None
    column: QuantizedResult | None
    new: Callable[[], list[Any]]

    @classmethod
    def of(
        cls,
        memory: ArrayLibrary,
        amax: Amax | None,
        launch: Launch,
        arguments: Arguments,
        row: QuantizedResult | None,
        column: QuantizedResult | None,
    ) -> QuantizeCall:
        """By a launch, called with the addresses of these arguments."""
        results = [result for result in (row, column) if result]
        wanted, names = [new for result in results for new in result.wanted], [*_names(row), *_names(column, "column_")]
        if results[0].amax is not None:
            wanted += [results[0].amax] * len(results)
            names += ["column_amax_out"] * (len(results) - 1) + ["amax_out" if amax is None else "tensor_amax"]
        return cls(memory, amax, launch, _argument_picker(arguments, names), row, column, memory.maker(wanted))

    def __call__(self, x: Any, given: Any, out: Quantized | None) -> Any:
        memory = self.memory
        address, stream = memory.address, memory.stream()
        arrays = self.new() if out is None else self._of(out)
        addresses = [address(x), *map(address, arrays), 0 if given is None else address(given), 0]
        if self.amax is not None:
            self.amax.find(memory, addresses[0], arrays[-1], stream)
        self.launch(*self.pick(addresses), stream=stream)
        return self._made(arrays) if out is None else out

    def _of(self, out: Quantized) -> list[Any]:
        """Arrays of out in the place of new ones; out is never of both."""
        result: Any = self.row or self.column
        return [
            getattr(out, name) for name in (result.names if result.amax is None else (*result.names, "tensor_amax"))
        ]

    def _made(self, arrays: list[Any]) -> Any:
        first, second = self.row, self.column
        one: Any = second if first is None else first
        amax, other = (None, None) if one.amax is None else arrays[:-3:-1]
        if first is None or second is None:
            return one.make(arrays, amax)
        return first.make(arrays, amax), second.make(arrays[len(first.names) :], other)


def quantize(call: Call, x: Any, both: bool = False) -> QuantizeCall | None:
    """Return the cached call of a call on x, the array as the caller gave it; None if it is not one launch.

    The call rounds to nearest, without a Hadamard transform or block amaxes. both: quantize_both, by its call for the
    columns.
    """
    last, columns = call.x.ndim - 1, call.axis == call.x.ndim - 2
    request = launch_request(call, columns=columns)
    choice = find_kernel(request) if columns or call.axis == last else None
    if (
        choice is None
        or not _is_one_matrix(call.x, call.recipe, call.tensor_amax)
        or matrix_count(call, request, call.tensor_amax) != 1
    ):
        return None
    request = with_kernel_amax(call, request, call.x)
    found = quantize_launch(choice, request, has_aligned_runs(Matrix(call.x), request), call.x.device.id)
    row = QuantizedResult.of(call, last) if both or not columns else None
    column = QuantizedResult.of(call, call.axis) if columns else None
    return QuantizeCall.of(library_of(x), _amax(call, request), found, choice.arguments, row, column)


@dataclass(frozen=True, slots=True)
class FakeQuantizeCall:
    """fake_quantize of one matrix; new: makes the values, and the amax where it is found."""

    memory: ArrayLibrary
    amax: Amax | None
    launch: Launch
    pick: Callable[[list[int]], tuple[int, ...]]
    new: Callable[[], list[Any]]

    @classmethod
    def of(
        cls, memory: ArrayLibrary, amax: Amax | None, launch: Launch, arguments: Arguments, values: NewArray
    ) -> FakeQuantizeCall:
        """By a launch, called with the addresses of these arguments."""
        new = memory.maker([values] if amax is None else [values, _NEW_AMAX])
        return cls(
            memory,
            amax,
            launch,
            _argument_picker(arguments, ("values",) if amax is None else ("values", "tensor_amax")),
            new,
        )

    def __call__(self, x: Any, given: Any) -> Any:
        memory, arrays = self.memory, self.new()
        address, stream = memory.address, memory.stream()
        addresses = [address(x), *map(address, arrays), 0 if given is None else address(given), 0]
        if self.amax is not None:
            self.amax.find(memory, addresses[0], arrays[1], stream)
        self.launch(*self.pick(addresses), stream=stream)
        return arrays[0]


def fake_quantize(call: Call, x: Any) -> FakeQuantizeCall | None:
    """Return the cached call of a call on x, the array as the caller gave it; None if it is not one launch.

    The call rounds to nearest, without block amaxes.
    """
    request = launch_request(call, values=True)
    one = _is_one_matrix(call.x, call.recipe, call.tensor_amax) and call.axis == call.x.ndim - 1
    choice = find_kernel(request)
    if choice is None or not one or matrix_count(call, request, call.tensor_amax) != 1:
        return None
    request = with_kernel_amax(call, request, call.x)
    found = quantize_launch(
        choice, request, has_aligned_runs(Matrix(call.x), request), call.x.device.id
    )  # new values are aligned
    return FakeQuantizeCall.of(
        library_of(x), _amax(call, request), found, choice.arguments, NewArray(call.x.shape, call.x.dtype)
    )


@dataclass(frozen=True, slots=True)
class DequantizeCall:
    """dequantize of one matrix."""

    memory: ArrayLibrary
    launch: Launch
    new: Callable[[], list[Any]]

    def __call__(self, q: Quantized, out: Any) -> Any:
        address, stream = self.memory.address, self.memory.stream()
        (values,) = self.new() if out is None else (out,)
        scales, tensor_scale, amax = q.block_scale, q.tensor_scale, q.tensor_amax
        self.launch(
            address(q.packed),
            0 if scales is None else address(scales),
            address(values),
            0 if tensor_scale is None else address(tensor_scale),
            0 if amax is None else address(amax),
            stream=stream,
        )
        return values


def dequantize(q: Quantized, given: Quantized, dtype: np.dtype, out: Any) -> DequantizeCall | None:
    """Return the cached call of a call on q, which the caller gave as `given`; None if it is not one launch."""
    r = q.recipe
    one = _is_one_matrix(q.packed, r, q.tensor_scale) and q.axis == len(q.shape) - 1
    joined = len(q.shape) <= 2 or q.scale_layout == "linear"
    arrays = [a for a in (q.packed, q.block_scale, out) if a is not None]
    if not one or not joined or not all(a.flags.c_contiguous and aligned(a, 16) for a in arrays):
        return None
    check_formats(r)
    shape = prod(q.shape[:-1]), q.shape[-1]
    found = matrix.dequantize_launch(r, q.scale_layout, q.dtype, dtype, shape, q.packed.device.id)
    memory = library_of(given.packed)
    return DequantizeCall(memory, found, memory.maker([NewArray(q.shape, dtype)]))


@dataclass(frozen=True, slots=True)
class MoveCall:
    """transpose or swizzle of a Quantized: other arrays, by their names, and fields that differ."""

    memory: ArrayLibrary
    launch: Launch
    names: tuple[str, ...]
    new: Callable[[], list[Any]]
    fields: dict[str, Any]

    def __call__(self, q: Quantized) -> Quantized:
        address, stream = self.memory.address, self.memory.stream()
        made, old = dict(zip(self.names, self.new(), strict=True)), vars(q)
        self.launch(*(address(old[name]) for name in made), *map(address, made.values()), stream=stream)
        return assembled({**old, **self.fields, **made})


def transpose(q: Quantized, given: Quantized, axis: int) -> MoveCall | None:
    """Return the cached call that transposes q, which the caller gave as `given`; None if it is not one launch.

    axis: the axis of the result.
    """
    if q.recipe.block_size not in transpose_launcher.BLOCKS or not _are_contiguous_here(q.packed, q.block_scale):
        return None
    *lead, M, K = q.moved_shape
    found = transpose_launcher.launch_of(
        q.packed, q.block_scale, q.recipe, q.scale_layout, None, None, (prod(lead), M, K)
    )
    _, packed, scales, _ = wanted_parts(q.shape, axis, q.recipe, q.scale_layout)
    memory = library_of(given.packed)
    new = memory.maker([NewArray(packed, UINT8), NewArray(scales or (), UINT8)])
    return MoveCall(memory, found, ("packed", "block_scale"), new, {"axis": axis})


def swizzle(q: Quantized, given: Quantized, layout: str) -> MoveCall | None:
    """Return the cached call that changes the layout of q's block scales; None if it is not one launch.

    given: q as the caller gave it.
    """
    if not _are_contiguous_here(q.block_scale) or q.scale_layout == layout:
        return None
    *lead, R, C = q.scale_shape
    found = swizzle_launcher.launch_of(q.block_scale, q.scale_layout, None, layout, (prod(lead), R, C))
    memory = library_of(given.block_scale)
    new = memory.maker([NewArray(padded_shape(q.scale_shape, layout), UINT8)])
    return MoveCall(memory, found, ("block_scale",), new, {"scale_layout": layout})


def _are_contiguous_here(*arrays: Any) -> bool:
    """Whether arrays are read where they are, on the current device."""
    device = imports.cupy().cuda.runtime.getDevice()
    return all(a.size and a.flags.c_contiguous and a.device.id == device for a in arrays)
