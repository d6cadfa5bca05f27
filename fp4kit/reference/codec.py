"""Encode and decode single values, with the sign, NaN and overflow rules of producers.

The rounding formula is that of fp4kit/rounding.py. It works for every element format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import ml_dtypes
import numpy as np

from fp4kit.formats import E2M1, E8M0, Codebook, ElementFormat
from fp4kit.reference.arith import ONE
from fp4kit.rounding import ROUNDINGS, Rounding, codes_of

Sign = Literal["signbit", "negative", "not_positive", "unsigned_zero"]

# Each function returns a mask of the elements that get the sign bit, given x and the codes of its magnitudes:
# signbit: elements with a set sign bit, so that -0 keeps its sign.  negative: elements below zero.
# not_positive: elements that are 0, below 0 or NaN.  unsigned_zero: as signbit, without elements whose code is 0.
SIGNS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "signbit": lambda x, codes: np.signbit(x),
    "negative": lambda x, codes: x < 0,
    "not_positive": lambda x, codes: ~(x > 0),
    "unsigned_zero": lambda x, codes: np.signbit(x) & (codes != 0),
}


def decode(codes: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Return the float32 values of codes in a format, in the shape of codes. The result is exact. NaN codes give NaN.

    codes: unsigned integers. Bits above the width of the format are ignored, so callers need not mask a code that
    shares its byte with another one.
    """
    return np.take(fmt.values, codes if fmt.bits == 8 else codes & (2**fmt.bits - 1))


def encode_magnitude(a: np.ndarray, fmt: ElementFormat, rounding: str = "rn") -> np.ndarray:
    """Return the codes of float32 a >= 0, as uint8. Numbers beyond fmt.max, infinity included, become fmt.max.

    `a` must not hold NaN.

    rounding: a name in rounding.ROUNDINGS, such as "rn" for nearest even.
    """
    return codes_of(np.minimum(a, fmt.max), fmt.emin, fmt.mantissa_bits, ROUNDINGS[rounding]).astype(np.uint8)


def first_of_least(a: np.ndarray, fmt: ElementFormat, step: np.ndarray | np.float32) -> np.ndarray:
    """Return, for each float32 a >= 0, the code whose value times step is nearest to a: uint8. No a may be NaN.

    This is the rounding "first" of llama.cpp and MLX. Distances |value * step - a| are computed in float32. Among equal
    distances the lowest code wins, so ties go toward zero. If a is infinite, or so large that float32 distances are
    equal, a lower code than the nearest one wins, down to code 0.
    """
    codes, smallest_error = np.zeros(a.shape, np.uint8), a
    for code, value in enumerate(fmt.magnitudes[1:], 1):
        error = np.abs(value * step - a)
        codes, smallest_error = (
            np.where(error < smallest_error, np.uint8(code), codes),
            np.where(error < smallest_error, error, smallest_error),
        )
    return codes


def nearest_unbounded(a: np.ndarray) -> np.ndarray:
    """Return float32 a >= 0 rounded to the nearest E2M1 value, ties to even, as if E2M1 had no largest value.

    From 4 on the values continue in steps of 2: 4, 6, 8, 10, ... The result is float32; inf and NaN give NaN. The
    rounding "rnw" uses this function. Source: fouroversix quantize/pytorch/reference.py fake_quantize_to_e2m1, which
    does not clamp.
    """
    beyond = np.where(np.isfinite(a), np.float32(2) * np.rint(a / np.float32(2)), np.float32(np.nan))
    return np.where(a < 4, decode(encode_magnitude(np.where(a < 4, a, np.float32(0)), E2M1), E2M1), beyond)


