"""Change tensors of a written checkpoint in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np


def change(root: Path, end: str, new: Callable[[np.ndarray], np.ndarray], dtype: type = np.float32) -> None:
    """Replace in place the tensors of a checkpoint whose names end with ``end``. All other bytes are unchanged.

    new: a function that returns the new values of a tensor, given its old values as a flat array of ``dtype``.
    """
    for path in root.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8 : 8 + length]).items():
            if name.endswith(end):
                a, b = (8 + length + offset for offset in info["data_offsets"])
                data[a:b] = new(np.frombuffer(bytes(data[a:b]), dtype)).astype(dtype).tobytes()
        path.write_bytes(data)
