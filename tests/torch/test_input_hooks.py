"""Test collect: inputs of linear layers and of experts, names in the checkpoint, and real models from end to end."""

import copy
import importlib
import re

import numpy as np
import oracle
import pytest
from exhaustive import every, exhaustive

from fp4kit.calibration import Collector, Headroom, input_global_scale, input_scale
from fp4kit.checkpoint import Activations, convert
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

torch = pytest.importorskip("torch")
collect = importlib.import_module("fp4kit.torch").collect
nn = torch.nn


def model_of(kind, **sizes):
    """Return a small model of transformers with random weights, in bfloat16.

    kind: the architecture as in class names, such as "Llama".
    sizes: further fields of its config.
    """
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, **sizes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**common)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()


QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def tokens(seed, shape=(2, 17)):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 128, shape))


def run(model, *seeds, **options):
    """Return the Collector of a model that ran once per seed, on random tokens. options: arguments of collect."""
    with collect(model, **options) as collector, torch.no_grad():
        for seed in seeds:
            model(tokens(seed))
    return collector


class Observed:
    """Compute the amax of a layer's inputs as Model-Optimizer's max calibration does, in PyTorch."""

    def __init__(self):
        self.amax = torch.zeros(())

    def see(self, x):
        self.amax = torch.maximum(self.amax, torch.maximum(x.max().abs(), x.min().abs()).float())


def observed(model, *seeds):
    """Return {layer: amax of its inputs} of every torch.nn.Linear, measured by this test's own hooks."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = Observed()
            hooks.append(module.register_forward_pre_hook(lambda module, args, one=found[name]: one.see(args[0])))
    with torch.no_grad():
        for seed in seeds:
            model(tokens(seed))
    for hook in hooks:
        hook.remove()
    return {name: np.float32(one.amax.item()) for name, one in found.items()}


def test_linear_layers():
    model = model_of("Llama")
    collector, expected = run(model, 0, 1), observed(model, 0, 1)
    assert collector.amaxes() == expected and len(expected) == 15
    assert set(collector.tokens().values()) == {2 * 2 * 17}


def test_outputs_do_not_change_and_hooks_go():
    model = model_of("Qwen3Moe", **QWEN)
    with torch.no_grad():
        before = model(tokens(0)).logits
        implementation = model.config._experts_implementation
        model.set_experts_implementation("eager")
        expected = model(tokens(0)).logits
        model.set_experts_implementation(implementation)
        with collect(model) as collector:
            assert torch.equal(model(tokens(0)).logits, expected)
        seen = collector.tokens()
        assert torch.equal(model(tokens(0)).logits, before)
    assert model.config._experts_implementation == implementation and collector.tokens() == seen
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_go_after_an_error():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(KeyError), collect(model):
        raise KeyError
    assert not model[0]._forward_pre_hooks


def experts_by_hand(model, seed):
    """Return (expert, leaf) -> (amax, tokens) of the experts of layer 0, computed from the router's choice."""
    seen, block = {}, model.model.layers[0].mlp
    hook = block.experts.register_forward_pre_hook(lambda module, args: seen.update(args=args))
    with torch.no_grad():
        model(tokens(seed))
    hook.remove()
    (x, chosen, _), found = seen["args"], {}
    for e in range(4):
        rows = x[(chosen == e).any(dim=-1)]
        with torch.no_grad():
            gate, up = nn.functional.linear(rows, block.experts.gate_up_proj[e]).chunk(2, dim=-1)
            inner = block.experts.act_fn(gate) * up
        for leaf, inputs in (("gate_proj", rows), ("up_proj", rows), ("down_proj", inner)):
            amax = inputs.abs().max().float().item() if len(inputs) else 0.0
            found[e, leaf] = (np.float32(amax), len(inputs))
    return found


def test_stacks_of_experts_have_the_names_of_the_file():
    model = model_of("Qwen3Moe", **QWEN)
    collector = run(model, 3)
    amaxes, counts = collector.found(), collector.tokens()
    for (e, leaf), (amax, count) in experts_by_hand(model, 3).items():
        name = f"model.layers.0.mlp.experts.{e}.{leaf}"
        assert (amaxes[name], counts[name]) == (amax, count)
    assert sum(counts[f"model.layers.0.mlp.experts.{e}.up_proj"] for e in range(4)) == 2 * 34


@pytest.mark.parametrize(
    "model_kind",
    [("Qwen3Moe", QWEN), *exhaustive([("Llama", {}), ("Mixtral", MIXTRAL), ("Qwen3", {"tie_word_embeddings": True})])],
)
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("rule", ["max", "headroom"])
def test_from_a_model_to_a_checkpoint(model_kind, format, rule, tmp_path):
    """Every layer of the converted checkpoint has the input scale of what the layer saw, and verify finds no error.

    The amaxes of dense layers equal those of an observer written in PyTorch.
    """
    kind, sizes = model_kind
    model = model_of(kind, **sizes)
    model.save_pretrained(tmp_path / "m")
    collector = run(model, *range(4))
    collector.save(tmp_path / "act")
    activations = Activations.of([tmp_path / "act"], rule)
    convert(tmp_path / "m", tmp_path / "out", format=format, activations=activations)
    found, end = oracle.load(tmp_path / "out"), ".input_scale" if format == "modelopt" else ".input_global_scale"
    stored = {name.removesuffix(end): data for name, (_, _, data) in found.items() if name.endswith(end)}
    amaxes, to_scale = collector.amaxes(rule), input_scale if format == "modelopt" else input_global_scale
    assert len(stored) == sum(name.endswith("weight_scale") for name in found) >= 14
    assert {name: np.float32(to_scale(amaxes[name])).tobytes() for name in stored} == stored
    if rule == "max":
        dense = observed(model, *range(4))
        assert all(amaxes[name] == amax for name, amax in dense.items()) and dense.keys() <= amaxes.keys()
    assert verify(tmp_path / "out", tmp_path / "m").clean


