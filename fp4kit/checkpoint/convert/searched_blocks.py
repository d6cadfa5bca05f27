"""Search the scale bytes of GGUF blocks, which have no tensor scale, for the smallest error.

Candidates and ties:

- nvfp4-gguf: the E4M3 codes 1 to 126. A block whose element codes are all 0 gets the scale byte 0.
- mxfp4-gguf: 2^j times the largest power of two that is at most amax / 4, for j from -1 to 1. The scale with j = 0 is
  the one that llama.cpp computes. With column weights, or for an error sum(abs(x - y) ** p) with p below 2, j begins
  at -4.

Errors are compared in float32, as fp4kit.search_scales computes them. Among equal errors, the smallest scale wins.

For mxfp4-gguf without column weights and with p of at least 2, the range -1 to 1 is sufficient: no other scale byte has
a smaller error. With j = -2, the element of the largest magnitude alone adds more error than the whole block has with
j = 0. With j = 2, the representable values up to the largest magnitude of the block are a subset of those with j = 1.

If all column weights of a block are 0, every scale has the error 0, so the block is searched with equal weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from fp4kit.arrays.imports import to_device
from fp4kit.call.search_scales import power_of
from fp4kit.formats import E4M3, E8M0
from fp4kit.ops.amax import search_scales
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.codec import encode
from fp4kit.types import Objective

# A recipe with the scale_max 256. Its candidate scale for the E4M3 value c is tensor_amax * c / 256 / 6. With the
# tensor amax 256 * 6 = 1536, this is exactly c in float32, and the block amax that search_scales returns is 6 * c.
_UNIT_RECIPE = "nvfp4-modelopt-static-4over6"
_UNIT_AMAX = np.float32(256 * 6)
_WIDE = (-4, 1)  # the range of j for E8M0 scales if the default range may miss the smallest error


def search_blocks(x: Any, recipe: Recipe, objective: str, weights: Any) -> Quantized:
    """Quantize a matrix for GGUF with the scale byte that gives each block the smallest error."""
    error = cast(Objective, objective)
    weights = None if weights is None else _without_zero_blocks(weights, recipe.block_size)
    if recipe.scale == E8M0:
        is_proven = weights is None and power_of("scale search", objective) >= 2
        found = search_scales(x, recipe, objective=error, weights=weights, candidates="all" if is_proven else _WIDE)
        return quantize(x, recipe, block_amax=found)
    found = search_scales(x, _UNIT_RECIPE, objective=error, tensor_amax=_UNIT_AMAX, weights=weights)
    return _with_searched_scales(x, recipe, found / np.float32(6))


def _with_searched_scales(x: Any, recipe: Recipe, values: Any) -> Quantized:
    """Quantize a matrix with given block scales."""
    on_host = isinstance(values, np.ndarray)
    codes = encode(values if on_host else values.get(), E4M3)
    q = quantize(x, recipe, block_scale=codes if on_host else to_device(codes))
    packed, scales = cast(Any, q.packed), cast(Any, q.block_scale)
    has_codes = (packed.reshape(*scales.shape, -1) != 0).any(axis=-1)
    return replace(q, block_scale=scales * has_codes.astype(np.uint8))


def _without_zero_blocks(weights: Any, size: int) -> Any:
    """Return the column weights, with ones in every block of ``size`` columns whose weights are all zero."""
    blocks = weights.reshape(-1, size)
    is_zero = ~blocks.any(axis=-1, keepdims=True)
    return (blocks + is_zero.astype(np.float32)).reshape(-1)
