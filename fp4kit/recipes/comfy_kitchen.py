"""Define the recipes of comfy-kitchen 0.2.40, which quantizes for ComfyUI: its eager back end, written in PyTorch.

One recipe is of ComfyUI itself, which rounds stochastically when it merges a LoRA into a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import E4M3, E5M2, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.2.40", "0.2.40")
_SOURCE = "comfy-kitchen 0.2.40 backends/eager/quantization.py"


def recipes() -> Iterator[Recipe]:
    """Yield seven recipes: four of NVFP4, then MXFP8, then FP8 with E4M3 and with E5M2 elements."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-comfy-kitchen",
        tensor_rule="comfy_kitchen",
        block_rule="comfy_kitchen",
        decode_rule="comfy_kitchen",
        apply="divide",
        nan_code=0,
        amax_nan="propagate",
        source=f"{_SOURCE} quantize_nvfp4, tensor/nvfp4.py TensorCoreNVFP4Layout",
        exact="codes, scales and decoded values of the eager back end, whose tensor scale has the precision of x. "
        "ComfyUI's files have the even element in the high nibble, and swizzled scales. For ComfyUI's "
        "stochastic rounding, use nvfp4-comfy-kitchen-stochastic",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-comfy-kitchen-static",
        tensor_rule="divided",
        exact="codes, scales and decoded values of the eager back end for a given scale, such as the input_scale of a "
        "layer in ComfyUI, which it does not round to the precision of x. The scale is tensor_amax / 2688 in float32",
    )
    stochastic = of_format(
        NVFP4,
        "nvfp4-comfy-kitchen-stochastic",
        tensor_rule="comfy_kitchen",
        block_rule="comfyui",
        decode_rule="comfy_kitchen",
        apply="divide",
        nan_code=0,
        amax_nan="propagate",
        round_scaled=True,
        stochastic="comfyui_nvfp4",
        versions=Versions("0.29", "0.33"),
        source="ComfyUI 0.33 comfy/float.py stochastic_round_quantize_nvfp4_by_block",
        exact="codes, scales and decoded values of stochastic rounding on a CPU, with the seed or the random numbers. "
        "For a seed, PyTorch 2.11 draws other numbers in 16 bits than PyTorch 2.13, which was recorded. ComfyUI rounds "
        "stochastically when it merges a LoRA into a layer. It computes in the dtype of x, also block scales. No "
        "producer uses this recipe with rounding to nearest",
    )
    yield stochastic
    yield replace(
        stochastic,
        id="nvfp4-comfy-kitchen-stochastic-cuda",
        tensor_rule="comfy_kitchen_cuda",
        block_rule="comfyui_cuda",
        stochastic="comfyui_nvfp4_cuda",
        exact="codes, scales and decoded values of stochastic rounding by PyTorch on a GPU (H200), for given random "
        "numbers. Recorded with the PyTorch calls of ComfyUI's function, not with ComfyUI itself. In bfloat16, about "
        "1% of the codes differ from those of nvfp4-comfy-kitchen-stochastic. In float32, "
        "scales differ, because PyTorch multiplies by rounded reciprocals. No producer uses this recipe with rounding "
        "to nearest",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-comfy-kitchen",
        block_rule="e8m0_comfy_kitchen",
        decode_rule="e8m0_flashinfer_api",
        stochastic="comfy_kitchen_fp8",
        amax_nan="propagate",
        source=f"{_SOURCE} quantize_mxfp8",
        exact="codes, scales and decoded values of the eager back end, where scale byte 0 means 0; except that -0 in a "
        "block of zeros keeps its sign. Stochastic rounding gives ComfyUI's codes on a CPU for its seed. Differs from "
        "mxfp8-modelopt only for blocks with scale byte 0, infinities or NaN",
    )
    for element, name in ((E4M3, "fp8-comfy-kitchen"), (E5M2, "fp8-comfy-kitchen-e5m2")):
        yield Recipe(
            id=name,
            element=element,
            scale=None,
            block=None,
            block_rule=None,
            tensor_scaling="tensor",
            tensor_rule="fp8_comfy_kitchen",
            decode_rule="fp8_comfy_kitchen",
            round_scaled=True,
            stochastic="comfy_kitchen_fp8",
            amax_nan="propagate",
            source=f"{_SOURCE} quantize_per_tensor_fp8, with ComfyUI's scale amax / {element.max:g}",
            exact="codes, scales and decoded values of the eager back end. The reciprocal of the scale is rounded to "
            "the dtype of x, and so are its products with elements. In float16, ComfyUI limits this reciprocal to "
            "65504; fp4kit does not. Stochastic rounding gives comfy-kitchen's codes for given random bytes",
        )
