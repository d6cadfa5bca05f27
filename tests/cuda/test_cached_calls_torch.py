"""Test cached calls on PyTorch tensors, in host memory: the addresses, new tensors and streams of launches.

On a GPU, tests/cuda/test_gpu_torch.py compares the results of the kernels.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.arrays import imports
from fp4kit.arrays import returns as torch_arrays
from fp4kit.call.parse import Call
from fp4kit.cuda import cached_calls, compiler, launch, matrix
from fp4kit.cuda.dispatch import PATCHES, ROWS
from fp4kit.cuda.launch import LAUNCHES
from fp4kit.ops import engines as call_cache

torch = pytest.importorskip("torch")
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (64, 256)
STREAM, CELLS = 4321, 1 << 20


@pytest.fixture(autouse=True)
def log(monkeypatch):
    """Make tensors report that they are on CUDA, set a current stream, and record all launches and cleared memory."""
    seen = []
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        memsetAsync=lambda *arguments: seen.append(("memset", arguments)),
        streamIsCapturing=lambda stream: False,
    )
    cuda = SimpleNamespace(runtime=runtime, Memory=lambda size: SimpleNamespace(ptr=CELLS, size=size))
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch_arrays, "_raw_stream", lambda: lambda index: STREAM)
    monkeypatch.setattr(call_cache, "_CALLS", {})
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "architecture_of", lambda device: "sm_90")

    def function(source, kernel, device):
        def launched(grid, threads, arguments, stream):
            assert stream.ptr == STREAM
            name = kernel.removesuffix("_kernel")
            struct = {"quantize": ROWS.struct, "quantize_columns": PATCHES.struct}.get(name)
            fields = LAUNCHES[name].arguments if struct is None else struct
            words = np.frombuffer(arguments[0].tobytes(), fields)[0]
            seen.append((name, {f: int(words[f]) for f in fields.names if fields[f].kind == "u" and words[f]}))

        return launched

    monkeypatch.setattr(compiler, "function", function)
    caches = [f for m in (launch, matrix, cached_calls) for f in vars(m).values() if hasattr(f, "cache_clear")]
    for cached in caches:
        cached.cache_clear()
    yield seen
    for cached in caches:
        cached.cache_clear()


def tensor(shape=SHAPE, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


class Imported:
    """Stand in for the CuPy array as which a call imports a tensor."""

    def __init__(self, t):
        self.shape, self.ndim, self.size, self.dtype = tuple(t.shape), t.ndim, t.numel(), dtype_of(t)
        self.flags, self.device = SimpleNamespace(c_contiguous=t.is_contiguous()), SimpleNamespace(id=0)
        self.data = SimpleNamespace(ptr=t.data_ptr())


def dtype_of(t):
    return torch_arrays.numpy_dtype("", t.dtype)


def parsed(x, recipe, axis=1, amax=None):
    given = None if amax is None else Imported(amax)
    return Call("quantize", Imported(x), fp4kit.recipe(recipe), axis, Imported(x.movedim(axis, -1)), given)


def addresses(q, prefix=""):
    named = {"packed": q.packed, "scales": q.block_scale, "tensor_scale": q.tensor_scale}
    return {prefix + name: a.data_ptr() for name, a in named.items() if a is not None}


AMAXES = [("mxfp4-ocp", False), ("nvfp4-te", False), ("nvfp4-te", True)]


@pytest.mark.parametrize("directions", ["rows", "columns", "both"])
@pytest.mark.parametrize(("recipe", "is_given"), AMAXES)
def test_quantize(log, recipe, is_given, directions):
    """The kernel gets the addresses of x and of new tensors, and writes the amax that it finds, or a copy of the
    caller's, into each result.
    """
    x, amax, axis = tensor(), torch.tensor(3.0) if is_given else None, 1 if directions == "rows" else 0
    call = cached_calls.quantize(parsed(x, recipe, axis, amax), x, amax, directions == "both")
    found = call(x, amax, None)
    results = found if directions == "both" else (found,)
    wanted = {"x": x.data_ptr()}
    for q, of in zip(results, (1, 0) if directions == "both" else (axis,), strict=True):
        wanted |= addresses(q, "" if of else "column_")
        if q.tensor_amax is not None:
            second = directions == "both" and of == 0
            written = "column_amax_out" if second else "amax_out" if is_given else "tensor_amax"
            wanted[written] = q.tensor_amax.data_ptr()
        expected = fp4kit.quantize(np.zeros(SHAPE, BF16), recipe, axis=of)
        for name, part in expected.parts().items():
            new = getattr(q, name)
            assert (new is None) == (part is None), name
            if part is not None:
                assert type(new) is torch.Tensor and new.shape == part.shape and new.is_contiguous(), name
                assert dtype_of(new) == part.dtype, name
        assert (q.shape, q.dtype, q.axis, q.recipe, q.scale_layout) == (SHAPE, BF16, of, expected.recipe, "linear")
    wanted |= {"tensor_amax": amax.data_ptr()} if is_given else {}
    kernel = "quantize" if directions == "rows" else "quantize_columns"
    assert log == [(kernel, wanted)] and len({*wanted.values()}) == len(wanted)
    if directions != "both":
        assert call(x, amax, found) is found and log[1:] == [(kernel, wanted)]


def test_an_amax_with_a_launch_of_its_own(log):
    """The amax kernel raises a zero that no other call uses, and quantize copies it into the result."""
    x = tensor((2048, 512))
    call = cached_calls.quantize(parsed(x, "nvfp4-te"), x, None)
    cells = []
    for _ in range(5000):
        q = call(x, None, None)
        *memsets, (name, found), (_, quantized) = log
        cells.append(found["amax"])
        assert name == "amax" and found["x"] == x.data_ptr()
        assert quantized == {"x": x.data_ptr(), "tensor_amax": cells[-1]} | addresses(q) | {
            "amax_out": q.tensor_amax.data_ptr()
        }
        # A cleared part is neither that of this call nor one of the last 1,000 calls.
        for _, (at, value, size, stream) in memsets[1:] if len(cells) == 1 else memsets:
            assert (value, stream) == (0, STREAM) and not {at + i for i in range(0, size, 4)} & {*cells[-1000:]}
        log.clear()
    assert cells[:4096] == [CELLS + 4 * i for i in range(4096)] and cells[4096:] == cells[: 5000 - 4096]


def test_an_amax_in_a_capture(log, monkeypatch):
    """A graph is launched more than once, so it clears the amax itself."""
    x = tensor((2048, 512))
    monkeypatch.setattr(imports.cupy().cuda.runtime, "streamIsCapturing", lambda stream: stream == STREAM)
    call = cached_calls.quantize(parsed(x, "nvfp4-te"), x, None)
    q = call(x, None, None)
    at = q.tensor_amax.data_ptr()
    assert log[:2] == [("memset", (at, 0, 4, STREAM)), ("amax", {"x": x.data_ptr(), "amax": at})]
    assert log[2:] == [("quantize", {"x": x.data_ptr(), "tensor_amax": at, "amax_out": at} | addresses(q))]


def test_other_operations(log):
    x, out = tensor(), tensor()
    y = cached_calls.fake_quantize(parsed(x, "nvfp4-te"), x, None)(x, None)
    ((_, seen),) = log
    assert seen.pop("tensor_amax") not in (x.data_ptr(), y.data_ptr())
    assert seen == {"x": x.data_ptr(), "values": y.data_ptr()} and y.dtype == torch.bfloat16 and y.shape == SHAPE
    q = cached_calls.quantize(parsed(x, "nvfp4-te-2d"), x, None)(x, None, None)
    imported = fp4kit.quantize(np.zeros(SHAPE, BF16), "nvfp4-te-2d")
    parts = {name: Imported(part) for name, part in q.parts().items()}
    vars(imported).update(parts)
    for target in (None, out):
        values = cached_calls.dequantize(imported, q, BF16, None if target is None else Imported(target))(q, target)
        assert target is None or values is out
        amax = {"tensor_amax": q.tensor_amax.data_ptr()}
        assert log[-1] == ("dequantize", addresses(q) | amax | {"values": values.data_ptr()})
    swizzled = cached_calls.swizzle(imported, q, "swizzled_128x4")(q)
    assert log[-1] == ("swizzle", {"in": q.block_scale.data_ptr(), "out": swizzled.block_scale.data_ptr()})
    assert swizzled.packed is q.packed and swizzled.scale_layout == "swizzled_128x4" and q.scale_layout == "linear"
    turned = cached_calls.transpose(imported, q, 0)(q)
    outs = {"codes_out": turned.packed.data_ptr(), "scales_out": turned.block_scale.data_ptr()}
    assert log[-1] == ("transpose", {"codes": q.packed.data_ptr(), "scales": q.block_scale.data_ptr()} | outs)
    assert turned.axis == 0 and turned.tensor_scale is q.tensor_scale


# ---- keys ----


def key(x, amax=None, out=None):
    found, call = call_cache.find("quantize", (x, amax, out), "nvfp4-te", -1)
    assert call is None
    return found


def test_what_a_check_depends_on_changes_the_key():
    x, q = tensor(), cached_calls.quantize(parsed(tensor(), "nvfp4-te"), tensor(), None)(tensor(), None, None)
    same, whole = key(x, torch.tensor(1.0), q), torch.zeros(64 * 256 + 1, dtype=torch.bfloat16)
    assert (
        same is not None
        and same == key(tensor(), torch.tensor(2.0), q)
        and hash(same) == hash(key(x, torch.tensor(1.0), q))
    )
    others = [
        tensor((32, 512)),
        tensor(dtype=torch.float32),
        tensor((256, 64)).T,
        whole[1:].reshape(SHAPE),
        torch.nn.Parameter(x),
    ]
    keys = [key(other, torch.tensor(1.0), q) for other in others]
    keys += [
        key(x, None, q),
        key(x, torch.tensor([1.0]), q),
        key(x, torch.tensor(1.0), None),
        key(x, torch.tensor(1.0, dtype=torch.float64), q),
    ]
    assert None not in keys and len({same, *keys}) == 1 + len(keys)


def test_a_gradient_that_would_be_lost_changes_the_key():
    x = tensor().requires_grad_()
    with torch.no_grad():
        unneeded = key(x)
    assert key(x) != unneeded


@pytest.mark.parametrize("other", [np.float32(1), 1.0, [1.0], "x"], ids=["NumPy's", "number", "list", "text"])
def test_other_amaxes_have_no_key(other):
    assert key(tensor(), other) is None


def test_tensors_of_the_host_have_a_key_of_their_own(monkeypatch):
    on_cuda = key(tensor())
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert key(tensor()) not in (None, on_cuda)


@pytest.mark.parametrize("straight", [True, False], ids=["straight from the allocator", "by an older PyTorch"])
@pytest.mark.parametrize("shape", [(), (3,), (64, 128), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_new_tensors(monkeypatch, shape, dtype, straight):
    if not straight:
        monkeypatch.setattr(torch_arrays, "_direct_allocator", lambda kind: None)
    for zeros in (False, True):
        make = torch_arrays.maker(torch.device("cpu"), shape, torch_arrays.numpy_dtype("", dtype), zeros)
        a, b = make(), make()
        assert (a.shape, a.dtype, a.is_contiguous(), a.requires_grad) == (shape, dtype, True, False)
        assert a.data_ptr() != b.data_ptr() and a.untyped_storage().nbytes() == a.numel() * a.itemsize
        assert not zeros or not a.any()


def test_this_pytorch_allocates_straight():
    assert torch_arrays._direct_allocator("cpu") and torch_arrays._direct_allocator("cuda")
    assert torch_arrays._direct_allocator("abacus") is None
