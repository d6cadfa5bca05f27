"""Test swizzle, unswizzle, pack and unpack: bytes are at the documented offsets, and each function undoes its
inverse.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4kit
from fp4kit import layouts
from fp4kit.evidence.testing import assert_same_bits

TILED = layouts.SCALE_LAYOUTS[1:]


def _offset(layout: str, r: int, c: int, columns: int) -> int:
    tiles = -(-columns // 4)
    if layout == "swizzled_8x4":
        return (r // 8 * tiles + c // 4) * 32 + r % 8 * 4 + c % 4
    return (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


@given(layout=st.sampled_from(TILED), lead=st.sampled_from([(), (2,)]), R=st.integers(1, 300), C=st.integers(1, 20))
def test_offsets_and_padding(layout, lead, R, C) -> None:
    scales = np.random.default_rng(R * 31 + C).integers(1, 256, (*lead, R, C)).astype(np.uint8)
    swizzled = fp4kit.swizzle(scales, layout)
    flat = swizzled.reshape(*lead, -1)
    expected = np.zeros_like(flat)
    r, c = np.mgrid[:R, :C]
    expected[..., np.vectorize(_offset)(layout, r, c, C)] = scales
    assert_same_bits(flat, expected)
    assert_same_bits(fp4kit.unswizzle(swizzled, layout, scales.shape), scales)
    assert_same_bits(fp4kit.unswizzle(swizzled.reshape(-1), layout, scales.shape), scales)


@pytest.mark.parametrize("layout", layouts.SCALE_LAYOUTS)
def test_quantized_between_any_layouts(layout) -> None:
    x = np.random.default_rng(9).standard_normal((2, 40, 96)).astype(np.float32)
    linear = fp4kit.quantize(x, "nvfp4-te")
    q = fp4kit.quantize(x, "nvfp4-te", scale_layout=layout)
    assert_same_bits(fp4kit.unswizzle(q), linear)
    for other in layouts.SCALE_LAYOUTS:
        assert_same_bits(fp4kit.swizzle(q, other), fp4kit.quantize(x, "nvfp4-te", scale_layout=other))
    assert_same_bits(fp4kit.dequantize(q), fp4kit.dequantize(linear))


@given(st.integers(0, 60), st.integers(0, 5))
def test_pack_and_unpack(half, rows) -> None:
    codes = np.random.default_rng(half).integers(0, 16, (rows, 2 * half)).astype(np.uint8)
    packed = fp4kit.pack(codes)
    assert packed.shape == (rows, half)
    assert_same_bits(fp4kit.unpack(packed), codes)
    assert_same_bits(packed & 15, codes[:, 0::2])
    assert_same_bits(packed >> 4, codes[:, 1::2])


def test_pack_of_all_bytes() -> None:
    every = np.arange(256, dtype=np.uint8)
    assert_same_bits(fp4kit.pack(fp4kit.unpack(every)), every)


def test_pad() -> None:
    x = np.ones((3, 5), np.float32)
    assert layouts.pad(x, 5) is x
    padded = layouts.pad(x, 16)
    assert padded.shape == (3, 16) and padded[:, 5:].sum() == 0 and padded.sum() == 15
    assert layouts.pad(x, 4, axis=0).shape == (4, 5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp4kit.pack(np.zeros(3, np.uint8)), ValueError, "pack: the last axis has length 3; two codes"),
        (lambda: fp4kit.pack(np.full(2, 16, np.uint8)), ValueError, "pack: codes hold 16; needs 4-bit codes, 0 to"),
        (lambda: fp4kit.pack(np.zeros(2, int)), TypeError, "pack: codes are int64; needs uint8"),
        (lambda: fp4kit.unpack(np.uint8(3)), ValueError, "unpack: codes are 0-d; needs at least one axis"),
        (lambda: fp4kit.swizzle(np.zeros((2, 2), np.uint8), "128x4"), ValueError, "scale_layout is '128x4'; needs"),
        (lambda: fp4kit.swizzle(np.zeros((2, 2)), TILED[0]), TypeError, "swizzle: scales are float64; needs uint8"),
        (lambda: fp4kit.swizzle(np.zeros(2, np.uint8), TILED[0]), ValueError, "swizzle: scales are 1-d; needs"),
        (lambda: fp4kit.unswizzle(np.zeros(9, np.uint8)), ValueError, "unswizzle: layout or shape is missing; an"),
        (lambda: fp4kit.unswizzle(np.zeros(9, np.uint8), TILED[0], (3, 3)), ValueError, "unswizzle: (9,) holds 9"),
        (
            lambda: fp4kit.swizzle(fp4kit.quantize(np.ones(4, np.float32), "fp8-modelopt"), TILED[0]),
            ValueError,
            "swizzle: fp8-modelopt has no block scales; needs a recipe with block",
        ),
        (
            lambda: fp4kit.swizzle(fp4kit.quantize(np.ones(32, np.float32), "nvfp4-te"), TILED[0]),
            ValueError,
            "swizzle: q is 1-d; swizzled_128x4 scales need the rows of a matrix;",
        ),
        *(
            (
                lambda facts=facts: fp4kit.unswizzle(fp4kit.quantize(np.ones((2, 32), np.float32), "nvfp4-te"), *facts),
                ValueError,
                "unswizzle: layout or shape was given for a Quantized, which has both; leave them out, or pass its",
            )
            for facts in (["linear"], [None, (2, 2)])
        ),
        (lambda: layouts.shuffle_rows(20, 64), ValueError, "shuffle_rows: M is 20; needs a multiple of 16"),
    ],
)
def test_errors(call, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_unswizzle_from_linear_is_a_reshape() -> None:
    scales = np.arange(24, dtype=np.uint8)
    assert_same_bits(fp4kit.unswizzle(scales, "linear", (2, 3, 4)), scales.reshape(2, 3, 4))
    assert_same_bits(fp4kit.unswizzle(scales.reshape(6, 4), "linear", (6, 4)), scales.reshape(6, 4))
