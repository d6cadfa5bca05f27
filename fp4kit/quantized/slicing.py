"""Slice, copy, move and compare a Quantized.

x is the array that was quantized. A box is a rectangular region of x, given as a tuple of slices, one per axis.
"""

from __future__ import annotations

import sys
from math import lcm
from typing import Any

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.arrays import imports, jax_arrays, torch_arrays
from fp4kit.arrays.returns import TORCH, library_of
from fp4kit.formats import bit_patterns
from fp4kit.layouts import padded_shape, tile_rows
from fp4kit.quantized.container import FACTS, PARTS, Quantized, assembled


def box_of(q: Quantized, box: tuple[slice, ...]) -> Quantized:
    """Slice q: return the Quantized of x[box]. Its arrays are views of those of q.

    A tensor_scale or tensor_amax of shape () is kept, because it belongs to the whole tensor. With any other shape, it
    is sliced to the box.

    box: a slice with start and stop for every axis of x. It must not cut a block. If scales are swizzled, it must not
    cut a tile of rows either.
    """
    *lead, last = (*box[: q.axis], *box[q.axis + 1 :], box[q.axis])
    r = q.recipe
    blocks = slice(last.start // r.block_size, last.stop // r.block_size)
    bytes_ = slice(*map(r.element.packing.length, (last.start, last.stop)))
    covered = {"tensor": tuple(lead[:1]), "row": tuple(lead), "block": (*lead, blocks)}

    def cut(a: Any) -> Any:  # a 0-d scale covers the whole tensor
        return a if a is None or not a.ndim else a[covered[r.tensor_scaling]]

    scales = None if q.block_scale is None else q.block_scale[_in_layout(q, (*lead, blocks))]
    shape = tuple(part.stop - part.start for part in box)
    packed, scale, amax = q.packed[(*lead, bytes_)], cut(q.tensor_scale), cut(q.tensor_amax)
    return Quantized(packed, scales, scale, amax, shape, q.dtype, q.axis, r, q.scale_layout)


def _in_layout(q: Quantized, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Convert an index into linear block scales to the index into the block scales that q stores, maybe swizzled.

    If q's scales are linear, return `index` unchanged. If they are swizzled, the rows of `index` must begin at a tile;
    the result has these rows extended to whole tiles, and all columns.
    """
    if q.scale_layout == "linear":
        return index
    *lead, rows, _ = index
    padded = padded_shape((rows.stop, 1), q.scale_layout)[0]
    return (*lead, slice(rows.start, padded), slice(None))


def rows_of(q: Quantized, rows: Any) -> Quantized:
    """Return q[rows], for a slice of the first axis of x: the implementation of Quantized.__getitem__.

    Return q itself if the slice covers all rows.

    Raises:
        TypeError: rows is not a slice, or one of its ends is not an int.
        ValueError: the slice has a step, or cuts a block or a tile of swizzled scales.
    """
    if not isinstance(rows, slice):
        raise TypeError(
            f"Quantized: q[{rows!r}] is not a slice; needs whole blocks of the first axis, such as q[0:{_multiple(q)}]"
        )
    if rows.step not in (None, 1):
        raise ValueError(
            f"Quantized: the slice has a step of {rows.step}; needs a step of 1; quantize x[::{rows.step}] instead"
        )
    for edge in (rows.start, rows.stop):
        if edge is not None:
            as_index("Quantized", "an end of the slice", edge)
    start, stop, _ = rows.indices(len(q))
    if (start, stop) == (0, len(q)):
        return q
    stop = max(start, stop)
    _check_edges(q, start, stop)
    return box_of(q, (slice(start, stop), *(slice(0, n) for n in q.shape[1:])))


def _multiple(q: Quantized) -> int:
    """Return the multiple at which x's first axis may be cut: a slice whose ends are multiples of it cuts no block.

    It is 1 if no block spans several entries of the first axis.
    """
    if q.axis == 0:
        return q.recipe.length_multiple
    return q.recipe.block_rows if len(q.shape) == 2 else 1


def _check_edges(q: Quantized, start: int, stop: int) -> None:
    """Raise ValueError if the slice start:stop of the first axis cuts a block, or a tile of swizzled scales.

    Swizzled scales cannot be cut at all if the first axis is the quantized one. An end of the slice at the end of the
    axis never cuts a block or a tile.
    """
    blocks = _multiple(q)
    inside = [edge for edge in (start, stop) if edge != len(q)]
    if any(edge % blocks for edge in inside):
        raise ValueError(
            f"Quantized: q[{start}:{stop}] cuts blocks of {blocks}; needs multiples of {blocks}, or the end"
        )
    if q.block_scale is None or q.scale_layout == "linear" or (len(q.shape) > 2 and q.axis):
        return
    tile = lcm(tile_rows(q.scale_layout), blocks)
    if q.axis == 0 or any(edge % tile for edge in inside):
        needed = "the rows of x" if q.axis == 0 else f"multiples of {tile}"
        raise ValueError(
            f"Quantized: q[{start}:{stop}] cuts tiles of {q.scale_layout} scales, which cover {needed}; "
            f"slice linear scales: fp4kit.unswizzle(q)[{start}:{stop}]"
        )


def on_host(q: Quantized, op: str = "Quantized") -> Quantized:
    """Return q with its arrays as NumPy arrays. If they already are, return q itself.

    Arrays of PyTorch and JAX in host memory are shared, not copied. Arrays on a GPU are copied, after waiting for their
    values. op: the function that error messages begin with.
    """
    q = q.imported(op)
    return q.with_parts(imports.to_host) if imports.on_device(q.packed) else q


def same_bits(a: Quantized, b: Any) -> bool:
    """Return whether two Quantized are equal in every field and in every bit of every array (Quantized.equals).

    They may be of different libraries or on different devices. Raise TypeError if b is not a Quantized.
    """
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
    """Return q with its arrays in the library or on the device `target`: the implementation of Quantized.to.

    Raise ValueError if target is unknown or names no existing device, and RuntimeError if its library is not imported
    or there is no GPU. If q holds PyTorch tensors and target is a device, PyTorch raises its own errors for a device
    that does not exist.
    """
    name, _, number = str(target).partition(":")
    if name not in ("numpy", "cupy", "torch", "jax", "cpu", "cuda") or (
        number and (name != "cuda" or not number.isdigit())
    ):
        needed = "'numpy', 'cupy', 'torch', 'jax', or a device such as 'cpu' or 'cuda:0'"
        raise ValueError(f"Quantized: to({target!r}); needs {needed}")
    if name in ("cpu", "cuda") and library_of(q.packed) is TORCH:
        return q.with_parts(lambda tensor: tensor.to(str(target)))
    if name in ("torch", "jax"):
        return _given_to(q.imported(), name)
    return on_host(q) if name in ("numpy", "cpu") else _on_gpu(q.imported(), int(number) if number else None)


def _given_to(q: Quantized, name: str) -> Quantized:
    """Convert the arrays of q from NumPy or CuPy to the library `name`, "torch" or "jax". Return a new Quantized.

    PyTorch tensors share the memory of the arrays, but read-only arrays are copied. JAX arrays share the memory of CuPy
    arrays, and are copies of NumPy arrays. Raise RuntimeError if the library is not imported.
    """
    if name not in sys.modules:
        raise RuntimeError(f"Quantized: to({name!r}) needs {name}, which is not imported here; import {name} first")
    return q.with_parts(torch_arrays.tensor_of if name == "torch" else jax_arrays.array_of)


def _on_gpu(q: Quantized, device: int | None) -> Quantized:
    """Move the arrays of q, NumPy or CuPy, to the CUDA device of the given number. Return a Quantized of CuPy arrays.

    If the arrays are on this device already, return q itself. If `device` is None, arrays on any GPU stay there, and
    arrays in host memory are copied to the current device. Raise ValueError if there is no device of this number, and
    RuntimeError if CuPy or the driver is missing.
    """
    cupy, is_on_gpu = imports.cupy(), imports.on_device(q.packed)
    count = cupy.cuda.runtime.getDeviceCount()
    if device is not None and device >= count:
        raise ValueError(f"Quantized: to('cuda:{device}'); there are {count} CUDA devices; needs 0 to {count - 1}")
    if is_on_gpu and device in (None, q.packed.device.id):
        return q
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if device is None else device):
        return q.with_parts(cupy.array if is_on_gpu else imports.to_device)


def flatten(q: Quantized) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split q into the pair (arrays, facts), for libraries that compute on trees of arrays, such as JAX.

    arrays is a tuple of the arrays that are not None. facts is a hashable tuple of the names of these arrays and of all
    other fields. Two Quantized that differ only in the values of their arrays give equal facts.
    """
    names = tuple(name for name in PARTS if getattr(q, name) is not None)
    return tuple(getattr(q, name) for name in names), (names, *(getattr(q, name) for name in FACTS))


def unflatten(arrays: Any, facts: Any) -> Quantized:
    """Return the Quantized that flatten split into `arrays` and `facts`. This is the inverse of flatten.

    Nothing is checked, because `arrays` may hold other objects in place of arrays, such as JAX's tracers or a tree
    library's placeholders.
    """
    names, *values = facts
    return assembled({**dict.fromkeys(PARTS), **dict(zip((*names, *FACTS), (*arrays, *values), strict=True))})
