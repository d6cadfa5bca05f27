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
from fp4kit.layouts import pack, swizzle_scales, unpack, unpacked, unswizzle_scales
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import decoding
from fp4kit.reference.arith import ONE, reciprocal_approx_ftz, reciprocal_or_zero, round_to
from fp4kit.reference.codec import decode, encode, show, tiles
from fp4kit.reference.tensor_rules import TINY_AMAX, TensorScale, full_range, tensor_scale

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
ALL_ONES = np.float32(480)  # 15 * 2^5: E4M3's pattern of all ones, read as a number

# Every function decode_<rule> below is a decode rule. It takes element values (m, blocks, block), block scale codes
# (m, blocks) or None, and a TensorScale whose arrays broadcast to the element values. It returns the decoded values.
# recipes/rules.py says which rules read tensor.amax or tensor.encode. The other rules read tensor.decode only. Few
# rules use the recipe.


def decode_product(values: np.ndarray, scales: np.ndarray | None, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (s(scales) * tensor.decode), or values * tensor.decode if the recipe has no block scales.

    s() decodes scale codes in recipe.scale, the scale format. tensor.decode is the stored tensor_scale. Recipes use
    this decode rule unless they name another one.
    """
    if scales is None or recipe.scale is None:
        return values * tensor.decode
    return values * (decode(scales, recipe.scale)[..., None] * tensor.decode)


def decode_te(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * ((e4m3(scales) * tensor.amax) * fp32(1 / (6 * scale_max))), as Transformer Engine does.

    e4m3() decodes scale codes. 6 * scale_max, with scale_max from the recipe, is the tensor amax that gives the tensor
    scale 1. Source: TE cast/nvfp4/dequantize_nvfp4.cuh.
    """
    return values * (decode(scales, E4M3)[..., None] * tensor.amax * (np.float32(1) / full_range(recipe)))


def decode_compressed_tensors(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * (e4m3(scales) / tensor.encode), as compressed-tensors and vLLM do.

    e4m3() decodes scale codes. compressed-tensors stores tensor.encode as its global scale. recipe is not used.
    """
    return values * (decode(scales, E4M3)[..., None] / tensor.encode)


def decode_stored_divisor(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) / (1 / tensor.decode)), as compressed-tensors decodes codes from another producer.

    e4m3() decodes scale codes. A checkpoint of compressed-tensors stores a divisor, the reciprocal of the tensor scale.
    This rule is for codes whose recipe computes only tensor.decode, so that 1 / tensor.decode is stored. recipe is not
    used.
    """
    return values * (decode(scales, E4M3)[..., None] / (ONE / tensor.decode))


def decode_vllm_cuda(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) * rcp(tensor.encode)), as vLLM's Triton kernel does.

    e4m3() decodes scale codes, and rcp is PTX rcp.approx.ftz.f32. recipe is not used. Source: vLLM
    _nvfp4_quant_dequant_kernel.
    """
    return values * (decode(scales, E4M3)[..., None] * reciprocal_approx_ftz(tensor.encode))


def decode_flashinfer_kv(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return (values * e4m3(scales)) * tensor.decode, as FlashInfer's nvfp4_kv_dequantize does.

    e4m3() decodes scale codes. The first product is exact, so the result is rounded once. recipe is not used.
    """
    return values * decode(scales, E4M3)[..., None] * tensor.decode


def decode_auto_round(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * R(R(e4m3(scales) * tensor.decode)), as auto-round does. R(t) is 1 / t, or 0 if t is 0.

    e4m3() decodes scale codes. recipe is not used. Source: auto-round data_type/nvfp.py ref_nvfp4_quant.
    """
    return values * reciprocal_or_zero(reciprocal_or_zero(decode(scales, E4M3)[..., None] * tensor.decode))


def decode_modelopt(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) * tensor.decode), but +0 for the E2M1 code 8 (-0), as Model-Optimizer does.

    e4m3() decodes scale codes. Source: Model-Optimizer NVFP4QTensor.dequantize, e2m1_values.
    """
    return decode_product(_unsigned_zero(values, recipe), scales, tensor, recipe)


def decode_mlx_0322(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) * tensor.decode), where the scale codes 0x7F and 0xFF count as 480 and -480.

    In E4M3, these two codes are NaN. e4m3() decodes the other scale codes. recipe is not used. Source: MLX
    mx.dequantize on a CPU, up to 0.32.2.
    """
    numbers = np.where(scales & 0x7F == 0x7F, np.where(scales == 0x7F, ALL_ONES, -ALL_ONES), decode(scales, E4M3))
    return values * (numbers[..., None] * tensor.decode)


def decode_e8m0(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * 2^(scales - 127), as OCP MX v1.0 defines it. Scale code 255 gives NaN.

    tensor and recipe are not used.
    """
    return values * decode(scales, E8M0)[..., None]


def decode_e8m0_flashinfer_host(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * 2^(scales - 127), but +0 for the E2M1 code 8 (-0). Scale code 255 gives NaN.

    tensor and recipe are not used. Source: FlashInfer mxfp4_dequantize_host.
    """
    return decode_e8m0(_unsigned_zero(values, recipe), scales, tensor, recipe)


def _unsigned_zero(values: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return values with -0 replaced by +0, for producers whose tables of values have no -0."""
    return values + np.float32(0)  # -0 + 0 = +0 under rn; every other value is unchanged


def decode_e8m0_flashinfer_api(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * 2^(scales - 127), where scale code 0 gives the scale 0 instead of 2^-127, and 255 gives infinity.

    So zeros under code 255 become NaN. The scale is the float32 whose bits are scales << 23. tensor and recipe are not
    used. Source: FlashInfer e2m1_and_ufp8sf_scale_to_float, type 0.
    """
    return values * (scales.astype(np.int32) << 23).view(np.float32)[..., None]


def decode_e8m0_unbounded(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return ldexp(values, scales - 127): values * 2^(scales - 127) with an unbounded scale.

    Scale code 255 stands for 2^128, which is too large for float32. But its product with the element 0.5 is a float32
    number. tensor and recipe are not used. Source: transformers convert_moe_packed_tensors.
    """
    return np.ldexp(values, scales.astype(np.int32)[..., None] - 127)


def decode_gguf(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) * tensor.decode), as llama.cpp decodes NVFP4, with +0 for the E2M1 code 8 (-0).

    e4m3() decodes a scale code after clearing bit 7, its sign. There are two exceptions: 0x7F, which is NaN in E4M3,
    gives 0, and 0xFF gives 480. recipe is not used.
    """
    usual = decode(scales & np.uint8(0x7F), E4M3)
    scale = np.where(scales == 0xFF, ALL_ONES, np.where(scales == 0x7F, np.float32(0), usual))
    return _unsigned_zero(values, recipe) * (scale[..., None] * tensor.decode)


def decode_e8m0_gguf(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return ldexp(values, scales - 127), as llama.cpp decodes MXFP4, but +0 for the E2M1 code 8 (-0).

    tensor and recipe are not used. Source: llama.cpp dequantize_row_mxfp4.
    """
    return decode_e8m0_unbounded(_unsigned_zero(values, recipe), scales, tensor, recipe)


def decode_e8m0_infinite(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * 2^(scales - 127), where scale code 255 is infinity instead of NaN.

    With scale code 255, zeros decode to NaN. tensor and recipe are not used. Source: Model-Optimizer MXFP4QTensor and
    MXFP8QTensor.
    """
    return values * np.where(scales == 255, np.float32(np.inf), decode(scales, E8M0))[..., None]


def decode_e8m0_mlx(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * 2^(scales - 127), where scale code 255 is infinity, as MLX does for float32 and bfloat16.

    For float16 results the rule e8m0_float16 is used instead. tensor and recipe are not used. Source: MLX mx.dequantize
    on a CPU.
    """
    return decode_e8m0_infinite(values, scales, tensor, recipe)


def decode_e8m0_mlx_0322(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * 2^(scales - 127), where scale code 255 is infinity, as MLX up to 0.32.2 does.

    In `values`, the E4M3 element codes 0x7F and 0xFF (NaN) are already 480 and -480 (see _read_as). For float16 results
    the rule e8m0_float16_0322 is used instead. tensor and recipe are not used. Source: MLX mx.dequantize on a CPU.
    """
    return decode_e8m0_infinite(values, scales, tensor, recipe)


def decode_fouroversix(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return H(values * e4m3(scales)) * tensor.amax / full_range(recipe), as fouroversix does. H rounds to float16.

    e4m3() decodes scale codes. full_range is 6 * scale_max, or 4 * scale_max with scale rule static_4; scale_max is a
    field of the recipe. In IF4, the values of INT4 codes (code * 6/7) are rounded by H, too. Source: fouroversix
    dequantize, whose intermediate dtype is float16 by default.
    """
    if isinstance(recipe.element, IntegerOrFloat):
        values = round_to(values, HALF)
    return round_to(values * decode(scales, E4M3)[..., None], HALF) * tensor.amax / full_range(recipe)


def decode_fouroversix_float32(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * e4m3(scales) * tensor.amax / full_range(recipe), as fouroversix does with float32 intermediates.

    e4m3() decodes scale codes. full_range is 6 * scale_max, or 4 * scale_max with scale rule static_4; scale_max is a
    field of the recipe. For E2M1 and INT4 elements this rule equals the rule fouroversix, because their products are
    exact in float16. Source: fouroversix dequantize with intermediate dtype float32.
    """
    return values * decode(scales, E4M3)[..., None] * tensor.amax / full_range(recipe)


def decode_comfy_kitchen(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * (e4m3(scales) * tensor.decode), as comfy-kitchen does for float32.

    e4m3() decodes scale codes. For results of 16 bits, the rules comfy_kitchen_float16 and comfy_kitchen_bfloat16 are
    used instead. Source: comfy-kitchen tensor/nvfp4.py TensorCoreNVFP4Layout.dequantize.
    """
    return decode_product(values, scales, tensor, recipe)


def _narrow_scales(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, dtype: np.dtype) -> np.ndarray:
    """Return values * T(T(tensor.decode) * e4m3(scales)), where T rounds to dtype and e4m3() decodes scale codes."""
    scale = round_to(decode(scales, E4M3)[..., None] * round_to(np.asarray(tensor.decode), dtype), dtype)
    return values * scale


def decode_comfy_kitchen_float16(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * T(T(tensor.decode) * e4m3(scales)), where T rounds to float16 and e4m3() decodes scale codes.

    This rule replaces comfy_kitchen if the result is float16. recipe is not used.
    """
    return _narrow_scales(values, scales, tensor, HALF)


def decode_comfy_kitchen_bfloat16(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * T(T(tensor.decode) * e4m3(scales)), where T rounds to bfloat16 and e4m3() decodes scale codes.

    This rule replaces comfy_kitchen if the result is bfloat16. recipe is not used.
    """
    return _narrow_scales(values, scales, tensor, BFLOAT16)


def decode_fp8_comfy_kitchen(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * tensor.decode, as comfy-kitchen does for float32.

    Recipes with this rule have no block scales, so scales is None. For results of 16 bits, the rules
    fp8_comfy_kitchen_float16 and fp8_comfy_kitchen_bfloat16 are used instead. Source: comfy-kitchen
    backends/eager/quantization.py dequantize_per_tensor_fp8.
    """
    return decode_product(values, scales, tensor, recipe)


def decode_fp8_comfy_kitchen_float16(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * T(tensor.decode), where T rounds to float16.

    This rule replaces fp8_comfy_kitchen if the result is float16. Such recipes have no block scales, so scales is None.
    """
    narrow = tensor._replace(decode=round_to(np.asarray(tensor.decode), HALF))
    return decode_product(values, scales, narrow, recipe)


def decode_fp8_comfy_kitchen_bfloat16(
    values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe
) -> np.ndarray:
    """Return values * T(tensor.decode), where T rounds to bfloat16.

    This rule replaces fp8_comfy_kitchen if the result is bfloat16. Such recipes have no block scales, so scales is
    None.
    """
    narrow = tensor._replace(decode=round_to(np.asarray(tensor.decode), BFLOAT16))
    return decode_product(values, scales, narrow, recipe)


def decode_e8m0_quark(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values * 2^(scales - 127), where scale code 255 is infinity, as Quark does for float32 and bfloat16.

    For float16 results the rule e8m0_float16 is used instead, because Quark first converts scales to the dtype of the
    weight. tensor and recipe are not used. Source: Quark export/nn/modules/realquantizer.py unpack_params.
    """
    return decode_e8m0_infinite(values, scales, tensor, recipe)


def decode_e8m0_float16(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return H(values * H(s)), where s = 2^(scales - 127) and H rounds to float16.

    A scale s of 2^16 or more becomes infinite, and a scale below 2^-24 becomes 0. Scale code 255 is infinite too. With
    an infinite scale, zeros become NaN. This rule replaces e8m0_mlx and e8m0_quark if the result is float16. tensor and
    recipe are not used. Source: MLX mx.dequantize of float16 on a CPU; fouroversix dequantize, for every dtype.
    """
    scale = np.where(scales == 255, np.float32(np.inf), decode(scales, E8M0))
    return round_to(values * round_to(scale, HALF)[..., None], HALF)


def decode_e8m0_float16_0322(values: np.ndarray, scales: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return H(values * H(s)), where s = 2^(scales - 127) and H rounds to float16, as MLX up to 0.32.2 does.

    In `values`, the E4M3 element codes 0x7F and 0xFF (NaN) are already 480 and -480 (see _read_as). This rule replaces
    e8m0_mlx_0322 if the result is float16. tensor and recipe are not used. Source: MLX mx.dequantize of float16 on a
    CPU.
    """
    return decode_e8m0_float16(values, scales, tensor, recipe)


def decode_int_modelopt(values: np.ndarray, scales: None, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return values / tensor.encode, or +0 if the tensor amax is at most 2^-24, as Model-Optimizer decodes integers.

    Integer recipes have no block scales, so scales is None. scales and recipe are not used.
    """
    zero = tensor.amax <= TINY_AMAX
    return np.where(zero, np.float32(0), values / np.where(zero, np.float32(1), tensor.encode))


DECODE_RULES: dict[str, Callable[..., np.ndarray]] = {name: globals()[f"decode_{name}"] for name in rules.DECODE_RULES}


@lru_cache(64)
def _read_as(element: ElementFormat, decode_rule: str) -> ElementFormat:
    """Return the format that a decode rule uses to read element codes: usually `element` itself."""
    return replace(element, specials="none") if rules.DECODE_RULES[decode_rule].numbers else element


def dequantize_tile(codes: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale) -> np.ndarray:
    """Return the float32 values (m, k) of codes (m, k) and block scale codes (m, k / block).

    The recipe's decode rule computes them, with one exception: if no amax gives the stored tensor scale, the rule
    decode_product is used instead, because it does not read the amax. tensor.amax is then implied_amax.UNKNOWN.

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
    expanded = TensorScale(*(np.asarray(part)[..., None] for part in tensor))
    with np.errstate(all="ignore"):
        decoded = DECODE_RULES[recipe.decode_rule](values, scales, expanded, recipe)
        unknown = expanded.amax < 0
        if unknown.any():
            decoded = np.where(unknown, decode_product(values, scales, expanded, recipe), decoded)
        return show("decoded value", decoded.reshape(m, k))


def dequantize_matrix(
    packed: np.ndarray, scales: np.ndarray | None, recipe: Recipe, tensor: TensorScale, out: np.ndarray
) -> None:
    """Write the values of one matrix into out (M, K), tile by tile, rounded to nearest even in the dtype of out.

    Args:
        packed: the codes as the element format stores them.
        scales: block scale codes (M, K / block), or None if the recipe has no block scales.
        recipe: the recipe. For some dtypes of `out` it decodes by another rule.
        tensor: the result of implied_amax.stored_tensor_scale.
        out: float32, float16 or bfloat16 (M, K).
    """
    recipe, tensor, packing = decoding(recipe, out.dtype), tensor.columns(recipe), recipe.element.packing
    for rows, columns in tiles(out.shape, recipe.block):
        codes = unpacked(packed[rows, packing.length(columns.start) : packing.length(columns.stop)], packing)
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        tile_scales = None if scales is None else scales[rows, blocks]
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

    quantized: Any
    in_range: np.ndarray


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
    scale = np.asarray(np.ldexp(np.float32(1), m))
    parts = {"packed": _kept_codes(q), "block_scale": layout, "tensor_scale": scale, "tensor_amax": amax}
    return KeptCodes(replace(q, **parts, recipe=target), in_range)


def _amax_of(m: int, target: Recipe, dtypes: tuple[np.dtype, ...]) -> np.ndarray | None:
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


def _kept_codes(q: Any) -> np.ndarray:
    """Return a copy of the packed codes of q, for use in the converted Quantized."""
    if not rules.DECODE_RULES[q.recipe.decode_rule].unsigned_zero:
        return q.packed.copy()
    codes = unpack(q.packed)
    return pack(np.where(codes == E2M1.sign_bit, np.uint8(0), codes))


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
