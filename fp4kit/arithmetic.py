"""Ensure IEEE 754 arithmetic on the host, split numbers into terms, and round them to the codes of a format.

A processor computes float32 and float64 as IEEE 754 says unless the mode of its thread was changed. The decorator
`ieee` restores the default mode during a call. The rounding functions share one formula for both dtypes.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

# Made from its bits, because a literal or 2.0**-1074 would depend on the mode of the thread that imports this module.
_TINY: float = struct.unpack("<d", b"\x01" + bytes(7))[0]  # 2^-1074
_BIG, _ONE_STEP, _TWO_STEPS = 2.0**1023, 2.0**-51, 2.0**-50  # a step is _TINY * _BIG

_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV, the default environment, in glibc and musl
_ENVIRONMENT_BYTES = 256  # more than C's fenv_t takes: 32 bytes on x86-64, 8 on aarch64
Environment = tuple[Callable[..., int], Callable[..., int]]  # fegetenv, fesetenv


def is_ieee() -> bool:
    """Return whether this thread computes in IEEE arithmetic, which keeps subnormals and rounds to nearest even.

    The check multiplies the smallest subnormal, here called one step, by 1.5 and by 1.25:

    - 1.5 steps round to two steps under nearest even, but to one step when rounding down or toward zero.
    - 1.25 steps round to one step under nearest even, but to two steps when rounding up.

    The products are scaled up before they are compared, because DAZ would also treat a compared subnormal as zero. One
    check is enough, because float32 and float64 share the mode.
    """
    return _TINY * 1.5 * _BIG == _TWO_STEPS and _TINY * 1.25 * _BIG == _ONE_STEP


def ieee(op: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that it runs in IEEE arithmetic, whatever the mode of the calling thread.

    A check of the mode precedes each call and costs four multiplications, 0.1 us. If the check fails, the thread's
    floating-point environment is set to the default during the call. When the call returns or raises, the caller's
    mode, rounding and exception flags are restored. Only the inexact and underflow flags may differ, because the check
    can set them in any mode.

    Args:
        op: the function name that an error message begins with.

    Raises:
        RuntimeError: raised by the decorated function if the mode is wrong and cannot be set on this platform.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if _TINY * 1.5 * _BIG == _TWO_STEPS and _TINY * 1.25 * _BIG == _ONE_STEP:  # is_ieee(), without the call
                return function(*args, **kwargs)
            with default_environment(op):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def default_environment(op: str) -> Iterator[None]:
    """Set the default floating-point environment in this thread while a with block runs, and then restore it.

    Raise RuntimeError if this platform does not allow setting it, or if its default is not IEEE arithmetic. op: the
    function that the message begins with.
    """
    found = environment()
    if found is None:
        raise RuntimeError(_refusal(op))
    get, set_ = found
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    get(saved)
    set_(_DEFAULT)
    try:
        if not is_ieee():
            raise RuntimeError(_refusal(op))
        yield
    finally:
        set_(saved)


@cache
def environment() -> Environment | None:
    """Return C's functions fegetenv and fesetenv, which read and set the floating-point environment of a thread.

    Return None unless this is Linux with glibc or musl, on x86-64 or aarch64. On other platforms, FE_DFL_ENV, which
    stands for the default environment, may not be the pointer -1. Android's C library, Bionic, is recognized by its
    symbol __fe_dfl_env.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return None
    try:
        library = ctypes.PyDLL(None)  # PyDLL keeps the GIL, because the calls take only a few nanoseconds
        functions = library.fegetenv, library.fesetenv
    except (AttributeError, OSError):
        return None
    return None if hasattr(library, "__fe_dfl_env") else functions


def _refusal(op: str) -> str:
    """Return the error message for a thread that does not compute in IEEE arithmetic, and cannot be made to do so."""
    return (
        f"{op}: this thread treats subnormal numbers as zero, or does not round to nearest; fp4kit needs IEEE"
        f" arithmetic, which it cannot set on {sys.platform} {platform.machine()}; call torch.set_flush_denormal(False)"
        " first, or call fp4kit in a thread that was started before the mode was set"
    )


