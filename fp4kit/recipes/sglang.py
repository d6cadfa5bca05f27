"""Define the recipes of SGLang: the MXFP4 utilities of 0.5.23, and its online NVFP4, named nvfp4_online.

For NVFP4 and MXFP8, SGLang calls FlashInfer. In online NVFP4, SGLang quantizes weights while it loads them, and
quantizes activations with one scale per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, Versions, of_format

VERSIONS = Versions("0.5.23", "0.5.23")


def recipes() -> Iterator[Recipe]:
    """Yield three recipes: online NVFP4 weights, the MXFP4 utility, and the MXFP4 KV cache with blocks of 16."""
    yield of_format(
        NVFP4,
        "nvfp4-sglang-online",
        tensor_rule="sglang_online",
        block_rule="flashinfer_precise",
        amax_nan="lanes",
        flush=True,
        source="SGLang a022252 layers/quantization/nvfp4_online.py _quantize_weight_nvfp4",
        exact="weights of one expert by --quantization nvfp4_online, without 4over6, whose w1 and w3 share an amax. "
        "Not equal for tensors with inf or NaN, and for blocks whose scale underflows to 0. Derived from the source "
        "code, not recorded. Activations: nvfp4-sglang-token",
        versions=Versions("a022252", "a022252"),
    )
    util = of_format(
        MXFP4,
        "mxfp4-sglang-util",
        block_rule="e8m0_sglang",
        rounding="rnz",
        sign="not_positive",
        nan_code=8,
        round_scaled=True,
        amax_nan="propagate",
        source="SGLang 0.5.23 mxfp4_tensor.py MXFP4QuantizeUtil",
        exact="codes. Logarithms and quotients are computed in the dtype of the elements, and every zero is code 8",
    )
    yield util
    yield replace(
        util,
        id="mxfp4-sglang-kv",
        block=(1, 16),
        block_rule="e8m0_sglang_kv",
        rounding="rna",
        sign="negative",
        nan_code=0,
        source="SGLang 0.5.23 kvfp4_tensor.py FP4MXBlock16KVQuantizeUtil",
        exact="codes of eager execution, without torch.compile",
    )


def aliases() -> Iterator[Alias]:
    """Yield the alias for SGLang's activations with one scale per token, which FlashInfer quantizes."""
    yield Alias(
        "nvfp4-sglang-token",
        "nvfp4-flashinfer-token",
        source="SGLang a022252 layers/quantization/nvfp4_online.py, which calls FlashInfer",
        exact="gives the activations of SGLang --quantization nvfp4_online; derived from its source code, not recorded",
    )
