"""Test the table of engines, containers and model families, and the parallelism that a checkpoint allows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from synthetic import BF16, refused
from together import together

from fp4kit.__main__ import main
from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, loaded_container
from fp4kit.checkpoint.containers.table import CONTAINERS
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.loaders.requirements import SIZES, SPLITS, obstacles, sharding_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.recipes import recipe


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


def test_among_equal_formats_the_best_is_that_of_the_producer() -> None:
    """MXFP8 has a format that vLLM and transformers load, and one that SGLang and transformers load."""
    found = {name: support.best_format("mxfp8", "dense", name) for name in ("", "te", "compressed-tensors", "sglang")}
    assert [*found.values()] == [*["compressed-tensors"] * 3, "sglang-mxfp8"]
    assert support.best_format("mxfp8", "stacked_moe", "compressed-tensors") == "compressed-tensors"
    assert support.best_format("mxfp8", "moe", "compressed-tensors") == "sglang-mxfp8"  # more engines load it
    config = {"architectures": ["BertModel"]}
    for name in ("mxfp8-te", "mxfp8-compressed-tensors"):
        form = Request.of(recipe(name), {}).form_for(config)
        assert form is not None and form.format == "compressed-tensors"
    for recipes in ([], [("*.down_proj", "mxfp8-te")]):
        mixture = Request.of(recipe("mxfp8-compressed-tensors"), {"recipes": recipes}).mixture_for(
            {"model_type": "qwen3_vl_moe"}
        )
        assert mixture.of("a.up_proj").form.format == "compressed-tensors"


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
    page = Path(__file__).parents[3] / "docs" / "checkpoint-engines.md"
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


NAMED = {container.name: container for container in CONTAINERS}
NVFP4, FP8, MXFP4, PER_ROW = (
    *("modelopt NVFP4", "fp8 128x128", "compressed-tensors mxfp4-pack-quantized", "modelopt FP8 per row"),
)
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def layer(name: str, shape: tuple[int, ...], container: str | None = NVFP4) -> Weight:
    form = None if container is None else NAMED[container].for_columns(shape[-1])
    return Weight(name, f"{name}.weight", shape, form, {})


def sizes(*layers: Weight, **config: Any) -> tuple[int, ...]:
    found = sharding_of(layers, config)
    assert found is not None
    for size in SIZES:  # the question about one size has the same answer
        assert bool(obstacles(layers, config, size, None)) == (size not in found.tensor)
    return found.tensor


MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
TABLE = [  # (layers, entries of config.json, allowed sizes)
    ([layer(f"{MLP}.down_proj", (128, 1856))], {}, (1, 2, 4)),  # 232 of 16
    ([layer(f"{MLP}.gate_proj", (1856, 128))], {}, SIZES),  # rows do not cut blocks of one row
    ([layer(f"{MLP}.gate_proj", (1000, 128))], {}, (1, 2, 4, 8)),  # but must be whole rows
    ([layer(f"{MLP}.down_proj", (128, 1856), MXFP4)], {}, (1, 2)),  # 464 = 14.5 * 32
    ([layer(f"{MLP}.down_proj", (128, 3072), FP8)], {}, (1, 2, 4, 8)),  # 192 of 128
    ([layer(f"{MLP}.gate_proj", (3072, 128), FP8)], {}, (1, 2, 4, 8)),
    ([layer(f"{MLP}.gate_up_proj", (6144, 128), FP8)], {}, (1, 2, 4, 8)),  # halves of 3072
    ([layer(f"{MLP}.down_proj", (128, 1856), PER_ROW)], {}, SIZES),
    ([layer(f"{MLP}.gate_proj", (3072, 128), PER_ROW), layer(f"{MLP}.down_proj", (64, 100), None)], {}, (1, 2, 4)),
    ([layer(f"{ATTENTION}.q_proj", (4096, 4096))], HEADS, SIZES),
    ([layer(f"{ATTENTION}.q_proj", (3072, 4096))], {**HEADS, "num_attention_heads": 24}, (1, 2, 4, 8)),
    ([layer(f"{ATTENTION}.k_proj", (1024, 4096), FP8)], HEADS, SIZES),  # heads of 128 rows, repeated from 16 on
    ([layer(f"{ATTENTION}.k_proj", (512, 4096), FP8)], HEADS, (1, 2, 4)),  # heads of 64 rows
    ([layer(f"{ATTENTION}.qkv_proj", (4096 + 2048, 4096), FP8)], HEADS, SIZES),
    ([layer(f"{ATTENTION}.qkv_proj", (2048 + 1024, 4096), FP8)], HEADS, (1, 2, 4)),
    ([layer(f"{ATTENTION}.q_proj", (4096, 4096))], {"text_config": {**HEADS, "num_key_value_heads": 6}}, (1, 2)),
    ([layer(f"{ATTENTION}.q_proj", (4096, 4096))], {**HEADS, "num_key_value_heads": 6, "kv_lora_rank": 512}, SIZES),
    ([layer(f"{ATTENTION}.kv_a_proj_with_mqa", (576, 7168), FP8)], {"num_attention_heads": 128}, SIZES),  # not split
    ([layer(f"{ATTENTION}.o_proj", (4096, 4096), FP8)], HEADS, SIZES),
    ([layer("backbone.layers.5.mixer.k_proj", (256, 4096), FP8)], {**HEADS, "num_key_value_heads": 2}, SIZES),
    ([layer(f"{ATTENTION}.indexer.wq_b", (64, 100), FP8), layer(f"{MLP}.up_proj", (64, 64))], {}, SIZES),
    ([layer("encoder.layer.0.intermediate.dense", (3072, 100))], {}, SIZES),  # rows; BERT's other dense: columns
    ([layer("encoder.layer.0.output.dense", (64, 96))], {}, (1, 2)),
    ([layer("lm_head", (151936, 1000)), layer(f"{MLP}.up_proj", (64, 64))], {}, SIZES),  # the vocabulary is padded
    ([layer("model.visual.blocks.0.mlp.fc2", (64, 80)), layer(f"{MLP}.up_proj", (64, 64))], {}, SIZES),
    ([layer("model.layers.0.mlp.experts.gate_up_proj", (32, 5760, 2880), "gpt-oss")], {}, (1, 2, 4, 8)),  # 90 blocks
]


@pytest.mark.parametrize(("layers", "config", "allowed"), TABLE)
def test_sizes(layers: list[Weight], config: dict[str, Any], allowed: tuple[int, ...]) -> None:
    assert sizes(*layers, **config) == allowed


@pytest.mark.parametrize("container", [NVFP4, MXFP4, FP8, PER_ROW, "compressed-tensors mxfp8-quantized"])
def test_no_shard_begins_or_ends_within_a_block(container: str) -> None:
    """For every layer kind: the allowed sizes are those that divide the axis into whole blocks."""
    for leaf, axis in ((leaf, axis) for leaf, axis in SPLITS.items() if axis != "whole"):
        for length in (96, 128, 384, 1856, 3072):
            halves = 2 if leaf in ("gate_up_proj", "w13") else 1
            shape = (halves * length, 256) if axis == "rows" else (256, length)
            block = NAMED[container].block[axis != "rows"] or 1
            whole = [n for n in SIZES if n == 1 or length % (n * block) == 0]
            assert sizes(layer(f"{MLP}.{leaf}", shape, container)) == tuple(whole), (leaf, length)


def experts(count: int, columns: int = 1856) -> list[Weight]:
    names = [f"model.layers.0.mlp.experts.{e}" for e in range(count)]
    return [layer(f"{name}.down_proj", (128, columns)) for name in names] + [layer(f"{MLP}.gate", (count, 128), None)]


def test_expert_parallelism() -> None:
    """Ranks that share the experts hold whole ones; the number of experts must be a multiple of these ranks."""
    found = sharding_of(experts(8), {})
    assert found is not None and (found.tensor, found.with_experts) == ((1, 2, 4), (1, 2, 4, 8))
    for tp, ep, text in (
        (8, None, "rows of 1856 values give 232 per rank, no multiple of the block of 16"),
        (8, 1, "give 232 per rank"),
        (16, 2, "give 232 per rank"),
        (8, 2, ""),
        (8, 8, ""),
        (None, 8, ""),
        (16, 16, "8 experts cannot be shared evenly among 16 ranks, as SGLang requires"),
        (None, 3, "8 experts cannot be shared evenly among 3 ranks"),
        (3, None, "rows of 1856 values cannot be split over 3 ranks"),
    ):
        reasons = [one.text for one in obstacles(experts(8), {}, tp, ep)]
        assert any(text in reason for reason in reasons) if text else not reasons, (tp, ep, reasons)
    stack = layer("model.layers.0.mlp.experts.down_proj", (6, 128, 1856), "modelopt NVFP4 stacks")
    assert [one.text for one in obstacles([stack], {}, 4, 4)] == [
        "6 experts cannot be shared evenly among 4 ranks, as SGLang requires"
    ]
    assert [one.text for one in obstacles([layer(f"{MLP}.down_proj", (64, 64))], {}, 2, 2)] == [
        "the model has no experts to share among 2 ranks"
    ]
    with refused("--ep 3: --tp 8 is no multiple of it"):
        obstacles(experts(8), {}, 8, 3)


def test_the_line_names_the_first_size_that_is_missing() -> None:
    found = sharding_of([*experts(4), layer("model.layers.0.mixer.in_proj", (64, 64))], {})
    assert found is not None and found.line == (
        "tensor parallel sizes: 1, 2, 4; not 8: rows of 1856 values give 232 per rank, no multiple of the block of 16"
        " (model.layers.0.mlp.experts.0.down_proj and 3 more); not judged: layers called in_proj"
    )
    heads = sharding_of([layer(f"{ATTENTION}.q_proj", (640, 64))], {"num_attention_heads": 10})
    assert heads is not None and "not 4: 10 attention heads cannot be split over 4 ranks" in heads.line


def test_models_that_other_engines_load_are_not_judged() -> None:
    for container in ("mlx nvfp4", "gguf NVFP4", "comfy nvfp4"):
        assert sharding_of([layer(f"{MLP}.down_proj", (128, 1856), container)], {}) is None
    assert sharding_of([layer(f"{MLP}.down_proj", (128, 1856), None)], {}) is None
    with refused("--tp, --ep: need a model directory in a format that vLLM or SGLang loads"):
        obstacles([layer(f"{MLP}.down_proj", (128, 1856), "mlx nvfp4")], {}, 2, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a quantized model of four experts of width 928, of which 8 ranks would get 116 columns."""
    root = tmp_path_factory.mktemp("model")
    tensors = {"model.embed_tokens.weight": synthetic.random("embed", (64, 64), 0.02, BF16)}
    for e in range(4):
        for leaf, shape in (("gate", (928, 64)), ("up", (928, 64)), ("down", (64, 928))):
            name = f"model.layers.0.mlp.experts.{e}.{leaf}_proj.weight"
            tensors[name] = synthetic.random(name, shape, 0.02, BF16)
    tensors["model.layers.0.mlp.gate.weight"] = synthetic.random("gate", (4, 64), 0.02, BF16)
    synthetic.write_model(root / "src", {"model_type": "qwen3_moe", "num_attention_heads": 4}, tensors)
    convert(root / "src", root / "out", "nvfp4-modelopt", format="modelopt")
    return root / "out"


