"""Find and remove leftovers: a lock and a journal that a killed run did not remove from a finished result. A run first
renames its result to the destination, and then removes its lock and journal. If it is killed in between, these files
stay.

For a directory, leftovers are the files ``.lock`` and ``.journal.jsonl`` inside it. If the result is one or several
files, such as a GGUF model, the leftover is the partial directory beside them (see staging.py), which then contains no
other file. While a run is alive and holds the lock, its files are not leftovers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fp4kit.checkpoint.convert.journal import Journal, key_of_lines
from fp4kit.checkpoint.model.model_files import load_manifest
from fp4kit.checkpoint.plan.job import Done
from fp4kit.checkpoint.run import staging
from fp4kit.storage.files import CheckpointError

_OWN = (staging.JOURNAL, staging.LOCK)  # names of the leftovers, in the order in which a run removes them


def leftovers_of(destination: Path) -> tuple[Path, ...]:
    """Return the paths of the leftovers of a run that finished its result, but was killed before it removed them."""
    if destination.is_dir():
        is_ours = _is_finished(destination) and not staging.is_live(destination)
        return tuple(destination / name for name in _OWN if _is_own(destination / name)) if is_ours else ()
    partial = staging.partial_of(destination)
    with suppress(OSError):  # if the partial directory cannot be read, there are no known leftovers
        emptied = (
            staging.result_of(destination).is_file()
            and staging.is_partial(partial)
            and {*os.listdir(partial)} <= {*_OWN}
        )
        return (partial,) if emptied and not staging.is_live(partial) else ()
    return ()


def remove_leftovers(destination: Path) -> tuple[Path, ...]:
    """Remove what a finished run has left: a lock and a journal, or the partial directory that holds them."""
    found = leftovers_of(destination)
    if found and not destination.is_dir():
        staging.remove_partial(destination)
        return found
    for path in found:
        path.unlink(missing_ok=True)
    return found


def jobs_of_finished_run(destination: Path, key: str) -> Mapping[str, Done] | None:
    """Return a dict from job key to Done, for the jobs of a run that was killed after it had finished its result."""
    for path in leftovers_of(destination):
        journal = path if path.name == staging.JOURNAL else path / staging.JOURNAL
        with suppress(OSError, CheckpointError):
            if key_of_lines(journal) == key:
                with Journal(journal, key) as found:
                    return found.done
    return None


def _is_finished(folder: Path) -> bool:
    """Return whether a finished conversion wrote this directory, that is, whether it contains a valid manifest."""
    try:
        return load_manifest(folder) is not None
    except CheckpointError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether a file is the lock or the journal of a run of fp4kit, so that the file may be removed."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == staging.LOCK:
        return path.stat().st_size == 0
    with suppress(OSError):
        return key_of_lines(path) is not None
    return False
