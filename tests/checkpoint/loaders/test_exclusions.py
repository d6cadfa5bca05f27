"""Test exclusion lists in every syntax: they contain the right names, and every engine understands them as meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import pytest
from exhaustive import exhaustive
from hypothesis import given
from hypothesis import strategies as st
from seconds import TEN, cpu_seconds
from together import together

from fp4kit.checkpoint.containers.configs import LOADED, LoaderContainer
from fp4kit.checkpoint.containers.engines import Issue, finding
from fp4kit.checkpoint.loaders import exclusions as m
from fp4kit.checkpoint.loaders.exclusions import READERS, check, exclusion_list, listed

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


def test_readers_of_gpt_oss() -> None:
    published = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    assert not m.transformers_mxfp4(EXPERTS, published) and not m.vllm_gpt_oss(EXPERTS, published)
    assert m.transformers_mxfp4(f"{ATTENTION}.q_proj", []) and m.vllm_gpt_oss(f"{ATTENTION}.q_proj", [])
    # transformers honors a list that names the layer, but vLLM does not read the list.
    assert m.transformers_mxfp4(EXPERTS, [LAYER]) and not m.vllm_gpt_oss(EXPERTS, [LAYER])
    assert not m.transformers_mxfp4("model.layers.11.mlp.experts", [LAYER])  # matched up to the end of a part


def test_deepseek_v4() -> None:
    experts = "layers.0.ffn.experts"
    assert not m.vllm_listed(experts, ["head", "mtp.*"], {})
    assert m.vllm_listed(experts, [f"{experts}.0.w1"], {})


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


@together(
    "container, engine, module, pattern, excluded",
    [
        ("modelopt NVFP4", "vLLM", "model.layers.10.mlp.down_proj", LAYER, True),
        ("modelopt NVFP4", "SGLang", f"{MLP}.down_proj", "mlp", True),
        ("compressed-tensors FP8", "vLLM", EXPERTS, EXPERTS, False),
        ("compressed-tensors FP8", "SGLang", EXPERTS, EXPERTS, False),
        ("compressed-tensors FP8", "compressed-tensors", EXPERTS, EXPERTS, True),
        ("compressed-tensors FP8", "transformers", EXPERTS, "Linear", True),
        ("fp8 128x128", "vLLM", f"{MLP}.down_proj", "mlp", False),
        ("fp8 128x128", "SGLang", "visual.blocks.0.fc", "model.visual", True),
        ("fp8 128x128", "transformers", f"{MLP}.down_proj", "down_proj", True),
        ("sglang-mxfp8", "SGLang", "visual.blocks.0.fc", "model.visual", True),
        ("sglang-mxfp8", "transformers", f"{MLP}.down_proj", "down_proj", True),
        ("gpt-oss", "vLLM", EXPERTS, EXPERTS, False),
        ("gpt-oss", "transformers", EXPERTS, EXPERTS, True),
        ("deepseek-v4", "vLLM", EXPERTS, f"{EXPERTS}.0.w1", True),
    ],
)
def test_how_a_reader_reads_a_list(container: str, engine: str, module: str, pattern: str, excluded: bool) -> None:
    (reader,) = (one for one in m.READERS[container] if one.engine == engine)
    assert reader.excluded(module, [pattern]) is excluded


def test_every_container_has_its_readers() -> None:
    assert set(m.READERS) == set(LOADED)


PARTS = "model layers 0 1 10 mlp mlp2 gate gate_proj experts lm_head Linear Module".split()
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
    assert mine == theirs or {mine, theirs} == {True, "fails"}


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


SYNTAXES = ("modelopt", "compressed-tensors", "dotted", "mxfp4")
LISTED = [container for container in LOADED.values() if container.syntax and READERS[container.id]]
LINEARS = [container for container in LISTED if container.format != "gpt-oss"]  # containers of linear layers


def attention(layer: str) -> list[str]:
    return [f"{layer}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]


def mla(layer: str) -> list[str]:
    leaves = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    return [f"{layer}.self_attn.{leaf}" for leaf in leaves]


def mlp(parent: str) -> list[str]:
    return [f"{parent}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]


def experts(layer: str, count: int = 3) -> list[str]:
    return [name for index in range(count) for name in mlp(f"{layer}.mlp.experts.{index}")]


def layers(count: int, of: str = "model") -> list[str]:
    return [f"{of}.layers.{index}" for index in range(count)]


def wrong(container: str, patterns: Iterable[str], copied: Iterable[str], converted: Iterable[str]) -> list[str]:
    """Return the texts of all findings that an engine misreads an exclusion list.

    container: the container, whose engines are checked.
    patterns: the exclusion list.
    copied: the modules that are not quantized.
    converted: the quantized modules.
    """
    return [f"{found.loader}: {found.subject}: {found.text}" for found in check(container, patterns, copied, converted)]


def engines(found: Iterable[Issue]) -> set[str]:
    return {each.loader.partition(" ")[0] for each in found}


def test_a_dense_model_needs_its_head_alone() -> None:
    converted = [name for layer in layers(2) for name in attention(layer) + mlp(f"{layer}.mlp")]
    assert {exclusion_list(syntax, [], [], converted) for syntax in SYNTAXES} == {("lm_head",)}


def test_fused_names_are_added() -> None:
    copied = attention("model.layers.0")
    for syntax in SYNTAXES:
        assert exclusion_list(syntax, copied, [], mlp("model.layers.0.mlp")) == tuple(
            sorted([*copied, "lm_head", "model.layers.0.self_attn.qkv_proj"])
        )


def test_a_subtree_is_named_alone() -> None:
    copied = [*mla("model.layers.3"), *experts("model.layers.3"), "model.layers.3.eh_proj", "model.visual.attn.qkv"]
    subtrees, converted = ["model.layers.3", "model.visual"], [*mla("model.layers.0")]
    assert exclusion_list("modelopt", copied, subtrees, converted) == ("lm_head", "model.layers.3.*", "model.visual.*")
    assert exclusion_list("dotted", copied, subtrees, converted) == ("lm_head", "model.layers.3", "model.visual")
    assert exclusion_list("mxfp4", copied, subtrees, converted) == ("lm_head", "model.layers.3", "model.visual")
    assert exclusion_list("compressed-tensors", copied, subtrees, converted) == (
        "lm_head",
        r"re:model\.layers\.3\..*",
        r"re:model\.visual\..*",
        r"re:visual\..*",
    )


def test_a_subtree_below_another_is_not_named() -> None:
    assert exclusion_list("dotted", [], ["a.b.c", "a.b", "a.bc"], ["d"]) == ("a.b", "a.bc", "lm_head")


def test_a_linear_layer_that_is_the_root_of_a_subtree_is_named_itself() -> None:
    assert exclusion_list("modelopt", ["mm_projector", "mm_projector.0"], ["mm_projector"], ["a"]) == (
        "lm_head",
        "mm_projector",
        "mm_projector.*",
    )


@together(
    "syntax, written",
    [
        ("modelopt", ("E", "E.*")),
        ("compressed-tensors", ("E", r"re:model\.layers\.1\.mlp\.experts\..*")),
        ("dotted", ("E",)),
        ("mxfp4", ("E",)),
    ],
)
@together("stacked", [False, True])
def test_experts_that_are_copied_are_named_by_their_container(
    syntax: str, written: tuple[str, ...], stacked: bool
) -> None:
    container = "model.layers.1.mlp.experts"
    copied = [f"{container}.gate_up_proj", f"{container}.down_proj"] if stacked else experts("model.layers.1")
    expected = tuple(sorted(["lm_head", *(text.replace("E", container) for text in written)]))
    assert exclusion_list(syntax, copied, [], experts("model.layers.0")) == expected


def test_experts_that_are_partly_copied_are_named_one_by_one_and_reported() -> None:
    all_experts = experts("model.layers.0")
    found = exclusion_list("modelopt", all_experts[:3], [], all_experts[3:])
    assert found == tuple(sorted([*all_experts[:3], "lm_head", "model.layers.0.mlp.experts.0.gate_up_proj"]))
    vllm, sglang = check("modelopt NVFP4", found, all_experts[:3], all_experts[3:])
    assert (vllm.loader, sglang.loader) == ("vLLM 0.33.0", "SGLang 0.5.23")
    assert vllm.subject == "model.layers.0.mlp.experts"
    assert (
        vllm.text
        == "model.layers.0.mlp.experts.1.gate_proj is quantized, model.layers.0.mlp.experts.0.gate_proj is not; "
        "vLLM loads them as one and needs all or none"
    )


def test_experts_of_a_multimodal_model_are_named_where_engines_mount_them() -> None:
    copied = experts("model.language_model.layers.0")
    found = exclusion_list("compressed-tensors", copied, [], ["model.language_model.layers.1.mlp.down_proj"])
    assert r"re:language_model\.model\.layers\.0\.mlp\.experts\..*" in found


def test_modules_that_transformers_renames_are_named_twice() -> None:
    """compressed-tensors' lists have the names of the file and those of transformers; other models keep one name."""
    projector = "multi_modal_projector.linear_1"
    copied = [projector, "language_model.model.layers.1.mlp.down_proj", "vision_tower.encoder.layers.0.fc1"]
    wanted = {*copied[:2], f"model.{projector}", "model.language_model.layers.1.mlp.down_proj", "lm_head"}
    wanted |= {r"re:vision_tower\..*", r"re:model\.vision_tower\..*"}
    assert set(exclusion_list("compressed-tensors", copied, ["vision_tower"], [])) == wanted
    layer = "model.layers.0.mlp.down_proj"
    found = exclusion_list("compressed-tensors", [layer], ["visual"], [])
    assert {"model.language_model.layers.0.mlp.down_proj", layer, r"re:model\.visual\..*"} <= set(found)
    assert exclusion_list("compressed-tensors", [layer], [], []) == ("lm_head", layer)


@pytest.mark.parametrize(
    ("file", "runtime"),
    [
        ("vision_tower.encoder.layers.0.fc1", "model.vision_tower.encoder.layers.0.fc1"),
        ("language_model.model.layers.1.mlp.down_proj", "model.language_model.layers.1.mlp.down_proj"),
        ("visual.blocks.0.attn.proj", "model.visual.blocks.0.attn.proj"),
    ],
)
def test_names_of_transformers_exclude_the_layers_of_the_file(file: str, runtime: str) -> None:
    """Every engine understands a list with transformers' names, as llm-compressor writes it.

    If a name has one more letter, there is a finding for every engine.
    """
    container = LOADED["compressed-tensors nvfp4-pack-quantized"].id
    assert check(container, [runtime], [file], []) == ()
    missed = check(container, [runtime + "x"], [file], [])
    assert engines(missed) == {"vLLM", "SGLang", "compressed-tensors", "transformers"}
    older = ["visual.a", "model.layers.0.mlp.down_proj"]
    assert check(container, ["visual.a", "model.language_model.layers.0.mlp.down_proj"], older, []) != ()
    assert check(container, ["model.visual.a", "model.language_model.layers.0.mlp.down_proj"], older, []) == ()


def test_a_converted_head_is_not_excluded() -> None:
    assert exclusion_list("modelopt", ["a"], [], ["lm_head"]) == ("a",)


