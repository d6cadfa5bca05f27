"""Quantize by 4over6: try two scales for each block, and keep the result with the smaller error.
One scale maps the block's amax to the E2M1 value 6, the other to 4. Elements are arrays (m, blocks, 16). A block may
span several rows; arrays with one entry per block then have fewer than m rows, written (rows of blocks, blocks).

In the docstrings q is the E2M1 value of an element, scale is the value of a block's scale code, and x is the element.
tensor.encode multiplies elements before encoding, and tensor.decode multiplies values after decoding. Sources:
Transformer Engine (TE); FlashInfer; fouroversix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, FLT_MAX, FLT_MIN
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, divide_ftz, flush, multiply_ftz
from fp4kit.reference.block_rules_e4m3_serving import factor_fouroversix, zero_of_zeros
from fp4kit.reference.blocks import spread_rows
from fp4kit.reference.codec import decode, encode, nearest_unbounded
from fp4kit.reference.summation_order import sum_lanes
from fp4kit.reference.tensor_rules import TensorScale, full_range
from fp4kit.reference.trace import show

Operation = Callable[..., np.ndarray]
# {recipe.flush: the functions that multiply and divide}. With flush=True, they replace subnormals by zero.
ARITHMETIC: dict[bool, tuple[Operation, Operation]] = {
    False: (np.multiply, np.divide),
    True: (multiply_ftz, divide_ftz),
}


class _Candidate(NamedTuple):
    """The result of quantizing all blocks with one of the two candidate scales.

    Attributes:
        scales: scale codes (rows of blocks, blocks).
        codes: element codes (m, blocks, 16).
        values: the E2M1 values of `codes`, or for rounding "rnw" the values before they wrap.
    """

    scales: np.ndarray
    codes: np.ndarray
    values: np.ndarray


def _candidate(base: np.ndarray, blocks: np.ndarray, tensor: TensorScale, recipe: Recipe, top: int) -> _Candidate:
    """Return the result of quantizing blocks with one of the two candidate scales per block."""
    base = show(
        f"block scale before rounding, amax at {top}", zero_of_zeros(base, tensor) if recipe.lane_sums else base
    )
    scales = show(f"block scale, amax at {top}", encode(base, E4M3), E4M3)
    factor = show(f"factor to multiply by, amax at {top}", factor_of(scales, tensor, recipe))
    scaled = show(f"element * factor, amax at {top}", _scaled(spread_rows(factor, recipe, len(blocks)), blocks, recipe))
    codes = show(f"code, amax at {top}", _codes_of(scaled, recipe), E2M1)
    return _Candidate(scales, codes, rounded_values(scaled, codes, recipe))


def rounded_values(scaled: np.ndarray, codes: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the rounded elements that the errors of a candidate are computed from, before scales are applied to them.

    The result holds the values of the E2M1 codes. For rounding "rnw", whose codes wrap on overflow, it holds the
    rounded numbers before codes wrap.

    scaled: the elements after scaling, in the shape of codes.
    """
    if recipe.rounding == "rnw":
        return nearest_unbounded(np.abs(scaled)) * np.sign(scaled)
    return decode(codes, E2M1)


