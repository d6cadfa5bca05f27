"""Test --like: the default exclusions and the presets of Model-Optimizer and llm-compressor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import synthetic
from synthetic import refused
from together import together

from fp4kit.checkpoint import Wishes, make_plan
from fp4kit.checkpoint.containers.configs import WRITTEN
from fp4kit.checkpoint.selection import presets
from fp4kit.checkpoint.selection.presets import EXCLUSIONS, FORMATS, PRESETS, TOOLS, Likeness
from fp4kit.checkpoint.selection.selection import ModelFacts, Selector, candidate
from fp4kit.cli import main
from fp4kit.recipes import recipe

LAYER = "model.layers.3"
# (--like, model_type, module, whether it is quantized)
CASES = [
    *(
        ("modelopt", "qwen3_5_moe", f"model.language_model.layers.3.{module}", quantized)
        for module, quantized in {
            "linear_attn.in_proj_a": False,
            "linear_attn.in_proj_b": False,
            "linear_attn.in_proj_qkv": True,
            "linear_attn.in_proj_z": True,
            "linear_attn.out_proj": True,
            "mlp.gate": False,
            "mlp.shared_expert_gate": False,
            "mlp.gate_proj": True,
            "mlp.experts.7.down_proj": True,
            "self_attn.q_proj": True,
        }.items()
    ),
    ("modelopt", "qwen3_5", "model.mtp.layers.0.mlp.up_proj", False),  # by the recipes of this family
    ("modelopt", "llama", "model.mtp.layers.0.mlp.up_proj", True),
    ("modelopt", "llama", "mtp.layers.0.mlp.up_proj", False),
    ("modelopt", "llama4", "vision_model.model.layers.0.mlp.fc1", False),
    ("modelopt", "llama4", f"language_model.{LAYER}.feed_forward.router", False),
    ("modelopt", "gemma4", "model.embed_vision.embedding_projection", False),
    ("modelopt", "nemotron_vl", "image_newline.proj", False),
    ("modelopt", "nemotron_h", "backbone.layers.3.mixer.in_proj", True),
    ("modelopt:MAMBA_MOE_NVFP4_CONSERVATIVE_CFG", "nemotron_h", "backbone.layers.3.mixer.in_proj", False),
    ("modelopt:MAMBA_MOE_NVFP4_AGGRESSIVE_CFG", "nemotron_h", "backbone.layers.3.mixer.in_proj", True),
    ("modelopt:MAMBA_MOE_NVFP4_AGGRESSIVE_CFG", "nemotron_h", "backbone.layers.3.mixer.q_proj", False),
    ("modelopt:NVFP4_MLP_ONLY_CFG", "llama", f"{LAYER}.self_attn.q_proj", False),
    ("modelopt:NVFP4_MLP_ONLY_CFG", "llama", f"{LAYER}.mlp.up_proj", True),
    ("modelopt:nvfp4_omlp_only", "llama", f"{LAYER}.self_attn.o_proj", True),
    ("modelopt:nvfp4_omlp_only", "llama", f"{LAYER}.self_attn.v_proj", False),
    ("modelopt:NVFP4_EXPERTS_ONLY_CFG", "deepseek_v3", f"{LAYER}.mlp.experts.3.up_proj", True),
    ("modelopt:NVFP4_EXPERTS_ONLY_CFG", "deepseek_v3", f"{LAYER}.mlp.shared_experts.up_proj", False),
    ("modelopt:NVFP4_EXPERTS_ONLY_CFG", "mixtral", f"{LAYER}.block_sparse_moe.experts.0.w1", True),
    ("modelopt:NVFP4_EXPERTS_ONLY_CFG", "llama", f"{LAYER}.mlp.up_proj", False),
    ("llm-compressor", "llama", "lm_head", False),
    ("llm-compressor", "llama", f"{LAYER}.self_attn.q_proj", True),
    ("llm-compressor", "llama4", f"language_model.{LAYER}.self_attn.q_proj", False),
    ("llm-compressor:NVFP4", "qwen3_next", f"{LAYER}.linear_attn.out_proj", False),
    ("llm-compressor", "qwen3_5_moe", f"{LAYER}.linear_attn.in_proj_qkv", False),
    ("llm-compressor", "qwen3_5_moe", f"{LAYER}.mlp.experts.1.up_proj", True),
    ("llm-compressor", "glm_moe_dsa", "model.layers.2.mlp.up_proj", False),
    ("llm-compressor", "glm_moe_dsa", f"{LAYER}.mlp.up_proj", True),
    ("llm-compressor", "glm_moe_dsa", f"{LAYER}.self_attn.indexer.weights_proj", False),
    ("llm-compressor", "glm4_moe", "model.layers.0.self_attn.q_proj", False),
    ("llm-compressor", "nemotron_h", "backbone.layers.3.mixer.fc1_latent_proj", False),
]


@together("case", CASES)
def test_modules_of_families(case: tuple[str, str, str, bool]) -> None:
    like, model_type, module, quantized = case
    reason = Likeness(like, model_type).reason(module)
    assert (reason is None) == quantized and (quantized or reason.startswith(f"--like {like}: "))


def test_every_row_has_a_source_and_applies() -> None:
    for one in EXCLUSIONS:
        assert one.tool in TOOLS and one.source and one.keep.split()
        for model_type in one.models.split() or ["any"]:
            found = presets.exclusions_of(one.tool, model_type)
            assert {(glob, one.source) for glob in one.keep.split()} <= {*found}
    ids = [name for one in PRESETS for name in {one.id, f"{one.tool}:{one.alias}"} if not name.endswith(":")]
    assert len(ids) == len({*ids}) and all(one.source and one.activations for one in PRESETS)


@together("preset", [one for one in PRESETS if one.recipe], ids=lambda one: one.id)
def test_recipes_of_presets_can_be_stored(preset: presets.Preset) -> None:
    forms = [form for form in WRITTEN if form.stores(recipe(preset.recipe))]
    assert forms and (preset.tool == "modelopt" or FORMATS[preset.tool] in {form.format for form in forms})
    Wishes(like=preset.id)
    assert presets.preset_of(f"{preset.tool}:{preset.alias}") in (preset, None)


@together("preset", [one for one in PRESETS if not one.recipe], ids=lambda one: one.id)
def test_presets_that_convert_cannot_follow_are_refused(preset: presets.Preset) -> None:
    with refused(f"--like {preset.id!r}: convert cannot follow this preset: {preset.activations}"):
        Wishes(like=preset.id)


@pytest.mark.parametrize(
    ("like", "text"),
    [
        ("modelopts", "one of modelopt, llm-compressor is needed, or TOOL:PRESET"),
        ("modelopt:", "Model-Optimizer has no preset ''; known are NVFP4_DEFAULT_CFG, W4A16_NVFP4_CFG"),
        ("modelopt:NVFP4", "Model-Optimizer has no preset 'NVFP4'; known are NVFP4_DEFAULT_CFG"),
        ("llm-compressor:nvfp4", "llm-compressor has no preset 'nvfp4'; known are NVFP4, NVFP4A16, MXFP4"),
        (":NVFP4", "one of modelopt, llm-compressor is needed"),
        (None, "--like None: a str is needed"),
    ],
)
def test_unknown_tools_and_presets_are_refused(like: Any, text: str) -> None:
    with refused(text):
        Wishes(like=like)


def test_names_of_llama_cpp_are_refused(tmp_path: Path) -> None:
    gguf_files.write_model(tmp_path / "model.gguf")
    with refused("--like modelopt: names modules of Hugging Face models, but SRC has llama.cpp's names"):
        make_plan(tmp_path / "model.gguf", "nvfp4-gguf", wishes=Wishes(like="modelopt"))


def test_bits_choose_recipes_in_place_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.dense(tmp_path / "source")
    paths = [str(tmp_path / name) for name in ("source", "result")]
    assert main(["convert", *paths, "--bits", "6", "--like", "modelopt:nvfp4"]) == 2
    assert "leave the preset of --like modelopt:nvfp4 out" in capsys.readouterr().err


def test_keep_and_include_precede_like_and_only_follows_it() -> None:
    tensor = candidate(f"{LAYER}.linear_attn.in_proj_a.weight", "BF16", (64, 64), ModelFacts(4, "qwen3_next"))
    for wishes, reason in (
        (Wishes(), ""),
        (Wishes(like="modelopt"), "--like modelopt: *linear_attn.in_proj_a* (nvidia-modelopt 0.47.0"),
        (Wishes(like="modelopt", only=("*in_proj_a",)), "--like modelopt"),
        (Wishes(like="modelopt", keep=("*in_proj_a",)), "--keep *in_proj_a"),
        (Wishes(like="modelopt", include=("*in_proj_a",)), ""),
        (Wishes(like="modelopt:NVFP4_MLP_ONLY_CFG", include=("*in_proj_a",)), ""),
    ):
        found = Selector(wishes, 16).decide(tensor)
        assert found.converted == (not reason) and (found.converted or found.listed) and found.reason.startswith(reason)


def test_a_selector_follows_the_family_of_each_model() -> None:
    selector, names = Selector(Wishes(like="llm-compressor"), 16), f"{LAYER}.linear_attn.out_proj.weight"
    kinds = ("qwen3_next", "llama", "qwen3_next")
    found = [selector.decide(candidate(names, "BF16", (64, 64), ModelFacts(4, kind))) for kind in kinds]
    assert [one.converted for one in found] == [False, True, False]


def test_a_preset_determines_layers_recipe_and_format(tmp_path: Path) -> None:
    tmp_path /= "model"
    synthetic.moe(tmp_path)
    plan = make_plan(tmp_path, wishes=Wishes(like="modelopt:NVFP4_EXPERTS_ONLY_CFG"))
    assert plan.recipe.id == "nvfp4-modelopt" and plan.form is not None and plan.form.format == "modelopt"
    assert {tensor.name.split(".")[4] for tensor in plan.converted} == {"experts"}
    assert any("self_attn" in name for name in plan.ignore)
    assert "--like modelopt:NVFP4_EXPERTS_ONLY_CFG, whose activations are NVFP4" in plan.request.chosen
    assert plan.request.facts["wishes"]["like"] == "modelopt:NVFP4_EXPERTS_ONLY_CFG"
    plan = make_plan(tmp_path, wishes=Wishes(like="llm-compressor:MXFP4"))
    assert plan.recipe.id == "mxfp4-compressed-tensors" and plan.form.format == "compressed-tensors"
    synthetic.dense(tmp_path / "dense")
    for like, format in (("modelopt:nvfp4", "modelopt"), ("llm-compressor:NVFP4", "compressed-tensors")):
        plan = make_plan(tmp_path / "dense", wishes=Wishes(like=like))
        assert plan.form is not None and plan.form.format == format  # one of the two is not the usual format
    # what the user names is kept
    plan = make_plan(tmp_path, "nvfp4-te", format="compressed-tensors", wishes=Wishes(like="modelopt:nvfp4"))
    assert plan.recipe.id == "nvfp4-te" and plan.form.format == "compressed-tensors" and not plan.request.chosen
    plan = make_plan(tmp_path, wishes=Wishes(like="modelopt"))  # a tool alone determines layers only
    assert plan.recipe == make_plan(tmp_path).recipe and plan.format_name == make_plan(tmp_path).format_name


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.moe(tmp_path / "source")
    paths = [str(tmp_path / name) for name in ("source", "result")]
    assert main(["convert", *paths, "--like", "modelopt:NVFP4_MLP_ONLY_CFG", "--dry-run", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    reasons = {one["name"]: one["reason"] for one in body["tensors"]}
    kept = [reason for name, reason in reasons.items() if "q_proj" in name and "norm" not in name]
    assert kept and {*kept} == {"--like modelopt:NVFP4_MLP_ONLY_CFG: not in the preset"}
    assert body["recipe"] == "nvfp4-modelopt" and body["format"] == "modelopt W4A16_NVFP4"
    assert main(["convert", *paths, "--like", "modelopt:NVFP5"]) == 2
    assert "has no preset 'NVFP5'; known are NVFP4_DEFAULT_CFG" in capsys.readouterr().err
    assert main(["recipes", "--presets", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "fp4kit.recipes.presets/1" and len(body["presets"]) == len(PRESETS)
    assert main(["recipes", "--presets"]) == 0
    assert "modelopt:NVFP4_DEFAULT_CFG" in capsys.readouterr().out
