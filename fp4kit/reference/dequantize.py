"""Decode codes to values, and cast codes to another recipe without loss where the formats allow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0, ElementFormat, IntegerOrFloat
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import decoding
from fp4kit.reference.arith import ONE, Array, Dtype, reciprocal_approx_ftz, reciprocal_or_zero, round_to
from fp4kit.reference.codec import decode, encode, show, split_scales, tiles
from fp4kit.reference.tensor_rules import TINY_AMAX, TensorScale, full_range, tensor_scale

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
ALL_ONES = np.float32(480)  # 15 * 2^5: E4M3's pattern of all ones, read as a number


def _product(v: Array, s: Array | None, t: TensorScale, r: Recipe) -> Array:
    """Return v * (scale * t.decode), or v * t.decode without block scales: the rule that recipes use by default."""
    if s is None or r.scale is None:
        return v * t.decode
    return v * (decode(s, r.scale)[..., None] * t.decode)


def _e4m3(s: Array) -> Array:
    return decode(s, E4M3)[..., None]


def _e8m0(s: Array, at_255: float) -> Array:
    return np.where(s == 255, np.float32(at_255), decode(s, E8M0))[..., None]


def _unbounded(v: Array, s: Array) -> Array:
    """Return v * 2^(s - 127), where s = 255 stands for 2^128: too large for float32, unlike its product with 0.5."""
    return np.ldexp(v, s.astype(np.int32)[..., None] - 127)


def gguf_scales(s: Array) -> Array:
    """Return E4M3 scales without their sign bit, except that 7F gives 0 and FF gives 480."""
    usual = decode(s & np.uint8(0x7F), E4M3)
    return np.where(s == 0xFF, ALL_ONES, np.where(s == 0x7F, np.float32(0), usual))


def _mlx_0322(s: Array) -> Array:
    """Return E4M3 scales, where the codes 7F and FF, which are NaN in E4M3, count as 480 and -480."""
    return np.where(s & 0x7F == 0x7F, np.where(s == 0x7F, ALL_ONES, -ALL_ONES), decode(s, E4M3))[..., None]


def _unsigned_zero(v: Array) -> Array:
    """Return v with -0 replaced by +0, for producers whose tables of values have no -0."""
    return v + np.float32(0)  # -0 + 0 = +0 under rn; every other value is unchanged


def _fouroversix(v: Array, s: Array, t: TensorScale, r: Recipe) -> Array:
    if isinstance(r.element, IntegerOrFloat):
        v = round_to(v, HALF)  # the values of INT4 codes are code * 6/7
    return round_to(v * _e4m3(s), HALF) * t.amax / full_range(r)


def _narrow_scales(v: Array, s: Array, t: TensorScale, dtype: Dtype) -> Array:
    return v * round_to(_e4m3(s) * round_to(np.asarray(t.decode), dtype), dtype)


def _float16(v: Array, s: Array) -> Array:
    """Return H(v * H(scale)), where H rounds to float16: scales from 2^16 on become infinite, below 2^-24 zero."""
    return round_to(v * round_to(_e8m0(s, np.inf), HALF), HALF)


def _int_modelopt(v: Array, t: TensorScale) -> Array:
    """Return v / t.encode, or +0 if the tensor amax is at most 2^-24."""
    zero = t.amax <= TINY_AMAX
    return np.where(zero, np.float32(0), v / np.where(zero, ONE, t.encode))


# {decode rule: a function of the element values v (m, blocks, block), the block scale codes s (m, blocks) or None, the
# TensorScale t, whose arrays broadcast to v, and the recipe r}. It returns the decoded values. recipes/rules.py says
# which rules read t.amax or t.encode; t.decode is the stored tensor_scale.
DECODE_RULES: dict[str, Callable[..., Array]] = {
    "product": _product,
    # Source: TE cast/nvfp4/dequantize_nvfp4.cuh
    "te": lambda v, s, t, r: v * (_e4m3(s) * t.amax * (ONE / full_range(r))),
    # compressed-tensors stores t.encode as its global scale; vLLM decodes so too
    "compressed_tensors": lambda v, s, t, r: v * (_e4m3(s) / t.encode),
    # transformers with dequantize=True; values are then rounded to bfloat16 (DecodeRule.to_bfloat16)
    "compressed_tensors_bfloat16": lambda v, s, t, r: v * (_e4m3(s) / t.encode),
    "stored_divisor_bfloat16": lambda v, s, t, r: v * (_e4m3(s) / (ONE / t.decode)),
    # compressed-tensors decodes codes of another producer, which computes only t.decode, so: the divisor 1 / t.decode
    "stored_divisor": lambda v, s, t, r: v * (_e4m3(s) / (ONE / t.decode)),
    # Source: vLLM _nvfp4_quant_dequant_kernel
    "vllm_cuda": lambda v, s, t, r: v * (_e4m3(s) * reciprocal_approx_ftz(t.encode)),
    # FlashInfer's nvfp4_kv_dequantize. The first product is exact, so the result is rounded once
    "flashinfer_kv": lambda v, s, t, r: v * _e4m3(s) * t.decode,
    # Source: auto-round data_type/nvfp.py ref_nvfp4_quant
    "auto_round": lambda v, s, t, r: v * reciprocal_or_zero(reciprocal_or_zero(_e4m3(s) * t.decode)),
    # Source: Model-Optimizer NVFP4QTensor.dequantize, e2m1_values
    "modelopt": lambda v, s, t, r: _product(_unsigned_zero(v), s, t, r),
    # Source: MLX mx.dequantize on a CPU, up to 0.32.2
    "mlx_0322": lambda v, s, t, r: v * (_mlx_0322(s) * t.decode),
    # Source: fouroversix dequantize, whose intermediate dtype is float16 by default
    "fouroversix": _fouroversix,
    # The intermediate dtype is float32. Equals "fouroversix" for E2M1 and INT4, whose products are exact in float16
    "fouroversix_float32": lambda v, s, t, r: v * _e4m3(s) * t.amax / full_range(r),
    # Source: comfy-kitchen tensor/nvfp4.py TensorCoreNVFP4Layout.dequantize
    "comfy_kitchen": _product,
    "comfy_kitchen_float16": lambda v, s, t, r: _narrow_scales(v, s, t, HALF),
    "comfy_kitchen_bfloat16": lambda v, s, t, r: _narrow_scales(v, s, t, BFLOAT16),
    # Source: comfy-kitchen backends/eager/quantization.py dequantize_per_tensor_fp8
    "fp8_comfy_kitchen": _product,
    # Source: transformers, which loads the scales of compressed-tensors in the dtype of the model
    "fp8_compressed_tensors": _product,
    "fp8_comfy_kitchen_float16": lambda v, s, t, r: v * round_to(np.asarray(t.decode), HALF),
    "fp8_comfy_kitchen_bfloat16": lambda v, s, t, r: v * round_to(np.asarray(t.decode), BFLOAT16),
    # Source: TE custom_recipes/quantization_nvfp4_1x64.py
    "te_1x64": lambda v, s, t, r: v * _e4m3(s) / t.encode,
    # Source: kernels-community nvfp4-gemm quantize_reference
    "hf_kernels": lambda v, s, t, r: v * np.maximum(_e4m3(s), np.float32(1e-12)) / t.encode,
    # OpenVINO, with the inference precision float32: it reads the product of both scales as float16
    "nncf": lambda v, s, t, r: v * round_to(_e4m3(s) * t.decode, HALF),
    "e8m0_nncf": lambda v, s, t, r: v * round_to(_e8m0(s, np.nan), HALF),
    "int_modelopt": lambda v, s, t, r: _int_modelopt(v, t),
    # OCP MX v1.0: code 255 gives NaN
    "e8m0": lambda v, s, t, r: v * _e8m0(s, np.nan),
    # Source: FlashInfer mxfp4_dequantize_host
    "e8m0_flashinfer_host": lambda v, s, t, r: _unsigned_zero(v) * _e8m0(s, np.nan),
    # The scale is the float32 whose bits are s << 23: code 0 gives 0 instead of 2^-127, and code 255 infinity.
    # Source: FlashInfer e2m1_and_ufp8sf_scale_to_float, type 0
    "e8m0_flashinfer_api": lambda v, s, t, r: v * (s.astype(np.int32) << 23).view(np.float32)[..., None],
    # Source: transformers convert_moe_packed_tensors
    "e8m0_unbounded": lambda v, s, t, r: _unbounded(v, s),
    # Source: llama.cpp, NVFP4; then dequantize_row_mxfp4
    "gguf": lambda v, s, t, r: _unsigned_zero(v) * (gguf_scales(s)[..., None] * t.decode),
    "e8m0_gguf": lambda v, s, t, r: _unbounded(_unsigned_zero(v), s),
    # With scale code 255, zeros decode to NaN. Source: Model-Optimizer MXFP4QTensor and MXFP8QTensor
    "e8m0_infinite": lambda v, s, t, r: v * _e8m0(s, np.inf),
    # Source: MLX mx.dequantize on a CPU. Up to 0.32.2, the element codes 7F and FF are 480 and -480 in v (_read_as)
    "e8m0_mlx": lambda v, s, t, r: v * _e8m0(s, np.inf),
    "e8m0_mlx_0322": lambda v, s, t, r: v * _e8m0(s, np.inf),
    # Source: Quark export/nn/modules/realquantizer.py unpack_params
    "e8m0_quark": lambda v, s, t, r: v * _e8m0(s, np.inf),
    # Source: MLX mx.dequantize of float16 on a CPU; fouroversix dequantize, for every dtype
    "e8m0_float16": lambda v, s, t, r: _float16(v, s),
    "e8m0_float16_0322": lambda v, s, t, r: _float16(v, s),
    # Source: HiFloat4 quant_cy, AMCT hif4_unpack. v includes the exponent bits; the product is exact
    "hif4": _product,
    # Source: msmodelslim W4A4MXDynamicDualScaleFakeQuantLinear
    "e8m0_levels": lambda v, s, t, r: v * _e8m0(s, np.nan) * t.decode,
}


@lru_cache(64)
def _read_as(element: ElementFormat, decode_rule: str) -> ElementFormat:
    """Return the format that a decode rule uses to read element codes: usually `element` itself."""
    return replace(element, specials="none") if rules.DECODE_RULES[decode_rule].numbers else element


def dequantize_tile(codes: Array, scales: Array | None, recipe: Recipe, tensor: TensorScale) -> Array:
    """Return the float32 values (m, k) of codes (m, k) and block scale codes (m, k / block).

    The recipe's decode rule computes them, with one exception: if no amax gives the stored tensor scale, the rule
    "product" is used instead, because it does not read the amax. tensor.amax is then UNKNOWN.

    scales: None if the recipe has no block scales.
    tensor: the tensor scale; its fields are scalars, (m, 1) or (m, blocks).
    """
    m, k = codes.shape
    blocks = codes.reshape(m, -1, recipe.block_size if recipe.block else k)
    if isinstance(recipe.element, IntegerOrFloat) and scales is not None:
        values, scales = recipe.element.values_of(blocks, scales), recipe.element.scale_codes(scales)
    else:
        values = decode(blocks, _read_as(recipe.element, recipe.decode_rule))
    values = show("element value", values)
    if recipe.exponent_levels and scales is not None:
        scales, powers = split_scales(scales, recipe)
        values = show("element value * powers of two", values * powers)
    expanded = TensorScale(*(np.asarray(part)[..., None] for part in tensor))
    with np.errstate(all="ignore"):
        decoded = DECODE_RULES[recipe.decode_rule](values, scales, expanded, recipe)
        unknown = expanded.amax < 0
        if unknown.any():
            decoded = np.where(unknown, _product(values, scales, expanded, recipe), decoded)
        if rules.DECODE_RULES[recipe.decode_rule].to_bfloat16:
            decoded = round_to(show("decoded value before it is rounded to bfloat16", decoded), BFLOAT16)
        return show("decoded value", decoded.reshape(m, k))


def dequantize_matrix(packed: Array, scales: Array | None, recipe: Recipe, tensor: TensorScale, out: Array) -> None:
    """Write the values of one matrix into out (M, K), tile by tile, rounded to nearest even in the dtype of out.

    Args:
        packed: the codes as the element format stores them.
        scales: block scale codes (M, K / block), or None if the recipe has no block scales.
        recipe: the recipe. For some dtypes of `out` it decodes by another rule.
        tensor: the result of stored_tensor_scale.
        out: float32, float16 or bfloat16 (M, K).
    """
    tensor, packing = tensor.columns(recipe, out.shape[1]), recipe.element.packing
    recipe = decoding(recipe, out.dtype)
    for rows, columns in tiles(out.shape, recipe.block):
        codes = packing.unpack(packed[rows, packing.length(columns.start) : packing.length(columns.stop)])
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        count = recipe.scale_bytes
        tile_scales = None if scales is None else scales[rows, blocks.start * count : blocks.stop * count]
        values = dequantize_tile(codes, tile_scales, recipe, tensor.cut(rows, blocks))
        with np.errstate(all="ignore"):
            out[rows, columns] = show("result", values.astype(out.dtype))


HIGHEST = int(np.log2(E4M3.max))  # E4M3 holds the powers of two from 2^-9 to 2^8
LOWEST = int(np.log2(E4M3.min_subnormal))


def may_keep_codes(q: Any, target: Recipe) -> bool:
    """Return True if the formats and blocks of q and target allow a cast from MXFP4 to NVFP4.

    The result is False in these cases:

    - q is not MXFP4, or is empty
    - target is not NVFP4 with one scale per tensor
    - blocks of q and of target have different numbers of rows
    - the columns of q's block are not a multiple of those of target's block
    - target decodes with scales that are rounded to float16, as NNCF does

    The values of the scales are not checked here, but by keep_codes.
    """
    source = q.recipe
    rounds_scale = target.decode_rule == "nncf"
    if not (source.element == target.element == E2M1 and source.scale == E8M0 and target.scale == E4M3) or rounds_scale:
        return False
    if target.tensor_scaling != "tensor" or source.block is None or target.block is None or not q.packed.size:
        return False
    return target.block[0] == source.block[0] and source.block_size % target.block_size == 0


class KeptCodes(NamedTuple):
    """The result of keep_codes: the cast array, and which of its blocks are valid.

    quantized: the cast array. Its blocks that are out of range are not meaningful yet (see with_encoded_blocks).
    in_range: bool, one per block of the source: True if E4M3 holds the new scale of the block.
    """

    quantized: Any
    in_range: Array


def keep_codes(q: Any, target: Recipe) -> KeptCodes | None:
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
    scales = q.block_scale
    if (scales == E8M0.nan_code).any():
        return None
    nonzero = (E2M1.packing.unpack(q.packed).reshape(*scales.shape, -1) & 7).any(axis=-1)
    k = scales.astype(np.int32) - E8M0.bias
    m = int(k[nonzero].max()) - HIGHEST if nonzero.any() else 0
    in_range = ~nonzero | (k - m >= LOWEST)
    amax = _amax_of(m, target, (q.dtype,) if in_range.all() else (q.dtype, np.dtype(np.float32)))
    if amax is None:
        return None
    held = nonzero & in_range  # the scale of any other block may be out of range
    values = np.where(held, np.ldexp(np.float32(1), np.where(held, k - m, 0)), np.float32(0)).astype(np.float32)
    block_scale = np.repeat(encode(values, E4M3), source.block_size // target.block_size, axis=-1)
    scale = np.asarray(np.ldexp(np.float32(1), m))
    parts = {"packed": _kept_codes(q), "block_scale": block_scale, "tensor_scale": scale, "tensor_amax": amax}
    return KeptCodes(replace(q, **parts, recipe=target), in_range)


def _amax_of(m: int, target: Recipe, dtypes: tuple[np.dtype, ...]) -> Array | None:
    """Return the tensor amax that gives the tensor scale 2^m: full_range(target) * 2^m, as float32."""
    with np.errstate(over="ignore"):
        amax = np.asarray(np.ldexp(full_range(target), m), np.float32)
    scales = [np.float32(tensor_scale(amax, target, dtype).decode) for dtype in dtypes]
    return amax if np.isfinite(amax) and all(scale == np.ldexp(np.float32(1), m) for scale in scales) else None


def with_encoded_blocks(kept: KeptCodes, encoded: Any) -> Any:
    """Return a copy of kept.quantized in which blocks out of range have the codes and block scales of `encoded`.

    encoded: the values of the source, quantized with kept.quantized.tensor_amax, with scales in the linear layout.
    """
    q, keeps = kept.quantized, kept.in_range
    halves = np.repeat(keeps, q.block_scale.shape[-1] // keeps.shape[-1], axis=-1)
    scales = np.where(halves, q.block_scale, encoded.block_scale)
    blocks = (*keeps.shape, -1)
    packed = np.where(keeps[..., None], q.packed.reshape(blocks), encoded.packed.reshape(blocks))
    return replace(q, packed=packed.reshape(q.packed.shape), block_scale=scales)


def changed_values(before: Array, after: Array) -> tuple[int, np.float32]:
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


def _kept_codes(q: Any) -> Array:
    """Return a copy of the packed codes of q, for use in the converted Quantized."""
    if not rules.DECODE_RULES[q.recipe.decode_rule].unsigned_zero:
        return q.packed.copy()
    codes = E2M1.packing.unpack(q.packed)
    return E2M1.packing.pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))


# ---- powers of two as scales of FP8 and MXFP8 ----


def may_use_powers(q: Any, target: Recipe) -> bool:
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


def under_powers_of_two(values: Any, own: Any, changed: Any = None) -> Any:
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
