"""Define what the parts (the arrays) of a Quantized must satisfy: their shapes, and the numbers that they may hold.

A parameter "moved" or "moved_shape" is the shape of x, the quantized array, with the quantized axis moved last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import ElementFormat
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe

# tensor rules that give a number even for a NaN amax
NEVER_NAN = ("te_primary_weight", "compressed_tensors", "fp8_transformers")


def packed_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of an array's packed codes: (..., K/2) for 4-bit elements, (..., K) for wider ones."""
    *lead, K = moved_shape
    return (*lead, recipe.element.packing.length(K))


def scale_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape (..., K / block columns) of an array's block scales in linear layout."""
    *lead, K = moved_shape
    return (*lead, K // recipe.block_size)


def tensor_amax_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of an array's tensor amaxes, as quantize computes them."""
    *lead, K = moved_shape
    return {"row": tuple(lead), "block": (*lead, K // recipe.block_size)}.get(recipe.tensor_scaling, ())


def fitting_shape(shape: tuple[int, ...], allowed: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the first allowed shape that differs from `shape` only by trailing axes of length 1."""
    fitting = [other for other in allowed if _trimmed(other) == _trimmed(shape)]
    return shape if shape in fitting else next(iter(fitting), None)


def in_order(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether an array with one number per block can safely be reshaped from `shape` to `wanted`."""
    own_lengths, wanted_lengths = ([n for n in lengths if n != 1] for lengths in (shape, wanted))
    return prod(shape) == prod(wanted) and (len(own_lengths) <= 1 or own_lengths[-1:] == wanted_lengths[-1:])


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its trailing axes of length 1: (2, 1, 1) gives (2,), and (1, 1) gives ()."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class PartShapes(NamedTuple):
    """The shapes that the arrays of a Quantized must have.

    Attributes:
        axis: the quantized axis as a non-negative number.
        packed: the shape of the codes.
        block_scale: the shape of the block scales, padding included; None if there are none.
        tensor_scale: the shapes that the tensor scale may have; empty if there is none.
    """

    axis: int
    packed: tuple[int, ...]
    block_scale: tuple[int, ...] | None
    tensor_scale: tuple[tuple[int, ...], ...]


@lru_cache(1024)  # without a cache, computing the shapes would take as long as quantizing a small array on a GPU
def wanted_parts(shape: tuple[int, ...], axis: int, r: Recipe, layout: str) -> PartShapes:
    """Return the shapes that the parts of a Quantized of an array must have."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Quantized: axis {axis} is out of range for a {len(shape)}-d array; "
            f"needs {-len(shape)} to {len(shape) - 1}"
        )
    axis %= len(shape)
    if shape[axis] % r.length_multiple:
        raise ValueError(
            f"Quantized: axis {axis} has length {shape[axis]}; {r.id} needs a multiple of {r.length_multiple}"
        )
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    if layout != "linear" and len(shape) < 2 and r.scale is not None:
        raise ValueError(
            f"Quantized: scale_layout is {layout!r} of a 1-d array; needs the rows of a matrix, or 'linear'"
        )
    scales = None if r.scale is None else scale_shape(moved, r)
    if scales is not None and layout != "linear":
        scales = padded_shape(scales, layout)
    return PartShapes(axis, packed_shape(moved, r), scales, tuple(_tensor_shapes(moved, r)))


def _tensor_shapes(moved: tuple[int, ...], r: Recipe) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that the tensor_scale of a Quantized may have, which depend on the recipe's tensor_scaling."""
    if r.tensor_scaling == "row":
        yield moved[:-1]
    elif r.tensor_scaling == "block":
        yield scale_shape(moved, r)
    elif r.tensor_scaling == "tensor":
        yield ()
        if len(moved) > 2:
            yield moved[:1]


def check_codes(op: str, packed: Any, element: ElementFormat) -> None:
    """Raise ValueError if a code stored one per byte is too large for its format, such as 64 for a 6-bit format."""
    # 4-bit codes always pass, because they are stored two per byte.
    # Codes on a GPU always pass, because they are not read.
    one_per_byte = element.packing.codes == 1 and element.bits < 8
    if one_per_byte and isinstance(packed, np.ndarray) and int(packed.max(initial=0)) >> element.bits:
        needed = f"needs one code of {element.bits} bits per byte; unpack the codes first"
        raise ValueError(f"{op}: packed holds bytes above {2**element.bits - 1}; {needed}")


def check_scale_codes(op: str, block_scale: Any, scale: ElementFormat | None) -> None:
    """Raise ValueError if a block scale is too large a code for its format, such as 64 for a 6-bit format."""
    # Codes on a GPU always pass, because they are not read.
    if scale is None or scale.bits == 8 or not isinstance(block_scale, np.ndarray):
        return
    if int(block_scale.view(np.uint8).max(initial=0)) >> scale.bits:
        needed = f"needs codes of {scale}, which has {scale.bits} bits"
        raise ValueError(f"{op}: block_scale holds bytes above {2**scale.bits - 1}; {needed}")


def check_amounts(op: str, name: str, array: np.ndarray, tensor_scale: np.ndarray, r: Recipe) -> None:
    """Raise ValueError if a tensor scale or tensor amax holds a number that the recipe cannot have made."""
    if (array >= 0).all():
        return
    if (array < 0).any():
        raise ValueError(f"{op}: {name} is negative; needs {name} >= 0: the sign of a value is in its code")
    numbers = r.tensor_rule in NEVER_NAN
    if name == "tensor_scale" and numbers:
        raise ValueError(f"{op}: {name} is NaN; {r.id} gives no such scale; needs a number")
    if name == "tensor_amax" and not numbers and (np.isnan(array) & ~np.isnan(tensor_scale)).any():
        raise ValueError(f"{op}: {name} is NaN where tensor_scale is a number; None stands for an unknown amax")
