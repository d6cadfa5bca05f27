"""Block rules of llama.cpp and MLX, including their flaws. block_rules.py explains rules and notation."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, log2
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.tensor_rules import TensorScale, round_to

_MIN_NORMAL = 2.0**-126
_FIRST_WRAPPED = 127 - 149 + 256  # the lowest code of a wrapped byte: exponents of float32 go down to -149


# ---- llama.cpp 0c1e57098 ----


def code_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the code that ggml_fp32_to_ue4m3 makes of amax / 6, whose rounding is not nearest even.

    Half-way significands go up, 2^-6 is not reached from below, and values of 248 and more become 448. A subnormal code
    is min(int(d * 512 + 0.5), 7), where d = amax / 6. NaN gives 0. Source: ggml_fp32_to_ue4m3.
    """
    d = np.where(amax > 0, amax / recipe.element.max, ZERO)
    low = np.minimum(d * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    high = ((np.minimum(d, E4M3.max).view(np.int32) + 0x80000) >> 20) - (127 - E4M3.bias << E4M3.mantissa_bits)
    codes = np.where(d < E4M3.min_normal, low, high)
    return np.where(codes >= encode(np.float32(256), E4M3), E4M3.max_code, codes).astype(np.uint8)


def factor_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the scale. Elements are compared with multiples of it."""
    return decode(codes, E4M3)


def code_e8m0_gguf(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the low byte of floor(log2f(amax)) - emax + 127, or 0 if amax is 0, inf or NaN.

    For amaxes a few ulp (at most 44) below a power of two, float32's log2 rounds up to an integer. Below 2^-125 the
    byte wraps to 255, 254, ..., as x86-64 casts negative numbers. Source: quantize_row_mxfp4_ref.
    """
    positive = (amax > 0) & np.isfinite(amax)
    exponent = np.floor(log2(np.where(positive, amax, ONE))).astype(np.int32) - recipe.element.emax
    return np.where(positive, exponent + 127 & 0xFF, 0).astype(np.uint8)


def factor_e8m0_gguf(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^(code - 127). Elements are compared with multiples of it.

    Code 255 gives inf; then the nearest multiple of a finite element is 0.
    """
    return np.ldexp(ONE, codes.astype(np.int32) - 127)


# ---- MLX ----


def _saturated(scaled: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return E4M3(scaled) with special codes for NaN: 448 if amax is NaN, and -448 for the NaN of 0 * inf.

    x86-64 sets the sign bit of that second NaN.
    """
    codes = np.where(np.isnan(scaled), E4M3.sign_bit | E4M3.max_code, encode(scaled, E4M3))
    return np.where(np.isnan(amax), E4M3.max_code, codes).astype(np.uint8)


def code_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3(rnd(amax / 6) * S_enc), rnd to the input dtype. The code saturates, also for NaN."""
    return _saturated(round_to(amax / recipe.element.max, dtype) * tensor.encode, amax)


def factor_mlx(codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return |scale|, by which elements are divided before they are multiplied by S_enc."""
    return np.abs(decode(codes, E4M3))


def code_mlx_metal(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return E4M3((amax / 6) * S_enc). The code saturates, also for NaN."""
    return _saturated(amax / recipe.element.max * tensor.encode, amax)


def factor_mlx_metal(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return S_enc / |scale|, or 0 under a scale of 0."""
    scale = np.abs(decode(codes, E4M3))
    return np.where(scale == 0, ZERO, tensor.encode / scale)


def _wrapped(exponent: np.ndarray, s: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the low byte of exponent + 127 for scales s.

    s = 0 has exponent 0. For inf and NaN the byte is what the cast gives on x86-64: 128 for float32, 0 for other
    dtypes.
    """
    codes = np.where(s == 0, 127, exponent + 127 & 0xFF)
    return np.where(np.isfinite(s), codes, 128 if dtype == np.float32 else 0).astype(np.uint8)


def _defined(s: np.ndarray) -> np.ndarray:
    """Return s where it has a finite logarithm, and 1 elsewhere."""
    return np.where((s > 0) & np.isfinite(s), s, ONE)


def code_e8m0_mlx(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the low byte of ceil(log2(s)) + 127, s = rnd(amax / max), rnd to the input dtype; s = 0 gives 127.

    For s <= 2^-128 the byte wraps to 255, 254, ..., which decode as huge scales. Source: MLX 0.32.2 and later, on a
    CPU.
    """
    s = round_to(amax / recipe.element.max, dtype)
    significand, exponent = np.frexp(_defined(s))
    return _wrapped(exponent - (significand == 0.5), s, dtype)


def factor_e8m0_mlx(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return 2^n, by which elements are divided, or 0 if amax is not finite.

    n is code - 127 for a byte that did not wrap, and the original exponent for a byte that did.
    """
    wraps = (codes >= _FIRST_WRAPPED) & (amax > 0) & (amax / recipe.element.max < np.float32(_MIN_NORMAL / 2))
    power = np.ldexp(ONE, codes.astype(np.int32) - 127 - np.where(wraps, 256, 0))
    return np.where(np.isfinite(amax), power, ZERO)


def code_e8m0_mlx_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return code_e8m0_mlx's code with the exponent rint(rnd(log2(s))), the nearest instead of the next higher.

    Scaled elements can reach 8.5 and then saturate. Source: MLX until 0.32.1, on a CPU.
    """
    s = round_to(amax / recipe.element.max, dtype)
    exponent = np.rint(round_to(log2(_defined(s)), dtype)).astype(np.int32)
    return _wrapped(exponent, s, dtype)


factor_e8m0_mlx_0321 = factor_e8m0_mlx


def code_e8m0_mlx_metal_0321(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return log2(amax / max) + 127, rounded to nearest with ties away from zero, clamped to 0 ... 254.

    NaN gives 255. Source: MLX until 0.32.1, on Metal.
    """
    exponent = log2(amax / recipe.element.max).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(exponent) + 0.5), exponent)
    return np.where(np.isnan(amax), 255, np.clip(np.nan_to_num(rounded), -127, 127) + 127).astype(np.uint8)
