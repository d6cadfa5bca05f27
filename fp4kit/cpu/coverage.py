"""Tell which recipes the compiled CPU engine supports, and why it leaves others to the specification (NumPy code).
The engine contains one compiled rule per key. A key is a text that lists the fields of a recipe on which the results of
a rule depend.

A recipe is supported if all its keys are compiled, even if it is a variant that no table lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit import formats
from fp4kit.cpu.library import OwnFormat, address, functions
from fp4kit.formats import E2M1, E8M0, Codebook, ElementFormat, IntegerOrFloat, PairedMicroexponents, is_same
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import TOPS
from fp4kit.recipes.schema import then_encodes
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import decode
from fp4kit.reference.quantize import encode_elements
from fp4kit.reference.search import FACTORS
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale


def rule_key(r: Recipe) -> str | None:
    """Return the key of a recipe's block rule, which computes a block's scale from its amax."""
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
    """Return the key of a recipe's tensor rule, which computes the tensor scale from the tensor amax."""
    return None if r.tensor_rule is None else f"{r.tensor_rule} {_name(computed_format(r))} {r.scale_max}"


def element_key(r: Recipe) -> str:
    """Return the key of a recipe's element arithmetic, which computes a code from a finite element and a finite
    factor.
    """
    flags = [name for name in ("flush", "round_scaled", "narrow") if getattr(r, name)]
    flags += ["stochastic_float16"] * (r.stochastic == "comfy_kitchen_fp8")
    flags += ["then_encode"] * then_encodes(r)
    return " ".join([_name(computed_format(r)), r.apply, r.rounding, r.sign, *flags])


def computed_format(r: Recipe) -> ElementFormat:
    """Return the element format by which the engine computes: E2M1 for IF4, otherwise that of the recipe."""
    return E2M1 if isinstance(r.element, IntegerOrFloat) else r.element


def decode_key(r: Recipe) -> str:
    """Return the key of a recipe's decoder, which computes a value from a code, a block scale and a tensor scale."""
    scale = "none" if r.scale is None else _name(r.scale)
    return f"{r.decode_rule} {_name(r.element)} {scale} {r.scale_max} {top_rule(r)}"


def top_rule(r: Recipe) -> str:
    """Return the name of a recipe's tensor rule if rules.TOPS lists it, otherwise "none"."""
    return r.tensor_rule if r.tensor_rule in TOPS else "none"


def kept_factors(r: Recipe, dtype: np.dtype) -> tuple[float, float]:
    """Return (low, high): the limits of the factors with which the engine may encode, for a recipe and an input
    dtype.
    """
    if not r.repacked:
        return 0.0, math.inf
    f, info, is_power = r.element, ml_dtypes.finfo(dtype), r.scale == E8M0
    min_exponent = info.minexp - info.nmant
    max_power = -min_exponent if is_power else f.emin - f.mantissa_bits - min_exponent - 1
    min_factor = 2.0 ** (f.emax - (info.maxexp - 1) + (not is_power))
    return min_factor if is_power else -min_factor, 2.0 ** min(max_power, 127)


# A block has 16 columns or a multiple of SEGMENT: source/blocks.h.
SEGMENT = 32
PANEL_COLUMNS = 2048  # columns of a panel, and of a block, at most: kPanelColumns of source/blocks.h
MAX_BLOCK_ROWS = 16  # rows of a 4over6 block, at most: kMaxBlockRows of source/four_over_six.h


# For smaller arrays the specification is as fast, because of the Python work around a call to the library. These limits
# do not apply to cached calls (cached_calls.py). Two cores of an x86-64 machine with AVX-512, November 2026.
MIN_ELEMENTS = {"none": 1 << 12, "tensor": 1 << 12, "row": 1 << 15, "block": 1 << 11}  # to encode, by tensor_scaling
MIN_CODE_BYTES = 1 << 11  # the fewest bytes of codes to decode
MIN_AMAX_ELEMENTS = 1 << 11
MIN_COLUMNS = 16


@lru_cache(256)
def not_encoded(r: Recipe) -> str | None:
    """Return the reason why the engine cannot encode blocks of the shape that a recipe has, or None if it can."""
    if r.four_over_six and (r.block_size != 16 or r.block_rows > MAX_BLOCK_ROWS):
        return (
            f"4over6 with blocks of {r.block_rows}x{r.block_size} (the engine supports 16 columns and at most"
            f" {MAX_BLOCK_ROWS} rows)"
        )
    if r.block and ((r.block_size != 16 and r.block_size % SEGMENT) or r.block_size > PANEL_COLUMNS):
        return (
            f"blocks of {r.block_size} columns (the engine supports 16, and multiples of {SEGMENT} up to"
            f" {PANEL_COLUMNS})"
        )
    return None


@lru_cache(256)
def not_faked(r: Recipe) -> str | None:
    """Return the reason why the engine cannot fake-quantize by a recipe, or None if it can."""
    return "a fake_rule, which is a separate formula for the values" if r.fake_rule is not None else not_encoded(r)


FACTOR_SEARCH_BLOCKS = (16, 32)  # block sizes that source/search_factors.h supports


def not_searched(r: Recipe) -> str | None:
    """Return the reason why the engine cannot run the search of a recipe during quantize."""
    is_refused = r.search in FACTORS and r.block_size not in FACTOR_SEARCH_BLOCKS
    return f"a search over blocks of {r.block_size} columns (the engine supports 16 and 32)" if is_refused else None


def not_encoded_under_scales(r: Recipe) -> str | None:
    """Return the reason why the engine cannot encode by a recipe under scales that the caller passes."""
    return "in IF4, a given scale may select INT4 elements" if isinstance(r.element, IntegerOrFloat) else None


