"""Test PyTorch tensors on CUDA: results are tensors with the bits of NumPy results.

They are in PyTorch's memory and are computed on its current stream.
"""

import gc

import numpy as np
import pytest
from on_gpu import gpu_only
from torch_calls import CALLS, DTYPES, X, array, tensor

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import bit_patterns
from fp4kit.ops import engines as call_cache

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
BF16 = list(DTYPES)[2]
RECIPES = ("mxfp4-ocp", "nvfp4-te", "nvfp4-te-2d", "mxfp8-te", "fp8-modelopt")


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or a PyTorch without CUDA")
    call_cache._CALLS.clear()


def host(found):
    """Return results as nested lists of NumPy arrays, and assert that each array was a PyTorch tensor on CUDA."""
    if isinstance(found, fp4kit.Quantized):
        return [host(part) for part in found.parts().values() if part is not None]
    if isinstance(found, (list, tuple)):
        return [host(part) for part in found]
    if not isinstance(found, torch.Tensor):
        return found
    assert found.is_cuda
    return array(found.cpu())


def plain(expected):
    """Return the expected results of NumPy calls as nested lists of arrays, as `host` returns results of tensors."""
    if isinstance(expected, fp4kit.Quantized):
        return [part for part in expected.parts().values() if part is not None]
    return [plain(part) for part in expected] if isinstance(expected, (list, tuple)) else expected


