"""Test that convert and verify name lost values, and scales that can hardly be right."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_files
import ml_dtypes
import numpy as np
import pytest
import synthetic
from changed_bytes import change

from fp4kit import Quantized, identify, quantize
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.table import MODELOPT_MXFP4
from fp4kit.checkpoint.model.model_files import load_manifest
from fp4kit.checkpoint.model.statistics import LARGEST_REACH, doubt_about, reach_and_lost_blocks
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.verify import VerifyReport
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
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
    """Pruned layers are written without a loss; verify warns of them, with the source and without."""
    zero = tuple(f"{name}.weight" for name in NAMES[:2])
    source = write(tmp_path / "m", 0.02, zero)
    for recipe, form in (("nvfp4-te", "modelopt"), ("mxfp4", "compressed-tensors"), ("fp8-modelopt", "mlx")):
        if form == "mlx":
            recipe = "nvfp4-mlx-cpu"
        made = tmp_path / form
        assert not convert(source, made, recipe, format=form).losses
        for report, text in ((verify(made, source), "as in the source"), (verify(made), "unless the layer was pruned")):
            zeros = [issue for issue in report.issues if "zero" in issue.text]
            assert [(i.severity, i.subject) for i in zeros] == [("warning", n) for n in NAMES[:2]]
            assert not errors(report) and all(text in issue.text for issue in zeros)


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


O_PROJ, DIFFERENT = "model.layers.0.self_attn.o_proj", "; fp4kit reconcile repairs it"
SCALE = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}


@pytest.fixture(params=SCALE)
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Convert a dense model to NVFP4 in each format of SCALE. Return (format, directory)."""
    synthetic.dense(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "m", f"nvfp4-{request.param}", format=request.param)
    return request.param, tmp_path / "m"


