"""Define E4M3 block rules of serving engines, KV caches and quantizers: pairs of functions (see block_rules.py).
code_<rule> returns the scale codes of blocks (uint8), computed from `amax`, their largest magnitudes. factor_<rule>
returns float32 factors, which multiply elements or, where the docstring says so, divide them. `tensor` holds the tensor
scales. Results have the shape of `amax`. E4M3(x) is the code of x: to nearest even, above 448 the code of 448.

The rules are those of vLLM, auto-round, Quark, fouroversix, qwix, FlashInfer, comfy-kitchen, MSLK, Nunchaku, aiter and
DeepSeek.

Arguments and notation are those of block_rules.py:

- amax: the largest magnitude of each block
- tensor.encode multiplies elements before encoding, and tensor.decode multiplies values after decoding
- scale: the value of a scale code
- E4M3(t): the code of t, rounded to nearest even and saturated at 448
- fp32(t): t rounded to float32
- rcp(t): the approximate reciprocal, PTX rcp.approx.ftz.f32
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E2M1, E4M3, FLT_MIN
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import (
    INV6,
    ONE,
    ZERO,
    divide_full,
    multiply_ftz,
    reciprocal_approx_ftz,
    reciprocal_or_zero,
)
from fp4kit.reference.block_arith import decode_scale, encode_e4m3_scale, qwix_reciprocal, qwix_scale
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.reference.trace import show

QUARK_ZERO = np.float32(2.0**-23)  # replaces a scale of 0: the machine epsilon of float32
NAN = np.float32(np.nan)
_INFINITY_BITS = 0x7F800000


def code_vllm(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as vLLM computes it.

        code = E4M3(clamp(tensor.encode * (amax * fp32(1/6)), -448, 448))

    tensor.encode is the encode scale of the tensor. The product in the inner parentheses is rounded first. NaN gives a
    NaN code. recipe and dtype are not used. Source: vLLM nvfp4_emulation_utils.py.
    """
    return encode_e4m3_scale(tensor.encode * (amax * INV6))


