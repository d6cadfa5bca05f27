"""Test FakeQuantSettings, and the plan of quantization-aware training: which parameters are quantized, and how."""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
import synthetic
from inputs import BF16, INPUTS, ordinary
from together import together

import fp4kit
from fp4kit import qat as plan
from fp4kit.checkpoint import make_plan
from fp4kit.checkpoint.model.weights import has_transposed_stacks
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.qat import QuantizedNames
from fp4kit.training.settings import EXPERT_WEIGHTS, FakeQuantSettings

MXFP4, INT4 = "OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
MXFP4_SIZE, INT4_SIZE = "OPEN_TRAINING_MXFP4_BLOCK_SIZE", "OPEN_TRAINING_INT4_GROUP_SIZE"
EXPERT = "decoder.layers.0.mlp.experts.linear_fc1.weight3"


def from_environment(**options):
    return FakeQuantSettings.from_environment(options)


@pytest.mark.parametrize(
    "environ", [{}, {MXFP4: "0"}, {MXFP4: "", INT4: " 0 "}, {MXFP4_SIZE: "16", INT4_SIZE: "64"}], ids=str
)
def test_off_by_default(environ):
    settings = from_environment(**environ)
    assert settings.recipe is None and settings.resolved is None
    assert not settings.is_quantized(EXPERT)
    x, grad = object(), object()
    assert settings.fake_quantize(EXPERT, x) is x
    assert settings.backward(EXPERT, grad, x) is grad


@pytest.mark.parametrize(
    "environ, recipe, size",
    [
        ({MXFP4: "1"}, "mxfp4-flashinfer", 32),
        ({MXFP4: "1", MXFP4_SIZE: "16", INT4: "0"}, "mxfp4-flashinfer", 16),
        ({INT4: "1"}, "int4-qat", 128),
        ({INT4: "1", INT4_SIZE: "32", MXFP4_SIZE: "64"}, "int4-qat", 32),
    ],
    ids=str,
)
def test_flags(environ, recipe, size):
    settings = from_environment(**environ)
    assert settings.resolved == dataclasses.replace(fp4kit.recipe(recipe), block=(1, size))
    assert settings.parameters == EXPERT_WEIGHTS and settings.pass_through
    x = ordinary(1, (32, 256), BF16)
    assert_same_bits(settings.fake_quantize(EXPERT, x), fp4kit.fake_quantize(x, settings.resolved))
    assert settings.fake_quantize("decoder.layers.0.mlp.router.weight", x) is x


def test_the_environment_of_the_process(monkeypatch):
    for name in (MXFP4, INT4, MXFP4_SIZE, INT4_SIZE):
        monkeypatch.delenv(name, raising=False)
    assert FakeQuantSettings.from_environment().recipe is None
    monkeypatch.setenv(INT4, "1")
    settings = FakeQuantSettings.from_environment(parameters=("*.w",), exclude=("b.*",), pass_through=False)
    assert settings == FakeQuantSettings("int4-qat", 128, ("*.w",), ("b.*",), False)


def test_both_flags_are_an_error_at_once():
    with pytest.raises(ValueError, match=re.escape(f"{MXFP4} and {INT4} are both '1'")):
        from_environment(**{MXFP4: "1", INT4: "1"})


@together("name", [MXFP4, INT4])
@together("value", ["yes", "true", "2", "-1", "1.0", "on"])
def test_nonsense_flags(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; needs 0 or 1")):
        from_environment(**{name: value})


@together("name, default", [(MXFP4_SIZE, 32), (INT4_SIZE, 128)])
@together("value", ["0", "-32", "33", "32.0", "thirty", "1e2", "²", "+32", "0x20"])
@together("flags", [{}, {MXFP4: "1"}, {INT4: "1"}])
def test_nonsense_sizes_also_where_the_flag_is_off(name, default, value, flags):
    message = f"{name} is {value!r}; needs a positive even number, such as {default}"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_environment(**flags, **{name: value})


@pytest.mark.parametrize(
    "name, quantized",
    [
        (EXPERT, True),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", True),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias3", False),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj", False),  # stacks of experts have either orientation
    ],
)
def test_experts_are_what_the_flags_mean(name, quantized):
    assert from_environment(**{INT4: "1"}).is_quantized(name) is quantized


def test_patterns():
    settings = FakeQuantSettings("nvfp4-te", parameters=["*.weight"], exclude=["lm_head.*", "*.norm.*"])
    assert settings.parameters == ("*.weight",)
    names = ["a.weight", "a.bias", "lm_head.weight", "x.norm.weight", "a.WEIGHT"]
    assert [name for name in names if settings.is_quantized(name)] == ["a.weight"]
    assert FakeQuantSettings("nvfp4-te").is_quantized("anything")


