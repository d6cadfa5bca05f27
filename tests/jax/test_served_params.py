"""Test that a JAX model trains with the values that loaders decode from the converted checkpoint, bit for bit."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
import served
import synthetic
from inputs import BF16

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes.schema import as_stored

jax = pytest.importorskip("jax")
fj = importlib.import_module("fp4kit.jax")
CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
SHAPES = {f"self_attn.{name}_proj": (64, 64) for name in "qkvo"}
SHAPES |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


def a_llama(leaf="kernel", dtype=np.float32):
    """Return a pytree with the parameters of a Llama of two layers. Kernels are (K, N), weights (N, K)."""
    rng = np.random.default_rng(0)

    def array(rows, columns):
        w = (rng.standard_normal((rows, columns)) * rng.uniform(0.1, 3)).astype(dtype)
        return {leaf: jax.numpy.asarray(w.T if leaf == "kernel" else w)}

    layers = []
    for _ in range(2):
        layer = {"self_attn": {}, "mlp": {}, "input_layernorm": {"scale": jax.numpy.ones(64, dtype)}}
        for name, shape in SHAPES.items():
            parent, _, child = name.partition(".")
            layer[parent][child] = array(*shape)
        layers.append(layer)
    embedding = {"embedding": jax.numpy.ones((64, 64), dtype)}
    return {"model": {"embed_tokens": embedding, "layers": layers}, "lm_head": array(64, 64)}


def of_layer(tree, module):
    """Return the array (N, K) of a layer in a pytree."""
    for key in module.split("."):
        tree = tree[int(key) if key.isdigit() else key]
    return np.asarray(tree["kernel"]).T if "kernel" in tree else np.asarray(tree["weight"])


@pytest.mark.parametrize(
    ("recipe", "form", "leaf"),
    [
        ("nvfp4-te", "compressed-tensors", "kernel"),
        ("mxfp4", None, "weight"),
        pytest.param("nvfp4-te", "modelopt", "weight", marks=pytest.mark.exhaustive),
        pytest.param("nvfp4-compressed-tensors", None, "kernel", marks=pytest.mark.exhaustive),
    ],
)
def test_trained_values_are_served_values(tmp_path, recipe, form, leaf):
    params = a_llama(leaf)
    transform = fj.fake_quantize_model(params, recipe, format=form, config=CONFIG)
    values = jax.jit(transform)(params)
    modules = [f"model.layers.{i}.{name}" for i in range(2) for name in SHAPES]
    assert sorted(transform.names) == sorted(f"{module}.{leaf}" for module in modules)
    tensors = {f"{module}.weight": np.ascontiguousarray(of_layer(params, module)) for module in modules}
    synthetic.write_model(tmp_path / "trained", CONFIG, tensors)
    convert(tmp_path / "trained", tmp_path / "served", recipe, format=form)
    decoded = served.weights(tmp_path / "served", fp4kit.recipe(recipe))
    assert sorted(decoded) == sorted(modules)
    for module, expected in decoded.items():
        assert_same_bits(np.ascontiguousarray(of_layer(values, module)), expected)
        assert_same_bits(np.ascontiguousarray(of_layer(transform(params), module)), expected)


def test_gradients_pass_straight_through():
    params = a_llama(dtype=BF16)
    transform = fj.fake_quantize_model(params, "nvfp4-te")
    total = lambda params: sum(leaf.astype(np.float32).sum() for leaf in jax.tree.leaves(transform(params)))  # noqa: E731
    gradient = jax.jit(jax.grad(total))(params)
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)


@pytest.mark.parametrize("leaf", ["kernel", ""])
def test_stacks_of_experts(leaf):
    rng = np.random.default_rng(0)
    stacks = {
        name: rng.standard_normal((2, 32, 64), np.float32) * size for name, size in (("gate_proj", 1), ("up_proj", 9))
    }
    arrays = {name: {"kernel": w.swapaxes(1, 2)} if leaf else w for name, w in stacks.items()}
    params = {"mlp": {"experts": arrays, "router": {"kernel": np.ones((32, 2), np.float32)}}}
    transform = fj.fake_quantize_model(params, "nvfp4-te", format="modelopt")
    assert transform.names == [f"mlp.experts.{name}{'.kernel' * bool(leaf)}" for name in stacks]
    values = transform(params)["mlp"]["experts"]
    amax = np.maximum(*(np.abs(w).max(axis=(1, 2)) for w in stacks.values()))
    for name, w in stacks.items():
        product = transform.plan.recipe
        expected = np.stack([fp4kit.fake_quantize(w[e], product, tensor_amax=amax[e]) for e in range(2)])
        found = np.asarray(values[name]["kernel"]).swapaxes(1, 2) if leaf else np.asarray(values[name])
        assert_same_bits(np.ascontiguousarray(found), expected)


def test_shapes_without_values():
    shapes = jax.eval_shape(a_llama)
    transform = fj.fake_quantize_model(shapes, "nvfp4-te", config=CONFIG)
    assert len(transform.names) == 14
    assert "no  1     lm_head.kernel" in str(transform) and "output head (lm_head)" in str(transform)
    assert "embedding (embed_tokens)" in str(transform)


def test_errors():
    params = a_llama()
    with pytest.raises(ValueError, match=r"='\*.mpl.\*' matches no parameter; did you mean '\*.mlp.\*'\?; its"):
        fj.fake_quantize_model(params, "nvfp4-te", parameters=("*.mpl.*",))
    with pytest.raises(ValueError, match=r"matches no parameter; the model has no parameters$"):
        fj.fake_quantize_model({"a": {}}, "nvfp4-te")
    with pytest.raises(TypeError, match=r"^fake_quantize_model: a is str; needs a pytree of arrays"):
        fj.fake_quantize_model({"a": "x"}, "nvfp4-te")
    transform = fj.fake_quantize_model(params, "nvfp4-te", include=("lm_head.*",))
    assert "lm_head.kernel" in transform.names
    with pytest.raises(ValueError, match=r"^ServedParams: params has 1 arrays; needs 18, as planned"):
        transform({"w": np.ones((16, 16), np.float32)})
    renamed = {"a" if name == "lm_head" else name: params[name] for name in params}
    halves = jax.tree.map(lambda w: w[:24], params)
    turned = jax.tree.map(lambda w: w.T, params)
    for other in (renamed, halves, turned):
        with pytest.raises(ValueError, match=r"^ServedParams: params has .* was planned; call fake_quantize_model"):
            transform(other)
        with pytest.raises(ValueError, match=r"^ServedParams: params has .* was planned; call fake_quantize_model"):
            jax.jit(transform)(other)


def test_zeros_stay_zeros():
    params = {"fc": {"kernel": np.zeros((32, 16), np.float32)}}
    values = fj.fake_quantize_model(params, "nvfp4-modelopt")(params)
    assert not np.asarray(values["fc"]["kernel"]).any()


def fused(gate, up):
    """Return a pytree of a gate and an up projection."""
    return {"gate_proj": {"weight": jax.numpy.asarray(gate)}, "up_proj": {"weight": jax.numpy.asarray(up)}}


def test_fused_weights_of_two_dtypes():
    """The shared amax is not rounded to the dtype of a weight, as in the converter."""
    w = (np.random.default_rng(0).standard_normal((16, 32)) / 9).astype(BF16)
    params = fused(w, np.full((16, 32), 1.001, np.float32))
    served = fj.fake_quantize_model(params, "nvfp4-te", format="modelopt")(params)
    product = dataclasses.replace(fp4kit.recipe("nvfp4-te"), decode_rule="product")
    expected = fp4kit.fake_quantize(w, product, tensor_amax=np.float32(1.001))
    assert (expected != fp4kit.fake_quantize(w, product, tensor_amax=np.float32(1))).any()
    assert_same_bits(np.asarray(served["gate_proj"]["weight"]), expected)


def test_nan_in_a_fused_weight_is_an_error():
    """No weight of the group gets finite values of another scale."""
    w = np.ones((16, 32), np.float32)
    params = fused(np.where(w.cumsum().reshape(w.shape) == 9, np.nan, w), w)
    served = fj.fake_quantize_model(params, "nvfp4-modelopt")
    with pytest.raises(ValueError, match=r"gate_proj.weight: fake_quantize: gate_proj.weight holds NaN, so no"):
        served(params)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gate_proj.weight or up_proj.weight holds NaN, so no"):
        jax.block_until_ready(jax.jit(served)(params))


def test_the_config_is_a_mapping():
    with pytest.raises(TypeError, match=r"config is str; needs a dict, the content of config.json"):
        fj.fake_quantize_model(a_llama(), "nvfp4-te", config=json.dumps(CONFIG))


def with_lora(params, spelling):
    """Add LoRA of rank 16 to q, k and v of the first layer of a Llama, as a library spells it. Return the pytree."""
    rng, attention = np.random.default_rng(1), params["model"]["layers"][0]["self_attn"]
    for name in ("q_proj", "k_proj", "v_proj"):
        a, b = (jax.numpy.asarray(rng.standard_normal(shape).astype(np.float32)) / 99 for shape in ((64, 16), (16, 64)))
        layer = attention[name]
        attention[name] = {
            "flax LoRALinear": {**layer, "lora": {"lora_a": a, "lora_b": b}},
            "flax LoRA": {"base_module": layer, "lora_a": a, "lora_b": b},
            "qwix": {**layer, "kernel_lora_a": a, "kernel_lora_b": b},
            "tunix": {**layer, "w_lora_a": a, "w_lora_b": b},
            "gemma": {**layer, "lora": {"a": a, "b": b}},
        }[spelling]
    return params


@pytest.mark.parametrize("spelling", ["flax LoRALinear", "flax LoRA", "qwix", "tunix", "gemma"])
def test_adapters_stay_unquantized(spelling):
    params = with_lora(a_llama(), spelling)
    transform = fj.fake_quantize_model(params, "nvfp4-te", config=CONFIG)
    plain = fj.fake_quantize_model(a_llama(), "nvfp4-te", config=CONFIG)(a_llama())
    rows = [row for row in transform.plan.rows if "adapter (LoRA), which stays in 16 bits" in row.reason]
    assert len(rows) == 6 and len(transform.names) == 14
    attention = transform(params)["model"]["layers"][0]["self_attn"]
    for name, layer in attention.items():
        base = layer.get("base_module", layer)["kernel"]
        assert_same_bits(np.asarray(base), np.asarray(plain["model"]["layers"][0]["self_attn"][name]["kernel"]))
    given = jax.tree.leaves(params["model"]["layers"][0]["self_attn"]["q_proj"])
    kept = jax.tree.leaves(attention["q_proj"])
    assert sum(any(x is y for y in given) for x in kept) == 2
    with pytest.raises(ValueError, match=r"include= names .*lora.*, a tensor of an adapter \(LoRA\)"):
        fj.fake_quantize_model(params, "nvfp4-te", config=CONFIG, include=("*lora*",))
    with pytest.raises(ValueError, match=r"adapters is 'merged'; needs \"base\"; to train a merged model, call"):
        fj.fake_quantize_model(params, "nvfp4-te", config=CONFIG, adapters="merged")


def test_a_model_that_is_merged_before_it_is_served(tmp_path):
    """Gradients reach lora_a and lora_b, and the converted merged model has the trained values."""
    base = a_llama()
    adapters = {
        name: {"lora_a": jax.numpy.ones((64, 8)) / 9, "lora_b": jax.numpy.ones((8, 64)) / 7}
        for name in ("q_proj", "k_proj", "v_proj")
    }
    transform = fj.fake_quantize_model(base, "nvfp4-te", config=CONFIG)

    def merged(adapters):
        tree = jax.tree.map(lambda x: x, base)
        for name, ab in adapters.items():
            layer = tree["model"]["layers"][0]["self_attn"][name]
            layer["kernel"] = layer["kernel"] + 2 * ab["lora_a"] @ ab["lora_b"]
        return tree

    def loss(adapters):
        return sum((x**2).sum() for x in jax.tree.leaves(transform(merged(adapters))))

    gradients = jax.grad(loss)(adapters)
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradients))
    tree = merged(adapters)
    modules = [name.removesuffix(".kernel") for name in transform.names]
    tensors = {f"{module}.weight": np.ascontiguousarray(of_layer(tree, module)) for module in modules}
    synthetic.write_model(tmp_path / "trained", CONFIG, tensors)
    convert(tmp_path / "trained", tmp_path / "served", "nvfp4-te")
    values = transform(tree)
    for module, decoded in served.weights(tmp_path / "served", fp4kit.recipe("nvfp4-te")).items():
        assert_same_bits(np.ascontiguousarray(of_layer(values, module)), decoded)


def test_conv1d_of_gpt2_is_refused():
    """Flax's GPT-2 stores its kernels as (N, K), unlike other models of Flax."""
    kernels = {
        "c_attn": {"kernel": np.ones((192, 64), np.float32)},
        "c_proj": {"kernel": np.ones((64, 64), np.float32)},
    }
    params = {"transformer": {"h": {"0": {"attn": kernels}}}, "up_proj": {"kernel": np.ones((64, 64), np.float32)}}
    for config in (None, {"model_type": "gpt2", "n_layer": 1}):
        with pytest.raises(ValueError, match=r"h.0.attn.c_attn.kernel is stored transposed; Conv1D"):
            fj.fake_quantize_model(params, "nvfp4-te", config=config)
        assert fj.fake_quantize_model(params, "nvfp4-te", config=config, exclude=("*.c_*",)).names == ["up_proj.kernel"]


