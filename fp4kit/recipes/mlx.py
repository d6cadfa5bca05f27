"""Apple MLX: mx.quantize and mx.dequantize of its CPU back end and of its Metal kernels, at 0.32.4 and at older
versions.

Ids without a version are those of 0.32.4. Up to 0.32.2 (-0322) the E4M3 codes 7F and FF decode to 480 and -480 instead
of NaN; up to 0.32.1 (-0321) MX scales are the nearest power of two instead of the next one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.gguf import FIRST
from fp4kit.recipes.schema import Alias, Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.32.2", "0.32.4")
DECODES_NAN = Versions("0.32.3", "0.32.4")
METAL = "MLX {} fp4.h, fp8.h and fp_quantized.h"


def _cpu(mode: str, version: str) -> str:
    """The source of a recipe of the CPU back end."""
    return f"MLX {version} mx.quantize mode {mode}, CPU"


def aliases() -> Iterator[Alias]:
    """Metal's MX rules of 0.32.2 and later."""
    for name, of in (("mxfp4", "mxfp4-torchao-rceil"), ("mxfp8", "mxfp8-te")):
        yield Alias(
            f"{name}-mlx-metal",
            of,
            METAL.format("0.32.4"),
            exact="the conversions of its Metal headers, built for a CPU, but for blocks with inf or NaN",
        )


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    yield from _nvfp4()
    for fmt in (MXFP4, MXFP8_E4M3):
        yield from _mx(fmt)


def _nvfp4() -> Iterator[Recipe]:
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
        exact="mx.quantize on a CPU from 0.31.2 on, mx.dequantize from 0.32.3 on",
        versions=DECODES_NAN,
    )
    metal = of_format(
        NVFP4,
        "nvfp4-mlx-metal",
        tensor_scaling="none",
        block_rule="mlx_metal",
        source=METAL.format("0.32.4"),
        versions=Versions("0.32.4", "0.32.4"),
        exact="the conversions of its Metal headers, built for a CPU; an Apple GPU may flush float32 subnormals; up "
        "to 0.32.2 "
        "scale bytes 7F and FF decode to 480 and -480, by decode_rule='mlx_0322'",
    )
    older = replace(
        cpu,
        id="nvfp4-mlx-cpu-0322",
        decode_rule="mlx_0322",
        source=_cpu("nvfp4", "0.32.2"),
        exact="mx.quantize and mx.dequantize on a CPU, from 0.31.2 to 0.32.2: scale bytes 7F and FF decode to 480 "
        "and -480",
        versions=Versions("0.31.2", "0.32.2"),
    )
    for r in (cpu, older, metal):
        yield r
        yield replace(
            r,
            id=f"{r.id}-global",
            tensor_scaling="tensor",
            tensor_rule="mlx",
            exact=f"{r.exact}; with global_scale, which is the tensor's amax",
        )


def _mx(fmt: BlockFormat) -> Iterator[Recipe]:
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
        exact="mx.quantize on a CPU from 0.32.2 on"
        + ", mx.dequantize from 0.32.3 on" * (fmt is MXFP8_E4M3)
        + "; scale bytes of tiny blocks wrap there, and here, and decode as huge scales; to float16 it decodes with "
        "rounded "
        "scales: inf from 2^16 on, 0 below 2^-24",
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
        exact="the conversions of its Metal headers up to 0.32.1, built for a CPU; an Apple GPU may flush float32 "
        "subnormals" + (", and it decodes element codes 7F and FF to 480 and -480" if fmt is MXFP8_E4M3 else ""),
    )
