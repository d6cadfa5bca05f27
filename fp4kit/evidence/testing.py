"""Provide helpers for tests and benchmarks: engines to compare, bitwise comparison, and inputs that expose mistakes.

PYTEST_DONT_REWRITE: the texts of assertions are the same without pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import E2M1, bit_patterns
from fp4kit.ops.engines import specification
from fp4kit.quantized.container import FACTS, PARTS, Quantized


class Outcome(NamedTuple):
    """The counts of a bit-for-bit comparison. Two outcomes are added with +.

    Attributes:
        values: number of compared values.
        differing: number of values that differ.
        first: description of the first difference, or "" if no value differs.
        skipped: descriptions of what could not be compared, with the reason.
    """

    values: int = 0
    differing: int = 0
    first: str = ""
    skipped: tuple[str, ...] = ()

    def __add__(self, other: object) -> Outcome:
        if not isinstance(other, Outcome):
            return NotImplemented
        total, wrong = self.values + other.values, self.differing + other.differing
        return Outcome(total, wrong, self.first or other.first, (*self.skipped, *other.skipped))


class ComparedEngine:
    """An engine to test. It runs public functions of fp4kit on arrays of one library, numpy or cupy.

    ComparedEngine(cupy) uses the GPU. ComparedEngine(np) uses the host's compiled engine, or the specification if that
    engine is not installed. With ``call``, callers pass NumPy arrays and get NumPy arrays from either.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def put(self, a: Any) -> Any:
        """Return a NumPy array, or a Quantized of NumPy arrays, as arrays of the engine's library."""
        if isinstance(a, Quantized):
            return replace(a, **{name: self.put(getattr(a, name)) for name in PARTS})
        return self.module.asarray(a) if isinstance(a, np.ndarray) else a

    def get(self, a: Any) -> Any:
        """Return a result with all CuPy arrays copied to NumPy arrays."""
        if isinstance(a, Quantized):
            result = copy(a)  # skips the checks of Quantized, so that wrong arrays from a GPU are compared and reported
            for name in PARTS:
                object.__setattr__(result, name, self.get(getattr(a, name)))
            return result
        if isinstance(a, (list, tuple)):
            return [self.get(member) for member in a]
        return a.get() if hasattr(a, "get") else a

    def computing(self) -> AbstractContextManager[None]:
        """Return a context manager in which public functions run on this engine."""
        # In this class it does nothing, because the library of the arrays already selects the engine.
        return nullcontext()

    def apply(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``function(*arguments, **options)`` on this engine, and return its result unchanged."""
        with self.computing():
            return function(*arguments, **options)

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``function(*arguments, **options)`` on this engine, with NumPy arrays as arguments and result."""
        moved = {name: self.put(value) for name, value in options.items()}
        return self.get(self.apply(function, *map(self.put, arguments), **moved))


class Specification(ComparedEngine):
    """The NumPy specification as a ComparedEngine, used even if a compiled engine is installed."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context manager in which public functions run in the NumPy specification."""
        return specification()


SPECIFICATION = Specification(np)


def compare(found: Any, expected: Any, what: str) -> Outcome:
    """Compare a result with the expected one, bit for bit, and return the Outcome."""
    if isinstance(expected, Quantized):
        return _compare_quantized(found, expected, what)
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return Outcome(1, 1, f"{what}: {len(found)} results instead of {len(expected)}")
        pairs = enumerate(zip(found, expected, strict=True))
        return sum((compare(a, b, f"{what}[{i}]") for i, (a, b) in pairs), Outcome())
    if found is None or expected is None:
        return Outcome(1, int(found is not expected), f"{what}: only one is None" * (found is not expected))
    return _compare_arrays(np.asarray(found), np.asarray(expected), what)


def _compare_quantized(found: Any, expected: Quantized, what: str) -> Outcome:
    """Compare ``found`` with the Quantized ``expected``: first fields such as shape and layout, then arrays."""
    if not isinstance(found, Quantized):
        return Outcome(1, 1, f"{what}: {type(found).__name__} instead of Quantized")
    total = Outcome()
    for name in FACTS:
        a, b = getattr(found, name), getattr(expected, name)
        if a != b:
            total += Outcome(1, 1, f"{what}: {name} is {a} instead of {b}")
    pairs = ((getattr(found, name), getattr(expected, name), f"{what}: {name}") for name in PARTS)
    return sum((compare(*pair) for pair in pairs), total)


def _compare_arrays(found: np.ndarray, expected: np.ndarray, what: str) -> Outcome:
    """Compare the array ``found`` with ``expected`` in shape, dtype and bits, and return the Outcome."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        got = f"{found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}"
        return Outcome(expected.size, max(expected.size, 1), f"{what}: {got}")
    differ = differing(found, expected)
    wrong = int(np.count_nonzero(differ))
    if not wrong:
        return Outcome(expected.size)
    at = np.unravel_index(int(np.argmax(differ)), expected.shape)
    first = f"{what}: at {tuple(map(int, at))} {bit_patterns(found)[at]:#x} instead of {bit_patterns(expected)[at]:#x}"
    return Outcome(expected.size, wrong, first)


def differing(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return a mask of the elements whose bits differ in two arrays of equal shape and dtype. A NaN equals any NaN."""
    differ = np.asarray(bit_patterns(found) != bit_patterns(expected))
    if expected.dtype.itemsize > 1 and differ.any():
        with np.errstate(all="ignore"):
            differ &= ~(np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    return differ


def attempt(call: Callable[[], Outcome], what: str) -> Outcome:
    """Return the Outcome of ``call()``."""
    try:
        return call()
    except NotImplementedError as error:
        return Outcome(skipped=(f"{what}: {error}",))


def assert_same_bits(actual: Any, expected: Any, name: str = "array") -> None:
    """Raise AssertionError unless two arrays, or two Quantized objects, have equal shape, dtype and bits.

    NaNs are compared by their bits too. The message gives the number of differences, the coordinate of the first one,
    and both bit patterns there. The fields of a Quantized that are not arrays, such as its layout, are not compared.

    Args:
        actual: the array or Quantized to check.
        expected: what ``actual`` must equal.
        name: what the message calls the array.
    """
    if isinstance(actual, Quantized) or isinstance(expected, Quantized):
        assert type(actual) is type(expected), f"{name}: {type(actual).__name__} and {type(expected).__name__}"
        for part in PARTS:
            a, b = getattr(actual, part), getattr(expected, part)
            assert (a is None) == (b is None), f"{part}: {a!r} and {b!r}"
            if a is not None:
                assert_same_bits(a, b, part)
        return
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
    x, y = bit_patterns(a), bit_patterns(b)
    differ = x != y
    if differ.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), x.shape))
        count = int(np.count_nonzero(differ))
        raise AssertionError(
            f"{name}: {count} of {x.size} differ, first at {at}: {int(x[at]):#x} ({a[at]}) and {int(y[at]):#x}"
            f" ({b[at]})"
        )


