"""Test cached calls on the GPU path, with arrays that only look like CuPy's: what makes a key, and what a call
launches.
"""

import ctypes
import sys
import threading
import time
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.arrays import imports
from fp4kit.call.parse import Call
from fp4kit.cuda import cached_calls, compiler, engine, launch, matrix
from fp4kit.cuda.compiler import FINDERS
from fp4kit.cuda.dispatch import ROWS
from fp4kit.cuda.launch import Launch
from fp4kit.ops import engines as call_cache
from fp4kit.quantized.container import packed_shape, scale_shape

BF16 = np.dtype(ml_dtypes.bfloat16)
CELLS = 1 << 20  # the address of the memory for amaxes


class Odd(np.ndarray):
    """Stand in for a subclass of ndarray."""


class Memory:
    """Stand in for cupy.cuda.MemoryPointer, in host memory."""

    def __init__(self, array, device, log):
        self.array, self.ptr, self.device_id, self._log = array, array.ctypes.data, device, log

    def __add__(self, offset):
        moved = copy(self)
        moved.ptr += offset
        return moved

    def memset_async(self, value, size):
        self._log.append(("memset", self.ptr, size))


class Array:
    """Stand in for cupy.ndarray, in host memory that begins `offset` bytes after a multiple of 16."""

    log: ClassVar[list] = []  # records all launches, copies and cleared memory

    def __init__(self, shape, dtype=np.float32, memory=None, offset=0, device=0, array=None):
        if memory is not None:
            size, start = int(np.prod(shape)) * np.dtype(dtype).itemsize, memory.ptr - memory.array.ctypes.data
            array = memory.array[start : start + size].view(dtype).reshape(shape)
        elif array is None:
            memory = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
            start = -memory.ctypes.data % 16 + offset
            array = memory[start : len(memory) - 48 + start - offset][: int(np.prod(shape)) * np.dtype(dtype).itemsize]
            array = array.view(dtype).reshape(shape)
        self.array, self.device = array, SimpleNamespace(id=device)
        self.shape, self.dtype, self.strides, self.flags = array.shape, array.dtype, array.strides, array.flags
        self.size, self.ndim, self.nbytes = array.size, array.ndim, array.nbytes
        self.data = Memory(array, device, self.log)

    def reshape(self, *shape):
        return Array(None, device=self.device.id, array=self.array.reshape(*shape))

    def __getitem__(self, index):
        return Array(None, device=self.device.id, array=self.array[index])

    def __setitem__(self, index, value):
        value.data and self.log.append(("copy", value.data.ptr, self.data.ptr, self.nbytes))

    def __dlpack__(self):
        raise AssertionError("a CuPy array was exported")


Array.__module__ = "cupy"


@pytest.fixture
def gpu(monkeypatch):
    """Install a stand-in for CuPy whose kernels only record their launches.

    The fixture's `log` is the list of launches, and its `current` is the number of the current device.
    """
    state = SimpleNamespace(current=0, log=Array.log)
    runtime = SimpleNamespace(
        getDevice=lambda: state.current,
        streamIsCapturing=lambda stream: False,
        memsetAsync=lambda at, value, size, stream: state.log.append(("memset", at, size)),
    )
    cupy = SimpleNamespace(
        ndarray=Array,
        cuda=SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: SimpleNamespace(ptr=0),
            alloc=lambda size: Array(size, np.uint8).data,
            Memory=lambda size: SimpleNamespace(ptr=CELLS, size=size),
        ),
        ascontiguousarray=lambda a: a,
        empty=Array,
        zeros=Array,
        moveaxis=lambda a, source, target: a,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(imports, "cupy", lambda: cupy)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(call_cache, "_CALLS", {})

    def function(source, kernel, device):
        def launched(grid, threads, arguments, stream=None):
            state.log.append((kernel, source, grid, threads, arguments[0].tobytes()))

        return launched

    monkeypatch.setattr(compiler, "function", function)
    caches = [f for m in (launch, matrix, cached_calls) for f in vars(m).values() if hasattr(f, "cache_clear")]
    for cached in caches:
        cached.cache_clear()
    state.log.clear()
    yield state
    for cached in caches:
        cached.cache_clear()


