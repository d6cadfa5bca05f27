"""Test names of tensors to which a wrapper of PyTorch has added parts."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import numpy as np
import published
import pytest
import synthetic
from synthetic import refused
from together import together

from fp4kit.checkpoint import Rules, convert_tensors, make_plan
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection.names import (
    AdapterTensor,
    adapter_tensor,
    adapter_trouble,
    hugging_face_names,
    unwrapped,
)
from fp4kit.checkpoint.selection.selection import Wishes, candidate, decide, model_facts
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

PLAIN = "model.layers.0.self_attn.o_proj.weight"
WRAPPED = {
    "_orig_mod.model.layers.0.self_attn.o_proj.weight": "torch.compile",
    "model.layers.0._orig_mod.self_attn.o_proj.weight": "torch.compile",
    "module.model.layers.0.self_attn.o_proj.weight": "DistributedDataParallel",
    "module._orig_mod.model.layers.0.self_attn.o_proj.weight": "torch.compile",
    "_forward_module.model.layers.0.self_attn.o_proj.weight": "Lightning",
    "base_model.model.model.layers.0.self_attn.o_proj.weight": "PEFT",
    "base_model.model.model.layers.0.self_attn.o_proj.base_layer.weight": "PEFT",
    "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.self_attn.o_proj.weight": "FSDP",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_names(tmp_path: Path, name: str) -> None:
    """convert refuses a name that a wrapper such as DDP has changed; convert_tensors removes what the wrapper added."""
    assert unwrapped(name) == PLAIN
    w = synthetic.random("w", (32, 64))
    synthetic.write_model(tmp_path / "m", {}, {name: w})
    with refused(f"{name}: {WRAPPED[name]} has added to this name") as found:
        make_plan(tmp_path / "m", "nvfp4-te")
    assert PLAIN in str(found.value)
    assert any(issue.severity == "error" and issue.subject == name for issue in verify(tmp_path / "m").issues)
    rules = Rules.of("nvfp4-te")
    expected = dict(convert_tensors([(PLAIN, w)], rules))
    stripped = dict(convert_tensors([(name, w)], rules))
    assert stripped.keys() == expected.keys()
    assert all(np.array_equal(stripped[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", [PLAIN, "modules.0.weight", "encoder.module.0.weight", "module"])
def test_other_names(name: str) -> None:
    assert unwrapped(name) == name


ADAPTED = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "kind", "layer", "part"),
    [
        (f"{ADAPTED}.lora_A.default.weight", "LoRA", ADAPTED, "lora_A"),
        (f"base_model.model.{ADAPTED}.lora_B.weight", "LoRA", ADAPTED, "lora_B"),
        ("model.embed_tokens.lora_embedding_A.default", "LoRA", "model.embed_tokens", "lora_embedding_A"),
        (f"{ADAPTED}.lora_magnitude_vector.default.weight", "LoRA", ADAPTED, "lora_magnitude_vector"),
        (f"{ADAPTED}.lora_A.weight", "LoRA", ADAPTED, "lora_A"),
        ("lora_unet_blocks_0_q.lora_down.weight", "LoRA", "", "lora_unet_blocks_0_q"),
        ("blocks.0.qkv.dora_scale", "DoRA", "blocks.0.qkv", "dora_scale"),
        ("unet.attn1.processor.to_q_lora.up.weight", "LoRA", "unet.attn1.processor", "to_q_lora.up"),
        ("layers.0.attn.q_einsum.lora.a", "LoRA", "layers.0.attn.q_einsum", "lora.a"),
        ("layers.0.attn.q_proj.kernel_lora_a", "LoRA", "layers.0.attn.q_proj", "kernel_lora_a"),
        ("layers.0.attn.q_proj.w_lora_b", "LoRA", "layers.0.attn.q_proj", "w_lora_b"),
        ("layers.0.mlp.lora.lora_a", "LoRA", "layers.0.mlp.lora", "lora_a"),
        ("lm_head.modules_to_save.default.weight", "modules_to_save", "lm_head", "modules_to_save"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default", "trainable tokens",
         "model.embed_tokens.token_adapter", "trainable_tokens_delta"),
        ("prompt_encoder.default.embedding.weight", "prompt tuning", "", "prompt_encoder"),
        ("prompt_embeddings", "prompt tuning", "", "prompt_embeddings"),
        ("layers.0.linear_qkv.adapter.linear_in.weight", "LoRA", "layers.0.linear_qkv", "adapter.linear_in"),
        ("output.adapters.a.adapter_down.0.weight", "bottleneck", "output.adapters.a", "adapter_down"),
        ("prompt_encoder.default.delta_embedding.weight", "prompt tuning", "", "prompt_encoder"),
        ("internal_xlora_classifier.inner.0.weight", "X-LoRA", "", "internal_xlora_classifier"),
        ("base_model.shadow_backbone.default.layers.0.q_proj.weight", "shadow", "base_model", "shadow_backbone"),
    ],
)  # fmt: skip
def test_tensors_of_adapters(name: str, kind: str, layer: str, part: str) -> None:
    assert adapter_tensor(name) == AdapterTensor(kind, layer, part)
    assert f"adapter ({kind})" in adapter_trouble(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{ADAPTED}.weight",
        f"{ADAPTED}.base_layer.weight",
        "lm_head.original_module.weight",
        "model.layers.0.attn.w_lora.lora.0.weight",  # RWKV-7: a part of the model itself
        f"{ADAPTED}._svdquant_lora_a",
        f"{ADAPTED}.weight_quantizer._svdquant_lora_b",
        "prompt_encoder.shared_embedding.positional_embedding",  # SAM
        "prompt_encoder.mask_embed.conv1.weight",
        "layers.0.a",
        "blocks.0.up.weight",
    ],
)
def test_tensors_of_models(name: str) -> None:
    assert adapter_tensor(name) is None
    assert adapter_trouble(name) == ""


def test_every_adapter_of_peft() -> None:
    """Every tensor that an installed layer of PEFT holds for its adapter is recognized."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in pkgutil.iter_modules(peft.tuners.__path__):
        importlib.import_module(f"peft.tuners.{module.name}")
    layers, names = [BaseTunerLayer], set()
    while layers:
        layer = layers.pop()
        layers += layer.__subclasses__()
        names |= set(layer.adapter_layer_names) if isinstance(layer.adapter_layer_names, tuple) else set()
    assert {name for name in names if adapter_tensor(f"{LAYER}.{name}.default") is None} == set()
    assert len(names) > 20


