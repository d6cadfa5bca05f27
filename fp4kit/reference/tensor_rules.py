"""Define tensor rules, which compute the encode scale and the decode scale of a tensor from its amax.
A rule takes the amaxes (float32, one per tensor, row or block), the recipe and the dtype of the elements. It returns
(encode, decode), two float32 arrays in the shape of the amaxes: encode multiplies elements before encoding, and decode
multiplies values after decoding. `tensor_scale` calls the rule of a recipe.

A Quantized stores the decode scale as tensor_scale. block_rules.py derives block scales from the two scales.

In the docstrings, encode and decode are the two scales that a rule returns, the input dtype is the dtype of the
elements, and 2688 = 6 * 448 stands for full_range(recipe).

All arithmetic is float32 and rounds to nearest even after every written operation, unless a rule says that it rounds to
the input dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.arith import ONE, ZERO, multiply_ftz, reciprocal_approx_ftz, reciprocal_or_zero
from fp4kit.reference.trace import show

Pair = tuple[np.ndarray, np.ndarray]  # (encode scale, decode scale)
TINY_AMAX = np.float32(2.0**-24)  # Model-Optimizer's FP8 and INT fake quantizers treat an amax up to this specially


class TensorScale(NamedTuple):
    """The two scales of a tensor, and the tensor amax that they were made from.

    encode multiplies elements before encoding. decode multiplies values after decoding, and is stored as tensor_scale.
    Each field is a scalar, or an array with one entry per row or per block.
    """

    encode: np.ndarray
    decode: np.ndarray
    amax: np.ndarray

    def columns(self, recipe: Recipe) -> TensorScale:
        """Return the scales reshaped to matrices, so that `cut` can take the scales of a tile.

        The shape is (M, blocks) if every block has its own tensor scale, (M, 1) if every row has, and otherwise (1, 1).
        """
        per_block = recipe.tensor_scaling == "block"
        return TensorScale(*(p if per_block and np.ndim(p) == 2 else np.reshape(p, (-1, 1)) for p in self))

    def cut(self, rows: slice, blocks: slice) -> TensorScale:
        """Return the part of the scales that belongs to a tile: the rectangle of these rows and blocks.

        Only axes with more than one entry are cut: scales per row lose rows, and a single scale is returned unchanged.
        self must be a result of columns().
        """
        parts = (p[rows] if len(p) > 1 else p for p in self)
        return TensorScale(*(p[:, blocks] if p.shape[1] > 1 else p for p in parts))


def round_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return float32 x rounded to dtype (nearest even), stored as float32. Values that overflow dtype become infinite.

    If x is the result of a float32 operation, it has then been rounded twice. For bfloat16 and float16, whose
    significands have 8 and 11 bits, this equals a single rounding. If dtype is float32, x itself is returned.
    """
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


# ---- tensor rules: tensor_amax -> TensorScale ----


def full_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gives the tensor scale 1: the largest element value times the largest block scale.

    For most recipes, this is 2688 = 6 * 448. The largest block scale is recipe.scale_max. The tensor rule fouroversix_4
    uses 4 instead of the largest element value.
    """
    return np.float32(rules.TOPS.get(recipe.tensor_rule or "", recipe.element.max) * np.float32(recipe.scale_max))


def tensor_te_reference(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of TE's Python reference quantizer.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient is 0
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. An amax of 0 gives encode = FLT_MAX.
    NaN stays NaN. dtype is not used.
    """
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    encode_scale = np.where(encode_scale == 0, ONE, encode_scale)
    return encode_scale, ONE / encode_scale


