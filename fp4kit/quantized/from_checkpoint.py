"""Convert the tensors of a checkpoint to the parts (the arrays) of a Quantized.

Checkpoints store codes and scales in several dtypes and in both nibble orders, and tensor scales that multiply or
divide. An array is copied only if its bytes must change. They must change for 4-bit codes stored one per byte, for
swapped nibbles, and for tensor scales that divide or are not float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import check_tensor, import_arrays, making_current, to_device, to_host
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FLOATS, INT4, INT8
from fp4kit.layouts import pack
from fp4kit.quantized.part_shapes import check_codes, fitting_shape
from fp4kit.recipes import Recipe

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
    arrays = {name: np.asarray(a) for name, a in named.items() if type(a) is float} | dict(
        zip(names, imported, strict=True)
    )
    return {
        name: Stored(arrays[name], _dtype_name(a, arrays[name])) if name in arrays else None
        for name, a in named.items()
    }


def _is_tensor(a: Any) -> bool:
    """Return whether a is a PyTorch tensor."""
    return hasattr(a, "data_ptr") and "torch" in sys.modules


def _dtype_name(a: Any, imported: Any) -> str:
    """Return the name of the dtype that an array has in its own library, such as "float8_e4m3fn"."""
    # The imported array may have another dtype, because NumPy and CuPy lack some dtypes of PyTorch and JAX.
    return str(a.dtype).removeprefix("torch.") if _is_tensor(a) or _has_nibbles(a) else imported.dtype.name


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


def codes(op: str, stored: Stored | None, recipe: Recipe, high_nibble_first: bool) -> Any:
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
        return _packed(op, bits) if is_packed else bits
    check_codes(op, bits, fmt)
    return bits << np.uint8(4) | bits >> np.uint8(4) if high_nibble_first else bits


def _packed(op: str, codes: Any) -> Any:
    """Pack 4-bit codes from one per byte to two per byte. Raise ValueError if the last axis has an odd length."""
    if codes.shape[-1] % 2:
        raise ValueError(
            f"{op}: packed holds {codes.shape[-1]} codes along its last axis; two share a byte, so it must be even"
        )
    return pack(codes)


def _bits(array: Any) -> Any:
    """Return an array with one byte per element, viewed as uint8. A uint8 array is returned unchanged."""
    return array if array.dtype == np.uint8 else array.view(np.uint8)


def block_scales(op: str, stored: Stored | None, recipe: Recipe, shape: tuple[int, ...] | None) -> Any:
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
    needs_reshape = shape is not None and bits.shape != shape and bits.size == _size(shape)
    return bits.reshape(shape) if needs_reshape else bits


def _size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of an array of the given shape; 1 for ()."""
    return int(np.prod(shape, dtype=np.int64))


def tensor_scale(
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
