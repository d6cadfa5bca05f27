"""Prefetch files into the page cache before a run reads them. Prefetching starts while worker processes or a GPU start,
which takes seconds, and continues during the run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock, Thread

from fp4kit.storage.safetensors_file import SafetensorsFile

PIECE = 64 << 20  # bytes of a piece, the part of a file that one thread prefetches before it takes the next piece
THREADS = 2  # number of prefetching threads
STEP = 8 << 20  # bytes per request to the system
WINDOW_DIVISOR = 8  # prefetch at most 1 / WINDOW_DIVISOR of the machine's memory ahead of the run
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # holds the memory limit of this process, such as that of a Docker container


class Prefetcher:
    """Prefetch files in order, in background threads, until the with statement ends.

    The with statement gives a function. The run must call this function after each of its reads, with the number of
    bytes read. From these calls, the threads know the position of the run. They stay ahead of it by at most an eighth
    of the memory. Where posix_fadvise does not exist (macOS), nothing is prefetched.

    files: the files, in the order in which the run reads them.
    total: the number of bytes that the run will read. It exceeds the size of the files if some are read twice.
    progress: called with each number of bytes that the run reports.
    """

    def __init__(self, files: Iterable[SafetensorsFile], total: int, progress: Callable[[int], None]) -> None:
        found = list(files)
        ends = list(accumulate((file.size for file in found), initial=0))
        self._pieces = deque(
            (file, at, before + at)
            for file, before in zip(found, ends, strict=False)
            for at in range(0, file.size, PIECE)
        )
        self._size, self._total, self._progress = ends[-1], total, progress
        self._window = memory() // WINDOW_DIVISOR
        self._done, self._lock, self._stopped = 0, Lock(), Event()
        readers = THREADS if hasattr(os, "posix_fadvise") else 0
        self._threads = [Thread(target=self._read, daemon=True) for _ in range(readers)]

    def __enter__(self) -> Callable[[int], None]:
        for thread in self._threads:
            thread.start()
        return self._tick

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _tick(self, count: int) -> None:
        """Record that the run has read ``count`` more bytes, and report it to ``progress``."""
        with self._lock:
            self._done += count
        self._progress(count)

    def _read(self) -> None:
        """Prefetch pieces of files until no piece is left or the with statement ends."""
        # Files that cannot be read are skipped, because the run itself reports them.
        while self._pieces and not self._stopped.is_set():
            # Ignore OSError, because the run itself reports unreadable files. An IndexError means that the other thread
            # took the last piece.
            with suppress(OSError, IndexError):
                file, at, place = self._pieces.popleft()
                while place - self._position_of_run() > self._window and not self._stopped.wait(0.01):
                    pass
                descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    for step in range(0, min(PIECE, file.size - at), STEP):
                        if self._stopped.is_set():
                            return
                        if place + step + STEP > self._position_of_run():  # the run has not read this yet
                            os.posix_fadvise(descriptor, at + step, STEP, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def _position_of_run(self) -> float:
        """Return the approximate position of the run, in bytes from the start of the first file."""
        return self._size * self._done / max(self._total, 1)


def memory() -> int:
    """Return the size of this machine's memory in bytes, or the memory limit of this process if that is smaller."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the file does not exist, or contains "max"
        return min(whole, int(_LIMIT.read_text()))
    return whole
