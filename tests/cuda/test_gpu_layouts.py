"""Test transpose, swizzle, unswizzle, pack and unpack on CuPy arrays: they give the bytes of the CPU.

Without a GPU, the kernels run on the CPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from on_gpu import ON_GPU, assert_same, cupy, differing, gpu_only

import fp4kit
from fp4kit.layouts import (
    SCALE_LAYOUTS,
    aiter,
    pack,
    pack_gguf,
    pack_mlx,
    swizzle_scales,
    unpack,
    unpack_gguf,
    unpack_mlx,
    unswizzle_scales,
)
from fp4kit.quantized.container import packed_shape, scale_shape
from fp4kit.recipes import RECIPES, Recipe

pytestmark = ON_GPU

SQUARE = ("nvfp4-te-2d", "mxfp8-te-2d")


def random_bytes(shape: tuple[int, ...]) -> np.ndarray:
    """Return random bytes without zeros, so that they differ from padding."""
    return np.random.default_rng(prod(shape)).integers(1, 256, shape, np.uint8)


def square_blocks(r: Recipe, layout: str, shape: tuple[int, ...]) -> fp4kit.Quantized:
    """Return a Quantized with random codes and with scales that are equal in all rows of a block.

    The padding of its scales is not zero.

    layout: the layout of the scales.
    """
    linear = scale_shape(shape, r)
    scales = np.repeat(random_bytes((*linear[:-2], linear[-2] // r.block_size, linear[-1])), r.block_size, axis=-2)
    padding = swizzle_scales(np.ones_like(scales), layout) == 0
    laid_out = swizzle_scales(scales, layout) | padding * np.uint8(0xEE)
    packed = random_bytes(packed_shape(shape, r))
    amax = None if r.tensor_rule is None else np.ones((), np.float32)
    return fp4kit.Quantized(packed, laid_out, amax, amax, shape, np.float32, len(shape) - 1, r, layout)


def moved(q: fp4kit.Quantized, move=None) -> fp4kit.Quantized:
    """Return q with its arrays on the device, changed by `move` if it is given."""
    moved = q.to("cupy")
    return moved if move is None else replace(moved, packed=move(moved.packed), block_scale=move(moved.block_scale))


def strided(a):
    """Return a copy with equal bytes and gaps along the last axis."""
    wide = cupy.full((*a.shape[:-1], 2 * a.shape[-1]), 0xEE, np.uint8)
    wide[..., ::2] = a
    return wide[..., ::2]


def misaligned(a):
    """Return a contiguous copy with equal bytes at an odd address."""
    room = cupy.full(a.size + 17, 0xEE, np.uint8)
    room[1 : a.size + 1] = a.reshape(-1)
    return room[1 : a.size + 1].reshape(a.shape)


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_transpose(name, layout) -> None:
    size = RECIPES[name].block_size
    shapes = [(size * a, size * b) for a, b in product((1, 3, 8, 37), (1, 2, 16, 65))]
    for shape in (*shapes, (3, 4 * size, 6 * size), (2, 2, size, 17 * size), (70, 8 * size, size)):
        q = square_blocks(RECIPES[name], layout, shape)
        gpu, expected = fp4kit.transpose(moved(q)), fp4kit.transpose(q)
        assert_same(gpu, expected)
        assert_same(fp4kit.transpose(gpu), fp4kit.transpose(expected))


@pytest.mark.parametrize("move", [strided, misaligned])
@pytest.mark.parametrize("name", SQUARE)
def test_transpose_strided_and_misaligned(name, move) -> None:
    for layout in SCALE_LAYOUTS:
        q = square_blocks(RECIPES[name], layout, (256, 320))
        assert_same(fp4kit.transpose(moved(q, move)), fp4kit.transpose(q))


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-te-4over6-mae-256-2d", "mxfp8-te-2d"])
def test_transpose_equals_quantizing_the_other_axis(name) -> None:
    x = cupy.asarray(np.random.default_rng(0).standard_normal((2, 96, 160)).astype(np.float32))
    q = fp4kit.quantize(x, name)
    assert_same(fp4kit.transpose(q), fp4kit.quantize(x.get(), name, axis=-2))
    assert fp4kit.transpose(q).tensor_scale is q.tensor_scale


def test_transpose_of_empty_arrays() -> None:
    for shape in ((0, 32), (32, 0), (0, 32, 32), (2, 0, 16)):
        q = square_blocks(RECIPES["nvfp4-te-2d"], "linear", shape)
        assert_same(fp4kit.transpose(moved(q)), fp4kit.transpose(q))


@gpu_only
def test_transpose_of_a_large_array() -> None:
    """The transpose of an array with more than 2^31 codes equals the CPU's. It needs 64-bit offsets."""
    M, K = shape = (2**16, 2**15 + 32)
    q = fp4kit.quantize(cupy.zeros((32, 32), np.float32), "nvfp4-te-2d")
    rows, columns = cupy.arange(M, dtype=np.uint32), cupy.arange(K // 2, dtype=np.uint32)
    packed = ((rows[:, None] * 40503 ^ columns * 30011) >> 7).astype(np.uint8)
    blocks = cupy.arange(M // 16 * (K // 16), dtype=np.uint32).astype(np.uint8).reshape(M // 16, K // 16)
    scales = cupy.repeat(blocks, 16, axis=0)
    t = fp4kit.transpose(replace(q, packed=packed, block_scale=scales, shape=shape))
    assert not (t.block_scale != cupy.repeat(blocks.T, 16, axis=0)).any()
    for first in (0, K // 2 - 64):
        codes = unpack(packed[:, first : first + 64].get())
        assert differing(t.packed[2 * first : 2 * first + 128], pack(codes.T)) == 0


@pytest.mark.parametrize(("source", "target"), [*product(SCALE_LAYOUTS, SCALE_LAYOUTS)])
def test_swizzle(source, target) -> None:
    for shape in ((128, 16), (1, 1), (300, 48), (129, 33), (3, 40, 64), (2, 2, 7, 130), (0, 16), (4, 0), (0, 8, 16)):
        linear = random_bytes(shape)
        expected = swizzle_scales(linear, target)
        for move in (lambda a: a, strided, misaligned):
            swizzled = fp4kit.swizzle(move(cupy.asarray(linear)), target)
            assert differing(swizzled, expected) == 0
            assert differing(fp4kit.unswizzle(move(swizzled), target, shape), linear) == 0
    x = cupy.asarray(np.random.default_rng(1).standard_normal((2, 130, 96)).astype(np.float32))
    q = fp4kit.quantize(x, "nvfp4-te", scale_layout=source)
    assert_same(fp4kit.swizzle(q, target), fp4kit.quantize(x.get(), "nvfp4-te", scale_layout=target))
    assert_same(fp4kit.unswizzle(q), fp4kit.quantize(x.get(), "nvfp4-te"))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_scales_alone(layout) -> None:
    """The functions for scales without a Quantized give the bytes that they give for NumPy arrays."""
    scales = np.random.default_rng(1).integers(0, 256, (2, 37, 13), np.uint8)
    swizzled = swizzle_scales(cupy.asarray(scales), layout)
    assert differing(swizzled, swizzle_scales(scales, layout)) == 0
    assert differing(unswizzle_scales(swizzled, layout, scales.shape), scales) == 0


def test_pack_and_unpack() -> None:
    for shape in ((256,), (3, 2), (5, 7, 34), (1000, 4096), (0, 4), (4, 0)):
        codes = random_bytes(shape) & 15
        for move in (lambda a: a, strided, misaligned):
            packed = fp4kit.pack(move(cupy.asarray(codes)))
            assert differing(packed, pack(codes)) == 0
            assert differing(fp4kit.unpack(move(packed)), codes) == 0
    assert differing(fp4kit.pack(cupy.asarray(np.uint8([0xF1, 0x92]))), np.uint8([0x21])) == 0


@gpu_only
def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    codes = random_bytes((6, 64)) & 15
    tensor = torch.from_numpy(codes).cuda()
    packed = fp4kit.pack(tensor)
    assert isinstance(packed, torch.Tensor) and packed.is_cuda
    assert differing(cupy.from_dlpack(packed), pack(codes)) == 0
    assert differing(cupy.from_dlpack(fp4kit.unpack(packed)), codes) == 0
    swizzled = fp4kit.swizzle(tensor, "swizzled_8x4")
    assert differing(cupy.from_dlpack(swizzled), swizzle_scales(codes, "swizzled_8x4")) == 0


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_blocks_and_words_of_files(format) -> None:
    packed, scales = random_bytes((3, 64)), random_bytes((3, {"mxfp4": 4, "nvfp4": 8}[format]))
    raw, words = pack_gguf(cupy.asarray(packed), cupy.asarray(scales), format), pack_mlx(cupy.asarray(packed))
    assert type(raw) is type(words) is cupy.ndarray
    assert differing(raw, pack_gguf(packed, scales, format)) == differing(words, pack_mlx(packed)) == 0
    codes, stored = unpack_gguf(raw, format)
    assert differing(codes, packed) == differing(stored, scales) == differing(unpack_mlx(words), packed) == 0


def test_errors_come_before_work() -> None:
    with pytest.raises(ValueError, match="pack: the last axis has length 3"):
        fp4kit.pack(cupy.zeros(3, np.uint8))
    with pytest.raises(
        ValueError, match=re.escape("unswizzle: (9,) holds 9 scales; swizzled_128x4 of (3, 3) needs (128, 4)")
    ):
        fp4kit.unswizzle(cupy.zeros(9, np.uint8), "swizzled_128x4", (3, 3))
    q = square_blocks(RECIPES["nvfp4-te-2d"], "linear", (32, 32))
    with pytest.raises(
        TypeError, match=r"Quantized: block_scale is a numpy\.ndarray; needs a CuPy array, as packed is"
    ):
        replace(q, packed=cupy.asarray(q.packed))
    small = square_blocks(replace(RECIPES["nvfp4-te-2d"], block=(8, 8)), "linear", (32, 32))
    with pytest.raises(NotImplementedError, match="transpose: blocks of 8x8 have no CUDA kernel; needs 16, 32 or 64"):
        fp4kit.transpose(moved(small))


def test_in_a_cuda_graph() -> None:
    """All layout operations can be captured in a CUDA graph, so they neither wait for the device nor read from it."""
    q = square_blocks(RECIPES["nvfp4-te-2d"], "swizzled_128x4", (512, 512))
    gpu, results = moved(q), []

    def work() -> None:
        t = fp4kit.transpose(gpu)
        results[:] = t, fp4kit.unswizzle(t), fp4kit.unpack(t.packed)
        results.append(fp4kit.pack(results[2]))

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work()
        stream.begin_capture()
        work()
        graph = stream.end_capture()
        for array in (results[0].packed, results[0].block_scale, results[1].block_scale, results[3]):
            array.data.memset_async(0xEE, array.nbytes, stream)
        graph.launch()
        stream.synchronize()
    expected = fp4kit.transpose(q)
    assert_same(results[0], expected)
    assert_same(results[1], fp4kit.unswizzle(expected))
    assert differing(results[3], expected.packed) == 0


def test_the_order_of_aiter():
    """CuPy arrays give the bytes of NumPy arrays, in both directions."""
    rng = np.random.default_rng(5)
    scales, packed = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((2, 40, 9), (2, 32, 64)))
    shuffled, codes = aiter.shuffle_scales(cupy.asarray(scales)), aiter.shuffle_codes(cupy.asarray(packed))
    assert differing(shuffled, aiter.shuffle_scales(scales)) == differing(codes, aiter.shuffle_codes(packed)) == 0
    assert differing(aiter.unshuffle_scales(shuffled, scales.shape), scales) == 0
    assert differing(aiter.unshuffle_codes(codes), packed) == 0
