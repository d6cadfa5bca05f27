"""Test on a GPU that examples/train_fp4.py gives the losses of the CPU, bit for bit, also with fp4kit.torch on CUDA
tensors.
"""

import functools
import importlib

import numpy as np
import pytest
from exhaustive import by_default
from inputs import ordinary
from on_gpu import DEVICES, ON_GPU, cupy, gpu_only, importable

import fp4kit
from examples import train_fp4
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.settings import FakeQuantSettings

pytestmark = ON_GPU
STEPS = 60 if DEVICES else 15
with importable():
    WAYS = list(train_fp4.ways((1, 2, 4), True))


@functools.cache
def trained():
    return train_fp4.train(STEPS, train_fp4.whole)


@pytest.mark.parametrize("name", by_default([way for way in WAYS if "4 ranks" not in way], WAYS))
def test_every_loss_is_that_of_the_cpu(name):
    expected = trained()
    assert train_fp4.ways((1, 2, 4), True)[name](STEPS) in ([expected], [expected] * 2, [expected] * 4)


@gpu_only
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-flashinfer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_autograd_on_cuda(recipe, dtype):
    torch = pytest.importorskip("torch")
    fp4kit_torch = importlib.import_module("fp4kit.torch")
    quantized = fp4kit_torch.FakeQuantized(FakeQuantSettings(recipe), "w")
    x, grad = (torch.from_numpy(ordinary(seed)).to(getattr(torch, dtype)) for seed in (1, 2))
    w = x.cuda().requires_grad_()
    y = quantized(w)
    y.backward(grad.cuda())
    expected = quantized(x)
    assert y.is_cuda and y.dtype == x.dtype
    assert torch.equal(y.detach().cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(w.grad.cpu(), grad)


def test_settings_on_cupy_arrays():
    w = ordinary(3)
    settings = FakeQuantSettings("mxfp4-flashinfer", block_size=32)
    assert_same_bits(settings.fake_quantize("w", cupy.asarray(w)).get(), fp4kit.fake_quantize(w, "mxfp4-flashinfer"))
    grad = cupy.asarray(np.ones_like(w))
    assert settings.backward("w", grad, cupy.asarray(w)) is grad
