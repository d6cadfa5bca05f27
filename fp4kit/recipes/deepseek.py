"""Define the recipes of DeepSeek-V4's inference code: its quantizers of activations and of the compressed KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import E4M3, MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("V4", "V4")
_READ = "except for blocks with infinities or NaN; derived from its source code, not recorded"


def recipes() -> Iterator[Recipe]:
    """Yield four recipes: MXFP4, NVFP4 for the KV cache, FP8 with float32 scales, and FP8 with E8M0 scales (MXFP8)."""
    yield of_format(
        MXFP4,
        "mxfp4-deepseek-v4",
        block_rule="e8m0_deepseek",
        source="DeepSeek-V4 inference/kernel.py fp4_act_quant",
        exact="the TileLang kernel, except for blocks with infinities or NaN; derived from its source code, not "
        "recorded. Same as mxfp4-torchao-rceil except for these blocks and for amaxes below 2^-124",
    )
    yield of_format(
        NVFP4,
        "nvfp4-deepseek-v4",
        tensor_scaling="none",
        block_rule="deepseek",
        apply="divide",
        source="DeepSeek-V4 inference/kernel.py fp4_act_quant with scale_dtype e4m3",
        exact=f"the TileLang kernel for compressed KV caches, {_READ}",
    )
    yield Recipe(
        id="fp8-deepseek-v4",
        element=E4M3,
        scale=None,
        block=(1, 128),
        block_rule=None,
        tensor_scaling="block",
        tensor_rule="fp8_deepseek",
        apply="divide",
        source="DeepSeek-V4 inference/kernel.py act_quant without scale_fmt",
        exact=f"the TileLang kernel, {_READ}",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-deepseek-v4",
        block_rule="e8m0_deepseek_fp8",
        source="DeepSeek-V4 inference/kernel.py act_quant with scale_fmt",
        exact=f"the TileLang kernel with blocks of 128, which replace(recipe, block=(1, 128)) gives, {_READ}. Differs "
        "from mxfp8-deepgemm in one step: amaxes are multiplied by 1/448 instead of divided by 448",
    )
