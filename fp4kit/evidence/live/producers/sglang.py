"""Define the adapter of SGLang: its MXFP4 utilities, whose files are loaded without the package. An adapter holds the
calls to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such
as {"codes": codes}.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.standins import cached, load, packages

_QUANTIZATION = "srt/layers/quantization"


@cached
def _mxfp4_tensor() -> Any:
    """Return SGLang's module mxfp4_tensor, which the first call loads. Raise ImportError if it is missing."""
    return load("sglang", f"{_QUANTIZATION}/mxfp4_tensor.py")


@cached
def _kvfp4_tensor() -> Any:
    """Return SGLang's module kvfp4_tensor, which the first call loads."""
    return load(
        "sglang", f"{_QUANTIZATION}/kvfp4_tensor.py", packages("sglang", "sglang.srt", "sglang.srt.runtime_context")
    )


@cached
def _stored() -> Any:
    """Return a subclass of SGLang's MXFP4QuantizeUtil with a constructor (shape, dtype, data), which keeps data."""

    def keep(self: Any, shape: Any, dtype: Any, data: Any) -> None:
        self.data = data

    # SGLang's fp8_utils.py defines an equivalent subclass.
    return type("Stored", (_mxfp4_tensor().MXFP4QuantizeUtil,), {"__init__": keep})


def _mxfp4(x: np.ndarray) -> Parts:
    """Quantize and dequantize x to MXFP4 with SGLang's class MXFP4QuantizeUtil."""
    import torch

    t, scale = _stored().quantize(to_torch(x), 32)
    values = _stored().dequantize(t.data, torch.float32, scale, [32])
    return {
        "codes": fp4kit.unpack(to_numpy(t.data)),
        "block_scale": to_numpy(scale).reshape(len(x), -1),
        "values": to_numpy(values),
    }


def _kv(x: np.ndarray) -> Parts:
    """Quantize x to blocks of 16 with SGLang's utility for key-value caches, without torch.compile."""
    quantize = inspect.unwrap(_kvfp4_tensor().FP4MXBlock16KVQuantizeUtil.batched_quantize)
    codes, scale = quantize(to_torch(x)[None])
    return {"codes": fp4kit.unpack(to_numpy(codes[0])), "block_scale": to_numpy(scale).reshape(len(x), -1)}


def _prepare() -> None:
    """Load both modules of SGLang that this adapter's calls use. Raise ImportError if one of them cannot be loaded."""
    _mxfp4_tensor()
    _kvfp4_tensor()


ADAPTER = Adapter(
    name="sglang",
    module="sglang",
    dependencies=("torch",),
    prepare=_prepare,
    calls={"mxfp4-sglang-util": ProducerCall(_mxfp4), "mxfp4-sglang-kv": ProducerCall(_kv)},
    left_out={"nvfp4-sglang-online": "SGLang quantizes weights online on GPUs of compute capability 10 only"},
)
