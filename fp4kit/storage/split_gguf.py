"""Read the files of a split GGUF model as one model, and divide a model into such files.

The files are named NAME-00001-of-00003.gguf and so on. Each file has three keys: split.no (its index, from 0),
split.count, and split.tensors.count (of the whole model). The first file has all other keys. Source: llama.cpp
3e00f05f2, tools/gguf-split/gguf-split.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.gguf_file import GgufFile, read_gguf

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
SPLIT_KEYS = (_COUNT, _NUMBER, _TENSORS)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PADDED = 32  # llama-gguf-split counts the bytes of each tensor, rounded up to a multiple of this
_MAX_FILES = int(np.iinfo(np.uint16).max)  # split.count is a uint16
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}


def bytes_of_text(text: str) -> int:
    """Return the number of bytes that a size such as "5G", "500M" or "4096" means."""
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)", text)
    if match is None:
        raise CheckpointError(
            f"size {shown(text)}: is not a size; a positive integer is needed, perhaps with K, M or G: 500M, 5G"
        )
    return int(match[1]) * _UNITS[match[2]]


def name_of_part(index: int, count: int) -> str:
    """Return the end of a file name of a split model: "00001-of-00003.gguf" for index 0 and count 3."""
    return f"{index + 1:05}-of-{count:05}.gguf"


def whole_path(path: Path) -> Path:
    """Return the path of a file of a split model without the part number: "a-00001-of-00003.gguf" gives "a.gguf"."""
    match = _NAME.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}.gguf")


def first_parts_of(path: Path) -> list[Path]:
    """Return the first file of each split model named ``path``: ["a-00001-of-00003.gguf"] for "a.gguf"."""
    found = path.parent.glob("*.gguf") if path.parent.is_dir() else ()
    named = ((one, _NAME.fullmatch(one.name)) for one in found)
    return sorted(one for one, match in named if match and int(match[2]) == 1 and f"{match[1]}.gguf" == path.name)


def divide(sizes: Sequence[int], limit: int) -> list[slice]:
    """Divide tensors among the files of a split model, as llama-gguf-split --split-max-size does."""
    found, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        padded = -(-size // _PADDED) * _PADDED
        if padded > limit:
            raise CheckpointError(
                f"split-max-size: {limit} bytes are less than the largest tensor, which needs"
                f" {-(-max(sizes) // _PADDED) * _PADDED} bytes"
            )
        if total + padded > limit:
            found.append(slice(first, i))
            first, total = i, 0
        total += padded
    found.append(slice(first, len(sizes)))
    if len(found) > _MAX_FILES:
        raise CheckpointError(
            f"split-max-size: {limit} bytes give {len(found)} files; at most {_MAX_FILES} are possible"
        )
    return found


def keys_of_part(index: int, count: int, tensors: int) -> dict[str, np.uint16 | np.int32]:
    """Return the three keys of file `index` of a split model, with the types and in the order of llama-gguf-split."""
    return {_NUMBER: np.uint16(index), _TENSORS: np.int32(tensors), _COUNT: np.uint16(count)}


def read_gguf_model(path: Path) -> tuple[GgufFile, ...]:
    """Return the checked headers of all files of a GGUF model, in their order."""
    parts = [] if path.exists() else first_parts_of(path)
    if parts:
        raise CheckpointError(
            f"{shown(str(path))}: is stored in several files; pass the first one, {shown(str(parts[0]))}"
        )
    file = read_gguf(path)
    count = file.metadata.get(_COUNT, "1")
    if count in ("0", "1"):
        return (file,)
    match = _NAME.fullmatch(path.name)
    if match is None or str(int(match[3])) != count:
        raise CheckpointError(
            f"{file.label}: is one of {shown(count)} files of a split model, but is not named so; give it the name that"
            " llama-gguf-split gave it, such as NAME-00001-of-00003.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, int(count) + 1)]
    missing = [one.name for one in paths if not one.exists()]
    if missing:
        raise CheckpointError(
            f"{file.label}: {len(missing)} of {count} files of the split model are missing: {listed(missing)}; put them"
            f" into {path.parent}"
        )
    files = tuple(file if one == path else read_gguf(one) for one in paths)
    _check(files)
    return files


def _check(files: tuple[GgufFile, ...]) -> None:
    """Raise CheckpointError if the files of a split model contradict each other."""
    count, total = files[0].metadata[_COUNT], files[0].metadata.get(_TENSORS, "")
    for i, file in enumerate(files):
        wanted = {_NUMBER: str(i), _COUNT: count, _TENSORS: total}
        for key, value in wanted.items():
            if file.metadata.get(key) != value:
                raise CheckpointError(
                    f"{file.label}: {key} is {shown(str(file.metadata.get(key)))}, but {shown(value)} is expected from"
                    f" its name and {files[0].label}; download the model again"
                )
    owner: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            if owner.setdefault(entry.name, file.label) != file.label:
                raise CheckpointError(f"{shown(entry.name)}: is in both {owner[entry.name]} and {file.label}")
    if str(len(owner)) != total:
        raise CheckpointError(
            f"{files[0].label}: {_TENSORS} is {shown(total)}, but the files hold {len(owner)}; download the model again"
        )
