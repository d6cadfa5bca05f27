"""Test that everything a source declares beside its weights is kept, converted, or named as lost with a true reason."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import synthetic
from partly_quantized import SOURCES, declare

from fp4kit.__main__ import main
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.containers.config_entries import CARRIED, METHODS
from fp4kit.checkpoint.containers.configs import ALL_FORMATS
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.plan.plan import configs
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
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.storage.files import CheckpointError

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
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a key of SOURCES to the model with all declarations, which is written once."""
    return cache(lambda name: with_all(tmp_path_factory.mktemp("source") / "s", name))


@pytest.mark.parametrize("name", WITH_CONFIG)
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_each_declaration_is_kept_converted_or_named_as_lost(name: str, format: str, source: Any) -> None:
    model = source(name)
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


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_the_result_declares_the_same_again(name: str, source: Any, tmp_path: Path) -> None:
    """A conversion of the result of a conversion without options declares what the first one did."""
    plans = []
    model = source(name)
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


def test_lost_input_scales_are_named(source: Any) -> None:
    model = source("compressed-tensors NVFP4 W4A4")
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


def test_what_is_lost_reaches_the_user(source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", str(source("modelopt FP8")), str(tmp_path / "o"), "--format", "bf16"])
    assert "warning: the quantized KV cache of the source and its 2 scales are left out" in capsys.readouterr().out


ATTENTION = "model.layers.{}.self_attn."
NAMES = {"modelopt": ("k_proj.k_scale", "v_proj.v_scale"), "compressed-tensors": ("k_scale", "v_scale")}
RECIPES = {"modelopt": "nvfp4-modelopt", "compressed-tensors": "nvfp4-compressed-tensors"}


def with_cache(root: Path, form: str) -> Path:
    """Write a quantized checkpoint with the scales 0.5, 0.75, ... of a KV cache. Return its directory.

    form: the container format.
    """
    synthetic.dense(root / "m")
    convert(root / "m", root / "q", RECIPES[form], format=form)
    tensors = oracle.arrays(oracle.load(root / "q"))
    for number, name in enumerate(ATTENTION.format(layer) + leaf for layer in range(2) for leaf in NAMES[form]):
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
    for number, name in enumerate(ATTENTION.format(layer) + leaf for layer in range(2) for leaf in NAMES[to]):
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
    keys, values = ATTENTION.format(0) + NAMES["modelopt"][0], ATTENTION.format(1) + NAMES["modelopt"][1]
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
