"""Seconds of a processor that a call takes, for tests that its cost does not explode.

The figures that users are told are those of benchmarks/, from quiet machines. A test may run on a slow one, beside
others, under coverage: its bounds leave an order of magnitude, and see what is quadratic in 100,000 names or
exponential in a pattern.
"""

import gc
import time
from collections.abc import Callable

TEN = 10.0  # ten times what the slowest of these calls may take of a quiet machine


def cpu_seconds(call: Callable[[], object], rounds: int = 1) -> float:
    """The least of so many rounds; what other tests left is not searched for garbage meanwhile."""
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