LAYER = "decoder.layers.12"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", ["model.embed_tokens.weight"]),
        ("embedding.position_embeddings.weight", ["model.embed_positions.weight"]),
        ("decoder.final_layernorm.weight", ["model.norm.weight"]),
        ("decoder.final_layernorm.bias", ["model.norm.bias"]),
        ("output_layer.weight", ["lm_head.weight"]),
        ("output_layer._extra_state", []),
        ("decoder.final_layernorm._extra_state", []),
    ],
)
def test_outside_of_layers(name: str, expected: list[str]) -> None:
    for wrapped in (name, f"module.{name}", f"module.module.{name}"):
        assert hugging_face_names(wrapped) == tuple(expected)


# parameter of a layer of Megatron-Core, and the names of the same tensors in Hugging Face models
NAMES = """
input_layernorm.weight                                 input_layernorm.weight
self_attention.linear_qkv.layer_norm_weight            input_layernorm.weight
self_attention.linear_qkv.layer_norm_bias              input_layernorm.bias
self_attention.linear_qkv.weight  self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight
self_attention.linear_qkv.bias                         self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias
self_attention.linear_qkv._extra_state
self_attention.linear_proj.weight                      self_attn.o_proj.weight
self_attention.q_layernorm.weight                      self_attn.q_norm.weight
self_attention.k_layernorm.weight                      self_attn.k_norm.weight
self_attention.core_attention.softmax_offset           self_attn.sinks
self_attention.linear_q_proj.weight                    self_attn.q_proj.weight
self_attention.linear_q_down_proj.weight               self_attn.q_a_proj.weight
self_attention.linear_qkv_down_proj.weight             self_attn.q_a_proj.weight self_attn.kv_a_proj_with_mqa.weight
self_attention.linear_qkv_down_proj.layer_norm_weight  input_layernorm.weight
self_attention.linear_q_up_proj.weight                 self_attn.q_b_proj.weight
self_attention.linear_q_up_proj.layer_norm_weight      self_attn.q_a_layernorm.weight
self_attention.linear_kv_down_proj.weight              self_attn.kv_a_proj_with_mqa.weight
self_attention.linear_kv_up_proj.weight                self_attn.kv_b_proj.weight
self_attention.linear_kv_up_proj.layer_norm_weight     self_attn.kv_a_layernorm.weight
self_attention.core_attention.indexer.linear_wk.weight self_attn.indexer.wk.weight
pre_mlp_layernorm.weight                               post_attention_layernorm.weight
mlp.linear_fc1.layer_norm_weight                       post_attention_layernorm.weight
mlp.linear_fc1.weight                                  mlp.gate_proj.weight mlp.up_proj.weight
mlp.linear_fc2.weight                                  mlp.down_proj.weight
mlp.linear_fc2.bias                                    mlp.down_proj.bias
mlp.router.weight                                      mlp.gate.weight
mlp.router.expert_bias                                 mlp.gate.e_score_correction_bias
mlp.experts.linear_fc1.weight107                       mlp.experts.107.gate_proj.weight mlp.experts.107.up_proj.weight
mlp.experts.linear_fc2.weight0                         mlp.experts.0.down_proj.weight
mlp.experts.linear_fc1.bias3                           mlp.experts.3.gate_proj.bias mlp.experts.3.up_proj.bias
mlp.experts.linear_fc1._extra_state
mlp.experts.linear_fc1._extra_state7
mlp.experts.local_experts.9.linear_fc1.weight          mlp.experts.9.gate_proj.weight mlp.experts.9.up_proj.weight
mlp.experts.local_experts.9.linear_fc2.weight          mlp.experts.9.down_proj.weight
mlp.experts.local_experts.9.linear_fc2._extra_state
mlp.shared_experts.linear_fc1.weight  mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight
mlp.shared_experts.linear_fc2.weight                   mlp.shared_experts.down_proj.weight
mlp.shared_experts.gate_weight                         mlp.shared_expert_gate.weight
"""


