"""vLLM 0.33: what it quantizes weights and activations with where no kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.33", "0.33")


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-vllm-emulation",
        tensor_rule="vllm",
        block_rule="vllm",
        decode_rule="compressed_tensors",
        sign="negative",
        amax_nan="propagate",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py ref_nvfp4_quant",
        exact="its codes, on a CPU and a GPU, and its values on a CPU; blocks of a tensor with inf or NaN have no "
        "codes there",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-vllm-emulation-cuda",
        block_rule="vllm_cuda",
        decode_rule="vllm_cuda",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py _nvfp4_quant_dequant_kernel (Triton)",
        exact="the values of its fused fake quantizer on an H200",
    )
    mxfp4 = of_format(
        MXFP4,
        "mxfp4-vllm",
        block_rule="e8m0_even_normal",
        source="vLLM 0.33 utils/mxfp4_utils.py downcast_to_mxfp",
        exact="its codes of bfloat16 and float16 on a GPU, where blocks of scale 2^-127 are zeros",
    )
    yield mxfp4
    yield replace(
        mxfp4, id="mxfp4-vllm-cpu", block_rule="e8m0_even_finite", exact="its codes where Triton is interpreted"
    )


def aliases() -> Iterator[Alias]:
    """Names of recipes of others that do the same."""
    yield Alias(
        "mxfp8-vllm",
        "mxfp8-modelopt",
        source="vLLM 0.33 utils/mxfp8_utils.py _mxfp8_e4m3_quantize_torch",
        exact="but elements of blocks with an infinity, which are 0 there",
    )
