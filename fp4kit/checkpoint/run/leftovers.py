"""Find and remove leftovers: a lock and a journal that a killed run did not remove from a finished result.

A run gives its result the final name first, and removes its lock and journal afterwards. If it is killed in between,
these files stay. For a directory, leftovers are the files ``.lock`` and ``.journal.jsonl`` inside it. For a GGUF file,
they are the partial directory beside it (see staging.py), which then contains nothing else. While a run is alive and
holds the lock, its files are not leftovers.
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
    """Return the leftovers in a finished directory or beside a finished file.

    Returns () if there are none, or if a run is alive.
    """
    if destination.is_dir():
        is_ours = _is_finished(destination) and not staging.is_live(destination)
        return tuple(destination / name for name in _OWN if _is_own(destination / name)) if is_ours else ()
    partial = staging.partial_of(destination)
    with suppress(OSError):  # the partial directory cannot be read
        emptied = destination.is_file() and staging.is_partial(partial) and {*os.listdir(partial)} <= {*_OWN}
        return (partial,) if emptied and not staging.is_live(partial) else ()
    return ()


def remove_leftovers(destination: Path) -> tuple[Path, ...]:
    """Remove the leftovers of a destination, and return what was removed."""
    found = leftovers_of(destination)
    if found and not destination.is_dir():
        staging.remove_partial(destination)
        return found
    for path in found:
        path.unlink(missing_ok=True)
    return found


def jobs_of_finished_run(destination: Path, key: str) -> Mapping[str, Done] | None:
    """Return job key -> result for a finished destination, if the journal of the run ``key`` is among its leftovers.

    Return None without that journal, because it is unknown then which run made the destination.
    """
    for path in leftovers_of(destination):
        journal = path if path.name == staging.JOURNAL else path / staging.JOURNAL
        with suppress(OSError, CheckpointError):
            if key_of_lines(journal) == key:
                with Journal(journal, key) as found:
                    return found.done
    return None


def _is_finished(folder: Path) -> bool:
    """Return whether a conversion wrote this directory and finished, so that it has a valid manifest."""
    try:
        return load_manifest(folder) is not None
    except CheckpointError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether a file was written by a run: an empty lock, or a journal that begins with a run's key.

    Links are never followed.
    """
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == staging.LOCK:
        return path.stat().st_size == 0
    with suppress(OSError):
        return key_of_lines(path) is not None
    return False
