"""Draw random test arrays from a seed, with strides, axis orders and offsets in memory; and make guarded outputs.
Filler is the byte 0x5A, which fills the memory around and between the elements of a view. Guards are the filler around
an output; a call must not change them.

The printed program of a failing case calls these functions, so it builds the arrays that were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arrays import imports
from fp4kit.evidence.testing import PARTS
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, unsigned
from fp4kit.quantized.container import Quantized

DISTANCES = (1, 16, 64)  # between two elements of a pair: within a term, within a step, and across steps
FORMATS = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
Rng = np.random.Generator
Shape = tuple[int, ...]


class Codes(NamedTuple):
    """Notable codes of a float format, such as the code of 1 and of the largest value.

    Attributes:
        sign: the sign bit. Larger codes have larger magnitudes if this bit is ignored.
        one: the code of 1.
        binade: number of codes per power of two, so that adding it to a code doubles the value.
        largest: the code of the largest finite value.
        special: the special codes.
        zeros: the codes of 0 and, if the format has it, -0.
    """

    sign: int
    one: int
    binade: int
    largest: int
    special: np.ndarray
    zeros: np.ndarray


@cache
def codes_of(dtype: np.dtype) -> Codes:
    """Return the Codes (notable codes, such as that of 1) of a float dtype of NumPy or ml_dtypes."""
    # The dtype must have a sign bit and at most 16 bits, which is not checked.
    info = ml_dtypes.finfo(dtype)
    every = np.arange(1 << info.bits).astype(f"u{dtype.itemsize}")
    values = every.view(dtype).astype(np.float32)
    one, largest = (int(every[values == value][0]) for value in (1, float(info.max)))
    return Codes(1 << info.bits - 1, one, 1 << info.nmant, largest, every[~np.isfinite(values)], every[values == 0])


def _signs(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return the sign bit or 0 at random, for every element of an array."""
    return c.sign * rng.integers(0, 2, shape)


