"""Test cached calls along columns, in both directions, with square blocks, and of transpose and swizzle.

They give the bits of first calls.
"""

from operator import attrgetter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from on_gpu import ON_GPU, assert_same, blocks, cupy

import fp4kit
from fp4kit.cuda import engine
from fp4kit.cuda.cached_calls import _array_at
from fp4kit.ops import engines as call_cache

pytestmark = ON_GPU
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def no_cached_calls():
    call_cache._CALLS.clear()


def forbid(monkeypatch, *names):
    """Make the test fail if one of these operations is made without its cached call."""
    for name in names:
        monkeypatch.setattr(engine, name, lambda *a, **k: pytest.fail("the call was done without its cached call"))


def two(dtype):
    """Return two different arrays of one shape and dtype."""
    first = blocks(dtype)
    return first, np.ascontiguousarray(first[::-1, ::-1])


@pytest.mark.parametrize("given", [False, True], ids=["amax of x", "amax given"])
@pytest.mark.parametrize(
    ("recipe", "axis", "layout"),
    [
        ("mxfp4-ocp", 0, "linear"),
        ("nvfp4-te", 0, "linear"),
        ("nvfp4-te", 0, "swizzled_128x4"),
        ("mxfp8-te", 0, "swizzled_8x4"),
        ("nvfp4-te-2d", 1, "linear"),
        ("nvfp4-te-2d", 0, "swizzled_128x4"),
        ("mxfp8-te-2d", 1, "linear"),
    ],
)
def test_columns_and_square_blocks(monkeypatch, recipe, axis, layout, given):
    first, second = two(BF16)
    expected = fp4kit.quantize(second, recipe, axis=axis, scale_layout=layout)
    options = {"axis": axis, "scale_layout": layout}
    if given and expected.tensor_amax is not None:
        options["tensor_amax"] = cupy.asarray(expected.tensor_amax)
    fp4kit.quantize(cupy.asarray(first), recipe, **options)
    forbid(monkeypatch, "quantize")
    assert_same(fp4kit.quantize(cupy.asarray(second), recipe, **options), expected)


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "nvfp4-te"])
def test_columns_into_out(monkeypatch, recipe):
    first, second = two(np.float32)
    out = fp4kit.quantize(cupy.asarray(first), recipe, axis=0)
    assert fp4kit.quantize(cupy.asarray(first), recipe, axis=0, out=out) is out
    forbid(monkeypatch, "quantize")
    assert fp4kit.quantize(cupy.asarray(second), recipe, axis=0, out=out) is out
    assert_same(out, fp4kit.quantize(second, recipe, axis=0))


def test_columns_into_out_with_an_amax(monkeypatch):
    """A given amax keeps its value when later calls of quantize write to the same out= under another amax."""
    first, second = two(np.float32)
    amaxes = [cupy.asarray(np.float32(a)) for a in (3, 4)]
    out = fp4kit.quantize(cupy.asarray(first), "nvfp4-te", axis=0, tensor_amax=amaxes[0])
    for amax in amaxes:
        assert fp4kit.quantize(cupy.asarray(first), "nvfp4-te", axis=0, tensor_amax=amax, out=out) is out
    forbid(monkeypatch, "quantize")
    assert fp4kit.quantize(cupy.asarray(second), "nvfp4-te", axis=0, tensor_amax=amaxes[1], out=out) is out
    assert_same(out, fp4kit.quantize(second, "nvfp4-te", axis=0, tensor_amax=np.float32(4)))
    assert [float(a) for a in amaxes] == [3, 4]


@pytest.mark.parametrize("axis", [-1, 0])
def test_results_do_not_share_the_callers_amax(axis):
    """Writing to a result again does not change the amax that the caller gave for it.

    This holds with and without a cached call.
    """
    first, second = two(BF16)
    amax = cupy.asarray(np.float32(3))
    for _ in range(3):
        q = fp4kit.quantize(cupy.asarray(first), "nvfp4-te", axis=axis, tensor_amax=amax)
        assert q.tensor_amax.data.ptr != amax.data.ptr and float(q.tensor_amax) == 3
        fp4kit.quantize(cupy.asarray(second), "nvfp4-te", axis=axis, out=q)
        assert float(amax) == 3 and float(q.tensor_amax) != 3


@pytest.mark.parametrize("given", [False, True], ids=["amax of x", "amax given"])
@pytest.mark.parametrize(
    ("recipe", "layout"), [("mxfp4-ocp", "linear"), ("nvfp4-te", "swizzled_128x4"), ("nvfp4-te-2d", "linear")]
)
def test_both_directions(monkeypatch, recipe, layout, given):
    first, second = two(BF16)
    expected = fp4kit.quantize_both(second, recipe, scale_layout=layout)
    options = {"scale_layout": layout}
    if given and expected[0].tensor_amax is not None:
        options["tensor_amax"] = cupy.asarray(expected[0].tensor_amax)
    uncached = fp4kit.quantize_both(cupy.asarray(first), recipe, **options)
    forbid(monkeypatch, "quantize_both", "quantize")
    cached = fp4kit.quantize_both(cupy.asarray(second), recipe, **options)
    for row, column in (uncached, cached):
        shared = [
            a.data.ptr
            for a in (*row.parts().values(), *column.parts().values(), *options.values())
            if hasattr(a, "data")
        ]
        assert len(set(shared)) == len(shared)
    for a, b in zip(cached, expected, strict=True):
        assert_same(a, b)


