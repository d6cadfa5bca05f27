"""What is in a checkpoint: tensors, quantized layers, totals, declared quantization. Reads headers and JSON only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, existing_file, open_model_files, resolved
from fp4kit.checkpoint.model.weights import Weight, looks_quantized, part_names, weights_of
from fp4kit.lazy import lazy_property
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.gguf_file import read_any_header
from fp4kit.storage.json_object import load_object
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint and the configs beside them (None: there are none)."""

    path: Path
    files: tuple[SafetensorsFile, ...]
    config: Mapping[str, Any] | None
    hf_quant_config: Mapping[str, Any] | None

    @lazy_property
    def tensors(self) -> dict[str, tuple[SafetensorsFile, TensorEntry]]:
        """Every tensor with its file, by name: layer 2 before layer 10."""
        pairs = ((entry.name, (file, entry)) for file in self.files for entry in file.entries)
        return dict(sorted(pairs, key=lambda pair: natural_order(pair[0])))

    @lazy_property
    def weights(self) -> dict[str, Weight]:
        """Tensor of values or codes -> weight: quantized ones of any container that is known, and plain ones."""
        return weights_of(self.tensors, self.config or {})

    @property
    def layers(self) -> dict[str, Weight]:
        """Name -> quantized layer, or stack of them."""
        return {weight.name: weight for weight in self.weights.values() if weight.container is not None}

    @lazy_property
    def unrecognised(self) -> tuple[str, ...]:
        """Tensors that look like a part of a quantized layer, and are of no container that is known."""
        known = part_names(self.layers.values())
        return tuple(name for name, (_, entry) in self.tensors.items() if name not in known and looks_quantized(entry))

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """dtype -> (tensors, bytes), sorted by falling bytes."""
        sums: dict[str, tuple[int, int]] = {}
        for _, entry in self.tensors.values():
            count, nbytes = sums.get(entry.dtype, (0, 0))
            sums[entry.dtype] = (count + 1, nbytes + entry.nbytes)
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at ``path``, a directory, a .safetensors or a GGUF file.

    Raises CheckpointError if it is malformed, or if a file of the directory is a link that leaves it.
    """
    place = Path(path)
    if resolved(place).is_dir():
        files = open_model_files(place)[0]
        return Checkpoint(place, files, _optional(place, CONFIG), _optional(place, HF_QUANT_CONFIG))
    if not os.path.lexists(place):
        raise CheckpointError(f"{place}: does not exist; a model directory, a .safetensors or a GGUF file is needed")
    return Checkpoint(place, (read_any_header(place),), None, None)


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts numbers in names as numbers: ``layers.2`` before ``layers.10``."""
    parts = re.split("([0-9]+)", name)
    return [
        (len(part.lstrip("0")) if i % 2 else 0, part.lstrip("0") if i % 2 else part) for i, part in enumerate(parts)
    ], name


def _optional(root: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file that may be absent."""
    return load_object(existing_file(root, name), name) if os.path.lexists(root / name) else None


def quantization_summary(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return (name, value) lines on what the configs declare, and a line where they disagree; empty without any."""
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
    return len(value) if isinstance(value, list) else 0


def _compact(value: object) -> str:
    """Return a config value on one line."""
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
