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
from fp4kit.cuda import cached_calls
from fp4kit.cuda.cached_calls import FLOAT32, UINT8, NewArray
from fp4kit.cuda.dispatch import PATCHES, ROWS
from fp4kit.ops import engines as call_cache

torch = pytest.importorskip("torch")
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (64, 256)
STREAM = 4321


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Make tensors report that they are on CUDA, set a current stream, and record which memory is cleared."""
    cleared = []
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: cleared.append(arguments))
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch_arrays, "_raw_stream", lambda: lambda index: STREAM)
    monkeypatch.setattr(call_cache, "_CALLS", {})
    cached_calls._torch_library.cache_clear()
    yield cleared
    cached_calls._torch_library.cache_clear()


def tensor(shape=SHAPE, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def call_of(recipe, axis=1, amax=None, op="quantize"):
    x = SimpleNamespace(shape=SHAPE, dtype=BF16, ndim=2)
    return Call(op, x, fp4kit.recipe(recipe), axis, x, amax)


class Launched:
    """Stand in for a kernel's launcher: record the nonzero arguments of each launch by name.

    names: the names of the kernel's arguments, in order. `only` returns the arguments of the only launch so far.
    """

    def __init__(self, names):
        self.names, self.seen = names, []

    def __call__(self, *values, stream):
        assert stream.ptr == STREAM
        self.seen.append({name: value for name, value in zip(self.names, values, strict=True) if value})

    def only(self):
        (seen,) = self.seen
        self.seen.clear()
        return seen


def quantize_call(recipe, arguments, row, column, computes_amax, amax=None):
    """Return a cached call of quantize for PyTorch tensors, with a kernel that only records its launches.

    arguments: the kernel's arguments.
    row, column: True to write rowwise and columnwise results.
    computes_amax, amax: as for cached_calls.quantize_call.
    """
    launch, on = Launched((*arguments.pointers, *arguments.words)), cached_calls.library_of(tensor())
    axes = ((1, row), (0, column))
    results = (
        cached_calls.QuantizedResult.of(call_of(recipe, axis), axis) if wanted else None for axis, wanted in axes
    )
    call = cached_calls.quantize_call(on, amax, launch, arguments, *results, computes_amax)
    call.launch = launch
    return call


def addresses(q, prefix=""):
    named = {"packed": q.packed, "scales": q.block_scale, "tensor_scale": q.tensor_scale}
    return {prefix + name: a.data_ptr() for name, a in named.items() if a is not None}


@pytest.mark.parametrize(("recipe", "computes_amax"), [("mxfp4-ocp", False), ("nvfp4-te", True)])
def test_rows(recipe, computes_amax):
    x, call = tensor(), quantize_call(recipe, ROWS, True, False, computes_amax)
    expected = fp4kit.quantize(np.zeros(SHAPE, BF16), recipe)
    for out in (None, call(x, None, None)):
        call.launch.seen.clear()
        q = call(x, None, out)
        assert out is None or q is out
        wanted = (
            {"x": x.data_ptr()}
            | addresses(q)
            | ({} if q.tensor_amax is None else {"tensor_amax": q.tensor_amax.data_ptr()})
        )
        assert call.launch.only() == wanted
        for name, part in expected.parts().items():
            found = getattr(q, name)
            assert (found is None) == (part is None), name
            if part is not None:
                assert type(found) is torch.Tensor and found.shape == part.shape and found.is_contiguous(), name
                assert torch_arrays.numpy_dtype("", found.dtype) == part.dtype, name
        assert (q.shape, q.dtype, q.axis, q.recipe, q.scale_layout) == (SHAPE, BF16, 1, expected.recipe, "linear")


@pytest.mark.parametrize(("row", "column"), [(True, False), (False, True), (True, True)])
def test_a_given_amax_is_copied_by_the_kernel(row, column):
    """A given amax is copied to the result, new or out=, so that the result does not share the caller's array."""
    x, amax = tensor(), torch.tensor(3.0)
    call = quantize_call("nvfp4-te", ROWS if not column else PATCHES, row, column, False)
    found = call(x, amax, None)
    seen = call.launch.only()
    results = found if row and column else (found,)
    outs = [seen[name] for name in ("amax_out", "column_amax_out")[: len(results)]]
    assert seen["tensor_amax"] == amax.data_ptr() and [q.tensor_amax.data_ptr() for q in results] == outs
    assert len({amax.data_ptr(), *outs}) == 1 + len(results)
    if len(results) == 1:
        assert call(x, torch.tensor(4.0), found) is found
        assert call.launch.only()["amax_out"] == found.tensor_amax.data_ptr()


