"""Test name rules on published models: which modules are converted, which are copied and why, and what config.json
adds.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import published
import pytest
from synthetic import refused
from together import together

from fp4kit.checkpoint.selection.selection import (
    STACKS,
    Candidate,
    Decision,
    LayerKind,
    ModelFacts,
    Wishes,
    candidate,
    decide,
    is_transposed,
    model_facts,
)

MODEL = ModelFacts(7)


def decision(
    name: str, shape: tuple[int, ...] = (16, 64), dtype: str = "BF16", model: ModelFacts = MODEL, preset: str = "linear"
) -> Decision:
    """Return the decision on one unquantized tensor of the given name, shape and dtype."""
    (found,) = decide([candidate(name, dtype, shape, model)], Wishes(preset), 16).values()
    return found


# {model: number of quantized modules for the presets experts, mlp and linear}. Multi-token prediction is not quantized.
# With it, deepseek_v3 would have 45 experts instead of 30.
COUNTS = {
    "qwen3_dense": (0, 3 * 3, 3 * 7),
    "qwen3_moe": (3 * 12, 3 * 12 + 3, 3 * 12 + 3 + 4 * 4),
    "qwen3_moe_fused": (4, 4, 4 + 2 * 4),
    "gpt_oss": (4, 4, 4 + 2 * 4),
    "gpt_oss_mxfp4": (4, 4, 4 + 2 * 4),
    "deepseek_v3": (2 * 15, 2 * 15 + 3, 2 * 15 + 3 + 3 * 5),
    "deepseek_v3_fp8": (2 * 15, 2 * 15 + 3, 2 * 15 + 3 + 3 * 5),
    "deepseek_v4": (2 * 15, 2 * 15, 2 * 15 + 2 * 5),
    "mixtral": (24, 24, 24 + 2 * 4),
    "vlm_moe": (24, 24, 24 + 2 * 4),
}


@together("name", published.MODELS)
def test_counts_of_presets(name: str) -> None:
    candidates = published.MODELS[name]()
    converted = {preset: decide(candidates, Wishes(preset), 16) for preset in ("experts", "mlp", "linear")}
    assert tuple(sum(d.converted for d in found.values()) for found in converted.values()) == COUNTS[name]
    assert [list(found) for found in converted.values()] == [[tensor.name for tensor in candidates]] * 3


@pytest.mark.parametrize(
    ("wishes", "count"),
    [
        (Wishes("experts", keep_first=1, keep_last=1), 15),
        (Wishes("experts", only=("*", "model.layers.3.*")), 45),
        (Wishes("experts", keep_first=1, keep_last=1, only=("*", "model.layers.3.*")), 30),
        (Wishes("linear", only=("model.layers.3.*",)), 5 + 15),
        (Wishes("linear", keep=("model.layers.3.*",)), 48),
    ],
)
def test_multi_token_prediction_has_its_own_rule(wishes: Wishes, count: int) -> None:
    decisions = decide(published.deepseek_v3(), wishes, 16)
    assert sum(found.converted for found in decisions.values()) == count


def test_multi_token_prediction_is_a_subtree_unless_it_is_asked_for() -> None:
    layer = {
        name: found for name, found in decide(published.deepseek_v3(), Wishes(), 16).items() if ".layers.3." in name
    }
    weights = {name: found for name, found in layer.items() if name.endswith(".weight")}
    assert {found.subtree for found in weights.values()} == {"model.layers.3"} and all(
        f.listed for f in weights.values()
    )
    assert set(weights.values()) == {Decision(False, "multi-token prediction (model.layers.3)", True, "model.layers.3")}
    asked = decide(published.deepseek_v3(), Wishes(only=("model.layers.3.*",)), 16)
    assert not any(found.subtree for found in asked.values())
    eh_proj = asked["model.layers.3.eh_proj.weight"]
    assert eh_proj == Decision(False, "input of multi-token prediction, which engines read unquantized (eh_proj)", True)
    assert asked["model.layers.3.shared_head.head.weight"].reason == "output head (shared_head)"
    assert asked["model.layers.3.mlp.gate.weight"].reason == "MoE router"


def test_native_names_of_multi_token_prediction() -> None:
    decisions = decide(published.deepseek_v4(), Wishes(), 16)
    assert decisions["mtp.0.ffn.experts.1.w1.weight"] == Decision(False, "multi-token prediction (mtp)", True, "mtp")
    assert decisions["layers.1.attn.wq_a.weight"].converted and decisions["layers.1.ffn.experts.1.w1.weight"].converted
    asked = decide(published.deepseek_v4(), Wishes("experts", only=("mtp.*",)), 16)
    assert sum(found.converted for found in asked.values()) == 15


@pytest.mark.parametrize("module", ["mtp.fc", "mtp.0.e_proj", "mtp.0.h_proj", "model.mtp_layers.0.input_proj"])
def test_inputs_of_multi_token_prediction_are_copied_even_if_it_is_asked_for(module: str) -> None:
    tensor = candidate(f"{module}.weight", "BF16", (16, 64), MODEL)
    found = decide([tensor], Wishes(only=(module,)), 16)[tensor.name]
    leaf = module.rpartition(".")[2]
    assert found == Decision(False, f"input of multi-token prediction, which engines read unquantized ({leaf})", True)
    assert decision("model.layers.0.mlp.fc.weight").converted


@together(
    "module, reason, listed",
    [
        ("model.embed_tokens", "embedding (embed_tokens)", False),
        ("transformer.wte", "embedding (wte)", False),
        ("shared", "embedding (shared)", False),
        ("model.shared", "embedding (shared)", False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "embedding (relative_attention_bias)", False),
        ("embeddings.word_embeddings", "embedding (embeddings)", False),
        ("model.embed_tokens_extend.proj.0", "layer of an embedding (embed_tokens_extend)", True),
        ("model.embed_vision.embedding_projection", "layer of an embedding (embed_vision)", True),
        ("lm_head", "output head (lm_head)", True),
        ("embed_out", "output head (embed_out)", True),
        ("head", "output head (head)", True),
        ("score", "output head (score)", True),
        ("model.value_head", "output head (value_head)", True),
        ("output", "output head (output)", True),
        ("model.layers.0.mlp.gate", "MoE router", True),
        ("model.layers.0.block_sparse_moe.gate", "MoE router", True),
        ("model.layers.0.mlp.gate.wg", "MoE router", True),
        ("model.layers.0.mlp.shared_expert_gate", "MoE router", True),
        ("model.layers.0.feed_forward.router", "MoE router", True),
        ("model.layers.0.block_sparse_moe.router.layer", "MoE router", True),
        ("model.layers.0.mlp.router.classifier", "MoE router", True),
        ("mtp.0.ffn.w1", "multi-token prediction (mtp)", True),
        ("model.mtp_layers.0.mlp.up_proj", "multi-token prediction (model.mtp_layers)", True),
        ("model.layers.7.mlp.up_proj", "multi-token prediction (model.layers.7)", True),
        ("vision_tower.encoder.layers.9.mlp.fc1", "vision or audio tower (vision_tower)", True),
        ("model.video_tower.encoder.layers.0.fc1", "vision or audio tower (model.video_tower)", True),
        ("model.connector.perceiver_resampler.layers.0.fc1", "vision or audio tower (model.connector)", True),
        ("qformer.encoder.layer.0.dense", "vision or audio tower (qformer)", True),
        ("audio_tower.layers.0.self_attn.q_proj", "vision or audio tower (audio_tower)", True),
        ("model.multi_modal_projector.linear_1", "vision or audio tower (model.multi_modal_projector)", True),
        ("model.layers.0.self_attn.indexer.wk", "engines read it unquantized (indexer.wk)", True),
        ("model.layers.0.self_attn.indexer.weights_proj", "engines read it unquantized (weights_proj)", True),
        ("layers.0.attn.compressor.wkv", "engines read it unquantized (compressor.wkv)", True),
        ("model.layers.0.mamba.x_proj", "engines read it unquantized (x_proj)", True),
    ],
)
def test_layers_that_are_left_out(module: str, reason: str, listed: bool) -> None:
    found = decision(f"{module}.weight")
    assert (found.converted, found.reason, found.listed) == (False, reason, listed)


@together(
    "module, kind",
    [
        ("model.layers.0.mlp.experts.3.gate_proj", "routed expert"),
        ("model.layers.0.block_sparse_moe.experts.3.w2", "routed expert"),
        ("model.layers.0.feed_forward.experts.3.up_proj", "routed expert"),
        ("backbone.layers.0.mixer.experts.3.up_proj", "routed expert"),
        ("model.layers.0.mlp.shared_expert.up_proj", "shared expert"),
        ("layers.0.ffn.shared_experts.w1", "shared expert"),
        ("model.layers.0.mlp.gate_up_proj", "dense MLP"),
        ("model.layers.0.feed_forward.w3", "dense MLP"),
        ("backbone.layers.0.mixer.up_proj", "dense MLP"),
        ("encoder.layer.0.intermediate.dense", "dense MLP"),
        ("encoder.layer.0.output.dense", "dense MLP"),
        ("encoder.layer.0.attention.output.dense", "attention"),
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.layers.0.self_attn.gate_proj", "attention"),
        ("layers.0.attn.wo_a", "attention"),
        ("model.layers.0.linear_attn.in_proj_qkvz", "attention"),
        ("model.layers.0.self_attn.indexer.wq_b", "attention"),
        ("backbone.layers.0.mixer.in_proj", "linear layer"),
        ("pooler.dense", "linear layer"),
    ],
)
def test_kinds(module: str, kind: LayerKind) -> None:
    assert decision(f"{module}.weight") == Decision(True, f"{kind} (preset linear)")
    experts, mlp = (decision(f"{module}.weight", preset=preset) for preset in ("experts", "mlp"))
    assert experts.converted == (kind in ("routed expert", "shared expert"))
    assert mlp.converted == (kind in ("routed expert", "shared expert", "dense MLP"))
    if not mlp.converted:
        assert mlp == Decision(False, f"{kind}: not in preset mlp", True)


@together("leaf", STACKS)
def test_stacks_of_experts(leaf: str) -> None:
    name = f"model.layers.0.mlp.experts.{leaf}"
    for stored in (name, f"{name}.weight"):
        assert decision(stored, (4, 96, 64)) == Decision(True, "routed expert (preset linear)")
        assert decision(stored, (4, 96, 72)) == Decision(False, "K = 72 is not a multiple of 16", True)
    assert decision(f"{name}_bias", (4, 96)) == Decision(False, "not a weight")
    assert decision(f"model.layers.0.mlp.{leaf}.weight", (4, 96, 64)) == Decision(False, "3-D: not a linear layer")


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("transformer.blocks.0.ffn.experts.mlp.w1", (256, 64), "(w1, 2-D)"),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 96, 64), "(gate_up_proj, 4-D)"),
        ("model.layers.0.mlp.experts.fc1.weight", (4, 96, 64), "(fc1, 3-D)"),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (4, 96, 64), "(input_linear, 3-D)"),
    ],
)
def test_stacks_of_other_forms(name: str, shape: tuple[int, ...], reason: str) -> None:
    assert decision(name, shape) == Decision(False, f"unsupported expert stack {reason}", True)


@together(
    "name, shape, dtype, expected",
    [
        ("a.weight", (16, 64), "F16", Decision(True, "linear layer (preset linear)")),
        ("a.weight", (16, 64), "modelopt NVFP4", Decision(True, "linear layer (preset linear)")),
        ("a.weight", (16, 64), "I64", Decision(False, "dtype I64 is not one of F32, F16, BF16", True)),
        ("a.weight", (16, 64), "F8_E4M3", Decision(False, "dtype F8_E4M3 is not one of F32, F16, BF16", True)),
        ("a.weight", (0, 64), "BF16", Decision(False, "has no elements", True)),
        ("a.weight", (16, 0), "BF16", Decision(False, "has no elements", True)),
        ("a.weight", (16, 8), "BF16", Decision(False, "K = 8 is not a multiple of 16", True)),
        ("a.weight", (1, 16), "BF16", Decision(True, "linear layer (preset linear)")),
        ("a.weight", (64,), "BF16", Decision(False, "1-D: a norm or a bias")),
        ("a.weight", (), "BF16", Decision(False, "0-D: not a linear layer")),
        ("a.weight", (4, 3, 2, 14, 14), "BF16", Decision(False, "5-D: not a linear layer")),
        ("a.bias", (64,), "BF16", Decision(False, "not a weight")),
        ("self_attn.sinks", (64,), "BF16", Decision(False, "not a weight")),
        ("weight", (16, 64), "BF16", Decision(False, "not a weight")),
        ("model.weight.a.weight", (16, 64), "BF16", Decision(True, "linear layer (preset linear)")),
    ],
)
def test_dtypes_and_shapes(name: str, shape: tuple[int, ...], dtype: str, expected: Decision) -> None:
    assert decision(name, shape, dtype) == expected


def test_transposed_layers() -> None:
    found = decision("h.0.attn.c_attn.weight", model=ModelFacts(7, "gpt2"))
    assert found == Decision(False, "gpt2 stores its layers transposed ([K, N])", True)
    assert decision("h.0.attn.q_proj.weight", model=ModelFacts(7, "gpt2")).converted


@together(
    "name, shape, transposed",
    [
        ("h.0.attn.c_attn.weight", (64, 192), True),
        ("h.0.attn.c_attn.weight", (192, 64), False),  # nanoGPT, StarCoder, Qwen
        ("h.0.attn.c_attn.weight", (96, 64), False),
        ("h.0.mlp.c_fc.weight", (64, 256), True),
        ("h.0.mlp.c_fc.weight", (256, 64), False),
        ("h.0.mlp.c_proj.weight", (256, 64), True),
        ("h.0.mlp.c_proj.weight", (64, 256), False),
        ("h.0.attn.c_proj.weight", (64, 64), False),  # unknown
    ],
)
def test_transposed_layers_without_a_model_type(name: str, shape: tuple[int, int], transposed: bool) -> None:
    found = decision(name, shape)
    assert is_transposed(found.reason) == transposed == (not found.converted)


def test_every_model_of_transformers_with_conv1d() -> None:
    """The table names every model type whose source imports Conv1D of transformers."""
    transformers = pytest.importorskip("transformers")
    models = Path(transformers.__file__).parent / "models"
    folders = {
        path.parent
        for path in models.glob("*/modeling_*.py")
        if re.search(r"pytorch_utils import [^\n]*\bConv1D\b", path.read_text(encoding="utf-8"))
    }
    assert len(folders) == 5
    for folder in folders:
        config = next(folder.glob("configuration_*.py")).read_text(encoding="utf-8")
        kinds = set(re.findall(r'model_type = "([\w-]+)"', config))
        assert any(model_facts({"model_type": kind}).conv1d == kind for kind in kinds)
    assert model_facts({"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}).conv1d == "gpt2"
    assert model_facts({"model_type": "llama", "text_config": {"model_type": "gpt_bigcode"}}).conv1d == ""


@together(
    "config, model",
    [
        ({}, ModelFacts(None)),
        ({"num_hidden_layers": None}, ModelFacts(None)),
        ({"model_type": "llama", "num_hidden_layers": 2}, ModelFacts(2, "llama")),
        ({"n_layer": 3}, ModelFacts(3)),
        ({"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 2}}, ModelFacts(2)),
        ({"thinker_config": {"text_config": {"num_hidden_layers": 4}, "num_hidden_layers": 5}}, ModelFacts(4)),
        ({"text_config": "none", "num_hidden_layers": 2}, ModelFacts(2)),
        ({"num_hidden_layers": 32, "encoder_layers": 32, "decoder_layers": 4}, ModelFacts(4, "", True)),
        ({"num_layers": 6, "num_decoder_layers": 3, "is_encoder_decoder": True}, ModelFacts(3, "", True)),
    ],
)
def test_facts_of_config(config: dict[str, object], model: ModelFacts) -> None:
    assert model_facts(config) == model


@together("value", ["1", 0, -1, 100_001, True, 2.0, float("nan")])
@together("inside", [False, True])
def test_invalid_layer_counts_are_rejected(value: object, inside: bool) -> None:
    config = {"num_hidden_layers": value}
    with refused(f"config.json: num_hidden_layers is {value!r}; a whole number from 1 to 100000 is needed"):
        model_facts({"text_config": config} if inside else config)


@together(
    "module, place",
    [
        ("model.layers.3.mlp.up_proj", ("model.layers.3", 3)),
        ("model.language_model.layers.3.mlp.up_proj", ("model.language_model.layers.3", 3)),
        ("language_model.model.layers.0.a", ("language_model.model.layers.0", 0)),
        ("transformer.h.6.mlp.dense", ("transformer.h.6", 6)),
        ("encoder.layer.2.output.dense", ("encoder.layer.2", 2)),
        ("model.layers.3.mlp.layers.1.a", ("model.layers.3", 3)),
        ("layers.2", ("layers.2", 2)),
        ("model.layers.7.a", None),  # multi-token prediction
        ("mtp.layers.0.a", None),
        ("visual.blocks.0.a", None),
        ("model.layers.x.a", None),
        ("model.layers.1234567890.a", None),
        ("model.layers.³.a", None),
        ("model.layers.٣.a", None),
        (f"model.layers.{'9' * 5000}.a", None),
        (f"model.layers.{'0' * 9}3.a", None),
        ("experts.3.a", None),
    ],
)
def test_layers_of_the_decoder(module: str, place: tuple[str, int] | None) -> None:
    assert candidate(f"{module}.weight", "BF16", (16, 64), MODEL).decoder_layer == place


def test_layers_of_an_encoder_are_none_of_the_decoder() -> None:
    model = ModelFacts(4, "whisper", has_encoder=True)
    names = (f"model.{part}.layers.9.fc1.weight" for part in ("encoder", "decoder"))
    encoder, decoder = (candidate(name, "BF16", (16, 64), model) for name in names)
    assert encoder.decoder_layer is None and decide([encoder], Wishes(keep_last=4), 16)[encoder.name].converted
    assert decide([decoder], Wishes(), 16)[decoder.name].reason == "multi-token prediction (model.decoder.layers.9)"


def test_every_weight_of_published_models_is_converted_listed_or_no_linear_layer() -> None:
    """Every weight that loaders could expect to be quantized is converted or in the exclusion list."""
    for make in published.MODELS.values():
        candidates = {tensor.name: tensor for tensor in make()}
        for name, found in decide(candidates.values(), Wishes("experts"), 32).items():
            tensor = candidates[name]
            silent = not found.converted and not found.listed
            assert silent == (len(tensor.shape) == 1 or name.endswith("bias") or "embed" in found.reason), (name, found)


def test_counts_of_kinds() -> None:
    kinds = Counter(tensor.kind for tensor in published.deepseek_v3() if len(tensor.shape) == 2 and tensor.is_weight)
    assert kinds["routed expert"] == 36 and kinds["shared expert"] == 9 and kinds["attention"] == 20


def test_module_says_whether_it_is_a_weight() -> None:
    packed = Candidate("a.weight_packed", "a", "nvfp4-pack-quantized", (16, 64), MODEL)
    assert packed.is_weight and decide([packed], Wishes(), 16)[packed.name].converted
    assert not candidate("a.weight_packed", "U8", (16, 32), MODEL).is_weight
