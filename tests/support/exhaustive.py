"""Cases of the long rest (the marker exhaustive): `pytest -m exhaustive` runs them, and .ci/run does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings

from fp4kit.recipes import RECIPES

_PARAMETER = type(pytest.param())


def exhaustive(cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters that only an exhaustive run takes; a case that is such a parameter stays one."""
    return [
        case if isinstance(case, _PARAMETER) else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases
    ]


def half(cases: Iterable[Any]) -> list[Any]:
    """Every other case in every run, the rest in an exhaustive one."""
    return every(2, cases)


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """The first of each `step` cases in every run, the rest in an exhaustive one."""
    cases = list(cases)
    return cases[::step] + exhaustive(case for i, case in enumerate(cases) if i % step)


def by_default(chosen: Collection[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters: the chosen ones in every run, the others in an exhaustive one."""
    names = list(names)
    assert set(chosen) <= set(names), f"no such names: {set(chosen) - set(names)}"
    return [*chosen, *exhaustive(name for name in names if name not in chosen)]


USUAL = ("nvfp4-te", "nvfp4-te-rowscaled", "nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt-channel")


def seldom() -> frozenset[str]:
    """Recipes whose cases are exhaustive: all but the usual ones, and some that have every other value of a field among
    them.
    """
    facts = {
        r.id: {
            (f.name, repr(getattr(r, f.name))) for f in fields(r) if f.name not in ("id", "source", "exact", "versions")
        }
        for r in RECIPES.values()
    }
    often = set(USUAL)
    missing = set[tuple[str, str]]().union(*facts.values()).difference(*(facts[name] for name in USUAL))
    while missing:
        best = max(facts, key=lambda name: len(facts[name] & missing))  # the first in the table of those
        often.add(best)
        missing -= facts[best]
    return frozenset(facts.keys() - often)


def lot(test: str, recipe: str) -> int:
    """0 ... 11 for a test's case of a recipe, evenly over those of a test and those of a recipe."""
    return crc32(f"{test} {recipe}".encode()) % 12


def sampled(
    few: int, many: int, *arguments: Any, **strategies: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator in place of hypothesis's given: so few examples in every run, so many in an exhaustive one."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        runs = {count: settings(max_examples=count)(given(*arguments, **strategies)(body)) for count in (few, many)}

        @pytest.mark.parametrize("examples", [few, *exhaustive([many])])
        def test(examples: int) -> None:
            runs[examples]()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate
