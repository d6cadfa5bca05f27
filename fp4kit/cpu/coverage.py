"""Names of what the compiled engine has: rules of scales, and the arithmetic of elements, by the fields that they
depend on.

A variant of a recipe whose fields have a name there is computed by it, whatever its other fields are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import ml_dtypes
import numpy as np

from fp4kit import formats
from fp4kit.cuda.compile.traits import is_same, then_encodes
from fp4kit.formats import E8M0, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import TOPS
from fp4kit.reference.search_factors import FACTORS


def rule_key(r: Recipe) -> str | None:
    """Of the rule that makes block scales of amaxes, or by the errors that they leave; None for a recipe without
    one.
    """
    if r.block_rule is None or r.scale is None:
        return None
    if r.four_over_six:
        flags = [name for name in ("fast_error", "lane_sums", "keep_infinity", "flush") if getattr(r, name)]
        flags += [r.rounding] * (r.rounding != "rn")
        return " ".join(
            [r.block_rule, r.four_over_six, _name(r.element), _name(r.scale), str(r.scale_max), top_rule(r), *flags]
        )
    propagate = "propagate" if r.amax_nan == "propagate" else "ignore"
    return (
        f"{r.block_rule} {_name(r.element)} {_name(r.scale)} {r.scale_max} {propagate}" + " infinity" * r.keep_infinity
    )


def tensor_key(r: Recipe) -> str | None:
    """Of the rule that makes a tensor's scale of its amax; None for a recipe without one."""
    return None if r.tensor_rule is None else f"{r.tensor_rule} {_name(r.element)} {r.scale_max}"


def element_key(r: Recipe) -> str:
    """Of what makes a code of an element and a factor, where both are finite."""
    flags = [name for name in ("flush", "round_scaled", "narrow") if getattr(r, name)] + ["then_encode"] * then_encodes(
        r
    )
    return " ".join([_name(r.element), r.apply, r.rounding, r.sign, *flags])


def decode_key(r: Recipe) -> str:
    """Of what makes a value of a code, a block scale's code and a tensor scale."""
    scale = "none" if r.scale is None else _name(r.scale)
    return f"{r.decode_rule} {_name(r.element)} {scale} {r.scale_max} {top_rule(r)}"


def top_rule(r: Recipe) -> str:
    """The tensor rule where it says what a scale of 1 covers; else "none"."""
    return r.tensor_rule if r.tensor_rule in TOPS else "none"


def kept_factors(r: Recipe, dtype: np.dtype) -> tuple[float, float]:
    """The least and the largest factor of a block under which codes that are found again (repacked) are those that they
    were.

    The least one is negative if a factor of 0 keeps codes, too. See keeps_codes of cuda/kernels/rules/fast_path.cuh.
    """
    if not r.repacked:
        return 0.0, math.inf
    f, info, power = r.element, ml_dtypes.finfo(dtype), r.scale == E8M0
    least_exponent = info.minexp - info.nmant
    most = -least_exponent if power else f.emin - f.mantissa_bits - least_exponent - 1
    least = 2.0 ** (f.emax - (info.maxexp - 1) + (not power))
    return least if power else -least, 2.0 ** min(most, 127)


GRAIN = 32  # elements that lie in a block, where it has not 16
WIDTH = 2048  # columns of a panel, and of a block, at most: kWidth of source/blocks.h
MOST_ROWS = 16  # of a block whose scale is chosen by errors: kMostRows of source/four_over_six.h


# Below so many elements, what is not one call of the library (see cached_calls.py) is no faster by it than by the
# specification, because of the work around it; by what a tensor scale covers. Two cores of an x86-64 machine with
# AVX-512, November 2026.
FEW = {"none": 1 << 12, "tensor": 1 << 12, "row": 1 << 15, "block": 1 << 11}
FEW_VALUES, FEW_AMAX, FEW_COLUMNS = (
    1 << 11,
    1 << 11,
    16,
)  # bytes of codes to be decoded; elements of an amax, and of a row


@lru_cache(256)
def not_encoded(r: Recipe) -> str | None:
    """Why the compiled engine makes no codes of a recipe; None where its arithmetic is all that it has to have."""
    if r.four_over_six and (r.block_size != 16 or r.block_rows > MOST_ROWS):
        return (
            f"4over6 of blocks of {r.block_rows} x {r.block_size}, which are not of 16 columns and of {MOST_ROWS} rows"
            " at most"
        )
    if r.block and ((r.block_size != 16 and r.block_size % GRAIN) or r.block_size > WIDTH):
        return f"blocks of {r.block_size}, neither 16 nor a multiple of {GRAIN} up to {WIDTH}"
    return None


@lru_cache(256)
def not_faked(r: Recipe) -> str | None:
    """Why it does not fake-quantize by a recipe."""
    return "a fake_rule of its own" if r.fake_rule is not None else not_encoded(r)


MULTIPLIED = (16, 32)  # elements of the blocks whose multiples it searches


def not_searched(r: Recipe) -> str | None:
    """Why it does not find the amaxes of a recipe's blocks, under which it makes codes."""
    wide = r.search in FACTORS and r.block_size not in MULTIPLIED
    return f"a search of blocks of {r.block_size}, neither 16 nor 32" if wide else None


COVERAGE: dict[str, Callable[[Recipe], str | None]] = {
    "quantize and all that makes codes": not_encoded,
    "fake_quantize": not_faked,
    "block amaxes before these": not_searched,
}
COVERAGE_COLUMNS = ("operation", "recipes", "why")


def uncovered_rows(recipes: Iterable[Recipe]) -> list[tuple[str, str, str]]:
    """What of these recipes falls to the specification: operation, recipes, why."""
    found: dict[tuple[str, str], list[str]] = {}
    for operation, why in COVERAGE.items():
        for r in recipes:
            reason = None if r.fake_only and operation != "fake_quantize" else why(r)
            if reason is not None:
                found.setdefault((operation, reason), []).append(r.id)
    return [(operation, ", ".join(ids), reason) for (operation, reason), ids in found.items()]


def _name(f: ElementFormat) -> str:
    """Of a format that fp4kit has, which another of the same numbers may be; else its own, that no key has."""
    known = getattr(formats, f.name, None)
    return f.name if isinstance(known, ElementFormat) and is_same(f, known) else f"other {f.name}"
