"""Test requests that a plan rejects: unknown sources, values that would change, recipes without a container, wrong
options.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.containers.configs import ALL_FORMATS
from fp4kit.checkpoint.convert.convert import convert, execute
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.verify.verify import verify


def dense(tmp_path: Path) -> Path:
    """Write a model that can be converted; return its path."""
    synthetic.dense(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "text_config.quantization_config"),
        ({"compression_config": {"format": "int4"}}, "compression_config"),
    ],
)
def test_source_that_declares_what_it_is_not(tmp_path: Path, config: dict[str, object], key: str) -> None:
    synthetic.write_model(tmp_path / "m", config, {"a.weight": synthetic.random("a", (16, 64))})
    with refused(f"config.json: has {key}, but no tensor is quantized; remove this entry or file from the source"):
        make_plan(tmp_path / "m")


def test_source_with_hf_quant_config(tmp_path: Path) -> None:
    root = dense(tmp_path)
    (root / "hf_quant_config.json").write_text("{}")
    with refused("hf_quant_config.json: exists, but no tensor is quantized; remove this entry or file from the source"):
        make_plan(root)


@pytest.mark.parametrize(
    "name", ["a.weight_scale", "a.weight_scale_inv", "a.qweight", "a.weight_packed", "a.weight", "a.down_proj_blocks"]
)
def test_source_of_no_known_form(tmp_path: Path, name: str) -> None:
    synthetic.write_model(tmp_path / "m", {}, {name: np.zeros((4, 4), np.uint8)})
    with refused(f"{name} (U8 [4, 4]): packed weights or scales in a format that fp4kit does not know ("):
        make_plan(tmp_path / "m")


FP8 = {"a.weight": np.zeros((256, 64), synthetic.E4M3)}
NVFP4 = {"a.weight": np.zeros((8, 32), np.uint8), "a.weight_scale": np.zeros((8, 4), synthetic.E4M3)}


@pytest.mark.parametrize(
    "tensors",
    [
        {**FP8, "a.weight_scale_inv": np.ones((1, 1), np.float32)},  # 2 blocks of rows
        {**FP8, "a.weight_scale_inv": np.ones((2, 1), np.uint8)},
        {**NVFP4, "a.weight_scale": np.zeros((8, 2), synthetic.E4M3), "a.weight_scale_2": np.ones((), np.float32)},
        {**NVFP4, "a.weight_scale_2": np.ones(2, np.float32)},
        NVFP4,  # lacks its tensor scale
        {"a.weight_packed": np.zeros((8, 20), np.uint8), "a.weight_scale": np.zeros((8, 1), np.uint8)},  # K = 40
        {"a_blocks": np.zeros((2, 8, 2, 8), np.uint8), "a_scales": np.zeros((2, 8, 2), np.uint8)},
    ],
    ids=["rows", "dtype", "columns", "two scales", "no scale", "half a block", "half a group"],
)
def test_parts_that_do_not_fit(tmp_path: Path, tensors: synthetic.Tensors) -> None:
    synthetic.write_model(tmp_path / "m", {}, {**tensors, "b.weight": synthetic.random("b", (16, 64))})
    with refused("in a format that fp4kit does not know"):
        make_plan(tmp_path / "m")


def test_values_that_would_change(tmp_path: Path) -> None:
    """Values that are already quantized are changed only if --requantize is given.

    Without the option, the request is rejected.
    """
    synthetic.deepseek_fp8(tmp_path / "fp8")
    with refused(
        "model.layers.0.self_attn.q_a_proj: is already quantized as fp8 128x128,"
        " and quantizing it as modelopt NVFP4 would change its values"
    ):
        make_plan(tmp_path / "fp8", "nvfp4-te")
    with refused(
        "model.layers.0.self_attn.q_a_proj.weight: its scales are not powers of two, so MXFP8 cannot keep its values"
    ):
        make_plan(tmp_path / "fp8", "mxfp8-te", format="sglang-mxfp8")
    assert make_plan(tmp_path / "fp8", "mxfp8-te", format="sglang-mxfp8", requantize=True).converted
    with refused("its scales are not powers of two"):
        convert(tmp_path / "fp8", tmp_path / "out", "mxfp8-te", format="sglang-mxfp8", options=Options(workers=1))
    assert not (tmp_path / "out").exists()


def test_scales_that_are_no_powers_of_two_any_more(tmp_path: Path) -> None:
    """The run fails if scales, which were powers of two when the plan was made, have changed since."""
    synthetic.deepseek_fp8(tmp_path / "fp8", powers=True)
    plan = make_plan(tmp_path / "fp8", "mxfp8-te", format="sglang-mxfp8")
    shutil.rmtree(tmp_path / "fp8")
    synthetic.deepseek_fp8(tmp_path / "fp8")
    with refused("its scales are not powers of two"):
        execute(plan, tmp_path / "out", Options(workers=1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "mlx"])
def test_a_weight_of_no_module_stays(tmp_path: Path, format: str) -> None:
    """A tensor named just ".weight" is copied, because its scales would have no valid name."""
    numbers = {".weight": synthetic.random("a", (64, 64)), "b.weight": synthetic.random("b", (64, 64))}
    synthetic.write_model(tmp_path / "m", {"model_type": "qwen3"}, numbers)
    convert(tmp_path / "m", tmp_path / "q", "mxfp4-ocp" if format == "mlx" else "nvfp4-te", format=format)
    assert verify(tmp_path / "q", tmp_path / "m").clean
    convert(tmp_path / "q", tmp_path / "n", format="bf16")
    del numbers["b.weight"]
    synthetic.write_model(tmp_path / "only", {"model_type": "qwen3"}, numbers)
    with refused("0 tensors to convert"):
        make_plan(tmp_path / "only")


def test_nothing_to_decode(tmp_path: Path) -> None:
    with refused("0 tensors to convert: nothing in the source is quantized, so there is nothing to decode"):
        make_plan(dense(tmp_path), format="bf16")


def test_null_declarations_and_similar_names_are_no_quantization(tmp_path: Path) -> None:
    tensors = {"a.weight": synthetic.random("a", (16, 64)), "logit_scale": np.array(1, np.float32)}
    synthetic.write_model(tmp_path / "m", {"quantization_config": None}, tensors)
    assert make_plan(tmp_path / "m").converted


def test_unknown_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'nvfp4-te'"):
        make_plan(dense(tmp_path), "nvfp4-tee")


@pytest.mark.parametrize(
    "recipe, plain",
    [
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen"),
        ("nvfp4-comfy-kitchen-stochastic-cuda", "nvfp4-comfy-kitchen"),
        ("mxfp4-mslk-stochastic", "mxfp4-mslk"),
    ],
)
def test_recipes_of_stochastic_rounding(tmp_path: Path, recipe: str, plain: str) -> None:
    with refused(f"recipe {recipe}: is for stochastic rounding, but convert rounds to nearest; use {plain}"):
        make_plan(dense(tmp_path), recipe)


@pytest.mark.parametrize("recipe", ["nvfp4-te-rowscaled", "nvfp4-modelopt-fake", "mxfp8-te-e5m2", "int4-modelopt"])
def test_recipe_without_a_container(tmp_path: Path, recipe: str) -> None:
    first = "mxfp8-te" if recipe.startswith("mxfp8") else "nvfp4-te"
    with refused(f"recipe {recipe}: cannot be stored in a checkpoint; use one of {first}, ") as caught:
        make_plan(dense(tmp_path), recipe)
    assert recipe not in str(caught.value).partition(";")[2].split(", ")
    assert re.search(r"(, [\w-]+){4} and \d+ more$", str(caught.value)), "a short list"


@pytest.mark.parametrize("recipe", ["nvfp4-gguf", "nvfp4-torchao-single"])
def test_recipe_of_gguf_files_for_a_directory(tmp_path: Path, recipe: str) -> None:
    with refused(f"recipe {recipe}: can be stored only in a GGUF file; use one of nvfp4-te, "):
        make_plan(dense(tmp_path), recipe)


def test_changed_recipe_needs_an_id_of_its_own(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    changed = replace(fp4kit.recipe("nvfp4-te"), sign="negative")
    with refused("recipe nvfp4-te: differs from fp4kit's recipe of this id; give it an id of its own"):
        make_plan(tmp_path / "m", changed)
    assert make_plan(tmp_path / "m", replace(changed, id="nvfp4-mine")).recipe.id == "nvfp4-mine"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "gguf"}, f"format gguf: unknown; use one of {', '.join(ALL_FORMATS)}"),
        ({"nonfinite": "drop"}, "nonfinite drop: unknown; use one of error, keep, saturate"),
        (
            {"recipe_id": "nvfp4-te", "format": "sglang-mxfp8"},
            "--format sglang-mxfp8 holds mxfp8 only, no nvfp4; use --format ",
        ),
        ({"recipe_id": "nvfp4-te", "format": "gpt-oss"}, "--format gpt-oss holds mxfp4 only, no nvfp4; use --format "),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with refused(text):
        make_plan(dense(tmp_path), **options)


def test_pair_that_no_engine_loads(tmp_path: Path) -> None:
    """A recipe and format that no engine loads are rejected, and the alternative in the message works."""
    with refused("--format modelopt with mxfp4: no engine is known to load it for dense models") as caught:
        make_plan(dense(tmp_path), "mxfp4-ocp", format="modelopt")
    assert "use --format compressed-tensors (" in str(caught.value)
    assert make_plan(tmp_path / "m", "mxfp4-ocp", format="compressed-tensors").converted


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39])
def test_input_scale_out_of_range(tmp_path: Path, value: float) -> None:
    with refused(f"input scale: got {value}; a positive normal float32 is needed, such as 1.0"):
        make_plan(dense(tmp_path), input_scale=value)


def test_input_scale_of_a_recipe_without(tmp_path: Path) -> None:
    with refused("input scale: mxfp4-ocp has no input scale; leave it out, or use an NVFP4 recipe"):
        make_plan(dense(tmp_path), "mxfp4-ocp", input_scale=1.0)
