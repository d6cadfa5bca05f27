"""Test that verify names the fault of a layer, such as a lost or inverted scale, with its source and without."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import synthetic
from changed_bytes import change
from exhaustive import every_row, half
from measured import whole

import fp4kit
from fp4kit.checkpoint import Activations, Wishes, convert, make_plan
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.findings import emptiness_of, engines_that_load, recorded_activations, zeros_of
from fp4kit.checkpoint.identify.run import problems_of
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.statistics import StoredCounts, sampled_magnitudes
from fp4kit.checkpoint.verify import reencode as module
from fp4kit.checkpoint.verify.reencode import SampledError, sampled_error
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.formats import E4M3
from fp4kit.layouts import swizzle_scales
from fp4kit.storage.files import CheckpointError

Bytes = npt.NDArray[np.uint8]
LAYER, SIZE = "model.layers.0.self_attn.o_proj", 128
NAMES = {"modelopt": "modelopt NVFP4", "compressed-tensors": "compressed-tensors nvfp4-pack-quantized"}
FORMS = {"nvfp4-modelopt": "modelopt", "mxfp4-compressed-tensors": "compressed-tensors"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with square layers to "s", and its conversion by each recipe of FORMS; return the directory."""
    root = tmp_path_factory.mktemp("models")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = [f"model.layers.0.self_attn.{name}" for name in names]
    drawn = (synthetic.random(module, (SIZE, SIZE), 0.02 + i / 100) for i, module in enumerate(modules))
    tensors = {f"{module}.weight": x for module, x in zip(modules, drawn, strict=True)}
    synthetic.write_model(root / "s", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, tensors)
    for recipe, form in FORMS.items():
        convert(root / "s", root / recipe, recipe, format=form)
    return root


def copied(source: Path, to: Path, is_recorded: bool) -> Path:
    """Copy a checkpoint without its manifest, and without the record of its recipe if ``is_recorded`` is False."""
    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    if not is_recorded:
        del config["quantization_config"]["fp4kit"]
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return to


def swapped(codes: Bytes) -> Bytes:
    return codes << 4 | codes >> 4


def transposed(codes: Bytes) -> Bytes:
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(SIZE, SIZE).T
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def swizzled(scales: Bytes) -> Bytes:
    return swizzle_scales(scales.reshape(SIZE, -1), "swizzled_128x4")


