"""qwix 0.1.8 (JAX), as XLA on a CPU computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.1.8", "0.1.8")
_MX = "its codes: logarithms and quotients in the dtype of the elements, a scale below the root of its smallest normal is 1"


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
    nvfp4 = of_format(
        NVFP4, "nvfp4-qwix", tensor_scaling="none", block_rule="qwix", apply="divide", round_scaled=True, nan_code=8,
        amax_nan="propagate", source="qwix 0.1.8", exact="its codes of float32 and bfloat16, of one level",
    )  # fmt: skip
    yield nvfp4
    yield replace(
        nvfp4, id="nvfp4-qwix-float16", block_rule="qwix_float16", apply="multiply",
        exact="its codes of float16, which XLA on a CPU multiplies with rounded reciprocals; a scale below 2^-7 is 1",
    )  # fmt: skip
    yield of_format(
        MXFP4, "mxfp4-qwix", block_rule="e8m0_qwix", round_scaled=True, nan_code=8, amax_nan="propagate", source="qwix 0.1.8",
        exact=_MX,
    )  # fmt: skip
    yield of_format(
        MXFP8_E4M3, "mxfp8-qwix", block_rule="e8m0_qwix", round_scaled=True, amax_nan="propagate", source="qwix 0.1.8", exact=_MX,
    )  # fmt: skip
