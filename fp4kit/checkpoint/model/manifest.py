"""Write and check manifests. The manifest of a converted model, fp4kit_manifest.json, records the recipe, the source,
and the size and SHA-256 of every written file, so that a copy of the model can be checked for missing, changed and
additional files.
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
    """Return the SHA-256 of a file's content, as 64 hexadecimal digits. Raise OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    """Return the SHA-256, in hexadecimal, of an open binary file from its current position to its end."""
    whole = hashlib.sha256()
    while data := file.read(1 << 20):
        whole.update(data)
    return whole.hexdigest()


class Digest(NamedTuple):
    """The path, the size and the SHA-256 digest of a file.

    Attributes:
        path: the path of the file.
        sha256: the SHA-256 of the content, in hexadecimal.
        nbytes: the size in bytes.
    """

    path: Path
    sha256: str
    nbytes: int


def digest_of(path: Path) -> Digest:
    """Read a file and return its Digest: path, SHA-256 and size."""
    return Digest(path, file_digest(path), path.stat().st_size)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names, relative to ``folder``, of the files in ``folder`` that its manifest must list."""
    # The manifest must list all files in the directory and its subdirectories, except itself and hidden files.
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and _is_inside(path, folder))
    return sorted(name.as_posix() for name in names if not is_hidden(name) and name.as_posix() != MANIFEST)


def is_hidden(name: PurePath) -> bool:
    """Return whether the name of a file, or of a directory in its path, begins with a dot."""
    return any(part.startswith(".") for part in name.parts)


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is inside ``folder``, or in the cache of the Hugging Face Hub that holds ``folder``."""
    try:
        contained(path, folder)
    except CheckpointError:
        return False
    return True


def manifest_of(digests: Mapping[str, Digest], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest: a dict that can be written as JSON."""
    files = {name: {"sha256": one.sha256, "bytes": one.nbytes} for name, one in sorted(digests.items())}
    return {"fp4kit_manifest": VERSION, **facts, "files": files}


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of a directory's manifest, or None if the directory has none."""
    path = folder / MANIFEST
    if not path.is_file() or not _is_inside(path, folder):
        return None
    found = load_object(path, MANIFEST)
    files = found.get("files")
    right = isinstance(files, dict) and all(
        isinstance(f, dict) and isinstance(f.get("sha256"), str) for f in files.values()
    )
    if found.get("fp4kit_manifest") != VERSION or not right:
        raise CheckpointError(f"{MANIFEST}: is malformed or not of version {VERSION}; convert the model again")
    return found


def differences(folder: Path, executor: Executor | None = None) -> list[str] | None:
    """Compare the files of a converted model with its manifest, to find missing, changed and additional files."""
    # A file whose size differs from the manifest is reported without being hashed, because a damaged sparse file may
    # appear to hold terabytes.
    found = load_manifest(folder)
    if found is None:
        return None
    present, files = set(names_in(folder)), found["files"]
    sizes = {name: text for name in files if name in present and (text := _other_size(folder / name, files[name]))}
    names = {folder / name: name for name in files if name in present and name not in sizes}
    digests = {names[one.path]: one.sha256 for one in run_all(executor, deque((digest_of, (path,)) for path in names))}
    wrong = [f"{shown(name)}: {text}" for name, text in sizes.items()]
    wrong += [
        f"{shown(name)}: its content differs from what the conversion wrote"
        for name in digests
        if digests[name] != files[name]["sha256"]
    ]
    missing = [f"{shown(name)}: is missing" for name in files if name not in present]
    strange = [f"{shown(name)}: was not written by the conversion" for name in present - set(files)]
    return [*sorted(missing + wrong), *sorted(strange)]


def _other_size(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the fault of a file's size, for a message; None if the size agrees with the manifest."""
    size, written = path.stat().st_size, facts.get("bytes")
    if written is None:
        return None
    if type(written) is not int:
        return "its size in the manifest is not a whole number"
    return None if size == written else f"has {size} bytes, but the conversion wrote {written} bytes"
