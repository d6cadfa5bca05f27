"""Test that a model trains with the values that loaders decode from the converted checkpoint, bit for bit."""

import copy
import dataclasses
import importlib
import json
import re

import numpy as np
import pytest
import served
import synthetic
from exhaustive import half
from tensors import to_numpy, to_torch

import fp4kit
from fp4kit.calibration import Collector
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.checkpoint.plan.request import Request
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
ft = importlib.import_module("fp4kit.torch")


CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
UNSTORABLE = "mxfp6-compressed-tensors"  # no format of convert stores it
FORMATS = ("compressed-tensors", "modelopt", "fp8", "sglang-mxfp8", "mlx", "comfy")


def a_llama(dtype=None, seed=0, width=64):
    """Return a module with the parameters of a Llama of two layers, whose layers have different amaxes.

    width: the hidden size; MLPs have one and a half times this size.
    """
    wide = width * 3 // 2
    torch.manual_seed(seed)

    def linear(columns, rows):
        layer = torch.nn.Linear(columns, rows, bias=False)
        with torch.no_grad():
            layer.weight.mul_(torch.rand(()) * 3)
        return layer

    def decoder_layer():
        attention = {name: linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        mlp = {"gate_proj": linear(width, wide), "up_proj": linear(width, wide), "down_proj": linear(wide, width)}
        norms = {"input_layernorm": torch.nn.RMSNorm(width), "post_attention_layernorm": torch.nn.RMSNorm(width)}
        both = {"self_attn": torch.nn.ModuleDict(attention), "mlp": torch.nn.ModuleDict(mlp)}
        return torch.nn.ModuleDict({**both, **norms})

    body = {
        "embed_tokens": torch.nn.Embedding(64, width),
        "layers": torch.nn.ModuleList([decoder_layer() for _ in range(2)]),
        "norm": torch.nn.RMSNorm(width),
    }
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict(body), "lm_head": linear(width, width)})
    return model.to(dtype)


def save(model, folder, config=CONFIG):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


def containers():
    """Return {(model type, format, name of its container): recipe ids} of everything that convert can write."""
    found = {}
    for name, recipe in RECIPES.items():
        for kind, forms in {"llama": FORMATS, "gpt_oss": ("gpt-oss",), "deepseek_v4": ("deepseek-v4",)}.items():
            for form in forms:
                try:
                    container = Request(recipe, form).form_for({"model_type": kind})
                except CheckpointError:
                    continue
                found.setdefault((kind, form, container.name), []).append(name)
    return found


def needed_input_scale(recipe, form):
    """Return the input scale without which convert refuses a recipe in a format, or None."""
    needed = recipe in ("fp8-modelopt", "fp8-comfy-kitchen") if form == "modelopt" else form == "deepseek-v4"
    return 1.0 if needed and not recipe.startswith("mx") else None


def check_served(model, names, folder, recipe, form, config=CONFIG):
    """Check that the model reads what loaders decode from its converted checkpoint. Return the number of layers."""
    scale = needed_input_scale(recipe, form)
    convert(save(model, folder / "trained", config), folder / "served", recipe, format=form, input_scale=scale)
    decoded = served.weights(folder / "served", fp4kit.recipe(recipe))
    assert sorted(f"{module}.weight" for module in decoded) == sorted(names)
    for module, values in decoded.items():
        assert_same_bits(to_numpy(model.get_submodule(module).weight), values)
    return len(decoded)


