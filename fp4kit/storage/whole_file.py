"""Create a file that appears complete or not at all: write under a temporary name, then rename."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, to which the caller writes the new file."""
    # The caller flushes the content to the disk if it must survive a crash.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk. Raise FileExistsError if a file or link exists at ``path``."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory (names of new, renamed and removed files) to disk, so they survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
