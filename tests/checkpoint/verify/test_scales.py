"""Test that lost, multiplied and inverted scales are named without a source, in all containers, by verify, convert and
identify, and that sound models of odd magnitudes give no finding.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import synthetic
from changed_bytes import change
from measured import whole

from fp4kit.checkpoint import Activations, convert, make_plan
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.findings import recorded_activations
from fp4kit.checkpoint.identify.run import problems_of
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.statistics import sampled_magnitudes
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main
from fp4kit.storage.files import CheckpointError

PHRASES = ("its scales allow values", "scales allow values up to", "so that it was lost", "have one tensor scale")
ODD = "model.layers.1.mlp.down_proj"
# (recipe, format, suffix of the scale, dtype of its bytes)
SCALES = [
    ("nvfp4-te", "modelopt", "weight_scale_2", np.float32),
    ("nvfp4-te", "compressed-tensors", "weight_global_scale", np.float32),
    ("nvfp4-comfy-kitchen", "comfy", "weight_scale_2", np.float32),
    ("fp8-modelopt-channel", "modelopt", "weight_scale", np.float32),
    ("fp8-modelopt", "compressed-tensors", "weight_scale", np.float32),
    ("fp8-transformers-block", "fp8", "weight_scale_inv", np.float32),
    ("mxfp4", "compressed-tensors", "weight_scale", np.uint8),
    ("mxfp8-te", "modelopt", "weight_scale", np.uint8),
    ("mxfp4", "mlx", "scales", np.uint8),
]
Fault = Callable[[np.ndarray], np.ndarray]
FLOATS: dict[str, tuple[Fault, str]] = {
    "lost": (np.ones_like, "error"),
    "inverted": (lambda x: 1 / x, "error"),
    "x448": (lambda x: x * 448, "warning"),
    "/448": (lambda x: x / 448, "warning"),
}
EXPONENTS: dict[str, tuple[Fault, str]] = {
    "bias 127": (lambda x: np.clip(x.astype(int) + 127, 0, 254), "error"),
    "+20": (lambda x: x + 20, "error"),
    "-8": (lambda x: x - 8, "warning"),
    "+8": (lambda x: x + 8, "warning"),
}


def model(root: Path, std: float = 0.02, reference: float | None = 0.02, layers: int = 3) -> Path:
    """Write a dense model with embeddings of the standard deviation ``reference``, or without; return its path."""
    tensors = {}
    if reference is not None:
        tensors = {f"{n}.weight": synthetic.random(n, (64, 128), reference) for n in ("model.embed_tokens", "lm_head")}
        tensors["model.norm.weight"] = np.ones(128, synthetic.BF16)
    for i in range(layers):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.{i}.{part}.weight"
            tensors[name] = synthetic.random(name, (128, 128), std)
    synthetic.write_model(root, {"model_type": "llama", "hidden_size": 128}, tensors)
    return root


@pytest.fixture(scope="module", params=SCALES, ids=lambda case: f"{case[0]}-{case[1]}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, type]:
    """Convert a model to one container. Return the result, the suffix of its scales, and their dtype."""
    root = tmp_path_factory.mktemp("magnitudes")
    recipe, form, suffix, dtype = request.param
    convert(model(root / "m"), root / "q", recipe, format=form)
    return root / "q", suffix, dtype


def findings(root: Path) -> dict[str, str]:
    """Return what verify finds in the magnitudes: {subject: severity}."""
    issues = [issue for issue in verify(root).issues if any(phrase in issue.text for phrase in PHRASES)]
    return {issue.subject: issue.severity for issue in reversed(issues)}  # errors come first in a report


def changed(made: tuple[Path, str, type], root: Path, end: str, fault: Fault) -> Path:
    """Return a copy of a converted model in which the scales whose names end with ``end`` are changed."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(made[0], root)
    change(root, end, fault, made[2])
    return root


def test_sound_layers_give_no_finding(made: tuple[Path, str, type]) -> None:
    assert not findings(made[0]) and not problems_of(inspect_checkpoint(made[0]))
    make_plan(made[0], format="bf16")


def test_scales_of_all_layers_and_of_one(made: tuple[Path, str, type], tmp_path: Path) -> None:
    """Every fault is named: by verify with its severity, by the plan of a conversion, and by identify."""
    _, suffix, dtype = made
    for fault, severity in (FLOATS if dtype == np.float32 else EXPONENTS).values():
        for end in (f".{suffix}", f"{ODD}.{suffix}"):
            root = changed(made, tmp_path / "bad", end, fault)
            found = findings(root)
            assert severity in found.values(), (end, found)
            assert end == f".{suffix}" or found == {ODD: severity}
            assert any(phrase in text for text in problems_of(inspect_checkpoint(root)) for phrase in PHRASES)
            try:
                planned = " ".join(make_plan(root, format="bf16").warnings)
            except CheckpointError as error:
                assert severity == "error" and "--allow-loss" in str(error)
                planned = " ".join(make_plan(root, format="bf16", allow_loss=True).warnings)
            assert any(phrase in planned for phrase in PHRASES)