@together("case", NAMES.strip().split("\n"))
def test_names_of_a_layer(case: str) -> None:
    """A parameter of a Megatron layer maps to the expected Hugging Face names, wherever the layer is.

    The places are the decoder, a language model inside a larger model, and two places in multi-token prediction.
    """
    rest, *expected = case.split()
    assert hugging_face_names(f"{LAYER}.{rest}") == tuple(f"model.layers.12.{name}" for name in expected)
    inside = tuple(f"model.language_model.layers.12.{name}" for name in expected)
    assert hugging_face_names(f"module.module.language_model.{LAYER}.{rest}") == inside
    for inner in ("transformer_layer", "mtp_model_layer"):
        assert hugging_face_names(f"mtp.layers.1.{inner}.{rest}") == tuple(f"mtp.layers.1.{name}" for name in expected)
        beyond = tuple(f"model.layers.62.{name}" for name in expected)
        assert hugging_face_names(f"module.mtp.layers.1.{inner}.{rest}", layers=61) == beyond


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eh_proj", "eh_proj"), ("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")],
)
def test_names_of_multi_token_prediction(name: str, expected: str) -> None:
    assert hugging_face_names(f"mtp.layers.0.{name}.weight") == (f"mtp.layers.0.{expected}.weight",)
    assert hugging_face_names(f"mtp.layers.0.{name}.weight", layers=61) == (f"model.layers.61.{expected}.weight",)


def test_mlps_without_gates() -> None:
    for stem in ("linear_fc1.weight", "experts.linear_fc1.weight3", "experts.local_experts.3.linear_fc1.weight"):
        (name,) = hugging_face_names(f"{LAYER}.mlp.{stem}", gated=False)
        assert name.endswith("up_proj.weight") and name in hugging_face_names(f"{LAYER}.mlp.{stem}")
    down = hugging_face_names(f"{LAYER}.mlp.linear_fc2.weight", gated=False)
    assert down == ("model.layers.12.mlp.down_proj.weight",)


@together("name", published.MODELS)
def test_names_of_hugging_face_are_themselves(name: str) -> None:
    for tensor in published.MODELS[name]():
        assert hugging_face_names(tensor.name, layers=3) == (tensor.name,)


@together(
    "name",
    [
        "model.visual.blocks.0.mlp.linear_fc1.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "decoder.layers.0.self_attn.q_proj.weight",  # BART
        "decoder.layers.0.fc1.weight",
        "mtp.layers.0.self_attn.q_proj.weight",  # Qwen3-Next
        "mtp.layers.0.input_layernorm.weight",
        "mtp.fc.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.12345678901.fc1.weight",
        "",
        ".",
    ],
)
def test_other_names_are_themselves(name: str) -> None:
    assert hugging_face_names(name, layers=3) == (name,)


@together(
    "rest",
    (
        "cross_attention.linear_q.weight self_attention.linear_qkv.adapter.linear_in.weight"
        " self_attention.linear_new.weight self_attention.linear_proj.scale mlp.experts.weight1"
        " mlp.experts.local_experts.x.linear_fc1.weight mlp.experts.linear_fc3.weight0 mlp.linear_fc1.weight0"
        " transformer_layer.mlp.linear_fc1.weight"
    ).split(),
)
def test_unknown_names_of_megatron_are_refused(rest: str) -> None:
    with refused(f"hugging_face_names: {LAYER}.{rest}: unknown Megatron-Core name; rename"):
        hugging_face_names(f"{LAYER}.{rest}")


