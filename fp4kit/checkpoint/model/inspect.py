"""Inspect a checkpoint: list its tensors, quantized layers, totals and declared quantization. An item is a tensor,
config key or metadata entry that may concern quantization; fp4kit refuses items that it does not know.

Only headers, JSON files and the tags of ComfyUI's layers are read, never codes, scales or values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.items import REFUSED, Item
from fp4kit.checkpoint.model.model_files import (
    CONFIG,
    HF_QUANT_CONFIG,
    check_kind_of_file,
    existing_file,
    hint_on_path,
    load_config,
    open_model_files,
    resolved,
)
from fp4kit.checkpoint.model.weights import Weight, weights_of
from fp4kit.lazy import lazy_property
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.gguf_file import is_gguf
from fp4kit.storage.json_object import load_object
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry, read_header
from fp4kit.storage.split_gguf import first_parts_of, read_gguf_model


@dataclass(frozen=True)
class Checkpoint:
    """Describe a checkpoint by its files and configs. Everything else is derived from them on first use.

    Attributes:
        path: the model directory or file.
        files: the headers of the files that hold the model's tensors.
        config: the content of config.json; None if there is no such file, or if ``path`` is a file.
        hf_quant_config: the content of hf_quant_config.json; None if there is no such file, or if ``path`` is a file.
    """

    path: Path
    files: tuple[SafetensorsFile, ...]
    config: Mapping[str, Any] | None
    hf_quant_config: Mapping[str, Any] | None

    @lazy_property
    def tensors(self) -> dict[str, tuple[SafetensorsFile, TensorEntry]]:
        """A map from tensor name to (its file, its header entry), in natural order: layer 2 comes before layer 10."""
        pairs = ((entry.name, (file, entry)) for file in self.files for entry in file.entries)
        return dict(sorted(pairs, key=lambda pair: natural_order(pair[0])))

    @lazy_property
    def weights(self) -> dict[str, Weight]:
        """A map from tensor name to weight, for all weights, quantized or not."""
        return weights_of(self.tensors, self.config or {})

    def without(self, names: Collection[str]) -> Checkpoint:
        """Return a copy of the checkpoint without the tensors that have these names; self if ``names`` is empty."""
        if not names:
            return self
        kept = (tuple(entry for entry in file.entries if entry.name not in names) for file in self.files)
        files = tuple(replace(file, entries=entries) for file, entries in zip(self.files, kept, strict=True))
        return replace(self, files=files)

    @property
    def layers(self) -> dict[str, Weight]:
        """A map from module name to weight, for the quantized weights only: linear layers and stacks of experts."""
        return {weight.name: weight for weight in self.weights.values() if weight.container is not None}

    @lazy_property
    def items(self) -> tuple[Item, ...]:
        """The items of the checkpoint, each with the group that says whether fp4kit knows it (see closed_world.py)."""
        return transforms.resolved(self, self.weights, reads=False).items

    @property
    def unrecognised(self) -> tuple[str, ...]:
        """The names of the tensors that fp4kit refuses, such as packed weights in an unknown format; () if none."""
        return tuple(item.name for item in self.items if item.group == REFUSED and item.place == "tensor")

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """A map from the dtype of tensors to (number of tensors, number of bytes), sorted by decreasing bytes."""
        sums: dict[str, tuple[int, int]] = {}
        for _, entry in self.tensors.values():
            count, nbytes = sums.get(entry.dtype, (0, 0))
            sums[entry.dtype] = (count + 1, nbytes + entry.nbytes)
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def inspect_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at ``path``: a model directory, a .safetensors file or a GGUF file."""
    place = Path(path)
    if resolved(place).is_dir():
        files = open_model_files(place)[0]
        config = load_config(place) if os.path.lexists(place / CONFIG) else None
        return Checkpoint(place, files, config, _optional(place, HF_QUANT_CONFIG))
    if not os.path.lexists(place) and not first_parts_of(place):
        raise CheckpointError(
            f"{place}: does not exist; a model directory, a .safetensors or a GGUF file is needed{hint_on_path(place)}"
        )
    try:
        return Checkpoint(place, read_gguf_model(place) if is_gguf(place) else (read_header(place),), None, None)
    except CheckpointError:
        check_kind_of_file(place)
        raise


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key for tensor names that compares numbers in them by value: layers.2 comes before layers.10."""
    parts = re.split("([0-9]+)", name)
    return [
        (len(part.lstrip("0")) if i % 2 else 0, part.lstrip("0") if i % 2 else part) for i, part in enumerate(parts)
    ], name


def _optional(root: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file ``name`` of the directory ``root``, or None if the file does not exist."""
    return load_object(existing_file(root, name), name) if os.path.lexists(root / name) else None


def quantization_summary(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return what config.json and hf_quant_config.json declare about quantization, for ``fp4kit inspect`` to print."""
    declared = (checkpoint.config or {}).get("quantization_config")
    lines: list[tuple[str, str]] = []
    if isinstance(declared, dict):
        for key in ("quant_method", "quant_algo", "kv_cache_scheme", "producer", "fp4kit"):
            if key in declared:
                lines.append((key, _compact(declared[key])))
        lines.append(("ignore", f"{_length(declared.get('ignore'))} patterns"))
    other = (checkpoint.hf_quant_config or {}).get("quantization")
    if isinstance(other, dict):
        lines.append((HF_QUANT_CONFIG, f"{other.get('quant_algo')}, {_length(other.get('exclude_modules'))} patterns"))
        if isinstance(declared, dict) and other.get("quant_algo") != declared.get("quant_algo"):
            lines.append(
                (
                    "disagree",
                    f"config.json says {declared.get('quant_algo')}, {HF_QUANT_CONFIG} {other.get('quant_algo')}",
                )
            )
    return lines


def _length(value: object) -> int:
    """Return the number of elements if a config value is a list, or 0 for anything else, such as None or text."""
    return len(value) if isinstance(value, list) else 0


def _compact(value: object) -> str:
    """Return a config value as text for a summary."""
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
