"""Keep files that take long to make (programs and cubins) between test runs, under a key of everything they are made
from.
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
except ImportError:  # not on this system: two processes may then make the same file, and the later file stays
    fcntl = None

LIMIT = 512 * 2**20  # bytes; a run of all tests, exhaustive ones included, leaves less
IN_USE = 3600  # seconds for which a requested file stays


def key_of(parts: Iterable[str]) -> str:
    """Return a key for a list of texts. It also depends on where one text ends and the next begins."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Cache:
    """Folder of files by key, shared by processes. One process makes a file while the others wait for it."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, key: str, make: Callable[[Path], object]) -> Path:
        """Return the path of a key's file. If there is none yet, make(path) writes it. If make raises, no
        file is left.
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
        """Remove the least recently used files until the rest fits. Files that may be in use stay."""
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
    """Return this user's cache: ~/.cache/fp4kit/host, or a folder in the temporary directory if that cannot be
    written.
    """
    return Cache(loader.cache_folder().parent / "host")
