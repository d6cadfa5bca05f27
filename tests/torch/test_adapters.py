"""Test adapters of PEFT: trained with the served values, merged, kept in merges, and merged by merge_adapter.

Codes of merged weights are those of the converter.
"""

import copy
import importlib
import itertools
import re
import warnings

import lora
import numpy as np
import pytest
import served
import synthetic
from tensors import to_numpy

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ft = importlib.import_module("fp4kit.torch")
RECIPE = "nvfp4-te"
TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]  # o_proj has no adapter
ATTENTION = "model.layers.0.self_attn"
ORDERS = ("adapter first", "adapter last")
IDS = torch.arange(8)[None]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT with transformers 5


@pytest.fixture(scope="module", autouse=True)
def imported_peft():
    """Import PEFT for the first test of this file. It takes 3 s, and few workers of pytest-xdist run the file."""
    global peft
    peft = pytest.importorskip("peft")


def a_llama(dtype=torch.float32, **config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **config)).to(dtype)


def adapt(model, r=8, kind="", **options):
    """Return the model in PEFT, with adapters that are not zero."""
    own = {} if kind else {"r": r}
    config = getattr(peft, kind or "LoraConfig")(**{"target_modules": TARGETS, **options}, **own)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def build(order, adapters, dtype=torch.float32, recipe=RECIPE, quantize=(), **options):
    model, quantize = a_llama(dtype), {"adapters": adapters, **dict(quantize)}
    if order == "adapter last":
        ft.fake_quantize_model(model, recipe, **quantize)
        return adapt(model, **options)
    model = adapt(model, **options)
    ft.fake_quantize_model(model, recipe, **quantize)
    return model


def quantized(model):
    """Return {layer: the weight that it computes with} for all fake-quantized layers, as the checkpoint names them."""
    found = {}
    for name, module in model.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(module):
            plain = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            found[plain] = module.weight.detach().clone()
    return found


def train(model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    return model


def check_served(model, weights, folder, form=None, recipe=RECIPE):
    """Check that the checkpoint of a plain model serves these weights, bit for bit."""
    model.save_pretrained(folder / "trained")
    convert(folder / "trained", folder / "served", recipe, format=form)
    decoded = served.weights(folder / "served", fp4kit.recipe(recipe))
    assert sorted(decoded) == sorted(weights)
    for name, w in weights.items():
        assert_same_bits(to_numpy(w), to_numpy(torch.from_numpy(decoded[name]).to(w.dtype)))


def cases():
    exhaustive = pytest.mark.exhaustive
    for order, r, dtype in itertools.product(ORDERS, (8, 16), (torch.float32, torch.bfloat16)):
        usual = (r == 8) == (dtype is torch.bfloat16)
        yield pytest.param(order, dtype, {"r": r}, {}, marks=() if usual else exhaustive)
    more = (
        (torch.bfloat16, {"use_rslora": True, "lora_alpha": 13}, {"format": "modelopt"}),
        (torch.bfloat16, {"init_lora_weights": "pissa"}, {}),
        (torch.bfloat16, {"target_modules": ["q_proj", "o_proj"]}, {"recipe": "mxfp4-ocp"}),
        (torch.float16, {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 4}}, {}),
        (torch.bfloat16, {"autocast_adapter_dtype": False}, {}),
    )
    for i, (case, order) in enumerate(itertools.product(more, ORDERS)):
        yield pytest.param(order, *case, marks=() if i % 4 in (0, 3) else exhaustive)


