"""Define the adapter of comfy-kitchen: its eager back end, on a CPU. An adapter holds the calls to a producer (a
library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as {"codes": codes}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import SATURATING_CASTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.exceptions import NAN_VALUE, ZERO_OF_ZEROS
from fp4kit.layouts import swizzle_scales, unswizzle_scales

LAYOUT = "swizzled_128x4"


def _eager() -> Any:
    """Import and return the module of comfy-kitchen that holds its eager back end."""
    from comfy_kitchen.backends.eager import quantization

    return quantization


def _linear(scales: Any, rows: int, blocks: int) -> np.ndarray:
    """Return comfy-kitchen's swizzled block scales in the linear layout, without padding: uint8 (rows, blocks)."""
    import torch

    return np.asarray(unswizzle_scales(to_numpy(scales.view(torch.uint8)), LAYOUT, (rows, blocks)))


def _nvfp4(x: np.ndarray, is_given: bool) -> Parts:
    """Quantize and dequantize x to NVFP4 as TensorCoreNVFP4Layout does."""
    import torch

    t = to_torch(x)
    amax = torch.amax(t.abs())
    scale = ((amax.float() if is_given else amax) / 2688.0).to(torch.float32)
    codes, scales = _eager().quantize_nvfp4(t, scale)
    values = {d: _eager().dequantize_nvfp4(codes, scale, scales, d) for d in (torch.float32, torch.bfloat16)}
    packed = to_numpy(codes)
    return {
        "codes": fp4kit.unpack(packed << 4 | packed >> 4),
        "block_scale": _linear(scales, len(x), x.shape[1] // 16),
        "tensor_scale": to_numpy(scale),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _mxfp8(x: np.ndarray) -> Parts:
    """Quantize x to MXFP8 with comfy-kitchen, and dequantize the result."""
    import torch

    codes, scales = _eager().quantize_mxfp8(to_torch(x))
    values = {d: _eager().dequantize_mxfp8(codes, scales, d) for d in (torch.float32, torch.bfloat16)}
    return {
        "codes": to_numpy(codes.view(torch.uint8)),
        "block_scale": _linear(scales, len(x), x.shape[1] // 32),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _fp8(x: np.ndarray, name: str) -> Parts:
    """Quantize and dequantize x to FP8 with the scale that ComfyUI computes: amax / max, in float32."""
    import torch

    t, dtype = to_torch(x), getattr(torch, name)
    scale = torch.amax(t.abs()).to(torch.float32) / torch.finfo(dtype).max
    codes = _eager().quantize_per_tensor_fp8(t, scale, dtype)
    values = {d: _eager().dequantize_per_tensor_fp8(codes, scale, d) for d in (torch.float32, torch.bfloat16)}
    return {
        "codes": to_numpy(codes.view(torch.uint8)),
        "tensor_scale": to_numpy(scale),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _swizzled(q: fp4kit.Quantized) -> Any:
    """Return the block scales of q, which are in the linear layout, as the swizzled torch tensor for comfy-kitchen."""
    rows = -(-q.block_scale.shape[0] // 128) * 128
    return to_torch(np.asarray(swizzle_scales(q.block_scale, LAYOUT)).reshape(rows, -1))


def _decode_nvfp4(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that comfy-kitchen's dequantize_nvfp4 decodes from q, in q's shape and dtype."""
    import torch

    codes, scale = to_torch(q.packed << 4 | q.packed >> 4), to_torch(np.asarray(q.tensor_scale))
    scales = _swizzled(q).view(torch.float8_e4m3fn)
    return to_numpy(_eager().dequantize_nvfp4(codes, scale, scales, getattr(torch, str(q.dtype))))


def _decode_mxfp8(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that comfy-kitchen's dequantize_mxfp8 decodes from q, in q's shape and dtype."""
    import torch

    codes, scales = to_torch(q.packed).view(torch.float8_e4m3fn), _swizzled(q).view(torch.float8_e8m0fnu)
    return to_numpy(_eager().dequantize_mxfp8(codes, scales, getattr(torch, str(q.dtype))))


ADAPTER = Adapter(
    name="comfy-kitchen",
    module="comfy_kitchen",
    dependencies=("torch",),
    calls={
        **{
            id: ProducerCall(
                partial(_nvfp4, is_given=is_given),
                exempt=(NAN_VALUE,),
                dependency_versions=SATURATING_CASTS,
                decode=_decode_nvfp4,
            )
            for id, is_given in (("nvfp4-comfy-kitchen", False), ("nvfp4-comfy-kitchen-static", True))
        },
        "mxfp8-comfy-kitchen": ProducerCall(
            _mxfp8, columns=32, exempt=(ZERO_OF_ZEROS,), dependency_versions=SATURATING_CASTS, decode=_decode_mxfp8
        ),
        **{
            id: ProducerCall(partial(_fp8, name=name))
            for id, name in (("fp8-comfy-kitchen", "float8_e4m3fn"), ("fp8-comfy-kitchen-e5m2", "float8_e5m2"))
        },
    },
    left_out=dict.fromkeys(
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen-stochastic-cuda"),
        "ComfyUI, whose stochastic rounding this is, is not a package; recorded outputs are compared by --check",
    ),
)