def test_reciprocals_are_doubted(quantized: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A tensor scale stored as its reciprocal is an error in convert and verify; convert warns if it is allowed."""
    form, root = quantized
    sound = convert(root, tmp_path / "sound", format="bf16")
    assert not sound.doubts and not any("scales allow" in issue.text for issue in verify(root).issues)
    change(root, f"{O_PROJ}.{SCALE[form]}", lambda scale: 1 / scale)
    for name, format in (("decoded", "bf16"), ("renamed", form)):
        with synthetic.refused(f"{O_PROJ}: its scales allow values up to"):
            make_plan(root, format=format)
        (doubt,) = convert(root, tmp_path / name, format=format, allow_loss=True).doubts
        assert doubt.startswith(O_PROJ) and "far beyond trained weights" in doubt
    found = [issue for issue in verify(root).issues if "above 1e+" in issue.text]
    assert [(issue.severity, issue.subject) for issue in found] == [("warning", O_PROJ)]
    assert (O_PROJ, "error") in {(issue.subject, issue.severity) for issue in verify(root).issues}
    assert main(["convert", str(root), str(tmp_path / "cli"), "--format", "bf16"]) == 2
    assert "--allow-loss converts the model as it is" in capsys.readouterr().err
    assert main(["convert", str(root), str(tmp_path / "cli"), "--format", "bf16", "--allow-loss"]) == 0
    assert f"warning: {doubt.split('.weight')[0]}" in capsys.readouterr().out
    assert main(["convert", str(root), str(tmp_path / "json"), "--format", "bf16", "--json", "--allow-loss"]) == 0
    assert any("far beyond" in text for text in json.loads(capsys.readouterr().out)["warnings"])


def test_zero_scales_are_doubted(quantized: tuple[str, Path], tmp_path: Path) -> None:
    """Blocks that are zero only because their scale is zero are counted in a warning."""
    form, root = quantized
    codes = f"{O_PROJ}.{'weight' if form == 'modelopt' else 'weight_packed'}"
    change(root, f"{O_PROJ}.weight_scale", lambda bits: np.where(np.arange(bits.size) < 3, 0, bits), np.uint8)
    assert convert(root, tmp_path / "out", format="bf16").doubts == (f"{codes}: {doubt_about(0, 3)}",)


def test_reciprocals_of_fp8_blocks_are_doubted(tmp_path: Path) -> None:
    synthetic.deepseek_fp8(tmp_path / "m")
    assert not convert(tmp_path / "m", tmp_path / "sound", format="bf16").doubts
    change(tmp_path / "m", "o_proj.weight_scale_inv", lambda scale: 1 / scale)
    doubts = convert(tmp_path / "m", tmp_path / "out", format="bf16").doubts
    assert doubts and all(".o_proj" in doubt for doubt in doubts)


def test_blocks_of_zeros_do_not_count() -> None:
    """A large scale is doubtful only over codes that are not zero."""
    scales, codes = np.array([[127, 254]], np.uint8), np.zeros((1, 32), np.uint8)
    codes[0, 0] = 7
    assert reach_and_lost_blocks(MODELOPT_MXFP4, codes, scales, None) == (6.0, 0)
    codes[0, 31] = 1
    assert reach_and_lost_blocks(MODELOPT_MXFP4, codes, scales, None)[0] == 6 * 2.0**127 > LARGEST_REACH


def test_parts_with_different_tensor_scales(quantized: tuple[str, Path], tmp_path: Path) -> None:
    """Codes that keep different tensor scales within a fused layer give a warning; reconcile makes it go away."""
    form, root = quantized
    assert not any(DIFFERENT in text for text in make_plan(root, format=form).warnings)
    change(root, f"q_proj.{SCALE[form]}", lambda scale: scale * 2)
    (text,) = (text for text in make_plan(root, format=form).warnings if DIFFERENT in text)  # one of both engines
    assert text.startswith("vLLM ") and ", SGLang " in text and text.count("(q_proj|k_proj|v_proj)") == 2
    assert not any(DIFFERENT in text for text in make_plan(root, format="bf16").warnings)
    convert(root, tmp_path / "out", format=form)
    reconcile(tmp_path / "out", tmp_path / "repaired")
    assert not any(DIFFERENT in text for text in make_plan(tmp_path / "repaired", format=form).warnings)


def test_reconcile_does_not_read_fp8_layers(tmp_path: Path) -> None:
    """FP8 layers with different scales per layer have no block scales to change; reconcile refuses them by name."""
    tensors: dict[str, np.ndarray] = {}
    for number, name in enumerate("qkv"):
        module = f"model.layers.0.self_attn.{name}_proj"
        tensors[f"{module}.weight"] = synthetic.random(module, (64, 64), dtype=np.dtype(ml_dtypes.float8_e4m3fn))
        tensors[f"{module}.weight_scale"] = np.array(0.01 * (number + 1), np.float32)
    synthetic.write_model(tmp_path / "m", {"quantization_config": {"quant_method": "fp8"}}, tensors)
    with synthetic.refused("has no layer in NVFP4 of Model-Optimizer or compressed-tensors"):
        reconcile(tmp_path / "m", None)


def test_scales_of_gguf_layers(tmp_path: Path) -> None:
    """A negative .scale is an error in verify; a missing one is named if the other layers have one."""
    gguf_files.write_model(tmp_path / "src.gguf")
    convert(tmp_path / "src.gguf", tmp_path / "q.gguf", "nvfp4-te")
    assert not verify(tmp_path / "q.gguf").issues
    data = (tmp_path / "q.gguf").read_bytes()
    (tmp_path / "lost.gguf").write_bytes(data.replace(b"blk.0.attn_q.scale", b"blk.0.attn_q.scalf"))
    other = "blk.0.attn_q: no tensor scale, but 12 of 13 NVFP4 layers have one"
    ignore = ["blk.0.attn_q.scalf"]
    with synthetic.refused("blk.0.attn_q: no tensor scale other than 1, although block scales reach"):
        make_plan(tmp_path / "lost.gguf", format="bf16", ignore=ignore)
    plan = make_plan(tmp_path / "lost.gguf", format="bf16", ignore=ignore, allow_loss=True)
    assert any(other in text for text in plan.warnings)
    assert any(other in issue.text for issue in verify(tmp_path / "lost.gguf", ignore=ignore).issues)
    at = _position_of_scale(tmp_path / "q.gguf")
    (tmp_path / "turned.gguf").write_bytes(data[: at + 3] + bytes([data[at + 3] | 128]) + data[at + 4 :])
    found = [issue for issue in verify(tmp_path / "turned.gguf").issues if issue.severity == "error"]
    assert [issue.subject for issue in found] == ["blk.0.attn_q"] and "a positive finite number" in found[0].text


def test_one_layer_of_mlx_with_a_tensor_scale(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(3):
        module = f"model.layers.{layer}.mlp.down_proj"
        q = quantize(synthetic.random(module, (64, 64)), "nvfp4-mlx-cpu")
        tensors |= {f"{module}.weight": q.packed.view(np.uint32), f"{module}.scales": q.block_scale}
    config = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    synthetic.write_model(tmp_path / "m", config, tensors)
    assert not make_plan(tmp_path / "m", format="bf16").warnings
    tensors["model.layers.1.mlp.down_proj.global_scale"] = np.array(3, np.float32)
    synthetic.write_model(tmp_path / "other", config, tensors)
    (text,) = make_plan(tmp_path / "other", format="bf16").warnings
    assert text.startswith("model.layers.1.mlp.down_proj: has a tensor scale, but 2 of 3 NVFP4 layers have none; if")


def _position_of_scale(path: Path) -> int:
    """Return the position of the tensor scale of blk.0.attn_q in a GGUF file."""
    entries = {entry.name: entry for file in make_plan(path, format="bf16").source.files for entry in file.entries}
    return entries["blk.0.attn_q.scale"].start
