"""Slice, copy, move and compare a Quantized.

x is the array that was quantized. A box is a rectangular region of x, given as a tuple of slices, one per axis.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np

from fp4kit.arguments import as_index, written
from fp4kit.arrays import imports, returns
from fp4kit.formats import FLOATS, bit_patterns
from fp4kit.layouts import TILE_COLUMNS, padded_shape, tile_rows
from fp4kit.quantized.container import FACTS, PARTS, Quantized, assembled
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.recipes.table import recipe as listed_recipe
from fp4kit.types import ScaleLayout


def box_of(q: Quantized, box: tuple[slice, ...]) -> Quantized:
    """Slice q: return the Quantized of x[box]."""
    # A tensor_scale or tensor_amax of shape () is kept, because it belongs to the whole tensor.
    *lead, last = (*box[: q.axis], *box[q.axis + 1 :], box[q.axis])
    r = q.recipe
    scales_at = slice(*(end // r.block_size * r.scale_bytes for end in (last.start, last.stop)))
    blocks = slice(last.start // r.tensor_columns, -(-last.stop // r.tensor_columns))
    bytes_ = slice(*map(r.element.packing.length, (last.start, last.stop)))
    covered = {"tensor": tuple(lead[:1]), "row": tuple(lead), "block": (*lead, blocks)}

    def cut(a: Any) -> Any:  # a 0-d scale covers the whole tensor
        return a if a is None or not a.ndim else a[covered[r.tensor_scaling]]

    scales = None if q.block_scale is None else _scales_of(q, (*lead, scales_at))
    shape = tuple(part.stop - part.start for part in box)
    packed, scale, amax = q.packed[(*lead, bytes_)], cut(q.tensor_scale), cut(q.tensor_amax)
    return Quantized(packed, scales, scale, amax, shape, q.dtype, q.axis, r, q.scale_layout)


def _scales_of(q: Quantized, index: tuple[slice, ...]) -> Any:
    """Return the block scales that an index into linear block scales selects, in the layout of q."""
    # Swizzled scales are cut between whole tiles; rows and columns of `index` must begin at one.
    if q.scale_layout == "linear":
        return q.block_scale[index]
    *lead, rows, columns = index
    height, width = tile_rows(q.scale_layout), TILE_COLUMNS
    high, wide = padded_shape((rows.stop, columns.stop), q.scale_layout)
    scales = q.block_scale[(*lead, slice(rows.start, high))]
    if (columns.start, wide) == (0, scales.shape[-1]):
        return scales
    outer, across = scales.shape[:-2], scales.shape[-1] // width
    tiles = scales.reshape(*outer, (high - rows.start) // height, across, height * width)
    tiles = tiles[..., columns.start // width : wide // width, :]
    return tiles.reshape(*outer, high - rows.start, wide - columns.start)


def part_of(q: Quantized, index: Any) -> Quantized:
    """Return q[index], for a slice of the first axis of x, or a tuple of slices and numbers: Quantized.__getitem__."""
    given, dropped = _slices(q, index)
    for one in given:
        if one.step is not None and as_index("Quantized", "the step of the slice", one.step) != 1:
            raise ValueError(
                f"Quantized: q[{_spelled(given)}] has a step of {one.step}; needs steps of 1; quantize"
                f" x[{_spelled(given)}] instead"
            )
        for edge in (one.start, one.stop):
            if edge is not None:
                as_index("Quantized", "an end of the slice", edge)
    ranges = [one.indices(n)[:2] for one, n in zip(given, q.shape, strict=True)]
    box = tuple(slice(a, b) if a < b else slice(0, 0) for a, b in ranges)
    if box == (whole := tuple(slice(0, n) for n in q.shape)):
        return _without_axes(q, dropped)
    wanted = [slice(None) if part == all_ else part for part, all_ in zip(box, whole, strict=True)]
    for axis, part in enumerate(box):
        _check_ends(q, axis, part, _spelled(wanted))
    return _without_axes(box_of(q, box), dropped)


def _without_axes(q: Quantized, axes: Sequence[int]) -> Quantized:
    """Return q without some axes of x, all of length 1 and neither quantized nor those of rows."""
    if not axes:
        return q
    # The arrays have the axes of x in order, except that the quantized one is the last.
    places = {axis - (axis > q.axis) for axis in axes}

    def first(a: Any) -> Any:
        return a if a is None else a[tuple(0 if i in places else slice(None) for i in range(a.ndim))]

    shape = tuple(n for axis, n in enumerate(q.shape) if axis not in axes)
    parts = {name: first(getattr(q, name)) for name in PARTS}
    return replace(q, **parts, shape=shape, axis=q.axis - sum(axis < q.axis for axis in axes))


def _slices(q: Quantized, index: Any) -> tuple[list[slice], list[int]]:
    """Return one slice per axis of x for an index, and the axes from which it selects a number, to drop them."""
    given, axes = index if isinstance(index, tuple) else (index,), len(q.shape)
    dots = [i for i, one in enumerate(given) if one is Ellipsis]
    at = dots[0] if dots else len(given)
    missing = axes - len(given) + len(dots)
    if missing < 0:
        raise ValueError(
            f"Quantized: q[{_spelled(given)}] has {axes - missing} slices; needs at most {axes}, one per axis"
        )
    found, dropped = [*given[:at], *[slice(None)] * missing, *given[at + 1 :]], []
    for axis, one in enumerate(found):
        if not isinstance(one, slice) and hasattr(one, "__index__") and axis not in (q.axis, _row_axis(q)):
            number = as_index("Quantized", "the index", one)
            if not -len(x := range(q.shape[axis])) <= number < len(x):
                raise IndexError(f"Quantized: index {number} is out of range; axis {axis} has length {len(x)}")
            found[axis] = slice(x[number], x[number] + 1)
            dropped.append(axis)
    if not all(isinstance(one, slice) for one in found):
        first = ", ".join(f"0:{_multiple(q, axis)}" for axis in range(min(axes, max(len(given), 1))))
        raise TypeError(f"Quantized: q[{_spelled(given)}] is not a slice; needs slices of whole blocks, as q[{first}]")
    return found, dropped


def _spelled(index: Sequence[Any]) -> str:
    """Return an index as it is written between brackets, such as ":, 0:16". Trailing whole axes are left out."""
    last = max((i for i, one in enumerate(index) if not isinstance(one, slice) or one != slice(None)), default=0)
    return ", ".join(map(written, index[: last + 1]))


def _multiple(q: Quantized, axis: int) -> int:
    """Return the multiple at which an axis of x may be cut without cutting a block."""
    if axis == q.axis:
        return q.recipe.cut_multiple
    return q.recipe.block_rows if axis == _row_axis(q) else 1


def _row_axis(q: Quantized) -> int:
    """Return the axis of the rows of x's matrices: the last one that is not quantized, or -1 if there is none."""
    return max((axis for axis in range(len(q.shape)) if axis != q.axis), default=-1)


