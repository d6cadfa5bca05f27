"""Fake-quantize as fouroversix's MS-EDEN: correct the block scales of a Hadamard row, then round them stochastically.

Rounding to E2M1 shrinks a vector on average. MS-EDEN multiplies the block scales by the factor that undoes this, and
rounds them to E4M3 up or down at random, so that the expected value of the result is the vector. Blocks of 32 elements,
which the producer multiplies by a Hadamard matrix first, share one factor. The functions are fake rules: fake.py
describes their arguments. Source: fouroversix kernels/triton/quartet_ii.py.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3, IF4_INTEGER_STEP, INT4
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import fake_unit
from fp4kit.reference.arith import ONE, ZERO, divide_full
from fp4kit.reference.block_arith import encode_e4m3_scale
from fp4kit.reference.blocks import block_amax
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.trace import show

_TOP = np.float32(6.0 / (17 / 16 * 0.93))  # the element value to which the amax of a block is scaled, about 6.07
_SCALE_TOP = np.float32(255.99)  # the block scale of the block with the tensor's amax


def ms_eden(
    x: np.ndarray,
    recipe: Recipe,
    tensor_amax: np.ndarray,
    amax: np.ndarray | None,
    dtype: np.dtype,
    random: np.ndarray | None = None,
) -> np.ndarray:
    """Fake-quantize x as MS-EDEN does for NVFP4: q * s * D, computed from left to right.

        D = tensor_amax / 255.99 / t, or 1 if tensor_amax is 0,   t = float32(6 / (17/16 * 0.93))
        c = E4M3(amax / t / D), or 1 if c is 0
        y = x / (c * D),   q = y rounded to E2M1, ties away from zero
        k = (sum of y * y) / (sum of y * q) over a row of 32 elements, or 1 if the divisor is 0
        s = c * k, rounded to one of the two E4M3 values around it

    The upper value is taken if random < (c * k - lower) / (upper - lower). Without random numbers, s is the nearest
    E4M3 value. Divisions are those of PTX div.full.f32. Sums add in the order of the elements.

    -0 counts as +0. A zero q is +0 if y is positive, otherwise -0. An infinite or NaN element makes its row of 32
    NaN, and an infinite or NaN tensor_amax makes everything NaN. c * k above 448 gives 448. dtype is not used.

    random: float32 (m, blocks), at least 0 and below 1; None rounds s to nearest.
    """
    return _ms_eden(x, recipe, tensor_amax, amax, random, integers=False)


def ms_eden_if4(
    x: np.ndarray,
    recipe: Recipe,
    tensor_amax: np.ndarray,
    amax: np.ndarray | None,
    dtype: np.dtype,
    random: np.ndarray | None = None,
) -> np.ndarray:
    """Fake-quantize x as MS-EDEN does for IF4: as ms_eden, but a block may be rounded to integers instead of E2M1.

    With integers, q is i * float32(6/7), where i is y * float32(7/6), limited to -7 to 7 and rounded to an integer,
    ties to even. A zero i has the sign of y. A block gets integers if its sum of (y - q) * (y - q) is then strictly
    smaller than with E2M1. dtype is not used.

    random: float32 (m, blocks), at least 0 and below 1; None rounds s to nearest.
    """
    return _ms_eden(x, recipe, tensor_amax, amax, random, integers=True)


def _ms_eden(
    x: np.ndarray,
    recipe: Recipe,
    tensor_amax: np.ndarray,
    amax: np.ndarray | None,
    random: np.ndarray | None,
    integers: bool,
) -> np.ndarray:
    """Return the result of ms_eden or, if integers is True, of ms_eden_if4."""
    blocks = x.reshape(len(x), -1, recipe.block_size) + ZERO
    amax = show("block amax", block_amax(x, recipe) if amax is None else amax)
    tensor = divide_full(divide_full(tensor_amax, _SCALE_TOP), _TOP)
    tensor = show("tensor scale", np.where(tensor_amax == 0, ONE, tensor))
    scale = decode(encode_e4m3_scale(divide_full(divide_full(amax, _TOP), tensor)), E4M3)
    scale = show("block scale before the correction", np.where(scale == 0, ONE, scale))
    factor = show("factor to divide by", scale * tensor)
    y = show("element / factor", divide_full(blocks, factor[..., None]))
    q = decode(encode(y, recipe.element, "rna", "not_positive", recipe.element.sign_bit), recipe.element)
    if integers:
        i = np.rint(np.clip(y * np.float32(7 / 6), -INT4.max, INT4.max)) * IF4_INTEGER_STEP
        better = _sum((y - i) * (y - i)) < _sum((y - q) * (y - q))
        q = np.where(better[..., None], i, q)
    q = show("element value", q)
    row = (len(x), -1, fake_unit(recipe))
    squares, products = _sum((y * y).reshape(row)), _sum((y * q).reshape(row))
    k = show("correction", np.where(products == 0, ONE, divide_full(squares, products)))
    corrected = scale * np.repeat(k, row[2] // recipe.block_size, axis=1)
    stored = show("block scale", _rounded(show("corrected block scale", corrected), random))
    return (q * stored[..., None] * tensor[..., None]).reshape(x.shape)


def _sum(terms: np.ndarray) -> np.ndarray:
    """Return the sums over the last axis, which must not be empty, added in order."""
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _rounded(scales: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    """Return float32 scales >= 0 rounded to E4M3: stochastically with random numbers, otherwise to nearest even."""
    codes = encode(scales, E4M3)
    nearest = decode(codes, E4M3)
    if random is None:
        return nearest
    below, above = (decode(codes + np.uint8(step), E4M3) for step in (255, 1))
    is_above = nearest > scales
    upper, lower = np.where(is_above, nearest, above), np.where(is_above, below, nearest)
    return np.where(random < divide_full(scales - lower, upper - lower), upper, lower)