@pytest.mark.parametrize(("order", "dtype", "options", "more"), list(cases()))
def test_merged_adapters_train_with_served_weights(tmp_path, order, dtype, options, more):
    recipe, form = more.get("recipe", RECIPE), more.get("format")
    kept = options.pop("autocast_adapter_dtype", True)
    model = build(order, "merged", dtype, recipe, {"format": form}, **options)
    if not kept:  # adapters in the dtype of the model
        model.to(dtype)
    train(model)
    adapters = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * len(options.get("target_modules", TARGETS)) and all(g.any() for g in adapters.values())
    weights, logits = quantized(model), model(IDS).logits
    assert len(weights) == 7
    plain = copy.deepcopy(model)  # merged by PEFT alone
    ft.remove_fake_quantization(plain)
    plain = plain.merge_and_unload()
    merged = model.merge_and_unload()
    assert torch.equal(merged(IDS).logits, logits)
    for name, w in quantized(merged).items():
        assert torch.equal(w, weights[name])
        original = merged.get_submodule(name).parametrizations.weight.original
        assert torch.equal(original, plain.get_submodule(name).weight)
    check_served(merged, weights, tmp_path, form, recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_converter_merges_a_trained_adapter(tmp_path, dtype):
    """The base and the adapter, saved apart and merged by the converter, serve the weights of the training."""
    a_llama(dtype).save_pretrained(tmp_path / "base")
    model = train(build("adapter first", "merged", dtype, r=8))
    weights = quantized(model)
    model.save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "served", RECIPE, adapter=tmp_path / "adapter")
    decoded = served.weights(tmp_path / "served", fp4kit.recipe(RECIPE))
    assert sorted(decoded) == sorted(weights)
    for name, w in weights.items():
        assert_same_bits(to_numpy(w), to_numpy(torch.from_numpy(decoded[name]).to(w.dtype)))
    original = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj.base_layer").parametrizations.weight.original
    original.requires_grad_()
    model(IDS, labels=IDS).loss.backward()
    assert original.grad.any()  # W trains too


def test_base_and_adapter_are_served_apart(tmp_path):
    """The base is served in FP4, the adapter in 16 bits, and the adapter is never quantized."""
    for order in ORDERS:
        model = build(order, "base", r=16)
        layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
        x = torch.randn(3, 64)
        with torch.no_grad():
            adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
            assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.base_layer.weight) + adapter)
        weights = quantized(train(model))
        saved = peft.get_peft_model_state_dict(model)
        assert len(saved) == 12 and all(torch.equal(p, saved[name]) for name, p in saved.items())
        check_served(model.unload(), weights, tmp_path / order)


def test_the_table_names_adapters():
    model = adapt(a_llama(), r=16, use_dora=True, modules_to_save=["lm_head"])
    names = ft.fake_quantize_model(model, RECIPE)
    rows = {row.name: row for row in names.plan.rows}
    tensors = [row for name, row in rows.items() if "lora_" in name or "modules_to_save" in name]
    assert len(tensors) == 19 and not any(row.quantized for row in tensors)
    assert {row.reason for row in tensors} == {
        "adapter (LoRA), which stays in 16 bits",
        "adapter (modules_to_save), which stays in 16 bits",
    }
    assert sum(row.quantized for row in rows.values()) == 7
    assert rows[f"base_model.model.{ATTENTION}.q_proj.base_layer.weight"].group
    merged = ft.fake_quantize_model(adapt(a_llama()), RECIPE, adapters="merged")
    assert str(merged).count("with its adapter merged") == 6


@pytest.mark.parametrize("order", ORDERS)
def test_merging_an_adapter_of_the_base_mode_raises(order):
    model = build(order, "base")
    weights = copy.deepcopy(model.state_dict())
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"adapters='base'.*adapters='merged'.*remove_fake_quantization first"):
            merge()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    ft.remove_fake_quantization(model)
    before = {name: w.clone() for name, w in a_llama().state_dict().items()}
    after = model.merge_and_unload().state_dict()
    assert not torch.equal(after[f"{ATTENTION}.q_proj.weight"], before[f"{ATTENTION}.q_proj.weight"])


