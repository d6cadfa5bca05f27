"""Requantize MXFP4 to NVFP4: keep the element codes, and express the scales, powers of two, in NVFP4.

The tensor scale of the result is a power of two 2^m, and each block scale is the MXFP4 scale divided by 2^m. Only
blocks whose scale E4M3 cannot hold get new codes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.layouts import pack, swizzle_scales, unpack, unswizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import full_range, tensor_scale

HIGHEST = int(np.log2(E4M3.max))  # E4M3 holds the powers of two from 2^-9 to 2^8
LOWEST = int(np.log2(E4M3.min_subnormal))


def may_keep_codes(q: Quantized, target: Recipe) -> bool:
    """Return True if the formats and blocks of q and target allow a cast from MXFP4 to NVFP4.

    The result is False in these cases:

    - q is not MXFP4, or is empty
    - target is not NVFP4 with one scale per tensor
    - blocks of q and of target have different numbers of rows
    - the columns of q's block are not a multiple of those of target's block

    The values of the scales are not checked here, but by keep_codes.
    """
    source = q.recipe
    if not (source.element == target.element == E2M1 and source.scale == E8M0 and target.scale == E4M3):
        return False
    if target.tensor_scaling != "tensor" or source.block is None or target.block is None or not q.packed.size:
        return False
    return target.block[0] == source.block[0] and source.block_size % target.block_size == 0


class KeptCodes(NamedTuple):
    """The result of keep_codes: the cast array, and which of its blocks are valid.

    quantized: the cast array. Its blocks that are out of range are not meaningful yet (see with_encoded_blocks).
    in_range: bool, one per block of the source: True if E4M3 holds the new scale of the block.
    """

    quantized: Quantized
    in_range: np.ndarray


def keep_codes(q: Quantized, target: Recipe) -> KeptCodes | None:
    """Return q cast from MXFP4 to the NVFP4 recipe target, with its element codes kept, as a KeptCodes; or None.

    The codes are copied, except that code 8 (-0) becomes 0 if q decodes it to +0. The tensor scale is 2^m, where m is
    the largest scale exponent among the blocks with a nonzero code, minus 8. If all codes are zero, m is 0. Blocks
    whose codes are all zero get the scale 0. The cast array has the shape, dtype and scale layout of q. q is not
    changed.

    Return None in three cases:

    - the recipes do not allow the cast (see may_keep_codes)
    - a scale is NaN
    - the tensor rule of target cannot give 2^m
    """
    if not may_keep_codes(q, target):
        return None
    source = q.recipe
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
    if (scales == E8M0.nan_code).any():
        return None
    nonzero = (unpack(q.packed).reshape(*scales.shape, -1) & 7).any(axis=-1)
    k = scales.astype(np.int32) - E8M0.bias
    m = int(k[nonzero].max()) - HIGHEST if nonzero.any() else 0
    in_range = ~nonzero | (k - m >= LOWEST)
    amax = _amax_of(m, target, (q.dtype,) if in_range.all() else (q.dtype, np.dtype(np.float32)))
    if amax is None:
        return None
    held = nonzero & in_range  # the scale of any other block may be out of range
    values = np.where(held, np.ldexp(np.float32(1), np.where(held, k - m, 0)), np.float32(0)).astype(np.float32)
    block_scale = np.repeat(encode(values, E4M3), source.block_size // target.block_size, axis=-1)
    layout = swizzle_scales(block_scale, q.scale_layout)
    parts = (_kept_codes(q), layout, np.asarray(np.ldexp(np.float32(1), m)), amax)
    return KeptCodes(Quantized(*parts, q.shape, q.dtype, q.axis, target, q.scale_layout), in_range)


def _amax_of(m: int, target: Recipe, dtypes: tuple[np.dtype, ...]) -> np.ndarray | None:
    """Return the tensor amax that gives the tensor scale 2^m: full_range(target) * 2^m, as float32."""
    with np.errstate(over="ignore"):
        amax = np.asarray(np.ldexp(full_range(target), m), np.float32)
    scales = [np.float32(tensor_scale(amax, target, dtype).decode) for dtype in dtypes]
    return amax if np.isfinite(amax) and all(scale == np.ldexp(np.float32(1), m) for scale in scales) else None


def with_encoded_blocks(kept: KeptCodes, encoded: Quantized) -> Quantized:
    """Return a copy of kept.quantized in which blocks out of range have the codes and block scales of `encoded`.

    encoded: the values of the source, quantized with kept.quantized.tensor_amax, with scales in the linear layout.
    """
    q, keeps = kept.quantized, kept.in_range
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
    halves = np.repeat(keeps, scales.shape[-1] // keeps.shape[-1], axis=-1)
    layout = swizzle_scales(np.where(halves, scales, encoded.block_scale), q.scale_layout)
    blocks = (*keeps.shape, -1)
    packed = np.where(keeps[..., None], q.packed.reshape(blocks), encoded.packed.reshape(blocks))
    return replace(q, packed=packed.reshape(q.packed.shape), block_scale=layout)


def changed_values(before: np.ndarray, after: np.ndarray) -> tuple[int, np.float32]:
    """Return how many values of two float32 arrays differ, and the largest magnitude of their differences.

    Values differ if their bits differ. So -0 differs from +0, with a difference of 0. All NaNs count as equal. The
    magnitude is 0 if no value differs, and NaN if a NaN became a number or a number became NaN.
    """
    same = (before.view(np.uint32) == after.view(np.uint32)) | (np.isnan(before) & np.isnan(after))
    if same.all():
        return 0, np.float32(0)
    with np.errstate(over="ignore"):
        error = np.float32(np.abs(after[~same] - before[~same]).max())
    return int(same.size - np.count_nonzero(same)), np.float32(np.nan) if np.isnan(error) else error


def _kept_codes(q: Quantized) -> np.ndarray:
    """Return a copy of the packed codes of q, for use in the converted Quantized."""
    if not DECODE_RULES[q.recipe.decode_rule].unsigned_zero:
        return q.packed.copy()
    codes = unpack(q.packed)
    return pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))
