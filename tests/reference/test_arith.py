"""Test the arithmetic of the specification: instructions of GPUs, powers, rotations and sums of matrix products."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, FINITE, NAMES, ORDINARY
from powers import POWERS, errors
from products import drawn, of_cards, of_tcgen05, recorded
from rotations import SIZES, orthogonal
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import (
    INV6,
    PART,
    divide_ftz,
    flush,
    fma,
    multiply_ftz,
    narrow_float64,
    power,
    reciprocal_approx_ftz,
)
from fp4kit.reference.stochastic import hadamard_blocks, random_signs, stream_bytes

TINY = np.float32(2.0**-126)  # the smallest normal number
SMALL = [0, 2.0**-149, 2.0**-130, 2.0**-127, 2.0**-126 - 2.0**-149, 2.0**-126, 1.5 * 2.0**-126, 2.0**-63]
SPECIAL = np.float32([*SMALL, 0.1, 0.5, 1, 4, 6, 1e19, 2.0**126, 3.4028235e38, np.inf])
SPECIAL = np.concatenate([SPECIAL, -SPECIAL, np.float32([np.nan])])


def all_pairs():
    """Return two arrays that hold every pair of special values, and random pairs."""
    some = np.random.default_rng(0).integers(0, 2**32, (2, 20_000), np.uint32).view(np.float32)
    return (np.append(m, more) for m, more in zip(np.meshgrid(SPECIAL, SPECIAL), some, strict=True))


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


# Digest of the bits of power(errors(), p) for each p in turn, NaN excluded. Every machine must give this digest.
DIGEST = "7fc9ce2ee527ad23adfdf2c43fb6530c8634c542372e881e54edbf8f460bbaa8"


@pytest.mark.parametrize("p", POWERS)
def test_power_is_near_the_exact_value(p) -> None:
    """The power of each error is within the documented distance of the value computed with 40 decimal digits."""
    n, d = int(p), errors()[::37]
    d = d[(d > 1e-18) & (d < 1e18)]
    with localcontext() as context:
        context.prec = 40
        exact = [Decimal(x) ** Decimal(p) for x in d.tolist()]
        error = np.array([float(abs(Decimal(y) / x - 1)) for x, y in zip(exact, power(d, p).tolist(), strict=True)])
    assert len(d) > 100 and (error <= (n + 4 + 2 * abs((p - n) * np.log2(d))) * 2.0**-53).all()
    with np.errstate(over="ignore", under="ignore"):
        singles = np.array([float(x) for x in exact]).astype(np.float32)
        # After rounding to float32, all of these powers equal the exact ones. In general, one in a million differs.
        assert (power(d, p).astype(np.float32) == singles).all()


def test_the_same_bits_on_every_machine() -> None:
    with np.errstate(all="ignore"):
        found = [power(errors(), p) for p in POWERS]
    assert sha256(b"".join(np.where(np.isnan(a), 0, a).astype("<f8").tobytes() for a in found)).hexdigest() == DIGEST


def test_whole_powers_are_products() -> None:
    d = errors()[:500]
    with np.errstate(all="ignore"):
        for p, expected in ((1, d), (2, d * d), (3, d * d * d), (4, (d * d) * (d * d)), (5, (d * d) * (d * d) * d)):
            np.testing.assert_array_equal(power(d, p), expected)
    whole = np.arange(9.0)
    for p in range(1, 17):
        assert power(whole, p).tolist() == [n**p for n in range(9)]


@pytest.mark.parametrize("p", [1.0, 1.0000001, 1.5, 2.4, 2.9999999, 16.0])
def test_powers_of_zero_infinity_and_nan(p) -> None:
    with np.errstate(all="ignore"):
        found = power(np.array([0, 2.0**-149, 1, 2.0**128, 2.0**1023, np.inf, np.nan, -np.nan]), p)
    assert found[0] == 0 and found[2] == 1 and found[5] == np.inf and np.isnan(found[6:]).all()
    assert all(a <= b for a, b in pairwise(found[:6]))


def test_any_shape_and_parts() -> None:
    d = np.abs(np.random.default_rng(0).standard_normal((3, PART // 2 + 5)))
    before, found = d.tobytes(), power(d.T, 1.7)
    assert found.shape == d.T.shape and d.tobytes() == before
    for first in range(0, d.shape[1], 1000):
        np.testing.assert_array_equal(found.T[:, first : first + 1000], power(d[:, first : first + 1000], 1.7))
    assert power(d[:0], 2.4).shape == (0, d.shape[1]) and power(np.float64(4), 1.5) == 8


recipes = pytest.mark.parametrize("name", NAMES)


def sylvester(size):
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


TE_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


@pytest.mark.parametrize("hadamard, signs", [(True, TE_SIGNS), ("no_signs", np.ones(16))])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_hadamard_is_the_matrix_product(hadamard, signs, dtype):
    """The transform equals the product with its matrix, rounded once.

    Inputs are integers below 2^8, so that every float64 sum is exact.
    """
    x = np.random.default_rng(0).integers(-255, 256, (8, 64)).astype(dtype)
    expected = x.astype(np.float64).reshape(-1, 16) @ (signs[:, None] * sylvester(16) / 4)
    transformed = hadamard_blocks(x) if hadamard is True else hadamard_blocks(x, 0)
    assert_same_bits(transformed, expected.reshape(x.shape).astype(dtype))


def test_the_order_of_hadamard_sums():
    """The transform adds in the documented order, so that every device gives equal bits.

    The order decides the bits if float64 sums round and then cancel.
    """
    rng = np.random.default_rng(2)
    x = (1000 * rng.standard_normal((64, 16))).astype(np.float32)
    x[:, 3], x[:, 9] = 2.0**60, -(2.0**60)
    expected = [by_butterflies([float(v) * int(s) for v, s in zip(block, TE_SIGNS, strict=True)], 16) for block in x]
    assert_same_bits(hadamard_blocks(x), (np.array(expected) / 4).astype(np.float32))


@recipes
@pytest.mark.parametrize("hadamard", [True, "no_signs"])
def test_hadamard_comes_before_everything(name, hadamard):
    for x in (ORDINARY, FINITE["bf16"]):
        transformed = hadamard_blocks(x) if hadamard is True else hadamard_blocks(x, 0)
        assert_same_bits(fp4kit.quantize(x, name, hadamard=hadamard), fp4kit.quantize(transformed, name))


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, 0x7F800001), (np.float16, 0x7C01), (BF16, 0x7F81)])
def test_a_signalling_nan_gives_nan_and_no_warning(dtype, bits):
    x = np.ones((2, 32), dtype)
    x.view(f"u{x.itemsize}")[:, 3] = bits
    y = hadamard_blocks(x).astype(np.float32)
    assert np.isnan(y[:, :16]).all() and np.isfinite(y[:, 16:]).all()


F32 = np.float32


def test_impulses_give_the_rows_of_the_matrix():
    with fp4kit.specification():
        for size in SIZES:
            factor = F32(1 / np.sqrt(np.float64(size)))
            signs = fp4kit.random_signs(size, 5)
            rows = signs[:, None] * sylvester(size) * factor
            assert_same_bits(fp4kit.hadamard(np.eye(size, dtype=F32), size, seed=5), rows.astype(F32))
            columns = fp4kit.hadamard(np.eye(size, dtype=F32), size, signs=signs, inverse=True)
            assert_same_bits(columns, np.ascontiguousarray(rows.T).astype(F32))


def by_butterflies(block, size):
    """Return the unscaled Hadamard transform of a list of numbers, one addition after the other."""
    y = list(block)
    distance = 1
    while distance < size:
        y = [y[i ^ distance] - y[i] if i & distance else y[i] + y[i ^ distance] for i in range(size)]
        distance *= 2
    return y


def test_the_order_of_the_sums_of_hadamard():
    """Large elements that cancel make the order of the sums visible in the bits."""
    rng = np.random.default_rng(2)
    with fp4kit.specification():
        for size in SIZES:
            x = rng.standard_normal((2, size)).astype(F32) * F32(1000)
            x[:, 3], x[:, 9] = 2.0**30, -(2.0**30)
            factor = F32(1 / np.sqrt(np.float64(size)))
            expected = np.array([by_butterflies(block, size) for block in x]) * factor
            assert_same_bits(fp4kit.hadamard(x, size), expected)
            assert (expected != np.array(by_butterflies(x[0, ::-1], size)[::-1]) * factor).any()


def test_the_order_of_the_sums_of_rotate():
    rng = np.random.default_rng(3)
    n = 5
    x = (rng.standard_normal((3, 2 * n)) * np.exp2(rng.integers(0, 20, (3, 2 * n)))).astype(F32)
    matrices = orthogonal(rng, 2, n)
    expected = np.empty_like(x)
    for row, block, j in np.ndindex(3, 2, n):
        total = x[row, block * n] * matrices[block, 0, j]
        for i in range(1, n):
            total = total + x[row, block * n + i] * matrices[block, i, j]
        expected[row, block * n + j] = total
    with fp4kit.specification():
        assert_same_bits(fp4kit.rotate(x, matrices), expected)
        assert_same_bits(fp4kit.rotate(x, matrices.swapaxes(1, 2), inverse=True), expected)


def test_signs_of_a_seed():
    signs = random_signs(512, 11)
    assert signs.dtype == np.int8 and (signs == np.where(stream_bytes(11, 0, 512) < 128, 1, -1)).all()
    assert 200 < (signs == 1).sum() < 312 and (signs != random_signs(512, 12)).any()


RECORDED = [*recorded("mma_sim"), *recorded("h100")]


@together("case", RECORDED, ids=lambda case: case.name)
def test_recorded_products(case) -> None:
    """matmul gives every bit of the recorded products, which MMA-Sim and an H100 computed."""
    dtype = ml_dtypes.bfloat16 if case.d.dtype.itemsize == 2 else np.float32
    with fp4kit.specification():
        d = fp4kit.matmul(case.a, case.b, unit=case.unit, c=case.c, out_dtype=dtype)
    bits = f"u{case.d.dtype.itemsize}"
    np.testing.assert_array_equal(d.view(bits), case.d.view(bits))


def test_the_recorded_products_use_every_unit() -> None:
    hardware = {unit.id for unit in fp4kit.units() if unit.order is None}
    elsewhere = [*of_cards(), *of_tcgen05()]  # in tests/ops/test_matmul.py
    assert {case.unit.id for case in [*RECORDED, *elsewhere]} == hardware


@pytest.mark.parametrize("kind", ["nvfp4", "mx-e3m2", "bf16", "e5m2"])
def test_exact_is_the_exact_sum_rounded_once(kind) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = (drawn(rng, kind, 3, 64) for _ in range(2))
        c = (rng.standard_normal((3, 3)) * 2.0 ** rng.integers(-140, 20, (3, 3))).astype(np.float32)
        x, y = (values(q) for q in (a, b))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        with fp4kit.specification():
            d = fp4kit.matmul(a, b, unit="exact", c=c, alpha=1)
        for m, n in np.ndindex(3, 3):
            total = Fraction(float(c[m, n])) + sum(map(product, x[m].tolist(), y[n].tolist()))
            assert_nearest(d[m, n], total)


def values(q) -> np.ndarray:
    """Return an operand's elements times their block scales, without the tensor scale, in float64."""
    if isinstance(q, np.ndarray):
        with np.errstate(invalid="ignore"):  # signaling NaN
            return q.astype(np.float64)
    elements = q.recipe.element.values[fp4kit.unpack(q.packed) if q.recipe.element.bits == 4 else q.packed]
    scales = np.abs(q.recipe.scale.values[q.block_scale].astype(np.float64))
    return elements * scales.repeat(q.recipe.block_size, axis=-1)


