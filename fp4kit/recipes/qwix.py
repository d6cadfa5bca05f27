"""Define the recipes of qwix 0.1.8 (JAX), as XLA computes them on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.1.8", "0.1.8")
_COMMON = (
    "Where qwix divides, XLA on a CPU multiplies by rounded reciprocals. A scale below 2^-63 (2^-7 for float16) "
    "becomes 1"
)
_MX = (
    "codes with jax 0.10, which rounds logarithms to the dtype of the elements (jax 0.11 does not for bfloat16). "
    f"{_COMMON}"
)


def recipes() -> Iterator[Recipe]:
    """Yield qwix's recipes: one for each of NVFP4, MXFP4 and MXFP8, in this order."""
    yield of_format(
        NVFP4,
        "nvfp4-qwix",
        tensor_scaling="none",
        block_rule="qwix",
        flush=True,
        round_scaled=True,
        nan_code=8,
        amax_nan="propagate",
        source="qwix 0.1.8",
        exact=f"codes. {_COMMON}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-qwix",
        block_rule="e8m0_qwix",
        round_scaled=True,
        nan_code=8,
        amax_nan="propagate",
        source="qwix 0.1.8",
        exact=_MX,
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-qwix",
        block_rule="e8m0_qwix",
        round_scaled=True,
        amax_nan="propagate",
        source="qwix 0.1.8",
        exact=_MX,
    )
