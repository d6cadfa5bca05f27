"""Cases: the Hadamard transform of runs on both sides of what its sums in float32 can tell, and of every other kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from host.cases import F16, F32, Result
from host.harness import DeviceArray
from inputs import BF16

from fp4kit.call.parse import HADAMARD_BLOCK as BLOCK
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.amax_hadamard import amax_hadamard
from fp4kit.cuda.launch.geometry import THREADS, address, grid
from fp4kit.reference.hadamard import TE_SIGN_MASK, hadamard_blocks

_ARGUMENTS = np.dtype([("x", "u8"), ("y", "u8"), ("columns", "u8"), ("is_fast", "u8"), ("runs", "i8")])
SYLVESTER = np.array([[(-1) ** (i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)])
MANTISSA_BITS = {F16: 10, BF16: 7, F32: 23}
LEAST_EXPONENT = {F16: -24, BF16: -133, F32: -149}
MOST_EXPONENT = {F16: 15, BF16: 127, F32: 127}


def transform(x: DeviceArray, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transforms of runs (n, 16), n even; the same as columns, by two; and which of them sums in float32 told."""
    y, columns = (DeviceArray.output(x.shape, x.dtype) for _ in range(2))
    is_fast = DeviceArray.zeros(len(x.array), np.uint8)
    text = f'#include "hadamard.cuh"\nusing Input = {TYPES[x.dtype]};\nconstexpr u32 kSignMask = {mask}u;\n'
    function = loader.function(
        text + Path(__file__).with_name("hadamard.cu").read_text(), "hadamard_kernel", x.device.id
    )
    arguments = np.array([(*map(address, (x, y, columns, is_fast)), len(x.array))], _ARGUMENTS)
    function((grid(-(-x.size // (BLOCK * THREADS)), x.device.id),), (THREADS,), (arguments,))
    return y.array, columns.array, is_fast.array


@dataclass(frozen=True)
class Hadamard:
    """The transform of every kind of runs, of a dtype and with a mask of signs."""

    dtype: np.dtype
    mask: int
    kinds: tuple[str, ...] = ()  # all

    def __str__(self) -> str:
        return "-".join([str(self.dtype), f"{self.mask:#x}", *self.kinds])

    def run(self) -> Iterator[Result]:
        for kind in self.kinds or KINDS:
            x = np.ascontiguousarray(KINDS[kind](self, np.random.default_rng(7)))
            with np.errstate(all="ignore"):
                x = x if x.dtype == self.dtype else x.astype(self.dtype)
                expected = hadamard_blocks(x, self.mask)
            y, columns, _ = transform(DeviceArray(x), self.mask)
            yield kind, y, expected
            if self.dtype != F32:
                yield f"{kind} as columns", columns, expected

    def signs(self, j: int) -> np.ndarray:
        """With which the elements of a run are added for y_j."""
        return SYLVESTER[j] * (1 - 2 * (self.mask >> np.arange(BLOCK) & 1))


def signs(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    """Every pattern of signs of ones, of zeros, and of one number too small to halve."""
    patterns = 1.0 - 2.0 * (np.arange(1 << BLOCK)[:, None] >> np.arange(BLOCK) & 1)
    return np.concatenate([patterns, np.copysign(0.0, patterns), patterns * 2.0 ** LEAST_EXPONENT[case.dtype]])


def spread(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    """Random elements whose exponents lie up to `s` apart, for every s, at many magnitudes; some with zeros of both
    signs.
    """
    s = np.repeat(np.arange(48), 400)[:, None]
    x = rng.standard_normal((len(s), BLOCK)) * np.exp2(-rng.integers(0, s + 1, (len(s), BLOCK)))
    x[::3] *= rng.random(x[::3].shape) < 0.7
    return x * np.exp2(rng.integers(-30, 8, (len(s), 1)).astype(np.float64))


def normal(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((4096, BLOCK))


def bits(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    """Random bit patterns: all magnitudes at once, infinities and NaN."""
    unsigned = np.dtype(f"u{case.dtype.itemsize}")
    return rng.integers(0, 2 ** (8 * unsigned.itemsize), (8192, BLOCK), unsigned).view(case.dtype)


def edges(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    """At both ends of the type: subnormal elements and results, results that overflow, few infinities and NaN among
    others.
    """
    low = rng.integers(-300, 301, (4096, BLOCK)) * 2.0 ** (LEAST_EXPONENT[case.dtype] + rng.integers(0, 6, (4096, 1)))
    high = rng.standard_normal((4096, BLOCK)) * 2.0 ** (MOST_EXPONENT[case.dtype] + rng.integers(-4, 1, (4096, 1)))
    high = np.clip(high, *(s * float(ml_dtypes.finfo(case.dtype).max) for s in (-1, 1)))
    high[:1024] = np.sign(high[:1024]) * float(ml_dtypes.finfo(case.dtype).max)
    high[:256] = case.signs(3) * high[0, 0] * np.exp2(-rng.integers(0, 3, (256, BLOCK)))  # y_3 is 4 times an element
    few = rng.standard_normal((2048, BLOCK))
    few[np.arange(2048), rng.integers(0, BLOCK, 2048)] = rng.choice([np.inf, -np.inf, np.nan], 2048)
    few[::5, ::7] = np.inf
    return np.concatenate([low, high, few])


def ties(case: Hadamard, rng: np.random.Generator) -> np.ndarray:
    """One y a tie but for a little: 2^n + 2^(n - M - 1) +- 1 quarters of the least bit of an element, n on both sides
    of 24.

    Exact in float32 for n < 24; one more bit, and the sum rounds to the tie, which goes the other way.
    """
    M, count = MANTISSA_BITS[case.dtype], 6000
    least, n = 2.0 ** rng.integers(-9, 4, (count, 1)), rng.integers(20, 28, (count, 1))
    x = np.zeros((count, BLOCK))
    x[:, :8] = 2.0 ** (n - 3)
    x[:, 8:9] = 2.0 ** (n - M - 1) * rng.choice([1, 3, -1], (count, 1))
    x[:, 9:10] = 2.0**M + 1
    x[:, 10:11] = -(2.0**M) - rng.choice([0, 2], (count, 1))
    rows = rng.integers(0, BLOCK, count)
    by_row = np.array([case.signs(j) for j in range(BLOCK)])[rows]
    return rng.permuted(x, axis=1) * by_row * least * rng.choice([-1, 1], (count, 1))


@dataclass(frozen=True)
class AmaxStrips:
    """Instantiations of the kernel of the amax of transformed columns: of words, and of elements."""

    dtype: np.dtype
    counted: str = "no_nan"

    def __str__(self) -> str:
        return f"{self.dtype}-{self.counted}"

    def run(self) -> Iterator[Result]:
        for shape in ((16, 1), (32, 530), (112, 37), (48, 1026)):
            x = np.resize(spread(Hadamard(self.dtype, TE_SIGN_MASK), np.random.default_rng(3))[::-1], shape).astype(
                self.dtype
            )
            for value, misalignment in ((0, 0), (np.inf, self.dtype.itemsize), (np.nan, 0)):
                x[len(x) // 2, 0] = value
                actual = amax_hadamard(DeviceArray(x, misalignment), self.counted, TE_SIGN_MASK)
                yield f"amax of {shape} with {value}", actual.array, self.expected(x)

    def expected(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            a = np.abs(hadamard_blocks(np.ascontiguousarray(x.T))).astype(np.float32)
        if self.counted != "all":
            a = np.where(np.isfinite(a) if self.counted == "finite" else ~np.isnan(a), a, np.float32(0))
        return np.max(a)


KINDS = {f.__name__: f for f in (signs, spread, normal, bits, edges, ties)}
