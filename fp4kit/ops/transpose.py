"""transpose: the columnwise copy of a rowwise quantized array with square blocks, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp4kit.arrays.returns import returns_in_library
from fp4kit.call import checks
from fp4kit.call.call_cache import find, keep
from fp4kit.call.shards import square_block
from fp4kit.ops.engines import prepared_by, run
from fp4kit.quantized.container import Quantized


def transpose(q: Quantized) -> Quantized:
    """The same values with blocks along the other one of the last two axes: codes and scales moved, nothing decoded.

    q: Quantized of a recipe with square blocks (16x16: nvfp4-te-2d, ...), axis -1 or -2 of x; x (..., M, K), M and K
    multiples of
        the block. Any scale layout; the result has the same.
    Returns Quantized with the other axis: packed (..., K, M/2) from (..., M, K/2), block_scale (..., K, M/block), both
    where
        those of q are; tensor_scale and tensor_amax are q's own.
    Raises ValueError for other recipes, axes or lengths, or arrays of several devices; on a GPU NotImplementedError for
    blocks of
        other sizes than 16, 32 and 64.
    Exact: transpose(transpose(q)) is q. The bytes are those of quantize(x, recipe, axis=-2), except where the choice of
    a scale
        follows the direction: 4over6 sums errors along the rows (nvfp4-te-4over6-...-2d), and amax_nan "lanes" looks
        for NaN in every other element of a row.

    >>> import fp4kit, numpy as np
    >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4-te-2d")
    >>> fp4kit.transpose(q)
    Quantized(nvfp4-te-2d, shape=(32, 64), dtype=float32, axis=0, scale_layout='linear', 4.52 bits a value)
    """
    key, repeat = find("transpose", (q,))
    return _transpose(q, key) if repeat is None else repeat(q)


@returns_in_library
def _transpose(q: Quantized, key: Any) -> Quantized:
    """The full way, which leaves a prepared call under the key."""
    given = q
    q = checks.check_quantized("transpose", q)
    _check_square_blocks(q)
    codes, block_scale = run("transpose", "transpose", q.packed, q.packed, q.block_scale, q)
    result = replace(q, packed=codes, block_scale=block_scale, axis=2 * len(q.shape) - 3 - q.axis)
    if key is not None:
        keep(key, prepared_by(q.packed).transpose(q, given.packed, result))
    return result


def _check_square_blocks(q: Quantized) -> None:
    if len(q.shape) < 2 or q.axis < len(q.shape) - 2:
        raise ValueError(f"transpose: q has axis {q.axis} of a {len(q.shape)}-d array; needs one of the last two axes")
    square_block("transpose", q.recipe, q.moved_shape[-2])
