"""Define the adapter of triton_kernels: its PyTorch reference downcast_to_mxfp_torch, in the copy that vLLM contains.
An adapter holds the calls to a producer (a library that quantizes) that are compared with recipes. A call returns
Parts, {name: array}, such as {"codes": codes}.

The file is loaded without importing either package.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.standins import cached, load, packages, triton

_DETAILS = "vllm.third_party.triton_kernels.numerics_details"


@cached
def _mxfp() -> Any:
    """Load and return the module numerics_details.mxfp. Stand-ins replace the Triton kernels that it imports."""
    names = ("vllm", "vllm.third_party", "vllm.third_party.triton_kernels", _DETAILS, f"{_DETAILS}.mxfp_details")
    kernels = {f"{_DETAILS}.mxfp_details.{name}": None for name in ("_upcast_from_mxfp", "_downcast_to_mxfp")}
    stand_ins = packages(*names, *kernels)
    stand_ins[f"{_DETAILS}.mxfp_details._downcast_to_mxfp"].MXFP_BLOCK_SIZE = 32  # type: ignore[attr-defined]
    file = "third_party/triton_kernels/numerics_details/mxfp.py"
    return load("vllm", file, {**triton(), **stand_ins})


def _downcast(x: np.ndarray, element: str, mode: str) -> Parts:
    """Quantize x to MXFP4 or MXFP8 with downcast_to_mxfp_torch."""
    import torch

    rounding = getattr(_mxfp().DequantScaleRoundingMode, mode)
    codes, scales = _mxfp().downcast_to_mxfp_torch(to_torch(x), getattr(torch, element), -1, rounding)
    stored = to_numpy(codes)
    return {"codes": fp4kit.unpack(stored) if element == "uint8" else stored, "block_scale": to_numpy(scales)}


def _call(element: str, mode: str) -> ProducerCall:
    """Return the ProducerCall that calls _downcast with the given element dtype and rounding mode of scales."""
    return ProducerCall(partial(_downcast, element=element, mode=mode))


ADAPTER = Adapter(
    name="vllm",
    module="vllm",
    dependencies=("torch",),
    prepare=_mxfp,
    calls={
        "mxfp4-triton-kernels": _call("uint8", "ROUND_UP"),
        "mxfp4-triton-kernels-down": _call("uint8", "ROUND_DOWN"),
        "mxfp8-triton-kernels": _call("float8_e4m3fn", "ROUND_UP"),
        "mxfp8-triton-kernels-down": _call("float8_e4m3fn", "ROUND_DOWN"),
        "mxfp8-triton-kernels-e5m2": _call("float8_e5m2", "ROUND_UP"),
    },
    left_out={"mxfp4-triton-kernels-main": "no release holds that version of triton_kernels"},
    title="triton_kernels in vllm",
)
