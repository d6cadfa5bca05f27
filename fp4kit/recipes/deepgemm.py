"""Define the recipes of DeepGEMM 54e2261: its casts to FP4 and FP8 with UE8M0 scales, and to FP8 with float32 scales.

The recipes with UE8M0 scales have blocks of 32 elements. For DeepGEMM's own blocks of 128, make a variant with
dataclasses.replace.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import E4M3, MXFP4, MXFP8_E4M3
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("54e2261", "54e2261")
_SOURCE = "DeepGEMM 54e2261 deep_gemm/utils/math.py"


def recipes() -> Iterator[Recipe]:
    """Yield DeepGEMM's recipes: one for MXFP4, one for MXFP8, then one for FP8 in blocks of 128x128."""
    yield of_format(
        MXFP4,
        "mxfp4-deepgemm",
        block_rule="e8m0_deepgemm",
        rounding="rnz",
        sign="unsigned_zero",
        nan_code=0,
        amax_nan="propagate",
        source=_SOURCE,
        exact="codes for blocks of 32. An amax below 1e-4 counts as 1e-4, and ties round toward zero",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-deepgemm",
        block_rule="e8m0_deepgemm",
        amax_nan="propagate",
        source=_SOURCE,
        exact="codes for blocks of 32. An amax below 1e-4 counts as 1e-4",
    )
    yield Recipe(
        id="fp8-deepgemm-block",
        element=E4M3,
        scale=None,
        block=(128, 128),
        block_rule=None,
        tensor_scaling="block",
        tensor_rule="fp8_deepgemm",
        amax_nan="propagate",
        source=f"{_SOURCE} per_block_cast_to_fp8",
        exact="codes and scales of per_block_cast_to_fp8 without UE8M0 on a CPU; its scales are every 128th row of "
        "tensor_scale. On a GPU, where PyTorch multiplies by float32(1 / 448) instead of dividing by 448, use "
        "tensor_rule='fp8_deepseek'. An amax below 1e-4 is replaced by 1e-4. Derived from the source code, not "
        "recorded",
    )
