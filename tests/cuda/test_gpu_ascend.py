"""Test kernels with recipes for Ascend NPUs, whose rules round logarithms, at the edges of these rules."""

from __future__ import annotations

import numpy as np
import pytest
from on_gpu import ON_GPU, agree
from power_edges import DTYPES, TOPS, blocks, every_element, nonfinite

import fp4kit
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
IDS = [id for id, r in RECIPES.items() if r.producer in ("msmodelslim", "hifloat4")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id", IDS)
def test_edges_of_exponents(id, dtype):
    cases = [(blocks(dtype), -1), (nonfinite(dtype), -1), (np.ascontiguousarray(nonfinite(dtype).T), 0)]
    for x, axis in (*cases, *((every_element(dtype, top), -1) for top in TOPS)):
        if not RECIPES[id].fake_only:
            agree(fp4kit.quantize, x, id, axis=axis)
        agree(fp4kit.fake_quantize, x, id, axis=axis)
