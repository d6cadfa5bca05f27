"""Test what engines require of tensors, tensor scales and configs.

Valid ones give no finding, and every fault gives a finding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from together import together

from fp4kit.checkpoint.containers.configs import LOADED, declarations
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.loaders.requirements import consequence, findings, quantized_layers

Tensors = dict[str, tuple[str, tuple[int, ...]]]
ROWS, COLUMNS = 96, 64
Q, EXPERT = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts.0.down_proj"

MEMORY = "the engine uses uninitialised memory in its place"
ONE = "the engine uses 1.0 in its place, which is not calibrated"
PER_TOKEN = f"{MEMORY}, unless it is configured to quantize the inputs of experts per token"
W4A16, NVFP4, MXFP8, MXFP4 = "modelopt W4A16_NVFP4", "modelopt NVFP4", "modelopt MXFP8", "modelopt mxfp4"
CT_NVFP4, CT_MXFP4, CT_MXFP8 = (
    f"compressed-tensors {name}" for name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
)

FP8, FP8_CHANNEL = "modelopt FP8", "modelopt FP8_PER_CHANNEL_PER_TOKEN"
CT_FP8, CT_FP8_ROWS = "compressed-tensors FP8", "compressed-tensors FP8 per row"
CT_FP8_BLOCKS, FP8_BLOCKS = "compressed-tensors FP8 128x128", "fp8 128x128"


def layer(container: str, name: str, lead: tuple[int, ...] = ()) -> Tensors:
    """Return {tensor name: (dtype, shape)} for a layer of shape [96, 64], or [96, 128] in 128x128 blocks.

    name: the module's name.
    lead: leading dimensions, such as the number of experts.
    """
    form = LOADED[container].form
    if form is None:
        return {f"{name}.weight": ("BF16", (*lead, ROWS, COLUMNS))}
    shape = (*((4,) if container == "gpt-oss" else lead), ROWS, 128 if form.block[0] > 1 else COLUMNS)
    outputs = form.outputs(name, shape, container in (NVFP4, FP8, "deepseek-v4 nvfp4"))
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in outputs}


def config(container: str) -> dict[str, Any]:
    """Return the content of a config.json that engines accept for a container: what fp4kit writes."""
    form = LOADED[container].form
    if form is None:
        return {}
    declared, _ = declarations(form, [], container in (NVFP4, FP8), {}, [name_of(container)])
    kind = {"gpt-oss": {"model_type": "gpt_oss"}, "deepseek-v4": {"model_type": "deepseek_v4", "expert_dtype": "fp4"}}
    return {**kind.get(form.format, {}), "quantization_config": declared}


def ct_config(container: str, inputs: object = None) -> dict[str, Any]:
    """Return the quantization_config of a container of compressed-tensors with other ``input_activations``."""
    declared: dict[str, Any] = config(container)["quantization_config"]
    declared["config_groups"]["group_0"]["input_activations"] = inputs
    return declared


def name_of(container: str) -> str:
    own = {"gpt-oss": "model.layers.0.mlp.experts.gate_up_proj", "deepseek-v4": "layers.0.ffn.experts.0.w1"}
    return own.get(LOADED[container].format, Q)


def engine_of(found: Issue) -> str:
    return found.loader.partition(" ")[0]


def errors(found: list[Issue]) -> list[Issue]:
    return [each for each in found if each.severity == "error"]


def checked(container: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **options: Any) -> list[Issue]:
    scales = options.pop("scales", {})
    return errors(findings(container, tensors, scales, options.pop("config", config(container)), **options))


@together("container", LOADED)
def test_a_sound_checkpoint_has_no_errors(container: str) -> None:
    tensors = {**layer(container, name_of(container)), "model.norm.weight": ("BF16", (64,)), "a.bias": ("F32", (4,))}
    assert checked(container, tensors) == []


@together("container", [each for each in LOADED if each not in ("gpt-oss", "bf16")])
def test_a_stack_of_experts(container: str) -> None:
    tensors = layer(container, name_of(container), (4,))
    assert checked(container, tensors) == []
    for name, (dtype, shape) in tensors.items():
        if not name.endswith((".weight", ".weight_packed")):
            assert checked(container, {**tensors, name: (dtype, (3, *shape[1:]))}), name


@together("container", [each for each in LOADED if each != "bf16"])
def test_every_tensor_counts(container: str) -> None:
    """If a tensor of a layer is missing, or has a dtype or shape that engines do not accept, a finding reports it."""
    tensors = layer(container, name_of(container))
    for name, (dtype, shape) in tensors.items():
        part = name.removeprefix(name_of(container))[1:]
        missing = {other: tensor for other, tensor in tensors.items() if other != name}
        assert any(each.text.startswith(f"{part} is missing; ") for each in checked(container, missing))
        other_dtype = checked(container, {**tensors, name: ("I64", shape)})
        assert f"{part} is I64; {dtype} is needed" in [each.text for each in other_dtype]
        if part == "weight" and container in (FP8, CT_FP8):  # no other tensor depends on the shape of the weight
            continue
        more = 128 if part == "weight" and container in (CT_FP8_BLOCKS, FP8_BLOCKS) else 1  # one more block
        wrong = (shape[0] + more, *shape[1:]) if shape else (2,)
        found = checked(container, {**tensors, name: (dtype, wrong)})
        assert found and all("has shape" in each.text for each in found), name


@together("container", [each for each in LOADED if each not in ("bf16", "gpt-oss")])
@together("shape", [(96,), (), (1, 2, 3, 4)])
def test_weights_of_other_ranks(container: str, shape: tuple[int, ...]) -> None:
    tensors = layer(container, name_of(container))
    weight = next(iter(tensors))
    first, *_ = checked(container, {**tensors, weight: (tensors[weight][0], shape)})
    assert first.text.endswith(f"has rank {len(shape)}; no engine loads such a layer")


def test_k_that_is_not_whole_blocks() -> None:
    tensors: Tensors = {f"{Q}.weight": ("F8_E4M3", (96, 80)), f"{Q}.weight_scale": ("U8", (96, 3))}
    (found,) = checked(MXFP8, tensors)
    assert (found.loader, found.subject, found.text) == ("vLLM 0.33.0", Q, "K = 80 is not a multiple of 32")


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("container", [W4A16, CT_NVFP4])
def test_scalars_of_either_shape(container: str, shape: tuple[int, ...]) -> None:
    tensors = layer(container, Q)
    name = next(name for name in tensors if name.endswith(("_2", "_global_scale")))
    assert not checked(container, {**tensors, name: ("F32", shape)})


@pytest.mark.parametrize(
    ("container", "name", "suffix", "vllm", "sglang"),
    [
        (NVFP4, Q, ".weight_scale", 'loading raises "was never loaded"', MEMORY),
        (NVFP4, Q, ".weight_scale_2", MEMORY, MEMORY),
        (NVFP4, Q, ".input_scale", MEMORY, ONE),
        (NVFP4, EXPERT, ".weight_scale", MEMORY, MEMORY),
        (NVFP4, EXPERT, ".input_scale", PER_TOKEN, ONE),
        (CT_NVFP4, Q, ".weight_scale", MEMORY, MEMORY),
        (CT_NVFP4, EXPERT, ".weight_global_scale", MEMORY, MEMORY),
    ],
)
def test_a_missing_tensor(container: str, name: str, suffix: str, vllm: str, sglang: str) -> None:
    """The findings say what vLLM 0.33.0 and SGLang 0.5.23 do, as read in their sources."""
    tensors = layer(container, name)
    del tensors[name + suffix]
    found = {engine_of(each): (each.severity, each.subject, each.text) for each in checked(container, tensors)}
    start = f"{suffix[1:]} is missing; "
    assert found["vLLM"] == ("error", name, start + vllm)
    assert found["SGLang"] == ("error", name, start + sglang)


def test_what_other_engines_do_with_a_missing_tensor() -> None:
    """consequence states what an engine does without a tensor, or that this is not known.

    An engine may be unable to decode the layer, or use zeros or uninitialized memory instead.
    """
    unknown = consequence("transformers", CT_NVFP4, Q, ".input_global_scale")
    assert unknown == "it is not known what the engine does then"
    assert consequence("transformers", CT_NVFP4, Q, ".weight_scale") == "the layer cannot be decoded"
    assert consequence("SGLang", "sglang-mxfp8", Q, ".weight_scale_inv") == "the engine uses zeros in its place"
    assert consequence("vLLM", "gpt-oss", Q, "_scales") == "the engine uses zeros in its place"
    assert consequence("vLLM", MXFP8, Q, ".weight_scale") == MEMORY  # only NVFP4 scales are checked
    assert consequence("vLLM", "deepseek-v4", Q, ".scale") == "the layer cannot be decoded"


@pytest.mark.parametrize(
    ("container", "suffix"),
    [
        (MXFP8, "weight_scale_inv"),
        ("sglang-mxfp8", "weight_scale"),
        (W4A16, "weight_global_scale"),
        (CT_MXFP4, "weight"),
        ("bf16", "weight_scale"),
    ],
)
def test_names_of_other_containers(container: str, suffix: str) -> None:
    tensors = {**layer(container, Q), f"{Q}.{suffix}": ("U8", (96, 2))}
    assert any(f"{suffix}: not a tensor of {container}" in each.text for each in checked(container, tensors))


def test_packed_weights_in_an_unquantized_checkpoint() -> None:
    assert [each.text for each in checked("bf16", {f"{Q}.weight": ("F8_E4M3", (96, 64))})] == [
        "weight: not a tensor of bf16"
    ] * 3


def test_fp8_layers_beside_packed_experts() -> None:
    wq = "layers.0.attn.wq_a"
    tensors: Tensors = {f"{wq}.weight": ("F8_E4M3", (200, 256)), f"{wq}.scale": ("F8_E8M0", (2, 2))}
    assert not checked("deepseek-v4", tensors)
    first, *_ = checked("deepseek-v4", {**tensors, f"{wq}.scale": ("F8_E8M0", (1, 2))})
    assert first.text == "scale has shape [1, 2]; [2, 2] is needed"


def test_static_inputs_need_their_scale() -> None:
    """In compressed-tensors' NVFP4, a layer needs input_global_scale if the inputs have ``"dynamic": "local"``.

    It needs none if ``dynamic`` is True, or if the inputs are not quantized.
    """
    tensors = layer(CT_NVFP4, Q)
    inputs = {"num_bits": 4, "dynamic": "local"}
    found = checked(CT_NVFP4, tensors, config={"quantization_config": ct_config(CT_NVFP4, inputs)})
    assert set(map(engine_of, found)) == {"vLLM", "SGLang", "transformers"}
    assert all(each.text.startswith("input_global_scale is missing") for each in found)
    whole = {**tensors, f"{Q}.input_global_scale": ("F32", (1,))}
    assert not checked(CT_NVFP4, whole, config={"quantization_config": ct_config(CT_NVFP4, inputs)})
    for unneeded in ({"dynamic": True}, None, {}):
        assert not checked(CT_NVFP4, tensors, config={"quantization_config": ct_config(CT_NVFP4, unneeded)})


# Tensor scales.


def pair(container: str, parent: str, leaves: tuple[str, ...]) -> Tensors:
    return {name: tensor for leaf in leaves for name, tensor in layer(container, f"{parent}.{leaf}").items()}


DIVISOR = "the largest divisor, which is the smallest scale, | gate_proj by 0.5"


@pytest.mark.parametrize(
    ("container", "parent", "stored", "text"),
    [
        (W4A16, "a.mlp", {"gate_proj": 1.0, "up_proj": 2.0}, "the largest | gate_proj by 2"),
        (W4A16, "a.mlp", {"gate_proj": 1.0001, "up_proj": 1.0}, "the largest | up_proj by 1.0001"),
        (W4A16, "a.mlp", {"gate_proj": 1.0, "up_proj": 1 - 2.0**-24}, "the largest | up_proj by 1.0000001"),
        (W4A16, "a.mlp.experts.0", {"gate_proj": 1.0, "up_proj": 2.0}, "that of gate_proj | up_proj by 0.5"),
        (W4A16, "a.experts.0", {"w1": 4.0, "w3": 1.0}, "that of w1 | w3 by 4"),
        (W4A16, "a.self_attn", {"q_proj": 1.0, "k_proj": 1.0, "v_proj": 4.0}, "the largest | q_proj by 4, k_proj by 4"),
        (W4A16, "a.self_attn", {"q_a_proj": 1.0, "kv_a_proj_with_mqa": 2.0}, "the largest | q_a_proj by 2"),
        # divisors 1 and 2 mean scales 1 and 0.5; engines use 0.5 for both
        (CT_NVFP4, "a.mlp", {"gate_proj": 1.0, "up_proj": 2.0}, DIVISOR),
        (CT_NVFP4, "a.mlp.experts.0", {"gate_proj": 1.0, "up_proj": 2.0}, "that of gate_proj | up_proj by 2"),
    ],
)
def test_tensor_scales_of_a_fused_layer(container: str, parent: str, stored: dict[str, float], text: str) -> None:
    suffix = "weight_scale_2" if container == W4A16 else "weight_global_scale"
    scales = {f"{parent}.{leaf}.{suffix}": value for leaf, value in stored.items()}
    found = checked(container, pair(container, parent, tuple(stored)), scales=scales)
    which, _, factors = text.partition(" | ")
    assert [engine_of(one) for one in found] == ["vLLM", "SGLang"]
    for one in found:
        by = " by most back ends" if engine_of(one) == "SGLang" and "experts" in parent else ""
        text = f"{suffix} differs; {which} is used for all{by}, so values are off by a factor: {factors}; "
        assert one.subject == f"{parent}.({'|'.join(stored)})" and one.text == f"{text}fp4kit reconcile repairs it"
    same = dict.fromkeys(scales, 1.5)
    assert not checked(container, pair(container, parent, tuple(stored)), scales=same)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0])
def test_tensor_scales_that_are_no_scales(value: float) -> None:
    found = checked(W4A16, layer(W4A16, Q), scales={f"{Q}.weight_scale_2": value})
    assert [each.text for each in found] == [f"weight_scale_2 is {value}; a positive finite number is needed"] * 2
    both = {f"a.mlp.{leaf}.weight_scale_2": number for leaf, number in (("gate_proj", value), ("up_proj", 1.0))}
    # The two findings are about the invalid scale. The ratio of the fused layers' scales is not reported.
    assert len(checked(W4A16, pair(W4A16, "a.mlp", ("gate_proj", "up_proj")), scales=both)) == 2


@pytest.mark.parametrize(
    ("value", "subnormal"), [(2.0**-126, False), (2.0**-126 * (1 - 2.0**-23), True), (2.0**-149, True)]
)
def test_a_subnormal_tensor_scale_is_at_risk(value: float, subnormal: bool) -> None:
    found = findings(W4A16, layer(W4A16, Q), {f"{Q}.weight_scale_2": value}, config(W4A16))
    assert not errors(found)
    assert any("a subnormal: engines that flush subnormals read 0" in each.text for each in found) is subnormal


# Configurations.


def changed(container: str, **entries: object) -> dict[str, Any]:
    base = config(container)
    return {**base, "quantization_config": {**base.get("quantization_config", {}), **entries}}


CONFIGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (W4A16, {}, "quant_method is ''; 'modelopt' is needed"),
    (W4A16, changed(W4A16, quant_method="fp8"), "quant_method is 'fp8'; 'modelopt' is needed"),
    (W4A16, changed(W4A16, quant_algo="NVFP4"), "quant_algo is 'NVFP4'; the tensors are 'W4A16_NVFP4'"),
    (W4A16, changed(W4A16, group_size=32), "group_size is 32; the tensors have 16"),
    (MXFP8, changed(MXFP8, quant_algo=None), "quant_algo is None; the tensors are 'MXFP8'"),
    (CT_NVFP4, changed(CT_NVFP4, format="pack-quantized"), "format is 'pack-quantized'; the tensors are 'nvfp4-pack-"),
    (CT_NVFP4, changed(CT_NVFP4, config_groups={}), "has no config_groups; no layer would be quantized"),
    (CT_NVFP4, changed(CT_NVFP4, config_groups=[1]), "has no config_groups; no layer would be quantized"),
    (
        CT_NVFP4,
        changed(CT_NVFP4, config_groups=ct_config(CT_MXFP4)["config_groups"]),
        "strategy is 'group' ('tensor_group'), group_size is 32 (16): does not describe the tensors",
    ),
    (
        CT_MXFP8,
        changed(CT_MXFP8, config_groups={"a": {"weights": None}}),
        "strategy is None ('group'), num_bits is None (8), group_size is None (32), type is None ('float'), symmetric",
    ),
    (FP8_BLOCKS, changed(FP8_BLOCKS, weight_block_size=[64, 64]), "weight_block_size is [64, 64]; [128, 128] is"),
    (FP8_BLOCKS, changed(FP8_BLOCKS, activation_scheme="static"), "activation_scheme is 'static'; 'dynamic' is needed"),
    ("sglang-mxfp8", changed("sglang-mxfp8", quant_method="fp8"), "quant_method is 'fp8'; 'mxfp8' is needed"),
    ("gpt-oss", {**config("gpt-oss"), "model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'; blocks and scales are"),
    ("deepseek-v4", {**config("deepseek-v4"), "expert_dtype": "fp8"}, "expert_dtype is 'fp8'; 'fp4' is needed"),
    ("deepseek-v4 nvfp4", changed("deepseek-v4", moe_quant_algo=None), "moe_quant_algo is None; 'NVFP4' is needed"),
    ("deepseek-v4", changed("deepseek-v4", quant_method="mxfp4"), "quant_method is 'mxfp4'; 'fp8' is needed"),
)


@together("container, given, text", CONFIGS)
def test_faults_of_config_json(container: str, given: dict[str, Any], text: str) -> None:
    found = checked(container, layer(container, name_of(container)), config=given)
    assert any(text in each.text for each in found)
    assert {each.subject for each in found} == {"config.json"}


def test_sglang_minds_the_case_of_quant_algo() -> None:
    (found,) = checked(W4A16, layer(W4A16, Q), config=changed(W4A16, quant_algo="w4a16_nvfp4"))
    assert engine_of(found) == "SGLang"


def test_an_absent_expert_dtype_is_fp4() -> None:
    given = {key: value for key, value in config("deepseek-v4").items() if key != "expert_dtype"}
    assert not checked("deepseek-v4", layer("deepseek-v4", name_of("deepseek-v4")), config=given)


def nested(**entries: object) -> dict[str, Any]:
    """Return the content of an hf_quant_config.json with some entries replaced.

    entries: the new values; an entry with the value "absent" is left out.
    """
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}
    quantization |= entries
    return {"quantization": {key: value for key, value in quantization.items() if value != "absent"}}


@pytest.mark.parametrize(
    ("container", "hf", "missing"),
    [
        (NVFP4, nested(group_size="absent"), "group_size"),
        (NVFP4, nested(kv_cache_quant_algo="absent", exclude_modules="absent"), "kv_cache_quant_algo, exclude_modules"),
        (NVFP4, {}, "kv_cache_quant_algo, exclude_modules, group_size"),
        (NVFP4, {"quantization": []}, "kv_cache_quant_algo, exclude_modules, group_size"),
        (MXFP8, nested(quant_algo="MXFP8", group_size="absent", exclude_modules="absent"), "exclude_modules"),
    ],
)
def test_keys_of_hf_quant_config(container: str, hf: dict[str, Any], missing: str) -> None:
    (found,) = checked(container, layer(container, Q), hf_quant_config=hf)
    assert found.subject == "hf_quant_config.json"
    assert found.text == f"quantization lacks {missing}; loading fails without it"


def warnings(
    container: str, given: dict[str, Any], hf: dict[str, Any] | None, tensors: Tensors | None = None
) -> list[str]:
    found = findings(container, tensors or layer(container, Q), {}, given, hf)
    return [each.text for each in found if each.severity == "warning" and each.subject != "model"]


def test_two_files_that_disagree() -> None:
    assert not warnings(NVFP4, config(NVFP4), nested())
    assert not warnings(NVFP4, config(NVFP4), nested(quant_algo="absent"))  # one of the two is enough
    assert warnings(NVFP4, config(NVFP4), nested(exclude_modules=["a"], quant_algo="FP8")) == [
        "quantization.quant_algo differs from quant_algo in config.json; which one is used depends on the engine",
        ("quantization.exclude_modules differs from ignore in config.json; which one is used depends on the engine"),
    ]


def test_a_file_of_another_format() -> None:
    assert warnings(CT_MXFP4, config(CT_MXFP4), nested()) == [
        "belongs to another format; compressed-tensors checkpoints have no such file; remove it"
    ]


def test_nvfp4_that_is_taken_for_w4a16() -> None:
    groups = {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}
    tensors = layer(NVFP4, Q)
    del tensors[f"{Q}.input_scale"]  # vLLM ignores it in W4A16

    def engines() -> set[str]:
        return {engine_of(one) for one in checked(NVFP4, tensors, config=changed(NVFP4, config_groups=groups))}

    (text,) = warnings(NVFP4, changed(NVFP4, config_groups=groups), None)
    assert "the engine treats NVFP4 as W4A16_NVFP4" in text and "vLLM" not in engines() and engines()
    groups["group_0"]["input_activations"] = {"num_bits": 4}
    assert not warnings(NVFP4, changed(NVFP4, config_groups=groups), None) and "vLLM" in engines()


@pytest.mark.parametrize("in_config", [True, False])
def test_an_fp8_kv_cache_without_scales(in_config: bool) -> None:
    given = changed(NVFP4, kv_cache_scheme={"num_bits": 8, "type": "float"}) if in_config else config(NVFP4)
    hf = None if in_config else nested(kv_cache_quant_algo="FP8")
    assert warnings(NVFP4, given, hf) == ["an FP8 KV cache is declared, but no k_scale or v_scale is stored"]
    stored: Tensors = {**layer(NVFP4, Q), "model.layers.0.self_attn.k_proj.k_scale": ("F32", ())}
    assert not warnings(NVFP4, given, hf, stored)


# The next tests are about engines that cannot load a valid checkpoint.


def traps(container: str, names: list[str], model: dict[str, Any]) -> dict[str, str]:
    tensors = {name: tensor for each in names for name, tensor in layer(container, each).items()}
    found = findings(container, tensors, {}, {**config(container), **model})
    return {engine_of(each): each.text for each in found if each.subject == "model"}


def test_traps_are_warnings_of_the_engine_that_meets_them() -> None:
    moe = {"num_experts": 4}
    assert traps(CT_NVFP4, [EXPERT], moe)["transformers"].startswith("wrong values: the engine decodes experts without")
    assert "transformers" not in traps(CT_NVFP4, [Q], moe)  # no experts are quantized
    assert traps(CT_MXFP4, [Q, EXPERT], moe)["SGLang"].startswith("fails: the engine has MXFP4 only for experts")
    assert "SGLang" not in traps(CT_MXFP4, [EXPERT], moe)
    assert "SGLang" in traps(CT_MXFP4, [Q], {})
    assert traps("sglang-mxfp8", [Q], {"model_type": "llama"})["SGLang"].startswith(
        "wrong values: the engine's Llama loader renames"
    )
    assert set(traps(MXFP8, [Q], {})) == {"SGLang", "transformers"}
    assert set(traps(MXFP4, [Q], {})) == {"vLLM", "SGLang", "transformers"}


def test_unknown_container() -> None:
    with pytest.raises(ValueError, match=rf"^findings: container 'awq'; one of {re.escape(W4A16)}, .* is needed$"):
        findings("awq", {}, {}, {})


def test_quantized_layers() -> None:
    tensors: Tensors = {
        "a.weight": ("BF16", (2, 2)),
        "b.weight": ("U8", (2, 2)),
        "c.weight": ("F8_E4M3", (2,)),
        "d.weight_scale": ("U8", (1,)),
        "e.experts.down_proj_blocks": ("U8", (1, 1, 1, 16)),
        "f.k_scale": ("F32", ()),
        "weight": ("U8", (2, 2)),
        "g.weight.weight": ("I8", (2, 2)),
    }
    assert quantized_layers(tensors) == {
        "b": {".weight": ("U8", (2, 2))},
        "d": {".weight_scale": ("U8", (1,))},
        "e.experts.down_proj": {"_blocks": ("U8", (1, 1, 1, 16))},
        "g.weight": {".weight": ("I8", (2, 2))},
    }