@pytest.mark.parametrize("order", ORDERS)
def test_what_peft_does_with_merged_adapters(order):
    """Merge, unmerge, disable, switch and unload adapters while the weights with them are fake-quantized."""
    model = build(order, "merged", r=16)
    layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
    stored, values = layer.base_layer.parametrizations.weight.original, layer.base_layer.weight.clone()
    base = stored.detach().clone()
    logits = model(IDS).logits
    model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, values) and torch.equal(model(IDS).logits, logits)
    assert torch.equal(stored, base + layer.get_delta_weight("default"))
    model.unmerge_adapter()
    assert torch.allclose(stored, base, atol=1e-6)
    stored.data.copy_(base)
    with model.disable_adapter():
        alone = layer.base_layer.weight
        assert not torch.equal(alone, values)
    assert torch.equal(layer.base_layer.weight, values)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    torch.nn.init.normal_(layer.lora_B["second"].weight, std=0.1)
    assert torch.equal(layer.base_layer.weight, values)  # not active
    model.base_model.set_adapter(["default", "second"])
    both = layer.base_layer.weight
    model.merge_adapter()
    assert not torch.equal(both, values) and torch.equal(layer.base_layer.weight, both)
    model.unmerge_adapter()
    stored.data.copy_(base)
    with torch.nn.utils.parametrize.cached(), pytest.raises(RuntimeError, match=r"leave .*cached"):
        layer.base_layer.weight  # noqa: B018  # fills the cache
        model.merge_adapter()
    model.set_adapter("default")
    with pytest.raises(ValueError, match="adapter_names: adapters of single samples cannot be merged"):
        layer(torch.zeros(1, 64), adapter_names=["default"])
    plain = model.unload()
    assert torch.equal(plain.get_submodule(f"{ATTENTION}.q_proj").weight, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safe_merges_and_disabled_adapters(dtype):
    """A safe merge rounds as the forward pass does, and disabling a merged adapter unmerges it, as in PEFT."""
    model = build("adapter first", "merged", dtype, r=16)
    layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
    stored, weights = layer.base_layer.parametrizations.weight.original, quantized(model)
    base = stored.detach().clone()
    model.merge_adapter(safe_merge=True)
    assert all(torch.equal(w, weights[name]) for name, w in quantized(model).items())
    assert not torch.equal(stored, base)
    with model.disable_adapter():
        layer(torch.zeros(1, 64, dtype=dtype))
        assert not layer.merged and torch.allclose(stored, base, atol=1e-2 if dtype is torch.bfloat16 else 1e-6)
    layer.lora_A["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the merged .*q_proj.base_layer.weight contains NaN or infinity"):
        layer.merge(safe_merge=True)


@pytest.mark.parametrize("order", ORDERS)
def test_initializations_that_change_the_base(order):
    """PiSSA moves a part of W to the adapter, so that their sum is W."""
    model = build(order, "merged", init_lora_weights="pissa", target_modules=["q_proj"])
    plain = a_llama()
    fresh = peft.get_peft_model(a_llama(), peft.LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights="pissa"))
    stored, expected = (
        m.base_model.model.get_submodule(f"{ATTENTION}.q_proj.base_layer").state_dict()["weight"]
        for m in (model, fresh)
    )
    assert torch.equal(stored, expected) and not torch.equal(stored, plain.get_submodule(f"{ATTENTION}.q_proj").weight)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_and_state_dicts(tmp_path, order):
    model = build(order, "merged")
    weights, state = quantized(model), copy.deepcopy(model.state_dict())
    assert list(state) == list(adapt(a_llama()).state_dict())
    copied = train(copy.deepcopy(model))
    assert all(torch.equal(w, weights[name]) for name, w in quantized(model).items())
    assert not any(torch.equal(w, weights[name]) for name, w in quantized(copied).items() if "o_proj" not in name)
    ft.remove_fake_quantization(copied)  # the model keeps its weights
    copied.merge_and_unload()
    assert all(torch.equal(w, weights[name]) for name, w in quantized(model).items())
    train(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = build(order, "merged")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(torch.equal(w, quantized(other)[name]) for name, w in quantized(model).items())
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(build_base("merged"), tmp_path / "adapter")
    assert all(torch.equal(w, quantized(loaded)[name]) for name, w in quantized(model).items())
    assert list(ft.remove_fake_quantization(model))
    with torch.no_grad():
        x = torch.randn(2, 64)
        layer, plain = (m.base_model.model.get_submodule(f"{ATTENTION}.q_proj") for m in (model, adapt(a_llama())))
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), plain(x)) and "forward" not in vars(layer)


def build_base(adapters):
    model = a_llama()
    ft.fake_quantize_model(model, RECIPE, adapters=adapters)
    return model


