"""Test that lost values are errors of convert and verify, with their true cause: blocks that underflow, codes or scales
that are zero in the file alone, and layers that are far noisier than their format. A layer that is zero in the source
is no fault.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import synthetic
from changed_bytes import change

from fp4kit import Quantized, identify, quantize
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.model.model_files import load_manifest
from fp4kit.checkpoint.verify.verify import VerifyReport, verify
from fp4kit.cli import main

NAMES = [f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")]
UNDERFLOW, NOISY = "because their scales underflow", "below what"


def write(root: Path, std: float, zero: tuple[str, ...] = ()) -> Path:
    """Write a model of six layers whose values have the standard deviation ``std``, or are zero; return its path."""
    tensors = {f"{name}.weight": synthetic.random(name, (128, 128), std, np.dtype("f4")) for name in NAMES}
    synthetic.write_model(root, {"model_type": "llama"}, {n: x * (n not in zero) for n, x in tensors.items()})
    return root


def errors(report: VerifyReport) -> set[tuple[str, str]]:
    """Return (subject, text) of the errors of a report."""
    return {(issue.subject, issue.text) for issue in report.issues if issue.severity == "error"}


# (recipe, format, standard deviation of the weights, phrase of the error; "" if the format holds the values)
ENDS = [
    ("nvfp4-mlx-cpu", "mlx", 2e-2, ""),
    ("nvfp4-mlx-cpu", "mlx", 2e-3, UNDERFLOW),
    ("nvfp4-mlx-cpu", "mlx", 2e-4, UNDERFLOW),
    ("nvfp4-mlx-cpu", "mlx", 1e6, NOISY),
    ("nvfp4-torchao-single", "mlx", 2e-4, UNDERFLOW),
    ("nvfp4-te", "modelopt", 2e-4, ""),
    ("nvfp4-te", "compressed-tensors", 1e37, ""),
    ("nvfp4-te", "modelopt", 1e-38, "tensor scale is"),
    ("nvfp4-comfy-kitchen", "comfy", 1e-37, "tensor scale is"),
    ("mxfp4", "compressed-tensors", 1e-37, ""),
    ("mxfp4", "compressed-tensors", 1e-39, NOISY),
    ("mxfp4", "mlx", 1e-39, NOISY),
    ("mxfp8-te", "modelopt", 1e-39, ""),
    ("fp8-modelopt", "compressed-tensors", 2e-4, ""),
    ("fp8-modelopt", "compressed-tensors", 1e-36, UNDERFLOW),
    ("fp8-modelopt-channel", "modelopt", 1e-38, UNDERFLOW),
    ("fp8-transformers-block", "fp8", 1e-38, "not positive normal float32"),
]


@pytest.mark.parametrize(("recipe", "form", "std", "phrase"), ENDS)
def test_values_at_the_ends_of_a_format(recipe: str, form: str, std: float, phrase: str, tmp_path: Path) -> None:
    """verify accepts what convert accepts, and rejects what convert writes only with allow_loss."""
    source, made = write(tmp_path / "m", std), tmp_path / "q"
    if not phrase:
        assert not convert(source, made, recipe, format=form).losses and not errors(verify(made, source))
        return
    with synthetic.refused(phrase):
        convert(source, made, recipe, format=form)
    assert not made.exists() and not [*tmp_path.glob(".*")]  # nothing is left of the result
    if phrase not in (UNDERFLOW, NOISY):  # scales that no loader can use, whatever the user allows
        with synthetic.refused(phrase):
            convert(source, made, recipe, format=form, allow_loss=True)
        return
    report = convert(source, made, recipe, format=form, allow_loss=True)
    assert len(report.losses) == len(NAMES) and all(phrase in text for text in report.losses)
    assert {name for name, text in errors(verify(made, source)) if phrase in text} == {*NAMES}
    assert (load_manifest(made) or {})["request"]["allow_loss"]


def test_gguf_and_a_cast_at_the_ends_of_their_formats(tmp_path: Path) -> None:
    """GGUF's NVFP4 without tensor scale, and MXFP4 whose exponents NVFP4 cannot hold, are treated alike."""
    tensors = gguf_files.model(np.dtype("f4"), experts=False)
    for std, lost in ((1.0, False), (2e-3, True)):
        scaled = {name: gguf_files.plain((x * std).astype("f4")) for name, x in tensors.items()}
        gguf_files.write(tmp_path / f"{std}.gguf", scaled, {"tokenizer.ggml.tokens": ["a"]})
        if not lost:
            assert not convert(tmp_path / f"{std}.gguf", tmp_path / "sound.gguf", "nvfp4-gguf").losses
            continue
        with synthetic.refused(UNDERFLOW):
            convert(tmp_path / f"{std}.gguf", tmp_path / "q.gguf", "nvfp4-gguf")
        assert not (tmp_path / "q.gguf").exists()
        assert convert(tmp_path / f"{std}.gguf", tmp_path / "q.gguf", "nvfp4-gguf", allow_loss=True).losses
        found = {text for _, text in errors(verify(tmp_path / "q.gguf", tmp_path / f"{std}.gguf"))}
        assert any(UNDERFLOW in text for text in found)


