"""Define the recipes of torchao: nvfp4_quantize and to_mx of 0.19 dev, and to_mx of release 0.18.0.

Mode FLOOR of to_mx in 0.19 dev is the OCP MX standard v1.0 (mxfp4-ocp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit import formats
from fp4kit.formats import MXFP4, NVFP4, BlockFormat
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.19 dev", "0.19 dev")


def recipes() -> Iterator[Recipe]:
    """Yield torchao's recipes for NVFP4, then MXFP4, MXFP6 and MXFP8, in the order of fp4kit.recipes()."""
    for family in (_nvfp4(), _mxfp4(), _mxfp6(), _mxfp8()):
        yield from family


def _nvfp4() -> Iterator[Recipe]:
    """Yield torchao's two NVFP4 recipes: with one tensor scale per tensor, then without a tensor scale."""
    torchao = of_format(
        NVFP4,
        "nvfp4-torchao",
        tensor_rule="divided",
        block_rule="torchao",
        amax_nan="propagate",
        nan_code=0xB,  # the code of 0 * inf: on x86 that NaN is negative, and its bits round to -1.5
        source="torchao 0.19 dev mx_formats/nvfp4_tensor.py nvfp4_quantize",
        exact="nvfp4_quantize with a per-tensor scale, on a CPU, since 0.18.0",
        versions=Versions("0.18.0", "0.19 dev"),
    )
    yield torchao
    yield replace(
        torchao,
        id="nvfp4-torchao-single",
        tensor_scaling="none",
        tensor_rule=None,
        exact="nvfp4_quantize without a per-tensor scale, since 0.18.0",
    )


def _mxfp4() -> Iterator[Recipe]:
    """Yield the MXFP4 recipes of torchao 0.19 dev, then the MXFP4 recipes of 0.18.0."""
    # The recipes of 0.19 dev cover RCEIL, CEIL and EVEN, because mode FLOOR is the recipe mxfp4-ocp.
    for mode in ("rceil", "ceil", "even"):
        yield _to_mx(MXFP4, mode, f"mxfp4-torchao-{mode}")
    for mode in ("floor", "rceil", "ceil", "even"):
        yield _to_mx_018(MXFP4, mode, f"mxfp4-torchao-{mode}")


def _mxfp6() -> Iterator[Recipe]:
    """Yield the MXFP6 recipes of torchao."""
    for fmt in (formats.MXFP6_E2M3, formats.MXFP6_E3M2):
        for mode in ("floor", "rceil"):
            for made in (_to_mx, _to_mx_018):
                yield made(fmt, mode, f"mxfp6-torchao-{mode}-{fmt.element.name.lower()}")


def _mxfp8() -> Iterator[Recipe]:
    """Yield the MXFP8 recipes of torchao."""
    for fmt, suffix in ((formats.MXFP8_E4M3, ""), (formats.MXFP8_E5M2, "-e5m2")):
        for mode in ("floor", "rceil", "ceil", "even"):
            for made in (_to_mx, _to_mx_018):
                yield made(fmt, mode, f"mxfp8-torchao-{mode}{suffix}")


def _to_mx(fmt: BlockFormat, mode: str, id: str) -> Recipe:
    """Return the recipe of to_mx in torchao 0.19 dev, for an MX format and a mode, that is how scales are rounded."""
    return of_format(
        fmt,
        id,
        block_rule=f"e8m0_{mode}",
        amax_nan="propagate",
        source=f"torchao 0.19 dev mx_formats/mx_tensor.py to_mx {mode.upper()}",
        exact=f"to_mx with mode {mode.upper()} in 0.19 dev; for 0.18.0 use {id}-018",
    )


def _to_mx_018(fmt: BlockFormat, mode: str, id: str) -> Recipe:
    """Return the recipe of to_mx in torchao 0.18.0, for an MX format and a mode."""
    scale_0 = (
        "under which elements become zeros" if mode == "rceil" else "which encodes as 2^-126 but decodes as 2^-127"
    )
    more = {
        "even": ", and for blocks with inf or an amax that rounds to inf",
        "rceil": "; for blocks with inf; and for an amax a few ulp above 2^k times the largest element value, where "
        "the log2 of the release rounds down",
    }
    return of_format(
        fmt,
        f"{id}-018",
        block_rule=f"e8m0_{mode}_018",
        amax_nan="propagate",
        versions=Versions("0.18.0", "0.18.0"),
        source=f"torchao 0.18.0 mx_formats/mx_tensor.py to_mx {mode.upper()}",
        exact=f"to_mx with mode {mode.upper()} in release 0.18.0. Differs from {id} for scale byte 0, "
        f"{scale_0}{more.get(mode, ', and for blocks with inf')}",
    )
