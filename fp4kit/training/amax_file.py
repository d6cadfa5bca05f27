"""Amax states as safetensors bytes: what files hold, and what processes send each other."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

FACTS = "fp4kit_amax"  # the metadata entry of our own files
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def encode(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Arrays and facts (JSON, in one metadata entry) as a safetensors file; equal input gives equal bytes."""
    metadata = {FACTS: json.dumps(facts, sort_keys=True)}  # the library shuffles entries, so there is one
    return save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata)


def decode(data: bytes, label: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The amax arrays (float32, keys sorted) and the facts that encode put into a file; other tensors are left out.

    Raises ValueError, beginning with label, for what is no safetensors file, a key that stands twice, or another dtype.
    """
    try:
        tensors = sorted((item for item in deserialize(data) if item[0].endswith("amax")), key=lambda item: item[0])
    except SafetensorError as error:
        raise ValueError(f"{label}: not a usable safetensors file: {error}") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_unique(label))
    return {key: _array(key, info, label) for key, info in tensors}, _facts(header.get("__metadata__") or {}, label)


def _unique(label: str) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{label}: {next(key for key in keys if keys.count(key) > 1)!r} stands twice in the header")
        return found

    return hook


def _array(key: str, info: Mapping[str, Any], label: str) -> np.ndarray:
    if info["dtype"] not in _DTYPES:
        raise ValueError(f"{label}: {key!r} is {info['dtype']}; needs F32, F16 or BF16")
    value = np.frombuffer(info["data"], _DTYPES[info["dtype"]]).reshape(info["shape"]).astype(np.float32)
    return np.asarray(value + np.float32(0))  # -0 becomes +0


def _facts(metadata: Mapping[str, str], label: str) -> dict[str, Any]:
    """Those of our own files; a producer's metadata may be anything."""
    try:
        facts = json.loads(metadata.get(FACTS, "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: its metadata {FACTS} is damaged: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{label}: its metadata {FACTS} is {facts!r}; needs an object")
    return facts


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a temporary one beside it, then a rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
