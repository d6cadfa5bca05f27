"""Define the recipes of microxcaling 7bc4195: its fake quantizers."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit.formats import MXFP4, MXFP8_E4M3, BlockFormat
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("7bc4195", "7bc4195")


def recipes() -> Iterator[Recipe]:
    """Yield microxcaling's recipes, one per rounding mode: four for MXFP4, then two for MXFP8."""
    yield from _fakes(MXFP4, ("nearest", "nearest_flush", "even", "floor"))
    yield from _fakes(MXFP8_E4M3, ("nearest", "even"))


def _fakes(fmt: BlockFormat, modes: tuple[str, ...]) -> Iterator[Recipe]:
    """Yield microxcaling's recipes for a format, one per rounding mode, in the order of `modes`."""
    for mode in modes:
        yield of_format(
            fmt,
            f"mx{fmt.name[2:5].lower()}-microxcaling-{mode.replace('_', '-')}",
            block_rule="e8m0_floor",
            fake_only=True,
            fake_rule=f"microxcaling_{mode}",
            amax_nan="propagate",
            source="microxcaling 7bc4195 mx/mx_ops.py _quantize_mx",
            exact=f"quantize_mx_op with round={mode.split('_')[0]!r}" + " and flush_fp32_subnorms" * ("flush" in mode),
        )
