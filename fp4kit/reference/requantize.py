"""Requantize without loss where the formats allow it.

MXFP4 to NVFP4 keeps the element codes: the tensor scale is a power of two 2^m, and each block scale is the MXFP4 scale
divided by 2^m. Blocks whose scale E4M3 cannot hold get new codes. To FP8 and MXFP8, a block is written under the scale
2^m with which the most of its values are exact in the element format (under_powers_of_two).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0, ElementFormat
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
    differ = differing(before, after)
    if not differ.any():
        return 0, np.float32(0)
    with np.errstate(over="ignore"):
        error = np.float32(np.abs(after[differ] - before[differ]).max())
    return int(np.count_nonzero(differ)), np.float32(np.nan) if np.isnan(error) else error


def differing(before: Any, after: Any) -> Any:
    """Return where two float32 arrays differ in any bit; NaN equals NaN."""
    same = (before.view(np.uint32) == after.view(np.uint32)) | ((before != before) & (after != after))
    return ~same


def _kept_codes(q: Quantized) -> np.ndarray:
    """Return a copy of the packed codes of q, for use in the converted Quantized."""
    if not DECODE_RULES[q.recipe.decode_rule].unsigned_zero:
        return q.packed.copy()
    codes = unpack(q.packed)
    return pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))


# ---- powers of two as scales of FP8 and MXFP8 ----


def may_use_powers(q: Quantized, target: Recipe) -> bool:
    """Return True if q's scales are, or may be, powers of two, and target has 8-bit floats whose scales can be.

    q must be of an MX format, or of FP8 with float32 scales. target must be FP8 or MXFP8. The values are not read.
    """
    source, element = q.recipe, target.element
    if not q.packed.size or (source.scale != E8M0 and not (source.scale is None and _is_fp8(source.element))):
        return False
    if not _is_fp8(element) or target.four_over_six:
        return False
    return target.tensor_scaling == "none" if target.scale == E8M0 else target.scale is None


def _is_fp8(element: Any) -> bool:
    return isinstance(element, ElementFormat) and element.bits == 8 and not element.is_integer and element.has_zero


class _Powers(NamedTuple):
    """One power of two per block: its exponent, and whether it is of use: see _powers_for."""

    exponent: Any
    usable: Any


def in_blocks(array: Any, r: Recipe) -> Any:
    """Return an array (..., K) as (..., row blocks, rows, column blocks, columns), with zeros below the last rows.

    Without blocks, a block is a row, or the whole array if the recipe has one scale per tensor.
    """
    if r.block is None and r.tensor_scaling == "tensor":
        return array.reshape(1, 1, 1, -1)
    K = array.shape[-1]
    height, width = r.block or (1, K)
    lead, rows = array.shape[:-2], array.shape[-2] if array.ndim > 1 else 1
    array = array.reshape(*lead, rows, K)
    if missing := -rows % height:
        xp = _namespace(array)
        array = xp.concatenate([array, xp.zeros((*lead, missing, K), array.dtype)], axis=-2)
    return array.reshape(*lead, -1, height, K // width, width)


def _per_row(found: Any, shape: tuple[int, ...], r: Recipe) -> Any:
    """Return one entry per block as one entry per row and block column, the shape of block scales of an array."""
    if r.block is None and r.tensor_scaling == "tensor":
        return found.reshape(())
    rows = shape[-2] if len(shape) > 1 else 1
    repeated = _namespace(found).repeat(found, r.block[0] if r.block else 1, axis=-2)[..., :rows, :]
    return repeated.reshape(*shape[:-1], -1)


def _namespace(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def _bits_of(bits: Any) -> tuple[Any, Any, Any]:
    """Return (exponent of the leading one bit, exponent of the last one bit, fraction) of float32 magnitudes."""
    # Integers are used throughout, because kernels that CuPy compiles flush subnormals.
    xp = _namespace(bits)
    field = bits >> 23
    significand = (bits & 0x7FFFFF) | xp.where(field > 0, 1 << 23, 0).astype(bits.dtype)
    length, lowest = (_length_of(n) for n in (significand, significand & -significand))
    first = xp.maximum(field, 1) - 151
    return first + length, first + lowest, (significand << (24 - length)) & 0x7FFFFF


def _length_of(numbers: Any) -> Any:
    """Return the number of bits of each positive int32, and 0 for 0, as the exponent of the number in float64."""
    exponents = numbers.astype(np.float64).view(np.int64) >> 52
    return _namespace(numbers).maximum(exponents - 1022, 0).astype(np.int32)


def _powers_for(values: Any, r: Recipe) -> _Powers:
    """Find the scale 2^m of each block: the smallest one with which the block's amax does not exceed the element."""
    element, xp = r.element, _namespace(values)
    bits = xp.ascontiguousarray(values).view(np.int32) & 0x7FFFFFFF
    leading, last, _ = _bits_of(bits)
    unfit = (bits >= 0x7F800000) | ((leading - last > element.mantissa_bits) & (bits > 0))
    amax = in_blocks(bits, r).max(axis=(-3, -1))
    top, _, fraction = _bits_of(amax)
    largest_fraction = int(element.max.view(np.int32)) & 0x7FFFFF
    smallest, largest = -126, 127 if r.scale is not None else 127 - element.emax  # the amax is finite
    m = xp.where(amax > 0, xp.maximum(top - element.emax + (fraction > largest_fraction), smallest), 0)
    usable = ~in_blocks(unfit, r).any(axis=(-3, -1)) & (m <= largest)
    return _Powers(xp.minimum(m, largest), usable)


