"""Define the recipe of the INT4 fake quantization of slime and miles, for quantization-aware training (QAT)."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import INT4
from fp4kit.recipes.schema import Recipe, Versions

VERSIONS = Versions("unversioned", "unversioned")


def recipes() -> Iterator[Recipe]:
    """Yield the only recipe of this file, int4-qat: INT4 in blocks of 128 elements with float32 scales."""
    yield Recipe(
        id="int4-qat",
        element=INT4,
        scale=None,
        block=(1, 128),
        block_rule=None,
        tensor_scaling="block",
        tensor_rule="int4_qat",
        fake_rule="int4_qat",
        apply="divide",
        narrow=True,
        amax_nan="propagate",
        source="INT4 fake quantization of the trainers slime and miles",
        exact="the formula clamp(round(w / s), -7, 7) * s for a weight w, where s = max(amax / 7, 1e-5)",
    )
