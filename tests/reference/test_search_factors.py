"""Test recipes that search a factor of the block amax: each block takes the candidate with the smallest error.

Candidates and sums are in the producer's order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from inputs import ordinary

import fp4kit
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


def test_sums_are_those_of_lanes():
    terms = np.random.default_rng(0).standard_normal((50, 3, 256)).astype(np.float32) ** 2
    for size in (16, 32, 56, 256):
        expected = np.float32([[sum_of(block) for block in row] for row in terms[..., :size]])
        assert_same_bits(sum_lanes(terms[..., :size]), expected)
        assert (expected != terms[..., :size].sum(axis=-1)).any()


def test_the_result_is_that_of_the_static_recipe_with_the_chosen_amaxes():
    x = ordinary(1)
    static = replace(RECIPES[NVFP4], search="", static=True)
    expected = fp4kit.quantize(x, static, block_amax=chosen(x, NVFP4))
    found = fp4kit.quantize(x, NVFP4)
    for part in ("packed", "block_scale", "tensor_scale"):
        assert_same_bits(getattr(found, part), getattr(expected, part))


@pytest.mark.parametrize("name", NAMES)
def test_identify_finds_it(name):
    x = ordinary(10, (64, 256))
    assert fp4kit.identify(fp4kit.quantize(x, name), x).exact == (name,)
    plain = name.removesuffix("-opt").replace("-mse", "-static").replace("fp-quant-quest", "ocp")
    others = fp4kit.identify(fp4kit.quantize(x, plain), x).exact
    assert name not in others and others
