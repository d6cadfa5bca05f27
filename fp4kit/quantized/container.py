"""Define Quantized, which holds the codes and scales of an array, and everything needed to read them.

A Quantized checks its fields once, when it is made. Its arithmetic is in other modules. The four fields that are arrays
are its parts: packed, block_scale, tensor_scale and tensor_amax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from fp4kit.arguments import a_type, as_flag, as_index, as_shape, explains_class
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import check_tensor, check_unmasked, import_arrays, making_current, to_device, to_host
from fp4kit.arrays.returns import TORCH, ArrayLibrary, library_of, numpy_dtype
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FLOATS, INT4, INT8, ElementFormat
from fp4kit.layouts import check_axis, check_layout, pack, padded_shape
from fp4kit.lazy import FUNCTIONS
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.rules import STORES_DIVISOR
from fp4kit.recipes.schema import check_one_level, tensor_scale_dtype
from fp4kit.types import ScaleLayout

# tensor rules that give a number even for a NaN amax
NEVER_NAN = ("te_primary_weight", "compressed_tensors", "fp8_transformers")


def packed_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of an array's packed codes: (..., K/2) for 4-bit elements, (..., K) for wider ones."""
    *lead, K = moved_shape
    return (*lead, recipe.element.packing.length(K))


def scale_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape (..., K / block columns * bytes per block) of an array's block scales in linear layout."""
    *lead, K = moved_shape
    return (*lead, K // recipe.block_size * recipe.scale_bytes)


def tensor_amax_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of an array's tensor amaxes, as quantize computes them."""
    *lead, K = moved_shape
    return {"row": tuple(lead), "block": (*lead, -(-K // recipe.tensor_columns))}.get(recipe.tensor_scaling, ())


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
    axis = check_axis("Quantized", axis, len(shape))
    if shape[axis] % r.length_multiple:
        raise ValueError(
            f"Quantized: axis {axis} has length {shape[axis]}; {r.id} needs a multiple of {r.length_multiple}"
        )
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    check_scale_layout("Quantized", r, layout)
    if layout != "linear" and len(shape) < 2 and r.scale is not None:
        raise ValueError(
            f"Quantized: scale_layout is {layout!r} of a 1-d array; needs the rows of a matrix, or 'linear'"
        )
    scales = None if r.scale is None else padded_shape(scale_shape(moved, r), layout)
    tensor_shapes = {"row": (moved[:-1],), "block": (tensor_amax_shape(moved, r),), "none": ()}
    of_tensor = ((), moved[:1]) if len(moved) > 2 else ((),)
    return PartShapes(axis, packed_shape(moved, r), scales, tensor_shapes.get(r.tensor_scaling, of_tensor))


def check_scale_layout(op: str, r: Recipe, layout: str) -> None:
    """Raise NotImplementedError for swizzled scales of a recipe with several levels of scales."""
    if r.levels and layout != "linear":
        raise NotImplementedError(
            f"{op}: scale_layout is {layout!r}; {r.id} has several levels of scales, for 'linear'"
        )


def check_codes(op: str, name: str, codes: Any, fmt: ElementFormat | None) -> None:
    """Raise ValueError if a code stored one per byte is too large for its format, such as 64 for a 6-bit format."""
    # Codes on a GPU always pass, because they are not read.
    if fmt is None or fmt.bits == 8 or not isinstance(codes, np.ndarray):
        return
    if int(codes.view(np.uint8).max(initial=0)) >> fmt.bits:
        needed = f"needs codes of {fmt}, which has {fmt.bits} bits"
        if name == "packed":
            needed = f"needs one code of {fmt.bits} bits per byte; unpack the codes first"
        raise ValueError(f"{op}: {name} holds bytes above {2**fmt.bits - 1}; {needed}")


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
    given = {name: a for name, a in named.items() if a is not None and type(a) is not float}
    imported = import_arrays(op, **{name: _as_bytes(a, f"{op}: {name}") for name, a in given.items()})
    arrays = dict(zip(given, imported, strict=True))
    found: dict[str, Stored | None] = dict.fromkeys(named)
    for name, a in named.items():
        if a is not None:
            array = np.asarray(a) if type(a) is float else arrays[name]
            # The imported array may have another dtype, because NumPy and CuPy lack some dtypes of PyTorch and JAX.
            dtype = str(a.dtype).removeprefix("torch.") if _is_tensor(a) or _has_nibbles(a) else array.dtype.name
            found[name] = Stored(array, dtype)
    return found


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
    element_dtype, is_packed = DTYPES.get(fmt), fmt.packing.codes > 1
    # For INT4, int8 could hold one number per byte instead of two.
    usable = [dtype for dtype in (element_dtype, _PAIRS.get(fmt), "uint8", fmt != INT4 and "int8") if dtype]
    if stored.dtype not in usable:
        needed = " or ".join(usable)
        raise TypeError(f"{op}: packed is {stored.dtype}; {recipe.id} has elements of {fmt}; needs {needed}")
    if not stored.array.ndim:
        raise ValueError(f"{op}: packed is 0-d; needs at least one axis")
    if high_nibble_first and (not is_packed or stored.dtype == element_dtype):
        raise ValueError(f"{op}: high_nibble_first is True, but packed holds one code per byte; leave it out")
    bits = stored.array if stored.array.dtype == np.uint8 else stored.array.view(np.uint8)
    if stored.dtype == element_dtype:
        bits = bits if fmt.bits == 8 else bits & np.uint8(2**fmt.bits - 1)
        if is_packed and bits.shape[-1] % 2:
            raise ValueError(
                f"{op}: packed holds {bits.shape[-1]} codes along its last axis; two share a byte, so it must be even"
            )
        return pack(bits) if is_packed else bits
    if not is_packed:
        check_codes(op, "packed", bits, fmt)
    return bits << np.uint8(4) | bits >> np.uint8(4) if high_nibble_first else bits


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
    bits = stored.array if stored.array.dtype == np.uint8 else stored.array.view(np.uint8)
    return bits.reshape(shape) if shape not in (None, bits.shape) and bits.size == prod(shape) else bits


@ieee("from_parts")
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
            raise ValueError(f"{op}: tensor_scale_divides is True, but tensor_scale is None; leave it out")
        return None, None
    scale, amax = given.array, None
    if scale.dtype != np.float32 or divides:
        host = _exact(op, to_host(scale))
        if divides:
            if (host == 0).any():
                raise ValueError(
                    f"{op}: tensor_scale holds 0, but tensor_scale_divides is True; needs positive numbers"
                )
            amax = _like(packed, amaxes_of(host))
            with np.errstate(all="ignore"):
                host = np.asarray(np.float32(1) / host)
        scale = _like(packed, host)
    shape = fitting_shape(scale.shape, shapes)
    if shape in (None, scale.shape):
        return scale, amax
    return scale.reshape(shape), None if amax is None else amax.reshape(shape)


def _like(array: Any, host: np.ndarray | None) -> Any:
    """Return the NumPy array `host` in the memory of `array`: unchanged if `array` is a NumPy array."""
    if host is None or isinstance(array, np.ndarray):
        return host
    with making_current(array.device.id):
        return to_device(host)


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


def shape_of(op: str, packed: Any, recipe: Recipe, axis: int) -> tuple[int, ...]:
    """Return the shape of x, the array that was quantized, as the shape of its packed codes implies."""
    *lead, last = packed.shape
    packing = recipe.element.packing
    lead.insert(check_axis(op, axis, packed.ndim), last // packing.bytes * packing.codes)
    return tuple(lead)


PARTS = ("packed", "block_scale", "tensor_scale", "tensor_amax")  # fields that are arrays
FACTS = ("shape", "dtype", "axis", "recipe", "scale_layout")  # the other fields
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)

_NO_NUMBERS = "Quantized: is not an array of numbers; call q.dequantize() for its values, or use q.packed for its codes"
_TRANSPOSE = "use q.dequantize().T for the values; fp4kit.transpose(q) turns the blocks, not the shape"
# {an attribute that users look for: what to use}
_OTHER_NAMES = {
    "scale": "use q.block_scale (bit patterns), q.tensor_scale or q.dequantize()",
    "scales": "use q.block_scale (bit patterns), q.tensor_scale or q.dequantize()",
    "data": "use q.packed, or q.dequantize() for the values",
    "codes": "use fp4kit.unpack(q.packed), which gives one code per element, or q.packed",
    "values": "call q.dequantize()",
    "amax": "use q.tensor_amax",
    "block_size": "use q.recipe.block",
    "numpy": "call q.to('numpy') to move it, or q.dequantize() for the values",
    "cpu": "call q.to('cpu')",
    "cuda": "call q.to('cuda')",
    "T": _TRANSPOSE,
    "transpose": _TRANSPOSE,
    "float": "call q.dequantize()",
}
_OF_ARRAYS = frozenset(name for name in dir(np.ndarray) if not name.startswith("_"))  # methods that users try


@explains_class
@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: codes and scales, where value = decode(code) * block_scale * tensor_scale.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.float32([[6] * 32, [3] * 32]), "mxfp4")
        >>> q.packed.shape, q.block_scale.tolist(), q.tensor_scale
        ((2, 16), [[127], [126]], None)
        >>> float(q.dequantize()[1, 0]), q[0:1].shape
        (3.0, (1, 32))

    recipe.decode_rule states the order of the products. Let x be the array that was quantized, and x' be x with the
    quantized axis moved last, of shape (..., K). All arrays must be of one library (NumPy, CuPy, PyTorch or JAX) and on
    one device.

    Args:
        packed: the codes, uint8. (..., K/2) for 4-bit elements: two codes per byte, element 2j in the low nibble. (...,
            K) for wider elements: one code per byte.
        block_scale: the bit patterns of the block scales, uint8 (..., K/block), padded and permuted by scale_layout.
            Scales of 16x16 blocks are stored once per row. None if the recipe has only float32 scales. A hierarchical
            recipe with exponent bits (Recipe.levels) has recipe.scale_bytes bytes per block, and only linear scales.
        tensor_scale: the float32 scales by which decoding multiplies. The shape is () for one scale per tensor, (E,)
            for one per expert (x then has three or more dimensions, and E is the first length of x'), x'.shape[:-1] for
            one per row, and (..., K/block) for one per block, where a level of float32 scales has blocks of its own,
            of which the last may be incomplete. None if the recipe has no tensor scale.
        tensor_amax: the amax that tensor_scale was made from, float32, in the shape of tensor_scale. None if it is
            unknown, as in a checkpoint. Decoding does not need it: without it, a rule that reads the amax uses the amax
            that tensor_scale implies (reference/tensor_rules.py).
        shape: shape of x.
        dtype: dtype of x: float32, float16 or bfloat16. A dtype of PyTorch or JAX is stored as NumPy's or ml_dtypes'.
        axis: the axis of x along which blocks run; stored as a non-negative number.
        recipe: a Recipe or a recipe id.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".

    Raises:
        TypeError: an array, the dtype or the recipe has the wrong type.
        ValueError: an array does not have the shape above; an array is None that the recipe needs, or the reverse; or
            arrays are on several devices.
        ValueError: on the host, a tensor scale or amax is negative, or is NaN although the recipe's rule never gives
            NaN. Other NaN, infinite and zero scales are accepted, because quantize makes them from NaN, infinity and
            zeros. Values on a device are not read.
    """

    packed: Any
    block_scale: Any
    tensor_scale: Any
    tensor_amax: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int
    recipe: Recipe
    scale_layout: ScaleLayout = "linear"

    def __post_init__(self) -> None:
        put = object.__setattr__
        if type(self.recipe) is not Recipe:
            put(self, "recipe", recipe_of("Quantized", self.recipe))
        put(self, "shape", as_shape("Quantized", self.shape))
        put(self, "dtype", numpy_dtype("Quantized", self.dtype))
        if self.dtype not in FLOATS:
            raise TypeError(f"Quantized: dtype is {self.dtype}; needs float32, float16 or bfloat16, the dtype of x")
        given = as_index("Quantized", "axis", self.axis)
        check_layout("Quantized", self.scale_layout)
        axis, packed, scales, covered = wanted_parts(self.shape, given, self.recipe, self.scale_layout)
        put(self, "axis", axis)
        if (library := library_of(self.packed)) is not None:
            return self._check_parts_of(library)
        self._check("packed", _UINT8, (packed,))
        if self.recipe.element.packing.codes == 1:
            check_codes("Quantized", "packed", self.packed, self.recipe.element)
        self._check("block_scale", _UINT8, () if scales is None else (scales,))
        codes = self.block_scale
        if self.recipe.exponent_levels:  # the bytes of bits may hold any number
            codes = codes[..., :: self.recipe.scale_bytes]
        check_codes("Quantized", "block_scale", codes, self.recipe.scale)
        self._check("tensor_scale", _FLOAT32, covered)
        if self.tensor_amax is not None:
            self._check("tensor_amax", _FLOAT32, () if self.tensor_scale is None else (self.tensor_scale.shape,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickle and copy need to recreate this object."""
        if library_of(self.packed) is TORCH and type(self) is Quantized:
            return FUNCTIONS["Quantized.__reduce_ex__"](self)
        return object.__reduce_ex__(self, protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields of this object, which pickle or copy is recreating, with the checks of a new Quantized."""
        Quantized.__init__(self, **state)

    def _check_parts_of(self, library: ArrayLibrary) -> None:
        """Check the parts of a Quantized of PyTorch or JAX arrays, and raise an error unless they are valid."""
        for name in PARTS:
            array = getattr(self, name)
            if array is not None and library_of(array) is not library:
                kind = a_type(array, module=True)
                raise TypeError(f"Quantized: {name} is {kind}; needs an array of {library.name}, as packed is")
        self.imported()

    def _check(self, name: str, dtype: np.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Check a part: it must have the dtype and one of the shapes, or be None if there are no shapes."""
        array, host = getattr(self, name), isinstance(self.packed, np.ndarray)
        if array is None and not shapes:
            return
        if array is not None and shapes:
            if host and dtype == _FLOAT32 and isinstance(array, np.generic):
                array = np.asarray(array)
                object.__setattr__(self, name, array)
            self._check_kind(name, array, host)
            if dtype == _FLOAT32 != array.dtype:
                raise TypeError(
                    f"Quantized: {name} is {array.dtype}; needs float32; convert it with .astype(np.float32), or with"
                    " .float() in PyTorch"
                )
            if array.dtype == dtype and array.shape in shapes:
                if host and dtype == _FLOAT32:
                    check_amounts("Quantized", name, array, self.tensor_scale, self.recipe)
                return
        got = "None" if array is None else f"of type {type(array).__name__}"
        got = f"{array.dtype} {tuple(array.shape)}" if hasattr(array, "dtype") else got
        none = "None, as it has no tensor scale" if dtype == _FLOAT32 else "None"
        needed = " or ".join(f"{dtype} {shape}" for shape in shapes) or none
        raise ValueError(f"Quantized: {name} is {got}; {self.recipe.id} of {self.shape} needs {needed}")

    def _check_kind(self, name: str, array: Any, host: bool) -> None:
        """Raise TypeError unless `array`, the field `name`, is of packed's library: a NumPy array, or a CuPy array."""
        kind, packed = type(array), self.packed
        if isinstance(array, np.ndarray):
            check_unmasked(array, f"Quantized: {name}")
        if isinstance(array, np.ndarray) if host else kind is type(packed) and kind.__module__ == "cupy":
            if host or array is packed or array.data.device_id == packed.data.device_id:
                return
            devices = f"{name} is on device {array.data.device_id} and packed on {packed.data.device_id}"
            raise ValueError(f"Quantized: {devices}; move all parts to one")
        needed = "NumPy array" if host else "CuPy array"
        needed = f"{needed}, as packed is" if array is not packed and hasattr(array, "dtype") else "NumPy or CuPy array"
        raise TypeError(f"Quantized: {name} is {a_type(array, module=True)}; needs a {needed}")

    def with_parts(self, convert: Callable[[Any], Any]) -> Quantized:
        """Return a new Quantized with each array replaced by convert(array), and all other fields unchanged.

        Use it to move the arrays to another library or device. The result is not checked, so convert must keep shapes
        and bytes. Array fields that are None stay None.
        """
        parts = {name: array if array is None else convert(array) for name, array in self.parts().items()}
        return assembled({**vars(self), **parts})

    def parts(self) -> dict[str, Any]:
        """Return {name: array} for packed, block_scale, tensor_scale and tensor_amax, in this order.

        The arrays are not copied. If the Quantized lacks an array, its value is None.
        """
        return {name: getattr(self, name) for name in PARTS}

    def imported(self, op: str = "Quantized") -> Quantized:
        """Return a Quantized of NumPy or CuPy arrays that share the memory of this Quantized's arrays.

        If the arrays already are NumPy or CuPy arrays, return this Quantized itself. Raise as import_arrays does, for
        example for a tensor that requires grad.

        op: the name of the function with which error messages begin.
        """
        if self.recipe.levels:
            check_one_level(op, self.recipe)
        if isinstance(self.packed, np.ndarray) or type(self.packed).__module__ == "cupy":
            return self
        present = {name: array for name, array in self.parts().items() if array is not None}
        return replace(self, **dict(zip(present, import_arrays(op, **present), strict=True)))

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """The shape of the original array, with the quantized axis moved last."""
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.shape[self.axis])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape that the block scales have in linear layout, without padding.

        For a recipe without block scales, it is the shape that they would have: one per block, repeated for each row of
        the block.
        """
        return scale_shape(self.moved_shape, self.recipe)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all codes and scales, padding included. tensor_amax is not counted."""
        parts = (self.packed, self.block_scale, self.tensor_scale)
        return sum(int(part.nbytes) for part in parts if part is not None)

    @classmethod
    def from_parts(
        cls,
        packed: Any,
        block_scale: Any,
        tensor_scale: Any = None,
        *,
        recipe: Recipe | str,
        shape: tuple[int, ...] | None = None,
        dtype: Any = "bfloat16",
        axis: int = -1,
        scale_layout: ScaleLayout = "linear",
        tensor_scale_divides: bool | None = None,
        high_nibble_first: bool = False,
    ) -> Quantized:
        """Make a Quantized from the tensors of a checkpoint. Arrays are copied only if their bytes must change.

        Args:
            packed: the codes, shaped as in a Quantized. Either bytes (uint8, float4_e2m1fn_x2 or, as in the files of
                DeepSeek-V4, int8), or one element per byte in the recipe's element dtype: float8_e4m3fn, float8_e5m2,
                int8, float6_*, or float4_e2m1fn and int4, which are then packed. For elements of INT4, int8 is
                rejected, because it could hold one number per byte.
            block_scale: the scales as uint8 or int8 bit patterns, or as float8_e4m3fn or float8_e8m0fnu, whichever the
                recipe uses. None if it has no block scales. In a swizzled layout, any shape of the padded size is
                accepted.
            tensor_scale: shaped as in a Quantized, except that trailing axes of length 1 may be missing or added.
                float32, or the same numbers as float16, bfloat16, float64 or a Python float.
            recipe: the Recipe, or its id, of the producer that made the tensors.
            shape: shape of x; None derives it from packed.
            dtype: dtype of x. Most checkpoints are made from bfloat16, the default.
            axis: the axis of x along which blocks run.
            scale_layout: layout of block_scale.
            tensor_scale_divides: True if the stored tensor scale divides on decode, as the weight_global_scale of
                compressed-tensors does. False if it multiplies. None, the default, means False, but is an error if the
                producer's own files store a divisor, as those of compressed-tensors, vLLM and AutoRound do.
            high_nibble_first: True if the even element of a pair of codes is in the high nibble.

        Returns:
            A Quantized with arrays in the library of packed. No checkpoint stores the amax, so tensor_amax is None.
            There is one exception: for float32 x and a recipe of compressed-tensors, a divisor cannot always be
            computed from its reciprocal. Then tensor_amax is an amax that gives the divisor, if any amax does.

        Raises:
            TypeError: a dtype is not one of the recipe's, packed is None or not an array, or a flag is not a bool.
            ValueError: a tensor scale is not a float32 number, or it divides and is 0 or None; tensor_scale_divides is
                None although the producer's files store a divisor; codes have more bits than the element; an odd number
                of 4-bit codes is stored one per byte; high_nibble_first is set although no codes share a byte; the
                recipe has no codes; the arrays are on several devices; or a check of Quantized fails.

        Numerics:
            If the tensor scale divides, tensor_scale is 1 / tensor_scale, rounded to nearest even. If the divisor needs
            it, tensor_amax is computed too. Nothing else is computed. On a device, only tensor scales that divide or
            are not float32 are read, which waits for the device.

        Exact:
            compressed-tensors divides by the stored divisor. Decoding gives the same values if dtype is the dtype of x.
            A divisor has no more bits than the elements of x, so one that bfloat16 cannot represent was made from
            float16 or float32.

        Examples:
            >>> import ml_dtypes, numpy as np
            >>> codes = np.array([[0x21, 0x43, 0x65, 0x87, 0, 0, 0, 0]], np.uint8)
            >>> scales = np.array([[2.0]], ml_dtypes.float8_e4m3fn)
            >>> q = Quantized.from_parts(
            ...     codes, scales, np.float32([4]), recipe="nvfp4-compressed-tensors", tensor_scale_divides=True
            ... )
            >>> q.recipe.id, q.shape, q.dtype
            ('nvfp4-compressed-tensors', (1, 16), dtype(bfloat16))
            >>> q.dequantize(np.float32)[0, :8].tolist()
            [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, -0.0]
        """
        op, r = "from_parts", recipe_of("from_parts", recipe)
        if r.fake_only:
            raise ValueError(f"{op}: {r.id} is a fake quantizer and has values only; needs a recipe with codes")
        check_layout(op, scale_layout)
        high_nibble_first = as_flag(op, "high_nibble_first", high_nibble_first)
        if tensor_scale_divides is None and tensor_scale is not None and r.tensor_rule in STORES_DIVISOR:
            raise ValueError(
                f"{op}: the producer of {r.id} stores a tensor scale that divides, such as weight_global_scale; needs"
                " tensor_scale_divides=True for it, or tensor_scale_divides=False for one that multiplies"
            )
        divides = as_flag(op, "tensor_scale_divides", False if tensor_scale_divides is None else tensor_scale_divides)
        tensors = import_parts(op, packed=packed, block_scale=block_scale, tensor_scale=tensor_scale)
        codes = imported_codes(op, tensors["packed"], r, high_nibble_first)
        shape = shape_of(op, codes, r, as_index(op, "axis", axis)) if shape is None else as_shape(op, shape)
        shapes = wanted_parts(shape, as_index(op, "axis", axis), r, scale_layout)
        padded = None if scale_layout == "linear" else shapes.block_scale
        scales = imported_scales(op, tensors["block_scale"], r, padded)
        scale, amax = imported_tensor_scale(
            *(op, tensors["tensor_scale"], codes, shapes.tensor_scale, divides),
            lambda divisors: FUNCTIONS["Quantized.from_parts"](divisors, r, numpy_dtype(op, dtype)),
        )
        with _suspecting_a_swap(codes, scales, scale_layout):
            q = cls(codes, scales, scale, amax, shape, dtype, axis, r, scale_layout)
        library = library_of(packed)
        if library is None:
            return q
        with library.call_context(packed) as give:
            return q.with_parts(give)

    def dequantize(self, dtype: Any = None) -> Any:
        """Return the values, in the shape of x. This is fp4kit.dequantize(q, dtype).

        Args:
            dtype: float32, float16 or bfloat16; None for the dtype of x.

        Returns:
            A new array in the library and on the device of the codes.

        Raises:
            TypeError: dtype is none of these dtypes.

        Examples:
            >>> import fp4kit, numpy as np
            >>> fp4kit.quantize(np.float32([[6] * 32, [3] * 32]), "mxfp4").dequantize()[:, 0]
            array([6., 3.], dtype=float32)
        """
        return FUNCTIONS["Quantized.dequantize"](self, dtype)

    def to(self, target: Any) -> Quantized:
        """Return a Quantized with its arrays in another library or on another device. The bytes stay unchanged.

        Args:
            target: a library: "numpy", "cupy", "torch" or "jax". Or a device: "cpu", "cuda", "cuda:1" or a
                torch.device. If target is a library, the arrays share memory where possible. If it is a device, PyTorch
                tensors stay tensors, and other arrays become NumPy or CuPy arrays.

        Returns:
            A Quantized. It may be self if nothing has to change.

        Raises:
            ValueError: target is anything else, or there is no CUDA device of this number.
            RuntimeError: the library is not imported, or there is no GPU.

        Examples:
            >>> import fp4kit, numpy as np
            >>> fp4kit.quantize(np.ones((4, 32), np.float32), "mxfp4").to("numpy").packed.shape
            (4, 16)
        """
        return FUNCTIONS["Quantized.to"](self, target)

    def __len__(self) -> int:
        """Return the length of the first axis of x. A Quantized without rows is false, like an empty list."""
        return self.shape[0]

    def __getitem__(self, index: int | slice | tuple[int | slice | EllipsisType, ...]) -> Quantized:
        """Return q[a:b] or q[a:b, c:d], the Quantized of that part of x. It shares the memory of q where it can.

        The values of q[a:b, c:d] are q.dequantize()[a:b, c:d], in every bit. tensor_amax remains the amax of the whole
        tensor, because tensor_scale was made from it.

        Args:
            index: a slice of the first axis of x, or a tuple of slices, one per axis, which may contain one `...`. Ends
                may be negative or missing. Along the quantized axis, the ends must be multiples of the block length.
                Along the rows of a matrix, they must be multiples of the block rows. The end of an axis is always
                allowed, and so is any slice of a stack of matrices, or an int, as q[3] for one expert. Swizzled scales
                can be cut only between whole tiles (128 or 8 rows, and 4 blocks along the quantized axis); otherwise
                slice fp4kit.unswizzle(q). Cutting them along the quantized axis copies the scales.

        Returns:
            A Quantized; self if the slices cover all of x.

        Raises:
            TypeError: the index is neither a slice nor a tuple of slices, one of the ends is not an int, or an int
                selects part of a matrix.
            IndexError: an int is out of range.
            ValueError: there are more slices than axes, or a slice has a step, or cuts a block or a tile.

        Examples:
            >>> import fp4kit, numpy as np
            >>> q = fp4kit.quantize(np.ones((64, 64), np.float32), "nvfp4-te-2d")
            >>> q[16:48].shape, q[:, -32:].shape, len(q[32:])
            ((32, 64), (64, 32), 32)
            >>> q[:, 0:24]
            Traceback (most recent call last):
            ValueError: Quantized: q[:, 0:24] cuts blocks of 16 along axis 1; needs multiples of 16, or the end; ...
        """
        return FUNCTIONS["Quantized.__getitem__"](self, index)

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError."""
            usual = "call q.dequantize() for an array of the values" if name in _OF_ARRAYS else ""
            hint = f"; {found}" if (found := _OTHER_NAMES.get(name, usual)) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def _refuse_arithmetic(self, *others: Any) -> NoReturn:
        """Raise TypeError. This method stands for all arithmetic operators, because a Quantized supports none."""
        raise TypeError(_NO_NUMBERS)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __float__ = __int__ = _refuse_arithmetic

    def __eq__(self, other: object) -> bool:
        """Return True for q == q. For another Quantized, raise TypeError: `equals` compares, and may wait for a GPU."""
        if isinstance(other, Quantized) and other is not self:
            raise TypeError("Quantized: q == other is not defined; call q.equals(other), or compare(q, other)")
        return self is other or NotImplemented

    __hash__ = object.__hash__

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError, because NumPy would otherwise make an object array of a Quantized."""
        raise TypeError(_NO_NUMBERS)

    def equals(self, other: Quantized) -> bool:
        """Return whether all fields are equal and all arrays agree in every bit.

        NaN patterns, tensor_amax and padding are compared too. Arrays on a GPU are first copied to the host, which
        waits for the device. To see where two differ, use fp4kit.compare.

        Args:
            other: another Quantized.

        Returns:
            True or False.

        Raises:
            TypeError: other is not a Quantized.

        Examples:
            >>> import fp4kit, numpy as np
            >>> q = fp4kit.quantize(np.ones((4, 32), np.float32), "nvfp4-te")
            >>> q.equals(q[0:4]), q.equals(q[0:2])
            (True, False)
        """
        return FUNCTIONS["Quantized.equals"](self, other)

    def __str__(self) -> str:
        """Return the text that print(q) shows: shapes, sizes, and statistics of codes and scales."""
        return FUNCTIONS["Quantized.__str__"](self)

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows, or None if the arrays hold no values."""
        return FUNCTIONS["Quantized._repr_html_"](self)

    @property
    def bits_per_value(self) -> float:
        """The number of bits of codes and scales per value; 0 if there are no values. tensor_amax is not counted.

        Scales that a recipe rounds to float16 or bfloat16 count as 16 bits, although tensor_scale holds them as
        float32. So nbytes may be larger.
        """
        values, bits = prod(self.shape), 8 * self.nbytes
        if tensor_scale_dtype(self.recipe) != "float32":
            bits -= 16 * prod(self.tensor_scale.shape)
        return bits / values if values else 0.0

    def __repr__(self) -> str:
        try:
            bits = f", {self.bits_per_value:.3g} bits per value"
        except (TypeError, AttributeError):  # in a tree of shapes, shardings, ... the parts are not arrays
            bits = ""
        return (
            f"Quantized({self.recipe.title}, shape={self.shape}, dtype={self.dtype}, axis={self.axis}, "
            f"scale_layout={self.scale_layout!r}{bits})"
        )


def check_is_quantized(op: str, q: Any, name: str = "q") -> None:
    """Raise TypeError unless q is a Quantized. Its arrays may be of any library. name: the name of q in the message."""
    if not isinstance(q, Quantized):
        raise TypeError(f"{op}: {name} is {type(q).__name__}; needs a Quantized, as fp4kit.quantize returns")


def check_quantized(op: str, q: Any) -> Quantized:
    """Check that q is a Quantized, and return it with NumPy or CuPy arrays that share its memory."""
    check_is_quantized(op, q)
    return q.imported(op)


def check_values_dtype(op: str, dtype: Any) -> None:
    """Raise TypeError unless dtype, the dtype of dequantized values, is float32, float16 or bfloat16."""
    if dtype not in FLOATS:
        needed = "needs float32, float16 or bfloat16; dequantize to float32 and convert the result"
        raise TypeError(f"{op}: dtype is {dtype}; {needed}")


@contextmanager
def _suspecting_a_swap(codes: Any, scales: Any, scale_layout: ScaleLayout) -> Iterator[None]:
    """Add a hint to a ValueError that is raised in the with block, if the caller may have swapped codes and scales."""
    try:
        yield
    except ValueError as error:
        if scales is None or scale_layout != "linear" or codes.size >= scales.size:
            raise
        raise ValueError(f"{error}; block_scale is larger than packed: pass packed first, then block_scale") from None


def assembled(fields: dict[str, Any]) -> Quantized:
    """Return a Quantized with the given fields, without any check."""
    q = object.__new__(Quantized)
    q.__dict__.update(fields)
    return q
