"""Define the adapter of compressed-tensors: its computation of scales, and its compressors of weights. An adapter holds
the calls to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array},
such as {"codes": codes}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch
from fp4kit.evidence.live.exceptions import ROUNDS_BEYOND_DTYPE


def _prepare() -> None:
    """Import the modules of compressed-tensors that this adapter's calls use. Raise ImportError if one is missing."""
    import compressed_tensors.compressors  # noqa: F401


def _scheme(bits: int) -> Any:
    """Return compressed-tensors' QuantizationScheme for weights in an MX format (blocks of 32)."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, **group)
    return QuantizationScheme(targets=["Linear"], weights=args)


def _nvfp4(x: np.ndarray) -> Parts:
    """Compress and decompress x in NVFP4."""
    import torch
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, **group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = to_torch(x)
    divisor = generate_gparam(weight.min(), weight.max())
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, divisor)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    stored = NVFP4PackedCompressor.compress(state, scheme)
    return {
        "codes": fp4kit.unpack(to_numpy(stored["weight_packed"])),
        "block_scale": to_numpy(stored["weight_scale"]),
        "tensor_scale": np.float32(1) / to_numpy(divisor),
        "values_bfloat16": to_numpy(NVFP4PackedCompressor.decompress(stored, scheme)["weight"]),
    }


def _stored(x: np.ndarray, bits: int, compressor: Any) -> tuple[Any, Any]:
    """Compress x in MXFP4, MXFP6 or MXFP8, and decompress the result."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, weight = _scheme(bits), to_torch(x)
    groups = weight.unflatten(-1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def _mxfp4(x: np.ndarray) -> Parts:
    """Compress x to MXFP4 with compressed-tensors, and decompress the result."""
    from compressed_tensors.compressors import MXFP4PackedCompressor

    stored, values = _stored(x, 4, MXFP4PackedCompressor)
    codes = fp4kit.unpack(to_numpy(stored["weight_packed"]))
    return {"codes": codes, "block_scale": to_numpy(stored["weight_scale"]), "values_bfloat16": to_numpy(values)}


def _mxfp6(x: np.ndarray) -> Parts:
    """Compress and decompress x in MXFP6 E2M3."""
    from compressed_tensors.compressors import MXFP6PackedCompressor

    stored, values = _stored(x, 6, MXFP6PackedCompressor)
    bytes_ = to_numpy(stored["weight_packed"]).reshape(x.shape[0], -1, 3).astype(np.uint32)
    words = bytes_[..., 0] | bytes_[..., 1] << 8 | bytes_[..., 2] << 16
    codes = (words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).astype(np.uint8).reshape(x.shape)
    return {"codes": codes, "block_scale": to_numpy(stored["weight_scale"]), "values_bfloat16": to_numpy(values)}


def _mxfp8(x: np.ndarray) -> Parts:
    """Compress and decompress x in MXFP8."""
    from compressed_tensors.compressors import MXFP8QuantizationCompressor

    stored, values = _stored(x, 8, MXFP8QuantizationCompressor)
    return {
        "codes": to_numpy(stored["weight"]),
        "block_scale": to_numpy(stored["weight_scale"]),
        f"values_{values.dtype}".replace("torch.", "").replace("values_float32", "values"): to_numpy(values),
    }


_MX = partial(ProducerCall, exempt=(ROUNDS_BEYOND_DTYPE,))
ADAPTER = Adapter(
    name="compressed-tensors",
    module="compressed_tensors",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "nvfp4-compressed-tensors": ProducerCall(_nvfp4),
        "mxfp4-compressed-tensors": _MX(_mxfp4),
        "mxfp6-compressed-tensors": _MX(_mxfp6),
        "mxfp8-compressed-tensors": _MX(_mxfp8),
    },
)
