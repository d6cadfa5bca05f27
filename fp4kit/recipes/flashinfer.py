"""Define the recipes of FlashInfer fb28d72: its CUDA quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, four_over_six, of_format

VERSIONS = Versions("fb28d72", "fb28d72")


def recipes() -> Iterator[Recipe]:
    """Yield FlashInfer's recipes for NVFP4, then MXFP4, then MXFP8, in the order of fp4kit.recipes()."""
    fast = of_format(
        NVFP4,
        "nvfp4-flashinfer",
        tensor_rule="flashinfer",
        block_rule="flashinfer",
        amax_nan="lanes",
        flush=True,
        source="FlashInfer fb28d72 quantization_utils.cuh cvt_warp_fp16_to_fp4",
        exact="FlashInfer's default, with the approximate reciprocals of sm_90 (those of sm_100 are unmeasured)",
    )
    yield fast
    precise = replace(
        fast,
        id="nvfp4-flashinfer-precise",
        block_rule="flashinfer_precise",
        exact="FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1. Same bytes as nvfp4-te except for "
        "subnormals and NaN",
    )
    yield precise
    yield from four_over_six(
        replace(precise, exact="FlashInfer with FLASHINFER_NVFP4_4OVER6=1 and fast math disabled"), "nvfp4-flashinfer"
    )
    yield replace(
        fast,
        id="nvfp4-flashinfer-static",
        tensor_rule="divided",
        source="FlashInfer fb28d72 nvfp4_quantize with the global scale 1 / input_scale, as engines call it",
        exact="activations under Model-Optimizer's input_scale, which is tensor_amax / 2688, with the approximate "
        "reciprocals of sm_90; derived from the engines' source code, not recorded",
    )
    yield from _token(fast, precise)
    yield from _kv()
    yield of_format(
        MXFP4,
        "mxfp4-flashinfer",
        block_rule="e8m0_flashinfer_fp4",
        decode_rule="e8m0_flashinfer_host",
        amax_nan="lanes",
        flush=True,
        source="FlashInfer fb28d72 quantization_utils.cuh, UE8M0_SF",
        exact="mxfp4_quantize and mxfp4_dequantize_host, the MXFP4 serving path",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-flashinfer",
        block_rule="e8m0_flashinfer_fp8",
        nan_is_max=True,
        amax_nan="lanes",
        flush=True,
        source="FlashInfer fb28d72 quantization_utils.cuh cvt_warp_fp16_to_mxfp8",
        exact="mxfp8_quantize, CUDA backend",
    )


def _token(fast: Recipe, precise: Recipe) -> Iterator[Recipe]:
    """Yield FlashInfer's recipes for activations with one tensor scale per token, that is per row."""
    kernel = "FlashInfer fb28d72 nvfp4_quantize with per_token_activation=True"
    read = (
        "derived from its source code, not recorded. For a row of zeros, the scale of the row is 0, as in the CuTe-DSL "
        "kernel. Not equal for blocks whose scale underflows to 0, because FlashInfer's two kernels differ there"
    )
    yield replace(
        fast,
        id="nvfp4-flashinfer-token",
        tensor_scaling="row",
        tensor_rule="flashinfer_token_fast",
        source=kernel,
        exact=f"the default kernel for float16 and bfloat16, with the approximate reciprocals of sm_90; {read}",
    )
    yield replace(
        precise,
        id="nvfp4-flashinfer-token-precise",
        tensor_scaling="row",
        tensor_rule="flashinfer_token",
        source=kernel,
        exact=f"the kernel with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1; {read}",
    )
    reference = of_format(
        NVFP4,
        "nvfp4-flashinfer-token-reference",
        tensor_scaling="row",
        tensor_rule="flashinfer_token",
        block_rule="te",
        sign="negative",
        nan_code=0,
        amax_nan="propagate",
        source="FlashInfer fb28d72 tests, the Python reference of per-token NVFP4",
        exact="the Python reference, which FlashInfer's tests compare bit for bit with its kernels without fast math. "
        "Same codes and block scales as nvfp4-te-rowscaled; the scale of a row of zeros is 0",
    )
    yield reference
    for r in four_over_six(reference, "nvfp4-flashinfer-token"):
        name = f"the Python reference with 4over6, error {r.four_over_six} and scales up to {r.scale_max}"
        yield replace(r, exact=name)
        yield replace(
            r,
            id=f"{r.id}-fasterr",
            fast_error=True,
            exact=f"{name}, and FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
        )


def _kv() -> Iterator[Recipe]:
    """Yield FlashInfer's two recipes for KV caches: that of nvfp4_kv_quant, then that of its functions for pages."""
    kv = of_format(
        NVFP4,
        "nvfp4-flashinfer-kv",
        tensor_rule="divided",
        block_rule="flashinfer_kv",
        decode_rule="flashinfer_kv",
        flush=True,
        source="FlashInfer fb28d72 csrc/fp4_kv_quantization.cu nvfp4_kv_quant and nvfp4_kv_dequantize",
        exact="nvfp4_kv_quant, except for blocks with NaN; derived from its source code, not recorded. The tensor "
        "scale is its global_scale",
    )
    yield kv
    yield replace(
        kv,
        id="nvfp4-flashinfer-kv-page",
        block_rule="flashinfer_kv_page",
        flush=False,
        nan_code=0,
        source="FlashInfer fb28d72 include/flashinfer/page.cuh nvfp4_quantize_append_paged_kv_cache",
        exact="nvfp4_quantize_append_paged_kv_cache with exact divisions; derived from its source code, not recorded. "
        "FlashInfer compiles it with -use_fast_math, so that a quotient may be off by some ulp. The tensor scale is "
        "its k_scale or v_scale",
    )