COVERAGE: dict[str, Callable[[Recipe], str | None]] = {
    "quantize, and other operations that compute codes": not_encoded,
    "quantize with given block scales": not_encoded_under_scales,
    "fake_quantize": not_faked,
    "the search of block amaxes": not_searched,
}
COVERAGE_COLUMNS = ("operation", "recipes", "why")


def uncovered_rows(recipes: Iterable[Recipe]) -> list[tuple[str, str, str]]:
    """Return what the engine leaves to the specification, as rows of a table for the documentation."""
    found: dict[tuple[str, str], list[str]] = {}
    for operation, why in COVERAGE.items():
        for r in recipes:
            reason = None if r.fake_only and operation != "fake_quantize" else why(r)
            if reason is not None:
                found.setdefault((operation, reason), []).append(r.id)
    return [(operation, ", ".join(ids), reason) for (operation, reason), ids in found.items()]


def _name(f: ElementFormat) -> str:
    """Return the name of a format for use in a key, such as "E2M1"."""
    known = getattr(formats, f.name, None)
    return f.name if isinstance(known, ElementFormat) and is_same(f, known) else f"other {f.name}"


# Tables of user-defined formats. Rounding to codes is monotone, so each code belongs to one interval of floats (a
# piece). The pieces are found by the specification, so results equal its results. The key of a float is an integer,
# and keys have the order of the floats, with -0 before 0.
_LAST = 0x7F800000  # the key of infinity
_UNUSED = 0x7FFFFFFF  # a bound above every key


class Tables(NamedTuple):
    """The tables of a recipe: the struct for the library, and the arrays to which the struct points.

    element: the index of the compiled element arithmetic that is used instead of tables, because it is faster; 0 if
        there is none.
    """

    struct: OwnFormat
    arrays: tuple[np.ndarray, ...]
    element: int


@lru_cache(64)
def tables_of(r: Recipe) -> Tables:
    """Return the tables by which the library encodes and decodes a recipe with an amax rule (one of custom_recipe)."""
    size = 16 if r.element.bits == 4 else 256
    arrays = [*_element_pieces(r, size), _values(r.element, size)]
    if r.scale is not None:
        arrays += [*_pieces(lambda x: _scale_codes(x, r), 0, 256), _values(r.scale, 256)]
    addresses = [*map(address, arrays), *[None] * (6 - len(arrays))]
    element = -1 if isinstance(r.element, Codebook) else functions().fp4kit_element(element_key(r).encode())
    struct = OwnFormat(*addresses, float(r.element.amax_target), element < 0, size == 16, r.scale is not None)
    struct.has_pairs = isinstance(r.element, PairedMicroexponents)
    return Tables(struct, tuple(arrays), max(element, 0))


def _element_pieces(r: Recipe, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces (intervals that round to one code each) of elements after scaling, as (bounds, codes)."""
    e = r.element
    if not isinstance(e, PairedMicroexponents):
        return _pieces(lambda x: _element_codes(x, r), -_LAST - 1, size)
    parts = [_pieces(partial(e.nearest_under, microexponent=bit), -_LAST - 1, 8) for bit in (False, True)]
    bounds = np.concatenate([parts[0][0], np.array([_UNUSED], np.int32), parts[1][0]])
    return bounds, np.concatenate([parts[0][1], parts[1][1]])


def _element_codes(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the codes to which the specification rounds elements x, float32 (n,), that are already scaled."""
    one = np.ones(1, np.float32)
    tensor = tensor_scale(None, r, x.dtype)
    return encode_elements(x.reshape(1, 1, -1), one, r, x.dtype, None, tensor).reshape(-1)


def _scale_codes(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the codes to which the specification rounds scales x, float32 (n,), under a recipe with an amax rule."""
    assert r.block_rule is not None
    one = np.ones((), np.float32)
    return BLOCK_RULES[r.block_rule].code(x, TensorScale(one, one, one), _with_unit_element(r), x.dtype)


@lru_cache(64)
def _with_unit_element(r: Recipe) -> Recipe:
    """Return a copy of a recipe whose element format has only the values 0 and 1, so that the largest element is 1."""
    unit = Codebook((0.0, 1.0), name="Fp4kitUnit")
    return replace(
        r, element=unit, block=(1, 2), rounding="rn", sign="signbit", nan_code=None, nan_is_max=False, narrow=False
    )


def _values(f: ElementFormat, size: int) -> np.ndarray:
    """Return the float32 values of codes 0 to size - 1 in a format. Bits beyond the width of the format are ignored."""
    return decode(np.arange(size, dtype=np.uint8), f)


def _pieces(encode: Callable[[np.ndarray], np.ndarray], first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces (intervals that round to one code each) as (bounds, codes): int32 (size - 1,), uint8
    (size,).
    """
    low, high = np.array([first], np.int64), np.array([_LAST], np.int64)  # intervals whose ends have different codes
    found = []
    while low.size:
        differ = encode(_floats(low)) != encode(_floats(high))
        low, high = low[differ], high[differ]
        adjacent = high - low == 1
        found.append(high[adjacent])
        low, high = low[~adjacent], high[~adjacent]
        middle = (low + high) // 2
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    starts = np.unique(np.concatenate([np.array([first], np.int64), *found]))
    bounds, codes = np.full(size - 1, _UNUSED, np.int32), np.zeros(size, np.uint8)
    bounds[: len(starts) - 1], codes[: len(starts)] = starts[1:], encode(_floats(starts))
    return bounds, codes


def _floats(keys: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that have the given keys."""
    bits = keys.astype(np.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(np.float32)