def test_names_that_are_expressions_are_escaped() -> None:
    assert exclusion_list("mxfp4", ["a+b"], [], ["c"]) == ("a\\+b", "lm_head")
    assert exclusion_list("compressed-tensors", [], ["a+b"], ["c"]) == ("lm_head", r"re:a\+b\..*")


def test_unknown_syntax() -> None:
    message = "exclusion_list: syntax 'regex'; one of modelopt, compressed-tensors, dotted, names, mxfp4 is needed"
    with pytest.raises(ValueError, match=f"^{message}$"):
        exclusion_list("regex", [], [], [])


def test_converted_below_a_subtree() -> None:
    message = (
        "exclusion_list: model.visual.fc is converted, but lies below model.visual, a subtree that is copied as a whole"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        exclusion_list("dotted", [], ["model.visual"], ["model.visual.fc"])


# For multi-head latent attention, SGLang matches the last part of a module's name in every layer. fp4kit's exclusion
# lists use patterns for which it does not.


def test_an_mla_leaf_excludes_every_layer_in_sglang() -> None:
    copied, converted = mla("model.layers.3"), [name for layer in layers(3) for name in mla(layer)]
    found = check("modelopt NVFP4", [*copied, "lm_head"], copied, converted)
    assert engines(found) == {"SGLang"}
    assert len(found) == 3 * 3  # fused a, q_b and kv_b in each of three layers
    by_subject = {each.subject: each.text for each in found}
    assert (
        by_subject["model.layers.0.self_attn.q_b_proj"]
        == "is quantized, but excluded by model.layers.3.self_attn.q_b_proj: the engine then expects "
        "unpacked weights of another shape; it applies an exclusion that ends in q_b_proj to every layer: "
        "exclude model.layers.3.self_attn.*, or q_b_proj*, or the whole subtree of that layer"
    )
    assert not check("modelopt NVFP4", ["model.layers.3.*", "lm_head"], copied, converted)


def test_the_way_out_is_for_sglang_alone() -> None:
    name = "model.layers.0.self_attn.q_b_proj"
    vllm, sglang = check("modelopt NVFP4", ["lm_head", name], [], [name])
    text = f"is quantized, but excluded by {name}: the engine then expects unpacked weights of another shape"
    assert vllm.text == text
    assert sglang.text.startswith(f"{vllm.text}; it applies an exclusion that ends in q_b_proj to every layer")


@pytest.mark.parametrize("kept", [mla("model.layers.1"), mla("model.layers.1")[3:4], mla("model.layers.1")[:3:2]])
def test_an_mla_projection_of_one_layer_is_kept_for_every_engine(kept: list[str]) -> None:
    modules = [name for layer in layers(3) for name in mla(layer) + mlp(f"{layer}.mlp")]
    converted = [name for name in modules if name not in kept]
    patterns = exclusion_list("modelopt", kept, [], converted)
    assert any(pattern.endswith("_proj*") or pattern.endswith("_mqa*") for pattern in patterns)
    assert not wrong("modelopt NVFP4", patterns, kept, converted)


def test_mla_leaves_are_named_plainly_where_none_is_converted() -> None:
    copied = [name for layer in layers(2) for name in mla(layer)]
    patterns = exclusion_list("modelopt", copied, [], experts("model.layers.0"))
    assert not any("*" in pattern for pattern in patterns)
    assert "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa" in patterns
    assert not wrong("modelopt NVFP4", patterns, copied, experts("model.layers.0"))


# Draw random models and selections of layers, for which every engine must understand the exclusion list.

KINDS = ("mlp", "attention", "mla", "experts", "shared", "mixtral", "router", "visual", "stack")
units = st.sampled_from(KINDS)


def modules_of(kind: str, layer: str) -> list[list[str]]:
    """Return the modules of one part of a model, in groups that are converted together or not at all.

    kind: the kind of part, such as "mlp".
    layer: the name of the decoder layer.
    """
    return {
        "mlp": [mlp(f"{layer}.mlp")[:2], mlp(f"{layer}.mlp")[2:]],
        "attention": [attention(layer)[:3], attention(layer)[3:]],
        "mla": [mla(layer)[:3:2], *([name] for name in mla(layer)[1::2]), mla(layer)[4:]],
        "experts": [experts(layer)],
        "shared": [mlp(f"{layer}.mlp.shared_experts")[:2], mlp(f"{layer}.mlp.shared_experts")[2:]],
        "mixtral": [[f"{layer}.block_sparse_moe.experts.{i}.{leaf}" for i in range(2) for leaf in ("w1", "w2", "w3")]],
        "router": [[f"{layer}.mlp.gate"]],
        "visual": [[f"model.visual.blocks.{layer[-1]}.attn.qkv"], [f"model.visual.blocks.{layer[-1]}.mlp.fc1"]],
        "stack": [[f"{layer}.feed_forward.experts.gate_up_proj", f"{layer}.feed_forward.experts.down_proj"]],
    }[kind]


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[str], list[str], list[str]]:
    """Draw a random model, and which of its modules are quantized.

    Return (unquantized modules, subtrees in which nothing is quantized, quantized modules).
    """
    kinds, count = draw(st.sets(units, min_size=1)), draw(st.integers(1, 12))
    subtrees = [layer for layer in layers(count) if draw(st.integers(0, 9)) == 0]
    copied: list[str] = []
    converted: list[str] = []
    for layer in layers(count):
        for group in (group for kind in sorted(kinds) for group in modules_of(kind, layer)):
            always = layer in subtrees or group[0].startswith("model.visual") or group[0].endswith("mlp.gate")
            (copied if always or draw(st.booleans()) else converted).extend(group)
    if "visual" in kinds:
        subtrees.append("model.visual")
    return [name for name in copied if name not in converted], subtrees, converted


