"""Define the adapter of MLX: mx.quantize and mx.dequantize of its CPU back end. An adapter holds the calls to a
producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall


def _array(x: np.ndarray) -> Any:
    """Return an MLX array with the elements and the dtype of x, bfloat16 included."""
    import mlx.core as mx

    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x)


def _numpy(a: Any) -> np.ndarray:
    """Return a NumPy array with the elements and the dtype of an MLX array, bfloat16 included."""
    import mlx.core as mx

    if a.dtype == mx.bfloat16:
        return np.array(a.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(a)


def _quantize(x: np.ndarray, mode: str, with_global: bool = False) -> Parts:
    """Quantize and dequantize x in a mode of MLX, on the CPU."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        amax = mx.array(np.abs(x.astype(np.float32)).max()) if with_global else None
        words, scales, *_ = mx.quantize(_array(x), mode=mode, global_scale=amax)
        parts = {"block_scale": _numpy(scales)}
        for name in ("float32",) if with_global else ("float32", "float16", "bfloat16"):
            values = mx.dequantize(words, scales, mode=mode, global_scale=amax, dtype=getattr(mx, name))
            parts["values" if name == "float32" else f"values_{name}"] = _numpy(values)
        codes = _numpy(words).view(np.uint8)
    return {"codes": codes if mode == "mxfp8" else fp4kit.unpack(codes), **parts}


def _decode(q: fp4kit.Quantized, mode: str) -> np.ndarray:
    """Return the values that mx.dequantize decodes from q, in q's dtype."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        words, scales = mx.array(q.packed.view(np.uint32)), mx.array(q.block_scale)
        return _numpy(mx.dequantize(words, scales, mode=mode, dtype=getattr(mx, str(q.dtype))))


def _call(mode: str, first: str, last: str = "", **options: Any) -> ProducerCall:
    """Return the ProducerCall for a mode and for MLX versions from ``first`` to ``last``."""
    decode = None if options else partial(_decode, mode=mode)
    return ProducerCall(partial(_quantize, mode=mode, **options), columns=32, first=first, last=last, decode=decode)


ADAPTER = Adapter(
    name="mlx",
    module="mlx",
    dependencies=("mlx-cpu",),
    calls={
        "nvfp4-mlx-cpu": _call("nvfp4", "0.32.3"),
        "nvfp4-mlx-cpu-global": _call("nvfp4", "0.32.3", with_global=True),
        "nvfp4-mlx-cpu-0322": _call("nvfp4", "0.31.2", "0.32.2"),
        "nvfp4-mlx-cpu-0322-global": _call("nvfp4", "0.31.2", "0.32.2", with_global=True),
        "mxfp4-mlx-cpu": _call("mxfp4", "0.32.2"),
        "mxfp4-mlx-cpu-0321": _call("mxfp4", "", "0.32.1"),
        "mxfp8-mlx-cpu": _call("mxfp8", "0.32.3"),
        "mxfp8-mlx-cpu-0322": _call("mxfp8", "0.32.2", "0.32.2"),
        "mxfp8-mlx-cpu-0321": _call("mxfp8", "", "0.32.1"),
    },
    left_out={
        "nvfp4-mlx-metal": "Metal kernels need an Apple GPU",
        "nvfp4-mlx-metal-global": "Metal kernels need an Apple GPU",
        "mxfp4-mlx-metal-0321": "Metal kernels need an Apple GPU",
        "mxfp8-mlx-metal-0321": "Metal kernels need an Apple GPU",
    },
)
