"""Quantized: codes, scales and what is needed to read them. Validates once, holds no arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import numpy as np

from fp4kit.arguments import as_flag, as_index, as_shape
from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import ArrayLibrary, library_of, numpy_dtype
from fp4kit.formats import FLOATS
from fp4kit.layouts import check_layout
from fp4kit.quantized import from_checkpoint
from fp4kit.quantized.part_shapes import check_amounts, check_codes, scale_shape, wanted_parts
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.registered import FUNCTIONS
from fp4kit.types import ScaleLayout

PARTS = ("packed", "block_scale", "tensor_scale", "tensor_amax")  # fields that are arrays
FACTS = ("shape", "dtype", "axis", "recipe", "scale_layout")  # and the others
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: value = decode(code) * block_scale * tensor_scale, in the order that recipe.decode_rule
    states.

    With x' = x with the quantized axis moved last, of shape (..., K):
    packed: uint8 (..., K/2), element 2j in the low nibble; (..., K) for elements of more than 4 bits, one code a byte.
    block_scale: uint8 bit patterns (..., K/block), once per row also for 16x16 blocks; padded and permuted by
    scale_layout; None
        where the recipe has only float32 scales.
    tensor_scale: float32, multiplies on decode: () for the tensor, (E,) per expert of x with three or more dimensions,
        x'.shape[:-1] per row, (..., K/block) per block; None for recipes without one. It is what the array's values
        follow.
    tensor_amax: float32, same shape: the amax that tensor_scale was made from; None where it is not known, as in a
    checkpoint.
        Decoding needs none: a rule that reads an amax takes the one that the scale implies (reference/implied_amax.py).
    shape, dtype: of x; float32, float16 or bfloat16. axis: the axis of x along which blocks run, stored as a
    non-negative number. recipe: a Recipe or an id. scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".

    All arrays are of one library and one device: NumPy's, CuPy's, PyTorch's or JAX's; dtype may be a dtype of theirs,
    and is kept as NumPy's (or ml_dtypes'). Raises TypeError for an array, dtype or recipe of another kind; ValueError
    for another shape, for a part that the recipe has not or that is missing, for arrays of several devices and, on the
    host, for negative tensor scales or amaxes and for NaN where the recipe's rule gives none. On a device values are
    not read.
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
        host = isinstance(self.packed, np.ndarray)
        self._check("packed", packed, host)
        check_codes("Quantized", self.packed, self.recipe.element)
        self._check("block_scale", scales, host)
        self._check_tensor(covered, host)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields of what was pickled or copied; they are checked as those of a new Quantized."""
        Quantized.__init__(self, **state)

    def _check_parts_of(self, library: ArrayLibrary) -> None:
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
            raise TypeError(
                f"Quantized: {name} is {array.dtype}; needs float32; convert it with {name}.astype(np.float32)"
            )
        if array.shape not in shapes:
            self._refuse_floats(name, shapes)
        if host:
            check_amounts("Quantized", name, array, self.tensor_scale, self.recipe)

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
            raise ValueError(
                f"Quantized: {name} is on device {found[0]} and packed on {found[1]}; move all parts to one"
            )
        if array is packed or not hasattr(array, "dtype"):
            raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a NumPy or CuPy array")
        needed = "NumPy array" if host else "CuPy array"
        raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a {needed}, as packed is")

    def with_parts(self, convert: Callable[[Any], Any]) -> Quantized:
        """The same, with every array as convert(array) gives it: the same bytes elsewhere, which are not checked
        again.
        """
        parts = {name: array if array is None else convert(array) for name, array in self.parts().items()}
        return assembled({**vars(self), **parts})

    def parts(self) -> dict[str, Any]:
        """The arrays by their names; None for those that are missing."""
        return {name: getattr(self, name) for name in PARTS}

    def imported(self, op: str = "Quantized") -> Quantized:
        """Itself, or the same with NumPy or CuPy arrays on the memory of another library's; op: what errors begin
        with.
        """
        if isinstance(self.packed, np.ndarray) or type(self.packed).__module__ == "cupy":
            return self
        there = {name: array for name, array in self.parts().items() if array is not None}
        return replace(self, **dict(zip(there, import_arrays(op, **there), strict=True)))

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
        tensor_scale_divides: bool = False,
        high_nibble_first: bool = False,
    ) -> Quantized:
        """A Quantized of the tensors of a checkpoint, without copies but of what must change.

        packed: codes, shaped as in a Quantized: bytes as uint8, int8 or float4_e2m1fn_x2; or numbers of the recipe's
        own element
            dtype, one a byte: float8_e4m3fn, float8_e5m2, int8, float6_*, and float4_e2m1fn and int4, which are packed.
        block_scale: uint8 or int8 bit patterns, float8_e4m3fn or float8_e8m0fnu, as the recipe has; None where it has
        none. Under
            a swizzled scale_layout, of any shape of the padded size.
        tensor_scale: shaped as in a Quantized, but for axes of length 1 at the end: float32, or the same numbers as
        float16,
            bfloat16, float64 or a Python float.
        recipe: its producer's. shape: of x; None takes that of packed. dtype: of x; most checkpoints are made from
        bfloat16. tensor_scale_divides: what is stored divides on decode, as the weight_global_scale of
        compressed-tensors does. high_nibble_first: the even element of a pair of codes is in the high nibble. Arrays
        are of any library, all on one device. tensor_amax is None: no checkpoint has one.

        Raises TypeError for a dtype that is not the recipe's, and for a flag that is no bool; ValueError for a tensor
        scale that
            is no float32, or 0 and divides, codes of more bits than the element has, high_nibble_first where no codes
            share a byte, a recipe without codes; and what Quantized raises. On a device, only tensor scales that divide
            or are no float32 are read, which waits for it.
        Numerics: 1 / tensor_scale, rn, where it divides. Nothing else is computed.
        Exact: a divisor is known by its reciprocal; values are the producer's where no other divisor that it writes has
        the same.

        >>> import ml_dtypes, numpy as np
        >>> codes = np.array([[0x21, 0x43, 0x65, 0x87, 0, 0, 0, 0]], np.uint8)
        >>> scales = np.array([[2.0]], ml_dtypes.float8_e4m3fn)
        >>> q = Quantized.from_parts(codes, scales, np.float32([4]), recipe="nvfp4-compressed-tensors", tensor_scale_divides=True)
        >>> q
        Quantized(nvfp4-compressed-tensors, shape=(1, 16), dtype=bfloat16, axis=1, scale_layout='linear', 6.5 bits a value)
        >>> q.dequantize(np.float32)[0, :8].tolist()
        [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, -0.0]
        """  # noqa: E501
        op, r = "from_parts", recipe_of("from_parts", recipe)
        if r.fake_only:
            raise ValueError(f"{op}: {r.id} is a fake quantizer and has values only; needs a recipe with codes")
        check_layout(op, scale_layout)
        high_nibble_first = as_flag(op, "high_nibble_first", high_nibble_first)
        tensor_scale_divides = as_flag(op, "tensor_scale_divides", tensor_scale_divides)
        found = from_checkpoint.import_parts(op, packed=packed, block_scale=block_scale, tensor_scale=tensor_scale)
        codes = from_checkpoint.codes(op, found["packed"], r, high_nibble_first)
        shape = (
            from_checkpoint.shape_of(op, codes, r, as_index(op, "axis", axis)) if shape is None else as_shape(op, shape)
        )
        wanted = wanted_parts(shape, as_index(op, "axis", axis), r, scale_layout)
        padded = None if scale_layout == "linear" else wanted.block_scale
        scales = from_checkpoint.block_scales(op, found["block_scale"], r, padded)
        scale = from_checkpoint.tensor_scale(
            op, found["tensor_scale"], codes, wanted.tensor_scale, tensor_scale_divides
        )
        q = cls(codes, scales, scale, None, shape, dtype, axis, r, scale_layout)
        library = library_of(packed)
        if library is None:
            return q
        with library.call_context(packed) as give:
            return q.with_parts(give)

    def dequantize(self, dtype: Any = None) -> Any:
        """fp4kit.dequantize of it: its values, in the shape of x; dtype None is that of x.

        >>> import fp4kit, numpy as np
        >>> fp4kit.quantize(np.float32([[6] * 32, [3] * 32]), "mxfp4").dequantize()[:, 0]
        array([6., 3.], dtype=float32)
        """
        return FUNCTIONS["Quantized.dequantize"](self, dtype)

    def to(self, target: Any) -> Quantized:
        """The same elsewhere: its arrays in another library, or on another device. The bytes are not looked at.

        target: "numpy", "cupy", "torch" or "jax", without a copy where the library takes the memory as it is; or a
        device,
            "cpu", "cuda" or "cuda:1", or a torch.device: tensors of PyTorch stay tensors, other arrays become NumPy's
            or CuPy's.
        Raises ValueError for anything else; RuntimeError where the library is not imported, or there is no GPU.

        >>> import fp4kit, numpy as np
        >>> fp4kit.quantize(np.ones((4, 32), np.float32), "mxfp4").to("numpy").packed.shape
        (4, 16)
        """
        return FUNCTIONS["Quantized.to"](self, target)

    def __len__(self) -> int:
        """Length of the first axis of x. A Quantized without rows is false, as an empty list is."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Quantized:
        """q[a:b], what x[a:b] is: whole blocks of x's first axis, whose values are q.dequantize()[a:b]. Views, no
        copies.

        a and b are multiples of the rows of a block (of its length where the first axis is the quantized one), or the
        end; any tensors of a stack. Swizzled scales are cut between whole tiles of 128 or 8 rows; cut
        fp4kit.unswizzle(q) elsewhere. tensor_amax stays that of the whole tensor, which tensor_scale was made from.
        Raises TypeError for anything but a slice; ValueError for a step, and for a cut inside a block or a tile.

        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((64, 32), np.float32), "nvfp4-te-2d")
        >>> q[16:48].shape, len(q[32:])
        ((32, 32), 32)
        >>> q[8:16]
        Traceback (most recent call last):
        ValueError: Quantized: q[8:16] cuts blocks of 16; needs multiples of 16, or the end
        """
        return FUNCTIONS["Quantized.__getitem__"](self, rows)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "Quantized: is no array of numbers; needs q.dequantize() for its values, or q.packed for its codes"
        )

    def equals(self, other: Quantized) -> bool:
        """Whether all fields are equal, and all parts in every bit: NaN patterns, tensor_amax and padding too.

        What is on a GPU is copied to the host first, which waits for the device. fp4kit.compare says where two differ.
        Raises TypeError unless other is a Quantized.

        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((4, 32), np.float32), "nvfp4-te")
        >>> q.equals(q[0:4]), q.equals(q[0:2])
        (True, False)
        """
        return FUNCTIONS["Quantized.equals"](self, other)

    def __str__(self) -> str:
        return FUNCTIONS["Quantized.__str__"](self)

    def _repr_html_(self) -> str | None:
        return FUNCTIONS["Quantized._repr_html_"](self)

    @property
    def bits_per_value(self) -> float:
        """Bits of codes and scales for every value; 0 where there are none."""
        return 8 * self.nbytes / max(prod(self.shape), 1)

    def __repr__(self) -> str:
        try:
            bits = f", {self.bits_per_value:.3g} bits a value"
        except (TypeError, AttributeError):  # parts are no arrays in a tree of shapes, shardings, ...
            bits = ""
        return (
            f"Quantized({self.recipe.id}, shape={self.shape}, dtype={self.dtype}, axis={self.axis}, "
            f"scale_layout={self.scale_layout!r}{bits})"
        )


def assembled(fields: dict[str, Any]) -> Quantized:
    """A Quantized of what an engine made as it must be: nothing is checked."""
    q = object.__new__(Quantized)
    q.__dict__.update(fields)
    return q


def _spelled(array: Any) -> str:
    return "None" if array is None else f"{array.dtype} {tuple(array.shape)}"
