"""Define the adapter of NVIDIA Model-Optimizer: its quantized tensor classes, on a CPU. An adapter holds the calls to a
producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch


def _prepare() -> None:
    """Import the quantized tensor classes of Model-Optimizer. Raise ImportError if they are missing."""
    import modelopt.torch.quantization.qtensor  # noqa: F401


def _values(t: Any, **scales: Any) -> dict[str, np.ndarray]:
    """Decode a quantized tensor of Model-Optimizer to float32, float16 and bfloat16."""
    import torch

    names = {"values": torch.float32, "values_float16": torch.float16, "values_bfloat16": torch.bfloat16}
    return {name: to_numpy(t.dequantize(dtype, **scales)) for name, dtype in names.items()}


def _nvfp4(x: np.ndarray) -> Parts:
    """Quantize x with NVFP4QTensor."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    t, scale, double_scale = NVFP4QTensor.quantize(to_torch(x), 16)
    return {
        "codes": fp4kit.unpack(to_numpy(t._quantized_data)),
        "block_scale": to_numpy(scale),
        "tensor_scale": to_numpy(double_scale),
        **_values(t, scale=scale, double_scale=double_scale, block_sizes={-1: 16}),
    }


def _mxfp4(x: np.ndarray) -> Parts:
    """Quantize x with MXFP4QTensor."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    t, scale = MXFP4QTensor.quantize(to_torch(x), 32)
    return {
        "codes": fp4kit.unpack(to_numpy(t._quantized_data)),
        "block_scale": to_numpy(scale).reshape(*x.shape[:-1], -1),
        **_values(t, scale=scale, block_sizes={-1: 32}),
    }


def _mxfp8(x: np.ndarray) -> Parts:
    """Quantize x with MXFP8QTensor."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    t, scale = MXFP8QTensor.quantize(to_torch(x))
    return {"codes": to_numpy(t._quantized_data), "block_scale": to_numpy(scale), **_values(t, scale=scale)}


def _decode(q: fp4kit.Quantized, kind: str) -> np.ndarray:
    """Return the values that Model-Optimizer decodes from q, in q's dtype and shape."""
    import torch
    from modelopt.torch.quantization import qtensor

    dtype = getattr(torch, str(q.dtype))
    codes, scales = to_torch(q.packed), to_torch(q.block_scale)
    given: dict[str, Any] = {"scale": scales, "block_sizes": {-1: q.recipe.block_size}}
    if kind == "NVFP4QTensor":
        given = {
            **given,
            "scale": scales.view(torch.float8_e4m3fn),
            "double_scale": to_torch(np.asarray(q.tensor_scale)),
        }
    if kind == "MXFP8QTensor":
        codes = codes.view(torch.float8_e4m3fn)
    t = getattr(qtensor, kind)(torch.Size(q.shape), dtype, codes)
    return to_numpy(t.dequantize(dtype, **given)).reshape(q.shape)


_KERNEL = "a kernel of Model-Optimizer, which needs a GPU"
_DIVIDED = (
    *("fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt", "int8-modelopt-channel", "int8-modelopt-narrow"),
    *("int8-modelopt-channel-narrow", "int4-modelopt-channel", "int4-modelopt"),
)
ADAPTER = Adapter(
    name="nvidia-modelopt",
    module="modelopt",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "nvfp4-modelopt": ProducerCall(_nvfp4, decode=partial(_decode, kind="NVFP4QTensor")),
        "mxfp4-modelopt": ProducerCall(_mxfp4, decode=partial(_decode, kind="MXFP4QTensor")),
        "mxfp8-modelopt": ProducerCall(_mxfp8, decode=partial(_decode, kind="MXFP8QTensor")),
    },
    left_out={
        **dict.fromkeys(
            ("nvfp4-modelopt-static", "nvfp4-modelopt-static-4over6"), "needs a calibrated quantizer of a model"
        ),
        "nvfp4-modelopt-mse": f"its sweep is {_KERNEL}",
        **dict.fromkeys(("nvfp4-modelopt-fake", "nvfp4-modelopt-static-fake"), f"is {_KERNEL}"),
        **dict.fromkeys(("nvfp4-modelopt-fake-cuda", "mxfp4-modelopt-fake", "mxfp8-modelopt-fake"), f"is {_KERNEL}"),
        **dict.fromkeys(
            _DIVIDED, "is stated for a GPU: PyTorch on a CPU divides a number by a tensor in two roundings"
        ),
    },
)
