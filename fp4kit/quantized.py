"""Quantized: codes, scales and what is needed to read them. Validates once, holds no arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fp4kit.formats import FLOATS
from fp4kit.interop import import_arrays
from fp4kit.layouts import check_layout, padded_shape
from fp4kit.libraries import Library, library_of, numpy_dtype
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe

PARTS = ("packed", "block_scale", "tensor_scale", "tensor_amax")
FACTS = ("shape", "dtype", "axis", "recipe", "scale_layout")
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_NEVER_NAN = ("te_primary_weight", "compressed_tensors")  # tensor rules that make a number of an amax that is NaN


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: value = decode(code) * block_scale * tensor_scale, in the order that recipe.decode_rule states.

    With x' = x with the quantized axis moved last, of shape (..., K):
    packed: uint8 (..., K/2), element 2j in the low nibble; (..., K) for elements of more than 4 bits, one code a byte.
    block_scale: uint8 bit patterns (..., K/block), once per row also for 16x16 blocks; padded and permuted by scale_layout; None
        where the recipe has only float32 scales.
    tensor_scale: float32, multiplies on decode: () for the tensor, (E,) per expert of x with three or more dimensions,
        x'.shape[:-1] per row, (..., K/block) per block; None for recipes without one. It is what the array's values follow.
    tensor_amax: float32, same shape: the amax that tensor_scale was made from; None where it is not known, as in a checkpoint.
        Decoding needs none: a rule that reads an amax takes the one that the scale implies (reference/implied.py).
    shape, dtype: of x; float32, float16 or bfloat16. axis: the axis of x along which blocks run, stored as a non-negative number.
    recipe: a Recipe or an id. scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".

    All arrays are of one library and one device: NumPy's, CuPy's, PyTorch's or JAX's; dtype may be a dtype of theirs, and is kept
    as NumPy's (or ml_dtypes'). Raises TypeError for an array, dtype or recipe of another kind; ValueError for another shape, for
    a part that the recipe has not or that is missing, for arrays of several devices and, on the host, for negative tensor scales
    or amaxes and for NaN where the recipe's rule gives none. On a device values are not read.
    """

    packed: Any
    block_scale: Any
    tensor_scale: Any
    tensor_amax: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int
    recipe: Recipe
    scale_layout: str = "linear"

    def __post_init__(self) -> None:
        put = object.__setattr__
        if type(self.recipe) is not Recipe:
            put(self, "recipe", find_recipe(self.recipe))
        put(self, "shape", _as_shape(self.shape))
        put(self, "dtype", numpy_dtype("Quantized", self.dtype))
        if self.dtype not in FLOATS:
            raise TypeError(f"Quantized: dtype is {self.dtype}; needs float32, float16 or bfloat16, the dtype of x")
        axis, packed, scales, covered = _wanted(self.shape, operator.index(self.axis), self.recipe, self.scale_layout)
        put(self, "axis", axis)
        library = library_of(self.packed)
        if library is not None:
            return self._check_parts_of(library)
        host = isinstance(self.packed, np.ndarray)
        self._check("packed", packed, host)
        self._check("block_scale", scales, host)
        self._check_tensor(covered, host)

    def _check_parts_of(self, library: Library) -> None:
        """The parts are arrays of one library, and what is needed of NumPy's or CuPy's holds for their memory."""
        for name in PARTS:
            array = getattr(self, name)
            if array is not None and library_of(array) is not library:
                kind = f"{type(array).__module__}.{type(array).__name__}"
                raise TypeError(f"Quantized: {name} is a {kind}; needs an array of {library.name}, as packed is")
        self.imported()

    def _check(self, name: str, shape: tuple[int, ...] | None, host: bool) -> None:
        array = getattr(self, name)
        if array is None and shape is None:
            return
        if array is not None and shape is not None:
            self._check_kind(name, array, host)
            if array.dtype == _UINT8 and array.shape == shape:
                return
        got = "None" if array is None else _spelled(array)
        needed = "None" if shape is None else f"uint8 {shape}"
        raise ValueError(f"Quantized: {name} is {got}; {self.recipe.id} of {self.shape} needs {needed}")

    def _check_tensor(self, shapes: tuple[tuple[int, ...], ...], host: bool) -> None:
        """tensor_scale and tensor_amax: there as the recipe has them, float32, of one shape."""
        if shapes and self.tensor_scale is not None:
            self._check_floats("tensor_scale", shapes, host)
            if self.tensor_amax is not None:
                self._check_floats("tensor_amax", (self.tensor_scale.shape,), host)
        elif shapes or self.tensor_scale is not None or self.tensor_amax is not None:
            name = "tensor_scale" if shapes or self.tensor_scale is not None else "tensor_amax"
            self._refuse_floats(name, shapes)

    def _check_floats(self, name: str, shapes: tuple[tuple[int, ...], ...], host: bool) -> None:
        array = getattr(self, name)
        if host and isinstance(array, np.generic):
            array = np.asarray(array)
            object.__setattr__(self, name, array)
        self._check_kind(name, array, host)
        if array.dtype != _FLOAT32:
            raise TypeError(f"Quantized: {name} is {array.dtype}; needs float32; convert it with {name}.astype(np.float32)")
        if array.shape not in shapes:
            self._refuse_floats(name, shapes)
        if host:
            self._check_values(name, array)

    def _refuse_floats(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> NoReturn:
        got = _spelled(getattr(self, name))
        needed = " or ".join(f"float32 {shape}" for shape in shapes) or "None, as it has no tensor scale"
        raise ValueError(f"Quantized: {name} is {got}; {self.recipe.id} of {self.shape} needs {needed}")

    def _check_kind(self, name: str, array: Any, host: bool) -> None:
        """A NumPy array, or a CuPy one; of the kind, and on the device, of packed."""
        kind, packed = type(array), self.packed
        if isinstance(array, np.ndarray) if host else kind is type(packed) and kind.__module__ == "cupy":
            if host or array is packed or array.data.device_id == packed.data.device_id:
                return
            found = (array.data.device_id, packed.data.device_id)
            raise ValueError(f"Quantized: {name} is on device {found[0]} and packed on {found[1]}; move all parts to one")
        if array is packed or not hasattr(array, "dtype"):
            raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a NumPy or CuPy array")
        needed = "NumPy array" if host else "CuPy array"
        raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a {needed}, as packed is")

    def _check_values(self, name: str, array: np.ndarray) -> None:
        """No negative number, and NaN only where the tensor rule gives it, which it does for an amax that is NaN."""
        if not (array >= 0).all():
            if (array < 0).any():
                raise ValueError(f"Quantized: {name} is negative; needs {name} >= 0: the sign of a value is in its code")
            numbers = self.recipe.tensor_rule in _NEVER_NAN
            if name == "tensor_scale" and numbers:
                raise ValueError(f"Quantized: {name} is NaN; {self.recipe.id} gives no such scale; needs a number")
            if name == "tensor_amax" and not numbers and (np.isnan(array) & ~np.isnan(self.tensor_scale)).any():
                raise ValueError(f"Quantized: {name} is NaN where tensor_scale is a number; None stands for an unknown amax")

    def with_parts(self, convert: Callable[[Any], Any]) -> Quantized:
        """The same, with every array as convert(array) gives it: the same bytes elsewhere, which are not checked again."""
        parts = {name: array if array is None else convert(array) for name, array in self.parts().items()}
        return assembled(**{**vars(self), **parts})

    def parts(self) -> dict[str, Any]:
        """The arrays by their names; None for those that are missing."""
        return {name: getattr(self, name) for name in PARTS}

    def imported(self) -> Quantized:
        """Itself, or the same with NumPy or CuPy arrays on the memory of another library's."""
        if isinstance(self.packed, np.ndarray) or type(self.packed).__module__ == "cupy":
            return self
        there = {name: array for name, array in self.parts().items() if array is not None}
        return replace(self, **dict(zip(there, import_arrays("Quantized", **there), strict=True)))

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """Shape of x with the quantized axis last."""
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.shape[self.axis])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the block scales in linear layout."""
        return scale_shape(self.moved_shape, self.recipe)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.packed, self.block_scale, self.tensor_scale)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(prod(self.shape), 1)
        return (
            f"Quantized({self.recipe.id}, shape={self.shape}, dtype={self.dtype}, axis={self.axis}, "
            f"scale_layout={self.scale_layout!r}, {bits:.3g} bits a value)"
        )


def assembled(**fields: Any) -> Quantized:
    """A Quantized of what an engine made as it must be: nothing is checked."""
    q = object.__new__(Quantized)
    q.__dict__.update(fields)
    return q


def flatten(q: Quantized) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays of q that are there; and their names with all that is no array: hashable, and equal where it means the same."""
    names = tuple(name for name in PARTS if getattr(q, name) is not None)
    return tuple(getattr(q, name) for name in names), (names, *(getattr(q, name) for name in FACTS))


