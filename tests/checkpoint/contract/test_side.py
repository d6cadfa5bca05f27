"""Test fp4kit.parity with paths: checkpoints, contract files, files of fp4kit.save and files of plain tensors."""

import json
import shutil

import numpy as np
import pytest
import synthetic
from changed_bytes import change
from exhaustive import half
from safetensors.numpy import load_file, save_file

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.cli import main
from fp4kit.contract.compare_layer import products
from fp4kit.contract.schema import FILE
from fp4kit.contract.sides import InputScale, Side, side_of
from fp4kit.evidence.testing import assert_same_bits

RNG = np.random.default_rng(0)
LEAVES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a directory with a small model (source), and the model in NVFP4 (served)."""
    folder = tmp_path_factory.mktemp("models")
    names = (*(f"model.layers.0.{leaf}" for leaf in LEAVES), "model.embed_tokens")
    tensors = {f"{name}.weight": RNG.standard_normal((64, 64), np.float32) for name in names}
    synthetic.write_model(folder / "source", {"model_type": "llama"}, tensors)
    convert(folder / "source", folder / "served", "nvfp4-te", format="modelopt")
    return folder


def test_a_contract_against_the_checkpoint_that_was_made_by_it(models):
    source, served = models / "source", models / "served"
    found = fp4kit.parity(served / FILE, served, weights=source)
    assert found.equal and not found.contracts.differences and len(found.layers) == 4
    contract = fp4kit.Contract.of(served)
    found = fp4kit.parity(contract.stating(shared_amax=()), served, weights=source)
    assert [layer.step for layer in found.differing] == ["amax"]
    found = fp4kit.parity(contract.stating(weights="nvfp4-compressed-tensors"), str(served), weights=str(source))
    assert {layer.step for layer in found.differing} == {"tensor scale"} and len(found.differing) == 3
    (served / FILE).rename(models / "away.json")
    assert fp4kit.parity(contract, served, weights=source).equal  # the recipe is inferred from the config
    (models / "away.json").rename(served / FILE)


@pytest.mark.parametrize(("container", "recipe"), [("modelopt", "static"), ("compressed-tensors", "static-divisor")])
def test_stored_input_scales_are_applied(models, tmp_path, container, recipe):
    """Inputs have an amax of about 4, and the stored scale stands for 8: only a static side uses it."""
    scale = 8 / 2688 if container == "modelopt" else 2688 / 8
    convert(models / "source", tmp_path / "served", "nvfp4-te", format=container, input_scale=8 / 2688)
    layer = "model.layers.0.mlp.down_proj"
    x = {layer: np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)}
    activations = f"nvfp4-vllm-{recipe}"
    static = fp4kit.Contract.of(tmp_path / "served").stating(activations=activations, unit="exact")
    assert static.input_scales == "static"
    served = (static, tmp_path / "served")
    found = fp4kit.parity(static, served, weights=models / "source", inputs=x)  # the trainer uses the stored scale
    assert found.equal and not any("stored input scales" in note for note in found.notes)
    dynamic = static.stating(input_scales="dynamic")
    found = fp4kit.parity(dynamic, served, weights=models / "source", inputs=x)
    (inputs,) = (one for one in found.layers if one.kind == "input")
    assert inputs.step == "amax" and inputs.count
    assert ", its own and rollout uses 8.0, which its stored input scale gives; use the same in" in inputs.setting
    assert [one.step for one in found.layers if one.name == layer and one.kind == "weight"] == ["product"]
    name = "input_scale" if container == "modelopt" else "input_global_scale"
    q = fp4kit.quantize_static(x[layer], activations, **{name: np.float32(scale)})
    assert_same_bits(q.packed, fp4kit.quantize(x[layer], activations, tensor_amax=8.0).packed)
    w = fp4kit.open_checkpoint(tmp_path / "served")[layer]
    stated = {layer: np.asarray(fp4kit.matmul(q, w, unit="exact"))}
    side = side_of("rollout", served)
    assert_same_bits(products(side, x[layer], w, True, layer), stated[layer])


def test_two_checkpoints_without_weights(models, tmp_path):
    convert(models / "source", tmp_path / "other", "nvfp4-te-4over6-mse-448", format="compressed-tensors")
    found = fp4kit.parity(models / "served", tmp_path / "other")
    assert {layer.kind for layer in found.layers} == {"weight"} and len(found.differing) == 3
    assert all(layer.step == "block scale" and layer.codes[0] for layer in found.differing)
    assert found.layers[0].name == "model.embed_tokens" and found.layers[0].equal
    plain = fp4kit.parity(models / "source", models / "served")
    assert all(layer.step == "quantization" for layer in plain.differing) and len(plain.differing) == 3


def test_stacks_of_experts_are_compared_per_expert(tmp_path):
    shapes = {"gate_up_proj": (2, 64, 64), "down_proj": (2, 64, 32)}
    stacks = {f"model.layers.0.mlp.experts.{n}": RNG.standard_normal(x, np.float32) for n, x in shapes.items()}
    synthetic.write_model(tmp_path / "source", {"model_type": "qwen3_moe", "num_experts": 2}, stacks)
    convert(tmp_path / "source", tmp_path / "served", "nvfp4-te", format="modelopt")
    found = fp4kit.parity(tmp_path / "served" / FILE, tmp_path / "served", weights=tmp_path / "source")
    assert found.equal and not found.notes[1:] and len(found.layers) == 6, str(found)
    assert found.layers[0].name == "model.layers.0.mlp.experts.0.down_proj"


def test_files_of_tensors(models, tmp_path):
    w = {"a": RNG.standard_normal((32, 64), np.float32)}
    fp4kit.save(tmp_path / "q.safetensors", {"a": fp4kit.quantize(w["a"], "mxfp4")})
    save_file(w, tmp_path / "w.safetensors")
    assert fp4kit.parity(fp4kit.Contract("mxfp4"), tmp_path / "q.safetensors", weights=tmp_path / "w.safetensors").equal
    save_file({"logits": w["a"] + 1}, tmp_path / "a.safetensors")
    save_file({"logits": w["a"] + 2}, tmp_path / "b.safetensors")
    found = fp4kit.parity(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.layers[0].kind == "tensor" and found.layers[0].step == "value"
    with pytest.raises(CheckpointError, match="does not exist"):
        fp4kit.parity(tmp_path / "none", tmp_path / "q.safetensors")
    damaged = bytearray((tmp_path / "q.safetensors").read_bytes())
    damaged[-40] ^= 1  # its parts must not be compared as plain tensors
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        fp4kit.parity(tmp_path / "damaged.safetensors", tmp_path / "damaged.safetensors")
    with pytest.raises(ValueError, match=r"weights is the contract .*; needs a model or a file of tensors"):
        fp4kit.parity(models / "served" / FILE, models / "served", weights=models / "served" / FILE)


def with_others(folder, **changes):
    """Write a model with a norm, a bias and a buffer into a new directory, and return the directory.

    changes: tensor name, with "_" in place of ".", -> its value; None to leave the tensor out.
    """
    tensors = {f"model.layers.0.{leaf}.weight": np.ones((32, 64), np.float32) for leaf in LEAVES}
    others = {"model.norm.weight": 1.0, "model.layers.0.mlp.down_proj.bias": 0.0, "model.inv_freq": 2.0}
    for name, value in others.items():
        value = changes.get(name.replace(".", "_"), value)
        if value is not None:
            tensors[name] = np.full(48, value, np.int64 if name == "model.inv_freq" else np.float32)
    synthetic.write_model(folder, {"model_type": "llama"}, tensors)
    return folder


def test_norms_and_biases_of_checkpoints(tmp_path):
    """A refit that sends only the matrices leaves norms and biases stale; parity of checkpoints finds them."""
    source = with_others(tmp_path / "source")
    stale = with_others(tmp_path / "stale", model_norm_weight=1.5, model_layers_0_mlp_down_proj_bias=0.25)
    for folder in (source, stale):
        convert(folder, folder.with_suffix(".q"), "nvfp4-te", format="modelopt")
    served, other = source.with_suffix(".q"), stale.with_suffix(".q")
    found = fp4kit.parity(served, served)
    assert found.equal and found.verdict.startswith("3 layers and 3 other tensors are equal in every bit")
    names = ["model.layers.0.mlp.down_proj.bias", "model.norm"]
    contract = fp4kit.Contract.of(served)
    for train, weights in ((served, None), (source, None), (contract, source), (lambda name, x: x, source)):
        found = fp4kit.parity(train, stale if train is source or callable(train) else other, weights=weights)
        assert [(layer.name, layer.kind) for layer in found.differing] == [(name, "other tensor") for name in names]
        assert found.verdict.startswith("2 of 3 other tensors differ; compared 6,144 of 6,144 elements in 3 layers")
    late = fp4kit.parity(served, other, seconds=0)  # no time for norms
    assert late.equal and "3 tensors besides the layers, because the time had passed" in late.notes
    assert "other tensor model.norm: first step that differs: value, 48 of 48" in str(found.differing[1])


def test_tensors_that_one_checkpoint_lacks(tmp_path):
    """They are noted, because not every file has buffers. A mapping of tensors has norms under their own names."""
    source, without = with_others(tmp_path / "a"), with_others(tmp_path / "b", model_inv_freq=None)
    found = fp4kit.parity(source, without)
    assert found.equal and "1 tensor besides the layers, which rollout does not have: model.inv_freq" in found.notes
    tensors = load_file(source / "model.safetensors")
    assert fp4kit.parity(tensors, source).equal and fp4kit.parity(source, tensors).equal
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    found = fp4kit.parity(source, tensors)
    assert [layer.name for layer in found.differing] == ["model.norm"] and not found.missing
    tensors["model.norm.weight"] = np.ones(47, np.float32)
    (layer,) = fp4kit.parity(source, tensors).differing
    assert layer.name == "model.norm" and layer.setting == "train has the shape (48,), and rollout (47,)"
    contract = fp4kit.Contract("nvfp4-te")
    convert(source, tmp_path / "q", "nvfp4-te", format="modelopt")
    weights = {name: x for name, x in tensors.items() if x.ndim == 2}
    found = fp4kit.parity(contract, tmp_path / "q", weights=weights)
    assert any(text.startswith("3 tensors besides the layers, which train does not have: ") for text in found.notes)


def test_input_scales_of_checkpoints(tmp_path):
    """Input scales are part of a server's arithmetic, so parity of checkpoints compares them."""
    source = with_others(tmp_path / "source")
    for name, scale in (("a", 0.5), ("b", 0.25)):
        convert(source, tmp_path / name, "nvfp4-te", format="modelopt", input_scale=scale)
    found = fp4kit.parity(tmp_path / "a", tmp_path / "b")
    assert {layer.name for layer in found.differing} == {f"model.layers.0.{leaf}.input_scale" for leaf in LEAVES}


