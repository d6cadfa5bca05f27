"""Implement fp4kit.compare, which reports where two quantized arrays, or two arrays of values, differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import lcm, prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arguments import explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_to_host
from fp4kit.call.parse import fake_call
from fp4kit.display import Panel, Shown, share
from fp4kit.formats import Codebook, ElementFormat, IntegerOrFloat, bit_patterns
from fp4kit.layouts import unpacked, unswizzle_scales
from fp4kit.ops.quantize import dequantize, fake_quantize, quantize
from fp4kit.quantized.container import FACTS, Quantized
from fp4kit.quantized.slicing import box_of
from fp4kit.quantized.slicing import on_host as quantized_on_host
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Array, RecipeId

BOX_ELEMENTS = 1 << 16  # temporaries of a box, up to 50 bytes per element, stay in the second-level cache
Box = tuple[slice, ...]
First = tuple[tuple[int, ...], float, float]  # index and both values


def boxes(shape: Sequence[int], multiples: Sequence[int] | None = None) -> Iterator[Box]:
    """Yield boxes (tuples of slices) of at most BOX_ELEMENTS (2^16) elements that together cover an array."""
    smallest = [1] * len(shape) if multiples is None else multiples
    steps = list(smallest)
    for axis in reversed(range(len(shape))):
        others = prod(steps) // steps[axis]
        length = max(BOX_ELEMENTS // others // smallest[axis], 1) * smallest[axis]
        steps[axis] = min(length, -(-shape[axis] // smallest[axis]) * smallest[axis]) or 1
    starts = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(at, min(at + step, n)) for at, step, n in zip(corner, steps, shape, strict=True))


def _energy(x: np.ndarray, scaled: bool) -> tuple[float, int]:
    """Return the sum of the squares of x, a float64 array, as a pair (p, e), which means p * 4^e.

    scaled: whether squares may leave the range of float64, so that x must be scaled by a power of two before.
    """
    top = float(np.max(np.abs(x))) if scaled else 0.0
    exponent = int(np.frexp(top)[1]) if np.isfinite(top) else 0
    x = np.ldexp(x, -exponent) if exponent else x
    return float(np.sum(x * x)), exponent


def _total(parts: list[tuple[float, int]]) -> tuple[np.float64, int]:
    """Return the sum of energies, each a pair (p, e), as such a pair."""
    top = max((e for p, e in parts if p), default=0)
    return np.sum([np.ldexp(p, 2 * (e - top)) for p, e in parts]), top


@dataclass
class Differences:
    """The differences between two arrays of values, collected box by box.

    Attributes:
        scaled: whether squares may leave the range of float64, as for float64 arrays.
        differing: how many values differ. Two NaNs count as equal.
        max_ulp: the largest distance of two values that are not NaN, in steps between neighboring floats.
        max_error: the largest |x - y|.
        first: index and values of the first pair that differs, in row-major order.
        signal, noise: the energies of x and of x - y in each box.
    """

    scaled: bool
    differing: int = 0
    max_ulp: int = 0
    max_error: float = 0.0
    first: First | None = None
    signal: list[tuple[float, int]] = field(default_factory=list)
    noise: list[tuple[float, int]] = field(default_factory=list)

    def add(self, x: np.ndarray, y: np.ndarray, box: Box) -> bool:
        """Add the differences of x and y, the values of two arrays within a box. Return whether there are any."""
        differ = bit_patterns(x) != bit_patterns(y)
        if differ.any():
            differ &= ~(np.isnan(x) & np.isnan(y))
        count = int(np.count_nonzero(differ))
        if not count:
            return False
        self.differing += count
        at = np.unravel_index(int(np.argmax(differ)), x.shape)
        place = tuple(int(i) + part.start for i, part in zip(at, box, strict=True))
        if self.first is None or place < self.first[0]:
            self.first = place, float(x[at]), float(y[at])
        numbers = ~(np.isnan(x) | np.isnan(y))
        a, b = _ordered(x[numbers]), _ordered(y[numbers])
        steps = bit_patterns(np.maximum(a, b)) - bit_patterns(np.minimum(a, b))
        self.max_ulp = max(self.max_ulp, int(steps.max(initial=0)))
        self.add_errors(x, y)
        return True

    def add_errors(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add the energies of x and x - y, the values within a box that is not empty, and update `max_error`."""
        wide = x.astype(np.float64, copy=False)
        error = np.abs(wide - y)
        self.signal.append(_energy(wide, self.scaled))
        self.noise.append(_energy(error, self.scaled))
        self.max_error = float(np.maximum(self.max_error, np.max(error)))

    @property
    def sqnr(self) -> float:
        """The signal-to-noise ratio in dB: 10 log10(sum x^2 / sum (x - y)^2)."""
        (p, e), (q, f) = _total(self.signal), _total(self.noise)
        return float(10 * np.log10(p / q) + 20 * np.log10(2.0) * (e - f))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Map floats to signed integers in the order of their values, so that neighboring floats differ by 1."""
    # The integers are as wide as the floats. -0 comes just below +0. x must not hold NaN.
    bits = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    width = 8 * x.dtype.itemsize
    return bits ^ (bits >> width - 1 & 2 ** (width - 1) - 1)  # reverse the order of negative numbers; keep the sign


BoxReader = Callable[[Box], Any]  # a function that returns the values of an array within a box


def compare_values(
    read_x: BoxReader, read_y: BoxReader, shape: Sequence[int], multiples: Sequence[int], dtype: Any
) -> Differences:
    """Compare two arrays box by box, and return their Differences."""
    differences, equal_boxes = Differences(np.dtype(dtype) == np.float64), []
    with np.errstate(all="ignore"):
        for box in boxes(shape, multiples):
            x, y = (np.asarray(read(box), dtype, order="C") for read in (read_x, read_y))
            if not differences.add(x, y, box):
                equal_boxes.append(box)
        # If any value differs, the SQNR needs the signal of the whole array, to which equal boxes contribute, too.
        for box in equal_boxes if differences.differing else ():
            x = np.asarray(read_x(box), dtype, order="C")
            differences.add_errors(x, x)
    return differences


Count = tuple[int, int]  # (how many entries differ, how many were compared); (0, 0) if they cannot be compared
_MEANINGFUL_ULP = 1 << 23  # a factor of 2 between two float32 numbers
_NAN_POSITION = 1 << 12  # stands for NaN in _positions: farther from zero, in steps, than any value of any format
_NARROW = (  # floats of ml_dtypes
    *("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e3m4", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
)
# The dtypes that compare converts to float32, exactly.
WIDENED = tuple(np.dtype(t) for t in (np.float32, np.float16, *(getattr(ml_dtypes, name) for name in _NARROW)))


@dataclass(frozen=True)
class Comparison(Shown):
    """The result of fp4kit.compare: how the arrays a and b differ.

    A Comparison prints as a table. Its truth value is True if everything is equal.

    A count is a pair (differing, compared): how many entries differ, and how many were compared. Codes and scales are
    compared only if a and b are both Quantized with equal element formats, scale formats, block lengths and axes.
    Otherwise their counts are (0, 0).

    Attributes:
        codes: count of element codes.
        scales: count of block scales, including float32 block scales, which a Quantized stores in tensor_scale.
        tensor_scales: count of tensor scales, one per tensor or per row.
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
        fields: the fields in which two Quantized differ beside their arrays, as texts such as
            "dtype: bfloat16 and float32", the dtypes of dequantize. They do not count as differences, except to
            q.equals. Recipes of different names are not among them, because the table begins with their names.

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
    fields: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if no code, block scale, tensor scale or value differs. Parts that were not compared count as equal."""
        return not any(differing for differing, _ in self._parts().values())

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        (panel,) = self._panels()
        return "\n".join([panel.title, *(f"  {name:15}{text}".rstrip() for name, text in panel.facts)])

    def _parts(self) -> dict[str, Count]:
        """Return the counts by the names that the table gives them."""
        names = ("codes", "block scales", "tensor scales", "values")
        return dict(zip(names, (self.codes, self.scales, self.tensor_scales, self.values), strict=True))

    def __repr__(self) -> str:
        """Return one line with the counts that differ, or "Comparison(equal in every bit)"."""
        if self.equal:
            return "Comparison(equal in every bit)"
        counts = [f"{n:,} of {of:,} {name}" for name, (n, of) in self._parts().items() if n]
        error = [f"max_error={self.max_error:.3g}, sqnr={self.sqnr:.4g}"] if self.values[0] else []
        return f"Comparison({', '.join([*counts, *error])})"

    def _panels(self) -> Iterator[Panel]:
        """Yield the table: the names of a and b, the counts of the compared parts, and the largest and first error."""
        facts = []
        for name, (differing, compared) in self._parts().items():
            if compared:
                share = 100 * differing / compared
                facts.append((name, f"{differing:>11,} of {compared:>14,} differ  ({share:.3g}%)"))
        if self.first is not None:
            at, x, y = self.first
            # Numbers of different magnitude, such as 0 and a small code, are up to four billion ulp apart.
            distance = f"{self.max_ulp:,} ulp, " if self.max_ulp < _MEANINGFUL_ULP else ""
            if self.max_steps:
                distance = f"{self.max_steps} step{'s' * (self.max_steps > 1)} of {self.element}, "
            error = f"|a - b| = {self.max_error:.6g}; SQNR {self.sqnr:.2f} dB"
            if np.isnan(self.max_error):
                distance *= self.max_ulp > 0
                error = "|a - b| and SQNR are NaN, because a or b has a NaN, or both have an infinity"
            facts.append(("largest", f"{distance}{error}"))
            digits = 17 if x != y and f"{x:.9g}" == f"{y:.9g}" else 9
            facts.append(("first", f"at {at}: {x:.{digits}g} and {y:.{digits}g}"))
        fields = (field.partition(": ") for field in self.fields)
        facts += [(name, f"{text}, which only a.equals(b) compares") for name, _, text in fields]
        title = f"{self.names[0]} and {self.names[1]}: {'equal in every bit' if self.equal else 'different'}"
        yield Panel(title, tuple(facts))


@explains_calls
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
    given = a, b
    a, b = (_linear(part) for part in given)
    parts: tuple[Count, Count, Count] = ((0, 0), (0, 0), (0, 0))
    steps: tuple[int | None, str] = (None, "")
    fields: tuple[str, ...] = ()
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        parts, fields = _compare_parts(a, b), tuple(_unlike_fields(*given))
        differing, compared = parts[0]
        if compared and not isinstance(a.recipe.element, IntegerOrFloat):
            steps = _max_steps(a, b) if differing else 0, a.recipe.element.name
    result = compare_values(_reader(a), _reader(b), a.shape, _multiples(a, b), dtype)
    counts, names = (*parts, (result.differing, prod(a.shape))), (_name("a", a), _name("b", b))
    if not result.differing:
        return Comparison(*counts, 0, 0.0, float("inf"), None, names, *steps, fields)
    with np.errstate(all="ignore"):
        sqnr = result.sqnr
    return Comparison(*counts, result.max_ulp, result.max_error, sqnr, result.first, names, *steps, fields)


def _unlike_fields(a: Quantized, b: Quantized) -> Iterator[str]:
    for name in FACTS:
        one, other = getattr(a, name), getattr(b, name)
        if one != other and (name != "recipe" or one.id == other.id):
            yield f"{name}: {one!r} and {other!r}" if name == "recipe" else f"{name}: {one} and {other}"
    known = ["unknown" if q.tensor_amax is None else "known" for q in (a, b)]
    if known[0] != known[1] and (a.tensor_scale is None) == (b.tensor_scale is None):
        yield f"tensor_amax: {' and '.join(known)}"


def _precision(name: str, a: Any) -> np.dtype:
    """Return the dtype in which to compare one argument: float64 for a float64 array, otherwise float32."""
    if isinstance(a, Quantized) or a.dtype.newbyteorder("=") in WIDENED:
        return np.dtype(np.float32)
    if a.dtype.newbyteorder("=") != np.float64:
        raise TypeError(
            f"compare: {name} is {a.dtype}; needs a Quantized, or float64, float32, float16, bfloat16 or a narrower"
            " float; count codes and other integers that differ with (a != b).sum(), or convert both to float32"
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
    multiples = [1] * len(operands[0].shape)
    for q in operands:
        if isinstance(q, Quantized):
            multiples[q.axis] = lcm(multiples[q.axis], q.recipe.cut_multiple)
    return multiples


def _name(name: str, a: Any) -> str:
    """Return the name under which the table shows an argument: "a", or "a (mxfp4-ocp)" for a Quantized."""
    return f"{name} ({a.recipe.title})" if isinstance(a, Quantized) else name


def on_host(name: str, a: Any) -> Any:
    """Return an array of any library as a NumPy array, or a Quantized whose arrays are NumPy arrays."""
    if isinstance(a, Quantized):
        return quantized_on_host(a, name)
    operation, _, argument = name.partition(": ")
    return import_to_host(operation, **{argument: a})


def _compare_parts(a: Quantized, b: Quantized) -> tuple[Count, Count, Count]:
    """Count the codes, block scales and tensor scales that differ."""
    comparable = a.recipe.element == b.recipe.element and a.recipe.scale == b.recipe.scale and a.axis == b.axis
    if not comparable or a.recipe.block_size != b.recipe.block_size or a.recipe.levels != b.recipe.levels:
        return (0, 0), (0, 0), (0, 0)
    codes = _count(a.packed, b.packed, partial(unpacked, packing=a.recipe.element.packing))
    tensor_scales = _count(a.tensor_scale, b.tensor_scale)
    if a.block_scale is None:
        per_block = a.recipe.tensor_scaling == "block"
        return (codes, tensor_scales, (0, 0)) if per_block else (codes, (0, 0), tensor_scales)
    return codes, _count(a.block_scale, b.block_scale), tensor_scales


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


OP = "compare_recipes"


@dataclass(frozen=True, eq=False)
class RecipeComparison(Shown):
    """The result of fp4kit.compare_recipes: how close each recipe is to x, and how the recipes differ.

    print() shows three tables. sqnr, max_error, relative_error and bits_per_value are float64 arrays of shape (n,) for
    n recipes. codes to first are arrays of shape (n, n): entry [i, j] compares recipes i and j, and equals entry
    [j, i]. On the diagonal, shares are 0, and `first` is None.

    Attributes:
        recipes: the ids of the recipes.
        codes: float64, the share of element codes that differ, from 0 to 1. NaN if two recipes have different element
            formats, or if one of the two gives no codes.
        scales: float64, the share of block scales that differ. NaN if codes is NaN, if the scale formats or block sizes
            differ, or if there are no block scales. Float32 block scales, such as those of NF4, count here too.
        tensor_scales: float64, the share of tensor scales that differ in any bit. NaN if a recipe has none, or if the
            two recipes have different numbers of tensor scales, such as one per tensor and one per row.
        values: float64, the share of decoded values that differ in any bit; NaN equals NaN.
        first: array of objects. Each is the index in x, a tuple of ints, of the first element whose code differs. If
            all codes are equal or cannot be compared, it is the index of the first element whose value differs. It is
            None if all values are equal too.
        sqnr: 10 log10(sum x^2 / sum (x - y)^2) in dB for the decoded values y; larger is better.
        max_error: the largest |x - y|.
        relative_error: sqrt(sum (x - y)^2 / sum x^2).
        bits_per_value: the bits of codes and scales per value; NaN if a recipe gives no codes.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
        >>> found = fp4kit.compare_recipes(x, ["mxfp4-ocp", "mxfp4-te"])
        >>> float(found.codes[0, 1]), found.first[0, 1]
        (0.0, None)
    """

    recipes: tuple[str, ...]
    codes: np.ndarray
    scales: np.ndarray
    tensor_scales: np.ndarray
    values: np.ndarray
    first: np.ndarray
    sqnr: np.ndarray
    max_error: np.ndarray
    relative_error: np.ndarray
    bits_per_value: np.ndarray

    def __repr__(self) -> str:
        """Return one line with the number of recipes and of pairs whose values are all equal."""
        pairs = np.triu_indices(len(self.recipes), 1)
        equal = int((self.values[pairs] == 0).sum())
        return f"RecipeComparison({len(self.recipes)} recipes; {equal} of {len(pairs[0])} pairs have equal values)"

    def _panels(self) -> Iterator[Panel]:
        """Yield the errors of every recipe, a matrix of the shares of differing codes, and all shares per pair."""
        n = len(self.recipes)
        numbers = zip(self.sqnr, self.max_error, self.relative_error, self.bits_per_value, strict=True)
        errors = tuple(
            (id, f"{sqnr:.2f}", f"{largest:.4g}", f"{100 * relative:.3g}%", "n/a" if np.isnan(bits) else f"{bits:.4g}")
            for id, (sqnr, largest, relative, bits) in zip(self.recipes, numbers, strict=True)
        )
        heads = ("recipe", "SQNR, dB", "largest error", "relative error", "bits per value")
        yield Panel("Distance from x", columns=heads, rows=errors)
        # The diagonal shows "-", and a pair whose codes cannot be compared shows "n/a".
        matrix = [["-" if i == j else _percent(self.codes[i, j]) for j in range(n)] for i in range(n)]
        rows = tuple(
            (f"{i + 1}  {id}", *shares) for i, (id, shares) in enumerate(zip(self.recipes, matrix, strict=True))
        )
        yield Panel("Codes that differ", columns=("recipe", *(str(i + 1) for i in range(n))), rows=rows)
        parts = (self.codes, self.scales, self.tensor_scales, self.values)
        pairs = []
        for i, j in zip(*np.triu_indices(n, 1), strict=True):
            first = "none" if self.first[i, j] is None else str(list(self.first[i, j]))
            pairs.append((f"{i + 1} and {j + 1}", *(_percent(part[i, j]) for part in parts), first))
        columns = ("recipes", "codes", "block scales", "tensor scales", "values", "first difference")
        yield Panel("Shares that differ, per pair", columns=columns, rows=tuple(pairs))


def _percent(fraction: float) -> str:
    """Return a share from 0 to 1 as text: a percentage such as "54.9%", or "n/a" for NaN."""
    return "n/a" if np.isnan(fraction) else share(round(fraction * 10**9), 10**9)


@explains_calls
@ieee(OP)
def compare_recipes(
    x: Array, recipes: Sequence[RecipeId | Recipe], *, axis: int = -1, tensor_amax: Any = None
) -> RecipeComparison:
    """Quantize x by several recipes, and report how close each is to x, and what differs between every pair.

    Args:
        x: float32, float16 or bfloat16 array, as for fp4kit.quantize. An array on a GPU is first copied to the host.
        recipes: at least two recipe ids, aliases or Recipes, such as those of fp4kit.custom_recipe. Formats and block
            sizes may differ: the distances from x can always be compared, and codes if the element formats are equal.
        axis: the axis along which blocks run.
        tensor_amax: as for fp4kit.quantize. A number holds for the recipes that have one scale per tensor, and an array
            for all recipes with float32 scales. None computes it from x.

    Returns:
        A RecipeComparison.

    Raises:
        TypeError: recipes is not a list or tuple of recipes, such as a single string, or x has an unsupported dtype.
        ValueError: there are fewer than two recipes, or x or tensor_amax does not fit one of them.

    Numerics:
        Values are those of fp4kit.dequantize in float32, or of fp4kit.fake_quantize for recipes that only
        fake-quantize. Codes are compared as bit patterns, so 0 and -0 differ. Errors are computed in float64.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> print(fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-flashinfer", "mxfp4"]))
        Distance from x
          recipe            SQNR, dB  largest error  relative error  bits per value
          nvfp4-te             20.41          0.519           9.54%           4.502
          nvfp4-flashinfer     20.41          0.519           9.54%           4.502
          mxfp4-ocp            18.81         0.9577           11.5%            4.25
        Codes that differ
          recipe                   1      2      3
          1  nvfp4-te              -     0%  54.9%
          2  nvfp4-flashinfer     0%      -  54.9%
          3  mxfp4-ocp         54.9%  54.9%      -
        Shares that differ, per pair
          recipes  codes  block scales  tensor scales  values  first difference
          1 and 2     0%            0%             0%   75.9%            [0, 0]
          1 and 3  54.9%           n/a            n/a   93.3%            [0, 2]
          2 and 3  54.9%           n/a            n/a   93.3%            [0, 2]
    """
    if not isinstance(recipes, (list, tuple)):
        raise TypeError(f"{OP}: recipes is {recipes!r}; needs a list of at least two recipes")
    if len(recipes) < 2:
        raise ValueError(f"{OP}: recipes has {len(recipes)} entries; needs at least two, such as ['nvfp4', 'mxfp4']")
    chosen = [recipe_of(OP, r) for r in recipes]
    array: np.ndarray = import_to_host(OP, x=x)
    for r in chosen:
        fake_call(OP, array, r, axis, tensor_amax=amax_for(r, tensor_amax))
    results, bits = zip(*(_parts_by(array, r, axis, tensor_amax) for r in chosen), strict=True)
    n = len(chosen)
    shares, first = np.zeros((4, n, n)), np.full((n, n), None, object)
    for i, a in enumerate(results):
        for j, b in enumerate(results[:i]):
            differing = [_differing(*parts) for parts in zip(a, b, strict=True)]
            found = [np.nan if where is None else np.count_nonzero(where) / max(where.size, 1) for where in differing]
            shares[:, i, j] = shares[:, j, i] = found
            # The first code that differs or, if codes are equal or cannot be compared, the first value.
            where = next((where for where in differing[::3] if where is not None and where.any()), None)
            if where is not None:
                first[i, j] = first[j, i] = tuple(map(int, np.unravel_index(int(where.argmax()), where.shape)))
    codes, scales, tensor_scales, values = shares
    ids = tuple(r.title for r in chosen)
    sqnr, largest, relative = np.array([_errors(array, parts[3].array) for parts in results]).T
    return RecipeComparison(ids, codes, scales, tensor_scales, values, first, sqnr, largest, relative, np.array(bits))


def amax_for(r: Recipe, tensor_amax: Any) -> Any:
    """Return the part of an argument tensor_amax that a recipe needs, if several recipes share the argument."""
    is_number = np.ndim(tensor_amax) == 0
    return None if r.tensor_scaling == "none" or (is_number and r.tensor_scaling != "tensor") else tensor_amax


def _errors(x: np.ndarray, values: np.ndarray) -> tuple[float, float, float]:
    """Return (SQNR in dB, largest error, relative error) of values, which are bit patterns of float32."""
    if not x.size:
        return np.nan, np.nan, np.nan
    found = Differences(False)
    with np.errstate(all="ignore"):
        found.add_errors(x, values.view(np.float32))
        return found.sqnr, found.max_error, float(10 ** (-found.sqnr / 20))


class _Part(NamedTuple):
    """The codes, scales or values that a recipe gives for x. Parts of different formats cannot be compared."""

    array: np.ndarray | None
    format: Any = None


def _parts_by(x: np.ndarray, r: Recipe, axis: int, tensor_amax: Any) -> tuple[tuple[Any, ...], float]:
    """Return the codes, block scales, tensor scales and values that a recipe gives for x, and the bits per value."""
    given = amax_for(r, tensor_amax)
    if r.fake_only:
        values = np.asarray(fake_quantize(x, r, axis=axis, tensor_amax=given), np.float32)
        return (_Part(None), _Part(None), _Part(None), _Part(_bits(values))), np.nan
    q: Quantized = quantize(x, r, axis=axis, tensor_amax=given)
    codes = np.moveaxis(unpacked(q.packed, r.element.packing), -1, q.axis)
    scales, tensor_scales = q.block_scale, None if q.tensor_scale is None else _bits(q.tensor_scale)
    if scales is None and r.tensor_scaling == "block":
        scales, tensor_scales = tensor_scales, None
    kept = _Part(scales, (r.element, r.scale, r.block_size, r.levels))
    decoded = _Part(_bits(dequantize(q, np.float32)))
    return (_Part(codes, r.element), kept, _Part(tensor_scales), decoded), q.bits_per_value


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of float32 values as int32, with one common pattern for all NaNs."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def _differing(a: _Part, b: _Part) -> np.ndarray | None:
    """Return a bool array that is True where two parts differ, or None if they cannot be compared."""
    if a.array is None or b.array is None or a.format != b.format or a.array.shape != b.array.shape:
        return None
    return np.asarray(a.array != b.array)
