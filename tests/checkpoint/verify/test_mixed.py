"""Test that verify checks the NVFP4 layers of checkpoints in which FP8 layers outnumber them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic
from changed_bytes import change

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.verify.verify import verify

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