MEGATRON = [
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    *(
        f"{layer}.{rest}"
        for layer in ("decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "mtp.layers.0.transformer_layer")
        for rest in (
            "self_attention.linear_q_down_proj.weight self_attention.linear_q_up_proj.weight"
            " self_attention.linear_kv_down_proj.weight self_attention.linear_kv_up_proj.weight"
            " self_attention.linear_proj.weight"
        ).split()
    ),
    *(
        f"{layer}.mlp.{rest}"
        for layer in ("decoder.layers.1", "decoder.layers.2", "mtp.layers.0.transformer_layer")
        for rest in (
            "router.weight",
            "router.expert_bias",
            "shared_experts.linear_fc1.weight",
            "shared_experts.linear_fc2.weight",
            *(f"experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(published.E)),
        )
    ),
    "mtp.layers.0.eh_proj.weight",
]


def test_a_model_in_either_names_has_the_same_tensors() -> None:
    """The names of DeepSeek-V3 map one to one, except tensors that Megatron shares.

    These are the embedding and the head of multi-token prediction.
    """
    found = sorted(name for megatron in MEGATRON for name in hugging_face_names(f"module.{megatron}", layers=3))
    shared = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    assert found == sorted(tensor.name for tensor in published.deepseek_v3() if tensor.name not in shared)


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(),
        Wishes("experts", 1, 1),
        Wishes("mlp", keep=("*.1.*",)),
        Wishes("experts", only=("*", "model.layers.3.*")),
    ],
)
def test_a_live_export_decides_as_the_converter(wishes: Wishes) -> None:
    """Which layers are quantized does not depend on the names: Megatron's give the decisions that Hugging Face's give.

    All Hugging Face tensors that are parts of one Megatron parameter get one decision.
    """
    candidates = {tensor.name: tensor for tensor in published.deepseek_v3()}
    converter = decide(candidates.values(), wishes, 16)
    for megatron in MEGATRON:
        names = hugging_face_names(megatron, layers=3)
        live = decide([candidates[name] for name in names], wishes, 16)
        assert live == {name: converter[name] for name in names}
        assert len({(found.converted, found.reason) for found in live.values()}) == 1


def test_multi_token_prediction_is_kept_under_either_name() -> None:
    model = model_facts({"num_hidden_layers": 61})
    for layers in (None, 61):
        (name,) = hugging_face_names("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", layers=layers)
        (found,) = decide([candidate(name, "BF16", (64, 96), model)], Wishes("experts"), 16).values()
        assert not found.converted and found.reason.startswith("multi-token prediction (")


def groups_of(name: str) -> dict[str, set[str]]:
    """Return {group: its modules} for all modules of the published model `name` that the preset "linear" quantizes."""
    candidates = published.MODELS[name]()
    decisions = decide(candidates, Wishes(), 16)
    found: dict[str, set[str]] = {}
    modules = (t.module for t in candidates if decisions[t.name].converted)
    for module, group in fused_layers.shared_amax_groups(modules).items():
        found.setdefault(group, set()).add(module)
    return found


@together(
    "name, count",
    [
        ("qwen3_dense", 3 + 3),
        ("qwen3_moe", 4 + 1 + 3 * 4),
        ("qwen3_moe_fused", 2),
        ("gpt_oss", 2),
        ("deepseek_v3", 3 + 1 + 2 * 5),
        ("deepseek_v4", 2 + 2 * 5),
        ("mixtral", 2 + 2 * 4),
        ("vlm_moe", 2 + 2 * 4),
    ],
)
def test_groups_of_published_models(name: str, count: int) -> None:
    assert len(groups_of(name)) == count


