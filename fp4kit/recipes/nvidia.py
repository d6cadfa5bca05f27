"""Define the recipes of NVIDIA's Transformer Engine (TE), FlashInfer and Model-Optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit import formats
from fp4kit.formats import E4M3, INT4, INT8, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Made, Recipe, four_over_six, of_format, producer, unscaled, variant


@producer("te", "Transformer Engine", "d0067d0", package="transformer_engine")
def te() -> Made:
    """Yield the recipes of Transformer Engine (TE) d0067d0: its CUDA kernels and its Python reference quantizers."""
    te = of_format(
        NVFP4,
        "nvfp4-te",
        "tensor_rule=te block_rule=te decode_rule=te",
        source="TE d0067d0 common/transpose/quantize_transpose_vector_blockwise_fp4.cu",
        exact="the reference function of TE's C++ tests; for infinities, NaN and scales that underflow, TE's CUDA "
        "kernels by their source. Same bytes as nvfp4-te-reference except for -0 and NaN",
    )
    yield te
    yield variant(
        te,
        "nvfp4-te-2d",
        "tensor_rule=te_primary_weight block=16x16",
        source="TE d0067d0 common/recipe/nvfp4.cu",
        exact="TE's primary-weight kernels. Also defined for odd offsets and K % 64 != 0, where these kernels fail",
    )
    reference = variant(
        te,
        "nvfp4-te-reference",
        "tensor_rule=te_reference sign=negative nan_code=0 amax_nan=propagate",
        source="TE d0067d0 pytorch/custom_recipes/reference_nvfp4.py",
        exact="TE's Python reference quantizer",
    )
    yield reference
    yield variant(reference, "nvfp4-te-reference-2d", "block=16x16")
    yield variant(reference, "nvfp4-te-rowscaled", "tensor_scaling=row")
    yield variant(
        reference,
        "nvfp4-te-1x64",
        "tensor_scaling=row tensor_rule=te_1x64 block_rule=te_1x64 decode_rule=te_1x64",
        source="TE 7308e30 (PR 2940) custom_recipes/quantization_nvfp4_1x64.py NVFP4Quantizer1x64Ref",
        exact="codes, block scales and window_amax with NVTE_NVFP4_ROWWISE_1X64_LOCAL_ENCODE=1. Each window of 64 "
        "elements is a row: quantize x.reshape(-1, 64), and for the columnwise output x.T.reshape(-1, 64)",
        versions=("7308e30", "7308e30"),
    )
    base = replace(reference, source="TE d0067d0 common/cast/nvfp4/quantize_4over6_nvfp4.cuh, reference_nvfp4.py")
    for r in four_over_six(base, "nvfp4-te"):
        yield r
        yield variant(r, f"{r.id}-2d", "block=16x16")
    yield variant(
        r,
        f"{r.id}-fasterr",
        "fast_error=True",
        exact="TE's Python reference quantizer with NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
    )
    yield of_format(
        MXFP4,
        "mxfp4-te",
        "block_rule=e8m0_te_reference sign=negative nan_code=0 amax_nan=propagate",
        source="TE d0067d0 reference_nvfp4.py, pow_2_scales (TE has no MXFP4 kernel)",
        exact="TE's Python reference quantizer",
    )
    for fmt, suffix in ((formats.MXFP8_E4M3, ""), (formats.MXFP8_E5M2, "-e5m2")):
        te = of_format(
            fmt,
            f"mxfp8-te{suffix}",
            "block_rule=e8m0_te",
            exact="the reference function of TE's C++ tests",
            source="TE d0067d0 common/cast/mxfp8/quantize_mxfp8.cuh",
        )
        yield te
        yield variant(te, f"{te.id}-2d", "block=32x32")


@producer("flashinfer", "FlashInfer", "fb28d72", package="flashinfer-python")
def flashinfer() -> Made:
    """Yield the recipes of FlashInfer fb28d72: its CUDA quantizers."""
    fast = of_format(
        NVFP4,
        "nvfp4-flashinfer",
        "tensor_rule=flashinfer block_rule=flashinfer amax_nan=lanes flush=True",
        source="FlashInfer fb28d72 quantization_utils.cuh cvt_warp_fp16_to_fp4",
        exact="FlashInfer's default, with the approximate reciprocals of sm_90 (those of sm_100 are unmeasured)",
    )
    yield fast
    precise = variant(
        fast,
        "nvfp4-flashinfer-precise",
        "block_rule=flashinfer_precise",
        exact="FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1. Same bytes as nvfp4-te except for "
        "subnormals and NaN",
    )
    yield precise
    yield from four_over_six(
        replace(precise, exact="FlashInfer with FLASHINFER_NVFP4_4OVER6=1 and fast math disabled"), "nvfp4-flashinfer"
    )
    yield variant(
        fast,
        "nvfp4-flashinfer-static",
        "tensor_rule=divided",
        source="FlashInfer fb28d72 nvfp4_quantize with the global scale 1 / input_scale, as engines call it",
        exact="activations under Model-Optimizer's input_scale, which is tensor_amax / 2688, with the approximate "
        "reciprocals of sm_90",
    )
    yield from _flashinfer_token(fast, precise)
    kv = of_format(
        NVFP4,
        "nvfp4-flashinfer-kv",
        "tensor_rule=divided block_rule=flashinfer_kv decode_rule=flashinfer_kv flush=True",
        source="FlashInfer fb28d72 csrc/fp4_kv_quantization.cu nvfp4_kv_quant and nvfp4_kv_dequantize",
        exact="nvfp4_kv_quant, except for blocks with NaN. The tensor scale is its global_scale",
    )
    yield kv
    yield variant(
        kv,
        "nvfp4-flashinfer-kv-page",
        "block_rule=flashinfer_kv_page nan_code=0",
        source="FlashInfer fb28d72 include/flashinfer/page.cuh nvfp4_quantize_append_paged_kv_cache",
        exact="nvfp4_quantize_append_paged_kv_cache, with the approximate reciprocals of sm_90, by which "
        "-use_fast_math replaces quotients. The tensor scale is its k_scale or v_scale",
    )
    yield of_format(
        MXFP4,
        "mxfp4-flashinfer",
        "block_rule=e8m0_flashinfer_fp4 decode_rule=e8m0_flashinfer_host amax_nan=lanes flush=True",
        source="FlashInfer fb28d72 quantization_utils.cuh, UE8M0_SF",
        exact="mxfp4_quantize and mxfp4_dequantize_host, the MXFP4 serving path",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-flashinfer",
        "block_rule=e8m0_flashinfer_fp8 nan_is_max=True amax_nan=lanes flush=True",
        source="FlashInfer fb28d72 quantization_utils.cuh cvt_warp_fp16_to_mxfp8",
        exact="mxfp8_quantize, CUDA backend",
    )


def _flashinfer_token(fast: Recipe, precise: Recipe) -> Iterator[Recipe]:
    """Yield FlashInfer's recipes for activations with one tensor scale per token, that is per row."""
    kernel = "FlashInfer fb28d72 quantization.cuh nvfp4QuantAndPerTokenScaleKernel"
    yield variant(
        fast,
        "nvfp4-flashinfer-token",
        "tensor_scaling=row tensor_rule=flashinfer_token_fast",
        source=kernel,
        exact="the default kernel for float16 and bfloat16, with the approximate reciprocals of sm_90, except for "
        "block scales of rows whose scale is 0: of a row of zeros, the kernel makes NaN, and 0.7.4 makes 0, as here",
    )
    yield variant(
        precise,
        "nvfp4-flashinfer-token-precise",
        "tensor_scaling=row tensor_rule=flashinfer_token_precise",
        source=kernel,
        exact="the kernel with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1",
    )
    reference = of_format(
        NVFP4,
        "nvfp4-flashinfer-token-reference",
        "tensor_scaling=row tensor_rule=flashinfer_token block_rule=te sign=negative nan_code=0 amax_nan=propagate",
        source="FlashInfer fb28d72 tests, the Python reference of per-token NVFP4",
        exact="the Python reference, which FlashInfer's tests compare bit for bit with its kernels without fast math. "
        "Same codes and block scales as nvfp4-te-rowscaled; the scale of a row of zeros is 0",
    )
    yield reference
    for r in four_over_six(reference, "nvfp4-flashinfer-token"):
        name = f"the Python reference with 4over6, error {r.four_over_six} and scales up to {r.scale_max}"
        yield replace(r, exact=name)
        yield variant(
            r, f"{r.id}-fasterr", "fast_error=True", exact=f"{name}, and FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH=1"
        )


