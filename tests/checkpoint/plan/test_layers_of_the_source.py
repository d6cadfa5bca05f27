"""Test what a quantized source decides: layers, recipes and format; its declarations are kept or named as lost."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import every, half
from partly_quantized import ATTENTION, MLP, SOURCES, declare, llama
from synthetic import refused

from fp4kit.__main__ import main
from fp4kit.checkpoint import Rules, Wishes, convert, convert_tensors, make_plan
from fp4kit.checkpoint.containers.config_entries import CARRIED, METHODS
from fp4kit.checkpoint.containers.configs import ALL_FORMATS
from fp4kit.checkpoint.convert.convert import configs
from fp4kit.checkpoint.model.model_files import MANIFEST, open_source
from fp4kit.checkpoint.plan.make_plan import DEFAULTS
from fp4kit.checkpoint.plan.plan_facts import (
    CONVERTED,
    DECLARATIONS,
    DECODED,
    KEPT,
    LOST,
    RECORDED,
    declared_inputs,
    value_of,
)
from fp4kit.checkpoint.plan.source_layers import kv_cache_of
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
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


@pytest.mark.parametrize("name", every(16, [name for name in SOURCES if not name.startswith(("gguf", "gpt-oss"))]))
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


PRODUCER = {"name": "somebody", "version": "1.2"}
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
WITH_CONFIG = [name for name in SOURCES if not name.startswith(("gguf", "mlx", "torchao", "comfy", "gpt-oss"))]


def with_all(root: Path, name: str) -> Path:
    """Write a source of SOURCES with a KV cache, its scales, and a producer, in the spelling of its tool."""
    model = SOURCES[name](root)
    file = model / "model.safetensors"
    tensors = oracle.arrays(oracle.load(model))
    beside = "k_proj." if name.startswith("modelopt") else ""
    scale = np.float32(0.5)
    tensors |= {f"model.layers.0.self_attn.{beside.replace('k', kind)}{kind}_scale": scale for kind in "kv"}
    synthetic.write_file(file, dict(sorted(tensors.items())))
    if "alone" in name:
        path = model / "hf_quant_config.json"
        content = json.loads(path.read_text())
        content["quantization"]["kv_cache_quant_algo"] = "FP8"
        path.write_text(json.dumps({**content, "producer": PRODUCER}))
    elif name.startswith("modelopt"):
        declare(model, kv_cache_quant_algo="FP8", producer=PRODUCER, fp4kit=None, mamba_ssm_cache_dtype="float32")
    elif name.startswith("quark"):
        declare(model, kv_cache_quant_config={"*k_proj": {}}, version="0.13")
    else:
        declare(model, kv_cache_scheme=SCHEME, producer=PRODUCER, fp4kit=None)
    return model


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a key of SOURCES to the model with all declarations, which is written once."""
    return cache(lambda name: with_all(tmp_path_factory.mktemp("source") / "s", name))


