"""Files read into the page cache before a run needs them: while a GPU starts, which takes seconds, and while it works."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate
from threading import Event, Lock, Thread

from fp4kit.storage.safetensors_file import SafetensorsFile

PIECE, READERS = 64 << 20, 8  # bytes that a thread reads in their order, and how many threads: a disk has as much to do as it can
STEP = 8 << 20  # of them, at a time
PART = 8  # of the memory of this machine: one of so many parts holds what is not needed yet, at most


class ReadingAhead:
    """Reads files, from the first on, until the with statement ends; gives what the run is to call with the bytes it has read.

    total: bytes that the run reads, which may be more than the files have: what is measured first is read twice.
    """

    def __init__(self, files: Iterable[SafetensorsFile], total: int, progress: Callable[[int], None]) -> None:
        found = list(files)
        ends = list(accumulate((file.size for file in found), initial=0))
        self._pieces = deque(
            (file.path, at, before + at) for file, before in zip(found, ends, strict=False) for at in range(0, file.size, PIECE)
        )
        self._size, self._total, self._progress = ends[-1], total, progress
        self._window = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // PART
        self._done, self._lock, self._stopped = 0, Lock(), Event()
        self._threads = [Thread(target=self._read, daemon=True) for _ in range(READERS)]

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
        buffer = bytearray(STEP)
        while self._pieces and not self._stopped.is_set():
            with suppress(OSError, IndexError):  # whoever needs the bytes will say so; another thread took the last piece
                path, at, place = self._pieces.popleft()
                while place - self._reached() > self._window and not self._stopped.wait(0.01):
                    pass
                with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
                    for step in range(0, PIECE, STEP):
                        if self._stopped.is_set():
                            return
                        if place + step + STEP <= self._reached():
                            continue  # the run has been there
                        file.seek(at + step)
                        if not file.readinto(buffer):
                            break

    def _reached(self) -> float:
        """About the place in the files that the run has come to."""
        return self._size * self._done / max(self._total, 1)
