"""Define the adapter of Transformer Engine: NVFP4QuantizerRef, its reference quantizer in PyTorch. An adapter holds the
calls to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such
as {"codes": codes}.

The files of Transformer Engine are loaded without importing the package, so that the CUDA libraries that the package
loads are not needed.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.standins import cached, load, packages

_RECIPES = "transformer_engine.pytorch.custom_recipes"


@cached
def _reference() -> Any:
    """Return TE's module reference_nvfp4, which the first call loads."""

    class Quantizer:  # stands in for the class in transformer_engine.pytorch.quantized_tensor
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    tensors = ModuleType("transformer_engine.pytorch.quantized_tensor")
    tensors.Quantizer, tensors.QuantizedTensorStorage = Quantizer, object  # type: ignore[attr-defined]
    names = ("transformer_engine", "transformer_engine.pytorch", _RECIPES, f"{_RECIPES}.gemm")
    stand_ins = {**packages(*names), tensors.__name__: tensors}
    utils = load("transformer_engine", "pytorch/custom_recipes/reference_utils.py", stand_ins)
    stand_ins[_RECIPES].reference_utils = utils  # type: ignore[attr-defined]
    stand_ins[f"{_RECIPES}.reference_utils"] = utils
    return load("transformer_engine", "pytorch/custom_recipes/reference_nvfp4.py", stand_ins)


def _nvfp4(x: np.ndarray, tile: tuple[int, int] = (1, 16), **options: Any) -> Parts:
    """Quantize x to NVFP4 with Transformer Engine's class NVFP4QuantizerRef."""
    module = _reference()
    kind = module.reference_utils.Fp4Formats.E2M1
    quantizer = module.NVFP4QuantizerRef(kind, rowwise=True, columnwise=False, quant_tile_shape=tile, **options)
    codes, scales, *_ = quantizer._quantize(to_torch(x))
    return {"codes": fp4kit.unpack(to_numpy(codes)), "block_scale": to_numpy(scales)}


def _mxfp4(x: np.ndarray) -> Parts:
    """Quantize x to MXFP4 with NVFP4QuantizerRef and power-of-two scales."""
    quantize = _reference().NVFP4QuantizerRef._quantize_blockwise_reference
    codes, scales = quantize(to_torch(x), None, 32, 1, pow_2_scales=True, eps=0.0)
    exponents = np.frexp(to_numpy(scales).astype(np.float64))[1] + 126  # the E8M0 code of a power of two
    return {"codes": fp4kit.unpack(to_numpy(codes)), "block_scale": exponents.astype(np.uint8)}


def _call(**options: Any) -> ProducerCall:
    """Return the ProducerCall that calls _nvfp4 with the given options, such as tile=(16, 16)."""
    return ProducerCall(partial(_nvfp4, **options))


def _four_over_six(error: str, scale_max: int, **options: Any) -> ProducerCall:
    """Return the ProducerCall for a variant of TE's 4over6, which tries two scales per block and keeps the better."""
    return _call(nvfp4_use_4over6=True, nvfp4_4over6_err_mode=error.upper(), nvfp4_e4m3_max=scale_max, **options)


_KERNELS = "Transformer Engine's CUDA kernels need a GPU; recorded outputs are compared by --check"
ADAPTER = Adapter(
    name="transformer_engine",
    module="transformer_engine",
    dependencies=("torch",),
    prepare=_reference,
    calls={
        "nvfp4-te-reference": _call(),
        "nvfp4-te-reference-2d": _call(tile=(16, 16)),
        "nvfp4-te-rowscaled": _call(row_scaled_nvfp4=True),
        **{
            f"nvfp4-te-4over6-{error}-{scale_max}{suffix}": _four_over_six(error, scale_max, tile=tile)
            for error in ("mae", "mse")
            for scale_max in (448, 256)
            for suffix, tile in (("", (1, 16)), ("-2d", (16, 16)))
        },
        "nvfp4-te-4over6-mse-256-fasterr": _four_over_six("mse", 256, nvfp4_4over6_err_use_fast_math=True),
        "mxfp4-te": ProducerCall(_mxfp4),
    },
    left_out=dict.fromkeys(
        ("nvfp4-te", "nvfp4-te-2d", "mxfp8-te", "mxfp8-te-2d", "mxfp8-te-e5m2", "mxfp8-te-e5m2-2d"), _KERNELS
    ),
)
