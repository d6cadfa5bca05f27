"""requantize: from one recipe to another, exactly where that is possible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.layouts import pack, swizzle_scales, unpack, unswizzle_scales
from fp4kit.ops import check
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.quantize import quantize
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.reference.codec import encode
from fp4kit.reference.scaling import full_range, tensor_scale


class Requantized(NamedTuple):
    """quantized: the result. exact: every value is the same, bit for bit. changed: how many values are not."""

    quantized: Quantized
    exact: bool
    changed: int


def requantize(q: Quantized, recipe: str | Recipe) -> Requantized:
    """Quantize a quantized array with another recipe, and say whether every value stayed the same.

    MXFP4 -> NVFP4 keeps the codes: with k the exponents of the blocks that hold anything but zeros and m = max(k) - 8,

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    which is exact iff max(k) - min(k) <= 17, because E4M3 holds 2^-9 ... 2^8 (and 2^m and 2688 * 2^m are float32). Blocks of
    zeros get scale 0 and keep their codes. Everything else is quantize(dequantize(q), recipe).

    q: Quantized; its axis, dtype and scale layout are kept. recipe: the target.
    Returns Requantized(quantized, exact, changed); exact is verified by decoding both, NaN equal to NaN.
    Raises what quantize raises (a length that is not whole blocks of the target, ...).
    Source: Model-Optimizer utils/numeric_utils.py, the closed-form cast.
    """
    check.check_quantized("requantize", q)
    target = find_recipe(recipe)
    check.check_has_codes("requantize", target)
    result = _keep_codes(q, target)
    if result is None:
        values = dequantize(q, np.float32)
        result = quantize(values, target, axis=q.axis, scale_layout=q.scale_layout)
        result = Quantized(**{**vars(result), "dtype": q.dtype})
    changed = _changed_values(q, result)
    return Requantized(result, changed == 0, changed)


def _changed_values(a: Quantized, b: Quantized) -> int:
    x, y = dequantize(a, np.float32), dequantize(b, np.float32)
    same = (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))
    return int(same.size - np.count_nonzero(same))


def _keep_codes(q: Quantized, target: Recipe) -> Quantized | None:
    """The exact MXFP4 -> NVFP4 cast, or None where it does not apply."""
    source = q.recipe
    if not (source.element is target.element is E2M1 and source.scale is E8M0 and target.scale is E4M3):
        return None
    if target.tensor_scaling != "tensor" or source.block is None or target.block is None or not q.packed.size:
        return None
    if target.block[0] != source.block[0] or source.block_size % target.block_size:
        return None
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
    exponents = _exponents(q, scales)
    if exponents is None:
        return None
    nonzero, m = exponents
    values = np.where(nonzero, np.ldexp(np.float32(1), scales.astype(np.int32) - 127 - m), np.float32(0)).astype(np.float32)
    block_scale = np.repeat(encode(values, E4M3), source.block_size // target.block_size, axis=-1)
    with np.errstate(over="ignore"):
        amax = np.ldexp(full_range(target), m).astype(np.float32)
    decode_scale = np.asarray(tensor_scale(amax, target, q.dtype).decode, np.float32)
    if not np.isfinite(amax) or decode_scale != np.ldexp(np.float32(1), m):
        return None
    layout = swizzle_scales(block_scale, q.scale_layout)
    return Quantized(_kept_codes(q), layout, decode_scale, np.asarray(amax), q.shape, q.dtype, q.axis, target, q.scale_layout)


def _kept_codes(q: Quantized) -> np.ndarray:
    """The codes, but code 8 as 0 where the source's decoder drops the sign of zero."""
    if q.recipe.decode_rule != "e8m0_flashinfer_host":
        return q.packed.copy()
    codes = unpack(q.packed)
    return pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))


def _exponents(q: Quantized, scales: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Which blocks hold a nonzero code, and the exponent m of the tensor scale; None if they span more than E4M3 does."""
    if (scales == 255).any():
        return None
    codes = unpack(q.packed).reshape(*scales.shape, -1)
    nonzero = (codes & 7).any(axis=-1)
    if not nonzero.any():
        return nonzero, 0
    k = scales[nonzero].astype(np.int64) - 127
    top = int(np.log2(E4M3.max))  # 2^8 is the largest power of two, 2^-9 the smallest
    low = int(np.log2(E4M3.min_subnormal))
    return (nonzero, int(k.max()) - top) if k.max() - k.min() <= top - low else None