def adversarial_blocks(dtype: Any = np.float32, block: int = 32, seed: int = 0) -> np.ndarray:
    """Return finite blocks that hit the edge cases of every quantization rule, as an array of shape (rows, 4 * block).

    They contain:
        - ties of E2M1 and their neighbors, at many scales;
        - blocks whose amax is at or next to 6 * 2^k, steps of 448, and powers of two;
        - signed zeros, subnormals, single outliers, and the largest finite values.

    Args:
        dtype: dtype of the result.
        block: number of elements per block.
        seed: seed of the random parts.
    """
    rows = [row for part in _adversarial(np.random.default_rng(seed), 4 * block) for row in part]
    finite = float(ml_dtypes.finfo(dtype).max)
    return np.clip(np.asarray(rows, np.float64), -finite, finite).astype(dtype)


def _adversarial(rng: np.random.Generator, k: int) -> Iterator[np.ndarray]:
    """Yield the rows of adversarial_blocks in groups: float64 arrays (rows, k), before they are clipped and cast."""
    grid = np.concatenate([E2M1.midpoints, E2M1.magnitudes.astype(np.float64)])
    for exponent in (-140, -126, -30, -14, -7, 0, 1, 7, 30, 100, 125):
        signs = rng.choice([-1.0, 1.0], (4, k))
        near = 1 + rng.choice([0, 2.0**-23, -(2.0**-24), 2.0**-8, -(2.0**-9)], (4, k))
        ties = signs * rng.choice(grid, (4, k)) * near
        ties[:, 0] = 6 * rng.choice([1, 1 + 2.0**-23, 1 - 2.0**-24, 7 / 6, 8 / 6], 4)
        yield ties * 2.0**exponent
    yield rng.standard_normal((8, k)) * np.exp2(rng.integers(-20, 20, (8, 1)))
    yield np.where(rng.random((4, k)) < 0.05, 1e4, 1e-4) * rng.standard_normal((4, k))
    yield np.zeros((1, k))
    yield np.copysign(np.zeros((1, k)), rng.choice([-1.0, 1.0], (1, k)))
    yield np.full((1, k), np.finfo(np.float32).max) * rng.choice([-1.0, 1.0], (1, k))
    yield np.full((1, k), 2.0**-149) * rng.integers(-3, 4, (1, k))
