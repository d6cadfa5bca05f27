"""Apple MLX: mx.quantize of its CPU back end (0.32.4, and 0.32.1 with an older rule of scales) and of its Metal kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.gguf import FIRST
from fp4kit.recipes.schema import Alias, Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.32.2", "0.32.4")
METAL = "MLX {} fp4.h, fp8.h and fp_quantized.h"


def aliases() -> Iterator[Alias]:
    """Metal's MX rules of 0.32.2 and later."""
    for name, of in (("mxfp4", "mxfp4-torchao-rceil"), ("mxfp8", "mxfp8-te")):
        yield Alias(
            f"{name}-mlx-metal", of, METAL.format("0.32.4"),
            exact="the conversions of its Metal headers, built for a CPU, but for blocks with inf or NaN",
        )  # fmt: skip


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    yield from _nvfp4()
    for fmt in (MXFP4, MXFP8_E4M3):
        yield from _mx(fmt)


def _nvfp4() -> Iterator[Recipe]:
    cpu = of_format(
        NVFP4, "nvfp4-mlx-cpu", tensor_scaling="none", block_rule="mlx", apply="divide", amax_nan="propagate", round_scaled=True,
        **FIRST, source="MLX 0.32.4 mx.quantize mode nvfp4, CPU", exact="mx.quantize on a CPU, from 0.31.2 on",
        versions=Versions("0.31.2", "0.32.4"),
    )  # fmt: skip
    metal = of_format(
        NVFP4, "nvfp4-mlx-metal", tensor_scaling="none", block_rule="mlx_metal", source=METAL.format("0.32.4"),
        versions=Versions("0.32.4", "0.32.4"),
        exact="the conversions of its Metal headers, built for a CPU; an Apple GPU may flush float32 subnormals",
    )  # fmt: skip
    for r in (cpu, metal):
        yield r
        yield replace(
            r, id=f"{r.id}-global", tensor_scaling="tensor", tensor_rule="mlx",
            exact=f"{r.exact}; with global_scale, which is the tensor's amax",
        )  # fmt: skip


def _mx(fmt: BlockFormat) -> Iterator[Recipe]:
    name, first = fmt.name[:5].lower(), FIRST if fmt is MXFP4 else {"nan_code": fmt.element.max_code}
    cpu = of_format(
        fmt, f"{name}-mlx-cpu", block_rule="e8m0_mlx", decode_rule="e8m0_mlx", apply="divide", amax_nan="propagate", **first,
        source=f"MLX 0.32.4 mx.quantize mode {name}, CPU",
        exact="mx.quantize on a CPU, from 0.32.2 on; scale bytes of tiny blocks wrap there, and here, and decode as huge scales; "
        "to float16 it decodes with rounded scales: inf from 2^16 on, 0 below 2^-24",
    )  # fmt: skip
    yield cpu
    yield replace(
        cpu, id=f"{name}-mlx-cpu-0321", block_rule="e8m0_mlx_0321", source=f"MLX 0.32.1 mx.quantize mode {name}, CPU",
        exact="mx.quantize on a CPU, up to 0.32.1", versions=Versions("0.30.6", "0.32.1"),
    )  # fmt: skip
    yield of_format(
        fmt, f"{name}-mlx-metal-0321", block_rule="e8m0_mlx_metal_0321", source=METAL.format("0.32.1"),
        versions=Versions("0.32.1", "0.32.1"),
        exact="the conversions of its Metal headers up to 0.32.1, built for a CPU; an Apple GPU may flush float32 subnormals",
    )  # fmt: skip
