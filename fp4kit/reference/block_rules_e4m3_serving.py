"""E4M3 block rules of vLLM, auto-round, AMD Quark, fouroversix and qwix.

A rule is a pair of functions (see block_rules.py): code_<rule> makes the scale codes of blocks from their amaxes, and
factor_<rule> makes the factors by which elements are multiplied, or divided where the docstring says so.

Notation: S_enc (also gs) and S_dec are tensor.encode and tensor.decode; scale is the value of a scale code; E4M3(t) is
the code of t; fp32(t) is t rounded to float32; rcp is PTX rcp.approx.ftz.f32.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import INV6, ONE, ZERO, reciprocal_approx_ftz, reciprocal_or_zero
from fp4kit.reference.block_arith import decode_scale, qwix_reciprocal, qwix_scale
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import TensorScale

QUARK_ZERO = np.float32(2.0**-23)  # replaces a scale of 0: the machine epsilon of float32
NAN = np.float32(np.nan)


def code_vllm(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(clamp(gs * (amax * fp32(1/6)), -448, 448)). The product in the inner brackets comes first.

    Source: vLLM nvfp4_emulation_utils.py.
    """
    return encode(tensor.encode * (amax * INV6), E4M3)


def factor_vllm(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 1 / (scale * S_dec). If the product is 0, it is replaced by 1e8."""
    scale = decode_scale(codes) * tensor.decode
    return ONE / np.where(scale == 0, np.float32(1e8), scale)


code_vllm_cuda = code_vllm


def factor_vllm_cuda(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return gs * rcp(scale), or 0 if the scale is 0. Source: vLLM _nvfp4_quant_dequant_kernel (Triton)."""
    scale = decode_scale(codes)
    return np.where(scale == 0, ZERO, tensor.encode * reciprocal_approx_ftz(scale))


code_auto_round = code_vllm


def factor_auto_round(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 1 / (scale * S_dec), or 0 if the product is 0. Source: auto-round data_type/nvfp.py."""
    return reciprocal_or_zero(decode_scale(codes) * tensor.decode)


def code_quark(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(amax / (6 * S_dec)). Code 0 is replaced by the code of 1. Source: Quark, model flow."""
    codes = encode(amax / (recipe.element.max * tensor.decode), E4M3)
    return np.where(codes == 0, encode(ONE, E4M3), codes)


def factor_quark(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return scale * S_dec, or 2^-23 if that is 0. Elements are divided by this factor.

    Source: Quark real_quantize_fp4_fp6_per_group.
    """
    scale = decode_scale(codes) * tensor.decode
    return np.where(scale == 0, QUARK_ZERO, scale)


def code_quark_file(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(t / S_dec), where t = E4M3(s / S_dec) * S_dec and s = amax / 6. If s is 0, it is replaced by 2^-23.

    In t, E4M3(.) stands for the value of the code. t may be 0. Source: Quark, file-to-file flow.
    """
    scale = amax / recipe.element.max
    scale = decode_scale(encode(np.where(scale == 0, QUARK_ZERO, scale) / tensor.decode, E4M3)) * tensor.decode
    return encode(scale / tensor.decode, E4M3)


factor_quark_file = factor_quark


def code_fouroversix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3((amax / 6) * S_enc), or code 0 if the whole tensor is zero.

    Source: fouroversix pytorch/reference.py, static_6.
    """
    return _ratio_code(amax / recipe.element.max, tensor)


def code_fouroversix_4(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3((amax / 4) * S_enc), or code 0 if the whole tensor is zero.

    Source: fouroversix pytorch/reference.py, static_4.
    """
    return _ratio_code(amax / np.float32(4), tensor)


def _ratio_code(ratio: np.ndarray, tensor: TensorScale) -> np.ndarray:
    """Return E4M3(ratio * S_enc), or code 0 if the whole tensor is zero. ratio is amax / 6 or amax / 4."""
    return encode(zero_of_zeros(ratio * tensor.encode, tensor), E4M3)


def zero_of_zeros(ratio: np.ndarray, tensor: TensorScale) -> np.ndarray:
    """Return block scales before they are encoded, with 0 in tensors that are zero everywhere.

    In such a tensor S_enc is infinite, so the scales 0 * S_enc are NaN.
    """
    return np.where(tensor.amax == 0, ZERO, ratio)


def factor_fouroversix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 1 / (S_dec * scale), or 0 if the scale is 0.

    If the result is infinite, it becomes NaN unless recipe.keep_infinity is set.
    """
    scale = decode_scale(codes)
    inverse = ONE / (tensor.decode * scale)
    inverse = np.where(np.isinf(inverse) & (not recipe.keep_infinity), NAN, inverse)
    return np.where(scale == 0, ZERO, inverse)


factor_fouroversix_4 = factor_fouroversix


def code_qwix(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 code of block_arith.qwix_scale. There is one level of scales and no tensor scale.

    Source: qwix 0.1.8, as XLA on a CPU computes it.
    """
    return encode(qwix_scale(amax, recipe, dtype), E4M3)


def factor_qwix(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return block_arith.qwix_reciprocal of the scale."""
    return qwix_reciprocal(decode_scale(codes), dtype)
