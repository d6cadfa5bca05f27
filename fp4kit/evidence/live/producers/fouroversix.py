"""Define the adapter of fouroversix: its PyTorch back end on a CPU. An adapter holds the calls to a producer (a library
that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as {"codes": codes}.

The back end's files are loaded without the package, because installing the package needs CUDA.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import SATURATING_CASTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.standins import cached, load, packages, triton

_QUANTIZE = "fouroversix.quantize"


@cached
def _modules() -> dict[str, ModuleType]:
    """Load fouroversix's plain PyTorch modules, and return {module name: module}, stand-ins (empty modules)
    included.
    """
    found = packages(
        "fouroversix", _QUANTIZE, f"{_QUANTIZE}.pytorch", "fouroversix.kernels", "fouroversix.kernels.triton"
    )
    found = {**triton(), **found, "fouroversix.kernels.triton.constants": packages("constants")["constants"]}
    files = ("utils", "quantize/utils", "quantize/dequantize_utils", "quantize/pytorch/reference")
    for file in files:
        found[f"fouroversix.{file}".replace("/", ".")] = load("fouroversix", f"{file}.py", found)
    return found


def _quantize(x: np.ndarray, rule: str, format: str = "nvfp4", both: bool = False) -> Parts:
    """Quantize x with fouroversix's PyTorch code."""
    modules = _modules()
    kinds = modules["fouroversix.utils"]
    codes, scales, _ = modules[f"{_QUANTIZE}.pytorch.reference"].quantize_to_fp4(
        to_torch(x),
        fp4_format=kinds.DataType(format),
        scale_rule=kinds.ScaleRule(rule),
        block_scale_2d=both,
        use_blackwell_scale_layout=False,
    )
    size = 32 if format == "mxfp4" else 16
    return {
        "codes": fp4kit.unpack(to_numpy(codes)),
        "block_scale": to_numpy(scales).reshape(len(x), x.shape[1] // size),
    }


def _call(*arguments: Any, **options: Any) -> ProducerCall:
    """Return the ProducerCall for a scale rule of fouroversix, such as _call("mse")."""
    dependency_versions = {} if options.get("format") == "mxfp4" else SATURATING_CASTS
    return ProducerCall(partial(_quantize, rule=arguments[0], **options), dependency_versions=dependency_versions)


_TRITON = "fouroversix's Triton kernels need a GPU; recorded outputs are compared by --check"
ADAPTER = Adapter(
    name="fouroversix",
    module="fouroversix",
    dependencies=("torch",),
    prepare=_modules,
    calls={
        "nvfp4-fouroversix": _call("mse"),
        "nvfp4-fouroversix-mae": _call("mae"),
        "nvfp4-fouroversix-absmax": _call("abs_max"),
        "nvfp4-fouroversix-6": _call("static_6"),
        "nvfp4-fouroversix-6-2d": _call("static_6", both=True),
        "nvfp4-fouroversix-4": _call("static_4"),
        "mxfp4-fouroversix-6": _call("static_6", format="mxfp4"),
        "mxfp4-fouroversix-4": _call("static_4", format="mxfp4"),
    },
    left_out={
        **dict.fromkeys(
            ("nvfp4-fouroversix-triton", "nvfp4-fouroversix-triton-mae", "nvfp4-fouroversix-triton-6"), _TRITON
        ),
        "nvint4-fouroversix": "fouroversix 1.1.0 has no INT4 any more; recorded outputs are compared by --check",
        **dict.fromkeys(
            ("if4-fouroversix", "if4-fouroversix-mae", "if4-fouroversix-absmax"),
            "fouroversix 1.1.0 has no IF4 any more; recorded outputs are compared by --check",
        ),
        **dict.fromkeys(("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden"), _TRITON),
    },
)
