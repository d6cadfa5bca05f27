"""Search E8M0 block scales: try powers of two near the amax of each block, and keep the best.
A candidate is amax * 2^j with an integer j. The best candidate gives the smallest loss, a sum over the errors of the
block's elements.

Every candidate is quantized and dequantized with the recipe's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.call.search_scales import AROUND_FLOOR, Search, SearchTerms
from fp4kit.formats import E8M0
from fp4kit.recipes import Recipe
from fp4kit.reference.blocks import block_amax, tiles
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.quantize import quantize_tile, widen
from fp4kit.reference.search_scales import powers, squared
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale


@np.errstate(all="ignore")
def search_powers(x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, search: Search) -> None:
    """Choose for each block of x (M, K) the amax * 2^j with the smallest loss, and write it into out.

    j is an integer, and amax is the largest magnitude of the block. Among equal losses, the lowest j is taken. If no
    candidate has a finite loss, the amax itself is written.

    Args:
        x: float32, float16 or bfloat16.
        out: float32 (M, K / block).
        amax: the tensor amax, or None if the recipe has no tensor scale.
        search: the exponents to try and the loss.
    """
    r, terms = search.call.recipe, search.terms
    tensor = tensor_scale(amax, r, x.dtype).columns(r)
    for rows, columns in tiles(x.shape, r.block):
        tile, blocks = (
            widen(x[rows, columns], r, None),
            slice(columns.start // r.block_size, columns.stop // r.block_size),
        )
        weights = None if terms.weights is None else _padded_to_fours(terms.weights[columns].reshape(-1, r.block_size))
        out[rows, blocks] = _chosen(tile, r, tensor, x.dtype, terms._replace(weights=weights))


def _chosen(x: np.ndarray, r: Recipe, tensor: TensorScale, dtype: np.dtype, terms: SearchTerms) -> np.ndarray:
    """Return for each block the amax * 2^j with the smallest loss."""
    own = block_amax(x, r)
    code = _codes(quantize_tile(x, r, tensor, dtype, own, None)[1])
    best, chosen = np.full(own.shape, np.inf, np.float32), own
    for j in _steps(own, code, r, terms):
        candidate = np.ldexp(own, j)
        codes, scales = quantize_tile(x, r, tensor, dtype, candidate, None)
        d = _padded_to_fours(np.abs(dequantize_tile(codes, scales, r, tensor) - x).reshape(*own.shape, r.block_size))
        loss = squared(d, terms.weights) if terms.power == 2 else powers(d, terms.weights, terms.power)
        better = (loss < best) & (_codes(scales) == code + j)
        best, chosen = np.where(better, loss, best), np.where(better, candidate, chosen)
    return chosen


def _padded_to_fours(a: np.ndarray) -> np.ndarray:
    """Return blocks (..., elements) padded with zeros to a multiple of four elements; `a` itself if none are
    missing.
    """
    missing = -a.shape[-1] % 4
    return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)]) if missing else a


def _codes(scales: np.ndarray | None) -> np.ndarray:
    """Return scale codes as int32, so that their differences can be negative."""
    # scales is never None, because the recipe has block scales.
    assert scales is not None
    return scales.astype(np.int32)


def _steps(amax: np.ndarray, code: np.ndarray, r: Recipe, terms: SearchTerms) -> Iterator[np.ndarray]:
    """Yield the exponents j to try, for candidates amax * 2^j, as int32 arrays with one exponent per block."""
    low, high = terms.offsets or AROUND_FLOOR
    floor = np.frexp(amax)[1] - 1 - int(np.frexp(np.float64(r.element.max))[1] - 1) + E8M0.bias
    base = floor - code if terms.offsets is None else np.zeros_like(code)
    for step in range(low, high + 1):
        yield base + step