EVERY_RUN = (
    ("nvfp4-te", None),  # the format that convert chooses
    ("nvfp4-te", "compressed-tensors"),
    ("nvfp4-te", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("nvfp4-modelopt", "modelopt"),
    ("nvfp4-te-2d", "comfy"),
    ("nvfp4-mlx-cpu", "mlx"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "sglang-mxfp8"),
    ("fp8-modelopt", "modelopt"),
    ("fp8-deepgemm-block", "fp8"),
)


@pytest.mark.parametrize(("recipe", "form"), EVERY_RUN)
def test_trained_values_are_served_values(tmp_path, recipe, form):
    model = a_llama(width=64 if fp4kit.recipe(recipe).block_size <= 64 else 256)
    names = ft.fake_quantize_model(model, recipe, format=form, config=CONFIG)
    assert check_served(model, names, tmp_path, recipe, form) == 14
    assert names.plan.format == (form or "compressed-tensors")


def a_part(kind, prefix, whole, block):
    """Return a module with the linear layers of one decoder layer.

    kind: the model type. Models other than a Llama have experts only.
    prefix: the name of the decoder layer.
    whole: True for a Llama with attention.
    block: the number of elements per block, which rows must hold.
    """
    width, inner = (128, 256) if block == 128 else (64, 96)
    if kind == "gpt_oss":  # stacks (E, K, N)
        shapes = {"mlp.experts.gate_up_proj": (2, width, 2 * inner), "mlp.experts.down_proj": (2, inner, width)}
    elif kind == "deepseek_v4":
        expert = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
        shapes = {f"ffn.experts.{i}.{name}.weight": shape for i in range(2) for name, shape in expert.items()}
    else:
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        shapes = {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo" if whole}
    sizes = {name: torch.rand(shape[0], 1, 1) if len(shape) == 3 else torch.rand(()) for name, shape in shapes.items()}
    return module_of({f"{prefix}.{name}": torch.randn(shape) * sizes[name] * 3 for name, shape in shapes.items()})


def module_of(tensors):
    """Return a module whose parameters have the names and values of tensors."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return root


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_recipe_in_every_format(tmp_path, whole):
    """Convert one model per container. Each of its decoder layers has a recipe of its own.

    whole: False for every eighth recipe of each container, and no attention.
    """
    torch.manual_seed(0)
    count = 0
    for i, ((kind, form, container), storable) in enumerate(containers().items()):
        recipes = storable if whole else storable[::8]
        config = {**CONFIG, "model_type": kind, "num_hidden_layers": len(RECIPES)}
        prefixes = [f"layers.{n}" if kind == "deepseek_v4" else f"model.layers.{n}" for n in range(len(recipes))]
        parts, tensors = {}, {}
        for prefix, recipe in zip(prefixes, recipes, strict=True):
            part = a_part(kind, prefix, whole, fp4kit.recipe(recipe).block_size)
            names = ft.fake_quantize_model(part, recipe, format=form, config=config)
            assert names == list(part.state_dict())
            parts |= {name: (part, recipe) for name in names}
            tensors |= part.state_dict()
        folder, out = tmp_path / f"trained {i}", tmp_path / f"served {i}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        chosen = [(f"{prefix}.*", recipe) for prefix, recipe in zip(prefixes, recipes, strict=True)]
        convert(folder, out, recipes[0], format=form, input_scale=needed_input_scale(recipes[0], form), recipes=chosen)
        decoded = served.weights(out, fp4kit.recipe(recipes[0]))
        decoded = {name if name in parts else f"{name}.weight": values for name, values in decoded.items()}
        assert decoded.keys() == parts.keys()
        for name, values in decoded.items():
            (part, recipe), (module, _, leaf) = parts[name], name.rpartition(".")
            weight = to_numpy(getattr(part.get_submodule(module), leaf))
            assert_same_bits(weight, values, f"{name} by {recipe} in {form} ({container})")
        count += len(recipes)
    assert count > (520 if whole else 90)


class Experts(torch.nn.Module):
    """Hold two stacks of experts, as modules of transformers do."""

    def __init__(self, transposed):
        super().__init__()
        torch.manual_seed(1)
        shapes = {"gate_up_proj": (4, 192, 64), "down_proj": (4, 64, 96)}
        for name, (experts, rows, columns) in shapes.items():
            shape = (experts, columns, rows) if transposed else (experts, rows, columns)
            sizes = torch.arange(1.0, 5).reshape(4, 1, 1)
            setattr(self, name, torch.nn.Parameter(torch.randn(shape) * sizes))


@pytest.mark.parametrize(("kind", "transposed"), [("qwen3_moe", False), ("llama4_text", True)])
@pytest.mark.parametrize(("recipe", "form"), [("nvfp4-te", "modelopt"), ("nvfp4-te", "compressed-tensors")])
def test_stacks_of_experts(tmp_path, kind, transposed, recipe, form):
    """Each expert has its own tensor scale, which its gate and up share. Routers stay unquantized."""
    config = {"model_type": kind, "num_hidden_layers": 1, "num_experts": 4, "num_local_experts": 4}
    mlp = torch.nn.ModuleDict({"experts": Experts(transposed), "gate": torch.nn.Linear(64, 4, bias=False)})
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": mlp})])
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})
    names = ft.fake_quantize_model(model, recipe, format=form, config=config)
    assert names == ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    assert {row.reason for row in names.plan.rows} == {"routed expert", "MoE router"}
    convert(save(model, tmp_path / "trained", config), tmp_path / "served", recipe, format=form)
    decoded, experts = served.weights(tmp_path / "served", fp4kit.recipe(recipe)), mlp["experts"]
    assert len(decoded) == 12
    for module, values in decoded.items():
        *_, number, leaf = module.split(".")
        stack = experts.down_proj if leaf == "down_proj" else experts.gate_up_proj
        matrix = (stack.mT if transposed else stack)[int(number)]
        rows = {"gate_proj": slice(96), "up_proj": slice(96, None)}.get(leaf, slice(None))
        assert_same_bits(to_numpy(matrix[rows].contiguous()), values)


def test_separate_stacks_share_the_amax_of_each_expert():
    class Separate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = torch.nn.Parameter(torch.full((2, 16, 32), 1.0) * torch.tensor([1.0, 8]).reshape(2, 1, 1))
            self.up_proj = torch.nn.Parameter(torch.full((2, 16, 32), 4.0))

    model = torch.nn.ModuleDict({"experts": Separate()})
    ft.fake_quantize_model(model, "nvfp4-te", format="modelopt")
    alone = [
        fp4kit.fake_quantize(np.full((16, 32), v, np.float32), "nvfp4-te", tensor_amax=a) for v, a in ((1, 4), (8, 8))
    ]
    for expert, values in enumerate(alone):
        np.testing.assert_allclose(to_numpy(model["experts"].gate_proj)[expert], values, rtol=1e-6)
    found = model["experts"].parametrizations.up_proj[0]._amaxes(torch.ones(2, 16, 32))
    assert torch.stack([*found.values()]).amax(0).tolist() == [1, 8]


def test_rows_of_a_stack_must_hold_whole_blocks():
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model["experts"].gate_up_proj = torch.nn.Parameter(torch.ones(2, 48, 32))
    with pytest.raises(ValueError, match=r"experts.gate_up_proj holds gate and up of 24 rows each, and blocks of"):
        ft.fake_quantize_model(model, "nvfp4-te-2d", format="modelopt")


def test_zeros_stay_zeros(tmp_path):
    for recipe in ("nvfp4-te", "nvfp4-modelopt", "nvfp4-torchao"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
        torch.nn.init.zeros_(model[0].weight)
        ft.fake_quantize_model(model, recipe)
        assert not model[0].weight.any() and not model[0].weight.isnan().any()


def test_state_dicts_are_those_of_the_plain_model():
    """Names, order and values are kept. Both kinds of names load, and save_pretrained thus writes plain names."""
    model, plain = a_llama(), a_llama()
    ft.fake_quantize_model(model, "nvfp4-te", config=CONFIG)
    before, after = plain.state_dict(), model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    other = a_llama(seed=1)
    ft.fake_quantize_model(other, "nvfp4-te", config=CONFIG)
    assert other.load_state_dict(after).missing_keys == []
    layer = "model.layers.1.mlp.up_proj"
    assert torch.equal(other.get_submodule(layer).weight, model.get_submodule(layer).weight)
    long = {name.replace("proj.weight", "proj.parametrizations.weight.original"): v for name, v in before.items()}
    other.load_state_dict(long)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.layers.0.mlp.up_proj.weight"'):
        other.load_state_dict({name: v for name, v in before.items() if "up_proj" not in name})
    for loaded in (other, copy.deepcopy(other)):
        missing = loaded.load_state_dict({}, strict=False).missing_keys
        assert sorted(missing) == sorted(plain.load_state_dict({}, strict=False).missing_keys)
    biased = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16))
    names = list(biased.state_dict())
    ft.fake_quantize_model(biased, "nvfp4-te")
    assert list(biased.state_dict()) == names
    ft.remove_fake_quantization(biased)
    assert list(biased.state_dict()) == names


def test_copies_share_amaxes_among_themselves():
    model = a_llama()
    ft.fake_quantize_model(model, "nvfp4-te", config=CONFIG)
    other = copy.deepcopy(model)
    q, k = (model.get_submodule(f"model.layers.0.self_attn.{name}_proj") for name in "qk")
    before = q.weight.clone(), other.get_submodule("model.layers.0.self_attn.q_proj").weight
    with torch.no_grad():
        k.parametrizations.weight.original.mul_(7.3)
    assert not torch.equal(q.weight, before[0])
    assert torch.equal(other.get_submodule("model.layers.0.self_attn.q_proj").weight, before[1])
    assert list(other.state_dict()) == list(a_llama().state_dict())


def test_training_updates_the_originals():
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False)), torch.randn(4, 32)
    original = model[0].weight
    ft.fake_quantize_model(model, "nvfp4-te")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    y = model(x)
    y.sum().backward()
    assert torch.equal(original.grad, x.sum(0).expand(16, 32))  # the gradient passes straight through
    before = original.detach().clone()
    optimizer.step()
    assert torch.equal(original.detach(), torch.add(before, original.grad, alpha=-0.1))


def test_compiled_models_read_the_same_bits():
    model, x = a_llama(), torch.randn(4, 64)
    ft.fake_quantize_model(model, "nvfp4-te", config=CONFIG)
    attention = model["model"]["layers"][0]["self_attn"]

    def read(x):
        return torch.cat([attention[name](x) for name in ("q_proj", "k_proj")])

    assert torch.equal(torch.compile(read, fullgraph=True, backend="aot_eager")(x), read(x))


@pytest.mark.parametrize("keep", ["original", "quantized"])
def test_remove_fake_quantization(keep):
    model, plain = a_llama(), a_llama()
    parameters = dict(model.named_parameters())
    names = ft.fake_quantize_model(model, "nvfp4-te", config=CONFIG)
    values = {name: model.get_submodule(name.removesuffix(".weight")).weight.detach().clone() for name in names}
    assert ft.remove_fake_quantization(model, keep=keep) == list(names)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        expected = values.get(name) if keep == "quantized" else None
        assert torch.equal(parameter, plain.get_parameter(name) if expected is None else expected)
    with pytest.raises(ValueError, match=r"^remove_fake_quantization: keep is 'all'; needs \"original\" or \"quant"):
        ft.remove_fake_quantization(model, keep="all")
    with pytest.raises(TypeError, match=r"^remove_fake_quantization: model is 'x'; needs a Module"):
        ft.remove_fake_quantization("x")
    assert ft.remove_fake_quantization(model) == []
    assert ft.fake_quantize_model(model, "mxfp4", config=CONFIG) == names
    with pytest.raises(ValueError, match=r"q_proj.weight is already fake-quantized; .*remove_fake_quantization first"):
        ft.fake_quantize_model(model, "nvfp4-te", config=CONFIG)


def test_other_parametrizations_stay():
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    normed = model[0].weight.detach().clone()
    ft.fake_quantize_model(model, "nvfp4-te", format="modelopt")
    assert_same_bits(to_numpy(model[0].weight), to_numpy(served_values(normed)))
    with pytest.raises(ValueError, match=r'0.weight has other parametrizations too; .* keep="original"'):
        ft.remove_fake_quantization(model, keep="quantized")
    ft.remove_fake_quantization(model)
    assert torch.equal(model[0].weight, normed)


PRODUCT = dataclasses.replace(fp4kit.recipe("nvfp4-te"), decode_rule="product")  # as Model-Optimizer's container


def served_values(w):
    """Return the values that Model-Optimizer's container gives for the codes of nvfp4-te."""
    return torch.from_numpy(fp4kit.fake_quantize(to_numpy(w), PRODUCT))


def test_convolutions_and_embeddings():
    def model():
        layers = {
            "embed": torch.nn.Embedding(8, 32),
            "conv": torch.nn.Conv2d(32, 8, 3),
            "thin": torch.nn.Conv1d(3, 8, 3),
        }
        return torch.nn.ModuleDict({**layers, "norm": torch.nn.LayerNorm(32), "fc": torch.nn.Linear(32, 8)})

    a = model()
    with pytest.warns(UserWarning, match="conv.weight: fp4kit convert leaves convolutions unquantized, so the served"):
        names = ft.fake_quantize_model(a, "nvfp4-te", format="modelopt", parameters=("*", "conv.weight", "thin.weight"))
    assert names == ["conv.weight", "fc.weight"]
    reasons = {row.name: row.reason for row in names.plan.rows}
    assert reasons["thin.weight"] == "K = 9 is not a multiple of 16"
    assert reasons["embed.weight"] == "embedding (embed)"
    assert reasons["norm.weight"] == "1-D: a norm or a bias" and reasons["fc.bias"] == "not a weight"
    w = a["conv"].parametrizations.weight.original
    assert torch.equal(a["conv"].weight, served_values(w.flatten(1)).view(w.shape))
    b = model()
    assert ft.fake_quantize_model(b, "nvfp4-te", include=("embed.*",), config={}) == ["embed.weight", "fc.weight"]
    assert ft.fake_quantize_model(model(), "nvfp4-te") == ["conv.weight", "fc.weight"]
    for known in ({"recipe": "nvfp4-te", "format": "modelopt"}, {"engine": "transformers", "scheme": "nvfp4-w4a16"}):
        names = ft.fake_quantize_model(model(), **known, parameters=("*.weight",))
        reasons = {row.name: row.reason for row in names.plan.rows}
        assert names == ["fc.weight"] and reasons["conv.weight"].endswith("which fp4kit convert leaves unquantized")


def test_weights_of_other_layers_are_named():
    layers = {"mha": torch.nn.MultiheadAttention(32, 2), "lstm": torch.nn.LSTM(32, 32), "fc": torch.nn.Linear(32, 8)}
    model = torch.nn.ModuleDict(layers)
    model.position = torch.nn.Parameter(torch.zeros(1, 4, 32))
    torch.nn.utils.parametrize.register_parametrization(model["lstm"], "weight_hh_l0", torch.nn.Identity())
    names = ft.fake_quantize_model(model, "nvfp4-te")
    reasons = {row.name: row.reason for row in names.plan.rows}
    assert reasons["mha.in_proj_weight"] == "packed q/k/v of nn.MultiheadAttention: not supported"
    assert reasons["lstm.weight_ih_l0"] == reasons["lstm.weight_hh_l0"] == "weight of nn.LSTM: not supported"
    assert reasons["position"] == "parameter of nn.ModuleDict: not supported"
    assert reasons["lstm.bias_ih_l0"] == reasons["fc.bias"] == "not a weight"


WRONG = {
    "a wildcard": (
        {"parameters": ("*.mlp.*", "*.mpl.up_proj.weight")},
        ValueError,
        r"mpl.up_proj.weight' matches no par",
    ),
    "excluded": ({"exclude": ("lm_haed",)}, ValueError, r"did you mean 'lm_head.weight'\?; its .* 'lm_head.weight'"),
    "a module": ({"exclude": ("*.down_proj",)}, ValueError, r"; did you mean '\*.down_proj.weight'\?; its parameters"),
    "all": ({"exclude": ("*",)}, ValueError, r"no parameter is left to quantize: .*\(exclude '\*'\)"),
    "text": ({"parameters": "*"}, TypeError, r"parameters is '\*'; needs a tuple of wildcards, such as"),
    "a norm": ({"include": ("model.norm.weight",)}, ValueError, r"which has shape \(64,\); needs two dimensi"),
    "format": (
        {"format": "modlopt"},
        CheckpointError,
        r"^fake_quantize_model: format modlopt: unknown; did you mean modelopt",
    ),
    "unstorable": ({"format": "mlx", "config": CONFIG}, CheckpointError, r"mlx"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    options, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        ft.fake_quantize_model(a_llama(), "nvfp4-te", **options)


def test_what_an_engine_computes_beyond_operands_is_said():
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64))
    with pytest.warns(
        UserWarning, match="llama.cpp multiplies as the unit 'ggml-avx2-repacked' does and quantizes inp"
    ):
        text = str(ft.fake_quantize_model(layer, engine="llama.cpp", scheme="mxfp4-w4a8"))
    assert "by mxfp4-gguf; values as llama.cpp serves them from gguf MXFP4\n" in text and "in float32" not in text
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64))
    text = str(ft.fake_quantize_model(layer, engine="MLX", scheme="mxfp4-w4a16"))
    assert "note: MLX multiplies as the unit 'mlx-cpu' does; the model" in text and "served_dtype" not in text
    within = {(row.engine, row.scheme) for row in fp4kit.servings() if row.quantizes_within}
    assert within == {("llama.cpp", "mxfp4-w4a8"), ("llama.cpp", "nvfp4-w4a8")}


