"""Define tensor rules, which compute the scales of a tensor from its amax, and find the amax of a given scale.

A rule takes the amaxes (float32, one per tensor, row or block), the recipe and the dtype of the elements. It returns
(encode, decode), two float32 arrays in the shape of the amaxes: encode multiplies elements before encoding, and decode
multiplies values after decoding. `tensor_scale` calls the rule of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.arith import (
    ONE,
    ZERO,
    Array,
    Dtype,
    divide_ftz,
    divide_full,
    multiply_ftz,
    reciprocal_approx_ftz,
    reciprocal_or_zero,
    round_to,
)
from fp4kit.reference.codec import show

Pair = tuple[Array, Array]  # (encode scale, decode scale)
TINY_AMAX = np.float32(2.0**-24)  # Model-Optimizer's FP8 and INT fake quantizers treat an amax up to this specially


class TensorScale(NamedTuple):
    """The two scales of a tensor, and the tensor amax that they were made from.

    encode multiplies elements before encoding. decode multiplies values after decoding, and is stored as tensor_scale.
    Each field is a scalar, or an array with one entry per row or per block.
    """

    encode: Array
    decode: Array
    amax: Array

    def columns(self, recipe: Recipe, length: int) -> TensorScale:
        """Return the scales of a matrix (M, length) reshaped to matrices, so that `cut` can take the scales of a tile.

        The shape is (M, blocks) if every block has its own tensor scale, (M, 1) if every row has, and otherwise (1, 1).
        Scales of outer blocks are repeated for each of their blocks, unless they have one entry per block already.
        """
        per_block, count = recipe.tensor_scaling == "block", recipe.tensor_columns // recipe.block_size
        parts, blocks = [], length // recipe.block_size
        for p in (p if per_block and np.ndim(p) == 2 else np.reshape(p, (-1, 1)) for p in self):
            is_outer = count > 1 and p.size > 1 and p.shape[1] != blocks
            parts.append(np.repeat(p, count, axis=1)[:, :blocks] if is_outer else p)
        return TensorScale(*parts)

    def cut(self, rows: slice, blocks: slice) -> TensorScale:
        """Return the part of the scales that belongs to a tile: the rectangle of these rows and blocks.

        Only axes with more than one entry are cut: scales per row lose rows, and a single scale is returned unchanged.
        self must be a result of columns().
        """
        parts = (p[rows] if len(p) > 1 else p for p in self)
        return TensorScale(*(p[:, blocks] if p.shape[1] > 1 else p for p in parts))


# ---- tensor rules: tensor_amax -> TensorScale ----


def full_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gives the tensor scale 1: the largest element value times the largest block scale.

    For most recipes, this is 2688 = 6 * 448. The largest block scale is recipe.scale_max. The tensor rule fouroversix_4
    uses 4 instead of the largest element value.
    """
    return np.float32(rules.TOPS.get(recipe.tensor_rule or "", recipe.element.max) * np.float32(recipe.scale_max))


