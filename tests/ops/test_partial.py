"""Test partial_amax and partial_cast: however a matrix is divided into flat shards, they give the bytes of the whole
matrix.
"""

from __future__ import annotations

import re
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from exhaustive import sampled
from hypothesis import given
from hypothesis import strategies as st
from together import together

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.reference.quantize import segments

NAMES = ("nvfp4-te-2d", "nvfp4-te", "nvfp4-modelopt", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te", "mxfp8-te-2d")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def _cast(x: np.ndarray, name: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the block amaxes and codes of x by the recipe `name`, computed shard by shard.

    The output is filled with wrong bits first, so that missing codes are found. cuts: the indices at which the flat
    matrix is divided into shards.
    """
    flat, edges = x.reshape(-1), [0, *sorted(cuts), x.size]
    pairs = list(pairwise(edges))
    parts = [fp4kit.partial_amax(flat[a:b], x.shape, a, name) for a, b in pairs]
    amax = np.max(parts, axis=0)
    out = np.full(fp4kit.quantize(x, name).packed.shape, 0xA5, np.uint8)
    for a, b in pairs:
        fp4kit.partial_cast(flat[a:b], out, amax, x.shape, a, name)
    return amax, out


@sampled(
    100,
    600,
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    fractions=st.lists(st.floats(0, 1), max_size=5),
    seed=st.integers(0, 99),
)
def test_any_cuts_give_the_whole(name, dtype, rows, blocks, fractions, seed) -> None:
    K = blocks * fp4kit.recipe(name).block_size
    x = np.random.default_rng(seed).standard_normal((rows, K)).astype(dtype)
    amax, out = _cast(x, name, [int(f * x.size) for f in fractions])
    assert_same_bits(amax, fp4kit.amax(x, name))
    assert_same_bits(out, fp4kit.quantize(x, name).packed)


def test_every_cut_of_a_small_matrix() -> None:
    x = np.random.default_rng(1).standard_normal((17, 16)).astype(np.float32)
    expected = fp4kit.quantize(x, "nvfp4-te-2d").packed
    for cut in range(x.size + 1):
        assert_same_bits(_cast(x, "nvfp4-te-2d", [cut])[1], expected)


@pytest.mark.parametrize("name", NAMES[:2])
def test_adversarial(name) -> None:
    x = adversarial_blocks()
    cuts = [1, 127, 129, 1000, 1001, 4097]
    assert_same_bits(_cast(x, name, cuts)[1], fp4kit.quantize(x, name).packed)


def test_neighbouring_nibbles_stay() -> None:
    x = np.full(64, 3, np.float32)
    amax = np.full((1, 4), 6, np.float32)
    out = np.zeros((1, 32), np.uint8)
    fp4kit.partial_cast(x[5:6], out, amax, (1, 64), 5, "nvfp4-te-2d")
    assert out[0, 2] == 0x50 and np.count_nonzero(out) == 1
    out[:] = 0xFF
    fp4kit.partial_cast(x[4:5], out, amax, (1, 64), 4, "nvfp4-te-2d")
    assert out[0, 2] == 0xF5 and np.count_nonzero(out != 0xFF) == 1


def test_tensor_amax_given_and_strided_out() -> None:
    x = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32)
    whole = fp4kit.quantize(x, "nvfp4-te-2d", tensor_amax=9.0)
    out = np.zeros((32, 64), np.uint8)[:, ::2]
    fp4kit.partial_cast(x.ravel(), out, fp4kit.amax(x, "nvfp4-te-2d"), x.shape, 0, "nvfp4-te-2d", tensor_amax=9.0)
    assert_same_bits(np.ascontiguousarray(out), whole.packed)


@pytest.mark.parametrize("name", NAMES)
def test_infinities(name) -> None:
    """partial_cast gives the bytes of quantize for a matrix with infinities, whose blocks have infinite amaxes.

    For the recipe that takes its tensor amax over finite elements only, that amax is given.
    """
    x = np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32)
    x[3, 5], x[20, 40] = np.inf, -np.inf
    whole, amax = fp4kit.quantize(x, name), fp4kit.amax(x, name)
    out = np.zeros_like(whole.packed)
    limit = whole.tensor_amax if name == "nvfp4-flashinfer" else None
    fp4kit.partial_cast(x.ravel(), out, amax, x.shape, 0, name, tensor_amax=limit)
    assert_same_bits(out, whole.packed)


@given(start=st.integers(0, 200), length=st.integers(0, 400), K=st.integers(1, 50))
def test_segments_cover_the_slice_once(start, length, K) -> None:
    covered = []
    for rows, columns, elements in segments(start, length, K):
        assert columns.stop <= K and (rows.stop - rows.start == 1 or (columns.start, columns.stop) == (0, K))
        count = (rows.stop - rows.start) * (columns.stop - columns.start)
        assert elements.stop - elements.start == count and rows.start * K + columns.start == start + elements.start
        covered += range(elements.start, elements.stop)
    assert covered == list(range(length))


X = np.ones(64, np.float32)
AMAX = np.ones((1, 4), np.float32)
OUT = np.zeros((4, 8), np.uint8)


@together(
    "call, error, message",
    [
        (lambda: fp4kit.partial_amax(X, (4, 16), 1, "nvfp4-te-2d"), ValueError, "elements [1, 65) of a matrix of"),
        (lambda: fp4kit.partial_amax(X, (4, 16), -1, "nvfp4-te-2d"), ValueError, "elements [-1, 63) of a matrix of"),
        (lambda: fp4kit.partial_amax(X, (8, 8), 0, "nvfp4-te-2d"), ValueError, "axis 1 has length 8; nvfp4-te-2d"),
        (lambda: fp4kit.partial_amax(X[None], (4, 16), 0, "nvfp4-te-2d"), ValueError, "shard is 2-d; needs the 1-d"),
        (lambda: fp4kit.partial_amax(X, (64,), 0, "nvfp4-te-2d"), ValueError, "shape is (64,); needs (M, K) of the"),
        (lambda: fp4kit.partial_amax(X.astype(int), (4, 16), 0, "nvfp4-te-2d"), TypeError, "shard is int64; needs"),
        (lambda: fp4kit.partial_amax(X, (4, 16), 0, "fp8-modelopt"), ValueError, "fp8-modelopt has no blocks, or"),
        (lambda: fp4kit.partial_amax(X, (4, 16), 0, "nvfp4-te-rowscaled"), ValueError, "nvfp4-te-rowscaled has no"),
        (lambda: _call(OUT[:, :4]), ValueError, "out is uint8 (4, 4); needs uint8 (4, 8)"),
        (lambda: _call(OUT.astype(np.int8)), ValueError, "out is int8 (4, 8); needs uint8 (4, 8)"),
        (lambda: _call(OUT, AMAX), ValueError, "block_amax is float32 (1, 4); nvfp4-te-2d needs float32 (1, 1)"),
        (lambda: _call(OUT, AMAX[:, :1] * np.nan), ValueError, "block_amax is float32 with NaN"),
        (
            lambda: _call(OUT, np.array([[1], [np.inf], [2], [np.inf]], np.float32), "nvfp4-flashinfer"),
            ValueError,
            "partial_cast: block_amax holds 2 infinite value(s) of 4, but",
        ),
        (lambda: _call(OUT, name="nvfp4-te-4over6-mae-256-2d"), ValueError, "chooses scales from whole blocks"),
    ],
)
def test_errors(call, error, message) -> None:
    before = OUT.copy()
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert_same_bits(OUT, before)


def _call(out: np.ndarray, amax: np.ndarray = AMAX[:, :1], name: str = "nvfp4-te-2d") -> None:
    fp4kit.partial_cast(X, out, amax, (4, 16), 0, name)
