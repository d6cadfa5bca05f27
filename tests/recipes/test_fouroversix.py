"""Test fouroversix on elements of 7 scales and more, which it does not clamp: its codes and its choice of scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, as_large_ones, counted
from inputs import codes_of
from wrapped import CODES, over_scales, tiny_scales

import fp4kit
from fp4kit.formats import E2M1, FLOATS
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import encode, nearest_unbounded

NAMES = [id for id, r in RECIPES.items() if r.producer == "fouroversix" and r.tensor_rule and not r.fake_only]
WRAPPED = [id for id in NAMES if RECIPES[id].rounding == "rnw"]
# {recipe: (code, block scales)} for two blocks. The first block has the amax 1. The second has the element 1.4 * 2^-9 /
# 448 and zeros, and `code` is the code of this element.
ONE_AND_TINY = {
    "nvfp4-fouroversix-6": (8, [126, 1]),
    "nvfp4-fouroversix-4": (7, [126, 1]),
    "nvfp4-fouroversix": (6, [120, 1]),
    "nvfp4-fouroversix-mae": (6, [120, 1]),
    "nvfp4-fouroversix-absmax": (6, [120, 1]),
    "nvfp4-fouroversix-triton-6": (7, [126, 1]),
}
# A block of these values, in units of 2^-9 / 2560, has the scale 2, and its first value becomes 8. If that value were
# clamped to 6, the scale 4 would be better.
TENTHS = (24, -12, 15, 12, 0, 18, 0, 0, 0, 21, -15, 3, -18, 0, -18, -18)
PACKED = "e8667000702e0fff"


@pytest.mark.parametrize("name", ONE_AND_TINY)
def test_the_code_of_an_element_of_eight_scales(name):
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 1, 1.4 * 2**-9 / 448
    q = fp4kit.quantize(x, name)
    assert (codes_of(q)[0, 16], q.block_scale.tolist()) == (ONE_AND_TINY[name][0], [ONE_AND_TINY[name][1]])
    assert (fp4kit.dequantize(q)[0, 16] == 0) == (ONE_AND_TINY[name][0] == 8)


@pytest.mark.parametrize("name", ["nvfp4-fouroversix", "nvfp4-fouroversix-mae", "nvfp4-fouroversix-absmax"])
def test_the_errors_of_unclamped_values_choose_the_scale(name):
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16:] = 1, np.float32(TENTHS) / 10 * np.float32(2.0**-9 / 256)
    q = fp4kit.quantize(x, name)
    assert q.block_scale.tolist() == [[120, 2]] and q.packed[0, 8:].tobytes().hex() == PACKED
    assert fp4kit.quantize(x, replace(RECIPES[name], rounding="rn")).block_scale.tolist() == [[120, 4]]


def test_codes_of_all_that_is_packed():
    assert encode(np.float32([*CODES]), E2M1, "rnw", "negative").tolist() == [*CODES.values()]
    q = fp4kit.quantize(over_scales(), "nvfp4-fouroversix-6", tensor_amax=2688)
    assert codes_of(q).reshape(-1, 16)[:, 3].tolist() == [*CODES.values()]


def test_values_go_on_in_steps_of_two():
    numbers = np.float32([0.25, 0.75, 3.5, 5, 7, 9, 9.5, 127, 2**24 + 2])
    assert nearest_unbounded(numbers).tolist() == [0, 1, 4, 4, 8, 8, 10, 128, 2**24 + 2]
    assert np.isnan(nearest_unbounded(np.float32([np.inf, np.nan]))).all()
    assert encode(np.float32([np.inf, -np.inf, np.nan]), E2M1, "rnw", "negative", 11).tolist() == [11, 11, 11]
    below = np.nextafter(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7]), np.float32(0))
    assert (encode(below, E2M1, "rnw") == encode(below, E2M1)).all()


def test_scales_that_are_nan():
    """In fouroversix's recipes, a block scale is NaN in two cases only.

    They are a block of zeros under an infinite encode scale, and a block with infinities.
    """
    for name in NAMES:
        assert not fp4kit.quantize(np.zeros((1, 32), np.float32), name).block_scale.any()
        x = np.zeros((1, 32), np.float32)
        x[0, 0] = 1e-40
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [[126, 127]] and (codes_of(q)[0, 16:] == RECIPES[name].nan_code).all()
        x[0, :17] = np.inf, *(16 * [1])
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [[127, 0]] and not codes_of(q)[0, 16:].any()


# ---- the compiled engine ----


@NEEDS_ENGINE
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine(name, monkeypatch):
    as_large_ones(monkeypatch)
    for dtype in FLOATS:
        x = tiny_scales(dtype, RECIPES[name].scale_max)
        with counted(monkeypatch) as left:
            q = fp4kit.quantize(x, name)
        assert left == [] and (name not in WRAPPED or name == "nvfp4-fouroversix-4" or (codes_of(q) == 8).sum() > 100)
        for tensor_amax in (None, x.max() / 3, x.max() / 100, 1e-30):
            q = agree(fp4kit.quantize, x, name, tensor_amax=tensor_amax)
            agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
            agree(fp4kit.fake_quantize, x, name, tensor_amax=tensor_amax)
        agree(fp4kit.requantize, q, "nvfp4-te")
    agree(fp4kit.quantize, over_scales(), name, tensor_amax=2688)
    agree(fp4kit.quantize, over_scales().repeat(64, axis=0) * np.float32(2.0**100), name, tensor_amax=2.0**-20)
    if RECIPES[name].four_over_six is None and not RECIPES[name].element.is_integer:
        searched = [{"search": "auto_round_percents"}] if RECIPES[name].block_rows == 1 else []
        for changes in (*searched, {"sign": "unsigned_zero"}, {"nan_code": 3}):
            agree(fp4kit.quantize, tiny_scales(np.dtype(np.float32), 448), replace(RECIPES[name], **changes))
