"""compare: where two quantized arrays, or two arrays of values, differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.layouts import unpack, unswizzle_scales
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.prepare import import_arrays
from fp4kit.quantized import Quantized

Count = tuple[int, int]  # differing, compared


@dataclass(frozen=True)
class Comparison:
    """Differences of b from a; print it for a table, or test it: it is true where everything is equal.

    codes, scales, tensor_scales: (differing, compared); (0, 0) where there are none to compare (arrays, other formats or axes).
    values: (differing, compared), in every bit, NaN equal to NaN. max_ulp: largest distance in float32 steps.
    sqnr: 10 log10(sum a^2 / sum (a - b)^2) in dB, inf where equal. max_error: largest |a - b|.
    first: coordinate in x of the first differing value, and the two values; None where equal.
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

    @property
    def equal(self) -> bool:
        """Whether codes, scales, tensor scales and values are all the same."""
        return not any(part[0] for part in (self.codes, self.scales, self.tensor_scales, self.values))

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        rows = [(name, part) for name, part in (("codes", self.codes), ("block scales", self.scales),
                ("tensor scales", self.tensor_scales), ("values", self.values)) if part[1]]  # fmt: skip
        lines = [f"{self.names[0]} and {self.names[1]}: {'equal in every bit' if self.equal else 'different'}"]
        lines += [f"  {name:14}{part[0]:>12,} of {part[1]:>14,} differ  ({100 * part[0] / part[1]:.3g}%)" for name, part in rows]
        if self.first is not None:
            at, x, y = self.first
            lines.append(f"  largest        {self.max_ulp:,} ulp, |a - b| = {self.max_error:.6g}; SQNR {self.sqnr:.2f} dB")
            lines.append(f"  first          at {at}: {x:.9g} and {y:.9g}")
        return "\n".join(lines)


@ieee("compare")
def compare(a: Any, b: Any) -> Comparison:
    """Compare two Quantized, or two arrays of one shape (a Quantized stands for its float32 values beside an array).

    Codes and scales are compared where both have the same formats, block and axis, in linear layout; values always.
    What is on a GPU is copied to the host first, which waits for the device; a and b may be on different ones.
    Returns Comparison. Raises ValueError for different shapes; TypeError for what is neither.
    """
    a, b = on_host("compare: a", a), on_host("compare: b", b)
    x, y = _values(a), _values(b)
    if x.shape != y.shape:
        raise ValueError(f"compare: a has shape {x.shape} and b {y.shape}; needs the same shape")
    codes, scales, tensor_scales = (0, 0), (0, 0), (0, 0)
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        codes, scales, tensor_scales = _compare_parts(a, b)
    values, max_ulp, max_error, sqnr, first = _compare_values(x, y)
    return Comparison(codes, scales, tensor_scales, values, max_ulp, max_error, sqnr, first, (_name("a", a), _name("b", b)))


def _name(name: str, a: Any) -> str:
    return f"{name} ({a.recipe.id})" if isinstance(a, Quantized) else name


def on_host(name: str, a: Any) -> Any:
    """A Quantized, or an array, with NumPy arrays: those of a GPU copied. name: what errors call it, "operation: argument"."""
    if isinstance(a, Quantized):
        parts = {part: getattr(a, part) for part in ("packed", "block_scale", "tensor_scale", "tensor_amax")}
        return replace(a, **{part: array.get() for part, array in parts.items() if hasattr(array, "get")})
    operation, _, argument = name.partition(": ")
    (array,) = import_arrays(operation, **{argument: a})
    return array if isinstance(array, np.ndarray) else array.get()


def _values(a: Any) -> np.ndarray:
    return dequantize(a, np.float32) if isinstance(a, Quantized) else a.astype(np.float32)


def _compare_parts(a: Quantized, b: Quantized) -> tuple[Count, Count, Count]:
    same = a.recipe.element is b.recipe.element and a.recipe.scale is b.recipe.scale and a.axis == b.axis
    if not same or a.recipe.block_size != b.recipe.block_size:
        return (0, 0), (0, 0), (0, 0)
    codes = _count(*(unpack(q.packed) if q.recipe.is_packed else q.packed for q in (a, b)))
    scales = (0, 0)
    if a.block_scale is not None:
        scales = _count(*(unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape) for q in (a, b)))
    return codes, scales, _count(a.tensor_scale, b.tensor_scale)


def _count(a: Any, b: Any) -> Count:
    """Differing and compared entries; NaN equals NaN. Where one is missing, or the shapes differ, all differ."""
    if a is None and b is None:
        return 0, 0
    if a is None or b is None or np.shape(a) != np.shape(b):
        size = max(np.size(part) for part in (a, b) if part is not None)
        return size, size
    differ = (a != b) & ~((a != a) & (b != b))
    return int(np.count_nonzero(differ)), int(np.size(a))


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 as integers in the order of the values, -0 just below +0: neighbours differ by 1."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


def _compare_values(x: np.ndarray, y: np.ndarray) -> tuple[Any, ...]:
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    differ = (x.view(np.uint32) != y.view(np.uint32)) & ~(np.isnan(x) & np.isnan(y))
    count = (int(np.count_nonzero(differ)), x.size)
    if not count[0]:
        return count, 0, 0.0, float("inf"), None
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), x.shape))
    comparable = differ & ~np.isnan(x) & ~np.isnan(y)
    ulp = np.abs(_ordered(x) - _ordered(y))[comparable]
    with np.errstate(all="ignore"):
        error = np.abs(x.astype(np.float64) - y)
        sqnr = 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum(error**2))
    largest = float(np.max(error)) if not np.isnan(error).any() else float("nan")
    return count, int(ulp.max(initial=0)), largest, float(sqnr), (at, float(x[at]), float(y[at]))
