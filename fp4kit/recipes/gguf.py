"""Define the recipes of llama.cpp 0c1e57098 (ggml 0.25.3): its FP4 types, quantize_mxfp4 and quantize_nvfp4.

llama.cpp quantizes float32 elements only.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("ggml 0.25.3", "ggml 0.25.3")
# Recipe fields for rounding to the nearest value. Among equally near values, the first in code order is taken. MLX's
# recipes use these fields too.
FIRST = {
    "rounding": "first",
    "sign": "unsigned_zero",
    "nan_code": 0,
}


def recipes() -> Iterator[Recipe]:
    """Yield llama.cpp's two recipes, nvfp4-gguf and then mxfp4-gguf. Neither has a tensor scale."""
    yield of_format(
        NVFP4,
        "nvfp4-gguf",
        tensor_scaling="none",
        block_rule="gguf",
        decode_rule="gguf",
        apply="compare",
        **FIRST,
        source="llama.cpp 0c1e57098 (ggml 0.25.3) ggml-quants.c quantize_row_nvfp4_ref",
        exact="the C function, which has no tensor scale. It turns scales of 248 or more into 448, rounds scales "
        "halfway between two codes up, and turns elements beyond 2^36 into 0",
    )
    yield of_format(
        MXFP4,
        "mxfp4-gguf",
        block_rule="e8m0_gguf",
        decode_rule="e8m0_gguf",
        apply="compare",
        **FIRST,
        source="llama.cpp 0c1e57098 (ggml 0.25.3) ggml-quants.c quantize_row_mxfp4_ref",
        exact="the C function, and gguf.quants.quantize except for blocks with NaN. For an amax a few ulp below a "
        "power of two, log2f rounds up, and the scale is twice as large. For an amax below 2^-125 the scale byte "
        "wraps, as x86-64 casts it, and all codes are 0",
    )