def test_layers_that_are_zero_in_the_source_are_no_fault(tmp_path: Path) -> None:
    """Pruned layers are written without a loss; verify without the source can only warn."""
    zero = tuple(f"{name}.weight" for name in NAMES[:2])
    source = write(tmp_path / "m", 0.02, zero)
    for recipe, form in (("nvfp4-te", "modelopt"), ("mxfp4", "compressed-tensors"), ("fp8-modelopt", "mlx")):
        if form == "mlx":
            recipe = "nvfp4-mlx-cpu"
        made = tmp_path / form
        assert not convert(source, made, recipe, format=form).losses
        assert not errors(verify(made, source)) and not [i for i in verify(made, source).issues if "zero" in i.text]
        alone = [issue for issue in verify(made).issues if "zero" in issue.text]
        assert [(i.severity, i.subject) for i in alone] == [("warning", n) for n in NAMES[:2]]
        assert all("unless the layer was pruned" in issue.text for issue in alone)


def _empty(codes: np.ndarray) -> np.ndarray:
    return np.zeros_like(codes)


def _without_last_block(scales: np.ndarray) -> np.ndarray:
    return np.where(np.arange(8) == 7, 0, scales.reshape(-1, 8)).reshape(-1)


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "mxfp4"])
@pytest.mark.parametrize("with_source", [True, False])
def test_codes_that_were_lost(form: str, with_source: bool, tmp_path: Path) -> None:
    """All codes of a layer are zero under sound scales. The cause is never said to be underflow."""
    source, made = write(tmp_path / "m", 0.02), tmp_path / "q"
    recipe, form = ("mxfp4", "compressed-tensors") if form == "mxfp4" else ("nvfp4-te", form)
    convert(source, made, recipe, format=form)
    suffix = "weight" if form == "modelopt" else "weight_packed"
    change(made, f"{NAMES[1]}.{suffix}", _empty, np.uint8)
    report = verify(made, source if with_source else None)
    texts = [text for name, text in errors(report) if name == NAMES[1]]
    assert any("codes were lost" in text for text in texts)
    assert any(("although the source is not zero" if with_source else "scales that differ") in text for text in texts)
    assert not any("underflow" in issue.text for issue in report.issues)
    with synthetic.refused("all codes are zero under block scales that differ"):
        convert(made, tmp_path / "bf16", format="bf16")
    assert convert(made, tmp_path / "bf16", format="bf16", allow_loss=True).doubts


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_the_last_block_of_each_row_was_dropped(form: str, tmp_path: Path) -> None:
    """Scales that are zero in one column of blocks are errors, with and without zero codes, with and without source."""
    source = write(tmp_path / "m", 0.02)
    convert(source, tmp_path / "q", "nvfp4-te", format=form)
    change(tmp_path / "q", f"{NAMES[0]}.weight_scale", _without_last_block, np.uint8)
    assert any(name == NAMES[0] and "scales were lost" in text for name, text in errors(verify(tmp_path / "q", source)))
    alone = [text for name, text in errors(verify(tmp_path / "q")) if name == NAMES[0]]
    assert any("zero in all rows of some columns" in text for text in alone)
    codes = "weight" if form == "modelopt" else "weight_packed"
    change(tmp_path / "q", f"{NAMES[0]}.{codes}", lambda c: np.where(np.arange(c.size) % 64 >= 56, 0, c), np.uint8)
    assert any(name == NAMES[0] and "scales were lost" in text for name, text in errors(verify(tmp_path / "q", source)))


def test_a_lost_expert_of_a_stack_is_named(tmp_path: Path) -> None:
    synthetic.gpt_oss_mxfp4(tmp_path / "m")
    name = "model.layers.0.mlp.experts.down_proj"

    def one(codes: np.ndarray) -> np.ndarray:
        found = codes.reshape(4, -1).copy()
        found[2] = 0
        return found.reshape(-1)

    change(tmp_path / "m", f"{name}_blocks", one, np.uint8)
    assert (f"{name}[2]", "all codes are zero under block scales that differ, so the codes were lost") in errors(
        verify(tmp_path / "m")
    )


def test_identify_says_that_codes_or_scales_are_zero(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    x = synthetic.random("x", (64, 128), dtype=np.dtype("f4"))
    q = quantize(x, "nvfp4-te")
    parts = np.asarray(q.packed), np.array(q.block_scale), np.asarray(q.tensor_scale)
    empty = Quantized.from_parts(np.zeros_like(parts[0]), *parts[1:], recipe="nvfp4-te")
    assert identify(empty, x).verdict.startswith("all codes are zero, although x is not; nearest is")
    parts[1][:, -1] = 0
    assert identify(Quantized.from_parts(*parts, recipe="nvfp4-te"), x).fault.startswith("scales are zero in 64 of 512")
    zeros = quantize(0 * x, "nvfp4-te")
    assert not identify(zeros, 0 * x).fault and not identify(q, x).fault
    source, made = write(tmp_path / "m", 0.02), tmp_path / "q"
    convert(source, made, "nvfp4-te", format="modelopt")
    change(made, f"{NAMES[1]}.weight", _empty, np.uint8)
    for arguments in ([], ["--source", str(source)]):
        assert main(["identify", str(made), *arguments]) == 1
        assert "all codes are zero" in capsys.readouterr().out


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A loss ends with exit code 2 and leaves nothing; --allow-loss writes the result, warns, and records itself."""
    source = write(tmp_path / "m", 2e-4)
    arguments = ["convert", str(source), str(tmp_path / "q"), "--recipe", "nvfp4-mlx-cpu", "--format", "mlx"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert UNDERFLOW in said and "--allow-loss" in said and NAMES[0] in said
    assert main([*arguments, "--dry-run", "--quiet"]) == 0  # the values are read by the run alone
    assert main([*arguments, "--allow-loss", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["lost"]) == len(NAMES)
    assert main(["verify", str(tmp_path / "q")]) == 1
    assert "the weights were lost" in capsys.readouterr().out