@pytest.mark.parametrize("scheme", ["nvfp4-w4a4", "mxfp4-w4a4", "nvfp4-w4a16"])
def test_an_engine_determines_weights_and_inputs(scheme):
    """Values of weights and inputs are those that fp4kit.torch.fake_quantize_model gives for the engine."""
    rng, row = np.random.default_rng(0), fp4kit.serving("transformers", scheme)
    params = {"mlp": {name: {"kernel": rng.standard_normal((64, 32), np.float32)} for name in ("gate_proj", "up_proj")}}
    x = jax.numpy.asarray(rng.standard_normal((4, 64)), jax.numpy.bfloat16)
    amaxes = {f"mlp.{name}": 3.5 for name in params["mlp"]} if row.input_scales == "static" else None
    served = fj.fake_quantize_model(params, engine="transformers", scheme=scheme, inputs=amaxes)
    values = served(params)["mlp"]["up_proj"]["kernel"]
    amax = max(np.abs(one["kernel"]).max() for one in params["mlp"].values()) if row.shared_amax else None
    q = fp4kit.quantize(np.ascontiguousarray(params["mlp"]["up_proj"]["kernel"].T), row.weights, tensor_amax=amax)
    form = dataclasses.replace(q, recipe=as_stored(q.recipe, True)) if row.shared_amax else q
    assert_same_bits(np.asarray(values).T, fp4kit.dequantize(form, np.dtype("bfloat16")).astype(np.float32))
    found = served.inputs("mlp.up_proj", x)
    if row.activations is None:
        assert found is x and "\ninputs of layers stay unquantized\n" in str(served)
    else:
        how = "static amaxes" if amaxes else "scales computed in each call"
        assert f"\ninputs(layer, x) fake-quantizes by {row.activations.id}, with {how}\n" in str(served)
        assert_same_bits(found, fp4kit.fake_quantize(np.asarray(x), row.activations, tensor_amax=amaxes and 3.5))
    with pytest.raises(ValueError, match=r"'mlp\.down_proj' is no layer whose weight"):
        served.inputs("mlp.down_proj", x)
    with pytest.raises(ValueError, match="no engine is known"):
        fj.fake_quantize_model(params, "nvfp4-te").inputs("mlp.up_proj", x)
    with pytest.raises(TypeError, match="recipe is None; needs"):
        fj.fake_quantize_model(params)
    if amaxes:
        with pytest.raises(ValueError, match=r"inputs has no layer 'mlp\.gate_proj'"):
            fj.fake_quantize_model(params, engine="transformers", scheme=scheme, inputs={"mlp.up_proj": 1.0})
