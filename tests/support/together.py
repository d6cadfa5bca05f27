"""Run many quick cases in one test.

pytest and xdist need some milliseconds per test, more than such a case itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# A skip counts as a failure, because it would hide the cases after it.
FAILURES = (
    Exception,
    pytest.fail.Exception,
    pytest.skip.Exception,
)


def together(
    name: str, cases: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces pytest.mark.parametrize: one test runs every case and names those that fail.

    All cases get the same fixtures. A case may not skip. Raise AssertionError if there is no case.

    Args:
        name: the argument that takes the case.
        cases: the cases; one is passed to each run of the test's body.
        ids: the function that names a case.
    """
    cases = list(cases)
    assert cases, "no cases"

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            failed = []
            for case in cases:
                try:
                    body(**fixtures, **{name: case})
                except FAILURES as error:
                    failed.append((ids(case), error))
            if failed:
                told = "\n".join(f"[{case}] {type(error).__name__}: {error}" for case, error in failed)
                pytest.fail(f"{len(failed)} of {len(cases)} cases:\n{told}")

        signature = inspect.signature(body)
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != name]
        test.__signature__ = signature.replace(parameters=others)
        return test

    return decorate
