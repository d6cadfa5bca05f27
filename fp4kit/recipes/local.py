"""Define the recipes of programs for personal computers: llama.cpp, Apple MLX and ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import E4M3, E5M2, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Alias, Made, Recipe, of_format, producer, unscaled, variant

# Recipe fields for rounding to the nearest value. Among equally near values, the first in code order is taken. MLX's
# recipes use these fields too.
_FIRST = "rounding=first sign=unsigned_zero nan_code=0"


@producer("gguf", "llama.cpp (GGUF)", "ggml 0.25.3", package="gguf")
def gguf() -> Made:
    """Yield the recipes of llama.cpp 0c1e57098 (ggml 0.25.3): its FP4 types, quantize_mxfp4 and quantize_nvfp4."""
    yield of_format(
        NVFP4,
        "nvfp4-gguf",
        f"tensor_scaling=none block_rule=gguf decode_rule=gguf apply=compare {_FIRST}",
        source="llama.cpp 0c1e57098 (ggml 0.25.3) ggml-quants.c quantize_row_nvfp4_ref",
        exact="the C function, which has no tensor scale. It turns scales of 248 or more into 448, rounds scales "
        "halfway between two codes up, and turns elements beyond 2^36 into 0",
    )
    yield of_format(
        MXFP4,
        "mxfp4-gguf",
        f"block_rule=e8m0_gguf decode_rule=e8m0_gguf apply=compare {_FIRST}",
        source="llama.cpp 0c1e57098 (ggml 0.25.3) ggml-quants.c quantize_row_mxfp4_ref",
        exact="the C function, and gguf.quants.quantize except for blocks with NaN. For an amax a few ulp below a "
        "power of two, log2f rounds up, and the scale is twice as large. For an amax below 2^-125 the scale byte "
        "wraps, as x86-64 casts it, and all codes are 0",
    )


_MLX_DECODES_NAN = ("0.32.3", "0.32.4")
_MLX_METAL = "MLX {} fp4.h, fp8.h and fp_quantized.h"


@producer("mlx", "MLX", "0.32.2", "0.32.4", package="mlx")
def mlx() -> Made:
    """Yield the recipes of Apple MLX: mx.quantize and mx.dequantize on a CPU and on Metal.

    An id without a version is for 0.32.4. Ids ending in -0322 are for versions up to 0.32.2, where the E4M3 codes 7F
    and FF decode to 480 and -480 instead of NaN. Ids ending in -0321 are for versions up to 0.32.1, where in addition
    an MX scale is the nearest power of two instead of the next larger one.
    """
    cpu = of_format(
        NVFP4,
        "nvfp4-mlx-cpu",
        f"tensor_scaling=none block_rule=mlx apply=divide amax_nan=propagate round_scaled=True {_FIRST}",
        source=_mlx_cpu("nvfp4", "0.32.4"),
        exact="mx.quantize on a CPU since 0.31.2, mx.dequantize since 0.32.3",
        versions=_MLX_DECODES_NAN,
    )
    metal = of_format(
        NVFP4,
        "nvfp4-mlx-metal",
        "tensor_scaling=none block_rule=mlx_metal",
        source=_MLX_METAL.format("0.32.4"),
        versions=("0.32.4", "0.32.4"),
        exact="the conversions in the Metal headers, compiled for a CPU. An Apple GPU may flush float32 subnormals. "
        "For versions up to 0.32.2, where scale bytes 7F and FF decode to 480 and -480, use decode_rule='mlx_0322'",
    )
    older = variant(
        cpu,
        "nvfp4-mlx-cpu-0322",
        "decode_rule=mlx_0322",
        source=_mlx_cpu("nvfp4", "0.32.2"),
        exact="mx.quantize and mx.dequantize on a CPU, from 0.31.2 to 0.32.2, where scale bytes 7F and FF decode to "
        "480 and -480",
        versions=("0.31.2", "0.32.2"),
    )
    for r in (cpu, older, metal):
        yield r
        yield variant(
            r,
            f"{r.id}-global",
            "tensor_scaling=tensor tensor_rule=mlx",
            exact=f"{r.exact}. With global_scale, which is the tensor amax",
        )
    for fmt in (MXFP4, MXFP8_E4M3):
        yield from _mlx_mx(fmt)
    for name, of in (("mxfp4", "mxfp4-torchao-rceil"), ("mxfp8", "mxfp8-te")):
        yield Alias(
            f"{name}-mlx-metal",
            of,
            _MLX_METAL.format("0.32.4"),
            exact="equals this recipe except for blocks with inf or NaN (compared with the conversions in MLX's Metal "
            "headers, compiled for a CPU)",
        )


def _mlx_cpu(mode: str, version: str) -> str:
    """Return the text of Recipe.source for MLX's CPU back end, such as "MLX 0.32.4 mx.quantize mode nvfp4, CPU"."""
    return f"MLX {version} mx.quantize mode {mode}, CPU"


