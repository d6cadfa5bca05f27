"""Test how names of Megatron-Core map to names of Hugging Face, and that selection rules decide alike for both."""

from __future__ import annotations

import published
import pytest
from synthetic import refused
from together import together

from fp4kit.checkpoint.selection.names import hugging_face_names
from fp4kit.checkpoint.selection.selection import Wishes, candidate, decide, model_facts

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


@together(
    "rest, expected",
    [
        ("input_layernorm.weight", ["input_layernorm.weight"]),
        ("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"]),
        ("self_attention.linear_qkv.layer_norm_bias", ["input_layernorm.bias"]),
        (
            "self_attention.linear_qkv.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        ),
        ("self_attention.linear_qkv.bias", ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]),
        ("self_attention.linear_qkv._extra_state", []),
        ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"]),
        ("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"]),
        ("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"]),
        ("self_attention.core_attention.softmax_offset", ["self_attn.sinks"]),
        ("self_attention.linear_q_proj.weight", ["self_attn.q_proj.weight"]),
        ("self_attention.linear_q_down_proj.weight", ["self_attn.q_a_proj.weight"]),
        (
            "self_attention.linear_qkv_down_proj.weight",
            ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"],
        ),
        ("self_attention.linear_qkv_down_proj.layer_norm_weight", ["input_layernorm.weight"]),
        ("self_attention.linear_q_up_proj.weight", ["self_attn.q_b_proj.weight"]),
        ("self_attention.linear_q_up_proj.layer_norm_weight", ["self_attn.q_a_layernorm.weight"]),
        ("self_attention.linear_kv_down_proj.weight", ["self_attn.kv_a_proj_with_mqa.weight"]),
        ("self_attention.linear_kv_up_proj.weight", ["self_attn.kv_b_proj.weight"]),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", ["self_attn.kv_a_layernorm.weight"]),
        ("self_attention.core_attention.indexer.linear_wk.weight", ["self_attn.indexer.wk.weight"]),
        ("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"]),
        ("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"]),
        ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"]),
        ("mlp.linear_fc2.bias", ["mlp.down_proj.bias"]),
        ("mlp.router.weight", ["mlp.gate.weight"]),
        ("mlp.router.expert_bias", ["mlp.gate.e_score_correction_bias"]),
        ("mlp.experts.linear_fc1.weight107", ["mlp.experts.107.gate_proj.weight", "mlp.experts.107.up_proj.weight"]),
        ("mlp.experts.linear_fc2.weight0", ["mlp.experts.0.down_proj.weight"]),
        ("mlp.experts.linear_fc1.bias3", ["mlp.experts.3.gate_proj.bias", "mlp.experts.3.up_proj.bias"]),
        ("mlp.experts.linear_fc1._extra_state", []),
        ("mlp.experts.linear_fc1._extra_state7", []),
        (
            "mlp.experts.local_experts.9.linear_fc1.weight",
            ["mlp.experts.9.gate_proj.weight", "mlp.experts.9.up_proj.weight"],
        ),
        ("mlp.experts.local_experts.9.linear_fc2.weight", ["mlp.experts.9.down_proj.weight"]),
        ("mlp.experts.local_experts.9.linear_fc2._extra_state", []),
        (
            "mlp.shared_experts.linear_fc1.weight",
            ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
        ),
        ("mlp.shared_experts.linear_fc2.weight", ["mlp.shared_experts.down_proj.weight"]),
        ("mlp.shared_experts.gate_weight", ["mlp.shared_expert_gate.weight"]),
    ],
)
def test_names_of_a_layer(rest: str, expected: list[str]) -> None:
    """A parameter of a Megatron layer maps to the expected Hugging Face names, wherever the layer is.

    The places are the decoder, a language model inside a larger model, and two places in multi-token prediction.
    """
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
    for stem in (
        "mlp.linear_fc1.weight",
        "mlp.experts.linear_fc1.weight3",
        "mlp.experts.local_experts.3.linear_fc1.weight",
    ):
        (name,) = hugging_face_names(f"{LAYER}.{stem}", gated=False)
        assert name.endswith("up_proj.weight") and name in hugging_face_names(f"{LAYER}.{stem}")
    assert hugging_face_names(f"{LAYER}.mlp.linear_fc2.weight", gated=False) == (
        "model.layers.12.mlp.down_proj.weight",
    )


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
    [
        "cross_attention.linear_q.weight",
        "self_attention.linear_qkv.adapter.linear_in.weight",
        "self_attention.linear_new.weight",
        "self_attention.linear_proj.scale",
        "mlp.experts.weight1",
        "mlp.experts.local_experts.x.linear_fc1.weight",
        "mlp.experts.linear_fc3.weight0",
        "mlp.linear_fc1.weight0",
        "transformer_layer.mlp.linear_fc1.weight",
    ],
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
            "self_attention.linear_q_down_proj.weight",
            "self_attention.linear_q_up_proj.weight",
            "self_attention.linear_kv_down_proj.weight",
            "self_attention.linear_kv_up_proj.weight",
            "self_attention.linear_proj.weight",
        )
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
