"""Test recipes with levels of scales (HiF4, dual-level MXFP4) on the compiled engine against the specification."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, VIEWS, agree, as_large_ones, counted, covered, shrink_tiles
from exhaustive import exhaustive, half
from hif4_inputs import CODED, COMPILED, OTHER_LEVELS, VARIANTS, drawn

import fp4kit
from fp4kit.formats import FLOATS
from fp4kit.recipes import ALL_RECIPES

pytestmark = NEEDS_ENGINE


def check(x, id, axis=-1):
    """Assert that quantize, fake_quantize and dequantize to every dtype give the bits of the specification."""
    agree(fp4kit.fake_quantize, x, id, axis=axis)
    if id in CODED:
        q = agree(fp4kit.quantize, x, id, axis=axis)
        for dtype in FLOATS:
            agree(fp4kit.dequantize, q, dtype)


@pytest.mark.parametrize("id", COMPILED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive(range(1, 20))])
def test_drawn_arrays(seed, dtype, id, monkeypatch):
    as_large_ones(monkeypatch)
    rng = np.random.default_rng(seed)
    for specials in (False, True):
        shape = (int(rng.integers(1, 30)), 64 * int(rng.integers(1, 40)))
        check(drawn(seed, shape, dtype, specials), id)


@pytest.mark.parametrize("r", VARIANTS, ids=lambda r: r.id)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_variants(dtype, r):
    for specials in (False, True):
        x = drawn(7, (16, 1024), dtype, specials)
        agree(fp4kit.fake_quantize, x, r)
        if not r.fake_only:
            agree(fp4kit.dequantize, agree(fp4kit.quantize, x, r))


@pytest.mark.parametrize("id", half(COMPILED))
def test_small_tiles(id, monkeypatch):
    shrink_tiles(monkeypatch)
    for dtype in FLOATS:
        check(drawn(3, (7, 640), dtype), id)


@pytest.mark.parametrize("view", VIEWS)
def test_views(view, monkeypatch):
    as_large_ones(monkeypatch)
    x = VIEWS[view](drawn(4, (128, 256), FLOATS[0], False))
    for axis in range(x.ndim):
        if x.shape[axis] % 64 == 0:
            check(x, "hif4-amct", axis)


@pytest.mark.parametrize("id", COMPILED)
def test_finite_elements_are_done_by_the_engine(id, monkeypatch):
    """The engine computes finite elements itself. Otherwise the tests would compare the specification with itself."""
    as_large_ones(monkeypatch)
    for dtype in FLOATS:
        unit = ALL_RECIPES[id].cut_multiple
        x = np.random.default_rng(0).normal(size=(64, 2 * unit + 64)).astype(dtype)
        with counted(monkeypatch) as shapes:
            fp4kit.fake_quantize(x, id)
            if id in CODED:
                q = fp4kit.quantize(x, id)
                q[3:50, unit:].dequantize(), q.dequantize()
        assert shapes == [], dtype


@pytest.mark.parametrize("id", half(COMPILED))
def test_outputs_and_groups(id):
    unit = ALL_RECIPES[id].cut_multiple
    xs = [drawn(seed, (40, 1088), FLOATS[seed % 3], seed != 2) for seed in range(5)]
    agree(fp4kit.fake_quantize_grouped, xs, id)
    if id not in CODED:
        return
    agree(fp4kit.quantize_grouped, xs, id)
    for found, x in zip(fp4kit.GroupedPlan(xs, id).quantize(), xs, strict=True):
        assert found.equals(fp4kit.quantize(x, id))
    for x in xs:
        agree(fp4kit.quantize, x, id, hadamard=True)
        q, out = fp4kit.quantize(x, id), fp4kit.quantize(-x, id)
        assert fp4kit.quantize(x, id, out=out) is out and out.equals(q)
        part = agree(fp4kit.dequantize, q[5:30, unit : 2 * unit])
        assert np.array_equal(part, q.dequantize()[5:30, unit : 2 * unit], equal_nan=True)
        values = np.empty(x.shape, x.dtype)
        assert fp4kit.dequantize(q, out=values) is values
        assert np.array_equal(values, q.dequantize(), equal_nan=True)


@pytest.mark.parametrize("r", OTHER_LEVELS, ids=lambda r: r.id)
def test_the_specification_computes_other_levels(r):
    assert r.specification_only and not covered(r)
    x = drawn(6, (8, 1024), FLOATS[0])
    agree(fp4kit.dequantize, agree(fp4kit.quantize, x, r))
    agree(fp4kit.fake_quantize, x, r)
