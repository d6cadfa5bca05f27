"""Find the files of one version of a model, which is a directory, a safetensors file or a GGUF model. A patch between
two versions names files so that both have equal names, whatever the user named them.

These names are:

- in a directory, by their path in it;
- a single file, model.safetensors or model.gguf;
- the files of a split GGUF model, by the end of their name, 00001-of-00003.gguf.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from fp4kit.checkpoint.model.model_files import MANIFEST, existing_file, names_in
from fp4kit.checkpoint.plan.output_files import check_target, final_path
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.gguf_file import is_gguf, name_of_part, read_gguf_model

_SINGLE = {".safetensors": "model.safetensors", ".gguf": "model.gguf"}
_NAME_OF_FILE = re.compile(r"model\.(safetensors|gguf)|\d{5}-of-\d{5}\.gguf")


def files_of(root: Path) -> dict[str, Path]:
    """Return a dict from the name in a patch to the path, for all files of a version."""
    if root.is_dir():
        manifest = [MANIFEST] if (root / MANIFEST).is_file() else []
        return {name: root / name for name in [*names_in(root), *manifest]}
    if is_gguf(root):
        parts = read_gguf_model(root)
        if len(parts) > 1:
            return {name_of_part(i, len(parts)): part.path for i, part in enumerate(parts)}
        return {_SINGLE[".gguf"]: root}
    if not root.is_file():
        raise CheckpointError(f"{root}: does not exist; a model directory, a .safetensors or a GGUF file is needed")
    return {_SINGLE[".safetensors"]: root}


def path_of(root: Path, name: str) -> Path:
    """Return the path of the file that a patch names ``name``, in a version of the model."""
    if root.is_dir():
        return existing_file(root, name)
    found = files_of(root)
    if name not in found:
        raise CheckpointError(
            f"{root}: has no file {shown(name)}, only {', '.join(found)}; name the version that the patch was made from"
        )
    return found[name]


def are_of_files(names: Collection[str]) -> bool:
    """Return whether all names in a patch are names of the files of a model that is not a directory."""
    return bool(names) and all(_NAME_OF_FILE.fullmatch(name) for name in names)


def paths_to_write(names: Collection[str], target: Path) -> dict[str, Path]:
    """Return {name in a patch: final path} for a model of single files that is written as ``target``."""
    suffix = Path(next(iter(names))).suffix
    if target.suffix.lower() != suffix:
        raise CheckpointError(f"{target}: the patch leads to a {suffix} file; name a file that ends in {suffix}")
    if set(names) <= set(_SINGLE.values()):
        return dict.fromkeys(names, target)
    check_target(target)
    return {name: final_path(target, name) for name in sorted(names)}
