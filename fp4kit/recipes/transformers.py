"""Define the recipe of Hugging Face transformers 5.23: FP8 weights in blocks of 128x128 with float32 scales."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import E4M3
from fp4kit.recipes.schema import Recipe, Versions

VERSIONS = Versions("5.23", "5.23")


def recipes() -> Iterator[Recipe]:
    """Yield the only recipe of this file, fp8-transformers-block."""
    yield Recipe(
        id="fp8-transformers-block",
        element=E4M3,
        scale=None,
        block=(128, 128),
        block_rule=None,
        tensor_scaling="block",
        tensor_rule="fp8_transformers",
        amax_nan="propagate",
        source="transformers 5.23 integrations/finegrained_fp8.py Fp8Quantize",
        exact="codes, and weight_scale_inv, which holds every 128th row of tensor_scale. transformers leaves a weight "
        "unquantized if its number of rows is not a multiple of 128; here, its last blocks have fewer rows",
    )