def test_settings_are_frozen_and_hashable():
    settings = FakeQuantSettings("mxfp4", block_size=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.recipe = None
    assert hash(settings) == hash(FakeQuantSettings("mxfp4", block_size=64))
    assert dataclasses.replace(settings, block_size=16).resolved.block == (1, 16)
    assert FakeQuantSettings(fp4kit.recipe("mxfp4")).resolved is fp4kit.recipe("mxfp4")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"recipe": "nvfp4-tee"}, "no recipe is called 'nvfp4-tee'"),
        ({"recipe": "mxfp4", "block_size": 0}, "block_size is 0; needs a positive even number"),
        ({"recipe": "mxfp4", "block_size": 31}, "block_size is 31; needs a positive even number"),
        ({"recipe": "mxfp4", "block_size": "32"}, "block_size is '32'; needs a positive even number"),
        ({"recipe": "mxfp4", "block_size": 32.0}, "block_size is 32.0; needs a positive even number"),
        ({"block_size": 32}, "block_size is 32, but recipe None has no blocks"),
        ({"recipe": "nvfp4-te-2d", "block_size": 32}, "block_size is 32, but recipe 'nvfp4-te-2d' has no blocks of"),
        ({"recipe": "int8-modelopt", "block_size": 32}, "block_size is 32, but recipe 'int8-modelopt' has no blocks"),
        ({"recipe": "mxfp4", "parameters": "*.weight"}, "parameters is '*.weight'; needs a tuple of wildcards"),
        ({"recipe": "mxfp4", "exclude": (1,)}, "exclude is (1,); needs a tuple of wildcards"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FakeQuantSettings(**arguments)


def test_errors_name_the_parameter():
    settings = FakeQuantSettings("mxfp4", pass_through=False)
    w = np.zeros((2, 33), np.float32)
    with pytest.raises(ValueError, match=re.escape("a.weight: fake_quantize: axis 1 has length 33")):
        settings.fake_quantize("a.weight", w)
    with pytest.raises(ValueError, match=re.escape("a.weight: fake_quantize_backward: axis 1 has length 33")):
        settings.backward("a.weight", w, w)
    with pytest.raises(TypeError, match=re.escape("a.weight: fake_quantize: x is int32")):
        settings.fake_quantize("a.weight", np.zeros((2, 32), np.int32))


def test_tensor_amax_and_clipping():
    settings = FakeQuantSettings("nvfp4-te", parameters=("w",), pass_through=False)
    w, grad, amax = ordinary(2), ordinary(3), np.float32(2)
    y = settings.fake_quantize("w", w, tensor_amax=amax)
    assert_same_bits(y, fp4kit.fake_quantize(w, "nvfp4-te", tensor_amax=amax))
    expected = fp4kit.fake_quantize_backward(grad, w, "nvfp4-te", amax=amax, pass_through=False)
    assert 0 < np.count_nonzero(expected) < np.count_nonzero(grad)
    assert_same_bits(settings.backward("w", grad, w, amax=amax), expected)
    assert settings.backward("other", grad, w, amax=amax) is grad
    assert dataclasses.replace(settings, pass_through=True).backward("w", grad, w, amax=amax) is grad


# ---- the formulas ----


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("kind", INPUTS)
def test_int4_by_its_formula_in_torch(size, kind):
    """The INT4 setting gives clamp(round(w / s), -7, 7) * s with s = max(amax / 7, 1e-5), as PyTorch on a GPU.

    The arithmetic is float32; the result is rounded to the dtype of w. On a GPU, PyTorch divides by a number by
    multiplying with its float32 reciprocal.
    """
    torch = pytest.importorskip("torch")
    x = INPUTS[kind]
    is_bf16 = x.dtype == BF16
    w = torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16) if is_bf16 else torch.from_numpy(x.copy())
    groups = w.reshape(len(x), -1, size)
    s = torch.clamp(groups.abs().float().amax(-1, keepdim=True) * torch.tensor(1 / 7), min=1e-5)
    y = (torch.clamp(torch.round(groups / s), -7, 7) * s).reshape(x.shape).to(w.dtype)
    expected = y.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == BF16 else y.numpy()
    ours = from_environment(**{INT4: "1", INT4_SIZE: str(size)}).fake_quantize(EXPERT, x)
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(ours.astype(np.float32)), nan)
    assert_same_bits(ours[~nan], expected[~nan])


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
def test_mxfp4_values_are_those_that_the_server_decodes(dtype):
    """Fake-quantized values equal those that a server decodes from mxfp4-flashinfer's codes.

    Every value has at most two significant bits, so no dtype rounds it.
    """
    w = ordinary(4, (64, 128), dtype)
    q = fp4kit.quantize(w, "mxfp4-flashinfer")
    y = from_environment(**{MXFP4: "1"}).fake_quantize(EXPERT, w)
    assert_same_bits(y.astype(np.float32), fp4kit.dequantize(q, np.float32))
    assert_same_bits(fp4kit.fake_quantize(y, "mxfp4-flashinfer"), y)


