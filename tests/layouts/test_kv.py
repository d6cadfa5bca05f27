"""Test the pages of KV caches: every byte lies where a statement of the layouts puts it, and errors name the fault."""

from __future__ import annotations

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from together import together

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import kv

SHAPES = [(1, 4, 1, 64), (3, 8, 2, 64), (2, 16, 3, 128), (2, 4, 5, 192), (5, 12, 4, 256)]
LINEAR_SHAPES = [(2, 3, 5, 16), (1, 1, 1, 48), (4, 7, 2, 80)]  # allowed without a swizzle only
CASES = [(name, shape) for name in kv.KV_LAYOUTS for shape in SHAPES + LINEAR_SHAPES * (not name.endswith("swizzled"))]


def random_bytes(rng, *shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def random_parts(rng, tokens, heads, head_dim):
    codes, scales = (tokens, heads, head_dim // 2), (tokens, heads, head_dim // 16)
    return kv.KVParts(*(random_bytes(rng, *each) for each in (codes, scales, codes, scales)))


def stated_places(name, shape, slot, head):
    """Yield (part, index in the part, array, byte offset in the page, its bytes) of every byte of a slot and head.

    It states the layouts of vLLM's and FlashInfer's kernels in scalar arithmetic.
    """
    container, order, *swizzled = name.split("-")
    _, B, H, D = shape
    t, S = slot % B, D // 16

    def vector(token):
        return head * B + token if order == "hnd" else token * H + head

    for side in (0, 1):
        base = side * H * B * (D // 2 + S) if container == "vllm" else 0
        for j in range(D // 2):
            array = 0 if container == "vllm" else side
            yield 2 * side, j, array, base + vector(t) * (D // 2) + j
        for s in range(S):
            token, place = t, s
            if side == 1 and swizzled:
                offset = 4 * s + t % 4  # within the 4 * S scales of a group of four tokens
                token, place = t // 4 * 4 + offset // S, offset % S
            array = 0 if container == "vllm" else 2 + side
            scales = base + (H * B * (D // 2) if container == "vllm" else 0)
            yield 2 * side + 1, s, array, scales + vector(token) * S + place


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_every_byte_lies_where_the_layout_says(name, shape):
    rng = np.random.default_rng(sum(shape))
    pages, B, H, D = shape
    cache = kv.KV_LAYOUTS[name].zeros(kv.PageShape(*shape))
    for array in cache.arrays:
        array[:] = random_bytes(rng, *array.shape)
    expected = [array.copy().reshape(pages, -1) for array in cache.arrays]
    slots = rng.permutation(pages * B)[: max(pages * B // 2, 1)]
    parts = random_parts(rng, len(slots), H, D)
    for i, slot in enumerate(slots):
        for head in range(H):
            for part, j, array, offset in stated_places(name, shape, slot, head):
                expected[array][slot // B, offset] = parts[part][i, head, j]
    cache.write(slots, parts)
    for array, bytes in zip(cache.arrays, expected, strict=True):
        assert_same_bits(array.reshape(pages, -1), bytes)
    for read, given in zip(cache.read(slots), parts, strict=True):
        assert_same_bits(read, given)


@together("source, target", [*product(kv.KV_LAYOUTS, kv.KV_LAYOUTS)])
def test_conversion_keeps_every_vector_and_is_undone(source, target):
    rng = np.random.default_rng(5)
    cache = kv.KV_LAYOUTS[source].zeros(kv.PageShape(3, 8, 2, 64))
    cache.write(np.arange(24), random_parts(rng, 24, 2, 64))
    converted = cache.converted(target)
    assert converted.layout.name == target and converted.shape == cache.shape
    for got, expected in zip(converted.read(), cache.read(), strict=True):
        assert_same_bits(got, expected)
    into = kv.KV_LAYOUTS[source].zeros(cache.shape)
    assert converted.converted(source, out=into) is into
    for got, expected in zip(into.arrays, cache.arrays, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("S", [4, 8, 12, 32])
def test_swizzle_is_a_permutation_that_stays_in_groups_of_four_tokens(S):
    places = [kv.v_scale_position(t, s, S) for t in range(16) for s in range(S)]
    assert sorted(places) == [(t, s) for t in range(16) for s in range(S)]
    # FlashInfer's statement of it: [T/4, 4, 4, S/4] -> permute(0, 2, 3, 1)
    linear = np.arange(16 * S).reshape(4, 4, 4, S // 4)
    assert_same_bits(
        np.array([t * S + s for t, s in places])[linear.transpose(0, 2, 3, 1).reshape(-1)], np.arange(16 * S)
    )
    arrays = kv.v_scale_position(np.arange(16)[:, None], np.arange(S), S)
    assert [*zip(*(a.reshape(-1).tolist() for a in arrays), strict=True)] == places


def test_padding_slots_are_skipped():
    cache = kv.KV_LAYOUTS["vllm-nhd-swizzled"].zeros(kv.PageShape(2, 4, 1, 64))
    parts = random_parts(np.random.default_rng(0), 4, 1, 64)
    cache.write([-1, 3, -7, 0], parts)
    untouched = [slot for slot in range(8) if slot not in (0, 3)]
    assert not any(part[untouched].any() for part in cache.read())
    for read, given in zip(cache.read([3, 0]), parts, strict=True):
        assert_same_bits(read, given[[1, 3]])
    cache.write(np.zeros(0, np.int32), random_parts(np.random.default_rng(1), 0, 1, 64))
    cache.write([], random_parts(np.random.default_rng(1), 0, 1, 64))


def test_views_of_larger_arrays_are_written_in_place():
    rng = np.random.default_rng(2)
    layers = np.zeros((3, 2, 4, 8, 2, 36), np.uint8)  # K and V in separate halves of one array, as vLLM may allocate
    pages = layers.swapaxes(1, 2)[1]
    cache = kv.KVCache("vllm-nhd", pages)
    parts = random_parts(rng, 32, 2, 64)
    cache.write(np.arange(32), parts)
    assert layers[1].any() and not layers[[0, 2]].any()
    for read, given in zip(cache.read(), parts, strict=True):
        assert_same_bits(read, given)
    arrays = [np.zeros((9, 4, 2, n), np.uint8)[::2] for n in (32, 32, 4, 4)]
    arrays[2] = arrays[2].view(ml_dtypes.float8_e4m3fn)
    strided = kv.KVCache("flashinfer-hnd", arrays)
    strided.write(np.arange(10), kv.KVParts(*(np.repeat(part[:10], 2, axis=1) for part in parts)))
    assert arrays[2].view(np.uint8).any()
    for read, given in zip(strided.read(np.arange(10)), parts, strict=True):
        assert_same_bits(read, np.repeat(given[:10], 2, axis=1))


def two_parts():
    return random_parts(np.random.default_rng(0), 2, 2, 64)


def pages(*shape):
    return np.zeros(shape, np.uint8)


def zeros(name, *shape):
    return kv.KV_LAYOUTS[name].zeros(kv.PageShape(*shape))


def write(slots, **changed):
    parts = two_parts()._replace(**changed)
    zeros("vllm-hnd", 2, 4, 2, 64).write(slots, parts)


def read_only():
    cache = zeros("flashinfer-nhd", 2, 4, 2, 64)
    cache.arrays[3].flags.writeable = False
    cache.write([0, 1], two_parts())


def shared():
    """Return a cache whose keys and values are the same arrays, and one whose pages are one page."""
    codes, scales = (np.zeros((2, 4, 2, n), np.uint8) for n in (32, 4))
    page = np.zeros((1, 2, 4, 2, 36), np.uint8)
    pages = np.lib.stride_tricks.as_strided(page, (2, *page.shape[1:]), (0, *page.strides[1:]))
    return kv.KVCache("flashinfer-nhd", (codes, codes, scales, scales)), kv.KVCache("vllm-nhd", pages)


BYTES = np.zeros((2, 2, 3), np.uint8)
MISTAKES = [  # a call, and the key phrase of its ValueError
    (lambda: kv.KVLayout("VLLM", "nhd", False), "KVLayout: container is 'VLLM'; needs one of 'vllm', 'fl"),
    (lambda: kv.KVLayout("vllm", "NHD", False), "KVLayout: order is 'NHD'; needs one of 'nhd', 'hnd'"),
    (lambda: shared()[0].write([0, 1], two_parts()), "KVCache.write: two bytes of the cache share memory"),
    (lambda: shared()[1].write([0, 1], two_parts()), "KVCache.write: two bytes of the cache share memory"),
    (lambda: kv.KVCache("vllm", BYTES), "KVCache: layout is 'vllm'; needs one of vllm-nhd, vllm-hnd"),
    (lambda: zeros("vllm-nhd", 1, 1, 1, 24), "head_dim is 24; vllm-nhd, with one scale per 16 elements"),
    (lambda: zeros("vllm-hnd-swizzled", 1, 4, 1, 80), "head_dim is 80; vllm-hnd-swizzled"),
    (lambda: zeros("flashinfer-nhd-swizzled", 1, 6, 1, 64), "block_size is 6; flashinfer-nhd-swizzled, which"),
    (lambda: kv.KVCache("vllm-nhd-swizzled", pages(1, 2, 6, 1, 36)), "block_size is 6; vllm-nhd-swizzled"),
    (lambda: zeros("vllm-nhd", 0, 4, 1, 64), "pages is 0; needs at least 1"),
    (lambda: kv.KVCache("flashinfer-nhd", BYTES), "got 1 arrays; flashinfer-nhd needs 4: k_codes"),
    (lambda: kv.KVCache("vllm-nhd", BYTES), r"pages has shape (2, 2, 3); vllm-nhd needs"),
    (lambda: kv.KVCache("vllm-hnd", pages(1, 2, 4, 4, 32)), "last axis of pages has length 32"),
    (lambda: kv.KVCache("vllm-hnd", pages(1, 2, 4, 4, 48)), "last axis of pages has length 48"),
    (lambda: kv.KVCache("vllm-hnd", pages(1, 3, 4, 4, 36)), "pages has shape (1, 3, 4, 4"),
    (lambda: kv.KVCache("vllm-nhd", pages(2, 2, 3, 4, 36).swapaxes(2, 3)), "the bytes of a page are not adjacent"),
    (lambda: kv.KVCache("flashinfer-nhd", [pages(2, 4, 3, n) for n in (32, 32, 4, 2)]), "v_scales has shape (2, 4, 3"),
    (lambda: write([0, 1], k_scales=BYTES), "k_scales have shape (2, 2, 3); needs (2, 2, 4), one row per"),
    (lambda: write([0]), "k_codes have shape (2, 2, 32); needs (1, 2, 32)"),
    (lambda: write([0, 8]), "KVCache.write: slot 8 is out of range; 2 pages of 4 tokens have slots 0 to 7"),
    (lambda: write([3, 3]), "KVCache.write: slot 3 occurs twice"),
    (lambda: write([[0, 1]]), "slots have shape (1, 2); needs (tokens,)"),
    (lambda: zeros("vllm-nhd", 2, 4, 1, 64).read([0, -1]), "KVCache.read: slot -1 is out of range"),
    (read_only, "an array of the cache is read-only"),
    (lambda: zeros("vllm-nhd", 2, 4, 1, 64).converted("vllm-hnd", zeros("vllm-hnd", 2, 8, 1, 64)), "(2, 8, 1, 64); "),
    (lambda: kv.v_scale_position(0, 0, 6), "scales is 6; needs a positive multiple of 4"),
]
TYPE_MISTAKES = [
    (lambda: kv.KVCache("vllm-nhd", np.zeros((1, 2, 4, 1, 36), np.int8)), "pages are int8; needs uint8"),
    (lambda: kv.KVCache("vllm-nhd", "x"), "pages are a builtins.str; needs an array of NumPy or CuPy"),
    (lambda: write([0.0, 1.0]), "slots are float64; needs integers"),
    (lambda: write(np.ma.array([0, 1], mask=[True, False])), "slots is a masked array, whose mask would be"),
    (lambda: kv.KVLayout("vllm", "nhd", "no"), "KVLayout: swizzled is 'no'; needs True or False"),
    (lambda: write([0, 1], v_codes=np.zeros((2, 2, 32), np.float32)), "v_codes are float32; needs uint8"),
    (lambda: zeros("vllm-nhd", 1.5, 4, 1, 64), "pages is 1.5"),
]
ERRORS = [(ValueError, *row) for row in MISTAKES] + [(TypeError, *row) for row in TYPE_MISTAKES]


@together("kind, call, message", ERRORS)
def test_mistakes_are_named(kind, call, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_out_shares_no_memory():
    cache = zeros("vllm-nhd", 2, 4, 1, 64)
    with pytest.raises(ValueError, match="shares memory"):
        cache.converted("vllm-nhd", out=kv.KVCache("vllm-nhd", cache.arrays))


@pytest.mark.exhaustive
@together("seed", range(100))
def test_drawn_sizes(seed):
    rng = np.random.default_rng(seed)
    name = rng.choice([*kv.KV_LAYOUTS])
    swizzled = name.endswith("swizzled")
    shape = (
        int(rng.integers(1, 6)),
        int(rng.integers(1, 9)) * (4 if swizzled else 1),
        int(rng.integers(1, 9)),
        int(rng.integers(1, 9)) * (64 if swizzled else 16),
    )
    test_every_byte_lies_where_the_layout_says(str(name), shape)
