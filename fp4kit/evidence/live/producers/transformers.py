"""Define the adapter of transformers: its FP8 quantizer of weights, in PyTorch on a CPU. An adapter holds the calls to
a producer (a library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as
{"codes": codes}.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fp4kit.evidence.live.adapter import SATURATING_CASTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.arrays import to_numpy, to_torch

SIZE = 128  # rows and columns per block


def _prepare() -> None:
    """Import the module of transformers that this adapter's calls use. Raise ImportError if it is missing."""
    import transformers.integrations.finegrained_fp8  # noqa: F401


def _quantize(x: np.ndarray) -> Parts:
    """Quantize x to FP8 in blocks of 128x128 with transformers."""
    # Before quantization, x is padded with rows of zeros to whole blocks, because transformers leaves weights with
    # partial blocks unquantized.
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    padded = np.zeros((-(-len(x) // SIZE) * SIZE, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    config = SimpleNamespace(weight_block_size=(SIZE, SIZE), scale_fmt=None)
    stored = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"p.weight": to_torch(padded)})
    scales = np.repeat(to_numpy(stored["p.weight_scale_inv"]), SIZE, axis=0)
    return {"codes": to_numpy(stored["p.weight"])[: len(x)], "tensor_scale": scales[: len(x)]}


ADAPTER = Adapter(
    name="transformers",
    module="transformers",
    dependencies=("torch",),
    prepare=_prepare,
    calls={
        "fp8-transformers-block": ProducerCall(_quantize, columns=SIZE, dependency_versions=SATURATING_CASTS),
    },
)