def tensor_te_reference(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of TE's Python reference quantizer.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient is 0
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. An amax of 0 gives encode = FLT_MAX.
    NaN stays NaN. dtype is not used.
    """
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    encode_scale = np.where(encode_scale == 0, ONE, encode_scale)
    return encode_scale, ONE / encode_scale


def tensor_te(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Transformer Engine's kernels.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient or amax is 0
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. NaN stays NaN. dtype is not used.
    """
    encode_scale = np.where(amax == 0, ONE, tensor_te_reference(amax, recipe, dtype)[0])
    return encode_scale, ONE / encode_scale


def tensor_te_primary_weight(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Transformer Engine's primary-weight kernels.

        encode = min(2688 / max(amax, FLT_MIN), FLT_MAX), or 1 if amax is 0 or NaN
        decode = 1 / encode, or 1 if encode is 0

    2688 stands for full_range(recipe). encode is 0 only if amax is infinite. dtype is not used.
    """
    encode_scale = np.minimum(full_range(recipe) / np.maximum(amax, FLT_MIN), FLT_MAX)
    encode_scale = np.where(amax > 0, encode_scale, ONE)
    return encode_scale, ONE / np.where(encode_scale <= 0, ONE, encode_scale)


def tensor_flashinfer(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of FlashInfer.

        encode = min(2688 / amax, FLT_MAX)
        decode = 1 / encode

    2688 stands for full_range(recipe). If amax is 0, encode is FLT_MAX. An infinite amax gives encode = 0 and decode =
    inf, and NaN gives NaN. dtype is not used. Source: FlashInfer make_nvfp4_global_scale.
    """
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    return encode_scale, ONE / encode_scale


def tensor_flashinfer_token(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a row, as FlashInfer computes them per token without fast math.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient is 0
        decode = 1 / encode, or 0 if amax is 0

    amax is that of the row, and 2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. For an
    amax of 0, encode is FLT_MAX. NaN stays NaN. dtype is not used. Source: FlashInfer tests, _ref_nvfp4_quantize_te.
    """
    encode_scale, decode_scale = tensor_te_reference(amax, recipe, dtype)
    return encode_scale, np.where(amax == 0, ZERO, decode_scale)


def tensor_flashinfer_token_precise(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a row, as FlashInfer's CUDA kernel computes them without fast math.

    They are those of tensor_flashinfer_token, except that a subnormal decode is 0. It is subnormal for an amax up to
    3.2e-35. Source: FlashInfer quantization.cuh nvfp4QuantAndPerTokenScaleKernel, compiled with -use_fast_math.
    """
    encode_scale = tensor_te_reference(amax, recipe, dtype)[0]
    return encode_scale, divide_ftz(ONE, encode_scale)


def tensor_flashinfer_token_fast(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a row, as FlashInfer computes them per token by default.

        decode = amax * fp32(1 / 2688)
        encode = rcp(decode), or FLT_MAX if decode is 0

    amax is that of the row, 2688 stands for full_range(recipe), and rcp is PTX rcp.approx.ftz.f32. Subnormal operands
    and results of both operations are flushed to zero. An infinite amax gives encode = 0, and NaN gives NaN. dtype is
    not used.
    """
    decode_scale = multiply_ftz(amax, ONE / full_range(recipe))
    return np.where(decode_scale == 0, FLT_MAX, reciprocal_approx_ftz(decode_scale)), decode_scale


def tensor_divided(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer and torchao.

        decode = amax / 2688
        encode = 1 / decode

    2688 stands for full_range(recipe). An amax of 0, inf or NaN is not treated specially: 0 gives encode = inf, inf
    gives encode = 0, and NaN gives NaN. dtype is not used.
    """
    decode_scale = amax / full_range(recipe)
    return ONE / decode_scale, decode_scale


def tensor_compressed_tensors(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of compressed-tensors.

        encode = T(T(1 / max(amax, tiny)) * 2688), or 1 if this product is infinite or NaN
        decode = 1 / encode

    T rounds to dtype, the dtype of the elements, and tiny is the smallest normal value of that dtype. 2688 stands for
    full_range(recipe). An amax of 0 or NaN gives 1 for both. If encode rounds to 0, as for an infinite amax, decode is
    inf.
    """
    tiny = np.float32(ml_dtypes.finfo(dtype).tiny)
    reciprocal = round_to(ONE / np.maximum(amax, tiny), dtype)
    encode_scale = round_to(reciprocal * full_range(recipe), dtype)
    encode_scale = np.where(np.isfinite(encode_scale), encode_scale, ONE)
    return encode_scale, ONE / encode_scale


def tensor_mlx(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of MLX.

        encode = 2688 / amax
        decode = amax / 2688

    2688 stands for full_range(recipe). An amax of 0, inf or NaN is not treated specially: 0 gives encode = inf, inf
    gives encode = 0, and NaN gives NaN. MLX calls the amax global_scale. dtype is not used.
    """
    return full_range(recipe) / amax, amax / full_range(recipe)


def tensor_fp8_modelopt(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer for FP8.

        encode = 448 / amax
        decode = 1 / encode

    An amax of at most 2^-24, 0 included, counts as 1. An infinite amax gives encode = 0 and decode = inf, and NaN gives
    NaN. dtype is not used.
    """
    encode_scale = recipe.element.max / np.where(amax <= TINY_AMAX, ONE, amax)
    return encode_scale, ONE / encode_scale


def tensor_fp8_modelopt_cpu(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer for FP8 with one amax per row, on a CPU.

        encode = (1 / amax) * 448
        decode = 1 / encode

    The quotient and the product are rounded one after the other, as PyTorch computes 448 / amax on a CPU if amax has
    several elements. An amax of at most 2^-24, 0 included, counts as 1. An infinite amax gives encode = 0 and decode =
    inf, and NaN gives NaN. dtype is not used.
    """
    encode_scale = ONE / np.where(amax <= TINY_AMAX, ONE, amax) * recipe.element.max
    return encode_scale, ONE / encode_scale


def tensor_fp8_compressed_tensors(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of compressed-tensors for FP8.

        decode = T(amax / 448), or eps if this quotient is 0
        encode = 1 / decode

    T rounds to dtype, the dtype of the elements, and eps is the distance from 1 to the next larger number of dtype. An
    infinite amax gives decode = inf and encode = 0, and NaN gives NaN. Source: compressed-tensors
    quantization/utils/helpers.py calculate_qparams.
    """
    decode_scale = round_to(np.asarray(amax / recipe.element.max, np.float32), dtype)
    decode_scale = np.where(decode_scale == 0, np.float32(ml_dtypes.finfo(dtype).eps), decode_scale)
    return ONE / decode_scale, decode_scale


def tensor_fp8_transformers(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of transformers for FP8.

        encode = (1 / amax) * 448, or 1 if amax is 0 or NaN
        decode = 1 / encode

    The quotient and the product are rounded one after the other, as PyTorch computes 448 / amax. If one of them
    overflows, encode is inf and decode is 0. An infinite amax gives encode = 0 and decode = inf. dtype is not used.
    Source: transformers integrations/finegrained_fp8.py Fp8Quantize.
    """
    encode_scale = np.where(amax > 0, ONE / np.where(amax > 0, amax, ONE) * recipe.element.max, ONE)
    return encode_scale, ONE / encode_scale


def tensor_fp8_deepgemm(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of DeepGEMM for FP8.

        decode = max(amax, 1e-4) / 448
        encode = 1 / decode

    An infinite amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is not used. Source: DeepGEMM
    deep_gemm/utils/math.py per_block_cast_to_fp8.
    """
    decode_scale = np.maximum(amax, np.float32(1e-4)) / recipe.element.max
    return ONE / decode_scale, decode_scale


def tensor_int_modelopt(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer for integers.

        encode = M / amax
        decode = amax / M

    M is the largest element value, 2^(bits - 1) - 1. If amax is at most 2^-24, both scales are 0. An infinite amax
    gives encode = 0 and decode = inf, and NaN gives NaN. dtype is not used.
    """
    zero = amax <= TINY_AMAX
    safe = np.where(zero, ONE, amax)
    encode_scale = np.where(zero, np.float32(0), recipe.element.max / safe)
    return encode_scale, np.where(zero, np.float32(0), safe / recipe.element.max)


def tensor_int4_qat(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of INT4 QAT.

        decode = max(amax * fp32(1 / 7), 1e-5)
        encode = 1 / decode

    The trainers divide by 7. The formula multiplies by the reciprocal because PyTorch on a GPU divides by a number in
    this way. Elements are divided by decode, instead of being multiplied by encode. An amax of 0 gives decode = 1e-5.
    An infinite amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is not used.
    """
    decode_scale = np.maximum(amax * (ONE / recipe.element.max), np.float32(1e-5))
    return ONE / decode_scale, decode_scale


def tensor_vllm(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of vLLM's emulation.

        encode = (1 / max(amax, 1e-8)) * 2688
        decode = 1 / encode, or 1e-8 if encode is 0

    2688 stands for full_range(recipe). The quotient and the product are rounded one after the other. encode is 0 only
    if amax is infinite. NaN gives NaN. dtype is not used.
    """
    encode_scale = ONE / np.maximum(amax, np.float32(1e-8)) * full_range(recipe)
    return encode_scale, ONE / np.where(encode_scale == 0, np.float32(1e8), encode_scale)


def tensor_divisor(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of a divisor that a checkpoint stores, such as input_global_scale.

        encode = amax
        decode = 1 / encode

    Callers pass the divisor in the place of the amax (recipes.schema.by_divisor). recipe and dtype are not used.
    """
    return amax, ONE / amax


def tensor_sglang_online(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of SGLang's online quantization of weights.

        decode = amax * fp32(1 / 2688), or 1 if amax is 0
        encode = 1 / decode

    2688 stands for full_range(recipe). The formula multiplies by a reciprocal because PyTorch on a GPU divides by a
    number in this way. If decode underflows to 0, encode is infinite. An infinite amax gives encode = 0, and NaN gives
    NaN. dtype is not used.
    """
    decode_scale = np.where(amax == 0, ONE, amax * (ONE / full_range(recipe)))
    return ONE / decode_scale, decode_scale


def tensor_te_1x64(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of a window of 64 elements in TE's NVFP4Quantizer1x64Ref.

        encode = min(2688 / max(amax, 1e-12), FLT_MAX), or 1 if the quotient is 0
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. NaN stays NaN. dtype is not used.
    """
    encode_scale = np.minimum(full_range(recipe) / np.maximum(amax, np.float32(1e-12)), FLT_MAX)
    encode_scale = np.where(encode_scale == 0, ONE, encode_scale)
    return encode_scale, ONE / encode_scale


def tensor_hf_kernels(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Hugging Face's nvfp4-gemm kernel.

        encode = (1 / max(amax, 1e-12)) * 2688
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient and the product are rounded one after the other. An infinite amax
    gives encode = 0, and NaN gives NaN. dtype is not used.
    """
    encode_scale = ONE / np.maximum(amax, np.float32(1e-12)) * full_range(recipe)
    return encode_scale, ONE / encode_scale


def tensor_auto_round(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of auto-round.

        encode = (1 / amax) * 2688, or 0 if amax is 0
        decode = 1 / encode, or 0 if encode is 0

    2688 stands for full_range(recipe). The quotient and the product are rounded one after the other. An infinite amax
    gives 0 for both scales, and NaN gives NaN. dtype is not used.
    """
    encode_scale = reciprocal_or_zero(amax) * full_range(recipe)
    return encode_scale, reciprocal_or_zero(encode_scale)


def tensor_quark(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Quark.

        decode = amax / 2688, or 2^-23 if the quotient is 0
        encode = 1 / decode

    2688 stands for full_range(recipe). An infinite amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is
    not used.
    """
    decode_scale = amax / full_range(recipe)
    decode_scale = np.where(decode_scale == 0, np.float32(2.0**-23), decode_scale)
    return ONE / decode_scale, decode_scale


def tensor_fouroversix(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of fouroversix.

        encode = 2688 / amax
        decode = 1 / encode

    2688 stands for full_range(recipe), which is 4 * 448 for scale rule static_4. An amax of 0, inf or NaN is not
    treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. dtype is not used.
    """
    encode_scale = full_range(recipe) / amax
    return encode_scale, ONE / encode_scale


tensor_fouroversix_4 = tensor_fouroversix  # its full_range is 4 * 448, from rules.TOPS


def tensor_comfy_kitchen(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of comfy-kitchen.

        decode = T(amax / 2688)
        encode = 1 / decode

    T rounds to dtype, the dtype of the elements, and 2688 stands for full_range(recipe). An amax of 0, inf or NaN is
    not treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. Source: comfy-kitchen
    tensor/nvfp4.py TensorCoreNVFP4Layout.quantize.
    """
    decode_scale = round_to(np.asarray(amax / full_range(recipe), np.float32), dtype)
    return ONE / decode_scale, decode_scale


def tensor_comfy_kitchen_cuda(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) that ComfyUI computes on a GPU.

        decode = T(amax * fp32(1 / 2688))
        encode = 1 / decode

    T rounds to dtype, the dtype of the elements, and 2688 stands for full_range(recipe). An amax of 0, inf or NaN is
    not treated specially. Source: as for comfy_kitchen; PyTorch on a GPU divides by a number by multiplying by its
    reciprocal.
    """
    decode_scale = round_to(np.asarray(amax * (ONE / full_range(recipe)), np.float32), dtype)
    return ONE / decode_scale, decode_scale


def tensor_jax_gpu(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of JAX on a GPU.

        decode = amax / 2688
        encode = 1 / decode, by PTX div.full.f32

    2688 stands for full_range(recipe). An amax of 0, inf or NaN is not treated specially. dtype is not used.
    """
    decode_scale = np.asarray(amax / full_range(recipe), np.float32)
    return divide_full(ONE, decode_scale), decode_scale


_NNCF_EPSILON = np.float32(2.0**-23)  # NNCF replaces smaller amaxes, or smaller scales, by this


def nncf_scale(amax: Array, largest: np.float32, is_small: bool) -> Array:
    """Return NNCF's scale of a block: max(amax / largest, eps) in a small tensor, otherwise max(amax, eps) / largest.

    eps is 2^-23, and NaN stays NaN. A tensor is small if it has fewer than 10000 elements.
    """
    if is_small:
        scale = amax / largest
        return np.where(scale < _NNCF_EPSILON, _NNCF_EPSILON, scale)
    return np.where(amax < _NNCF_EPSILON, _NNCF_EPSILON, amax) / largest


def _nncf(amax: Array, recipe: Recipe, blocks_are_small: bool, scales_are_small: bool) -> Pair:
    largest_scale = nncf_scale(amax, recipe.element.max, blocks_are_small)
    decode_scale = np.asarray(nncf_scale(largest_scale, np.float32(recipe.scale_max), scales_are_small), np.float32)
    return ONE / decode_scale, decode_scale


def tensor_nncf(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of NNCF for at least 10000 blocks of 16 elements.

        decode = max(max(amax, 2^-23) / 6, 2^-23) / 448
        encode = 1 / decode

    6 stands for the largest element value, and 448 for the largest block scale. NaN stays NaN. dtype is not used.
    Source: NNCF weight_compression/weight_lowering.py.
    """
    return _nncf(amax, recipe, False, False)


def tensor_nncf_medium(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of NNCF for at least 10000 elements in fewer than 10000 blocks.

    decode = max(max(amax, 2^-23) / 6 / 448, 2^-23). Otherwise, this rule is tensor_nncf.
    """
    return _nncf(amax, recipe, False, True)


def tensor_nncf_small(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of NNCF for fewer than 10000 elements.

    decode = max(max(amax / 6, 2^-23) / 448, 2^-23). Otherwise, this rule is tensor_nncf.
    """
    return _nncf(amax, recipe, True, True)


def tensor_fp4_nncf(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a block of NNCF's FP4: decode = max(amax, 2^-23) / 6, encode = 1 / decode.

    Elements are divided by decode, instead of being multiplied by encode. dtype is not used.
    """
    decode_scale = nncf_scale(amax, recipe.element.max, False)
    return ONE / decode_scale, decode_scale


def tensor_fp4_nncf_small(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a block of NNCF's FP4 in a tensor of fewer than 10000 elements.

    decode = max(amax / 6, 2^-23). Otherwise, this rule is tensor_fp4_nncf.
    """
    decode_scale = nncf_scale(amax, recipe.element.max, True)
    return ONE / decode_scale, decode_scale


def tensor_fp8_comfy_kitchen(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the tensor scales (encode, decode) of comfy-kitchen for FP8.

        decode = amax / M
        encode = T(1 / decode)

    T rounds to dtype, the dtype of the elements, and M is the largest element value. An amax of 0, inf or NaN is not
    treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. Source: comfy-kitchen
    backends/eager/quantization.py quantize_per_tensor_fp8.
    """
    decode_scale = np.asarray(amax / recipe.element.max, np.float32)
    return round_to(np.asarray(ONE / decode_scale, np.float32), dtype), decode_scale


def tensor_fp8_deepseek(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the scales (encode, decode) of a block of DeepSeek-V4's FP8 activations.

        decode = max(amax, 1e-4) * fp32(1 / M)
        encode = 1 / decode

    M is the largest element value. Elements are divided by decode, instead of being multiplied by encode. An infinite
    amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is not used. Source: DeepSeek-V4
    inference/kernel.py act_quant.
    """
    decode_scale = np.maximum(amax, np.float32(1e-4)) * (ONE / recipe.element.max)
    return ONE / decode_scale, decode_scale


# ---- rules for user-defined formats ----

SMALLEST_SCALE = np.float32(1e-38)  # scales with a smaller magnitude count as 1e-38 when elements are encoded


def reciprocal_of_scale(scale: Array) -> Array:
    """Return 1 / scale, or the reciprocal of 1e-38 (positive) if the magnitude of scale is below 1e-38.

    So the result is never infinite, and its products with elements that are 0 are 0. An infinite scale gives 0, and NaN
    gives NaN. Source: bitsandbytes, absmax in quantize_4bit on a CPU.
    """
    return ONE / np.where(np.abs(scale) < SMALLEST_SCALE, SMALLEST_SCALE, scale)


def largest_element(recipe: Recipe) -> np.float32:
    """Return what amax rules scale an amax to: the element's target, times 2 per level of exponent bits."""
    return np.float32(recipe.element.amax_target * np.float32(2 ** len(recipe.exponent_levels)))


def amax_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gets the tensor scale 1 from an amax rule (see _amax_rule).

    This amax is the largest magnitude of an element, times the largest block scale if the recipe has block scales. For
    scale formats up to more than 2^100, such as E8M0, the largest block scale under a tensor scale is 1.
    """
    top = ONE if recipe.scale is None or recipe.scale.max > 2.0**100 else recipe.scale.max
    return largest_element(recipe) * top


def _narrowed(x: Array, dtype: Dtype, direction: int) -> Array:
    """Return float32 x >= 0 rounded to float16 or bfloat16, as float32."""
    x = np.minimum(x, np.float32(ml_dtypes.finfo(dtype).max))
    narrow = np.ascontiguousarray(x).astype(dtype)
    error = narrow.astype(np.float32) - x
    step = np.where(np.sign(error) == -direction, direction, 0) if direction else 0
    bits = np.where(np.isnan(x) | (step == 0), narrow.view(np.int16), narrow.view(np.int16) + step)
    return bits.astype(np.int16).view(dtype).astype(np.float32).reshape(np.shape(x))


def _amax_rule(dtype: Any = None, direction: int = 0) -> Callable[[Array, Recipe, Dtype], Pair]:
    """Return an amax rule: a tensor rule for recipes of user-defined formats, which returns (encode, decode)."""
    target = None if dtype is None else np.dtype(dtype)

    def rule(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
        """Return the tensor scales (encode, decode) of an amax rule.

            decode = D(amax / amax_range(recipe))
            encode = 1 / decode, or 1e38 near 0

        D rounds to float16 or bfloat16 in the direction of the rule, or not at all in the plain rule "amax". If decode
        is below 1e-38, encode is the reciprocal of 1e-38. Without D, an infinite amax gives decode = inf and encode =
        0. With D, decode saturates. NaN gives NaN. dtype is not used.
        """
        decode_scale = np.asarray(amax / amax_range(recipe), np.float32)
        if target is not None:
            decode_scale = _narrowed(decode_scale, target, direction)
        return reciprocal_of_scale(decode_scale), decode_scale

    return rule


tensor_amax = _amax_rule()
tensor_amax_float16 = _amax_rule(np.float16)
tensor_amax_float16_up = _amax_rule(np.float16, 1)
tensor_amax_float16_down = _amax_rule(np.float16, -1)
tensor_amax_bfloat16 = _amax_rule(ml_dtypes.bfloat16)
tensor_amax_bfloat16_up = _amax_rule(ml_dtypes.bfloat16, 1)
tensor_amax_bfloat16_down = _amax_rule(ml_dtypes.bfloat16, -1)


def tensor_msmodelslim(amax: Array, recipe: Recipe, dtype: Dtype) -> Pair:
    """Return the outer scales (encode, decode) of msmodelslim's dual-level MXFP4: decode = amax / 6. It divides."""
    decode_scale = amax / recipe.element.max
    return ONE / decode_scale, decode_scale


TENSOR_RULES: dict[str, Callable[[Array, Recipe, Dtype], Pair]] = {
    name: globals()[f"tensor_{name}"] for name in rules.TENSOR_RULES
}


def tensor_scale(amax: Array | None, recipe: Recipe, dtype: Dtype) -> TensorScale:
    """Return the TensorScale that the recipe's tensor rule makes from a tensor amax (float32, any shape).

    If the recipe has no tensor scale or amax is None, all fields are 1.

    dtype: the dtype of the elements.
    """
    if recipe.tensor_rule is None or amax is None:
        return TensorScale(ONE, ONE, ONE)
    amax = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        encode, decode = TENSOR_RULES[recipe.tensor_rule](show("tensor amax", amax), recipe, dtype)
        return TensorScale(show("tensor encode scale", encode), show("tensor scale", decode), amax)


UNKNOWN = np.float32(-1)  # stands for the amax if no amax gives the scale
# NEAR and FAR are search radii around tensor_scale * covered_range, in float32 steps. NEAR is tried first.
NEAR = 8  # enough for a rule that makes a few float32 roundings
FAR = 1 << 20  # enough for a rule that rounds to 16 bits: an eighth of the number
# A scale more than JUMP times as large as the stored one shows that a rule replaced a small amax by a larger number.
# Such a replacement makes the scale at least 65504 times as large. Without it, FAR steps make the scale at most 391
# times as large (2^20 subnormal steps from 2688 * 2^-149).
JUMP = np.float32(4096)
_LARGEST = int(FLT_MAX.view(np.int32))
FEW = 64  # the largest number of scales whose interval is kept


def covered_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gives the tensor scale 1, such as 2688 for most NVFP4 recipes.

    For amax rules, the result is tensor_rules.amax_range. For other rules, it is tensor_rules.full_range if the recipe
    has block scales, otherwise the largest element value.
    """
    if recipe.is_custom:
        return amax_range(recipe)
    return full_range(recipe) if recipe.scale is not None else recipe.element.max


def same_scale(a: Array, b: Array) -> Array:
    """Return whether float32 scales are equal in every bit, elementwise. Any two NaNs count as equal."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))


def _order(bits: Array, scale: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Compare the scales that amaxes give with `scale`: return -1 if a scale is smaller, 0 if equal, 1 if larger."""
    candidate = tensor_scale(bits.astype(np.int32).view(np.float32), recipe, dtype).decode
    return np.where((candidate < scale) | (candidate >= scale * JUMP), -1, np.where(candidate == scale, 0, 1))


def _first_bits(low: Array, high: Array, minimum_order: int, scale: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the bits of the smallest amax in [low, high] that gives a scale of at least `scale`, or a scale above
    it.
    """
    high = high + 1
    while (low < high).any():
        middle = (low + high) // 2
        above = _order(np.minimum(middle, _LARGEST), scale, recipe, dtype) >= minimum_order
        low, high = np.where(above | (low >= high), low, middle + 1), np.where(above, middle, high)
    return low


def amax_interval(scale: Array, recipe: Recipe, dtype: Dtype, steps: int = FAR) -> tuple[Array, Array]:
    """Return the smallest and the largest positive amax that the tensor rule turns into `scale`, as float32 bits.

    The result is two int64 arrays in the shape of scale. If no such amax exists, the first is larger than the second.

    scale: float32, positive and finite.
    recipe: the recipe, which names the tensor rule.
    dtype: the dtype of the quantized array.
    steps: only amaxes within this number of float32 steps of scale * covered_range are searched.
    """
    scale = np.asarray(scale, np.float32)
    if scale.size > FEW:
        return _interval(scale, recipe, dtype, steps)
    first, last = _kept_interval(scale.tobytes(), scale.shape, recipe, np.dtype(dtype), steps)
    return first.copy(), last.copy()  # callers change them


@lru_cache(maxsize=1024)
def _kept_interval(
    scale: bytes, shape: tuple[int, ...], recipe: Recipe, dtype: Dtype, steps: int
) -> tuple[Array, Array]:
    # The arrays are shared with later calls, so a caller must not change them.
    return _interval(np.frombuffer(scale, np.float32).reshape(shape), recipe, dtype, steps)


def _interval(scale: Array, recipe: Recipe, dtype: Dtype, steps: int) -> tuple[Array, Array]:
    """Return the bits of the smallest and of the largest positive amax that the tensor rule turns into each scale."""
    with np.errstate(all="ignore"):
        likely_amax = np.minimum(scale * covered_range(recipe), FLT_MAX)
        center = likely_amax.view(np.int32).astype(np.int64)
        low, high = np.maximum(center - steps, 1), np.minimum(center + steps, _LARGEST)
        if steps <= NEAR and scale.size <= FEW:  # one call for all of them takes less time than a binary search
            every = low + np.arange(2 * steps + 1).reshape(-1, *(1,) * low.ndim)
            order = np.where(every <= high, _order(np.minimum(every, high), scale, recipe, dtype), 2)
            return low + (order < 0).sum(0), low + (order < 1).sum(0) - 1
        first = _first_bits(low, high, 0, scale, recipe, dtype)
        return first, _first_bits(low, high, 1, scale, recipe, dtype) - 1


def _with_fewest_bits(first: Array, last: Array) -> Array:
    """Return the integer in [first, last] that ends in the most zero bits, elementwise."""
    differ = (first - 1) ^ last
    for shift in (1, 2, 4, 8, 16):
        differ |= differ >> shift
    return last & ~(differ >> 1)


def implied_amax(scale: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the amax that a tensor scale was probably computed from.

    A candidate is a positive amax that the tensor rule turns into exactly the scale. Candidates are searched within
    FAR (2^20) float32 steps of scale * covered_range. The result is the candidate with the fewest significant bits,
    which is the float32 that ends in the most zero bits. For bfloat16 and float16 data this is the original amax,
    because two amaxes of such data rarely give equal scales.

    If there is no candidate, or if the scale is not positive and finite, 0, inf and NaN are tried in this order. The
    first of them that gives the scale is the result. If none gives it, the result is -1 (UNKNOWN).

    Args:
        scale: float32, any shape.
        recipe: a recipe with a tensor rule.
        dtype: dtype of the array that was quantized. Some rules round to it.

    Returns:
        The amaxes: float32, in the shape of scale.
    """
    scale = np.asarray(scale, np.float32)
    amax = np.full(scale.shape, UNKNOWN)
    specials = np.array([np.nan, np.inf, 0], np.float32)
    for special, its_scale in zip(specials, tensor_scale(specials, recipe, dtype).decode, strict=True):
        amax = np.where(same_scale(its_scale, scale), special, amax)
    usual = (scale > 0) & np.isfinite(scale)
    amax[usual] = _implied(scale[usual], amax[usual], recipe, dtype)
    return amax


def _implied(scale: Array, otherwise: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the implied amaxes (see implied_amax) of positive finite scales: float32, in the shape of scale."""
    # Where no amax near a scale gives it, the result is taken from the array `otherwise`.
    first, last = amax_interval(scale, recipe, dtype, NEAR)
    far = ~_is_complete(first, last, scale, recipe)
    if far.any():
        first[far], last[far] = amax_interval(scale[far], recipe, dtype)
    amax = _with_fewest_bits(first, np.maximum(last, first)).astype(np.int32).view(np.float32)
    return np.where(first <= last, amax, otherwise)


def _is_complete(first: Array, last: Array, scale: Array, recipe: Recipe) -> Array:
    """Return True for each scale whose interval [first, last] is known to hold every amax that gives it."""
    with np.errstate(all="ignore"):
        center = np.minimum(scale * covered_range(recipe), FLT_MAX).view(np.int32).astype(np.int64)
    return (first <= last) & (first > center - NEAR) & (last < center + NEAR)


def stored_tensor_scale(scale: Array | None, amax: Array | None, recipe: Recipe, dtype: Dtype) -> TensorScale:
    """Return the TensorScale to decode a Quantized with. Its field `decode` is the stored tensor_scale.

    The fields `amax` and `encode` are 1 unless the recipe's decode rule reads them. In that case, `amax` is the given
    amax if the tensor rule makes `scale` from it, otherwise the implied amax, and `encode` follows from it. If no amax
    gives the scale, `amax` is UNKNOWN (-1), and the Quantized is decoded as decode(code) * (block_scale *
    tensor_scale). All fields are 1 if the recipe has no tensor scale, or if `scale` is None.
    """
    if recipe.tensor_rule is None or scale is None:
        return TensorScale(ONE, ONE, ONE)
    scale = np.asarray(scale, np.float32)
    if not rules.DECODE_RULES[recipe.decode_rule].needs_amax:
        return TensorScale(ONE, scale, ONE)
    amaxes = np.full(scale.shape, UNKNOWN) if amax is None else np.array(amax, np.float32)
    mismatched = (
        ~same_scale(tensor_scale(amaxes, recipe, dtype).decode, scale)
        if amax is not None
        else np.ones(scale.shape, bool)
    )
    if mismatched.any():
        amaxes[mismatched] = implied_amax(scale[mismatched], recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(tensor_scale(amaxes, recipe, dtype).encode, scale, amaxes)


def encodes_by_amax(recipe: Recipe) -> bool:
    """Return whether the recipe encodes elements with the tensor's encode scale, which follows from the tensor amax.

    If so, the tensor amax must be known to quantize with a given tensor scale. Other recipes need only the decode
    scale, which a Quantized stores. The result is False if the recipe has no tensor scale.
    """
    if recipe.tensor_rule is None:
        return False
    return recipe.apply == "multiply" if recipe.block_rule is None else rules.BLOCK_RULES[recipe.block_rule].encode


def encoding_scale(scale: Array | None, recipe: Recipe, dtype: Dtype) -> TensorScale:
    """Return the TensorScale to encode elements with if the user passes the tensor scale.

    Its field `decode` is the given scale. Fields that the recipe does not read are 1; so are all fields if scale is
    None. The other fields depend on the recipe:

    - Custom recipe: `encode` is the scale's reciprocal (see reciprocal_of_scale).
    - Any other recipe that encodes by the amax: `amax` is the implied amax, and `encode` follows from it. If no amax
      gives the scale, `amax` is UNKNOWN (-1), and `encode` is 1 / scale.
    """
    if scale is None:
        return TensorScale(ONE, ONE, ONE)
    if recipe.is_custom:  # the encode scale follows from the decode scale
        return TensorScale(reciprocal_of_scale(scale), scale, ONE)
    if not encodes_by_amax(recipe):
        return TensorScale(ONE, scale, ONE)
    amax = implied_amax(scale, recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(
            np.where(amax == UNKNOWN, ONE / scale, tensor_scale(amax, recipe, dtype).encode), scale, amax
        )


def static_amax(scale: np.float32, recipe: Recipe, dtype: Dtype, divides: bool) -> np.float32:
    """Return an amax that the recipe's tensor rule turns into a static input scale; UNKNOWN (-1) if there is none.

    Args:
        scale: the stored scale, positive and finite.
        recipe: a recipe with one tensor scale per tensor.
        dtype: the dtype of the inputs. Some rules round to it.
        divides: True if the scale divides on decode, so that it is the encode scale; False if it multiplies.
    """
    if not divides:
        return np.float32(implied_amax(np.asarray(scale), recipe, dtype))
    return np.float32(_amaxes_encoding_to(np.asarray(scale), recipe, dtype))


def divisor_amaxes(divisors: Array, recipe: Recipe, dtype: Dtype) -> Array | None:
    """Return amaxes that the recipe's tensor rule turns into the divisors of a checkpoint, or None if none are needed.

    A Quantized holds the reciprocal of a divisor, rounded to float32. A divisor of 16-bit elements can be computed from
    it, because it has few bits, but one of float32 elements cannot. So the result is None for 16-bit elements. It is
    also None if no divisor is the encode scale of an amax, and for recipes that are not of compressed-tensors, which
    decode without their encode scale. A divisor of a stack that is the encode scale of no amax gets 0, which decoding
    ignores, because its scale differs (stored_tensor_scale).

    Args:
        divisors: the stored divisors, float32, any shape.
        recipe: the recipe of the codes.
        dtype: the dtype of the elements.
    """
    if recipe.tensor_rule != "compressed_tensors" or dtype != np.float32:
        return None
    found = _amaxes_encoding_to(divisors, recipe, dtype)
    return None if (found == UNKNOWN).all() else np.where(found == UNKNOWN, np.float32(0), found)


def divisor_dtype(divisors: Array, recipe: Recipe) -> np.dtype:
    """Return the dtype of the elements that were quantized, as far as the divisors of a checkpoint show it.

    The tensor rule of compressed-tensors rounds to the dtype of the elements. The result is that one of bfloat16,
    float16 and float32 for which the most divisors are the encode scales of amaxes, the first of several. If there are
    none, or if the recipe is not one of compressed-tensors, the result is bfloat16.

    Args:
        divisors: the stored divisors, float32, any shape.
        recipe: the recipe of the codes.
    """
    dtypes = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32)))
    if recipe.tensor_rule != "compressed_tensors":
        return dtypes[0]
    fitting = [_fits(divisors, recipe, dtype).sum() for dtype in dtypes]
    return dtypes[int(np.argmax(fitting))]


def _fits(divisors: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return for each divisor whether it is known to be the encode scale of an amax."""
    with np.errstate(all="ignore"):
        implied = implied_amax(np.float32(1) / divisors, recipe, dtype)
        same = (implied != UNKNOWN) & (tensor_scale(implied, recipe, dtype).encode == divisors)
    return same | (_amaxes_encoding_to(divisors, recipe, dtype) != UNKNOWN)


def _amaxes_encoding_to(scales: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return amaxes whose encode scales are the given ones, UNKNOWN where there is none: float32, in scales' shape."""
    # covered_range / scale is off by a few roundings, so the values within NEAR float32 steps are tried, nearest first.
    with np.errstate(all="ignore"):
        centers = np.asarray(covered_range(recipe) / scales, np.float32).view(np.int32)[..., None]
        steps = np.array(sorted(range(-NEAR, NEAR + 1), key=abs), np.int32)
        amaxes = np.maximum(centers + steps, 1).view(np.float32)
        fits = tensor_scale(amaxes, recipe, dtype).encode == scales[..., None]
    first = np.take_along_axis(amaxes, fits.argmax(-1)[..., None], -1)[..., 0]
    return np.where(fits.any(-1), first, UNKNOWN)
