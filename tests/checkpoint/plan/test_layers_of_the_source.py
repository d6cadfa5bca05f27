"""Test that a quantized source decides which layers a conversion quantizes, by which recipe, and in which format."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import oracle
import pytest
import synthetic
from exhaustive import every, half
from partly_quantized import ATTENTION, MLP, SOURCES, declare, llama
from synthetic import refused

from fp4kit.__main__ import main
from fp4kit.checkpoint import Rules, Wishes, convert, convert_tensors, make_plan
from fp4kit.checkpoint.containers.configs import ALL_FORMATS
from fp4kit.checkpoint.convert.convert import configs
from fp4kit.checkpoint.model.model_files import MANIFEST
from fp4kit.checkpoint.plan.make_plan import DEFAULTS
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.storage.files import CheckpointError

QKV = Wishes(include=("*.[qkv]_proj",))
STORED = ("mlx", "torchao", "comfy", "gguf")  # these containers have no list of unquantized layers
EXPERTS = ("gpt-oss", "deepseek-v4")  # formats for routed experts alone


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a key of SOURCES to the model, which is written once."""
    return cache(lambda name: SOURCES[name](tmp_path_factory.mktemp("source") / "s"))


def unquantized(model: Path) -> set[str]:
    """Return the names of the linear layers that are stored in BF16, without heads, embeddings, routers and norms."""
    plain = [name for name, (dtype, shape, _) in oracle.load(model).items() if dtype == "BF16" and len(shape) == 2]
    others = ("embed_tokens.weight", "lm_head.weight", "router.weight", "_bias", "mlp.gate.weight")
    return {name.removesuffix(".weight") for name in plain if not name.endswith(others)}


@pytest.mark.parametrize("name", half(SOURCES))
def test_unquantized_layers_stay_and_codes_are_kept(name: str, source: Any, tmp_path: Path) -> None:
    """Without options, the result has the source's format, codes and unquantized layers, and verify agrees."""
    model = source(name)
    out = tmp_path / ("out.gguf" if name.startswith("gguf") else "out")
    report = convert(model, out)
    plan = report.plan
    assert set(report.actions) <= {"rename", "copy"} and plan.carries_codes
    assert plan.request.chosen.startswith("as the source, which is stored as ")
    readable_only = name.startswith(("quark", "auto-round", "torchao"))
    form = plan.form.format
    assert form == ("compressed-tensors" if readable_only else name.partition(" ")[0].rstrip(","))
    if name == "gpt-oss":
        assert not plan.as_in_source  # its format can only store experts
    elif name.startswith("gguf"):
        assert {"blk.0.attn_q", "blk.1.attn_v"} <= set(plan.as_in_source)
    else:
        declared = not name.startswith(STORED)
        assert plan.as_in_source == dict.fromkeys(plan.as_in_source, declared)
        assert set(plan.as_in_source) == unquantized(model) == unquantized(out)
        assert f"{len(plan.as_in_source)} layers stay in 16 bits, as the source" in plan.as_in_source_line
    if not readable_only:  # engines' requirements for these containers are known
        assert [issue for issue in verify(out, model).issues if issue.severity == "error"] == []


@pytest.mark.parametrize("name", every(4, [name for name in SOURCES if not name.startswith(("gguf", "gpt-oss"))]))
def test_no_format_and_no_recipe_quantizes_them(name: str, source: Any) -> None:
    """In every format and by every recipe, attention stays, unless --include names it. Exclusion lists name it."""
    model, seen = source(name), 0
    layers = unquantized(model)
    for format in (one for one in ALL_FORMATS if one not in (*EXPERTS, "bf16")):
        for recipe in (None, *DEFAULTS):
            options: dict[str, Any] = {"format": format, "requantize": True}
            try:
                plan = make_plan(model, recipe, **options)
            except CheckpointError as error:  # the format does not store the recipe, or needs input scales
                assert "in the source" not in str(error)
                continue
            seen += 1
            assert set(plan.as_in_source) == layers, (format, recipe)
            assert not layers & {tensor.name.removesuffix(".weight") for tensor in plan.converted}
            declared = configs(plan)["config.json"].get("quantization_config", {})
            lists = [declared[key] for key in ("ignore", "modules_to_not_convert") if declared.get(key)]
            assert all(layers <= set(one) for one in lists)
            included = make_plan(
                model, recipe, wishes=QKV, input_scale=0.01 if plan.has_input_scale else None, **options
            )
            assert {one.removesuffix(".weight") for one in layers if "o_proj" in one} == set(included.as_in_source)
    assert seen > 10


