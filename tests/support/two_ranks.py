"""Train a model on two ranks, sharded in several ways, and check that every way reads the weights of the plain model.

    python tests/support/two_ranks.py RANK STORE

STORE is a file through which the ranks find each other.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp4kit.torch as ft

LAYERS = ("gate_proj", "up_proj", "down_proj")
TENSOR_PARALLEL = {"*.gate_proj": ColwiseParallel(), "*.up_proj": ColwiseParallel(), "*.down_proj": RowwiseParallel()}


class Mlp(torch.nn.Module):
    """A gated MLP, whose gate and up share a tensor scale."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(64, 96, bias=False)
        self.up_proj = torch.nn.Linear(64, 96, bias=False)
        self.down_proj = torch.nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP."""
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


def a_model() -> Any:
    """Return a model whose amaxes lie in the shards of the second rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Mlp(), Mlp())
    with torch.no_grad():
        model[0].up_proj.weight[90, 3] = 1.7
        model[0].down_proj.weight[3, 90] = 2.3
    return model


def quantized(model: Any) -> Any:
    """Fake-quantize the weights and inputs of a model, and return it."""
    ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te")
    return model


def check(model: Any, plain: Any, x: torch.Tensor, exact: bool) -> None:
    """Check outputs and gradients of a sharded model. exact: whether it adds in the order of the plain model."""
    y, z = plain(x), model(x)
    assert torch.equal(y, z) if exact else torch.allclose(y, z, rtol=1e-4, atol=1e-5)
    z.square().sum().backward()
    assert list(model.state_dict()) == list(a_model().state_dict())
    for i in range(2):
        for name in LAYERS:
            held = (getattr(one[i], name).parametrizations.weight.original for one in (model, plain))
            gradients = [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in held]
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def check_nan(mesh: Any) -> None:
    """Check that a NaN in the shard of one rank is an error on all ranks, as it is for a plain weight."""
    for row in (3, 90):  # in the shard of the first rank, and of the second one
        whole, shards = a_model(), a_model()
        for model in (whole, shards):
            with torch.no_grad():
                model[0].up_proj.weight[row, 5] = torch.nan
        quantized(whole)
        quantized(parallelize_module(shards, mesh, TENSOR_PARALLEL))
        for name in ("gate_proj", "up_proj"):
            for model in (whole, shards):
                try:
                    _ = getattr(model[0], name).weight
                except ValueError as error:
                    assert f"0.{name}.weight: fake_quantize: 0.up_proj.weight holds NaN, so no" in str(error), error
                else:
                    raise AssertionError("a NaN is accepted")


def main(rank: int, store: str) -> None:
    """Check all ways of sharding on this rank. store: the path of the file through which the ranks find each other."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, plain = init_device_mesh("cpu", (2,)), quantized(a_model())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    parallel = quantized(parallelize_module(a_model(), mesh, TENSOR_PARALLEL))
    for i in range(2):
        for name in LAYERS:
            assert torch.equal(getattr(parallel[i], name).weight.full_tensor(), getattr(plain[i], name).weight)
    check(parallel, plain, x, exact=False)
    check_nan(mesh)
    for each_layer in (False, True):
        sharded = quantized(a_model())
        for block in sharded:
            for name in LAYERS if each_layer else ():
                fully_shard(getattr(block, name), mesh=mesh)
            fully_shard(block, mesh=mesh)
        check(sharded, plain, x, exact=True)
    for sizes in ((1, 2), (2, 1)):  # in this order: parallelize_module, fake_quantize_model, fully_shard
        both = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        sharded = quantized(parallelize_module(a_model(), both["tensor"], TENSOR_PARALLEL))
        for block in sharded:
            fully_shard(block, mesh=both["data"])
        check(sharded, plain, x, exact=sizes == (2, 1))
    narrow = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(48, 32)})
    parallelize_module(narrow, mesh, {"down_proj": RowwiseParallel()})
    try:
        quantized(narrow)
    except ValueError as error:
        assert "sharded over 2 ranks; a shard must hold whole blocks of 16; shard another axis" in str(error), error
    else:
        raise AssertionError("blocks in two shards are accepted")
    torch.distributed.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
