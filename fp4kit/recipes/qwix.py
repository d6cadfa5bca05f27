"""qwix 0.1.8 (JAX), as XLA on a CPU computes it."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("0.1.8", "0.1.8")
_COMMON = (
    "XLA on a CPU multiplies by rounded reciprocals where qwix divides; a scale below 2^-63 (2^-7 for float16) is 1"
)
_MX = (
    "its codes with jax 0.10, which rounds logarithms to the dtype of the elements (0.11 does not round those of"
    f" bfloat16); {_COMMON}"
)


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
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
        exact=f"its codes: {_COMMON}",
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
