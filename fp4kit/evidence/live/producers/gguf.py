"""Define the adapter of the gguf package: quantize and dequantize of gguf.quants, in NumPy. An adapter holds the calls
to a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall


def _mxfp4(x: np.ndarray) -> Parts:
    """Quantize and dequantize x in MXFP4 with the gguf package."""
    from gguf import quants

    blocks = quants.quantize(x, quants.GGMLQuantizationType.MXFP4)
    stored = blocks.reshape(*x.shape[:-1], -1, 17)
    codes = np.concatenate([stored[..., 1:] & 15, stored[..., 1:] >> 4], axis=-1)
    return {
        "codes": codes.reshape(x.shape),
        "block_scale": stored[..., 0],
        "values": quants.dequantize(blocks, quants.GGMLQuantizationType.MXFP4),
    }


def _decode(q: fp4kit.Quantized) -> np.ndarray:
    """Return the float32 values that the gguf package decodes from q, a Quantized in MXFP4."""
    from gguf import quants

    codes = fp4kit.unpack(q.packed).reshape(*q.block_scale.shape, 2, 16)
    blocks = np.concatenate([q.block_scale[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], axis=-1)
    return quants.dequantize(blocks.reshape(len(blocks), -1), quants.GGMLQuantizationType.MXFP4)


ADAPTER = Adapter(
    name="gguf",
    module="gguf",
    dependencies=("numpy",),
    calls={"mxfp4-gguf": ProducerCall(_mxfp4, ("float32",), decode=_decode, decodes=("float32",))},
    left_out={"nvfp4-gguf": "gguf has no quantizer of NVFP4; the recipe is llama.cpp's C function"},
)