def _check_ends(q: Quantized, axis: int, part: slice, spelled: str) -> None:
    """Raise ValueError if a slice of an axis of x cuts a block, or a tile of swizzled scales."""
    # An end of the slice at the end of the axis never cuts a block or a tile.
    blocks, length = _multiple(q, axis), q.shape[axis]
    inside = [end for end in (part.start, part.stop) if end != length]
    if wrong := [end for end in inside if end % blocks]:
        near = [f"{end // blocks * blocks} and {min(end // blocks * blocks + blocks, length)}" for end in wrong]
        if len(wrong) > 1:
            near = [f"{two} for {end}" for two, end in zip(near, wrong, strict=True)]
        raise ValueError(
            f"Quantized: q[{spelled}] cuts blocks of {blocks} along axis {axis}; needs multiples of {blocks}, or the "
            f"end; the nearest allowed bounds are {', '.join(near)}"
        )
    if q.block_scale is None or q.scale_layout == "linear" or axis not in (q.axis, _row_axis(q)):
        return
    tile = q.recipe.block_size * TILE_COLUMNS if axis == q.axis else tile_rows(q.scale_layout)
    tile = lcm(tile, blocks)
    if any(end % tile for end in inside):
        raise ValueError(
            f"Quantized: q[{spelled}] cuts tiles of {q.scale_layout} scales, which cover multiples of {tile} along "
            f"axis {axis}; slice linear scales: fp4kit.unswizzle(q)[{spelled}]"
        )


