"""Time calls, one by one or in turns.

A *watch* is a function that makes a call and returns its seconds. Calls that are compared take turns, because a shared
machine is slower at one moment than at another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, NamedTuple

Call = Callable[[], object]
Watch = Callable[[], float]

BATCH_SECONDS = 2e-3  # watch times calls in batches of about this length
WARMED = 0.05  # seconds: shorter calls are timed after an untimed one
BUDGET = 0.7  # seconds; a call that has used them gets no further turn after the third


class Time(NamedTuple):
    """The smallest, the median and the spread of several timings, in microseconds per call.

    The spread is the largest minus the smallest.
    """

    best: float
    median: float
    spread: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Time:
        """Return the Time of several timings of one call, given in seconds."""
        found = sorted(one * 1e6 for one in seconds)
        return cls(round(found[0], 3), round(median(found), 3), round(found[-1] - found[0], 3))


def batches(call: Call, size: int, before: Call = lambda: None) -> Watch:
    """Return a watch that calls `before`, then times `size` calls in a row and returns the seconds per call."""

    def seconds() -> float:
        before()
        start = time.perf_counter()
        for _ in range(size):
            call()
        return (time.perf_counter() - start) / size

    return seconds


def watch(
    call: Call,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    lasting: float = BATCH_SECONDS,
    warm_below: float = 0.0,
) -> Watch:
    """Return a watch that makes a call inside a context, in batches of about `lasting` seconds.

    The call is made once or twice right away, to warm up and to find the size of a batch.

    Args:
        call: the call to time
        context: returns the context manager in which the call is made
        lasting: seconds per batch
        warm_below: if the first call took fewer seconds, an untimed call precedes each batch. The batch then does not
            pay for cache lines that another call evicted
    """

    def seconds(size: int, warmed: bool = False) -> float:
        with context():
            return batches(call, size, call if warmed else lambda: None)()

    first = seconds(1)
    size = 1 if first > 10 * lasting else max(1, min(50, int(lasting / max(seconds(1), 1e-9))))
    return lambda: seconds(size, first < warm_below)


def alternate(watches: Mapping[Any, Watch], rounds: int, budget: float = BUDGET) -> dict[Any, Time]:
    """Call the watches in turns, one call each per round, and return {name: Time} of their results.

    Args:
        watches: {name: watch}
        rounds: the number of rounds; at least 1
        budget: from the fourth round on, a watch that has used this many seconds is left out
    """
    found: dict[Any, list[float]] = {name: [] for name in watches}
    spent = dict.fromkeys(watches, 0.0)
    for turn in range(rounds):
        for name, seconds in watches.items():
            if turn < 3 or spent[name] < budget:
                start = time.perf_counter()
                found[name].append(seconds())
                spent[name] += time.perf_counter() - start
    return {name: Time.of(times) for name, times in found.items()}