@producer("modelopt", "Model-Optimizer", "0.47", package="nvidia-modelopt")
def modelopt() -> Made:
    """Yield the recipes of NVIDIA Model-Optimizer 0.47: QTensor classes and fake quantizers."""
    dynamic = of_format(
        NVFP4,
        "nvfp4-modelopt",
        "tensor_rule=divided block_rule=modelopt decode_rule=modelopt apply=divide sign=negative amax_nan=propagate",
        source="Model-Optimizer 0.47 qtensor/nvfp4_tensor.py NVFP4QTensor",
        exact="NVFP4QTensor, which decodes code 8 (-0) to +0",
    )
    yield dynamic
    static = variant(
        dynamic,
        "nvfp4-modelopt-static",
        "block_rule=modelopt_static static=True",
        exact="NVFP4QTensor with calibrated block amaxes",
    )
    yield static
    yield variant(static, "nvfp4-modelopt-static-4over6", "scale_max=256")
    yield variant(
        static,
        "nvfp4-modelopt-mse",
        "static=False search=modelopt_sweep",
        exact="NVFP4QTensor with the block amaxes that nvfp4_fp8_scale_sweep chooses on an H200",
        source="Model-Optimizer 0.47 nvfp4_fp8_scale_sweep (Triton), qtensor/nvfp4_tensor.py NVFP4QTensor",
    )
    fake = variant(
        dynamic,
        "nvfp4-modelopt-fake",
        "decode_rule=product fake_only=True fake_rule=nvfp4_modelopt_triton",
        exact="values of the Triton fake quantizer on a GPU",
        source="Model-Optimizer 0.47 kernels/quantization fp4_fake_quant_block (Triton)",
    )
    yield fake
    yield variant(
        fake,
        "nvfp4-modelopt-fake-cuda",
        "fake_rule=nvfp4_modelopt_cuda",
        exact="values of the CUDA fake quantizer",
        source="Model-Optimizer 0.47 tensor_quant_mx.cu fused_amax_convert",
    )
    yield variant(
        fake,
        "nvfp4-modelopt-static-fake",
        "fake_rule=nvfp4_modelopt_static static=True",
        exact="values of the Triton fake quantizer with calibrated block amaxes",
        source="Model-Optimizer 0.47 static_blockwise_fp4_fake_quant (Triton)",
    )
    yield of_format(
        MXFP4,
        "mxfp4-modelopt",
        "block_rule=e8m0_modelopt decode_rule=e8m0_infinite rounding=rnz sign=not_positive amax_nan=propagate",
        source="Model-Optimizer 0.47 qtensor/mxfp4_tensor.py MXFP4QTensor",
        exact="MXFP4QTensor, where ties round toward zero, every zero is code 8, and scale byte 255 decodes to inf. "
        "Except for blocks with inf or NaN, which the producer leaves undefined",
    )
    yield _modelopt_fake(MXFP4, "mxfp4-modelopt-fake")
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-modelopt",
        "block_rule=e8m0_modelopt decode_rule=e8m0_infinite amax_nan=propagate",
        source="Model-Optimizer 0.47 qtensor/mxfp8_tensor.py MXFP8QTensor",
        exact="MXFP8QTensor, which decodes scale byte 255 to inf",
    )
    yield _modelopt_fake(MXFP8_E4M3, "mxfp8-modelopt-fake")
    fp8 = unscaled(
        E4M3,
        "fp8-modelopt",
        "tensor_scaling=tensor tensor_rule=fp8_modelopt amax_nan=propagate",
        source="Model-Optimizer 0.47 tensor_quant.py scaled_e4m3",
        exact="values of the fake quantizer on a GPU",
    )
    yield fp8
    channel = variant(fp8, "fp8-modelopt-channel", "tensor_scaling=row")
    yield channel
    yield variant(
        channel,
        "fp8-modelopt-channel-cpu",
        "tensor_rule=fp8_modelopt_cpu",
        exact="values of the fake quantizer on a CPU, per channel and per token, where PyTorch computes 448 / amax as "
        "(1 / amax) * 448. With one amax per tensor, the CPU gives fp8-modelopt",
    )
    int8 = variant(
        fp8,
        "int8-modelopt",
        "tensor_rule=int_modelopt decode_rule=int_modelopt fake_rule=int_modelopt",
        element=INT8,
        source="Model-Optimizer 0.47 tensor_quant.py _tensor_quant",
    )
    yield int8
    channel = variant(int8, "int8-modelopt-channel", "tensor_scaling=row")
    yield channel
    yield variant(int8, "int8-modelopt-narrow", "narrow=True")
    yield variant(channel, "int8-modelopt-channel-narrow", "narrow=True")
    yield variant(channel, "int4-modelopt-channel", element=INT4)
    yield variant(int8, "int4-modelopt", "tensor_scaling=block block=1x32", element=INT4)


def _modelopt_fake(fmt: BlockFormat, id: str) -> Recipe:
    """Return the recipe of Model-Optimizer's CUDA fake quantizer for an MX format."""
    return of_format(
        fmt,
        id,
        "block_rule=e8m0_modelopt fake_only=True fake_rule=mx_modelopt",
        source="Model-Optimizer 0.47 tensor_quant_mx.cu fused_amax_convert",
        exact="values of the CUDA fake quantizer, except for NaN elements, which the producer leaves undefined",
    )
