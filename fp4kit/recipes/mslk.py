"""Define the recipes of MSLK 2a3c897 (Meta): its Triton kernels for NVFP4 and MX4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Alias, Recipe, Versions, of_format

VERSIONS = Versions("2a3c897", "2a3c897")
_MX4 = "MSLK 2a3c897 triton_quantize_mx4"


def recipes() -> Iterator[Recipe]:
    """Yield MSLK's recipes: four for NVFP4, then one per mode of its MXFP4 kernel: ceil, even, nearest and
    stochastic.
    """
    yield from _nvfp4()
    ceil = of_format(
        MXFP4,
        "mxfp4-mslk",
        block_rule="e8m0_mslk_ceil",
        source=_MX4,
        exact="codes and scales of the Triton kernel with mode ceil, the default, on an H100. Differs from "
        "mxfp4-torchao-ceil for scales above 2^125, which become 2^125, and for blocks with infinities or NaN",
    )
    yield ceil
    yield replace(
        ceil,
        id="mxfp4-mslk-even",
        block_rule="e8m0_mslk_even",
        exact="codes and scales of the Triton kernel with mode even on an H100. Differs from mxfp4-torchao-even for "
        "amaxes of exactly 1.75 * 2^k, for scales above 2^125, and for blocks with infinities or NaN",
    )
    yield replace(
        ceil,
        id="mxfp4-mslk-nearest",
        block_rule="e8m0_mslk_nearest",
        exact="codes and scales of the Triton kernel with mode nearest on an H100. An amax above about 1.414 * 2^k "
        "counts as 2^(k + 1)",
    )
    yield replace(
        ceil,
        id="mxfp4-mslk-stochastic",
        stochastic="mslk",
        source="MSLK 2a3c897 quantize_kernels/mx4.py",
        exact="codes and scales of the Triton kernel with mode stochastic on an H100, for the seed. Scales are rounded "
        "stochastically too. A zero has code 7 (the value 6 times the scale) in about half of all cases. With rounding "
        "to nearest, the recipe equals mxfp4-mslk",
    )


def aliases() -> Iterator[Alias]:
    """Yield one alias, mxfp4-mslk-floor: mode floor of MSLK's MXFP4 kernel, which equals the recipe mxfp4-ocp."""
    yield Alias(
        "mxfp4-mslk-floor",
        "mxfp4-ocp",
        source=_MX4,
        exact="equals this recipe except for blocks with inf or NaN, whose scale is 2^125 or that of the other "
        "elements",
    )


def _nvfp4() -> Iterator[Recipe]:
    """Yield MSLK's four NVFP4 recipes: without fast math, with it, with power-of-two scales, without tensor scale."""
    on_h100 = "on an H100, where MSLK's FP4 conversion was replaced by an equal function"
    given = "except for blocks with NaN if a tensor_amax is given"
    precise = of_format(
        NVFP4,
        "nvfp4-mslk",
        tensor_rule="fouroversix",
        block_rule="mslk",
        amax_nan="propagate",
        source="MSLK 2a3c897 quantize_kernels/nvfp4.py",
        exact=f"codes and scales of the Triton kernel {on_h100}, with 2688 / amax as global scale, {given}. Scales are "
        "at least 2^-9, including those of zero blocks",
    )
    yield precise
    yield replace(
        precise,
        id="nvfp4-mslk-fast",
        block_rule="mslk_fast",
        exact=f"codes and scales of the Triton kernel with fast math {on_h100}, {given}. Amaxes are multiplied by 1/6",
    )
    yield replace(
        precise,
        id="nvfp4-mslk-power",
        block_rule="mslk_power",
        exact=f"codes and scales of the Triton kernel with power-of-two scales {on_h100}, {given}. Equal with "
        "and without fast math",
    )
    yield replace(
        precise,
        id="nvfp4-mslk-single",
        tensor_scaling="none",
        tensor_rule=None,
        amax_nan="ignore",
        exact=f"codes and scales of the Triton kernel without a global scale, {on_h100}",
    )