def raw(folder, **tensors):
    """Write a model directory with a matrix and further tensors; return the directory.

    tensors: name -> (dtype in safetensors, shape, bytes). "__" in a name stands for a dot.
    """
    folder.mkdir()
    tensors = {"m.up_proj.weight": ("BF16", (32, 64), bytes(4096)), **tensors}
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        place = (len(data), len(data) + len(content))
        header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        data += content
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def numbers(*values, dtype):
    return np.array(values, dtype).tobytes()


ONE, LARGE = numbers(1.0, dtype="f4"), numbers(2**60 + 1, dtype="i8")
PAIRS = {  # case -> (dtype, shape, bytes) of both sides, and whether they are equal
    "a scalar and one element": (("F32", (), ONE), ("F32", (1,), ONE), True),
    "large integers": (("I64", (1,), numbers(2**60, dtype="i8")), ("U64", (1,), LARGE), False),
    "an integer and a float": (("I64", (1,), LARGE), ("F32", (1,), numbers(2.0**60, dtype="f4")), False),
    "FP8 and its value": (("F8_E4M3", (1,), b"\x38"), ("F32", (1,), ONE), True),
    "FP8 and its bits": (("F8_E4M3", (1,), b"\x38"), ("F32", (1,), numbers(56.0, dtype="f4")), False),
    "two NaN": (("F8_E4M3", (1,), b"\x7f"), ("F8_E4M3", (1,), b"\xff"), True),
    "formats of FP8": (("F8_E4M3", (1,), b"\x38"), ("F8_E5M2", (1,), b"\x38"), False),
    "signed and unsigned": (("U8", (1,), b"\xff"), ("I8", (1,), b"\xff"), False),
    "equal integers": (("I8", (1,), b"\xff"), ("I16", (1,), b"\xff\xff"), True),
    "shapes": (("F8_E5M2", (2, 4), bytes(8)), ("F8_E5M2", (4, 2), bytes(8)), False),
}


