"""Test which sizes of tensor and expert parallelism a checkpoint allows, and what forbids the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from synthetic import BF16, refused

from fp4kit.__main__ import main
from fp4kit.checkpoint.containers.table import CONTAINERS
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.loaders.requirements import SIZES, SPLITS, obstacles, sharding_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.verify.verify import verify

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


MLP, ATTENTION, EXPERT = "model.layers.0.mlp", "model.layers.0.self_attn", "model.layers.0.mlp.experts.0"
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
