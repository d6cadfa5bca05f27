"""Shrink a failing case to a smaller case that fails in the same way. A case describes one random test: an operation, a
recipe, arrays and options. The first simpler case that still fails replaces the case. This is repeated until no simpler
case fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from math import lcm
from typing import Any, TypeVar

import numpy as np

from fp4kit.evidence.engines import ComparedEngine
from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.check import Verdict, check
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOptions
from fp4kit.evidence.fuzz.shrink_arrays import parts, simpler_values
from fp4kit.evidence.fuzz.shrink_products import simpler_products

T = TypeVar("T")


def shrink(value: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], seconds: float) -> T:
    """Simplify a failing value as long as a simpler value fails too, and return the result."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in simpler(value):
            if time.monotonic() > end:
                return value
            if fails(candidate):
                value, again = candidate, True
                break
    return value


def shrink_case(case: DrawnCase, verdict: Verdict, engine: ComparedEngine | None, seconds: float) -> DrawnCase:
    """Return a simpler case that fails with a verdict of the same kind from the same function."""

    def fails(candidate: DrawnCase) -> bool:
        try:
            return check(candidate, engine).key == verdict.key
        except Exception:  # a candidate may be an invalid case
            return False

    return shrink(case, simpler_cases, fails, seconds)


def simpler_cases(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases that are simpler in one respect, the largest simplifications first."""
    if case.product is not None:
        yield from (replace(case, product=product) for product in simpler_products(case.product))
        return
    yield from _fewer_arrays(case)
    for variant in case.recipe.simpler():
        yield replace(case, recipe=variant)
    yield from _simpler_options(case)
    for i, a in enumerate(case.arrays):
        for smaller in _simpler_arrays(a, case, i):
            yield _with_array(case, i, smaller)
    if len(case.arrays) == 1 and not case.options.stacked:
        yield from _fewer_axes(case)
    for i, a in enumerate(case.arrays):
        for plainer in simpler_values(a):
            yield _with_array(case, i, plainer)


def _with_array(case: DrawnCase, i: int, a: DrawnArray) -> DrawnCase:
    """Return a copy of the case in which ``a`` replaces array ``i``."""
    return replace(case, arrays=(*case.arrays[:i], a, *case.arrays[i + 1 :]))


def _fewer_arrays(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield copies of the case with one of its arrays left out, each array in turn. A single array yields none."""
    if len(case.arrays) > 1:
        for i in range(len(case.arrays)):
            yield replace(case, arrays=case.arrays[:i] + case.arrays[i + 1 :])


def _simpler_options(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases with one option set to its default, a simpler recipe to requantize to, or one cut removed."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(DrawnOptions)}
    for name in case.changed_options():
        yield replace(case, options=replace(case.options, **{name: defaults[name]}))
    if case.options.target is not None:
        for variant in case.options.target.simpler():
            yield replace(case, options=replace(case.options, target=variant))
    if len(case.options.cuts) > 1:
        for i in range(len(case.options.cuts)):
            yield replace(case, options=replace(case.options, cuts=case.options.cuts[:i] + case.options.cuts[i + 1 :]))


def _simpler_arrays(a: DrawnArray, case: DrawnCase, i: int) -> Iterator[DrawnArray]:
    """Yield simpler forms of `a`, which is array ``i`` of the case."""
    if not a.view.is_plain:
        yield replace(a, view=View.plain(a.ndim))
        if a.view.offset:
            yield replace(a, view=replace(a.view, offset=0))
        yield replace(a, view=View(a.view.order, (1,) * a.ndim, a.view.offset))
        yield replace(a, view=View(tuple(range(a.ndim)), a.view.steps, a.view.offset))
    values = a.values()
    for axis in range(a.ndim):
        for part in parts(a.shape[axis], _unit(case, a, axis)):
            index: list[Any] = [slice(None)] * a.ndim
            index[axis] = part
            yield a.with_values(values[tuple(index)], a.view)
    if a.dtype in ("float16", "bfloat16"):
        with np.errstate(all="ignore"):
            yield replace(a.with_values(values.astype(np.float32), a.view), dtype="float32")


def _unit(case: DrawnCase, a: DrawnArray, axis: int) -> int:
    """Return the step for shortening an axis of an array: its length may change by multiples of this number."""
    shift = case.options.stacked
    along = case.axis % (a.ndim - shift) + shift if a.ndim > shift else 0
    if axis != along:
        return 1
    target = case.options.target
    lengths = (
        case.r.length_multiple,
        16 if case.options.hadamard else 1,
        target.recipe.length_multiple if target else 1,
    )
    return lcm(*lengths)


def _fewer_axes(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases without one of the axes of length 1 of the case's only array."""
    a, along = case.x, case.axis % case.x.ndim
    for axis in range(a.ndim):
        if a.shape[axis] == 1 and axis != along and a.ndim > 1:
            smaller = a.with_values(np.squeeze(a.values(), axis))
            yield replace(case, arrays=(smaller,), axis=along - (axis < along) - smaller.ndim)
