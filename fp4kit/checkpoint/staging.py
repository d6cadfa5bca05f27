"""A directory that appears whole or not at all: it is filled under a temporary name beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4kit.checkpoint import leftovers
from fp4kit.checkpoint.files import resolved
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.whole_file import sync_directory


def check_destination(source: Path, destination: Path) -> None:
    """Raise CheckpointError unless ``destination`` is new, in an existing directory, and apart from ``source``."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists; name a new directory, or remove it first")
    if not resolved(destination.parent).is_dir():
        raise CheckpointError(f"{destination}: its parent directory does not exist; create {destination.parent} first")
    real_source = resolved(source)
    real = resolved(destination.parent) / destination.name
    if real.is_relative_to(real_source):
        raise CheckpointError(f"{destination}: lies inside the source {source}; name a directory outside it")
    if real_source.is_relative_to(real):
        raise CheckpointError(f"{destination}: holds the source {source}; name a directory outside it")


def check_space(destination: Path, needed: int) -> None:
    """Raise CheckpointError if the file system of ``destination`` has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(destination.parent).free
    if free < needed:
        raise CheckpointError(f"{destination}: needs {needed} bytes, {free} are free; free space or name another disk")


def copy_file(source: Path, destination: Path) -> None:
    """Copy the bytes of a regular file into a new file, creating its directories."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, destination.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


class _PartialExists(CheckpointError):
    """The temporary directory is there already, and not this run's to remove."""


def _make_partial(partial: Path) -> None:
    """Create the temporary directory."""
    try:
        partial.mkdir()
    except FileExistsError:
        raise _PartialExists(f"{partial}: exists, left by a killed run; remove it (fp4kit convert --remove-stale does)") from None
    except OSError as error:
        raise CheckpointError(f"{shown(str(partial))}: cannot be created ({error.strerror})") from None


@contextmanager
def staged_directory(destination: Path) -> Iterator[Path]:
    """Yield a new directory ``.<name>.partial-<pid>``; rename it to ``destination`` at the end, or remove it."""
    partial = leftovers.partial_path(destination)
    try:
        _make_partial(partial)
        with leftovers.claimed(partial, destination):
            yield partial
            for folder, _, _ in os.walk(partial):
                sync_directory(Path(folder))
            if os.path.lexists(destination):
                raise CheckpointError(f"{destination}: appeared while the conversion ran; nothing was written to it")
            os.rename(partial, destination)
    except _PartialExists:
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(destination.parent)