REFUSED = {
    "DoRA": ({"use_dora": True}, TypeError, "adapter 'default' of .* is DoRA, not W"),
    "dropout": ({"lora_dropout": 0.1}, ValueError, "has lora_dropout=0.1, which a merged weight cannot have"),
    "bias": (
        {"target_modules": ["q_proj"], "lora_bias": True, "biases": True},
        TypeError,
        "has lora_bias=True, which changes the bias",
    ),
    "IA3": (
        {"kind": "IA3Config", "target_modules": ["q_proj"], "feedforward_modules": []},
        TypeError,
        "has an adapter of peft.tuners.ia3.layer.Linear, not LoRA",
    ),
    "LoHa": ({"kind": "LoHaConfig"}, TypeError, "peft.tuners.loha.layer.Linear"),
    "LoKr": ({"kind": "LoKrConfig"}, TypeError, "peft.tuners.lokr.layer.Linear"),
    "OFT": ({"kind": "OFTConfig", "oft_block_size": 16}, TypeError, "peft.tuners.oft.layer.Linear"),
    "VeRA": ({"kind": "VeraConfig", "target_modules": ["q_proj"]}, TypeError, "peft.tuners.vera.layer.Linear"),
    "AdaLoRA": ({"kind": "AdaLoraConfig", "total_step": 9}, TypeError, "peft.tuners.adalora.layer.SVDLinear"),
}


@pytest.mark.filterwarnings("ignore")  # of PEFT
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("which", REFUSED)
def test_adapters_that_cannot_be_merged(which, order):
    """Merged mode refuses them by name, at once or in the first forward pass. Base mode does not."""
    options, error, text = copy.copy(REFUSED[which])
    biases = {"attention_bias": True} if options.pop("biases", False) else {}
    model = a_llama(**biases)
    with pytest.raises(error, match=text):
        if order == "adapter last":
            ft.fake_quantize_model(model, RECIPE, adapters="merged")
            adapt(model, **options)(IDS)
        else:
            model = adapt(model, **options)
            ft.fake_quantize_model(model, RECIPE, adapters="merged")
    if order == "adapter first":
        assert not quantized(model)
        ft.fake_quantize_model(model, RECIPE)
        assert torch.isfinite(model(IDS).logits).all() and len(quantized(model)) == 7
        with pytest.raises(ValueError, match="adapters='base'"):
            model.merge_adapter()


