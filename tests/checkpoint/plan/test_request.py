"""Test that the fields of Request are the one home of the options of a conversion."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic

import fp4kit
from fp4kit.checkpoint import Wishes, convert, make_plan
from fp4kit.checkpoint.contract import contract_of_plan
from fp4kit.checkpoint.plan.plan import configs
from fp4kit.checkpoint.plan.request import OPTIONS, Request, RequestOptions
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.recipes import RECIPES
from fp4kit.recipes.table import as_data
from fp4kit.storage.files import CheckpointError

NVFP4 = RECIPES["nvfp4-te"]
DEFAULTS = {
    "format": None,
    "wishes": None,
    "input_scale": None,
    "requantize": False,
    "nonfinite": "error",
    "codes": None,
    "recipes": (),
    "search": None,
    "activations": None,
    "ignore": (),
    "split_max_size": None,
    "hadamard": None,
    "hadamard_seed": None,
    "hadamard_only": (),
    "adapter": None,
    "adapter_scales": "nearest",
    "allow_loss": False,
    "fp8_as": "bf16",
    "engine": None,
    "scheme": None,
}


@pytest.mark.parametrize("function", [convert, make_plan])
def test_signatures_name_every_option(function: Any) -> None:
    found = inspect.signature(function).parameters
    assert {name: found[name].default for name in DEFAULTS} == DEFAULTS
    assert {*OPTIONS} - {"recipe"} == {*RequestOptions.__annotations__} == {*DEFAULTS}
    assert found["hadamard"].annotation == "int | None"


def test_an_unknown_option(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'hadamards'"):
        make_plan(tmp_path, hadamards=16)  # type: ignore[call-arg]


ALWAYS = ("recipe", "format", "wishes", "input_scale", "requantize", "nonfinite")
RECORDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    *(
        (options, options)
        for options in (
            {"requantize": True, "input_scale": 1.0},
            {"allow_loss": True, "ignore": ["a", "b"], "split_max_size": 5},
            {"format": "compressed-tensors", "hadamard": 16, "hadamard_seed": 0, "hadamard_only": ["a"]},
            {"format": "gguf", "fp8_as": "q8_0"},
        )
    ),
    ({"search": ScaleSearch("mse")}, {"scale_search": ScaleSearch("mse").facts()}),
]


@pytest.mark.parametrize(("options", "facts"), RECORDED)
def test_what_the_journal_and_the_manifest_record(options: Any, facts: dict[str, Any]) -> None:
    """Options at their defaults are left out, except those in ALWAYS, in this order."""
    found = Request.of(NVFP4, options).facts
    assert [*found][: len(ALWAYS)] == [*ALWAYS] and {*found} - {*ALWAYS} == {*facts} - {*ALWAYS}
    assert {name: found[name] for name in facts} == facts


def test_codes_of_options_are_a_path_and_those_of_a_request_an_identity() -> None:
    """make_plan sets the identity and the recipe of the model; the path alone must not reach the journal's key."""
    found = Request.of(NVFP4, {"codes": "elsewhere", "requantize": True})
    assert found == Request(NVFP4, requantize=True) and "codes" not in found.facts


def test_patterns_and_copied_codes_are_recorded() -> None:
    assert [pattern for pattern, _ in Request.of(NVFP4, {"recipes": [("*.a", "mxfp8-te")]}).facts["recipes"]] == ["*.a"]
    found = Request(NVFP4, codes="donor", made_by="x").facts
    assert (found["codes"], found["recipe"]) == ("donor", "x") and found["recipe_of_form"] == as_data(NVFP4)


def test_keyword_arguments_become_fields(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    request = make_plan(tmp_path / "m", ignore=iter(()), wishes=Wishes("mlp")).request
    assert (request.ignore, request.wishes.preset, request.recipe) == ((), "mlp", NVFP4)


ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"scheme": "nvfp4-w4a4"}, "--scheme nvfp4-w4a4: needs an engine; add --engine"),
    (
        {"engine": "torchao", "scheme": "nvfp4-w4a16"},
        "quantizes the weights itself, so there is no checkpoint to write",
    ),
    ({"engine": "transformers", "scheme": "nvfp4-w4a4"}, "reads stored input scales; add --activations FILE, or"),
    ({"engine": "transformers", "scheme": "mxfp4-w4a4", "input_scale": 1.0}, "stores no input scales; leave"),
    ({"engine": "llama.cpp", "scheme": "mxfp4-w4a8"}, "loads gguf MXFP4, and DST would be"),
    ({"engine": "vLLM", "scheme": "mxfp8-w8a8", "recipe_id": "nvfp4-te"}, "DST would be compressed-tensors nvfp4-pack"),
]


@pytest.mark.parametrize(("options", "text"), ENGINES, ids=str)
def test_engines_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    synthetic.dense(tmp_path / "m")
    with pytest.raises(CheckpointError, match=re.escape(text)):
        make_plan(tmp_path / "m", **options)


def test_every_engine_that_loads_checkpoints_gets_its_container(tmp_path: Path) -> None:
    """Only the engine and the scheme are given; recipe, format and declaration follow."""
    x = {
        f"model.layers.0.mlp.{name}_proj.weight": synthetic.random(name, (128, 128)) for name in ("gate", "up", "down")
    }
    synthetic.write_model(tmp_path / "m", {"model_type": "qwen3"}, x)
    for row in fp4kit.servings():
        first = next(one for one in fp4kit.servings() if (one.engine, one.scheme) == (row.engine, row.scheme))
        if row.format is None or (row.route and row is not first):
            continue
        more: dict[str, Any] = {"input_scale": 1.0} if row.input_scales == "static" else {}
        plan = make_plan(tmp_path / "m", engine=row.engine, scheme=row.scheme, format=row.format, **more)
        assert plan.format_name == row.container and plan.recipe == row.weights
        declared = configs(plan)["config.json"].get("quantization_config", {})
        if row.format == "compressed-tensors":  # the only config that says which inputs are quantized
            (group,) = declared["config_groups"].values()
            always = "fp8" in row.container.lower()  # FP8 and MXFP8 declare them even if the engine ignores that
            assert (group["input_activations"] is not None) == (row.activations is not None or always)
        contract = contract_of_plan(plan)
        for name in ("activations", "input_scales", "served_dtype", "unit", "container"):
            assert getattr(contract, name) == getattr(row.contract, name), name
        assert contract.weights == row.loaded
