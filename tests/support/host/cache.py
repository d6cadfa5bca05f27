"""Keep files that take long to make, such as compiled programs, between test runs.

The key of a file is a hash of everything that it is made from.
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

from fp4kit.cuda import compiler

try:
    import fcntl
except ImportError:  # without locks, two processes may make one file; the file that is finished last stays
    fcntl = None

LIMIT = 512 * 2**20  # bytes in the folder; the files of one exhaustive run of all tests fit
IN_USE = 3600  # a file that was requested less than this many seconds ago is not removed


def key_of(parts: Iterable[str]) -> str:
    """Return a hash of the texts `parts`, which also depends on where one text ends and the next one begins."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Cache:
    """A folder of files by key, which processes share. While one process makes a file, others that need it wait.

    Args:
        folder: the folder, which is created if it does not exist.
        limit: the number of bytes above which old files are removed.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, key: str, make: Callable[[Path], object]) -> Path:
        """Return the path of the file with a key. If it does not exist, make(path) writes it first.

        If `make` raises an error, no file is left.
        """
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
        """Remove the least recently used files until the rest is within the limit; keep files that may be in use."""
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process is shrinking the cache too
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total, now = sum(size for _, size, _ in found), time.time()
        for used, size, path in sorted(found):
            if now - used < IN_USE:
                break
            if path.is_dir():  # left by a process that was killed
                shutil.rmtree(path, ignore_errors=True)
            elif total > self._limit or path.suffix == ".lock":
                path.unlink(missing_ok=True)
                total -= size


@cache
def shared() -> Cache:
    """Return this user's cache of compiled programs: ~/.cache/fp4kit/host, or a temporary directory.

    A temporary directory is used if the first cannot be written.
    """
    return Cache(compiler.cache_folder().parent / "host")
