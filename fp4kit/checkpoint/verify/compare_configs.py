"""Compare what two checkpoints declare: config.json, hf_quant_config.json and safetensors metadata, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG
from fp4kit.storage.errors import CheckpointError, listed
from fp4kit.storage.gguf_file import GgufFile
from fp4kit.storage.split_gguf import SPLIT_KEYS

METADATA = "__metadata__"


@dataclass(frozen=True)
class ConfigDifference:
    """One entry of a config or of metadata that differs between checkpoints a and b.

    place: the name of the config file. For metadata, it is ``__metadata__``, followed by the files that differ. The
        files are left out if the names of the files differ between a and b.
    key: the key of the entry; ``outer.inner`` in nested objects; "" if the whole file is missing.
    kind: "missing" (only in a), "extra" (only in b) or "value".
    a, b: the values of the entry; None where it does not exist.
    """

    place: str
    key: str
    kind: Literal["missing", "extra", "value"]
    a: Any = None
    b: Any = None

    @property
    def detail(self) -> str:
        """A short text that says what differs."""
        if self.kind != "value":
            return _brief(self.a if self.kind == "missing" else self.b)
        if isinstance(self.a, list) and isinstance(self.b, list):
            return _entries(self.a, self.b)
        return f"{_brief(self.a)} and {_brief(self.b)}"


def compare_configs(left: Checkpoint, right: Checkpoint) -> tuple[ConfigDifference, ...]:
    """Return the differences between the configs and the metadata of two checkpoints, a (left) and b (right)."""
    try:
        return tuple(_differences(left, right))
    except RecursionError:
        raise CheckpointError(
            f"{left.path}, {right.path}: the configs are nested too deeply to compare; compare them with another tool"
        ) from None


def _differences(left: Checkpoint, right: Checkpoint) -> Iterator[ConfigDifference]:
    """Yield the differences of config.json, of hf_quant_config.json and of the metadata, in this order."""
    for place, a, b in (
        (CONFIG, left.config, right.config),
        (HF_QUANT_CONFIG, left.hf_quant_config, right.hf_quant_config),
    ):
        if a is not None and b is not None:
            yield from _of_objects(place, "", a, b)
        elif a is not None or b is not None:
            yield ConfigDifference(place, "", "extra" if a is None else "missing", a, b)
    yield from _of_metadata(left, right)


def _of_metadata(left: Checkpoint, right: Checkpoint) -> Iterator[ConfigDifference]:
    """Yield the differences of the metadata in file headers."""
    one, other = ({file.name: file.metadata for file in checkpoint.files} for checkpoint in (left, right))
    if one.keys() != other.keys():
        yield from _of_objects(METADATA, "", _merged(left), _merged(right))
        return
    places: dict[ConfigDifference, list[str]] = {}
    for name in sorted(one):
        for difference in _of_objects(METADATA, "", one[name], other[name]):
            places.setdefault(difference, []).append(name)
    for difference, names in places.items():
        yield replace(difference, place=f"{METADATA} of {listed(names, limit=1)}")


def _merged(checkpoint: Checkpoint) -> dict[str, Any]:
    """Merge the metadata of all files of a checkpoint: key -> the value, or a sorted list of values if files
    disagree.
    """
    found: dict[str, set[str]] = {}
    for file in checkpoint.files:
        is_gguf = isinstance(file, GgufFile)
        for key, value in file.metadata.items():
            if not (is_gguf and key in SPLIT_KEYS):
                found.setdefault(key, set()).add(value)
    return {key: values.pop() if len(values) == 1 else sorted(values) for key, values in found.items()}


def _of_objects(place: str, prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ConfigDifference]:
    """Yield the differences of two JSON objects, in the order of their keys."""
    for name in sorted({*a, *b}):
        key = f"{prefix}{name}"
        if name not in b:
            yield ConfigDifference(place, key, "missing", a=a[name])
        elif name not in a:
            yield ConfigDifference(place, key, "extra", b=b[name])
        elif isinstance(a[name], dict) and isinstance(b[name], dict):
            yield from _of_objects(place, f"{key}.", a[name], b[name])
        elif _text(a[name]) != _text(b[name]):
            yield ConfigDifference(place, key, "value", a[name], b[name])


def _text(value: Any) -> str:
    """Return a value as JSON text with sorted keys. Values with equal texts are equal in type and content."""
    return json.dumps(value, sort_keys=True)


def _brief(value: Any) -> str:
    """Return a value as JSON text, or "N entries" for an object or list whose JSON text is over 40 characters long."""
    # Strings and numbers are never shortened.
    if isinstance(value, (dict, list)) and len(_text(value)) > 40:
        return f"{len(value)} entries"
    return _text(value)


def _entries(a: list[Any], b: list[Any]) -> str:
    """Describe the difference of two lists as text: how many entries only one of them has, with an example."""
    one, other = ([_text(value) for value in values] for values in (a, b))
    only_a, only_b = sorted(set(one) - set(other)), sorted(set(other) - set(one))
    if not only_a and not only_b:
        return f"{len(a)} and {len(b)} entries, which differ in number or order"
    parts = ((only_a, "only in a"), (only_b, "only in b"))
    return "; ".join(f"{len(names)} entries {where}, such as {names[0]}" for names, where in parts if names)
