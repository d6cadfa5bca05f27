"""Draw random codes for matrix operands, in patterns that are hard to sum exactly in a matrix unit's adder.
A *pattern* is a function (rng, shape, c) that draws codes of a float format as an integer array of the given shape. `c`
holds notable codes of the format. A *special* code is the code of an infinity or a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import ml_dtypes
import numpy as np

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
