"""Test the compiled engine with recipes for Ascend NPUs, whose rules round logarithms, at the edges of these rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, counted, covered
from exhaustive import exhaustive
from power_edges import DTYPES, TOPS, blocks, drawn_magnitudes, every_element, nonfinite

import fp4kit
from fp4kit.recipes import ALL_RECIPES
from fp4kit.reference import search

pytestmark = NEEDS_ENGINE
IDS = [id for id, r in ALL_RECIPES.items() if r.producer in ("msmodelslim", "hifloat4") and not r.levels and covered(r)]
WHOLE = "mxfp4-msmodelslim-ceil-x-search"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_edges_of_exponents(id, dtype, monkeypatch):
    x = blocks(dtype)
    with counted(monkeypatch) as left:
        if not ALL_RECIPES[id].fake_only:
            agree(fp4kit.quantize, x, id)
        agree(fp4kit.fake_quantize, x, id)
    assert not left or (dtype != np.float16 and "4over6" in id)  # code 255 of 2^-128 decodes to NaN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_every_element(id, dtype):
    for top in TOPS:
        agree(fp4kit.fake_quantize if ALL_RECIPES[id].fake_only else fp4kit.quantize, every_element(dtype, top), id)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_zeros_and_nonfinite_elements(id, dtype):
    x = nonfinite(dtype)
    for part, axis in ((x, -1), (np.ascontiguousarray(x.T), 0), (x[:, ::-1], -1), (x.reshape(4, 4, 256), 2)):
        if not ALL_RECIPES[id].fake_only:
            agree(fp4kit.quantize, part, id, axis=axis)
        agree(fp4kit.fake_quantize, part, id, axis=axis)
    agree(fp4kit.fake_quantize_grouped, [x, x[:8], blocks(dtype, 31)], id)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [*range(4), *exhaustive(range(4, 20))])
def test_a_search_of_the_whole_array(seed, dtype, monkeypatch):
    x = drawn_magnitudes(seed, dtype, (3, 7, 320))
    for part, axis in ((x, -1), (np.moveaxis(x, -1, 0), 0), (x[:, ::2], -1), (x[1, :2, :64], -1), (x[0, :1, :32], -1)):
        q = agree(fp4kit.quantize, part, WHOLE, axis=axis)
        agree(fp4kit.fake_quantize, part, WHOLE, axis=axis)
        agree(fp4kit.quantize, part, WHOLE, axis=axis, hadamard=True)
        agree(fp4kit.quantize, part, replace(ALL_RECIPES[WHOLE], id="wide", block=(1, 16)), axis=axis)
    agree(fp4kit.quantize, nonfinite(dtype), WHOLE)
    agree(fp4kit.quantize, nonfinite(dtype), WHOLE, hadamard=True)
    large = drawn_magnitudes(seed, dtype, (2, 40, 1024))
    agree(fp4kit.quantize_grouped, [x, large, x[:0], large[0]], WHOLE)
    out = fp4kit.quantize(-large, WHOLE)
    assert fp4kit.quantize(large, WHOLE, out=out) is out and out.equals(agree(fp4kit.quantize, large, WHOLE))
    monkeypatch.setattr(search, "ceil_x_constant", None)  # only the specification calls it
    assert fp4kit.quantize(large, WHOLE).equals(out) and q.block_scale.size == 1


def test_constants_that_are_found():
    """The constants differ, so that the test above compares different ones."""
    r = ALL_RECIPES[WHOLE]
    found = {float(search.ceil_x_constant(drawn_magnitudes(seed, DTYPES[2], (2, 64)), r)[0]) for seed in range(20)}
    assert len(found) > 3
