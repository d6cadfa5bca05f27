"""Dequantize one matrix: convert codes and scales to float32 values by the recipe's decode rule.
A decode rule is a function that multiplies `values` (the values of element codes, float32 (m, blocks, block)) by the
block scales, given as the codes `scales` (uint8 (m, blocks)), and by the tensor scale.

In the docstrings, e4m3(scales) are the values of E4M3 scale codes. An E8M0 scale code c stands for 2^(c - 127).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import ml_dtypes
import numpy as np

from fp4kit.formats import E4M3, E8M0, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpacked
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import decoding
from fp4kit.reference.arith import ONE, reciprocal_approx_ftz, reciprocal_or_zero
from fp4kit.reference.blocks import tiles
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import TINY_AMAX, TensorScale, full_range, round_to
from fp4kit.reference.trace import show

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
