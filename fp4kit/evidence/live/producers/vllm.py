"""Define the adapter of vLLM: its PyTorch code that emulates NVFP4 and quantizes to MXFP8. An adapter holds the calls
to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.

The files are loaded without importing the package.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import codes_of, to_numpy, to_torch
from fp4kit.evidence.live.standins import cached, load, packages, triton

_UTILS = "model_executor/layers/quantization/utils"
_NAMES = ("vllm", "vllm.utils", "vllm.utils.torch_utils")


@cached
def _emulation() -> Any:
    """Return vLLM's module nvfp4_emulation_utils, which the first call loads."""
    platform = ModuleType("vllm.platforms")
    platform.current_platform = _Cpu()  # type: ignore[attr-defined]
    tools = ModuleType("vllm.triton_utils")
    tools.triton, tools.tl = triton()["triton"], triton()["triton.language"]  # type: ignore[attr-defined]
    needed = {
        "vllm.platforms": platform,
        "vllm.triton_utils": tools,
        "vllm.scalar_type": load("vllm", "scalar_type.py"),
    }
    return load("vllm", f"{_UTILS}/nvfp4_emulation_utils.py", {**packages(*_NAMES), **needed})


class _Cpu:
    """A stand-in for vLLM's platform object, for machines without a GPU."""

    def is_cuda_alike(self) -> bool:
        return False


@cached
def _mxfp8_utils() -> Any:
    """Load and return vLLM's module mxfp8_utils. Stand-ins replace the modules of vLLM that it imports."""
    return load("vllm", f"{_UTILS}/mxfp8_utils.py", packages(*_NAMES))


def _nvfp4(x: np.ndarray) -> Parts:
    """Quantize and fake-quantize x to NVFP4 with vLLM's emulation, which runs in PyTorch on a CPU."""
    import torch

    t = to_torch(x)
    amax = torch.clamp(t.abs().max().float(), min=1e-8)
    global_scale = 2688.0 / amax
    values, scales = _emulation().ref_nvfp4_quant(t, global_scale, 16)
    decoded = _emulation().ref_nvfp4_quant_dequant(t, global_scale, 16)
    return {
        "codes": codes_of(to_numpy(values), "e2m1"),
        "block_scale": to_numpy(scales.to(torch.float8_e4m3fn)),
        "tensor_scale": to_numpy(1 / global_scale),
        "fake": to_numpy(decoded),
    }


def _mxfp8(x: np.ndarray) -> Parts:
    """Quantize and dequantize x in MXFP8 with vLLM's PyTorch code."""
    codes, scales = _mxfp8_utils()._mxfp8_e4m3_quantize_torch(to_torch(x))
    decoded = _mxfp8_utils().dequant_mxfp8_to_bf16(codes, scales)
    return {"codes": to_numpy(codes), "block_scale": to_numpy(scales), "values_bfloat16": to_numpy(decoded)}


def _prepare() -> None:
    """Load both modules of vLLM that this adapter's calls use. Raise ImportError if one of them cannot be loaded."""
    _emulation()
    _mxfp8_utils()


ADAPTER = Adapter(
    name="vllm",
    module="vllm",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "nvfp4-vllm-emulation": ProducerCall(_nvfp4),
        "mxfp8-modelopt": ProducerCall(_mxfp8),  # also named mxfp8-vllm
    },
    left_out={
        "nvfp4-vllm-kv": "vLLM's CUDA kernel needs a GPU of compute capability 10 or 12",
        "nvfp4-vllm-static-divisor": "vLLM's CUDA kernel needs a GPU of compute capability 10 or 12",
        "nvfp4-vllm-online": "vLLM quantizes weights online on GPUs of compute capability 10 only",
        "nvfp4-vllm-emulation-cuda": "vLLM's Triton kernels need a GPU",
        "mxfp4-vllm": "vLLM's Triton kernels need a GPU",
        "mxfp4-vllm-cpu": "vLLM's Triton kernels need a GPU, or Triton's interpreter",
    },
)