def test_tensor_scales_that_were_overwritten(tmp_path: Path) -> None:
    """All layers have the tensor scale of one of them, although the largest weights of all differ."""
    convert(model(tmp_path / "m", layers=6), tmp_path / "q", "nvfp4-te", format="modelopt")
    assert not findings(tmp_path / "q")
    change(tmp_path / "q", "weight_scale_2", lambda x: np.full_like(x, 3e-5))
    assert findings(tmp_path / "q") == {"model": "warning"}


# (std of the layers, std of the embeddings or None, recipe, format)
ODD_MAGNITUDES = [
    (1.0, 1.0, "nvfp4-te", "modelopt"),
    (1.0, None, "nvfp4-te", "modelopt"),
    (1.0, 0.02, "nvfp4-te", "compressed-tensors"),
    (2e-4, 2e-4, "nvfp4-te", "modelopt"),
    (2e-4, 1e-3, "mxfp4", "compressed-tensors"),
    (0.003, 0.02, "fp8-modelopt-channel", "modelopt"),
    (0.02, 1.0, "nvfp4-te", "modelopt"),
    (0.02, 1.0, "nvfp4-mlx-cpu", "mlx"),
    (0.02, None, "nvfp4-comfy-kitchen", "comfy"),
    (0.05, 0.02, "nvfp4-modelopt-static-4over6", "modelopt"),
    (0.05, 0.02, "nvfp4-te-4over6-mse-256", "modelopt"),
]


@pytest.mark.parametrize(("std", "reference", "recipe", "form"), ODD_MAGNITUDES)
def test_sound_models_of_odd_magnitudes(
    std: float, reference: float | None, recipe: str, form: str, tmp_path: Path
) -> None:
    convert(model(tmp_path / "m", std, reference), tmp_path / "q", recipe, format=form)
    assert not findings(tmp_path / "q")
    assert not problems_of(inspect_checkpoint(tmp_path / "q"))


def test_layers_of_one_kind_may_differ(tmp_path: Path) -> None:
    """Standard deviations from 0.005 to 0.04 within a kind, ternary weights and truncated ones are sound."""
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(6):
        for part, values in (
            ("q_proj", rng.standard_normal((128, 128)) * 0.005 * 1.5**i),
            ("o_proj", rng.integers(-1, 2, (128, 128)) * 0.03),
            ("v_proj", np.clip(rng.standard_normal((128, 128)) * 0.02, -0.04, 0.04)),
        ):
            tensors[f"model.layers.{i}.self_attn.{part}.weight"] = values.astype(synthetic.BF16)
    synthetic.write_model(tmp_path / "m", {"model_type": "llama", "hidden_size": 128}, tensors)
    for recipe, form in (("nvfp4-te", "modelopt"), ("fp8-modelopt", "compressed-tensors")):
        convert(tmp_path / "m", tmp_path / form, recipe, format=form)
        assert not findings(tmp_path / form)


def test_a_source_makes_magnitudes_unneeded(tmp_path: Path) -> None:
    """With the source, verify compares values and names the cause; a sound model of huge values is clean."""
    source = model(tmp_path / "m", 1e4, 0.02)
    convert(source, tmp_path / "q", "nvfp4-te", format="modelopt")
    assert findings(tmp_path / "q") and verify(tmp_path / "q", source).clean
    change(tmp_path / "q", f"{ODD}.weight_scale_2", np.ones_like)
    texts = [i.text for i in verify(tmp_path / "q", source).issues if i.subject == ODD and i.severity == "error"]
    assert any("tensor scale is" in text for text in texts)


def test_the_command_line_stops_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    convert(model(tmp_path / "m"), tmp_path / "q", "nvfp4-te", format="modelopt")
    change(tmp_path / "q", "weight_scale_2", np.ones_like)
    assert main(["verify", str(tmp_path / "q")]) == 1
    assert main(["identify", str(tmp_path / "q")]) == 1
    assert "so that it was lost" in capsys.readouterr().out
    arguments = ["convert", str(tmp_path / "q"), str(tmp_path / "b"), "--format", "bf16"]
    assert main(arguments) == 2 and "--allow-loss" in capsys.readouterr().err
    assert main([*arguments, "--allow-loss"]) == 0 and "so that it was lost" in capsys.readouterr().out


