"""Test repeated calls on CPU tensors of PyTorch and JAX: they give the bits and errors of calls on NumPy arrays.

They take nearly the time of those calls.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE

import fp4kit
from fp4kit.ops import engines as call_cache

pytestmark = NEEDS_ENGINE
RECIPES = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt-channel")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def torch_of(array):
    torch = pytest.importorskip("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def jax_of(array):
    return pytest.importorskip("jax").numpy.asarray(array)


def numpy_of(array):
    """Return a PyTorch or JAX array on the CPU as a NumPy array, bfloat16 included."""
    torch_bf16 = hasattr(array, "data_ptr") and str(array.dtype) == "torch.bfloat16"
    return (
        array.view(pytest.importorskip("torch").int16).numpy().view(ml_dtypes.bfloat16)
        if torch_bf16
        else np.asarray(array)
    )


def bits(result):
    parts = result.parts() if isinstance(result, fp4kit.Quantized) else {"values": result}
    return {name: None if part is None else (np.shape(part), numpy_of(part).tobytes()) for name, part in parts.items()}


@pytest.fixture(autouse=True)
def no_cached_calls(monkeypatch):
    monkeypatch.setattr(call_cache, "_CALLS", {})


@pytest.mark.parametrize("make", [torch_of, jax_of])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls_have_the_bits_of_numpy(make, recipe, dtype):
    rng = np.random.default_rng(5)
    for axis in (-1, 0):
        for _ in range(3):  # the first call with a signature is parsed; later calls use the cache
            x = rng.standard_normal((64, 96)).astype(dtype)
            t = make(x)
            q, expected = fp4kit.quantize(t, recipe, axis=axis), fp4kit.quantize(x, recipe, axis=axis)
            assert type(q.packed) is type(t)
            assert bits(q) == bits(expected)
            assert bits(fp4kit.dequantize(q)) == bits(fp4kit.dequantize(expected))
            assert bits(fp4kit.fake_quantize(t, recipe, axis=axis)) == bits(fp4kit.fake_quantize(x, recipe, axis=axis))
    assert any(call is not None for call in call_cache._CALLS.values())


def test_given_amaxes_and_outs():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(6).standard_normal((32, 64)).astype(np.float32)
    t, out = torch_of(x), fp4kit.quantize(torch_of(x), "nvfp4-te")
    version = out.packed._version
    for amax in (3.5, 7.0, torch.tensor(2.5), torch.tensor(9.0)):
        expected = bits(fp4kit.quantize(x, "nvfp4-te", tensor_amax=float(amax)))
        assert bits(fp4kit.quantize(t, "nvfp4-te", tensor_amax=amax)) == expected
        assert fp4kit.quantize(t, "nvfp4-te", tensor_amax=amax, out=out) is out
        assert bits(out) == expected
    assert out.packed._version > version
    values = torch.empty_like(t)
    for _ in range(2):
        assert fp4kit.dequantize(out, out=values) is values
        assert bits(values) == bits(fp4kit.dequantize(out))


def test_arrays_of_jax_in_another_layout_are_not_taken_for_those_of_a_cached_call():
    jax = pytest.importorskip("jax")
    layouts = pytest.importorskip("jax.experimental.layout")
    x = np.random.default_rng(7).standard_normal((64, 128)).astype(np.float32)
    device = jax.devices("cpu")[0]
    by_rows = jax.device_put(x, device)
    by_columns = jax.device_put(x, layouts.Format(layouts.Layout((1, 0)), jax.sharding.SingleDeviceSharding(device)))
    assert np.asarray(by_rows).strides != np.asarray(by_columns).strides
    for array in (by_rows, by_rows, by_columns, by_columns, by_rows):
        assert bits(fp4kit.quantize(array, "nvfp4-te")) == bits(fp4kit.quantize(x, "nvfp4-te"))


def test_results_are_new_each_time():
    t = torch_of(np.ones((32, 64), np.float32))
    results = [fp4kit.quantize(t, "nvfp4-te") for _ in range(3)]
    assert len({q.packed.data_ptr() for q in results}) == len({q.tensor_scale.data_ptr() for q in results}) == 3


def test_invalid_tensors_are_rejected_after_a_cached_call():
    torch = pytest.importorskip("torch")
    t = torch.ones(32, 64)
    for _ in range(2):
        fp4kit.quantize(t, "mxfp4")
        fp4kit.fake_quantize(t, "mxfp4")
    with pytest.raises(ValueError, match="requires grad"):
        fp4kit.fake_quantize(torch.ones(32, 64, requires_grad=True), "mxfp4")
    with pytest.raises(ValueError, match="negative bit set"):
        fp4kit.quantize(torch.zeros(32, 64, dtype=torch.complex64).conj().imag, "mxfp4")
    with pytest.raises(BufferError, match="without memory of its own"):
        torch.vmap(lambda x: fp4kit.quantize(x, "mxfp4").packed)(torch.ones(2, 32, 64))
    jax = pytest.importorskip("jax")
    gone = jax.numpy.ones((32, 64))
    fp4kit.quantize(gone, "mxfp4")
    gone.delete()
    with pytest.raises(BufferError, match="deleted"):
        fp4kit.quantize(gone, "mxfp4")


def test_nan_and_the_specification_go_the_full_way():
    t = torch_of(np.ones((32, 64), np.float32))
    fp4kit.quantize(t, "nvfp4-te")
    t[0, 0] = float("nan")
    x = t.numpy()
    assert bits(fp4kit.quantize(t, "nvfp4-te")) == bits(fp4kit.quantize(x, "nvfp4-te"))
    with fp4kit.specification():
        assert call_cache.find("quantize", (t, None, None), "nvfp4-te") == (None, None)
        assert bits(fp4kit.quantize(t, "nvfp4-te")) == bits(fp4kit.quantize(x, "nvfp4-te"))


def python_calls(call, *arguments) -> int:
    """Return the number of Python functions that a repeated call enters."""
    call(*arguments), call(*arguments)
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return len(entered)


def test_a_later_call_on_a_tensor_enters_few_functions_more_than_on_an_array():
    """A repeated call on a tensor enters few Python functions, each of which costs about a microsecond.

    Times vary too much for a test; measured, a call on a tensor takes 1 to 2 us more.
    """
    x = np.ones((4, 64), np.float32)
    t = torch_of(x)
    q, of_tensor = fp4kit.quantize(x, "nvfp4-te"), fp4kit.quantize(t, "nvfp4-te")
    for call, array, tensor in (
        (lambda a: fp4kit.quantize(a, "nvfp4-te"), x, t),
        (fp4kit.dequantize, q, of_tensor),
        (lambda a: fp4kit.fake_quantize(a, "nvfp4-te"), x, t),
    ):
        assert python_calls(call, tensor) <= python_calls(call, array) + 4
