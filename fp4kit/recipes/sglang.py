"""Define the recipes of SGLang 0.5.23: its MXFP4 utilities. For NVFP4 and MXFP8 SGLang uses FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.5.23", "0.5.23")


def recipes() -> Iterator[Recipe]:
    """Yield SGLang's two MXFP4 recipes: that of its quantization utility, then that of its KV cache."""
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
