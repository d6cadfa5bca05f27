"""Implement fp4kit.transpose, which makes the columnwise copy of a rowwise quantized array with square blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.call_cache import find, run_first
from fp4kit.call.checks import check_quantized
from fp4kit.call.shards import square_block
from fp4kit.ops.engines import new_cached_call, run
from fp4kit.quantized.container import Quantized


def transpose(q: Quantized) -> Quantized:
    """Convert a rowwise quantized array with square blocks to the columnwise one, or the reverse, without decoding it.

    The result is quantized along the other one of the last two axes. Codes and scales are only moved, so the values
    stay the same.

    Args:
        q: a Quantized in any scale layout, of a recipe with square blocks (16x16: nvfp4-te-2d, ...). It was quantized
            along axis -1 or -2 of an array (..., M, K), where M and K are multiples of the block's side.

    Returns:
        A new Quantized of q's shape, quantized along the other axis, in the scale layout and on the device of q. If q
        is rowwise, with packed (..., M, K/2), the result has packed (..., K, M/2) and block_scale (..., K, M/block).
        tensor_scale and tensor_amax are those of q.

    Raises:
        TypeError: q is not a Quantized.
        ValueError: the recipe has no square blocks, the axis or a length does not fit, or arrays are on several
            devices.
        NotImplementedError: q is on a GPU, and the block size is not 16, 32 or 64.

    Exact:
        transpose(transpose(q)) equals q. For a rowwise q, the bytes equal those of quantize(x, recipe, axis=-2). There
        are two exceptions, because the scale depends on the direction: 4over6 recipes sum errors along the rows
        (nvfp4-te-4over6-...-2d), and recipes with amax_nan "lanes" look for NaN in every other element of a row.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4-te-2d")
        >>> t = fp4kit.transpose(q)
        >>> q.packed.shape, t.packed.shape, t.axis
        ((32, 32), (64, 16), 0)
    """
    key, cached = find("transpose", (q,))
    return _transpose(q, key) if cached is None else cached(q)


@returns_in_library
def _transpose(q: Quantized, key: Any) -> Quantized:
    """Check the argument of transpose, and return q quantized along the other axis."""
    original = q
    q = check_quantized("transpose", q)
    _check_square_blocks(q)
    axis, is_on_device = 2 * len(q.shape) - 3 - q.axis, on_device(q.packed)

    def driver() -> Quantized:
        codes, block_scale = run("transpose", "transpose", is_on_device, q.packed, q.block_scale, q)
        return replace(q, packed=codes, block_scale=block_scale, axis=axis)

    cached = None if key is None else new_cached_call("transpose", is_on_device, q, original, axis)
    result: Quantized = run_first(key, cached, (original,), driver)
    return result


def _check_square_blocks(q: Quantized) -> None:
    """Raise ValueError unless q can be transposed."""
    if len(q.shape) < 2 or q.axis < len(q.shape) - 2:
        raise ValueError(f"transpose: q has axis {q.axis} of a {len(q.shape)}-d array; needs one of the last two axes")
    square_block("transpose", q.recipe, q.moved_shape[-2])