def product(x: float, y: float) -> Fraction:
    return Fraction(x) * Fraction(y)


def assert_nearest(d: np.float32, exact: Fraction) -> None:
    """Assert that no float32 is nearer to `exact` than d, and that d is even in a tie."""
    if abs(exact) >= 2**128 - 2**103:
        assert np.isinf(d) and (d > 0) == (exact > 0)
        return
    error = abs(Fraction(float(d)) - exact)
    for neighbour in (np.nextafter(d, np.float32(np.inf)), np.nextafter(d, np.float32(-np.inf))):
        if np.isfinite(neighbour):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and d.view(np.uint32) % 2 == 0)


@pytest.mark.parametrize("power", [-75, -60, 0, 40])
def test_fma_is_rounded_once(power) -> None:
    """a * b is half the distance of two float32 numbers around c, or less by 2^-46 of it, which float64 cuts off."""
    integers = np.random.default_rng(0).integers(1 << 23, 1 << 24, 100) >> (power == -75)
    c, half = np.ldexp(np.float32(integers), 2 * power + 1), np.ldexp(np.float32(1), power)
    for a, b in ((half, half), (-half, half), *((half * s, half * t) for s, t in ((BELOW, ABOVE), (-BELOW, ABOVE)))):
        for total, term in zip(fma(a, b, c), c, strict=True):
            assert_nearest(total, Fraction(float(a)) * Fraction(float(b)) + Fraction(float(term)))


