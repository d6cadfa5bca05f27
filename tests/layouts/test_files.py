"""Test pack_gguf, pack_mlx and their inverses: bytes are the documented ones, and each function undoes its inverse."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import numpy as np
import pytest
from together import together

from fp4kit import layouts
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import aiter

HALF = {"mxfp4": 16, "nvfp4": 8}  # distance of the two elements whose codes share a byte of GGUF
SHAPES = [(64,), (3, 128), (2, 3, 192), (0, 64), (2, 0)]


def random_bytes(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)


def stated_bytes(codes, scales, format):
    """Yield the bytes of GGUF blocks one by one, as documented for pack_gguf.

    codes, scales: the codes, one per element, and the block scales of one row.
    format: a key of GGUF_BLOCKS.
    """
    block, half = layouts.GGUF_BLOCKS[format], HALF[format]
    for first in range(0, len(codes), block.elements):
        yield from scales[first // (2 * half) :][: block.scales]
        for group in range(first, first + block.elements, 2 * half):
            yield from (codes[group + j] | codes[group + j + half] << 4 for j in range(half))


@together("format", HALF)
@together("shape", SHAPES)
def test_gguf_blocks(shape, format):
    *lead, K = shape
    codes, scales = random_bytes(*shape) & 15, random_bytes(*lead, K // (2 * HALF[format]))
    packed = layouts.pack(codes)
    raw = layouts.pack_gguf(packed, scales, format)
    rows = zip(codes.reshape(-1, K), scales.reshape(-1, scales.shape[-1]), strict=True) if codes.size else ()
    expected = np.array([list(stated_bytes(*row, format)) for row in rows], np.uint8)
    assert_same_bits(
        raw, expected.reshape(*lead, K // layouts.GGUF_BLOCKS[format].elements * layouts.GGUF_BLOCKS[format].bytes)
    )
    for ours, given in zip(layouts.unpack_gguf(raw, format), (packed, scales), strict=True):
        assert_same_bits(ours, given)


@pytest.mark.parametrize(("format", "elements", "size"), [("mxfp4", 32, 17), ("nvfp4", 64, 36)])
def test_sizes_of_gguf_blocks(format, elements, size):
    block = layouts.GGUF_BLOCKS[format]
    assert (block.elements, block.bytes) == (elements, size)


def test_strided_arrays():
    wide = random_bytes(5, 2 * 64)
    packed, scales = wide[::2, ::2], wide[::2, 1:17:2]
    raw = layouts.pack_gguf(packed, scales, "nvfp4")
    assert_same_bits(raw, layouts.pack_gguf(packed.copy(), scales.copy(), "nvfp4"))
    assert_same_bits(layouts.unpack_gguf(np.repeat(raw, 2, -1)[:, ::2], "nvfp4")[0], packed.copy())
    assert_same_bits(layouts.unpack_mlx(layouts.pack_mlx(packed)), packed.copy())


@pytest.mark.parametrize("shape", [(4,), (3, 64), (2, 3, 32), (0, 4), (2, 0)], ids=str)
def test_mlx_words(shape):
    packed = random_bytes(*shape)
    words = layouts.pack_mlx(packed)
    each = packed.reshape(*shape[:-1], shape[-1] // 4, 4).astype(np.uint32)
    assert_same_bits(words, each[..., 0] | each[..., 1] << 8 | each[..., 2] << 16 | each[..., 3] << 24)
    assert_same_bits(layouts.unpack_mlx(words), packed)
    assert np.shares_memory(words, packed) == bool(packed.size)


B = random_bytes
ERRORS = [
    (partial(layouts.pack_gguf, B(2, 32), B(2, 2), "mxfp8"), ValueError, "pack_gguf: format is 'mxfp8'; needs one of"),
    (partial(layouts.pack_gguf, B(2, 32).astype(int), B(2, 2), "mxfp4"), TypeError, "pack_gguf: codes are int64"),
    (
        partial(layouts.pack_gguf, B(2, 32), np.ones((2, 2), np.float32), "mxfp4"),
        TypeError,
        "pack_gguf: scales are float32; needs uint8",
    ),
    (partial(layouts.pack_gguf, B(2, 16), B(2, 2), "nvfp4"), ValueError, "pack_gguf: the last axis of packed has"),
    (partial(layouts.pack_gguf, B(2, 32), B(2, 4), "mxfp4"), ValueError, "pack_gguf: scales are (2, 4); packed (2"),
    (partial(layouts.unpack_gguf, B(2, 16), "mxfp4"), ValueError, "unpack_gguf: the last axis of raw"),
    (partial(layouts.unpack_gguf, np.array(1, np.uint8), "mxfp4"), ValueError, "unpack_gguf: bytes are 0-d; needs at"),
    (partial(layouts.pack_mlx, B(2, 6)), ValueError, "pack_mlx: the last axis of packed has length 6"),
    (partial(layouts.unpack_mlx, B(2, 4)), TypeError, "unpack_mlx: words are uint8; needs uint32"),
    (partial(layouts.unpack_mlx, np.array(1, np.uint32)), ValueError, "unpack_mlx: words are 0-d; needs"),
]


@together("call, kind, text", ERRORS)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        call()


def numbered(*shape):
    return np.random.default_rng(len(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(256, 8), (512, 24), (100, 6), (1, 1), (257, 9)])
def test_every_scale_lies_at_its_offset(shape):
    scales = numbered(*shape)
    shuffled = aiter.shuffle_scales(scales)
    R, C = aiter.padded_shape(shape)
    assert shuffled.shape == (R, C) and R % 256 == C % 8 == 0 and R - shape[0] < 256 and C - shape[1] < 8
    flat, seen = shuffled.reshape(-1), set()
    for r, c in product(range(R), range(C)):
        offset = (((((r // 32) * (C // 8) + c // 8) * 4 + c % 4) * 16 + r % 16) * 2 + c % 8 // 4) * 2 + r % 32 // 16
        seen.add(offset)
        assert flat[offset] == (scales[r, c] if r < shape[0] and c < shape[1] else 0)
    assert seen == set(range(R * C))
    assert np.array_equal(aiter.unshuffle_scales(shuffled, shape), scales)
    assert np.array_equal(aiter.unshuffle_scales(shuffled.reshape(-1), shape), scales)


@pytest.mark.parametrize("shape", [(16, 32), (48, 96)])
def test_every_byte_of_codes_lies_at_its_offset(shape):
    packed = numbered(*shape)
    flat = aiter.shuffle_codes(packed).reshape(-1)
    for n, k in product(range(shape[0]), range(shape[1])):
        tile = ((n // 16) * (shape[1] // 32) + k // 32) * 2 + k % 32 // 16
        assert flat[tile * 256 + (n % 16) * 16 + k % 16] == packed[n, k]
    assert np.array_equal(aiter.unshuffle_codes(flat.reshape(shape)), packed)


def test_stacks_are_rearranged_matrix_by_matrix():
    scales, packed = numbered(2, 3, 33, 5), numbered(2, 3, 32, 64)
    shuffled, codes = aiter.shuffle_scales(scales), aiter.shuffle_codes(packed)
    assert shuffled.shape == (2, 3, 256, 8) and codes.shape == packed.shape
    for i, j in np.ndindex(2, 3):
        assert np.array_equal(shuffled[i, j], aiter.shuffle_scales(scales[i, j]))
        assert np.array_equal(codes[i, j], aiter.shuffle_codes(packed[i, j]))
    assert np.array_equal(aiter.unshuffle_scales(shuffled, scales.shape), scales)
    assert np.array_equal(aiter.unshuffle_codes(codes), packed)


def test_strided_and_empty_arrays():
    scales, packed = numbered(512, 16)[::2, ::2], numbered(32, 64)[::-1]
    assert np.array_equal(aiter.shuffle_scales(scales), aiter.shuffle_scales(scales.copy()))
    assert np.array_equal(aiter.shuffle_codes(packed), aiter.shuffle_codes(packed.copy()))
    empty = numbered(0, 8)
    assert aiter.shuffle_scales(empty).shape == (0, 8) and aiter.unshuffle_scales(empty, (0, 8)).shape == (0, 8)
    assert aiter.shuffle_codes(numbered(0, 32)).shape == (0, 32) and aiter.unshuffle_codes(numbered(16, 0)).size == 0
    assert aiter.shuffle_scales(numbered(0, 33, 5)).shape == (0, 256, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: aiter.shuffle_scales(numbered(8)), ValueError, "aiter.shuffle_scales: the scales have shape (8,)"),
        (lambda: aiter.shuffle_scales(np.zeros((8, 8))), TypeError, "aiter.shuffle_scales: scales"),
        (lambda: aiter.shuffle_scales([[1]]), TypeError, "aiter.shuffle_scales: scales are a builtins.list"),
        (lambda: aiter.unshuffle_scales(numbered(256, 8), (257, 8)), ValueError, "scales have 2048 entries; shape"),
        (lambda: aiter.unshuffle_scales(numbered(256, 8), (-1, 8)), ValueError, "aiter.unshuffle_scales"),
        (lambda: aiter.unshuffle_scales(numbered(256, 8), 8), TypeError, "aiter.unshuffle_scales"),
        (lambda: aiter.shuffle_codes(numbered(8, 32)), ValueError, "aiter.shuffle_codes: packed has shape (8, 32)"),
        (lambda: aiter.unshuffle_codes(numbered(16, 48)), ValueError, "aiter.unshuffle_codes: packed has shape (16"),
        (lambda: aiter.shuffle_codes(numbered(32)), ValueError, "aiter.shuffle_codes: packed has shape (32,)"),
        (lambda: aiter.shuffle_codes(np.zeros((16, 32), np.int8)), TypeError, "aiter.shuffle_codes: packed"),
        (lambda: aiter.padded_shape((8,)), ValueError, "aiter.padded_shape"),
    ],
)
def test_errors_of_aiter(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith("aiter.") and text in str(raised.value)
