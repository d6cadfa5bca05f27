"""Test repeated calls on a GPU: they raise the errors of first calls, are right in threads and graphs, and hold no
memory.
"""

import threading
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, agree, assert_same, blocks, check, cupy, differing, gpu_only, there

import fp4kit
from fp4kit.cuda import cached_calls, engine
from fp4kit.cuda.cached_calls import _array_at
from fp4kit.cuda.matrix import implies_amaxes
from fp4kit.ops import engines as call_cache
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (64, 512)


@pytest.fixture(autouse=True)
def no_cached_calls():
    call_cache._CALLS.clear()


def forbid(monkeypatch, *names):
    """Make the test fail if one of these operations is made without its cached call."""
    for name in names:
        monkeypatch.setattr(engine, name, lambda *a, **k: pytest.fail("the call was done without its cached call"))


def misaligned(shape, dtype):
    """Return an array on the device that begins 2 bytes after a multiple of 16."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cupy.zeros(count + 16, np.uint8)[2 : 2 + count].view(dtype).reshape(shape)


def two(dtype):
    """Return two different arrays of one shape and dtype."""
    first = blocks(dtype)
    return first, np.ascontiguousarray(first[::-1, ::-1])


CASES = [
    ("mxfp4-ocp", 1, "linear", BF16),
    ("nvfp4-te", 1, "swizzled_8x4", np.float16),
    ("nvfp4-flashinfer", 1, "linear", np.float32),
    ("nvfp4-modelopt", 1, "swizzled_128x4", BF16),
    ("nvfp4-te-rowscaled", 1, "linear", BF16),
    ("nvfp4-te-rowscaled", 1, "swizzled_128x4", BF16),
    ("nvfp4-flashinfer-token", 1, "swizzled_128x4", BF16),
    ("nvfp4-flashinfer-token-4over6-mse-256", 1, "swizzled_128x4", BF16),
    ("fp8-modelopt-channel", 1, "linear", BF16),
    ("int8-modelopt-channel", 1, "linear", BF16),
    ("mxfp4-ocp", 0, "linear", np.float32),
    ("nvfp4-te", 0, "linear", np.float32),
    ("nvfp4-te", 0, "swizzled_128x4", BF16),
    ("mxfp8-te", 0, "swizzled_8x4", BF16),
    ("nvfp4-te-2d", 1, "linear", BF16),
    ("nvfp4-te-2d", 0, "swizzled_128x4", BF16),
    ("mxfp8-te-2d", 1, "linear", BF16),
    *exhaustive([("mxfp4-ocp", 1, "swizzled_128x4", np.float32), ("nvfp4-te", 1, "linear", BF16)]),
    *exhaustive([("mxfp8-te", 1, "linear", BF16), ("nvfp4-flashinfer-token", 1, "linear", BF16)]),
]


@pytest.mark.parametrize("given", [False, True], ids=["amax of x", "amax given"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cached_calls_give_the_bits_of_first_calls(monkeypatch, case, given):
    """Cached calls give the CPU's bits for arrays and amaxes other than those of the first call, new and into out=.

    Amaxes of rows have a negative zero and an infinity. The caller's amaxes keep their values.
    """
    recipe, axis, layout, dtype = case
    scaling = RECIPES[recipe].tensor_scaling
    if given and scaling == "none":
        return
    options = {"axis": axis, "scale_layout": layout}
    first, second = two(dtype)
    out, y = fp4kit.quantize(there(first), recipe, **options), cupy.empty(SHAPE, dtype)
    for seed, x in enumerate((first, second)):
        rows = np.random.default_rng(seed).uniform(0.5, 5, len(x)).astype(np.float32)
        rows[3], rows[5] = -0.0, np.inf
        amax = None if not given else rows if scaling == "row" else np.asarray(rows[0])
        if x is second:
            decodes = axis and "2d" not in recipe and not implies_amaxes(RECIPES[recipe])
            forbid(monkeypatch, "quantize", *(("dequantize", "fake_quantize") if decodes else ()))
        expected, on_gpu = fp4kit.quantize(x, recipe, tensor_amax=amax, **options), there(amax)
        for part in (out.packed, out.tensor_scale, out.tensor_amax):
            if part is not None:
                part.fill(7)
        for target in (None, out):
            q = fp4kit.quantize(there(x), recipe, tensor_amax=on_gpu, out=target, **options)
            assert target is None or q is out
            assert_same(q, expected)
        assert on_gpu is None or (q.tensor_amax is not on_gpu and differing(on_gpu, amax) == 0)
        for values in (fp4kit.dequantize(q), fp4kit.dequantize(q, out=y)):
            assert differing(values, fp4kit.dequantize(expected)) == 0
        agree(fp4kit.fake_quantize, x, recipe, axis=axis, tensor_amax=amax)


@pytest.mark.parametrize("recipe", ["mxfp4-modelopt-fake", "nvfp4-modelopt-fake", "int8-modelopt", "fp8-modelopt"])
def test_cached_fake_quantizers_give_the_same_bits(monkeypatch, recipe):
    first, second = two(np.float32)
    fp4kit.fake_quantize(cupy.asarray(first), recipe)
    forbid(monkeypatch, "fake_quantize")
    agree(fp4kit.fake_quantize, second, recipe)


# {what is wrong: (the changed arguments, the type of the error, a part of its text)}
WRONG_QUANTIZE = {
    "float64": (lambda: {"x": cupy.zeros(SHAPE, np.float64)}, TypeError, "x is float64; needs float32"),
    "length": (lambda: {"x": cupy.zeros((64, 500), BF16)}, ValueError, "axis 1 has length 500; nvfp4-te needs"),
    "0-d": (lambda: {"x": cupy.zeros((), BF16)}, ValueError, "x is 0-d"),
    "shape": (lambda: {"x": cupy.zeros((32, 512), BF16)}, ValueError, "out has shape (64, 512); needs (32, 512)"),
    "dtype": (lambda: {"x": cupy.zeros(SHAPE, np.float16)}, ValueError, "out has dtype bfloat16; needs float16"),
    "host x": (lambda: {"x": np.zeros(SHAPE, BF16)}, ValueError, "all arrays of one call must be on one device"),
    "list": (lambda: {"x": [1.0]}, TypeError, "x is a builtins.list"),
    "recipe": (lambda: {"recipe": "mxfp4-ocp"}, ValueError, "tensor_amax was given, but mxfp4-ocp has no tensor scale"),
    "other recipe": (lambda: {"recipe": "nvfp4-flashinfer"}, ValueError, "out has recipe Recipe('nvfp4-te')"),
    "no recipe": (lambda: {"recipe": "nvfp4-tee"}, ValueError, "no recipe is called 'nvfp4-tee'"),
    "list of recipes": (lambda: {"recipe": ["nvfp4-te"]}, TypeError, "needs an id such as"),
    "axis": (lambda: {"axis": 0}, ValueError, "out has axis 1; needs 0"),
    "axis out of range": (lambda: {"axis": 2}, ValueError, "axis 2 is out of range for a 2-d array; needs -2 to 1"),
    "axis as float": (lambda: {"axis": -1.0}, TypeError, "quantize: axis is -1.0; needs an int"),
    "layout": (lambda: {"scale_layout": "swizzled_128x4"}, ValueError, "out has scale_layout linear"),
    "no layout": (lambda: {"scale_layout": "swizzled"}, ValueError, "scale_layout is 'swizzled'"),
    "rounding": (lambda: {"rounding": "up"}, ValueError, "rounding is 'up'"),
    "no seed": (lambda: {"rounding": "stochastic"}, ValueError, "stochastic rounding needs seed"),
    "seed": (lambda: {"seed": 1}, ValueError, "seed was given with rounding='nearest'"),
    "hadamard": (lambda: {"hadamard": 0}, ValueError, "hadamard is 0; needs False, True or 'no_signs'"),
    "block_amax": (lambda: {"block_amax": cupy.zeros((64, 32), np.float32)}, ValueError, "block_amax was given, but"),
    "NaN": (lambda: {"tensor_amax": np.nan}, ValueError, "tensor_amax holds 1 NaN value(s) of 1"),
    "negative": (lambda: {"tensor_amax": -1.0}, ValueError, "tensor_amax holds 1 negative value(s) of 1"),
    "amax's dtype": (lambda: {"tensor_amax": cupy.ones((), np.float64)}, TypeError, "tensor_amax is float64; needs"),
    "amax's shape": (lambda: {"tensor_amax": cupy.ones(2, np.float32)}, ValueError, "tensor_amax has shape (2,)"),
    "host amax": (lambda: {"tensor_amax": np.ones(1, np.float32)}, ValueError, "all arrays of one call must be on one"),
}
# {what is wrong: (part of out, its array, the type of the error, a part of its text)}
OUT_PARTS = {
    "codes misaligned": ("packed", lambda: misaligned((64, 256), np.uint8), ValueError, "out.packed is at address"),
    "scales misaligned": (
        "block_scale",
        lambda: misaligned((64, 32), np.uint8),
        ValueError,
        "block_scale is at address",
    ),
    "codes strided": ("packed", lambda: cupy.zeros((64, 512), np.uint8)[:, ::2], ValueError, "needs a contiguous CuPy"),
    "codes on the host": ("packed", lambda: np.zeros((64, 256), np.uint8), TypeError, "needs a NumPy array, as packed"),
    "scales on the host": ("block_scale", lambda: np.zeros((64, 32), np.uint8), TypeError, "needs a CuPy array, as"),
    "scale's shape": ("tensor_scale", lambda: cupy.zeros(1, np.float32), ValueError, "tensor_scale is float32 (1,)"),
    "scale's dtype": ("tensor_scale", lambda: cupy.zeros((), np.float64), TypeError, "tensor_scale is float64; needs"),
    "amax's dtype": ("tensor_amax", lambda: cupy.zeros((), np.float16), TypeError, "tensor_amax is float16; needs"),
    "no amax": ("tensor_amax", lambda: None, ValueError, "out.tensor_amax is NoneType; needs a contiguous"),
}
WRONG_DEQUANTIZE = {
    "dtype": (lambda: {"dtype": np.float64}, TypeError, "dtype is float64; needs float32"),
    "other dtype": (lambda: {"dtype": np.float32}, ValueError, "needs a CuPy array of float32 (64, 512)"),
    "out's shape": (
        lambda: {"out": cupy.zeros((32, 512), BF16)},
        ValueError,
        "needs a CuPy array of bfloat16 (64, 512)",
    ),
    "host out": (lambda: {"out": np.zeros(SHAPE, BF16)}, ValueError, "needs a CuPy array of bfloat16"),
    "no Quantized": (lambda: {"q": cupy.zeros(SHAPE, np.uint8)}, TypeError, "needs a Quantized, as fp4kit.quantize"),
}


def raised(call):
    """Return the type and the text of the error that a call raises, with addresses removed."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return caught.type, caught.value.args[0].partition(" at address")[0]


