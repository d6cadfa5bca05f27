"""Groups of CuPy arrays: what is made of N arrays in one launch, prepared once and launched as often as needed.

A launch covers arrays of one dtype, so a group of several dtypes takes one for each. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fp4kit.cuda import grouped, launch, loader
from fp4kit.cuda.grouped import Launch, Matrix
from fp4kit.ops import check, fake_on_device, on_device
from fp4kit.ops.each import each
from fp4kit.ops.prepare import Prepared
from fp4kit.ops.quantize import check_codes
from fp4kit.quantized import Quantized, packed_shape, scale_shape

AmaxRows = tuple[tuple[Any, str, bool], tuple[int, ...]]  # what launch.amax takes, and the shape of its result


def cut(vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Views of consecutive parts of a vector, in these shapes."""
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    return [vector[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def by_dtype(arrays: Sequence[Any]) -> list[list[int]]:
    """Numbers of the arrays of each dtype."""
    return [[i for i, a in enumerate(arrays) if a.dtype == dtype] for dtype in dict.fromkeys(a.dtype for a in arrays)]


def amax_launches(rows: Sequence[AmaxRows], outs: Sequence[Any], mask: int | None = None) -> list[Launch]:
    """Launches that write the amaxes of arrays into outs, which hold zeros."""
    found = []
    for numbers in by_dtype([x for (x, *_), _ in rows]):
        full = [i for i in numbers if rows[i][0][0].size]
        if full:
            _, counted, by_row = rows[full[0]][0]
            found.append(grouped.amax_group([rows[i][0][0] for i in full], [outs[i] for i in full], counted, by_row, mask))
    return found


def amaxes(rows: Sequence[AmaxRows]) -> list[Any]:
    """launch.amax of N arrays in one launch: views of one vector."""
    shapes = [shape for _, shape in rows]
    outs = cut(loader.cupy().zeros(sum(map(prod, shapes)), np.float32), shapes)
    for call in amax_launches(rows, outs):
        call()
    return outs


def readable(a: Any, copies: list[tuple[Any, Any]]) -> Any:
    """a where it is contiguous; else room for a copy, which joins `copies`."""
    if a.flags.c_contiguous:
        return a
    copies.append((a, loader.cupy().empty(a.shape, a.dtype)))
    return copies[-1][1]


def launch_all(copies: list[tuple[Any, Any]], launches: Sequence[Launch]) -> None:
    """Make the copies, then the launches."""
    for array, copy in copies:
        loader.cupy().copyto(copy, array)
    for call in launches:
        call()


def clear(vector: Any) -> None:
    """Zeros, without a kernel."""
    if vector.size:
        vector.data.memset_async(0, vector.nbytes)


class Group:
    """N arrays of one device, their amaxes, codes and values, and the launches over them, each prepared when first needed.

    amaxes: of each array, what its tensor scales are made from, or None. vector: all of them, in one array of the group.
    """

    def __init__(
        self, op: str, prepared: Sequence[Prepared], stack: Any, layout: str, random: Sequence[Any], mask: int | None
    ) -> None:
        each(op, lambda p: on_device.check_block_amax(op, p), prepared)
        self.prepared, self.recipe, self._op = prepared, prepared[0].recipe, op
        self._layout, self._random, self._mask, self._stacked = layout, random, mask, stack is not None
        self._device = loader.cupy().cuda.Device(prepared[0].x.device.id)
        self._copies: list[tuple[Any, Any]] = []  # (array, contiguous copy that the kernels read), made anew for each launch
        self._codes: tuple[list[Quantized], list[Launch]] | None = None
        self._raw_values: list[Any] = []  # as the kernels write them, with the axis last
        self._values: list[Any] = []
        self._launches_of_values: dict[bool, list[Launch]] = {}  # by whether the kernel computes the amaxes itself
        self._amax_launches: list[Launch] | None = None
        self.vector: Any = None
        with self._device:
            arrays = [p.moved for p in prepared] if stack is None else [stack]
            self._xs = [readable(a, self._copies) for a in arrays]
            self._xs = self._xs if stack is None else list(self._xs[0])
            self.amaxes = self._find_amaxes()

    def _find_amaxes(self) -> list[Any]:
        r, shapes = self.recipe, [p.moved.shape for p in self.prepared]
        given = [p.others.get("tensor_amax") for p in self.prepared]
        if r.tensor_scaling == "none":
            none = lambda a, s: a if a is None else check.check_tensor_amax(self._op, a, s, r)  # noqa: E731
            return each(self._op, none, given, shapes)
        cupy = loader.cupy()
        if all(a is None for a in given):  # they are given for all, or for none
            wanted = [check.tensor_amax_shape(s, r) for s in shapes]
            self.vector = cupy.zeros(sum(map(prod, wanted)), np.float32)
            return cut(self.vector, wanted)
        if any(isinstance(a, cupy.ndarray) for a in given):
            ready = [readable(a, self._copies) if isinstance(a, cupy.ndarray) else a for a in given]
            return each(self._op, lambda a, s: on_device.given_amax(self._op, a, s, r), ready, shapes)
        checked = each(self._op, lambda a, s: check.check_tensor_amax(self._op, a, s, r), given, shapes)
        self.vector = cupy.asarray(np.concatenate([a.ravel() for a in checked]))
        return cut(self.vector, [a.shape for a in checked])

    @property
    def computes_amaxes(self) -> bool:
        """Whether the amaxes come from the arrays; else they were given."""
        return self.vector is not None and self.prepared[0].others.get("tensor_amax") is None

    def amax(self) -> list[Any]:
        """Compute the amaxes, unless they were given."""
        with self._device:
            self._update(True)
        return self.amaxes

    def quantize(self, compute_amaxes: bool) -> list[Quantized]:
        """Write the codes, scales and tensor scales of all arrays."""
        with self._device:
            self._codes = self._codes or self._prepare_codes()
            return self._run(self._codes, compute_amaxes)

    def fake_quantize(self, compute_amaxes: bool) -> list[Any]:
        """Write the values of all arrays. A fake_rule with a scale for each block computes its amaxes itself, where it shall."""
        with self._device:
            own = compute_amaxes and self.computes_amaxes and self.recipe.tensor_scaling == "block"
            own = own and self.recipe.fake_rule is not None
            if own not in self._launches_of_values:
                self._launches_of_values[own] = self._prepare_values([None if own else a for a in self.amaxes])
            return self._run((self._values, self._launches_of_values[own]), compute_amaxes and not own)

    def _run(self, prepared: tuple[list[Any], list[Launch]], compute_amaxes: bool) -> list[Any]:
        outputs, launches = prepared
        self._update(compute_amaxes)
        launch_all([], launches)
        return outputs

    def _update(self, compute_amaxes: bool) -> None:
        if not (compute_amaxes and self.computes_amaxes):
            return launch_all(self._copies, [])
        if self._amax_launches is None:
            rows = [(on_device.covered_by_scales(x, self.recipe), a.shape) for x, a in zip(self._xs, self.amaxes, strict=True)]
            self._amax_launches = amax_launches(rows, self.amaxes, self._mask)
        clear(self.vector)
        return launch_all(self._copies, self._amax_launches)

    def _prepare_codes(self) -> tuple[list[Quantized], list[Launch]]:
        r, moved = self.recipe, [p.moved.shape for p in self.prepared]
        on_device.check_supported(self._op, r)
        each(self._op, lambda p: check_codes(self._op, p, self._layout), self.prepared)
        packed = self._outputs([packed_shape(s, r) for s in moved], [np.uint8] * len(moved), loader.cupy().empty)
        scales: list[Any] = [None] * len(moved)
        if r.scale is not None:
            make: Callable[..., Any] = lambda shape, dtype: launch.empty_scales(shape, self._layout)  # noqa: E731
            scales = self._outputs([scale_shape(s, r) for s in moved], [np.uint8] * len(moved), make)
        decode: list[Any] = [None] * len(moved)
        if r.tensor_scaling != "none":
            shapes = [a.shape for a in self.amaxes]
            decode = cut(loader.cupy().empty(sum(map(prod, shapes)), np.float32), shapes)
        parts = [*zip(self.amaxes, packed, scales, decode, strict=True)]
        launches = self._launches([self._matrices(i, *part, None) for i, part in enumerate(parts)])
        return [
            Quantized(codes, s, d, amax, p.x.shape, p.x.dtype, p.axis, r, self._layout)
            for p, (amax, codes, s, d) in zip(self.prepared, parts, strict=True)
        ], launches

    def _prepare_values(self, amaxes: list[Any]) -> list[Launch]:
        if self.recipe.fake_rule is None:
            on_device.check_supported(self._op, self.recipe)
        else:
            fake_on_device.check_supported(self._op, self.recipe)
            if any(random is not None for random in self._random):
                raise ValueError(f"{self._op}: {self.recipe.id} rounds to nearest only; got rounding='stochastic'")
        cupy = loader.cupy()
        if not self._raw_values:
            self._raw_values = self._outputs([x.shape for x in self._xs], [x.dtype for x in self._xs], cupy.empty)
            self._values = [cupy.moveaxis(v, -1, p.axis) for p, v in zip(self.prepared, self._raw_values, strict=True)]
        parts = enumerate(zip(amaxes, self._raw_values, strict=True))
        return self._launches([self._matrices(i, amax, None, None, None, v) for i, (amax, v) in parts])

    def _outputs(self, shapes: list[tuple[int, ...]], dtypes: list[Any], make: Callable[..., Any]) -> list[Any]:
        """An array each; parts of one where the inputs are."""
        if self._stacked:
            return list(make((len(shapes), *shapes[0]), dtypes[0]))
        return [make(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def _matrices(self, i: int, amax: Any, packed: Any, scales: Any, decode: Any, values: Any) -> list[Matrix]:
        x = self._xs[i]
        if x.size:
            arrays = (amax, packed, scales, decode, values)
            layout = self._layout if values is None else "linear"
            return list(on_device.matrices(self.prepared[i], x, layout, self._mask, self._random[i], *arrays))
        if decode is None or not amax.size:
            return []
        return [Matrix(x.reshape(amax.size, 0), amax, tensor_scale=decode)]

    def _launches(self, matrices: list[list[Matrix]]) -> list[Launch]:
        seed = next((s for s in self._random if isinstance(s, int)), None)
        found = []
        for numbers in by_dtype(self._xs):
            group = [m for i in numbers for m in matrices[i]]
            if group:
                layout = self._layout if group[0].values is None else "linear"
                found.append(grouped.quantize_group(group, self.recipe, layout, seed=seed, mask=self._mask))
        return found