def result(recipe, shape=(64, 256), dtype=BF16, axis=-1, layout="linear", **parts):
    """Return a Quantized to pass as out= for an x of the given shape, dtype, axis and scale layout.

    parts: arrays to take instead of those of right shape, by name.
    """
    r = fp4kit.recipe(recipe)
    scales = fp4kit.layouts.padded_shape(scale_shape(shape, r), layout)
    arrays = {"packed": Array(packed_shape(shape, r), np.uint8), "block_scale": Array(scales, np.uint8)}
    has_scale = r.tensor_scaling != "none"
    arrays |= {name: Array(()) if has_scale else None for name in ("tensor_scale", "tensor_amax")}
    return fp4kit.Quantized(
        **(arrays | parts), shape=shape, dtype=dtype, axis=axis % len(shape), recipe=r, scale_layout=layout
    )


def logged(gpu, call):
    """Return (the launches that a call makes, its result). gpu: the fixture, which records launches."""
    gpu.log.clear()
    value = call()
    return list(gpu.log), value


def by_driver(gpu, monkeypatch, call):
    """Return (launches, result) of a call that is made without a cached call, as if it had no key."""

    def no_facts(array):
        raise TypeError

    with monkeypatch.context() as patched:
        patched.setattr(call_cache, "_facts_function", no_facts)
        return logged(gpu, call)


def forbid(monkeypatch):
    """Make the test fail if a call is made without a cached call."""
    for name in ("quantize", "dequantize", "fake_quantize"):
        monkeypatch.setattr(engine, name, lambda *a, **k: pytest.fail("the driver did the call"))


def argument(line, name):
    """Return one argument of a logged launch of quantize: an address, or 0 if the array is absent."""
    return int(np.frombuffer(line[4], ROWS.struct)[name][0])


def with_arguments(line, **addresses):
    """Return a logged launch of quantize with some of its addresses replaced."""
    arguments = np.frombuffer(line[4], ROWS.struct).copy()
    for name, address in addresses.items():
        arguments[name] = address
    return (*line[:4], arguments.tobytes())


def test_the_amax_of_x_is_copied_to_out(gpu, monkeypatch):
    """For an array that is not small, a separate launch finds the amax of x, and the last launch copies it to out."""
    x, out = Array((2048, 512), BF16), result("nvfp4-te", (2048, 512))
    first, _ = by_driver(gpu, monkeypatch, lambda: fp4kit.quantize(x, "nvfp4-te", out=out))
    forbid(monkeypatch)
    (*cleared, amax, last), _ = logged(gpu, lambda: fp4kit.quantize(x, "nvfp4-te", out=out))
    assert [line[0] for line in first] == ["amax_kernel", "quantize_kernel"] and {line[0] for line in cleared} == {
        "memset"
    }
    there, here = argument(first[1], "tensor_amax"), argument(last, "tensor_amax")
    assert argument(last, "amax_out") == out.tensor_amax.data.ptr and here == CELLS != there
    assert (*first[0][:4], first[0][4].replace(np.uint64(there).tobytes(), np.uint64(here).tobytes())) == amax
    assert with_arguments(first[1], tensor_amax=here) == last


def test_the_kernel_finds_the_amax_of_a_small_array_in_out(gpu, monkeypatch):
    x, out = Array((64, 256), BF16), result("nvfp4-te")
    first, _ = by_driver(gpu, monkeypatch, lambda: fp4kit.quantize(x, "nvfp4-te", out=out))
    forbid(monkeypatch)
    second, _ = logged(gpu, lambda: fp4kit.quantize(x, "nvfp4-te", out=out))
    assert [line[0] for line in first] == ["quantize_kernel"] and "#define FP4KIT_FINDERS 8" in first[0][1]
    assert [line[0] for line in second] == ["quantize_kernel"] and second[0][2][0] % FINDERS == 0  # whole clusters
    at = out.tensor_amax.data.ptr
    assert argument(first[0], "amax_out") == at and argument(first[0], "tensor_amax") != at
    assert with_arguments(first[0], tensor_amax=at, amax_out=0) == second[0]


# ---- keys ----

