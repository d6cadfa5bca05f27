"""Fake quantization inside PyTorch: fp4kit's arrays as a torch.autograd.Function, and a parametrization for any layer.

    python examples/torch_autograd.py

PyTorch tensors reach fp4kit through DLPack without a copy, on the CPU and on a GPU. So the values are fp4kit's, in every bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn.utils import parametrize

import fp4kit
from fp4kit.training.settings import FakeQuantSettings


def to_torch(array: Any) -> torch.Tensor:
    """The array that fp4kit returned, NumPy or CuPy, as a tensor on the same memory; NumPy cannot export bfloat16 itself."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


class FakeQuantize(torch.autograd.Function):
    """w with the error of a recipe; straight-through gradient, clipped to |w| <= amax if the settings say so.

    FakeQuantize.apply(w, settings, name, amax): amax is the tensor's amax, a tensor, or None for that of w itself.
    """

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, settings: FakeQuantSettings, name: str, amax: Any = None) -> torch.Tensor:
        """fp4kit.fake_quantize; a parameter that the settings leave out comes through."""
        ctx.settings, ctx.name, ctx.amax = settings, name, amax
        if not settings.pass_through:
            ctx.save_for_backward(w)
        if not settings.is_quantized(name):
            return w.view_as(w)
        return to_torch(settings.fake_quantize(name, w.detach(), tensor_amax=amax))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """fp4kit.fake_quantize_backward, or the gradient itself."""
        (grad,) = grads
        if not ctx.settings.pass_through and ctx.settings.is_quantized(ctx.name):
            (w,) = ctx.saved_tensors
            grad = to_torch(ctx.settings.backward(ctx.name, grad.detach(), w.detach(), amax=ctx.amax))
        return grad, None, None, None


class FakeQuantized(torch.nn.Module):
    """A parametrization: layer.weight is read fake-quantized, and the optimizer updates the original."""

    def __init__(self, settings: FakeQuantSettings, name: str) -> None:
        super().__init__()
        self.settings, self.name = settings, name

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """What the layer computes with."""
        return FakeQuantize.apply(w, self.settings, self.name)


def fake_quantize_model(model: torch.nn.Module, settings: FakeQuantSettings) -> list[str]:
    """Parametrize every parameter that the settings name; returns their names."""
    names = [name for name, _ in model.named_parameters() if settings.is_quantized(name)]
    for name in names:
        module, _, leaf = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(module), leaf, FakeQuantized(settings, name))
    return names


def main() -> None:
    """Train a small network on random data with NVFP4 weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    print("fake-quantized:", *fake_quantize_model(model, FakeQuantSettings("nvfp4-te", parameters=("*.weight",))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(256, 64), torch.randn(256, 16)
    for step in range(101):
        loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    weight = model[0].parametrizations.weight.original.detach()
    assert torch.equal(model[0].weight, to_torch(fp4kit.fake_quantize(weight, "nvfp4-te")))


if __name__ == "__main__":
    main()