def test_dry_run_and_summary_count_them(source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(source("modelopt, hf_quant_config.json alone"))
    line = "4 layers stay in 16 bits, as the source declares; --include GLOB quantizes them"
    for options in (["--dry-run"], []):
        assert main(["convert", model, str(tmp_path / "out"), *options]) == 0
        printed = capsys.readouterr().out
        assert line in printed and "whose codes are kept (as the source, which is stored as modelopt NVFP4)" in printed
    assert main(["convert", model, str(tmp_path / "json"), "--dry-run", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["declared"] for one in body["as_in_source"]} == dict.fromkeys(ATTENTION, True)
    assert {one["reason"] for one in body["tensors"] if "self_attn" in one["name"]} == {
        "unquantized, as the source declares"
    }


def test_what_is_declared_and_what_is_only_stored_so(source: Any, tmp_path: Path) -> None:
    model = SOURCES["compressed-tensors MXFP4"](tmp_path / "s")
    for ignore, words in (
        (["lm_head", "re:.*self_attn.*"], "4 layers stay in 16 bits, as the source declares"),
        (["lm_head"], "4 layers stay in 16 bits, as the source, which has quantized layers, stores them"),
        (["lm_head", ATTENTION[0]], "4 layers stay in 16 bits, 1 as the source declares, 3 as it stores them"),
    ):
        declare(model, ignore=ignore)
        assert make_plan(model).as_in_source_line.startswith(words)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # case -> (wishes, options, part of the message)
    "nothing": ({"include": ("*.x_proj",)}, {}, "--include '*.x_proj': matches no module"),
    "head": ({"include": ("lm_head",)}, {}, "every module that it matches stays unquantized: lm_head (output head ("),
    "keep wins": ({"include": ("*q_proj",), "keep": ("*.q_proj",)}, {}, "(--keep *.q_proj)"),
    "experts": ({"include": ("*self_attn*",)}, {"format": "gpt-oss"}, "stores nothing else"),
    "bf16": ({"include": ("*self_attn*",)}, {"format": "bf16"}, "has no effect with --format bf16"),
    "only": ({"only": (ATTENTION[0],)}, {}, f"--include '{ATTENTION[0]}' quantizes them"),
    "only, a glob": ({"only": ("*self_attn*",)}, {}, "(unquantized in the source, which has quantized layers)"),
    "a string": ({"include": "*"}, {}, "a tuple of patterns is needed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_choice_that_does_not_fit(case: str, source: Any) -> None:
    wishes, options, text = REFUSED[case]
    model = source("gpt-oss" if case == "experts" else "compressed-tensors MXFP4")
    with refused(text):
        make_plan(model, wishes=Wishes(**wishes), **options)


def test_a_source_with_nothing_but_a_quantized_head(tmp_path: Path) -> None:
    """Only the head is quantized in the source, and heads stay unquantized by rule."""
    llama(tmp_path / "m")
    layer = {
        "lm_head.weight_packed": synthetic.any_bytes("c", (128, 64)),
        "lm_head.weight_scale": synthetic.any_bytes("s", (128, 4), 120, 124),
    }
    tensors = oracle.arrays(oracle.load(tmp_path / "m"))
    del tensors["lm_head.weight"]
    synthetic.write_model(tmp_path / "q", {"model_type": "llama"}, tensors | layer)
    with refused("--include GLOB quantizes layers that the source has unquantized"):
        make_plan(tmp_path / "q", "nvfp4-te")
    plan = make_plan(tmp_path / "q", "nvfp4-te", wishes=Wishes(include=(MLP[0], MLP[1])))
    assert {one.name for one in plan.converted if one.action == "quantize"} == {f"{one}.weight" for one in MLP[:2]}


def test_include_adds_to_presets_and_towers(tmp_path: Path) -> None:
    """For an unquantized source, --include adds what the preset, --only or the rules about towers leave out."""
    synthetic.vlm_moe(tmp_path / "m")

    def converted(**wishes: Any) -> set[str]:
        return {one.name for one in make_plan(tmp_path / "m", "nvfp4-te", wishes=Wishes(**wishes)).converted}

    experts = converted(preset="experts")
    more = converted(preset="experts", include=("*.self_attn.o_proj",))
    assert more - experts == {name for name in converted() if name.endswith("o_proj.weight")} and experts < more
    assert converted(only=("*.self_attn.q_proj",), include=("*.self_attn.[kv]_proj",)) == converted(
        only=("*.self_attn.[qkv]_proj",)
    )
    assert any("visual" in name for name in converted(include=("model.visual.*",)))


def test_include_in_memory() -> None:
    w = synthetic.random("w", (32, 64))
    tensors = [("model.layers.0.self_attn.o_proj.weight", w)]
    rules = {"preset": "experts"}
    (same,) = convert_tensors(tensors, Rules.of("mxfp4-ocp", wishes=Wishes(**rules)))
    assert same[1] is w
    found = dict(convert_tensors(tensors, Rules.of("mxfp4-ocp", wishes=Wishes(**rules, include=("*o_proj",)))))
    assert len(found) == 2


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_verify_notices_layers_that_the_source_keeps(kind: str, source: Any, tmp_path: Path) -> None:
    """A layer that is quantized although the source keeps it is an error, unless --include named it."""
    if kind == "file":
        (tmp_path / "o").mkdir()
        model, out = tmp_path / "in.safetensors", tmp_path / "o" / "out.safetensors"
        model.write_bytes((source("comfy nvfp4") / "model.safetensors").read_bytes())
        included = {"format": "comfy"}
    else:
        model, out, included = source("modelopt W4A16_NVFP4"), tmp_path / "out", {"format": "compressed-tensors"}
    convert(model, out, wishes=QKV, **included)
    assert verify(out, model).clean
    again = tmp_path / f"again{out.suffix}"
    convert(out, again, **included)
    assert verify(again, model).clean  # the record of --include is kept
    file = out if kind == "file" else out / "model.safetensors"
    tensors = oracle.arrays(oracle.load(out.parent if kind == "file" else out))
    if kind == "directory":
        (out / MANIFEST).unlink()
    synthetic.write_file(file, tensors)
    errors = {issue.subject for issue in verify(out, model).issues if "keeps it unquantized" in issue.text}
    assert errors == {name for name in ATTENTION if not name.endswith("o_proj")}


FORMAT_DEFAULTS = {  # the recipe of an unquantized gpt-oss, Llama or GGUF model, per format
    ("gpt_oss", "gpt-oss"): "mxfp4-ocp",
    ("llama", None): "nvfp4-te",
    ("llama", "modelopt"): "nvfp4-te",
    ("llama", "fp8"): "fp8-transformers-block",
    ("llama", "mlx"): "mxfp4-ocp",
    ("llama", "comfy"): "nvfp4-te",
    ("gguf", None): "nvfp4-te",
}


@pytest.mark.parametrize(("model", "format"), FORMAT_DEFAULTS)
def test_default_recipe_of_an_unquantized_model(model: str, format: str | None, tmp_path: Path) -> None:
    """The default recipe is the first that the format can store, and the plan says so."""
    path = tmp_path / ("m.gguf" if model == "gguf" else "m")
    {"gpt_oss": synthetic.gpt_oss, "llama": llama, "gguf": gguf_files.write_model}[model](path)
    plan = make_plan(path, format=format)
    assert plan.recipe.id == FORMAT_DEFAULTS[model, format]
    assert plan.request.chosen == ("the default" if format is None else f"the default of --format {format}")


def test_a_format_that_cannot_keep_codes_says_so(source: Any) -> None:
    model, options = source("compressed-tensors NVFP4"), {"format": "sglang-mxfp8"}
    with refused("is already quantized as compressed-tensors nvfp4-pack-quantized"):
        make_plan(model, **options)
    plan = make_plan(model, **options, requantize=True)
    assert plan.recipe.id == "mxfp8-te"
    assert "which cannot keep the codes of layers in compressed-tensors nvfp4-pack-quantized" in plan.request.chosen


def test_a_format_that_no_engine_loads_names_the_recipe_of_the_source(source: Any) -> None:
    with refused("--format compressed-tensors with mxfp4: no engine is known to load it for gpt_oss models"):
        make_plan(source("gpt-oss"), format="compressed-tensors")


def test_a_named_recipe_keeps_the_format_of_the_source(source: Any) -> None:
    """If the source's format can store the recipe, it is the default format; otherwise the usual default."""
    model = source("compressed-tensors MXFP4")
    plan = make_plan(model, "nvfp4-te")
    assert plan.form.format == "compressed-tensors" and not plan.request.chosen
    assert make_plan(source("fp8 128x128"), "mxfp8-te", requantize=True).form.format != "fp8"


def test_layers_of_a_mixture_follow_their_own_container(source: Any) -> None:
    """Each container of the source gets its own recipe, so that all codes are kept between the formats that mix."""
    for name in ("modelopt MIXED_PRECISION", "compressed-tensors mixed-precision"):
        for format in ("modelopt", "compressed-tensors"):
            plan = make_plan(source(name), format=format)
            assert plan.is_mixed and {tensor.action for tensor in plan.converted} == {"rename"}
            assert plan.request.recipes[0][0] == "model.layers.*.mlp.down_proj"
            assert bool(plan.ignore) == (format == "compressed-tensors")  # MIXED_PRECISION lists the quantized layers
        with refused("is already quantized as"):
            make_plan(source(name), format="mlx")
        kept = make_plan(source(name), wishes=Wishes(keep=("*.down_proj",)))  # the pattern need not decide
        assert MLP[2] not in {tensor.name for tensor in kept.converted if tensor.action == "rename"}


def test_quantized_layers_that_fp4kit_decodes_are_named(tmp_path: Path) -> None:
    synthetic.deepseek_fp8(tmp_path / "fp8")
    (note,) = make_plan(tmp_path / "fp8", "nvfp4-te", requantize=True).notes
    assert note.startswith("11 layers (model.layers.2.") and "written in 16 bits: multi-token prediction" in note
    assert not make_plan(
        tmp_path / "fp8", "nvfp4-te", requantize=True, wishes=Wishes(include=("model.layers.2.*",))
    ).notes


def test_the_result_lists_what_the_source_forgot_to_exclude(tmp_path: Path) -> None:
    """The source's list lacks its routers and attention layers; the result's list names them, and verify is content."""
    synthetic.moe(tmp_path / "plain")
    model = tmp_path / "m"
    convert(tmp_path / "plain", model, "nvfp4-modelopt", format="modelopt", wishes=Wishes(keep=("*self_attn*",)))
    (model / "hf_quant_config.json").unlink()
    declare(model, ignore=["lm_head"])
    for format in ("modelopt", "compressed-tensors"):
        plan = convert(model, tmp_path / format, format=format).plan
        assert {"model.layers.1.mlp.gate", "model.layers.0.self_attn.o_proj"} <= set(plan.ignore)
        assert plan.as_in_source and not any(plan.as_in_source.values())
        assert verify(tmp_path / format, model).clean
