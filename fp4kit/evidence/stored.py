"""What a row compares beside codes and scales: the bytes of the producer's files, and the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp4kit.layouts import pack_gguf, pack_mlx

RAW: dict[str, Callable[[Any], np.ndarray]] = {  # Row.raw: from a Quantized
    "gguf_mxfp4": lambda q: pack_gguf(q.packed, q.block_scale, "mxfp4"),
    "gguf_nvfp4": lambda q: pack_gguf(q.packed, q.block_scale, "nvfp4"),
    "mlx": lambda q: pack_mlx(q.packed),
}


def stored_arrays(case: Any, skip: np.ndarray) -> Iterator[tuple[str, Any, Any, Any]]:
    """Of a Case: key, ours, recorded, and the mask of what is not compared."""
    raw, values = case.part("raw"), case.part("dequant")
    if case.row.raw and raw is not None:
        yield case.key("raw"), RAW[case.row.raw](case.q), raw, np.False_
    if case.row.decoded and values is not None:
        yield case.key("dequant"), case.ops.dequantize(case.q, values.dtype), values, skip
