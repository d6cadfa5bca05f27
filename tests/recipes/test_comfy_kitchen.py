"""Test ComfyUI's stochastic rounding to NVFP4 against an independent statement, which computes in the dtype of x."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from inputs import BF16

import fp4kit
from fp4kit.call.inputs import torch_words
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

NAME = "nvfp4-comfy-kitchen-stochastic"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]
# {dtype: the smallest numbers a with floor(log2(a) + c) >= 1, 2 and 3}, for c = 1 and c = 1.1925, as PyTorch 2.13
# computes them in the dtype on a CPU
THRESHOLDS = {
    "float32": [(1, 2 - 2**-23, 4 - 2**-21), (0.8750879764556885, 1.750175952911377, 3.500351667404175)],
    "float16": [(1, 2 - 2**-10, 4 - 2**-8), (0.875, 1.75, 3.498046875)],
    "bfloat16": [(1, 2 - 2**-7, 4 - 2**-5), (0.875, 1.7421875, 3.46875)],
}
SECOND_ON_CUDA = (0.875, 1.75, 3.484375)  # for bfloat16 and c = 1.1925, as PyTorch 2.11 computes on an H200


def exponent(a, thresholds):
    """Return how many of the three thresholds a number reaches."""
    return np.sum([a >= np.asarray(limit, a.dtype) for limit in thresholds], axis=0)


def stated(x, tensor_scale, r, on_gpu=False):
    """Return (codes packed with the even element high, scale codes), every step an operation in the dtype of x.

    r: random numbers in the dtype of x. on_gpu: True for the results of PyTorch on a GPU.
    """
    T, rows = x.dtype.type, len(x)
    first, second = THRESHOLDS[str(x.dtype)]
    second = SECOND_ON_CUDA if on_gpu and x.dtype == BF16 else second
    with np.errstate(all="ignore"):
        s, blocks = np.float32(tensor_scale).astype(x.dtype), x.reshape(rows, -1, 16)
        amaxes = np.abs(blocks).max(axis=-1)
        sixths = amaxes * T(1 / 6) if on_gpu and x.dtype == np.float32 else amaxes / T(6)
        ratio = sixths / s
        scales = np.minimum(ratio, T(448)).astype(ml_dtypes.float8_e4m3fn)
        y = (blocks / (s * scales.astype(x.dtype))[..., None]).reshape(x.shape)
        largest = T(ml_dtypes.finfo(x.dtype).max)
        y = np.where(np.isnan(y), T(0), np.clip(y, -largest, largest)).astype(x.dtype)
        sign = np.signbit(y)
        power = np.asarray([0.25, 0.5, 1, 2], x.dtype)
        a = np.abs(y + (r - T(0.5)) * power[exponent(np.abs(y), first)] * T(1.25))
        e = exponent(a, second)
        n = np.rint(np.where(e > 0, (a / (power * T(2))[e] - T(1)) * T(2), a * T(2)))
    n = [255 if on_gpu and v >= 2**63 else int(v) % 256 for v in n.astype(np.float64).reshape(-1)]
    codes = sign.astype(np.uint8) << 3 | e.astype(np.uint8) << 1 | np.uint8(n).reshape(x.shape)
    assert a.dtype == y.dtype == x.dtype
    return codes[:, ::2] << 4 | codes[:, 1::2], scales.view(np.uint8)


def rows_of(dtype, seed):
    """Return an array (24, 64) of rows of different magnitude, with zeros of both signs, an infinity and a NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 64)) * np.exp(rng.uniform(-12, 9 if dtype == np.float16 else 40, (24, 1)))
    x[rng.random(x.shape) < 0.1] = rng.choice([0.0, -0.0])
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1, 0.9, 0.05, 1e-4, 1e-9, 20, 1e6], ids=str)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_every_step_rounds_to_the_dtype(dtype, factor, on_gpu):
    """A small tensor amax gives scaled elements above 6, whose bits reach the sign and the element before."""
    for seed in range(3):
        x = rows_of(dtype, seed)
        if factor == 1 and seed == 2:
            x[3, 5], x[9, 9] = np.inf, np.nan
        amax = np.float32(np.nanmax(np.where(np.isfinite(x), np.abs(x), 0))) * np.float32(factor)
        r = np.random.default_rng(seed).random(x.shape, np.float32).astype(dtype)
        r = np.where(r == 1, dtype.type(0), r)
        q = agree(fp4kit.quantize, x, NAME + "-cuda" * on_gpu, tensor_amax=amax, rounding="stochastic", seed=r)
        codes, scales = stated(x, q.tensor_scale, r, on_gpu)
        assert_same_bits(q.packed, codes << 4 | codes >> 4)
        is_nan = (q.block_scale & 0x7F == 0x7F) & (scales & 0x7F == 0x7F)
        assert ((q.block_scale == scales) | is_nan).all()


