"""Test convert --codes, by which a GGUF file takes the codes of a quantized directory, or the reverse.

Codes are copied byte for byte, or the request is rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from borrowed_codes import MODULE_NAMES, directory, out_bytes, stored
from gguf_files import EXPERTS
from synthetic import refused

from fp4kit.checkpoint import ConversionReport, Wishes, convert, make_plan
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.cli import main
from fp4kit.layouts import pack_gguf
from fp4kit.storage.gguf_file import read_gguf

pytest.importorskip("gguf")


def taken(source: Path, codes: Path, **options: Any) -> ConversionReport:
    return convert(source, source.with_name("out.gguf"), codes=codes, **options)


CODES = {"modelopt": (".weight", ".weight_scale_2"), "compressed-tensors": (".weight_packed", ".weight_global_scale")}


@pytest.mark.parametrize(
    ("recipe", "format"),
    [("nvfp4-te", "modelopt"), ("nvfp4-te", "compressed-tensors"), ("mxfp4-ocp", "compressed-tensors")],
)
def test_codes_and_scales_are_those_of_the_directory(recipe: str, format: str, tmp_path: Path) -> None:
    """convert --codes gives every layer of a GGUF file the codes and scales that the directory has for it.

    Divisors are inverted. All other tensors stay as they are.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, recipe, format)
    report = taken(tmp_path / "m.gguf", tmp_path / "q", recipe=recipe)
    parts, kind = stored(tmp_path / "q"), recipe.partition("-")[0]
    assert set(report.actions) == {"rename", "copy"}
    seen = 0
    for entry in read_gguf(tmp_path / "out.gguf").entries:
        raw = out_bytes(tmp_path / "out.gguf", entry.name)
        if entry.dtype != kind.upper():
            assert entry.name.endswith(".scale") or raw == tensors[entry.name].tobytes()
            continue
        _, layer, leaf, _ = entry.name.split(".")
        prefix = f"model.layers.{layer}.{MODULE_NAMES[leaf.removesuffix('_exps')]}"
        stack = leaf.endswith("_exps")
        modules = [prefix.replace("mlp.", f"mlp.experts.{e}.") for e in range(EXPERTS)] if stack else [prefix]
        weight, scale = CODES[format]
        blocks = [pack_gguf(parts[module + weight], parts[f"{module}.weight_scale"], kind) for module in modules]
        assert raw == b"".join(block.tobytes() for block in blocks)
        if kind == "nvfp4":
            factors = np.float32([parts[module + scale].reshape(()) for module in modules])
            factors = np.float32(1) / factors if format == "compressed-tensors" else factors
            assert out_bytes(tmp_path / "out.gguf", entry.name.replace("weight", "scale")) == factors.tobytes()
        seen += 1
    assert seen == (14 if kind == "mxfp4" else 13)
    found = compare_checkpoints(tmp_path / "m.gguf", tmp_path / "out.gguf").layers
    assert len(found) == 11 + EXPERTS * (seen - 11) and all(layer.sqnr_db > 15 for layer in found)


def test_the_recipe_is_recorded_that_made_the_codes(tmp_path: Path) -> None:
    """A GGUF file that takes the codes of a directory records the recipe that the directory records.

    This may be another one than the recipe of the command, which only names the format. If none is known, the file
    records none.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, "nvfp4-torchao")
    taken(tmp_path / "m.gguf", tmp_path / "q")
    assert read_gguf(tmp_path / "out.gguf").metadata["fp4kit.recipe"] == "nvfp4-torchao"
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "modelopt"}}))
    convert(tmp_path / "m.gguf", tmp_path / "other.gguf", codes=tmp_path / "q")
    assert "fp4kit.recipe" not in read_gguf(tmp_path / "other.gguf").metadata


@pytest.mark.parametrize("format", CODES)
def test_input_scales_go_along(format: str, tmp_path: Path) -> None:
    """A GGUF file that takes the codes of a directory takes its input scales, too. Divisors are inverted."""
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, format=format, input_scale=0.5)
    taken(tmp_path / "m.gguf", tmp_path / "q")
    for name, experts in (("blk.0.attn_q", 1), ("blk.1.ffn_up_exps", EXPERTS)):
        scales = np.full(experts, 0.5, np.float32)
        assert out_bytes(tmp_path / "out.gguf", f"{name}.input_scale") == scales.tobytes()


def test_tensors_that_the_directory_has_not_quantized_stay(tmp_path: Path) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, wishes=Wishes(keep=("*.o_proj", "*.experts.2.*")))
    plan = make_plan(tmp_path / "m.gguf", codes=tmp_path / "q")
    reasons = {tensor.name: tensor.reason for tensor in plan.tensors if tensor.action == "copy"}
    for name in ("blk.0.attn_output.weight", "blk.1.ffn_up_exps.weight"):  # stacks are taken as a whole
        assert reasons[name] == "not quantized in the --codes model"
    assert reasons["blk.1.ffn_gate_inp.weight"] == "MoE router" and len(plan.converted) == 9


def test_mxfp4_codes_become_nvfp4_without_a_loss(tmp_path: Path) -> None:
    """A GGUF file in NVFP4 takes the MXFP4 codes of a directory after a cast without loss; in MXFP4, it keeps them."""
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, "mxfp4-ocp", "compressed-tensors")
    report = taken(tmp_path / "m.gguf", tmp_path / "q", recipe="nvfp4-te")
    assert report.actions["cast"] == 11 + 2 * EXPERTS and not report.inexact
    taken_again = convert(tmp_path / "m.gguf", tmp_path / "mx.gguf", codes=tmp_path / "q")
    assert taken_again.actions["rename"] == 11 + 3 * EXPERTS
    for layer in compare_checkpoints(tmp_path / "mx.gguf", tmp_path / "out.gguf").layers:
        assert "down_exps" in layer.name or layer.sqnr_db == np.inf


def test_experts_that_are_exchanged_are_refused(tmp_path: Path) -> None:
    tensors = gguf_files.model()
    directory(tmp_path / "q", tensors)
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][::-1]
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in tensors.items()})
    with refused("blk.1.ffn_up_exps.weight: model.layers.1.mlp.experts.0.up_proj decodes to other values"):
        taken(tmp_path / "m.gguf", tmp_path / "q")


def test_invalid_requests_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors)
    with refused("none of its quantized layers (none in MXFP4 or NVFP4) is in"):
        taken(tmp_path / "m.gguf", tmp_path / "plain")
    with refused("--codes: needs one GGUF file and one model directory; source and --codes are of the same kind"):
        convert(tmp_path / "plain", tmp_path / "out", codes=tmp_path / "q")
    gguf_files.write_model(tmp_path / "x.gguf", **{"general.architecture": "none"})
    with refused("--codes: the gguf package does not know the architecture 'none'; update gguf"):
        taken(tmp_path / "x.gguf", tmp_path / "q")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with refused('--codes: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'):
        taken(tmp_path / "m.gguf", tmp_path / "q")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors)
    arguments = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out.gguf"), "--codes", str(tmp_path / "q")]
    assert main([*arguments, "--dry-run"]) == 0 and main(arguments) == 0
    assert f"layers: {11 + 2 * EXPERTS} rename" in capsys.readouterr().out
