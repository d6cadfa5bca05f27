"""Implement fp4kit.compare, which reports where two quantized arrays, or two arrays of values, differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import lcm, prod
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.display.panel import Panel
from fp4kit.formats import Codebook, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpacked, unswizzle_scales
from fp4kit.ops.compare_values import BoxReader, boxes, compare_values
from fp4kit.ops.dequantize import dequantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of
from fp4kit.quantized.slicing import on_host as quantized_on_host

Count = tuple[int, int]  # (how many entries differ, how many were compared); (0, 0) if they cannot be compared
_NAN_POSITION = 1 << 12  # stands for NaN in _positions: farther from zero, in steps, than any value of any format
# Names of the ml_dtypes floats that convert to float32 exactly.
NARROW = (
    "bfloat16",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)
# The dtypes that compare converts to float32, exactly.
WIDENED = tuple(np.dtype(t) for t in (np.float32, np.float16, *(getattr(ml_dtypes, name) for name in NARROW)))


@dataclass(frozen=True)
class Comparison:
    """The result of fp4kit.compare: how the arrays a and b differ.

    A Comparison prints as a table. Its truth value is True if everything is equal.

    A count is a pair (differing, compared): how many entries differ, and how many were compared. Codes and scales are
    compared only if a and b are both Quantized with equal element formats, scale formats, block lengths and axes.
    Otherwise their counts are (0, 0).

    Attributes:
        codes: count of element codes.
        scales: count of block scales.
        tensor_scales: count of tensor scales.
        values: count of values, compared in every bit; NaN equals NaN.
        max_ulp: largest distance between two values at one index, counted in steps from one float32 number to the next
            (float64 if a or b is a float64 array). Pairs with a NaN are left out.
        max_error: largest |a - b|; 0 if all values are equal. NaN is possible, see compare.
        sqnr: 10 log10(sum a^2 / sum (a - b)^2) in dB; inf if all values are equal.
        first: the tuple (index, value of a, value of b) for the first value that differs, in row-major order. None if
            all values are equal.
        names: the names of a and b in the table.
        max_steps: largest distance between two codes at equal indices, counted in steps between neighboring values of
            the element format. -0 counts as 0, and NaN is left out. None if no codes are compared, or if elements are
            IF4, whose steps differ per block.
        element: name of the element format that max_steps refers to; "" if max_steps is None.

    Examples:
        >>> import fp4kit, numpy as np
        >>> found = fp4kit.compare(np.float32([1, 2]), np.float32([1, 3]))
        >>> found.equal, found.values, found.first
        (False, (1, 2), ((1,), 2.0, 3.0))
    """

    codes: Count
    scales: Count
    tensor_scales: Count
    values: Count
    max_ulp: int
    max_error: float
    sqnr: float
    first: tuple[tuple[int, ...], float, float] | None
    names: tuple[str, str] = ("a", "b")
    max_steps: int | None = None
    element: str = ""

    @property
    def equal(self) -> bool:
        """True if no code, block scale, tensor scale or value differs. Parts that were not compared count as equal."""
        return not any(part[0] for part in (self.codes, self.scales, self.tensor_scales, self.values))

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {name:15}{text}".rstrip() for name, text in self._facts())])

    def __repr__(self) -> str:
        """Return one line with the counts that differ, or "Comparison(equal in every bit)"."""
        if self.equal:
            return "Comparison(equal in every bit)"
        parts = {"codes": self.codes, "block scales": self.scales, "tensor scales": self.tensor_scales}
        counts = [f"{n:,} of {of:,} {name}" for name, (n, of) in {**parts, "values": self.values}.items() if n]
        error = [f"max_error={self.max_error:.3g}, sqnr={self.sqnr:.4g}"] if self.values[0] else []
        return f"Comparison({', '.join([*counts, *error])})"

    def _repr_html_(self) -> str:
        """Return the table as HTML, which notebooks show."""
        return Panel(self._title(), tuple(self._facts())).html()

    def _title(self) -> str:
        """Return the first line of the table: the names of a and b, and "equal in every bit" or "different"."""
        return f"{self.names[0]} and {self.names[1]}: {'equal in every bit' if self.equal else 'different'}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table, each as a pair (name, text)."""
        for name, part in (
            ("codes", self.codes),
            ("block scales", self.scales),
            ("tensor scales", self.tensor_scales),
            ("values", self.values),
        ):
            if part[1]:
                yield name, f"{part[0]:>11,} of {part[1]:>14,} differ  ({100 * part[0] / part[1]:.3g}%)"
        if self.first is not None:
            at, x, y = self.first
            yield "largest", f"{self._distance()}, |a - b| = {self.max_error:.6g}; SQNR {self.sqnr:.2f} dB"
            digits = 17 if x != y and f"{x:.9g}" == f"{y:.9g}" else 9
            yield "first", f"at {at}: {x:.{digits}g} and {y:.{digits}g}"

    def _distance(self) -> str:
        """Return the largest distance as text, such as "2 steps of E2M1" or "5 ulp"."""
        # For codes, ulp would mislead, because 0 and the smallest code above it are about a billion ulp apart.
        if not self.max_steps:
            return f"{self.max_ulp:,} ulp"
        return f"{self.max_steps} step{'s' * (self.max_steps > 1)} of {self.element}"


