"""Define Quantized, which holds the codes and scales of an array, and everything needed to read them.

A Quantized checks its fields once, when it is made. Its arithmetic is in other modules. The four fields that are arrays
are its parts: packed, block_scale, tensor_scale and tensor_amax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fp4kit.arguments import as_flag, as_index, as_shape
from fp4kit.arrays.imports import check_unmasked, import_arrays
from fp4kit.arrays.returns import TORCH, ArrayLibrary, library_of, numpy_dtype
from fp4kit.formats import FLOATS
from fp4kit.layouts import check_layout
from fp4kit.lazy import FUNCTIONS
from fp4kit.quantized.parts import (
    check_amounts,
    check_codes,
    check_scale_codes,
    import_parts,
    imported_codes,
    imported_scales,
    imported_tensor_scale,
    scale_shape,
    shape_of,
    wanted_parts,
)
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import ScaleLayout

PARTS = ("packed", "block_scale", "tensor_scale", "tensor_amax")  # fields that are arrays
FACTS = ("shape", "dtype", "axis", "recipe", "scale_layout")  # the other fields
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)

_NO_NUMBERS = "Quantized: is not an array of numbers; call q.dequantize() for its values, or use q.packed for its codes"
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
    "T": "call fp4kit.transpose(q)",
    "transpose": "call fp4kit.transpose(q)",
    "float": "call q.dequantize()",
}
_OF_ARRAYS = frozenset(name for name in dir(np.ndarray) if not name.startswith("_"))  # methods that users try


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
            Scales of 16x16 blocks are stored once per row. None if the recipe has only float32 scales.
        tensor_scale: the float32 scales by which decoding multiplies. The shape is () for one scale per tensor, (E,)
            for one per expert (x then has three or more dimensions, and E is the first length of x'), x'.shape[:-1] for
            one per row, and (..., K/block) for one per block. None if the recipe has no tensor scale.
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
            NaN. Values on a device are not read.
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
        check_scale_codes("Quantized", self.block_scale, self.recipe.scale)
        self._check_tensor(covered, host)

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
                kind = f"{type(array).__module__}.{type(array).__name__}"
                raise TypeError(f"Quantized: {name} is a {kind}; needs an array of {library.name}, as packed is")
        self.imported()

    def _check(self, name: str, shape: tuple[int, ...] | None, host: bool) -> None:
        """Check the field `name`, packed or block_scale: raise an error unless it is a uint8 array of the given
        shape.
        """
        # If `shape` is None, the field must be None.
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
        """Check tensor_scale and tensor_amax: raise an error unless they are float32 arrays of one allowed shape."""
        if shapes and self.tensor_scale is not None:
            self._check_floats("tensor_scale", shapes, host)
            if self.tensor_amax is not None:
                self._check_floats("tensor_amax", (self.tensor_scale.shape,), host)
        elif shapes or self.tensor_scale is not None or self.tensor_amax is not None:
            name = "tensor_scale" if shapes or self.tensor_scale is not None else "tensor_amax"
            self._refuse_floats(name, shapes)

    def _check_floats(self, name: str, shapes: tuple[tuple[int, ...], ...], host: bool) -> None:
        """Check the field `name`, tensor_scale or tensor_amax: raise an error unless it is float32 of an allowed
        shape.
        """
        # The error is TypeError for another library or dtype, and ValueError otherwise.
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
        """Raise the ValueError for a field `name` (tensor_scale or tensor_amax) of a wrong shape, missing or
        surplus.
        """
        got = _spelled(getattr(self, name))
        needed = " or ".join(f"float32 {shape}" for shape in shapes) or "None, as it has no tensor scale"
        raise ValueError(f"Quantized: {name} is {got}; {self.recipe.id} of {self.shape} needs {needed}")

    def _check_kind(self, name: str, array: Any, host: bool) -> None:
        """Raise TypeError unless `array`, the field `name`, is of packed's library: a NumPy array, or a CuPy array."""
        kind, packed = type(array), self.packed
        if isinstance(array, np.ndarray):
            check_unmasked(array, f"Quantized: {name}")
        if isinstance(array, np.ndarray) if host else kind is type(packed) and kind.__module__ == "cupy":
            if host or array is packed or array.data.device_id == packed.data.device_id:
                return
            devices = (array.data.device_id, packed.data.device_id)
            raise ValueError(
                f"Quantized: {name} is on device {devices[0]} and packed on {devices[1]}; move all parts to one"
            )
        if array is packed or not hasattr(array, "dtype"):
            raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a NumPy or CuPy array")
        needed = "NumPy array" if host else "CuPy array"
        raise TypeError(f"Quantized: {name} is a {kind.__module__}.{kind.__name__}; needs a {needed}, as packed is")

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
        tensor_scale_divides: bool = False,
        high_nibble_first: bool = False,
    ) -> Quantized:
        """Make a Quantized from the tensors of a checkpoint. Arrays are copied only if their bytes must change.

        Args:
            packed: the codes, shaped as in a Quantized. Either bytes (uint8, int8 or float4_e2m1fn_x2), or one element
                per byte in the recipe's element dtype: float8_e4m3fn, float8_e5m2, int8, float6_*, or float4_e2m1fn and
                int4, which are then packed.
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
                compressed-tensors does.
            high_nibble_first: True if the even element of a pair of codes is in the high nibble.

        Returns:
            A Quantized with arrays in the library of packed. No checkpoint stores the amax, so tensor_amax is None.
            There is one exception: for float32 x and a recipe of compressed-tensors, a divisor cannot always be
            computed from its reciprocal. Then tensor_amax is an amax that gives the divisor, if any amax does.

        Raises:
            TypeError: a dtype is not one of the recipe's, packed is None or not an array, or a flag is not a bool.
            ValueError: a tensor scale is not a float32 number, or it divides and is 0 or None; codes have more bits
                than the element; an odd number of 4-bit codes is stored one per byte; high_nibble_first is set although
                no codes share a byte; the recipe has no codes; the arrays are on several devices; or a check of
                Quantized fails.

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
        tensor_scale_divides = as_flag(op, "tensor_scale_divides", tensor_scale_divides)
        tensors = import_parts(op, packed=packed, block_scale=block_scale, tensor_scale=tensor_scale)
        codes = imported_codes(op, tensors["packed"], r, high_nibble_first)
        shape = shape_of(op, codes, r, as_index(op, "axis", axis)) if shape is None else as_shape(op, shape)
        shapes = wanted_parts(shape, as_index(op, "axis", axis), r, scale_layout)
        padded = None if scale_layout == "linear" else shapes.block_scale
        scales = imported_scales(op, tensors["block_scale"], r, padded)
        scale, amax = imported_tensor_scale(
            *(op, tensors["tensor_scale"], codes, shapes.tensor_scale, tensor_scale_divides),
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

    def __getitem__(self, index: slice | tuple[slice | EllipsisType, ...]) -> Quantized:
        """Return q[a:b] or q[a:b, c:d], the Quantized of that part of x. It shares the memory of q where it can.

        The values of q[a:b, c:d] are q.dequantize()[a:b, c:d], in every bit. tensor_amax remains the amax of the whole
        tensor, because tensor_scale was made from it.

        Args:
            index: a slice of the first axis of x, or a tuple of slices, one per axis, which may contain one `...`. Ends
                may be negative or missing. Along the quantized axis, the ends must be multiples of the block length.
                Along the rows of a matrix, they must be multiples of the block rows. The end of an axis is always
                allowed, and so is any slice of a stack of matrices. Swizzled scales can be cut only between whole tiles
                (128 or 8 rows, and 4 blocks along the quantized axis); otherwise slice fp4kit.unswizzle(q). Cutting
                them along the quantized axis copies the scales.

        Returns:
            A Quantized; self if the slices cover all of x.

        Raises:
            TypeError: the index is neither a slice nor a tuple of slices, or one of the ends is not an int.
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
        """The number of bits of codes and scales per value; 0 if there are no values. tensor_amax is not counted."""
        values = prod(self.shape)
        return 8 * self.nbytes / values if values else 0.0

    def __repr__(self) -> str:
        try:
            bits = f", {self.bits_per_value:.3g} bits per value"
        except (TypeError, AttributeError):  # in a tree of shapes, shardings, ... the parts are not arrays
            bits = ""
        return (
            f"Quantized({self.recipe.id}, shape={self.shape}, dtype={self.dtype}, axis={self.axis}, "
            f"scale_layout={self.scale_layout!r}{bits})"
        )


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


def _spelled(array: Any) -> str:
    """Return the dtype and shape of an array as text for an error message, such as "uint8 (2, 16)"."""
    if array is None or not hasattr(array, "dtype"):
        return "None" if array is None else f"of type {type(array).__name__}"
    return f"{array.dtype} {tuple(array.shape)}"