MODELS = synthetic.MODELS | synthetic.GPT_OSS


def planned(root, tensors, recipe, **options):
    """Return the plan for a model in training that has the tensors of a directory."""
    config, weights = json.loads((root / "config.json").read_text()), []
    for name, x in tensors.items():
        stack = x.ndim == 3 and ".experts." in name
        shape = (x.shape[0], x.shape[2], x.shape[1]) if stack and has_transposed_stacks(config) else x.shape
        weights.append(plan.TrainedWeight(name, name, shape, x.dtype.name, "stack" if stack else "matrix"))
    choice = plan.QatChoice.of("test", recipe, options.pop("format", None), config, None, **options)
    return plan.make_plan(choice, weights)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp"])
@pytest.mark.parametrize("model", MODELS)
def test_the_choice_is_that_of_the_converter(tmp_path, model, recipe):
    tensors = MODELS[model](tmp_path / "m")
    if (model, recipe) == ("gpt_oss", "nvfp4-te"):  # gate and up alternate, which no format of NVFP4 can store
        found = planned(tmp_path / "m", tensors, recipe)
        assert found.format == "" and "gpt" in found.note
        return
    converted = make_plan(tmp_path / "m", recipe)
    found = planned(tmp_path / "m", tensors, recipe)
    assert sorted(found.names) == sorted(tensor.name for tensor in converted.converted)
    assert found.format == converted.form.format
    reasons = {row.name: row.reason for row in found.rows}
    groups = {row.name.removesuffix(".weight"): row.group for row in found.rows if tensors[row.name].ndim == 2}
    shared = {name: group for tensor in converted.converted for name, group in tensor.group.items()}
    assert {name: group for name, group in groups.items() if group} == {n: g for n, g in shared.items() if n in groups}
    for tensor in (tensor for shard in converted.shards for tensor in shard.tensors):
        if tensor.name in reasons and tensor not in converted.converted:
            assert reasons[tensor.name] == tensor.reason


def members(plan, name):
    return [row.name for row in plan.members(next(row for row in plan.rows if row.name == name))]


def test_members_of_a_group(tmp_path):
    tensors = synthetic.dense(tmp_path / "m")
    found = planned(tmp_path / "m", tensors, "nvfp4-te")
    attention = "model.layers.0.self_attn"
    assert sorted(members(found, f"{attention}.k_proj.weight")) == [f"{attention}.{n}_proj.weight" for n in "kqv"]
    assert members(found, f"{attention}.o_proj.weight") == [f"{attention}.o_proj.weight"]
    alone = planned(tmp_path / "m", tensors, "mxfp4", exclude=("*.down_proj.weight",))
    assert members(alone, f"{attention}.k_proj.weight") == [f"{attention}.k_proj.weight"] and not alone.shares


def test_decoding_follows_the_format(tmp_path):
    tensors = synthetic.moe(tmp_path / "m")

    def rule(recipe, format):
        return planned(tmp_path / "m", tensors, recipe, format=format).recipe.decode_rule

    assert rule("nvfp4-te", "modelopt") == rule("nvfp4-compressed-tensors", "modelopt") == "product"
    assert rule("nvfp4-te", "compressed-tensors") == "stored_divisor"
    assert rule("nvfp4-compressed-tensors", "compressed-tensors") == "compressed_tensors"
    assert rule("mxfp4-ocp", "compressed-tensors") == rule("mxfp8-te", "sglang-mxfp8") == "e8m0"


def test_a_table_counts_layers_of_one_kind(tmp_path):
    found = QuantizedNames(planned(tmp_path / "m", synthetic.moe(tmp_path / "m"), "nvfp4-te"))
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    experts = [line for line in lines if "experts.*.down_proj.weight" in line]
    assert len(experts) == 1 and experts[0].startswith("yes 4 model.layers.*.mlp.experts.*.down_proj.weight")
    assert sum(int(line.split()[1]) for line in lines[3:]) == len(found.plan.rows)


def test_recipes_of_the_user(tmp_path):
    import dataclasses

    wide = dataclasses.replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
    found = planned(tmp_path / "m", synthetic.dense(tmp_path / "m"), wide)
    assert found.recipe == wide and found.format == "" and "mxfp4-sixteen" in found.note
    assert "model.layers.0.mlp.down_proj.weight" in found.names  # K = 80