def test_verify_reports_the_sizes_and_fails_for_one_that_cuts_blocks(model: Path, capsys: Any) -> None:
    cut = "tensor parallelism over 4 ranks: rows of 928 values give 232 per rank, no multiple of the block of 16"
    for arguments, code, text in (
        ((), 0, "tensor parallel sizes: 1, 2 (1, 2, 4 with expert parallelism of the same size); not 4: rows of 928"),
        (("--tp", "2"), 0, "tensor parallel sizes: 1, 2"),
        (("--tp", "4"), 1, cut),
        (("--ep", "4"), 0, "tensor parallel sizes"),
        (("--tp", "8", "--ep", "4"), 0, "tensor parallel sizes"),
        (("--ep", "3"), 1, "4 experts cannot be shared evenly among 3 ranks"),
        (("--tp", "4", "--ep", "3"), 2, "--tp 4 is no multiple of it"),
        (("--tp", "0"), 2, "--tp 0: a number of ranks of at least 1 is needed"),
    ):
        assert main(["verify", str(model), *arguments]) == code, arguments
        assert text in "".join(capsys.readouterr())
    assert main(["verify", str(model), "--tp", "4", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["parallel"]["tensor"] == [1, 2] and data["parallel"]["with_experts"] == [1, 2, 4]
    four = next(one for one in data["parallel"]["refused"] if one["size"] == 4)
    assert len(four["layers"]) == 4 and four["reason"] in cut
    assert [issue["subject"] for issue in data["issues"] if issue["severity"] == "error"] == four["layers"]
    report = verify(model, tp=4)
    assert not report.clean and report.parallel is not None and report.parallel.tensor == (1, 2)
