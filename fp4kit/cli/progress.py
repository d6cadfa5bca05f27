"""Show a line of progress on a terminal: bytes done, speed and time left.

The function that counts the bytes also draws the line, so that no thread is needed.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.filesize import decimal

from fp4kit.cli.render import duration, shortened

Tick = Callable[[int], None]
_INTERVAL = 0.1  # minimum number of seconds between two drawings of the line
_WINDOW = 10.0  # the speed is averaged over this many seconds
_ENOUGH = 0.02  # the time left is shown after this share of the bytes, or after _WINDOW seconds: the first may be slow


class Meter:
    """Count the bytes that are done, and describe the progress in one line.

    what: the name of the activity, such as "converting".
    total: the number of bytes to do.
    now: the start time in seconds, of any clock.
    """

    def __init__(self, what: str, total: int, now: float) -> None:
        self._what, self._total, self._done = what, total, 0
        self._past, self._start = deque([(now, 0)]), now

    def add(self, count: int) -> None:
        """Add ``count`` to the number of bytes done."""
        self._done += count

    def text(self, now: float) -> str:
        """Return a line such as ``converting 37% 3.7 GB of 10.0 GB 1.2 GB/s 5 s left``."""
        self._past.append((now, self._done))
        while len(self._past) > 2 and now - self._past[0][0] > _WINDOW:
            self._past.popleft()
        start, before = self._past[0]
        share = 100 * self._done // self._total if self._total else 100
        line = f"{self._what} {share}%  {decimal(self._done)} of {decimal(self._total)}"
        if now <= start or self._done == before:
            return line
        rate = (self._done - before) / (now - start)
        line += f"  {decimal(int(rate))}/s"
        if self._done < _ENOUGH * self._total and now - self._start < _WINDOW:
            return line
        return f"{line}  {duration(max(self._total - self._done, 0) / rate)} left"


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Tick]:
    """Yield a function that counts bytes and draws a line of progress on stderr, at most ten times per second."""
    if not shown:
        yield lambda count: None
        return
    meter, drawn = Meter(what, total, time.monotonic()), 0.0

    def tick(count: int) -> None:
        nonlocal drawn
        meter.add(count)
        now = time.monotonic()
        if now - drawn >= _INTERVAL:
            drawn = now
            _draw(meter.text(now))

    try:
        yield tick
    finally:
        _draw("")


def _draw(line: str) -> None:
    """Replace the line of progress on stderr by ``line``; "" clears it."""
    width = max(shutil.get_terminal_size().columns - 1, 1)
    while len(line) > width and "  " in line:
        line = line.rpartition("  ")[0]
    with suppress(OSError, ValueError):
        sys.stderr.write(f"\r{shortened(line, width, '...'):<{width}}" + ("\r" if not line else ""))
        sys.stderr.flush()
