"""Test codes of elements and of E8M0 scales, and the zero blocks of 4over6."""

import ml_dtypes
import numpy as np
import pytest
from codec_inputs import ALL_16_BITS, NANS, SWEEP
from exhaustive import half
from inputs import BF16, ML_DTYPES, codes_of
from together import together

import fp4kit
from fp4kit.arithmetic import ROUNDINGS, exponent_field, power_of_two
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ELEMENT_FORMATS, INT4, INT8
from fp4kit.reference.codec import SIGNS, block_amax, decode, encode, encode_e8m0, encode_magnitude

FLOATS = tuple(ML_DTYPES)
INTEGERS = (INT4, INT8)
FORMATS = FLOATS + INTEGERS

formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)
floats = pytest.mark.parametrize("fmt", FLOATS, ids=str)
roundings = pytest.mark.parametrize("rounding", ROUNDINGS)


# ---- the oracle ----


def finite_magnitudes(fmt):
    """Return the finite magnitudes of a format in ascending order, from ml_dtypes or, for integers, by counting.

    For integers, the last one is that of the most negative value.
    """
    if fmt in INTEGERS:
        return np.arange(2 ** (fmt.bits - 1) + 1, dtype=np.float64)
    codes = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8)
    values = codes.view(ML_DTYPES[fmt]).astype(np.float64)
    return values[np.isfinite(values)]


def oracle_magnitude(a, magnitudes, rounding):
    """Return the index in `magnitudes` to which each float64 a >= 0 must round. a and the result are arrays.

    The result is exact, because float64 holds the midpoints of these magnitudes.
    """
    low = np.searchsorted(magnitudes, a, side="right") - 1
    high = np.minimum(low + 1, len(magnitudes) - 1)
    if rounding == "rz":
        return low
    middle = (magnitudes[low] + magnitudes[high]) / 2
    tie = {"rn": low % 2 == 1, "rna": True, "rnz": False, "rns": low % 2 == 1, "rnas": True}[rounding]
    below_half = (rounding in ("rns", "rnas")) & (a == np.nextafter(np.float32(magnitudes[1] / 2), np.float32(0)))
    return np.where((a > middle) | (a == middle) & tie | below_half, high, low)


def oracle(x, fmt, rounding):
    """Return the codes to which encode must round x, an array without NaN. Float codes get the sign bit of x."""
    x = np.asarray(x).astype(np.float64)
    index = oracle_magnitude(np.abs(x), finite_magnitudes(fmt), rounding)
    if fmt in INTEGERS:
        value = np.where(np.signbit(x), -index, np.minimum(index, 2 ** (fmt.bits - 1) - 1))
        return (value % 2**fmt.bits).astype(np.uint8)
    return (index + np.signbit(x) * 2 ** (fmt.bits - 1)).astype(np.uint8)


# ---- inputs ----


def edges(fmt):
    """Return edge cases of both signs for a format.

    They are every value and midpoint with both float32 neighbors, numbers beyond the largest, and the ends of float32.
    """
    magnitudes = finite_magnitudes(fmt)
    step = magnitudes[-1] - magnitudes[-2]
    points = np.concatenate(
        [magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2, magnitudes[-1] + step * np.array([0.5, 1, 2])]
    )
    points = points.astype(np.float32)
    assert np.array_equal(points.astype(np.float64)[: len(magnitudes)], magnitudes)
    ends = np.array([0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-10, 1, 1e10, 3.4028235e38, np.inf], np.float32)
    around = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([points, *around, ends])
    return np.concatenate([x, -x])


# ---- decode ----