def test_wildcards():
    names = ft.fake_quantize_model(a_llama(), "nvfp4-te", parameters=("*.mlp.*",), exclude=("*layers.1*",))
    assert names == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    why = r"weight \(its layer is the whole model and has no name\).*layer in it, such as torch.nn.Sequential\(layer\)"
    with pytest.raises(ValueError, match=why + r", or include=\('weight',\)") as error:
        ft.fake_quantize_model(torch.nn.Linear(32, 16, bias=False), "nvfp4-te")
    assert "not a weight" not in str(error.value)
    assert ft.fake_quantize_model(torch.nn.Linear(32, 16), "nvfp4-te", include=("weight",)) == ["weight"]
    for layer, way_out in (
        (
            torch.nn.Linear(32, 16).double(),
            r"dtype float64\).*; convert the weights, and inputs that activations quantizes, to float32",
        ),
        (
            torch.nn.Linear(30, 16),
            r"K = 30 is not a multiple of 16\).*; pad the weights, or use a recipe whose blocks fit",
        ),
    ):
        with pytest.raises(ValueError, match=way_out):
            ft.fake_quantize_model(torch.nn.Sequential(layer), "nvfp4-te")
    with pytest.warns(UserWarning, match=r"self_attn.\(q_proj\|k_proj\|v_proj\): v_proj stays unquantized"):
        ft.fake_quantize_model(a_llama(), "nvfp4-te", exclude=("*.v_proj.weight",))


