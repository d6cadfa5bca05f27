"""Read the files of a split GGUF model, NAME-00001-of-00003.gguf and so on, as one model.

Each file has three keys: split.no (its index, from 0), split.count, and split.tensors.count (of the whole model). The
first file has all other keys. Source: llama.cpp tools/gguf-split/gguf-split.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path

from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.gguf_file import GgufFile, read_gguf

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
SPLIT_KEYS = (_COUNT, _NUMBER, _TENSORS)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf_model(path: Path) -> tuple[GgufFile, ...]:
    """Return the checked headers of all files of a GGUF model, in their order.

    path: the model's only file, or any file of a split model. The other files are beside it.

    Raises:
        CheckpointError: if a file is invalid or missing, or files contradict each other.
    """
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