@pytest.mark.parametrize("name", WITH_CONFIG)
@pytest.mark.parametrize("format", half(ALL_FORMATS))
def test_each_declaration_is_kept_converted_or_named_as_lost(name: str, format: str, declared: Any) -> None:
    model = declared(name)
    try:
        plan = make_plan(model, format=format, requantize=True)
    except CheckpointError:  # nothing is written for this pair
        return
    found = {one: (outcome, why) for one, outcome, why in plan.declarations}
    expected = {"list of unquantized layers", "scales of the KV cache", "producer"}
    if name.startswith("auto-round"):
        expected -= {"list of unquantized layers"}
    assert expected <= set(found) and {outcome for outcome, _ in found.values()} <= {KEPT, CONVERTED, DECODED, LOST}
    for one, (outcome, why) in found.items():
        named = [text for text in plan.warnings if why in text]
        assert bool(named) == (outcome == LOST), (one, outcome, why)
    declared = configs(plan)["config.json"].get("quantization_config", {})
    beside = configs(plan).get("hf_quant_config.json", {}).get("quantization", {})
    cache, _ = found["scales of the KV cache"]
    scales = [one.name for one in plan.files[0].outputs if one.name.endswith(("k_scale", "v_scale"))]
    if cache == LOST:
        assert not scales and not declared.get("kv_cache_scheme")
        assert format not in ("modelopt", "compressed-tensors")
    else:
        assert len(scales) == 2 and format in ("modelopt", "compressed-tensors")
        declares = not name.startswith(("quark",))
        assert bool(declared["kv_cache_scheme"]) == declares
        assert (beside.get("kv_cache_quant_algo") == "FP8") == (declares and format == "modelopt")
    outcome, _ = found["producer"]
    assert (RECORDED in declared.get("fp4kit", {})) == (outcome == KEPT)
    if "settings for engines" in found and "mamba" in str(value_of(open_source(model), "mamba_ssm_cache_dtype")):
        assert (found["settings for engines"][0] == KEPT) == ("mamba_ssm_cache_dtype" in declared)
    if "scheme of inputs" in found and format not in ("bf16", "mlx", "comfy"):
        outcome, _ = found["scheme of inputs"]
        groups = declared.get("config_groups", {}).values()
        if outcome == KEPT and groups:
            assert any(one.get("input_activations") for one in groups) == declared_inputs(open_source(model))


@pytest.mark.parametrize("name", half(WITH_CONFIG))
def test_the_result_declares_the_same_again(name: str, declared: Any, tmp_path: Path) -> None:
    """A conversion of the result of a conversion without options declares what the first one did."""
    plans = []
    model = declared(name)
    for out in (tmp_path / "a", tmp_path / "b"):
        plans.append(convert(model, out).plan)
        model = out
    first, second = (configs(plan) for plan in plans)
    assert first == second
    if not name.startswith(("fp8", "sglang", "quark")):
        assert kv_cache_of(open_source(model)).is_fp8
    assert not [
        issue for issue in verify(model, tmp_path / "a").issues if issue.severity == "error" and not issue.loader
    ]


