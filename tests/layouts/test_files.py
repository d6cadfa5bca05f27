"""Test pack_gguf, pack_mlx and their inverses: bytes are the documented ones, and each function undoes its inverse."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from together import together

from fp4kit import layouts
from fp4kit.evidence.testing import assert_same_bits

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
ERRORS = {
    "another format": (
        partial(layouts.pack_gguf, B(2, 32), B(2, 2), "mxfp8"),
        ValueError,
        "pack_gguf: format is 'mxfp8'; needs one of mxfp4, nvfp4, llama.cpp's formats",
    ),
    "wrong codes": (
        partial(layouts.pack_gguf, B(2, 32).astype(int), B(2, 2), "mxfp4"),
        TypeError,
        "pack_gguf: codes are int64; needs uint8",
    ),
    "wrong scales": (
        partial(layouts.pack_gguf, B(2, 32), np.ones((2, 2), np.float32), "mxfp4"),
        TypeError,
        "pack_gguf: scales are float32; needs uint8",
    ),
    "32 elements of NVFP4": (
        partial(layouts.pack_gguf, B(2, 16), B(2, 2), "nvfp4"),
        ValueError,
        "pack_gguf: the last axis of packed has length 16; nvfp4 has blocks of 64 elements; needs a multiple of 32",
    ),
    "scales that do not fit": (
        partial(layouts.pack_gguf, B(2, 32), B(2, 4), "mxfp4"),
        ValueError,
        "pack_gguf: scales are (2, 4); packed (2, 32) of mxfp4 needs linear scales (2, 2)",
    ),
    "half a block": (partial(layouts.unpack_gguf, B(2, 16), "mxfp4"), ValueError, "unpack_gguf: the last axis of raw"),
    "one byte": (
        partial(layouts.unpack_gguf, np.array(1, np.uint8), "mxfp4"),
        ValueError,
        "unpack_gguf: bytes are 0-d; needs at least one axis",
    ),
    "half a word": (partial(layouts.pack_mlx, B(2, 6)), ValueError, "pack_mlx: the last axis of packed has length 6"),
    "bytes for words": (partial(layouts.unpack_mlx, B(2, 4)), TypeError, "unpack_mlx: words are uint8; needs uint32"),
    "one word": (partial(layouts.unpack_mlx, np.array(1, np.uint32)), ValueError, "unpack_mlx: words are 0-d; needs"),
}


@together("name", ERRORS)
def test_errors(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text
