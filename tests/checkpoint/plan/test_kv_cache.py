"""Test that the scales of a quantized KV cache follow a conversion, under the names and declaration of the output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import synthetic

from fp4kit.checkpoint import CheckpointError, convert, make_plan
from fp4kit.checkpoint.verify.verify import verify

ATTENTION = "model.layers.{}.self_attn."
SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
NAMES = {
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors": ("k_scale", "v_scale"),
}
RECIPES = {"modelopt": "nvfp4-modelopt", "compressed-tensors": "nvfp4-compressed-tensors"}


def with_cache(root: Path, form: str, scheme: dict[str, object] = SCHEME) -> Path:
    """Write a quantized checkpoint with the scales 0.5, 0.75, ... of a KV cache. Return its directory.

    form: the container format.
    scheme: the entry kv_cache_scheme of quantization_config.
    """
    synthetic.dense(root / "m")
    convert(root / "m", root / "q", RECIPES[form], format=form)
    tensors = oracle.arrays(oracle.load(root / "q"))
    for number, name in enumerate(ATTENTION.format(layer) + leaf for layer in range(2) for leaf in NAMES[form]):
        tensors[name] = np.float32(0.5 + number / 4)
    config = json.loads((root / "q" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
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


@pytest.mark.parametrize(
    ("form", "to", "recipe", "scheme"),
    [
        ("modelopt", "bf16", "nvfp4-te", SCHEME),
        ("modelopt", "compressed-tensors", "nvfp4-te", {"num_bits": 4, "type": "float", "group_size": 16}),
        ("compressed-tensors", "modelopt", "nvfp4-te", {**SCHEME, "dynamic": True}),
    ],
)
def test_a_cache_without_a_place_is_left_out_with_a_warning(
    form: str, to: str, recipe: str, scheme: dict[str, object], tmp_path: Path
) -> None:
    model = with_cache(tmp_path, form, scheme)
    plan = make_plan(model, recipe, format=to)
    assert any("the quantized KV cache of the source and its 4 scales are left out" in line for line in plan.warnings)
    convert(model, tmp_path / "out", recipe, format=to)
    assert not [name for name in oracle.load(tmp_path / "out") if name.endswith(("k_scale", "v_scale"))]
    declared = json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config", {})
    assert not declared.get("kv_cache_scheme")


def test_another_scheme_stays_in_its_own_format(tmp_path: Path) -> None:
    scheme = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    model = with_cache(tmp_path, "modelopt", scheme)
    convert(model, tmp_path / "out", "nvfp4-modelopt", format="modelopt")
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["kv_cache_scheme"] == scheme


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
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = "fp8_e5m2"
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match='kv_cache_scheme: is "fp8_e5m2"; needs null or an object'):
        convert(model, tmp_path / "out", "nvfp4-modelopt", format="modelopt")
