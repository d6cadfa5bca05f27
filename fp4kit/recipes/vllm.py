"""Define the recipes of vLLM: its emulation of NVFP4, its MX quantizers, and its store of NVFP4 KV caches.

The emulation and the MX quantizers, of vLLM 0.33, run where vLLM has no CUDA kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.33", "0.33")


def recipes() -> Iterator[Recipe]:
    """Yield vLLM's NVFP4 recipes for weights and activations, that of its KV cache, then its two MXFP4 recipes."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-vllm-emulation",
        tensor_rule="vllm",
        block_rule="vllm",
        decode_rule="compressed_tensors",
        sign="negative",
        amax_nan="propagate",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py ref_nvfp4_quant",
        exact="codes of the emulation on a CPU and a GPU, and the decoded values on a CPU. Except for blocks of "
        "a tensor with inf or NaN, for which vLLM has no codes",
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
    yield of_format(
        NVFP4,
        "nvfp4-vllm-kv",
        tensor_rule="divided",
        block_rule="vllm_kv",
        decode_rule="flashinfer_kv",
        source="vLLM 0cd789b csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, without 4over6",
        exact="the KV cache kernel, except for blocks of NaN alone; read from its source, not recorded. The tensor "
        "scale is the checkpoint's k_scale or v_scale. Decodes as FlashInfer's nvfp4_kv_dequantize",
        versions=Versions("0cd789b", "0cd789b"),
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
    """Yield the alias for vLLM's only quantizer that equals a recipe of another producer, mxfp8-vllm."""
    yield Alias(
        "mxfp8-vllm",
        "mxfp8-modelopt",
        source="vLLM 0.33 utils/mxfp8_utils.py _mxfp8_e4m3_quantize_torch",
        exact="equals it except for blocks with an infinity, whose elements are 0 there",
    )
