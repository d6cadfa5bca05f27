"""Test models whose experts engines read as stacks: what is warned, what is excluded, and what transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.loaders import exclusions, support
from fp4kit.checkpoint.loaders.observations import SPLIT_EXPERTS
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings come from transformers
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LAYER = "model.layers.0"
STACKS = {
    "granitemoe": ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear", "block_sparse_moe.experts"),
    "aria_text": ("mlp.experts.fc1", "mlp.experts.fc2", "mlp.experts"),
}


def with_stacks(root: Path, model_type: str) -> Path:
    """Write a model with an attention layer and two stacks of experts to `root`, and return `root`.

    model_type: the type of the model, which determines the names of the stacks.
    """
    values = np.random.default_rng(0).standard_normal((4, 64, 64)).astype(np.float32)
    tensors = {f"{LAYER}.{name}.weight": values for name in STACKS[model_type][:2]}
    tensors |= {f"{LAYER}.self_attn.{name}_proj.weight": values[0] for name in "qkvo"}
    config = {"model_type": model_type, "num_local_experts": 4, "num_hidden_layers": 1}
    synthetic.write_model(root, config, tensors)
    return root


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("model_type", STACKS)
def test_copied_stacks_are_named_and_excluded(tmp_path: Path, model_type: str, format: str) -> None:
    source = with_stacks(tmp_path / "m", model_type)
    first, second, container = (f"{LAYER}.{name}" for name in STACKS[model_type])
    plan = make_plan(source, "nvfp4-te", format=format)
    assert {t.name for t in plan.tensors if "unsupported expert stack" in t.reason} == {
        f"{first}.weight",
        f"{second}.weight",
    }
    assert plan.warnings == (
        f"2 layers ({first}.weight, {second}.weight): kept unquantized, because expert stacks of such names are not"
        " supported",
    )
    assert container in plan.ignore  # vLLM and SGLang look up the container, not the stacks
    convert(source, tmp_path / "out", "nvfp4-te", format=format)
    assert not [issue for issue in verify(tmp_path / "out").issues if issue.severity == "error"]


@pytest.mark.parametrize("container", ["modelopt NVFP4", "compressed-tensors nvfp4-pack-quantized"])
def test_a_list_without_the_container_of_granite_is_an_error(container: str) -> None:
    stacks = [f"{LAYER}.{name}" for name in STACKS["granitemoe"][:2]]
    found = exclusions.check(container, ["lm_head", *stacks], stacks, [f"{LAYER}.self_attn.o_proj"])
    assert {(each.engine, each.subject) for each in found} >= {
        ("vLLM", f"{LAYER}.block_sparse_moe.experts"),
        ("SGLang", f"{LAYER}.block_sparse_moe.experts"),
    }


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "llama4_text", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["mxfp4-te", "mxfp8-te"])
def test_split_experts_are_warned_of(tmp_path: Path, model_type: str, recipe: str) -> None:
    """The plan and verify warn about experts stored one by one if transformers loads this model type only with stacks.

    They also warn when such experts are decoded to bfloat16.
    """
    synthetic.vlm_moe(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": model_type}))
    warned = model_type != "qwen3_moe"
    for source, out, format in (("m", "q", "compressed-tensors"), ("q", "b", "bf16")):
        plan = make_plan(tmp_path / source, recipe, format=format)
        assert any(SPLIT_EXPERTS in line for line in plan.warnings) == warned
        convert(tmp_path / source, tmp_path / out, recipe, format=format)
        texts = [issue.text for issue in verify(tmp_path / out).issues if issue.severity == "warning"]
        assert any(SPLIT_EXPERTS in text for text in texts) == warned


def test_copied_stacks_of_a_split_model_are_not_warned_of(tmp_path: Path) -> None:
    synthetic.fused(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl_moe"}))
    wishes = Wishes(keep=("*.experts.*",))
    plan = make_plan(tmp_path / "m", "mxfp4-te", format="compressed-tensors", wishes=wishes)
    assert not any(SPLIT_EXPERTS in line for line in plan.warnings)


def granite(transformers: Any) -> Any:
    config = transformers.AutoConfig.for_model("granitemoe", **SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.AutoModelForCausalLM, config


def aria(transformers: Any) -> Any:
    counts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0}
    return transformers.AutoModelForCausalLM, transformers.AutoConfig.for_model("aria_text", **SIZES, **counts)


def qwen3_vl_moe(transformers: Any) -> Any:
    text = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 4}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    return transformers.AutoModelForImageTextToText, config


@pytest.mark.parametrize("make", [granite, aria, qwen3_vl_moe])
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-te", "mxfp8-te"])
def test_the_table_says_what_transformers_does(tmp_path: Path, make: Callable[[Any], Any], recipe: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    auto, config = make(transformers)
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    plan = make_plan(tmp_path / "m", recipe, format="compressed-tensors")
    convert(tmp_path / "m", tmp_path / "q", recipe, format="compressed-tensors")
    model, loading = auto.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True)
    missing = [name for name in loading["missing_keys"] if ".experts." in name]
    status = support.cell(plan.format_name, support.family_of(config.to_dict()), "transformers").status
    assert (status == "loads") == (not missing)
    if missing:
        assert status == "wrong values"
        return
    model(torch.arange(4)[None])  # compressed-tensors decodes weights at their first use
    convert(tmp_path / "q", tmp_path / "bf16", recipe, format="bf16")
    expected = auto.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.items())