@pytest.mark.parametrize("case", PAIRS)
def test_other_tensors_of_every_dtype(tmp_path, case):
    a, b, equal = PAIRS[case]
    found = fp4kit.parity(raw(tmp_path / "a", x=a), raw(tmp_path / "b", x=b))
    assert found.equal == equal and [layer.name for layer in found.layers] == ["m.up_proj", "x"]
    assert equal or found.differing[0].kind == "other tensor"


def test_names_of_other_tensors(tmp_path):
    """Names that differ only in ".weight" or a wrapper stay apart, and a layer that one side lacks stays missing."""
    one, two = (("F32", (1,), numbers(x, dtype="f4")) for x in (1, 2))
    a = raw(tmp_path / "a", model__norm=one, model__norm__weight=two)
    b = raw(tmp_path / "b", model__norm=two, model__norm__weight=two)
    assert len(fp4kit.parity(a, b).differing) == 1
    matrix = ("BF16", (32, 64), bytes(4096))
    found = fp4kit.parity(raw(tmp_path / "c", m__g__weight=matrix, m__g=one), raw(tmp_path / "d"))
    assert not found.equal and found.missing == ("m.g: not in rollout",)
    c = raw(tmp_path / "e", **{"x.block_sparse_moe.experts.0.w1.bias": one})
    d = raw(tmp_path / "f", **{"x.mlp.experts.0.gate_proj.bias": two})
    assert [layer.name for layer in fp4kit.parity(c, d).differing] == ["x.mlp.experts.0.gate_proj.bias"]


