"""Test the selection of layers: presets, kept layers, patterns, errors, shared amaxes, and the cost for
100,000 names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import published
import pytest
import synthetic
from seconds import TEN, cpu_seconds
from synthetic import refused
from together import together

from fp4kit.checkpoint import make_plan
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection import selection
from fp4kit.checkpoint.selection.names import hugging_face_names
from fp4kit.checkpoint.selection.selection import (
    Candidate,
    Decision,
    ModelFacts,
    Selector,
    Wishes,
    candidate,
    check,
    decide,
)


def converted(candidates: list[Candidate], wishes: Wishes) -> set[str]:
    """Return the modules that are quantized. Raise an error if the wishes are not valid for the candidates."""
    decisions = decide(candidates, wishes, 16)
    check(candidates, wishes, decisions)
    return {tensor.module for tensor in candidates if decisions[tensor.name].converted}


def refused_wishes(candidates: list[Candidate], wishes: Wishes, text: str) -> None:
    with refused(text):
        check(candidates, wishes, decide(candidates, wishes, 16))


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
    with refused("--only '*.experts.*': a tuple of patterns is needed, such as ('*.experts.*',)"):
        Wishes(only="*.experts.*")  # type: ignore[arg-type]
    with refused("--keep ['*']: a tuple of patterns is needed"):
        Wishes(keep=["*"])  # type: ignore[arg-type]


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


def test_a_pattern_may_be_a_single_name() -> None:
    name = "model.layers.0.self_attn.o_proj"
    assert converted(published.qwen3_moe(), Wishes(only=(name,))) == {name}


@together(
    "pattern, asks",
    [
        ("model.layers.3.*", True),
        ("model.layers.3*", True),
        ("model.layers.3.mlp.experts.0.up_proj", True),
        ("model.layers.[3].*", False),
        ("model.layers.?.*", False),
        ("model.layers.*", False),
        ("*.3.*", False),
        ("*", False),
    ],
)
def test_a_subtree_is_asked_for_by_its_name(pattern: str, asks: bool) -> None:
    name = "model.layers.3.mlp.experts.0.up_proj"
    (found,) = decide(
        [candidate(f"{name}.weight", "BF16", (16, 64), ModelFacts(3))], Wishes(only=(pattern,)), 16
    ).values()
    assert found.converted == asks


def test_a_subtree_is_not_asked_for_by_a_name_that_only_begins_alike() -> None:
    """A pattern for layer 30 does not ask for layer 3, which is multi-token prediction here and stays unquantized.

    A pattern that matches all modules does not ask for it, either.
    """
    tensor = candidate("model.layers.3.mlp.up_proj.weight", "BF16", (16, 64), ModelFacts(3))
    assert not decide([tensor], Wishes(only=("model.layers.30.*", "*")), 16)[tensor.name].converted


def test_patterns_match_stacks() -> None:
    fused = published.MODELS["qwen3_moe_fused"]()
    assert converted(fused, Wishes(only=("*.experts.down_proj",))) == {
        f"model.layers.{i}.mlp.experts.down_proj" for i in (0, 1)
    }


@together("option", ["keep", "only"])
@together("pattern", ["layers.9", "*.Experts.*", "*.experts.0.up_proj.weight", "", "*experts.[!0-9]*"])
def test_patterns_that_match_nothing(option: str, pattern: str) -> None:
    wishes = Wishes(**{option: ("*.mlp.*", pattern)})  # type: ignore[arg-type]
    refused_wishes(
        published.qwen3_moe(),
        wishes,
        f"--{option} {pattern!r}: matches no module; names look like model.embed_tokens, model.norm and 63 more; "
        "a pattern must match a whole name, with its case and without .weight",
    )


@pytest.mark.parametrize(
    ("make", "wishes", "text"),
    [
        (published.qwen3_moe, Wishes(only=("lm_head", "*")), "lm_head (output head (lm_head))"),
        (
            published.qwen3_moe,
            Wishes("experts", only=("*.o_proj", "*")),
            "o_proj (attention: not in preset experts)",
        ),
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
        check(candidates, wishes, decide(candidates, wishes, 16))
    assert text in str(caught.value) and str(caught.value).startswith(f"--only {wishes.only[0]!r}: ")
    assert "--keep-first" not in text or str(caught.value).endswith("(model.layers.0))")


def test_a_selection_of_nothing() -> None:
    text = "0 tensors to convert: model.layers.0.self_attn.q_proj.weight (attention: not in preset experts); "
    refused_wishes(published.qwen3_dense(), Wishes("experts"), text)
    refused_wishes(
        [], Wishes(), "0 tensors to convert: no 2-D .weight tensors; change the preset, the patterns or the recipe"
    )


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
    assert [selector.decide(candidate(name, "BF16", (16, 64), model)).converted for model in models] == [
        False,
        True,
        False,
    ]
    others = [("BF16", (16, 72)), ("I64", (16, 64)), ("BF16", (64,)), ("BF16", (16, 64))]
    assert [selector.decide(candidate(name, *other, models[1])).converted for other in others] == [
        False,
        False,
        False,
        True,
    ]
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
    check(candidates, wishes, decisions)
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
