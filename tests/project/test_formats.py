"""Test formats: their facts, and encode and decode, against tables written by hand, ml_dtypes and exact fractions."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import FrozenInstanceError
from fractions import Fraction
from functools import cache
from itertools import pairwise

import inputs
import ml_dtypes
import numpy as np
import pytest
from codec_inputs import ALL_16_BITS, SWEEP
from exhaustive import exhaustive
from inputs import BF16, ML_DTYPES
from together import together

from fp4kit import formats, layouts
from fp4kit.arithmetic import NAMES, ROUNDINGS, is_ieee
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, E8M0, ELEMENT_FORMATS, INT4, INT8, ElementFormat
from fp4kit.reference import codec
from fp4kit.reference.stochastic import encode_stochastic

TYPES = inputs.ML_DTYPES | {E8M0: ml_dtypes.float8_e8m0fnu}
FLOATS = tuple(TYPES)

# {format: (bits, sign bit, emin, emax, max, min_normal, min_subnormal, max_code, nan_code)}
FLOAT_FACTS = {
    E2M1: (4, 0x8, 0, 2, 6.0, 1.0, 0.5, 0x7, 0x7),
    E2M3: (6, 0x20, 0, 2, 7.5, 1.0, 0.125, 0x1F, 0x1F),
    E3M2: (6, 0x20, -2, 4, 28.0, 0.25, 0.0625, 0x1F, 0x1F),
    E4M3: (8, 0x80, -6, 8, 448.0, 2.0**-6, 2.0**-9, 0x7E, 0x7F),
    E5M2: (8, 0x80, -14, 15, 57344.0, 2.0**-14, 2.0**-16, 0x7B, 0x7F),
    E8M0: (8, 0x0, -127, 127, 2.0**127, 2.0**-127, 2.0**-127, 0xFE, 0xFF),
}

E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3_VALUES = [i / 8 for i in range(16)] + [i / 4 for i in range(8, 16)] + [i / 2 for i in range(8, 16)]
E3M2_VALUES = [i / 16 for i in range(4)] + [i * 2.0**e for e in range(-4, 3) for i in range(4, 8)]


def by_name(fmt):
    return fmt.name


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_facts(fmt):
    facts = (
        fmt.bits,
        fmt.sign_bit,
        fmt.emin,
        fmt.emax,
        fmt.max,
        fmt.min_normal,
        fmt.min_subnormal,
        fmt.max_code,
        fmt.nan_code,
    )
    assert facts == FLOAT_FACTS[fmt]


# {scale format without a type in ml_dtypes: (its facts, the value of exponent field e and mantissa m)}
SCALES = {
    formats.E6M2: (
        (8, 0, -48, 15, 49152.0, 2.0**-48, 2.0**-48, 0xFE, 0xFF),
        lambda e, m: 2.0 ** (e - 48) * (1 + m / 4),
    ),
    formats.UE5M3: (
        (8, 0, -14, 16, 114688.0, 2.0**-14, 2.0**-17, 0xFE, 0xFF),
        lambda e, m: 2.0 ** (e - 15) * (1 + m / 8) if e else 2.0**-17 * m,
    ),
}


@pytest.mark.parametrize("fmt", SCALES, ids=by_name)
def test_scale_formats_by_hand(fmt):
    (*facts, nan_code), value = SCALES[fmt]
    names = "bits sign_bit emin emax max min_normal min_subnormal max_code".split()
    assert [getattr(fmt, name) for name in names] == facts and fmt.nan_code == nan_code
    by_hand = [value(*divmod(code, 2**fmt.mantissa_bits)) for code in range(255)]
    assert fmt.values[:255].tolist() == by_hand and np.isnan(fmt.values[255])
    assert fmt.encode(by_hand).tolist() == list(range(255)) and fmt.encode([-1.0, np.nan]).tolist() == [255, 255]


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_facts_are_float32(fmt):
    assert {type(fact) for fact in (fmt.max, fmt.min_normal, fmt.min_subnormal)} == {np.float32}
    assert (fmt.values.dtype, fmt.magnitudes.dtype, fmt.midpoints.dtype) == (np.float32, np.float32, np.float64)


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_values_equal_ml_dtypes(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(TYPES[fmt]).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(fmt.values), nan)
    assert_same_bits(fmt.values[~nan], expected[~nan])


@pytest.mark.parametrize("fmt, expected", [(E2M1, E2M1_VALUES), (E2M3, E2M3_VALUES), (E3M2, E3M2_VALUES)], ids=str)
def test_values_by_hand(fmt, expected):
    assert fmt.magnitudes.tolist() == expected
    assert fmt.values[: len(expected)].tolist() == expected
    assert_same_bits(fmt.values[len(expected) :], -np.array(expected, np.float32))


@pytest.mark.parametrize("fmt, bits", [(INT4, 4), (INT8, 8)], ids=str)
def test_integers(fmt, bits):
    half = 2 ** (bits - 1)
    assert fmt.is_integer and fmt.bits == bits and fmt.sign_bit == half
    assert fmt.values.tolist() == [*range(half), *range(-half, 0)]
    assert fmt.magnitudes.tolist() == list(range(half))
    assert (fmt.max, fmt.max_code, fmt.nan_code, fmt.min_subnormal) == (*(half - 1,) * 3, 1)
    assert fmt.midpoints.tolist() == [i + 0.5 for i in range(half - 1)]


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_midpoints_are_exact(fmt):
    values = np.arange(FLOAT_FACTS[fmt][7] + 1, dtype=np.uint8).view(TYPES[fmt]).astype(np.float64)
    exact = [(Fraction(float(a)) + Fraction(float(b))) / 2 for a, b in pairwise(values)]
    assert [Fraction(float(m)) for m in fmt.midpoints] == exact


@together("fmt", formats.ELEMENT_FORMATS)
def test_formats_are_frozen(fmt):
    with pytest.raises(FrozenInstanceError):
        fmt.bias = 3
    with pytest.raises(ValueError, match="read-only"):
        fmt.values[0] = 1


def test_names():
    names = [fmt.name for fmt in formats.ELEMENT_FORMATS]
    assert names == ["E2M1", "E1M2", "E3M0", "E2M3", "E3M2", "E4M3", "E5M2", "E8M0", "E6M2", "UE5M3", "INT4", "INT8"]
    assert [repr(fmt) for fmt in formats.ELEMENT_FORMATS] == names
    assert [getattr(formats, name) for name in names] == list(formats.ELEMENT_FORMATS)
    assert [repr(fmt) for fmt in formats.BLOCK_FORMATS] == [fmt.name for fmt in formats.BLOCK_FORMATS]


# {format: (element, scale, block size, has a tensor scale, bits per value, largest value before the tensor scale)}
BLOCK_FACTS = {
    "NVFP4": (E2M1, E4M3, 16, True, 4.5, 2688.0),
    "MXFP4": (E2M1, E8M0, 32, False, 4.25, 6 * 2.0**127),
    "MXFP6_E2M3": (E2M3, E8M0, 32, False, 6.25, 7.5 * 2.0**127),
    "MXFP6_E3M2": (E3M2, E8M0, 32, False, 6.25, 28 * 2.0**127),
    "MXFP8_E4M3": (E4M3, E8M0, 32, False, 8.25, 448 * 2.0**127),
    "MXFP8_E5M2": (E5M2, E8M0, 32, False, 8.25, 57344 * 2.0**127),
}


@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=by_name)
def test_block_formats(fmt):
    facts = (fmt.element, fmt.scale, fmt.block_size, fmt.has_tensor_scale, fmt.bits_per_value, fmt.max)
    assert facts == BLOCK_FACTS[fmt.name]


def test_every_block_format_has_its_facts():
    assert [fmt.name for fmt in formats.BLOCK_FORMATS] == list(BLOCK_FACTS)


def test_float32_limits():
    assert formats.FLT_MAX == (2 - 2.0**-23) * 2.0**127
    assert formats.FLT_MIN == 2.0**-126


@together("fmt", formats.ELEMENT_FORMATS)
def test_packing_says_how_codes_share_bytes(fmt):
    packing = fmt.packing
    assert packing == ((2, 1) if fmt.bits == 4 else (1, 1))
    assert packing.stored_bits * packing.codes == 8 * packing.bytes and packing.stored_bits >= fmt.bits
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) & (2**fmt.bits - 1)
    stored = layouts.packed(codes, packing)
    assert stored.shape == (2, packing.length(32)) and (layouts.unpacked(stored, packing) == codes).all()


LOW = ElementFormat("E2M1_LOW", 2, 1, 149)  # the reciprocal of its step overflows float32
MORE = (LOW, ElementFormat("E2M1_HIGH", 2, 1, -90), ElementFormat("E4M3_IEEE", 4, 3, 7, specials="ieee"))
every_format = pytest.mark.parametrize("fmt", ELEMENT_FORMATS + MORE, ids=str)
every_rounding = pytest.mark.parametrize("rounding", [name for name in NAMES if name != "rs"])


# ---- the oracle: lists of fractions ----


@cache
def magnitudes_of(fmt):
    """Return the finite magnitudes of a format as fractions, in the order of their codes, and one more.

    The last entry is the magnitude that would follow if the format had one more code.
    """
    if fmt.is_integer:
        return [Fraction(i) for i in range(fmt.sign_bit + 2)]  # integers have one more value below zero
    found = [Fraction(float(v)) for v in fmt.values[: fmt.sign_bit or None] if np.isfinite(v)]
    return [*found, found[-1] + Fraction(2) ** (fmt.emax - fmt.mantissa_bits)]


def index_of(a, magnitudes, rounding, negative):
    """Return the index in `magnitudes` to which the fraction a >= 0 rounds, or the last index if a is beyond the last.

    magnitudes: as magnitudes_of returns them.
    negative: True if the number is -a, which reverses directed rounding.
    """
    low = bisect_right(magnitudes, a) - 1
    if low < 0:  # E8M0 has no value below its smallest one
        return 0
    if low == len(magnitudes) - 1 or magnitudes[low] == a:
        return low
    if rounding in ("rz", "rp", "rm"):
        return low + (rounding != "rz" and (rounding == "rm") == negative)
    above = a - magnitudes[low] - (magnitudes[low + 1] - a)
    # True for formats without mantissa bits, which have only powers of two. The last digit of each number is then the
    # hidden 1, so every number is odd, and ties round up to the next power.
    powers = magnitudes[-1] == 2 * magnitudes[-2] == 4 * magnitudes[-3]
    up_at_tie = {"rn": low % 2 == 1 or (powers and magnitudes[low] > 0), "rna": True, "rnz": False}[rounding]
    return low + (above > 0 or (above == 0 and up_at_tie))


def oracle(x, fmt, rounding, saturate):
    """Return the code to which the format `fmt` must encode the float x, computed with exact fractions.

    saturate: True to encode numbers beyond the largest value as that value.
    """
    if np.isnan(x) or (x < 0 and not fmt.signed):
        return fmt.nan_code
    negative, magnitudes = bool(np.signbit(x)), magnitudes_of(fmt)
    last = len(magnitudes) - 1
    index = last if np.isinf(x) else index_of(abs(Fraction(float(x))), magnitudes, rounding, negative)
    if fmt.is_integer:
        return (-min(index, fmt.sign_bit) if negative else min(index, fmt.max_code)) % 2**fmt.bits
    if index == last:
        inward = rounding == "rz" or (rounding == "rp" and negative) or (rounding == "rm" and not negative)
        if saturate or fmt.specials == "none" or (inward and np.isfinite(x)):
            index = last - 1
        elif fmt.specials == "nan":
            return fmt.nan_code
    return index | (fmt.sign_bit if negative else 0)


def points(fmt):
    """Return the float64 numbers to test for a format, of both signs, and NaN.

    They are every value and every midpoint with both float64 neighbors, numbers beyond the largest, and tiny and huge
    numbers.
    """
    magnitudes = magnitudes_of(fmt)
    middles = [(a + b) / 2 for a, b in pairwise(magnitudes)]
    beyond = [2 * magnitudes[-1], 5 * magnitudes[-1]]
    exact = np.array([float(v) for v in (*magnitudes, *middles, *beyond)])
    ends = np.array([0.0, 5e-324, 2.2e-308, 1e-40, 1e-10, 1.0, 1e300, 1.7976931348623157e308, np.inf])
    x = np.concatenate([exact, np.nextafter(exact, -np.inf), np.nextafter(exact, np.inf), ends])
    return np.concatenate([x, -x, [np.nan]])


# ---- encode ----


@every_format
@every_rounding
@pytest.mark.parametrize("saturate", [True, *exhaustive([False])])
def test_every_value_and_midpoint_by_fractions(fmt, rounding, saturate):
    x = points(fmt)
    expected = [oracle(v, fmt, rounding, saturate) for v in x]
    assert_same_bits(fmt.encode(x, rounding, saturate=saturate), np.array(expected, np.uint8))


@every_format
@every_rounding
def test_every_code_comes_back(fmt, rounding):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    kept = ~np.isnan(fmt.values) & (np.isfinite(fmt.values) | (rounding == "rn"))
    assert_same_bits(fmt.encode(fmt.decode(codes[kept]), rounding, saturate=False), codes[kept])


@every_format
@pytest.mark.parametrize("rounding", [name for name in ROUNDINGS if name in NAMES])
def test_float32_as_the_specification_has_it(fmt, rounding):
    """For float32, ElementFormat.encode gives the codes of the specification (codec.encode) with its default rules."""
    if fmt is LOW or (not fmt.has_zero and rounding not in ("rn", "rz")):
        return
    x = SWEEP if fmt.signed or not fmt.has_zero else np.abs(SWEEP)  # the specification reads no sign of UE5M3
    with np.errstate(all="ignore"):
        assert_same_bits(fmt.encode(x, rounding), codec.encode(x, fmt, rounding))


def test_float64_is_rounded_once():
    """encode rounds float64 numbers directly to the format.

    These numbers are just above ties. Rounding to float32 first would make them ties, which round down to even.
    """
    x = np.array([0.25, 1.25, 5.0]) * (1 + 2.0**-40)
    assert E2M1.encode(x).tolist() == [1, 3, 7] and E2M1.encode(x.astype(np.float32)).tolist() == [0, 2, 6]
    assert (E2M1.encode(0.25 + 2.0**-40), E2M1.encode(0.25)) == (1, 0)


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=str)
def test_ml_dtypes_where_it_rounds_once(fmt):
    """Without saturation, codes equal those of ml_dtypes for numbers of up to 32 bits, except for the sign of NaN.

    ml_dtypes rounds float64 numbers twice, so these are not compared.
    """
    for x in (SWEEP, ALL_16_BITS.view(np.float16), ALL_16_BITS.view(BF16)):
        with np.errstate(all="ignore"):
            found, theirs = fmt.encode(x, saturate=False), x.astype(ML_DTYPES[fmt])
            number = ~np.isnan(theirs.astype(np.float32))
            number |= fmt.specials == "none"  # for these formats, the NaN of ml_dtypes is -0
            number &= ~np.isnan(x.astype(np.float32))
        assert number.sum() > 30_000
        assert_same_bits(found[number], theirs.view(np.uint8)[number])
        assert np.isnan(fmt.decode(found[~number & (fmt.specials != "none")])).all()


def test_overflow_by_hand():
    x = np.array([448, 464, np.nextafter(464, 500), 500, np.inf, -np.inf])
    assert E4M3.encode(x, saturate=False).tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F]
    assert E4M3.encode(x).tolist() == [0x7E] * 5 + [0xFE]
    assert E5M2.encode([61439.9, 61440, -1e9, 1e9], saturate=False).tolist() == [0x7B, 0x7C, 0xFC, 0x7C]
    assert E5M2.encode([1e9, -1e9, np.inf], "rz", saturate=False).tolist() == [0x7B, 0xFB, 0x7C]
    assert E5M2.encode([1e9, -1e9], "rp", saturate=False).tolist() == [0x7C, 0xFB]
    assert E2M1.encode([1e9, -np.inf, np.nan], saturate=False).tolist() == [7, 15, 7]
    assert E8M0.encode([2.0**128, np.inf, 0.0, -0.0, -1.0], saturate=False).tolist() == [255, 255, 0, 0, 255]


def test_new_formats_by_hand():
    assert E1M2.values[:8].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert E3M0.values[:8].tolist() == [0, 0.25, 0.5, 1, 2, 4, 8, 16]


# ---- stochastic ----


@pytest.mark.parametrize("fmt", [f for f in ELEMENT_FORMATS if f.has_zero], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_stochastic_goes_up_from_the_bits_that_reach_the_next_code(fmt, dtype):
    n = 8 * np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    mags = [float(m) for m in magnitudes_of(fmt)][: fmt.max_code + 1]
    for low, high in pairwise(mags[:9]):
        for share in (Fraction(1, 2), Fraction(1, 3), Fraction(1, 2**n), 1 - Fraction(1, 2**n)):
            x = float(Fraction(low) + share * Fraction(high - low))
            part = (Fraction(x) - Fraction(low)) / Fraction(high - low)
            edge = int((1 - part) * 2**n)  # the last random number that may round down
            near = [0, edge - 1, edge, edge + 1, 2**n - 1, *rng.integers(0, 2**n, 5)]
            bits = np.unique(np.clip(near, 0, 2**n - 1)).astype(dtype)
            up = np.array([part + Fraction(int(b), 2**n) >= 1 for b in bits])
            code = mags.index(low) + up
            assert fmt.encode(np.full(bits.shape, x), "rs", random=bits).tolist() == code.tolist()
            if fmt.signed and not fmt.is_integer:
                negative = fmt.encode(np.full(bits.shape, -x), "rs", random=bits)
                assert negative.tolist() == (code | fmt.sign_bit).tolist()


def test_stochastic_as_transformer_engine_has_it():
    """ElementFormat.encode agrees with Transformer Engine, which adds the random part to a 16-bit number in float32.

    That sum is exact, so both round alike.
    """
    for dtype in (np.float16, BF16):
        x = ALL_16_BITS.view(dtype)
        a = np.abs(x.astype(np.float32))
        x = x[np.isfinite(a) & ((a > 2.0**-14) | (a == 0))]
        for byte in (0, 1, 100, 128, 254, 255):
            random = np.full(x.shape, byte, np.uint8)
            assert_same_bits(E2M1.encode(x, "rs", random=random), encode_stochastic(x.astype(np.float32), E2M1, random))


def test_stochastic_beyond_the_largest():
    assert E2M1.encode([6.5, 1e9, -np.inf], "rs", random=np.array([255, 0, 7], np.uint8)).tolist() == [7, 7, 15]
    found = E4M3.encode([450, 450, 480, np.nan], "rs", saturate=False, random=np.array([0, 255, 0, 0], np.uint8))
    assert found.tolist() == [0x7E, 0x7F, 0x7F, 0x7F]
    assert E2M1.encode(0.3, "rs", random=np.uint8(200)) == 1


# ---- arguments ----


def test_shapes_and_kinds():
    assert type(E2M1.encode(1)) is np.uint8 and type(E2M1.decode(3)) is np.float32
    assert type(E2M1.encode(np.array(1.0))) is np.uint8
    x = np.arange(12.0).reshape(3, 4)[::2, ::-1]
    codes = INT8.encode(x)
    assert (codes.shape, codes.dtype) == ((2, 4), np.uint8) and INT8.decode(codes).tolist() == x.tolist()
    assert E2M1.encode([]).shape == (0,) and E2M1.decode(np.zeros((0, 3), np.uint8)).shape == (0, 3)
    assert E2M1.encode([1, -2, 3]).tolist() == [2, 12, 5] and E2M1.encode(np.array([255], np.uint8)).tolist() == [7]
    assert E4M3.encode(np.array([1.5], ml_dtypes.float8_e5m2)).tolist() == [0x3C]
    assert E2M1.decode([0, 7, 15]).dtype == np.float32


@every_format
def test_decode_gives_every_value(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    assert_same_bits(fmt.decode(codes.reshape(2, -1)), fmt.values.reshape(2, -1))
    assert_same_bits(fmt.decode(codes.astype(np.int64)), fmt.values)


def test_nothing_is_written_to():
    x = np.array([1.0, np.nan, -2.0])
    x.setflags(write=False)
    before = x.tobytes()
    E2M1.encode(x)
    assert x.tobytes() == before and is_ieee()


@together(
    "call, kind, message",
    [
        (
            lambda: E2M1.encode(1.0, "up"),
            ValueError,
            "E2M1.encode: rounding is 'up'; needs one of rn, rz, rna, rnz, rm, rp, rs",
        ),
        (lambda: E2M1.encode(1.0, 3), ValueError, "E2M1.encode: rounding is 3; needs one of"),
        (lambda: E2M1.encode("a"), TypeError, "E2M1.encode: x is <U1; needs numbers"),
        (lambda: E2M1.encode(True), TypeError, "E2M1.encode: x is bool; needs numbers"),
        (lambda: E2M1.encode(1j), TypeError, "E2M1.encode: x is complex128; needs numbers"),
        (
            lambda: E2M1.encode([[1], [1, 2]]),
            TypeError,
            "E2M1.encode: x has the type builtins.list, which NumPy cannot",
        ),
        (lambda: E2M1.encode(np.ma.array([1.0])), TypeError, "E2M1.encode: x is a masked array; needs plain numbers"),
        (lambda: E2M1.encode(2**53 + 1), ValueError, "E2M1.encode: x holds integers beyond 2^53"),
        (lambda: E2M1.encode(2**70), TypeError, "E2M1.encode: x is object; needs numbers"),
        (lambda: E2M1.encode(1.0, "rs"), ValueError, "random was not given, but rounding is 'rs'"),
        (lambda: E2M1.encode(1.0, random=np.uint8(1)), ValueError, "random was given, but rounding is 'rn'"),
        (
            lambda: E2M1.encode([1.0], "rs", random=np.uint8(1)),
            ValueError,
            "random is uint8 (); needs uint8, uint16 or uint32",
        ),
        (lambda: E2M1.encode(1.0, "rs", random=5), ValueError, "random is int64 (); needs uint8, uint16 or uint32"),
        (lambda: E2M1.decode(16), ValueError, "E2M1.decode: codes hold 16; needs 0 to 15"),
        (lambda: INT4.decode([-1]), ValueError, "INT4.decode: codes hold -1; needs 0 to 15"),
        (lambda: E2M1.decode(1.0), TypeError, "E2M1.decode: codes are float64; needs integers"),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()
