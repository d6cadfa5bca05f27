"""Test plans: the action per tensor, shared scales, what configs tell loaders, sizes; and the fields of Request."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.contract import contract_of_plan
from fp4kit.checkpoint.model.weights import layer_names
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import Plan, configs
from fp4kit.checkpoint.plan.request import OPTIONS, Request, RequestOptions
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.contract.engine_table import SPLIT_EXPERTS
from fp4kit.recipes import RECIPES
from fp4kit.recipes.table import as_data
from fp4kit.storage.files import CheckpointError

AGAIN = {"requantize": True}
ALL = synthetic.MODELS | synthetic.GPT_OSS | synthetic.QUANTIZED


def plan_of(tmp_path: Path, name: str, recipe: str = "nvfp4-te", **options: Any) -> Plan:
    ALL[name](tmp_path / name)
    return make_plan(tmp_path / name, recipe, **options)


def converted(plan: Plan) -> set[str]:
    """Return the modules that are quantized in the output."""
    pieces = [piece for tensor in plan.converted for piece in tensor.pieces if piece.form]
    return {name for piece in pieces for name in layer_names(piece.weight, plan.form, plan.config)}


def own_warnings(plan: Plan) -> tuple[str, ...]:
    """Return the warnings of a plan, except those about engines that load no model at all in its format."""
    return tuple(text for text in plan.warnings if ": model: " not in text)


def reasons(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.reason for tensor in plan.tensors if tensor.action == "copy"}


# {model: (number of layers quantized to NVFP4, number quantized to formats with blocks of 32)}. Models have two decoder
# layers unless synthetic.py says otherwise.
COUNTS = {
    "dense": (2 * 7, 2 * 6),
    "moe": (8 + 3 + 12, 8 + 3 + 12),
    "fused": (4 + 12, 4 + 12),
    "deepseek": (2 * 11, 2 * 11),
    "bert": (5, 5),
    "vlm": (7, 7),
    "mixtral": (2 * 16, 2 * 16),
    "vlm_moe": (2 * 16, 2 * 16),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te"])
def test_counts_of_models(tmp_path: Path, name: str, recipe: str) -> None:
    """In the default format, the plan quantizes the layers counted in COUNTS, and every engine understands its
    exclusion list.
    """
    plan = plan_of(tmp_path, name, recipe)
    assert len(converted(plan)) == COUNTS[name][recipe != "nvfp4-te"]
    assert {tensor.action for tensor in plan.converted} == {"quantize"}
    expected = [SPLIT_EXPERTS] * (name == "vlm_moe" and recipe == "mxfp4-ocp")
    assert [one.text.partition("wrong values: ")[2] for one in plan.findings if SPLIT_EXPERTS in one.text] == expected
    assert {(one.severity, one.subject) for one in plan.findings} <= {("note", "model"), ("warning", "model")}
    warnings = [text for text in own_warnings(plan) if "is not a multiple of" not in text]
    assert not warnings


@pytest.mark.parametrize(
    ("name", "recipe", "options", "format", "counts"),
    [
        ("gpt_oss", "mxfp4-ocp", {}, "gpt-oss", {"quantize": 4}),
        ("gpt_oss_mxfp4", "mxfp4-ocp", {}, "gpt-oss", {"rename": 4}),
        ("gpt_oss_mxfp4", "nvfp4-te", {"format": "bf16"}, "bf16", {"dequantize": 4}),
        ("deepseek_fp8", "nvfp4-te", AGAIN, "modelopt W4A16_NVFP4", {"requantize": 22, "dequantize": 11}),
        ("deepseek_fp8", "mxfp8-te", AGAIN, "sglang-mxfp8", {"carry": 22, "dequantize": 11}),
        ("deepseek_fp8", "nvfp4-te", {"format": "bf16"}, "bf16", {"dequantize": 33}),
        ("deepseek_v4", "mxfp4-ocp", {}, "deepseek-v4", {"rename": 24 + 12 + 3 * 7}),
        ("deepseek_v4", "nvfp4-te", {"format": "bf16"}, "bf16", {"dequantize": 3 * (4 + 15)}),
    ],
)
def test_counts_of_others(
    tmp_path: Path, name: str, recipe: str, options: dict[str, Any], format: str, counts: dict[str, int]
) -> None:
    """For some models, the plan gives each action to the expected number of layers.

    These models fit few formats or are already quantized.
    """
    plan = plan_of(tmp_path, name, recipe, **options)
    assert plan.format_name == format and not own_warnings(plan)
    assert Counter(tensor.action for tensor in plan.converted) == counts


def test_reasons(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense", "mxfp4-ocp")
    down = "model.layers.0.mlp.down_proj"
    assert reasons(plan)[f"{down}.weight"] == "K = 80 is not a multiple of 32" and down in plan.ignore
    assert reasons(plan)["model.embed_tokens.weight"] == "embedding (embed_tokens)"
    assert reasons(plan)["model.layers.0.self_attn.q_norm.weight"] == "1-D: a norm or a bias"


def test_reason_of_a_group(tmp_path: Path) -> None:
    found = {tensor.name: tensor.reason for tensor in plan_of(tmp_path, "dense").converted}
    shared = "quantized; shares its tensor scale: model.layers.0.mlp.(gate_proj|up_proj)"
    assert found["model.layers.0.mlp.up_proj.weight"] == f"dense MLP (preset linear): {shared}"
    assert found["model.layers.0.mlp.down_proj.weight"] == "dense MLP (preset linear): quantized"


def test_stacks_become_experts(tmp_path: Path) -> None:
    """A stack of experts is written as single experts, whose gate and up are separate layers.

    gate and up of one expert share a tensor scale; different experts do not.
    """
    plan = plan_of(tmp_path, "fused")
    (stack,) = [tensor for tensor in plan.converted if tensor.name.endswith("gate_up_proj")]
    names = [piece.module.removeprefix("model.layers.0.mlp.experts.") for piece in stack.pieces[:3]]
    assert names == ["0.gate_proj", "0.up_proj", "1.gate_proj"]
    assert [piece.span for piece in stack.pieces[:2]] == [(0, 96), (96, 192)]
    assert stack.group is not None and len(set(stack.group.values())) == synthetic.EXPERTS
    assert len(stack.outputs) == 3 * 2 * synthetic.EXPERTS


def test_quantized_tensors_that_are_not_selected_are_decoded(tmp_path: Path) -> None:
    """A quantized tensor that is not selected is decoded and added to the exclusion list.

    Otherwise loaders would take it for the new format.
    """
    plan = plan_of(tmp_path, "deepseek_fp8", "mxfp8-te", requantize=True, wishes=Wishes(preset="experts"))
    o_proj = next(tensor for tensor in plan.tensors if tensor.name == "model.layers.0.self_attn.o_proj.weight")
    assert (o_proj.action, o_proj.outputs[0].dtype) == ("dequantize", "BF16")
    assert o_proj.reason == "attention: not in preset experts; decoded, because the output has another container"
    assert "model.layers.0.self_attn.o_proj" in plan.ignore


def test_formats_of_routed_experts_leave_the_others(tmp_path: Path) -> None:
    """Formats that quantize only routed experts keep the other FP8 tensors of DeepSeek-V4, whatever the preset.

    They also keep the experts of multi-token prediction.
    """
    plan = plan_of(tmp_path, "deepseek_v4", "mxfp4-ocp", wishes=Wishes(preset="linear"))
    for tensor in plan.converted:
        routed = ".experts." in tensor.name and not tensor.name.startswith("mtp.")
        assert tensor.reason.endswith("as it is") == (not routed), tensor
    assert {"MoE router", "embedding (embed)", "output head (head)"} < {*reasons(plan).values()}
    shared = next(tensor for tensor in plan.tensors if "shared_experts" in tensor.name)
    assert shared.reason == "not a routed expert; deepseek-v4 stores nothing else; as it is"


def test_partly_converted_fusion_warns(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dense", wishes=Wishes(keep=("model.layers.0.self_attn.k_proj",)))
    assert plan.warnings[0] == (
        "model.layers.0.self_attn.(q_proj|k_proj|v_proj): k_proj stays unquantized;"
        " loaders that fuse these layers need all of them quantized, or none"
    )
    assert "model.layers.0.self_attn.qkv_proj" not in plan.ignore


def test_unpaired_gate(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"mlp.gate_proj.weight": synthetic.random("g", (16, 64))})
    with refused("mlp.gate_proj: has no up_proj beside it, with which it must share a tensor amax; add up_proj"):
        make_plan(tmp_path / "m")


def test_interleaved_stacks_have_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4kit.checkpoint.loaders.support.refusal", lambda *pair: None)
    with refused(
        "model.layers.0.mlp.experts.gate_up_proj: the rows of gate and up are interleaved,"
        " which only --format gpt-oss can store"
    ):
        plan_of(tmp_path, "gpt_oss", "mxfp4-ocp", format="compressed-tensors")


def test_two_tensors_of_one_output_name_are_rejected(tmp_path: Path) -> None:
    """A model is rejected if experts of two stacks would be written under one name."""
    stack = synthetic.random("s", (2, 64, 96))
    synthetic.write_model(tmp_path / "m", {}, {f"mlp.experts.down_proj{end}": stack for end in ("", ".weight")})
    with refused(
        "mlp.experts.0.down_proj.weight: two tensors would be written under this name; rename one in the source"
    ):
        make_plan(tmp_path / "m", format="modelopt")


def test_groups_only_where_a_tensor_scale_is_shared(tmp_path: Path) -> None:
    assert any(tensor.group for tensor in plan_of(tmp_path, "moe").converted)
    assert not any(tensor.group for tensor in make_plan(tmp_path / "moe", "mxfp4-ocp").converted)


@pytest.mark.parametrize("name", ["dense", "fused", "gpt_oss_mxfp4", "deepseek_v4"])
def test_sizes(tmp_path: Path, name: str) -> None:
    """The plan states the number of bytes to read (all tensors) and to write (codes, scales and copied tensors)."""
    tensors = ALL[name](tmp_path / "again")
    recipe = "mxfp4-ocp" if name in synthetic.QUANTIZED else "nvfp4-te"
    plan = plan_of(tmp_path, name, recipe)
    assert plan.bytes_in == sum(x.nbytes for x in tensors.values())
    assert plan.bytes_out == sum(output.nbytes for shard in plan.shards for output in shard.outputs)
    if name in synthetic.QUANTIZED:
        assert plan.bytes_out == plan.bytes_in
        return
    values = sum(tensor.bytes_in for tensor in plan.converted) // 2
    layers = len(converted(plan))
    assert plan.bytes_out == plan.bytes_in - 2 * values + values // 2 + values // 16 + 4 * layers


def test_plan_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "m")
    monkeypatch.setattr("fp4kit.storage.files.TensorReader.__init__", None)
    assert make_plan(tmp_path / "m").converted


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


def test_auxiliary_files(tmp_path: Path) -> None:
    root = tmp_path / "m"
    synthetic.dense(root)
    (tmp_path / "secret.txt").write_text("secret")
    names = ("LICENSE", "notes.md", "chat.jinja", "modeling.py", "pytorch_model.bin", "model.gguf", ".hidden")
    (root / "quantization_config.json").write_text('{"bits": 4}')
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
        "LICENSE",
        "chat.jinja",
        "inside.txt",
        "notes.md",
        "tokenizer_config.json",
        "sub/deep/vocab.txt",
    ]
    assert dict(files.skipped) == {
        ".git": "hidden directory",
        ".hidden": "hidden file",
        "USE.txt": "a link to a file outside the directory",
        "loop": "a link to a directory",
        "model.gguf": "weights that are not part of the model",
        "modeling.py": "kind of file that is not copied",
        "pipe.txt": "not a regular file",
        "pytorch_model.bin": "weights that are not part of the model",
        "pytorch_model.bin.index.json": "index of other weights",
        "quantization_config.json": "describes how the source is quantized",
        "sub/other.safetensors": "weights that are not part of the model",
    }


def test_rows_that_are_no_whole_blocks_are_named(tmp_path: Path) -> None:
    """One warning per row length names the layers that stay unquantized because rows are no whole number of blocks."""
    assert own_warnings(plan_of(tmp_path / "a", "dense", "mxfp4-ocp")) == (
        "2 layers (model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj): K = 80 is not a multiple of 32;"
        " they stay BF16",
    )
    assert plan_of(tmp_path / "b", "dense", "nvfp4-te").warnings == ()


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


@pytest.mark.parametrize("function", [make_plan, convert])
def test_an_unknown_option(function: Any, tmp_path: Path) -> None:
    error = rf"^{function.__name__}: there is no argument hadamards; did you mean hadamard\?$"
    with pytest.raises(TypeError, match=error):
        function(tmp_path, tmp_path, hadamards=16)
    for name, field in {"keep": "keep", "only": "only", "include": "include", "exclude": "keep"}.items():
        error = rf"^{function.__name__}: there is no argument {name}; use wishes=Wishes\({field}=\.\.\.\)$"
        with pytest.raises(TypeError, match=error):
            function(tmp_path, tmp_path, **{name: ["*"]})


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
    ({"engine": "vLLM", "scheme": "mxfp8-w8a8", "recipe": "nvfp4-te"}, "DST would be compressed-tensors nvfp4-pack"),
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
