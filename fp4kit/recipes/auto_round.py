"""Intel auto-round 0.16.1: its data types as packed by QuantLinear.pack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.16.1", "0.16.1")

# What packing makes of codes, as it divides values by scales in the dtype of x.
PACKED = (
    ": values that overflow the dtype have the code of zero, as have all under a scale that is 0 in float16 (those of 0"
    " / 0 with the sign of x86's NaN); the sign of an element that is NaN is undefined there"
)
PACKED8 = (
    ": values that overflow the dtype have the largest code, as have all under a scale that is 0 in float16 (those of 0"
    " / 0 are FF, as on x86); the sign of an element that is NaN is undefined there; with torch from 2.13 on (before,"
    " elements that overflow are NaN)"
)


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-auto-round",
        tensor_rule="auto_round",
        block_rule="auto_round",
        decode_rule="auto_round",
        sign="unsigned_zero",
        nan_code=0,
        repacked=True,
        amax_nan="propagate",
        source="auto-round 0.16.1 data_type/nvfp.py nv_fp4",
        exact="its packed tensors, whose codes are found of values in the dtype of x",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-auto-round-fake",
        sign="negative",
        repacked=False,
        exact="the values of its fake quantizer, where small negatives are -0: packing, which begins with them, "
        "drops that sign",
    )
    yield replace(
        nvfp4,
        id="nvfp4-auto-round-opt",
        search="auto_round_percents",
        source="auto-round 0.16.1 data_type/nvfp.py opt_rtn_nv_fp4, search_nvfp4_scale",
        exact="its packed tensors of iters=0, its default; a tensor_amax that is given is that of the search, too",
    )
    floor = of_format(
        MXFP4,
        "mxfp4-auto-round",
        block_rule="e8m0_auto_round",
        rounding="rns",
        sign="negative",
        nan_code=8,
        repacked=True,
        amax_nan="propagate",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx",
        exact=f"its packed tensors of iters=0 with disable_opt_rtn{PACKED}",
    )
    yield floor
    yield replace(
        floor,
        id="mxfp4-auto-round-opt",
        search="auto_round_powers",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_opt_rtn",
        exact=f"its packed tensors of iters=0, its default, but for blocks with inf{PACKED}",
    )
    for rule in ("rceil", "rceil_v2"):
        yield replace(
            floor,
            id=f"mxfp4-auto-round-{rule.replace('_', '-')}",
            block_rule=f"e8m0_auto_round_{rule}",
            source=f"auto-round 0.16.1 data_type/mxfp.py quant_mx_{rule}",
            exact=f"its packed tensors of {rule}{PACKED}",
        )
    mxfp8 = replace(
        floor, id="mxfp8-auto-round", element=MXFP8_E4M3.element, nan_code=0xFF, exact=f"its codes{PACKED8}"
    )
    yield mxfp8
    yield replace(
        mxfp8,
        id="mxfp8-auto-round-rceil",
        block_rule="e8m0_auto_round_rceil",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_rceil",
    )
