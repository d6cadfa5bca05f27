"""Quantize by 4over6 and IF4: try two scales, or two element formats, for each block, and keep the smaller error.

Elements are arrays (m, blocks, block). A block may span several rows; arrays with one entry per block then have fewer
than m rows, written (rows of blocks, blocks). In docstrings, q is the value of an element code and scale that of a
scale code. Sources: Transformer Engine (TE); FlashInfer; fouroversix; vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, FLT_MAX, FLT_MIN, IF4, IF4_INTEGER_BIT, IF4_INTEGER_STEP, INT4, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import (
    ONE,
    ZERO,
    Array,
    divide_ftz,
    flush,
    fma,
    multiply_ftz,
    reciprocal_approx_ftz,
    sum_lanes,
)
from fp4kit.reference.block_rules import factor_fouroversix, factor_vllm_kv, zero_of_zeros
from fp4kit.reference.codec import decode, encode, encode_e4m3_scale, nearest_unbounded, show, spread_rows
from fp4kit.reference.tensor_rules import TensorScale, full_range

Operation = Callable[..., Array]
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

    scales: Array
    codes: Array
    values: Array


def _candidate(base: Array, blocks: Array, tensor: TensorScale, recipe: Recipe, top: int) -> _Candidate:
    """Return the result of quantizing blocks with one of the two candidate scales per block."""
    base = show(
        f"block scale before rounding, amax at {top}", zero_of_zeros(base, tensor) if recipe.lane_sums else base
    )
    scales = show(f"block scale, amax at {top}", encode(base, E4M3), E4M3)
    factor = show(f"factor to multiply by, amax at {top}", factor_of(scales, tensor, recipe))
    scaled = show(f"element * factor, amax at {top}", _scaled(spread_rows(factor, recipe, len(blocks)), blocks, recipe))
    codes = show(f"code, amax at {top}", _codes_of(scaled, recipe), E2M1)
    return _Candidate(scales, codes, rounded_values(scaled, codes, recipe))


def rounded_values(scaled: Array, codes: Array, recipe: Recipe) -> Array:
    """Return the rounded elements that the errors of a candidate are computed from, before scales are applied to them.

    The result holds the values of the E2M1 codes. For rounding "rnw", whose codes wrap on overflow, it holds the
    rounded numbers before codes wrap.

    scaled: the elements after scaling, in the shape of codes.
    """
    if recipe.rounding == "rnw":
        return nearest_unbounded(np.abs(scaled)) * np.sign(scaled)
    return decode(codes, E2M1)


def factor_of(scales: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the factors that multiply the elements of each block, from block scale codes.

        factor = min(1 / (scale * tensor.decode), FLT_MAX)

    scale is the value of a scale code, and tensor.decode the decode scale of the tensor. A scale of 0 gives FLT_MAX,
    and a NaN scale gives NaN. If recipe.flush is set, subnormals count as zero. With block rule four_over_six_cute,
    1 / tensor.encode takes the place of tensor.decode.

    If recipe.lane_sums is set, the function factor_fouroversix of block_rules_e4m3_serving.py computes the factors
    instead.
    """
    if recipe.lane_sums:
        return factor_fouroversix(scales, tensor.amax, tensor, recipe, np.dtype(np.float32))
    multiply, divide = ARITHMETIC[recipe.flush]
    decode_scale = ONE / tensor.encode if _is_cute(recipe) else tensor.decode
    return np.minimum(divide(ONE, multiply(decode(scales, E4M3), decode_scale)), FLT_MAX)


def _is_cute(recipe: Recipe) -> bool:
    return recipe.block_rule == "four_over_six_cute"  # FlashInfer's kernel in CuTe-DSL, which gets encode alone


def _scaled(factor: Array, blocks: Array, recipe: Recipe) -> Array:
    """Return elements (m, blocks, 16) multiplied by the factors of their blocks (m, blocks): float32."""
    multiply, _ = ARITHMETIC[recipe.flush]
    return multiply(blocks, factor[..., None])


def _codes_of(scaled: Array, recipe: Recipe) -> Array:
    """Return the E2M1 codes, uint8, of elements that are already multiplied by the factors of their blocks."""
    return encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)


def encode_under(scales: Array, blocks: Array, amax: Array, tensor: TensorScale, recipe: Recipe) -> Array:
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
    return recipe.four_over_six is not None and (recipe.flush or _is_cute(recipe))


def is_zero_block(amax: Array, recipe: Recipe) -> Array:
    """Return a mask of the blocks that FlashInfer treats as zero: those whose amax is 0 or, if flushed, subnormal."""
    return np.abs(amax) < FLT_MIN if recipe.flush else amax == 0


def _without_zero_blocks(codes: Array, amax: Array, recipe: Recipe) -> Array:
    """Return codes with code 0 for all elements of zero blocks, if the recipe's producer skips such blocks."""
    return np.where(is_zero_block(amax, recipe)[..., None], np.uint8(0), codes) if leaves_zero_blocks(recipe) else codes


