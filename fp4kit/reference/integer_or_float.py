"""Quantize by IF4: encode each block as E2M1 and as INT4 under one scale, and keep the codes with the smaller error.
The scale maps the block's amax to 6 in both formats, because INT4 values are multiplied by 6/7. Bit 7 of the stored
scale byte is set if the codes are INT4; the other bits are the scale in E4M3.

Source: fouroversix quantize/pytorch/reference.py, select_intfloat.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, IF4, IF4_INTEGER_BIT, IF4_INTEGER_STEP, INT4, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.reference.block_rules_e4m3_serving import factor_fouroversix, zero_of_zeros
from fp4kit.reference.blocks import spread_rows
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.four_over_six import block_errors, rounded_values
from fp4kit.reference.tensor_rules import TensorScale, full_range
from fp4kit.reference.trace import show

_INTEGER_FACTOR = np.float32(7 / 6)  # E2M1's 6 becomes 7


class _Codes(NamedTuple):
    """The codes of elements in one of the two formats of IF4, and their values: both (m, blocks, block)."""

    codes: np.ndarray
    values: np.ndarray


def _scaled(blocks: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return elements (m, blocks, block), multiplied by the factors that factor_fouroversix makes from scale codes."""
    factor = show("factor to multiply by", factor_fouroversix(scales, tensor.amax, tensor, recipe, blocks.dtype))
    return show("element * factor", blocks * factor[..., None])


def _as_floats(scaled: np.ndarray, recipe: Recipe) -> _Codes:
    """Return the E2M1 codes of scaled elements, and the values of these codes."""
    codes = encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)
    return _Codes(show("code as E2M1", codes, E2M1), rounded_values(scaled, codes, recipe))


def _as_integers(scaled: np.ndarray) -> _Codes:
    """Return the INT4 codes of scaled elements, and their values: the integers scaled * float32(7/6), rounded."""
    wide = show("element * factor * 7/6", scaled * _INTEGER_FACTOR)
    values = np.rint(np.clip(wide, -INT4.max, INT4.max))
    return _Codes(show("code as INT4", encode(values, INT4, nan_code=0), INT4), values)


def encode_under_if4(scales: np.ndarray, blocks: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the codes (m, blocks, block) of float32 blocks under given block scales (m, blocks).

    Bit 7 of a scale selects the format of its block: 0 for E2M1, 1 for INT4. The lower seven bits are the E4M3 scale.
    """
    scaled = _scaled(blocks, IF4.scale_codes(scales), tensor, recipe)
    integers = IF4.are_integers(scales)
    codes = np.where(integers[..., None], _as_integers(scaled).codes, _as_floats(scaled, recipe).codes)
    return show("code", codes, _traced_format(integers))


def quantize_if4(
    blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> tuple[np.ndarray, np.ndarray]:
    """Return the element codes (m, blocks, block) and the block scales (m, blocks) of float32 blocks.

        scale = E4M3(amax / 6 * tensor.encode), or 0 if the whole tensor is zero

    The error of a format is computed from the decoded values, with operations from left to right:

        E2M1: q * scale * tensor.amax / range
        INT4: q * scale * tensor.amax * float32(6/7) / range

    Here q is the value of an element code, and range is full_range(recipe). INT4 is taken, and bit 7 of the scale is
    set, only if its error is strictly smaller. If an error is NaN, E2M1 is taken.

    amax: the block amaxes (rows of blocks, blocks).
    """
    base = show("block scale before rounding", zero_of_zeros(amax / E2M1.max * tensor.encode, tensor))
    codes = show("block scale without bit 7", encode(base, E4M3), E4M3)
    by_row = spread_rows(codes, recipe, len(blocks))
    scaled = _scaled(blocks, by_row, tensor, recipe)
    floats, integers = _as_floats(scaled, recipe), _as_integers(scaled)
    decoded = decode(by_row, E4M3)[..., None]
    full, tensor_amax = full_range(recipe), tensor.amax[..., None]
    as_floats = floats.values * decoded * tensor_amax / full
    as_integers = integers.values * decoded * tensor_amax * IF4_INTEGER_STEP / full
    float_errors = show("error of the block as E2M1", block_errors(as_floats - blocks, recipe))
    integer_errors = show("error of the block as INT4", block_errors(as_integers - blocks, recipe))
    chosen = spread_rows(integer_errors < float_errors, recipe, len(blocks))
    # A trace shows the scale with bit 7 as the sign, so that the scale of INT4 is negative.
    stored = show("block scale", by_row | np.where(chosen, IF4_INTEGER_BIT, np.uint8(0)), E4M3)
    return show("code", np.where(chosen[..., None], integers.codes, floats.codes), _traced_format(chosen)), stored


def _traced_format(integers: np.ndarray) -> ElementFormat:
    """Return the format that a trace shows element codes in: INT4 if all of `integers` are True, otherwise E2M1."""
    return INT4 if integers.all() else E2M1
