"""Test on a GPU the linear layers of fp4kit.torch and fp4kit.jax, and error_budget: they give the bits of the CPU."""

import importlib

import numpy as np
import pytest
from inputs import BF16, ordinary
from on_gpu import DEVICES, ON_GPU, cupy
from tensors import to_numpy, to_torch

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

NEEDS_DEVICE = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device")]
WARNINGS = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future")]
X, W, GRAD = (ordinary(i, shape).astype(BF16) for i, shape in ((1, (64, 128)), (2, (96, 128)), (3, (64, 96))))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}
QUANTIZED = {"backward": "quantized", "rounding": "stochastic", "seed": 7, "hadamard": True}


def near(a, b):
    """Assert that two products differ by the order of their float32 sums and the rounding to bfloat16 only."""
    a, b = np.float64(a), np.float64(b)
    np.testing.assert_allclose(a, b, 2.0**-7, 1e-5 * np.abs(b).max())


def with_marks(*marks):
    """Return a decorator that adds marks to a test."""

    def decorate(test):
        for mark in marks:
            test = mark(test)
        return test

    return decorate


def by_torch(device, options, compiled=False):
    """Return y and the gradients of x and w, computed on a device by PyTorch."""
    torch, ft = importlib.import_module("torch"), importlib.import_module("fp4kit.torch")
    x, w = (to_torch(a).to(device).requires_grad_() for a in (X, W))
    function = lambda x, w: ft.linear(x, w, **TE, **options)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    y = function(x, w)
    y.backward(to_torch(GRAD).to(device))
    assert y.device.type == x.grad.device.type == torch.device(device).type
    return [to_numpy(a.cpu()) for a in (y, x.grad, w.grad)]


@with_marks(*NEEDS_DEVICE, *WARNINGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_torch(compiled):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    for found, expected in zip(by_torch("cuda", QUANTIZED, compiled), by_torch("cpu", QUANTIZED), strict=True):
        assert_same_bits(found, expected)
    (y, *gradients), (expected_y, *expected) = by_torch("cuda", {}, compiled), by_torch("cpu", {})
    assert_same_bits(y, expected_y)
    for a, b in zip(gradients, expected, strict=True):
        near(a, b)


@with_marks(*NEEDS_DEVICE)
@pytest.mark.parametrize("jitted", [False, True])
def test_jax(jitted):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    fj = importlib.import_module("fp4kit.jax")

    def pulled(x, w, grad):
        y, pull = jax.vjp(lambda x, w: fj.linear(x, w, **TE, **QUANTIZED), x, w)
        return y, *pull(grad)

    found = (jax.jit(pulled) if jitted else pulled)(*map(jax.numpy.asarray, (X, W, GRAD)))
    for a, b in zip(found, by_torch("cpu", QUANTIZED), strict=True):
        assert_same_bits(np.asarray(a), b)


@with_marks(*ON_GPU)
def test_error_budget():
    call = ("nvfp4-te", "nvfp4-te-2d", "sm100")
    found = fp4kit.error_budget(cupy.asarray(X), cupy.asarray(W), *call)
    assert found == fp4kit.error_budget(X, W, *call)
