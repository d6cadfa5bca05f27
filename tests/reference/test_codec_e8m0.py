"""Test the encoding of E8M0 scales against Transformer Engine's function, ml_dtypes, recorded casts and the
definition.
"""

import ml_dtypes
import numpy as np
import pytest
from codec_inputs import NANS, SWEEP

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E8M0
from fp4kit.reference.codec import decode, encode_e8m0


def float_to_e8m0(bits):
    """Return the E8M0 code by the steps of Transformer Engine's float_to_e8m0.

    bits: the bits of a float32 that is not negative; infinity and NaN are allowed.
    """
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return 0xFF if mantissa else 0xFE
    if bits == 0:
        return 0x00
    if mantissa > 0 and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000):
        exponent += 1
    return exponent


POSITIVE = SWEEP[~np.signbit(SWEEP)]


def test_e8m0_rp_equals_transformer_engine():
    x = np.concatenate([POSITIVE, np.float32([np.nan])])
    assert encode_e8m0(x, "rp").tolist() == [float_to_e8m0(int(bits)) for bits in x.view(np.uint32)]


@pytest.mark.parametrize("rounding", ["rp", "rz", "rn"])
def test_e8m0_equals_the_definition(rounding):
    """Each rounding mode gives the documented power of two.

    It is the smallest not below, the largest not above, or the nearest with ties up.
    """
    powers = np.ldexp(1.0, np.arange(-127, 128))
    edges = np.concatenate([powers, powers[:-1] * 1.5]).astype(np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    for x in (edges, POSITIVE):
        a = x.astype(np.float64)
        up = np.searchsorted(powers, a, side="left")
        down = np.maximum(np.searchsorted(powers, a, side="right") - 1, 0)
        nearest = np.searchsorted(powers[:-1] * 1.5, a, side="right")
        expected = {"rp": up, "rz": down, "rn": nearest}[rounding]
        assert_same_bits(encode_e8m0(x, rounding), np.minimum(expected, 254).astype(np.uint8))


def same_rule(x):
    """Return a mask of the numbers that ml_dtypes and PyTorch round as "rn" does.

    Their rule differs at 0 and above the range, and they round up all numbers between 2^-127 and 2^-126.
    """
    return (x > 0) & (x < 1.5 * 2.0**127) & ~((x > 2.0**-127) & (x < 1.5 * 2.0**-127))


def test_e8m0_rn_equals_ml_dtypes():
    x = POSITIVE[same_rule(POSITIVE)]
    assert len(x) > 160_000
    assert_same_bits(encode_e8m0(x, "rn"), x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))


@pytest.mark.parametrize("producer", ["ml_dtypes", "torch"])
def test_e8m0_rn_equals_the_recorded_casts(producer, golden):
    x = golden.get("casts", "x__f32/input/bits")
    recorded = golden.get("casts", f"x__f32/{producer}_e8m0/codes")
    assert same_rule(x).sum() > 4000
    assert_same_bits(encode_e8m0(x, "rn")[same_rule(x)], recorded[same_rule(x)])


@pytest.mark.parametrize("rounding", ["rp", "rz", "rn"])
def test_e8m0_specials(rounding):
    x = np.array([0, -0.0, 2.0**-149, 2.0**127, 3.4028235e38, np.inf, -1, -np.inf], np.float32)
    assert encode_e8m0(x, rounding).tolist() == [0, 0, 0, 254, 254, 254, 255, 255]
    assert encode_e8m0(NANS, rounding).tolist() == [255] * len(NANS)


@pytest.mark.parametrize("rounding", ["rp", "rz", "rn"])
def test_e8m0_round_trips(rounding):
    codes = np.arange(255, dtype=np.uint8)
    assert_same_bits(encode_e8m0(decode(codes, E8M0), rounding), codes)
