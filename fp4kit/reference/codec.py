"""encode and decode as producers have them: one float32 <-> one code, for every element format, from its descriptor.

The rounding is the formula of fp4kit/rounding.py; what is here are the rules of producers for signs, NaN and overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import ml_dtypes
import numpy as np

from fp4kit.formats import E2M1, E8M0, ElementFormat
from fp4kit.reference.arith import ONE
from fp4kit.rounding import ROUNDINGS, Rounding, codes_of

Sign = Literal["signbit", "negative", "not_positive", "unsigned_zero"]

# Which values, of these magnitudes' codes, get the sign bit: those whose sign bit is set (-0 keeps it), those below
# zero, those not above zero (+0 gets it), those whose code is not that of zero.
SIGNS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "signbit": lambda x, codes: np.signbit(x),
    "negative": lambda x, codes: x < 0,
    "not_positive": lambda x, codes: ~(x > 0),
    "unsigned_zero": lambda x, codes: np.signbit(x) & (codes != 0),
}


def decode(codes: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Values of codes: float32, same shape.

    codes: unsigned integers below 2**fmt.bits (higher bits are ignored, so nibbles need no masking by the caller).
    Exact: every value of every format is a float32.
    """
    return np.take(fmt.values, codes if fmt.bits == 8 else codes & (2**fmt.bits - 1))


def encode_magnitude(a: np.ndarray, fmt: ElementFormat, rounding: str = "rn") -> np.ndarray:
    """Codes (uint8) of float32 a >= 0, saturating at fmt.max; a must not hold NaN."""
    return codes_of(np.minimum(a, fmt.max), fmt.emin, fmt.mantissa_bits, ROUNDINGS[rounding]).astype(np.uint8)


def first_of_least(a: np.ndarray, fmt: ElementFormat, step: np.ndarray | np.float32) -> np.ndarray:
    """Codes (uint8) of the magnitudes, in code order the first, for which float32 |value * step - a| is least; a >= 0,
    no NaN.

    So ties go toward zero. Where a is so large that float32 errors are equal, and for inf, the first of them is the
    code of a smaller value, or 0.
    """
    codes, least = np.zeros(a.shape, np.uint8), a
    for code, value in enumerate(fmt.magnitudes[1:], 1):
        error = np.abs(value * step - a)
        codes, least = np.where(error < least, np.uint8(code), codes), np.where(error < least, error, least)
    return codes


def nearest_unbounded(a: np.ndarray) -> np.ndarray:
    """Return the E2M1 value nearest to float32 a >= 0, ties to even, from 4 on in steps of 2 without end; NaN for inf
    and NaN.

    Source: fouroversix quantize/pytorch/reference.py fake_quantize_to_e2m1, which has no clamp.
    """
    beyond = np.where(np.isfinite(a), np.float32(2) * np.rint(a / np.float32(2)), np.float32(np.nan))
    return np.where(a < 4, decode(encode_magnitude(np.where(a < 4, a, np.float32(0)), E2M1), E2M1), beyond)


def _wrapped_magnitude(a: np.ndarray) -> np.ndarray:
    """Return the codes (uint8) of v = nearest_unbounded(a), a finite. From 8 on they are the last four bits of

    2 * (exponent of bfloat16(v) + 1) + the first bit of its mantissa: 8 for 8 and 10, 9 for 12 and 14, 10 for 16, ...
    Source: fouroversix quantize_bf16_to_unpacked_fp4.
    """
    near = nearest_unbounded(a)
    bits = near.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(near < 8, encode_magnitude(a, E2M1), ((bits >> 6) - 2 * 126).astype(np.uint8) & 15)


def encode(
    x: np.ndarray,
    fmt: ElementFormat,
    rounding: str = "rn",
    sign: Sign = "signbit",
    nan_code: int | None = None,
    step: np.ndarray | np.float32 = ONE,
) -> np.ndarray:
    """Codes of x: uint8, same shape.

    x: float32 (float16 and bfloat16 are widened, exactly).
    rounding: "rn" nearest ties to even, "rz" toward zero, "rna" nearest ties away, "rnz" nearest ties toward zero,
        "rnw" nearest_unbounded, for E2M1: the code of 8 and more keeps its last four bits (_wrapped_magnitude), and
        that of a negative value has its bit 3 set, so that 8 and -8 are both code 8; inf is NaN, "first" the first code
        in order of the nearest value: first_of_least, with steps of which values are multiples.
    sign: "signbit" (-0 -> code of -0), "negative" (only x < 0), "not_positive" (+0 too),
        "unsigned_zero" (only x < 0 that does not round to zero).
    Numerics: finite values beyond the largest, and +-inf, become +-max (for formats with an infinity too) unless
    rounding is "rnw"; NaN becomes nan_code, by default fmt.nan_code; subnormal values and subnormal codes are honoured.
    Integers: round, then clamp to [-2^(bits-1), 2^(bits-1) - 1]. E8M0: encode_e8m0, which has its own roundings.
    """
    if not fmt.has_zero:
        return encode_e8m0(x, rounding)
    x = np.asarray(x, np.float32)
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
    a = np.abs(x)
    if rounding == "first":
        codes = first_of_least(a, fmt, step)
    else:
        codes = _wrapped_magnitude(a) if rounding == "rnw" else encode_magnitude(a, fmt, rounding)
    codes |= np.where(SIGNS[sign](x, codes), np.uint8(fmt.sign_bit), np.uint8(0))
    return codes


def _encode_integer(x: np.ndarray, fmt: ElementFormat, rounding: str) -> np.ndarray:
    magnitude = ROUNDINGS[rounding](np.minimum(np.abs(x), np.float32(fmt.sign_bit)))
    value = np.clip(np.copysign(magnitude, x), np.float32(-fmt.sign_bit), fmt.max).astype(np.int32)
    return (value & (2**fmt.bits - 1)).astype(np.uint8)


_E8M0_ROUNDINGS: dict[str, Rounding] = {"rp": np.ceil, "rz": ROUNDINGS["rz"], "rn": ROUNDINGS["rn"]}


def encode_e8m0(x: np.ndarray, rounding: str = "rp") -> np.ndarray:
    """E8M0 codes of float32 x >= 0: exponent + 127, uint8, same shape.

    rounding: "rp" up to a power of two (PTX cvt.rp.satfinite.ue8m0), "rz" down, "rn" nearest with 1.5 * 2^k up.
    Raises ValueError for another rounding.
    Numerics: 0 and values up to 2^-127 -> 0 (which means 2^-127); above 2^127, and +inf, -> 254; NaN and x < 0 -> 255.
    """
    x = np.asarray(x, np.float32)
    if rounding not in _E8M0_ROUNDINGS:
        raise ValueError(f"encode_e8m0: rounding is {rounding!r}; needs 'rp', 'rz' or 'rn'")
    nan = np.isnan(x) | (x < 0)
    a = np.clip(np.where(nan, np.float32(1), x).astype(np.float64), E8M0.min_subnormal, E8M0.max)
    codes = codes_of(a, E8M0.emin, 0, _E8M0_ROUNDINGS[rounding]) - 1  # the mantissa is the hidden 1 alone
    return np.where(nan, 255, codes).astype(np.uint8)
