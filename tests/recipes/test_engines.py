"""Test recipes of activations and of loaded weights against what inference engines computed (tests/data/engines)."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree, as_large_ones
from inputs import BF16, extreme, nonfinite

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import recipe
from fp4kit.recipes.schema import as_stored, by_divisor, takes_divisor

FOLDER = Path(__file__).resolve().parents[1] / "data" / "engines"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]
TYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


@pytest.fixture(autouse=True)
def compiled_engine(monkeypatch):
    """Let the compiled engine compute small arrays too."""
    as_large_ones(monkeypatch)


@cache
def arrays(file):
    """Return {key: array} of a file of recordings, where bit patterns have the dtype that their key names."""
    with np.load(FOLDER / f"{file}.npz") as stored:
        found = {key.partition(":"): stored[key] for key in stored.files}
    return {key: array.view(TYPES[type]) if type else array for (key, _, type), array in found.items()}


def cases(scheme, file="transformers", part="x_fake"):
    """Yield (name of the input, activations, what the engine made of them) of a scheme."""
    found = arrays(file)
    for key, expected in found.items():
        which, name, what = key.split("/")
        if which == scheme and what == part:
            yield name, found[f"{'input' if file == 'transformers' else scheme}/{name}/x"], expected


def test_nvfp4_activations_of_transformers():
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    dtypes = set()
    for name, x, expected in cases("nvfp4-w4a4"):
        q = fp4kit.quantize_static(x, "nvfp4-compressed-tensors-static", input_global_scale=scale)
        assert_same_bits(fp4kit.dequantize(q), expected, name)
        assert_same_bits(fp4kit.fake_quantize(x, q.recipe, tensor_amax=q.tensor_amax), expected, name)
        dtypes.add(str(x.dtype))
    assert dtypes == {"float32", "float16", "bfloat16"}


def test_a_scale_in_the_dtype_of_x_gives_other_activations():
    """nvfp4-compressed-tensors rounds the tensor scale to the dtype of x, as for weights, so it is not the recipe."""
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    own, static = recipe("nvfp4-compressed-tensors"), recipe("nvfp4-compressed-tensors-static")
    x = next(x for name, x, _ in cases("nvfp4-w4a4") if name == "heavy_bf16")
    amax = fp4kit.quantize_static(x, static, input_global_scale=scale).tensor_amax
    assert not (
        fp4kit.fake_quantize(x, own, tensor_amax=amax) == fp4kit.fake_quantize(x, static, tensor_amax=amax)
    ).all()


def stated_nvfp4(x, divisor):
    """Return x fake-quantized to NVFP4 as compressed-tensors does with a stored input_global_scale."""
    T, gs, blocks = x.dtype.type, np.float32(divisor), x.reshape(-1, 16)
    with np.errstate(all="ignore"):
        sixths = (np.abs(blocks).max(axis=1, keepdims=True) / T(6)).astype(np.float32)
        s = np.clip(gs * sixths, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        s = np.where(s == 0, np.float32(0.125), s) / gs
        q = np.clip(blocks.astype(np.float32) / s + np.float32(0), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return (q.astype(np.float32) * s).astype(x.dtype).reshape(x.shape)


def divisors(dtype):
    """Return divisors that llm-compressor computes in a dtype, and others that follow from no amax."""
    amaxes = np.exp2(np.random.default_rng(2).uniform(-6, 8, 400)).astype(dtype)
    with np.errstate(all="ignore"):
        found = (dtype.type(1) / amaxes).astype(dtype) * dtype.type(2688)
    drawn = np.exp2(np.random.default_rng(3).uniform(-20, 20, 40)).astype(np.float32)
    found = found.astype(np.float32)
    return [*found[np.isfinite(found)], *drawn, *np.float32([3e38, 1e-37, 2.0**-126, 1e-40])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_divisor_is_used_as_it_is(dtype):
    torch, wrapped = pytest.importorskip("torch"), pytest.importorskip("fp4kit.torch")
    drawn = np.random.default_rng(4).standard_normal((4, 64)).astype(dtype)
    edges = np.concatenate([np.zeros((1, 64)), -np.zeros((1, 64)), np.full((1, 64), -1e-6), drawn]).astype(dtype)
    others = 0
    for divisor in divisors(dtype):
        q = fp4kit.quantize_static(edges, "nvfp4-compressed-tensors-static", input_global_scale=divisor)
        assert_same_bits(fp4kit.dequantize(q), stated_nvfp4(edges, divisor), f"divisor {divisor}")
        others += q.recipe != recipe("nvfp4-compressed-tensors-static")
        with np.errstate(over="ignore"):
            assert q.tensor_scale == np.float32(1) / divisor
    assert others > (5 if dtype == np.float32 else 50)  # divisors that no amax gives
    fitting = [r for r in map(recipe, fp4kit.recipes()) if takes_divisor(r)]
    assert {"nvfp4-compressed-tensors", "nvfp4-vllm-emulation", "nvfp4-auto-round"} <= {r.id for r in fitting}
    for r in fitting:  # in every engine, and in one step
        given = {"input_global_scale": np.float32(700.123)}
        values = agree(fp4kit.fake_quantize, edges, r, **given)
        assert_same_bits(agree(fp4kit.dequantize, agree(fp4kit.quantize_static, edges, r, **given)), values)
        tensor = torch.from_numpy(edges.astype(np.float32)).to(getattr(torch, str(dtype)))
        found = wrapped.fake_quantize(tensor, r, **given).float().numpy().astype(dtype)
        assert_same_bits(found, values)


def test_divisors_in_the_installed_library():
    pytest.importorskip("compressed_tensors")
    torch, wrapped = pytest.importorskip("torch"), pytest.importorskip("fp4kit.torch")
    from compressed_tensors.quantization import QuantizationArgs, fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    fixed = {"strategy": "tensor_group", "group_size": 16, "dynamic": "local", "scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, **fixed)
    for dtype in DTYPES:
        x = torch.from_numpy(np.concatenate([extreme()[:8], nonfinite()[1:5]])).to(getattr(torch, str(dtype)))[None]
        x = torch.where(x.isfinite(), x, 1)
        for divisor in divisors(dtype)[::20]:
            scales = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), torch.tensor([divisor]))
            expected = fake_quantize(x, *scales, args, torch.tensor([divisor]))
            name = "nvfp4-compressed-tensors-static"
            assert torch.equal(wrapped.fake_quantize(x, name, input_global_scale=divisor), expected)


def test_a_model_trains_with_the_divisors_of_a_checkpoint():
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    torch.manual_seed(0)
    static, given = "nvfp4-compressed-tensors-static", {"0": 735.1795, "2": torch.tensor([513.37])}
    plain = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    model = copy.deepcopy(plain)
    fake_quantize_model(model, "nvfp4-compressed-tensors", activations=static, input_global_scales=given)
    x = torch.randn(4, 64)
    hidden = torch.from_numpy(stated_nvfp4(x.numpy(), 735.1795))
    hidden = torch.nn.functional.linear(hidden, model[0].weight, model[0].bias).relu()
    hidden = torch.from_numpy(stated_nvfp4(hidden.detach().numpy(), np.float32(513.37)))
    assert torch.equal(model(x), torch.nn.functional.linear(hidden, model[2].weight, model[2].bias))
    amaxes = dict.fromkeys("02", 3.0)
    for options, kind, message in (
        ({"activations": None}, TypeError, "input_global_scales are given without activations"),
        ({"input_amaxes": amaxes}, ValueError, "input_amaxes and input_global_scales are both given"),
        ({"input_global_scales": [1, 2]}, TypeError, "input_global_scales is list; needs a dict of layer"),
        ({"input_global_scales": {"0": 1}}, ValueError, "no entry for 1 of 2 layers: 2"),
        ({"input_global_scales": {"0": 1, "2": 0}}, ValueError, "input_global_scales['2'] is 0; needs a positive"),
        ({"input_global_scales": {"0": 1, "2": float("nan")}}, ValueError, "input_global_scales['2'] is nan"),
        ({"activations": "nvfp4-te"}, ValueError, "nvfp4-te takes no input_global_scales; needs a recipe such as"),
    ):
        usual = {"activations": static, "input_global_scales": given}
        with pytest.raises(kind, match=re.escape(message)):
            fake_quantize_model(copy.deepcopy(plain), "nvfp4-compressed-tensors", **usual | options)


def test_mistakes_with_divisors():
    x, static = np.ones((2, 32), np.float32), "nvfp4-compressed-tensors-static"
    with pytest.raises(ValueError, match="tensor_amax and input_global_scale are both given"):
        fp4kit.fake_quantize(x, static, tensor_amax=1, input_global_scale=1)
    for wrong in (0, -1, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"input_global_scale is .*; needs a positive float32 number"):
            fp4kit.fake_quantize(x, static, input_global_scale=wrong)
    for name in ("nvfp4-te", "nvfp4-auto-round-opt", "mxfp4-ocp", "fp8-modelopt"):
        with pytest.raises(ValueError, match=f"{name} takes no input_global_scale"):
            fp4kit.fake_quantize(x, name, input_global_scale=1)
    with pytest.raises(ValueError, match="by divisor needs the stored divisor as tensor_amax"):
        fp4kit.quantize(x, by_divisor(recipe(static)))
    for field, rule in (("decode_rule", "te"), ("block_rule", "modelopt_static")):
        with pytest.raises(ValueError, match="read no tensor amax"):
            replace(by_divisor(recipe(static)), **{field: rule})


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_divisors_in_wrappers(name):
    library = pytest.importorskip(name)
    wrapped = pytest.importorskip(f"fp4kit.{name}").fake_quantize
    x, static = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32), "nvfp4-compressed-tensors-static"
    array = library.from_numpy(x) if name == "torch" else library.numpy.asarray(x)
    expected = stated_nvfp4(x, 513.37)
    assert_same_bits(np.asarray(wrapped(array, static, input_global_scale=513.37)), expected)
    with pytest.raises(ValueError, match="gives no amax to clip by"):
        wrapped(array, static, input_global_scale=1.0, pass_through=False)
    with pytest.raises(ValueError, match="both given"):
        wrapped(array, static, input_global_scale=1.0, tensor_amax=1.0)
    if name == "jax":
        jitted = library.jit(lambda x, divisor: wrapped(x, static, input_global_scale=divisor))
        assert_same_bits(np.asarray(jitted(array, np.float32(513.37))), expected)


# Both schemes of layers have activations per token; a 2-d input then has one scale.
FP8 = {
    ("fp8-dynamic", "x_fake"): "fp8-compressed-tensors-token",
    ("fp8-tensor", "x_fake"): "fp8-compressed-tensors-token",
    ("fp8-dynamic", "x_fake_2d"): "fp8-compressed-tensors",
    ("fp8-tensor", "x_fake_2d"): "fp8-compressed-tensors",
    ("fp8-block", "x_fake"): "fp8-compressed-tensors-group",
    ("mxfp4-w4a8", "x_fake"): "fp8-compressed-tensors-group",
}


@pytest.mark.parametrize(("scheme", "part"), FP8)
def test_fp8_activations_of_transformers(scheme, part):
    name, dtypes = FP8[scheme, part], set()
    for case, x, expected in cases(scheme, part=part):
        assert_same_bits(agree(fp4kit.fake_quantize, x, name), expected, case)
        dtypes.add(x.dtype)
    assert dtypes == set(DTYPES)


def stated(x, rows):
    """Return x (rows, n) fake-quantized to FP8 as compressed-tensors does, every step in the dtype of x."""
    T, groups = x.dtype.type, x.reshape(rows, -1)
    with np.errstate(all="ignore"):
        s = np.abs(groups).max(axis=-1, keepdims=True) / T(448)
        s = np.where(s == 0, ml_dtypes.finfo(x.dtype).eps, s).astype(x.dtype)
        q = np.clip(groups / s + T(0), T(-448), T(448)).astype(ml_dtypes.float8_e4m3fn)
        return (q.astype(x.dtype) * s).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", ["", "-token", "-group"])
def test_fp8_activations_are_computed_in_the_dtype_of_x(suffix, dtype):
    ties = np.float32([448, *(n / 2 for n in range(1, 60)), *(-n / 2 for n in range(1, 60)), 0, -0.0] + [1] * 7)
    zeros = np.where(np.arange(128) % 2, np.float32(0), np.float32(-0.0))
    special = np.float32([ties, zeros, zeros + np.float32(2.0**-24), ties * np.float32(2.0**-140)])
    for x in (extreme(), adversarial_blocks(np.float32, seed=5)[:, :128], special, special[1:2]):
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        x = x[np.isfinite(x.astype(np.float32)).all(axis=-1)]
        rows = {"": 1, "-token": len(x), "-group": x.size // 128}[suffix]
        assert_same_bits(agree(fp4kit.fake_quantize, x, f"fp8-compressed-tensors{suffix}"), stated(x, rows))
    x = nonfinite().astype(dtype)
    values = agree(fp4kit.fake_quantize, x, "fp8-compressed-tensors-token").astype(np.float32)
    is_lost = ~np.isfinite(x.astype(np.float32)).all(axis=-1)
    assert (np.isnan(values).all(axis=-1) == is_lost).all() and 0 < is_lost.sum() < 128


@pytest.mark.parametrize("part", ["x_fake", "fake"])
def test_fp8_per_token_and_per_channel_of_model_optimizer(part):
    scheme, found, count = "FP8_PER_CHANNEL_PER_TOKEN_CFG", arrays("modelopt"), 0
    if part == "x_fake":
        pairs = [(x, expected) for _, x, expected in cases(scheme, "modelopt")]
    else:
        pairs = [(found[f"{scheme}/weight/w_{dtype}"], found[f"{scheme}/weight/fake_{dtype}"]) for dtype in DTYPES]
    differing = 0
    for x, expected in pairs:
        assert_same_bits(agree(fp4kit.fake_quantize, x, "fp8-modelopt-channel-cpu"), expected)
        differing += (fp4kit.fake_quantize(x, "fp8-modelopt-channel") != expected).sum()
        count += x.size
    assert 0 < differing < count / 4  # on a GPU, 448 / amax is one division


LOADED = {"fp8-dynamic": "fp8-modelopt-channel", "fp8-tensor": "fp8-modelopt", "fp8-block": "fp8-deepgemm-block"}


def loaded(scheme, rule, dtype):
    """Return the stored FP8 weight of a scheme as a Quantized that decodes by a rule, and the weight of the engine."""
    found = {key.split("/")[-1]: array for key, array in arrays("transformers").items() if key.startswith(scheme)}
    codes, scale = found["weight"].view(np.uint8), found["weight_scale"]
    scale = np.repeat(scale, 24, 0) if scheme == "fp8-block" else scale.reshape(-1 if scheme == "fp8-dynamic" else ())
    r = replace(recipe(LOADED[scheme]), decode_rule=rule)
    facts = {"recipe": r, "shape": codes.shape, "dtype": np.dtype(dtype), "axis": -1}
    q = Quantized(packed=codes, block_scale=None, tensor_scale=scale, tensor_amax=None, **facts)
    return q, found[f"decoded_{dtype}"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", LOADED)
def test_fp8_weights_under_scales_in_the_dtype_of_the_model(scheme, dtype):
    q, expected = loaded(scheme, "fp8_compressed_tensors", dtype)
    assert_same_bits(agree(fp4kit.dequantize, q), expected)
    q, _ = loaded(scheme, "product", dtype)
    assert (fp4kit.dequantize(q) == expected).all() == (dtype == np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["compressed_tensors_bfloat16", "stored_divisor_bfloat16"])
def test_nvfp4_weights_that_are_decoded_to_bfloat16_first(rule, dtype):
    found = {key.split("/")[-1]: a for key, a in arrays("transformers").items() if key.startswith("nvfp4-w4a16")}
    r = replace(recipe("nvfp4-compressed-tensors"), decode_rule=rule)
    scale, expected = np.float32(1) / found["weight_global_scale"].reshape(()), found["decoded_bfloat16"]
    parts = {"packed": found["weight_packed"], "block_scale": found["weight_scale"].view(np.uint8)}
    parts |= {"tensor_scale": scale, "tensor_amax": None, "recipe": r}
    q = Quantized(**parts, shape=expected.shape, dtype=np.dtype(dtype), axis=-1)
    assert_same_bits(agree(fp4kit.dequantize, q), expected.astype(dtype))
    once = fp4kit.dequantize(replace(q, recipe=recipe("nvfp4-compressed-tensors")))
    assert (once == expected.astype(dtype)).all() == (dtype == BF16)


BY_LOADERS = {
    "fp8_compressed_tensors": "fp8-modelopt-channel",
    "compressed_tensors_bfloat16": "nvfp4-compressed-tensors",
    "stored_divisor_bfloat16": "nvfp4-te",
}


def test_float32_parameters_train_with_the_scales_of_a_served_dtype():
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    r = replace(recipe("fp8-modelopt-channel"), id="loaded", decode_rule="fp8_compressed_tensors")
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    w = model[0].weight.detach().numpy().copy()
    fake_quantize_model(model, r, format="compressed-tensors", served_dtype="bfloat16")
    q = fp4kit.quantize(w, "fp8-modelopt-channel")
    expected = q.packed.view(ml_dtypes.float8_e4m3fn).astype(BF16) * q.tensor_scale.astype(BF16)[:, None]
    assert_same_bits(model[0].weight.detach().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", BY_LOADERS)
def test_the_rule_of_a_loader_stays_for_training(rule, dtype):
    name = BY_LOADERS[rule]
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    r = replace(recipe(name), id=f"{name}-loaded", decode_rule=rule)
    assert as_stored(r, True) == as_stored(r, False) == r
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).to(getattr(torch, str(dtype)))
    w = model[0].weight.detach().float().numpy().astype(dtype)
    assert fake_quantize_model(model, r, format="compressed-tensors") == ["0.weight"]
    found = model[0].weight.detach().float().numpy().astype(dtype)
    q = fp4kit.quantize(w, r)
    if rule == "fp8_compressed_tensors":
        codes = q.packed.view(ml_dtypes.float8_e4m3fn).astype(dtype)
        expected = codes * q.tensor_scale.astype(dtype)[:, None]
    else:
        expected = fp4kit.dequantize(replace(q, recipe=as_stored(recipe(name), True)), "bfloat16").astype(dtype)
    assert_same_bits(found, expected)


def test_an_engine_takes_the_divisors_of_a_checkpoint():
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).bfloat16()
    names = {"engine": "transformers", "scheme": "nvfp4-w4a4"}
    fake_quantize_model(model, **names, input_global_scales={"0": 513.37})
    x = torch.randn(4, 64).bfloat16()
    inputs = torch.from_numpy(stated_nvfp4(x.float().numpy().astype(BF16), 513.37).astype(np.float32)).bfloat16()
    assert torch.equal(model(x), torch.nn.functional.linear(inputs, model[0].weight))


@pytest.mark.parametrize("scheme", LOADED)
def test_an_fp8_model_trains_with_the_logits_of_transformers(scheme, tmp_path):
    weights, activations = LOADED[scheme], FP8[scheme, "x_fake"]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    from fp4kit.checkpoint import convert
    from fp4kit.torch import fake_quantize_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "served", recipe=weights, format="compressed-tensors")
    loaded_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.bfloat16)
    r = replace(recipe(weights), id="loaded", decode_rule="fp8_compressed_tensors")
    names = fake_quantize_model(model, r, format="compressed-tensors", activations=activations)
    assert len(names) == 7
    tokens = torch.arange(64).reshape(4, 16) * 5 % 32
    with torch.no_grad():
        expected = loaded_model(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
