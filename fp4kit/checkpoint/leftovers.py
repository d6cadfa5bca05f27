"""Directories that a run fills beside their place, ``.NAME.partial-PID``: whose they are, and what killed runs left.

A run holds a lock (flock) on its directory for as long as it lives; the kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp4kit.storage.errors import CheckpointError

_CLAIMED: dict[str, tuple[int, int]] = {}  # destination -> device and inode of the directory that this process fills for it


@dataclass(frozen=True)
class Leftover:
    """A partial directory that no running process of this machine fills; age in seconds since its last change.

    kind: "stale", or "unlockable" where it cannot be known: the file system has no locks, or another user owns the directory.
    """

    path: Path
    nbytes: int
    age: float
    kind: Literal["stale", "unlockable"]


def partial_path(destination: Path) -> Path:
    """Return the name under which this process fills ``destination``."""
    return destination.parent / f".{destination.name}.partial-{os.getpid()}"


@contextmanager
def claimed(partial: Path, destination: Path) -> Iterator[None]:
    """Hold the lock on the new directory ``partial``, which is to become ``destination``."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if _locked(descriptor) is False or not _same(descriptor, partial):
            raise CheckpointError(f"{partial}: another process has taken it for stale; run again")
        found = os.fstat(descriptor)
        _CLAIMED[os.path.abspath(destination)] = found.st_dev, found.st_ino
        yield
    finally:
        os.close(descriptor)


def complete(destination: Path) -> bool:
    """Return whether ``destination`` is what this process filled and renamed: then it is whole, whatever was raised since."""
    try:
        found = os.lstat(destination)
    except OSError:
        return False
    return _CLAIMED.get(os.path.abspath(destination)) == (found.st_dev, found.st_ino)


def leftovers(destination: Path) -> tuple[Leftover, ...]:
    """Return what killed runs left beside ``destination``, by name; never the directory of a live process."""
    found = (_leftover(path) for path in _partials(destination) if not _runs(path))
    return tuple(leftover for leftover in found if leftover)


def remove(leftover: Leftover) -> None:
    """Remove a stale directory. Raises CheckpointError if it is not known to be stale, or no longer."""
    descriptor = os.open(leftover.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _locked(descriptor) or not _same(descriptor, leftover.path):
            raise CheckpointError(f"{leftover.path}: a running process may be filling it; remove it yourself if none is")
        shutil.rmtree(leftover.path)
    finally:
        os.close(descriptor)


def _partials(destination: Path) -> list[Path]:
    """The partial directories of any process for ``destination``; no links."""
    prefix = f".{destination.name}.partial-"
    try:
        with os.scandir(destination.parent) as entries:
            found = [e.name for e in entries if e.name.startswith(prefix) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [destination.parent / name for name in sorted(found)]


def _runs(partial: Path) -> bool:
    """Return whether the process in the name is another one that runs. Its number may be used anew: then it counts as live."""
    number = partial.name.rpartition("-")[2]
    if not (number.isascii() and number.isdigit()) or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _leftover(partial: Path) -> Leftover | None:
    """Return ``partial`` as a leftover, or None if a process holds its lock or it is gone."""
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:
        return Leftover(partial, 0, 0.0, "unlockable")
    try:
        locked = _locked(descriptor)
    finally:
        os.close(descriptor)
    if locked is False:
        return None
    nbytes, changed = _extent(partial)
    return Leftover(partial, nbytes, max(time.time() - changed, 0.0), "unlockable" if locked is None else "stale")


def _locked(descriptor: int) -> bool | None:
    """Try to lock a directory: False if another process has the lock, None if the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _same(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still names the directory that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _extent(folder: Path) -> tuple[int, float]:
    """Return the bytes of the files in ``folder``, and when anything in it last changed."""
    nbytes, changed = 0, 0.0
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            nbytes += found.st_size if path != place else 0
            changed = max(changed, found.st_mtime)
    return nbytes, changed