def test_a_recipe_that_no_format_stores():
    model = a_llama()
    names = ft.fake_quantize_model(model, UNSTORABLE, parameters=("*.o_proj.weight",))
    layer = model.get_submodule("model.layers.0.self_attn.o_proj")
    assert f"no checkpoint: recipe {UNSTORABLE}: cannot be stored in a checkpoint" in str(names)
    original = to_numpy(layer.parametrizations.weight.original)
    assert_same_bits(to_numpy(layer.weight), fp4kit.fake_quantize(original, UNSTORABLE))


def test_the_table():
    names = ft.fake_quantize_model(a_llama(), "nvfp4-te", config=CONFIG)
    lines = str(names).splitlines()
    assert (
        lines[0] == "14 of 21 parameters fake-quantized by nvfp4-te; values as served from --format compressed-tensors"
    )
    assert lines[1] == "inputs of layers stay unquantized" and len(lines) == 16 and repr(names) == str(list(names))
    assert "loaders usually decode to bfloat16" in lines[-1]
    rounded = ft.fake_quantize_model(a_llama(), "nvfp4-te", config=CONFIG, served_dtype="bfloat16")
    assert str(rounded).splitlines()[0] == f"{lines[0]}, decoded to bfloat16" and "note:" not in str(rounded)
    assert "note:" not in str(ft.fake_quantize_model(a_llama(torch.bfloat16), "nvfp4-te", config=CONFIG))
    shared = "shares the amax of model.layers.*.mlp.(gate_proj|up_proj)"
    assert f"yes 2 model.layers.*.mlp.up_proj.weight 96 x 64 dense MLP; {shared}" in [
        " ".join(x.split()) for x in lines
    ]


