"""Test recipes that search a factor of the block amax: each block takes the candidate with the smallest error.

Candidates and sums are in the producer's order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from inputs import BF16, extreme, nonfinite, ordinary

import fp4kit
from fp4kit.call.parse import Declined
from fp4kit.cuda.dispatch import LaunchRequest, find_kernel, kernel_for
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import sum_lanes
from fp4kit.reference.search import AUTO_ROUND_PERCENTS, AUTO_ROUND_POWERS, search_matrix

NAMES = [name for name, r in RECIPES.items() if r.search]
# Recipes whose candidates are multiples of the block amax.
# Recipes that choose the candidate with the smallest error. QuEST has one candidate only.
BY_ERROR = [name for name in NAMES if RECIPES[name].search != "quest"]
FACTORED = [name for name in NAMES if RECIPES[name].search.startswith("auto_round")]
NVFP4, MXFP4 = "nvfp4-auto-round-opt", "mxfp4-auto-round-opt"
F32 = np.dtype(np.float32)


def chosen(x, name, amax=None):
    """Return the block amaxes that the search of the recipe `name` chooses for x. amax: the tensor amax, or None."""
    r = RECIPES[name]
    out = np.empty((x.shape[0], x.shape[1] // r.block_size), np.float32)
    search_matrix(x, out, compute_tensor_amax(x, r) if amax is None else amax, r, None)
    return out


def sum_of(terms):
    """Return the sum of 16 or 32 float32 terms in PyTorch's order on a CPU: eight lanes of up to four partial sums."""
    vectors = terms.reshape(-1, 8)
    whole = len(vectors) // 4 * 4
    partial = [np.zeros(8, np.float32) for _ in range(4)]
    for i, vector in enumerate(vectors):
        partial[i % 4 if i < whole else 0] += vector
    total = np.float32(0)
    for lane in ((partial[0] + partial[1]) + partial[2]) + partial[3]:
        total += lane
    return total


def tried(x, factor, name, encode_scale):
    """Return the decoded values of one block x if its amax is multiplied by `factor`, by auto-round's formulas.

    name: the recipe.
    encode_scale: the encode scale of the tensor; not used for MXFP4.
    """
    amax, one = np.max(np.abs(x)) * np.float32(factor), np.float32(1)
    if name == MXFP4:
        exponent = np.floor(np.log2(amax.astype(np.float64)).astype(np.float32)) - 2 if amax else np.float32(-1)
        scale = np.float32(2.0 ** np.clip(exponent, -127, 127))
        return nearest(np.clip(x / scale, -6, 6)) * scale
    code = np.minimum(encode_scale * (amax * (one / np.float32(6))), np.float32(448))
    scale = fp4kit.formats.E4M3.values[fp4kit.reference.codec.encode(code, fp4kit.formats.E4M3)]
    inverse = scale * (one / encode_scale) if encode_scale else np.float32(0)
    output = one / inverse if inverse else np.float32(0)
    return nearest(np.clip(x * output, -6, 6)) * (one / output if output else np.float32(0))


def nearest(y):
    return E2M1.values[fp4kit.reference.codec.encode(y, E2M1, "rns" if y.size == 32 else "rn")]


def test_the_candidates():
    """The list of candidates is that of auto-round.

    The last candidate, 1.51, wins so rarely that tests of values would pass without it.
    """
    assert list(AUTO_ROUND_PERCENTS) == FACTORS[NVFP4] and FACTORS[NVFP4][-1] == 1.51 and len(FACTORS[NVFP4]) == 102
    assert list(AUTO_ROUND_POWERS) == FACTORS[MXFP4]


