"""Define the recipes of compressed-tensors 0.20: its scale generation, quantization and packing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp4kit.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.20", "0.20")


def recipes() -> Iterator[Recipe]:
    """Yield compressed-tensors' recipes: one for each of NVFP4, MXFP4, MXFP6 (E2M3) and MXFP8 (E4M3), in this order."""
    yield of_format(
        NVFP4,
        "nvfp4-compressed-tensors",
        tensor_rule="compressed_tensors",
        block_rule="compressed_tensors",
        decode_rule="compressed_tensors",
        apply="divide",
        sign="negative",
        nan_code=0,
        amax_nan="propagate",
        source="compressed-tensors 0.20 quantization/utils calculate_qparams, pack_fp4_to_uint8",
        exact="codes and block scales. The producer's global scale divides on decode, and tensor_scale is its "
        "reciprocal",
    )
    yield _mx(MXFP4, "mxfp4-compressed-tensors", sign="negative", nan_code=0)
    yield _mx(MXFP6_E2M3, "mxfp6-compressed-tensors")
    yield _mx(MXFP8_E4M3, "mxfp8-compressed-tensors", sign="negative")


def _mx(fmt: BlockFormat, id: str, **fields: Any) -> Recipe:
    """Return compressed-tensors' recipe ``id`` for an MX format."""
    top = "1.9375" if fmt is MXFP6_E2M3 else "1.75"
    zero_points = ", with zero points, which turn -0 into 0" if fmt is MXFP8_E4M3 else ""
    return of_format(
        fmt,
        id,
        block_rule="e8m0_compressed_tensors",
        round_scaled=True,
        amax_nan="propagate",
        source="compressed-tensors 0.20 quantization/utils calculate_qparams",
        exact=f"codes and scales{zero_points}, except for blocks with inf, NaN or an amax of at least {top} * 2^127 "
        f"(float16: {top} * 2^15). There, the producer's scale byte is an undefined cast (127 on x86, with codes of "
        "0), and the recipe follows OCP",
        **fields,
    )
