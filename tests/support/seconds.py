"""Measure the CPU seconds of a call, for tests that its cost does not explode.

Figures for users come from benchmarks/ on idle machines. A test may run on a slow machine, beside others, under
coverage. Its bounds therefore leave an order of magnitude. They detect a cost that is quadratic in 100,000 names or
exponential in a pattern.
"""

import gc
import time
from collections.abc import Callable

TEN = 10.0  # ten times the seconds that the slowest of these calls takes on an idle machine


def cpu_seconds(call: Callable[[], object], rounds: int = 1) -> float:
    """Return the smallest CPU seconds of several rounds. The garbage collector is off meanwhile."""
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
