"""Test tensor_amax, block_amax and tensor scales, given or computed, per tensor, row, block and expert.

Expected values are computed by hand.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from inputs import BF16, FINITE, NAMES, ORDINARY, as_strided, ordinary
from rounding_cases import TE_SCALES
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling != "none"])
@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE)
def test_the_amax_that_is_computed_can_be_given(name, x):
    q = fp4kit.quantize(x, name)
    assert q.tensor_amax.dtype == q.tensor_scale.dtype == np.float32
    assert q.tensor_amax.shape == q.tensor_scale.shape
    assert_same_bits(fp4kit.quantize(x, name, tensor_amax=q.tensor_amax), q)


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling == "tensor"])
def test_forms_of_a_tensor_amax(name):
    q = fp4kit.quantize(ORDINARY, name, tensor_amax=np.float32(40))
    for amax in (40, 40.0, np.float64(40), np.full((1, 1), 40, BF16), np.array([40])):
        assert_same_bits(fp4kit.quantize(ORDINARY, name, tensor_amax=amax), q)
    assert q.tensor_amax.shape == () and q.tensor_amax == 40
    assert not np.array_equal(q.tensor_scale, fp4kit.quantize(ORDINARY, name).tensor_scale)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_amax_is_the_amax(name):
    r = RECIPES[name]
    a = np.abs(ORDINARY)
    blocks = a.reshape(128, -1, r.block_size) if r.block else a[:, None]
    tall = np.maximum.reduceat(blocks.max(axis=-1), np.arange(0, 128, r.block_rows)).repeat(r.block_rows, axis=0)
    expected = {"tensor": a.max(), "row": a.max(axis=1), "block": tall, "none": None}[r.tensor_scaling]
    amax = fp4kit.quantize(ORDINARY, name).tensor_amax
    assert (amax is None) == (expected is None)
    if expected is not None:
        assert_same_bits(amax, np.asarray(expected))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling == "tensor"])
@pytest.mark.parametrize("view", ["contiguous", "strided"])
def test_an_amax_for_each_expert(name, view):
    x = ordinary(8, (4, 32, 128))
    amax = np.array([3, 50, 0.5, 700], np.float32)
    seen = x if view == "contiguous" else as_strided(x)
    q = fp4kit.quantize(seen, name, tensor_amax=amax)
    assert q.tensor_scale.shape == (4,)
    assert_same_bits(fp4kit.quantize(x, name, tensor_amax=amax.reshape(4, 1, 1)), q)
    values = fp4kit.dequantize(q)
    for i in range(4):
        one = fp4kit.quantize(x[i], name, tensor_amax=amax[i])
        assert_same_bits(q.packed[i], one.packed)
        assert_same_bits(q.tensor_scale[i : i + 1], one.tensor_scale.reshape(1))
        if q.block_scale is not None:
            assert_same_bits(q.block_scale[i], one.block_scale)
        assert_same_bits(values[i], fp4kit.dequantize(one))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].tensor_scaling == "tensor"])
def test_an_amax_for_each_expert_of_four_dimensions(name):
    x, amax = ordinary(9, (3, 2, 16, 128)), np.array([3, 50, 0.5], np.float32)
    q = fp4kit.quantize(x, name, tensor_amax=amax)
    values = fp4kit.dequantize(q)
    for i, j in np.ndindex(3, 2):
        one = fp4kit.quantize(x[i, j], name, tensor_amax=amax[i])
        assert_same_bits(q.packed[i, j], one.packed)
        assert_same_bits(values[i, j], fp4kit.dequantize(one))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].static])
def test_block_amaxes_can_be_given(name):
    x = ordinary(10, (2, 16, 64))
    q, amax = fp4kit.quantize(x, name), np.abs(x).reshape(2, 16, 4, 16).max(axis=-1)
    for given_amax in (amax, amax.reshape(-1, 1), amax.astype(np.float64)):
        assert_same_bits(fp4kit.quantize(x, name, block_amax=given_amax), q)
    half = fp4kit.quantize(x, name, block_amax=amax / 2)
    assert not np.array_equal(half.block_scale, q.block_scale)


@pytest.mark.parametrize("elements", [1 << 18, 64])
def test_block_amaxes_of_tall_blocks(elements, monkeypatch):
    """For blocks of several rows, block_amax has a row per row of x, like block_scale; rows of one block are equal.

    The last blocks may be short.
    """
    monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", elements)
    r = replace(RECIPES["nvfp4-modelopt-static"], block=(16, 16))
    for rows in (64, 40):
        x = ordinary(11, (rows, 64))
        amax = np.repeat(fp4kit.amax(x, r), 16, axis=0)[:rows]
        assert_same_bits(fp4kit.quantize(x, r, block_amax=amax), fp4kit.quantize(x, r))
        stacked = fp4kit.quantize(np.stack([x, x]), r, block_amax=np.stack([amax, amax / 2]))
        assert_same_bits(stacked.packed[1], fp4kit.quantize(x, r, block_amax=amax / 2).packed)


MAX = float(np.finfo(np.float32).max)
# {recipe: {tensor amax: decode scale}}. The quotients are exact or rounded to float32.
TENSOR_SCALES = {
    "nvfp4-te": {0: 1, 2688: 1, 5376: 2, 21: 1 / 128, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-reference": {0: 1 / MAX, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-2d": {0: 1, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: 1},
    "nvfp4-te-4over6-mse-256": {0: 1 / MAX, 1536: 1, 3072: 2},
    "nvfp4-flashinfer": {0: 1 / MAX, 2688: 1, 5376: 2, 2.0**-149: 1 / MAX, np.inf: np.inf},
    "nvfp4-modelopt": {0: 0, 2688: 1, 5376: 2, np.inf: np.inf},
    "nvfp4-torchao": {0: 0, 2688: 1, 5376: 2, np.inf: np.inf},
    "nvfp4-compressed-tensors": {0: 1, 2.0**-126: 1, 2688 * 2.0**-7: 1 / 128, np.inf: np.inf},
    "fp8-modelopt": {0: 1 / 448, 448: 1, 2.0**-24: 1 / 448, 448 * 2.0**-33: 1 / 448, 448 * 2.0**-32: 2.0**-32},
    "int8-modelopt": {0: 0, 127: 1, 2.0**-24: 0, 127 * 2.0**-30: 2.0**-30, 127 * 2.0**-32: 0},
    "int4-modelopt-channel": {0: 0, 7: 1, 2.0**-24: 0, 7 * 2.0**-26: 2.0**-26},
    "int4-qat": {0: 1e-5, 7: 1, 6e-5: 1e-5, 7 * 2.0**-16: 2.0**-16},
}


@together("name", TENSOR_SCALES)
def test_tensor_scales_by_hand(name):
    for amax, expected in TENSOR_SCALES[name].items():
        shape = {"tensor": (), "row": (1,), "block": (1, 1)}[RECIPES[name].tensor_scaling]
        q = fp4kit.quantize(np.zeros((1, 128), np.float32), name, tensor_amax=np.full(shape, amax, np.float32))
        assert_same_bits(q.tensor_scale, np.full(shape, expected, np.float32), f"tensor_scale of {amax}")
        assert_same_bits(q.tensor_amax, np.full(shape, amax, np.float32))


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d"])
def test_the_order_of_te_s_products(name):
    """TE computes amax * (encode_scale * (1/6)), not (amax * encode_scale) * (1/6)."""
    for amax, code in TE_SCALES.items():
        x = np.zeros((16, 16), np.float32)
        x[3, 5] = -amax
        assert set(fp4kit.quantize(x, name, tensor_amax=3.0).block_scale[3]) == {code}


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt-static", "mxfp4-ocp"])
def test_block_amaxes_of_the_other_axis_are_refused(recipe):
    """Block amaxes for blocks along the other axis are rejected, because they are equally many but in another order.

    Flat block amaxes, and ones with joined leading axes, are accepted.
    """
    x = ORDINARY[:64]
    rows, columns = fp4kit.amax(x, recipe), fp4kit.amax(x, recipe, axis=0)
    assert columns.size == rows.size and columns.shape != rows.shape
    for wrong in (columns, rows.T):
        text = f"quantize: block_amax has shape {wrong.shape}; {recipe} needs {rows.shape}"
        with pytest.raises(ValueError, match=re.escape(text)):
            fp4kit.quantize(x, recipe, block_amax=wrong)
    expected = fp4kit.quantize(x, recipe, block_amax=rows)
    for right in (rows.reshape(-1), rows.reshape(-1, 1), rows[..., None], rows.reshape(4, 16, -1)):
        assert_same_bits(fp4kit.quantize(x, recipe, block_amax=right), expected)
    stacked = fp4kit.quantize(x.reshape(4, 16, -1), recipe, block_amax=rows)
    assert_same_bits(stacked.packed.reshape(expected.packed.shape), expected.packed)


def test_tensor_amaxes_of_blocks_of_the_other_axis_are_refused():
    x = np.resize(ORDINARY, (256, 128))
    rows, columns = (fp4kit.quantize(x, "int4-qat", axis=axis).tensor_amax for axis in (1, 0))
    with pytest.raises(ValueError, match=r"quantize: tensor_amax has shape \(128, 2\); int4-qat needs \(256, 1\)"):
        fp4kit.quantize(x, "int4-qat", tensor_amax=columns)
    expected = fp4kit.quantize(x, "int4-qat")
    for right in (rows, rows.reshape(-1), rows[None]):
        assert_same_bits(fp4kit.quantize(x, "int4-qat", tensor_amax=right), expected)
