"""Test conversions in which layers that match a pattern get another recipe than the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from oracle import load
from partly_quantized import declare
from synthetic import refused

from fp4kit.__main__ import main
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify

DOWN = [("*.down_proj", "nvfp4-te-2d")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the small dense model once, and return its directory."""
    root = tmp_path_factory.mktemp("model") / "m"
    synthetic.dense(root)
    return root


def test_each_layer_has_the_bytes_of_its_recipe(model: Path, tmp_path: Path) -> None:
    """Layers that match get the other recipe; both kinds of layers have the bytes of a conversion by one recipe."""
    convert(model, tmp_path / "mixed", "nvfp4-te", recipes=DOWN, format="modelopt")
    mixed = load(tmp_path / "mixed")
    one = {}
    for recipe in ("nvfp4-te", "nvfp4-te-2d"):
        convert(model, tmp_path / recipe, recipe, format="modelopt")
        one[recipe] = load(tmp_path / recipe)
    for name, tensor in mixed.items():
        assert tensor == one["nvfp4-te-2d" if ".down_proj." in name else "nvfp4-te"][name], name
    codes = "model.layers.0.mlp.down_proj.weight"
    assert one["nvfp4-te"][codes] != one["nvfp4-te-2d"][codes]


def test_records_and_verify(model: Path, tmp_path: Path) -> None:
    """Config and manifest record the patterns; verify encodes each layer with its own recipe."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    own = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["fp4kit"]
    assert own["recipe"] == "nvfp4-te" and own["recipes"] == [["*.down_proj", "nvfp4-te-2d"]]
    report = verify(tmp_path / "out", model)
    assert report.clean and report.recipe == "nvfp4-te, *.down_proj=nvfp4-te-2d"
    assert all(layer.compared and not layer.differing for layer in report.layers)
    given = verify(tmp_path / "out", model, "nvfp4-te")
    assert {layer.name.rpartition(".")[2] for layer in given.layers if layer.differing} == {"down_proj"}
    (tmp_path / "out" / "fp4kit_manifest.json").unlink()  # the record in the config alone suffices
    assert verify(tmp_path / "out", model).clean
    convert(tmp_path / "out", tmp_path / "other", format="modelopt")  # the codes are carried, and so is the record
    assert verify(tmp_path / "other", model).clean


def test_the_record_in_a_single_file(tmp_path: Path) -> None:
    tensors = {f"mlp.{name}.weight": synthetic.random(name, (32, 64)) for name in ("gate_proj", "up_proj", "down_proj")}
    synthetic.write_file(tmp_path / "m.safetensors", tensors)
    convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", recipes=DOWN)
    report = verify(tmp_path / "out.safetensors", tmp_path / "m.safetensors")
    assert report.clean and report.recipe == "nvfp4-te, *.down_proj=nvfp4-te-2d"


def test_stacks_match_under_their_own_names(tmp_path: Path) -> None:
    """A pattern matches the names of the source, so that a stack of experts gets one recipe."""
    synthetic.fused(tmp_path / "m")
    plan = make_plan(tmp_path / "m", recipes=[("*.experts.down_proj", "nvfp4-te-2d")])
    found = {one.name.rpartition(".experts.")[2]: one.recipe and one.recipe.id for one in plan.converted}
    assert (found["down_proj"], found["gate_up_proj"]) == ("nvfp4-te-2d", "nvfp4-te")
    convert(tmp_path / "m", tmp_path / "out", recipes=[("*.experts.down_proj", "nvfp4-te-2d")])
    assert verify(tmp_path / "out", tmp_path / "m").clean


def test_the_first_pattern_decides(model: Path) -> None:
    plan = make_plan(model, recipes=[("*.0.mlp.down_proj", "nvfp4-modelopt"), *DOWN])
    ids = {tensor.name: tensor.recipe.id for tensor in plan.converted if tensor.recipe is not None}
    assert ids["model.layers.0.mlp.down_proj.weight"] == "nvfp4-modelopt"
    assert ids["model.layers.1.mlp.down_proj.weight"] == "nvfp4-te-2d"


REFUSED: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {  # part of the message -> (patterns, options)
    "matches no module; near names are model.layers": ([("model.layers.0.mlp.down_prj", "nvfp4-te-2d")], {}),
    "an earlier pattern, *.down_proj, matches all its layers": ([*DOWN, ("*0.mlp.down_proj", "nvfp4-te")], {}),
    "every module that it matches stays unquantized: model.embed_": ([("model.embed_tokens", "nvfp4-te-2d")], {}),
    "(q_proj|k_proj|v_proj): model.layers.0.self_attn.q_proj would get the recipe": ([("*.q_proj", "nvfp4-te-2d")], {}),
    "(gate_proj|up_proj): ": ([("*.gate_proj", "nvfp4-te-2d")], {}),
    "--recipe *.down_proj=...: is given twice": ([*DOWN, *DOWN], {}),
    "has no effect with --format bf16": (DOWN, {"format": "bf16"}),
    "(--keep *.down_proj)": (DOWN, {"wishes": Wishes(keep=("*.down_proj",))}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(model: Path, text: str) -> None:
    recipes, options = REFUSED[text]
    with refused(text):
        make_plan(model, recipes=recipes, **options)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", str(model), out, "--recipe", "*.down_proj=nvfp4-te-2d", "--dry-run", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["recipe"] == "nvfp4-te" and body["recipes"] == [{"pattern": "*.down_proj", "recipe": "nvfp4-te-2d"}]
    assert main(["convert", str(model), out, "--recipe", "mxfp4", "--recipe", "mxfp8"]) == 2
    assert "only one recipe can be the default" in capsys.readouterr().err
    assert main(["convert", str(model), out, "--recipe", "*.q_proj="]) == 2
    assert "PATTERN=RECIPE is needed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--recipe", "*.q_proj=mxfp8-te")])
def test_an_empty_recipe_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """--recipe "" is an error in convert and verify, instead of standing for the default recipe."""
    commands = (["convert", str(model), str(tmp_path / "out")], ["verify", str(model), "--source", str(model)])
    for command in commands:
        assert main([*command, "--recipe", "", *more]) == 2
        assert "--recipe '': is empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_takes_patterns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patterns tell verify which recipe made which layers if no recipe is recorded."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    declare(tmp_path / "out", fp4kit=None)
    (tmp_path / "out" / "fp4kit_manifest.json").unlink()
    command = ["verify", str(tmp_path / "out"), "--source", str(model), "--recipe", "nvfp4-te"]
    assert main(command) == 1 and "bytes of codes that differ" in capsys.readouterr().out
    assert main([*command, "--recipe", "*.down_proj=nvfp4-te-2d", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["clean"] and body["recipe"] == "nvfp4-te, *.down_proj=nvfp4-te-2d"
    assert all(layer["codes"]["compared"] for layer in body["layers"])
    assert main([*command, "--recipe", "*.down_prj=nvfp4-te-2d"]) == 2
    assert "*.down_prj=...: decides about no layer that is compared with the source" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out"), "--recipe", "*.down_proj=nvfp4-te-2d"]) == 2
    assert "--recipe: says how layers were made from a source; add --source SRC" in capsys.readouterr().err


def test_patterns_replace_those_that_are_recorded(model: Path, tmp_path: Path) -> None:
    """The recorded default holds for layers that no given pattern matches."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    report = verify(tmp_path / "out", model, recipes=[("*.0.mlp.down_proj", "nvfp4-te-2d")])
    assert {layer.name for layer in report.layers if layer.differing} == {"model.layers.1.mlp.down_proj"}
    assert report.recipe == "nvfp4-te, *.0.mlp.down_proj=nvfp4-te-2d"


def test_a_search_covers_the_recipes_that_allow_it(model: Path, tmp_path: Path) -> None:
    """Scales are searched only where the recipe accepts any block scale; verify knows which layers these are."""
    search = ScaleSearch.of("mse", None, None)
    recipes = [("*.down_proj", "nvfp4-te")]
    report = convert(model, tmp_path / "out", "nvfp4-modelopt-static", recipes=recipes, search=search)
    assert report.gains and not any(name.endswith("down_proj") for name in report.gains)
    assert verify(tmp_path / "out", model).clean
