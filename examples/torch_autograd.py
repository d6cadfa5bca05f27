"""Train a network with NVFP4 weights in PyTorch: quantization-aware training with fp4kit.torch.

    python examples/torch_autograd.py

The forward pass uses fake-quantized weights, and the optimizer updates the unquantized weights. To compile the model,
call model = torch.compile(model, fullgraph=True).
"""

from __future__ import annotations

import torch

import fp4kit
from fp4kit.torch import fake_quantize_model
from fp4kit.training.settings import FakeQuantSettings


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
    weight = model[0].parametrizations.weight.original.detach().numpy()
    assert (model[0].weight.detach().numpy() == fp4kit.fake_quantize(weight, "nvfp4-te")).all()


if __name__ == "__main__":
    main()
