"""Many quick cases as one test: pytest and xdist take some milliseconds for each test, more than such a case takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # a case that skips would hide those after it


def together(
    name: str, cases: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator in place of pytest.mark.parametrize: one test makes every case, then fails if any did and names those.

    All cases get the same fixtures; a case may not skip.
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