def test_different_options_have_different_keys():
    """Options that need other launches must not share a cached call."""
    x, _ = two(BF16)
    for options in ({}, {"axis": 0}, {"axis": 0, "scale_layout": "swizzled_8x4"}, {"scale_layout": "swizzled_8x4"}):
        for _ in range(2):
            assert_same(
                fp4kit.quantize(cupy.asarray(x), "nvfp4-te", **options), fp4kit.quantize(x, "nvfp4-te", **options)
            )
    for hadamard in (False, True, "no_signs", False):
        both = fp4kit.quantize_both(cupy.asarray(x), "nvfp4-te", hadamard=hadamard)
        for a, b in zip(both, fp4kit.quantize_both(x, "nvfp4-te", hadamard=hadamard), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("recipe", ["nvfp4-te-2d", "mxfp8-te-2d"])
def test_transpose(monkeypatch, recipe, layout):
    first, second = two(BF16)
    fp4kit.transpose(fp4kit.quantize(cupy.asarray(first), recipe, scale_layout=layout))
    expected = fp4kit.quantize(second, recipe, scale_layout=layout)
    q = fp4kit.quantize(cupy.asarray(second), recipe, scale_layout=layout)
    forbid(monkeypatch, "transpose")
    t = fp4kit.transpose(q)
    assert_same(t, fp4kit.transpose(expected))
    assert t.tensor_scale is q.tensor_scale and t.tensor_amax is q.tensor_amax


@pytest.mark.parametrize(
    ("start", "to"), [("linear", "swizzled_128x4"), ("swizzled_8x4", "swizzled_128x4"), ("swizzled_128x4", "linear")]
)
def test_swizzle(monkeypatch, start, to):
    first, second = two(BF16)
    fp4kit.swizzle(fp4kit.quantize(cupy.asarray(first), "nvfp4-te", scale_layout=start), to)
    expected = fp4kit.quantize(second, "nvfp4-te", scale_layout=to)
    q = fp4kit.quantize(cupy.asarray(second), "nvfp4-te", scale_layout=start)
    forbid(monkeypatch, "swizzle")
    found = fp4kit.swizzle(q, to)
    assert_same(found, expected)
    assert found.packed is q.packed and q.scale_layout == start


def test_a_quantized_moves_to_the_gpu_and_back():
    q = fp4kit.quantize(blocks(BF16), "nvfp4-te")
    there = q.to("cuda")
    assert_same(there, q)
    assert (
        there.to("cupy") is there
        and there.to("cuda:0") is there
        and there.to("cpu").equals(q)
        and q.to("cupy").equals(there)
    )


@pytest.mark.parametrize(("shape", "dtype"), [((64, 32), np.uint8), ((), np.float32), ((3, 1, 5), np.float32)])
def test_new_arrays_equal_those_of_cupy(shape, dtype):
    """The fast constructor makes arrays that equal those of cupy.ndarray and keep their memory alive."""
    memory, dtype = cupy.cuda.alloc(4096), np.dtype(dtype)
    array, expected = _array_at(cupy)(shape, dtype, memory + 512), cupy.ndarray(shape, dtype, memory + 512)
    for name in ("shape", "dtype", "strides", "size", "nbytes", "ndim", "data.ptr", "flags.c_contiguous"):
        assert attrgetter(name)(array) == attrgetter(name)(expected), name
    assert type(array) is cupy.ndarray
    array[...] = 3
    del memory, expected
    assert (cupy.asnumpy(array.copy()) == 3).all() and array.sum() == 3 * array.size


@pytest.mark.parametrize("change", ["none", "fails", "another shape"])
def test_other_versions_of_cupy_make_arrays_themselves(change):
    """cupy.ndarray is used if CuPy lacks the fast constructor, or if that gives another array."""

    class Base:
        pass

    class Array(Base):
        def __init__(self, shape, dtype, memory):
            self.shape, self.dtype, self.strides, self.size, self.nbytes, self.base = shape, dtype, (), 0, 0, None
            self.flags, self.data = SimpleNamespace(c_contiguous=True), SimpleNamespace(ptr=memory, device_id=0)

    if change == "fails":
        Base._init = lambda self: None
    if change == "another shape":
        Base._init = lambda self, shape, dtype, memory: Array.__init__(self, (*shape, 1), dtype, memory)
    other = SimpleNamespace(ndarray=Array, cuda=SimpleNamespace(alloc=lambda size: 0))
    assert _array_at(other) is Array
    Base._init = Array.__init__
    assert _array_at(other) is not Array
