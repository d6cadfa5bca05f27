"""The files of a model directory that are not tensors: which go along, which stay behind, and why.

An allow-list by kind: tokenizers, configs, templates, texts. No program (*.py) and no other weights are copied, and
no link is followed out of the directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fp4kit.checkpoint.model.manifest import MANIFEST
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, contained, resolved
from fp4kit.storage.errors import CheckpointError, shown

COPIED_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".vocab", ".yaml")
COPIED_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "README")
WEIGHT_SUFFIXES = (
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    ".ot",
    ".safetensors",
    ".npz",
)
WRITTEN_AT_ROOT = (CONFIG, HF_QUANT_CONFIG, MANIFEST)  # a manifest is of the source, or of the run before


@dataclass(frozen=True)
class AuxiliaryFile:
    """A file to copy: ``name`` relative to both directories, ``path`` the real file, its size in bytes."""

    name: str
    path: Path
    nbytes: int


@dataclass(frozen=True)
class AuxiliaryFiles:
    """What is copied, and what is skipped with the reason."""

    copied: tuple[AuxiliaryFile, ...]
    skipped: tuple[tuple[str, str], ...]


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name relative to root, path) of files, links to directories and hidden directories."""
    for folder, directories, names in os.walk(root, onerror=_unreadable):
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        hidden = [name for name in directories if name.startswith(".") and name not in links]
        directories[:] = sorted(set(directories) - set(links) - set(hidden))
        for name in sorted([*names, *links, *hidden]):
            path = Path(folder) / name
            yield path.relative_to(root).as_posix(), path


def _unreadable(error: OSError) -> NoReturn:
    """Raise for a directory that cannot be listed: os.walk would pass over what is in it."""
    raise CheckpointError(f"{shown(str(error.filename))}: cannot be read ({error.strerror}); allow it, or remove it")


def _skip_reason(name: str, path: Path, root: Path) -> str | None:
    """Return why the file is not copied, or None."""
    base = path.name
    if path.is_dir():
        return "a link to a directory" if path.is_symlink() else "hidden directory"
    if base.startswith("."):
        return "hidden file"
    if base.endswith(".index.json"):
        return "index of other weights"
    if base.endswith(WEIGHT_SUFFIXES):
        return "weights that are not part of the model"
    if not (base.endswith(COPIED_SUFFIXES) or base.startswith(COPIED_PREFIXES)) or base.endswith(".py"):
        return "not a kind of file that is copied"
    try:
        resolved(path)
    except CheckpointError:
        return "links that lead in a circle"
    try:
        real = contained(path, root)
    except CheckpointError:
        return "a link that leaves the directory"
    return None if real.is_file() else "not a regular file"


def scan(root: Path, model_files: set[str]) -> AuxiliaryFiles:
    """Return what beside the ``model_files`` (their names, and the index) of ``root`` is copied and what is skipped.

    Nothing, where ``root`` is a file. Raises CheckpointError for what may not be read.
    """
    copied: list[AuxiliaryFile] = []
    skipped: list[tuple[str, str]] = []
    for name, path in _walk(root) if root.is_dir() else ():
        if name in model_files or name in WRITTEN_AT_ROOT:
            continue
        reason = _skip_reason(name, path, root)
        if reason is None:
            if not os.access(path, os.R_OK):
                _unreadable(PermissionError(errno.EACCES, os.strerror(errno.EACCES), path))
            copied.append(AuxiliaryFile(name, path.resolve(), path.stat().st_size))
        else:
            skipped.append((name, reason))
    return AuxiliaryFiles(tuple(copied), tuple(skipped))
