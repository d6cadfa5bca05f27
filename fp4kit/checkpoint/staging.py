"""A directory that appears whole or not at all: it is filled under a hidden name beside its place, then renamed.

The hidden name is ``.NAME.partial``. While a run fills it, it holds a lock there, which the system takes back however the run ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.whole_file import sync_directory

try:
    import fcntl
except ImportError:  # Windows: two runs into one place are not told apart
    fcntl = None  # type: ignore[assignment]

LOCK, JOURNAL = ".lock", ".journal.jsonl"  # in the partial directory, removed before it gets its name


def partial_of(destination: Path) -> Path:
    """Where a run into a destination fills its files."""
    return destination.with_name(f".{destination.name}.partial")


def check_destination(source: Path, destination: Path) -> None:
    """Raise CheckpointError unless ``destination`` is new, in an existing directory, and apart from ``source``."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists; name a new directory, or remove it first")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination}: its parent directory does not exist; create {destination.parent} first")
    try:
        real_source = source.resolve()
        real = destination.parent.resolve() / destination.name
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{destination}: cannot be resolved ({shown(str(error))}); name a path without a loop of links") from None
    if real.is_relative_to(real_source):
        raise CheckpointError(f"{destination}: lies inside the source {source}; name a directory outside it")
    if real_source.is_relative_to(real):
        raise CheckpointError(f"{destination}: holds the source {source}; name a directory outside it")


def check_space(destination: Path, needed: int) -> None:
    """Raise CheckpointError if the file system of ``destination`` has fewer than ``needed`` bytes free.

    What an interrupted run left counts as free: it is written over.
    """
    free = shutil.disk_usage(destination.parent).free
    with suppress(OSError):
        free += sum(path.stat().st_blocks * 512 for path in partial_of(destination).iterdir() if path.is_file())
    if free < needed:
        raise CheckpointError(f"{destination}: needs {needed} bytes, {free} are free; free space or name another disk")


def check_partial(destination: Path, resume: bool) -> None:
    """Raise CheckpointError for what another run left or is writing, unless it is to be resumed; or if there is nothing to resume."""
    partial = partial_of(destination)
    there = os.path.lexists(partial)
    if there and is_live(partial):
        raise CheckpointError(f"{destination}: another run is writing to it; wait for that one, or name another directory")
    if there and not resume:
        raise CheckpointError(
            f"{partial}: left by an interrupted run; go on with --resume, or remove it with `fp4kit clean {destination}`"
        )
    if resume and not there:
        raise CheckpointError(f"{destination}: there is no interrupted run to resume; leave --resume out")


def is_live(partial: Path) -> bool:
    """Whether a run holds the lock of a partial directory."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_partial(destination: Path) -> Path | None:
    """Remove what an interrupted run into a destination left; returns what was removed, None if there was nothing.

    Raises CheckpointError while a run is writing there, and for anything that no run made.
    """
    partial = partial_of(destination)
    if not os.path.lexists(partial):
        return None
    if partial.is_symlink() or not partial.is_dir() or not (partial / LOCK).is_file():
        raise CheckpointError(f"{partial}: was not made by a conversion; remove it yourself")
    if is_live(partial):
        raise CheckpointError(f"{partial}: a run is writing to it; stop that one first")
    shutil.rmtree(partial)
    return partial


def copy_file(source: Path, destination: Path) -> None:
    """Copy the bytes of a regular file into a new file, creating its directories."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, destination.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


class Stage:
    """The partial directory of a run. published: whether it has got its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.published = folder, False


@contextmanager
def staged_directory(destination: Path, resume: bool = False) -> Iterator[Stage]:
    """Yield the partial directory of a destination; at the end it gets its name.

    After an error it is removed. An interrupted run (KeyboardInterrupt, SystemExit) leaves it, if its journal says that there is
    something to go on with.
    """
    partial = partial_of(destination)
    check_partial(destination, resume)
    try:
        partial.mkdir(mode=0o700, exist_ok=resume)
    except OSError as error:
        raise CheckpointError(f"{shown(str(partial))}: cannot be created ({error.strerror})") from None
    stage = Stage(partial)
    lock = _locked(partial, destination)
    try:
        yield stage
        for name in (LOCK, JOURNAL):
            (partial / name).unlink(missing_ok=True)
        os.chmod(partial, 0o777 & ~_umask())
        for folder, _, _ in os.walk(partial):
            sync_directory(Path(folder))
        if os.path.lexists(destination):
            raise CheckpointError(f"{destination}: appeared while the conversion ran; nothing was written to it")
        os.rename(partial, destination)
        stage.published = True
    except BaseException as error:
        keep = not isinstance(error, Exception) and (partial / JOURNAL).exists()
        if not keep and not stage.published:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    sync_directory(destination.parent)


def _locked(partial: Path, destination: Path) -> int | None:
    """The lock of a partial directory, as an open file."""
    descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise CheckpointError(f"{destination}: another run is writing to it; wait for that one") from None
    return descriptor


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found
