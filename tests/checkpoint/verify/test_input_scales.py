"""Test that verify names input scales that contradict those of other layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import synthetic
from measured import whole
from safetensors import safe_open

from fp4kit.checkpoint import Activations, convert
from fp4kit.checkpoint.findings import recorded_activations
from fp4kit.checkpoint.verify.integrity import Issue
from fp4kit.checkpoint.verify.verify import verify

EXPERTS = "model.layers.1.mlp.experts"
LEAVES = ("gate_proj", "up_proj", "down_proj")
SUFFIX = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}


def issues(root: Path, format: str, amaxes: dict[str, float], others: float = 1.0) -> list[Issue]:
    """Convert a model with input scales and return what verify says about these scales.

    amaxes: {layer: amax of its inputs}.
    others: the amax of all other layers.
    """
    synthetic.moe(root / "m")
    layers = dict.fromkeys(whole(root / "m").layers, others)
    activations = Activations.of(whole(root / "m", {**layers, **amaxes}))
    convert(root / "m", root / "out", format=format, activations=activations)
    report = verify(root / "out", root / "m")
    assert report.clean
    return [issue for issue in report.issues if "input scale" in issue.text]


@pytest.mark.parametrize("format", SUFFIX)
@pytest.mark.parametrize("factor", [5000.0, 1 / 5000])
def test_an_expert_far_from_the_others(format: str, factor: float, tmp_path: Path) -> None:
    found = issues(tmp_path, format, {f"{EXPERTS}.2.{leaf}": factor for leaf in LEAVES})
    assert {issue.subject for issue in found} == {f"{EXPERTS}.2.{leaf}" for leaf in LEAVES}
    text = f"its input scale stands for inputs of up to {factor:.3g}, {factor:.2g} times the median of 4 layers of its"
    assert all(issue.severity == "warning" and issue.text.startswith(text) for issue in found)


@pytest.mark.parametrize("factor", [1000.0, 1 / 1000])
def test_usual_differences_are_no_outliers(factor: float, tmp_path: Path) -> None:
    assert issues(tmp_path, "modelopt", {f"{EXPERTS}.2.{leaf}": factor for leaf in LEAVES}) == []


def test_two_layers_of_a_kind_are_too_few_for_a_median(tmp_path: Path) -> None:
    assert issues(tmp_path, "modelopt", {"model.layers.0.self_attn.o_proj": 9e4}) == []


@pytest.mark.parametrize(("amax", "warned"), [(4e5, False), (6e5, True)])
@pytest.mark.parametrize("format", SUFFIX)
def test_inverted_scales(format: str, amax: float, warned: bool, tmp_path: Path) -> None:
    """verify warns that input scales look inverted if all stand for inputs up to 6e5, but not for inputs up to 4e5."""
    found = issues(tmp_path, format, {}, amax)
    assert [issue.subject for issue in found] == ["model"] * warned
    assert all("as they do if they are inverted" in issue.text for issue in found)


def put(folder: Path, tensor: str, factor: float) -> None:
    """Multiply the float32 scalar `tensor` of the model in `folder` by `factor`, in place."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            if tensor not in file.keys():
                continue
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        at = 8 + size + json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0]
        data[at : at + 4] = (np.frombuffer(data[at : at + 4], np.float32) * np.float32(factor)).tobytes()
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("format", "used"),
    [("modelopt", "the largest amax"), ("compressed-tensors", "the smallest amax, so larger inputs")],
)
def test_fused_layers_that_differ(format: str, used: str, tmp_path: Path) -> None:
    assert issues(tmp_path, format, {}) == []
    put(tmp_path / "out", f"model.layers.0.self_attn.q_proj.{SUFFIX[format]}", 2.0)
    found = [issue for issue in verify(tmp_path / "out").issues if "input scales differ" in issue.text]
    assert [(issue.severity, issue.subject) for issue in found] == [
        ("warning", "model.layers.0.self_attn.(q_proj|k_proj|v_proj)")
    ]
    assert "by a factor of 2, although" in found[0].text and f"vLLM uses {used}" in found[0].text


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_unusable_scales_are_named_and_judge_no_others(factor: float, tmp_path: Path) -> None:
    assert issues(tmp_path, "modelopt", {}) == []
    put(tmp_path / "out", f"{EXPERTS}.2.up_proj.input_scale", factor)
    found = verify(tmp_path / "out").issues
    assert {issue.subject for issue in found if "input_scale is" in issue.text} == {f"{EXPERTS}.2.up_proj"}
    assert all("a positive finite number is needed" in issue.text for issue in found if "input_scale is" in issue.text)
    assert not any("input scale" in issue.text for issue in found)


@pytest.mark.parametrize("format", SUFFIX)
def test_input_scales_of_other_activations(format: str, tmp_path: Path) -> None:
    """verify with activations reports every input scale that is not the one they give, to the last bit."""
    synthetic.moe(tmp_path / "m")
    one = Activations.of(whole(tmp_path / "m"))
    convert(tmp_path / "m", tmp_path / "out", format=format, activations=one)
    assert verify(tmp_path / "out", activations=one).clean
    layer = f"{EXPERTS}.2.down_proj"
    other = Activations.of(whole(tmp_path / "m", {layer: float(np.nextafter(one.amaxes[layer], np.float32(9)))}))
    found = [issue for issue in verify(tmp_path / "out", activations=other).issues if issue.severity == "error"]
    assert [issue.subject for issue in found] == [layer]
    assert re.fullmatch(rf"{SUFFIX[format]} is \S+; the activations give \S+", found[0].text)


def test_rule_and_policy_are_those_that_the_manifest_records(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    collector = whole(tmp_path / "m", {f"{EXPERTS}.1.{leaf}": 0 for leaf in LEAVES})
    convert(tmp_path / "m", tmp_path / "out", activations=Activations.of(collector, "headroom", "layer"))
    assert recorded_activations(tmp_path / "out") == ("headroom", "layer")
    assert recorded_activations(tmp_path / "m") == (None, None)
