"""Files read into the page cache before a run needs them: while workers or a GPU start, which takes seconds, and after
that.
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

PIECE, READERS = 64 << 20, 2  # bytes that a thread asks the system for in their order, and how many threads do
STEP = 8 << 20  # of them, at a time
PART = 8  # of the memory of this machine: one of so many parts holds what is not needed yet, at most
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may have of it


class ReadingAhead:
    """Reads files, from the first on, until the with statement ends; gives what the run is to call with the bytes it
    has read.

    total: bytes that the run reads, which may be more than the files have: what is measured first is read twice.
    Where the system takes no such wishes (macOS), nothing is read.
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
        self._window = memory() // PART
        self._done, self._lock, self._stopped = 0, Lock(), Event()
        readers = READERS if hasattr(os, "posix_fadvise") else 0
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
        with self._lock:
            self._done += count
        self._progress(count)

    def _read(self) -> None:
        while self._pieces and not self._stopped.is_set():
            with suppress(
                OSError, IndexError
            ):  # whoever needs the bytes will say so; another thread took the last piece
                file, at, place = self._pieces.popleft()
                while place - self._reached() > self._window and not self._stopped.wait(0.01):
                    pass
                descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    for step in range(0, min(PIECE, file.size - at), STEP):
                        if self._stopped.is_set():
                            return
                        if place + step + STEP > self._reached():  # the run has not been there
                            os.posix_fadvise(descriptor, at + step, STEP, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def _reached(self) -> float:
        """About the place in the files that the run has come to."""
        return self._size * self._done / max(self._total, 1)


def memory() -> int:
    """Bytes of memory that this machine, or this container, has."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no such file; it says "max"
        return min(whole, int(_LIMIT.read_text()))
    return whole