@ieee("compare")
def compare(a: Any, b: Any) -> Comparison:
    """Compare two arrays of equal shape, each an array of values or a Quantized, and count where they differ.

    Values are always compared; those of a Quantized are its dequantized float32 values. Codes and scales are compared
    too, in linear layout, if both arguments are Quantized with equal element formats, scale formats, block sizes along
    the axis, and axes.

    Two arrays of different dtypes are compared as numbers, exactly: in float64 if one of them is float64, otherwise in
    float32. Arrays on a GPU are first copied to the host, which waits for the device. a and b may be on different
    devices.

    Args:
        a: a Quantized, or an array of float64, float32, float16, bfloat16 or a narrower float.
        b: a Quantized, or an array of one of these dtypes. It may be an array if a is a Quantized, and the reverse.

    Returns:
        A Comparison.

    Raises:
        TypeError: an argument has the wrong type, such as an array of integers, bools or complex numbers.
        ValueError: the shapes differ.

    Numerics:
        sqnr and max_error are computed in float64. Squares are summed pairwise within parts of 2^16 values, and then
        the sums of the parts are summed pairwise. If any value differs, then sqnr and max_error are NaN if a or b holds
        a NaN, or if both hold the same infinity at one index. If a is all zeros, sqnr is -inf, or NaN if b is all zeros
        too. If a has other values and only signs of zeros differ, sqnr is inf.

        Beyond a and b, the call needs at most 64 MiB of memory and, if scales are swizzled, a linear copy of them.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
        >>> print(fp4kit.compare(fp4kit.quantize(x, "mxfp4"), fp4kit.quantize(x, "mxfp4-te")))
        a (mxfp4-ocp) and b (mxfp4-te): equal in every bit
          codes                    0 of             64 differ  (0%)
          block scales             0 of              2 differ  (0%)
          values                   0 of             64 differ  (0%)
    """
    a, b = on_host("compare: a", a), on_host("compare: b", b)
    dtype = np.result_type(*(_precision(name, part) for name, part in (("a", a), ("b", b))))
    if a.shape != b.shape:
        raise ValueError(f"compare: a has shape {a.shape} and b {b.shape}; needs the same shape")
    a, b = (_linear(part) for part in (a, b))
    codes, scales, tensor_scales = (0, 0), (0, 0), (0, 0)
    steps: tuple[int | None, str] = (None, "")
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        codes, scales, tensor_scales = _compare_parts(a, b)
        if codes[1] and not isinstance(a.recipe.element, IntegerOrFloat):
            steps = _max_steps(a, b) if codes[0] else 0, a.recipe.element.name
    result = compare_values(_reader(a), _reader(b), a.shape, _multiples(a, b), dtype)
    counts, names = (codes, scales, tensor_scales, (result.differing, prod(a.shape))), (_name("a", a), _name("b", b))
    if not result.differing:
        return Comparison(*counts, 0, 0.0, float("inf"), None, names, *steps)
    with np.errstate(all="ignore"):
        sqnr = result.sqnr
    return Comparison(*counts, result.max_ulp, result.max_error, sqnr, result.first, names, *steps)


def _precision(name: str, a: Any) -> np.dtype:
    """Return the dtype in which to compare one argument: float64 for a float64 array, otherwise float32."""
    if isinstance(a, Quantized) or a.dtype.newbyteorder("=") in WIDENED:
        return np.dtype(np.float32)
    if a.dtype.newbyteorder("=") != np.float64:
        raise TypeError(
            f"compare: {name} is {a.dtype}; needs a Quantized, or float64, float32, float16, bfloat16 or a narrower"
            " float; count codes and other integers that differ with np.count_nonzero(a != b), or convert it with"
            f" {name}.astype"
        )
    return np.dtype(np.float64)