def tensor_te(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Transformer Engine's kernels.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient or amax is 0
        decode = 1 / encode

    2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. NaN stays NaN. dtype is not used.
    """
    encode_scale = np.where(amax == 0, ONE, tensor_te_reference(amax, recipe, dtype)[0])
    return encode_scale, ONE / encode_scale


def tensor_te_primary_weight(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Transformer Engine's primary-weight kernels.

        encode = min(2688 / max(amax, FLT_MIN), FLT_MAX), or 1 if amax is 0 or NaN
        decode = 1 / encode, or 1 if encode is 0

    2688 stands for full_range(recipe). encode is 0 only if amax is infinite. dtype is not used.
    """
    encode_scale = np.minimum(full_range(recipe) / np.maximum(amax, FLT_MIN), FLT_MAX)
    encode_scale = np.where(amax > 0, encode_scale, ONE)
    return encode_scale, ONE / np.where(encode_scale <= 0, ONE, encode_scale)


def tensor_flashinfer(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of FlashInfer.

        encode = min(2688 / amax, FLT_MAX)
        decode = 1 / encode

    2688 stands for full_range(recipe). If amax is 0, encode is FLT_MAX. An infinite amax gives encode = 0 and decode =
    inf, and NaN gives NaN. dtype is not used. Source: FlashInfer make_nvfp4_global_scale.
    """
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    return encode_scale, ONE / encode_scale


def tensor_flashinfer_token(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the scales (encode, decode) of a row, as FlashInfer computes them per token without fast math.

        encode = min(2688 / amax, FLT_MAX), or 1 if the quotient is 0
        decode = 1 / encode, or 0 if amax is 0

    amax is that of the row, and 2688 stands for full_range(recipe). The quotient is 0 only if amax is infinite. For an
    amax of 0, encode is FLT_MAX. NaN stays NaN. dtype is not used. Source: FlashInfer tests, _ref_nvfp4_quantize_te.
    """
    encode_scale, decode_scale = tensor_te_reference(amax, recipe, dtype)
    return encode_scale, np.where(amax == 0, ZERO, decode_scale)


def tensor_flashinfer_token_fast(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the scales (encode, decode) of a row, as FlashInfer computes them per token by default.

        decode = amax * fp32(1 / 2688)
        encode = rcp(decode), or FLT_MAX if decode is 0

    amax is that of the row, 2688 stands for full_range(recipe), and rcp is PTX rcp.approx.ftz.f32. Subnormal operands
    and results of both operations are flushed to zero. An infinite amax gives encode = 0, and NaN gives NaN. dtype is
    not used.
    """
    decode_scale = multiply_ftz(amax, ONE / full_range(recipe))
    return np.where(decode_scale == 0, FLT_MAX, reciprocal_approx_ftz(decode_scale)), decode_scale


def tensor_divided(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer and torchao.

        decode = amax / 2688
        encode = 1 / decode

    2688 stands for full_range(recipe). An amax of 0, inf or NaN is not treated specially: 0 gives encode = inf, inf
    gives encode = 0, and NaN gives NaN. dtype is not used.
    """
    decode_scale = amax / full_range(recipe)
    return ONE / decode_scale, decode_scale


def tensor_compressed_tensors(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
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


def tensor_mlx(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of MLX.

        encode = 2688 / amax
        decode = amax / 2688

    2688 stands for full_range(recipe). An amax of 0, inf or NaN is not treated specially: 0 gives encode = inf, inf
    gives encode = 0, and NaN gives NaN. MLX calls the amax global_scale. dtype is not used.
    """
    return full_range(recipe) / amax, amax / full_range(recipe)


def tensor_fp8_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Model-Optimizer for FP8.

        encode = 448 / amax
        decode = 1 / encode

    An amax of at most 2^-24, 0 included, counts as 1. An infinite amax gives encode = 0 and decode = inf, and NaN gives
    NaN. dtype is not used.
    """
    encode_scale = recipe.element.max / np.where(amax <= TINY_AMAX, ONE, amax)
    return encode_scale, ONE / encode_scale


def tensor_fp8_transformers(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of transformers for FP8.

        encode = (1 / amax) * 448, or 1 if amax is 0 or NaN
        decode = 1 / encode

    The quotient and the product are rounded one after the other, as PyTorch computes 448 / amax. If one of them
    overflows, encode is inf and decode is 0. An infinite amax gives encode = 0 and decode = inf. dtype is not used.
    Source: transformers integrations/finegrained_fp8.py Fp8Quantize.
    """
    encode_scale = np.where(amax > 0, ONE / np.where(amax > 0, amax, ONE) * recipe.element.max, ONE)
    return encode_scale, ONE / encode_scale


def tensor_fp8_deepgemm(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of DeepGEMM for FP8.

        decode = max(amax, 1e-4) / 448
        encode = 1 / decode

    An infinite amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is not used. Source: DeepGEMM
    deep_gemm/utils/math.py per_block_cast_to_fp8.
    """
    decode_scale = np.maximum(amax, np.float32(1e-4)) / recipe.element.max
    return ONE / decode_scale, decode_scale


def tensor_int_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
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


def tensor_int4_qat(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of INT4 QAT.

        decode = max(amax / 7, 1e-5)
        encode = 1 / decode

    Elements are divided by decode, instead of being multiplied by encode. An amax of 0 gives decode = 1e-5. An infinite
    amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is not used.
    """
    decode_scale = np.maximum(amax / recipe.element.max, np.float32(1e-5))
    return ONE / decode_scale, decode_scale


def tensor_vllm(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of vLLM's emulation.

        encode = (1 / max(amax, 1e-8)) * 2688
        decode = 1 / encode, or 1e-8 if encode is 0

    2688 stands for full_range(recipe). The quotient and the product are rounded one after the other. encode is 0 only
    if amax is infinite. NaN gives NaN. dtype is not used.
    """
    encode_scale = ONE / np.maximum(amax, np.float32(1e-8)) * full_range(recipe)
    return encode_scale, ONE / np.where(encode_scale == 0, np.float32(1e8), encode_scale)


def tensor_sglang_online(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of SGLang's online quantization of weights.

        decode = amax * fp32(1 / 2688), or 1 if amax is 0
        encode = 1 / decode

    2688 stands for full_range(recipe). The formula multiplies by a reciprocal because PyTorch on a GPU divides by a
    number in this way. If decode underflows to 0, encode is infinite. An infinite amax gives encode = 0, and NaN gives
    NaN. dtype is not used.
    """
    decode_scale = np.where(amax == 0, ONE, amax * (ONE / full_range(recipe)))
    return ONE / decode_scale, decode_scale


def tensor_auto_round(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of auto-round.

        encode = (1 / amax) * 2688, or 0 if amax is 0
        decode = 1 / encode, or 0 if encode is 0

    2688 stands for full_range(recipe). The quotient and the product are rounded one after the other. An infinite amax
    gives 0 for both scales, and NaN gives NaN. dtype is not used.
    """
    encode_scale = reciprocal_or_zero(amax) * full_range(recipe)
    return encode_scale, reciprocal_or_zero(encode_scale)


def tensor_quark(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of Quark.

        decode = amax / 2688, or 2^-23 if the quotient is 0
        encode = 1 / decode

    2688 stands for full_range(recipe). An infinite amax gives decode = inf and encode = 0, and NaN gives NaN. dtype is
    not used.
    """
    decode_scale = amax / full_range(recipe)
    decode_scale = np.where(decode_scale == 0, np.float32(2.0**-23), decode_scale)
    return ONE / decode_scale, decode_scale


def tensor_fouroversix(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of fouroversix.

        encode = 2688 / amax
        decode = 1 / encode

    2688 stands for full_range(recipe), which is 4 * 448 for scale rule static_4. An amax of 0, inf or NaN is not
    treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. dtype is not used.
    """
    encode_scale = full_range(recipe) / amax
    return encode_scale, ONE / encode_scale


tensor_fouroversix_4 = tensor_fouroversix  # its full_range is 4 * 448, from rules.TOPS


def tensor_comfy_kitchen(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of comfy-kitchen.

        decode = T(amax / 2688)
        encode = 1 / decode

    T rounds to dtype, the dtype of the elements, and 2688 stands for full_range(recipe). An amax of 0, inf or NaN is
    not treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. Source: comfy-kitchen
    tensor/nvfp4.py TensorCoreNVFP4Layout.quantize.
    """
    decode_scale = round_to(np.asarray(amax / full_range(recipe), np.float32), dtype)
    return ONE / decode_scale, decode_scale


def tensor_comfy_kitchen_cuda(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) that ComfyUI computes on a GPU.

        decode = T(amax * fp32(1 / 2688))
        encode = 1 / decode

    T rounds to dtype, the dtype of the elements, and 2688 stands for full_range(recipe). An amax of 0, inf or NaN is
    not treated specially. Source: as for comfy_kitchen; PyTorch on a GPU divides by a number by multiplying by its
    reciprocal.
    """
    decode_scale = round_to(np.asarray(amax * (ONE / full_range(recipe)), np.float32), dtype)
    return ONE / decode_scale, decode_scale


def tensor_fp8_comfy_kitchen(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """Return the tensor scales (encode, decode) of comfy-kitchen for FP8.

        decode = amax / M
        encode = T(1 / decode)

    T rounds to dtype, the dtype of the elements, and M is the largest element value. An amax of 0, inf or NaN is not
    treated specially: 0 gives encode = inf, inf gives encode = 0, and NaN gives NaN. Source: comfy-kitchen
    backends/eager/quantization.py quantize_per_tensor_fp8.
    """
    decode_scale = np.asarray(amax / recipe.element.max, np.float32)
    return round_to(np.asarray(ONE / decode_scale, np.float32), dtype), decode_scale


def tensor_fp8_deepseek(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
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


def reciprocal_of_scale(scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale, or the reciprocal of 1e-38 (positive) if the magnitude of scale is below 1e-38.

    So the result is never infinite, and its products with elements that are 0 are 0. An infinite scale gives 0, and NaN
    gives NaN. Source: bitsandbytes, absmax in quantize_4bit on a CPU.
    """
    return ONE / np.where(np.abs(scale) < SMALLEST_SCALE, SMALLEST_SCALE, scale)


def amax_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gets the tensor scale 1 from an amax rule (see _amax_rule).

    This amax is the largest magnitude of an element, times the largest block scale if the recipe has block scales.
    """
    return recipe.element.max if recipe.scale is None else recipe.element.max * recipe.scale.max


def _narrowed(x: np.ndarray, dtype: np.dtype, direction: int) -> np.ndarray:
    """Return float32 x >= 0 rounded to float16 or bfloat16, as float32."""
    x = np.minimum(x, np.float32(ml_dtypes.finfo(dtype).max))
    narrow = np.ascontiguousarray(x).astype(dtype)
    error = narrow.astype(np.float32) - x
    step = np.where(np.sign(error) == -direction, direction, 0) if direction else 0
    bits = np.where(np.isnan(x) | (step == 0), narrow.view(np.int16), narrow.view(np.int16) + step)
    return bits.astype(np.int16).view(dtype).astype(np.float32).reshape(np.shape(x))


def _amax_rule(dtype: Any = None, direction: int = 0) -> Callable[[np.ndarray, Recipe, np.dtype], Pair]:
    """Return an amax rule: a tensor rule for recipes of user-defined formats, which returns (encode, decode)."""
    target = None if dtype is None else np.dtype(dtype)

    def rule(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
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


TENSOR_RULES: dict[str, Callable[[np.ndarray, Recipe, np.dtype], Pair]] = {
    name: globals()[f"tensor_{name}"] for name in rules.TENSOR_RULES
}


def tensor_scale(amax: np.ndarray | None, recipe: Recipe, dtype: np.dtype) -> TensorScale:
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
