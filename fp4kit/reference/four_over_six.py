"""4over6: each block takes the better of two scales. One puts its amax at the E2M1 value 6, the other at 4.

Sources: Transformer Engine; FlashInfer.
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

Operation = Callable[..., np.ndarray]
# (multiply, divide), indexed by whether subnormals are flushed
ARITHMETIC: dict[bool, tuple[Operation, Operation]] = {
    False: (np.multiply, np.divide),
    True: (multiply_ftz, divide_ftz),
}


class _Candidate(NamedTuple):
    """The result of one candidate scale per block.

    scales: scale codes (rows of blocks, blocks). codes: element codes (m, blocks, 16). values: the E2M1 values of the
    codes.
    """

    scales: np.ndarray
    codes: np.ndarray
    values: np.ndarray


def _candidate(base: np.ndarray, blocks: np.ndarray, tensor: TensorScale, recipe: Recipe) -> _Candidate:
    """Return the candidate with block scale E4M3(min(base, 448))."""
    scales = encode(zero_of_zeros(base, tensor) if recipe.lane_sums else base, E4M3)
    scaled = _scaled(spread_rows(factor_of(scales, tensor, recipe), recipe, len(blocks)), blocks, recipe)
    codes = _codes_of(scaled, recipe)
    unbounded = recipe.rounding == "rnw"
    return _Candidate(
        scales, codes, nearest_unbounded(np.abs(scaled)) * np.sign(scaled) if unbounded else decode(codes, E2M1)
    )


def factor_of(scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return min(1 / (scale * S_dec), FLT_MAX), or fouroversix's factor if recipe.lane_sums is set."""
    if recipe.lane_sums:
        return factor_fouroversix(scales, tensor.amax, tensor, recipe, np.dtype(np.float32))
    multiply, divide = ARITHMETIC[recipe.flush]
    return np.minimum(divide(ONE, multiply(decode(scales, E4M3), tensor.decode)), FLT_MAX)


def _scaled(factor: np.ndarray, blocks: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the elements (m, blocks, 16) times factors (m, blocks)."""
    multiply, _ = ARITHMETIC[recipe.flush]
    return multiply(blocks, factor[..., None])


def _codes_of(scaled: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the codes of scaled elements."""
    return encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)


def encode_under(
    scales: np.ndarray, blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return the element codes under block scales that were already chosen. scales, amax: (m, blocks).

    No choice is needed, because both candidates encode elements alike under a given scale.
    """
    return _without_zero_blocks(
        _codes_of(_scaled(factor_of(scales, tensor, recipe), blocks, recipe), recipe), amax, recipe
    )


def leaves_zero_blocks(recipe: Recipe) -> bool:
    """Return whether zero blocks have only code 0.

    FlashInfer skips such blocks and thereby drops the signs of their zeros.
    """
    return recipe.four_over_six is not None and recipe.flush


def is_zero_block(amax: np.ndarray) -> np.ndarray:
    """Return which blocks FlashInfer treats as zero."""
    return np.abs(amax) < FLT_MIN


def _without_zero_blocks(codes: np.ndarray, amax: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return codes with 0 in the zero blocks that the producer skips. amax: (m, blocks)."""
    return np.where(is_zero_block(amax)[..., None], np.uint8(0), codes) if leaves_zero_blocks(recipe) else codes


def _decoded(scaled: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return q * scale in the units of x.

    TE computes ((q * scale) * tensor_amax) / (6 * scale_max), FlashInfer (q * scale) * (1 / gs).
    """
    multiply, divide = ARITHMETIC[recipe.flush]
    if recipe.flush:
        return multiply(scaled, tensor.decode[..., None])
    return divide(multiply(scaled, tensor.amax[..., None]), full_range(recipe))


def _error(blocks: np.ndarray, candidate: _Candidate, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the error of each block: the sum of |d| or d * d over its elements in their order, or the largest |d|.

    d = decoded - x, or float16(q * scale) - x * S_enc if recipe.fast_error is set. All arithmetic is float32, without
    fused multiply-add.
    """
    scaled = candidate.values * spread_rows(decode(candidate.scales, E4M3), recipe, len(blocks))[..., None]
    if recipe.fast_error:
        difference = scaled.astype(np.float16).astype(np.float32) - blocks * tensor.encode[..., None]
    else:
        difference = _decoded(scaled, tensor, recipe) - blocks
    difference = flush(difference) if recipe.flush else difference
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
    """Return terms (m, blocks, columns) grouped by block: (rows of blocks, blocks, elements per block).

    Rows beyond m are zeros.
    """
    rows, (m, count, columns) = recipe.block_rows, terms.shape
    padded = np.zeros((-(-m // rows) * rows, count, columns), np.float32)
    padded[:m] = terms
    return padded.reshape(-1, rows, count, columns).swapaxes(1, 2).reshape(-1, count, rows * columns)


def _sum_rows(error: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the summed errors of the 16 rows of each block.

    They are added as a tree: row i and row i + 8, then i + 4, i + 2 and i + 1.
    """
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
    """Return the element codes and block scales (m, blocks) of float32 blocks (m, blocks, 16).

    With base = amax / 6 * S_enc, the two candidate scales are E4M3(min(base, 448)) and E4M3(min(base * 1.5, 448)). The
    second one wins only if its error is strictly smaller.
    """
    multiply, divide = ARITHMETIC[recipe.flush]
    base = multiply(divide(amax, E2M1.max), tensor.encode)
    at_six = _candidate(base, blocks, tensor, recipe)
    at_four = _candidate(multiply(base, np.float32(1.5)), blocks, tensor, recipe)
    four = _error(blocks, at_four, tensor, recipe) < _error(blocks, at_six, tensor, recipe)
    scales = spread_rows(np.where(four, at_four.scales, at_six.scales), recipe, len(blocks))
    codes = np.where(spread_rows(four, recipe, len(blocks))[..., None], at_four.codes, at_six.codes)
    return _without_zero_blocks(codes, spread_rows(amax, recipe, len(blocks)), recipe), scales
