"""Rounding of numbers to the codes of a format: one formula, in float32 and in float64, and the roundings by name.

With e = max(exponent of a, emin) and step = 2^(e - M),

    code = (e - emin) * 2^M + round(a / step)

because codes of a format with M mantissa bits are consecutive integers: a carry out of the mantissa lands in the
exponent. a / step is exact, so the only rounding is the one that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]  # a / step, not negative -> integers, as floats
_LAYOUTS: dict[np.dtype, tuple[Any, int, int]] = {  # type of the bits, bits of the mantissa, bias
    np.dtype(np.float32): (np.int32, 23, 127),
    np.dtype(np.float64): (np.int64, 52, 1023),
}


def _round_ties_to_zero(a: np.ndarray) -> np.ndarray:
    return np.ceil(a - a.dtype.type(0.5))  # exact: a < 2^(M+1) and M is small


def _round_ties_away(a: np.ndarray) -> np.ndarray:
    floor = np.floor(a)
    return floor + (a - floor >= a.dtype.type(0.5))


def _round_by_a_sum(a: np.ndarray) -> np.ndarray:
    half = a.dtype.type(0.5)
    return np.floor(a + half) - ((a - half) % 2 == 0)


# rn: nearest, ties to even; rz: toward zero; rna / rnz: nearest, ties away from / toward zero; rns: rn by way of the
# rounded sum a + 0.5, for which the number just below 0.5 is 1.
ROUNDINGS: dict[str, Rounding] = {
    "rn": np.rint,
    "rz": np.floor,
    "rna": _round_ties_away,
    "rnz": _round_ties_to_zero,
    "rns": _round_by_a_sum,
}


def exponent_field(x: np.ndarray) -> np.ndarray:
    """Biased exponent of x (0 for zero and subnormals, 255 or 2047 for inf and NaN); the sign is ignored."""
    bits, mantissa, bias = _LAYOUTS[x.dtype]
    return (x.view(bits) >> mantissa) & (2 * bias + 1)


def power_of_two(exponent: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """2^exponent for exponents of normal numbers: -126 <= exponent <= 127 in float32."""
    bits, mantissa, bias = _LAYOUTS[np.dtype(dtype)]
    return ((exponent.astype(bits) + bias) << mantissa).view(dtype)


def codes_of(a: np.ndarray, emin: int, mantissa_bits: int, rounding: Rounding) -> np.ndarray:
    """Codes, as integers, of a >= 0 among the magnitudes of a format that goes on without end: the largest is the
    caller's.

    a: float32 or float64, no NaN, below 2^(127 + mantissa_bits), in float64 2^(1023 + mantissa_bits); if above zero,
    not
        so small that a / step underflows.
    """
    bits, _, bias = _LAYOUTS[a.dtype]
    exponent: np.ndarray = np.maximum(exponent_field(a) - bias, bits(emin))
    rounded = rounding(a * power_of_two(mantissa_bits - exponent, a.dtype))
    return (exponent - emin << mantissa_bits) + rounded.astype(bits)


# ---- one number, rounded once, to any format
# ------------------------------------------------------------------------------

# The last three, down, up and stochastic, read more than the magnitude; rns is a matter of float32.
NAMES = (*(name for name in ROUNDINGS if name != "rns"), "rm", "rp", "rs")
_FAR = 64  # a step by 2^64: a smaller magnitude rounds as this one does, under 32 random bits too


class Format(Protocol):
    """What encode reads of an ElementFormat."""

    @property
    def name(self) -> str: ...
    @property
    def mantissa_bits(self) -> int: ...
    @property
    def specials(self) -> str: ...
    @property
    def signed(self) -> bool: ...
    @property
    def has_zero(self) -> bool: ...
    @property
    def bits(self) -> int: ...
    @property
    def is_integer(self) -> bool: ...
    @property
    def sign_bit(self) -> int: ...
    @property
    def emin(self) -> int: ...
    @property
    def emax(self) -> int: ...
    @property
    def max_code(self) -> int: ...
    @property
    def nan_code(self) -> int: ...


class _Direction(NamedTuple):
    """A rounding of magnitudes, and where it is toward zero: there a finite number does not overflow."""

    rounding: Rounding
    toward_zero: Any = False


def encode(x: Any, fmt: Format, rounding: str, saturate: bool, random: Any) -> Any:
    """ElementFormat.encode, which says what it does."""
    op = f"{fmt.name}.encode"
    numbers = _as_float64(op, x)
    direction = _direction(op, rounding, random, numbers)
    nan = np.isnan(numbers) | (numbers < 0 if not fmt.signed else False)
    numbers = np.where(nan, 1.0, numbers)
    codes = (
        _integer_codes(numbers, fmt, direction) if fmt.is_integer else _float_codes(numbers, fmt, direction, saturate)
    )
    return np.where(nan, fmt.nan_code, codes).astype(np.uint8)[()]


def _as_float64(op: str, x: Any) -> np.ndarray:
    """Numbers as float64, which holds them all: floats of at most 64 bits, integers up to 2^53."""
    if hasattr(x, "filled"):
        raise TypeError(f"{op}: x is a masked array; needs plain numbers; pass x.filled(0)")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"{op}: x is a {kind}, which NumPy cannot read; needs a number or a NumPy array on the host"
        ) from error
    narrow = array.dtype.kind == "V" and "float" in array.dtype.name  # a float of ml_dtypes
    if not narrow and (array.dtype.kind not in "fiu" or array.dtype.itemsize > 8):
        raise TypeError(f"{op}: x is {array.dtype}; needs numbers: floats of at most 64 bits, or integers")
    if array.dtype.kind in "iu" and array.size and max(int(array.max()), -int(array.min())) > 2**53:
        raise ValueError(f"{op}: x holds integers beyond 2^53, which float64 has not all; pass x.astype(np.float64)")
    return array.astype(np.float64)


def _direction(op: str, rounding: str, random: Any, x: np.ndarray) -> _Direction:
    """The rounding of the magnitudes of x: by its name, the signs of x, and the random bits."""
    if not isinstance(rounding, str) or rounding not in NAMES:
        raise ValueError(f"{op}: rounding is {rounding!r}; needs one of {', '.join(NAMES)}")
    if (random is None) == (rounding == "rs"):
        given = "was not given" if random is None else "was given"
        raise ValueError(
            f"{op}: random {given} with rounding={rounding!r}; 'rs', and no other rounding, needs random bits"
        )
    if rounding == "rs":
        return _Direction(_stochastic(op, random, x))
    if rounding in ROUNDINGS:
        return _Direction(ROUNDINGS[rounding], rounding == "rz")
    toward_zero = np.signbit(x) == (rounding == "rp")
    return _Direction(lambda a: np.where(toward_zero, np.floor(a), np.ceil(a)), toward_zero)


def _stochastic(op: str, random: Any, x: np.ndarray) -> Rounding:
    """floor(a + random / 2^n), n the bits of an unsigned integer: exact, since it compares what is beyond floor(a)."""
    bits = np.asarray(random)
    if bits.dtype.kind != "u" or bits.dtype.itemsize > 4 or bits.shape != x.shape:
        raise ValueError(
            f"{op}: random is {bits.dtype} {bits.shape}; needs uint8, uint16 or uint32 of the shape of x, {x.shape}"
        )
    least = 1 - bits / 2.0 ** (8 * bits.dtype.itemsize)

    def rounded(a: np.ndarray) -> np.ndarray:
        floor = np.floor(a)
        return floor + (a - floor >= least)

    return rounded


def _float_codes(x: np.ndarray, fmt: Format, direction: _Direction, saturate: bool) -> np.ndarray:
    """Codes of x, no NaN. Magnitudes are held where every code is still right: two binades above the largest, and
    _FAR.
    """
    a = np.abs(x)
    held = np.clip(a, 2.0 ** (fmt.emin - fmt.mantissa_bits - _FAR), 2.0 ** (fmt.emax + 2))
    codes = codes_of(np.where(a > 0, held, a), fmt.emin, fmt.mantissa_bits, direction.rounding)
    codes = np.maximum(codes - (not fmt.has_zero), 0)  # E8M0: the mantissa is the hidden 1 alone, and no code is zero
    beyond = codes > fmt.max_code
    overflows = beyond & ~(direction.toward_zero & np.isfinite(x)) & (not saturate and fmt.specials != "none")
    codes = np.where(beyond, fmt.max_code + (overflows & (fmt.specials == "ieee")), codes)
    codes = codes | np.where(np.signbit(x), fmt.sign_bit, 0)
    return np.where(overflows & (fmt.specials == "nan"), fmt.nan_code, codes)


def _integer_codes(x: np.ndarray, fmt: Format, direction: _Direction) -> np.ndarray:
    """Two's complement codes of x, no NaN."""
    magnitude = direction.rounding(np.minimum(np.abs(x), fmt.sign_bit))
    value = np.clip(np.copysign(magnitude, x), -fmt.sign_bit, fmt.max_code)
    return value.astype(np.int64) & (2**fmt.bits - 1)
