"""Test fouroversix's MS-EDEN: against recorded float32 outputs, an independent statement, and in its errors."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import agree
from inputs import BF16
from philox import triton_word
from recorded import groups

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import divide_full

NAMES = ("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden")
F32 = np.float32
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E4M3 = [0.0] + [m * 2.0**-9 for m in range(1, 8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]


def rand(seed, index):
    """Return the number of Triton's tl.rand(seed, index), from Philox4x32-10 in Python integers."""
    word = triton_word(seed, index, 10)
    return F32(word if word < 2**31 else 2**32 - 1 - word) * F32(4.6566127342e-10)


def divide(a, b):
    """Return a / b as div.full.f32 computes it."""
    return divide_full(np.asarray([a], F32), np.asarray([b], F32))[0]


def nearest(value, values):
    """Return the number of `values` nearest to value >= 0. If two are equally near, take that at an even index."""
    i = min(range(len(values)), key=lambda i: (abs(float(values[i]) - float(value)), i % 2))
    return F32(values[i])


def element(y):
    """Return y rounded to E2M1, ties away from zero."""
    i = max(range(8), key=lambda i: (-abs(E2M1[i] - abs(float(y))), E2M1[i]))
    return F32(E2M1[i]) * F32(1 if y > 0 else -1)


def integer(y):
    """Return the value of y in IF4's integers."""
    return F32(np.rint(np.clip(y * F32(7 / 6), F32(-7), F32(7)))) * F32(6 / 7)


def summed(terms):
    """Return the sum of float32 terms, added in order."""
    total = terms[0]
    for term in terms[1:]:
        total = F32(total + term)
    return total


def rounded(scale, number):
    """Return a block scale rounded to E4M3, stochastically with a number, or to nearest if that is None."""
    if number is None:
        return nearest(scale, E4M3)
    if scale >= 448:
        return F32(448)
    lower = max(v for v in E4M3 if v <= scale)
    upper = E4M3[E4M3.index(lower) + 1]
    return F32(upper if number < divide(F32(scale - F32(lower)), F32(upper - lower)) else lower)


def stated(x, has_integers, seed, amax):
    """Return the values of finite rows x, whose length is a multiple of 32."""
    top = F32(6 / (17 / 16 * 0.93))
    tensor = F32(1) if amax == 0 else divide(divide(amax, 255.99), top)
    out, index = [], 0
    for unit in x.astype(F32).reshape(-1, 32) + F32(0):
        scales, ys, qs = [], [], []
        for block in unit.reshape(2, 16):
            scale = nearest(min(divide(divide(np.abs(block).max(), top), tensor), 448), E4M3) or F32(1)
            y = [divide(v, F32(scale * tensor)) for v in block]
            q = [element(v) for v in y]
            if has_integers:
                i = [integer(v) for v in y]
                errors = [summed([F32((v - w) * (v - w)) for v, w in zip(y, p, strict=True)]) for p in (i, q)]
                q = i if errors[0] < errors[1] else q
            scales, ys, qs = [*scales, scale], [*ys, *y], [*qs, *q]
        products = summed([F32(v * w) for v, w in zip(ys, qs, strict=True)])
        k = F32(1) if products == 0 else divide(summed([F32(v * v) for v in ys]), products)
        for b in range(2):
            number = None if seed is None else rand(seed, index)
            scale = rounded(F32(scales[b] * k), number)
            out += [F32(F32(q * scale) * tensor) for q in qs[16 * b : 16 * b + 16]]
            index += 1
    return np.asarray(out, F32).reshape(x.shape).astype(x.dtype)


