"""Define the adapter of AMD Quark: weights are scaled by its quantizers and packed by its exporter. An adapter holds
the calls to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array},
such as {"codes": codes}.

Quark compiles its C++ code when it is imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import SATURATING_CASTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.exceptions import QUARK_INFINITE, QUARK_SMALLEST_SCALE


def _prepare() -> None:
    """Import the modules of Quark that this adapter's calls use. Raise ImportError if one is missing."""
    import quark.torch.export.nn.modules.realquantizer
    import quark.torch.quantization.tensor_quantize  # noqa: F401


def _observed(t: Any, config: Any) -> Any:
    """Return a Quark quantizer for ``config`` that has computed its scales from the weight ``t``, a torch tensor."""
    import torch
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    quantizer = FakeQuantizeBase.get_fake_quantize(config, device=torch.device("cpu"))
    quantizer.enable_observer()
    quantizer.disable_fake_quant()
    with torch.no_grad():
        quantizer(t)
    return quantizer


def _exporter(t: Any, config: Any, quantizer: Any) -> Any:
    """Return the object with which Quark exports the weight ``t``."""
    # ``quantizer`` must have computed its scales from ``t``.
    import torch
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer

    where = {"device": torch.device("cpu"), "float_dtype": t.dtype}
    return get_real_quantizer(qspec=config, quantizer=quantizer, reorder=False, real_quantized=True, **where)


def _mx(x: np.ndarray, spec: str, mode: str) -> Parts:
    """Quantize and fake-quantize x to MXFP4, MXFP6 or MXFP8 with Quark."""
    from quark.torch.quantization.config import config as specs

    t = to_torch(x)
    config = getattr(specs, spec)(is_dynamic=False, ch_axis=-1).to_quantization_spec()
    config.scale_calculation_mode = mode
    exporter = _exporter(t, config, _observed(t, config))
    fake = exporter.to_fake_quantize_params(t)
    if spec == "OCP_MXFP8E4M3Spec":
        return {"fake": to_numpy(fake)}
    packed = to_numpy(exporter.to_real_quantize_params(t))
    exporter.maybe_convert_and_transpose_scale()
    codes = fp4kit.unpack(packed) if "FP4" in spec else _six_bits(packed)
    return {"codes": codes, "block_scale": to_numpy(exporter.scale).view(np.uint8), "fake": to_numpy(fake)}


def _six_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack 6-bit codes: each three bytes hold four codes, the first in the lowest bits. Return one code per byte."""
    triples = packed.reshape(len(packed), -1, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return (words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).astype(np.uint8).reshape(len(packed), -1)


def _nvfp4(x: np.ndarray, realigned: bool) -> Parts:
    """Quantize x to NVFP4 with Quark."""
    from quark.torch.quantization.config.template import FP4Block16ScaleE4M3Scheme
    from quark.torch.quantization.post_calibration import realign_single_sequential_quantizer

    t = to_torch(x)
    config = FP4Block16ScaleE4M3Scheme().config.weight
    quantizer = _observed(t, config)
    if realigned:
        realign_single_sequential_quantizer(quantizer)
    exporter = _exporter(t, config, quantizer)
    global_scale = to_numpy(exporter[1].scale)
    codes = fp4kit.unpack(to_numpy(exporter.to_real_quantize_params(t)))
    exporter.maybe_convert_and_transpose_scale()
    scales = to_numpy(exporter[0].scale).reshape(len(x), -1)
    return {"codes": codes, "block_scale": scales, "tensor_scale": global_scale.astype(np.float32)}


def _mx_call(spec: str, mode: str = "even") -> ProducerCall:
    """Return the ProducerCall for MXFP4, MXFP6 or MXFP8 of Quark."""
    # Differences are excused in elements whose stored scale is 2^-126 or less, because Quark may have divided them by
    # 2^-127.
    return ProducerCall(partial(_mx, spec=f"OCP_MX{spec}Spec", mode=mode), exempt=(QUARK_SMALLEST_SCALE,))


ADAPTER = Adapter(
    name="amd-quark",
    module="quark",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "nvfp4-quark": ProducerCall(
            partial(_nvfp4, realigned=True), exempt=(QUARK_INFINITE,), dependency_versions=SATURATING_CASTS
        ),
        "nvfp4-quark-file2file": ProducerCall(
            partial(_nvfp4, realigned=False), exempt=(QUARK_INFINITE,), dependency_versions=SATURATING_CASTS
        ),
        "mxfp4-quark-even": _mx_call("FP4"),
        "mxfp4-quark-floor": _mx_call("FP4", "floor"),
        "mxfp4-quark-ceil": _mx_call("FP4", "ceil"),
        "mxfp6-quark-e2m3-even": _mx_call("FP6E2M3"),
        "mxfp6-quark-e3m2-even": _mx_call("FP6E3M2"),
        "mxfp8-quark-even": _mx_call("FP8E4M3"),
    },
)
