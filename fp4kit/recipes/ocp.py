"""Define the recipes of the OCP Microscaling (MX) standard v1.0."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("v1.0", "v1.0")


def recipes() -> Iterator[Recipe]:
    """Yield the only recipe of the standard, mxfp4-ocp."""
    yield of_format(
        MXFP4,
        "mxfp4-ocp",
        block_rule="e8m0_floor",
        amax_nan="propagate",
        exact="torchao 0.19 dev, to_mx with mode FLOOR; for 0.18.0 use mxfp4-torchao-floor-018",
        source="OCP MX v1.0, 6.3; torchao 0.19 dev mx_formats/mx_tensor.py to_mx FLOOR",
    )
