"""Test fake-quantized models that are sharded over ranks, in the documented order of calls."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mesh():
    """Yield a mesh of one rank."""
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def a_model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(64, 32), "up_proj": torch.nn.Linear(64, 32)})


def test_tensor_parallel_weights(mesh):
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    plain, sharded = a_model(), a_model()
    parallel.parallelize_module(sharded, mesh, {"*_proj": parallel.ColwiseParallel()})
    for model in (plain, sharded):
        ft.fake_quantize_model(model, "nvfp4-te")
    for name in plain:
        assert torch.equal(sharded[name].weight.full_tensor(), plain[name].weight)


def test_fully_shard_comes_last(mesh):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    model, plain, x = torch.nn.Sequential(torch.nn.Linear(64, 64)), None, torch.ones(2, 64)
    with pytest.raises(
        TypeError, match=r"is sharded by fully_shard; call parallelize_module first, then fake_quantize"
    ):
        ft.fake_quantize_model(fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64)), mesh=mesh), "nvfp4-te")
    ft.fake_quantize_model(model, "nvfp4-te")
    plain = model(x)
    assert torch.equal(fully_shard(model, mesh=mesh)(x), plain)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.exhaustive
def test_two_ranks_read_the_weights_of_one(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "support" / "two_ranks.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(output.splitlines()[-1] == "equal" for output in outputs), outputs