def test_settings_are_removed_too():
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    ft.fake_quantize_model(model, ft.FakeQuantSettings("nvfp4-te", parameters=("*.weight",)))
    with pytest.raises(ValueError, match=r"0\.weight is already fake-quantized"):
        ft.fake_quantize_model(model, "nvfp4-te")
    assert ft.remove_fake_quantization(model) == ["0.weight"]


def gate_and_up():
    model = torch.nn.ModuleDict({f"{name}_proj": torch.nn.Linear(32, 16, bias=False) for name in ("gate", "up")})
    torch.nn.init.constant_(model["up_proj"].weight, 1.001)
    return model


def test_amaxes_of_other_dtypes_are_rounded_as_the_weight_is():
    """With mixed precision, FSDP gathers a weight in bfloat16 while others of its group are still in float32."""
    model = gate_and_up()
    ft.fake_quantize_model(model, "nvfp4-te", format="modelopt")
    w, part = torch.randn(16, 32, dtype=torch.bfloat16) / 9, model["gate_proj"].parametrizations.weight[0]
    expected = fp4kit.fake_quantize(to_numpy(w), PRODUCT, tensor_amax=np.float32(1))
    assert_same_bits(to_numpy(part(w)), expected)


def test_fused_weights_of_two_dtypes():
    """The shared amax is not rounded to the dtype of a weight, as in the converter."""
    model = gate_and_up()
    model["gate_proj"].bfloat16()
    w = to_numpy(model["gate_proj"].weight)
    ft.fake_quantize_model(model, "nvfp4-te", format="modelopt")
    expected = fp4kit.fake_quantize(w, PRODUCT, tensor_amax=np.float32(1.001))
    assert (expected != fp4kit.fake_quantize(w, PRODUCT, tensor_amax=np.float32(1))).any()
    assert_same_bits(to_numpy(model["gate_proj"].weight), expected)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-modelopt"])
def test_nan_in_a_fused_weight_is_an_error(recipe):
    """No weight of the group gets finite values of another scale."""
    model = gate_and_up()
    with torch.no_grad():
        model["gate_proj"].weight[3, 4] = torch.nan
    ft.fake_quantize_model(model, recipe, format="modelopt")
    for name in ("gate_proj", "up_proj"):
        with pytest.raises(ValueError, match=rf"{name}.weight: fake_quantize: gate_proj.weight holds NaN, so no"):
            _ = model[name].weight