def _mlx_mx(fmt: BlockFormat) -> Iterator[Recipe]:
    """Yield MLX's recipes for an MX format: first those of the CPU back end, then one of Metal up to 0.32.1."""
    name = fmt.name[:5].lower()
    first = _FIRST if fmt is MXFP4 else f"nan_code={fmt.element.max_code}"
    cpu = of_format(
        fmt,
        f"{name}-mlx-cpu",
        f"block_rule=e8m0_mlx decode_rule=e8m0_mlx apply=divide amax_nan=propagate {first}",
        source=_mlx_cpu(name, "0.32.4"),
        exact="mx.quantize on a CPU since 0.32.2"
        + ", mx.dequantize since 0.32.3" * (fmt is MXFP8_E4M3)
        + ". As in MLX, scale bytes of tiny blocks wrap and decode as huge scales, and float16 values are decoded "
        "with float16 scales, which are inf from 2^16 on and 0 below 2^-24",
        versions=_MLX_DECODES_NAN if fmt is MXFP8_E4M3 else None,
    )
    yield cpu
    decoded = ""
    if fmt is MXFP8_E4M3:
        decoded = "; element codes 7F and FF decode to 480 and -480"
        cpu = variant(
            cpu,
            f"{name}-mlx-cpu-0322",
            "decode_rule=e8m0_mlx_0322",
            source=_mlx_cpu(name, "0.32.2"),
            exact=f"mx.quantize and mx.dequantize on a CPU, 0.32.2{decoded}",
            versions=("0.32.2", "0.32.2"),
        )
        yield cpu
    yield variant(
        cpu,
        f"{name}-mlx-cpu-0321",
        "block_rule=e8m0_mlx_0321",
        source=_mlx_cpu(name, "0.32.1"),
        exact=f"mx.quantize and mx.dequantize on a CPU, up to 0.32.1{decoded}",
        versions=("0.30.6", "0.32.1"),
    )
    yield of_format(
        fmt,
        f"{name}-mlx-metal-0321",
        "block_rule=e8m0_mlx_metal_0321" + " nan_is_max=True" * (fmt is MXFP8_E4M3),
        source=_MLX_METAL.format("0.32.1"),
        versions=("0.32.1", "0.32.1"),
        exact="the conversions in the Metal headers up to 0.32.1, compiled for a CPU. An Apple GPU may flush float32 "
        "subnormals"
        + (", and the headers decode element codes 7F and FF to 480 and -480" if fmt is MXFP8_E4M3 else ""),
    )


_COMFY_KITCHEN_SOURCE = "comfy-kitchen 0.2.40 backends/eager/quantization.py"


