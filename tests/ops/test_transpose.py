"""Test transpose: it gives the bytes of quantizing along the other axis, and two transposes give the original."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4kit
import fp4kit.layouts
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits

SQUARE = ("nvfp4-te-2d", "nvfp4-te-reference-2d", "nvfp4-te-4over6-mae-256-2d", "mxfp8-te-2d")


@given(
    name=st.sampled_from(SQUARE),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    layout=st.sampled_from(fp4kit.layouts.SCALE_LAYOUTS),
    axis=st.sampled_from([-1, -2]),
    seed=st.integers(0, 9),
)
def test_equals_quantizing_the_other_axis(name, lead, rows, columns, layout, axis, seed) -> None:
    size = fp4kit.recipe(name).block_size
    x = np.random.default_rng(seed).standard_normal((*lead, rows * size, columns * size)).astype(np.float32)
    q = fp4kit.quantize(x, name, axis=axis, scale_layout=layout)
    other = fp4kit.transpose(q)
    expected = fp4kit.quantize(x, name, axis=-3 - axis, scale_layout=layout)
    assert other.axis == expected.axis and other.scale_layout == layout
    assert_same_bits(other, expected)
    assert_same_bits(fp4kit.transpose(other), q)


@pytest.mark.parametrize("name", SQUARE[:1])
def test_adversarial_and_wide(name) -> None:
    x = np.resize(adversarial_blocks(), (64, 256))
    q = fp4kit.quantize(x, name)
    assert_same_bits(fp4kit.transpose(q), fp4kit.quantize(x, name, axis=0))
    assert_same_bits(fp4kit.dequantize(fp4kit.transpose(q)), fp4kit.dequantize(q))


def test_tall_matrix_is_cut_into_columns(monkeypatch) -> None:
    monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", 100)
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    assert_same_bits(fp4kit.transpose(fp4kit.quantize(x, "nvfp4-te-2d")), fp4kit.quantize(x, "nvfp4-te-2d", axis=0))


@pytest.mark.parametrize(
    ("name", "shape", "axis", "message"),
    [
        ("nvfp4-te", (32, 32), -1, "transpose: nvfp4-te has 1x16 blocks; needs square blocks, such as"),
        ("fp8-modelopt", (32, 32), -1, "transpose: fp8-modelopt has 1x1 blocks; needs square blocks"),
        ("fp8-deepgemm-block", (128, 128), -1, "transpose: fp8-deepgemm-block has float32 scales; needs block"),
        ("nvfp4-te-2d", (16, 32, 32), 0, "transpose: q has axis 0 of a 3-d array; needs one of the last two axes"),
        ("nvfp4-te-2d", (32,), 0, "transpose: q has axis 0 of a 1-d array; needs one of the last two axes"),
        ("nvfp4-te-2d", (40, 32), -1, "transpose: the other axis has length 40; needs a multiple of 16"),
    ],
)
def test_errors(name, shape, axis, message) -> None:
    q = fp4kit.quantize(np.ones(shape, np.float32), name, axis=axis)
    with pytest.raises(ValueError, match=re.escape(message)):
        fp4kit.transpose(q)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 32, 32), (2, 0, 16)])
def test_transpose_of_empty_arrays(shape) -> None:
    x = np.zeros(shape, np.float32)
    q = fp4kit.quantize(x, "nvfp4-te-2d", scale_layout="swizzled_8x4")
    assert_same_bits(fp4kit.transpose(q), fp4kit.quantize(x, "nvfp4-te-2d", axis=-2, scale_layout="swizzled_8x4"))


def test_needs_a_quantized() -> None:
    with pytest.raises(
        TypeError, match=re.escape("transpose: q is ndarray; needs a Quantized, as fp4kit.quantize returns")
    ):
        fp4kit.transpose(np.ones(3))
