"""Encode amax states as safetensors bytes, for files and for messages between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fp4kit.arithmetic import ieee
from fp4kit.storage.json_object import parse_object
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, NUMPY_DTYPES, unusable

FACTS = "fp4kit_amax"  # the metadata entry that encode writes


def encode(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file with the arrays as tensors."""
    # All facts are one metadata entry, because the safetensors library writes several entries in random order.
    metadata = {FACTS: json.dumps(facts, sort_keys=True)}
    return save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata)


@ieee("AmaxState")
def decode(data: bytes, label: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (amaxes, facts) from the bytes of a safetensors file."""
    try:
        tensors = sorted((item for item in deserialize(data) if item[0].endswith("amax")), key=lambda item: item[0])
    except SafetensorError as error:
        raise unusable(label, error) from None
    header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")], label)
    # A file that was not written by fp4kit may have no metadata, or metadata without FACTS.
    facts = (header.get("__metadata__") or {}).get(FACTS, "{}")
    return {key: _array(key, info, label) for key, info in tensors}, parse_object(
        facts.encode(), f"{label}: metadata {FACTS}"
    )


def _array(key: str, info: Mapping[str, Any], label: str) -> np.ndarray:
    """Return the amax that a file stores under `key`, as float32 with -0 replaced by +0."""
    if info["dtype"] not in FLOAT_DTYPES:
        raise ValueError(f"{label}: {key!r} is {info['dtype']}; needs F32, F16 or BF16")
    value = np.frombuffer(info["data"], NUMPY_DTYPES[info["dtype"]]).reshape(info["shape"]).astype(np.float32)
    return np.asarray(value + np.float32(0))  # -0 becomes +0
