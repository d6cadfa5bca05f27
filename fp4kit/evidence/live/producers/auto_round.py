"""Define the adapter of Intel auto-round: its quantization functions, and codes as its QuantLinear.pack stores them. An
adapter holds the calls to a producer (a library that quantizes) that are compared with recipes. A call returns Parts,
{name: array}, such as {"codes": codes}.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import SATURATING_CASTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch


def _prepare() -> None:
    """Import the modules of auto-round that this adapter's calls use. Raise ImportError if one is missing."""
    import auto_round.data_type.mxfp
    import auto_round.data_type.nvfp
    import auto_round.export.export_to_autoround.qlinear_fp  # noqa: F401


def _packed(
    values: Any, scales: Any, bits: int, size: int, kind: str, global_scale: Any = None
) -> dict[str, np.ndarray]:
    """Pack quantized weights with auto-round's QuantLinear, and return what it stores."""
    import torch
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(values, requires_grad=False)
    stored = QuantLinear(bits, size, values.shape[1], values.shape[0], False, data_type=kind, act_bits=16)
    stored.pack(linear, scales, global_scale=global_scale)
    codes = to_numpy(stored.weight) if bits == 8 else fp4kit.unpack(to_numpy(stored.weight_packed))
    return {"codes": codes, "block_scale": to_numpy(stored.weight_scale).reshape(values.shape[0], -1)}


def _mx(x: np.ndarray, function: str, bits: int) -> Parts:
    """Quantize x to MXFP4 or MXFP8 with a function of auto_round.data_type.mxfp, and pack the result."""
    from auto_round.data_type import mxfp

    values, exponents, _ = getattr(mxfp, function)(to_torch(x), bits=bits, group_size=32)
    return _packed(values, exponents, bits, 32, f"mx_fp{bits}")


def _nvfp4(x: np.ndarray, function: str, fake: bool = False) -> Parts:
    """Quantize x to NVFP4 with a function of auto_round.data_type.nvfp."""
    import torch
    from auto_round.data_type import nvfp

    t = to_torch(x)
    global_scale = nvfp.calculate_gparam(t)
    values, scales, _ = getattr(nvfp, function)(t, global_scale=global_scale)
    if fake:
        return {"fake": to_numpy(values)}
    parts = _packed(values, scales, 4, 16, "nv_fp4", global_scale)
    return {**parts, "tensor_scale": to_numpy(nvfp.get_reciprocal(global_scale).to(torch.float32))}


def _mx_call(function: str, bits: int) -> ProducerCall:
    """Return the ProducerCall for a function of auto_round.data_type.mxfp, such as "quant_mx"."""
    return ProducerCall(partial(_mx, function=function, bits=bits))


ADAPTER = Adapter(
    name="auto-round",
    module="auto_round",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "nvfp4-auto-round": ProducerCall(partial(_nvfp4, function="nv_fp4")),
        "nvfp4-auto-round-fake": ProducerCall(partial(_nvfp4, function="nv_fp4", fake=True)),
        "nvfp4-auto-round-opt": ProducerCall(partial(_nvfp4, function="opt_rtn_fast_nvfp4")),
        "mxfp4-auto-round": _mx_call("quant_mx", 4),
        "mxfp4-auto-round-opt": _mx_call("quant_mx_opt_rtn", 4),
        "mxfp4-auto-round-rceil": _mx_call("quant_mx_rceil", 4),
        "mxfp4-auto-round-rceil-v2": _mx_call("quant_mx_rceil_v2", 4),
        "mxfp8-auto-round": replace(_mx_call("quant_mx", 8), dependency_versions=SATURATING_CASTS),
        "mxfp8-auto-round-rceil": replace(_mx_call("quant_mx_rceil", 8), dependency_versions=SATURATING_CASTS),
    },
)
