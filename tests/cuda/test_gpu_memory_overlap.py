"""Test that a call whose outputs overlap its inputs is rejected before any work, in first and in repeated calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exhaustive import half
from host import cupy_on_host as cupy
from inputs import ordinary
from numpy.lib.stride_tricks import as_strided

import fp4kit
from fp4kit.arrays.imports import overlaps_itself
from fp4kit.call.inputs import shares_memory
from fp4kit.evidence.testing import assert_same_bits

SHAPE, SIZE = (64, 256), 64 * 256 * 4
RECIPES = ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt"]


@pytest.fixture(params=["numpy", "cupy"])
def xp(request):
    """Return NumPy, or CuPy on the GPU, which may be simulated."""
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
@pytest.mark.parametrize("start", half([0, SIZE - 256]), ids=["front", "end"])
def test_quantize_into_x(name, xp, start):
    buffer, x = memory(xp), ordinary(3, SHAPE)
    inside = at(buffer, 0, SHAPE, np.float32)
    inside[...] = xp.asarray(x)
    apart = moved(fp4kit.quantize(x, name), xp)
    apart = replace(apart, packed=at(memory(xp), 0, apart.packed.shape, np.uint8))  # a view, as the array inside x is
    out = replace(apart, packed=at(buffer, start, apart.packed.shape, np.uint8))
    for _ in range(2):
        assert fp4kit.quantize(inside, name, out=apart) is apart  # from here on such calls are cached
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
    parts = {
        name: at(buffer, start, getattr(good, name).shape, np.uint8)
        for start, name in ((0, "packed"), (16, "block_scale"))
    }
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


# (strides in bytes of x (4, 3, 16), strides of out.packed (4, 3, 8), first byte of out). x and out share bytes, but
# NumPy would need more work to find this than fp4kit allows it.
HARD = [((96, 1024, 28), (84, 1527, 16), 1213), ((552, 956, 152), (803, 348, 57), 1135)]


@pytest.mark.parametrize(("of_x", "of_out", "start"), HARD)
def test_arrays_whose_bytes_are_too_many_to_compare(of_x, of_out, start):
    """Arrays count as overlapping if finding out would take too much work."""
    buffer, form = np.zeros(1 << 14, np.uint8), fp4kit.quantize(ordinary(3, (4, 3, 16)), "nvfp4-te")
    x = as_strided(buffer.view(np.float32), (4, 3, 16), of_x)
    x[...] = before = ordinary(3, (4, 3, 16))
    out = replace(form, packed=as_strided(buffer[start:], (4, 3, 8), of_out))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(x, out.packed, max_work=1000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^quantize: out\.packed shares memory with x, which is"):
            fp4kit.quantize(x, "nvfp4-te", out=out)
    assert_same_bits(np.array(x), before)
    assert shares_memory(x, out.packed) and shares_memory(out.packed, x)


def test_partial_cast_into_the_shard():
    x, r = ordinary(5, SHAPE), "nvfp4-te-2d"
    amax = fp4kit.partial_amax(x.reshape(-1), SHAPE, 0, r)
    with pytest.raises(ValueError, match=r"^partial_cast: out shares memory with shard"):
        fp4kit.partial_cast(x.reshape(-1), at(x.view(np.uint8).reshape(-1), 64, (64, 128), np.uint8), amax, SHAPE, 0, r)


def test_interleaved_arrays_do_not_overlap():
    """x may have every second row of a memory, and out the rows between.

    Their address ranges overlap, but no byte does.
    """
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
        memory = np.zeros(q.packed.size, np.uint8)
        scales = memory[: q.block_scale.size].reshape(q.block_scale.shape)
        small = replace(out, packed=memory.reshape(q.packed.shape))
        fp4kit.quantize(x, "nvfp4-te", block_scale=scales, tensor_scale=out.tensor_scale, out=small)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    buffer = torch.zeros(2 * SIZE, dtype=torch.uint8)
    x = buffer[:SIZE].view(torch.float32).view(SHAPE)
    q = fp4kit.quantize(x, "mxfp8-te")
    with pytest.raises(ValueError, match=r"^quantize: out\.packed shares memory with x"):
        fp4kit.quantize(x, "mxfp8-te", out=replace(q, packed=buffer[100 : 100 + 64 * 256].view(SHAPE)))


# ---- elements of one output that overlap ----


def bytes_of(shape, strides, itemsize):
    """Return the number of distinct bytes that the elements of an array occupy, counted one by one.

    If elements overlap, it is less than the number of elements times their size.
    """
    starts = np.zeros(1, int)
    for n, step in zip(shape, strides, strict=True):
        starts = np.add.outer(starts, np.arange(n) * step).ravel()
    return len(np.unique(np.add.outer(starts, np.arange(itemsize))))


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_are_found_exactly(seed):
    """For random shapes and strides, the check agrees with a count of bytes."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(1500):
        shape = tuple(int(n) for n in rng.integers(0, 7, rng.integers(0, 5)))
        itemsize = int(rng.choice([1, 2, 4]))
        strides = tuple(
            int(step) for step in rng.integers(-40, 41, len(shape)) * rng.choice([1, itemsize, 3 * itemsize])
        )
        found.append(overlaps_itself(shape, strides, itemsize))
        wrong = bytes_of(shape, strides, itemsize) < np.prod(shape, dtype=int) * itemsize if 0 not in shape else False
        assert found[-1] == wrong, (shape, strides, itemsize)
    assert 200 < sum(found) < 1300


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "overlaps"),
    [
        ((4096, 4096), (16384, 4), 4, False),
        ((4096, 4096), (4, 16384), 4, False),  # transposed
        ((8, 4096), (4097, 2), 1, False),  # rows lie in the gaps of other rows
        ((8, 4096), (4096, 2), 1, True),
        ((1 << 17, 1 << 17), ((1 << 17) + 2, 2), 1, True),
        ((1 << 17, 1 << 16), ((1 << 17) - 1, 2), 1, False),
        ((3, 1000, 1000), (1, 3000, 3), 1, False),
        ((3, 1000, 1000), (2, 3001, 3), 1, True),
        ((), (), 4, False),
        ((0, 5), (0, 0), 4, False),
        ((1, 5), (0, 4), 4, False),
        ((2, 5), (0, 4), 4, True),
        ((5,), (2,), 4, True),
        ((2000, 2000, 2000), (5, 7, 11), 1, True),
    ],
)
def test_overlaps_of_known_strides(shape, strides, itemsize, overlaps):
    assert overlaps_itself(shape, strides, itemsize) == overlaps