def assert_same_error(right, wrong, kind, text):
    """Assert that the call `wrong` raises one and the same error before and after the valid call `right` is cached.

    kind, text: the type of the error and a part of its text.
    """
    first, before = raised(wrong), len(call_cache._CALLS)
    right()
    assert len(call_cache._CALLS) == before + 1
    assert raised(wrong) == first
    assert first[0] is kind and text in first[1] + " at address"


def given_right():
    q = fp4kit.quantize(cupy.zeros(SHAPE, BF16), "nvfp4-te")
    return {"x": cupy.zeros(SHAPE, BF16), "recipe": "nvfp4-te", "tensor_amax": cupy.ones((), np.float32), "out": q}


# Cases that are right without out=.
OF_OUT = {"shape", "dtype", "other recipe", "axis", "layout"}
ALWAYS = sorted(WRONG_QUANTIZE.keys() - OF_OUT)
WRONG = [
    *((fp4kit.quantize, True, case) for case in WRONG_QUANTIZE),
    *((fp4kit.quantize, False, case) for case in ALWAYS),
    *((fp4kit.fake_quantize, False, case) for case in ALWAYS if case not in ("no layout", "hadamard")),
]


@pytest.mark.parametrize(("function", "has_out", "wrong"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_call_after_a_right_one(function, has_out, wrong):
    change, kind, text = WRONG_QUANTIZE[wrong]
    right = given_right()
    if not has_out:
        del right["out"]
    other = right | change()
    assert_same_error(lambda: function(**right), lambda: function(**other), kind, text)


@pytest.mark.parametrize("wrong", OUT_PARTS)
def test_a_wrong_out_after_a_right_one(wrong):
    part, make, kind, text = OUT_PARTS[wrong]
    right = given_right()

    def call():
        fp4kit.quantize(**right | {"out": replace(right["out"], **{part: make()})})

    assert_same_error(lambda: fp4kit.quantize(**right), call, kind, text)


@pytest.mark.parametrize("wrong", WRONG_DEQUANTIZE)
def test_a_wrong_dequantize_after_a_right_one(wrong):
    change, kind, text = WRONG_DEQUANTIZE[wrong]
    right = {"q": fp4kit.quantize(cupy.zeros(SHAPE, BF16), "nvfp4-te"), "out": cupy.zeros(SHAPE, BF16)}
    other = right | change()
    assert_same_error(lambda: fp4kit.dequantize(**right), lambda: fp4kit.dequantize(**other), kind, text)


def test_strided_and_misaligned_arrays_after_usual_ones():
    x = blocks(BF16)
    out, y = check(x, "nvfp4-te"), cupy.empty(SHAPE, BF16)
    expected = fp4kit.quantize(x, "nvfp4-te")
    strided = cupy.asarray(np.repeat(x, 2, 1))[:, ::2]
    shifted = misaligned(SHAPE, BF16)
    shifted[...] = cupy.asarray(x)
    for given in (cupy.asarray(x), strided, shifted, cupy.asarray(x)) * 2:
        out.packed[...] = 0xEE
        assert_same(fp4kit.quantize(given, "nvfp4-te", out=out), expected)
    values = fp4kit.dequantize(expected)
    for target in (y, cupy.empty((64, 1024), BF16)[:, ::2], misaligned(SHAPE, BF16), y) * 2:
        target[...] = cupy.zeros(SHAPE, BF16)
        assert differing(fp4kit.dequantize(out, out=target), values) == 0


def test_strided_amaxes_of_rows():
    x = blocks(BF16)
    expected = fp4kit.quantize(x, "nvfp4-te-rowscaled")
    amax = cupy.asarray(np.repeat(expected.tensor_amax, 2))[::2]
    for _ in range(2):
        q = fp4kit.quantize(cupy.asarray(x), "nvfp4-te-rowscaled", tensor_amax=amax)
        assert_same(q, expected)
    scale = cupy.asarray(np.repeat(expected.tensor_scale, 2))[::2]
    for known, on_host in ((amax, expected.tensor_amax), (None, None)):
        strided = replace(q, tensor_scale=scale, tensor_amax=known)
        assert differing(fp4kit.dequantize(strided), fp4kit.dequantize(replace(expected, tensor_amax=on_host))) == 0


@pytest.mark.parametrize(
    "recipe", ["nvfp4-te", "nvfp4-compressed-tensors", "nvfp4-modelopt", "int8-modelopt", "int4-modelopt"]
)
def test_unknown_and_wrong_amaxes(recipe):
    """If a Quantized has no amax, or not that of its tensor scale, dequantize finds the one it needs on the device.

    This holds with and without a cached call.
    """
    x = blocks(BF16)
    q = fp4kit.quantize(x, recipe)
    on_device = fp4kit.quantize(cupy.asarray(x), recipe)
    for scale in (q.tensor_scale, q.tensor_scale * np.float32(1.2345)):
        for amax in (None, np.full(q.tensor_scale.shape, 5, np.float32)):
            expected = fp4kit.dequantize(replace(q, tensor_scale=scale, tensor_amax=amax), np.float32)
            tensor = (None if a is None else cupy.asarray(a) for a in (scale, amax))
            given = replace(on_device, **dict(zip(("tensor_scale", "tensor_amax"), tensor, strict=True)))
            for _ in range(2):
                assert differing(fp4kit.dequantize(given, np.float32), expected) == 0


def test_amaxes_of_experts_that_are_unknown():
    x = blocks(np.float32).reshape(4, 16, 512)
    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=np.float32([1, 2, 3, 4]))
    given = replace(fp4kit.quantize(cupy.asarray(x), "nvfp4-te", tensor_amax=[1.0, 2.0, 3.0, 4.0]), tensor_amax=None)
    assert differing(fp4kit.dequantize(given), fp4kit.dequantize(replace(q, tensor_amax=None))) == 0
    assert differing(fp4kit.dequantize(given), fp4kit.dequantize(q)) == 0


@gpu_only
def test_threads_with_arrays_of_their_own():
    """Threads that use one cached call with different arrays get their own results."""
    xs = [np.random.default_rng(i).standard_normal(SHAPE, np.float32) for i in range(8)]
    outs = [fp4kit.quantize(cupy.zeros(SHAPE, np.float32), "nvfp4-te") for _ in xs]
    amaxes = [cupy.asarray(np.abs(x).max()) for x in xs]

    on_gpu = [cupy.asarray(x) for x in xs]

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(300):
                fp4kit.quantize(on_gpu[i], "nvfp4-te", tensor_amax=amaxes[i], out=outs[i])
            stream.synchronize()

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, out in zip(xs, outs, strict=True):
        assert_same(out, fp4kit.quantize(x, "nvfp4-te"))


@pytest.mark.parametrize(("amax_given", "copies"), [(True, 1), (False, 1), (False, 20)])
def test_a_cached_call_is_captured_in_a_graph(monkeypatch, amax_given, copies):
    # The graph is launched twice: the second time for smaller numbers.
    first, second = np.tile(blocks(BF16), (copies, 1)), np.tile(blocks(BF16)[::-1], (copies, 1)) / BF16.type(4)
    x, y = cupy.asarray(first), cupy.empty(first.shape, BF16)
    amax = cupy.asarray(fp4kit.quantize(second, "nvfp4-te").tensor_amax) if amax_given else None
    out = fp4kit.quantize(x, "nvfp4-te")

    def call():
        fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-te", tensor_amax=amax, out=out), out=y)

    call()
    cupy.cuda.Device().synchronize()
    forbid(monkeypatch, "quantize", "dequantize")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        graph.launch(stream)
        x[...] = cupy.asarray(second)
        graph.launch(stream)
        stream.synchronize()
    expected = fp4kit.quantize(second, "nvfp4-te")
    assert_same(out, expected)
    assert differing(y, fp4kit.dequantize(expected)) == 0


@pytest.mark.parametrize("own_stream", [True, False])
def test_the_amaxes_of_threads(monkeypatch, own_stream):
    """Each call takes a zero of its own for its amax, also if threads share a stream and zeros are used again."""
    monkeypatch.setattr(cached_calls._Cells, "_QUARTER", 2)
    cached_calls._cells.cache_clear()
    xs = [np.tile(blocks(BF16), (20, 1)) / BF16.type(2**i) for i in range(4)]
    on_gpu, found = [cupy.asarray(x) for x in xs], [[] for _ in range(2)]
    fp4kit.quantize(on_gpu[0], "nvfp4-te")
    shared = cupy.cuda.Stream(non_blocking=True)

    def work(thread):
        with cupy.cuda.Stream(non_blocking=True) if own_stream else shared as stream:
            for i in range(20):
                found[thread].append(fp4kit.quantize(on_gpu[(i + thread) % 4], "nvfp4-te"))
            stream.synchronize()

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cached_calls._cells.cache_clear()
    expected = [fp4kit.quantize(x, "nvfp4-te") for x in xs]
    for thread, results in enumerate(found):
        assert len(results) == 20
        for i, q in enumerate(results):
            assert_same(q, expected[(i + thread) % 4])


def test_cached_calls_hold_no_memory():
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        x = cupy.zeros(SHAPE, BF16)
        for _ in range(2):
            out = fp4kit.quantize(x, "nvfp4-te")
            y = fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-te", tensor_amax=out.tensor_amax, out=out))
            z = fp4kit.fake_quantize(x, "nvfp4-te")
        assert pool.used_bytes() > 0 and len(call_cache._CALLS) == 4
        del x, out, y, z
        assert pool.used_bytes() == 0


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
            agree(fp4kit.quantize, x, "nvfp4-te", **options)
    for hadamard in (False, True, "no_signs", False):
        agree(fp4kit.quantize_both, x, "nvfp4-te", hadamard=hadamard)


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
