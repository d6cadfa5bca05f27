"""Test MSLK's stochastic rounding to MXFP4 against an independent statement in Python integers."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from engine_cases import agree
from inputs import BF16
from philox import triton_word

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

NAME = "mxfp4-mslk-stochastic"
E2M1 = (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)


def randint(seed, offset):
    """Return the word of Triton's tl.randint(seed, offset, n_rounds=7)."""
    return triton_word(seed, offset, 7)


def scale_of(amax, word):
    """Return the E8M0 byte of a block: the exponent of the amax whose bits are increased by 22 random bits."""
    bits = int(np.float32(amax or 2.0**-126).view(np.int32)) + (word & 0x3FFFFF)
    return min(max((bits >> 23) - 127 - 2, -127), 125) + 127


def code_of(x, scale, word):
    """Return the code of x: noise is added to the bits of the scaled element, which is then rounded to nearest even."""
    y = np.float32(np.float64(x) / 2.0 ** (scale - 127))
    bits = 0x7FFFFFFF if np.isnan(y) else int(y.view(np.int32))
    noisy = (bits + (word & 0x3FFFFF) - 0x1FFFFF) & 0xFFFFFFFF
    sign, magnitude = noisy >> 31, noisy & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 7
    value = 6 if magnitude == 0x7F800000 else min(Fraction(float(np.uint32(magnitude).view(np.float32))), 6)
    return min(range(8), key=lambda c: (abs(E2M1[c] - value), c % 2)) | sign << 3


def stated(x, seed, size):
    """Return (scales, codes) of the rows of x, with blocks of `size` elements."""
    blocks = x.astype(np.float32).reshape(-1, size)
    with np.errstate(all="ignore"):
        amaxes = [np.nanmax(np.abs(b)) if not np.isnan(b).all() else 0 for b in blocks]
    scales = [scale_of(amax, randint(seed, i)) for i, amax in enumerate(amaxes)]
    with np.errstate(all="ignore"):
        codes = [code_of(v, scales[i // size], randint(seed ^ 0x5A5A5A5A, i)) for i, v in enumerate(blocks.reshape(-1))]
    rows = x.reshape(-1, x.shape[-1]).shape[0]
    return np.uint8(scales).reshape(rows, -1), np.uint8(codes).reshape(rows, -1)


def rows_of(dtype, shape):
    """Return rows of different magnitude, with zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-10, 8, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.2] = rng.choice([0.0, -0.0])
    x[(0,) * (x.ndim - 2)][1, 3], x[(0,) * (x.ndim - 2)][2, 40:43] = np.inf, (np.nan, -np.nan, -np.inf)
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("size, seed", [(32, 0), (16, 2**40 + 3)])
def test_scales_and_codes(dtype, size, seed):
    x, r = rows_of(dtype, (12, 64)), replace(RECIPES[NAME], block=(1, size))
    q = agree(fp4kit.quantize, x, r, rounding="stochastic", seed=seed)
    scales, codes = stated(x, seed, size)
    assert q.block_scale.tolist() == scales.tolist()
    assert fp4kit.unpack(q.packed).tolist() == codes.tolist()


def test_the_words_run_through_all_dimensions():
    """Elements and blocks are counted in x with the quantized axis last."""
    x = rows_of(BF16, (2, 4, 64))
    q = agree(fp4kit.quantize, x, NAME, rounding="stochastic", seed=5)
    scales, codes = stated(x, 5, 32)
    assert q.block_scale.reshape(8, -1).tolist() == scales.tolist()
    assert fp4kit.unpack(q.packed).reshape(8, -1).tolist() == codes.tolist()
    columns = agree(fp4kit.quantize, np.moveaxis(x, -1, 0), NAME, axis=0, rounding="stochastic", seed=5)
    assert_same_bits(columns.packed, q.packed)


def test_about_half_of_all_zeros_become_six():
    x = np.zeros((64, 64), np.float16)
    x[:, 0] = x[:, 32] = 1
    codes = fp4kit.unpack(fp4kit.quantize(x, NAME, rounding="stochastic", seed=1).packed)[x == 0]
    assert set(codes.tolist()) == {0, 7} and 0.45 < (codes == 7).mean() < 0.55


def test_other_operations():
    x, options = rows_of(np.float16, (16, 64)), {"rounding": "stochastic", "seed": 9}
    q = fp4kit.quantize(x, NAME, **options)
    assert_same_bits(agree(fp4kit.fake_quantize, x, NAME, **options), fp4kit.dequantize(q))
    assert_same_bits(fp4kit.quantize_grouped([x, x], NAME, **options)[1], q)
    assert_same_bits(fp4kit.quantize(x, NAME, block_scale=q.block_scale, **options), q)
    steps = str(fp4kit.explain(x, NAME, (7, 45), **options))
    assert "block amax, rounded stochastically" in steps and "scaled element with noise" in steps
    finite = np.where(np.isfinite(x), x, np.float16(1))
    assert not fp4kit.identify(fp4kit.quantize(finite, NAME, **options), finite).variations
    assert_same_bits(fp4kit.quantize(x, NAME).packed, fp4kit.quantize(x, "mxfp4-mslk").packed)


@pytest.mark.parametrize("index", [(0, 0), (5, 63), (7, 20)], ids=str)
def test_explained_codes(index):
    """The code that explain shows is the code of quantize, also in later rows and blocks."""
    x, options = rows_of(np.float16, (8, 64)), {"rounding": "stochastic", "seed": 3}
    expected = fp4kit.unpack(fp4kit.quantize(x, NAME, **options).packed)[index]
    steps = fp4kit.explain(x, NAME, index, **options)
    assert f"{expected:04b}" in next(line for line in str(steps).splitlines() if line.strip().startswith("code"))


def test_errors():
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=f"^quantize: seed is an array; {NAME} needs an int, because"):
        fp4kit.quantize(x, NAME, rounding="stochastic", seed=np.zeros(x.shape, np.uint8))
    with pytest.raises(ValueError, match=r"^quantize: stochastic rounding needs seed: an int$"):
        fp4kit.quantize(x, NAME, rounding="stochastic")
    for fields in ({"block": (2, 32)}, {"element": fp4kit.formats.E2M3}):
        with pytest.raises(ValueError, match="stochastic is 'mslk'; needs elements E2M1 and E8M0 scales of blocks of"):
            replace(RECIPES[NAME], **fields)