def test_samples_are_evenly_spaced(tmp_path: Path) -> None:
    convert(model(tmp_path / "m"), tmp_path / "q", "nvfp4-te", format="modelopt")
    layers = inspect_checkpoint(tmp_path / "q").layers
    assert {one.name for one in sampled_magnitudes(layers.values())} == {*layers}
    assert len(sampled_magnitudes(layers.values(), most=3)) == 3


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
@pytest.mark.parametrize(("factor", "is_far"), [(5000.0, True), (1 / 5000, True), (1000.0, False), (1 / 1000, False)])
def test_an_expert_far_from_the_others(format: str, factor: float, is_far: bool, tmp_path: Path) -> None:
    layers = [f"{EXPERTS}.2.{leaf}" for leaf in LEAVES]
    found = issues(tmp_path, format, dict.fromkeys(layers, factor))
    assert {issue.subject for issue in found} == set(layers if is_far else ())
    text = f"its input scale stands for inputs of up to {factor:.3g}, {factor:.2g} times the median of 4 layers of its"
    assert all(issue.severity == "warning" and issue.text.startswith(text) for issue in found)


def test_two_layers_of_a_kind_are_too_few_for_a_median(tmp_path: Path) -> None:
    assert issues(tmp_path, "modelopt", {"model.layers.0.self_attn.o_proj": 9e4}) == []


@pytest.mark.parametrize(("amax", "warned"), [(4e5, False), (6e5, True)])
@pytest.mark.parametrize("format", SUFFIX)
def test_inverted_scales(format: str, amax: float, warned: bool, tmp_path: Path) -> None:
    """verify warns that input scales look inverted if all stand for inputs up to 6e5, but not for inputs up to 4e5."""
    found = issues(tmp_path, format, {}, amax)
    assert [issue.subject for issue in found] == ["model"] * warned
    assert all("as they do if they are inverted" in issue.text for issue in found)


@pytest.mark.parametrize(
    ("format", "used"),
    [("modelopt", "the largest amax"), ("compressed-tensors", "the smallest amax, so larger inputs")],
)
def test_fused_layers_that_differ(format: str, used: str, tmp_path: Path) -> None:
    assert issues(tmp_path, format, {}) == []
    change(tmp_path / "out", f"model.layers.0.self_attn.q_proj.{SUFFIX[format]}", lambda x: x * np.float32(2.0))
    found = [issue for issue in verify(tmp_path / "out").issues if "input scales differ" in issue.text]
    subject = "model.layers.0.self_attn.(q_proj|k_proj|v_proj)"
    assert [(issue.severity, issue.subject) for issue in found] == [("warning", subject)]
    assert "by a factor of 2, although" in found[0].text and f"vLLM uses {used}" in found[0].text


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_unusable_scales_are_named_and_judge_no_others(factor: float, tmp_path: Path) -> None:
    assert issues(tmp_path, "modelopt", {}) == []
    change(tmp_path / "out", f"{EXPERTS}.2.up_proj.input_scale", lambda x: x * np.float32(factor))
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


GATE = "model.layers.0.mlp.gate_proj"
SCALE = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}


def unusable(root: Path) -> set[str]:
    """Return the engines for which verify calls the tensor scale of GATE unusable."""
    found = [issue for issue in verify(root).issues if issue.subject == GATE and "is nan" in issue.text]
    assert all(issue.severity == "error" for issue in found)
    return {issue.loader.split()[0] for issue in found}


@pytest.mark.parametrize("form", SCALE)
def test_fp8_layers_outnumber_nvfp4_layers(form: str, tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "s")
    recipes = [(pattern, "fp8-modelopt-channel") for pattern in ("*.self_attn.*", "*.down_proj", "model.layers.1.*")]
    convert(tmp_path / "s", tmp_path / "m", f"nvfp4-{form}", format=form, recipes=recipes)
    formats = [layer.format for layer in verify(tmp_path / "m").layers]
    assert sum("FP8" in name for name in formats) > 3 * sum("FP8" not in name for name in formats) > 0
    assert unusable(tmp_path / "m") == set()
    change(tmp_path / "m", f"{GATE}.{SCALE[form]}", lambda scale: scale * np.nan)
    assert {"vLLM", "SGLang"} <= unusable(tmp_path / "m")


def test_nvfp4_layers_in_a_checkpoint_of_fp8_blocks(tmp_path: Path) -> None:
    """NVFP4 layers are checked as such even if the config declares FP8 blocks for the whole model."""
    synthetic.dense(tmp_path / "s")
    convert(tmp_path / "s", tmp_path / "m", "nvfp4-modelopt", format="modelopt")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "FP8_PB_WO"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    change(tmp_path / "m", f"{GATE}.weight_scale_2", lambda scale: scale * np.nan)
    assert {"vLLM", "SGLang"} <= unusable(tmp_path / "m")
    assert not any("128x128: the requirements" in issue.text for issue in verify(tmp_path / "m").issues)
