"""Test fp4kit.torch and fp4kit.jax alike: values and gradients are bit-identical to fp4kit's and to recorded ones.

The example programs of both are run, too.
"""

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exhaustive import half
from inputs import BF16, ordinary
from tensors import to_numpy, to_torch

import fp4kit
from fp4kit.evidence.golden.check import cases
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.settings import FakeQuantSettings

ROOT = Path(__file__).resolve().parents[2]
CLIPPED = {row.recipe: row for row in ROWS if row.variant.endswith("_clip")}
ROUNDED = ["nvfp4-te", "mxfp4-flashinfer", "int4-qat", "nvfp4-te-2d"]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)


class Torch:
    """Call fp4kit.torch with NumPy arrays and return NumPy arrays, so that each test runs for fp4kit.jax too."""

    def __init__(self):
        pytest.importorskip("torch")
        self.module = importlib.import_module("fp4kit.torch")

    def __call__(self, w, grad, settings, name="w", amax=None):
        """Return the value of fake_quantize(w) and the gradient for an upstream gradient `grad`."""
        w = to_torch(w).requires_grad_()
        if amax is None:
            y = self.module.FakeQuantized(settings, name)(w)
        elif settings.is_quantized(name):
            y = self.module.fake_quantize(w, settings.resolved, tensor_amax=amax, pass_through=settings.pass_through)
        else:
            y = w * 1
        y.backward(to_torch(grad))
        return to_numpy(y), to_numpy(w.grad)


class Jax:
    """Call fp4kit.jax with NumPy arrays, with and without jit, and return NumPy arrays; both must give equal bits."""

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        self.fake_quantize = importlib.import_module("fp4kit.jax").fake_quantize

    def __call__(self, w, grad, settings, name="w", amax=None):
        """Return the value of fake_quantize(w) and the gradient for an upstream gradient `grad`."""

        def read(w, amax):
            if not settings.is_quantized(name):
                return w
            return self.fake_quantize(w, settings.resolved, tensor_amax=amax, pass_through=settings.pass_through)

        def both(w, grad, amax):
            y, pull = self.jax.vjp(lambda w: read(w, amax), w)
            return y, *pull(grad)

        plain, jitted = both(w, grad, amax), self.jax.jit(both)(w, grad, amax)
        for a, b in zip(plain, jitted, strict=True):
            assert_same_bits(np.asarray(a), np.asarray(b))
        return tuple(np.asarray(a) for a in plain)


@cache
def wrapper(kind):
    return kind()


@pytest.fixture(params=[Torch, Jax], ids=["torch", "jax"])
def wrapped(request):
    return wrapper(request.param)


@DTYPES
@pytest.mark.parametrize("recipe", ROUNDED)
@pytest.mark.parametrize("pass_through", [True, False], ids=["pass", "clip"])
def test_values_and_gradients(wrapped, recipe, dtype, pass_through):
    w, grad = ordinary(1, dtype=dtype), ordinary(2, dtype=dtype)
    amax = np.float32(3) if recipe.startswith("nvfp4") else None
    settings = FakeQuantSettings(recipe, parameters=("w",), pass_through=pass_through)
    y, g = wrapped(w, grad, settings, amax=amax)
    assert_same_bits(y, fp4kit.fake_quantize(w, recipe, tensor_amax=amax))
    assert_same_bits(g, fp4kit.fake_quantize_backward(grad, w, recipe, amax=amax, pass_through=pass_through))
    assert (g != grad).any() == (not pass_through and amax is not None)
    y, g = wrapped(w, grad, settings, name="other")
    assert_same_bits(y, w)
    assert_same_bits(g, grad)


@pytest.mark.parametrize("recipe", half(CLIPPED))
def test_recorded_gradients(wrapped, recipe, golden):
    """Gradients equal the recorded ones of Model-Optimizer's clipped straight-through estimator.

    For a pass-through estimator, they equal the upstream gradient.
    """
    compared = 0
    for case in cases(CLIPPED[recipe], golden):
        expected, amax = case.part("grad_clip"), case.part("amax")
        if expected is None or amax is None or np.isnan(amax.astype(np.float32)).any():
            continue
        upstream = golden.get(case.row.file, f"{case.name}/upstream/grad_out")
        upstream = upstream.view(ml_dtypes.bfloat16) if upstream.dtype == np.uint16 else upstream
        x, amax = case.x, amax.astype(np.float32)
        settings = FakeQuantSettings(case.recipe, pass_through=False)
        y, g = wrapped(x, upstream, settings, amax=amax)
        assert_same_bits(g, expected, case.name)
        assert_same_bits(y, fp4kit.fake_quantize(x, case.recipe, tensor_amax=amax), case.name)
        assert_same_bits(wrapped(x, upstream, FakeQuantSettings(case.recipe), amax=amax)[1], upstream, case.name)
        compared += 1
    assert compared >= 5


def test_parametrized_layers():
    torch = pytest.importorskip("torch")
    module = wrapper(Torch).module
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    settings = FakeQuantSettings("mxfp4-flashinfer", parameters=("*.weight",), exclude=("1.*",))
    original = model[0].weight.detach().clone()
    assert module.fake_quantize_model(model, settings) == ["0.weight"]
    assert_same_bits(to_numpy(model[0].weight), fp4kit.fake_quantize(original.numpy(), "mxfp4-flashinfer"))
    model(torch.ones(1, 32)).sum().backward()
    assert torch.equal(model[0].parametrizations.weight.original, original)
    assert model[0].parametrizations.weight.original.grad.abs().sum() > 0


@pytest.mark.parametrize("name, package", [("torch_autograd", "torch"), ("jax_custom_vjp", "jax")])
@pytest.mark.exhaustive
def test_examples_run_and_learn(name, package):
    pytest.importorskip(package)
    command, environment = [sys.executable, ROOT / "examples" / f"{name}.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