def _wrapped_magnitude(a: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes that fouroversix gives to v = nearest_unbounded(a), for finite a: uint8."""
    rounded = nearest_unbounded(a)
    bits = rounded.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(rounded < 8, encode_magnitude(a, E2M1), ((bits >> 6) - 2 * 126).astype(np.uint8) & 15)


def encode(
    x: np.ndarray,
    fmt: ElementFormat,
    rounding: str = "rn",
    sign: Sign = "signbit",
    nan_code: int | None = None,
    step: np.ndarray | np.float32 = ONE,
) -> np.ndarray:
    """Return the codes of x: uint8, in the shape of x.

    Roundings:

    - "rn": nearest, ties to even
    - "rz": toward zero
    - "rna": nearest, ties away from zero
    - "rnz": nearest, ties toward zero
    - "rns": nearest even, computed through the rounded sum a + 0.5
    - "rnw": nearest value of E2M1 as if it had no largest value (nearest_unbounded), for E2M1 only. The code of a
      rounded magnitude of 8 or more wraps to four bits, and the sign sets bit 3. So 8 and -8 both have code 8.
    - "first": the code whose value times step is nearest, ties to the lowest code (first_of_least)

    Args:
        x: float32; float16 and bfloat16 are widened, exactly.
        fmt: the element format. For E8M0, which has no zero, this is encode_e8m0(x, rounding), and the other arguments
            are ignored. A Codebook encodes to the nearest value (see there), and rounding, sign and step are ignored.
        rounding: a name from the list above; for E8M0 "rp", "rz" or "rn".
        sign: which elements get the sign bit: "signbit" (-0 has the code of -0), "negative" (only x < 0),
            "not_positive" (x <= 0, also +0) or "unsigned_zero" (x < 0, except if it rounds to zero). It applies to
            float formats only.
        nan_code: the code of NaN; by default fmt.nan_code.
        step: the factor of a block, used only by "first".

    Raises:
        KeyError: rounding or sign is another name, and fmt uses it.
        ValueError: rounding is another name, for E8M0.

    Numerics:
        Finite values beyond the largest and +-inf become +-max, also in a format with an infinity. "rnw" is the
        exception: it has no largest value, and treats inf as NaN. Subnormal values and subnormal codes are kept.
        Integers are rounded and then clamped to [-2^(bits-1), 2^(bits-1) - 1].
    """
    if not fmt.has_zero:
        return encode_e8m0(x, rounding)
    x = np.asarray(x, np.float32)
    if isinstance(fmt, Codebook):
        return np.where(np.isnan(x), np.uint8(fmt.nan_code if nan_code is None else nan_code), fmt.nearest(x))
    nan = ~np.isfinite(x) if rounding == "rnw" else np.isnan(x)
    any_nan = bool(nan.any())
    if any_nan:
        x = np.where(nan, np.float32(0), x)
    if fmt.is_integer:
        codes = _encode_integer(x, fmt, rounding)
    else:
        codes = _encode_float(x, fmt, rounding, sign, step)
    if any_nan:
        codes = np.where(nan, np.uint8(fmt.nan_code if nan_code is None else nan_code), codes)
    return codes


def _encode_float(
    x: np.ndarray, fmt: ElementFormat, rounding: str, sign: Sign, step: np.ndarray | np.float32
) -> np.ndarray:
    """Return the uint8 codes of x, which must not hold NaN, in a float format."""
    a = np.abs(x)
    if rounding == "first":
        codes = first_of_least(a, fmt, step)
    else:
        codes = _wrapped_magnitude(a) if rounding == "rnw" else encode_magnitude(a, fmt, rounding)
    codes |= np.where(SIGNS[sign](x, codes), np.uint8(fmt.sign_bit), np.uint8(0))
    return codes


def _encode_integer(x: np.ndarray, fmt: ElementFormat, rounding: str) -> np.ndarray:
    """Return the two's complement codes of x, uint8, clamped to the range of fmt. x must not hold NaN."""
    magnitude = ROUNDINGS[rounding](np.minimum(np.abs(x), np.float32(fmt.sign_bit)))
    value = np.clip(np.copysign(magnitude, x), np.float32(-fmt.sign_bit), fmt.max).astype(np.int32)
    return (value & (2**fmt.bits - 1)).astype(np.uint8)


_SCALE_ROUNDINGS: dict[str, Rounding] = {"rp": np.ceil, "rz": ROUNDINGS["rz"], "rn": ROUNDINGS["rn"]}


def encode_scale(x: np.ndarray, fmt: ElementFormat, rounding: str) -> np.ndarray:
    """Return the codes of float32 x >= 0 in a scale format: uint8, in the shape of x.

    Numbers beyond the largest value, infinity included, become the largest value. NaN gives fmt.nan_code. For E8M0,
    encode_e8m0 is used, so numbers below 2^-127 become 2^-127.

    rounding: "rp" up, "rz" down, "rn" to nearest even.
    """
    if not fmt.has_zero:
        return encode_e8m0(x, rounding)
    nan = np.isnan(x)
    a = np.where(nan, np.float32(0), np.minimum(x, fmt.max))
    codes = codes_of(a, fmt.emin, fmt.mantissa_bits, _SCALE_ROUNDINGS[rounding]).astype(np.uint8)
    return np.where(nan, np.uint8(fmt.nan_code), codes)


def encode_e8m0(x: np.ndarray, rounding: str = "rp") -> np.ndarray:
    """Return the E8M0 codes (exponent + 127) of float32 x >= 0, rounded to powers of two: uint8, in the shape of x.

    Args:
        x: the numbers; float16 and bfloat16 are widened.
        rounding: "rp" up to a power of two (PTX cvt.rp.satfinite.ue8m0), "rz" down, "rn" to nearest, where 1.5 * 2^k
            rounds up.

    Raises:
        ValueError: rounding is another name.

    Numerics:
        0, -0 and values up to 2^-127 give code 0, which stands for 2^-127. Values above 2^127 and +inf give 254. NaN
        and x < 0 give 255.
    """
    x = np.asarray(x, np.float32)
    if rounding not in _SCALE_ROUNDINGS:
        raise ValueError(f"encode_e8m0: rounding is {rounding!r}; needs 'rp', 'rz' or 'rn'")
    nan = np.isnan(x) | (x < 0)
    a = np.clip(np.where(nan, np.float32(1), x).astype(np.float64), E8M0.min_subnormal, E8M0.max)
    codes = codes_of(a, E8M0.emin, 0, _SCALE_ROUNDINGS[rounding]) - 1  # E8M0 has no zero: codes are one lower
    return np.where(nan, 255, codes).astype(np.uint8)
