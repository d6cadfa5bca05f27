"""Test the table of engines, containers and model families: its entries are consistent, and give the
documented advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from together import together

from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, loaded_container
from fp4kit.checkpoint.loaders import support
from fp4kit.contract.engine_table import VERSIONS


def test_only_unknown_cells_lack_a_source() -> None:
    for (container, family, engine), cell in support.CELLS.items():
        assert container in {*LOADED, *MIXTURES} and engine in VERSIONS and family in support.FAMILIES
        assert (cell.how == "") == (cell.status == "unknown"), (container, family)
        assert cell.note or cell.status in ("loads", "unknown"), (container, family, engine)


def test_gpt_oss_and_deepseek_v4_load_from_their_own_containers_alone() -> None:
    for family, own in (("gpt_oss", ["gpt-oss"]), ("deepseek_v4", ["deepseek-v4", "deepseek-v4 nvfp4"])):
        quantized = [each for each in LOADED.values() if each.kind]
        assert [each.id for each in quantized if support.engines_for(each.id, family)] == own
        others = [other for other in support.FAMILIES if other != family]
        assert not any(support.engines_for(each, other) for other in others for each in own)


@together("kind", KINDS)
@together("family", support.FAMILIES)
def test_the_best_format_loads_in_most_engines(kind: str, family: str) -> None:
    counts = {}
    for used in FORMATS[:-1]:
        if target := loaded_container(used, kind):
            counts[used] = len(support.engines_for(target.id, family))
    best = support.best_format(kind, family)
    assert max(counts.values()) == (counts[best] if best else 0)


@pytest.mark.parametrize("used", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@together("family", support.FAMILIES)
def test_refused_is_what_nothing_loads_and_the_way_out_works(used: str, kind: str, family: str) -> None:
    text = support.refusal(used, kind, family)
    target = loaded_container(used, kind)
    loads = target is not None and (target.kind is None or bool(support.engines_for(target.id, family)))
    assert (text is None) == loads
    if text is not None:
        way = re.search(r"use (?:an (\w+) recipe and )?--format ([\w-]+)", text)
        assert way and support.refusal(way[2], way[1] or kind, family) is None


@together(
    "format, kind, family, start, end",
    [
        (
            *("modelopt", "mxfp4", "dense"),
            "--format modelopt with mxfp4: no engine is known to load it for dense models (vLLM 0.33.0: the engine's",
            "; use --format compressed-tensors (vLLM 0.33.0, transformers 5.23.0)",
        ),
        (
            *("gpt-oss", "nvfp4", "moe"),
            "--format gpt-oss holds mxfp4 only, no nvfp4; use --format modelopt (vLLM 0.33.0, SGLang 0.5.23)",
            "",
        ),
        (
            *("modelopt", "mxfp8", "gpt_oss"),
            "--format modelopt with mxfp8",
            "use an mxfp4 recipe and --format gpt-oss (vLLM 0.33.0, SGLang 0.5.23, transformers 5.23.0)",
        ),
    ],
)
def test_texts_of_refusals(format: str, kind: str, family: str, start: str, end: str) -> None:
    text = support.refusal(format, kind, family) or ""
    assert text.startswith(start) and text.endswith(end)


def test_known_traps() -> None:
    traps = dict(support.known_traps("compressed-tensors nvfp4-pack-quantized", "moe"))
    assert {*traps} == {"vLLM", "SGLang", "transformers"} and traps["transformers"].status == "wrong values"
    assert not support.known_traps("modelopt NVFP4", "deepseek_v4")  # nothing is known


@together(
    "config, family",
    [
        ({"model_type": "qwen3"}, "dense"),
        ({}, "dense"),
        ({"model_type": "llama"}, "llama"),
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "moe"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "moe"),
        ({"model_type": "qwen3", "num_experts": 0}, "dense"),
        ({"model_type": "qwen3", "num_experts": None}, "dense"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "gpt_oss"),
        ({"architectures": ["GptOssForCausalLM"]}, "gpt_oss"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 4}, "deepseek_v3"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "deepseek_v3"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "deepseek_v4"),
        ({"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 4}}, "stacked_moe"),
        ({"model_type": "llama4_text", "num_local_experts": 4}, "llama4"),
        ({"model_type": "granitemoe", "num_local_experts": 4}, "granite_moe"),
        ({"model_type": "aria", "text_config": {"moe_num_experts": 4}}, "granite_moe"),
        ({"model_type": "gemma3", "text_config": {}}, "vlm"),
        ({"vision_config": {}}, "vlm"),
        ({"architectures": [1, None]}, "dense"),
        ({"architectures": "LlamaForCausalLM"}, "dense"),
        ({"architectures": 5, "model_type": ["llama"], "text_config": "x"}, "dense"),
    ],
)
def test_family_of(config: dict[str, object], family: str) -> None:
    assert support.family_of(config) == family


def test_the_table_of_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "checkpoints.md"
    text = page.read_text().partition("<!-- generated: loaders -->\n")[2].partition("<!-- end -->")[0].strip()
    head, rule, *rest = text.splitlines()
    rows, notes = rest[: rest.index("")], rest[rest.index("") + 1 :]
    assert (
        head
        == "| container | models | vLLM 0.33.0 | SGLang 0.5.23 | transformers 5.23.0 | compressed-tensors 0.20.0 | "
        "Model-Optimizer 0.47.0 |"
    )
    assert {line.count("|") for line in [head, rule, *rows]} == {8}
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows} == {*LOADED, *MIXTURES}
    assert [int(note.split(".")[0]) for note in notes] == list(range(1, len(notes) + 1))
    used = {int(number) for row in rows for number in re.findall(r"\[(\d+)\]", row)}
    assert used == set(range(1, len(notes) + 1))
    for row in rows:
        container_id, families, *cells = row.strip("| ").split(" | ")
        for family in families.split(", "):
            for engine, shown in zip(VERSIONS, cells, strict=True):
                status = support.cell(container_id, family, engine).status
                assert shown.startswith("?" if status == "unknown" else status)


@together(
    "call, text",
    [
        (lambda: support.cell("x", "dense", "vLLM"), "cell: container 'x', family 'dense', engine 'vLLM': at"),
        (lambda: support.engines_for("bf16", "x"), "cell: container 'bf16', family 'x', engine 'vLLM': at"),
        (lambda: loaded_container("mlx", "nvfp4"), "container: format 'mlx'; one of modelopt, compressed-tensors, "),
        (lambda: loaded_container("modelopt", "int4"), "container: recipe kind 'int4'; one of nvfp4, mxfp4, mxfp8, "),
        (lambda: support.best_format("int4", "dense"), "best_format: recipe kind 'int4'; one of nvfp4, mxfp4, mxfp8, "),
    ],
)
def test_unknown_words(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        call()


def test_container() -> None:
    assert loaded_container("modelopt", "nvfp4") is LOADED["modelopt W4A16_NVFP4"]
    assert loaded_container("modelopt", "nvfp4", input_scale=True) is LOADED["modelopt NVFP4"]
    assert loaded_container("compressed-tensors", "mxfp8") is LOADED["compressed-tensors mxfp8-quantized"]
    assert {loaded_container("bf16", kind) for kind in KINDS} == {LOADED["bf16"]}
    assert loaded_container("gpt-oss", "nvfp4") is None and loaded_container("sglang-mxfp8", "mxfp4") is None


def test_a_container_that_no_engine_was_seen_to_load_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "CELLS", {})
    assert support.refusal("sglang-mxfp8", "mxfp8", "dense") is None