def _linear(a: Any) -> Any:
    """Return a Quantized with its block scales in linear layout, so that codes and scales can be sliced alike."""
    if not isinstance(a, Quantized) or a.block_scale is None or a.scale_layout == "linear":
        return a
    scales = unswizzle_scales(a.block_scale, a.scale_layout, a.scale_shape)
    return replace(a, block_scale=scales, scale_layout="linear")


def _reader(a: Any) -> BoxReader:
    """Return a function that takes a box (a tuple of slices) and returns the values of `a` within the box."""
    if isinstance(a, Quantized):
        return lambda box: dequantize(box_of(a, box), np.float32)
    return lambda box: a[box]


def _multiples(*operands: Any) -> list[int]:
    """Return one number per axis: parts of the arrays that begin at its multiples do not cut any block."""
    multiples = [1] * operands[0].ndim if not isinstance(operands[0], Quantized) else [1] * len(operands[0].shape)
    for q in operands:
        if isinstance(q, Quantized):
            multiples[q.axis] = lcm(multiples[q.axis], q.recipe.length_multiple)
    return multiples


def _name(name: str, a: Any) -> str:
    """Return the name under which the table shows an argument: "a", or "a (mxfp4-ocp)" for a Quantized."""
    return f"{name} ({a.recipe.id})" if isinstance(a, Quantized) else name


def on_host(name: str, a: Any) -> Any:
    """Return an array of any library as a NumPy array, or a Quantized whose arrays are NumPy arrays."""
    if isinstance(a, Quantized):
        return quantized_on_host(a, name)
    operation, _, argument = name.partition(": ")
    (array,) = import_arrays(operation, **{argument: a})
    return to_host(array)


def _compare_parts(a: Quantized, b: Quantized) -> tuple[Count, Count, Count]:
    """Count the codes, block scales and tensor scales that differ."""
    comparable = a.recipe.element == b.recipe.element and a.recipe.scale == b.recipe.scale and a.axis == b.axis
    if not comparable or a.recipe.block_size != b.recipe.block_size:
        return (0, 0), (0, 0), (0, 0)
    codes = _count(a.packed, b.packed, partial(unpacked, packing=a.recipe.element.packing))
    scales = (0, 0) if a.block_scale is None else _count(a.block_scale, b.block_scale)
    return codes, scales, _count(a.tensor_scale, b.tensor_scale)


@cache
def _positions(fmt: ElementFormat) -> np.ndarray:
    """Return an int16 array that maps each code of fmt to the position of its value, counted in steps from zero."""
    if isinstance(fmt, Codebook):
        return np.unique(fmt.values, return_inverse=True)[1].astype(np.int16)
    codes = np.arange(2**fmt.bits)
    magnitude = codes & (fmt.sign_bit - 1)
    positions = np.where(codes & fmt.sign_bit, codes - 2**fmt.bits if fmt.is_integer else -magnitude, magnitude)
    return np.where(np.isnan(fmt.values), _NAN_POSITION, positions).astype(np.int16)


def _max_steps(a: Quantized, b: Quantized) -> int:
    """Return the largest distance between two codes of a and b at equal indices, in steps of the element format."""
    # Pairs with a NaN code are left out; return 0 if no pair is left. a and b must have equal element formats and
    # shapes.
    fmt, largest = a.recipe.element, 0
    for box in boxes(a.packed.shape):
        x, y = (np.take(_positions(fmt), unpacked(part[box], fmt.packing)) for part in (a.packed, b.packed))
        largest = max(largest, int(np.max(np.abs(x - y), where=(x != _NAN_POSITION) & (y != _NAN_POSITION), initial=0)))
    return largest


def _count(a: Any, b: Any, to_entries: Any = None) -> Count:
    """Return the pair (differing, compared): the number of entries that differ, and the number of all entries."""
    if a is None and b is None:
        return 0, 0
    if a is None or b is None or np.shape(a) != np.shape(b):
        size = max(np.size(part) for part in (a, b) if part is not None)
        return size, size
    differing = compared = 0
    for box in boxes(np.shape(a)):
        x, y = (np.asarray(part)[box] if to_entries is None else to_entries(part[box]) for part in (a, b))
        differing += int(np.count_nonzero((x != y) & ~((x != x) & (y != y))))
        compared += x.size
    return differing, compared
