"""Files that take long to make, kept between runs of the tests: programs and cubins, by a key of all they are made
of.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from fp4kit.cuda.compile import loader

try:
    import fcntl
except ImportError:  # not on this system: two processes may make one file, and the later one stays
    fcntl = None

LIMIT = 512 * 2**20  # bytes; a run of all tests, the exhaustive ones too, leaves less
IN_USE = 3600  # seconds for which an entry stays after it was asked for


def key_of(parts: Iterable[str]) -> str:
    """A name for what is made of these texts; where one ends and the next begins counts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Cache:
    """A folder of files by key. Processes share it: one makes a file while the others wait for it."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, key: str, make: Callable[[Path], object]) -> Path:
        """Path of the file of a key; make(path) writes it where there is none yet, and what it raises leaves none."""
        path = self.folder / key
        with (self.folder / f"{key}.lock").open("wb") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                os.utime(path)
                return path
            with tempfile.TemporaryDirectory(dir=self.folder) as beside:
                make(Path(beside) / key)
                os.replace(Path(beside) / key, path)
        self._shrink()
        return path

    def _shrink(self) -> None:
        """Remove what was asked for longest ago until the rest fits, but nothing that may be in use."""
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process shrinks, too
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total, now = sum(size for _, size, _ in found), time.time()
        for used, size, path in sorted(found):
            if now - used < IN_USE:
                break
            if path.is_dir():  # of a process that was killed
                shutil.rmtree(path, ignore_errors=True)
            elif total > self._limit or path.suffix == ".lock":
                path.unlink(missing_ok=True)
                total -= size


@cache
def shared() -> Cache:
    """The cache of this user: ~/.cache/fp4kit/host, or one in the temporary directory where that cannot be written."""
    return Cache(loader.cache_folder().parent / "host")
