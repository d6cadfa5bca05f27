"""Requantize MXFP4 to NVFP4 exactly: keep the element codes, and express the scales, powers of two, in NVFP4.

The tensor scale of the result is a power of two 2^m, and each block scale is the MXFP4 scale divided by 2^m.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.layouts import pack, swizzle_scales, unpack, unswizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import full_range, tensor_scale


def may_keep_codes(q: Quantized, target: Recipe) -> bool:
    """Return whether the formats and blocks of q and target allow the exact cast from MXFP4 to NVFP4.

    q must be MXFP4, target must be NVFP4 with one scale per tensor, and each block of q must consist of whole blocks of
    target. keep_codes also checks the values of the scales.
    """
    source = q.recipe
    if not (source.element == target.element == E2M1 and source.scale == E8M0 and target.scale == E4M3):
        return False
    if target.tensor_scaling != "tensor" or source.block is None or target.block is None or not q.packed.size:
        return False
    return target.block[0] == source.block[0] and source.block_size % target.block_size == 0


def keep_codes(q: Quantized, target: Recipe) -> Quantized | None:
    """Return q cast exactly from MXFP4 to the NVFP4 recipe target, or None if no exact cast exists."""
    if not may_keep_codes(q, target):
        return None
    source = q.recipe
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
    exponents = _exponents(q, scales)
    if exponents is None:
        return None
    nonzero, m = exponents
    shifted = np.where(nonzero, scales.astype(np.int32) - 127 - m, 0)  # a zero block's scale may be out of range
    values = np.where(nonzero, np.ldexp(np.float32(1), shifted), np.float32(0)).astype(np.float32)
    block_scale = np.repeat(encode(values, E4M3), source.block_size // target.block_size, axis=-1)
    with np.errstate(over="ignore"):
        amax = np.ldexp(full_range(target), m).astype(np.float32)
    decode_scale = np.asarray(tensor_scale(amax, target, q.dtype).decode, np.float32)
    if not np.isfinite(amax) or decode_scale != np.ldexp(np.float32(1), m):
        return None
    layout = swizzle_scales(block_scale, q.scale_layout)
    return Quantized(
        _kept_codes(q), layout, decode_scale, np.asarray(amax), q.shape, q.dtype, q.axis, target, q.scale_layout
    )


def _kept_codes(q: Quantized) -> np.ndarray:
    """Return the packed codes of the cast: a copy of those of q.

    If the decode rule of q gives +0 for code 8 (-0), code 8 is replaced by code 0.
    """
    if not DECODE_RULES[q.recipe.decode_rule].unsigned_zero:
        return q.packed.copy()
    codes = unpack(q.packed)
    return pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))


def _exponents(q: Quantized, scales: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Return a mask of the blocks of q with a nonzero code, and the exponent m of the tensor scale 2^m of the cast.

    Return None if a scale is NaN, or if the scales of these blocks span more powers of two than E4M3 has. scales: the
    scale codes of q in linear layout.
    """
    if (scales == 255).any():
        return None
    codes = unpack(q.packed).reshape(*scales.shape, -1)
    nonzero = (codes & 7).any(axis=-1)
    if not nonzero.any():
        return nonzero, 0
    k = scales[nonzero].astype(np.int64) - 127
    top = int(np.log2(E4M3.max))  # E4M3 holds the powers of two from 2^-9 to 2^8
    low = int(np.log2(E4M3.min_subnormal))
    return (nonzero, int(k.max()) - top) if k.max() - k.min() <= top - low else None
