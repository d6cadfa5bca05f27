"""Test fp4kit.torch on modules: a model reads chosen parameters fake-quantized."""

import copy
import importlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensors import to_numpy

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.settings import EXPERT_WEIGHTS, FakeQuantSettings

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")


def a_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))


def test_a_parametrized_model():
    model, x = a_model(), torch.randn(4, 32)
    settings = FakeQuantSettings("nvfp4-te", parameters=("*.weight",), pass_through=False)
    plain = copy.deepcopy(model)
    assert ft.fake_quantize_model(model, settings) == ["0.weight", "2.weight"]
    weights = [fp4kit.fake_quantize(to_numpy(plain[i].weight), "nvfp4-te") for i in (0, 2)]
    for i, weight in zip((0, 2), weights, strict=True):
        assert_same_bits(to_numpy(model[i].weight), weight)
        assert torch.equal(model[i].parametrizations.weight.original, plain[i].weight)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert "0.parametrizations.weight.original" in model.state_dict() and torch.equal(again(x), model(x))
    again(x).sum().backward()
    assert (
        again[0].parametrizations.weight.original.grad.any() and model[0].parametrizations.weight.original.grad is None
    )
    assert "'0.weight', nvfp4-te, pass_through=False" in str(model)
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    assert torch.equal(model[0].weight, plain[0].weight)


def test_tied_and_already_parametrized_parameters():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 32), "head": torch.nn.Linear(32, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    torch.nn.utils.parametrize.register_parametrization(model["head"], "weight", torch.nn.Identity())
    assert ft.fake_quantize_model(model, FakeQuantSettings("mxfp4-ocp")) == ["embed.weight", "head.weight"]
    originals = [model[name].parametrizations.weight.original for name in ("embed", "head")]
    assert originals[0] is originals[1] and torch.equal(model["embed"].weight, model["head"].weight)
    with pytest.raises(ValueError, match=r"fake_quantize_model: head.weight is already fake-quantized; leave it out"):
        ft.fake_quantize_model(model, FakeQuantSettings("mxfp4-ocp", parameters=("head.*",)))


@pytest.mark.parametrize("options", [{"parameters": ("b.*",)}, {"exclude": ("a.*",)}], ids=str)
def test_a_module_with_several_names(options):
    """A shared module is quantized if any of its names is included.

    PyTorch lists it under its first name only, which the settings exclude here.
    """
    layer = torch.nn.Linear(32, 32, bias=False)
    model = torch.nn.ModuleDict({"a": layer, "b": layer, "c": torch.nn.Linear(32, 32, bias=False)})
    settings = FakeQuantSettings("mxfp4-ocp", **options)
    assert ft.fake_quantize_model(model, settings) == ["b.weight", "c.weight"][: 2 - ("parameters" in options)]
    assert_same_bits(
        to_numpy(model["a"].weight), fp4kit.fake_quantize(to_numpy(layer.parametrizations.weight.original), "mxfp4")
    )
    twice = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False)] * 2)
    assert ft.fake_quantize_model(twice, FakeQuantSettings("mxfp4")) == ["0.weight"]


SETTINGS = FakeQuantSettings("nvfp4-te", parameters=("*.weight",))
NONE = r"settings include no parameter .*none matches parameters=\('0\.wieght',\); did you mean '0\.weight'\?; its"
WRONG = {
    "model": (("x", SETTINGS), {}, TypeError, r"^fake_quantize_model: model is 'x'; needs a Module"),
    "recipe": ((None, 4), {}, TypeError, r"^fake_quantize_model: recipe is 4; needs a recipe id, such as 'nvfp4-te'"),
    "options": ((None, SETTINGS), {"format": "modelopt", "include": ("0",)}, TypeError, "format, include cannot be g"),
    "a flag": ((None, SETTINGS), {"pass_through": False}, TypeError, "pass_through cannot be given with a FakeQuantS"),
    "both": ((None, "mxfp4"), {"settings": SETTINGS}, TypeError, "recipe and settings are both given; needs one"),
    "settings": ((None,), {"settings": "mxfp4"}, TypeError, "settings is 'mxfp4'; needs a FakeQuantSettings"),
    "typo": ((None, FakeQuantSettings("nvfp4-te", parameters=("0.wieght",))), {}, ValueError, NONE),
    "no parameters": ((torch.nn.ReLU(), "mxfp4"), {}, ValueError, "no parameter; the model has no parameters"),
    "none to match": ((torch.nn.ReLU(), SETTINGS), {}, ValueError, "; the model has no parameters; FakeQuantSettings"),
    "all": ((None, FakeQuantSettings("nvfp4-te", exclude=("*",))), {}, ValueError, r"exclude=\('\*',\) leaves out all"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    (model, *rest), options, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        ft.fake_quantize_model(model or a_model(), *rest, **options)


@pytest.mark.parametrize(("sizes", "name", "axis"), [((32, 8, 4), "1.weight", 1), ((32, 50), "0.bias", 0)])
def test_a_model_that_does_not_fit_stays_as_it_was(sizes, name, axis):
    model = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)])
    settings = FakeQuantSettings("nvfp4-te", parameters=("*.weight", name))
    text = rf"^{name}: fake_quantize: axis {axis} has length \d+; nvfp4-te needs .*exclude=\('{name}',\)\)$"
    with pytest.raises(ValueError, match=text):
        ft.fake_quantize_model(model, settings)
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())
    assert ft.fake_quantize_model(model, FakeQuantSettings()) == []


