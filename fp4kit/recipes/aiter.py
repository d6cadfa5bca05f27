"""Define the recipes of AMD aiter e404860: the PyTorch reference of its MXFP4 quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4
from fp4kit.recipes.schema import Alias, Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("e404860", "e404860")
_SOURCE = "aiter e404860 utility/fp4_utils.py, ops/quant.py per_1x32_f4_quant"


def recipes() -> Iterator[Recipe]:
    """Yield aiter's two recipes that no other producer's recipe equals: modes RoundUp and Ceil."""
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


def aliases() -> Iterator[Alias]:
    """Yield the aliases for aiter's modes RoundDown and Even, which equal recipes of OCP and torchao."""
    for name, of, mode in (("down", "mxfp4-ocp", "RoundDown"), ("even", "mxfp4-torchao-even", "Even")):
        yield Alias(f"mxfp4-aiter-{name}", of, source=_SOURCE, exact=f"has its codes and scales with mode {mode}")
