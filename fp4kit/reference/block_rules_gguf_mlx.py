"""Block rules of llama.cpp and of MLX, flaws included; what a rule is: block_rules.py."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.tensor_rules import TensorScale, round_to

_LEAST_NORMAL, _LEAST_WRAPPED = 2.0**-126, 127 - 149 + 256  # exponents of float32 go down to -149


# ---- llama.cpp 0c1e57098
# --------------------------------------------------------------------------------------------------


def code_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """ue4m3(amax / 6), which is no rn: half-way significands go up, 2^-6 is not reached from below, and 248 and more
    become 448.

    Subnormal: min(int(d * 512 + 0.5), 7). NaN is 0. Source: ggml_fp32_to_ue4m3.
    """
    d = np.where(amax > 0, amax / recipe.element.max, ZERO)
    low = np.minimum(d * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    high = ((np.minimum(d, E4M3.max).view(np.int32) + 0x80000) >> 20) - (127 - E4M3.bias << E4M3.mantissa_bits)
    codes = np.where(d < E4M3.min_normal, low, high)
    return np.where(codes >= encode(np.float32(256), E4M3), E4M3.max_code, codes).astype(np.uint8)


def factor_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """scale, of which values of codes are multiples."""
    return decode(codes, E4M3)


def code_e8m0_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """The low byte of floor(log2f(amax)) - emax + 127; 0 for amax = 0, inf and NaN.

    float32's log2 rounds up to an integer for the amaxes a few ulp (44 at most) below a power of two. Below 2^-125 the
    byte wraps: 255, 254, ... as x86-64 casts negative numbers. Source: quantize_row_mxfp4_ref.
    """
    positive = (amax > 0) & np.isfinite(amax)
    exponent = np.floor(log2(np.where(positive, amax, ONE))).astype(np.int32) - recipe.element.emax
    return np.where(positive, exponent + 127 & 0xFF, 0).astype(np.uint8)


def factor_e8m0_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """2^(code - 127), of which values of codes are multiples; 255 -> inf, of which none but 0 is near a number."""
    return np.ldexp(ONE, codes.astype(np.int32) - 127)


# ---- MLX
# ------------------------------------------------------------------------------------------------------------------


def _saturated(scaled: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """E4M3(scaled), with 448 for an amax of NaN and -448 for the NaN of 0 * inf, whose sign x86-64 sets."""
    codes = np.where(np.isnan(scaled), E4M3.sign_bit | E4M3.max_code, encode(scaled, E4M3))
    return np.where(np.isnan(amax), E4M3.max_code, codes).astype(np.uint8)


def code_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """E4M3(rnd(amax / 6) * S_enc), rnd to the input dtype; saturates, NaN too."""
    return _saturated(round_to(amax / recipe.element.max, dtype) * tensor.encode, amax)


def factor_mlx(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """|scale|, which elements are divided by, before they meet S_enc."""
    return np.abs(decode(codes, E4M3))


def code_mlx_metal(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """E4M3((amax / 6) * S_enc); saturates, NaN too."""
    return _saturated(amax / recipe.element.max * tensor.encode, amax)


def factor_mlx_metal(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """S_enc / |scale|, 0 under a scale that is 0."""
    scale = np.abs(decode(codes, E4M3))
    return np.where(scale == 0, ZERO, tensor.encode / scale)


def _wrapped(exponent: np.ndarray, s: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The low byte of exponent + 127, of scales s; exponent 0 for s = 0; what x86-64 makes of inf and NaN."""
    codes = np.where(s == 0, 127, exponent + 127 & 0xFF)
    return np.where(np.isfinite(s), codes, 128 if dtype == np.float32 else 0).astype(np.uint8)


def _defined(s: np.ndarray) -> np.ndarray:
    """s where it has a logarithm, else 1."""
    return np.where((s > 0) & np.isfinite(s), s, ONE)


def code_e8m0_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """The low byte of ceil(log2(s)) + 127, s = rnd(amax / max), rnd to the input dtype; 127 for s = 0. 0.32.2 and
    later, CPU.

    For s of 2^-128 and less the byte wraps: 255, 254, ..., which decode as huge scales.
    """
    s = round_to(amax / recipe.element.max, dtype)
    significand, exponent = np.frexp(_defined(s))
    return _wrapped(exponent - (significand == 0.5), s, dtype)


def factor_e8m0_mlx(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """2^n, which elements are divided by: n = code - 127, and what it was before it wrapped. 0 for an amax that is not
    finite.
    """
    wraps = (codes >= _LEAST_WRAPPED) & (amax > 0) & (amax / recipe.element.max < np.float32(_LEAST_NORMAL / 2))
    power = np.ldexp(ONE, codes.astype(np.int32) - 127 - np.where(wraps, 256, 0))
    return np.where(np.isfinite(amax), power, ZERO)


def code_e8m0_mlx_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """code_e8m0_mlx, but the exponent is rint(rnd(log2(s))), the nearest: until 0.32.1, CPU. Elements up to 8.5
    saturate.
    """
    s = round_to(amax / recipe.element.max, dtype)
    exponent = np.rint(round_to(log2(_defined(s)), dtype)).astype(np.int32)
    return _wrapped(exponent, s, dtype)


factor_e8m0_mlx_0321 = factor_e8m0_mlx


def code_e8m0_mlx_metal_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """log2(amax / max) + 127, rounded to nearest, ties away from zero; clamped to 0 ... 254; NaN -> 255. Until 0.32.1,
    Metal.
    """
    exponent = log2(amax / recipe.element.max).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(exponent) + 0.5), exponent)
    return np.where(np.isnan(amax), 255, np.clip(np.nan_to_num(rounded), -127, 127) + 127).astype(np.uint8)