def router_hides_gate(copied: Iterable[str], converted: Iterable[str]) -> bool:
    """Return True if an MLP has an unquantized router ``gate`` and also quantized layers of its own.

    vLLM would also exclude the fused layer ``gate_up_proj``, because its name contains ``mlp.gate``. No published model
    has such an MLP.

    copied, converted: the names of the unquantized and of the quantized modules.
    """
    parents = {name.removesuffix(".gate") for name in copied if name.endswith(".gate")}
    return any(name.rpartition(".")[0] in parents for name in converted)


@given(drawn=selections(), container=st.sampled_from(LINEARS))
def test_every_engine_understands_every_list(
    drawn: tuple[list[str], list[str], list[str]], container: LoaderContainer
) -> None:
    copied, subtrees, converted = drawn
    if router_hides_gate(copied, converted):
        copied = [name for name in copied if not name.endswith("mlp.gate")]
    patterns = exclusion_list(container.syntax, copied, subtrees, converted)
    assert not wrong(container.id, patterns, copied, converted)
    assert not any(pattern.endswith(".") for pattern in patterns) and patterns == tuple(sorted(set(patterns)))


@together("container", LINEARS, ids=lambda container: container.id)
@together("kind, beside", [(kind, beside) for kind in KINDS for beside in KINDS])
def test_every_engine_understands_a_list_with_a_subtree(kind: str, beside: str, container: LoaderContainer) -> None:
    """Layer 0 is copied as a whole. In layer 1, one kind of module is copied, and the other is quantized."""
    below = [name for each in {kind, beside} for group in modules_of(each, "model.layers.0") for name in group]
    copied = [name for group in modules_of(kind, "model.layers.1") for name in group]
    converted = [name for group in modules_of(beside, "model.layers.1") for name in group]
    if beside in ("visual", "router", kind):  # these are not quantized
        copied, converted = copied + converted, mlp("model.layers.1.other")
    converted = [name for name in converted if name not in copied]
    if router_hides_gate(copied, converted):
        copied = [name for name in copied if not name.endswith("mlp.gate")]
    subtrees = ["model.layers.0", *["model.visual"] * ("visual" in (kind, beside))]
    patterns = exclusion_list(container.syntax, below + copied, subtrees, converted)
    assert not wrong(container.id, patterns, below + copied, converted)