@producer("comfy-kitchen", "comfy-kitchen (ComfyUI)", "0.2.40", package="comfy-kitchen")
def comfy_kitchen() -> Made:
    """Yield the recipes of comfy-kitchen 0.2.40, which quantizes for ComfyUI: its eager back end, in PyTorch.

    The stochastic ones are of ComfyUI itself, which rounds stochastically when it merges a LoRA into a layer.
    """
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-comfy-kitchen",
        "tensor_rule=comfy_kitchen block_rule=comfy_kitchen decode_rule=comfy_kitchen apply=divide nan_code=0 "
        "amax_nan=propagate",
        source=f"{_COMFY_KITCHEN_SOURCE} quantize_nvfp4, tensor/nvfp4.py TensorCoreNVFP4Layout",
        exact="codes, scales and decoded values of the eager back end, whose tensor scale has the precision of x. "
        "ComfyUI's files have the even element in the high nibble, and swizzled scales. For ComfyUI's "
        "stochastic rounding, use nvfp4-comfy-kitchen-stochastic",
    )
    yield nvfp4
    yield variant(
        nvfp4,
        "nvfp4-comfy-kitchen-static",
        "tensor_rule=divided",
        exact="codes, scales and decoded values of the eager back end for a given scale, such as the input_scale of a "
        "layer in ComfyUI, which it does not round to the precision of x. The scale is tensor_amax / 2688 in float32",
    )
    stochastic = of_format(
        NVFP4,
        "nvfp4-comfy-kitchen-stochastic",
        "tensor_rule=comfy_kitchen block_rule=comfyui decode_rule=comfy_kitchen apply=divide nan_code=0 "
        "amax_nan=propagate round_scaled=True stochastic=comfyui_nvfp4",
        versions=("0.29", "0.33"),
        source="ComfyUI 0.33 comfy/float.py stochastic_round_quantize_nvfp4_by_block",
        exact="codes, scales and decoded values of stochastic rounding on a CPU, with the seed or the random numbers. "
        "For a seed, PyTorch 2.11 draws other numbers in 16 bits than PyTorch 2.13, which was recorded. ComfyUI rounds "
        "stochastically when it merges a LoRA into a layer. It computes in the dtype of x, also block scales. For "
        "rounding to nearest, use nvfp4-comfy-kitchen",
    )
    yield stochastic
    yield variant(
        stochastic,
        "nvfp4-comfy-kitchen-stochastic-cuda",
        "tensor_rule=comfy_kitchen_cuda block_rule=comfyui_cuda stochastic=comfyui_nvfp4_cuda",
        exact="codes, scales and decoded values of stochastic rounding by PyTorch on a GPU (H200), for given random "
        "numbers. Recorded with the PyTorch calls of ComfyUI's function, not with ComfyUI itself. In bfloat16, about "
        "1% of the codes differ from those of nvfp4-comfy-kitchen-stochastic. In float32, "
        "scales differ, because PyTorch multiplies by rounded reciprocals",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-comfy-kitchen",
        "block_rule=e8m0_comfy_kitchen decode_rule=e8m0_flashinfer_api stochastic=comfy_kitchen_fp8 amax_nan=propagate",
        source=f"{_COMFY_KITCHEN_SOURCE} quantize_mxfp8",
        exact="codes, scales and decoded values of the eager back end, where scale byte 0 means 0; except that -0 in a "
        "block of zeros keeps its sign. Stochastic rounding gives ComfyUI's codes on a CPU for its seed. Differs from "
        "mxfp8-modelopt only for blocks with scale byte 0, infinities or NaN",
    )
    for element, name in ((E4M3, "fp8-comfy-kitchen"), (E5M2, "fp8-comfy-kitchen-e5m2")):
        yield unscaled(
            element,
            name,
            "tensor_scaling=tensor tensor_rule=fp8_comfy_kitchen decode_rule=fp8_comfy_kitchen round_scaled=True "
            "stochastic=comfy_kitchen_fp8 amax_nan=propagate",
            source=f"{_COMFY_KITCHEN_SOURCE} quantize_per_tensor_fp8, with ComfyUI's scale amax / {element.max:g}",
            exact="codes, scales and decoded values of the eager back end. The reciprocal of the scale is rounded to "
            "the dtype of x, and so are its products with elements. In float16, ComfyUI limits this reciprocal to "
            "65504; fp4kit does not. Stochastic rounding gives comfy-kitchen's codes for given random bytes",
        )
