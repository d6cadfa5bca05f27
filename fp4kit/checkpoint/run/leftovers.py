"""Leftovers: what a run left that was killed when its result had its name already, and had not removed its lock and
journal.

In a directory that was finished these are its files ``.lock`` and ``.journal.jsonl``. Beside a GGUF file it is the
partial directory that the file was taken out of, with nothing else in it. A run that lives yet, and holds the lock,
leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fp4kit.checkpoint.convert.journal import Journal, key_of_lines
from fp4kit.checkpoint.model.manifest import load_manifest
from fp4kit.checkpoint.plan.job import Done
from fp4kit.checkpoint.run import staging
from fp4kit.storage.errors import CheckpointError

_OWN = (staging.JOURNAL, staging.LOCK)  # in the order in which a run removes them


def leftovers_of(destination: Path) -> tuple[Path, ...]:
    """Return what was left in a finished directory, or beside a finished file. Empty if there is nothing, or a run is
    alive.
    """
    if destination.is_dir():
        is_ours = _is_finished(destination) and not staging.is_live(destination)
        return tuple(destination / name for name in _OWN if _is_own(destination / name)) if is_ours else ()
    partial = staging.partial_of(destination)
    with suppress(OSError):  # of a directory that cannot be read
        emptied = destination.is_file() and staging.is_partial(partial) and {*os.listdir(partial)} <= {*_OWN}
        return (partial,) if emptied and not staging.is_live(partial) else ()
    return ()


def remove_leftovers(destination: Path) -> tuple[Path, ...]:
    """Remove what leftovers_of returns, and return it."""
    found = leftovers_of(destination)
    if found and not destination.is_dir():
        staging.remove_partial(destination)
        return found
    for path in found:
        path.unlink(missing_ok=True)
    return found


def done_before(destination: Path, key: str) -> Mapping[str, Done] | None:
    """Return the jobs that made a finished destination, by their keys, if the journal of the run ``key`` was left
    there.

    None without that journal, so that nothing tells which run made the destination.
    """
    for path in leftovers_of(destination):
        journal = path if path.name == staging.JOURNAL else path / staging.JOURNAL
        with suppress(OSError, CheckpointError):
            if key_of_lines(journal) == key:
                with Journal(journal, key) as found:
                    return found.done
    return None


def _is_finished(folder: Path) -> bool:
    """Return whether a conversion wrote a directory: it then has a manifest."""
    try:
        return load_manifest(folder) is not None
    except CheckpointError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether a file is an empty lock, or a journal that begins with the key of a run. No link is followed."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == staging.LOCK:
        return path.stat().st_size == 0
    with suppress(OSError):
        return key_of_lines(path) is not None
    return False
