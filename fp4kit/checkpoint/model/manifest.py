"""fp4kit_manifest.json: what a conversion wrote, so that a copy of it can be checked: SHA-256 of every file, recipe,
source.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from fp4kit.checkpoint.model.model_files import contained
from fp4kit.checkpoint.run.executors import run_all
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.json_object import load_object

MANIFEST = "fp4kit_manifest.json"
VERSION = 1


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10
    whole = hashlib.sha256()
    while data := file.read(1 << 20):
        whole.update(data)
    return whole.hexdigest()


class Digest(NamedTuple):
    """A file: its SHA-256, and its bytes."""

    path: Path
    sha256: str
    nbytes: int


def digest_of(path: Path) -> Digest:
    """The digest of a file as it is."""
    return Digest(path, file_digest(path), path.stat().st_size)


def names_in(folder: Path) -> list[str]:
    """Files of a directory and those below, by their names in it, but for the manifest and what is hidden.

    Links count where they stay inside, or lead to the blobs of a Hugging Face cache.
    """
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and _is_inside(path, folder))
    return sorted(name.as_posix() for name in names if not is_hidden(name) and name.as_posix() != MANIFEST)


def is_hidden(name: PurePath) -> bool:
    """Whether a part of a name begins with a dot; no file of a conversion does."""
    return any(part.startswith(".") for part in name.parts)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        contained(path, folder)
    except CheckpointError:
        return False
    return True


def manifest_of(digests: Mapping[str, Digest], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest; digests: of every file, by its name; facts: of the run."""
    files = {name: {"sha256": one.sha256, "bytes": one.nbytes} for name, one in sorted(digests.items())}
    return {"fp4kit_manifest": VERSION, **facts, "files": files}


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a directory, None without. Raises CheckpointError for one that is not of this form."""
    path = folder / MANIFEST
    if not path.is_file() or not _is_inside(path, folder):
        return None
    found = load_object(path, MANIFEST)
    files = found.get("files")
    right = isinstance(files, dict) and all(
        isinstance(f, dict) and isinstance(f.get("sha256"), str) for f in files.values()
    )
    if found.get("fp4kit_manifest") != VERSION or not right:
        raise CheckpointError(f"{MANIFEST}: is not of version {VERSION}; convert the model again")
    return found


def differences(folder: Path, executor: Executor | None = None) -> list[str] | None:
    """Return what is not as the manifest says, one sentence per file; None without a manifest.

    executor: hashes file by file. Only files of the size that the manifest gives are hashed, so that a file that grew
    (it may be sparse, and claim terabytes) is named at once.
    """
    found = load_manifest(folder)
    if found is None:
        return None
    present, files = set(names_in(folder)), found["files"]
    sizes = {name: text for name in files if name in present and (text := _other_size(folder / name, files[name]))}
    names = {folder / name: name for name in files if name in present and name not in sizes}
    digests = {names[one.path]: one.sha256 for one in run_all(executor, deque((digest_of, (path,)) for path in names))}
    wrong = [f"{shown(name)}: {text}" for name, text in sizes.items()]
    wrong += [
        f"{shown(name)}: has other bytes than were written"
        for name in digests
        if digests[name] != files[name]["sha256"]
    ]
    missing = [f"{shown(name)}: is missing" for name in files if name not in present]
    strange = [f"{shown(name)}: was not written by the conversion" for name in present - set(files)]
    return [*sorted(missing + wrong), *sorted(strange)]


def _other_size(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return a sentence if the size of a file is not the one in its manifest entry; None if it is, or the entry has
    none.
    """
    size, written = path.stat().st_size, facts.get("bytes")
    if written is None:
        return None
    if type(written) is not int:
        return "has a size in the manifest that is no whole number"
    return None if size == written else f"has other bytes than were written ({size} in place of {written})"