@pytest.mark.parametrize("row", [False, True])
def test_columns_and_both(row):
    x, call = tensor(), quantize_call("nvfp4-te", PATCHES, row, True, True)
    found = call(x, None, None)
    first, column = found if row else (None, found)
    wanted = {"x": x.data_ptr()} | addresses(column, "column_")
    if row:
        wanted |= addresses(first) | {"column_amax_out": column.tensor_amax.data_ptr()}
    wanted["tensor_amax"] = (first or column).tensor_amax.data_ptr()
    assert call.launch.only() == wanted
    assert (
        column.axis == 0
        and column.packed.shape == (256, 32)
        and (not row or first.tensor_amax is not column.tensor_amax)
    )


def test_an_amax_with_a_launch_of_its_own(gpu):
    launch = Launched(("x", "amax"))
    x = tensor()
    call = quantize_call("nvfp4-te", ROWS, True, False, True, cached_calls.AmaxStep(launch))
    q = call(x, None, None)
    assert launch.only() == {"x": x.data_ptr(), "amax": q.tensor_amax.data_ptr()}
    assert gpu == [(q.tensor_amax.data_ptr(), 0, 4, STREAM)]


def test_fake_quantize_and_dequantize():
    x, on = tensor(), cached_calls.library_of(tensor())
    launch = Launched((*ROWS.pointers, *ROWS.words))
    arrays = [NewArray(SHAPE, BF16), NewArray((), FLOAT32)]
    fake = cached_calls.fake_quantize_call(on, None, launch, ROWS, arrays)
    y = fake(x, None)
    seen = launch.only()
    assert seen.pop("tensor_amax") not in (x.data_ptr(), y.data_ptr())
    assert seen == {"x": x.data_ptr(), "values": y.data_ptr()} and y.dtype == torch.bfloat16 and y.shape == SHAPE
    q = quantize_call("nvfp4-te", ROWS, True, False, True)(x, None, None)
    decode = Launched(("packed", "scales", "values", "tensor_scale", "tensor_amax"))
    out = tensor()
    for target in (None, out):
        values = cached_calls.dequantize_call(on, decode, NewArray(SHAPE, BF16))(q, target)
        assert target is None or values is out
        assert decode.only() == addresses(q) | {"values": values.data_ptr(), "tensor_amax": q.tensor_amax.data_ptr()}


def test_moves():
    on = cached_calls.library_of(tensor())
    q = quantize_call("nvfp4-te", ROWS, True, False, True)(tensor(), None, None)
    scales, codes = NewArray((128, 16), UINT8), NewArray((256, 32), UINT8)
    move = Launched(("in", "out"))
    swizzled = cached_calls.move_call(on, move, {"block_scale": scales}, scale_layout="swizzled_128x4")(q)
    assert move.only() == {"in": q.block_scale.data_ptr(), "out": swizzled.block_scale.data_ptr()}
    assert swizzled.packed is q.packed and swizzled.scale_layout == "swizzled_128x4" and q.scale_layout == "linear"
    move = Launched(("codes", "scales", "codes_out", "scales_out"))
    turned = cached_calls.move_call(on, move, {"packed": codes, "block_scale": scales}, axis=0)(q)
    outs = {"codes_out": turned.packed.data_ptr(), "scales_out": turned.block_scale.data_ptr()}
    assert move.only() == {"codes": q.packed.data_ptr(), "scales": q.block_scale.data_ptr()} | outs
    assert turned.axis == 0 and turned.tensor_scale is q.tensor_scale


# ---- keys ----


def key(x, amax=None, out=None):
    found, call = call_cache.find("quantize", (x, amax, out), "nvfp4-te", -1)
    assert call is None
    return found


def test_what_a_check_depends_on_changes_the_key():
    x, q = tensor(), quantize_call("nvfp4-te", ROWS, True, False, True)(tensor(), None, None)
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
