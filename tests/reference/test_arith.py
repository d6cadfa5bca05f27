"""Test float32 arithmetic as GPUs do it: subnormals are flushed, and the approximate reciprocal is that of sm_90.

The reciprocal is checked for every significand.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import INV6, divide_ftz, flush, multiply_ftz, narrow_float64, reciprocal_approx_ftz

TINY = np.float32(2.0**-126)  # the smallest normal number
SPECIAL = np.array(
    [
        0,
        2.0**-149,
        2.0**-127,
        2.0**-126 - 2.0**-149,
        2.0**-126,
        2.0**-63,
        0.1,
        1,
        6,
        1e19,
        2.0**126,
        3.4028235e38,
        np.inf,
    ],
    np.float32,
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL, np.float32([np.nan])])


def all_pairs():
    a, b = (m.reshape(-1) for m in np.meshgrid(SPECIAL, SPECIAL))
    return a, b


def test_flush():
    x = np.array([2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1, np.inf, 0], np.float32)
    x = np.concatenate([x, -x])
    expected = np.array([0, 0, 2.0**-126, 1, np.inf, 0], np.float32)
    assert_same_bits(flush(x), np.concatenate([expected, -expected]))
    assert np.isnan(flush(np.array([np.nan], np.float32)))[0]


def test_flush_of_every_exponent_and_sign():
    high = np.arange(0x10000, dtype=np.uint32) << 16
    x = np.concatenate([high, high | 0xFFFF]).view(np.float32)
    x = x[~np.isnan(x)]
    bits = x.view(np.uint32)
    subnormal = bits & 0x7F800000 == 0
    assert_same_bits(flush(x), np.where(subnormal, bits & 0x80000000, bits).astype(np.uint32).view(np.float32))


def exact_ftz(operation, a, b):
    """Return operation(a, b) in float32, with subnormal operands and results flushed to zeros of their sign.

    operation: a function of float64 arrays. Rounding its result to float64 and then to float32 equals one rounding.
    """
    a, b = (np.where(np.abs(v) < TINY, np.copysign(0.0, v), v.astype(np.float64)) for v in (a, b))
    with np.errstate(all="ignore"):
        y = operation(a, b).astype(np.float32)
    return np.where(np.abs(y) < TINY, np.copysign(np.float32(0), y), y)


@pytest.mark.parametrize("ours, plain", [(multiply_ftz, np.multiply), (divide_ftz, np.divide)])
def test_ftz_operations_on_special_values(ours, plain):
    a, b = all_pairs()
    with np.errstate(all="ignore"):
        y, expected = ours(a, b), exact_ftz(plain, a, b)
    nan = np.isnan(expected)
    assert y.dtype == np.float32
    assert np.array_equal(np.isnan(y), nan)
    assert_same_bits(y[~nan], expected[~nan])


def test_ftz_operations_flush():
    tiny, small = np.float32([2.0**-126]), np.float32([2.0**-130])
    assert_same_bits(multiply_ftz(-small, np.float32([2.0**100])), np.float32([-0.0]))  # the operand is flushed
    assert_same_bits(multiply_ftz(-tiny, np.float32([0.5])), np.float32([-0.0]))  # the result is flushed
    assert_same_bits(multiply_ftz(tiny, np.float32([1.5])), np.float32([1.5 * 2.0**-126]))
    with np.errstate(divide="ignore"):
        assert_same_bits(divide_ftz(np.float32([1.0]), -small), np.float32([-np.inf]))
    assert_same_bits(divide_ftz(tiny, np.float32([4.0])), np.float32([0.0]))


pairs = st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2)


@given(pairs)
def test_ftz_operations_on_any_floats(pair):
    a, b = (np.float32([v]) for v in pair)
    with np.errstate(all="ignore"):
        assert_same_bits(multiply_ftz(a, b), exact_ftz(np.multiply, a, b))
        if flush(b)[0] != 0:
            assert_same_bits(divide_ftz(a, b), exact_ftz(np.divide, a, b))


# ---- rcp.approx.ftz.f32 ----


def test_reciprocal_of_every_significand():
    """For every significand, the approximate reciprocal is within 1 ulp of the correctly rounded one.

    The numbers of results that are exact, too low and too high equal those counted on an H200.
    """
    counts = np.zeros(3, np.int64)  # below, exact, above
    for start in range(0, 2**23, 2**20):
        x = (np.arange(start, start + 2**20, dtype=np.uint32) | 0x3F800000).view(np.float32)
        rounded = (1 / x.astype(np.float64)).astype(np.float32)
        ulps = reciprocal_approx_ftz(x).view(np.int32) - rounded.view(np.int32)
        assert np.abs(ulps).max() <= 1
        counts += np.bincount(ulps + 1, minlength=3)
    assert counts.tolist() == [374_723, 7_280_086, 733_799]


def test_reciprocal_of_powers_of_two_is_exact():
    exponents = np.arange(-126, 127)
    x = np.ldexp(np.float32(1), exponents)
    for sign in (1, -1):
        assert_same_bits(reciprocal_approx_ftz(sign * x), sign * np.ldexp(np.float32(1), -exponents))


@pytest.mark.parametrize("exponent", [-126, -125, -64, -1, 1, 64, 125])
def test_the_exponent_only_scales(exponent):
    x = (np.random.default_rng(1).integers(0, 2**23, 10_000, dtype=np.uint32) | 0x3F800000).view(np.float32)
    scaled = np.ldexp(x, exponent)
    assert_same_bits(reciprocal_approx_ftz(scaled), np.ldexp(reciprocal_approx_ftz(x), -exponent))
    assert_same_bits(reciprocal_approx_ftz(-scaled), -reciprocal_approx_ftz(scaled))


def test_reciprocal_of_6_is_the_rounded_sixth():
    assert INV6.view(np.uint32) == 0x3E2AAAAB
    assert_same_bits(reciprocal_approx_ftz(np.float32([6])), INV6.reshape(1))


def test_reciprocals_below_the_normal_range_are_zero():
    x = np.float32([2.0**126, np.nextafter(np.float32(2.0**126), np.float32(np.inf)), 2.0**127, 3.4028235e38])
    assert_same_bits(reciprocal_approx_ftz(x), np.float32([2.0**-126, 0, 0, 0]))
    assert_same_bits(reciprocal_approx_ftz(-x), np.float32([-(2.0**-126), -0.0, -0.0, -0.0]))


def test_reciprocal_of_specials():
    x = np.float32([0, 2.0**-149, 2.0**-126 - 2.0**-149, np.inf])
    assert_same_bits(reciprocal_approx_ftz(x), np.float32([np.inf, np.inf, np.inf, 0]))
    assert_same_bits(reciprocal_approx_ftz(-x), np.float32([-np.inf, -np.inf, -np.inf, -0.0]))
    assert np.isnan(reciprocal_approx_ftz(np.float32([np.nan, -np.nan]))).all()


def test_reciprocal_keeps_shape_and_input():
    x = np.full((3, 4), 3, np.float32)
    x.setflags(write=False)
    y = reciprocal_approx_ftz(x)
    assert (y.shape, y.dtype) == ((3, 4), np.float32)
    assert float(reciprocal_approx_ftz(np.float32(4))) == 0.25


def test_tiny_is_decided_before_rounding_to_subnormals():
    """A product is flushed if it is below 2^-126 after rounding to 24 significant bits, like on an H200.

    A product of (1 - 2^-24) * 2^-126 is flushed; a product of (1 - 2^-26) * 2^-126 becomes 2^-126.
    """
    smallest, half = np.float32(2.0**-126), np.float32(2.0**-63)
    below = np.nextafter(np.float32(1), np.float32(0))
    assert multiply_ftz(below, smallest) == 0 and below * smallest == smallest
    up, down = half * np.float32(1 + 2.0**-13), half * np.float32(1 - 2.0**-13)
    assert multiply_ftz(up, down) == smallest
    assert multiply_ftz(half * np.float32(1 + 2.0**-12), half * np.float32(1 - 2.0**-12)) == 0
    assert divide_ftz(half * below, np.float32(2.0**63)) == 0
    assert divide_ftz(half, np.float32(2.0**63)) == smallest


def test_float64_is_rounded_once():
    """float64 is rounded to bfloat16 directly: values beside a tie would round wrongly through float32.

    float16 and float32 results are rounded by NumPy.
    """
    tie = 6096.0  # between the bfloat16 neighbors 6080 (even) and 6112
    x = np.array([tie, tie * (1 + 2.0**-40), tie * (1 - 2.0**-40), -tie * (1 + 2.0**-40), np.inf, np.nan, 0.0, 1e-300])
    found = narrow_float64(x, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    np.testing.assert_array_equal(found, [6080, 6112, 6080, -6112, np.inf, np.nan, 0, 0])
    half = np.array([2049 * (1 + 2.0**-40), 2049.0])
    assert narrow_float64(half, np.dtype(np.float16)).tolist() == [2050, 2048]