def rows_of(dtype, shape):
    """Return rows of different magnitude, with zeros of both signs and whole blocks of zeros."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-9, 3, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.1] = rng.choice([0.0, -0.0])
    x.reshape(-1, 16)[rng.random(x.size // 16) < 0.1] = -0.0
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values(name, dtype):
    for shape, seed in (((6, 64), 7), ((2, 3, 32), 2**40 + 1), ((5, 96), None), ((1, 32), 0)):
        x = rows_of(dtype, shape)
        options = {} if seed is None else {"rounding": "stochastic", "seed": seed}
        found = agree(fp4kit.fake_quantize, x, name, **options)
        assert_same_bits(found, stated(x, "if4" in name, seed, np.abs(x.astype(F32)).max()), str((shape, seed)))


@pytest.mark.parametrize("name", NAMES)
def test_given_amaxes_saturate_and_underflow(name):
    x = rows_of(np.float32, (4, 64))
    for amax in (1e-3, 0.5, 1e6, 1e30):
        found = agree(fp4kit.fake_quantize, x, name, tensor_amax=amax, rounding="stochastic", seed=3)
        assert_same_bits(found, stated(x, "if4" in name, 3, F32(amax)), str(amax))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite(name):
    """An infinity or a NaN makes its 32 elements NaN, and through the tensor amax everything."""
    x = rows_of(np.float32, (4, 64))
    x[1, 40], x[2, 3] = np.inf, np.nan
    found = fp4kit.fake_quantize(x, name, tensor_amax=4.0, rounding="stochastic", seed=3)
    expected = np.zeros(x.shape, bool)
    expected[1, 32:] = expected[2, :32] = True
    assert (np.isnan(found) == expected).all()
    assert np.isnan(fp4kit.fake_quantize(x, name, rounding="stochastic", seed=3)).all()
    agree(fp4kit.fake_quantize, adversarial_blocks(np.float32)[:, :32], name, rounding="stochastic", seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_truncated_to_tf32(name, golden):
    """Elements without their 13 low bits give the recorded values, with the amax of the original elements."""
    end = f"__f32/fouroversix_ms_eden_{name.split('-')[0]}_seed7"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 12
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        truncated = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        amax = np.abs(x).max()
        options = {"rounding": "stochastic", "seed": 7} | ({} if np.isnan(amax) else {"tensor_amax": amax})
        found = fp4kit.fake_quantize(truncated, name, **options)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        ours, theirs = (np.where(np.isnan(a), np.float32(np.nan), a) for a in (found, recorded))
        assert_same_bits(ours, theirs, prefix)


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_amax_of_the_next_step(name, golden):
    """fouroversix also returns the amax of the transformed elements, which leaves out NaN.

    In the product with an identity matrix, an infinity makes the other elements of its 32 NaN, because inf * 0 is NaN.
    """
    end = f"fouroversix_ms_eden_{name.split('-')[0]}_seed7"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/next_amax") if prefix.endswith(end)]
    assert len(prefixes) == 33
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        wide = x.astype(np.float32)
        if x.dtype == np.float32:
            wide = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        with np.errstate(invalid="ignore"):
            transformed = wide.reshape(-1, 32) @ np.eye(32, dtype=np.float32)
        known = np.where(np.isnan(transformed), np.float32(0), transformed)
        assert_same_bits(fp4kit.amax(known), golden.get("triton_h100", f"{prefix}/next_amax")[0], prefix)


def test_the_mean_is_unbiased():
    """The mean over seeds approaches x more closely than rounding to nearest does."""
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    means = np.mean(
        [fp4kit.fake_quantize(x, NAMES[0], rounding="stochastic", seed=s).astype(np.float64) for s in range(64)], axis=0
    )
    # Along x, the projection of the result is x itself, up to the noise of rounding scales.
    assert abs((means * x).sum() / (x.astype(np.float64) ** 2).sum() - 1) < 2e-3
    plain = fp4kit.fake_quantize(x, "nvfp4-fouroversix-6").astype(np.float64)
    assert abs((plain * x).sum() / (x.astype(np.float64) ** 2).sum() - 1) > 4e-3


def test_errors():
    x = np.zeros((4, 48), np.float32)
    with pytest.raises(ValueError, match=r"axis -?1 has length 48; nvfp4-fouroversix-ms-eden needs a multiple of 32"):
        fp4kit.fake_quantize(x, NAMES[0], rounding="stochastic", seed=1)
    x = np.zeros((4, 64), np.float32)
    with pytest.raises(ValueError, match="is a fake quantizer and has values only"):
        fp4kit.quantize(x, NAMES[0])
    with pytest.raises(ValueError, match=r"stochastic rounding needs seed: an int$"):
        fp4kit.fake_quantize(x, NAMES[0], rounding="stochastic")
    with pytest.raises(ValueError, match=r"seed is an array; .* needs an int, because scales are random too"):
        fp4kit.fake_quantize(x, NAMES[0], rounding="stochastic", seed=np.zeros((4, 64), np.uint8))
    with pytest.raises(ValueError, match="seed was given with rounding='nearest'"):
        fp4kit.fake_quantize(x, NAMES[0], seed=1)
    r = RECIPES[NAMES[0]]
    with pytest.raises(ValueError, match="'ms_eden' and fake_rule 'ms_eden' or 'ms_eden_if4' need each other"):
        replace(r, stochastic="te")
    with pytest.raises(ValueError, match="'ms_eden' and fake_rule"):
        replace(RECIPES["nvfp4-te"], stochastic="ms_eden")
    for fields in ({"fake_only": False}, {"block": (1, 64)}, {"block": (1, 24)}):
        with pytest.raises(ValueError, match="needs fake_only and a number of columns that divides 32"):
            replace(r, **fields)