MLA = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
OTHERS = [
    (
        "DeepseekV3",
        {**MLA, **ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    ("Glm4Moe", {**ROUTED, "first_k_dense_replace": 1}),
    ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("Phi3", {"pad_token_id": 0}),
    ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 32}),
]


@pytest.mark.parametrize("other", every(3, OTHERS), ids=lambda other: other[0])
def test_other_architectures(other, tmp_path):
    """For further architectures, collect gives every layer the name that it has in the saved model.

    convert and verify then find an amax for every layer, even if the model's own names and fused layers differ.
    """
    kind, sizes = other
    model = model_of(kind, **sizes)
    model.save_pretrained(tmp_path / "m")
    activations = Activations.of(run(model, *range(3)), unseen="layer")
    plan = convert(tmp_path / "m", tmp_path / "out", format="modelopt", activations=activations).plan
    assert len(plan.input_amaxes) == sum(piece.module != "" for t in plan.converted for piece in t.pieces) >= 8
    assert verify(tmp_path / "out", tmp_path / "m", activations=activations).clean


def test_experts_that_no_token_reached(tmp_path):
    """With one token, two of four experts see nothing: they are known, and the policies apply to them."""
    model = model_of("Qwen3Moe", **QWEN)
    model.save_pretrained(tmp_path / "m")
    with collect(model) as collector, torch.no_grad():
        model(tokens(0, (1, 1)))
    unseen = [name for name, count in collector.tokens().items() if not count]
    assert len(unseen) == 2 * 2 * 3 and all(".experts." in name for name in unseen)
    with pytest.raises(ValueError, match="12 layers have seen no input other than zero"):
        collector.amaxes()
    plan = convert(tmp_path / "m", tmp_path / "out", activations=Activations.of(collector, unseen="layer")).plan
    assert plan.input_amaxes[unseen[0]] > 0 and verify(tmp_path / "out", tmp_path / "m").clean


class Experts(nn.Module):
    """Experts as one 3-d parameter [E, K, N] that multiplies all tokens at once, zeroed where they are not routed."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.ones(3, 16, 8))

    def forward(self, x):
        return torch.bmm(x, self.up_proj)


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return self.experts(x)


def test_experts_that_are_multiplied_at_once():
    x = torch.zeros(3, 5, 16)
    x[0, 1], x[2, :2] = 2, -3
    model = Batched()
    with collect(model) as collector:
        assert collector.layers == ()  # the number of columns is known only when the experts are multiplied
        model(x)
    assert collector.tokens() == {"experts.0.up_proj": 1, "experts.1.up_proj": 0, "experts.2.up_proj": 2}
    assert collector.found() == {"experts.0.up_proj": 2, "experts.1.up_proj": 0, "experts.2.up_proj": 3}


def test_two_runs_merge_to_one():
    model = model_of("Qwen3Moe", **QWEN)
    both, parts = run(model, 0, 1), Collector.merge([run(model, 1), run(model, 0)])
    assert parts.found() == both.found() and parts.tokens() == both.tokens()
    assert parts.found(Headroom()) == both.found(Headroom())


def test_autocast_inference_mode_keywords_and_gradients():
    model = nn.Sequential(nn.Linear(32, 32))
    x = torch.full((2, 32), 1.5, requires_grad=True)
    with collect(model) as collector:
        model(x).sum().backward()
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            model(x)
        model[0](input=x)
    assert collector.tokens() == {"0": 6} and collector.amaxes() == {"0": 1.5} and x.grad is not None


def test_names_within_a_wrapper():
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(16, 4)))
    with collect(wrapped) as collector:
        wrapped(torch.ones(2, 16))
    assert collector.tokens() == {"0": 2}


def test_layers_that_never_run_are_known():
    model = nn.ModuleDict({"used": nn.Linear(16, 4), "idle": nn.Linear(24, 4)})
    with collect(model, histogram=False) as collector:
        model["used"](torch.ones(1, 16))
    assert collector.tokens() == {"idle": 0, "used": 1} and collector.columns()["idle"] == 24
    with pytest.raises(ValueError, match="1 layer has seen no input other than zero: idle; run more tokens"):
        collector.amaxes()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_inputs_name_the_layer(bad):
    model = nn.Sequential(nn.Identity(), nn.Linear(16, 4))
    with collect(model), pytest.raises(ValueError, match=r"collect: 1: x holds .*; needs finite inputs"):
        model(torch.full((1, 16), bad))


def test_compiled_models_are_refused():
    model = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(ValueError, match="collect: the model is compiled, so its inputs cannot be seen"):
        collect(torch.compile(model, backend="eager")).__enter__()
    inner = copy.deepcopy(model)
    inner[0].compile(backend="eager")
    with pytest.raises(ValueError, match="collect: the module 0 is compiled"):
        collect(inner).__enter__()


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (3, TypeError, "collect: model is an int; needs a torch.nn.Module"),
        (nn.ReLU(), ValueError, "collect: the model has no torch.nn.Linear and no stack of experts"),
    ],
)
def test_models_that_cannot_be_collected(model, error, text):
    with pytest.raises(error, match=re.escape(text)):
        collect(model).__enter__()