Rounding = Callable[[np.ndarray], np.ndarray]  # maps a / step >= 0 to integers, stored as floats
_LAYOUTS: dict[np.dtype, tuple[Any, int, int]] = {  # integer type of the bits, mantissa bits, exponent bias
    np.dtype(np.float32): (np.int32, 23, 127),
    np.dtype(np.float64): (np.int64, 52, 1023),
}


def _round_ties_to_zero(a: np.ndarray) -> np.ndarray:
    """Round floats a >= 0 to the nearest integers, ties toward zero. Return the integers as floats."""
    return np.ceil(a - a.dtype.type(0.5))  # exact, because a < 2^(M + 1) and M is small


def _round_ties_away(a: np.ndarray) -> np.ndarray:
    """Round floats a >= 0 to the nearest integers, ties away from zero. Return the integers as floats."""
    floor = np.floor(a)
    return floor + (a - floor >= a.dtype.type(0.5))


def _round_by_a_sum(a: np.ndarray) -> np.ndarray:
    """Round a >= 0 through the rounded sum a + 0.5, as auto-round does, so that the number just below 0.5 gives 1."""
    half = a.dtype.type(0.5)
    return np.floor(a + half) - ((a - half) % 2 == 0)


def _round_away_by_a_sum(a: np.ndarray) -> np.ndarray:
    """Round a >= 0 through the rounded sum a + 0.5, as HiFloat4 does, so that the number just below 0.5 gives 1."""
    return np.floor(a + a.dtype.type(0.5))


# rn: nearest, ties to even. rz: toward zero. rna: nearest, ties away from zero. rnz: nearest, ties toward zero.
# rns, rnas: nearest through the rounded sum a + 0.5, ties to even or away from zero.
ROUNDINGS: dict[str, Rounding] = {
    "rn": np.rint,
    "rz": np.floor,
    "rna": _round_ties_away,
    "rnz": _round_ties_to_zero,
    "rns": _round_by_a_sum,
    "rnas": _round_away_by_a_sum,
}


def exponent_field(x: np.ndarray) -> np.ndarray:
    """Return the exponent bits (exponent plus bias) of a float32 or float64 array x, as integers of the same width.

    The bias is 127 in float32, and 1023 in float64. The sign of x is ignored. The result is 0 for zero and subnormals,
    and 255 (float64: 2047) for inf and NaN.
    """
    bits, mantissa, bias = _LAYOUTS[x.dtype]
    return (x.view(bits) >> mantissa) & (2 * bias + 1)


