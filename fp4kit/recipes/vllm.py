"""Define the recipes of vLLM: its emulation of NVFP4, its MX quantizers, its KV caches and its online NVFP4.

vLLM 0.33 uses its emulation and its MX quantizers where it has no CUDA kernel. Online NVFP4 (nvfp4_per_token) quantizes
weights while they are loaded. Activations are then quantized by FlashInfer with one scale per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, Versions, of_format

VERSIONS = Versions("0.33", "0.33")
_ACTIVATIONS = "vLLM 0.33 csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh cvt_warp_fp16_to_fp4"


def recipes() -> Iterator[Recipe]:
    """Yield vLLM's recipes for NVFP4, then those for MXFP4."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-vllm-emulation",
        tensor_rule="vllm",
        block_rule="vllm",
        decode_rule="compressed_tensors",
        sign="negative",
        amax_nan="propagate",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py ref_nvfp4_quant",
        exact="codes of the emulation on a CPU and a GPU, and the decoded values on a CPU. Not equal for "
        "blocks of a tensor with inf or NaN, for which vLLM has no codes",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-vllm-emulation-cuda",
        block_rule="vllm_cuda",
        decode_rule="vllm_cuda",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py _nvfp4_quant_dequant_kernel (Triton)",
        exact="values of the fused fake quantizer on an H200",
    )
    kv = of_format(
        NVFP4,
        "nvfp4-vllm-kv",
        tensor_rule="divided",
        block_rule="vllm_kv",
        decode_rule="flashinfer_kv",
        source="vLLM 0cd789b csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, without 4over6",
        exact="the KV cache kernel, except for blocks of only NaN; derived from its source code, not recorded. The "
        "tensor scale is the checkpoint's k_scale or v_scale. Decodes as FlashInfer's nvfp4_kv_dequantize",
        versions=Versions("0cd789b", "0cd789b"),
    )
    yield kv
    yield replace(
        kv,
        id="nvfp4-vllm-static-divisor",
        tensor_rule="vllm",
        decode_rule="product",
        source=_ACTIVATIONS,
        exact="activations under compressed-tensors' input_global_scale, which is 2688 * (1 / tensor_amax) in float32 "
        "and divides on decode. Not equal for a tensor_amax below 1e-8 and for blocks of only NaN. Derived from the "
        "source code, not recorded",
        versions=VERSIONS,
    )
    yield of_format(
        NVFP4,
        "nvfp4-vllm-online",
        tensor_rule="vllm",
        block_rule="flashinfer",
        amax_nan="lanes",
        flush=True,
        source="vLLM 0136201 layers/quantization/online/nvfp4.py _quantize_moe_weight_to_nvfp4",
        exact="the weights of one expert by --quantization nvfp4_per_token, without 4over6, with the approximate "
        "reciprocals of sm_90; derived from its source code, not recorded. Activations: nvfp4-vllm-token",
        versions=Versions("0136201", "0136201"),
    )
    mxfp4 = of_format(
        MXFP4,
        "mxfp4-vllm",
        block_rule="e8m0_even_normal",
        source="vLLM 0.33 utils/mxfp4_utils.py downcast_to_mxfp",
        exact="codes of the Triton kernel for bfloat16 and float16 on a GPU, where blocks with scale 2^-127 are zeros",
    )
    yield mxfp4
    yield replace(
        mxfp4,
        id="mxfp4-vllm-cpu",
        block_rule="e8m0_even_finite",
        exact="codes of the Triton kernel, run in Triton's interpreter",
    )


def aliases() -> Iterator[Alias]:
    """Yield the aliases for vLLM's quantizers that equal other recipes: one for MXFP8, two for NVFP4 activations."""
    yield Alias(
        "mxfp8-vllm",
        "mxfp8-modelopt",
        source="vLLM 0.33 utils/mxfp8_utils.py _mxfp8_e4m3_quantize_torch",
        exact="equals this recipe except for blocks with an infinity, whose elements are 0 there",
    )
    yield Alias(
        "nvfp4-vllm-static",
        "nvfp4-vllm-kv",
        source=_ACTIVATIONS,
        exact="gives vLLM's codes and scales for activations under Model-Optimizer's input_scale, tensor_amax / 2688",
    )
    yield Alias(
        "nvfp4-vllm-token",
        "nvfp4-flashinfer-token",
        source="vLLM 0136201 layers/quantization/online/nvfp4.py, which calls FlashInfer",
        exact="gives the activations of vLLM --quantization nvfp4_per_token; derived from its source code, not "
        "recorded",
    )
