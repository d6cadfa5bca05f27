"""Test as_stored, the recipes of programs that load checkpoints: they encode alike, but may decode otherwise."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.formats import bit_patterns
from fp4kit.recipes import RECIPES
from fp4kit.recipes.schema import as_stored, searching

WITH_CODES = [name for name, r in RECIPES.items() if not r.fake_only]


def assert_encodes_alike(x, name):
    """Assert that the recipe and its as_stored copies give equal codes of x, and the values to which these decode."""
    r = RECIPES[name]
    q = fp4kit.quantize(x, r)
    for divides in (False, True) if r.scale is not None and r.scale.name == "E4M3" else (False,):
        stored = as_stored(r, divides)
        found = fp4kit.quantize(x, stored)
        assert np.array_equal(found.packed, q.packed)
        assert q.block_scale is None or np.array_equal(found.block_scale, q.block_scale)
        expected = bit_patterns(fp4kit.dequantize(replace(q, recipe=stored)))
        assert np.array_equal(bit_patterns(fp4kit.fake_quantize(x, stored)), expected)


@pytest.mark.parametrize("name", WITH_CODES)
def test_codes_and_fake_quantized_values(name):
    rng = np.random.default_rng(1)
    assert_encodes_alike((rng.standard_normal((128, 256)) * 3).astype(ml_dtypes.bfloat16), name)


@pytest.mark.parametrize("name", [name for name in WITH_CODES if RECIPES[name].search])
def test_searches_measure_errors_by_the_rule_of_their_producer(name):
    """The search of auto-round chooses another scale for one in 50,000 blocks if it decodes by another rule."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        assert_encodes_alike((rng.standard_normal((512, 512)) * np.exp(rng.uniform(-3, 2))).astype(np.float32), name)


@pytest.mark.parametrize("specified", [False, True])
def test_all_engines_search_by_the_rule_of_the_producer(specified):
    r = replace(RECIPES["nvfp4-auto-round-opt"], id="loaded", decode_rule="product")
    assert searching(r).decode_rule == "auto_round"
    assert searching(RECIPES["mxfp4-fp-quant-quest"]).decode_rule == "e8m0"
    x = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32)
    expected = fp4kit.quantize(x, "nvfp4-auto-round-opt")
    if specified:
        with fp4kit.specification():
            q = fp4kit.quantize(x, r)
    else:
        q = fp4kit.quantize(x, r)
    assert np.array_equal(q.packed, expected.packed) and np.array_equal(q.block_scale, expected.block_scale)