def factor_vllm(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in vLLM's emulation: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale * tensor.decode is
    0, the factor is 1 / 1e8. A NaN scale gives NaN. amax, recipe and dtype are not used.
    """
    scale = decode_scale(codes) * tensor.decode
    return ONE / np.where(scale == 0, np.float32(1e8), scale)


code_vllm_cuda = code_vllm


def factor_vllm_cuda(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in vLLM's Triton kernel.

        factor = tensor.encode * rcp(scale), or 0 if scale is 0

    scale is the value of the scale code, tensor.encode the encode scale of the tensor, and rcp is PTX
    rcp.approx.ftz.f32. A NaN scale gives NaN. amax, recipe and dtype are not used. Source: vLLM
    _nvfp4_quant_dequant_kernel.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, tensor.encode * reciprocal_approx_ftz(scale))


code_auto_round = code_vllm


def factor_auto_round(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in auto-round: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale * tensor.decode is
    0, the factor is 0. A NaN scale gives NaN. amax, recipe and dtype are not used. Source: auto-round
    data_type/nvfp.py.
    """
    return reciprocal_or_zero(decode_scale(codes) * tensor.decode)


def code_quark(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as AMD Quark computes it when it quantizes a loaded model.

        code = E4M3(amax / (6 * tensor.decode)), or the code of 1 if this code is 0

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. A quotient above 448,
    also an infinite one, gives the code of 448. A NaN quotient gives a NaN code. dtype is not used.
    """
    codes = encode_e4m3_scale(amax / (recipe.element.max * tensor.decode))
    return np.where(codes == 0, encode(ONE, E4M3), codes)


def factor_quark(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor of each block's elements in Quark: scale * tensor.decode, or 2^-23 if this product is 0.

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used. Source: Quark real_quantize_fp4_fp6_per_group.
    """
    scale = decode_scale(codes) * tensor.decode
    return np.where(scale == 0, QUARK_ZERO, scale)


def code_quark_file(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as AMD Quark computes it when it quantizes file to file.

    The scale is rounded twice:

        s = amax / 6, or 2^-23 if s is 0
        t = value of E4M3(s / tensor.decode) * tensor.decode
        code = E4M3(t / tensor.decode)

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. The code may be 0.
    Codes saturate at 448, and NaN gives a NaN code. dtype is not used.
    """
    scale = amax / recipe.element.max
    scale = decode_scale(encode_e4m3_scale(np.where(scale == 0, QUARK_ZERO, scale) / tensor.decode)) * tensor.decode
    return encode_e4m3_scale(scale / tensor.decode)


factor_quark_file = factor_quark


def code_fouroversix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as fouroversix computes it with scale rule static_6.

        code = E4M3((amax / 6) * tensor.encode), or 0 if the whole tensor is zero

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. Codes saturate at 448,
    and NaN gives a NaN code. dtype is not used. Source: fouroversix pytorch/reference.py.
    """
    return _ratio_code(amax / recipe.element.max, tensor)


def code_fouroversix_4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as fouroversix computes it with scale rule static_4.

        code = E4M3((amax / 4) * tensor.encode), or 0 if the whole tensor is zero

    This scale maps the block's amax to about 4, as an E2M1 value. tensor.encode is the encode scale of the tensor.
    Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not used. Source: fouroversix
    pytorch/reference.py.
    """
    return _ratio_code(amax / np.float32(4), tensor)


def _ratio_code(ratio: np.ndarray, tensor: TensorScale) -> np.ndarray:
    """Return E4M3(ratio * tensor.encode), or code 0 if the whole tensor is zero."""
    return encode_e4m3_scale(zero_of_zeros(ratio * tensor.encode, tensor))


def zero_of_zeros(ratio: np.ndarray, tensor: TensorScale) -> np.ndarray:
    """Return `ratio`, the block scales before they are encoded, or zeros if the amax of the tensor is 0.

    In a tensor of zeros, block amaxes are 0 and tensor.encode is infinite. Without this replacement, their product
    would make every block scale NaN.
    """
    return np.where(tensor.amax == 0, ZERO, ratio)


def factor_fouroversix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in fouroversix: 1 / (tensor.decode * scale).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If scale is 0, the factor is
    0. A NaN scale gives NaN. An infinite factor becomes NaN, unless recipe.keep_infinity is set. amax and dtype are not
    used.
    """
    scale = decode_scale(codes)
    inverse = ONE / (tensor.decode * scale)
    inverse = np.where(np.isinf(inverse) & (not recipe.keep_infinity), NAN, inverse)
    return np.where(scale == 0, ZERO, inverse)


factor_fouroversix_4 = factor_fouroversix


def code_qwix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as qwix 0.1.8 computes it with XLA on a CPU.

    The scale is block_arith.qwix_scale(amax, recipe, dtype): amax divided by the largest element value, or 1 for a very
    small amax and for 0. There is no tensor scale. Codes saturate at 448, and NaN gives a NaN code. tensor is not used.
    """
    return encode_e4m3_scale(qwix_scale(amax, recipe, dtype))


def factor_qwix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in qwix: 1 / scale, as qwix_reciprocal computes it.

    scale is the value of the scale code. A scale of 0, which a caller may pass, gives an infinite factor. A NaN scale
    gives NaN. amax, tensor and recipe are not used.
    """
    return qwix_reciprocal(decode_scale(codes), dtype)


# ---- stores of KV caches ----


def code_vllm_kv(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as vLLM's KV cache kernel computes it.

        code = E4M3(tensor.encode * (amax * rcp(6)))

    tensor.encode is 1 / k_scale or 1 / v_scale, and rcp is PTX rcp.approx.ftz.f32. Codes saturate at 448, and NaN gives
    a NaN code. recipe and dtype are not used. Source: vLLM nvfp4_utils.cuh cvt_warp_fp16_to_fp4.
    """
    return encode_e4m3_scale(tensor.encode * (amax * reciprocal_approx_ftz(E2M1.max)))


def factor_vllm_kv(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in vLLM's KV cache kernel.

        factor = rcp(scale * rcp(tensor.encode)), or 0 if scale is 0

    scale is the value of the scale code, tensor.encode is 1 / k_scale or 1 / v_scale, and rcp is PTX
    rcp.approx.ftz.f32. A NaN scale gives NaN. If the product is subnormal, the factor is infinite. amax, recipe and
    dtype are not used.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, reciprocal_approx_ftz(scale * reciprocal_approx_ftz(tensor.encode)))


def code_flashinfer_kv(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as FlashInfer's nvfp4_kv_quant computes it.

        code = E4M3(rcp(tensor.decode) * (amax * rcp(6)))

    tensor.decode is the decode scale of the tensor, and rcp is PTX rcp.approx.ftz.f32. Subnormal operands and results
    of every operation are flushed to zero. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype are not
    used. Source: FlashInfer csrc/fp4_kv_quantization.cu.
    """
    return encode_e4m3_scale(
        multiply_ftz(reciprocal_approx_ftz(tensor.decode), multiply_ftz(amax, reciprocal_approx_ftz(E2M1.max)))
    )


def factor_flashinfer_kv(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in FlashInfer's nvfp4_kv_quant.

        factor = rcp(scale * tensor.decode), or 0 if amax is 0 or subnormal

    scale is the value of the scale code, tensor.decode the decode scale of the tensor, and rcp is PTX
    rcp.approx.ftz.f32. Subnormal operands and results of every operation are flushed to zero. For scale 0 and any other
    amax, the factor is infinite. A NaN scale gives NaN. recipe and dtype are not used.
    """
    factor = reciprocal_approx_ftz(multiply_ftz(decode_scale(codes), tensor.decode))
    return np.where(np.abs(amax) < FLT_MIN, ZERO, factor)


def code_flashinfer_kv_page(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(amax / (6 * tensor.decode)), the scale code of each block in FlashInfer's store into pages.

    tensor.decode is the decode scale of the tensor. Codes saturate at 448, and NaN gives a NaN code. recipe and dtype
    are not used. Source: FlashInfer page.cuh nvfp4_append_quantize_block.
    """
    return encode_e4m3_scale(amax / (E2M1.max * tensor.decode))


def factor_flashinfer_kv_page(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in FlashInfer's store into pages.

        factor = 1 / (scale * tensor.decode), or 0 if scale is 0

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. A NaN scale gives NaN. amax,
    recipe and dtype are not used.
    """
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, ONE / (scale * tensor.decode))


# ---- comfy-kitchen, MSLK, Nunchaku, aiter and DeepSeek ----


def code_comfy_kitchen(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as comfy-kitchen computes it: E4M3(amax / 6 / tensor.decode).

    6 stands for the largest element value, and tensor.decode is the decode scale of the tensor. Codes saturate at 448,
    and NaN gives a NaN code. dtype is not used. Source: comfy-kitchen backends/eager/quantization.py quantize_nvfp4.
    """
    return encode_e4m3_scale(amax / recipe.element.max / tensor.decode)


def factor_comfy_kitchen(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor of each block's elements in comfy-kitchen: scale * tensor.decode, or NaN if this product is 0.

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. A NaN scale gives NaN, too.
    If the divisor is NaN, every element of the block gets the recipe's nan_code, which is 0: the producer replaces NaN
    by +0. amax, recipe and dtype are not used.
    """
    scale = decode_scale(codes) * tensor.decode
    return np.where(scale == 0, NAN, scale)


def code_comfyui(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as ComfyUI computes it for stochastic rounding.

        code = E4M3(T(T(amax / 6) / T(tensor.decode)))

    6 stands for the largest element value, tensor.decode is the decode scale of the tensor, and T rounds to dtype, the
    dtype of the elements. Codes saturate at 448, and NaN gives a NaN code. Source: ComfyUI comfy/float.py
    stochastic_round_quantize_nvfp4_block.
    """
    ratio = round_to(amax / recipe.element.max, dtype) / round_to(tensor.decode, dtype)
    return encode_e4m3_scale(round_to(ratio, dtype))


def factor_comfyui(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return T(scale * T(tensor.decode)), the divisor of each block's elements in ComfyUI.

    scale is the value of the scale code, tensor.decode the decode scale of the tensor, and T rounds to dtype, the dtype
    of the elements. The divisor may be 0: elements then become infinite, and zeros become NaN. A NaN scale gives NaN.
    amax and recipe are not used.
    """
    return round_to(decode_scale(codes) * round_to(tensor.decode, dtype), dtype)


def code_comfyui_cuda(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as ComfyUI computes it on a GPU for stochastic rounding.

        code = E4M3(T(T(amax * fp32(1/6)) / T(tensor.decode)))

    tensor.decode is the decode scale of the tensor, and T rounds to dtype, the dtype of the elements. Codes saturate at
    448, and NaN gives a NaN code. The rule comfyui differs only in amax / 6, which PyTorch on a GPU computes as a
    product with the reciprocal. recipe is not used.
    """
    return encode_e4m3_scale(round_to(round_to(amax * INV6, dtype) / round_to(tensor.decode, dtype), dtype))


factor_comfyui_cuda = factor_comfyui


def _mslk_code(scale: np.ndarray) -> np.ndarray:
    """Return the E4M3 codes of block scales, which are clamped to [2^-9, 448] first. NaN counts as 2^-9 (code 1)."""
    return encode_e4m3_scale(np.fmin(np.fmax(scale, E4M3.min_subnormal), E4M3.max))


def code_mslk(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as MSLK computes it.

        code = E4M3(clamp((amax / 6) * tensor.encode, 2^-9, 448))

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. A block of zeros has
    code 1 (2^-9), and so has a block whose product is NaN. dtype is not used. Source: MSLK quantize_kernels/nvfp4.py.
    """
    return _mslk_code(amax / recipe.element.max * tensor.encode)


def factor_mslk(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in MSLK: tensor.encode / scale.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. A scale of 0 gives an
    infinite factor, and a NaN scale gives NaN. Only the rule mslk_power or a caller gives a scale of 0, and only a
    caller gives a NaN scale. amax, recipe and dtype are not used.
    """
    return tensor.encode / decode_scale(codes)


def code_mslk_fast(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as MSLK computes it with fast math.

        code = E4M3(clamp((amax * fp32(1/6)) * tensor.encode, 2^-9, 448))

    tensor.encode is the encode scale of the tensor. A block of zeros has code 1 (2^-9), and so has a block whose
    product is NaN. recipe and dtype are not used.
    """
    return _mslk_code(amax * INV6 * tensor.encode)


def code_mslk_power(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as MSLK computes it for scales that are powers of two: E4M3(2^k).

    2^k is the product (amax / 4) * tensor.encode, rounded up to a power of two if its significand is above 1.75, and
    otherwise down. tensor.encode is the encode scale of the tensor.

    A product that is at most 0.75 * 2^-126 (such as 0, for a block of zeros), above 1.75 * 2^127 or NaN counts as 1.
    Other powers give code 0 if they are below 2^-9, and the code of 448 if they are above 448. recipe and dtype are not
    used. Source: MSLK quantize_kernels/nvfp4.py.
    """
    product = np.asarray(amax / np.float32(4) * tensor.encode, np.float32)
    power = (np.minimum(product.view(np.int32), _INFINITY_BITS) + 0x1FFFFF & _INFINITY_BITS).view(np.float32)
    return encode_e4m3_scale(np.where((power > 0) & np.isfinite(power), power, ONE))


factor_mslk_fast = factor_mslk_power = factor_mslk


def code_nunchaku(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(amax * fp32(1/6)), the scale code of each block in Nunchaku.

    Codes saturate at 448. A NaN amax, which only a caller can pass, counts as infinite. tensor, recipe and dtype are
    not used. Source: Nunchaku gemm_w4a4.cuh quantize_w4a4_fp4_from_fpsum_warp.
    """
    return encode_e4m3_scale(_nunchaku_scale(amax))


def factor_nunchaku(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in Nunchaku: rcp(min(amax * fp32(1/6), 448)).

    rcp is PTX rcp.approx.ftz.f32. Its operand, the block scale, is not rounded to E4M3 first. If the scale is 0 or
    subnormal, the factor is infinite, and its products with zeros are NaN. If the caller of quantize passed a scale
    code other than the one that amax gives, the factor is rcp of this code's value. tensor, recipe and dtype are not
    used.
    """
    return reciprocal_approx_ftz(_scale_or_given(codes, _nunchaku_scale(amax)))


def _scale_or_given(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the scale that each block is quantized with, as float32."""
    return np.where(encode_e4m3_scale(scale) == codes, scale, decode_scale(codes))


def _nunchaku_scale(amax: np.ndarray) -> np.ndarray:
    """Return min(amax * fp32(1/6), 448), or 448 if amax is NaN: the block scale before it is rounded to E4M3."""
    return show("block scale before rounding", np.fmin(amax * INV6, E4M3.max))


def code_aiter(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(amax * fp32(1/6)), the scale code of each block in aiter's Triton kernel.

    Codes saturate at 448, and NaN gives a NaN code. tensor, recipe and dtype are not used. Source: aiter Triton
    _nvfp4_quant_op, compiled for an H100, where the division by 6 becomes this product.
    """
    return encode_e4m3_scale(show("block scale before rounding", amax * INV6))


def factor_aiter(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in aiter's Triton kernel: 1 / (amax * fp32(1/6)).

    The division is that of PTX div.full.f32. The divisor, the block scale, is not rounded to E4M3. If it is 0, the
    factor is infinite, and its products with zeros are NaN. If the caller of quantize passed a scale code other than
    the one that amax gives, the divisor is this code's value. tensor, recipe and dtype are not used.
    """
    scale = _scale_or_given(codes, np.asarray(amax * INV6, np.float32))
    return divide_full(np.ones_like(scale), scale)


def code_deepseek(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(max(amax, 6 * 2^-9) / 6), the scale code of each block in DeepSeek-V4's compressed KV cache.

    6 stands for the largest element value. The code is at least 1, even for a block of zeros. Codes saturate at 448,
    and NaN gives a NaN code. The default factor divides elements by the value of the code. tensor and dtype are not
    used. Source: DeepSeek-V4 inference/kernel.py.
    """
    largest = recipe.element.max
    return encode_e4m3_scale(np.maximum(amax, largest * E4M3.min_subnormal) / largest)
