"""Define the recipes of Intel auto-round 0.16.1: its data types, as QuantLinear.pack stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.16.1", "0.16.1")

# Texts for Recipe.exact: the exceptions that QuantLinear.pack causes, because it recomputes each code as value / scale
# in the dtype of x.
PACKED = (
    ". Values that overflow the dtype get the code of zero. So do all values whose scale is 0 in float16; the sign of "
    "0 / 0 is that of x86's NaN. The sign of a NaN element is undefined in auto-round"
)
PACKED8 = (
    ". Values that overflow the dtype get the largest code. So do all values whose scale is 0 in float16; 0 / 0 gives "
    "FF, as on x86. The sign of a NaN element is undefined in auto-round. Needs torch 2.13 or later, because earlier "
    "versions turn elements that overflow into NaN"
)


def recipes() -> Iterator[Recipe]:
    """Yield auto-round's recipes for NVFP4, then MXFP4, then MXFP8, in the order of fp4kit.recipes()."""
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
        exact="packed tensors, whose codes are recomputed from values in the dtype of x",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-auto-round-fake",
        sign="negative",
        repacked=False,
        exact="values of the fake quantizer, where small negative values become -0 (packing starts from these values "
        "and drops the sign)",
    )
    yield replace(
        nvfp4,
        id="nvfp4-auto-round-opt",
        search="auto_round_percents",
        source="auto-round 0.16.1 data_type/nvfp.py opt_rtn_nv_fp4, search_nvfp4_scale",
        exact="packed tensors with iters=0, the default. If tensor_amax is passed, the search uses it too",
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
        exact=f"packed tensors with iters=0 and disable_opt_rtn{PACKED}",
    )
    yield floor
    yield replace(
        floor,
        id="mxfp4-auto-round-opt",
        search="auto_round_powers",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_opt_rtn",
        exact=f"packed tensors with iters=0, the default, except for blocks with inf{PACKED}",
    )
    for rule in ("rceil", "rceil_v2"):
        yield replace(
            floor,
            id=f"mxfp4-auto-round-{rule.replace('_', '-')}",
            block_rule=f"e8m0_auto_round_{rule}",
            source=f"auto-round 0.16.1 data_type/mxfp.py quant_mx_{rule}",
            exact=f"packed tensors with data type function quant_mx_{rule}{PACKED}",
        )
    mxfp8 = replace(floor, id="mxfp8-auto-round", element=MXFP8_E4M3.element, nan_code=0xFF, exact=f"codes{PACKED8}")
    yield mxfp8
    yield replace(
        mxfp8,
        id="mxfp8-auto-round-rceil",
        block_rule="e8m0_auto_round_rceil",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_rceil",
    )
