"""Run grouped operations (GroupedPlan, quantize_grouped, ...) on CuPy arrays: one launch for N arrays of one dtype.
ShapedOperands are AmaxOperands (see amax.py) with the shape of the result. A sign mask is an int whose bit i is 1 if a
Hadamard transform first negates element i of each 16. Launches are prepared once and launched as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.inputs import check_tensor_amax, parse_tensor_amax
from fp4kit.call.parse import Call, Declined, check_codes, declined_as_error, each
from fp4kit.cuda import matrix
from fp4kit.cuda.amax import (
    AmaxOperands,
    amax_operands,
    computed_tensor_amax,
    needs_block_kernel,
    plain_amax_operands,
    tensor_amax_operands,
)
from fp4kit.cuda.dispatch import LaunchRequest
from fp4kit.cuda.launch import GroupedLaunch
from fp4kit.cuda.matrix import Clip, Matrix, launch_request, split_matrices
from fp4kit.cuda.search import group_launches, matrices_to_search, without_search
from fp4kit.quantized.container import Quantized, scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import has_tall_scales

ShapedOperands = tuple[AmaxOperands, tuple[int, ...]]  # the operands of an amax, and the shape of the result


def cut(vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Cut a vector into consecutive parts."""
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    return [vector[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def by_dtype(arrays: Sequence[Any]) -> list[list[int]]:
    """Group arrays by dtype."""
    return [[i for i, a in enumerate(arrays) if a.dtype == dtype] for dtype in dict.fromkeys(a.dtype for a in arrays)]


def amax_launches(
    operands: Sequence[ShapedOperands], outs: Sequence[Any], mask: int | None = None
) -> list[GroupedLaunch]:
    """Return the launches that compute the amaxes of arrays: one per dtype."""
    found = []
    for indices in by_dtype([x for (x, *_), _ in operands]):
        nonempty = [i for i in indices if operands[i][0][0].size]
        if nonempty:
            _, counted, by_row = operands[nonempty[0]][0]
            found.append(
                matrix.amax_group(
                    [operands[i][0][0] for i in nonempty], [outs[i] for i in nonempty], counted, by_row, mask
                )
            )
    return found


def tensor_amax_launches(
    xs: Sequence[Any], outs: Sequence[Any], r: Recipe, mask: int | None = None
) -> Sequence[Callable[[], None]]:
    """Return functions that compute the tensor amaxes of arrays: one prepared launch per dtype."""
    if has_tall_scales(r) or any(x.shape[-1] % r.tensor_columns for x in xs):
        return [partial(_write_tensor_amax, x, out, r, mask) for x, out in zip(xs, outs, strict=True)]
    operands = [(tensor_amax_operands(x, r), out.shape) for x, out in zip(xs, outs, strict=True)]
    return amax_launches(operands, outs, mask)


def _write_tensor_amax(x: Any, out: Any, r: Recipe, mask: int | None) -> None:
    """Compute the tensor amaxes of a contiguous array, and write them to `out`, which has as many elements."""
    out[...] = computed_tensor_amax(x, r, mask).reshape(out.shape)


def amaxes(operands: Sequence[ShapedOperands]) -> list[Any]:
    """Compute amaxes in one launch per dtype."""
    shapes = [shape for _, shape in operands]
    outs = cut(imports.cupy().zeros(sum(map(prod, shapes)), np.float32), shapes)
    for call in amax_launches(operands, outs):
        call()
    return outs


def amax_group(calls: Sequence[tuple[Call]]) -> list[Any]:
    """Return what fp4kit.amax returns for each of N calls, computed by one launch per dtype."""
    ((first,), *_) = calls
    if needs_block_kernel(first.recipe):
        raise Declined("blocks of several rows need one launch per array")
    with imports.cupy().cuda.Device(first.x.device.id):
        return amaxes([amax_operands(call, imports.cupy().ascontiguousarray(call.moved)) for (call,) in calls])


def plain_amax_group(calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the result of amax.plain_amax(array, axis) for each pair (array, axis), by one launch per dtype."""
    with imports.cupy().cuda.Device(calls[0][0].device.id):
        return amaxes([plain_amax_operands(x, axis) for x, axis in calls])


def contiguous_or_copy(a: Any, copies: list[tuple[Any, Any]]) -> Any:
    """Return `a` if it is contiguous."""
    # If `a` is not contiguous, append (a, copy) to `copies`, so that launch_all makes the copy before each launch.
    if a.flags.c_contiguous:
        return a
    copies.append((a, imports.cupy().empty(a.shape, a.dtype)))
    return copies[-1][1]


def launch_all(copies: list[tuple[Any, Any]], launches: Sequence[Callable[[], None]]) -> None:
    """Refresh the contiguous copies of strided arrays, and then run all launches in order."""
    for array, copy in copies:
        imports.cupy().copyto(copy, array)
    for call in launches:
        call()


def clear(vector: Any) -> None:
    """Fill a contiguous vector with zeros by a memset, which needs no kernel."""
    if vector.size:
        vector.data.memset_async(0, vector.nbytes)


class CudaGroup:
    """Parsed calls on arrays on one GPU, with their outputs and the launches that quantize the arrays.

    Every run overwrites the outputs of the previous run. Launches that search block amaxes are prepared at once, all
    others when they are first needed.

    Args:
        calls: one parsed call per array, all with the same recipe.
        stack: the stacked array whose items are the arrays of the calls; None if they are separate arrays.

    Attributes:
        amaxes: the tensor amax of each array; every entry is None for a recipe without a tensor scale.
        vector: all tensor amaxes in one array that the group owns; None if the caller passed any amax on the GPU,
            or if the recipe has no tensor scale.
    """

    def __init__(self, calls: Sequence[Call], stack: Any) -> None:
        first = calls[0]
        self.calls, self.recipe, self._op, self._mask = calls, first.recipe, first.op, first.mask
        self._stacked = stack is not None
        self._device = imports.cupy().cuda.Device(first.x.device.id)
        # Pairs of an array and the contiguous copy that kernels read. The copies are made before each launch.
        self._copies: list[tuple[Any, Any]] = []
        self._codes: tuple[list[Quantized], list[GroupedLaunch]] | None = None
        self._raw_values: list[Any] = []  # the values with the quantized axis last, as the kernels write them
        self._values: list[Any] = []
        # The launches that write values. The key is True for kernels that compute the amaxes themselves.
        self._launches_of_values: dict[bool, list[GroupedLaunch]] = {}
        self._amax_launches: Sequence[Callable[[], None]] | None = None
        self.vector: Any = None
        with self._device:
            arrays = [call.moved for call in calls] if stack is None else [stack]
            self._xs = [contiguous_or_copy(a, self._copies) for a in arrays]
            self._xs = self._xs if stack is None else list(self._xs[0])
            self.amaxes = self._find_amaxes()
            self.calls, self._searches = self._find_searches()

    def _find_amaxes(self) -> list[Any]:
        """Return the tensor amax of each array, on the GPU."""
        r, cupy = self.recipe, imports.cupy()
        pairs = [(call.tensor_amax, call.moved.shape) for call in self.calls]
        if pairs[0][0] is None:
            if r.tensor_scaling == "none":
                return [None] * len(pairs)
            wanted = [tensor_amax_shape(shape, r) for _, shape in pairs]
            self.vector = cupy.zeros(sum(map(prod, wanted)), np.float32)
            return cut(self.vector, wanted)
        if r.tensor_scaling == "none" or any(isinstance(a, cupy.ndarray) for a, _ in pairs):
            given = [
                (contiguous_or_copy(a, self._copies) if isinstance(a, cupy.ndarray) else a, shape) for a, shape in pairs
            ]
            return each(self._op, lambda pair: parse_tensor_amax(self._op, pair[0], pair[1], r, True), given)
        checked = each(self._op, lambda pair: check_tensor_amax(self._op, pair[0], pair[1], r), pairs)
        self.vector = cupy.asarray(np.concatenate([a.ravel() for a in checked]))
        return cut(self.vector, [a.shape for a in checked])

    def _find_searches(self) -> tuple[Sequence[Call], list[Callable[[], None]]]:
        """Replace a search in the recipe by launches that search."""
        r, calls = self.recipe, self.calls
        if not r.search:
            return calls, []
        blocks = self._outputs(
            [scale_shape(x.shape, r) for x in self._xs], [np.float32] * len(calls), imports.cupy().empty
        )
        launches: list[Callable[[], None]] = []
        for indices in by_dtype(self._xs):
            group = [part for i in indices for part in matrices_to_search(self._xs[i], blocks[i], self.amaxes[i], r)]
            launches += group_launches(group, r, self._mask) if group else []
        return [
            call._replace(recipe=without_search(r), block_amax=b) for call, b in zip(calls, blocks, strict=True)
        ], launches

    @property
    def computes_amaxes(self) -> bool:
        """Return True if the group computes amaxes, False if the caller passed them or no amaxes are needed."""
        return self.vector is not None and self.calls[0].tensor_amax is None

    def amax(self) -> list[Any]:
        """Return the tensor amax of each array: the caller's or, if the caller passed none, one computed now."""
        with self._device:
            self._update(True)
        return self.amaxes

    def quantize(self, compute_amaxes: bool) -> list[Quantized]:
        """Quantize all arrays, and return one Quantized per array."""
        with self._device:
            self._codes = self._codes or self._prepare_codes()
            return self._run(self._codes, compute_amaxes)

    def fake_quantize(self, compute_amaxes: bool) -> list[Any]:
        """Fake-quantize all arrays, and return one array of values per array."""
        with self._device:
            own = compute_amaxes and self.computes_amaxes and self.recipe.tensor_scaling == "block"
            own = own and self.recipe.fake_rule is not None
            if own not in self._launches_of_values:
                self._launches_of_values[own] = self._prepare_values([None if own else a for a in self.amaxes])
            return self._run((self._values, self._launches_of_values[own]), compute_amaxes and not own)

    def _run(self, prepared: tuple[list[Any], list[GroupedLaunch]], compute_amaxes: bool) -> list[Any]:
        """Run prepared launches, and return their outputs."""
        outputs, launches = prepared
        self._update(compute_amaxes)
        launch_all([], [*self._searches, *launches])
        return outputs

    def _update(self, compute_amaxes: bool) -> None:
        """Update the contiguous copies of strided arrays, and then the amaxes."""
        if not (compute_amaxes and self.computes_amaxes):
            return launch_all(self._copies, [])
        if self._amax_launches is None:
            self._amax_launches = tensor_amax_launches(self._xs, self.amaxes, self.recipe, self._mask)
        clear(self.vector)
        return launch_all(self._copies, self._amax_launches)

    def _prepare_codes(self) -> tuple[list[Quantized], list[GroupedLaunch]]:
        """Allocate codes and scales."""
        cupy, r, layout = imports.cupy(), self.recipe, self.calls[0].layout
        each(self._op, lambda call: check_codes(call, layout), self.calls)
        specs, none = [call._replace(tensor_amax=None).part_specs() for call in self.calls], [None] * len(self.calls)
        made: dict[str, list[Any]] = dict.fromkeys(("packed", "block_scale", "tensor_scale", "tensor_amax"), none)
        for name in specs[0]:
            if name in ("packed", "block_scale"):
                make = cupy.empty if name == "packed" or layout == "linear" else cupy.zeros
                made[name] = self._outputs([s[name][0] for s in specs], [np.uint8] * len(specs), make)
            elif name == "tensor_scale" or self.vector is None:  # copies of amaxes that the caller may overwrite later
                shapes = [a.shape for a in self.amaxes]
                made[name] = cut(cupy.empty(sum(map(prod, shapes)), np.float32), shapes)
        parts = [*zip(self._xs, self.amaxes, *made.values(), strict=True)]
        matrices = [Matrix(x, c, s, None, amax, d, amax_out=out) for x, amax, c, s, d, out in parts]
        launches = self._launches(matrices, values=False)
        return [
            Quantized(codes, s, d, amax if out is None else out, call.x.shape, call.x.dtype, call.axis, r, layout)
            for call, (_, amax, codes, s, d, out) in zip(self.calls, parts, strict=True)
        ], launches

    def _prepare_values(self, amaxes: list[Any]) -> list[GroupedLaunch]:
        """Allocate the arrays of values at the first call."""
        cupy = imports.cupy()
        if not self._raw_values:
            self._raw_values = self._outputs([x.shape for x in self._xs], [x.dtype for x in self._xs], cupy.empty)
            self._values = [
                cupy.moveaxis(v, -1, call.axis) for call, v in zip(self.calls, self._raw_values, strict=True)
            ]
        matrices = [
            Matrix(x, values=v, tensor_amax=a) for x, v, a in zip(self._xs, self._raw_values, amaxes, strict=True)
        ]
        return self._launches(matrices, values=True)

    def _outputs(self, shapes: list[tuple[int, ...]], dtypes: list[Any], make: Callable[..., Any]) -> list[Any]:
        """Return one new array per shape, made by make(shape, dtype)."""
        if self._stacked:
            return list(make((len(shapes), *shapes[0]), dtypes[0]))
        return [make(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def _launches(self, matrices: list[Matrix], values: bool) -> list[GroupedLaunch]:
        """Return the launches that quantize the arrays: one per dtype that has work."""
        seed = next((call.random for call in self.calls if isinstance(call.random, int)), 0)
        found = []
        with declined_as_error(self._op):
            for indices in by_dtype(self._xs):
                group = [part for i in indices for part in self._matrices_of(self.calls[i], matrices[i], values)]
                if group:
                    found.append(matrix.quantize_group([m for m, _ in group], [w for _, w in group], seed))
        return found

    def _matrices_of(self, call: Call, m: Matrix, values: bool) -> list[tuple[Matrix, LaunchRequest]]:
        """Split the array of a call into matrices."""
        # For an array without elements, return [] or, if it has tensor scales, one matrix without columns, because the
        # kernel must still write the tensor scales.
        request = launch_request(call, values=values)
        if m.x.size:
            return list(split_matrices(call, request, m))
        if m.tensor_scale is None or not m.tensor_amax.size:
            return []
        shape = (m.tensor_amax.size, 0)
        empty = Matrix(m.x.reshape(shape), tensor_amax=m.tensor_amax, tensor_scale=m.tensor_scale, amax_out=m.amax_out)
        return [(empty, request._replace(shape=shape))]


class CudaClipGroup:
    """Gradients on one GPU and the launches that clip them. The launches are prepared once and can run repeatedly.

    Args:
        calls: parsed calls to fake_quantize_backward.
        amaxes: the clip limit of each call; None to compute the limit from call.x.

    Attributes:
        outs: the clipped gradient of each call, which clip() overwrites. If a call has no elements, its entry is the
            gradient itself.
    """

    def __init__(self, calls: Sequence[Call], amaxes: Sequence[Any]) -> None:
        cupy = imports.cupy()
        self._copies: list[tuple[Any, Any]] = []
        self._device = cupy.cuda.Device(calls[0].x.device.id)
        nonempty = [(call, amax) for call, amax in zip(calls, amaxes, strict=True) if call.x.size]
        with self._device:
            xs = [contiguous_or_copy(call.moved, self._copies) for call, _ in nonempty]
            grads = [contiguous_or_copy(np.moveaxis(call.grad, call.axis, -1), self._copies) for call, _ in nonempty]
            outs = [cupy.empty(g.shape, g.dtype) for g in grads]
            limits = self._limits(nonempty, xs)
            self._launches += clip_launches([Clip(*arrays) for arrays in zip(grads, xs, limits, outs, strict=True)])
            clipped = iter([cupy.moveaxis(out, -1, call.axis) for (call, _), out in zip(nonempty, outs, strict=True)])
        self.outs = [next(clipped) if call.x.size else call.grad for call in calls]

    def _limits(self, nonempty: Sequence[tuple[Call, Any]], xs: list[Any]) -> list[Any]:
        """Return the clip limit of each nonempty call, as a contiguous array, and set _vector and _launches."""
        given = [None if amax is None else contiguous_or_copy(amax, self._copies) for _, amax in nonempty]
        computed = [i for i, amax in enumerate(given) if amax is None]
        shapes = [(prod(tensor_amax_shape(xs[i].shape, nonempty[i][0].recipe)),) for i in computed]
        self._vector = imports.cupy().zeros(sum(shape[0] for shape in shapes), np.float32)
        for i, amax in zip(computed, cut(self._vector, shapes), strict=True):
            given[i] = amax
        self._launches: list[Callable[[], None]] = []
        if computed:
            r = nonempty[computed[0]][0].recipe
            self._launches += tensor_amax_launches([xs[i] for i in computed], [given[i] for i in computed], r)
        return given

    def clip(self) -> list[Any]:
        """Clip the gradients, and return them: the arrays in `outs`, which the next call overwrites."""
        with self._device:
            clear(self._vector)
            launch_all(self._copies, self._launches)
        return list(self.outs)


def clip_launches(clips: Sequence[Clip]) -> list[GroupedLaunch]:
    """Return the prepared launches that clip gradients: one per pair (dtype of x, dtype of the gradient)."""
    kinds = dict.fromkeys((c.x.dtype, c.grad.dtype) for c in clips)
    return [matrix.clip_group([c for c in clips if (c.x.dtype, c.grad.dtype) == kind]) for kind in kinds]