FAULTS: dict[str, tuple[str, Callable[[Bytes], Bytes]]] = {
    "nibbles are swapped": ("codes", swapped),
    "codes are transposed": ("codes", transposed),
    "block scales are swizzled_128x4, declared linear": ("scales", swizzled),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("recipe", FORMS)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_faults_are_named(sound: Path, tmp_path: Path, fault: str, recipe: str, is_recorded: bool) -> None:
    """The fault is named whether or not the layers can be encoded again by the recorded recipe."""
    root = copied(sound / recipe, tmp_path / "m", is_recorded)
    part, make = FAULTS[fault]
    packed = "weight" if FORMS[recipe] == "modelopt" else "weight_packed"
    change(root, f"{LAYER}.{packed if part == 'codes' else 'weight_scale'}", make, np.uint8)
    found = [(one.severity, one.subject) for one in verify(root, sound / "s").issues if one.text.startswith(fault)]
    assert found == [("error", LAYER)]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with 28 layers to "s", and its conversion to "q"; return the directory."""
    root = tmp_path_factory.mktemp("many")
    names = [f"model.layers.{i}.self_attn.{leaf}_proj.weight" for i in range(7) for leaf in "qkvo"]
    tensors = {name: synthetic.random(name, (SIZE, SIZE), 0.02 + i / 1000) for i, name in enumerate(names)}
    synthetic.write_model(root / "s", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, tensors)
    convert(root / "s", root / "q", "nvfp4-modelopt", format="modelopt")
    return root


EVERYWHERE: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "nibbles are swapped, as": ("", np.uint8, swapped),
    "codes are transposed, as": ("", np.uint8, transposed),
    "tensor scale is inverted: its reciprocal is stored, as": ("_scale_2", np.float32, np.reciprocal),
    "block scales are swizzled_128x4, declared linear, as": ("_scale", np.uint8, swizzled),
}


@pytest.mark.parametrize("fault", EVERYWHERE)
def test_a_fault_of_all_layers_is_named_once(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """All layers are examined, one line names the fault, and three layers stand for all in the table."""
    root = copied(many / "q", tmp_path / "m", True)
    part, dtype, make = EVERYWHERE[fault]
    change(root, f"_proj.weight{part}", make, dtype)
    assert main(["verify", str(root), "--source", str(many / "s")]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if fault in line)
    assert "and 25 more: " in line and "examined" not in line
    assert sum("_proj [" in line for line in lines) <= 6
    assert any(line.endswith("layers with the findings of others; --all lists them") for line in lines)
    assert main(["verify", str(root), "--source", str(many / "s"), "--all"]) == 1
    assert sum("_proj [" in line for line in capsys.readouterr().out.splitlines()) == 28


def test_layers_that_were_not_examined_are_counted(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copied(many / "q", tmp_path / "m", True)
    change(root, "_proj.weight", swapped, np.uint8)
    monkeypatch.setattr(module, "_MOST_ELEMENTS", SIZE * SIZE)
    texts = [one.text for one in verify(root, many / "s").issues if one.text.startswith("nibbles")]
    assert len(texts) == 5 and all("swapped (5 of 28 differing layers were examined)" in text for text in texts)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_negative_block_scales_are_named(sound: Path, tmp_path: Path, is_recorded: bool) -> None:
    root = copied(sound / "nvfp4-modelopt", tmp_path / "m", is_recorded)
    change(root, f"{LAYER}.weight_scale", lambda scales: scales | np.uint8(0x80), np.uint8)
    found = [
        one.subject for one in verify(root, sound / "s").issues if one.text.startswith("block scales are negative,")
    ]
    assert found == [LAYER]


@pytest.mark.parametrize(("count", "severity"), [(1, "warning"), (3, "warning"), (4, "error")])
@pytest.mark.parametrize("fault", [name for name in FAULTS if "nibbles" not in name])
def test_another_order_in_most_layers_is_an_error(
    sound: Path, tmp_path: Path, fault: str, count: int, severity: str
) -> None:
    root = copied(sound / "nvfp4-modelopt", tmp_path / "m", False)
    part, make = FAULTS[fault]
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")[:count]:
        layer = LAYER.replace("o_proj", leaf)
        change(root, f"{layer}.{'weight' if part == 'codes' else 'weight_scale'}", make, np.uint8)
    report = verify(root)
    found = [one.severity for one in report.issues if "fit the codes only if" in one.text]
    assert found == [severity] * count and report.clean == (severity == "warning")
    assert engines_that_load(NAMES["modelopt"], {}, ()) and not engines_that_load(NAMES["modelopt"], {}, report.issues)


def test_lost_scales_are_named_and_not_their_noise(sound: Path, tmp_path: Path) -> None:
    root = copied(sound / "nvfp4-modelopt", tmp_path / "m", False)
    change(root, f"{LAYER}.weight_scale", np.zeros_like, np.uint8)
    texts = [one.text for one in verify(root, sound / "s").issues if one.subject == LAYER and one.severity == "error"]
    assert any("the scales were lost" in text for text in texts) and not any("SQNR" in text for text in texts)


@pytest.mark.parametrize("factor", [np.nan, 3])
def test_nan_and_the_needed_tensor_scale_are_named(factor: float, sound: Path, tmp_path: Path) -> None:
    """NaN have no SQNR, and a wrong tensor scale is told with the one that is needed, as identify tells it."""
    root = copied(sound / "nvfp4-modelopt", tmp_path / "m", True)
    right = next(one.tensor_scale for one in verify(root, sound / "s").layers if one.name == LAYER)
    change(root, f"{LAYER}.weight_scale_2", lambda x: x * np.float32(factor))
    texts = [one.text for one in verify(root, sound / "s").issues if one.subject == LAYER]
    assert any(f"{right:.9g} is needed), as the source shows" in one for one in texts)
    assert sum("SQNR is" in one for one in texts) == (factor == 3) == 1 - sum("values are NaN" in one for one in texts)


@pytest.mark.parametrize("recipe", FORMS)
def test_sound_layers_have_no_fault(sound: Path, tmp_path: Path, recipe: str) -> None:
    """No fault is named in a sound checkpoint, not even if it is compared by another recipe."""
    root = copied(sound / recipe, tmp_path / "m", True)
    other = "nvfp4-te-4over6-mse-256" if recipe.startswith("nvfp4") else "mxfp4-quark-ceil"
    for wanted in (None, other):
        issues = verify(root, sound / "s", wanted).issues
        assert not any("as the source shows" in issue.text for issue in issues)
        assert any("bytes of codes that differ" in issue.text for issue in issues) == (wanted is not None)


@pytest.mark.parametrize("is_inverted", [False, True])
def test_reciprocal_factors_per_column(tmp_path: Path, is_inverted: bool) -> None:
    """pre_quant_scale that is stored as its reciprocals is named; the right factors cause no error."""
    x = synthetic.random("awq", (SIZE, SIZE))
    scaling = np.exp2(np.arange(SIZE) % 3 - 1).astype(np.float32)
    q = fp4kit.quantize((x.astype(np.float32) * scaling).astype(synthetic.BF16), "nvfp4-modelopt")
    parts = {
        "weight": q.packed,
        "weight_scale": np.asarray(q.block_scale).reshape(SIZE, -1).view(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.asarray(q.tensor_scale),
        "pre_quant_scale": (scaling if is_inverted else 1 / scaling).astype(synthetic.BF16),
    }
    declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}}
    synthetic.write_model(tmp_path / "m", declared, {f"{LAYER}.{name}": part for name, part in parts.items()})
    synthetic.write_model(tmp_path / "s", {"model_type": "llama"}, {f"{LAYER}.weight": x})
    issues = verify(tmp_path / "m", tmp_path / "s").issues
    found = [issue.subject for issue in issues if issue.text.startswith("pre_quant_scale is stored as its reciprocals")]
    assert found == [LAYER] * is_inverted
    assert any(issue.severity == "error" and "SQNR" in issue.text for issue in issues) == is_inverted


NORM = "model.layers.0.input_layernorm.weight"
LAYERS = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def smoothed(root: Path, spread: float, undo: bool, noise: float = 0) -> tuple[Path, Path]:
    """Write a model whose first norm is divided by a power of two per column, and quantize it.

    Return (quantized model without a recorded recipe, source without the division).

    spread: the standard deviation of the exponents.
    undo: True to multiply the columns of the next layers by the factors, as SmoothQuant does.
    noise: the standard deviation of numbers by which the values of these layers are multiplied in addition.
    """
    tensors = synthetic.dense(root / "m", index=False)
    rng = np.random.default_rng(3)
    factor = np.exp2(np.round(rng.standard_normal(tensors[NORM].size) * spread)).astype(np.float32)
    changed = dict(tensors)
    changed[NORM] = (tensors[NORM].astype(np.float32) / factor).astype(synthetic.BF16)
    for name in LAYERS if undo else ():
        errors = 1 + noise * rng.standard_normal(tensors[name].shape)
        changed[name] = (tensors[name].astype(np.float32) * factor * errors).astype(synthetic.BF16)
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    synthetic.write_model(root / "s", config, changed)
    convert(root / "s", root / "q", "nvfp4-modelopt", format="modelopt")
    stored = oracle.arrays(oracle.load(root / "q"))
    synthetic.write_model(root / "bare", config, stored)  # without the record of a recipe
    return root / "bare", root / "m"


@pytest.mark.parametrize("spread", [0.7, 2.0])
def test_smoothed_layers_are_clean(spread: float, tmp_path: Path) -> None:
    model, source = smoothed(tmp_path, spread, undo=True)
    report = verify(model, source)
    texts = {issue.subject: issue.text for issue in report.issues if issue.severity == "warning"}
    assert "divided by a factor per column" in texts[NORM]
    errors = [issue for issue in report.issues if issue.severity == "error" and "SQNR" in issue.text]
    assert not errors and not [i for i in report.issues if i.severity == "error" and i.subject == NORM]


@pytest.mark.parametrize("noise, severity", [(0.03, "warning"), (0.13, "error")])
def test_layers_that_changed_in_addition_are_not_smoothed(noise: float, severity: str, tmp_path: Path) -> None:
    """With the noise of 0.13, the layers are 4 dB below the usual SQNR, so the factors do not explain the change."""
    model, source = smoothed(tmp_path, 2.0, undo=True, noise=noise)
    assert {issue.severity for issue in verify(model, source).issues if issue.subject == NORM} == {severity}


def test_a_norm_that_changed_otherwise_is_an_error(tmp_path: Path) -> None:
    model, source = smoothed(tmp_path, 2.0, undo=False)
    found = [issue for issue in verify(model, source).issues if issue.subject == NORM]
    assert [issue.severity for issue in found] == ["error"] and "differ from the source" in found[0].text


@pytest.mark.parametrize("column", range(3))
def test_a_norm_whose_factor_hardly_helps_its_layers_is_an_error(column: int, tmp_path: Path) -> None:
    """verify reports a norm that differs from the source in one column by a factor of 1 + 2^-7 as an error.

    Such a factor is not smoothing: it changes the SQNR of the layers by much less than 0.5 dB, up or down.
    """
    tensors = synthetic.dense(tmp_path / "m", index=False)
    norm = tensors[NORM].astype(np.float32)
    norm[column] *= 1 + 2**-7
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    synthetic.write_model(tmp_path / "s", config, {**tensors, NORM: norm.astype(synthetic.BF16)})
    convert(tmp_path / "s", tmp_path / "q", "nvfp4-modelopt", format="modelopt")
    synthetic.write_model(tmp_path / "bare", config, oracle.arrays(oracle.load(tmp_path / "q")))
    found = [issue for issue in verify(tmp_path / "bare", tmp_path / "m").issues if issue.subject == NORM]
    assert [issue.severity for issue in found] == ["error"]


@pytest.mark.parametrize("name", ["dense", "fused", "deepseek_fp8"])
def test_the_error_of_all_rows_is_that_of_verify(tmp_path, name, monkeypatch) -> None:
    monkeypatch.setattr(module, "_SPAN_ROWS", 256)
    (synthetic.MODELS | synthetic.QUANTIZED)[name](tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", requantize=True)
    found = sampled_error(tmp_path / "q", open_source(tmp_path / "m"))
    whole = {layer.name: layer.tally.sqnr_db for layer in verify(tmp_path / "q", tmp_path / "m").layers}
    single = {name: db for name, db in found.layers if "[" not in name}  # verify sums over the experts of a stack
    assert single == pytest.approx({name: whole[name] for name in single})
    assert [db for _, db in found.layers] == sorted(db for _, db in found.layers)


def test_many_or_large_matrices_are_sampled_evenly(tmp_path, monkeypatch) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    source = open_source(tmp_path / "m")
    whole = sampled_error(tmp_path / "q", source)
    monkeypatch.setattr(module, "_MOST_MATRICES", 4)
    few = sampled_error(tmp_path / "q", source)
    assert (len(whole.layers), whole.total, len(few.layers), few.total) == (14, 14, 4, 14)
    assert {name.split(".")[2] for name, _ in few.layers} == {"0", "1"}
    monkeypatch.setattr(module, "_SAMPLED_ELEMENTS", 1)
    assert len(sampled_error(tmp_path / "q", source).layers) == 1


def test_spans_are_whole_blocks_within_the_matrix(tmp_path) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    checks = module.checks_of(module.inspect_checkpoint(tmp_path / "q").layers.values(), {}, module.Settings())
    for check in checks:
        rows = check.stored.shape[-2]
        for count in (1, 2, 4):
            spans = module._spans(check, count)
            assert all(0 <= start < end <= rows and start % 16 == 0 for start, end in spans)
            assert sum(end - start for start, end in spans) == min(rows, 16 * count)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_layers_three_decibels_below_the_median_are_outliers() -> None:
    error = SampledError((("a", 10.0), ("b", 17.5), ("c", 20.0), ("d", 20.5), ("e", 21.0)), 5)
    assert error.median == 20.0 and error.outliers == ("a",)


@pytest.mark.parametrize(
    ("zero", "flushed", "underflowed", "emptied", "findings"),
    [
        (3, 0, 0, 0, []),
        (3, 3, 0, 3, [("error", "the codes were lost", 3)]),
        (3, 3, 0, 1, [("error", "the codes were lost", 1), ("error", "the scales were lost", 2)]),
        (3, 3, 3, 0, [("warning", "their scales underflow", 3)]),
        (8, 3, 2, 1, [("error", "the codes were lost", 1), ("warning", "their scales underflow", 2)]),
        (9, 1, 1, 0, [("warning", "their scales underflow", 1)]),
        (8, 3, 3, 0, [("error", "most blocks are zero", 3)]),
    ],
)
def test_each_lost_block_is_counted_under_one_cause(zero, flushed, underflowed, emptied, findings) -> None:
    """Of 10 blocks; those that are zero in the source too do not count."""
    lost = {"flushed_blocks": flushed, "underflowed_blocks": underflowed, "emptied_blocks": emptied}
    counts = StoredCounts(blocks=10, zero_blocks=zero, **lost)
    found = [*zeros_of("a", counts)]
    assert [(loss.severity, loss.count) for loss in found] == [(severity, count) for severity, _, count in findings]
    assert all(phrase in loss.text for loss, (_, phrase, _) in zip(found, findings, strict=True))


@pytest.mark.parametrize(
    ("recipe", "found"),
    [("fp8-modelopt", [("error", 128)]), ("fp8-modelopt-channel", [("warning", 1)]), ("nvfp4-modelopt", [])],
)
def test_weights_that_are_lost_beside_an_outlier(tmp_path: Path, recipe: str, found: list[tuple[str, int]]) -> None:
    rng, shape = np.random.default_rng(0), (SIZE, SIZE)
    outlier, sparse, small = (rng.standard_normal(shape) * size for size in (0.02, 0.02, 1e-7))
    outlier[3, 7], sparse[rng.random(shape) < 0.5] = 1e4, 0
    layers = {LAYER: outlier, "0.up_proj": sparse, "1.o_proj": small, "2.o_proj": rng.standard_t(2, shape) * 0.02}
    layers["3.o_proj"] = np.zeros(shape)
    tensors = {f"{name}.weight": x.astype(synthetic.BF16) for name, x in layers.items()}
    synthetic.write_model(tmp_path / "s", {"model_type": "llama"}, tensors)
    convert(tmp_path / "s", tmp_path / "m", recipe, format="modelopt", allow_loss=True)
    report = verify(tmp_path / "m", tmp_path / "s")
    assert [issue.subject for issue in report.issues if "zero, as in the source" in issue.text] == ["3.o_proj"]
    issues = [issue for issue in report.issues if "stored as zeros" in issue.text]
    assert [(issue.severity, issue.count) for issue in issues] == found
    assert all(issue.subject == LAYER for issue in issues)
    if ("error", 128) in found:
        with pytest.raises(CheckpointError, match="most weights are stored as zeros beside a far larger one"):
            convert(tmp_path / "s", tmp_path / "refused", recipe, format="modelopt")


@pytest.mark.parametrize(
    ("zero", "smallest", "largest", "share", "severity", "phrase"),
    [
        (5, 0.0, 1.0, 0.0, None, ""),
        (6, 0.0, 2.0**-6, 0.0, "error", "near the smallest one of their format"),
        (6, 0.0, 2.0**-5, 0.0, "warning", "unless the layer is sparse"),
        (10, 2.0**-6, 2.0**-5, 0.0, "error", "the codes were lost"),
        (10, 0.0, 0.0, 0.6, "error", "as in most layers of this model"),
        (10, 0.0, 0.0, 0.5, "warning", "unless the layer was pruned"),
    ],
)
def test_mostly_zero_blocks_without_a_source(zero, smallest, largest, share, severity, phrase) -> None:
    counts = StoredCounts(blocks=10, zero_blocks=zero, smallest_scale=smallest, largest_scale=largest)
    found = [*emptiness_of("a", counts, E4M3, share)]
    assert [loss.severity for loss in found] == [severity] * bool(severity)
    assert all(phrase in loss.text for loss in found)


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


@pytest.fixture(scope="module", params=half(SCALES), ids=lambda case: f"{case[0]}-{case[1]}")
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


@pytest.mark.parametrize(("std", "reference", "recipe", "form"), every_row(2, ODD_MAGNITUDES))
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
    assert report.clean == (others < 5e5)
    return [issue for issue in report.issues if "input scale" in issue.text]


@pytest.mark.parametrize("inputs", [None, {"num_bits": 4, "type": "float", "dynamic": True}], ids=["null", "dynamic"])
def test_input_scales_that_the_config_makes_engines_ignore(inputs: object, tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    activations = Activations.of(whole(tmp_path / "m", {}))
    convert(tmp_path / "m", tmp_path / "out", format="compressed-tensors", activations=activations)
    assert verify(tmp_path / "out", tmp_path / "m").clean
    command = ["contract", str(tmp_path / "out"), "--engine", "transformers", "--scheme", "nvfp4-w4a4"]
    assert main(command) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for source in (None, tmp_path / "m"):
        found = [issue for issue in verify(tmp_path / "out", source).issues if "stored input scales, but" in issue.text]
        assert [(issue.severity, issue.subject) for issue in found] == [("error", "config.json")]
    assert main(command) == 1


@pytest.mark.parametrize("format", SUFFIX)
@pytest.mark.parametrize("case", half([(5000.0, True), (1 / 5000, True), (1 / 1000, False), (1000.0, False)]), ids=str)
def test_an_expert_far_from_the_others(format: str, case: tuple[float, bool], tmp_path: Path) -> None:
    factor, is_far = case
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
    """Input scales look inverted if all stand for inputs up to 6e5, but not if they stand for inputs up to 4e5."""
    found = issues(tmp_path, format, {}, amax)
    assert [(issue.severity, issue.subject) for issue in found] == [("error", "model")] * warned
    assert all("as they do if they are inverted" in issue.text for issue in found)
    doubted = [replace(issue, severity="warning") for issue in found]
    assert bool(engines_that_load(NAMES[format], {}, doubted)) != warned


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
    assert verify(tmp_path / "out", activations=one).unmeasured == 0 < verify(tmp_path / "out").unmeasured
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


def kept_in(into: list[Bytes], x: Bytes) -> Bytes:
    into.append(x)
    return x


@pytest.mark.parametrize("fault", ["", "k_proj", "o_proj"])
def test_fused_layers_with_tensor_scales_of_their_own(sound: Path, tmp_path: Path, fault: str) -> None:
    """compressed-tensors encodes q, k and v by themselves: the bytes are right, but vLLM fuses and misreads them."""
    stored = copied(sound / "nvfp4-modelopt", tmp_path / "stored", True)
    for name in ("q_proj", "k_proj", "v_proj"):
        convert(sound / "s", tmp_path / name, "nvfp4-modelopt", format="modelopt", wishes=Wishes(only=(f"*{name}",)))
        for part in ("weight", "weight_scale", "weight_scale_2"):
            read: list[Bytes] = []
            change(tmp_path / name, f"{name}.{part}", partial(kept_in, read), np.uint8)
            change(stored, f"{name}.{part}", lambda _, read=read: read[0], np.uint8)
    if fault:
        change(stored, f"{fault}.weight", lambda x: x ^ (np.arange(x.size).reshape(x.shape) == 5), np.uint8)
    report = verify(stored, sound / "s")
    differing = {layer.name.rpartition(".")[2]: layer.differing for layer in report.layers}
    assert {name: n for name, n in differing.items() if n} == ({fault: 1} if fault else {})
    assert any("weight_scale_2 differs" in issue.text and issue.severity == "error" for issue in report.issues)
