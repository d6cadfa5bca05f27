"""Test the properties of formats, such as the largest value, against tables written by hand and against ml_dtypes."""

from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import pairwise

import inputs
import ml_dtypes
import numpy as np
import pytest
from together import together

from fp4kit import formats, layouts
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT4, INT8

ML_DTYPES = inputs.ML_DTYPES | {E8M0: ml_dtypes.float8_e8m0fnu}
FLOATS = tuple(ML_DTYPES)

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
    expected = codes.view(ML_DTYPES[fmt]).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(fmt.values), nan)
    assert_same_bits(fmt.values[~nan], expected[~nan])


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_facts_equal_finfo(fmt):
    info = ml_dtypes.finfo(ML_DTYPES[fmt])
    assert fmt.bits == info.bits
    assert float(fmt.max) == float(info.max)
    assert float(fmt.min_normal) == float(info.smallest_normal)
    if fmt is not E8M0:
        assert float(fmt.min_subnormal) == float(info.smallest_subnormal)


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_values_equal_the_recorded_ones(fmt, golden):
    names = [f"ml_dtypes_{fmt.name.lower()}", f"torch_{fmt.name.lower()}"]
    recorded = [key for key in golden.keys("casts") if key.split("/")[:2] in [["all_codes", name] for name in names]]
    assert recorded
    for key in recorded:
        expected = golden.get("casts", key)[: 2**fmt.bits]
        assert np.array_equal(np.isnan(fmt.values), np.isnan(expected))
        finite = ~np.isnan(expected)
        assert_same_bits(fmt.values[finite], expected[finite], key)


@pytest.mark.parametrize("fmt, expected", [(E2M1, E2M1_VALUES), (E2M3, E2M3_VALUES), (E3M2, E3M2_VALUES)], ids=str)
def test_values_by_hand(fmt, expected):
    assert fmt.magnitudes.tolist() == expected
    assert fmt.values[: len(expected)].tolist() == expected
    assert_same_bits(fmt.values[len(expected) :], -np.array(expected, np.float32))


def test_special_codes():
    assert np.flatnonzero(np.isnan(E4M3.values)).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(np.isnan(E5M2.values)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert np.flatnonzero(np.isinf(E5M2.values)).tolist() == [0x7C, 0xFC]
    assert (E5M2.values[0x7C], E5M2.values[0xFC]) == (np.inf, -np.inf)
    assert np.flatnonzero(np.isnan(E8M0.values)).tolist() == [0xFF]
    assert [len(fmt.magnitudes) for fmt in FLOATS] == [8, 32, 32, 127, 124, 255]


def test_e8m0_is_all_powers_of_two():
    assert E8M0.magnitudes.tolist() == [2.0 ** (code - 127) for code in range(255)]


@pytest.mark.parametrize("fmt, bits", [(INT4, 4), (INT8, 8)], ids=str)
def test_integers(fmt, bits):
    half = 2 ** (bits - 1)
    assert fmt.is_integer and fmt.bits == bits and fmt.sign_bit == half
    assert fmt.values.tolist() == [*range(half), *range(-half, 0)]
    assert fmt.magnitudes.tolist() == list(range(half))
    assert (fmt.max, fmt.max_code, fmt.min_subnormal) == (half - 1, half - 1, 1)
    assert fmt.midpoints.tolist() == [i + 0.5 for i in range(half - 1)]


def test_int8_values_equal_numpy():
    assert_same_bits(INT8.values, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32))


def test_floats_are_not_integers():
    assert not any(fmt.is_integer for fmt in FLOATS)


def test_e2m1_midpoints_by_hand():
    assert E2M1.midpoints.tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


@pytest.mark.parametrize("fmt", FLOATS, ids=by_name)
def test_midpoints_are_exact(fmt):
    values = np.arange(FLOAT_FACTS[fmt][7] + 1, dtype=np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)
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
