"""Make the tables by which the compiled library encodes and decodes user-defined formats.
Every code belongs to one interval of float32 numbers that are rounded to it, called a piece. The key of a float is an
integer, and keys have the order of the floats, with -0 before 0.

A recipe with amax rules may have element and scale formats that are known only at run time. Rounding to codes is
monotone, so each code has one piece. This module finds the pieces by the specification, and the library looks numbers
up in them (source/own_format.h). So results equal those of the specification in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from fp4kit.cpu.coverage import element_key
from fp4kit.cpu.library import OwnFormat, address, functions
from fp4kit.formats import Codebook, ElementFormat, PairedMicroexponents
from fp4kit.recipes import Recipe
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import decode
from fp4kit.reference.quantize import encode_elements
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale

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
