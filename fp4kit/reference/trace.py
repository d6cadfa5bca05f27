"""Record the intermediate results of the specification, so that fp4kit.explain can show them.
The functions of fp4kit.reference pass these results through show(), which returns them unchanged. Within
`with traced() as steps`, show() also appends each result to the list `steps`.

The steps are the results of the specification itself, not those of a second computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import numpy as np

from fp4kit.formats import ElementFormat

T = TypeVar("T", bound=np.ndarray | np.generic)


class Step(NamedTuple):
    """One recorded intermediate result of quantization.

    Attributes:
        name: what the result is, such as "block amax".
        result: a number, an array with one entry per row or per block, or an array with one entry per element.
        format: the format of codes, if the result consists of codes; None for numbers.
    """

    name: str
    result: np.ndarray
    format: ElementFormat | None


_steps: ContextVar[list[Step] | None] = ContextVar("steps", default=None)


def show(name: str, result: T, format: ElementFormat | None = None) -> T:
    """Return result unchanged. If steps are being recorded, first append a Step with a copy of the result.

    name: the name of the step.
    format: the format of the codes that result consists of; None for numbers.
    """
    steps = _steps.get()
    if steps is not None:
        steps.append(Step(name, np.array(result), format))
    return result


@contextmanager
def traced() -> Iterator[list[Step]]:
    """Yield a list. Each call of show() within the with block, in the same thread or task, appends a Step to it.

    Within a nested block, steps go to the inner list only. The list stays usable after the block.
    """
    steps: list[Step] = []
    token = _steps.set(steps)
    try:
        yield steps
    finally:
        _steps.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Record nothing within a with block, even inside traced(), for computations that repeat recorded ones."""
    token = _steps.set(None)
    try:
        yield
    finally:
        _steps.reset(token)
