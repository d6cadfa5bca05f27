"""Shapes of the parts (the arrays) of a Quantized, and the conversion of the tensors of a checkpoint to parts.

Checkpoints store codes and scales in several dtypes and in both nibble orders, and tensor scales that multiply or
divide. An array is copied only if its bytes must change: for 4-bit codes stored one per byte, swapped nibbles, and
tensor scales that divide or are not float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import check_tensor, import_arrays, making_current, to_device, to_host
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FLOATS, INT4, INT8, ElementFormat
from fp4kit.layouts import pack, padded_shape
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


# {format: name of the dtype that implies it}, for dtypes with one element per byte. uint8 and int8 may hold any bits.
DTYPES = {
    E2M1: "float4_e2m1fn",
    E2M3: "float6_e2m3fn",
    E3M2: "float6_e3m2fn",
    E4M3: "float8_e4m3fn",
    E5M2: "float8_e5m2",
    E8M0: "float8_e8m0fnu",
    INT4: "int4",
    INT8: "int8",
}
_PAIRS = {E2M1: "float4_e2m1fn_x2"}  # dtypes with two elements per byte
_BYTES = ("uint8", "int8")
_NIBBLES = ("float4_e2m1fn", "int4")  # dtypes of JAX, one element per byte in memory


class Stored(NamedTuple):
    """An imported array of a checkpoint, and the name of the dtype that it had in its own library.

    The dtype of `array` can be another one, because narrow floats of PyTorch are imported as uint8.

    Attributes:
        array: a NumPy or CuPy array.
        dtype: the name of the original dtype, such as "float8_e4m3fn".
    """

    array: Any
    dtype: str


def import_parts(op: str, **named: Any) -> dict[str, Stored | None]:
    """Import the arrays of a checkpoint as NumPy or CuPy arrays."""
    names = [name for name, a in named.items() if a is not None and type(a) is not float]
    imported = import_arrays(op, **{name: _as_bytes(named[name], f"{op}: {name}") for name in names})
    found: dict[str, Stored | None] = dict.fromkeys(named)
    for name, array in zip(names, imported, strict=True):
        # The imported array may have another dtype, because NumPy and CuPy lack some dtypes of PyTorch and JAX.
        a, dtype = named[name], array.dtype.name
        found[name] = Stored(array, str(a.dtype).removeprefix("torch.") if _is_tensor(a) or _has_nibbles(a) else dtype)
    numbers = {name: np.asarray(a) for name, a in named.items() if type(a) is float}
    return found | {name: Stored(array, array.dtype.name) for name, array in numbers.items()}


def _is_tensor(a: Any) -> bool:
    """Return whether a is a PyTorch tensor."""
    return hasattr(a, "data_ptr") and "torch" in sys.modules


def _has_nibbles(a: Any) -> bool:
    """Return whether a is a JAX array of dtype float4_e2m1fn or int4, which has one element per byte in memory."""
    return "jax" in sys.modules and isinstance(a, sys.modules["jax"].Array) and str(a.dtype) in _NIBBLES


def _as_bytes(a: Any, name: str) -> Any:
    """Convert an array to uint8 within its library if the import would not accept its own dtype."""
    if _has_nibbles(a):
        jax: Any = sys.modules["jax"]
        return jax.lax.bitcast_convert_type(a, "uint4").astype("uint8")
    if not _is_tensor(a) or a.element_size() != 1:
        return a
    check_tensor(a, name)
    return a.view(sys.modules["torch"].uint8)


def imported_codes(op: str, stored: Stored | None, recipe: Recipe, high_nibble_first: bool) -> Any:
    """Convert a checkpoint's codes to those of a Quantized: uint8, with the even element of a pair in the low
    nibble.
    """
    if stored is None:
        raise TypeError(f"{op}: packed is None; needs the array of codes")
    fmt = recipe.element
    element_dtype, pair_dtype = DTYPES.get(fmt), _PAIRS.get(fmt)
    is_packed = fmt.packing.codes > 1
    if stored.dtype not in (element_dtype, *_BYTES, *([pair_dtype] if pair_dtype else [])):
        usable = " or ".join(filter(None, (element_dtype, pair_dtype, *_BYTES)))
        raise TypeError(f"{op}: packed is {stored.dtype}; {recipe.id} has elements of {fmt}; needs {usable}")
    if not stored.array.ndim:
        raise ValueError(f"{op}: packed is 0-d; needs at least one axis")
    one_per_byte = not is_packed or (stored.dtype == element_dtype)
    if one_per_byte and high_nibble_first:
        raise ValueError(f"{op}: high_nibble_first is True, but packed holds one code per byte; leave it out")
    bits = _bits(stored.array)
    if stored.dtype == element_dtype:
        bits = bits if fmt.bits == 8 else bits & np.uint8(2**fmt.bits - 1)
        if is_packed and bits.shape[-1] % 2:
            raise ValueError(
                f"{op}: packed holds {bits.shape[-1]} codes along its last axis; two share a byte, so it must be even"
            )
        return pack(bits) if is_packed else bits
    check_codes(op, bits, fmt)
    return bits << np.uint8(4) | bits >> np.uint8(4) if high_nibble_first else bits


def _bits(array: Any) -> Any:
    """Return an array with one byte per element, viewed as uint8. A uint8 array is returned unchanged."""
    return array if array.dtype == np.uint8 else array.view(np.uint8)


def imported_scales(op: str, stored: Stored | None, recipe: Recipe, shape: tuple[int, ...] | None) -> Any:
    """Return a checkpoint's block scales as uint8 bit patterns."""
    if stored is None or recipe.scale is None:
        return stored and stored.array
    scale_dtype = DTYPES.get(recipe.scale)
    if stored.dtype not in (scale_dtype, *_BYTES):
        needed = f"{scale_dtype}, or " * (scale_dtype is not None) + "uint8 or int8 of their bits"
        raise TypeError(
            f"{op}: block_scale is {stored.dtype}; {recipe.id} has block scales of {recipe.scale}; "
            f"needs {needed}; name the recipe that made them"
        )
    bits = _bits(stored.array)
    needs_reshape = shape is not None and bits.shape != shape and bits.size == prod(shape)
    return bits.reshape(shape) if needs_reshape else bits


