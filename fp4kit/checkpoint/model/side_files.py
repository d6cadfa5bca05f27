"""Decide which files of a model directory, other than the model's tensors, a conversion copies. The decision is mostly
by name: tokenizers, configs, templates and texts are copied; programs, other weights and hidden files are skipped.

No link is followed out of the directory. Each skipped file is reported with a reason.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fp4kit.checkpoint.model.manifest import MANIFEST
from fp4kit.checkpoint.model.model_files import (
    CONFIG,
    DESCRIPTION,
    HF_QUANT_CONFIG,
    contained,
    index_name,
    resolved,
    safetensors_in,
)
from fp4kit.contract.to_json import FILE as CONTRACT
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
WRITTEN_AT_ROOT = (CONFIG, HF_QUANT_CONFIG, MANIFEST, CONTRACT)  # never copied, because a conversion writes its own
# Files beside the config in which auto-round, GPTQ and AWQ tools declare how a model is quantized; msmodelslim's file
# is DESCRIPTION.
_DECLARATIONS = ("quantization_config.json", "quantize_config.json", "quant_config.json")


@dataclass(frozen=True)
class AuxiliaryFile:
    """Describe a file that a conversion copies.

    Attributes:
        name: the path of the file, relative both to the source directory and to the output directory.
        path: the real file, with links resolved.
        nbytes: the size in bytes.
    """

    name: str
    path: Path
    nbytes: int


@dataclass(frozen=True)
class AuxiliaryFiles:
    """List the files of a model directory, other than the model's tensors, that a conversion copies or skips.

    Attributes:
        copied: the files to copy.
        skipped: (name, reason) per file that is not copied.
    """

    copied: tuple[AuxiliaryFile, ...]
    skipped: tuple[tuple[str, str], ...]


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name relative to ``root``, path) for every file in a directory and its subdirectories."""
    for folder, directories, names in os.walk(root, onerror=_unreadable):
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        hidden = [name for name in directories if name.startswith(".") and name not in links]
        directories[:] = sorted(set(directories) - set(links) - set(hidden))
        for name in sorted([*names, *links, *hidden]):
            path = Path(folder) / name
            yield path.relative_to(root).as_posix(), path


def _unreadable(error: OSError) -> NoReturn:
    """Raise CheckpointError for a file or directory that cannot be read."""
    # os.walk calls this as its ``onerror``, because it would otherwise skip an unreadable directory silently.
    raise CheckpointError(
        f"{shown(str(error.filename))}: cannot be read ({error.strerror}); grant read permission, or remove it"
    )


def _skip_reason(name: str, path: Path, root: Path) -> str | None:
    """Return the reason not to copy a file, for the report; None if it is to be copied."""
    # A directory is never copied.
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
        return "kind of file that is not copied"
    try:
        resolved(path)
    except CheckpointError:
        return "links that form a cycle"
    try:
        real = contained(path, root)
    except CheckpointError:
        return "a link to a file outside the directory"
    return None if real.is_file() else "not a regular file"


_NEXT = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers of multi-token prediction, in config.json


def other_weights(root: Path, names: Collection[str], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (file name, what engines do with it) for each safetensors file beside a model that is not part of it."""
    if not root.is_dir():
        return
    index = index_name(root)
    text = config.get("text_config")
    counts = [part.get(key) for part in (config, text) if isinstance(part, Mapping) for key in _NEXT]
    count = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    predicted = f"{count} layer{'s' * (count != 1)} of multi-token prediction"
    for name in sorted(set(safetensors_in(root)) - set(names)):
        if name.startswith("adapter_"):
            yield name, "is an adapter (PEFT) that is not part of the model; merge it first, if the model needs it"
        elif index is None:
            read = " and ".join(sorted(names))
            how = f"{read} alone is read here and by transformers, but vLLM and SGLang load all safetensors files"
            yield name, f"there is no index, so {how}; remove the file, or write an index that names it"
        else:
            how = f"is not named by {index}, so vLLM and transformers do not load it"
            if count and name == "mtp.safetensors":
                how += f"; SGLang does, for the {predicted} in {CONFIG}"
            elif count:
                how += f"; {CONFIG} declares {predicted}, which may be in it"
            yield name, f"{how}; add its tensors to the index if they belong to the model"


def scan(root: Path, model_files: set[str], keeps_layers: bool = True) -> AuxiliaryFiles:
    """Decide for each file in a model directory that is not part of the model whether a conversion copies it."""
    copied: list[AuxiliaryFile] = []
    skipped: list[tuple[str, str]] = []
    for name, path in _walk(root) if root.is_dir() else ():
        if name in model_files or name in WRITTEN_AT_ROOT:
            continue
        reason = _skip_reason(name, path, root)
        declares = name in _DECLARATIONS or name.startswith(DESCRIPTION)
        if reason is None and declares and not keeps_layers:
            reason = "describes how the source is quantized"
        if reason is None:
            if not os.access(path, os.R_OK):
                _unreadable(PermissionError(errno.EACCES, os.strerror(errno.EACCES), path))
            copied.append(AuxiliaryFile(name, path.resolve(), path.stat().st_size))
        else:
            skipped.append((name, reason))
    return AuxiliaryFiles(tuple(copied), tuple(skipped))
