"""encode and decode: one value <-> one code, for every element format, from its descriptor.

The rounding is one formula. With e = max(exponent of |x|, emin) and step = 2^(e - M),

    code = (e - emin) * 2^M + round(|x| / step)

because codes of a format with M mantissa bits are consecutive integers: a carry out of the mantissa lands in the exponent.
|x| / step is exact in float32, so the only rounding is the one that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from fp4kit.formats import ElementFormat

Sign = Literal["signbit", "negative", "not_positive"]


def _round_ties_to_zero(a: np.ndarray) -> np.ndarray:
    return np.ceil(a - np.float32(0.5))  # exact: a < 2^(M+1) and M is small


def _round_ties_away(a: np.ndarray) -> np.ndarray:
    floor = np.floor(a)
    return floor + (a - floor >= np.float32(0.5))


# rn: nearest, ties to even; rz: toward zero; rna / rnz: nearest, ties away from / toward zero.
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rn": np.rint,
    "rz": np.floor,
    "rna": _round_ties_away,
    "rnz": _round_ties_to_zero,
}

# Which values get the sign bit: those whose sign bit is set (-0 keeps it), those below zero, those not above zero (+0 gets it).
SIGNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "signbit": np.signbit,
    "negative": lambda x: x < 0,
    "not_positive": lambda x: ~(x > 0),
}


def decode(codes: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Values of codes: float32, same shape.

    codes: unsigned integers below 2**fmt.bits (higher bits are ignored, so nibbles need no masking by the caller).
    Exact: every value of every format is a float32.
    """
    return np.take(fmt.values, codes if fmt.bits == 8 else codes & (2**fmt.bits - 1))


def exponent_field(x: np.ndarray) -> np.ndarray:
    """Biased exponent of float32 x (int32, 0 for zero and subnormals, 255 for inf and NaN); the sign is ignored."""
    return (x.view(np.int32) >> 23) & 0xFF


def power_of_two(exponent: np.ndarray) -> np.ndarray:
    """2^exponent as float32 for -126 <= exponent <= 127 (int32 in)."""
    return ((exponent.astype(np.int32) + 127) << 23).view(np.float32)


def encode_magnitude(a: np.ndarray, fmt: ElementFormat, rounding: str = "rn") -> np.ndarray:
    """Codes (uint8) of float32 a >= 0, saturating at fmt.max; a must not hold NaN."""
    a = np.minimum(a, fmt.max)
    exponent = np.maximum(exponent_field(a) - 127, np.int32(fmt.emin))
    mantissa = ROUNDINGS[rounding](a * power_of_two(fmt.mantissa_bits - exponent))
    return ((exponent - fmt.emin << fmt.mantissa_bits) + mantissa.astype(np.int32)).astype(np.uint8)


def encode(
    x: np.ndarray, fmt: ElementFormat, rounding: str = "rn", sign: Sign = "signbit", nan_code: int | None = None
) -> np.ndarray:
    """Codes of x: uint8, same shape.

    x: float32 (float16 and bfloat16 are widened, exactly).
    rounding: "rn" nearest ties to even, "rz" toward zero, "rna" nearest ties away, "rnz" nearest ties toward zero.
    sign: "signbit" (-0 -> code of -0), "negative" (only x < 0), "not_positive" (+0 too).
    Numerics: finite values beyond the largest, and +-inf, become +-max (for formats with an infinity too); NaN becomes
    nan_code, by default fmt.nan_code; subnormal values and subnormal codes are honoured.
    Integers: round, then clamp to [-2^(bits-1), 2^(bits-1) - 1]. E8M0: encode_e8m0, which has its own roundings.
    """
    if not fmt.has_zero:
        return encode_e8m0(x, rounding)
    x = np.asarray(x, np.float32)
    nan = np.isnan(x)
    any_nan = bool(nan.any())
    if any_nan:
        x = np.where(nan, np.float32(0), x)
    if fmt.is_integer:
        codes = _encode_integer(x, fmt, rounding)
    else:
        codes = _encode_float(x, fmt, rounding, sign)
    if any_nan:
        codes = np.where(nan, np.uint8(fmt.nan_code if nan_code is None else nan_code), codes)
    return codes


def _encode_float(x: np.ndarray, fmt: ElementFormat, rounding: str, sign: Sign) -> np.ndarray:
    codes = encode_magnitude(np.abs(x), fmt, rounding)
    codes |= np.where(SIGNS[sign](x), np.uint8(fmt.sign_bit), np.uint8(0))
    return codes


def _encode_integer(x: np.ndarray, fmt: ElementFormat, rounding: str) -> np.ndarray:
    magnitude = ROUNDINGS[rounding](np.minimum(np.abs(x), np.float32(fmt.sign_bit)))
    value = np.clip(np.copysign(magnitude, x), np.float32(-fmt.sign_bit), fmt.max).astype(np.int32)
    return (value & (2**fmt.bits - 1)).astype(np.uint8)


def encode_e8m0(x: np.ndarray, rounding: str = "rp") -> np.ndarray:
    """E8M0 codes of float32 x >= 0: exponent + 127, uint8, same shape.

    rounding: "rp" up to a power of two (PTX cvt.rp.satfinite.ue8m0), "rz" down, "rn" nearest with 1.5 * 2^k up.
    Raises ValueError for another rounding.
    Numerics: 0 and values up to 2^-127 -> 0 (which means 2^-127); above 2^127, and +inf, -> 254; NaN and x < 0 -> 255.
    """
    bits = np.asarray(x, np.float32).view(np.int32)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal is mantissa * 2^-149, and code 0 stands for 2^-127 = 0x400000 * 2^-149.
    if rounding not in ("rp", "rz", "rn"):
        raise ValueError(f"encode_e8m0: rounding is {rounding!r}; needs 'rp', 'rz' or 'rn'")
    up: np.ndarray = {
        "rp": np.where(field == 0, mantissa > 0x400000, mantissa > 0),
        "rz": np.zeros(np.shape(bits), bool),
        "rn": np.where(field == 0, mantissa >= 0x600000, mantissa >= 0x400000),
    }[rounding]
    codes = np.minimum(field + up, 254)
    return np.where(np.isnan(x) | (np.asarray(x) < 0), 255, codes).astype(np.uint8)