BELOW, ABOVE = np.float32([1 - 2.0**-23, 1 + 2.0**-23])


def test_float32_blocks_are_the_sums_of_a_loop() -> None:
    rng = np.random.default_rng(2)
    a, b = drawn(rng, "nvfp4", 5, 96), drawn(rng, "nvfp4", 7, 96)
    with fp4kit.specification(), np.errstate(all="ignore"):
        d = fp4kit.matmul(a, b, unit="float32-blocks", alpha=1)
        x, y = (q.recipe.element.values[fp4kit.unpack(q.packed)] for q in (a, b))
        sa, sb = (np.abs(q.recipe.scale.values[q.block_scale]) for q in (a, b))
        for m, n in np.ndindex(5, 7):
            total = np.float32(0)
            for i in range(6):
                block = slice(16 * i, 16 * i + 16)
                total = total + (sa[m, i] * sb[n, i]) * np.float32(np.dot(x[m, block], y[n, block]))
            assert total == d[m, n] or np.isnan(total)


def test_sums_keep_the_bits_that_the_unit_keeps() -> None:
    """A sum of 4,096 equal products loses the bits that a unit does not keep.

    Hopper's FP8 sum keeps 13 bits behind the point, so it stops growing by whole products.
    """
    a, b = (np.full((1, 4096), x, ml_dtypes.float8_e4m3fn) for x in (1.125, 1.25))
    found = {unit: float(fp4kit.matmul(a, b, unit=unit)[0, 0]) for unit in ("exact", "sm100", "sm90", "sm89")}
    assert found == {"exact": 5760.0, "sm100": 5760.0, "sm90": 5080.0, "sm89": 5073.5}