FACTORS = {MXFP4: [1, 0.5, 2], NVFP4: [1, *(n / 100 for n in range(50, 152) if n != 100)]}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("x", [ordinary(7, (12, 64)), ordinary(8, (12, 64), BF16), extreme()[::12, :64]], ids=range(3))
def test_the_first_candidate_with_the_smallest_error_wins(name, x):
    """Each block gets the first candidate with the smallest error, found one candidate at a time."""
    q = fp4kit.quantize(x, name)
    found = chosen(x, name)
    scale = (
        np.float32(0)
        if q.tensor_amax is None or not q.tensor_amax
        else np.float32(1) / q.tensor_amax * np.float32(2688)
    )
    size = RECIPES[name].block_size
    other = 0
    with np.errstate(all="ignore"):
        for i, block in enumerate(x.astype(np.float32).reshape(-1, size)):
            errors = [sum_of((tried(block, f, name, scale) - block) ** 2) for f in FACTORS[name]]
            best = FACTORS[name][min(range(len(errors)), key=lambda n: (errors[n], n))]
            assert found.reshape(-1)[i] == np.max(np.abs(block)) * np.float32(best), (i, best)
            other += best != 1
    assert other > 0 or x.min() < -1e30  # the tensor scale for such large values makes zeros of the other blocks


def test_the_first_of_equal_errors_wins():
    """The search takes the candidate with the smallest error, and of equal errors the first.

    A block of ones, for example, is exact with the scales of amax * 2, amax * 1 and amax * 0.5.
    """
    x = np.ones((1, 32), np.float32)
    assert chosen(x, MXFP4).item() == 1.0
    x[0, :2] = 6, 0.5  # only amax * 1 holds both exactly
    assert chosen(x, MXFP4).item() == 6.0
    x[0], x[0, 0] = 0.25, 4  # half the scale loses 1 of the 4; the scale itself loses all other elements
    assert chosen(x, MXFP4).item() == 2.0
    x[0], x[0, 0] = 0, 7.5  # twice the scale holds 8, the scale itself 6
    assert chosen(x, MXFP4).item() == 15.0


def test_sums_are_those_of_lanes():
    terms = np.random.default_rng(0).standard_normal((50, 3, 256)).astype(np.float32) ** 2
    for size in (16, 32, 56, 256):
        expected = np.float32([[sum_of(block) for block in row] for row in terms[..., :size]])
        assert_same_bits(sum_lanes(terms[..., :size]), expected)
        assert (expected != terms[..., :size].sum(axis=-1)).any()


@pytest.mark.parametrize("factor", [None, 2])
def test_the_result_is_that_of_the_static_recipe_with_the_chosen_amaxes(factor):
    x = ordinary(1)
    amax = factor and np.float32(factor * np.abs(x).max())
    static = replace(RECIPES[NVFP4], search="", static=True)
    expected = fp4kit.quantize(x, static, tensor_amax=amax, block_amax=chosen(x, NVFP4, amax))
    found = fp4kit.quantize(x, NVFP4, tensor_amax=amax)
    for part in ("packed", "block_scale", "tensor_scale"):
        assert_same_bits(getattr(found, part), getattr(expected, part))


@pytest.mark.parametrize("name", BY_ERROR)
def test_errors_are_at_most_those_without_it(name):
    x = ordinary(2)
    error = [
        np.sum((fp4kit.fake_quantize(x, r) - x).astype(np.float64) ** 2)
        for r in (name, replace(RECIPES[name], search=""))
    ]
    assert error[0] < 0.95 * error[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [ordinary, extreme, nonfinite])
def test_both_engines(name, make, same_on_both_engines):
    turn = NAMES.index(name) + [ordinary, extreme, nonfinite].index(make)  # each dtype with every kind of blocks
    dtype = (np.float32, np.float16, BF16)[turn % 3]
    with np.errstate(all="ignore"):
        x = make().astype(dtype)
    same_on_both_engines(lambda: fp4kit.quantize(x, name))
    same_on_both_engines(lambda: fp4kit.quantize(x, name, axis=0))
    same_on_both_engines(lambda: fp4kit.fake_quantize(x, name))
    assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(fp4kit.quantize(x, name)))


