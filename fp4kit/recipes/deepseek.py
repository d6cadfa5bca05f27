"""Define the recipe of DeepSeek-V4's inference code: its FP4 quantizer of activations."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("V4", "V4")


def recipes() -> Iterator[Recipe]:
    """Yield the one recipe of DeepSeek-V4, for MXFP4."""
    yield of_format(
        MXFP4,
        "mxfp4-deepseek-v4",
        block_rule="e8m0_deepseek",
        source="DeepSeek-V4 inference/kernel.py fp4_act_quant",
        exact="the TileLang kernel, except for blocks with infinities or NaN; read from its source, not recorded. Same "
        "as mxfp4-torchao-rceil except for these blocks and for amaxes below 2^-124",
    )
