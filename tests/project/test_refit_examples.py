"""Test that the examples refit_*.py pass after a refit of a real engine, and raise for a faulty one.

The frameworks are stand-ins. Their classes and functions have the signatures of the files and commits that the example
names in its docstring, and send a refit to a model of transformers. Its weights are quantized as an engine would do it.
"""

import asyncio
import copy
import importlib
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from fp4kit.checkpoint import Rules, convert, convert_tensors

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPE = "nvfp4-compressed-tensors"
LAYERS = 9  # so that the first and the last decoder layer are in the sample of the first refit
STALE = "model.layers.8.mlp.up_proj.weight"  # and the names of its parts begin so
REPORT = r"does not hold the trainer's weights\n\d of \d+ layers differ(.|\n)*layers\.8\.mlp\.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the trainer's model in "trained", and the engine's checkpoint in "served"."""
    pytest.importorskip("compressed_tensors")  # here, because importing it takes seconds
    folder = tmp_path_factory.mktemp("refit")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "trained")
    convert(folder / "trained", folder / "served", RECIPE, format="compressed-tensors")
    return folder


@pytest.fixture(scope="module")
def models(folder):
    trainer = transformers.AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.bfloat16)
    return trainer, transformers.AutoModelForCausalLM.from_pretrained(folder / "served", dtype=torch.bfloat16)


@pytest.fixture
def trainer(models):
    return copy.deepcopy(models[0])


@pytest.fixture
def engine(models):
    return copy.deepcopy(models[1])