@together(
    "parent, leaves",
    [
        ("model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj")),
        ("encoder.layer.0.attention.self", ("query", "key", "value")),
        ("layers.0.attention", ("wq", "wk", "wv")),
        ("model.layers.0.mlp", ("gate_proj", "up_proj")),
        ("model.layers.0.mlp.experts.3", ("gate_proj", "up_proj")),
        ("model.layers.0.mlp.experts", ("gate_proj", "up_proj")),
        ("model.layers.0.block_sparse_moe.experts.3", ("w1", "w3")),
        ("model.layers.0.self_attn", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("layers.0.attn", ("wq_a", "wkv")),
        ("layers.0.attention", ("wq_a", "wkv_a_with_mqa")),
        ("model.layers.0.linear_attn", ("in_proj_qkv", "in_proj_z")),
        ("model.layers.0.linear_attn", ("in_proj_b", "in_proj_a")),
    ],
)
def test_what_shares_an_amax(parent: str, leaves: tuple[str, ...]) -> None:
    modules = [f"{parent}.{leaf}" for leaf in leaves]
    alone = "o_proj down_proj w2 q_b_proj wq_b kv_b_proj wo_a out_proj".split()
    others = [f"{parent}.{leaf}" for leaf in alone]
    groups = fused_layers.shared_amax_groups([*modules, *others, f"other.{leaves[0]}"])
    assert set(groups) == set(modules) and len(set(groups.values())) == 1
    assert all(leaf in groups[modules[0]] for leaf in leaves)
    assert all(fused_layers.group_of(module) == (groups[module], len(leaves)) for module in modules)


def test_every_expert_is_a_group_and_a_stack_none() -> None:
    groups = groups_of("mixtral")
    experts = {name: members for name, members in groups.items() if "experts" in name}
    assert experts["model.layers.1.block_sparse_moe.experts.3.(w1|w3)"] == {
        f"model.layers.1.block_sparse_moe.experts.3.{leaf}" for leaf in ("w1", "w3")
    }
    assert not any("experts" in name for name in groups_of("gpt_oss"))


@pytest.mark.parametrize(
    ("modules", "module", "missing"),
    [
        (["a.gate_proj"], "a.gate_proj", "up_proj"),
        (["a.w1", "a.w2"], "a.w1", "w3"),
        (["a.experts.0.gate_proj", "a.experts.0.up_proj", "a.experts.1.up_proj"], "a.experts.1.up_proj", "gate_proj"),
        (["a.0.b.w1", "a.0.b.w3", "a.11.b.w3"], "a.11.b.w3", "w1"),
        (["m.experts.gate_proj", "m.experts.down_proj"], "m.experts.gate_proj", "up_proj"),
    ],
)
def test_unpaired_halves(modules: list[str], module: str, missing: str) -> None:
    text = f"{module}: has no {missing} beside it, with which it must share a tensor amax; add {missing}"
    assert fused_layers.missing_gated_halves(modules) == [text]
    other = f"{fused_layers.split_module(module)[0]}.{missing}"
    assert (
        fused_layers.missing_gated_halves(modules, [other]) == []
        and fused_layers.missing_gated_halves([*modules, other]) == []
    )


@pytest.mark.parametrize("dtype", ["F64", "F32"])
def test_a_half_of_another_dtype_is_named(dtype: str) -> None:
    (line,) = fused_layers.missing_gated_halves(["a.gate_proj"], dtypes={"a.up_proj.weight": dtype})
    assert ("up_proj.weight beside it is F64" in line and "keep both" in line) == (dtype == "F64")


def test_halves_of_different_experts_are_no_pair() -> None:
    lines = fused_layers.missing_gated_halves(["a.experts.7.gate_proj", "a.experts.6.up_proj"])
    assert [line.split(" beside")[0] for line in lines] == [
        "a.experts.7.gate_proj: has no up_proj",
        "a.experts.6.up_proj: has no gate_proj",
    ]


@pytest.mark.parametrize(
    "modules",
    [
        [],
        ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"],  # no gates: Nemotron, Arcee
        ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "backbone.layers.0.mixer.up_proj"],
        ["model.layers.0.self_attn.gate_proj", "model.layers.0.self_attn.q_proj"],  # gated attention: AFMoE
        ["encoder.layer.0.attention.gate_proj"],
        ["encoder.layer.0.SelfAttention.gate_proj"],
        ["transformer.h.0.mlp.w1", "transformer.h.0.mlp.w2", "transformer.h.0.mlp.c_proj"],  # Qwen
        ["blocks.0.mlp.w12", "blocks.0.mlp.w3"],
        ["m.experts.gate_up_proj", "m.experts.down_proj"],
    ],
)
def test_names_that_are_not_halves(modules: list[str]) -> None:
    assert fused_layers.missing_gated_halves(modules) == []


def test_no_published_model_has_unpaired_halves() -> None:
    for make in published.MODELS.values():
        candidates = make()
        assert fused_layers.missing_gated_halves(tensor.module for tensor in candidates if tensor.is_weight) == []


def test_names_of_unpaired_halves_are_shown_safely() -> None:
    (line,) = fused_layers.missing_gated_halves(["a\x1b[2J.gate_proj"])
    assert line.startswith(r"a\x1b[2J.gate_proj: has no up_proj")
