"""Reject recipes that no CUDA kernel supports, before any launch.

The limits in this module hold for all kernels. dispatch.py says which shapes of blocks each kernel supports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fp4kit.call.parse import Declined
from fp4kit.formats import E2M1, ElementFormat, IntegerOrFloat, is_same
from fp4kit.recipes import Recipe

MAX_EXPONENT = 100  # the largest |exponent| of an element, so that encoding and decoding stay in float32's range
FOUR_OVER_SIX_COLUMNS = 16  # the columns of a 4over6 block that kernels support


def check_formats(r: Recipe) -> None:
    """Raise Declined if no kernel supports a recipe. The message says what is needed and what to do instead."""
    wrong = unsupported(r)
    if wrong:
        raise Declined(f"{r.id} has {wrong}; compute on the CPU with cupy.asnumpy(x)")


@lru_cache(256)
def unsupported(r: Recipe) -> str | None:
    """Return why no kernel supports a recipe, or None if it exceeds no limit of the kernels."""
    return next(
        (f"{what}, which no CUDA kernel supports; needs {needed}" for is_wrong, what, needed in _limits(r) if is_wrong),
        None,
    )


def _limits(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Yield one tuple per limit: whether a recipe exceeds it, the property that exceeds it, and what is needed."""
    e, s = r.element, r.scale
    yield not _has_kernels(e), f"elements {e} with bias {e.bias}", "values from 2^-100 to 2^100"
    if r.is_custom and s is not None and s.has_zero:
        yield s.bias < 0, f"scales {s} with bias {s.bias}", "a bias of 0 or more"
        yield s.mantissa_bits == 0, f"scales {s} without mantissa bits", "E8M0, or at least one mantissa bit"
    narrow = r.block is not None and r.block_size % 4 != 0
    yield narrow, f"blocks of {r.block_size} columns", "a multiple of 4"
    yield e.is_integer and r.rounding != "rn", f"rounding={r.rounding!r} for elements {e}", "'rn'"
    lanes = r.amax_nan == "lanes" and r.tensor_scaling == "block"
    yield lanes, "amax_nan='lanes' with tensor_scaling='block'", "'ignore' or 'propagate'"
    if r.four_over_six:
        yield not (is_same(e, E2M1) or isinstance(e, IntegerOrFloat)), f"4over6 with elements {e}", "E2M1"
        in_lanes = (r.lane_sums or r.four_over_six == "max") and r.block_rows > 1
        yield (
            in_lanes,
            f"4over6 by {'lane_sums' if r.lane_sums else 'max'} with blocks of {r.block_rows} rows",
            "one row",
        )
        shape = f"4over6 with blocks of {r.block_size} columns"
        yield r.block_size != FOUR_OVER_SIX_COLUMNS, shape, f"{FOUR_OVER_SIX_COLUMNS}"


def _has_kernels(e: ElementFormat) -> bool:
    """Return True if kernels can encode and decode an element format."""
    if e.is_integer:
        return True
    return -MAX_EXPONENT <= e.emin - e.mantissa_bits and e.emax <= MAX_EXPONENT and e.bias >= 0
