"""The gguf package: quantize_blocks and dequantize_blocks of gguf.quants, in NumPy."""

from __future__ import annotations

import numpy as np

from fp4kit.evidence.live.adapter import Adapter, Call, Parts


def _mxfp4(x: np.ndarray) -> Parts:
    from gguf import quants

    blocks = quants.quantize(x, quants.GGMLQuantizationType.MXFP4)
    stored = blocks.reshape(*x.shape[:-1], -1, 17)
    codes = np.concatenate([stored[..., 1:] & 15, stored[..., 1:] >> 4], axis=-1)
    return {
        "codes": codes.reshape(x.shape),
        "block_scale": stored[..., 0],
        "values": quants.dequantize(blocks, quants.GGMLQuantizationType.MXFP4),
    }


ADAPTER = Adapter(
    name="gguf",
    module="gguf",
    beside=("numpy",),
    calls={"mxfp4-gguf": Call(_mxfp4, ("float32",))},
    left_out={"nvfp4-gguf": "gguf has no quantizer of NVFP4; the recipe is llama.cpp's C function"},
)
