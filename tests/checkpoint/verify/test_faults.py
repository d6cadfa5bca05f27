"""Test that verify names the fault of a layer that differs from its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import synthetic
from changed_bytes import change

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.findings import emptiness_of, zeros_of
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.statistics import StoredCounts
from fp4kit.checkpoint.verify import reencode as module
from fp4kit.checkpoint.verify.reencode import SampledError, sampled_error
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.formats import E4M3
from fp4kit.layouts import swizzle_scales

Bytes = npt.NDArray[np.uint8]
LAYER, SIZE = "model.layers.0.self_attn.o_proj", 128
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


def test_lost_scales_are_named_and_not_their_noise(sound: Path, tmp_path: Path) -> None:
    root = copied(sound / "nvfp4-modelopt", tmp_path / "m", False)
    change(root, f"{LAYER}.weight_scale", np.zeros_like, np.uint8)
    texts = [one.text for one in verify(root, sound / "s").issues if one.subject == LAYER and one.severity == "error"]
    assert any("the scales were lost" in text for text in texts) and not any("SQNR" in text for text in texts)


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
