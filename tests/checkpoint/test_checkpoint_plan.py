"""Plans: what is converted and why not, what shares an amax, what loaders are told, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import Plan, make_plan, schema, sharing
from fp4kit.formats import E2M1


def plan_of(tmp_path: Path, name: str, recipe: str = "nvfp4-te", **options: object) -> Plan:
    synthetic.MODELS[name](tmp_path / name)
    return make_plan(tmp_path / name, recipe, **options)  # type: ignore[arg-type]


def converted(plan: Plan) -> set[str]:
    return {tensor.name.removesuffix(".weight") for tensor in plan.converted}


def reasons(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.reason for tensor in plan.tensors if tensor.action == "copy"}


def test_dense(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense")
    assert len(converted(plan)) == 2 * 7
    why = reasons(plan)
    assert why["model.embed_tokens.weight"] == "embedding (embed_tokens)"
    assert why["model.layers.0.self_attn.q_norm.weight"] == "1-D: a norm or a bias"
    assert plan.ignore == ("lm_head",)
    assert not plan.warnings


def test_k_that_is_not_whole_blocks_is_copied_and_listed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense", "mxfp4-ocp")
    name = "model.layers.0.mlp.down_proj"
    assert reasons(plan)[f"{name}.weight"] == "K = 80 is not a multiple of 32"
    assert name in plan.ignore and name not in converted(plan)
    assert "model.layers.0.mlp.gate_proj" in converted(plan)


def test_moe(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "moe")
    assert len(converted(plan)) == 8 + 3 + 12
    assert reasons(plan)["model.layers.1.mlp.gate.weight"] == "MoE router"
    assert reasons(plan)["lm_head.weight"] == "output head (lm_head)"
    assert plan.ignore == ("lm_head", "model.layers.1.mlp.gate")


def test_fused_experts_are_copied_and_their_container_is_listed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "fused")
    assert reasons(plan)["model.layers.0.mlp.experts.down_proj"] == "expert stack: not converted by this version"
    assert "model.layers.0.mlp.experts" in plan.ignore
    assert len(converted(plan)) == 4


def test_flat_expert_stacks_and_their_biases(tmp_path: Path) -> None:
    experts = "transformer.blocks.0.ffn.experts"
    tensors = {"a.weight": synthetic.random("a", (16, 64)), f"{experts}.mlp.w1": synthetic.random("w1", (256, 64))}
    tensors[f"{experts}.down_proj_bias"] = synthetic.random("b", (4, 64))
    synthetic.write_model(tmp_path / "m", {}, tensors)
    plan = make_plan(tmp_path / "m")
    assert reasons(plan)[f"{experts}.mlp.w1"] == "expert stack of a form that is not converted (w1, 2-D)"
    assert reasons(plan)[f"{experts}.down_proj_bias"] == "not a weight"
    assert plan.ignore == ("lm_head", experts, f"{experts}.mlp.w1")


def test_deepseek(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deepseek")
    assert not [name for name in converted(plan) if ".layers.2." in name]
    assert reasons(plan)["model.layers.2.eh_proj.weight"] == "multi-token prediction (model.layers.2)"
    assert "model.layers.2.*" in plan.ignore
    assert "model.layers.2.mlp.experts" in plan.ignore
    assert "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa" in plan.ignore
    group = "model.layers.0.self_attn.(q_a_proj|kv_a_proj_with_mqa)"
    assert {t.name.split(".")[-2] for t in plan.converted if t.group == group} == {"q_a_proj", "kv_a_proj_with_mqa"}


def test_bert(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "bert")
    assert len(converted(plan)) == 5
    assert reasons(plan)["classifier.weight"] == "output head (classifier)"
    assert reasons(plan)["embeddings.position_ids"] == "not a weight"
    group = "encoder.layer.0.attention.self.(query|key|value)"
    assert sum(tensor.group == group for tensor in plan.converted) == 3
    assert [file.name for file in plan.auxiliary.copied] == ["tokenizer_config.json", "1_Pooling/config.json"]


def test_vlm(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vlm")
    assert all(name.startswith("model.language_model.layers.0.") for name in converted(plan))
    tower = "model.visual.blocks.0.mlp.gate_proj"
    assert reasons(plan)[f"{tower}.weight"] == "vision or audio tower (model.visual)"
    assert {"model.visual.*", tower, "model.visual.blocks.0.mlp.gate_up_proj"} <= set(plan.ignore)
    assert reasons(plan)["model.visual.patch_embed.proj.weight"] == "5-D: not a linear layer"


def test_layer_count_of_text_config_bounds_layers(tmp_path: Path) -> None:
    synthetic.vlm(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = "1"
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with refused("config.json: num_hidden_layers is '1'; a whole number from 1 to 100000 is needed"):
        make_plan(tmp_path / "m")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("transformer.wte", "embedding (wte)"),
        ("shared", "embedding (shared)"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "embedding (relative_attention_bias)"),
        ("score", "output head (score)"),
        ("model.value_head", "output head (value_head)"),
        ("output", "output head (output)"),
        ("model.layers.0.block_sparse_moe.gate", "MoE router"),
        ("model.layers.0.mlp.shared_expert_gate", "MoE router"),
        ("model.layers.0.feed_forward.router", "MoE router"),
        ("mtp.0.ffn.w1", "multi-token prediction (mtp)"),
        ("model.layers.7.mlp.up_proj", "multi-token prediction (model.layers.7)"),
        ("vision_tower.encoder.layers.9.mlp.fc1", "vision or audio tower (vision_tower)"),
    ],
)
def test_names_that_are_left_out(tmp_path: Path, module: str, reason: str) -> None:
    tensors = {f"{module}.weight": synthetic.random(module, (16, 64)), "a.weight": synthetic.random("a", (16, 64))}
    synthetic.write_model(tmp_path / "m", {"num_hidden_layers": 7}, tensors)
    plan = make_plan(tmp_path / "m")
    assert reasons(plan) == {f"{module}.weight": reason}


def test_gpt2_layers_are_transposed(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {"model_type": "gpt2"}, {"h.0.attn.c_attn.weight": np.ones((64, 64), np.float32)})
    with refused("0 tensors to convert: h.0.attn.c_attn.weight (gpt2 stores its layers transposed ([K, N]))"):
        make_plan(tmp_path / "m")


def test_nothing_to_convert(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"a.bias": np.ones(4, np.float32)})
    with refused("0 tensors to convert: no 2-D .weight tensors; change the preset, the patterns or the recipe"):
        make_plan(tmp_path / "m")


def test_other_dtypes_and_empty_tensors_are_copied(tmp_path: Path) -> None:
    tensors: synthetic.Tensors = {
        "a.weight": np.ones((16, 64), np.float16),
        "b.weight": np.ones((16, 64), np.int64),
        "c.weight": np.ones((0, 64), np.float32),
        "d.weight": np.array(1, np.float32),
    }
    synthetic.write_model(tmp_path / "m", {}, tensors)
    plan = make_plan(tmp_path / "m")
    assert reasons(plan) == {
        "b.weight": "dtype I64 is not one of F32, F16, BF16",
        "c.weight": "has no elements",
        "d.weight": "0-D: not a linear layer",
    }
    assert plan.ignore == ("b", "c", "lm_head")


def test_include_restricts(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "moe", include=["*.experts.*", "*.self_attn.o_proj"])
    assert len(converted(plan)) == 12 + 2
    assert reasons(plan)["model.layers.0.mlp.up_proj.weight"] == "not named by --only"
    assert {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"} <= set(plan.ignore)
    assert "model.layers.0.self_attn.qkv_proj" in plan.ignore


def test_exclude_wins(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "moe", include=["*.experts.*"], exclude=["*.experts.[123].*"])
    assert converted(plan) == {f"model.layers.1.mlp.experts.0.{n}_proj" for n in ("gate", "up", "down")}
    assert reasons(plan)["model.layers.1.mlp.experts.1.up_proj.weight"] == "--keep *.experts.[123].*"
    assert "model.layers.1.mlp.experts" not in plan.ignore


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_pattern_that_matches_nothing(tmp_path: Path, option: str) -> None:
    synthetic.moe(tmp_path / "m")
    options = {"include": ["*"], "exclude": ["*.0.*"], option: ["layers.9"]}
    with refused(f"--{'only' if option == 'include' else 'keep'} 'layers.9': matches no module; names look like "):
        make_plan(tmp_path / "m", include=options["include"], exclude=options["exclude"])


def test_include_of_what_rules_leave_out(tmp_path: Path) -> None:
    with refused("--only 'lm_head': all that it names is left out: lm_head (output head (lm_head))"):
        plan_of(tmp_path, "moe", include=["lm_head", "*.experts.*"])


def test_partly_converted_fusion_warns(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense", exclude=["model.layers.0.self_attn.k_proj"])
    assert plan.warnings == (
        "model.layers.0.self_attn.(q_proj|k_proj|v_proj): k_proj stays unquantized; loaders that fuse these need all or none",
    )
    assert "model.layers.0.self_attn.qkv_proj" not in plan.ignore


def test_substring_of_a_converted_layer_warns(tmp_path: Path) -> None:
    tensors = {f"model.mlp.{n}.weight": synthetic.random(n, (16, 64)) for n in ("gate", "gate_proj", "up_proj")}
    synthetic.write_model(tmp_path / "m", {}, tensors)
    (warning,) = make_plan(tmp_path / "m").warnings
    assert warning.startswith("model.mlp.gate of the exclusion list also matches model.mlp.gate_proj, which is converted")


def test_groups_only_where_a_tensor_scale_is_shared(tmp_path: Path) -> None:
    assert any(tensor.group for tensor in plan_of(tmp_path, "moe").converted)
    assert not any(tensor.group for tensor in make_plan(tmp_path / "moe", "mxfp4-ocp").converted)


def test_group_of_one_is_no_group(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "moe", include=["*.0.self_attn.q_proj"])
    assert [tensor.group for tensor in plan.converted] == [None]


def _vllm_excludes(patterns: Iterable[str], module: str) -> bool:
    return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)


def _sglang_excludes(patterns: Iterable[str], module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


@pytest.mark.parametrize("name", synthetic.MODELS)
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp"])
def test_loaders_and_tensors_agree(tmp_path: Path, name: str, recipe: str) -> None:
    """What a loader excludes, by its own matcher and by fused names, is what is not quantized."""
    plan = plan_of(tmp_path, name, recipe)
    layers = {t.name.removesuffix(".weight"): t.action for t in plan.tensors if t.name.endswith(".weight")}
    layers = {m: a for m, a in layers.items() if "embed" not in m and "norm" not in m.lower()}
    for excludes in (_vllm_excludes, _sglang_excludes):
        assert {module: excludes(plan.ignore, module) for module in layers} == {m: a == "copy" for m, a in layers.items()}
        for (parent, fusion), members in sharing.fused_groups(layers).items():
            fused = sharing.join_module(parent, fusion.alias or fusion.members[0])
            assert excludes(plan.ignore, fused) == (layers[members[0]] == "copy")
    assert not any(pattern.endswith(".") for pattern in plan.ignore)


def test_sizes(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense")
    assert plan.bytes_in == sum(x.nbytes for x in synthetic.dense(tmp_path / "again").values())
    weights = sum(tensor.entry.nbytes for tensor in plan.converted)
    values = weights // 2
    assert plan.bytes_out == plan.bytes_in - weights + values // 2 + values // 16 + 4 * len(plan.converted)
    assert plan.bytes_to_read == plan.bytes_in + sum(t.entry.nbytes for t in plan.converted)


def test_plan_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "m")
    monkeypatch.setattr("fp4kit.storage.safetensors_file.TensorReader.__init__", None)
    assert make_plan(tmp_path / "m").converted


def test_auxiliary_files(tmp_path: Path) -> None:
    root = tmp_path / "m"
    synthetic.dense(root)
    (tmp_path / "secret.txt").write_text("secret")
    names = ("LICENSE", "notes.md", "chat.jinja", "modeling.py", "pytorch_model.bin", "model.gguf", ".hidden")
    nested = ("pytorch_model.bin.index.json", "sub/deep/vocab.txt", "sub/other.safetensors", ".git/config.json")
    for name in (*names, *nested):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "USE.txt").symlink_to(tmp_path / "secret.txt")
    (root / "inside.txt").symlink_to("LICENSE")
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "pipe.txt")
    files = make_plan(root).auxiliary
    assert [file.name for file in files.copied] == [
        "LICENSE", "chat.jinja", "inside.txt", "notes.md", "tokenizer_config.json", "sub/deep/vocab.txt",
    ]  # fmt: skip
    assert dict(files.skipped) == {
        ".git": "hidden directory",
        ".hidden": "not a kind of file that is copied",
        "USE.txt": "a link that leaves the directory",
        "loop": "a link to a directory",
        "model.gguf": "weights that are not part of the model",
        "modeling.py": "not a kind of file that is copied",
        "pipe.txt": "not a regular file",
        "pytorch_model.bin": "weights that are not part of the model",
        "pytorch_model.bin.index.json": "index of other weights",
        "sub/other.safetensors": "weights that are not part of the model",
    }


@pytest.mark.parametrize("fmt", schema.OUTPUT_FORMATS, ids=str)
def test_every_format_recognises_its_own_tensors(fmt: schema.OutputFormat) -> None:
    assert schema.recognise(fmt.tensors((6, 64))) == (fmt, (6, 64))
    assert schema.recognise({"weight": ("BF16", (6, 64))}) is None
    assert fmt.scale.max > 0 and (fmt.element is E2M1) == (fmt.weight_dtype == "U8")