SHAPE = (64, 256)
STRIDED = np.zeros((64, 512), BF16)[:, ::2]
CHANGES = {
    "shape": lambda: {"x": Array((32, 512), BF16)},
    "dtype": lambda: {"x": Array(SHAPE, np.float16)},
    "strides": lambda: {"x": Array(None, array=STRIDED)},
    "alignment": lambda: {"x": Array(SHAPE, BF16, offset=2)},
    "device": lambda: {"x": Array(SHAPE, BF16, device=1)},
    "no amax": lambda: {"amax": None},
    "dtype of amax": lambda: {"amax": Array((), np.float64)},
    "shape of amax": lambda: {"amax": Array((2,))},
    "device of amax": lambda: {"amax": Array((), device=1)},
    "recipe": lambda: {"recipe": "nvfp4-te-reference"},
    "recipe object": lambda: {"recipe": replace(fp4kit.recipe("nvfp4-te"), sign="negative")},
    "axis": lambda: {"axis": 0},
    "type of axis": lambda: {"axis": -1.0},
    "layout": lambda: {"layout": "swizzled_128x4"},
    "rounding": lambda: {"rounding": "stochastic"},
    "no out": lambda: {"out": None},
    "out's recipe": lambda: {"out": replace(result("nvfp4-te"), recipe=fp4kit.recipe("nvfp4-te-reference"))},
    "out's dtype": lambda: {"out": result("nvfp4-te", dtype=np.float16)},
    "out's axis": lambda: {"out": replace(result("nvfp4-te", (256, 256)), axis=0)},
    "out's shape": lambda: {"out": result("nvfp4-te", (32, 512))},
    "out's layout": lambda: {"out": result("nvfp4-te", layout="swizzled_8x4")},
    "out's codes": lambda: {"out": result("nvfp4-te", packed=Array((64, 128), np.uint8, offset=1))},
    "out's scales": lambda: {"out": result("nvfp4-te", block_scale=Array((64, 16), np.uint8, offset=1))},
    "out's tensor scale": lambda: {"out": result("nvfp4-te", tensor_scale=Array((), offset=4))},
    "out's amax": lambda: {"out": result("nvfp4-te", tensor_amax=None)},
}


def key(x=None, amax="", recipe="nvfp4-te", axis=-1, layout="linear", rounding="nearest", out=""):
    x = Array(SHAPE, BF16) if x is None else x
    amax, out = (Array(()) if isinstance(amax, str) else amax), (result("nvfp4-te") if isinstance(out, str) else out)
    found, call = call_cache.find("quantize", (x, amax, out), recipe, axis, layout, rounding)
    assert call is None and found is not None
    return found


def test_arrays_of_equal_form_have_one_key(gpu):
    assert key() == key() and hash(key()) == hash(key())


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_check_depends_on_changes_the_key(gpu, change):
    assert key(**CHANGES[change]()) != key()


def test_the_current_device_changes_the_key(gpu):
    here = key()
    gpu.current = 1
    assert key() != here


@pytest.mark.parametrize(
    "arrays",
    [
        (None,),
        ([1.0],),
        (np.zeros(3).view(Odd),),
        (Array((2, 32)), 3.0),
        (Array((2, 32)), np.float32(3)),
        (Array((2, 32)), ""),
    ],
    ids=["None", "list", "subclass of NumPy's", "number", "NumPy number", "text"],
)
def test_other_arguments_have_no_key(gpu, arrays):
    assert call_cache.find("quantize", arrays, "nvfp4-te") == (None, None)


def test_an_argument_that_cannot_be_hashed_has_no_key(gpu):
    assert call_cache.find("quantize", (Array((2, 32)),), ["nvfp4-te"]) == (None, None)


def test_numpy_arrays_do_not_ask_for_cupy(monkeypatch):
    monkeypatch.setattr(imports, "cupy", lambda: pytest.fail("CuPy was imported"))
    x = np.zeros((2, 32), np.float32)
    q = fp4kit.quantize(x, "mxfp4-ocp")
    fp4kit.quantize(x, "mxfp4-ocp", out=q)
    fp4kit.dequantize(q)
    fp4kit.fake_quantize(x, "mxfp4-ocp")


def test_the_number_of_cached_calls_is_limited(gpu):
    for i in range(3 * call_cache.MAX_CALLS):
        assert call_cache.run_first((i,), lambda: "cached", (), lambda: "driver") == "cached"
        assert (i,) in call_cache._CALLS and len(call_cache._CALLS) <= call_cache.MAX_CALLS
    assert call_cache.run_first(None, lambda: "cached", (), lambda: "driver") == "cached"
    assert None not in call_cache._CALLS


