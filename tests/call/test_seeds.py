"""Test seeds of stochastic rounding: the numbers that an int stands for, given random numbers, and wrong seeds."""

import numpy as np
import pytest
from engine_cases import agree
from inputs import BF16, ordinary

import fp4kit
from fp4kit.call.inputs import torch_words
from fp4kit.evidence.testing import assert_same_bits

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