CT, W4 = "compressed-tensors", "modelopt W4A16_NVFP4"
BOTH = {"modelopt": (8, "FP8"), CT: (8, None)}
CACHES = [  # source, kv_cache_quant_algo, kv_cache_scheme, per target: (bits of the scheme, algorithm), or why lost
    (W4, "FP8", None, {**BOTH, "mlx": "no place"}),
    (W4, "fp8", None, BOTH),
    (W4, "NVFP4", None, {"modelopt": (None, "NVFP4"), CT: f"cache is NVFP4, and {CT}", "bf16": "bf16 has no place"}),
    (W4, None, None, {"modelopt": (None, None), CT: (None, None)}),
    (W4, None, SCHEME, BOTH),
    (W4, None, {**SCHEME, "num_bits": 4}, {"modelopt": (4, None), CT: "can declare only FP8"}),
    (f"{CT} NVFP4", None, {**SCHEME, "num_bits": 4}, {"modelopt": 'the cache is {"num_bits": 4', CT: (4, None)}),
    (f"{CT} NVFP4", None, {**SCHEME, "dynamic": True}, {"modelopt": "only FP8 with static scales"}),
]


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("case", range(len(CACHES)))
def test_every_spelling_of_a_kv_cache(case: int, where: str, tmp_path: Path) -> None:
    """The KV cache is found in both files and both spellings, and written in both of the target's."""
    name, algorithm, scheme, targets = CACHES[case]
    model = SOURCES[name](tmp_path / "s")
    path = model / "hf_quant_config.json"
    if where == "config.json":
        path.unlink(missing_ok=True)
        declare(model, kv_cache_quant_algo=algorithm, kv_cache_scheme=scheme)
    elif not path.exists() or scheme:
        pytest.skip("only Model-Optimizer has the file, which has no scheme")
    else:
        content = json.loads(path.read_text())
        content["quantization"]["kv_cache_quant_algo"] = algorithm
        path.write_text(json.dumps(content))
        config = json.loads((model / "config.json").read_text())
        del config["quantization_config"]
        (model / "config.json").write_text(json.dumps(config))
    tensors = oracle.arrays(oracle.load(model))
    tensors |= {f"model.layers.0.self_attn.{one}_proj.{one}_scale": np.float32(0.5) for one in "kv"}
    synthetic.write_file(model / "model.safetensors", tensors)
    for format, wanted in targets.items():
        plan = make_plan(model, format=format, requantize=True)
        lost = [text for text in plan.warnings if "quantized KV cache of the source and its 2 scales" in text]
        if isinstance(wanted, str):
            assert len(lost) == 1 and wanted in lost[0]
            continue
        assert not lost
        found = configs(plan)
        declared = found["config.json"]["quantization_config"]
        assert ((declared["kv_cache_scheme"] or {}).get("num_bits"), wanted[0]) == (wanted[0],) * 2
        if format == "modelopt":
            assert found["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] == wanted[1]


def test_lost_input_scales_are_named(declared: Any) -> None:
    model = declared("compressed-tensors NVFP4 W4A4")
    for format, recipe in (("mlx", "mxfp4-ocp"), ("fp8", "fp8-transformers-block"), ("compressed-tensors", "mxfp8-te")):
        warnings = make_plan(model, recipe, format=format, requantize=True).warnings
        assert any(
            "the source's input scales are lost: all 3 belong to layers that have none" in one for one in warnings
        )
    assert not any("input scales" in one for one in make_plan(model, format="modelopt").warnings)


@pytest.mark.parametrize("inputs", [None, {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}])
def test_the_scheme_of_inputs_stays_in_its_own_format(inputs: Any, tmp_path: Path) -> None:
    """compressed-tensors to compressed-tensors repeats it; another format whose engines differ is a loss."""
    model = SOURCES["compressed-tensors FP8 per row"](tmp_path / "s")
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    declare(model, config_groups={"group_0": {**config["config_groups"]["group_0"], "input_activations": inputs}})
    plan = make_plan(model, format="compressed-tensors")
    assert (
        configs(plan)["config.json"]["quantization_config"]["config_groups"]["group_0"]["input_activations"] == inputs
    )
    warnings = make_plan(model, format="modelopt").warnings
    assert any("but engines of modelopt FP8 per row quantize them to 8 bits" in one for one in warnings) == (not inputs)


def test_scale_fmt_follows_the_scales(tmp_path: Path) -> None:
    model = SOURCES["fp8 128x128"](tmp_path / "s")
    declare(model, scale_fmt="ue8m0")
    assert configs(make_plan(model))["config.json"]["quantization_config"]["scale_fmt"] == "ue8m0"
    (lost,) = [text for text in make_plan(model, format="compressed-tensors").warnings if "scale_fmt" in text]
    assert 'configs of compressed-tensors have no entry scale_fmt, which is "ue8m0"' in lost


def test_the_list_covers_every_entry_of_a_config() -> None:
    """Each entry that fp4kit accepts without comparing it with tensors is in DECLARATIONS, or is history."""
    covered = {key for one in DECLARATIONS for key in one.keys}
    history = {"how the checkpoint was made", "what a loader does", "the tensors decide"}
    for entries in METHODS.values():
        for key, (group, reason, _) in entries.items():
            assert group != CARRIED or reason in history or key in covered, key


def test_what_is_lost_reaches_the_user(declared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", str(declared("modelopt FP8")), str(tmp_path / "o"), "--format", "bf16"])
    assert "warning: the quantized KV cache of the source and its 2 scales are left out" in capsys.readouterr().out


ATTENTION_LAYERS = "model.layers.{}.self_attn."
NAMES = {"modelopt": ("k_proj.k_scale", "v_proj.v_scale"), "compressed-tensors": ("k_scale", "v_scale")}
RECIPES = {"modelopt": "nvfp4-modelopt", "compressed-tensors": "nvfp4-compressed-tensors"}


def with_cache(root: Path, form: str) -> Path:
    """Write a quantized checkpoint with the scales 0.5, 0.75, ... of a KV cache. Return its directory.

    form: the container format.
    """
    synthetic.dense(root / "m")
    convert(root / "m", root / "q", RECIPES[form], format=form)
    tensors = oracle.arrays(oracle.load(root / "q"))
    for number, name in enumerate(ATTENTION_LAYERS.format(layer) + leaf for layer in range(2) for leaf in NAMES[form]):
        tensors[name] = np.float32(0.5 + number / 4)
    config = json.loads((root / "q" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = SCHEME
    synthetic.write_model(root / "kv", config, tensors)
    return root / "kv"


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("form", NAMES)
def test_scales_and_scheme_are_carried(form: str, to: str, tmp_path: Path) -> None:
    model = with_cache(tmp_path, form)
    convert(model, tmp_path / "out", RECIPES[to], format=to)
    have = oracle.load(tmp_path / "out")
    for number, name in enumerate(ATTENTION_LAYERS.format(layer) + leaf for layer in range(2) for leaf in NAMES[to]):
        assert have[name] == ("F32", (), np.float32(0.5 + number / 4).tobytes())
    assert sum(name.endswith(("k_scale", "v_scale")) for name in have) == 4
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert {key: declared[key] for key in SCHEME} == SCHEME
    beside = tmp_path / "out" / "hf_quant_config.json"
    if to == "modelopt":
        assert json.loads(beside.read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"  # both files agree
    report = verify(tmp_path / "out", model)
    assert report.clean, report.issues


def test_scales_that_no_engine_can_use(tmp_path: Path) -> None:
    """A negative scale is an error in verify and a warning in convert. A scale of the keys alone is a warning."""
    model = with_cache(tmp_path, "modelopt")
    assert not any("KV cache" in text for text in make_plan(model, format="modelopt").warnings)
    tensors = oracle.arrays(oracle.load(model))
    keys, values = ATTENTION_LAYERS.format(0) + NAMES["modelopt"][0], ATTENTION_LAYERS.format(1) + NAMES["modelopt"][1]
    tensors[keys] = np.float32(-1)
    del tensors[values]
    synthetic.write_model(tmp_path / "bad", json.loads((model / "config.json").read_text()), tensors)
    negative = "is -1.0; a positive finite number is needed as scale of the KV cache"
    alone = "has a k_scale, but no v_scale"
    warnings = make_plan(tmp_path / "bad", format="modelopt").warnings
    assert f"{keys}: {negative}" in warnings and any(alone in text for text in warnings)
    found = {issue.subject: issue for issue in verify(tmp_path / "bad").issues if "KV cache" in issue.text}
    assert found[keys].severity == "error" and found[keys].text == negative
    assert found["model.layers.1.self_attn"].severity == "warning" and alone in found["model.layers.1.self_attn"].text


def test_a_scheme_that_is_no_object_is_refused(tmp_path: Path) -> None:
    model = with_cache(tmp_path, "modelopt")
    declare(model, kv_cache_scheme="fp8_e5m2")
    with pytest.raises(CheckpointError, match='kv_cache_scheme: is "fp8_e5m2"; needs null or an object'):
        convert(model, tmp_path / "out", "nvfp4-modelopt", format="modelopt")


def test_the_scheme_of_inputs_gives_way_to_input_scales(tmp_path: Path) -> None:
    model = SOURCES["compressed-tensors FP8"](tmp_path / "s")
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    dynamic = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "tensor"}
    declare(model, config_groups={"group_0": {**config["config_groups"]["group_0"], "input_activations": dynamic}})
    for options, is_dynamic in (({}, True), ({"input_scale": 0.5}, False)):
        plan = make_plan(model, format="compressed-tensors", **options)
        group = configs(plan)["config.json"]["quantization_config"]["config_groups"]["group_0"]
        assert group["input_activations"]["dynamic"] is is_dynamic
