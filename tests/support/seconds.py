"""Measure the CPU seconds of a call, for tests that its cost grows only linearly.

A test may run on a slow machine, beside others, under coverage, so its bound leaves an order of magnitude. Such a bound
still detects a cost that is quadratic in 100,000 names or exponential in a pattern. Figures for users come from
benchmarks/ on idle machines.
"""

import gc
import time
from collections.abc import Callable

TEN = 10.0  # a bound in seconds; the slowest of the tested calls takes a tenth of it on an idle machine


def cpu_seconds(call: Callable[[], object], rounds: int = 1) -> float:
    """Return the CPU seconds of the fastest of several rounds, without garbage collection."""
    found = []
    gc.disable()
    try:
        for _ in range(rounds):
            start = time.process_time()
            call()
            found.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(found)