def strided(a, shape, strides):
    """Return a view of a flat array with the given shape and strides."""
    if isinstance(a, np.ndarray):
        return np.lib.stride_tricks.as_strided(a, shape, strides)
    view = a[...]
    view._host = np.lib.stride_tricks.as_strided(a._host, shape, strides)
    return view


TEXT = r" has elements that share memory, shape \(.*\), strides \(.*\); needs one place in memory for each element$"


@pytest.mark.parametrize("part", ["packed", "block_scale", "tensor_scale", "tensor_amax"])
def test_quantize_into_elements_that_overlap(xp, part):
    """Outputs whose own rows overlap are rejected, because later rows would overwrite codes of earlier ones."""
    recipe = "nvfp4-te-rowscaled" if "tensor" in part else "nvfp4-te"
    x = xp.asarray(ordinary(0, (128, 64)))
    q = fp4kit.quantize(x, recipe)
    a = getattr(q, part)
    fewer = (a.shape[1] // 2, 1) if a.ndim > 1 else (2,)
    out = replace(q, **{part: strided(xp.zeros(a.size, a.dtype), a.shape, fewer)})
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^quantize: out\.{part}{TEXT}"):
            fp4kit.quantize(x, recipe, out=out)
        assert fp4kit.quantize(x, recipe, out=q) is q
    assert not host(getattr(out, part)).any()


def test_dequantize_into_elements_that_overlap(xp):
    q = fp4kit.quantize(xp.asarray(ordinary(0, (128, 64))), "mxfp4-ocp")
    out = strided(xp.zeros(128 * 64, np.float32), (128, 64), (128, 4))
    with pytest.raises(ValueError, match=rf"^dequantize: out{TEXT}"):
        fp4kit.dequantize(q, out=out)
    assert not host(out).any()


def test_cast_into_elements_that_overlap(xp):
    x = ordinary(0, (128, 64))
    amax = xp.asarray(fp4kit.partial_amax(x.ravel(), x.shape, 0, "nvfp4-te"))
    out = strided(xp.zeros(128 * 32, np.uint8), (128, 32), (16, 1))
    with pytest.raises(ValueError, match=rf"^partial_cast: out{TEXT}"):
        fp4kit.partial_cast(xp.asarray(x.ravel()), out, amax, x.shape, 0, "nvfp4-te")
    assert not host(out).any()


def test_interleaved_rows_are_accepted():
    """Outputs whose rows interleave without overlap are accepted."""
    x = ordinary(0, (2, 64))
    q = fp4kit.quantize(x, "mxfp4-ocp")
    out = replace(q, packed=np.lib.stride_tricks.as_strided(np.zeros(96, np.uint8), (2, 32), (33, 2)))
    assert_same_bits(fp4kit.quantize(x, "mxfp4-ocp", out=out), q)
