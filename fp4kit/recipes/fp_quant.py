"""Define the recipe of FP-Quant 0.3.2: its fake quantizer for MXFP4 training, written in Triton."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.3.2", "0.3.2")


def recipes() -> Iterator[Recipe]:
    """Yield FP-Quant's one recipe: MXFP4 with method abs_max and without a Hadamard transform."""
    yield of_format(
        MXFP4,
        "mxfp4-fp-quant",
        block_rule="e8m0_floor",
        fake_only=True,
        fake_rule="fp_quant",
        amax_nan="propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of MXFP4",
        exact="values with method abs_max and an identity transform: on an H100 for float16 and bfloat16, and in "
        "Triton's interpreter for float32, except for blocks with an amax below 2^-124, whose scale a GPU flushes. "
        "On a GPU, float32 elements are rounded to TF32 first; round them before the call",
    )
