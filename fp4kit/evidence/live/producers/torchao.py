"""Define the adapter of torchao: MXTensor.to_mx and NVFP4Tensor.to_nvfp4, on a CPU. An adapter holds the calls to a
producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.exceptions import NAN_SCALE


def _mx(x: np.ndarray, element: str, mode: str) -> Parts:
    """Quantize and dequantize x to MXFP4, MXFP6 or MXFP8 with torchao's class MXTensor."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    dtype = getattr(torch, element, element)  # FP6 formats are strings
    t = MXTensor.to_mx(to_torch(x), dtype, 32, ScaleCalculationMode(mode))
    codes = to_numpy(t.qdata.view(torch.uint8))
    return {
        "codes": fp4kit.unpack(codes) if element == "float4_e2m1fn_x2" else codes,
        "block_scale": to_numpy(t.scale.view(torch.uint8)),
        "values": to_numpy(t.dequantize(torch.float32)),
        "values_bfloat16": to_numpy(t.dequantize(torch.bfloat16)),
    }


def _nvfp4(x: np.ndarray, single: bool) -> Parts:
    """Quantize and dequantize x to NVFP4 with torchao's class NVFP4Tensor."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    t = to_torch(x)
    scale = None if single else per_tensor_amax_to_scale(t.abs().max())
    q = NVFP4Tensor.to_nvfp4(t, 16, scale)
    parts = {
        "codes": fp4kit.unpack(to_numpy(q.qdata.view(torch.uint8))),
        "block_scale": to_numpy(q.scale.view(torch.uint8)),
        "values": to_numpy(q.dequantize(torch.float32)),
        "values_bfloat16": to_numpy(q.dequantize(torch.bfloat16)),
    }
    return parts if scale is None else {**parts, "tensor_scale": to_numpy(scale)}


def _decode_mx(q: fp4kit.Quantized, element: str) -> np.ndarray:
    """Return the values that torchao's function to_dtype decodes from q, a Quantized in an MX format, in q's dtype."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    kind = getattr(torch, element, element)
    codes, scales = to_torch(q.packed), to_torch(q.block_scale).view(torch.float8_e8m0fnu)
    codes = codes.view(kind) if element.startswith("float8") else codes
    return to_numpy(to_dtype(codes, scales, kind, 32, getattr(torch, str(q.dtype))))


def _decode_nvfp4(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that torchao's class NVFP4Tensor decodes from q, in q's dtype. q may lack a tensor scale."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    dtype = getattr(torch, str(q.dtype))
    scale = None if q.tensor_scale is None else to_torch(np.asarray(q.tensor_scale))
    scales = to_torch(q.block_scale).view(torch.float8_e4m3fn)
    return to_numpy(NVFP4Tensor(to_torch(q.packed), scales, 16, dtype, scale).dequantize(dtype))


def _calls() -> dict[str, ProducerCall]:
    """Return {recipe id: ProducerCall} for all recipes of torchao."""
    recipe_ids = fp4kit.recipes()
    nvfp4: dict[str, tuple[Any, Any]] = {
        id: (partial(_nvfp4, single=single), _decode_nvfp4)
        for id, single in (("nvfp4-torchao", False), ("nvfp4-torchao-single", True))
    }
    mx: dict[str, tuple[Any, Any]] = {
        id.format(mode): (partial(_mx, element=element, mode=mode), partial(_decode_mx, element=element))
        for id, element in _ELEMENTS.items()
        for mode in ("floor", "rceil", "ceil", "even")
    }
    calls = {}
    dtypes = ("float32", "bfloat16")
    for id, (function, decode) in {**nvfp4, **mx}.items():
        call = ProducerCall(function, dtypes, exempt=(NAN_SCALE,), decode=decode, decodes=dtypes)
        older = f"{id}-018"
        if older in recipe_ids:
            calls[older] = replace(call, last="0.18.99")
        newer = fp4kit.recipe(id).id if id in _ALIASES or id in recipe_ids else ""
        if newer:
            calls[newer] = replace(call, first="0.19" if older in recipe_ids else "")
    return calls


_ALIASES = ("mxfp4-torchao-floor",)
_ELEMENTS = {
    "mxfp4-torchao-{}": "float4_e2m1fn_x2",
    "mxfp6-torchao-{}-e2m3": "fp6_e2m3",
    "mxfp6-torchao-{}-e3m2": "fp6_e3m2",
    "mxfp8-torchao-{}": "float8_e4m3fn",
    "mxfp8-torchao-{}-e5m2": "float8_e5m2",
}

ADAPTER = Adapter(name="torchao", module="torchao", dependencies=("torch",), calls=_calls())
