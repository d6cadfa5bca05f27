"""Test that served_dtype= trains a float32 model with the values that loaders decode to 16 bits."""

import importlib

import numpy as np
import pytest
import served
from tensors import to_numpy

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")
FORMATS = (("nvfp4-te", "compressed-tensors"), ("nvfp4-te", "modelopt"), ("mxfp8-te", "sglang-mxfp8"))


def layers():
    """Return a float32 model of fused layers of different sizes."""
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=False) for name in names})
    with torch.no_grad():
        for i, layer in enumerate(model.values()):
            layer.weight.mul_(i + 0.3)
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("recipe", "form"), FORMATS)
def test_decoded_values_are_rounded_once(tmp_path, recipe, form, dtype):
    safetensors = pytest.importorskip("safetensors.torch")
    model = layers()
    names = ft.fake_quantize_model(model, recipe, format=form, served_dtype=dtype)
    assert f"; values as served from --format {form}, decoded to {dtype}\n" in str(names) and "note:" not in str(names)
    trained = tmp_path / "trained"
    trained.mkdir()
    safetensors.save_file(model.state_dict(), trained / "model.safetensors")
    (trained / "config.json").write_text("{}")
    convert(trained, tmp_path / "served", recipe, format=form)
    for name, decoded in served.weights(tmp_path / "served", fp4kit.recipe(recipe)).items():
        w = model[name].weight
        w.sum().backward()
        expected = torch.from_numpy(decoded).to(getattr(torch, dtype)).float()
        assert_same_bits(to_numpy(w), to_numpy(expected))
        gradient = model[name].parametrizations.weight.original.grad
        assert w.dtype == torch.float32 and torch.equal(gradient, torch.ones_like(gradient))


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
