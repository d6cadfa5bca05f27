"""Test the recipe of DeepSeek-V4, which has no recorded outputs, against an independent statement of its kernel."""

import math
from fractions import Fraction

import numpy as np
from engine_cases import agree

import fp4kit

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
