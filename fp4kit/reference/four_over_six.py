"""4over6: each block takes the better of two scales, with its amax at code 6 or at code 4. Source: TE, a.8; FlashInfer
a4.
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
# multiply and divide, by whether subnormals are flushed
ARITHMETIC: dict[bool, tuple[Operation, Operation]] = {
    False: (np.multiply, np.divide),
    True: (multiply_ftz, divide_ftz),
}


class _Candidate(NamedTuple):
    """A scale that blocks may have: scale codes (rows of blocks, blocks), element codes (m, blocks, 16) and their E2M1
    values.
    """

    scales: np.ndarray
    codes: np.ndarray
    values: np.ndarray


def _candidate(base: np.ndarray, blocks: np.ndarray, tensor: TensorScale, recipe: Recipe) -> _Candidate:
    """Return the candidate of block scale E4M3(min(base, 448))."""
    scales = encode(zero_of_zeros(base, tensor) if recipe.lane_sums else base, E4M3)
    scaled = _scaled(spread_rows(factor_of(scales, tensor, recipe), recipe, len(blocks)), blocks, recipe)
    codes = _codes_of(scaled, recipe)
    unbounded = recipe.rounding == "rnw"
    return _Candidate(
        scales, codes, nearest_unbounded(np.abs(scaled)) * np.sign(scaled) if unbounded else decode(codes, E2M1)
    )


def factor_of(scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """min(1 / (scale * S_dec), FLT_MAX); with lane_sums fouroversix's."""
    if recipe.lane_sums:
        return factor_fouroversix(scales, tensor.amax, tensor, recipe, np.dtype(np.float32))
    multiply, divide = ARITHMETIC[recipe.flush]
    return np.minimum(divide(ONE, multiply(decode(scales, E4M3), tensor.decode)), FLT_MAX)


def _scaled(factor: np.ndarray, blocks: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the elements (m, blocks, 16) times factors (m, blocks)."""
    multiply, _ = ARITHMETIC[recipe.flush]
    return multiply(blocks, factor[..., None])


def _codes_of(scaled: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the element codes of scaled elements."""
    return encode(scaled, E2M1, recipe.rounding, recipe.sign, recipe.nan_code)


def encode_under(
    scales: np.ndarray, blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Element codes under scales that were chosen: those of either candidate, under its scale. scales, amax: (m,
    blocks).
    """
    return _without_zero_blocks(
        _codes_of(_scaled(factor_of(scales, tensor, recipe), blocks, recipe), recipe), amax, recipe
    )


def leaves_zero_blocks(recipe: Recipe) -> bool:
    """Whether zero blocks have no codes but 0: FlashInfer leaves one early, without the signs of its zeros."""
    return recipe.four_over_six is not None and recipe.flush


def is_zero_block(amax: np.ndarray) -> np.ndarray:
    """Of blocks that FlashInfer quantizes."""
    return np.abs(amax) < FLT_MIN


def _without_zero_blocks(codes: np.ndarray, amax: np.ndarray, recipe: Recipe) -> np.ndarray:
    """amax: (m, blocks)."""
    return np.where(is_zero_block(amax)[..., None], np.uint8(0), codes) if leaves_zero_blocks(recipe) else codes


def _decoded(scaled: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """(q * scale) back in the units of x: TE ((q * scale) * tensor_amax) / (6 * scale_max), FlashInfer (q * scale) * (1
    / gs).
    """
    multiply, divide = ARITHMETIC[recipe.flush]
    if recipe.flush:
        return multiply(scaled, tensor.decode[..., None])
    return divide(multiply(scaled, tensor.amax[..., None]), full_range(recipe))


def _error(blocks: np.ndarray, candidate: _Candidate, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Sum over the elements of a block, in their order, of |d| or d * d, or the largest |d|; float32, no fused
    multiply-add.

    d = decoded - x;   fast_error: d = float16(q * scale) - x * S_enc
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
    """Terms (m, blocks, columns) as (rows of blocks, blocks, elements of a block); rows beyond m have none."""
    rows, (m, count, columns) = recipe.block_rows, terms.shape
    padded = np.zeros((-(-m // rows) * rows, count, columns), np.float32)
    padded[:m] = terms
    return padded.reshape(-1, rows, count, columns).swapaxes(1, 2).reshape(-1, count, rows * columns)


def _sum_rows(error: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Errors of the 16 rows of a block, summed as a tree: row i with i + 8, then + 4, + 2, + 1."""
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
    """Element codes and block scales (m, blocks) of float32 blocks (m, blocks, 16).

    base = amax / 6 * S_enc; the candidates' scales are E4M3(min(base, 448)) and E4M3(min(base * 1.5, 448)).
    The second one wins only with a strictly smaller error.
    """
    multiply, divide = ARITHMETIC[recipe.flush]
    base = multiply(divide(amax, E2M1.max), tensor.encode)
    at_six = _candidate(base, blocks, tensor, recipe)
    at_four = _candidate(multiply(base, np.float32(1.5)), blocks, tensor, recipe)
    four = _error(blocks, at_four, tensor, recipe) < _error(blocks, at_six, tensor, recipe)
    scales = spread_rows(np.where(four, at_four.scales, at_six.scales), recipe, len(blocks))
    codes = np.where(spread_rows(four, recipe, len(blocks))[..., None], at_four.codes, at_six.codes)
    return _without_zero_blocks(codes, spread_rows(amax, recipe, len(blocks)), recipe), scales
