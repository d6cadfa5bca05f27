"""Define the recipes of AMD aiter e404860: the PyTorch reference of its MXFP4 quantizers, and its Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, Versions, of_format

VERSIONS = Versions("e404860", "e404860")
_SOURCE = "aiter e404860 utility/fp4_utils.py, ops/quant.py per_1x32_f4_quant"
_TRITON = "aiter e404860 Triton kernel"


def recipes() -> Iterator[Recipe]:
    """Yield aiter's recipes: MXFP4 with modes RoundUp and Ceil, then NVFP4. Its other quantizers are aliases."""
    up = of_format(
        MXFP4,
        "mxfp4-aiter",
        block_rule="e8m0_aiter_up",
        amax_nan="propagate",
        source=_SOURCE,
        exact="codes and scales with mode RoundUp, the default. Differs from mxfp4-torchao-rceil only for amaxes below "
        "2^-124",
    )
    yield up
    yield replace(
        up,
        id="mxfp4-aiter-ceil",
        block_rule="e8m0_aiter_ceil",
        exact="codes and scales with mode Ceil. Differs from mxfp4-torchao-ceil only for amaxes below 2^-124",
    )
    yield of_format(
        NVFP4,
        "nvfp4-aiter-triton",
        tensor_scaling="none",
        block_rule="aiter",
        nan_code=4,
        source=f"{_TRITON} _nvfp4_quant_op",
        exact="codes and scales of the Triton kernel on an H100. Elements are multiplied by the reciprocal of the "
        "scale before it is rounded to E4M3, and zeros of a zero block become 2",
    )


def aliases() -> Iterator[Alias]:
    """Yield the aliases for aiter's modes RoundDown and Even, and for its Triton kernels, which equal other recipes."""
    for name, of, mode in (("down", "mxfp4-ocp", "RoundDown"), ("even", "mxfp4-torchao-even", "Even")):
        yield Alias(f"mxfp4-aiter-{name}", of, source=_SOURCE, exact=f"gives aiter's codes and scales with mode {mode}")
    yield Alias(
        "mxfp4-aiter-triton",
        "mxfp4-torchao-even",
        source=f"{_TRITON} _mxfp4_quant_op",
        exact="gives the codes of aiter's Triton kernel on an H100, except for blocks with an amax from 1.75 * 2^127 "
        "on, an infinity or NaN. Scales below 1 were recorded as 1 there, because the kernel casts a negative number "
        "to uint8",
    )
