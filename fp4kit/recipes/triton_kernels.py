"""Define the recipes of triton_kernels (OpenAI): v3.5.1, as in vLLM 0.33 and TensorRT-LLM, and its main branch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("v3.5.1", "v3.5.1")
_SOURCE = "triton_kernels v3.5.1 numerics_details/mxfp.py downcast_to_mxfp"
_UP = "the PyTorch reference with ROUND_UP, and the Triton kernel except for blocks with NaN"
_DOWN = "the PyTorch reference with ROUND_DOWN, and the Triton kernel except for blocks with NaN"


def recipes() -> Iterator[Recipe]:
    """Yield triton_kernels' recipes: those for MXFP4, then those for MXFP8."""
    up = of_format(
        MXFP4,
        "mxfp4-triton-kernels",
        block_rule="e8m0_triton_up",
        rounding="rna",
        decode_rule="e8m0_flashinfer_api",
        amax_nan="propagate",
        source=_SOURCE,
        exact=f"{_UP}. Ties round away from zero",
    )
    yield up
    yield replace(
        up,
        id="mxfp4-triton-kernels-down",
        block_rule="e8m0_triton_down",
        exact=f"{_DOWN}. Ties round away from zero",
    )
    yield replace(
        up,
        id="mxfp4-triton-kernels-main",
        rounding="rn",
        source="triton_kernels main 018a674 (3.8) mxfp.py downcast_to_mxfp",
        versions=Versions("018a674", "018a674"),
        exact="derived from the source code, not recorded. The source code rounds ties to even since this commit",
    )
    for fmt, suffix in ((MXFP8_E4M3, ""), (MXFP8_E5M2, "-e5m2")):
        up = replace(
            up,
            id=f"mxfp8-triton-kernels{suffix}",
            element=fmt.element,
            rounding="rn",
            exact=_UP,
        )
        yield up
        if not suffix:
            yield replace(up, id="mxfp8-triton-kernels-down", block_rule="e8m0_triton_down", exact=_DOWN)