def assert_equal(found, expected):
    """Assert that nested lists of arrays have equal bits."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    else:
        assert_same_bits(bit_patterns(np.asarray(found)), bit_patterns(np.asarray(expected)))


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_of_tensors_are_tensors(name, dtype):
    """Calls on CUDA tensors return CUDA tensors with the bits of calls on NumPy arrays.

    Each call is made three times: first without a cached call, then by the cached call.
    """
    expected = plain(CALLS[name](X[dtype]))
    for _ in range(3):
        assert_equal(host(CALLS[name](tensor(X[dtype]).cuda())), expected)


@gpu_only
@pytest.mark.parametrize("recipe", RECIPES)
def test_random_calls_on_side_streams(recipe):
    """Calls on PyTorch's side streams use the current stream, so results are right without explicit synchronization."""
    rng = np.random.default_rng(5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(40):
        shape = (int(rng.integers(1, 9)) * 32, int(rng.integers(1, 9)) * 32)
        x = rng.standard_normal(shape, dtype=np.float32) * np.float32(2.0 ** rng.integers(-20, 20))
        axis = int(rng.integers(0, 2)) if recipe != "fp8-modelopt" else 1
        with torch.cuda.stream(streams[i % 3]):
            t = torch.zeros(shape, device="cuda")
            torch.cuda._sleep(200_000)
            t.add_(torch.from_numpy(x).cuda())
            q = fp4kit.quantize(t, recipe, axis=axis)
            y = fp4kit.dequantize(q)
            fake = fp4kit.fake_quantize(t, recipe, axis=axis)
            t.fill_(7)
            del t
            found = host([q, y, fake])
        expected = fp4kit.quantize(x, recipe, axis=axis)
        assert_equal(found, [plain(expected), fp4kit.dequantize(expected), fp4kit.fake_quantize(x, recipe, axis=axis)])


@gpu_only
def test_memory_is_pytorch_s_and_comes_back():
    x = tensor(X[BF16]).cuda()
    calls = [
        CALLS[name]
        for name in ("quantize", "columns", "quantize_both", "fake_quantize", "dequantize", "swizzle", "amax")
    ]
    for call in calls * 2:
        call(x)
    gc.collect()
    torch.cuda.synchronize()
    import cupy

    before, pool = torch.cuda.memory_allocated(), cupy.get_default_memory_pool()
    held, used = pool.total_bytes(), torch.cuda.memory_reserved()
    q = fp4kit.quantize(x, "nvfp4-te")
    assert torch.cuda.memory_allocated() > before
    del q
    for i in range(10_000):
        calls[i % len(calls)](x)
    torch.cuda.synchronize()
    assert (
        torch.cuda.memory_allocated() == before and pool.total_bytes() == held and torch.cuda.memory_reserved() == used
    )


@gpu_only
def test_results_know_other_streams():
    """After record_stream, a result's memory is not reused before the other stream is done with it."""
    side, x = torch.cuda.Stream(), torch.ones(1024, 1024, device="cuda")
    for call in (lambda: fp4kit.fake_quantize(x, "nvfp4-te"), lambda: fp4kit.fake_quantize(x, "nvfp4-te", axis=0)):
        for _ in range(3):
            y = call()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                z = y.clone()
            y.record_stream(side)
            del y
            torch.full((1024, 1024), 9.0, device="cuda")
            torch.cuda.synchronize()
            assert bool((z == 1).all())


@gpu_only
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_in_a_graph_of_pytorch(recipe):
    x = tensor(X[BF16]).cuda()

    def run():
        return fp4kit.quantize(x, recipe), fp4kit.fake_quantize(x, recipe), fp4kit.quantize(x, recipe, axis=-1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(), run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    other = np.ascontiguousarray(X[BF16][::-1])
    x.copy_(tensor(other))
    graph.replay()
    torch.cuda.synchronize()
    expected = fp4kit.quantize(other, recipe)
    assert_equal(host(list(results)), [plain(expected), fp4kit.fake_quantize(other, recipe), plain(expected)])


@gpu_only
def test_views_and_strides_have_calls_of_their_own():
    x = tensor(np.ascontiguousarray(np.tile(X[BF16], (2, 2)))).cuda()
    whole = array(x.cpu())
    rows, columns = X[BF16].shape
    parts = (
        (slice(0, rows), slice(0, columns)),
        (slice(1, rows + 1), slice(columns)),
        (slice(None, None, 2), slice(columns)),
    )
    for _ in range(2):
        for part in parts:
            assert_equal(host(fp4kit.quantize(x[part], "nvfp4-te")), plain(fp4kit.quantize(whole[part], "nvfp4-te")))
        assert_equal(
            host(fp4kit.quantize(x.T, "nvfp4-te", axis=0)), plain(fp4kit.quantize(whole.T, "nvfp4-te", axis=0))
        )
    parameter = torch.nn.Parameter(x)
    for _ in range(2):
        assert_equal(host(fp4kit.quantize(parameter, "nvfp4-te")), plain(fp4kit.quantize(whole, "nvfp4-te")))
        with pytest.raises(ValueError, match="fake_quantize: x requires grad"):
            fp4kit.fake_quantize(parameter, "nvfp4-te")
        with torch.no_grad():
            fp4kit.fake_quantize(parameter, "nvfp4-te")


@gpu_only
def test_one_call_has_arrays_of_one_device():
    x = tensor(X[BF16]).cuda()
    amax = fp4kit.amax(X[BF16])
    import cupy

    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=cupy.asarray(amax))  # a CuPy array on the same device
    assert type(q.tensor_amax) is torch.Tensor
    for _ in range(2):
        assert_equal(
            host(fp4kit.quantize(x, "nvfp4-te", tensor_amax=cupy.asarray(amax))),
            plain(fp4kit.quantize(X[BF16], "nvfp4-te")),
        )
        assert_equal(
            host(fp4kit.quantize(x, "nvfp4-te", tensor_amax=torch.tensor(amax).cuda())),
            plain(fp4kit.quantize(X[BF16], "nvfp4-te")),
        )
    with pytest.raises(ValueError, match="all arrays of one call must be on one device"):
        fp4kit.quantize(x, "nvfp4-te", tensor_amax=torch.tensor(amax))
    with pytest.raises(ValueError, match=r"out.packed is .*; needs a contiguous CuPy array of uint8 .* on the device"):
        fp4kit.quantize(x, "nvfp4-te", out=fp4kit.quantize(X[BF16], "nvfp4-te"))
