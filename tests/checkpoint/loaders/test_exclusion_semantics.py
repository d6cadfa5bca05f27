"""Test functions that decide, as an engine does, whether its exclusion list matches a module.

They are compared with every case that is documented for an engine, and with the engine's own functions if it is
installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from together import together

from fp4kit.checkpoint.containers.configs import LOADED
from fp4kit.checkpoint.loaders import exclusions as m

LAYER = "model.layers.1"
ATTENTION, MLP, EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.mlp", f"{LAYER}.mlp.experts"
QKV = tuple(f"{ATTENTION}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj"))
MLA_PAIR = (f"{ATTENTION}.q_a_proj", f"{ATTENTION}.kv_a_proj_with_mqa")

Case = tuple[str, Sequence[str], bool]

VLLM_MODELOPT: tuple[Case, ...] = (
    (f"{MLP}.down_proj", [f"{MLP}.down_proj"], True),
    (f"{MLP}.down_proj", [], False),
    (f"{ATTENTION}.qkv_proj", QKV, True),
    # A glob must match the name of the fused layer. An exact name is also compared with the names of the fused parts.
    (f"{ATTENTION}.qkv_proj", [f"{ATTENTION}.qkv_proj"], True),
    (f"{ATTENTION}.fused_qkv_a_proj", MLA_PAIR, True),
    ("model.layers.10.mlp.down_proj", [LAYER], True),  # a substring matches
    (f"{MLP}.gate_up_proj", [f"{MLP}.gate"], True),
    (f"{MLP}.gate", [f"{MLP}.gate_up_proj"], False),
    ("language_model.model.layers.1.mlp.down_proj", [f"{MLP}.down_proj"], True),
    (f"{MLP}.down_proj", [f"{LAYER}.*"], True),
    ("model.layers.10.mlp.down_proj", [f"{LAYER}.*"], False),
    ("model.layers.10.mlp.down_proj", [f"{LAYER}*"], True),
    (f"{MLP}.Down_proj", [f"{MLP}.d*"], False),  # globs are case-sensitive
    (f"{MLP}.Down_proj", [f"{MLP}.D*"], True),
    (f"{MLP}.down_proj", ["*.mlp.[d]own_proj"], True),
    (EXPERTS, [f"{EXPERTS}.3.up_proj"], True),  # one excluded expert excludes all experts of the layer
    (EXPERTS, [EXPERTS], True),
    (EXPERTS, [f"{EXPERTS}.*"], True),
    (EXPERTS, [f"{LAYER}.*"], True),
    ("model.vision_tower.blocks.0.qkv", [], True),
    ("vision_model.fc1", [], True),
    ("vit_large_projector", [], True),
    ("model.visual.blocks.0.attn.qkv", [], False),  # no longer special
    ("lm_head", [], False),
    ("lm_head", ["lm_head"], True),
)

SGLANG_MODELOPT: tuple[Case, ...] = (
    (f"{MLP}.down_proj", [f"{MLP}.down_proj"], True),
    (f"{MLP}.down_proj", [MLP], True),  # a dotted path matches anywhere
    (f"{MLP}.down_proj", ["mlp"], True),
    ("model.layers.10.mlp.down_proj", [LAYER], False),  # only whole parts match
    (f"{MLP}.gate_up_proj", [f"{MLP}.gate"], False),
    (f"{ATTENTION}.qkv_proj", QKV, True),
    (f"{ATTENTION}.fused_qkv_a_proj_with_mqa", MLA_PAIR, True),
    (f"{MLP}.down_proj", [f"{LAYER}.*"], True),
    ("model.layers.10.mlp.down_proj", [f"{LAYER}.*"], False),
    ("language_model.model.layers.1.mlp.down_proj", [f"{LAYER}.*"], True),
    ("mtp_block.fc", ["mtp*"], True),  # a glob may match one part
    ("model.mtp_block.fc", ["mtp*"], True),
    ("model.amtp.fc", ["mtp*"], False),
    (EXPERTS, [EXPERTS], True),
    (EXPERTS, [f"{EXPERTS}.*"], True),
    # For multi-head latent attention (MLA), SGLang drops the layer number, so layer 3 in the list excludes layer 0 too.
    ("model.layers.0.self_attn.q_a_proj", ["model.layers.3.self_attn.q_a_proj"], True),
    ("model.layers.0.self_attn.q_b_proj", ["model.layers.3.self_attn.q_b_proj"], True),
    ("model.layers.0.self_attn.kv_b_proj", ["model.layers.3.self_attn.kv_b_proj"], True),
    ("model.layers.0.self_attn.fused_qkv_a_proj_with_mqa", ["model.layers.3.self_attn.kv_a_proj_with_mqa"], True),
    ("model.layers.0.self_attn.o_proj", ["model.layers.3.self_attn.o_proj"], False),
    # Patterns with a wildcard do not lose their layer number.
    ("model.layers.0.self_attn.q_a_proj", ["model.layers.3.*"], False),
    ("model.layers.3.self_attn.q_a_proj", ["model.layers.3.*"], True),
    ("model.layers.0.self_attn.kv_b_proj", ["model.layers.3.self_attn.kv_b_proj*"], False),
    ("model.layers.3.self_attn.kv_b_proj", ["model.layers.3.self_attn.kv_b_proj*"], True),
)

SGLANG_MXFP8: tuple[Case, ...] = (
    ("model.visual.blocks.0.attn.qkv", ["model.visual"], True),
    ("visual.blocks.0.attn.qkv", ["model.visual"], True),  # with or without the prefix model.
    ("model.visual.blocks.0.attn.qkv", ["visual"], True),
    ("model.visual.blocks.0.attn.qkv", ["model.visual.*"], False),  # wildcards are not supported
    ("model.visualize.fc", ["model.visual"], False),
    (f"{ATTENTION}.qkv_proj", QKV, True),
    (f"{MLP}.gate_up_proj", [f"{MLP}.gate"], False),
    ("model.layers.0.self_attn.q_b_proj", ["model.layers.3.self_attn.q_b_proj"], False),
    (EXPERTS, [f"{EXPERTS}.0.up_proj"], True),
)

SERVED_CT: tuple[Case, ...] = (
    (f"{MLP}.down_proj", [f"{MLP}.down_proj"], True),
    (f"{MLP}.down_proj", [f"{MLP}.*"], False),  # globs are not supported
    (f"{MLP}.down_proj", [r"re:model\.layers\.1\..*"], True),
    ("a.model.layers.1.mlp.down_proj", [r"re:model\.layers\.1\..*"], False),  # matched from the start
    (f"{MLP}.down_proj", ["Linear"], False),  # classes are not matched
    (f"{ATTENTION}.qkv_proj", QKV, True),
    (f"{ATTENTION}.qkv_proj", [f"{ATTENTION}.qkv_proj"], True),
    (f"{ATTENTION}.qkv_proj", [f"{ATTENTION}.qkv_proj", QKV[0]], True),  # its own name is tried first
    (f"{ATTENTION}.qkv_proj", [r"re:.*self_attn.*"], True),
    (EXPERTS, [r"re:.*experts\..*"], True),
    (EXPERTS, [EXPERTS], False),  # the engine asks for the first expert
    (EXPERTS, [f"{EXPERTS}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")], True),
    # The engine asks for gate_proj, up_proj and down_proj, even if the experts' own layers are called w1, w2 and w3.
    (EXPERTS, [f"{EXPERTS}.0.{leaf}" for leaf in ("w1", "w2", "w3")], False),
)

LIBRARY_CT: tuple[Case, ...] = (
    (f"{MLP}.down_proj", [f"{MLP}.down_proj"], True),
    (f"{MLP}.down_proj", ["Linear"], True),  # classes are matched
    (f"{MLP}.down_proj", ["Module"], True),
    (f"{MLP}.down_proj", ["Embedding"], False),
    (f"{MLP}.down_proj", [r"re:.*mlp\.down"], True),  # matched from the start, not to the end
    (f"{MLP}.down_proj", [r"re:mlp\.down_proj"], False),
    (f"{MLP}.down_proj", [f"{MLP}.*"], False),
)

TRANSFORMERS: tuple[Case, ...] = (
    (EXPERTS, [LAYER], True),
    (EXPERTS, [f"{LAYER}."], True),  # a pattern may end with the dot
    ("model.layers.11.mlp.experts", [LAYER], False),  # matched up to the end of a part
    ("model.layers.11.mlp.experts", ["model.layers.*"], True),
    ("model.decoder.layers.23.fc1", ["fc1"], True),  # a suffix matches
    ("model.decoder.layers.23.fc1", ["c1"], True),
    ("model.decoder.layers.23.fc1", ["decoder"], False),  # neither a suffix nor a prefix
    (f"{MLP}.gate_proj", [f"{MLP}.gate"], False),
)


@together(
    "excluded, case",
    [
        *((m.vllm_modelopt, case) for case in VLLM_MODELOPT),
        *((m.sglang_modelopt, case) for case in SGLANG_MODELOPT),
        *((m.sglang_mxfp8, case) for case in SGLANG_MXFP8),
        *((m.compressed_tensors, case) for case in LIBRARY_CT),
        *((m.transformers_listed, case) for case in TRANSFORMERS),
        *((served, case) for served in (m.vllm_compressed_tensors, m.sglang_compressed_tensors) for case in SERVED_CT),
    ],
)
def test_stated_cases(excluded: Callable[[str, Sequence[str]], bool], case: Case) -> None:
    module, patterns, expected = case
    assert excluded(module, patterns) is expected


@pytest.mark.parametrize(
    "excluded",
    [m.vllm_modelopt, m.sglang_modelopt, m.sglang_mxfp8, m.vllm_compressed_tensors, m.sglang_compressed_tensors],
)
def test_parts_of_a_fused_layer_have_to_agree(excluded: Callable[[str, Sequence[str]], bool]) -> None:
    message = f"{ATTENTION}.qkv_proj: {QKV[0]} is excluded, {QKV[1]}, {QKV[2]} is not; exclude all or none"
    with pytest.raises(m.PartsDisagree, match=f"^{re.escape(message)}$"):
        excluded(f"{ATTENTION}.qkv_proj", QKV[:1])


def test_projections_of_the_first_expert_have_to_agree() -> None:
    with pytest.raises(m.PartsDisagree, match=r"experts\.0\.up_proj is excluded"):
        m.vllm_compressed_tensors(EXPERTS, [f"{EXPERTS}.0.up_proj"])


def test_vllm_splits_a_wildcard_where_it_maps_names() -> None:
    assert not m.vllm_modelopt("a.model.layers.1.fc", [f"{LAYER}*"])
    # With mapped names, vLLM splits off the wildcard and looks for the rest anywhere in the name.
    assert m.vllm_modelopt("a.model.layers.1.fc", [f"{LAYER}*"], mapped=True)
    assert not m.vllm_modelopt("a.model.layers.1.fc", [f"{LAYER}.*"], mapped=True)  # .* is not expanded
    assert not m.vllm_modelopt("model.visual", ["model.visual.*"], mapped=True)


def test_gpt_oss() -> None:
    published = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    assert not m.transformers_mxfp4(EXPERTS, published) and not m.vllm_gpt_oss(EXPERTS, published)
    assert m.transformers_mxfp4(f"{ATTENTION}.q_proj", []) and m.vllm_gpt_oss(f"{ATTENTION}.q_proj", [])
    # transformers honors a list that names the layer, but vLLM does not read the list.
    assert m.transformers_mxfp4(EXPERTS, [LAYER]) and not m.vllm_gpt_oss(EXPERTS, [LAYER])
    assert not m.transformers_mxfp4("model.layers.11.mlp.experts", [LAYER])  # matched up to the end of a part
    assert not m.transformers_mxfp4(EXPERTS, None)


def test_deepseek_v4() -> None:
    experts = "layers.0.ffn.experts"
    assert not m.vllm_deepseek_v4(experts, ["head", "mtp.*"])
    assert m.vllm_deepseek_v4(experts, [f"{experts}.0.w1"])


@pytest.mark.parametrize(
    "excluded", [m.sglang_modelopt, m.compressed_tensors, m.vllm_compressed_tensors, m.transformers_listed]
)
def test_patterns_that_do_not_compile(excluded: Callable[[str, Sequence[str]], bool]) -> None:
    with pytest.raises(ValueError, match=r"^pattern 're:\(': not a regular expression \(.*\); the engine fails on it$"):
        excluded("a", ["re:("])


def test_container_of() -> None:
    assert {m.container_of(name) for name in (EXPERTS, f"{EXPERTS}.0.up_proj", f"{EXPERTS}.gate_up_proj")} == {EXPERTS}
    assert m.container_of("model.layers.0.mlp.shared_experts.up_proj") is None
    assert m.container_of("layers.0.block_sparse_moe.experts.3.w1") == "layers.0.block_sparse_moe.experts"


def test_names_that_an_engine_looks_up() -> None:
    vllm, sglang = m.READERS["modelopt NVFP4"]
    modules = [*QKV, *MLA_PAIR, f"{EXPERTS}.0.w1", f"{EXPERTS}.1.w1", "lm_head"]
    assert vllm.lookups(modules) == {
        f"{ATTENTION}.qkv_proj": list(QKV),
        f"{ATTENTION}.fused_qkv_a_proj": list(MLA_PAIR),
        EXPERTS: [f"{EXPERTS}.0.w1", f"{EXPERTS}.1.w1"],
        "lm_head": ["lm_head"],
    }
    assert f"{ATTENTION}.fused_qkv_a_proj_with_mqa" in sglang.lookups(modules)
    assert set(m.READERS["deepseek-v4"][0].lookups(modules)) == {EXPERTS}
    library, transformers = m.READERS["compressed-tensors nvfp4-pack-quantized"][2:]
    assert set(library.lookups(modules)) == set(modules)
    assert set(transformers.lookups(modules)) == {name for name in modules if not name.startswith(EXPERTS)}


def test_every_container_has_its_readers() -> None:
    assert set(m.READERS) == set(LOADED)


PARTS = [
    "model",
    "layers",
    "0",
    "1",
    "10",
    "mlp",
    "mlp2",
    "gate",
    "gate_proj",
    "experts",
    "lm_head",
    "Linear",
    "Module",
]
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(".".join)
pieces = st.one_of(
    names, st.sampled_from([".*", r"\.", "[01]", "(a|mlp)", "$", "?", "+", "(", "*", "", "(?i)", "re:", "."])
)


@st.composite
def questions(draw: st.DrawFn, prefixes: tuple[str, ...]) -> tuple[str, list[str]]:
    """Draw (module name, exclusion list), with patterns made of pieces of the name and of regular expressions.

    prefixes: texts of which each pattern begins with one, such as "" or "re:".
    """
    module = draw(names)
    cut = st.integers(0, len(module))
    near = st.one_of(
        pieces, st.builds(lambda a, b: module[min(a, b) : max(a, b)], cut, cut), cut.map(lambda a: module[a:])
    )
    pattern = st.builds("".join, st.tuples(st.sampled_from(prefixes), near, st.one_of(st.just(""), pieces)))
    return module, draw(st.lists(pattern, min_size=1, max_size=3))


def outcome(call: Callable[[], bool]) -> bool | str:
    """Return the result of `call`, which matches a module with a list, or "fails" if a pattern is invalid."""
    try:
        return bool(call())
    except (ValueError, re.error):
        return "fails"


@given(drawn=questions(("", "re:", "re:.*")))
def test_as_compressed_tensors_does(drawn: tuple[str, list[str]]) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear = pytest.importorskip("torch").nn.Linear(1, 1)
    theirs = outcome(lambda: match.is_match(drawn[0], linear, drawn[1]))
    mine = outcome(lambda: m.compressed_tensors(*drawn))
    # Both results are right if a list has a match and an invalid pattern, because the result depends on their order.
    assert mine == theirs or {mine, theirs} == {
        True,
        "fails",
    }


@given(drawn=questions(("",)))
def test_as_transformers_does(drawn: tuple[str, list[str]]) -> None:
    real = pytest.importorskip("transformers.quantizers.quantizers_utils")
    theirs = outcome(lambda: not real.should_convert_module(*drawn))
    mine = outcome(lambda: m.transformers_listed(*drawn))
    assert mine == theirs or {mine, theirs} == {True, "fails"}


@pytest.mark.parametrize("case", [*LIBRARY_CT, *TRANSFORMERS])
def test_the_real_functions_agree_on_the_stated_cases(case: Case) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    real = pytest.importorskip("transformers.quantizers.quantizers_utils")
    module, patterns, expected = case
    if case in LIBRARY_CT:
        assert match.is_match(module, pytest.importorskip("torch").nn.Linear(1, 1), patterns) is expected
    else:
        assert real.should_convert_module(module, patterns) is not expected