@pytest.fixture(autouse=True)
def place(folder, monkeypatch):
    """Let examples be imported as a framework imports them, and forget them after the test."""
    monkeypatch.setenv("REFIT_CONTRACT", str(folder / "served" / "fp4kit_contract.json"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("refit_check", "refit_verl", "refit_nemo_rl", "refit_slime", "refit_miles"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in [name for name in sys.modules if name.startswith("refit_")]:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes a module with the given members importable, with the packages above it."""

    def install(path, **members):
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in sys.modules or not hasattr(sys.modules[name], "is_stand_in"):
                module = ModuleType(name)
                module.is_stand_in, module.__path__ = True, []
                monkeypatch.setitem(sys.modules, name, module)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        vars(sys.modules[path]).update(members)
        return sys.modules[path]

    return install


def load(engine, weights, skipped=""):
    """Quantize weights and load them into the model of an engine, except the layer whose weight is `skipped`."""
    own = engine.state_dict()
    for name, x in convert_tensors(weights, Rules.of(RECIPE, format="compressed-tensors")):
        if not (skipped and name.startswith(skipped)):
            own[name].copy_(x)


def buckets(trainer):
    """Return the trainer's weights in two buckets, as refits send them."""
    weights = [(name, x.detach()) for name, x in trainer.named_parameters()]
    return weights[:20], weights[20:]


def scaled(trainer):
    """Take a step of training, which changes the weights of layer 8."""
    with torch.no_grad():
        dict(trainer.named_parameters())[STALE].mul_(1.5)
    return trainer


def vllm_worker(extension, engine):
    """Return a worker as vLLM makes it: its class gets the extension as its last base, which must add names only."""
    worker = type("Worker", (), {})
    assert not [name for name in dir(extension) if not name.startswith("__") and hasattr(worker, name)]
    made = type("Worker", (worker, extension), {})()
    made.model_runner = Namespace(model=engine)
    return made


@pytest.mark.parametrize("skipped", ["", STALE])
def test_verl(skipped, trainer, engine, install):
    class Extension:  # verl/workers/rollout/vllm_rollout/utils.py of b178a3c
        def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done=False):
            self.loaded = []
            for weights in buckets(scaled(trainer)):
                self._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
            load(self.model_runner.model, self.loaded, skipped)

        def _update_weights(self, weights: list, peft_config: dict, base_sync_done: bool):
            self.loaded += weights

    install("verl.workers.rollout.vllm_rollout.utils", vLLMColocateWorkerExtension=Extension)
    worker = vllm_worker(importlib.import_module("refit_verl").WorkerExtension, engine)
    if skipped:
        with pytest.raises(RuntimeError, match=REPORT):
            worker.update_weights_from_ipc()
    else:
        worker.update_weights_from_ipc()
        assert worker.refit_step == 1 and not worker.refit_weights


@pytest.mark.parametrize("transport", ["update_weights_via_ipc_zmq", "update_weights_from_collective"])
@pytest.mark.parametrize("skipped", ["", STALE])
def test_nemo_rl(transport, skipped, trainer, engine, install):
    class Extension:  # nemo_rl/models/generation/vllm/vllm_backend.py of 7ea279a
        def _load_weights(self, weights):
            self.loaded += weights

        def update_weights_via_ipc_zmq(self) -> bool:
            self.loaded = []
            for weights in buckets(scaled(trainer)):
                self._load_weights(weights)
            load(self.model_runner.model, self.loaded, skipped)
            return True

        def update_weights_from_collective(self) -> bool:
            return Extension.update_weights_via_ipc_zmq(self)

    backend = install("nemo_rl.models.generation.vllm.vllm_backend", VllmInternalWorkerExtension=Extension)
    install("vllm.v1.worker.gpu_worker", Worker=type("Worker", (), {}))
    assert importlib.import_module("refit_nemo_rl").Worker is sys.modules["vllm.v1.worker.gpu_worker"].Worker
    worker = vllm_worker(backend.VllmInternalWorkerExtension, engine)  # vLLM looks it up after it imported worker_cls
    if skipped:
        with pytest.raises(RuntimeError, match=REPORT):
            getattr(worker, transport)()
    else:
        assert getattr(worker, transport)() is True


@pytest.fixture
def sglang(engine, install):
    """Install SGLang's server of one rank, and return its requests."""
    requests = []

    class MultiprocessingSerializer:  # sglang.srt.utils of 0.5.23, where it returns a text
        @staticmethod
        def serialize(obj, output_str: bool = False):
            assert output_str
            return obj

    def post(url, json, timeout):
        """Answer /update_weights_from_tensor as WeightUpdater and the scheduler do: an error ends the server."""
        requests.append((url, json["load_format"]))
        (named_tensors,) = json["serialized_named_tensors"]
        module, _, name = json["load_format"].rpartition(".")
        try:
            getattr(importlib.import_module(module), name)(engine, named_tensors)
        except RuntimeError as error:
            return Namespace(ok=False, text=str(error))
        return Namespace(ok=True, text="")

    def get(url, timeout):
        assert url == "http://router:1/workers"
        return Namespace(json=lambda: {"workers": [{"url": "http://engine:2"}]})

    install("sglang.srt.utils", MultiprocessingSerializer=MultiprocessingSerializer)
    install("requests", get=get, post=post)
    return requests


ASKED = [("http://engine:2/update_weights_from_tensor", "refit_check.check_folder")]


def saved(trainer, tmp_path, rollout_id):
    """Save the model as --save-hf does, and return the arguments of the framework."""
    trainer.save_pretrained(tmp_path / f"{rollout_id}")
    (tmp_path / f"{rollout_id}" / ".complete").touch()
    router = {"sglang_router_ip": "router", "sglang_router_port": 1}
    return Namespace(save_hf=f"{tmp_path}/{{rollout_id}}", sglang_tp_size=1, **router)


@pytest.mark.parametrize("skipped", ["", STALE])
def test_slime(skipped, trainer, engine, sglang, install, tmp_path):
    def generate_rollout(args, rollout_id: int, data_source, evaluation: bool = False):
        return rollout_id, data_source, evaluation  # slime/rollout/sglang_rollout.py of 624b824

    install("slime.rollout.sglang_rollout", generate_rollout=generate_rollout)
    example = importlib.import_module("refit_slime")
    args = saved(scaled(trainer), tmp_path, 3)
    load(engine, [one for bucket in buckets(trainer) for one in bucket], skipped)
    assert example.generate_rollout(args, 3, "data") == (3, "data", False) and not sglang  # 2 was not saved
    assert example.generate_rollout(args, 4, "data", evaluation=True) == (4, "data", True) and not sglang
    if skipped:
        with pytest.raises(RuntimeError, match=f"http://engine:2 does not hold the weights in (.|\n)*{REPORT}"):
            example.generate_rollout(args, 4, "data", evaluation=False)
    else:
        assert example.generate_rollout(args, 4, "data", evaluation=False) == (4, "data", False)
    assert sglang == ASKED


@pytest.mark.parametrize("skipped", ["", STALE])
def test_miles(skipped, trainer, engine, sglang, install, tmp_path):
    @dataclass(frozen=True)
    class RolloutFnInput:  # miles/rollout/base_types.py of 31f1ca9, there a property
        rollout_id: int
        evaluation: bool = False

    class InferenceRolloutFn:  # miles/rollout/inference_rollout/inference_rollout_common.py
        def __init__(self, input):
            self.state = Namespace(args=input.args)  # GenerateState

        async def __call__(self, input):
            return input

    async def get_worker_urls(args):
        return ["http://engine:2"]

    install("miles.rollout.base_types", RolloutFnInput=RolloutFnInput, RolloutFnOutput=object)
    of_rollouts = "miles.rollout.inference_rollout.inference_rollout"
    install(f"{of_rollouts}_common", InferenceRolloutFn=InferenceRolloutFn)
    install(f"{of_rollouts}_train", get_worker_urls=get_worker_urls)
    install("miles.utils.hf_config", HF_EXPORT_COMPLETE_MARKER=".complete")
    args = saved(scaled(trainer), tmp_path, 3)
    load(engine, [one for bucket in buckets(trainer) for one in bucket], skipped)
    checked = importlib.import_module("refit_miles").CheckedRollout(Namespace(args=args))
    for unchecked in (RolloutFnInput(3), RolloutFnInput(4, evaluation=True)):
        assert asyncio.run(checked(unchecked)) is unchecked and not sglang
    if skipped:
        with pytest.raises(RuntimeError, match=REPORT):
            asyncio.run(checked(RolloutFnInput(4)))
    else:
        assert asyncio.run(checked(RolloutFnInput(4))) == RolloutFnInput(4)
    assert sglang == ASKED


def test_layers_take_turns(trainer, engine):
    """A stale layer is found in the refit whose sample has it."""
    received = importlib.import_module("refit_check").Received()
    for step in range(8):
        received.keep_received(scaled(trainer).named_parameters() if step == 0 else trainer.named_parameters())
        assert {int(name.split(".")[2]) for name in received.refit_weights} == {
            i for i in range(LAYERS) if i % 8 == step
        }
        if step == 0:
            with pytest.raises(RuntimeError, match=REPORT):
                received.check_received(engine)
        else:
            received.check_received(engine)
    received.keep_received([("lm_head.weight", torch.zeros(2, 2))])
    received.check_received(None)  # a sample without layers is not compared


@pytest.mark.parametrize("name", ["verl", "nemo_rl", "slime", "miles"])
def test_an_example_has_at_most_40_lines(name):
    assert len((EXAMPLES / f"refit_{name}.py").read_text(encoding="utf-8").splitlines()) <= 40