@pytest.mark.parametrize("call", [None, lambda: None])
def test_the_driver_does_what_a_cached_call_does_not(gpu, call):
    assert call_cache.run_first(("key",), call, (), lambda: "driver") == "driver"
    assert call_cache._CALLS == {("key",): call}
    with pytest.raises(ZeroDivisionError):
        call_cache.run_first(("other",), call, (), lambda: 1 / 0)
    assert ("other",) not in call_cache._CALLS


def test_calls_that_cannot_be_cached_are_not_tried_again(monkeypatch):
    """If the cache records that a signature has no cached call, find returns no key.

    So nothing is stored for the signature again.
    """
    x = np.ones((2, 3, 32), np.float32)
    key, _ = call_cache.find("quantize", (x,), "mxfp4-ocp")
    assert key is not None
    monkeypatch.setitem(call_cache._CALLS, key, None)
    assert call_cache.find("quantize", (x,), "mxfp4-ocp") == (None, None)


UNUSUAL = {
    "blocks along axis 0 of a stack": ("mxfp4-ocp", Array((64, 2, 64), BF16), {"axis": 0}),
    "columns of a stack": ("mxfp4-ocp", Array((2, 64, 64), BF16), {"axis": 1}),
    "no elements": ("mxfp4-ocp", Array((0, 64), BF16), {}),
    "strided": ("mxfp4-ocp", Array(None, array=STRIDED), {}),
    "another device": ("mxfp4-ocp", Array((64, 64), BF16, device=1), {}),
    "a copy of given amaxes": ("nvfp4-te-rowscaled", Array((4, 64), BF16), {"amax": Array((4,)), "given": Array((4,))}),
    "given amaxes of other rows": ("nvfp4-te-rowscaled", Array((4, 64), BF16), {"amax": Array((2,))}),
    "amaxes of columns": ("nvfp4-te-rowscaled", Array((16, 64), BF16), {"axis": 0}),
    "amaxes of experts": ("nvfp4-te", Array((2, 64, 64), BF16), {"amax": Array((2,))}),
    "swizzled stack": ("mxfp4-ocp", Array((2, 64, 64), BF16), {"layout": "swizzled_128x4"}),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_calls_are_not_cached(gpu, case):
    recipe, x, options = UNUSUAL[case]
    axis, layout = options.get("axis", x.ndim - 1), options.get("layout", "linear")
    call = Call("quantize", x, fp4kit.recipe(recipe), axis, x, options.get("amax"), layout=layout)
    given = options.get("given", call.tensor_amax)
    assert cached_calls.quantize(call, x, given) is None
    assert cached_calls.fake_quantize(call, x, given) is None or layout != "linear"


def test_errors_are_not_cached(gpu):
    out = result("nvfp4-te")
    for _ in range(2):
        with pytest.raises(ValueError, match="out has dtype bfloat16; needs float16"):
            fp4kit.quantize(Array(SHAPE, np.float16), "nvfp4-te", tensor_amax=Array(()), out=out)
    assert not call_cache._CALLS


def test_threads_that_launch_do_not_mix_up_their_arguments():
    """A kernel gets the arguments of its own call, even if other threads launch at the same time."""
    wrong, fields = [], np.dtype([("a", "u8"), ("b", "u8"), ("size", "i8")])

    def function(grid, threads, arguments):
        address, _ = arguments[0].__array_interface__["data"]
        time.sleep(1e-5)
        a, b, size = np.frombuffer(ctypes.string_at(address, fields.itemsize), np.uint64).tolist()
        if b != a + 1 or size != 7 or arguments[0].tobytes() != np.array([a, b, size], np.uint64).tobytes():
            wrong.append((a, b, size))
        local.seen.append(a)

    def work(thread):
        local.seen = []
        for i in range(200):
            kernel(1000 * thread + i, 1000 * thread + i + 1)
        if local.seen != [1000 * thread + i for i in range(200)]:
            wrong.append(thread)

    kernel, local = Launch(function, 1, fields, 7), threading.local()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
