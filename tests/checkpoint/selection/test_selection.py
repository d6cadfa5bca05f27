"""Test the selection of layers: presets, kept layers, patterns, errors, shared amaxes, and the cost for
100,000 names.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import published
import pytest
import synthetic
from seconds import TEN, cpu_seconds
from synthetic import refused
from together import together

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection import selection
from fp4kit.checkpoint.selection.names import hugging_face_names
from fp4kit.checkpoint.selection.selection import Candidate, Decision, ModelFacts, Selector, Wishes, candidate, decide
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify


def converted(candidates: list[Candidate], wishes: Wishes) -> set[str]:
    """Return the modules that are quantized. Raise an error if the wishes are not valid for the candidates."""
    decisions = decide(candidates, wishes, 16)
    selection.check(candidates, wishes, decisions)
    return {tensor.module for tensor in candidates if decisions[tensor.name].converted}


def refused_wishes(candidates: list[Candidate], wishes: Wishes, text: str) -> None:
    with refused(text):
        selection.check(candidates, wishes, decide(candidates, wishes, 16))


@pytest.mark.parametrize(
    ("first", "last", "layers"), [(0, 0, "0123"), (1, 0, "123"), (0, 1, "012"), (1, 2, "1"), (3, 0, "3")]
)
def test_layers_that_are_kept(first: int, last: int, layers: str) -> None:
    modules = converted(published.qwen3_moe(), Wishes(keep_first=first, keep_last=last))
    assert {module.split(".")[2] for module in modules} == set(layers)


def test_kept_layers_are_listed_as_subtrees() -> None:
    wishes = Wishes(keep_first=1, keep_last=1)
    for name, found in decide(published.vlm_moe(), wishes, 16).items():
        if ".layers." in name and "norm" not in name:
            prefix = f"model.language_model.layers.{name.split('.')[3]}"
            option = "first" if prefix.endswith("0") else "last"
            assert found == Decision(False, f"--keep-{option} 1 ({prefix})", True, prefix)


def test_layers_that_are_kept_of_prefixed_models() -> None:
    for name, prefix in (("vlm_moe", "model.language_model.layers.1."), ("deepseek_v4", "layers.1.")):
        modules = converted(published.MODELS[name](), Wishes(keep_first=1))
        assert modules and all(module.startswith(prefix) for module in modules)


def test_no_layer_is_like_another_by_its_digits() -> None:
    model = ModelFacts(12)
    candidates = [candidate(f"model.layers.{i}.mlp.up_proj.weight", "BF16", (16, 64), model) for i in range(12)]
    assert converted(candidates, Wishes(keep_first=2)) == {f"model.layers.{i}.mlp.up_proj" for i in range(2, 12)}
    assert converted(candidates, Wishes(keep_last=2)) == {f"model.layers.{i}.mlp.up_proj" for i in range(10)}


@pytest.mark.parametrize("option", ["keep_first", "keep_last"])
def test_layers_that_cannot_be_kept(option: str) -> None:
    moe, words = published.qwen3_moe(), "--" + option.replace("_", "-")
    refused_wishes(moe, Wishes(**{option: 5}), f"{words} 5: the decoder has 4 layers; ask for at most that many")  # type: ignore[arg-type]
    unknown = [replace(tensor, model=ModelFacts(None)) for tensor in moe]
    no_count = f"{words} 1: config.json does not say how many layers there are; add num_hidden_layers"
    refused_wishes(unknown, Wishes(**{option: 1}), no_count)  # type: ignore[arg-type]
    absent = [tensor for tensor in moe if ".layers.0." not in tensor.name and ".layers.3." not in tensor.name]
    number = 0 if option == "keep_first" else 3
    missing = f"{words} 1: no tensor is in layer {number} of 4; correct num_hidden_layers of config.json"
    refused_wishes(absent, Wishes(**{option: 1}), missing)  # type: ignore[arg-type]
    assert converted(unknown, Wishes()) and converted(absent, Wishes())
    refused_wishes(moe, Wishes(**{option: 4}), "0 tensors to convert: lm_head.weight (output head (lm_head)); ")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, True, 1.0, "1", None])
def test_invalid_numbers_of_layers_are_rejected(count: object) -> None:
    with refused(f"--keep-first {count!r}: a whole number of layers, 0 or more, is needed"):
        Wishes(keep_first=count)  # type: ignore[arg-type]
    with refused(f"--keep-last {count!r}: a whole number of layers, 0 or more, is needed"):
        Wishes(keep_last=count)  # type: ignore[arg-type]


def test_invalid_wishes_are_rejected() -> None:
    with refused("preset 'expert': one of experts, mlp, linear is needed"):
        Wishes("expert")
    with refused("keep [1]: a tuple of patterns is needed, such as ('*.experts.*',)"):
        Wishes(keep=[1])  # type: ignore[arg-type]
    assert Wishes(keep=["*"]) == Wishes(keep=("*",))  # type: ignore[arg-type]


def test_keep_copies_and_only_restricts() -> None:
    moe = published.qwen3_moe()
    assert len(converted(moe, Wishes(only=("*.experts.*", "*.self_attn.o_proj")))) == 36 + 4
    wishes = Wishes(only=("*.experts.*",), keep=("*.experts.[123].*", "*.layers.1.*"))
    leaves = ("gate_proj", "up_proj", "down_proj")
    assert converted(moe, wishes) == {f"model.layers.{i}.mlp.experts.0.{leaf}" for i in (2, 3) for leaf in leaves}
    decisions = decide(moe, wishes, 16)
    assert decisions["model.layers.1.mlp.experts.1.up_proj.weight"] == Decision(False, "--keep *.experts.[123].*", True)
    assert decisions["model.layers.1.mlp.experts.0.up_proj.weight"] == Decision(False, "--keep *.layers.1.*", True)
    assert decisions["model.layers.1.self_attn.o_proj.weight"] == Decision(False, "--keep *.layers.1.*", True)
    assert decisions["model.layers.2.self_attn.o_proj.weight"] == Decision(False, "not named by --only", True)
    assert decisions["model.layers.1.mlp.gate.weight"] == Decision(False, "MoE router", True)


@together(
    "patterns, asks",
    [
        (["model.layers.3.*"], True),
        (["model.layers.3*"], True),
        (["model.layers.3.mlp.experts.0.up_proj"], True),
        (["model.layers.[3].*"], False),
        (["model.layers.?.*"], False),
        (["model.layers.*"], False),
        (["*.3.*"], False),
        (["model.layers.30.*", "*"], False),  # layer 30 is not layer 3
    ],
)
def test_a_subtree_is_asked_for_by_its_name(patterns: list[str], asks: bool) -> None:
    """Layer 3 of a model of three layers is multi-token prediction."""
    tensor = candidate("model.layers.3.mlp.experts.0.up_proj.weight", "BF16", (16, 64), ModelFacts(3))
    assert decide([tensor], Wishes(only=tuple(patterns)), 16)[tensor.name].converted == asks


def test_patterns_match_stacks() -> None:
    fused = published.MODELS["qwen3_moe_fused"]()
    assert converted(fused, Wishes(only=("*.experts.down_proj",))) == {
        f"model.layers.{i}.mlp.experts.down_proj" for i in (0, 1)
    }


@together("option", ["keep", "only"])
@together(
    "pattern, similar",
    [
        ("layers.9", ""),
        ("*.Experts.*", "did you mean '*.experts.*'?; "),
        ("*.experts.0.up_proj.weight", "did you mean '*.experts.0.up_proj'?; "),
        ("gate_proj", "did you mean '*.gate_proj'?; "),
        ("", ""),
        ("*experts.[!0-9]*", ""),
    ],
)
def test_patterns_that_match_nothing(option: str, pattern: str, similar: str) -> None:
    wishes = Wishes(**{option: ("*.mlp.*", pattern)})  # type: ignore[arg-type]
    refused_wishes(
        published.qwen3_moe(),
        wishes,
        f"--{option} {pattern!r}: matches no module; {similar}"
        "names look like model.embed_tokens, model.norm and 63 more; a pattern must match a whole name, with its case"
        " and without .weight",
    )


@pytest.mark.parametrize(
    ("make", "wishes", "text"),
    [
        (published.qwen3_moe, Wishes(only=("lm_head", "*")), "lm_head (output head (lm_head))"),
        (published.qwen3_moe, Wishes("experts", only=("*.o_proj", "*")), "o_proj (attention: not in preset experts)"),
        (
            published.qwen3_moe,
            Wishes(only=("*.o_proj", "*"), keep=("*.o_proj",)),
            "layers.0.self_attn.o_proj (--keep *.o_proj)",
        ),
        (
            published.qwen3_moe,
            Wishes(only=("*.layers.0.*", "*"), keep_first=1),
            "gate_proj (--keep-first 1 (model.layers.0))",
        ),
        (
            published.vlm_moe,
            Wishes(only=("*.visual.*", "*")),
            "qkv (vision or audio tower (model.visual)); to convert it, use a pattern that begins with model.visual.",
        ),
        (
            published.deepseek_v3,
            Wishes(only=("*.layers.3.*", "*")),
            "(multi-token prediction (model.layers.3)); to convert it, use a pattern that begins with model.layers.3.",
        ),
    ],
)
def test_only_what_is_left_out(make: Callable[[], list[Candidate]], wishes: Wishes, text: str) -> None:
    candidates = make()
    with pytest.raises(ValueError, match="every module that it matches stays unquantized: ") as caught:
        selection.check(candidates, wishes, decide(candidates, wishes, 16))
    assert text in str(caught.value) and str(caught.value).startswith(f"--only {wishes.only[0]!r}: ")
    assert "--keep-first" not in text or str(caught.value).endswith("(model.layers.0))")


def test_a_selection_of_nothing() -> None:
    text = "0 tensors to convert: model.layers.0.self_attn.q_proj.weight (attention: not in preset experts); "
    refused_wishes(published.qwen3_dense(), Wishes("experts"), text)
    for wishes in (Wishes(), Wishes(keep=("x",)), Wishes(only=("x",))):
        refused_wishes([], wishes, "0 tensors to convert: no 2-D .weight tensors; change the preset, the patterns or")
    doubles = [replace(one, dtype="F64") for one in published.qwen3_dense()]
    refused_wishes(doubles, Wishes(), "is not one of F32, F16, BF16); cast the weights to one of these dtypes")
    odd = [replace(one, shape=(*one.shape[:-1], 200)) for one in published.qwen3_dense()]
    refused_wishes(odd, Wishes(), "(K = 200 is not a multiple of 16); choose a recipe without blocks along K, such as")


@together("name", published.MODELS)
@together(
    "wishes",
    [
        Wishes(),
        Wishes("experts", 1, 1),
        Wishes("mlp", keep=("*.1.*", "*.o_proj")),
        Wishes(only=("*.mlp.*", "mtp.*", "*.1.*")),
    ],
)
def test_tensors_may_come_one_at_a_time_and_in_any_order(name: str, wishes: Wishes) -> None:
    """A live export decides on tensors one by one, and must decide as the converter does, which sees all tensors."""
    candidates = published.MODELS[name]()
    expected = decide(candidates, wishes, 16)
    shuffled = random.Random(0).sample(candidates, len(candidates))
    assert decide(shuffled, wishes, 16) == expected
    for tensor in candidates:
        assert decide([tensor], wishes, 16) == {tensor.name: expected[tensor.name]}


def test_one_selector_keeps_two_models_apart() -> None:
    """A Selector's cached decisions must not mix models, blocks, dtypes or shapes.

    Layer 3 belongs to the decoder in one model and to multi-token prediction in the other.
    """
    selector = Selector(Wishes(), 16)
    name = "model.layers.3.mlp.experts.0.up_proj.weight"
    models = (ModelFacts(3), ModelFacts(4), ModelFacts(3))
    found = [selector.decide(candidate(name, "BF16", (16, 64), model)).converted for model in models]
    assert found == [False, True, False]
    others = [("BF16", (16, 72)), ("I64", (16, 64)), ("BF16", (64,)), ("BF16", (16, 64))]
    found = [selector.decide(candidate(name, *other, models[1])).converted for other in others]
    assert found == [False, False, False, True]
    assert not selector.decide(candidate(name.removesuffix(".weight"), "BF16", (16, 64), models[1])).converted


@together(
    "module, alike",
    [
        ("a.experts.12.up_proj", "a.experts.#.up_proj"),
        ("a.experts.12.b.experts.3.c", "a.experts.#.b.experts.3.c"),
        ("a.experts.12", None),
        ("a.experts.12.", "a.experts.#."),
        ("a.experts.x1.up_proj", None),
        ("a.experts..up_proj", None),
        ("experts.1.up_proj", None),
        ("a.experts.-1.up_proj", None),
        ("a.experts.1a.experts.2.c", None),
        ("", None),
    ],
)
def test_experts_are_alike_but_for_a_number(module: str, alike: str | None) -> None:
    assert selection._without_expert_number(module) == (module if alike is None else alike)


def test_plan_decides_as_the_rules_do(tmp_path: Path) -> None:
    synthetic.deepseek(tmp_path / "m")
    plan = make_plan(tmp_path / "m", wishes=Wishes(keep=("*.experts.*",)))
    model = ModelFacts(2, "deepseek_v3")
    candidates = [candidate(tensor.name, tensor.dtype, tensor.shape, model) for tensor in plan.tensors]
    expected = decide(candidates, Wishes(keep=("*.experts.*",)), 16)
    assert {t.name: t.action == "quantize" for t in plan.tensors} == {name: d.converted for name, d in expected.items()}


def _big_model(layers: int = 61, experts: int = 550) -> list[str]:
    leaves = ("gate_proj", "up_proj", "down_proj")
    return [
        f"model.layers.{i}.mlp.experts.{e}.{leaf}" for i in range(layers) for e in range(experts) for leaf in leaves
    ]


def _decide_all(modules: list[str], wishes: Wishes) -> int:
    """Decide, as a plan does, which of the modules are quantized. Return the number of groups that share an amax.

    modules: the names of the modules of a DeepSeek-V3 model.
    """
    model = ModelFacts(61, "deepseek_v3")
    candidates = [candidate(f"{module}.weight", "BF16", (2048, 7168), model) for module in modules]
    decisions = decide(candidates, wishes, 16)
    selection.check(candidates, wishes, decisions)
    taken = [tensor.module for tensor in candidates if decisions[tensor.name].converted]
    assert not fused_layers.missing_gated_halves(taken)
    return len(fused_layers.shared_amax_groups(taken))


@pytest.mark.exhaustive
def test_100_000_names_are_decided_in_seconds() -> None:
    """The cost of rules, patterns and shared scales must stay linear in the number of names."""
    modules = _big_model()
    wishes = Wishes("experts", 1, 1, ("*.layers.7.*", "*.experts.3.*"), ("*.experts.*", "model.layers.5.*"))

    def decide_all() -> None:
        assert _decide_all(modules, wishes) == 58 * 549 * 2

    assert len(modules) > 100_000 and cpu_seconds(decide_all) < TEN


@pytest.mark.exhaustive
def test_100_000_names_of_megatron_are_decided_in_seconds() -> None:
    names = [
        f"decoder.layers.{i}.mlp.experts.linear_fc{n}.weight{e}" for i in range(61) for e in range(550) for n in (1, 2)
    ]
    modules = []

    def decide_all() -> None:
        modules[:] = [name.removesuffix(".weight") for megatron in names for name in hugging_face_names(megatron)]
        assert _decide_all(modules, Wishes("experts")) == 61 * 550 * 2

    assert cpu_seconds(decide_all) < TEN and sorted(modules) == sorted(_big_model())


def test_the_patterns_of_a_hostile_user_are_bounded() -> None:
    """A --keep or --only pattern cannot make matching take exponential time, because globs do not backtrack."""
    name = "model.layers.0." + "a" * 3000
    candidates = [candidate(f"{name}.weight", "BF16", (16, 64), ModelFacts(1))]
    wishes = Wishes(keep=("*a" * 60 + "*b",))
    assert cpu_seconds(lambda: refused_wishes(candidates, wishes, "matches no module")) < TEN


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
    every = decide(published.deepseek_v3(), Wishes(), 16)
    layer = {name: found for name, found in every.items() if ".layers.3." in name}
    weights = {name: found for name, found in layer.items() if name.endswith(".weight")}
    assert {(found.subtree, found.listed) for found in weights.values()} == {("model.layers.3", True)}
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
def test_kinds(module: str, kind: selection.LayerKind) -> None:
    assert decision(f"{module}.weight") == Decision(True, f"{kind} (preset linear)")
    experts, mlp = (decision(f"{module}.weight", preset=preset) for preset in ("experts", "mlp"))
    assert experts.converted == (kind in ("routed expert", "shared expert"))
    assert mlp.converted == (kind in ("routed expert", "shared expert", "dense MLP"))
    if not mlp.converted:
        assert mlp == Decision(False, f"{kind}: not in preset mlp", True)


@together("leaf", selection.STACKS)
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
    assert selection.is_transposed(found.reason) == transposed == (not found.converted)


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
        assert any(selection.model_facts({"model_type": kind}).conv1d == kind for kind in kinds)
    outer = {"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}
    assert selection.model_facts(outer).conv1d == "gpt2"
    assert selection.model_facts({"model_type": "llama", "text_config": {"model_type": "gpt_bigcode"}}).conv1d == ""


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
    assert selection.model_facts(config) == model


@together("value", ["1", 0, -1, 100_001, True, 2.0, float("nan")])
@together("inside", [False, True])
def test_invalid_layer_counts_are_rejected(value: object, inside: bool) -> None:
    config = {"num_hidden_layers": value}
    with refused(f"config.json: num_hidden_layers is {value!r}; a whole number from 1 to 100000 is needed"):
        selection.model_facts({"text_config": config} if inside else config)


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


def test_module_says_whether_it_is_a_weight() -> None:
    packed = Candidate("a.weight_packed", "a", "nvfp4-pack-quantized", (16, 64), MODEL)
    assert packed.is_weight and decide([packed], Wishes(), 16)[packed.name].converted
    assert not candidate("a.weight_packed", "U8", (16, 32), MODEL).is_weight


ALL = Wishes(only=("*",))
# {class of the model: (modules that are quantized, modules that stay unquantized)}
MODULES = {
    "FluxTransformer2DModel": (
        ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_out"],
        (
            "transformer_blocks.0.norm1_context.linear single_transformer_blocks.0.norm.linear norm_out.linear"
            " proj_out x_embedder context_embedder time_text_embed.timestep_embedder.linear_1"
        ).split(),
    ),
    "QwenImageTransformer2DModel": (
        ["transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.txt_mlp.net.0.proj"],
        ["transformer_blocks.0.img_mod.1", "transformer_blocks.0.txt_mod.1", "img_in", "txt_in", "proj_out"],
    ),
    "WanTransformer3DModel": (
        ["blocks.0.attn2.to_k", "blocks.0.ffn.net.0.proj"],
        ["condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1", "proj_out"],
    ),
    "HunyuanVideoTransformer3DModel": (
        ["transformer_blocks.0.ff_context.net.2", "single_transformer_blocks.0.proj_mlp"],
        ["context_embedder.token_refiner.refiner_blocks.0.attn.to_q", "context_embedder.proj_in", "proj_out"],
    ),
    "LTXVideoTransformer3DModel": (
        ["transformer_blocks.0.attn1.to_q", "transformer_blocks.0.ff.net.0.proj"],
        ["proj_in", "time_embed.linear", "caption_projection.linear_1", "proj_out"],
    ),
    "SD3Transformer2DModel": (
        ["transformer_blocks.0.attn.add_q_proj", "transformer_blocks.0.ff_context.net.2"],
        ["transformer_blocks.0.norm1.linear", "context_embedder", "norm_out.linear", "proj_out"],
    ),
}


def _write(folder: Path, name: str, modules: list[str], shards: int = 1) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": name}))
    tensors = {f"{module}.weight": synthetic.random(module, (32, 64)) for module in modules}
    if shards == 1:
        synthetic.write_file(folder / "diffusion_pytorch_model.safetensors", tensors)
        return
    weight_map = {}
    for i in range(shards):
        file = f"diffusion_pytorch_model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        synthetic.write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", MODULES)
def test_layers_of_known_classes(tmp_path: Path, name: str) -> None:
    quantized, kept = MODULES[name]
    _write(tmp_path / "m", name, quantized + kept)
    plan = make_plan(tmp_path / "m", "nvfp4-te", wishes=ALL)
    assert sorted(tensor.name for tensor in plan.converted) == sorted(f"{module}.weight" for module in quantized)
    assert any("no engine is known to load" in text for text in plan.warnings)


@pytest.mark.parametrize("name", MODULES)
def test_refused_without_only(tmp_path: Path, name: str) -> None:
    """The advice of the refusal works, and the modulation stays unquantized."""
    _write(tmp_path / "m", name, MODULES[name][0] + MODULES[name][1])
    for format in (None, "modelopt", "compressed-tensors", "comfy"):
        with refused("no engine is known to load quantized weights of Diffusers models") as caught:
            make_plan(tmp_path / "m", "nvfp4-te", format=format)
    for pattern in re.findall(r"--only '([^']*)'", str(caught.value)):
        plan = make_plan(tmp_path / "m", "nvfp4-te", wishes=Wishes(only=(pattern,)))
        assert plan.converted and {one.name.removesuffix(".weight") for one in plan.converted} <= {*MODULES[name][0]}
    assert "--only '*'" in str(caught.value)


def test_an_unknown_class_is_given_no_pattern_of_other_classes(tmp_path: Path) -> None:
    _write(tmp_path / "other", "NewTransformer2DModel", ["blocks.0.attn.to_q", "proj_out"])
    with refused("_class_name NewTransformer2DModel: it is not known which layers") as caught:
        make_plan(tmp_path / "other", "nvfp4-te")
    assert str(caught.value).endswith("name layers with --only; fp4kit inspect lists them")
    plan = make_plan(tmp_path / "other", "nvfp4-te", wishes=Wishes(only=("blocks.*",)))
    assert [tensor.name for tensor in plan.converted] == ["blocks.0.attn.to_q.weight"]


def test_shards_and_index_keep_their_names(tmp_path: Path) -> None:
    quantized, kept = MODULES["FluxTransformer2DModel"]
    _write(tmp_path / "m", "FluxTransformer2DModel", quantized + kept, shards=2)
    assert open_source(tmp_path / "m").has_index
    convert(tmp_path / "m", tmp_path / "o", "nvfp4-te", wishes=ALL)
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert "diffusion_pytorch_model.safetensors.index.json" in names
    assert "model.safetensors.index.json" not in names
    report = verify(tmp_path / "o", tmp_path / "m")
    assert report.clean and len(report.layers) == len(quantized)
    assert ["no engine is known" in issue.text for issue in report.issues] == [True]
    convert(tmp_path / "o", tmp_path / "d", format="bf16")
    assert np.array_equal(sorted(open_source(tmp_path / "d").tensors), sorted(open_source(tmp_path / "m").tensors))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "m", "FluxTransformer2DModel", MODULES["FluxTransformer2DModel"][0], shards=2)
    (tmp_path / "m" / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with refused("diffusion_pytorch_model-00002-of-00002.safetensors: is missing"):
        open_source(tmp_path / "m")


def test_variants_beside_the_model_are_not_read(tmp_path: Path) -> None:
    _write(tmp_path / "m", "FluxTransformer2DModel", MODULES["FluxTransformer2DModel"][0])
    whole = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    whole.with_name("diffusion_pytorch_model.fp16.safetensors").write_bytes(whole.read_bytes())
    assert [file.name for file in open_source(tmp_path / "m").files] == [whole.name]


def test_single_files_of_original_releases(tmp_path: Path) -> None:
    """In a single file of FLUX without a config, modulation, input and output layers stay unquantized.

    This holds with and without the prefix that ComfyUI gives to names.
    """
    quantized = ["double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.2", "single_blocks.0.linear1"]
    kept = ["double_blocks.0.img_mod.lin", "single_blocks.0.modulation.lin", "final_layer.linear", "img_in", "txt_in"]
    kept += ["final_layer.adaLN_modulation.1", "time_in.in_layer", "vector_in.in_layer", "guidance_in.out_layer"]
    for prefix in ("", "model.diffusion_model."):
        tensors = {f"{prefix}{name}.weight": synthetic.random(name, (32, 64)) for name in quantized + kept}
        synthetic.write_file(tmp_path / "m.safetensors", tensors)
        plan = make_plan(tmp_path / "m.safetensors", "nvfp4-te", format="comfy")
        assert {tensor.name for tensor in plan.converted} == {f"{prefix}{name}.weight" for name in quantized}
        assert plan.warnings == ()
