"""Define the patch file: one safetensors file that stores what changed between two versions of a checkpoint. It stores
a changed file as runs, which are ranges of changed bytes, and a new file as a whole. Files are divided into chunks; no
run extends beyond its chunk.

A patch stores each file of the new version in one of three ways:

- An unchanged file: only its name, size and SHA-256.
- A changed file of equal size: runs of changed bytes. The file is divided into chunks of CHUNK bytes, and no run
  extends beyond its chunk. The runs are stored in four tensors:

  - FILE/counts I64 [chunks, 2]: the number of runs and the number of their bytes, per chunk
  - FILE/starts I64: the position of each run's first byte in the file
  - FILE/lengths I64: the number of bytes of each run
  - FILE/bytes U8: the new bytes of all runs

- A new file, or a file of a different size: the whole file, as the tensor FILE/whole U8.

The metadata entry "fp4kit.patch" is JSON. It holds:

- the version of this format
- what the model is: "directory" or "file"
- the size in bytes and the SHA-256 of every file of both versions, under the names that version_files.py defines
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fp4kit.checkpoint.delta.version_files import are_of_files
from fp4kit.storage.files import CheckpointError, parse_object, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry, read_header

KEY, VERSION = "fp4kit.patch", 1
CHUNK = 8 << 20
COUNTS, STARTS, LENGTHS, BYTES, WHOLE = "counts", "starts", "lengths", "bytes", "whole"
_MODELS = {True: "directory", False: "file"}
PARTS = (COUNTS, STARTS, LENGTHS, BYTES)


@dataclass(frozen=True)
class FileFacts:
    """The size in bytes and the SHA-256 (hexadecimal text) of a file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Patch:
    """An open patch file with a checked header. A patch turns the old version of a checkpoint into the new version.

    file: the header of the patch file.
    is_directory: True if both versions are directories; False if they are safetensors files or GGUF models.
    base, result: file name -> size and SHA-256, for the files of the old version (base) and of the new version
        (result).
    """

    file: SafetensorsFile
    is_directory: bool
    base: Mapping[str, FileFacts]
    result: Mapping[str, FileFacts]

    def entry(self, name: str, part: str) -> TensorEntry | None:
        """Return the tensor that holds a part of the file ``name``, or None if the patch has no such tensor."""
        wanted = f"{name}/{part}"
        return next((entry for entry in self.file.entries if entry.name == wanted), None)


def metadata_of(
    base: Mapping[str, FileFacts], result: Mapping[str, FileFacts], is_directory: bool = True
) -> dict[str, str]:
    """Return the metadata of a patch file: one entry, whose value is JSON text."""
    files = {
        side: {name: {"bytes": one.nbytes, "sha256": one.sha256} for name, one in sorted(facts.items())}
        for side, facts in (("base", base), ("result", result))
    }
    return {KEY: json.dumps({"version": VERSION, "model": _MODELS[is_directory], **files})}


def open_patch(path: Path) -> Patch:
    """Open a patch file, check its header, and return it as a Patch."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file; a patch that fp4kit diff wrote is needed")
    file = read_header(path)
    if KEY not in file.metadata:
        raise CheckpointError(f"{path}: has no {KEY} entry; a patch that fp4kit diff wrote is needed")
    content = parse_object(file.metadata[KEY].encode(), f"{path.name}: {KEY}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path}: is a patch of version {content.get('version')}; {VERSION} is needed")
    model = content.get("model", _MODELS[True])
    patch = Patch(file, model == _MODELS[True], _facts(path, content.get("base")), _facts(path, content.get("result")))
    if model not in _MODELS.values() or not (patch.is_directory or are_of_files(patch.result)):
        raise CheckpointError(f"{path}: its {KEY} entry is malformed; make the patch again")
    for name, facts in patch.result.items():
        _check_parts(path, patch, name, facts)
    return patch


def _facts(path: Path, content: Any) -> dict[str, FileFacts]:
    """Return a dict from file name to size and SHA-256, read from the JSON content for one version of the model."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: its {KEY} entry is malformed; make the patch again")
    found = {}
    for name, one in content.items():
        parts = PurePosixPath(name).parts
        safe = (
            bool(parts) and not any(part in ("..", "/") or part.startswith(".") for part in parts) and "\\" not in name
        )
        if (
            not safe
            or not isinstance(one, dict)
            or type(one.get("bytes")) is not int
            or len(str(one.get("sha256"))) != 64
        ):
            raise CheckpointError(
                f"{path}: its entry for the file {shown(str(name))} is malformed; make the patch again"
            )
        found[name] = FileFacts(one["bytes"], one["sha256"])
    return found


def _check_parts(path: Path, patch: Patch, name: str, facts: FileFacts) -> None:
    """Raise CheckpointError if the shapes of the tensors that store a file do not fit together or do not fit its
    size.
    """
    base = patch.base.get(name)
    whole, counts = patch.entry(name, WHOLE), patch.entry(name, COUNTS)
    if whole is not None:
        fits = whole.shape == (facts.nbytes,)
    elif counts is not None:
        sizes = [patch.entry(name, part) for part in PARTS]
        starts, lengths = (patch.entry(name, part) for part in (STARTS, LENGTHS))
        fits = (
            None not in sizes
            and base is not None
            and base.nbytes == facts.nbytes
            and counts.shape == (-(-facts.nbytes // CHUNK), 2)
            and starts is not None
            and lengths is not None
            and starts.shape == lengths.shape
        )
    else:
        fits = base == facts
    if not fits:
        raise CheckpointError(f"{path}: its parts for the file {shown(name)} do not fit; make the patch again")
