"""AMD Quark 0.13: its quantized tensors, in which a zero has no sign."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.13", "0.13")
_LEAST = (
    "a scale of 2^-127 is stored as 2^-126, blocks with inf hold no value of theirs; its values, of which float16 loses"
    " those under scales from 2^16 on and below 2^-24; those of its fake quantizer, which loses none"
)
_TORCH = "with torch from 2.13 on (before, scales that overflow are NaN)"


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-quark",
        tensor_rule="quark",
        block_rule="quark",
        apply="divide",
        sign="unsigned_zero",
        amax_nan="propagate",
        source="AMD Quark 0.13, scheme nvfp4",
        exact=f"its packed tensors, of the model flow; {_TORCH}",
    )
    yield nvfp4
    yield replace(
        nvfp4,
        id="nvfp4-quark-file2file",
        block_rule="quark_file",
        exact=f"its packed tensors, of the file-to-file flow; {_TORCH}",
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
            exact=f"its packed tensors of scale mode {mode}: logarithms in the dtype of the elements, {_LEAST}",
        )
    yield _mx(MXFP6_E2M3, "mxfp6-quark-e2m3-even")
    yield _mx(MXFP6_E3M2, "mxfp6-quark-e3m2-even")
    yield replace(
        _mx(MXFP8_E4M3, "mxfp8-quark-even"),
        block_rule="e8m0_even_finite",
        decode_rule="e8m0",
        sign="signbit",
        exact="the values of its fake quantizer; it packs no FP8 by blocks",
    )


def _mx(fmt: BlockFormat, id: str) -> Recipe:
    return of_format(
        fmt,
        id,
        block_rule="e8m0_quark_even",
        decode_rule="e8m0_quark",
        sign="unsigned_zero",
        amax_nan="propagate",
        source="AMD Quark 0.13 quantization/utils.py even_round, csrc/mx/funcs.cuh",
        exact=f"its packed tensors, where {_LEAST}",
    )
