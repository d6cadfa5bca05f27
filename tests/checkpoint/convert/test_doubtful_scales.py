"""Test that scales which can hardly be right cause warnings: reciprocals, zeros under nonzero codes, and parts of fused
layers with different tensor scales.
"""

import json
from pathlib import Path

import gguf_files
import ml_dtypes
import numpy as np
import pytest
import synthetic
from changed_bytes import change

from fp4kit import quantize
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.table import MODELOPT_MXFP4
from fp4kit.checkpoint.model.statistics import LARGEST_REACH, doubt_about, reach_and_lost_blocks
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main

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
    found = [issue for issue in verify(root).issues if "far beyond trained weights" in issue.text]
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
    (warning,) = (text for text in make_plan(root, format=form).warnings if DIFFERENT in text)
    assert warning.startswith("vLLM ") and warning.count("(q_proj|k_proj|v_proj)") == 2
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
