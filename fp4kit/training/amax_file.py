"""Amax states as safetensors bytes: what files hold, and what processes send each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fp4kit.storage.json_object import parse_object
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, NUMPY_DTYPES, unusable

FACTS = "fp4kit_amax"  # the metadata entry of our own files


def encode(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Arrays and facts (JSON, in one metadata entry) as a safetensors file; equal input gives equal bytes."""
    metadata = {FACTS: json.dumps(facts, sort_keys=True)}  # the library shuffles entries, so there is one
    return save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata)


def decode(data: bytes, label: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The amax arrays (float32, keys sorted) and the facts that encode put into a file; other tensors are left out.

    Raises ValueError, beginning with label, for what is no safetensors file, a key that occurs twice, or another dtype.
    """
    try:
        tensors = sorted((item for item in deserialize(data) if item[0].endswith("amax")), key=lambda item: item[0])
    except SafetensorError as error:
        raise unusable(label, error) from None
    header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")], label)
    facts = (header.get("__metadata__") or {}).get(FACTS, "{}")  # a producer's metadata may be anything
    return {key: _array(key, info, label) for key, info in tensors}, parse_object(
        facts.encode(), f"{label}: metadata {FACTS}"
    )


def _array(key: str, info: Mapping[str, Any], label: str) -> np.ndarray:
    if info["dtype"] not in FLOAT_DTYPES:
        raise ValueError(f"{label}: {key!r} is {info['dtype']}; needs F32, F16 or BF16")
    value = np.frombuffer(info["data"], NUMPY_DTYPES[info["dtype"]]).reshape(info["shape"]).astype(np.float32)
    return np.asarray(value + np.float32(0))  # -0 becomes +0