def unflatten(arrays: Any, facts: Any) -> Quantized:
    """Inverse of flatten. Nothing is checked: a tracer's arrays, and what a tree library has in their places, hold no values."""
    names, *values = facts
    return assembled(**{**dict.fromkeys(PARTS), **dict(zip((*names, *FACTS), (*arrays, *values), strict=True))})


def packed_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Shape of the packed codes of an array whose quantized axis is last."""
    *lead, K = moved_shape
    return (*lead, recipe.element.packing.length(K))


def scale_shape(moved_shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Shape of the linear block scales of an array whose quantized axis is last."""
    *lead, K = moved_shape
    return (*lead, K // recipe.block_size)


class _Parts(NamedTuple):
    """The axis as a non-negative number, and shapes: of packed, of block_scale (None without), allowed ones of tensor_scale."""

    axis: int
    packed: tuple[int, ...]
    block_scale: tuple[int, ...] | None
    tensor_scale: tuple[tuple[int, ...], ...]


@lru_cache(1024)  # a small array on a GPU is quantized in the time that these shapes take
def _wanted(shape: tuple[int, ...], axis: int, r: Recipe, layout: str) -> _Parts:
    """What the parts of a Quantized must be. Raises ValueError for an axis, a length or a layout that the shape has not."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"Quantized: axis {axis} of a {len(shape)}-d array; needs {-len(shape)} to {len(shape) - 1}")
    axis %= len(shape)
    check_layout("Quantized", layout)
    if shape[axis] % r.length_multiple:
        raise ValueError(f"Quantized: axis {axis} has length {shape[axis]}; {r.id} needs a multiple of {r.length_multiple}")
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    if layout != "linear" and len(shape) < 2 and r.scale is not None:
        raise ValueError(f"Quantized: scale_layout is {layout!r} of a 1-d array; needs the rows of a matrix, or 'linear'")
    scales = None if r.scale is None else padded_shape(scale_shape(moved, r), layout)
    return _Parts(axis, packed_shape(moved, r), scales, tuple(_tensor_shapes(moved, r)))


def _tensor_shapes(moved: tuple[int, ...], r: Recipe) -> Iterator[tuple[int, ...]]:
    if r.tensor_scaling == "row":
        yield moved[:-1]
    elif r.tensor_scaling == "block":
        yield scale_shape(moved, r)
    elif r.tensor_scaling == "tensor":
        yield ()
        if len(moved) > 2:
            yield moved[:1]


def _as_shape(shape: Any) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"Quantized: shape is {shape!r}; needs a tuple of ints, the shape of x") from None
    if found and min(found) < 0:
        raise ValueError(f"Quantized: shape is {shape!r}; needs lengths >= 0")
    return found


def _spelled(array: Any) -> str:
    return "None" if array is None else f"{array.dtype} {tuple(array.shape)}"