GATES = ["model.layers.1.mlp.gate"]
ATTENTION = "model.layers.0.self_attn.q_proj"
# Exclusion lists of a model, and the layer that vLLM leaves unquantized in the second alone; None if there is none.
LISTS = {
    "modelopt": (
        ("lm_head", *GATES),
        (["*lm_head", "*.mlp.gate"], None),
        (["lm_head", *GATES, "*.self_attn.*"], ATTENTION),
        (["lm_head", *GATES, "self_attn"], ATTENTION),
        (["lm_head", *GATES, "mlp.gate"], "model.layers.0.mlp.gate_proj"),  # swallows gate_up_proj (verl 7519)
    ),
    "compressed-tensors": (
        ("lm_head", *GATES),
        (["re:.*lm_head", r"re:model\.layers\.\d\.mlp\.gate$"], None),
        (["lm_head", *GATES, "re:.*self_attn"], ATTENTION),
        (["lm_head", *GATES, "self_attn"], None),
    ),
}


@pytest.mark.parametrize("format", half(LISTS))
def test_exclusions_are_compared_as_engines_read_them(format, tmp_path, capsys):
    """Lists that are spelled differently are equal if they mean the same layers to every engine, and else differ."""
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", "nvfp4-te", format=format)
    written, *others = LISTS[format]
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert sorted(written) == config["quantization_config"]["ignore"]
    for i, (patterns, layer) in enumerate(others):
        shutil.copytree(tmp_path / "a", tmp_path / f"b{i}")
        declared = {**config["quantization_config"], "ignore": patterns}
        (tmp_path / f"b{i}/config.json").write_text(json.dumps({**config, "quantization_config": declared}))
        for sides in ((tmp_path / "a", tmp_path / f"b{i}"), (fp4kit.Contract.of(tmp_path / "a"), tmp_path / f"b{i}")):
            found = fp4kit.parity(*sides, weights=tmp_path / "m")
            assert found.equal == (layer is None), (patterns, found.exclusions)
            told = [text for text in found.exclusions if "vLLM" in text.split(" lea")[0] and "in rollout" in text]
            assert len({text.partition(" lea")[2].partition(" ")[2] for text in found.exclusions}) == len(
                found.exclusions
            )
            assert bool(told) == (layer is not None) and all(layer.rpartition(".")[0] in text for text in told)
        assert main(["parity", str(tmp_path / "a"), str(tmp_path / f"b{i}")]) == (layer is not None)
        assert ("exclusions: " in capsys.readouterr().out) == (layer is not None)


@pytest.mark.parametrize("formats", [("modelopt", "compressed-tensors"), ("compressed-tensors", "modelopt")])
def test_a_lossless_rename_differs_by_rounding_alone(formats, tmp_path):
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", "nvfp4-modelopt", format=formats[0])
    convert(tmp_path / "a", tmp_path / "b", format=formats[1])
    found = fp4kit.parity(tmp_path / "a", tmp_path / "b")
    values = sum(layer.values[0] for layer in found.layers)
    assert values and found.verdict.startswith(f"codes and scales are equal in all layers; {values:,} of ")
    total = found.sampled.split()[1]  # without the norms, which are equal
    assert f"{values:,} of {total} values differ by rounding, in " in found.verdict and not found.exclusions
    scale = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}[formats[1]]
    change(tmp_path / "b", f"layers.0.mlp.down_proj.{scale}", lambda value: value * 2)
    assert "codes and scales are equal" not in fp4kit.parity(tmp_path / "a", tmp_path / "b").verdict


@pytest.mark.parametrize("recipe", ["nvfp4-compressed-tensors-static", "nvfp4-vllm-static-divisor"])
def test_stored_divisors_are_used_as_they_are(recipe):
    """No amax gives some of the divisors that engines store. Inputs have the engine's codes under all of them."""
    x, r = RNG.standard_normal((4, 64), np.float32), fp4kit.recipe(recipe)
    amaxes = RNG.uniform(0.1, 30, 64).astype(np.float32)
    contract, rules = fp4kit.Contract(activations=recipe, input_scales="static"), set()
    for divisor in np.float32(2688) / amaxes:
        side = Side("rollout", contract)
        side.input_scales = {"a": InputScale(divisor, True)}
        one, amax = side.of_inputs("a", r, x.dtype)
        rules.add(one.tensor_rule)
        expected = fp4kit.quantize_static(x, recipe, input_global_scale=divisor)
        assert_same_bits(fp4kit.quantize(x, one, tensor_amax=amax).packed, expected.packed)
    assert rules == {r.tensor_rule, "divisor"}