class OwnLora(torch.nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = torch.nn.Linear(64, 16, bias=False), torch.nn.Linear(16, 64, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_other_models_that_merged_mode_refuses():
    own = torch.nn.ModuleDict({"q_proj": OwnLora(torch.nn.Linear(64, 64))})
    with pytest.raises(TypeError, match=r"q_proj.base_layer.weight has an adapter of .*OwnLora, not LoRA of PEFT"):
        ft.fake_quantize_model(own, RECIPE, adapters="merged")
    assert ft.fake_quantize_model(own, RECIPE) == ["q_proj.base_layer.weight"]
    inside = torch.nn.Linear(64, 64)
    inside.lora_a = torch.nn.Linear(64, 16, bias=False)
    with pytest.raises(TypeError, match=r"proj.lora_a.weight \(LoRA\) is not merged into proj.weight"):
        ft.fake_quantize_model(torch.nn.ModuleDict({"proj": inside}), RECIPE, adapters="merged")
    saved = adapt(a_llama(), modules_to_save=["o_proj"])
    with pytest.raises(TypeError, match=r"o_proj.modules_to_save.* is not merged into .*o_proj.original_module.weight"):
        ft.fake_quantize_model(saved, RECIPE, adapters="merged")
    merged = adapt(a_llama())
    merged.merge_adapter()
    for adapters in ("base", "merged"):
        with pytest.raises(ValueError, match=r"an adapter is merged into .*; call unmerge_adapter\(\)"):
            ft.fake_quantize_model(merged, RECIPE, adapters=adapters)


def test_adapters_that_peft_copies_or_parametrizes():
    with pytest.raises(ValueError, match=r"modules_to_save names .*o_proj.weight, which is fake-quantized"):
        adapt(build_base("base"), modules_to_save=["o_proj"])
    model = a_llama()
    with pytest.raises(ValueError, match=r"include= names .*lora_A.default.weight, a tensor of an adapter"):
        ft.fake_quantize_model(adapt(model), RECIPE, include=("*.lora_A.*",))
    with pytest.raises(ValueError, match='adapters is \'both\'; needs "base" or "merged"'):
        ft.fake_quantize_model(model, RECIPE, adapters="both")
    with pytest.raises(TypeError, match=re.escape("adapters, served_dtype cannot be given with a FakeQuantSettings")):
        ft.fake_quantize_model(model, ft.FakeQuantSettings(RECIPE), adapters="merged", served_dtype="bfloat16")
    experts = torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(2, 64, 64))
    model = torch.nn.ModuleDict({"experts": experts})
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj"])
    ft.fake_quantize_model(model, RECIPE)
    with pytest.raises(TypeError, match=r"experts.gate_up_proj has an adapter by target_parameters"):
        peft.inject_adapter_in_model(config, model)
    model = torch.nn.ModuleDict({"experts": copy.deepcopy(experts)})
    ft.remove_fake_quantization(model)
    with pytest.raises(TypeError, match=r"experts.*gate_up_proj has an adapter by target_parameters"):
        ft.fake_quantize_model(peft.inject_adapter_in_model(config, model), RECIPE)


def test_quantized_values_are_kept_only_without_a_pending_adapter():
    model = build("adapter first", "merged")
    with pytest.raises(ValueError, match=r"contain its adapter; call merge_adapter\(\)"):
        ft.remove_fake_quantization(model, keep="quantized")
    weights = quantized(model)
    model.merge_adapter()
    ft.remove_fake_quantization(model, keep="quantized")
    layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj.base_layer")
    assert torch.equal(layer.weight, weights[f"{ATTENTION}.q_proj"])


def test_embeddings_and_convolutions_with_lora():
    """Merged weights of other layers than linear ones equal those that PEFT merges."""
    layers = {"embed": torch.nn.Embedding(32, 64), "conv": torch.nn.Conv2d(16, 32, 3)}
    config = peft.LoraConfig(r=8, target_modules=list(layers), init_lora_weights=False)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = peft.inject_adapter_in_model(config, torch.nn.ModuleDict(copy.deepcopy(layers)).to(dtype))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()  # as get_peft_model does
        ft.fake_quantize_model(model, RECIPE, adapters="merged", include=("embed.base_layer.weight",))
        for name, x in (("embed", IDS), ("conv", torch.randn(1, 16, 5, 5, dtype=dtype))):
            layer = model[name]
            values, y = layer.base_layer.weight.clone(), layer(x)
            layer.merge(safe_merge=name == "conv")
            assert torch.equal(layer.base_layer.weight, values) and torch.equal(layer(x), y)


@pytest.mark.parametrize("adapters", ["base", "merged"])
def test_parametrizations_that_are_removed_from_a_part(adapters):
    """The adapter layer works as PEFT made it, also if the base layer alone, or PyTorch itself, removes them."""
    for remove in (
        lambda layer: ft.remove_fake_quantization(layer),
        lambda layer: torch.nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False),
    ):
        model = build("adapter first", adapters, target_modules=["q_proj"])
        layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
        x = torch.randn(2, 64)
        expected = adapt(a_llama(), target_modules=["q_proj"]).base_model.model.get_submodule(f"{ATTENTION}.q_proj")
        remove(layer.base_layer)
        expected.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), expected(x))
        layer.merge()
        expected.merge()
        assert torch.equal(layer.base_layer.weight, expected.base_layer.weight)


def test_autocast_does_not_change_merged_weights():
    model = build("adapter first", "merged")
    weights = quantized(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(w, weights[name]) for name, w in quantized(model).items())
    merged = model.merge_and_unload()
    assert all(torch.equal(w, weights[name]) for name, w in quantized(merged).items())


def test_a_base_layer_in_another_module():
    """A base layer that is registered elsewhere cannot know its adapter any more. Its adapter layer says so."""
    model = build("adapter first", "merged", target_modules=["q_proj"])
    layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
    torch.nn.ModuleList([layer.base_layer])
    for use in (lambda: layer(torch.randn(2, 64)), layer.merge):
        with pytest.raises(RuntimeError, match="its base layer was put into another module"):
            use()


