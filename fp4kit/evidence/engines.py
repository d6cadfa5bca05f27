"""Engines that operations run on, and the comparison of what two of them give: in every bit, but that a NaN equals a
NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import bit_patterns
from fp4kit.ops.engines import specification
from fp4kit.quantized.container import FACTS, PARTS, Quantized


class Outcome(NamedTuple):
    """How many values were compared and differ; the first difference; what could not be compared, and why."""

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
    """Calls of the public functions with NumPy arrays in and out, whose arrays lie where an array module has them
    meanwhile.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def put(self, a: Any) -> Any:
        """An array, or the arrays of a Quantized, for the functions; anything else as it is."""
        if isinstance(a, Quantized):
            return replace(a, **{name: self.put(getattr(a, name)) for name in PARTS})
        return self.module.asarray(a) if isinstance(a, np.ndarray) else a

    def get(self, a: Any) -> Any:
        """The NumPy array, or Quantized of NumPy arrays, of a result; of each member of a list or tuple."""
        if isinstance(a, Quantized):
            found = copy(a)  # unchecked: what a device gave wrong is to be compared
            for name in PARTS:
                object.__setattr__(found, name, self.get(getattr(a, name)))
            return found
        if isinstance(a, (list, tuple)):
            return [self.get(member) for member in a]
        return a.get() if hasattr(a, "get") else a

    def computing(self) -> AbstractContextManager[None]:
        """Calls inside are done by the engine."""
        return nullcontext()

    def apply(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """function of arguments that lie where the module has them; so does the result."""
        with self.computing():
            return function(*arguments, **options)

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """function of the moved arguments, and its result as NumPy arrays."""
        moved = {name: self.put(value) for name, value in options.items()}
        return self.get(self.apply(function, *map(self.put, arguments), **moved))


class Specification(ComparedEngine):
    """The specification, on NumPy arrays; Engine(np) is the host's fast engine, where there is one."""

    def computing(self) -> AbstractContextManager[None]:
        """Calls inside are done by the specification."""
        return specification()


SPECIFICATION = Specification(np)


def compare(found: Any, expected: Any, what: str) -> Outcome:
    """Two arrays or numbers, or two Quantized part by part, or lists of these."""
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
    if found.shape != expected.shape or found.dtype != expected.dtype:
        got = f"{found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}"
        return Outcome(expected.size, max(expected.size, 1), f"{what}: {got}")
    a, b = bit_patterns(found), bit_patterns(expected)
    differ = a != b
    if expected.dtype.itemsize > 1 and differ.any():
        with np.errstate(all="ignore"):
            differ &= ~(np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    wrong = int(np.count_nonzero(differ))
    if not wrong:
        return Outcome(expected.size)
    at = np.unravel_index(int(np.argmax(differ)), expected.shape)
    first = f"{what}: at {tuple(map(int, at))} {a[at]:#x} instead of {b[at]:#x}"
    return Outcome(expected.size, wrong, first)


def attempt(call: Callable[[], Outcome], what: str) -> Outcome:
    """The outcome, or what was skipped where there is no kernel."""
    try:
        return call()
    except NotImplementedError as error:
        return Outcome(skipped=(f"{what}: {error}",))
