"""Define the adapter of microxcaling: quantize_mx_op of its package mx, in PyTorch on a CPU. An adapter holds the calls
to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch


def _prepare() -> None:
    """Import the modules of mx that this adapter's calls use. Raise ImportError if one is missing."""
    import mx.mx_ops
    import mx.specs  # noqa: F401


def _quantize(x: np.ndarray, element: str, rounding: str, flush: bool = False) -> Parts:
    """Fake-quantize x with quantize_mx_op, and return {"fake": values}."""
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    specs = {
        "scale_bits": 8,
        "w_elem_format": element,
        "a_elem_format": element,
        "block_size": 32,
        "custom_cuda": False,
    }
    specs = finalize_mx_specs({**specs, "round": rounding, "mx_flush_fp32_subnorms": flush})
    y = quantize_mx_op(to_torch(x), specs, elem_format=element, axes=[-1], round=rounding)
    return {"fake": to_numpy(y)}


def _call(element: str, rounding: str, **options: Any) -> ProducerCall:
    """Return the ProducerCall for an element format and a rounding mode."""
    return ProducerCall(partial(_quantize, element=element, rounding=rounding, **options), ("float32", "bfloat16"))


ADAPTER = Adapter(
    name="microxcaling",
    module="mx",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "mxfp4-microxcaling-nearest": _call("fp4_e2m1", "nearest"),
        "mxfp4-microxcaling-nearest-flush": _call("fp4_e2m1", "nearest", flush=True),
        "mxfp4-microxcaling-even": _call("fp4_e2m1", "even"),
        "mxfp4-microxcaling-floor": _call("fp4_e2m1", "floor"),
        "mxfp8-microxcaling-nearest": _call("fp8_e4m3", "nearest"),
        "mxfp8-microxcaling-even": _call("fp8_e4m3", "even"),
    },
)
