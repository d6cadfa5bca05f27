"""Requests that a plan refuses: quantized sources, recipes without a place, input scales out of range."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import make_plan


def dense(tmp_path: Path) -> Path:
    """The path of a model that could be converted."""
    synthetic.dense(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "config.json: has quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "config.json: has quantization_config"),
        ({"compression_config": {"format": "int4"}}, "config.json: has compression_config"),
    ],
)
def test_source_that_declares_quantization(tmp_path: Path, config: dict[str, object], what: str) -> None:
    synthetic.write_model(tmp_path / "m", config, {"a.weight": synthetic.random("a", (16, 64))})
    with refused(f"{what}: the source is quantized already; start from its unquantized release"):
        make_plan(tmp_path / "m")


def test_source_with_hf_quant_config(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    (tmp_path / "m" / "hf_quant_config.json").write_text("{}")
    with refused("hf_quant_config.json: the source is quantized already"):
        make_plan(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["a.weight_scale", "a.weight_scale_inv", "a.qweight", "a.weight_packed", "a.weight", "a.down_proj_blocks"]
)
def test_source_with_packed_tensors(tmp_path: Path, name: str) -> None:
    synthetic.write_model(tmp_path / "m", {}, {name: np.zeros((4, 4), np.uint8)})
    with refused(f"{name}: packed weights or their scales; the source is quantized already"):
        make_plan(tmp_path / "m")


def test_null_declarations_and_similar_names_are_no_quantization(tmp_path: Path) -> None:
    tensors = {"a.weight": synthetic.random("a", (16, 64)), "logit_scale": np.array(1, np.float32)}
    synthetic.write_model(tmp_path / "m", {"quantization_config": None}, tensors)
    assert make_plan(tmp_path / "m").converted


def test_unknown_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'nvfp4-te'"):
        make_plan(dense(tmp_path), "nvfp4-tee")


@pytest.mark.parametrize(
    "recipe", ["nvfp4-te-rowscaled", "nvfp4-modelopt-fake", "mxfp8-te-e5m2", "int4-modelopt", "nvfp4-torchao-single"]
)
def test_recipe_without_a_place(tmp_path: Path, recipe: str) -> None:
    with refused(f"recipe {recipe}: has no place in a Model-Optimizer checkpoint; use one of nvfp4-te, "):
        make_plan(dense(tmp_path), recipe)


def test_changed_recipe_needs_an_id_of_its_own(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    changed = replace(fp4kit.recipe("nvfp4-te"), sign="negative")
    with refused("recipe nvfp4-te: changed from the one of that id; give it an id of its own"):
        make_plan(tmp_path / "m", changed)
    assert make_plan(tmp_path / "m", replace(changed, id="nvfp4-mine")).recipe.id == "nvfp4-mine"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39])
def test_input_scale_out_of_range(tmp_path: Path, value: float) -> None:
    with refused(f"input scale: got {value}; a positive normal float32 is needed, such as 1.0"):
        make_plan(dense(tmp_path), input_scale=value)


def test_input_scale_of_a_recipe_without(tmp_path: Path) -> None:
    with refused("input scale: mxfp4-ocp stores none; leave it out, or use an NVFP4 recipe"):
        make_plan(dense(tmp_path), "mxfp4-ocp", input_scale=1.0)
