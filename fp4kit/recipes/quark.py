"""Define the recipes of AMD Quark 0.13: its quantized tensors, in which a zero has no sign."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.13", "0.13")
_STORED = (
    "a scale of 2^-127 is stored as 2^-126 and blocks with inf lose their values; the decoded values, where float16 "
    "loses scales from 2^16 on and below 2^-24; and the values of the fake quantizer, which keeps those scales"
)
_TORCH = "Needs torch 2.13 or later, because earlier versions turn scales that overflow into NaN"


def recipes() -> Iterator[Recipe]:
    """Yield Quark's recipes for NVFP4, then MXFP4, MXFP6 and MXFP8, in the order of fp4kit.recipes()."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-quark",
        tensor_rule="quark",
        block_rule="quark",
        apply="divide",
        sign="unsigned_zero",
        amax_nan="propagate",
        source="AMD Quark 0.13, scheme nvfp4",
        exact=f"packed tensors of the model flow. {_TORCH}",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-quark-file2file",
        block_rule="quark_file",
        exact=f"packed tensors of the file-to-file flow. {_TORCH}",
    )
    even = _mx(MXFP4, "mxfp4-quark-even")
    yield even
    for mode in ("floor", "ceil"):
        yield replace(
            even,
            id=f"mxfp4-quark-{mode}",
            block_rule=f"e8m0_quark_{mode}",
            apply="divide",
            source="AMD Quark 0.13 quantization/observer.py get_scale",
            exact=f"packed tensors with scale mode {mode}, where logarithms are computed in the dtype of the "
            f"elements, {_STORED}",
        )
    yield _mx(MXFP6_E2M3, "mxfp6-quark-e2m3-even")
    yield _mx(MXFP6_E3M2, "mxfp6-quark-e3m2-even")
    yield replace(
        _mx(MXFP8_E4M3, "mxfp8-quark-even"),
        block_rule="e8m0_even_finite",
        decode_rule="e8m0",
        sign="signbit",
        exact="values of the fake quantizer. Quark does not pack FP8 with block scales",
    )


def _mx(fmt: BlockFormat, id: str) -> Recipe:
    """Return Quark's recipe for an MX format and Quark's scale mode "even"."""
    return of_format(
        fmt,
        id,
        block_rule="e8m0_quark_even",
        decode_rule="e8m0_quark",
        sign="unsigned_zero",
        amax_nan="propagate",
        source="AMD Quark 0.13 quantization/utils.py even_round, csrc/mx/funcs.cuh",
        exact=f"packed tensors, where {_STORED}",
    )