def near_one(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return integer codes of values from 1/4 to 4 of either sign, limited to nonzero finite values of the format."""
    codes = rng.integers(c.one - 2 * c.binade, c.one + 2 * c.binade + 1, shape)
    return np.clip(codes, 1, c.largest) | _signs(rng, shape, c)


def any_code(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return integers drawn from all codes of the format, special ones included, in an array of the given shape."""
    return rng.integers(0, 2 * c.sign, shape)


def finite(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return codes drawn from all codes of finite values, with random signs, so that a sum aligns terms by every
    shift.
    """
    codes = rng.integers(0, c.largest + 1, shape)
    return np.where(codes == 0, 0, codes | _signs(rng, shape, c))


def one_large(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return codes of near_one, with one code per row replaced by that of the largest finite value, of either sign."""
    # A sum of products then aligns the other terms to a very large one, so that their low bits are dropped.
    # In half of the draws, the large values are in the first or the last column of all rows, otherwise in a random
    # column per row.
    codes = near_one(rng, shape, c)
    if codes.size:
        column = rng.integers(0, shape[-1], (*shape[:-1], 1)) if rng.random() < 0.5 else rng.integers(0, 2) - 1
        large = c.largest | _signs(rng, shape, c)
        codes = np.where(np.arange(shape[-1]) == column % shape[-1], large, codes)
    return codes


def zero_runs(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return codes of near_one in which about half of the groups of 16 elements, and a third of the rows, are zeros."""
    runs = rng.random((*shape[:-1], -(-shape[-1] // 16))) < 0.5
    zero = np.repeat(runs, 16, axis=-1)[..., : shape[-1]] | (rng.random((*shape[:-1], 1)) < 1 / 3)
    return np.where(zero, rng.choice(c.zeros, shape), near_one(rng, shape, c))


def with_special(rng: Rng, shape: Shape, c: Codes) -> np.ndarray:
    """Return random finite codes, a few of which are replaced by special codes (infinities and NaN)."""
    codes = finite(rng, shape, c)
    if not c.special.size:
        return codes
    return np.where(rng.random(shape) < rng.choice([0.002, 0.05]), rng.choice(c.special, shape), codes)


def paired(rng: Rng, shape: Shape, c: Codes, *, distance: int, opposed: bool) -> np.ndarray:
    """Return finite codes in pairs ``distance`` elements apart; the two codes of a pair are equal or differ in sign."""
    codes = (finite if rng.random() < 0.5 else near_one)(rng, shape, c)
    position = np.arange(shape[-1])
    second = position // distance % 2 == 1
    codes = codes[..., np.where(second, position - distance, position)]
    return np.where(second & (codes != 0), codes ^ c.sign, codes) if opposed else codes


PATTERNS: dict[str, Callable[[Rng, Shape, Codes], np.ndarray]] = {
    "near 1": near_one,
    "any": any_code,
    "finite terms": finite,
    "one large": one_large,
    "zero runs": zero_runs,
    "with special": with_special,
    **{f"paired by {d}": partial(paired, distance=d, opposed=False) for d in DISTANCES},
    **{f"opposed by {d}": partial(paired, distance=d, opposed=True) for d in DISTANCES},
}


def drawn_floats(pattern: str, rng: Rng, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Return values of a float dtype whose codes follow a pattern."""
    if dtype.itemsize > 2:
        return drawn_floats(pattern, rng, shape, np.dtype(ml_dtypes.bfloat16)).astype(dtype)
    codes: np.ndarray = PATTERNS[pattern](rng, shape, codes_of(dtype)).astype(f"u{dtype.itemsize}")
    return codes.view(dtype)


def drawn_codes(pattern: str, name: str, rng: Rng, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Return random codes of a float format, one per byte, that follow a pattern."""
    codes: np.ndarray = PATTERNS[pattern](rng, shape, codes_of(np.dtype(FORMATS[name]))).astype(dtype)
    return codes


def drawn_scales(low: int, high: int, rng: Rng, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Return random block scales: bytes from ``low`` to ``high`` - 1."""
    scales = rng.integers(low, high, shape).astype(dtype)
    other = np.where(rng.random(shape) < 0.5, 0, rng.integers(0, 256, shape)).astype(dtype)
    return np.where(rng.random(shape) < rng.choice([0, 0, 0.02]), other, scales)


SCALES = {"E4M3": (0x28, 0x58), "E8M0": (112, 142)}  # bytes of block scales of ordinary size
OPERANDS: dict[str, Callable[..., np.ndarray]] = {
    **{pattern: partial(drawn_floats, pattern) for pattern in PATTERNS},
    **{f"codes of {name}, {pattern}": partial(drawn_codes, pattern, name) for name in FORMATS for pattern in PATTERNS},
    **{f"scale codes of {name}": partial(drawn_scales, *limits) for name, limits in SCALES.items()},
    "smallest scale codes": partial(drawn_scales, 0, 8),
}


DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16", "float64", "uint8")
}
FILLER = 0x5A  # gives large values in every dtype, so that reading outside a view changes the result
MARGIN = 64  # bytes of guards before and behind an output; keeps the output aligned to 16 bytes


@dataclass(frozen=True)
class View:
    """The memory layout of an array that is a strided view of a larger array.

    Attributes:
        order: the axes of the array in the order of memory, the slowest-varying first.
        steps: for each axis, the step of the view in the larger array; a negative step reverses the axis.
        offset: the number of elements of the larger array in front of the view.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int = 0

    @classmethod
    def plain(cls, ndim: int) -> View:
        """Return the layout of a contiguous array with ``ndim`` axes, in C order."""
        return cls(tuple(range(ndim)), (1,) * ndim)

    @property
    def is_plain(self) -> bool:
        """Return True if the layout is that of a contiguous array in C order, without an offset."""
        return self == View.plain(len(self.order))


@dataclass(frozen=True)
class DrawnArray:
    """A random test array, described by plain data, so that a program can be printed and run again.

    Attributes:
        kind: a key of VALUES, which says how to draw the elements from ``seed``.
        dtype: a key of DTYPES.
        shape: the array's shape.
        seed: seed of the values.
        view: layout in memory.
        kept: the range of the flat indices of elements that are not set to 0; None for all.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    seed: int
    view: View
    kept: tuple[int, int] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def values(self) -> np.ndarray:
        """Return the elements as a contiguous array."""
        return drawn(self.kind, self.dtype, self.shape, self.seed, self.kept)


def memory(values: np.ndarray, view: View) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """Return (flat, cut): a flat array of the values and filler elements, and a function that extracts the values."""
    shape = [values.shape[i] * abs(view.steps[i]) for i in view.order]
    end = view.offset + prod(shape)
    back = np.argsort(view.order).tolist()

    def cut(flat: Any) -> Any:
        whole = flat[view.offset : end].reshape(shape).transpose(back)
        # The ellipsis makes indexing of a 0-d array return a view instead of a scalar.
        return whole[(*(slice(None, None, step) for step in view.steps), ...)]

    flat = np.full((end + view.offset) * values.dtype.itemsize, FILLER, np.uint8).view(values.dtype)
    cut(flat)[...] = values
    return flat, cut


def given(dtype: str, shape: tuple[int, ...], nonzero: dict[int, int]) -> np.ndarray:
    """Return an array with the given bits: {flat index: bit pattern}."""
    bits = np.zeros(prod(shape), unsigned(DTYPES[dtype]))
    bits[list(nonzero)] = list(nonzero.values())
    return bits.view(DTYPES[dtype]).reshape(shape)


# ---- values ----


def drawn(kind: str, dtype: str, shape: tuple[int, ...], seed: int, kept: tuple[int, int] | None = None) -> np.ndarray:
    """Return random values of the given dtype and shape, with 0 outside the range ``kept`` of flat indices."""
    with np.errstate(all="ignore"):
        x = VALUES[kind](np.random.default_rng(seed), shape, DTYPES[dtype])
    if kept not in (None, (0, x.size)):
        start, stop = kept
        flat = x.reshape(-1)
        x = np.concatenate([np.zeros(start, x.dtype), flat[start:stop], np.zeros(x.size - stop, x.dtype)]).reshape(
            shape
        )
    return x


def _ordinary(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return normally distributed values whose magnitude varies from row to row, with a few zeros (all +0 or all
    -0).
    """
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))).astype(np.float32)
    x[rng.random(shape) < 0.02] = rng.choice([0.0, -0.0])
    return x.astype(dtype)


def _bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return uniformly distributed bit patterns, which include infinities, NaN and subnormals."""
    return rng.integers(0, 1 << 8 * dtype.itemsize, shape, unsigned(dtype)).view(dtype)


def _finite(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return uniformly distributed bit patterns of ``dtype``, with zeros instead of infinities and NaN."""
    x = _bits(rng, shape, dtype)
    return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), dtype))


def _ties(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return rounding ties (finite values midway between two representable values), and the floats next to ties."""
    element = (E2M1, E2M1, E2M3, E3M2, E4M3, E5M2, INT8)[rng.integers(7)]
    info = ml_dtypes.finfo(dtype)
    size, runs = prod(shape), -(-prod(shape) // 8)
    exponents = rng.integers(info.minexp - info.nmant, info.maxexp - 2, runs)
    exponents = np.where(rng.random(runs) < 0.7, rng.integers(-6, 7) * np.ones_like(exponents), exponents)
    near = 1 + rng.choice([0, 0, 1, -0.5], (runs, 8)) * 2.0**-info.nmant
    x = rng.choice([-1.0, 1.0], (runs, 8)) * rng.choice(element.midpoints, (runs, 8)) * near
    x[rng.random(runs) < 0.6, 0] = float(element.max) * rng.choice([1, 7 / 6, 4 / 3, 1 + 2.0**-info.nmant])
    top = float(info.max)
    return np.clip(np.ldexp(x, exponents[:, None]), -top, top).reshape(-1)[:size].reshape(shape).astype(dtype)


def _tiny(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros, subnormals and normal values below four times the smallest normal, all of either sign."""
    bits = rng.integers(0, 3 << ml_dtypes.finfo(dtype).nmant, shape).astype(unsigned(dtype))
    return np.where(rng.random(shape) < 0.5, bits.view(dtype), -bits.view(dtype))


def _zeros(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return normally distributed values (see _ordinary), but about three of four groups of 16 elements are all
    zero.
    """
    runs = (*shape[:-1], -(-shape[-1] // 16))
    kinds = np.repeat(rng.integers(0, 4, runs), 16, axis=-1)[..., : shape[-1]]
    signs = np.where(kinds == 2, rng.choice([0.0, -0.0], shape), np.where(kinds == 1, -0.0, 0.0))
    return np.where(kinds < 3, signs.astype(dtype), _ordinary(rng, shape, dtype))


def _outlier(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return normally distributed values (see _ordinary), one of which is replaced by a far larger value."""
    x = _ordinary(rng, shape, dtype)
    if x.size:
        x.reshape(-1)[rng.integers(x.size)] = rng.choice([1e4, -6e4, float(ml_dtypes.finfo(dtype).max)])
    return x


def _constant(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return values of equal magnitude with random signs."""
    value = rng.choice(
        [1.0, 6.0, 448.0, 0.1, 2688.0, float(ml_dtypes.finfo(dtype).tiny), float(ml_dtypes.finfo(dtype).max)]
    )
    return (rng.choice([1.0, -1.0], shape) * value).astype(dtype)


def _sprinkled(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return normally distributed values (see _ordinary), some of which are replaced by NaN, +inf or -inf."""
    x = _ordinary(rng, shape, dtype)
    x[rng.random(shape) < rng.choice([0.002, 0.05, 0.6])] = rng.choice([np.nan, np.inf, -np.inf])
    return np.where(rng.random(shape) < 0.002, np.asarray(np.nan, dtype), x)


def _infinite(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return normally distributed values (see _ordinary), with a few infinities of one sign. There may be none."""
    x = _ordinary(rng, shape, dtype)
    x[rng.random(shape) < rng.choice([0.002, 0.05])] = rng.choice([np.inf, -np.inf])
    return x


def _below(limit: int) -> Callable[..., np.ndarray]:
    """Return a function for VALUES that draws uniformly distributed bytes below ``limit``, whatever the dtype."""
    return lambda rng, shape, dtype: rng.integers(0, limit, shape, np.uint8)


def _amaxes(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return float32 amaxes: absolute values of normal numbers, and some that are 0, -0, tiny, huge or infinite."""
    x = np.abs(rng.standard_normal(shape, np.float32)) * np.exp2(rng.integers(-8, 9, shape)).astype(np.float32)
    special = rng.choice(np.array([0, -0.0, 2.0**-149, 2.0**-126, 1e-6, 3e38, np.inf], np.float32), shape)
    return np.where(rng.random(shape) < rng.choice([0, 0.2, 1]), special, x).astype(np.float32)


def _weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return nonnegative finite weights for a scale search, among them zeros and outliers that are 2^20 times
    larger.
    """
    # In a quarter of the draws all weights are multiplied by 1e30, and in another quarter by 1e-38, so that their
    # squares underflow.
    x = rng.random(shape) ** 3 * rng.choice([1, 1, 1e-38, 1e30]) * rng.choice([0, 1, 1, 1, 2.0**20], shape)
    return x.astype(dtype)


def _hessians(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return symmetric 16 x 16 Hessian matrices for a scale search, each computed from 3 or 40 random samples."""
    # In some draws, 2 is subtracted from the diagonals, so that the quadratic form can be negative.
    samples = rng.standard_normal((shape[0], rng.choice([3, 40]), 16)) * rng.choice([1, 1, 1e-15, 1e10])
    x = samples.transpose(0, 2, 1) @ samples - rng.choice([0, 0, 2]) * np.eye(16)
    return (x + x.transpose(0, 2, 1)).astype(dtype)


FINITE_KINDS = ("ordinary", "finite", "ties", "tiny", "zeros", "outlier", "constant")
NUMBERS = (*FINITE_KINDS, "infinite")  # kinds without NaN
KINDS = (*FINITE_KINDS, "bits", "sprinkled")
VALUES: dict[str, Callable[..., np.ndarray]] = {
    "ordinary": _ordinary,
    "finite": _finite,
    "ties": _ties,
    "tiny": _tiny,
    "zeros": _zeros,
    "outlier": _outlier,
    "constant": _constant,
    "bits": _bits,
    "sprinkled": _sprinkled,
    "infinite": _infinite,
    "bytes": _below(256),
    "codes": _below(16),
    **{f"codes of {bits} bits": _below(1 << bits) for bits in (3, 5, 6)},
    "amaxes": _amaxes,
    "weights": _weights,
    "hessians": _hessians,
    "ones": lambda rng, shape, dtype: np.ones(shape, dtype),
    "numbers": lambda rng, shape, dtype: rng.random(shape, np.float32).astype(dtype),
    **OPERANDS,
}


# ---- outputs ----


class Guarded(NamedTuple):
    """An array or Quantized to pass as an output, surrounded by guard bytes that a call must not change.

    Attributes:
        value: the array or Quantized.
        buffers: (bytes with guards, shape, step, dtype) per array. `touched` counts the changed guards in them.
    """

    value: Any
    buffers: list[tuple[Any, tuple[int, ...], int, np.dtype]]


def guarded(a: Any, step: int = 1) -> Guarded:
    """Copy an array or Quantized into memory with guard bytes around each array, to be used as an output."""
    if isinstance(a, Quantized):
        parts = {name: guarded(getattr(a, name), step) for name in PARTS if getattr(a, name) is not None}
        buffers = [buffer for part in parts.values() for buffer in part.buffers]
        return Guarded(replace(a, **{name: part.value for name, part in parts.items()}), buffers)
    whole = imports.module_of(a).full((a.size * step * a.dtype.itemsize + 2 * MARGIN,), FILLER, np.uint8)
    inside = _inside(whole, a.shape, step, a.dtype)
    inside[...] = a
    return Guarded(inside, [(whole, a.shape, step, a.dtype)])


def _inside(whole: Any, shape: tuple[int, ...], step: int, dtype: np.dtype) -> Any:
    """Return a view of the array inside ``whole``, a buffer of bytes that guarded() made."""
    return whole[MARGIN:-MARGIN].view(dtype).reshape(*shape, step)[..., 0]


def touched(g: Guarded) -> int:
    """Return the number of guard bytes of an output that have changed since guarded() made it."""
    total = 0
    for whole, shape, step, dtype in g.buffers:
        now, before = whole.copy(), imports.module_of(whole).full(whole.shape, FILLER, np.uint8)
        for guards in (now, before):
            _inside(guards, shape, step, dtype)[...] = 0
        total += int((now != before).sum())
    return total


# ---- further functions that programs call ----


def as_float8(codes: Any, dtype: str) -> Any:
    """Return a view of codes (uint8) as an array of a float8 dtype, such as "float8_e4m3fn"."""
    if not isinstance(codes, np.ndarray):
        raise NotImplementedError("CuPy has no float8 arrays")
    return codes.view(getattr(ml_dtypes, dtype))


def overwrite(target: Any, values: Any) -> None:
    """Overwrite ``target`` in place by ``values``. Fuzz programs call this for the arrays of a GroupedPlan."""
    target[...] = values


def largest(arrays: list[Any]) -> Any:
    """Return the elementwise maximum of float32 amaxes, as a new array."""
    # ``arrays`` must not be empty.
    # The amaxes are compared by bit patterns, because CuPy's maximum flushes subnormals.
    result = arrays[0].copy()
    bits = result.view(np.uint32)
    for a in arrays[1:]:
        np.maximum(bits, a.view(np.uint32), out=bits)
    return result


def with_codes(before: Any, packed: Any, pieces: list[tuple[int, int]], per_byte: int) -> Any:
    """Return a copy of the packed codes ``before`` in which some ranges of elements have the codes of ``packed``."""
    old, new = (_one_per_byte(array, per_byte) for array in (before, packed))
    for start, stop in pieces:
        old[start:stop] = new[start:stop]
    return (old if per_byte == 1 else old[0::2] | old[1::2] << 4).reshape(before.shape)


def _one_per_byte(a: Any, per_byte: int) -> Any:
    """Return packed codes as a new flat array with one code per byte."""
    flat = a.reshape(-1).copy()
    if per_byte == 1:
        return flat
    codes = imports.module_of(a).empty((2 * flat.size,), np.uint8)
    codes[0::2], codes[1::2] = flat & 0xF, flat >> 4
    return codes
