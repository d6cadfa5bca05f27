"""Cases of the long rest (the marker exhaustive): `pytest -m exhaustive` runs them, and .ci/run does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive(cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters that only an exhaustive run takes."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def by_default(chosen: Collection[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters: the chosen ones in every run, the others in an exhaustive one."""
    names = list(names)
    assert set(chosen) <= set(names), f"no such names: {set(chosen) - set(names)}"
    return [*chosen, *exhaustive(name for name in names if name not in chosen)]
