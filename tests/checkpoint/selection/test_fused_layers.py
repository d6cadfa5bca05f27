"""Test which layers loaders fuse: these share a tensor amax, and both halves of a gated MLP must be selected."""

from __future__ import annotations

import published
import pytest
from together import together

from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection.selection import Wishes, decide


def groups_of(name: str) -> dict[str, set[str]]:
    """Return {group: its modules} for all modules of the published model `name` that the preset "linear" quantizes."""
    candidates = published.MODELS[name]()
    decisions = decide(candidates, Wishes(), 16)
    found: dict[str, set[str]] = {}
    for module, group in fused_layers.shared_amax_groups(
        t.module for t in candidates if decisions[t.name].converted
    ).items():
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
    others = [
        f"{parent}.{leaf}"
        for leaf in ("o_proj", "down_proj", "w2", "q_b_proj", "wq_b", "kv_b_proj", "wo_a", "out_proj")
    ]
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