def _decoded(scaled: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the decoded elements, float32, from `scaled`, the products of E2M1 values and block scales."""
    multiply, divide = ARITHMETIC[recipe.flush]
    if recipe.flush:
        return multiply(scaled, tensor.decode[..., None])
    return divide(multiply(scaled, tensor.amax[..., None]), full_range(recipe))


def _error(blocks: Array, candidate: _Candidate, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the error of each block under a candidate: float32 (rows of blocks, blocks)."""
    scaled = candidate.values * spread_rows(decode(candidate.scales, E4M3), recipe, len(blocks))[..., None]
    if recipe.fast_error:
        difference = scaled.astype(np.float16).astype(np.float32) - blocks * tensor.encode[..., None]
    else:
        difference = _decoded(scaled, tensor, recipe) - blocks
    return block_errors(flush(difference) if recipe.flush else difference, recipe)


def block_errors(difference: Array, recipe: Recipe) -> Array:
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


def _by_block(terms: Array, recipe: Recipe) -> Array:
    """Return one number per element, rearranged so that all elements of a block lie on the last axis."""
    rows, (m, count, columns) = recipe.block_rows, terms.shape
    padded = np.zeros((-(-m // rows) * rows, count, columns), np.float32)
    padded[:m] = terms
    return padded.reshape(-1, rows, count, columns).swapaxes(1, 2).reshape(-1, count, rows * columns)


def _sum_rows(error: Array, recipe: Recipe) -> Array:
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


def quantize_four_over_six(blocks: Array, amax: Array, tensor: TensorScale, recipe: Recipe) -> tuple[Array, Array]:
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


_INTEGER_FACTOR = np.float32(7 / 6)  # E2M1's 6 becomes 7


class _Codes(NamedTuple):
    """The codes of elements in one of the two formats of IF4, and their values: both (m, blocks, block)."""

    codes: Array
    values: Array


def _scaled_if4(blocks: Array, scales: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return elements (m, blocks, block), multiplied by the factors that factor_fouroversix makes from scale codes."""
    factor = show("factor to multiply by", factor_fouroversix(scales, tensor.amax, tensor, recipe, blocks.dtype))
    return show("element * factor", blocks * factor[..., None])


def _as_floats(scaled: Array, recipe: Recipe) -> _Codes:
    """Return the E2M1 codes of scaled elements, and the values of these codes."""
    codes = encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)
    return _Codes(show("code as E2M1", codes, E2M1), rounded_values(scaled, codes, recipe))


def _as_integers(scaled: Array) -> _Codes:
    """Return the INT4 codes of scaled elements, and their values: the integers scaled * float32(7/6), rounded."""
    wide = show("element * factor * 7/6", scaled * _INTEGER_FACTOR)
    values = np.rint(np.clip(wide, -INT4.max, INT4.max))
    return _Codes(show("code as INT4", encode(values, INT4, nan_code=0), INT4), values)


def encode_under_if4(scales: Array, blocks: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the codes (m, blocks, block) of float32 blocks under given block scales (m, blocks).

    Bit 7 of a scale selects the format of its block: 0 for E2M1, 1 for INT4. The lower seven bits are the E4M3 scale.
    """
    scaled = _scaled_if4(blocks, IF4.scale_codes(scales), tensor, recipe)
    integers = IF4.are_integers(scales)
    codes = np.where(integers[..., None], _as_integers(scaled).codes, _as_floats(scaled, recipe).codes)
    return show("code", codes, _traced_format(integers))


def quantize_if4(blocks: Array, amax: Array, tensor: TensorScale, recipe: Recipe) -> tuple[Array, Array]:
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
    scaled = _scaled_if4(blocks, by_row, tensor, recipe)
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


def _traced_format(integers: Array) -> ElementFormat:
    """Return the format that a trace shows element codes in: INT4 if all of `integers` are True, otherwise E2M1."""
    return INT4 if integers.all() else E2M1


TOPS = (np.float32(6), np.float32(4))  # the E2M1 values at which the candidate scales put the block amax


def codes_vllm_kv(blocks: Array, amax: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the E4M3 scale code of each block, as vLLM's KV cache kernel chooses it with 4over6.

        code_t = E4M3(tensor.encode * (amax * rcp(t)))     for t = 6 and t = 4

    The code of t = 4 is taken only if its error is strictly smaller. If an error is NaN, the code of t = 6 is taken.

    Args:
        blocks: the elements, float32 (..., 16).
        amax: the block amaxes (...).
        tensor: the tensor scale; tensor.encode is 1 / k_scale or 1 / v_scale.
        recipe: nvfp4-vllm-kv.
    """
    at_six, at_four = (encode_e4m3_scale(tensor.encode * (amax * reciprocal_approx_ftz(top))) for top in TOPS)
    four = _error_vllm_kv(blocks, at_four, amax, tensor, recipe) < _error_vllm_kv(blocks, at_six, amax, tensor, recipe)
    return np.where(four, at_four, at_six)


def _error_vllm_kv(blocks: Array, codes: Array, amax: Array, tensor: TensorScale, recipe: Recipe) -> Array:
    """Return the error of each block under given block scale codes, summed over its eight pairs of elements."""
    factor = factor_vllm_kv(codes, amax, tensor, recipe, blocks.dtype)[..., None]
    values = decode(encode(blocks * factor, E2M1, recipe.rounding, recipe.sign, recipe.nan_code), E2M1)
    difference = fma(values, np.broadcast_to(reciprocal_approx_ftz(factor), values.shape), -blocks)
    difference = np.where(factor == ZERO, blocks, difference)
    squares = fma(difference[..., 0::2], difference[..., 0::2], difference[..., 1::2] * difference[..., 1::2])
    error = squares[..., 0]
    for i in range(1, squares.shape[-1]):
        error = error + squares[..., i]
    return np.asarray(error)