def joined(op: str, qs: Sequence[Quantized], axis: int) -> Quantized:
    """Return the Quantized of the arrays of ``qs`` joined along an axis of x: the implementation of concatenate."""
    first = qs[0]
    axes = len(first.shape)
    if not -axes <= axis < axes:
        raise ValueError(f"{op}: axis {axis} is out of range for {axes}-d arrays")
    axis %= axes
    for i, q in enumerate(qs):
        for name in FACTS[1:]:
            if getattr(q, name) != getattr(first, name):
                values = f"qs[0].{name} is {getattr(first, name)!r:.60}, and qs[{i}].{name} {getattr(q, name)!r:.60}"
                raise ValueError(f"{op}: {values}; needs equal ones")
        if (*q.shape[:axis], *q.shape[axis + 1 :]) != (*first.shape[:axis], *first.shape[axis + 1 :]):
            raise ValueError(f"{op}: qs[{i}] has shape {q.shape}, and qs[0] {first.shape}; only axis {axis} may differ")
        if i < len(qs) - 1 and q.shape[axis] % (blocks := _multiple(q, axis)):
            raise ValueError(f"{op}: axis {axis} of qs[{i}] has length {q.shape[axis]}; needs a multiple of {blocks}")
        if imports.on_device(q.packed) != imports.on_device(first.packed):
            raise ValueError(f"{op}: qs[0] and qs[{i}] are on different devices; move them with q.to(...)")
    if first.block_scale is not None and first.scale_layout != "linear":
        raise ValueError(f"{op}: the scales are in the layout {first.scale_layout}; needs fp4kit.unswizzle(q)")
    # The arrays have the axes of x in order, except that the quantized one is the last.
    place = axes - 1 if axis == first.axis else axis - (axis > first.axis)

    def join(name: str) -> Any:
        arrays = [getattr(q, name) for q in qs]
        if all(a is not None and place < a.ndim == arrays[0].ndim for a in arrays):
            return imports.module_of(arrays[0]).concatenate(arrays, axis=place)
        hosts = [None if a is None else imports.to_host(a) for a in arrays]
        for i, host in enumerate(hosts):
            if not _same(hosts[0], host):
                values = f"qs[0].{name} is {hosts[0]!s:.60}, and qs[{i}].{name} {host!s:.60}"
                raise ValueError(f"{op}: {values}; quantize them with one tensor_amax, such as the largest of theirs")
        return arrays[0]

    length = sum(q.shape[axis] for q in qs)
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    return replace(first, **{name: join(name) for name in PARTS}, shape=shape)


def on_host(q: Quantized, op: str = "Quantized") -> Quantized:
    """Return q with its arrays as NumPy arrays."""
    q = q.imported(op)
    return q.with_parts(imports.to_host) if imports.on_device(q.packed) else q


def same_bits(a: Quantized, b: Any) -> bool:
    """Return whether two Quantized are equal in every field and in every bit of every array (Quantized.equals)."""
    if not isinstance(b, Quantized):
        raise TypeError(
            f"equals: other is {type(b).__name__}; needs a Quantized; to compare with an array of values, use"
            " fp4kit.compare"
        )
    if any(getattr(a, name) != getattr(b, name) for name in FACTS):
        return False
    a, b = on_host(a, "equals"), on_host(b, "equals")
    return all(_same(getattr(a, name), getattr(b, name)) for name in PARTS)


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Return whether two arrays have equal shapes and equal bits, so that NaN can equal NaN. Two None are equal too."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and np.array_equal(bit_patterns(a), bit_patterns(b))