def test_a_value_of_six_may_become_four():
    """The code of 6 plus noise of 1 or more is that of 4, because n is 2."""
    x = np.full((1, 16), 6, np.float32)
    codes = {
        float(r): agree(
            fp4kit.quantize, x, NAME, tensor_amax=2688, rounding="stochastic", seed=np.full(x.shape, r, np.float32)
        ).packed[0, 0]
        for r in (0, 0.25, 0.5, 0.875, 0.9375)
    }
    assert codes == {0: 0x66, 0.25: 0x77, 0.5: 0x77, 0.875: 0x77, 0.9375: 0x66}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_seed_gives_the_numbers_of_torch(dtype):
    torch = pytest.importorskip("torch", minversion="2.13")  # PyTorch 2.11 gives other numbers in 16 bits
    x = rows_of(dtype, 5)
    for seed in (0, 1234, 2**40 + 7):
        generator = torch.Generator().manual_seed(seed)
        r = torch.rand(x.shape, dtype=getattr(torch, str(dtype)), generator=generator).float().numpy().astype(dtype)
        q = fp4kit.quantize(x, NAME, rounding="stochastic", seed=seed)
        assert_same_bits(q, fp4kit.quantize(x, NAME, rounding="stochastic", seed=r))


def test_other_operations():
    """Other operations give the codes of quantize, and so do engines that fall back to the specification."""
    x = rows_of(np.dtype(np.float32), 7)
    options = {"rounding": "stochastic", "seed": 9}
    q = agree(fp4kit.quantize, x, NAME, **options)
    assert_same_bits(agree(fp4kit.fake_quantize, x, NAME, **options), fp4kit.dequantize(q))
    assert_same_bits(fp4kit.quantize_grouped([x, x], NAME, **options)[1], q)
    row, column = fp4kit.quantize_both(x[:16], NAME, **options)
    assert_same_bits(row, fp4kit.quantize(x[:16], NAME, **options))
    assert_same_bits(column, fp4kit.quantize(x[:16], NAME, axis=0, rounding="stochastic", seed=10))
    given = fp4kit.quantize(x, NAME, block_scale=q.block_scale, tensor_scale=q.tensor_scale, **options)
    assert_same_bits(given.packed, q.packed)
    steps = fp4kit.explain(x, NAME, (3, 5), **options)
    assert "random number" in str(steps)
    assert not fp4kit.identify(q, x).variations


def test_the_numbers_follow_their_elements():
    """Along axis 0, and in more dimensions, the numbers of a seed are in the order of x."""
    x = rows_of(BF16, 8)[:16].reshape(2, 16, 32)
    r = torch_words(3, x.size).reshape(x.shape) & 0xFFFFFF
    r = r.astype(np.float32) * np.float32(2**-24)
    for axis in (-1, 1):
        by_seed = agree(fp4kit.quantize, x, NAME, axis=axis, rounding="stochastic", seed=3)
        assert_same_bits(fp4kit.quantize(x, NAME, axis=axis, rounding="stochastic", seed=r), by_seed)


def test_variants():
    """A variant with other scales rounds stochastically in the same way; other elements are refused."""
    x = rows_of(np.dtype(np.float16), 9)
    for fields in ({"block": (1, 32)}, {"block_rule": "te", "apply": "multiply"}, {"round_scaled": False}):
        agree(fp4kit.quantize, x, replace(RECIPES[NAME], **fields), rounding="stochastic", seed=4)
    with pytest.raises(ValueError, match="stochastic is 'comfyui_nvfp4'; needs E2M1, whose codes it computes"):
        replace(RECIPES["mxfp8-te"], stochastic="comfyui_nvfp4")
