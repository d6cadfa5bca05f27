"""Test kernels with recipes for Ascend NPUs, whose rules round logarithms, at the edges of these rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from on_gpu import ON_GPU, agree
from power_edges import DTYPES, TOPS, blocks, drawn_magnitudes, every_element, nonfinite

import fp4kit
from fp4kit.recipes import ALL_RECIPES

pytestmark = ON_GPU
IDS = [id for id, r in ALL_RECIPES.items() if r.producer in ("msmodelslim", "hifloat4") and not r.levels]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_edges_of_exponents(id, dtype):
    cases = [(blocks(dtype), -1), (nonfinite(dtype), -1), (np.ascontiguousarray(nonfinite(dtype).T), 0)]
    for x, axis in (*cases, *((every_element(dtype, top), -1) for top in TOPS)):
        if not ALL_RECIPES[id].fake_only:
            agree(fp4kit.quantize, x, id, axis=axis)
        agree(fp4kit.fake_quantize, x, id, axis=axis)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", [id for id in IDS if not (ALL_RECIPES[id].fake_only or ALL_RECIPES[id].search)])
def test_given_scales_of_every_code(id, dtype):
    """255, the NaN of E8M0, gives the factor 0 or NaN, whichever the rule gives."""
    x = np.tile(np.linspace(-6, 6, ALL_RECIPES[id].block_size).astype(dtype), (256, 1))
    agree(fp4kit.quantize, x, id, block_scale=np.arange(256, dtype=np.uint8)[:, None])


@pytest.mark.parametrize(
    "id", [id for id in IDS if not ALL_RECIPES[id].search and "fp8" not in ALL_RECIPES[id].block_rule]
)
def test_given_amaxes(id):
    r = replace(ALL_RECIPES[id], id="given", static=True)
    for dtype in DTYPES:
        x = drawn_magnitudes(1, dtype, (9, 128))
        amax = np.full((9, 128 // r.block_size), 0.3, np.float32)
        agree(fp4kit.fake_quantize, x, r, block_amax=amax)
        given = fp4kit.fake_quantize(x, r, block_amax=amax)
        with fp4kit.specification():
            np.testing.assert_array_equal(given, fp4kit.fake_quantize(x, r, block_amax=amax))
            assert (given != fp4kit.fake_quantize(x, r)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_search_of_the_whole_array(dtype):
    id = "mxfp4-msmodelslim-ceil-x-search"
    for seed in range(4):
        x = drawn_magnitudes(seed, dtype, (3, 7, 320))
        for part, axis in ((x, -1), (np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0), (x[1, :, 32:], -1)):
            agree(fp4kit.quantize, part, id, axis=axis)
            agree(fp4kit.fake_quantize, part, id, axis=axis)
        agree(fp4kit.quantize, x, id, hadamard=True)
        agree(fp4kit.quantize_grouped, [x, x[0], x[:0], -x], id)
        x[0, 0, :32], x[0, 0, 0] = 0, 4096  # without an error; those of all others are smaller by many powers of two
        agree(fp4kit.quantize, np.where(x == 4096, x, x / 4096).astype(dtype), id)