def moved_to(q: Quantized, target: Any) -> Quantized:
    """Return q with its arrays in the library or on the device `target`: the implementation of Quantized.to."""
    name, _, number = str(target).partition(":")
    if name not in ("numpy", "cupy", "torch", "jax", "cpu", "cuda") or (
        number and (name != "cuda" or not number.isdigit())
    ):
        needed = "'numpy', 'cupy', 'torch', 'jax', or a device such as 'cpu' or 'cuda:0'"
        raise ValueError(f"Quantized: to({target!r}); needs {needed}")
    if name in ("cpu", "cuda") and returns.library_of(q.packed) is returns.TORCH:
        try:
            return q.with_parts(lambda tensor: tensor.to(str(target)))
        except (AssertionError, RuntimeError) as error:  # PyTorch without CUDA, or a device that does not exist
            raise RuntimeError(f"Quantized: to({target!r}): {error}") from error
    if name in ("torch", "jax"):
        return _given_to(q.imported(), name)
    return on_host(q) if name in ("numpy", "cpu") else _on_gpu(q.imported(), int(number) if number else None)


def _given_to(q: Quantized, name: str) -> Quantized:
    """Convert the arrays of q from NumPy or CuPy to the library `name`, "torch" or "jax"."""
    if name not in sys.modules:
        raise RuntimeError(f"Quantized: to({name!r}) needs {name}, which is not imported here; import {name} first")
    return q.with_parts(returns.tensor_of if name == "torch" else returns.array_of)


def _on_gpu(q: Quantized, device: int | None) -> Quantized:
    """Move the arrays of q, NumPy or CuPy, to the CUDA device of the given number."""
    cupy, is_on_gpu = imports.cupy(), imports.on_device(q.packed)
    count = cupy.cuda.runtime.getDeviceCount()
    if device is not None and device >= count:
        raise ValueError(f"Quantized: to('cuda:{device}'); there are {count} CUDA devices; needs 0 to {count - 1}")
    if is_on_gpu and device in (None, q.packed.device.id):
        return q
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if device is None else device):
        return q.with_parts(cupy.array if is_on_gpu else imports.to_device)


def flatten(q: Quantized) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split q into the pair (arrays, facts), for libraries that compute on trees of arrays, such as JAX."""
    names = tuple(name for name in PARTS if getattr(q, name) is not None)
    return tuple(getattr(q, name) for name in names), (names, *(getattr(q, name) for name in FACTS))


def unflatten(arrays: Any, facts: Any) -> Quantized:
    """Return the Quantized that flatten split into `arrays` and `facts`."""
    names, *values = facts
    return assembled({**dict.fromkeys(PARTS), **dict(zip((*names, *FACTS), (*arrays, *values), strict=True))})


_DTYPES = {dtype.name: dtype for dtype in FLOATS}
_Facts = tuple[tuple[int, ...], str, int, str, ScaleLayout]


def reduced(q: Quantized) -> tuple[Any, ...]:
    """Return the pair (function, arguments) by which pickle recreates a Quantized of PyTorch tensors."""
    allow_torch_load()
    facts = tuple(q.shape), q.dtype.name, q.axis, to_spec(q.recipe), q.scale_layout
    return rebuild_quantized, (tuple(getattr(q, name) for name in PARTS), facts)


def rebuild_quantized(parts: tuple[Any, Any, Any, Any], facts: _Facts) -> Quantized:
    """Return the Quantized that a pickle stores, from the arguments that ``reduced`` returned."""
    shape, dtype, axis, spec, layout = facts
    return Quantized(*parts, tuple(shape), _DTYPES[dtype], axis, from_spec(spec), layout)


rebuild_quantized.__module__ = "fp4kit.torch"


def allow_torch_load() -> None:
    """Let torch.load load a Quantized with weights_only=True: tell PyTorch to trust the names in such files."""
    serialization = getattr(sys.modules.get("torch"), "serialization", None)
    add = getattr(serialization, "add_safe_globals", None)
    if add is not None:
        dtypes = {type(dtype) for dtype in FLOATS} | {dtype.type for dtype in FLOATS}
        add([rebuild_quantized, Quantized, listed_recipe, np.dtype, *dtypes])


def of_zeros(q: Quantized) -> Quantized:
    """Return a copy of the all-zero matrix ``q`` with scales that all loaders can read: block scales 0, tensor
    scale 1.
    """
    zeros = {"packed": np.zeros_like(q.packed)}
    zeros |= {} if q.block_scale is None else {"block_scale": np.zeros_like(q.block_scale)}
    return replace(q, **zeros, tensor_scale=np.ones_like(q.tensor_scale), tensor_amax=None)
