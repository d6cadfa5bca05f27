"""A Hugging Face directory: which safetensors files make up the model, and are they all there.

Three forms: one model.safetensors; model.safetensors.index.json, which maps every tensor to its shard; or shards
without index. Everything is checked from headers, before any tensor is read.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.containers.ggml_names import config_of
from fp4kit.lazy import lazy_property
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.gguf_file import is_gguf, read_gguf
from fp4kit.storage.json_object import load_object
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Source:
    """A model directory whose headers have been read and agree with its index, or a GGUF file; config then is what that
    says.
    """

    root: Path
    config: Mapping[str, Any]
    files: tuple[SafetensorsFile, ...]  # sorted by name
    ignored: tuple[str, ...]  # safetensors files that are not part of the model
    has_index: bool

    @lazy_property
    def tensors(self) -> dict[str, tuple[SafetensorsFile, TensorEntry]]:
        """Every tensor with its file, in the order of files and bytes."""
        return {entry.name: (file, entry) for file in self.files for entry in file.entries}


def resolved(path: Path) -> Path:
    """Return the real path of ``path``, which need not exist. Raises CheckpointError for links that lead in a
    circle.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{shown(str(path))}: its symbolic links lead in a circle; put what is meant there"
            ) from None
    return Path(os.path.realpath(path))


def contained(path: Path, root: Path) -> Path:
    """Return the real path of ``path``, which must lie in ``root``.

    The one way out that is allowed is that of a Hugging Face cache: root is ``snapshots/<revision>``, its links lead
        to ``blobs``.
    """
    real_root = resolved(root)
    roots = [real_root]
    if real_root.parent.name == "snapshots":
        roots.append(resolved(real_root.parent.parent / "blobs"))
    real = resolved(path)
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{shown(path.name)}: a link that leaves {root}; put the file itself there")
    return real


def existing_file(root: Path, name: str) -> Path:
    """Return the real path of the file ``name`` of ``root``; it must exist and lie inside."""
    path = root / name
    real = contained(path, root)
    if not real.is_file():
        state = "is not a regular file" if real.exists() else "is missing"
        raise CheckpointError(f"{shown(name)}: {state} in {root}; download or copy it again")
    return real


def check_shard_name(name: object) -> str:
    """Return ``name`` if it is the plain name of a safetensors file: an index must not lead out of its directory."""
    plain = (
        isinstance(name, str)
        and re.fullmatch(r"[^/\\:\x00-\x1f]+\.safetensors", name) is not None
        and name[0] not in ".-"
        and len(name.encode("utf-8", "replace")) <= 255
    )
    if not plain:
        raise CheckpointError(
            f"{INDEX}: shard name {shown(repr(name))}; a plain file name that ends in .safetensors is needed"
        )
    return str(name)


def load_weight_map(root: Path) -> dict[str, str]:
    """Return tensor name -> shard name from the index of ``root``, with every shard name checked."""
    index = load_object(existing_file(root, INDEX), INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: no weight_map; an object that maps tensor names to shards is needed")
    return {tensor: check_shard_name(shard) for tensor, shard in weight_map.items()}


def _check_numbering(names: Iterable[str]) -> None:
    """Raise if files are numbered ``-00001-of-00003`` and one number is absent."""
    series: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), present in series.items():
        if total != len(present):
            raise CheckpointError(
                f"{shown(stem)}: {len(present)} of {total} numbered shards are present and there is no {INDEX}; "
                "download the missing ones"
            )


def _safetensors_in(root: Path) -> list[str]:
    """Names of safetensors files in a directory; Path.glob would find none where it may not look."""
    return sorted(name for name in os.listdir(root) if name.endswith(".safetensors"))


def model_file_names(root: Path, weight_map: Mapping[str, str] | None) -> list[str]:
    """Return the names of the safetensors files that make up the model in ``root``."""
    present = _safetensors_in(root)
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        if SINGLE in present and SINGLE not in names:
            raise CheckpointError(
                f"{root}: holds both {SINGLE} and {INDEX}, which does not name it; remove one of them"
            )
        return names
    if SINGLE in present:
        return [SINGLE]
    if not present:
        raise CheckpointError(
            f"{root}: no .safetensors file; a Hugging Face model directory with safetensors is needed"
        )
    _check_numbering(present)
    return present


def _check_names_differ(names: list[str]) -> None:
    """Raise if two shard names differ only in case: some file systems take them for one file."""
    folded: dict[str, str] = {}
    for name in names:
        if folded.setdefault(name.casefold(), name) != name:
            raise CheckpointError(f"{shown(name)} and {shown(folded[name.casefold()])} differ only in case; rename one")


def _check_no_duplicates(files: Iterable[SafetensorsFile]) -> None:
    """Raise if two files hold a tensor of the same name."""
    owner: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            if owner.setdefault(entry.name, file.label) != file.label:
                raise CheckpointError(
                    f"{shown(entry.name)}: in {owner[entry.name]} and in {file.label}; "
                    "remove the file that is not part of the model"
                )


def _check_index(weight_map: Mapping[str, str], files: Iterable[SafetensorsFile]) -> None:
    """Raise unless the index and the shards name the same tensors in the same places."""
    held = {entry.name: file.name for file in files for entry in file.entries}
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if held.get(name) != shard]
    if absent:
        raise CheckpointError(
            f"{INDEX}: names {listed(absent)}, which the shard does not hold; download the model again"
        )
    unlisted = [f"{name} of {shard}" for name, shard in held.items() if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{INDEX}: does not name {listed(unlisted)}; download the model again")


def open_source(root: Path) -> Source:
    """Return the checked model in the directory, or GGUF file, ``root``; raises CheckpointError with what is wrong."""
    if is_gguf(root):
        file = read_gguf(root)
        return Source(root, config_of(file.metadata), (file,), (), False)
    if not resolved(root).is_dir():
        state = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(f"{root}: {state}; a Hugging Face model directory is needed")
    files, ignored, has_index = open_model_files(root)
    config = load_object(existing_file(root, CONFIG), CONFIG)
    return Source(root, config, files, ignored, has_index)


def open_model_files(root: Path) -> tuple[tuple[SafetensorsFile, ...], tuple[str, ...], bool]:
    """Return the checked files of the model in ``root``, other safetensors files there, and whether it has an index."""
    weight_map = load_weight_map(root) if os.path.lexists(root / INDEX) else None
    names = model_file_names(root, weight_map)
    _check_names_differ(names)
    files = tuple(read_header(existing_file(root, name), name) for name in names)
    _check_no_duplicates(files)
    if weight_map is not None:
        _check_index(weight_map, files)
    ignored = tuple(sorted(set(_safetensors_in(root)) - set(names)))
    return files, ignored, weight_map is not None