def factor_of(scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the factors that multiply the elements of each block, from block scale codes.

        factor = min(1 / (scale * tensor.decode), FLT_MAX)

    scale is the value of a scale code, and tensor.decode the decode scale of the tensor. A scale of 0 gives FLT_MAX,
    and a NaN scale gives NaN. If recipe.flush is set, subnormals count as zero.

    If recipe.lane_sums is set, the function factor_fouroversix of block_rules_e4m3_serving.py computes the factors
    instead.
    """
    if recipe.lane_sums:
        return factor_fouroversix(scales, tensor.amax, tensor, recipe, np.dtype(np.float32))
    multiply, divide = ARITHMETIC[recipe.flush]
    return np.minimum(divide(ONE, multiply(decode(scales, E4M3), tensor.decode)), FLT_MAX)


def _scaled(factor: np.ndarray, blocks: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return elements (m, blocks, 16) multiplied by the factors of their blocks (m, blocks): float32."""
    multiply, _ = ARITHMETIC[recipe.flush]
    return multiply(blocks, factor[..., None])


def _codes_of(scaled: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the E2M1 codes, uint8, of elements that are already multiplied by the factors of their blocks."""
    return encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)


def encode_under(
    scales: np.ndarray, blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return the element codes (m, blocks, 16) of blocks with given scale codes, such as those of an earlier call.

    It does not matter which of the two candidates a scale code came from.

    Args:
        scales: the scale codes, one per row and block, (m, blocks).
        blocks: the elements, float32 (m, blocks, 16).
        amax: the block amaxes (m, blocks), read only to find zero blocks.
        tensor: the tensor scale.
        recipe: a 4over6 recipe.
    """
    return _without_zero_blocks(
        _codes_of(_scaled(factor_of(scales, tensor, recipe), blocks, recipe), recipe), amax, recipe
    )


def leaves_zero_blocks(recipe: Recipe) -> bool:
    """Return True if every element of a zero block gets the code 0, even -0, as in FlashInfer's 4over6.

    FlashInfer skips zero blocks, so their elements lose the sign. With other recipes, -0 keeps its sign bit if the
    recipe says so.
    """
    return recipe.four_over_six is not None and recipe.flush


def is_zero_block(amax: np.ndarray) -> np.ndarray:
    """Return a mask of the blocks that FlashInfer treats as zero: those whose amax is 0 or subnormal."""
    return np.abs(amax) < FLT_MIN


def _without_zero_blocks(codes: np.ndarray, amax: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return codes with code 0 for all elements of zero blocks, if the recipe's producer skips such blocks."""
    return np.where(is_zero_block(amax)[..., None], np.uint8(0), codes) if leaves_zero_blocks(recipe) else codes


def _decoded(scaled: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the decoded elements, float32, from `scaled`, the products of E2M1 values and block scales."""
    multiply, divide = ARITHMETIC[recipe.flush]
    if recipe.flush:
        return multiply(scaled, tensor.decode[..., None])
    return divide(multiply(scaled, tensor.amax[..., None]), full_range(recipe))


def _error(blocks: np.ndarray, candidate: _Candidate, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the error of each block under a candidate: float32 (rows of blocks, blocks)."""
    scaled = candidate.values * spread_rows(decode(candidate.scales, E4M3), recipe, len(blocks))[..., None]
    if recipe.fast_error:
        difference = scaled.astype(np.float16).astype(np.float32) - blocks * tensor.encode[..., None]
    else:
        difference = _decoded(scaled, tensor, recipe) - blocks
    return block_errors(flush(difference) if recipe.flush else difference, recipe)


def block_errors(difference: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the error of each block, by the measure that recipe.four_over_six names: float32 (rows of blocks, blocks).

        "mae": sum of |d|    "mse": sum of d * d    "max": largest |d|

    The terms are summed in the order of the elements, or in eight partial sums (lanes) if recipe.lane_sums is set. A
    NaN element makes the error of its block NaN.

    difference: the errors d of the elements (m, blocks, block).
    """
    terms = difference * difference if recipe.four_over_six == "mse" else np.abs(difference)
    if recipe.four_over_six == "max":
        return np.max(_by_block(terms, recipe), axis=-1)
    if recipe.lane_sums:
        return sum_lanes(_by_block(terms, recipe))
    error = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        error = error + terms[..., i]
    return error if recipe.block_rows == 1 else _sum_rows(error, recipe)


def _by_block(terms: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return one number per element, rearranged so that all elements of a block lie on the last axis."""
    rows, (m, count, columns) = recipe.block_rows, terms.shape
    padded = np.zeros((-(-m // rows) * rows, count, columns), np.float32)
    padded[:m] = terms
    return padded.reshape(-1, rows, count, columns).swapaxes(1, 2).reshape(-1, count, rows * columns)


def _sum_rows(error: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the errors (m, blocks) of single rows, summed over the rows of each block: (rows of blocks, blocks)."""
    rows = recipe.block_rows
    m, count = error.shape
    padded = np.zeros((-(-m // rows) * rows, count), np.float32)
    padded[:m] = error
    tree = padded.reshape(-1, rows, count)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    return tree[:, 0]


def quantize_four_over_six(
    blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> tuple[np.ndarray, np.ndarray]:
    """Return the element codes (m, blocks, 16) and the block scale codes (m, blocks) of float32 blocks (m, blocks, 16).

    Each block is quantized with two candidate scales, where base = amax / 6 * tensor.encode:

    - E4M3(min(base, 448)) puts the amax at the value 6.
    - E4M3(min(base * 1.5, 448)) puts the amax at the value 4. This scale is taken only if its error is strictly
      smaller than the error of the first. If an error is NaN, the first scale is taken.

    If a block has several rows, they share one scale, which is repeated for each row. With FlashInfer's recipes, all
    elements of a zero block get the code 0 (see leaves_zero_blocks).

    amax: the block amaxes (rows of blocks, blocks).
    """
    multiply, divide = ARITHMETIC[recipe.flush]
    base = multiply(divide(amax, E2M1.max), tensor.encode)
    at_six = _candidate(base, blocks, tensor, recipe, 6)
    at_four = _candidate(multiply(base, np.float32(1.5)), blocks, tensor, recipe, 4)
    error_at_six = show("error of the block, amax at 6", _error(blocks, at_six, tensor, recipe))
    error_at_four = show("error of the block, amax at 4", _error(blocks, at_four, tensor, recipe))
    four = error_at_four < error_at_six
    scales = show("block scale", np.where(four, at_four.scales, at_six.scales), E4M3)
    scales = spread_rows(scales, recipe, len(blocks))
    codes = np.where(spread_rows(four, recipe, len(blocks))[..., None], at_four.codes, at_six.codes)
    codes = _without_zero_blocks(codes, spread_rows(amax, recipe, len(blocks)), recipe)
    return show("code", codes, E2M1), scales
