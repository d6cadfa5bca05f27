"""Run many quick cases in one test.

pytest and xdist need some milliseconds per test, more than such a case itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_PARAMETER = type(pytest.param())
# A skip counts as a failure, because it would hide the cases after it.
FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)


def together(
    names: str, cases: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces pytest.mark.parametrize: one test runs every case and names those that fail.

    All cases get the same fixtures. A case may not skip. Raise AssertionError if there is no case.

    Args:
        names: the argument that takes the case, or several arguments that take the parts of a case, as "a, b".
        cases: the cases; one is passed to each run of the test's body.
        ids: the function that names a case.
    """
    cases, arguments = list(cases), names.split(", ")
    assert cases, "no cases"
    assert not any(isinstance(case, _PARAMETER) for case in cases), "marks of single cases would be lost"

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            failed = []
            for case in cases:
                parts = case if len(arguments) > 1 else (case,)
                try:
                    body(**fixtures, **dict(zip(arguments, parts, strict=True)))
                except FAILURES as error:
                    failed.append((ids(case), error))
            if failed:
                told = "\n".join(f"[{case}] {type(error).__name__}: {error}" for case, error in failed)
                pytest.fail(f"{len(failed)} of {len(cases)} cases:\n{told}")

        signature = inspect.signature(body)
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in arguments]
        test.__signature__ = signature.replace(parameters=others)
        return test

    return decorate