@pytest.fixture
def same_on_both_engines():
    """Return a function that asserts that a call gives equal bits on the specification and the compiled engine."""

    def check(call):
        with fp4kit.specification():
            expected = call()
        for _ in range(2):  # the second call may be a cached one
            assert_same_bits(call(), expected)

    return check


@pytest.mark.parametrize("name", NAMES)
def test_the_search_rounds_to_nearest_even_if_codes_are_rounded_stochastically(name):
    x = ordinary(6)
    q = fp4kit.quantize(x, name)
    random = fp4kit.quantize(x, name, rounding="stochastic", seed=1)
    assert_same_bits(random.block_scale, q.block_scale)
    assert (random.packed != q.packed).any()


@pytest.mark.parametrize("name", NAMES)
def test_given_scales_are_not_searched(name):
    x = ordinary(8)
    q = fp4kit.quantize(x, name)
    given = {part: getattr(q, part) for part in ("block_scale", "tensor_scale") if getattr(q, part) is not None}
    assert_same_bits(fp4kit.quantize(x, name, **given).packed, q.packed)
    plain = fp4kit.quantize(x, replace(RECIPES[name], search=""))
    assert (plain.block_scale != q.block_scale).mean() > 0.05
    given["block_scale"] = plain.block_scale
    assert_same_bits(fp4kit.quantize(x, name, **given).packed, plain.packed)


@pytest.mark.parametrize("name", NAMES)
def test_invalid_arguments_are_rejected(name):
    x, out = ordinary(), np.zeros((128, 64), np.uint8)
    amax = fp4kit.amax(x, name)
    with pytest.raises(
        ValueError, match=f"quantize: block_amax was given, but {name} computes it from x; leave it out"
    ):
        fp4kit.quantize(x, name, block_amax=amax)
    with pytest.raises(ValueError, match=f"partial_cast: {name} chooses scales from whole blocks; use quantize"):
        fp4kit.partial_cast(x.reshape(-1), out, amax, x.shape, 0, name)
    assert_same_bits(fp4kit.partial_amax(x.reshape(-1), x.shape, 0, name), amax)


@pytest.mark.parametrize("name", FACTORED)
def test_a_kernel_of_codes_searches_nothing(name):
    """The kernel that writes codes gets the chosen amaxes from a kernel that searches, and searches nothing itself."""
    message = f"{name} has search='auto_round_.*': a separate kernel chooses the block amaxes; call quantize"
    for work in (
        LaunchRequest(RECIPES[name], F32, (32, 64)),
        LaunchRequest(RECIPES[name], F32, (32, 64), columns=True),
    ):
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=message):
            kernel_for(work)
    assert find_kernel(LaunchRequest(RECIPES[name], F32, (32, 64), scaled=True)) is not None


def quest_amax(block):
    """Return QuEST's amax of a block of 32 float32 elements, computed from exact sums."""
    exact = [Fraction(float(v)) for v in block]
    mean, square = sum(exact) / 32, sum(v * v for v in exact) / 32
    scale = 2.92247856 / 6 * math.sqrt(square - mean * mean) + 1e-8
    return 2.0 ** (math.floor(math.log2(scale)) + 2)


def test_quest_follows_from_the_standard_deviation():
    """QuEST's amaxes equal those of exact sums, except where the standard deviation is within a few ulp of a step."""
    x = np.concatenate([ordinary(3, (64, 64)), np.float32([[0.1] * 64, [0] * 64, [1e-9, -1e-9] * 32, [7, 0] * 32])])
    found = chosen(x, "mxfp4-fp-quant-quest")
    assert found.reshape(-1).tolist() == [quest_amax(block) for block in x.reshape(-1, 32)]
    assert found[64].tolist() == [2.0**-25] * 2  # 1e-8 rounds down to 2^-27, and 2^-25 = 4 * 2^-27
    assert np.isnan(chosen(np.float32([[np.inf] + [1] * 31]), "mxfp4-fp-quant-quest")).all()