@pytest.mark.parametrize("recipe", ["nvfp4-te", pytest.param("nvfp4-compressed-tensors", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", half(synthetic.MODELS))
def test_published_models(tmp_path, name, recipe):
    """Every layer that the converter writes as a matrix is one that the model reads, bit for bit."""
    tensors = synthetic.MODELS[name](tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    model = module_of({name: to_torch(x) for name, x in tensors.items()})
    names = ft.fake_quantize_model(model, recipe, config=config)
    convert(tmp_path / "trained", tmp_path / "served", recipe)
    compared = 0
    for module, values in served.weights(tmp_path / "served", fp4kit.recipe(recipe)).items():
        tensor = f"{module}.weight"
        if tensor in tensors:
            assert tensor in names
            found = model.get_submodule(module).weight
            assert torch.equal(found, torch.from_numpy(values).to(found.dtype)), module
            compared += 1
    assert compared == sum(tensors[name].ndim == 2 for name in names)


@pytest.mark.parametrize("transposed", [True, False])
def test_modules_that_state_their_axis_order(transposed):
    experts = torch.nn.Module()
    experts.is_transposed, experts.down_proj = transposed, torch.nn.Parameter(torch.randn(2, 32, 48))
    names = ft.fake_quantize_model(torch.nn.ModuleDict({"experts": experts}), "nvfp4-te", format="modelopt")
    assert names.plan.rows[0].shape == ((2, 48, 32) if transposed else (2, 32, 48))
    w = experts.parametrizations.down_proj.original.detach()
    matrix = w[1].T.contiguous() if transposed else w[1]
    assert torch.equal(experts.down_proj[1], served_values(matrix).T if transposed else served_values(matrix))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_of_transformers(tmp_path, kind):
    """transformers holds experts in stacks and saves them one by one, in Mixtral under other names."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "num_experts_per_tok": 2}
    more = {"num_experts": 4, "moe_intermediate_size": 96} if kind == "Qwen3Moe" else {"num_local_experts": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand(()))
    names = ft.fake_quantize_model(model, "nvfp4-te", format="compressed-tensors")
    assert sum(name.endswith((".gate_up_proj", ".down_proj")) for name in names) == 4
    model(torch.arange(8)[None]).logits.sum().backward()
    model.save_pretrained(tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "served", "nvfp4-te", format="compressed-tensors")
    decoded = served.weights(tmp_path / "served", fp4kit.recipe("nvfp4-te"))
    assert len(decoded) == 2 * (4 + 4 * 3)
    for module, values in decoded.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)", module)
        if found is None:
            assert_same_bits(to_numpy(model.get_submodule(module).weight), values)
            continue
        layer, number, leaf = int(found[1]), int(found[2]), found[3]
        experts = model.model.layers[layer].mlp.experts
        both = experts.gate_up_proj[number].chunk(2)
        parts = {"gate_proj": both[0], "w1": both[0], "up_proj": both[1], "w3": both[1]}
        assert_same_bits(to_numpy(parts.get(leaf, experts.down_proj[number])), values)


def test_a_model_in_a_wrapper_has_the_config_of_the_model():
    model = a_llama()
    model.conv, model.config = torch.nn.Conv1d(16, 8, 1), CONFIG
    wrapper = torch.nn.DataParallel(model)
    names = ft.fake_quantize_model(wrapper, "nvfp4-te")
    assert len(names) == 14 and names[0] == "module.model.layers.0.self_attn.q_proj.weight"
    reasons = {row.name: row.reason for row in names.plan.rows}
    assert reasons["module.conv.weight"] == "convolution, which fp4kit convert leaves unquantized"


@pytest.mark.parametrize("kind", ["gpt2", "parts of it", "settings"])
def test_conv1d_of_transformers_is_refused(tmp_path, kind):
    """GPT-2 stores its weights as (in, out). Training and conversion refuse them by name."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    part = model.transformer.h if kind == "parts of it" else model
    recipe = ft.FakeQuantSettings("nvfp4-te", parameters=("*c_fc.weight",)) if kind == "settings" else "nvfp4-te"
    with pytest.raises(ValueError, match=r"\.c_\w+\.weight is stored transposed; Conv1D .*; there is no other layer"):
        ft.fake_quantize_model(part, recipe)
    if kind == "settings":
        return
    with pytest.raises(ValueError, match=r"names .*c_attn.weight, which is stored transposed; Conv1D .*; correct"):
        ft.fake_quantize_model(part, recipe, include=("*.c_attn.weight",))
    with_linear = torch.nn.ModuleDict({"h": model.transformer.h, "up_proj": torch.nn.Linear(64, 64)})
    with pytest.raises(ValueError, match=r"; to leave it unquantized, pass exclude=\('\*\.c_\*',\)"):
        ft.fake_quantize_model(with_linear, recipe)
    assert ft.fake_quantize_model(with_linear, recipe, exclude=("*.c_*",)) == ["up_proj.weight"]
    model.save_pretrained(tmp_path / "gpt2")
    for options in ({}, {"format": "modelopt"}):
        with pytest.raises(CheckpointError, match=r"c_attn: gpt2 stores .*; Conv1D .*; there is no other layer"):
            convert(tmp_path / "gpt2", tmp_path / "out", "nvfp4-te", **options)
    config = {"model_type": "gpt2", "n_layer": 1}
    rules = fp4kit.checkpoint.Rules.of("nvfp4-te", format="modelopt", config=config)
    state = ((name, to_numpy(w.detach())) for name, w in model.state_dict().items())
    with pytest.raises(
        CheckpointError, match=r"c_attn: gpt2 stores its layers transposed .*; to .*, wishes=Wishes\(keep="
    ):
        dict(fp4kit.checkpoint.convert_tensors(state, rules))


DTYPES = ("float32", "float16", "bfloat16")
ROUNDED = (
    *(("nvfp4-te", "compressed-tensors"), ("nvfp4-te", "modelopt"), ("nvfp4-compressed-tensors", "compressed-tensors")),
    *(("mxfp8-te", "sglang-mxfp8"), ("mxfp4-ocp", "compressed-tensors")),
)


def layers():
    """Return a float32 model of fused layers of different sizes."""
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=False) for name in names})
    with torch.no_grad():
        for i, layer in enumerate(model.values()):
            layer.weight.mul_(i + 0.3)
    return model


@pytest.mark.parametrize(("stored", "dtype"), [("float32", d) for d in DTYPES] + [(d, None) for d in DTYPES[1:]])
@pytest.mark.parametrize(("recipe", "form"), ROUNDED)
def test_decoded_values_are_rounded_once(tmp_path, recipe, form, stored, dtype):
    """They are rounded to served_dtype, or to the dtype of the parameter."""
    model = layers().to(getattr(torch, stored))
    names = ft.fake_quantize_model(model, recipe, format=form, served_dtype=dtype)
    decoded_to = f", decoded to {dtype}" if dtype else ""
    assert f"; values as served from --format {form}{decoded_to}\n" in str(names) and "note:" not in str(names)
    convert(save(model, tmp_path / "trained", {}), tmp_path / "served", recipe, format=form)
    for name, decoded in served.weights(tmp_path / "served", fp4kit.recipe(recipe)).items():
        w = model[name].weight
        w.sum().backward()
        expected = torch.from_numpy(decoded).to(getattr(torch, dtype or stored)).to(w.dtype)
        assert_same_bits(to_numpy(w), to_numpy(expected))
        gradient = model[name].parametrizations.weight.original.grad
        assert w.dtype == getattr(torch, stored) and torch.equal(gradient, torch.ones_like(gradient))


def test_gradients_are_not_rounded():
    model = layers()
    ft.fake_quantize_model(model, "nvfp4-te", served_dtype=torch.bfloat16)
    upstream = torch.rand(64, 64)
    (model["q_proj"].weight * upstream).sum().backward()
    assert torch.equal(model["q_proj"].parametrizations.weight.original.grad, upstream)


def test_dtypes_that_do_not_fit():
    with pytest.raises(ValueError, match="served_dtype is 'int8'; needs one of float32, float16, bfloat16"):
        ft.fake_quantize_model(layers(), "nvfp4-te", served_dtype="int8")
    for dtype, wanted in (("bfloat16", "float16"), ("float16", "bfloat16"), ("bfloat16", "float32")):
        text = f"q_proj.weight is {dtype}, which cannot hold values of served_dtype='{wanted}'; train it in float32"
        with pytest.raises(ValueError, match=text):
            ft.fake_quantize_model(layers().to(getattr(torch, dtype)), "nvfp4-te", served_dtype=wanted)
    model = layers().bfloat16()
    ft.fake_quantize_model(model, "nvfp4-te", served_dtype="bfloat16")
    plain = layers().bfloat16()
    ft.fake_quantize_model(plain, "nvfp4-te")
    assert torch.equal(model["q_proj"].weight, plain["q_proj"].weight)


def test_jax_rounds_the_same_values():
    jax = pytest.importorskip("jax")
    fj = importlib.import_module("fp4kit.jax")
    model = layers()
    params = {name: {"kernel": layer.weight.detach().numpy().T.copy()} for name, layer in model.items()}
    ft.fake_quantize_model(model, "nvfp4-te", served_dtype="bfloat16")
    transform = fj.fake_quantize_model(params, "nvfp4-te", served_dtype="bfloat16")
    for name, w in transform(params).items():
        assert_same_bits(np.asarray(w["kernel"]).T.copy(), to_numpy(model[name].weight))
    upstream = np.random.default_rng(0).random((64, 64), np.float32)
    gradient = jax.jit(jax.grad(lambda p: (transform(p)["q_proj"]["kernel"] * upstream).sum()))(params)
    assert_same_bits(np.asarray(gradient["q_proj"]["kernel"]), upstream)
    with pytest.raises(ValueError, match="served_dtype is 'half'"):
        fj.fake_quantize_model(params, "nvfp4-te", served_dtype="half")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("adapted", [False, True])
def test_transformers_decodes_the_trained_values(tmp_path, adapted):
    """transformers decodes a converted float32 model to bfloat16. All its layers equal those that were trained."""
    for package in ("compressed_tensors", "accelerate"):
        pytest.importorskip(package)
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    adapters = "merged" if adapted else "base"
    names = ft.fake_quantize_model(model, "nvfp4-te", served_dtype="bfloat16", adapters=adapters)
    trained = model
    if adapted:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        trained = peft.get_peft_model(model, options)
    weights = {name: get(trained, name) for name in names}
    if adapted:
        model = trained.merge_and_unload()
    model.save_pretrained(tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "served", "nvfp4-te")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.bfloat16)
    loaded(torch.arange(4)[None])  # decodes
    assert len(names) == 7
    for name, w in weights.items():
        decoded = get(loaded, name)
        assert decoded.dtype == torch.bfloat16 and torch.equal(decoded.float(), w)


