"""Define the recipe of Nunchaku, the inference engine of SVDQuant: its FP4 quantizer of activations."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("3fbb6c1", "3fbb6c1")  # a commit of the copy nunchux-ai/nunchaku


def recipes() -> Iterator[Recipe]:
    """Yield the only recipe of this file, nvfp4-nunchaku, for activations. It has no tensor scale."""
    yield of_format(
        NVFP4,
        "nvfp4-nunchaku",
        tensor_scaling="none",
        block_rule="nunchaku",
        nan_code=7,
        source="Nunchaku 3fbb6c1 src/kernels/zgemm/gemm_w4a4.cuh quantize_w4a4_fp4_from_fpsum_warp",
        exact="codes and scales of bfloat16 and float16 activations, before they are ordered for the tensor cores; "
        "except for blocks of only NaN. Elements are multiplied by the reciprocal of the scale before it is rounded "
        "to E4M3, so zeros of a zero block become 6. Derived from its source code, not recorded",
    )
