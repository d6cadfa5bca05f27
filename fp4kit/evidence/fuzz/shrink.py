"""Shrink a failing fuzz case with hypothesis: repeat the choices that drew the case, and try simpler ones.

hypothesis needs no failing case to be found again: the first case that it tests is the one that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, ClassVar

from hypothesis import Phase, find, settings, strategies
from hypothesis.errors import Flaky, NoSuchExample
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

from fp4kit.evidence.fuzz.draw import Draw, DrawnCase
from fp4kit.evidence.fuzz.recipes import Pool


class RecordedChoices(PrimitiveProvider):
    """A hypothesis backend that draws integers from ``choices``."""

    choices: ClassVar[list[int]] = []

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **_: Any) -> int:
        return RecordedChoices.choices.pop(0)

    def draw_boolean(self, p: float = 0.5) -> bool:
        raise NotImplementedError

    draw_float = draw_string = draw_bytes = draw_boolean  # type: ignore[assignment]  # a case needs only integers


AVAILABLE_PROVIDERS["fp4kit"] = f"{__name__}.RecordedChoices"
SETTINGS = settings(backend="fp4kit", max_examples=2, database=None, phases=[Phase.generate, Phase.shrink])


class _TimeIsUp(KeyboardInterrupt):
    """Ends hypothesis' search. Any other exception would count as a failing test."""


class SimplerDraw(Draw):
    """Draw a case from the choices of hypothesis. Arrays have the seeds of the case that failed."""

    def __init__(self, draw: Callable[..., Any], failed: Draw) -> None:
        super().__init__(0, failed.pool)
        self.draw, self.given = draw, failed.seeds

    def record(self, choice: int, limit: int) -> int:
        return int(self.draw(strategies.integers(0, limit - 1)))

    def seed(self) -> int:
        self.seeds.append(self.given[len(self.seeds) % len(self.given)])
        return self.seeds[-1]


def shrunk(number: int, pool: Pool, fails: Callable[[DrawnCase], bool], seconds: float) -> DrawnCase:
    """Return the simplest case for which ``fails`` is True that is found within ``seconds``.

    The search begins with the case that ``number`` draws from the pool, for which ``fails`` must be True.
    """
    failed, end = Draw(number, pool), time.monotonic() + seconds
    found = failed.case()
    RecordedChoices.choices = failed.made.copy()

    @strategies.composite
    def cases(draw: Callable[..., Any]) -> DrawnCase | None:
        try:
            return SimplerDraw(draw, failed).case()
        except Exception:  # simpler choices may not fit together
            return None

    def condition(case: DrawnCase | None) -> bool:
        nonlocal found
        if time.monotonic() > end:
            raise _TimeIsUp
        if case is None or not fails(case):
            return False
        found = case
        return True

    with suppress(_TimeIsUp, Flaky, NoSuchExample):
        return find(cases(), condition, settings=SETTINGS, random=Random(0)) or found
    return found
