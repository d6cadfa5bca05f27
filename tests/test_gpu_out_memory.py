"""What a call writes lies apart from what it reads, or the call is refused before any work: the first one, and repeated ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from host import cupy_on_host as cupy
from inputs import ordinary

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

SHAPE, SIZE = (64, 256), 64 * 256 * 4
RECIPES = ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt"]


@pytest.fixture(params=["numpy", "cupy"])
def xp(request):
    """NumPy, or the GPU that the host plays."""
    if request.param == "numpy":
        return np
    request.getfixturevalue("played_gpu")
    return cupy


def memory(xp):
    return xp.zeros(2 * SIZE, np.uint8)


def at(buffer, start, shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return buffer[start : start + size].view(dtype).reshape(shape)


def host(a):
    return a if isinstance(a, np.ndarray) else a.get()


def moved(q, xp):
    return replace(q, **{name: None if a is None else xp.asarray(a) for name, a in q.parts().items()})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("start", [0, SIZE - 256], ids=["front", "end"])
def test_quantize_into_x(name, xp, start):
    buffer, x = memory(xp), ordinary(3, SHAPE)
    inside = at(buffer, 0, SHAPE, np.float32)
    inside[...] = xp.asarray(x)
    apart = moved(fp4kit.quantize(x, name), xp)
    apart = replace(apart, packed=at(memory(xp), 0, apart.packed.shape, np.uint8))  # a view, as the one in x is
    out = replace(apart, packed=at(buffer, start, apart.packed.shape, np.uint8))
    for _ in range(2):
        assert fp4kit.quantize(inside, name, out=apart) is apart  # from here on such calls are repeated
        with pytest.raises(
            ValueError, match=r"^quantize: out\.packed shares memory with x, which is .*; needs memory of its own$"
        ):
            fp4kit.quantize(inside, name, out=out)
    assert_same_bits(host(inside), x)


def test_quantize_into_parts_that_overlap(xp):
    x, buffer = xp.asarray(ordinary(3, SHAPE)), memory(xp)
    good = moved(fp4kit.quantize(ordinary(3, SHAPE), "nvfp4-te"), xp)
    views = {name: at(memory(xp), 0, getattr(good, name).shape, np.uint8) for name in ("packed", "block_scale")}
    good = replace(good, **views)
    parts = {name: at(buffer, start, getattr(good, name).shape, np.uint8) for start, name in ((0, "packed"), (16, "block_scale"))}
    for _ in range(2):
        fp4kit.quantize(x, "nvfp4-te", out=good)
        with pytest.raises(ValueError, match=r"^quantize: out\.block_scale shares memory with out\.packed"):
            fp4kit.quantize(x, "nvfp4-te", out=replace(good, **parts))
        with pytest.raises(ValueError, match=r"^quantize: out\.tensor_amax shares memory with out\.tensor_scale"):
            fp4kit.quantize(x, "nvfp4-te", out=replace(good, tensor_amax=good.tensor_scale))


@pytest.mark.parametrize("name", RECIPES)
def test_dequantize_into_q(name, xp):
    q, buffer = moved(fp4kit.quantize(ordinary(4, SHAPE), name), xp), memory(xp)
    shared = replace(q, packed=at(buffer, SIZE - 512, q.packed.shape, np.uint8))
    shared.packed[...] = q.packed
    other, out = at(memory(xp), 0, SHAPE, np.float32), at(buffer, 0, SHAPE, np.float32)
    for _ in range(2):
        assert_same_bits(host(fp4kit.dequantize(shared, out=other)), host(fp4kit.dequantize(q)))
        with pytest.raises(ValueError, match=r"^dequantize: out shares memory with q\.packed"):
            fp4kit.dequantize(shared, out=out)
    assert_same_bits(host(shared.packed), host(q.packed))


def test_partial_cast_into_the_shard():
    x, r = ordinary(5, SHAPE), "nvfp4-te-2d"
    amax = fp4kit.partial_amax(x.reshape(-1), SHAPE, 0, r)
    with pytest.raises(ValueError, match=r"^partial_cast: out shares memory with shard"):
        fp4kit.partial_cast(x.reshape(-1), at(x.view(np.uint8).reshape(-1), 64, (64, 128), np.uint8), amax, SHAPE, 0, r)


def test_arrays_between_each_other_are_apart():
    """Every second row: the spans are one, and no byte is of both."""
    x, q = ordinary(6, SHAPE), fp4kit.quantize(ordinary(6, SHAPE), "mxfp8-te")
    whole = np.zeros((128, 256, 4), np.uint8)
    inside = whole[::2].view(np.float32)[..., 0]
    inside[...] = x
    out = replace(q, packed=whole[1::2, :, 0])
    assert fp4kit.quantize(inside, "mxfp8-te", out=out) is out
    assert_same_bits(np.ascontiguousarray(out.packed), fp4kit.quantize(x, "mxfp8-te").packed)


def test_scales_that_are_given_may_be_those_of_out():
    x = ordinary(7, SHAPE)
    q = fp4kit.quantize(x, "nvfp4-te")
    out = replace(q, packed=np.zeros_like(q.packed), tensor_amax=None)
    assert fp4kit.quantize(x, "nvfp4-te", block_scale=out.block_scale, tensor_scale=out.tensor_scale, out=out) is out
    assert_same_bits(out.packed, q.packed)
    with pytest.raises(ValueError, match=r"^quantize: out\.packed shares memory with block_scale"):
        scales = np.ascontiguousarray(q.block_scale)
        small = replace(out, packed=np.lib.stride_tricks.as_strided(scales, q.packed.shape, (8, 1)))
        fp4kit.quantize(x, "nvfp4-te", block_scale=scales, tensor_scale=out.tensor_scale, out=small)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    buffer = torch.zeros(2 * SIZE, dtype=torch.uint8)
    x = buffer[:SIZE].view(torch.float32).view(SHAPE)
    q = fp4kit.quantize(x, "mxfp8-te")
    with pytest.raises(ValueError, match=r"^quantize: out\.packed shares memory with x"):
        fp4kit.quantize(x, "mxfp8-te", out=replace(q, packed=buffer[100 : 100 + 64 * 256].view(SHAPE)))
