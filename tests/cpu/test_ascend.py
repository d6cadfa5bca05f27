"""Test the compiled engine with recipes for Ascend NPUs, whose rules round logarithms, at the edges of these rules."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, counted, covered
from power_edges import DTYPES, TOPS, blocks, every_element, nonfinite

import fp4kit
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
IDS = [id for id, r in RECIPES.items() if r.producer in ("msmodelslim", "hifloat4") and covered(r)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_edges_of_exponents(id, dtype, monkeypatch):
    x = blocks(dtype)
    with counted(monkeypatch) as left:
        if not RECIPES[id].fake_only:
            agree(fp4kit.quantize, x, id)
        agree(fp4kit.fake_quantize, x, id)
    assert not left or (dtype != np.float16 and "4over6" in id)  # code 255 of 2^-128 decodes to NaN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_every_element(id, dtype):
    for top in TOPS:
        agree(fp4kit.fake_quantize if RECIPES[id].fake_only else fp4kit.quantize, every_element(dtype, top), id)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_zeros_and_nonfinite_elements(id, dtype):
    x = nonfinite(dtype)
    for part, axis in ((x, -1), (np.ascontiguousarray(x.T), 0), (x[:, ::-1], -1), (x.reshape(4, 4, 256), 2)):
        if not RECIPES[id].fake_only:
            agree(fp4kit.quantize, part, id, axis=axis)
        agree(fp4kit.fake_quantize, part, id, axis=axis)
    agree(fp4kit.fake_quantize_grouped, [x, x[:8], blocks(dtype, 31)], id)