def imported_tensor_scale(
    op: str,
    given: Stored | None,
    packed: Any,
    shapes: tuple[tuple[int, ...], ...],
    divides: bool,
    amaxes_of: Callable[[np.ndarray], np.ndarray | None],
) -> tuple[Any, Any]:
    """Return a checkpoint's tensor scale as the float32 number by which decoding multiplies, and its tensor amax."""
    if given is None:
        if divides:
            raise ValueError(
                f"{op}: tensor_scale_divides is True, but tensor_scale is None; leave tensor_scale_divides out"
            )
        return None, None
    scale, amax = given.array, None
    if scale.dtype != np.float32 or divides:
        host = _exact(op, to_host(scale))
        scale = _like(packed, _reciprocal(op, host) if divides else host)
        found = amaxes_of(host) if divides else None
        amax = None if found is None else _like(packed, found)
    shape = fitting_shape(scale.shape, shapes)
    if shape in (None, scale.shape):
        return scale, amax
    return scale.reshape(shape), None if amax is None else amax.reshape(shape)


def _like(array: Any, host: np.ndarray) -> Any:
    """Return the NumPy array `host` in the memory of `array`: unchanged if `array` is a NumPy array."""
    if isinstance(array, np.ndarray):
        return host
    with making_current(array.device.id):
        return to_device(host)


@ieee("from_parts")
def _exact(op: str, scale: np.ndarray) -> np.ndarray:
    """Convert a tensor scale to float32 without changing a number."""
    if scale.dtype not in (*FLOATS, np.float64):
        raise TypeError(f"{op}: tensor_scale is {scale.dtype}; needs float32, or another float with the same numbers")
    with np.errstate(all="ignore"):
        exact = scale.astype(np.float32)
        changed = (exact != scale) & ~np.isnan(scale)
    if changed.any():
        raise ValueError(
            f"{op}: tensor_scale holds {float(scale[changed][0])!r}, which is not a float32 number; needs the number"
            " that the file holds; or round it with np.float32(tensor_scale)"
        )
    return exact


@ieee("from_parts")
def _reciprocal(op: str, scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale for float32 scales, rounded to float32; 0 for infinity, and NaN for NaN."""
    if (scale == 0).any():
        raise ValueError(f"{op}: tensor_scale holds 0, but tensor_scale_divides is True; needs positive numbers")
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(1) / scale)


def shape_of(op: str, packed: Any, recipe: Recipe, axis: int) -> tuple[int, ...]:
    """Return the shape of x, the array that was quantized, as the shape of its packed codes implies."""
    ndim = packed.ndim
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    *lead, last = packed.shape
    packing = recipe.element.packing
    lead.insert(axis % ndim, last // packing.bytes * packing.codes)
    return tuple(lead)
