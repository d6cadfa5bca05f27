"""Test the recipes of DeepSeek-V4, which have no recorded outputs, against independent statements of its kernels."""

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
from engine_cases import agree

import fp4kit
from fp4kit.recipes import RECIPES

E2M1 = (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)


def exponent_of(amax):
    """Return the exponent of max(amax, 6 * 2^-126) * float32(1/6), rounded to float32 and then up to a power of two."""
    product = np.float32(max(float(amax), 6 * 2.0**-126)) * np.float32(1 / 6)
    significand, exponent = math.frexp(float(product))
    return exponent - (significand == 0.5)


def code_of(x, scale):
    """Return the E2M1 code nearest to x / scale, ties to the even code, in exact arithmetic."""
    quotient = min(abs(Fraction(float(x))) / scale, Fraction(6))
    code = min(range(8), key=lambda c: (abs(E2M1[c] - quotient), c % 2))
    return code | 8 * bool(np.signbit(x))


E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp8_of(quotient):
    """Return the E4M3 codes nearest to float32 quotients, ties to the even code, saturated at 448."""
    magnitude = np.minimum(np.abs(quotient.astype(np.float64)), 448)[..., None]
    distance = np.abs(magnitude - E4M3)  # exact in float64
    code = distance.argmin(axis=-1)
    tied = np.take_along_axis(distance, np.minimum(code + 1, 126)[..., None], axis=-1)[..., 0] == distance.min(axis=-1)
    return code + (tied & (code % 2 == 1)) | 128 * np.signbit(quotient)


def rows_of(amaxes, columns):
    """Return rows of random elements of both signs, float32 (len(amaxes), columns), whose amaxes are given."""
    x = np.random.default_rng(34).uniform(-1, 1, (len(amaxes), columns)).astype(np.float32)
    x *= np.float32(amaxes)[:, None]
    x[:, 3] = amaxes
    return x


def test_the_kv_cache():
    """The scale is E4M3(max(amax, 6 * 2^-9) / 6), by whose value elements are divided."""
    x = rows_of([0, 1e-3, 6 * 2.0**-9, 0.0125, 0.3, 1, 5.9, 6, 77, 2688, 3000], 16)
    q = agree(fp4kit.quantize, x, "nvfp4-deepseek-v4")
    scales = fp8_of(np.maximum(np.abs(x).max(axis=1), np.float32(6 * 2.0**-9)) / np.float32(6))
    assert q.block_scale[:, 0].tolist() == scales.tolist() and scales[0] == 1
    wanted = [[code_of(np.float32(v) / np.float32(E4M3[s]), 1) for v in row] for row, s in zip(x, scales, strict=True)]
    assert fp4kit.unpack(q.packed).tolist() == wanted


def test_fp8_with_float32_scales():
    """The scale is max(amax, 1e-4) * float32(1/448), by which elements are divided."""
    x = rows_of([0, 1e-6, 1e-4, 0.3, 448, 1e30], 128)
    q = agree(fp4kit.quantize, x, "fp8-deepseek-v4")
    scales = np.maximum(np.abs(x).max(axis=1), np.float32(1e-4)) * np.float32(1 / 448)
    assert q.tensor_scale.reshape(-1).tolist() == scales.tolist()
    assert q.packed.tolist() == fp8_of(x / scales[:, None]).tolist()


def test_fp8_with_powers_of_two():
    """The scale max(amax, 1e-4) * float32(1/448) is rounded up to a power of two; amaxes are next to 448 * 2^k."""
    near = np.float32([448 * 2.0**k for k in range(-20, 100, 12)])
    x = rows_of([0, 1e-6, *near, *np.nextafter(near, np.float32(0)), *np.nextafter(near, np.float32(np.inf))], 128)
    q = agree(fp4kit.quantize, x, replace(RECIPES["mxfp8-deepseek-v4"], block=(1, 128)))
    products = np.maximum(np.abs(x).max(axis=1), np.float32(1e-4)) * np.float32(1 / 448)
    exponents = [exponent - (m == 0.5) for m, exponent in (math.frexp(float(p)) for p in products)]
    assert q.block_scale[:, 0].tolist() == [e + 127 for e in exponents]
    assert q.packed.tolist() == fp8_of(x / np.float32(2.0 ** np.array(exponents))[:, None]).tolist()


def test_codes_and_scales():
    """Blocks with amaxes over the range of float32, among them those next to 6 * 2^k."""
    rng = np.random.default_rng(33)
    x = rng.uniform(-1, 1, (96, 32)).astype(np.float32)
    amaxes = np.float32([6 * 2.0**k for k in range(-128, 122, 8)])
    amaxes = np.concatenate([np.nextafter(amaxes, np.float32(0)), amaxes, np.nextafter(amaxes, np.float32(np.inf))])
    x *= np.resize(amaxes, 96)[:, None]
    x[:, 5] = np.resize(amaxes, 96)
    x[-1] = 0
    q = agree(fp4kit.quantize, x, "mxfp4-deepseek-v4")
    exponents = [exponent_of(np.abs(row).max()) for row in x]
    assert q.block_scale[:, 0].tolist() == [e + 127 for e in exponents]
    wanted = [[code_of(v, Fraction(2) ** e) for v in row] for row, e in zip(x, exponents, strict=True)]
    assert fp4kit.unpack(q.packed).tolist() == wanted