def under_powers_of_two(values: Any, own: Quantized, changed: Any = None) -> Quantized:
    """Return `own` with blocks written under powers of two where those are usable (_powers_for).

    Values that are not exact under them are rounded to nearest even. All other blocks keep the codes and scales of
    `own`. tensor_amax becomes the amax that gives the new scales.

    values: the float32 values that `own` quantizes, with the quantized axis last.
    own: the values, quantized by the target, with linear scales.
    changed: bool, in the shape of the values: where `own` changed a value. If it is given, blocks in which nothing
        changed stay as they are.
    """
    r, xp = own.recipe, _namespace(values)
    if xp is np and changed is not None and not changed.any():
        return own
    m, usable = _powers_for(values, r)
    if changed is not None:
        usable &= in_blocks(changed, r).any(axis=(-3, -1))
    if xp is np and not usable.any():
        return own
    usable, m = _per_row(usable, values.shape, r), _per_row(m, values.shape, r)
    shape = own.tensor_scale.shape if r.scale is None else own.block_scale.shape
    usable, m = usable.reshape(shape), m.reshape(shape)
    blocks = (*values.shape[:-1], -1, r.block_size) if r.block else values.shape
    chosen, power = (a[..., None] if a.ndim else a for a in (usable, m))
    codes = _codes_under(xp.ascontiguousarray(values).reshape(blocks), power, r.element)
    packed = xp.where(chosen, codes, own.packed.reshape(blocks)).reshape(own.packed.shape)
    if r.scale is not None:
        return replace(
            own, packed=packed, block_scale=xp.where(usable, (m + E8M0.bias).astype(np.uint8), own.block_scale)
        )
    scale = ((m + 127) << 23).astype(np.int32).view(np.float32)
    amax = own.tensor_amax
    if amax is not None:
        amax = xp.where(usable, scale * r.element.max, amax)
    return replace(own, packed=packed, tensor_scale=xp.where(usable, scale, own.tensor_scale), tensor_amax=amax)


def _codes_under(values: Any, m: Any, element: ElementFormat) -> Any:
    """Return the uint8 codes of values / 2^m, rounded to nearest even below the smallest normal number of the
    element.
    """
    xp = _namespace(values)
    bits = values.view(np.int32)
    leading, _, fraction = _bits_of(bits & 0x7FFFFFFF)
    width, exponent = element.mantissa_bits, leading - m + element.bias
    mantissa = fraction >> (23 - width)
    significand, shift = (1 << width) | mantissa, xp.minimum(xp.maximum(1 - exponent, 0), width + 2)
    lost = significand & ((1 << shift) - 1)
    kept, half = significand >> shift, (1 << shift) >> 1
    subnormal = kept + ((lost > half) | ((lost == half) & (half > 0) & ((kept & 1) > 0)))
    codes = xp.where(exponent > 0, (exponent << width) | mantissa, subnormal)
    codes = xp.where(bits & 0x7FFFFFFF, codes & 0x7F, 0) | xp.where(bits < 0, element.sign_bit, 0)
    return codes.astype(np.uint8)
