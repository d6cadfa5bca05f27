"""Test that verify names the fault of a layer that differs from its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import synthetic
from changed_bytes import change

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.verify.verify import verify
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
    tensors = {
        f"{module}.weight": synthetic.random(module, (SIZE, SIZE), 0.02 + i / 100) for i, module in enumerate(modules)
    }
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