def get(model, name):
    """Return the weight of a layer that may be inside an adapter layer of PEFT."""
    layer = getattr(getattr(model, "base_model", None), "model", model).get_submodule(name.removesuffix(".weight"))
    return getattr(layer, "base_layer", layer).weight.detach()


class Mlp(torch.nn.Module):
    """Store the inputs that its layers compute with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
        self.down_proj = torch.nn.Linear(32, 64)
        self.seen = {}

    def forward(self, x):
        hidden = torch.relu(self.gate_proj(x)) * self.up_proj(input=x)
        self.seen |= {"up_proj": x.detach(), "down_proj": hidden.detach()}
        return self.down_proj(hidden)


def inputs_of(model, x):
    """Return {layer: the inputs that its product gets}, for one call of a model."""
    found = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, y, name=name: found.update({name: (args or tuple(kwargs.values()))[0]}),
            with_kwargs=True,
        )
        for name, module in model.named_children()
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def test_inputs_of_experts_are_named_as_unquantized():
    layers = torch.nn.ModuleDict({"experts": Experts(False), "q_proj": torch.nn.Linear(64, 64)})
    by = {"engine": "vLLM", "scheme": "nvfp4-w4a4", "format": "modelopt"}
    with pytest.warns(UserWarning, match="the inputs of 2 stacks of experts stay unquantized, although vLLM quantizes"):
        names = ft.fake_quantize_model(torch.nn.ModuleDict({"mlp": layers}), **by, inputs={"mlp.q_proj": 2.0})
    assert "inputs of 1 torch.nn.Linear fake-quantized" in str(names)
    assert "; those of 2 stacks of experts stay unquantized\n" in str(names)


def test_dynamic_amaxes():
    model, x = Mlp(), torch.randn(4, 64, requires_grad=True)
    names = ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te")
    assert names.inputs == ("gate_proj", "up_proj", "down_proj")
    of_inputs = "\ninputs of 3 torch.nn.Linear fake-quantized by nvfp4-te, with "
    assert f"{of_inputs}scales computed in each call\n" in str(names)
    seen = inputs_of(model, x)
    for layer in ("up_proj", "down_proj"):
        assert_same_bits(to_numpy(seen[layer]), fp4kit.fake_quantize(to_numpy(model.seen[layer]), "nvfp4-te"))
    model(x).sum().backward()
    assert x.grad.any()
    ft.remove_fake_quantization(model)
    assert inputs_of(model, x)["up_proj"] is x


@pytest.mark.parametrize("kind", ["collector", "dict"])
def test_calibrated_amaxes(kind):
    """Layers that read one input use its largest measured amax, under whichever of their names it was measured."""
    model, x = Mlp(), torch.randn(4, 64)
    if kind == "collector":
        with ft.collect(model) as given, torch.no_grad():
            model(x * 3)
        amaxes = given.amaxes()
    else:
        amaxes = given = {"gate_proj": 7.5, "down_proj": np.float32(4)}
    names = ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=given)
    assert ", with static amaxes\n" in str(names)
    divisors = dict.fromkeys(names.inputs, 448.0)
    by = "nvfp4-vllm-static-divisor"
    found = ft.fake_quantize_model(Mlp(), "nvfp4-te", activations=by, input_global_scales=divisors)
    assert f"fake-quantized by {by}, with static input_global_scales\n" in str(found)
    seen = inputs_of(model, x)
    for layer, of in {"up_proj": "gate_proj", "down_proj": "down_proj"}.items():
        values = fp4kit.fake_quantize(to_numpy(model.seen[layer]), "nvfp4-te", tensor_amax=amaxes[of])
        assert_same_bits(to_numpy(seen[layer]), values)


def test_recipes_without_a_tensor_scale():
    model, x = Mlp(), torch.randn(4, 64)
    ft.fake_quantize_model(model, "mxfp4", activations="mxfp8")
    assert_same_bits(to_numpy(inputs_of(model, x)["up_proj"]), fp4kit.fake_quantize(to_numpy(x), "mxfp8"))
    with pytest.raises(ValueError, match=r"input_amaxes are given, but mxfp8-te has no tensor scale; leave them out"):
        ft.fake_quantize_model(Mlp(), "mxfp4", activations="mxfp8", input_amaxes={"gate_proj": 1})


def test_errors_leave_the_model_as_it_was():
    model = Mlp()
    with pytest.raises(TypeError, match=r"input_amaxes are given without activations; pass activations='nvfp4-te' too"):
        ft.fake_quantize_model(model, "nvfp4-te", input_amaxes=Collector())
    with pytest.raises(ValueError, match=r"^fake_quantize_model: format='fp8' holds .*; use format='compressed-ten"):
        ft.fake_quantize_model(model, "nvfp4-te", format="fp8")
    with pytest.raises(
        ValueError, match=r"^fake_quantize_model: .* layers were not measured: down_proj; .* exclude=\.\.\.$"
    ):
        ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes={"up_proj": 1})
    for wrong in ({"recipe": "mxfp4-mslk-stochastic"}, {"recipe": "mxfp4", "activations": "if4-fouroversix-ms-eden"}):
        with pytest.raises(ValueError, match=r"^fake_quantize_model: rounding is 'nearest', but .* only rounds "):
            ft.fake_quantize_model(model, **wrong)
    with pytest.raises(TypeError, match=r"input_amaxes is list; needs a Collector, or a dict of layer -> amax"):
        ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=[1])
    for amax, error, text in (
        (-1.0, ValueError, "is -1.0; needs a number >= 0"),
        (np.nan, ValueError, "is nan; needs a number >= 0"),
        ("3", TypeError, "is '3'; needs a number >= 0"),
        (None, TypeError, "is None; needs a number >= 0"),
    ):
        amaxes = {"gate_proj": 1, "up_proj": amax, "down_proj": 1}
        with pytest.raises(error, match=re.escape(f"fake_quantize_model: input_amaxes['up_proj'] {text}")):
            ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=amaxes)
    attention = torch.nn.MultiheadAttention(32, 2)
    with pytest.raises(ValueError, match=r"out_proj.weight: torch.nn.MultiheadAttention does not call this layer, so"):
        ft.fake_quantize_model(attention, "nvfp4-te", activations="nvfp4-te")
    with pytest.raises(ValueError, match=r"activations='nvfp4-te', but no torch.nn.Linear is fake-quantized"):
        ft.fake_quantize_model(torch.nn.Sequential(torch.nn.Conv1d(16, 8, 1)), "nvfp4-te", activations="nvfp4-te")
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
