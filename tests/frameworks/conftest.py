"""Run every test of this folder with PyTorch and with JAX."""

import pytest
from frameworks import Jax, Torch


@pytest.fixture(params=[Torch, Jax], ids=["torch", "jax"])
def lib(request):
    """Yield a library. JAX runs on the CPU, even if it has a GPU: tests/cuda/test_gpu_wrappers.py runs on a GPU."""
    found = request.param()
    if request.param is Torch:
        yield found
        return
    with found.jax.default_device(found.jax.devices("cpu")[0]):
        yield found