@together("fmt", ELEMENT_FORMATS)
def test_decode_gives_the_value_of_every_code(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    assert_same_bits(decode(codes, fmt), fmt.values)
    assert_same_bits(decode(codes.reshape(2, -1), fmt), fmt.values.reshape(2, -1))


@pytest.mark.parametrize("fmt", (E2M1, E2M3, E3M2, INT4), ids=str)
def test_decode_ignores_higher_bits(fmt):
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(decode(codes, fmt), fmt.values[codes % 2**fmt.bits])


# ---- encode ----


@formats
@roundings
def test_edges(fmt, rounding):
    x = edges(fmt)
    assert_same_bits(encode(x, fmt, rounding), oracle(x, fmt, rounding))


@formats
@roundings
def test_float32_sweep(fmt, rounding):
    assert_same_bits(encode(SWEEP, fmt, rounding), oracle(SWEEP, fmt, rounding))


@formats
@roundings
@pytest.mark.parametrize("dtype", half([np.float16, BF16]), ids=str)
def test_all_16_bit_floats(fmt, rounding, dtype):
    x = ALL_16_BITS.view(dtype)
    x = x[~np.isnan(x.astype(np.float32))]
    assert_same_bits(encode(x, fmt, rounding), oracle(x, fmt, rounding))


@floats
@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "f64"])
def test_recorded_casts_of_ml_dtypes(fmt, source, golden):
    recorded = golden.get("casts", f"x__{source}/ml_dtypes_{fmt.name.lower()}/codes")
    x = golden.get("casts", "x__f32/input/bits")
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype({"f16": np.float16, "bf16": BF16}.get(source, np.float32)).astype(np.float32)
    same = np.abs(x) <= {E4M3: 464, E5M2: 61439}.get(fmt, np.inf)
    assert same.sum() > 4000
    assert_same_bits(encode(x, fmt)[same], recorded[same])


@pytest.mark.parametrize("fmt", (E4M3, E5M2), ids=str)
def test_recorded_casts_of_pytorch(fmt, golden):
    """encode gives the recorded codes of casts by PyTorch, which saturates E4M3, also for infinities.

    E5M2 overflows to infinity, and NaN keeps its sign.
    """
    recorded = golden.get("casts", f"x__f32/torch_{fmt.name.lower()}/codes")
    x = golden.get("casts", "x__f32/input/bits")
    same = ~np.isnan(x) if fmt is E4M3 else np.abs(x) < 61440
    assert_same_bits(encode(x, fmt)[same], recorded[same])
    nan = np.isnan(x)
    assert nan.any() and np.array_equal(encode(x, fmt)[nan], recorded[nan] & 0x7F)


@formats
@roundings
def test_nan(fmt, rounding):
    assert encode(NANS, fmt, rounding).tolist() == [fmt.nan_code] * len(NANS)
    assert encode(NANS, fmt, rounding, nan_code=0xB).tolist() == [0xB] * len(NANS)
    mixed = encode(np.array([1, np.nan, -1], np.float32), fmt, rounding)
    assert mixed[1] == fmt.nan_code and decode(mixed[[0, 2]], fmt).tolist() == [1, -1]


@floats
@pytest.mark.parametrize(
    "sign, negative",
    [
        ("signbit", [False, True, True, True, False, True]),
        ("negative", [False, False, True, True, False, True]),
        ("not_positive", [True, True, True, True, False, True]),
        ("unsigned_zero", [False, False, False, True, False, True]),
        ("unscaled", [False, True, True, True, False, True]),
    ],
)
def test_signs(fmt, sign, negative):
    x = np.array([0.0, -0.0, -(2.0**-149), -1, 1, -np.inf], np.float32)
    codes = encode(x, fmt, sign=sign)
    assert [bool(code & fmt.sign_bit) for code in codes] == negative
    assert (codes % fmt.sign_bit).tolist() == (encode(np.abs(x), fmt)).tolist()


@pytest.mark.parametrize("sign", SIGNS)
def test_integers_have_one_zero(sign):
    x = np.array([0.0, -0.0, -0.25, 0.5, -0.5], np.float32)
    for fmt in INTEGERS:
        assert encode(x, fmt, sign=sign).tolist() == [0] * 5


@formats
def test_shape_dtype_and_input(fmt):
    x = np.array([[1.0, -2.0], [np.nan, 0.5]], np.float32)
    x.setflags(write=False)
    codes = encode(x, fmt)
    assert (codes.shape, codes.dtype) == ((2, 2), np.uint8)
    assert encode(np.empty((0, 3), np.float32), fmt).shape == (0, 3)
    assert int(encode(np.float32(1), fmt)) == codes[0, 0] and int(encode(np.float32(np.nan), fmt)) == codes[1, 0]


@floats
@roundings
def test_encode_magnitude_is_encode_of_the_absolute_value(fmt, rounding):
    x = edges(fmt)
    assert_same_bits(encode_magnitude(np.abs(x), fmt, rounding), encode(np.abs(x), fmt, rounding))


# ---- helpers ----


def test_power_of_two():
    exponents = np.arange(-126, 128)
    assert_same_bits(power_of_two(exponents), np.ldexp(np.float32(1), exponents))


def test_exponent_field():
    x = np.array([0, -0.0, 2.0**-149, 2.0**-126, 1, -1.5, 3.4e38, np.inf, np.nan], np.float32)
    assert exponent_field(x).tolist() == [0, 0, 0, 1, 127, 127, 254, 255, 255]


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


def four_over_six(x, amax, error, scale_max):
    """Return the scale and the values of one block (rows, 16), computed in scalar float32.

    The block's largest element becomes 6, or 4 if that has the smaller error. Errors are summed along each row in
    order. The sums of 16 rows are added as a tree: row i with i + 8, then + 4, + 2, + 1.

    amax: the tensor amax.
    error: "mae" to sum absolute errors, "mse" to sum their squares.
    scale_max: the largest block scale of the recipe, 448 or 256.
    """
    f, full = np.float32, np.float32(6 * scale_max)
    encode_scale = full / amax
    base = np.abs(x).max() / f(6) * encode_scale
    candidates = []
    for times in (f(1), f(1.5)):
        scale = np.minimum(base * times, f(448)).astype(ml_dtypes.float8_e4m3fn).astype(f)
        values = (x * (f(1) / (scale * (f(1) / encode_scale)))).astype(ml_dtypes.float4_e2m1fn).astype(f)
        rows = []
        for row, exact in zip(values, x, strict=True):
            differences = [v * scale * amax / full - e for v, e in zip(row, exact, strict=True)]
            terms = [abs(d) if error == "mae" else d * d for d in differences]
            rows.append(sum(terms[1:], start=terms[0]))
        while len(rows) > 1:
            rows = [a + b for a, b in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)]
        candidates.append((rows[0], scale, values))
    return min(candidates, key=lambda candidate: candidate[0])[1:]  # for equal errors the first candidate, 6


# (seed, index) of blocks. In some of them the chosen scale depends on the order of the rows' sums; others are ordinary.
SUMS = [(4, 3387), (8, 865), (0, 0), (0, 1), (0, 2), (1, 3999)]


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("scale_max", [448, 256])
@pytest.mark.parametrize("seed, block", SUMS)
def test_four_over_six_of_a_block(error, scale_max, seed, block):
    x = np.random.default_rng(seed).standard_normal((16, 64_000)).astype(np.float32)[:, 16 * block : 16 * block + 16]
    x = np.round(x * 4) / 4  # few distinct values, so that errors are often nearly equal
    amax = np.float32(5.3)
    for name, rows in ((f"nvfp4-te-4over6-{error}-{scale_max}-2d", x), (f"nvfp4-te-4over6-{error}-{scale_max}", x[:1])):
        q = fp4kit.quantize(rows, name, tensor_amax=amax)
        scale, values = four_over_six(rows, amax, error, scale_max)
        assert_same_bits(decode(q.block_scale, E4M3), np.full((len(rows), 1), scale))
        assert np.array_equal(decode(codes_of(q), E2M1), values)


def test_nan_elements_of_two_lanes():
    """FlashInfer's amax is NaN only if all elements at odd indices are; otherwise NaN elements are left out."""
    x = np.ones((4, 16), np.float32)
    x[0, 1], x[0, 2], x[1, 0], x[1, 3] = 5, np.nan, 7, np.nan
    x[2, ::2] = x[3, 1::2] = np.nan
    assert block_amax(x, fp4kit.recipe("nvfp4-flashinfer"))[:3, 0].tolist() == [5, 7, 1]
    assert np.isnan(block_amax(x, fp4kit.recipe("nvfp4-flashinfer"))[3, 0])
