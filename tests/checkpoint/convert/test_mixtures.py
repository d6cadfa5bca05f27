"""Test mixed checkpoints: layers in several containers, as compressed-tensors and Model-Optimizer declare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import half
from oracle import load
from synthetic import refused

from fp4kit.__main__ import main
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

OUT, DOWN, QKV = "*.o_proj", "*.mlp.down_proj", "*.self_attn.[qkv]_proj"
CT = [(DOWN, "fp8-modelopt-channel"), (OUT, "mxfp8-te"), (QKV, "mxfp4-ocp")]
MODELOPT = [(DOWN, "fp8-modelopt-channel"), (OUT, "mxfp8-te")]
LAYER = "model.layers.0"
Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dense model and one with experts, as folders of one directory, and return the directory."""
    root = tmp_path_factory.mktemp("models")
    synthetic.dense(root / "dense")
    synthetic.moe(root / "moe")
    return root


def config(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("name", half(["dense", "moe"]))
@pytest.mark.parametrize(("format", "recipes"), [("compressed-tensors", CT), ("modelopt", MODELOPT)])
def test_every_layer_is_as_in_its_container_alone(
    models: Path, tmp_path: Path, name: str, format: str, recipes: Pairs
) -> None:
    """Each layer has the tensors of a conversion by its recipe alone; verify, identify and decode read the mix."""
    out = tmp_path / "mixed"
    plan = convert(models / name, out, "nvfp4-te", format=format, recipes=recipes).plan
    mixed, alone = load(out), {}
    for recipe in {"nvfp4-te", *dict(recipes).values()}:
        convert(models / name, tmp_path / recipe, recipe, format=format)
        alone[recipe] = load(tmp_path / recipe)
    seen: dict[str, int] = {}
    for tensor in plan.converted:
        assert tensor.recipe is not None
        seen[tensor.recipe.id] = seen.get(tensor.recipe.id, 0) + 1
        for output in tensor.outputs:
            assert mixed.pop(output.name) == alone[tensor.recipe.id][output.name]
    assert set(seen) == set(alone)
    source = load(models / name)
    assert all(source[left] == tensor for left, tensor in mixed.items())
    report = verify(out, models / name)
    assert report.clean and all(layer.compared and not layer.differing for layer in report.layers)
    assert len(report.formats) == len(alone)
    assert not any("not known" in issue.text for issue in report.issues)  # every layer was checked
    assert main(["identify", str(out), "--source", str(models / name)]) == 0
    convert(out, tmp_path / "back", format="bf16")
    for recipe, tensors in alone.items():
        convert(tmp_path / recipe, tmp_path / f"{recipe}-back", format="bf16")
        tensors |= load(tmp_path / f"{recipe}-back")
    back = load(tmp_path / "back")
    for tensor in plan.converted:
        assert tensor.recipe is not None
        assert back[tensor.name] == alone[tensor.recipe.id][tensor.name]


def test_awq_layers_in_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An NVFP4_AWQ layer beside FP8 keeps its tensors and its algorithm; no engine is said to load the result."""
    source = Path(__file__).parents[2] / "data" / "foreign" / "modelopt--NVFP4_AWQ_LITE_CFG"
    recipes = ["--recipe", "nvfp4-modelopt", "--recipe", f"{DOWN}=fp8-modelopt", "--requantize"]
    options = ["--format", "modelopt", *recipes, "--input-scale", "0.5"]
    assert main(["convert", str(source), str(tmp_path / "out"), *options]) == 0
    said = capsys.readouterr().out
    assert "engines that load" not in said and "serve:" not in said
    (awq,) = (name for name, w in inspect_checkpoint(source).layers.items() if w.dtype == "modelopt NVFP4_AWQ")
    have, made = load(source), load(tmp_path / "out")
    kept = [name for name in have if name.startswith(f"{awq}.")]
    assert f"{awq}.pre_quant_scale" in kept and all(made[name] == have[name] for name in kept)
    declared = config(tmp_path / "out")
    assert declared["quant_algo"] == "MIXED_PRECISION" and declared["quantized_layers"][awq] == {
        "quant_algo": "NVFP4_AWQ",
        "group_size": 16,
        "has_zero_point": False,
        "pre_quant_scale": True,
    }
    assert main(["convert", str(source), str(tmp_path / "same"), "--format", "modelopt"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "engines that load" not in said and "serve:" not in said and "not known; not checked: 1 layer" in said
    assert said.count("modelopt NVFP4, modelopt NVFP4_AWQ)") == 2  # in the container and in the reason of the recipe
    report = verify(tmp_path / "out", source)
    assert not report.errors and any("with --requantize, --format" in issue.text for issue in report.issues)
    for root in (source, tmp_path / "out"):
        convert(root, tmp_path / f"{root.name}-bf16", format="bf16")
    back, wanted = load(tmp_path / "out-bf16"), load(tmp_path / f"{source.name}-bf16")
    assert {name for name in wanted if back[name] != wanted[name]} == {
        name for name in wanted if name.endswith("mlp.down_proj.weight")
    }


def test_config_of_compressed_tensors(models: Path, tmp_path: Path) -> None:
    """There is a config group per container. Its targets name its layers; experts share one pattern."""
    convert(models / "moe", tmp_path / "out", "nvfp4-te", recipes=[(OUT, "fp8-modelopt-channel")])
    found = config(tmp_path / "out")
    groups = {group["format"]: group for group in found["config_groups"].values()}
    assert found["format"] == "mixed-precision" and set(groups) == {"nvfp4-pack-quantized", "float-quantized"}
    assert groups["float-quantized"]["targets"] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    targets = groups["nvfp4-pack-quantized"]["targets"]
    assert r"re:model\.layers\.1\.mlp\.experts\..*" in targets and not any(".experts.0" in one for one in targets)
    assert found["ignore"] == ["lm_head", "model.layers.1.mlp.gate"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_config_of_modelopt(models: Path, tmp_path: Path) -> None:
    """Both configs name the algorithm of every layer; unquantized layers are not listed."""
    recipes = [(OUT, "fp8-modelopt")]
    convert(models / "dense", tmp_path / "out", "nvfp4-te", format="modelopt", recipes=recipes, input_scale=0.5)
    found = config(tmp_path / "out")
    beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert found["quant_algo"] == beside["quant_algo"] == "MIXED_PRECISION" and found["ignore"] == []
    layers = found["quantized_layers"]
    assert layers == beside["quantized_layers"] and len(layers) == 14
    assert layers[f"{LAYER}.self_attn.o_proj"] == {"quant_algo": "FP8"}
    assert layers[f"{LAYER}.mlp.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    stored = load(tmp_path / "out")
    assert stored[f"{LAYER}.self_attn.o_proj.input_scale"] == ("F32", (), np.float32(0.5).tobytes())
    with refused("input scale: Model-Optimizer's FP8 layers have one"):
        make_plan(models / "dense", "nvfp4-te", format="modelopt", recipes=recipes)


def test_a_mixture_of_one_container_is_none(models: Path, tmp_path: Path) -> None:
    """If the patterns cover all layers with one container, the config is that of this container."""
    convert(models / "dense", tmp_path / "out", "nvfp4-te", recipes=[("*", "fp8-modelopt-channel")])
    assert config(tmp_path / "out")["format"] == "float-quantized"
    assert verify(tmp_path / "out", models / "dense").clean


def test_the_mix_goes_from_one_tool_to_the_other(models: Path, tmp_path: Path) -> None:
    """A mixed source is converted layer by layer: with the same patterns, all codes are kept."""
    recipes = [(DOWN, "fp8-modelopt-channel")]
    convert(models / "dense", tmp_path / "ct", "nvfp4-te", recipes=recipes)
    report = convert(tmp_path / "ct", tmp_path / "mo", "nvfp4-te", format="modelopt", recipes=recipes)
    assert report.actions["rename"] == 14 and report.plan.format_name == "modelopt MIXED_PRECISION"
    assert verify(tmp_path / "mo", models / "dense").clean
    with refused("is already quantized as compressed-tensors FP8 per row"):
        convert(tmp_path / "ct", tmp_path / "x", "nvfp4-te", format="modelopt")


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "--format comfy holds layers of one": ("nvfp4-te", {"format": "comfy", "recipes": [(DOWN, "mxfp8-te")]}),
    "--format mlx holds layers of one": ("mxfp4-mlx-cpu", {"format": "mlx", "recipes": [(DOWN, "mxfp8-mlx-cpu")]}),
    "--format sglang-mxfp8 holds mxfp8 only": (
        "mxfp8-te",
        {"format": "sglang-mxfp8", "recipes": [(DOWN, "fp8-modelopt")]},
    ),
    "loaders fuse these layers, so one recipe is needed": ("nvfp4-te", {"recipes": [("*.k_proj", "mxfp8-te")]}),
    "loaders fuse these layers, so one container is needed": (
        "nvfp4-te",
        {"recipes": [("*.experts.*.down_proj", "mxfp8-te")]},
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(models: Path, text: str) -> None:
    recipe, options = REFUSED[text]
    with refused(text):
        make_plan(models / "moe", recipe, **options)


def test_modelopt_warns_of_what_vllm_may_leave_out(models: Path) -> None:
    plan = make_plan(models / "dense", format="modelopt", recipes=[(DOWN, "fp8-modelopt-channel")])
    assert any("take layers in FP8_PER_CHANNEL_PER_TOKEN for unquantized" in text for text in plan.warnings)
    assert not make_plan(models / "dense", recipes=[(DOWN, "fp8-modelopt-channel")]).warnings


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_verify_finds_a_layer_that_the_config_does_not_declare(models: Path, tmp_path: Path, format: str) -> None:
    """A layer that is missing from the config, or declared as another format, is an error."""
    convert(models / "dense", tmp_path / "out", format=format, recipes=[(DOWN, "fp8-modelopt-channel")])
    path = tmp_path / "out" / "config.json"
    whole = json.loads(path.read_text())
    found = whole["quantization_config"]
    name = f"{LAYER}.mlp.down_proj"
    for group in found["config_groups"].values():
        group["targets"] = [target for target in group["targets"] if target != name]
    if format == "modelopt":
        del found["quantized_layers"][name]
    path.write_text(json.dumps(whole))
    assert any(name in issue.subject or name in issue.text for issue in verify(tmp_path / "out").issues)