@together("container", LINEARS, ids=lambda container: container.id)
@together("module", [*mla("model.layers.0"), *attention("model.layers.0"), "model.layers.0.mlp.gate"])
def test_every_engine_misses_a_copied_layer_that_is_not_listed(module: str, container: LoaderContainer) -> None:
    found = check(container.id, ["lm_head"], [module], [])
    assert engines(found) == {each.engine for each in READERS[container.id]}
    assert all(each.text == "is not quantized, but expected to be; add it to the exclusion list" for each in found)


def test_gpt_oss() -> None:
    """For gpt-oss, engines match the exclusion list with the experts only. They never quantize its linear layers."""
    stacks = [[f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj"] for layer in layers(2)]
    copied = [name for layer in layers(2) for name in [*attention(layer), f"{layer}.mlp.router"]]
    patterns = exclusion_list("mxfp4", copied, [], stacks[0] + stacks[1])
    assert not wrong("gpt-oss", patterns, copied, stacks[0] + stacks[1])
    kept = exclusion_list("mxfp4", copied + stacks[0], [], stacks[1])
    (vllm,) = check("gpt-oss", kept, copied + stacks[0], stacks[1])
    assert (vllm.loader, vllm.subject) == ("vLLM 0.33.0", "model.layers.0.mlp.experts")
    found = check("gpt-oss", patterns, copied[1:], copied[:1])
    assert [each.text for each in found if each.subject == copied[0]] == [
        "is quantized, but excluded: the engine then expects unpacked weights of another shape"
    ] * 2


# ---- faults in lists that fp4kit did not write ----


def test_a_tied_head_is_missed() -> None:
    (found,) = check("modelopt NVFP4", [], [], ["a"])
    text = "is not quantized, but expected to be; add it to the exclusion list"
    assert found == finding("vLLM", "error", "lm_head", text)


def test_a_substring_is_found() -> None:
    (text,) = wrong("modelopt NVFP4", ["lm_head", "a.mlp.gate"], ["a.mlp.gate"], ["a.mlp.gate_proj", "a.mlp.up_proj"])
    assert text == (
        "vLLM 0.33.0: a.mlp.gate_up_proj: is quantized, but excluded by a.mlp.gate: the engine then "
        "expects unpacked weights of another shape"
    )


def test_globs_mean_nothing_in_other_syntaxes() -> None:
    copied, converted = ["model.visual.fc"], ["model.layers.0.mlp.down_proj"]
    found = check("sglang-mxfp8", ["lm_head", "model.visual.*"], copied, converted)
    assert engines(found) == {"SGLang"}
    found = check("compressed-tensors mxfp4-pack-quantized", ["lm_head", "model.visual.*"], copied, converted)
    assert engines(found) == {"vLLM", "SGLang", "compressed-tensors", "transformers"}


def test_parts_that_disagree_are_found() -> None:
    names = attention("model.layers.0")
    vllm, sglang = check("modelopt NVFP4", ["lm_head", names[0]], [], names)
    assert (
        vllm.subject == "model.layers.0.self_attn.qkv_proj"
        and "loading fails: " in vllm.text
        and sglang.loader == "SGLang 0.5.23"
    )


def test_a_broken_pattern_is_found() -> None:
    found = check("compressed-tensors nvfp4-pack-quantized", ["lm_head", "re:("], [], ["a"])
    assert len(found) == 4 and all("not a regular expression" in each.text for each in found)


def test_listed() -> None:
    assert listed("modelopt", {"ignore": ["a"], "modules_to_not_convert": ["b"]}) == ("a",)
    assert listed("dotted", {"modules_to_not_convert": ["b"], "ignored_layers": ["a"]}) == ("a",)
    assert listed("dotted", {"modules_to_not_convert": ["b"], "ignored_layers": None}) == ("b",)
    assert listed("mxfp4", {}) == ()
    for value in ("lm_head", [1], {"a": 1}):
        with pytest.raises(ValueError, match=r"^quantization_config: ignore is .*; a list of names is needed$"):
            listed("compressed-tensors", {"ignore": value})


@pytest.mark.parametrize("syntax", ["modelopt", *exhaustive(SYNTAXES[1:])])
def test_lists_of_100_000_names_are_made_in_seconds(syntax: str) -> None:
    converted = [name for layer in layers(130) for name in experts(layer, 256)]
    copied = [name for layer in layers(130) for name in mla(layer)]
    container = next(each.id for each in LISTED if each.syntax == syntax)

    def list_all() -> None:
        patterns = exclusion_list(syntax, copied, [], converted)
        check(container, patterns, copied if syntax != "mxfp4" else [], converted)

    assert len(converted) > 99_000 and cpu_seconds(list_all) < TEN


# ---- names that engines give modules of some classes of models ----

WRAPPED = ("KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration", "Glm5vForConditionalGeneration")


def of(architecture: str) -> dict[str, object]:
    return {"architectures": [architecture]}


@together("architecture", WRAPPED)
@together("container", ["modelopt NVFP4", "modelopt MXFP8", "modelopt FP8"])
@together("in_file, in_list", [(a, b) for a in ("", "model.") for b in ("", "model.")])
def test_wrapped_models_are_excluded_under_both_names(
    in_file: str, in_list: str, container: str, architecture: str
) -> None:
    """vLLM and SGLang rename language_model.layers in the list and in the files, so it may differ between the two."""
    layer, listed = f"language_model.{in_file}layers.0", f"language_model.{in_list}layers.0"
    copied = [*mla(layer), f"{layer}.mlp.gate", "vision_tower.blocks.0.wqkv", "language_model.lm_head"]
    converted = experts(layer)
    for patterns in ([f"{listed}.self_attn*", "*lm_head"], [*mla(listed), "language_model.lm_head"]):
        if patterns[1:] == mla(listed)[1:]:
            patterns = [*patterns, f"{listed}.self_attn.fused_qkv_a_proj*"]
        found = check(container, patterns, copied, converted, of(architecture))
        assert not found, (patterns, found)
    missed = check(container, ["language_model.lm_head"], copied, converted, of(architecture))
    assert engines(missed) == {one.engine for one in READERS[container]}
    if in_file != in_list:  # other models are not renamed
        assert check(container, [f"{listed}.self_attn*", "*lm_head"], copied, converted, of("OtherModel"))


@together("name", ["gate", "routed_expert_down_proj", "routed_expert_up_proj"])
@together("container", ["modelopt NVFP4", "compressed-tensors mxfp4-pack-quantized"])
def test_layers_that_engines_never_quantize_need_no_entry(name: str, container: str) -> None:
    module = f"language_model.model.layers.1.block_sparse_moe.{name}"
    converted = [f"language_model.model.layers.1.block_sparse_moe.experts.0.{leaf}" for leaf in ("w1", "w2", "w3")]
    assert not check(container, ["lm_head"], [module], converted, of("KimiK3ForConditionalGeneration"))
    assert check(container, ["lm_head"], [module], converted, of("Qwen3MoeForCausalLM"))


def test_towers_with_wrapped_layers() -> None:
    """SGLang fuses the layers q_proj.linear under the names q_proj, and asks the others for NAME.linear."""
    tower = "model.vision_tower.encoder.layers.0"
    names = [*attention(tower), *mlp(f"{tower}.mlp")]
    copied, converted = [f"{name}.linear" for name in names], attention("model.language_model.layers.0")
    container = "compressed-tensors nvfp4-pack-quantized"

    def subjects(patterns: list[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for one in check(container, ["lm_head", *patterns], copied, converted):
            found.setdefault(one.loader.partition(" ")[0], set()).add(one.subject.removeprefix(f"{tower}."))
        return found

    assert subjects(copied) == {"SGLang": {"self_attn.qkv_proj", "mlp.gate_up_proj"}}
    bare = subjects(names)
    assert bare["SGLang"] == {"self_attn.o_proj.linear", "mlp.down_proj.linear"}
    assert bare["vLLM"] == {f"{name}.linear".removeprefix(f"{tower}.") for name in names}
    assert not subjects([r"re:.*vision_tower.*"])
    assert not check(container, exclusion_list("compressed-tensors", copied, [], converted), copied, converted)
