"""Define the recipes of FP-Quant 0.3.2: its fake quantizers for training, written in Triton."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.3.2", "0.3.2")
_GPU = (
    "With a Hadamard transform, the recorded values are those of the transformed elements if each sum is rounded once; "
    "the order in which a GPU adds is not known. On a GPU, float32 elements are truncated to TF32 first; clear their "
    "13 low bits before the call"
)


def recipes() -> Iterator[Recipe]:
    """Yield three recipes: NVFP4, MXFP4 with method abs_max, and MXFP4 with method quest."""
    yield of_format(
        NVFP4,
        "nvfp4-fp-quant",
        tensor_scaling="none",
        block_rule="modelopt",
        apply="divide",
        fake_only=True,
        fake_rule="nvfp4_fp_quant",
        amax_nan="propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of NVFP4",
        exact=f"values with an identity transform and the global scale 3 of method abs_max, on an H100. {_GPU}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-fp-quant",
        block_rule="e8m0_floor",
        fake_only=True,
        fake_rule="fp_quant",
        amax_nan="propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of MXFP4",
        exact="values with method abs_max and an identity transform: on an H100 for float16 and bfloat16, and in "
        f"Triton's interpreter for float32, except for blocks with an amax below 2^-124, whose scale a GPU flushes. "
        f"{_GPU}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-fp-quant-quest",
        block_rule="e8m0_floor",
        search="quest",
        rounding="rnz",
        sign="not_positive",
        nan_code=8,
        amax_nan="propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of MXFP4",
        exact="values with method quest and an identity transform, on an H100 and in Triton's interpreter. The order "
        f"in which a GPU adds the squares of a block is not known, and changed no recorded value. {_GPU}",
    )
