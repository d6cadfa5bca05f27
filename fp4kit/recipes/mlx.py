"""Define the recipes of Apple MLX: mx.quantize and mx.dequantize on a CPU and on Metal, in several versions.

An id without a version is for 0.32.4. Ids ending in -0322 are for versions up to 0.32.2, where the E4M3 codes 7F and FF
decode to 480 and -480 instead of NaN. Ids ending in -0321 are for versions up to 0.32.1, where in addition an MX scale
is the nearest power of two instead of the next larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.gguf import FIRST
from fp4kit.recipes.schema import Alias, Recipe, Versions, of_format

VERSIONS = Versions("0.32.2", "0.32.4")
DECODES_NAN = Versions("0.32.3", "0.32.4")
METAL = "MLX {} fp4.h, fp8.h and fp_quantized.h"


def _cpu(mode: str, version: str) -> str:
    """Return the text of Recipe.source for MLX's CPU back end, such as "MLX 0.32.4 mx.quantize mode nvfp4, CPU"."""
    return f"MLX {version} mx.quantize mode {mode}, CPU"


def aliases() -> Iterator[Alias]:
    """Yield aliases for the MX quantizers of MLX's Metal kernels since 0.32.2, which equal other producers' recipes."""
    for name, of in (("mxfp4", "mxfp4-torchao-rceil"), ("mxfp8", "mxfp8-te")):
        yield Alias(
            f"{name}-mlx-metal",
            of,
            METAL.format("0.32.4"),
            exact="equals this recipe except for blocks with inf or NaN (compared with the conversions in MLX's Metal "
            "headers, compiled for a CPU)",
        )


def recipes() -> Iterator[Recipe]:
    """Yield MLX's recipes: first those for NVFP4, then those for MXFP4, then those for MXFP8."""
    yield from _nvfp4()
    for fmt in (MXFP4, MXFP8_E4M3):
        yield from _mx(fmt)


def _nvfp4() -> Iterator[Recipe]:
    """Yield the NVFP4 recipes: for the CPU back end, for its versions up to 0.32.2, and for the Metal kernels."""
    cpu = of_format(
        NVFP4,
        "nvfp4-mlx-cpu",
        tensor_scaling="none",
        block_rule="mlx",
        apply="divide",
        amax_nan="propagate",
        round_scaled=True,
        **FIRST,
        source=_cpu("nvfp4", "0.32.4"),
        exact="mx.quantize on a CPU since 0.31.2, mx.dequantize since 0.32.3",
        versions=DECODES_NAN,
    )
    metal = of_format(
        NVFP4,
        "nvfp4-mlx-metal",
        tensor_scaling="none",
        block_rule="mlx_metal",
        source=METAL.format("0.32.4"),
        versions=Versions("0.32.4", "0.32.4"),
        exact="the conversions in the Metal headers, compiled for a CPU. An Apple GPU may flush float32 subnormals. "
        "For versions up to 0.32.2, where scale bytes 7F and FF decode to 480 and -480, use decode_rule='mlx_0322'",
    )
    older = replace(
        cpu,
        id="nvfp4-mlx-cpu-0322",
        decode_rule="mlx_0322",
        source=_cpu("nvfp4", "0.32.2"),
        exact="mx.quantize and mx.dequantize on a CPU, from 0.31.2 to 0.32.2, where scale bytes 7F and FF decode to "
        "480 and -480",
        versions=Versions("0.31.2", "0.32.2"),
    )
    for r in (cpu, older, metal):
        yield r
        yield replace(
            r,
            id=f"{r.id}-global",
            tensor_scaling="tensor",
            tensor_rule="mlx",
            exact=f"{r.exact}. With global_scale, which is the tensor amax",
        )


def _mx(fmt: BlockFormat) -> Iterator[Recipe]:
    """Yield MLX's recipes for an MX format: first those of the CPU back end, then one of Metal up to 0.32.1."""
    name, first = fmt.name[:5].lower(), FIRST if fmt is MXFP4 else {"nan_code": fmt.element.max_code}
    cpu = of_format(
        fmt,
        f"{name}-mlx-cpu",
        block_rule="e8m0_mlx",
        decode_rule="e8m0_mlx",
        apply="divide",
        amax_nan="propagate",
        **first,
        source=_cpu(name, "0.32.4"),
        exact="mx.quantize on a CPU since 0.32.2"
        + ", mx.dequantize since 0.32.3" * (fmt is MXFP8_E4M3)
        + ". As in MLX, scale bytes of tiny blocks wrap and decode as huge scales, and float16 values are decoded "
        "with float16 scales, which are inf from 2^16 on and 0 below 2^-24",
        versions=DECODES_NAN if fmt is MXFP8_E4M3 else None,
    )
    yield cpu
    decoded = ""
    if fmt is MXFP8_E4M3:
        decoded = "; element codes 7F and FF decode to 480 and -480"
        cpu = replace(
            cpu,
            id=f"{name}-mlx-cpu-0322",
            decode_rule="e8m0_mlx_0322",
            source=_cpu(name, "0.32.2"),
            exact=f"mx.quantize and mx.dequantize on a CPU, 0.32.2{decoded}",
            versions=Versions("0.32.2", "0.32.2"),
        )
        yield cpu
    yield replace(
        cpu,
        id=f"{name}-mlx-cpu-0321",
        block_rule="e8m0_mlx_0321",
        source=_cpu(name, "0.32.1"),
        exact=f"mx.quantize and mx.dequantize on a CPU, up to 0.32.1{decoded}",
        versions=Versions("0.30.6", "0.32.1"),
    )
    yield of_format(
        fmt,
        f"{name}-mlx-metal-0321",
        block_rule="e8m0_mlx_metal_0321",
        source=METAL.format("0.32.1"),
        versions=Versions("0.32.1", "0.32.1"),
        exact="the conversions in the Metal headers up to 0.32.1, compiled for a CPU. An Apple GPU may flush float32 "
        "subnormals"
        + (", and the headers decode element codes 7F and FF to 480 and -480" if fmt is MXFP8_E4M3 else ""),
    )