def power_of_two(exponent: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Return 2^exponent as an array of floats, exact, for an array of integer exponents.

    Exponents must be those of normal numbers: -126 to 127 in float32, -1022 to 1023 in float64. This is not checked;
    other exponents give wrong numbers. dtype: float32 or float64, the dtype of the result.
    """
    bits, mantissa, bias = _LAYOUTS[np.dtype(dtype)]
    return ((exponent.astype(bits) + bias) << mantissa).view(dtype)


def codes_of(a: np.ndarray, emin: int, mantissa_bits: int, rounding: Rounding) -> np.ndarray:
    """Return the codes, without sign bits, of magnitudes rounded to a float format: int32 for float32, else int64.

    With e = max(exponent of a, emin), a code is (e - emin) * 2^mantissa_bits + rounding(a / 2^(e - mantissa_bits)). The
    format is treated as if it had no largest value, so the caller must clip the magnitudes or the codes.

    a: the magnitudes, float32 or float64, not negative and not NaN. They must be below 2^(127 + mantissa_bits), in
        float64 below 2^(1023 + mantissa_bits). A nonzero one must not be so small that a / step underflows.
    emin: the exponent of the format's smallest normal value.
    mantissa_bits: the mantissa bits of the format.
    rounding: a function that rounds magnitudes to integers, such as one of ROUNDINGS.
    """
    bits, _, bias = _LAYOUTS[a.dtype]
    exponent: np.ndarray = np.maximum(exponent_field(a) - bias, bits(emin))
    rounded = rounding(a * power_of_two(mantissa_bits - exponent, a.dtype))
    return (exponent - emin << mantissa_bits) + rounded.astype(bits)


class Terms(NamedTuple):
    """Numbers as pairs: value = significand * 2^exponent.

    Attributes:
        significand: float64, exact.
        exponent: int32, in a shape that broadcasts with that of significand.
    """

    significand: np.ndarray
    exponent: np.ndarray


def as_terms(values: np.ndarray, least: int) -> Terms:
    """Return numbers as Terms (value = significand * 2^exponent) with 1 <= |significand| < 2, in the shape of values.

    Numbers with a magnitude below 2^least, zero included, get the exponent `least` and a smaller significand. The
    significand of infinity is infinite, and the significand of NaN is NaN.
    """
    _, exponent = np.frexp(values)
    exponent = np.where(values == 0, least, np.maximum(exponent - 1, least)).astype(np.int32)
    return Terms(np.ldexp(values.astype(np.float64), -exponent), exponent)


# ---- one number, rounded once, to any format ----

# Roundings that ElementFormat.encode accepts. rm (down) and rp (up) also read the sign, rs (stochastic) random bits.
# rns and rnas are left out, because they are defined in float32 only.
NAMES = (*(name for name in ROUNDINGS if name not in ("rns", "rnas")), "rm", "rp", "rs")
_TINY_EXPONENT = 64  # nonzero magnitudes up to 2^-64 steps all round alike, even with 32 random bits


class _Direction(NamedTuple):
    """The way in which a rounding mode of `encode` rounds the magnitudes of an array.

    Attributes:
        rounding: the function that rounds magnitudes to integers.
        toward_zero: a mask of the elements that are rounded toward zero, or one bool for all. True for the positive
            elements with "rm", for the negative ones with "rp", and for all with "rz"; otherwise False. Such an element
            must not overflow to infinity if it is finite.
    """

    rounding: Rounding
    toward_zero: Any = False


def encode(x: Any, fmt: Any, rounding: str, saturate: bool, random: Any) -> Any:
    """Return the codes of x in a format, each number rounded once: uint8 in the shape of x, a scalar for a number.

    This implements ElementFormat.encode, whose docstring describes the arguments and the numerics. fmt: the
    ElementFormat. In a format without a sign, negative numbers get the code of NaN.

    Raise TypeError if x is not an array of numbers. Raise ValueError if rounding is unknown, if random bits are missing
    or given without need, or if an integer is beyond 2^53.
    """
    op = f"{fmt.name}.encode"
    numbers = as_float64(op, x)
    direction = _direction(op, rounding, random, numbers)
    nan = np.isnan(numbers) | (numbers < 0 if not fmt.signed else False)
    numbers = np.where(nan, 1.0, numbers)
    codes = (
        _integer_codes(numbers, fmt, direction) if fmt.is_integer else _float_codes(numbers, fmt, direction, saturate)
    )
    return np.where(nan, fmt.nan_code, codes).astype(np.uint8)[()]


def as_float64(op: str, x: Any) -> np.ndarray:
    """Return x, a number or an array that NumPy can read, as a new float64 array with equal values.

    Accept floats of at most 64 bits, and integers of a magnitude up to 2^53. Raise TypeError for other dtypes, masked
    arrays and objects that NumPy cannot read. Raise ValueError for larger integers. Every error message begins with op,
    the public function.
    """
    if hasattr(x, "filled"):
        raise TypeError(f"{op}: x is a masked array; needs plain numbers; pass x.filled(0)")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"{op}: x has the type {kind}, which NumPy cannot read; needs a number or a NumPy array on the host"
        ) from error
    narrow = array.dtype.kind == "V" and "float" in array.dtype.name  # a float of ml_dtypes
    if not narrow and (array.dtype.kind not in "fiu" or array.dtype.itemsize > 8):
        raise TypeError(f"{op}: x is {array.dtype}; needs numbers: floats of at most 64 bits, or integers")
    if array.dtype.kind in "iu" and array.size and max(int(array.max()), -int(array.min())) > 2**53:
        raise ValueError(
            f"{op}: x holds integers beyond 2^53, not all of which are float64 values; round them to float64 first"
        )
    return array.astype(np.float64)


def _direction(op: str, rounding: str, random: Any, x: np.ndarray) -> _Direction:
    """Return the _Direction of the rounding mode with the name `rounding`, for the elements of x."""
    if not isinstance(rounding, str) or rounding not in NAMES:
        raise ValueError(f"{op}: rounding is {rounding!r}; needs one of {', '.join(NAMES)}")
    if (random is None) == (rounding == "rs"):
        given = "was not given" if random is None else "was given"
        raise ValueError(
            f"{op}: random {given}, but rounding is {rounding!r}; pass random bits with 'rs' and with no other rounding"
        )
    if rounding == "rs":
        return _Direction(_stochastic(op, random, x))
    if rounding in ROUNDINGS:
        return _Direction(ROUNDINGS[rounding], rounding == "rz")
    toward_zero = np.signbit(x) == (rounding == "rp")
    return _Direction(lambda a: np.where(toward_zero, np.floor(a), np.ceil(a)), toward_zero)


def _stochastic(op: str, random: Any, x: np.ndarray) -> Rounding:
    """Return a function that rounds magnitudes a stochastically to floor(a + r / 2^n), where r is `random`, of n bits.

    The sum is exact, because a - floor(a) is compared with the threshold 1 - r / 2^n instead.
    """
    bits = np.asarray(random)
    if bits.dtype.kind != "u" or bits.dtype.itemsize > 4 or bits.shape != x.shape:
        raise ValueError(
            f"{op}: random is {bits.dtype} {bits.shape}; needs uint8, uint16 or uint32 of the shape of x, {x.shape}"
        )
    threshold = 1 - bits / 2.0 ** (8 * bits.dtype.itemsize)

    def rounded(a: np.ndarray) -> np.ndarray:
        floor = np.floor(a)
        return floor + (a - floor >= threshold)

    return rounded


def _float_codes(x: np.ndarray, fmt: Any, direction: _Direction, saturate: bool) -> np.ndarray:
    """Return the codes of x, which must not hold NaN, in a float format."""
    a = np.abs(x)
    # Clipping to the range from 2^-_TINY_EXPONENT steps to two binades above the largest value changes no code.
    clipped = np.clip(a, 2.0 ** (fmt.emin - fmt.mantissa_bits - _TINY_EXPONENT), 2.0 ** (fmt.emax + 2))
    codes = codes_of(np.where(a > 0, clipped, a), fmt.emin, fmt.mantissa_bits, direction.rounding)
    if not fmt.has_zero:  # without subnormals and zero, codes are lower by those of one exponent
        codes = np.maximum(codes - (1 << fmt.mantissa_bits), 0)
    beyond = codes > fmt.max_code
    overflows = beyond & ~(direction.toward_zero & np.isfinite(x)) & (not saturate and fmt.specials != "none")
    codes = np.where(beyond, fmt.max_code + (overflows & (fmt.specials == "ieee")), codes)
    codes = codes | np.where(np.signbit(x), fmt.sign_bit, 0)
    return np.where(overflows & (fmt.specials == "nan"), fmt.nan_code, codes)


def _integer_codes(x: np.ndarray, fmt: Any, direction: _Direction) -> np.ndarray:
    """Return the codes of x, which must not hold NaN, in a two's complement format. Values are clipped to its range."""
    magnitude = direction.rounding(np.minimum(np.abs(x), fmt.sign_bit))
    value = np.clip(np.copysign(magnitude, x), -fmt.sign_bit, fmt.max_code)
    return value.astype(np.int64) & (2**fmt.bits - 1)
