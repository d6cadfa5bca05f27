"""Choose which test cases every run takes, and which only exhaustive runs take.

An *exhaustive run* is `pytest -m exhaustive`, which .ci/run makes too. Cases that only exhaustive runs take have
pytest's marker "exhaustive".
"""

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
    """Return the cases as pytest parameters that only exhaustive runs take.

    Cases that already are parameters stay unchanged.
    """
    return [
        case if isinstance(case, _PARAMETER) else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases
    ]


def half(cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters: every other one for every run, the rest for exhaustive runs only."""
    return every(2, cases)


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test. Runs that are not exhaustive take only some of them.

    The first case and every `step`-th case after it are in every run. The other cases are only in exhaustive runs.
    """
    cases = list(cases)
    return cases[::step] + exhaustive(case for i, case in enumerate(cases) if i % step)


def every_row(step: int, rows: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the rows as `every` does, for a test with several parameters. A row has a value for each of them."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) if i % step else row for i, row in enumerate(rows)]


def by_default(chosen: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test. Names in `chosen` are in every run, others only in exhaustive runs.

    Raise AssertionError if a name in `chosen` is not among `names`.
    """
    names = list(names)
    assert set(chosen) <= set(names), f"no such names: {set(chosen) - set(names)}"
    return [*chosen, *exhaustive(name for name in names if name not in chosen)]


USUAL = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt-channel")


def seldom() -> frozenset[str]:
    """Return the recipes that only exhaustive runs take.

    Other runs take the recipes in USUAL and a few more, so that every value of a recipe field occurs in some recipe.
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
        best = max(facts, key=lambda name: len(facts[name] & missing))  # ties: the first in the table
        often.add(best)
        missing -= facts[best]
    return frozenset(facts.keys() - often)


def lot(test: str, recipe: str) -> int:
    """Return a number from 0 to 63 by which test cases are divided between runs.

    The numbers are evenly distributed over the recipes of a test and over the tests of a recipe.
    """
    return crc32(f"{test} {recipe}".encode()) % 64


def sampled(
    few: int, many: int, *arguments: Any, **strategies: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces hypothesis.given, with the strategies as its further arguments.

    A test gets `few` examples in every run, and `many` in exhaustive runs.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        runs = {count: settings(max_examples=count)(given(*arguments, **strategies)(body)) for count in (few, many)}

        @pytest.mark.parametrize("examples", [few, *exhaustive([many])])
        def test(examples: int) -> None:
            runs[examples]()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate
