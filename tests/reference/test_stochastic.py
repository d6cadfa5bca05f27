"""Test stochastic rounding: the random stream byte for byte, the possible results, their mean, and seeds."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import agree
from exhaustive import half
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16, ORDINARY, STOCHASTIC, as_strided, codes_of, ordinary
from philox import philox
from together import together

import fp4kit
from fp4kit.call.inputs import torch_words
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.stochastic import encode_stochastic, encode_stochastic_float16, stream_bytes

PHILOX = [name for name in STOCHASTIC if RECIPES[name].stochastic == "te"]  # recipes whose seeds are keys of Philox


def random_byte(seed, i):
    """Return the random byte of element i, as documented.

    It is byte i % 16, little-endian, of the words of counter i // 16.
    """
    counter = i // 16
    words = philox((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return b"".join(word.to_bytes(4, "little") for word in words)[i % 16]


def test_philox_of_the_paper():
    """The words equal the known answers of Random123 for philox4x32-10."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@together("seed", [0, 1, 2**32, 2**63 + 12345])
@together("start", [0, 1, 15, 16, 1000, 2**36 - 3, 2**40 + 7])
def test_the_stream(seed, start):
    assert stream_bytes(seed, start, 40).tolist() == [random_byte(seed, start + i) for i in range(40)]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 2**45))
def test_any_cut_of_the_stream_is_the_same_stream(seed, lengths, start):
    whole = stream_bytes(seed, start, sum(lengths))
    ends = start + np.cumsum([0, *lengths])
    parts = [stream_bytes(seed, int(a), int(n)) for a, n in zip(ends, lengths, strict=False)]
    assert_same_bits(np.concatenate([np.empty(0, np.uint8), *parts]), whole)


@pytest.mark.parametrize("name", PHILOX)
def test_the_seed_means_the_documented_bytes(name):
    stream = stream_bytes(7, 0, ORDINARY.size).reshape(ORDINARY.shape)
    for axis, random in ((1, stream), (0, stream.T)):
        by_seed = fp4kit.quantize(ORDINARY, name, axis=axis, rounding="stochastic", seed=7)
        assert_same_bits(fp4kit.quantize(ORDINARY, name, axis=axis, rounding="stochastic", seed=random), by_seed)


@pytest.mark.parametrize("name", PHILOX)
@pytest.mark.parametrize("view", ["contiguous", "strided"])
def test_the_stream_runs_through_all_dimensions(name, view):
    x = ordinary(16, (2, 3, 32, 128))
    seen = x if view == "contiguous" else as_strided(x)
    random = stream_bytes(9, 0, x.size).reshape(x.shape)
    q = fp4kit.quantize(seen, name, rounding="stochastic", seed=9)
    assert_same_bits(fp4kit.quantize(seen, name, rounding="stochastic", seed=random), q)
    assert_same_bits(fp4kit.quantize(x, name, rounding="stochastic", seed=as_strided(random)), q)


@pytest.mark.parametrize("name", PHILOX)
def test_seeds(name):
    seeds = (1, np.int64(1), 2**64 - 1, 2, 2**32 + 1)
    one, same, *others = (fp4kit.quantize(ORDINARY, name, rounding="stochastic", seed=s) for s in seeds)
    assert_same_bits(one, same)
    assert all(not np.array_equal(one.packed, other.packed) for other in others)
    if one.block_scale is not None:
        assert_same_bits(one.block_scale, fp4kit.quantize(ORDINARY, name).block_scale)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in STOCHASTIC
        if RECIPES[name].sign != "unsigned_zero" and not RECIPES[name].search and RECIPES[name].stochastic == "te"
    ],
)
def test_byte_0_rounds_toward_zero(name):
    """A random byte of 0 truncates.

    Recipes with unsigned zeros are an exception: here their zeros keep the product's sign.
    """
    x = np.where(ORDINARY == 0, np.float32(1), ORDINARY)
    zeros = fp4kit.quantize(x, name, rounding="stochastic", seed=np.zeros(x.shape, np.uint8))
    assert_same_bits(zeros, fp4kit.quantize(x, replace(RECIPES[name], rounding="rz", fake_rule=None)))


# In float16, a magnitude just below a power of two may become the second value below it.
@pytest.mark.parametrize("name", PHILOX)
def test_stochastic_rounding_gives_a_neighbour(name):
    down = fp4kit.quantize(ORDINARY, name, rounding="stochastic", seed=np.zeros(ORDINARY.shape, np.uint8))
    q = fp4kit.quantize(ORDINARY, name, rounding="stochastic", seed=3)
    step = codes_of(q).astype(int) - codes_of(down)
    assert set(np.unique(step)) == {0, 1}
    assert 0.2 < step.mean() < 0.6  # about a half; less where small values lie near zero


@pytest.mark.parametrize("fmt", half([E2M1, E2M3, E3M2, E4M3, E5M2]), ids=str)
def test_the_mean_is_low_by_at_most_a_256th_of_a_step(fmt):
    """Over all 256 random bytes, 0 <= |x| - mean < step / 256, where step is the distance of two values.

    Inputs are multiples of step / 1024, so that every sum is exact.
    """
    a = fmt.magnitudes.astype(np.float64)
    steps = np.diff(a)
    x = (a[:-1, None] + steps[:, None] * np.arange(0, 1024, 7) / 1024).reshape(-1)
    step = np.repeat(steps, 147)
    random = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(x), 256))
    for sign in (1, -1):
        codes = encode_stochastic(np.repeat((sign * x).astype(np.float32)[:, None], 256, axis=1), fmt, random)
        low = x - sign * decode(codes, fmt).astype(np.float64).mean(axis=1)
        assert np.all((low >= 0) & (low < step / 256))


def test_the_mean_of_the_stream_is_unbiased():
    """A value between two codes rounds up as often as its distance requires, within five standard deviations."""
    x = np.full((512, 32), 2.3, np.float32)
    x[:, ::16] = 6
    q = fp4kit.quantize(x, "mxfp4-ocp", rounding="stochastic", seed=1)
    chosen = fp4kit.dequantize(q)[x != 6]
    assert set(np.unique(chosen)) == {2, 3}
    deviation = np.sqrt(0.3 * 0.7 / chosen.size)
    assert abs(chosen.mean() - (2.3 - 0.5 / 256)) < 5 * deviation


def test_stochastic_rounding_of_specials():
    """For any random byte, infinities saturate, zeros keep their sign, and NaN gives the largest value or the format's
    NaN.
    """
    x = np.array([np.inf, -np.inf, 7, -7, 0.0, -0.0, np.nan, -np.nan], np.float32)
    for byte in (0, 128, 255):
        random = np.full(len(x), byte, np.uint8)
        assert encode_stochastic(x, E2M1, random).tolist() == [7, 15, 7, 15, 0, 8, 7, 7]
        assert encode_stochastic(x * 100, E4M3, random).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0, 0x80, 0x7F, 0x7F]


def in_float16(x, random, fmt):
    """Return x rounded stochastically by comfy-kitchen's formulas, every step a NumPy operation in float16.

    x: float16, at most fmt.max in magnitude.
    """
    half, emin, steps = np.float16, np.float16(fmt.emin), np.float16(2**fmt.mantissa_bits)
    a = np.abs(x)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(a.astype(np.float64)).astype(np.float32).astype(half))
        is_normal = exponent >= emin
        power = np.exp2(np.where(is_normal, exponent, emin).astype(np.float32)).astype(half)
        scaled = np.where(is_normal, (a / power - half(1)) * steps, a / half(2.0 ** (fmt.emin - fmt.mantissa_bits)))
        mantissa = np.floor(scaled + random.astype(half) * half(1 / 256)) / steps
        values = np.where(is_normal, power * (half(1) + mantissa), half(2.0**fmt.emin) * mantissa)
    assert scaled.dtype == mantissa.dtype == values.dtype == half
    return np.where(a == 0, half(0), np.copysign(np.minimum(values, half(fmt.max)), x))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_rounding_in_float16(fmt, either_engine):
    """All float16 numbers up to the largest value, with four random bytes, get the codes of comfy-kitchen."""
    x = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    x = x[x <= fmt.max][: (x <= fmt.max).sum() // 64 * 64].reshape(-1, 64)
    name = "fp8-comfy-kitchen" + "-e5m2" * (fmt == E5M2)
    exact = changed = 0
    for byte in (0, 1, 128, 255):
        for signed in (x, -x):
            random = np.full(x.shape, byte, np.uint8)
            expected = encode(in_float16(signed, random, fmt).astype(np.float32), fmt)
            assert_same_bits(encode_stochastic_float16(signed.astype(np.float32), fmt, random), expected)
            found = fp4kit.quantize(signed, name, tensor_amax=fmt.max, rounding="stochastic", seed=random)
            assert_same_bits(found.packed, expected)
            changed += int((encode_stochastic(signed.astype(np.float32), fmt, random) != expected).sum())
            exact += expected.size
    assert 0 < changed < exact / 50  # mostly numbers just below a power of two
    assert encode_stochastic_float16(np.float32([np.nan, np.inf, -1e9, -0.0]), fmt, np.zeros(4, np.uint8)).tolist() == [
        fmt.nan_code,
        fmt.max_code,
        fmt.max_code | 128,
        0,
    ]


NVFP4, FP8 = "nvfp4-comfy-kitchen-stochastic", "mxfp8-comfy-kitchen"
DRAWN = ordinary(3, (32, 64))


def mt19937(seed, count):
    """Return the first words of the Mersenne Twister, as Matsumoto and Nishimura state it. count: at most 624."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + i) & 0xFFFFFFFF)
    words = []
    for i in range(count):
        y = state[i] & 0x80000000 | state[(i + 1) % 624] & 0x7FFFFFFF
        y = state[i] = state[(i + 397) % 624] ^ y >> 1 ^ (0x9908B0DF if y & 1 else 0)
        y ^= y >> 11
        y ^= y << 7 & 0x9D2C5680
        y ^= y << 15 & 0xEFC60000
        words.append(y ^ y >> 18)
    return words


@pytest.mark.parametrize("seed", [0, 1, 5489, 2**32 - 1])
def test_the_words_are_those_of_the_mersenne_twister(seed):
    assert torch_words(seed, 600).tolist() == mt19937(seed, 600)
    assert_same_bits(torch_words(seed + 2**40, 600), torch_words(seed, 600))  # only the low 32 bits count


@pytest.mark.parametrize("recipe", [FP8, "fp8-comfy-kitchen", "fp8-comfy-kitchen-e5m2"])
def test_a_seed_gives_the_lowest_bytes_of_words(recipe, either_engine):
    random = torch_words(11, DRAWN.size).astype(np.uint8).reshape(DRAWN.shape)
    for axis in (1, 0):
        q = fp4kit.quantize(DRAWN, recipe, axis=axis, rounding="stochastic", seed=11)
        assert_same_bits(fp4kit.quantize(DRAWN, recipe, axis=axis, rounding="stochastic", seed=random), q)


def test_the_bytes_of_torch():
    torch = pytest.importorskip("torch")
    drawn = torch.randint(0, 256, DRAWN.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5)).numpy()
    by_seed = fp4kit.quantize(DRAWN, FP8, rounding="stochastic", seed=5)
    assert_same_bits(fp4kit.quantize(DRAWN, FP8, rounding="stochastic", seed=drawn), by_seed)


R = np.full(DRAWN.shape, 0.25, np.float32)


@pytest.mark.parametrize(
    "recipe, seed, error, text",
    [
        (NVFP4, R[:1], ValueError, "seed is float32 \\(1, 64\\); nvfp4-comfy-kitchen-stochastic needs"),
        (NVFP4, np.zeros(DRAWN.shape, np.uint8), ValueError, "seed is uint8 \\(32, 64\\); nvfp4-comfy"),
        (NVFP4, R.astype(BF16), ValueError, "seed is bfloat16"),
        (NVFP4, np.where(R > 1, R, 1), ValueError, "seed holds 2048 number"),
        (NVFP4, -R, ValueError, "outside 0 to 1; needs 0 <= r < 1"),
        (NVFP4, R * np.float32(np.nan), ValueError, "seed holds 2048 number"),
        (NVFP4, None, ValueError, "needs seed: an int, or numbers from 0 to 1 in the shape of x"),
        (f"{NVFP4}-cuda", 3, ValueError, "seed is 3; nvfp4-comfy-kitchen-stochastic-cuda needs the numbers that"),
        (f"{NVFP4}-cuda", R[:1], ValueError, "needs numbers as torch.rand gives them, float32 \\(32, 64\\)$"),
        (f"{NVFP4}-cuda", None, ValueError, "needs seed: numbers from 0 to 1 in the shape of x$"),
        (NVFP4, 1.5, TypeError, "seed is 1.5; needs an int"),
        (FP8, -1, ValueError, "seed is -1; needs 0 to"),
        (FP8, R, ValueError, "seed is float32 \\(32, 64\\); random bytes need uint8 \\(32, 64\\), or pass an int"),
        (FP8, None, ValueError, "needs seed: an int, or random bytes \\(uint8, shape of x\\)"),
    ],
)
def test_wrong_seeds(recipe, seed, error, text):
    for call in (fp4kit.quantize, fp4kit.fake_quantize):
        with pytest.raises(error, match=f"^{call.__name__}: .*{text}"):
            call(DRAWN, recipe, rounding="stochastic", seed=seed)


def test_numbers_of_the_dtype_or_float32():
    x = DRAWN.astype(BF16)
    for numbers in (R, R.astype(BF16)):
        q = agree(fp4kit.quantize, x, NVFP4, rounding="stochastic", seed=numbers)
        assert_same_bits(q, fp4kit.quantize(x, NVFP4, rounding="stochastic", seed=R))