def test_a_compiled_model_reads_merged_weights():
    model = build("adapter last", "merged", target_modules=["q_proj"])
    layer = model.base_model.model.get_submodule(f"{ATTENTION}.q_proj")
    x = torch.randn(2, 64)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_peft_in_base_mode():
    """Parameters that PEFT adds stay unquantized, and the others compute with the served base."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    options = (
        {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "feedforward_modules": []},
        {"target_modules": ["q_proj"], "total_step": 9},
        {"target_modules": ["q_proj"], "oft_block_size": 16},
        {"target_modules": ["q_proj"], "num_vectors": 16, "vector_length": 16},
        {"target_modules": ["q_proj"], "n_frequency": 10},
        {"num_virtual_tokens": 4},
        {"num_virtual_tokens": 4, "num_tasks": 2},
        {"adapter_layers": 1, "adapter_len": 4},
        {},
    )
    names, tested = {name for name, _ in a_llama().named_parameters()}, []
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        for one in options:
            try:
                model = peft.get_peft_model(a_llama(), config(task_type="CAUSAL_LM", **one)).eval()
            except Exception:  # these options do not suit this kind, or it needs another package
                continue
            tested.append(kind)
            rows = ft.fake_quantize_model(model, RECIPE).plan.rows
            plain = [re.sub(r"\.base_layer|(?<=self_attn)\.model", "", row.name) for row in rows]
            base = [
                row
                for row, name in zip(rows, plain, strict=True)
                if {name.removeprefix("base_model."), name.removeprefix("base_model.model.")} & names
            ]
            added = {row.name for row in rows} - {row.name for row in base}
            assert sum(row.quantized for row in rows) == 7 and not any(r.quantized for r in rows if r.name in added), (
                kind,
                added,
            )
            assert all("adapter (" in row.reason for row in rows if row.name in added), (kind, added)
            plain = copy.deepcopy(model)
            ft.remove_fake_quantization(plain, keep="quantized")
            if kind in ("MULTITASK_PROMPT_TUNING", "POLY", "CPT", "SHADOW"):  # need other arguments
                continue
            with torch.no_grad():
                assert torch.equal(model(IDS).logits, plain(IDS).logits), kind
            break
    assert len(tested) > 30


@pytest.mark.exhaustive
def test_mixture_of_experts_with_lora(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    plain = ft.fake_quantize_model(copy.deepcopy(model), RECIPE).plan.rows
    model = adapt(model, target_modules=["q_proj", "v_proj"])
    rows = ft.fake_quantize_model(model, RECIPE, adapters="merged").plan.rows
    shown = {(r.name.removeprefix("base_model.model.").replace(".base_layer", ""), r.quantized, r.group) for r in rows}
    assert {(row.name, row.quantized, row.group) for row in plain} <= shown
    train(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "served", RECIPE)
    decoded = served.weights(tmp_path / "served", fp4kit.recipe(RECIPE))
    for name in "qkvo":
        layer = f"{ATTENTION}.{name}_proj"
        assert_same_bits(to_numpy(merged.get_submodule(layer).weight), decoded[layer])


def test_settings_leave_adapters_alone():
    model = adapt(a_llama())
    names = ft.fake_quantize_model(model, ft.FakeQuantSettings(RECIPE, parameters=("*_proj.*weight",)))
    assert len(names) == 7 and not any("lora" in name for name in names)
    with pytest.raises(ValueError, match="adapters='base'"):
        model.merge_and_unload()
    ft.remove_fake_quantization(model)
    with pytest.raises(ValueError, match=r"matches only tensors of adapters, .*lora_A.*never quantized"):
        ft.fake_quantize_model(model, ft.FakeQuantSettings(RECIPE, parameters=("*lora_A*",)))


Q, K, V, UP = (f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up"))
SHAPES = {Q: (64, 64), K: (32, 64), V: (32, 64), UP: (96, 64)}


def values(std=0.02):
    return {name: synthetic.random(name, shape, std, np.dtype("f4")) for name, shape in SHAPES.items()}


def quantized_model(recipe, weights):
    """Return the weights quantized as the converter does: q, k and v share their tensor amax."""
    fused = max(np.abs(weights[name]).max() for name in (Q, K, V))
    given = {} if fp4kit.recipe(recipe).tensor_scaling != "tensor" else {"tensor_amax": fused}
    return {name: fp4kit.quantize(x, recipe, **(given if name != UP else {})) for name, x in weights.items()}


def adapter(path, std=3e-4, layers=(Q, UP)):
    tensors = {}
    for name in layers:
        tensors |= lora.halves(name, SHAPES[name], std=std)
    return lora.write(path, tensors), {name: lora.delta(tensors, name, 2.0) for name in layers}


@pytest.mark.parametrize(
    "recipe", ["nvfp4-modelopt", "nvfp4-modelopt-static-4over6", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt-channel"]
)
@pytest.mark.parametrize("scales", ["nearest", "base", "new"])
def test_the_codes_are_those_of_the_converter(tmp_path, recipe, scales):
    weights, (path, _) = values(), adapter(tmp_path / "adapter")
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, {f"{name}.weight": x for name, x in weights.items()})
    form = {"format": "compressed-tensors" if "fp8" in recipe or recipe.startswith("mx") else "modelopt"}
    convert(tmp_path / "m", tmp_path / "base", recipe, **form)
    report = convert(tmp_path / "base", tmp_path / "out", recipe, adapter=path, adapter_scales=scales, **form)
    base, out = (fp4kit.open_checkpoint(tmp_path / name) for name in ("base", "out"))
    merged = ft.merge_adapter(quantized_model(recipe, weights), path, scales=scales)
    assert set(merged.survival) == {Q, UP}
    for name in SHAPES:
        assert_same_bits(merged.weights[name].packed, out[name].packed)
        assert np.array_equal(merged.weights[name].dequantize(np.float32), out[name].dequantize(np.float32))
        assert base[name].shape == out[name].shape
    for name, one in merged.survival.items():
        assert one.share == pytest.approx(report.survival[name].share)
        assert one[4:] == report.survival[name][4:]


def test_weights_without_an_update_are_the_given_objects(tmp_path):
    given = quantized_model("nvfp4-te", values())
    path, deltas = adapter(tmp_path / "adapter")
    merged = ft.merge_adapter(given, path)
    assert merged.weights.keys() == given.keys()
    assert merged.weights[K] is given[K]
    for name, delta in deltas.items():
        base, stored = (q[name].dequantize(np.float32).astype(np.float64) for q in (given, merged.weights))
        share = np.vdot(stored - base, delta) / np.vdot(delta, delta)
        assert merged.survival[name].share == pytest.approx(share, abs=1e-6)


def test_an_update_beyond_the_tensor_scale_changes_all_that_share_it(tmp_path):
    given = quantized_model("nvfp4-te", values())
    merged = ft.merge_adapter(given, adapter(tmp_path / "adapter", std=0.1)[0])
    assert {float(merged.weights[name].tensor_scale) for name in (Q, K, V)} != {float(given[Q].tensor_scale)}
    assert len({float(merged.weights[name].tensor_scale) for name in (Q, K, V)}) == 1
    assert set(merged.survival) == {Q, UP}
    assert merged.survival[Q].share > 0.98


def test_a_model_of_peft_and_tensors_give_tensors():
    """The adapter of a model in memory is merged as its saved files are; the model stays as it is."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 96, bias=False)})
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=4, target_modules=["up_proj"]))
    layer = model.base_model.model["up_proj"]
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    given = {"up_proj.weight": ft.quantize(layer.base_layer.weight.detach(), "nvfp4-te")}
    with warnings.catch_warnings(record=True) as seen:
        merged = ft.merge_adapter(given, model)
    assert not seen
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    q = merged.weights["up_proj.weight"]
    assert isinstance(q.packed, torch.Tensor)
    delta = layer.get_delta_weight("default").detach()
    base, stored = (one["up_proj.weight"].dequantize(torch.float32) for one in (given, merged.weights))
    share = float(((stored - base) * delta).sum() / (delta * delta).sum())
    assert merged.survival["up_proj.weight"].share == pytest.approx(share, abs=1e-5)


def test_wrong_arguments_are_refused(tmp_path):
    given, (path, _) = quantized_model("nvfp4-te", values()), adapter(tmp_path / "adapter")
    x = values()[Q]
    cases = [
        ((given, path), {"scales": "best"}, ValueError, "use one of nearest, base, new"),
        (({**given, Q: x}, path), {}, TypeError, "needs a Quantized"),
        ((given, 3), {}, TypeError, "needs a model of PEFT or the path"),
        ((given, tmp_path / "none"), {}, CheckpointError, "has no adapter_config.json"),
        (({K: given[K]}, path), {}, CheckpointError, "the model has no such layer"),
        (({**given, Q: given[K]}, path), {}, ValueError, "needs the model of the adapter"),
        (({**given, Q: fp4kit.quantize(x, "nvfp4-te", axis=0)}, path), {}, ValueError, "needs axis 1, linear"),
        (
            ({**given, Q: fp4kit.quantize(x, "nvfp4-te", scale_layout="swizzled_128x4")}, path),
            {},
            ValueError,
            "needs axis 1, linear",
        ),
    ]
    for arguments, options, error, text in cases:
        with pytest.raises(error, match=text):
            ft.merge_adapter(*arguments, **options)
