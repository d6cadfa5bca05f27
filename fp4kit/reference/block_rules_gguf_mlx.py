"""Define the block rules of llama.cpp and MLX, including their flaws: pairs of functions (see block_rules.py).
code_<rule> returns the scale codes of blocks (uint8), computed from `amax`, their largest magnitudes. factor_<rule>
returns one float32 number per block: a factor that multiplies the elements, a divisor of the elements, or a factor that
multiplies the values of codes before elements are compared with them.

Arguments are those of block_rules.py; tensor.encode multiplies elements before encoding. Notation:

- scale: the value of a scale code
- M and emax: the largest element value and its exponent
- E4M3(t): the code of t, rounded to nearest even and saturated at 448
- T(t): t rounded to dtype, the dtype of the elements
- the low byte of an integer: its value modulo 256
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.block_arith import encode_e4m3_scale
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.tensor_rules import TensorScale, round_to
from fp4kit.reference.trace import show

_MIN_NORMAL = 2.0**-126
_FIRST_WRAPPED = 127 - 149 + 256  # the lowest byte that can be a wrapped one, because float32 exponents go down to -149


# ---- llama.cpp 0c1e57098 ----


def code_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as llama.cpp's ggml_fp32_to_ue4m3 makes it from d = amax / 6.

    6 stands for the largest element value. Rounding is to nearest, but ties go up. A d below 2^-6 has the code
    min(int(d * 512 + 0.5), 7), so it never rounds up to 2^-6, the smallest normal value. From d = 248 on, the code is
    that of 448. NaN gives code 0. tensor and dtype are not used.
    """
    d = show("block scale before rounding", np.where(amax > 0, amax / recipe.element.max, ZERO))
    low = np.minimum(d * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    high = ((np.minimum(d, E4M3.max).view(np.int32) + 0x80000) >> 20) - (127 - E4M3.bias << E4M3.mantissa_bits)
    codes = np.where(d < E4M3.min_normal, low, high)
    return np.where(codes >= encode(np.float32(256), E4M3), E4M3.max_code, codes).astype(np.uint8)


def factor_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the value of each block's scale code, which llama.cpp uses as the factor of the block.

    llama.cpp gives each element the code whose value * factor is nearest to the element. A NaN code, which only a
    caller can pass, gives NaN. Only `codes` is read; the other parameters exist for a common signature.
    """
    return decode(codes, E4M3)


def code_e8m0_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 scale code of each block, as llama.cpp computes it.

        code = low byte of (floor(log2f(amax)) - emax + 127), or 0 if amax is 0, infinite or NaN

    emax is the exponent of the largest element value. If amax is at most 44 ulp below a power of two, log2f rounds up
    to an integer. If amax is below 2^-125, the byte wraps to 255, 254, ..., as x86-64 casts negative numbers. tensor
    and dtype are not used. Source: quantize_row_mxfp4_ref.
    """
    positive = (amax > 0) & np.isfinite(amax)
    exponent = (
        np.floor(show("log2 of the amax", log2(np.where(positive, amax, ONE)))).astype(np.int32) - recipe.element.emax
    )
    return np.where(positive, exponent + 127 & 0xFF, 0).astype(np.uint8)


def factor_e8m0_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the value of each block's scale code, which llama.cpp uses as the factor of the block: 2^(code - 127).

    llama.cpp gives each element the code whose value * factor is nearest to the element. Code 255 gives an infinite
    factor. Then every finite element gets code 0. Only `codes` is read; the other parameters exist for a common
    signature.
    """
    return np.ldexp(ONE, codes.astype(np.int32) - 127)


# ---- MLX ----


def _saturated(scaled: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return E4M3(scaled), but never a NaN code, because MLX saturates NaN too."""
    codes = np.where(np.isnan(scaled), E4M3.sign_bit | E4M3.max_code, encode_e4m3_scale(scaled))
    return np.where(np.isnan(amax), E4M3.max_code, codes).astype(np.uint8)


def code_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as MLX's CPU back end computes it: E4M3(T(amax / 6) * tensor.encode).

    T rounds to the dtype of the elements, 6 stands for the largest element value, and tensor.encode is the encode scale
    of the tensor. Codes saturate at 448. A NaN amax gives the code of 448, and a product 0 * inf gives that of -448,
    because MLX saturates NaN too.
    """
    return _saturated(round_to(amax / recipe.element.max, dtype) * tensor.encode, amax)


def factor_mlx(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the divisor that MLX's CPU back end applies to each block: the magnitude of the block scale.

    The caller then multiplies the quotients by tensor.encode, the encode scale of the tensor. A NaN scale gives NaN.
    Only `codes` is read; the other parameters exist for a common signature.
    """
    return np.abs(decode(codes, E4M3))


def code_mlx_metal(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E4M3 scale code of each block, as MLX's Metal kernels compute it: E4M3((amax / 6) * tensor.encode).

    6 stands for the largest element value, and tensor.encode is the encode scale of the tensor. Codes saturate at 448.
    A NaN amax gives the code of 448, and a product 0 * inf gives that of -448. dtype is not used.
    """
    return _saturated(amax / recipe.element.max * tensor.encode, amax)


def factor_mlx_metal(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block in MLX's Metal kernels: tensor.encode / |scale|.

    scale is the value of the scale code, and tensor.encode the encode scale of the tensor. If scale is 0, the factor is
    0. A NaN scale gives NaN. Only `codes` and `tensor` are read; the other parameters exist for a common signature.
    """
    scale = np.abs(decode(codes, E4M3))
    return np.where(scale == 0, ZERO, tensor.encode / scale)


def _wrapped(exponent: np.ndarray, s: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 codes that MLX stores for the scales 2^exponent: the low byte of exponent + 127."""
    codes = np.where(s == 0, 127, exponent + 127 & 0xFF)
    return np.where(np.isfinite(s), codes, 128 if dtype == np.float32 else 0).astype(np.uint8)


def _defined(s: np.ndarray) -> np.ndarray:
    """Return s with 1 in place of each number that is 0, negative, infinite or NaN, so that all logarithms are
    finite.
    """
    return np.where((s > 0) & np.isfinite(s), s, ONE)


def code_e8m0_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 scale code of each block, as MLX 0.32.2 and later compute it on a CPU.

        code = low byte of (ceil(log2(s)) + 127),   s = T(amax / M)

    T rounds to the dtype of the elements, and M is the largest element value. s = 0 gives 127. If s <= 2^-128, the byte
    wraps to 255, 254, ..., which decode as huge scales. If s is infinite or NaN, the code is 128 for float32 elements,
    otherwise 0. tensor is not used.
    """
    s = round_to(amax / recipe.element.max, dtype)
    significand, exponent = np.frexp(show("block scale before rounding", _defined(s)))
    return _wrapped(exponent - (significand == 0.5), s, dtype)


def factor_e8m0_mlx(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the divisor that MLX's CPU back end applies to the elements of each block: 2^n.

    n is code - 127. If the byte wrapped around because the exponent was below -127, n is that exponent: code - 127 -
    256. A code of 234 or more counts as wrapped if amax is positive and amax divided by the largest element value is
    below 2^-127. If amax is infinite or NaN, the divisor is 0. tensor and dtype are not used.
    """
    wraps = (codes >= _FIRST_WRAPPED) & (amax > 0) & (amax / recipe.element.max < np.float32(_MIN_NORMAL / 2))
    power = np.ldexp(ONE, codes.astype(np.int32) - 127 - np.where(wraps, 256, 0))
    return np.where(np.isfinite(amax), power, ZERO)


def code_e8m0_mlx_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 scale code of each block, as MLX up to 0.32.1 computes it on a CPU.

        code = low byte of (rint(T(log2(s))) + 127),   s = T(amax / M)

    T rounds to the dtype of the elements, and M is the largest element value. s = 0 gives 127. If s is infinite or NaN,
    the code is 128 for float32 elements, otherwise 0. Exponents below -127 wrap to 255, 254, ... tensor is not used.

    Later versions round the exponent up instead. With the nearest exponent, scaled E2M1 elements can reach 8.5 and then
    saturate.
    """
    s = round_to(amax / recipe.element.max, dtype)
    exponent = np.rint(show("log2 of the scale", round_to(log2(_defined(s)), dtype))).astype(np.int32)
    return _wrapped(exponent, s, dtype)


factor_e8m0_mlx_0321 = factor_e8m0_mlx


def code_e8m0_mlx_metal_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the E8M0 scale code of each block, as MLX up to 0.32.1 computes it on Metal: round(log2(amax / M)) + 127.

    M is the largest element value. The logarithm is rounded to float32, then to the nearest integer, ties away from
    zero, and clamped to [-127, 127]. So amax = 0 gives code 0, and inf gives 254. A NaN amax gives code 255. tensor and
    dtype are not used.
    """
    exponent = show("log2 of the scale", log2(amax / recipe.element.max)).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(exponent) + 0.5), exponent)
    return np.where(np.isnan(amax), 255, np.clip(np.nan_to_num(rounded), -127, 127) + 127).astype(np.uint8)