def test_settings_by_name_and_settings_that_are_wrong():
    assert ft.fake_quantize_model(a_model(), settings=SETTINGS) == ["0.weight", "2.weight"]
    assert ft.FakeQuantSettings is FakeQuantSettings
    with pytest.raises(TypeError, match=r"^FakeQuantized: settings is 'mxfp4'; needs a FakeQuantSettings"):
        ft.FakeQuantized("mxfp4", "weight")
    with pytest.warns(
        UserWarning, match=r"less than two dimensions: '0.bias'; .*leave them out with FakeQuantSettings"
    ):
        ft.fake_quantize_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), FakeQuantSettings("nvfp4-te"))


def test_one_wildcard_of_several_matches_nothing():
    settings = FakeQuantSettings("nvfp4-te", parameters=("0.weight", "2.wieght"))
    with pytest.warns(
        UserWarning, match=r"no parameter matches '2.wieght', so .*; did you mean '2\.weight'\?; its"
    ) as warned:
        assert ft.fake_quantize_model(a_model(), settings) == ["0.weight"]
    assert {one.filename for one in warned} == {__file__}
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(32, 32, bias=False)])})
    model = torch.nn.ModuleDict({"mlp": experts})
    assert ft.fake_quantize_model(model, FakeQuantSettings("mxfp4", parameters=EXPERT_WEIGHTS)) == [
        "mlp.experts.0.weight"
    ]


@pytest.fixture
def mesh():
    """Yield a mesh of one rank."""
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_distributed_tensors_are_refused_with_the_way_out(mesh):
    tensor = pytest.importorskip("torch.distributed.tensor")
    x = tensor.distribute_tensor(torch.ones(64, 64), mesh, [tensor.Shard(0)])
    for call in (fp4kit.quantize, fp4kit.fake_quantize, ft.quantize, ft.fake_quantize):
        with pytest.raises(TypeError, match=r"x is a DTensor.*x\.full_tensor\(\), or x\.to_local\(\)"):
            call(x, "nvfp4-te")
    assert ft.quantize(x.full_tensor(), "nvfp4-te").shape == (64, 64)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (SETTINGS, r"0\.weight is a DTensor; call fake_quantize_model before fully_shard"),
        ("nvfp4-te", "fake_quantize_model: the model is sharded by fully_shard; call parallelize_module first, then"),
    ],
)
def test_sharding_comes_after_fake_quantization(mesh, given, text):
    fully_shard, x = pytest.importorskip("torch.distributed.fsdp").fully_shard, torch.ones(2, 64)

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 64))

    plain, first = model(), model()
    ft.fake_quantize_model(plain, given)
    ft.fake_quantize_model(first, given)
    assert torch.equal(fully_shard(first, mesh=mesh)(x), plain(x))
    assert list(first.state_dict()) == list(plain.state_dict())
    with pytest.raises(TypeError, match=text):
        ft.fake_quantize_model(fully_shard(model(), mesh=mesh), given)
    if given == "nvfp4-te":
        part = torch.nn.ModuleDict({"mlp": fully_shard(model(), mesh=mesh)})
        with pytest.raises(TypeError, match="fake_quantize_model: mlp is sharded by fully_shard"):
            ft.fake_quantize_model(part, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4", "mxfp8"])
def test_torch_load_reads_a_quantized(tmp_path, dtype, recipe):
    q = fp4kit.quantize(torch.ones(4, 32, dtype=dtype), recipe)
    torch.save({"w": q}, tmp_path / "q.pt")
    assert torch.load(tmp_path / "q.pt", weights_only=True)["w"].equals(q)


TORCH_FIRST = """
import sys, torch, fp4kit
assert torch.load(sys.argv[1])["w"].recipe.block == (1, 16) and "fp4kit.torch" not in sys.modules
"""
TORCH_LAST = """
import copy, sys, fp4kit, torch
try:
    torch.load(sys.argv[1])
except Exception as error:
    assert "Unsupported global: GLOBAL fp4kit.torch.rebuild_quantized was not" in str(error)
else:
    raise SystemExit("it was read; so the guide is wrong")
q = fp4kit.quantize(torch.ones(4, 32), "mxfp4")
assert copy.copy(q).equals(q)  # as torch.save does
assert torch.load(sys.argv[1])["w"].recipe.block == (1, 16)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [TORCH_FIRST, TORCH_LAST], ids=["torch first", "torch last"])
def test_what_a_process_must_import_before_torch_load(tmp_path, program):
    variant = replace(fp4kit.recipe("mxfp4"), block=(1, 16))
    torch.save({"w": fp4kit.quantize(torch.ones(4, 32), variant)}, tmp_path / "q.pt")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "q.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ROOT = Path(__file__).resolve().parents[2]


def gate_and_up():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(64, 32), "up_proj": torch.nn.Linear(64, 32)})


def test_tensor_parallel_weights(mesh):
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    plain, sharded = gate_and_up(), gate_and_up()
    parallel.parallelize_module(sharded, mesh, {"*_proj": parallel.ColwiseParallel()})
    for model in (plain, sharded):
        ft.fake_quantize_model(model, "nvfp4-te")
    for name in plain:
        assert torch.equal(sharded[name].weight.full_tensor(), plain[name].weight)


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
