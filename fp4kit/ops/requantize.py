"""requantize: from one recipe to another, exactly where that is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.cuda import loader
from fp4kit.cuda import requantize as kernels
from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.layouts import pack, swizzle_scales, unpack, unswizzle_scales
from fp4kit.ops import check, on_device
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import swizzle, unswizzle
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.reference.codec import encode
from fp4kit.reference.scaling import full_range, tensor_scale


class Requantized(NamedTuple):
    """quantized: the result. exact: every value is the same, bit for bit. changed: how many values are not.

    On a GPU exact and changed are CuPy arrays, bool () and int64 (): bool(exact) and int(changed) wait for the device.
    """

    quantized: Quantized
    exact: Any
    changed: Any


@ieee("requantize")
def requantize(q: Quantized, recipe: str | Recipe) -> Requantized:
    """Quantize a quantized array with another recipe, and say whether every value stayed the same.

    MXFP4 -> NVFP4 keeps the codes: with k the exponents of the blocks that hold anything but zeros and m = max(k) - 8,

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    which is exact iff max(k) - min(k) <= 17, because E4M3 holds 2^-9 ... 2^8 (and 2^m and 2688 * 2^m are float32). Blocks of
    zeros get scale 0 and keep their codes. Everything else is quantize(dequantize(q), recipe).

    q: Quantized, NumPy or CuPy; its axis, dtype and scale layout are kept. recipe: the target.
    Returns Requantized(quantized, exact, changed); exact is verified by decoding both, NaN equal to NaN. On a GPU nothing waits:
    exact and changed stay there, and both ways are gone, since which one applies is known on the device only.
    Raises what quantize raises (a length that is not whole blocks of the target, ...).
    Source: Model-Optimizer utils/numeric_utils.py, the closed-form cast.
    """
    check.check_quantized("requantize", q, on_device=True)
    target = find_recipe(recipe)
    check.check_has_codes("requantize", target)
    if not isinstance(q.packed, np.ndarray):
        return _requantize_on_device(q, target)
    result = _keep_codes(q, target)
    if result is None:
        values = dequantize(q, np.float32)
        result = replace(quantize(values, target, axis=q.axis, scale_layout=q.scale_layout), dtype=q.dtype)
    changed = _changed_values(q, result)
    return Requantized(result, changed == 0, changed)


def _changed_values(a: Quantized, b: Quantized) -> int:
    x, y = dequantize(a, np.float32), dequantize(b, np.float32)
    same = (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))
    return int(same.size - np.count_nonzero(same))


def _may_keep_codes(q: Quantized, target: Recipe) -> bool:
    """Whether the formats and blocks are those of the MXFP4 -> NVFP4 cast."""
    source = q.recipe
    if not (source.element is target.element is E2M1 and source.scale is E8M0 and target.scale is E4M3):
        return False
    if target.tensor_scaling != "tensor" or source.block is None or target.block is None or not q.packed.size:
        return False
    return target.block[0] == source.block[0] and source.block_size % target.block_size == 0


def _requantize_on_device(q: Quantized, target: Recipe) -> Requantized:
    """Quantize the values, then overwrite that with the codes as they are, where the device finds that they can be kept."""
    cupy = loader.cupy()
    with cupy.cuda.Device(q.packed.device.id):
        values = dequantize(q, np.float32)
        may_keep = _may_keep_codes(q, target)
        layout = "linear" if may_keep else q.scale_layout
        result = replace(quantize(values, target, axis=q.axis, scale_layout=layout), dtype=q.dtype)
        if may_keep:
            source = (on_device.ready(q.packed), on_device.ready(unswizzle(q).block_scale))
            outputs = (result.packed, result.block_scale, result.tensor_scale, result.tensor_amax)
            kernels.keep_codes(*source, q.recipe, target, q.dtype, *outputs)
        before, after = (np.moveaxis(v, q.axis, -1) for v in (values, dequantize(result, np.float32)))
        changed = kernels.count_changed(before, after)
        return Requantized(swizzle(result, q.scale_layout) if may_keep else result, changed == 0, changed)


def _keep_codes(q: Quantized, target: Recipe) -> Quantized | None:
    """The exact MXFP4 -> NVFP4 cast, or None where it does not apply."""
    if not _may_keep_codes(q, target):
        return None
    source = q.recipe
    scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
    exponents = _exponents(q, scales)
    if exponents is None:
        return None
    nonzero, m = exponents
    shifted = np.where(nonzero, scales.astype(np.int32) - 127 - m, 0)  # scales of zeros may be far outside
    values = np.where(nonzero, np.ldexp(np.float32(1), shifted), np.float32(0)).astype(np.float32)
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
