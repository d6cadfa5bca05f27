"""Test commands on one .safetensors file in place of a model directory."""

from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main

FORMATS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-te", "compressed-tensors"),
    ("nvfp4-te", "comfy"),
    ("mxfp8", "modelopt"),
    ("mxfp8", "comfy"),
    ("mxfp4", "compressed-tensors"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {
        "blocks.0.qkv.weight": synthetic.random("qkv", (64, 128)),
        "blocks.0.norm.weight": np.ones(128, np.float32),
    }
    synthetic.write_file(tmp_path / "source.safetensors", tensors)
    return tmp_path / "source.safetensors"


def _values(path: Path) -> np.ndarray:
    file, entry = open_source(path).tensors["blocks.0.qkv.weight"]
    return np.fromfile(file.path, np.uint16, entry.nbytes // 2, offset=entry.start)


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_file_becomes_a_file_that_is_read_again(source: Path, recipe: str, format: str) -> None:
    quantized, decoded = source.with_name("q.safetensors"), source.with_name("d.safetensors")
    convert(source, quantized, recipe, format=format)
    assert quantized.is_file()
    report = verify(quantized, source)
    assert report.clean and report.recipe == fp4kit.recipe(recipe).id
    assert [layer.differing for layer in report.layers] == [0]
    convert(quantized, decoded, format="bf16")
    whole = np.fromfile(source, np.uint8)  # the values that fp4kit.quantize and dequantize give
    assert whole.size and decoded.is_file()
    stored = synthetic.random("qkv", (64, 128))
    expected = fp4kit.dequantize(fp4kit.quantize(stored, recipe)).astype(stored.dtype).view(np.uint16)
    assert np.array_equal(_values(decoded), expected.reshape(-1))


def test_file_becomes_a_directory(source: Path) -> None:
    destination = source.with_name("directory")
    convert(source, destination, format="modelopt")
    assert {path.name for path in destination.iterdir()} >= {source.name, "config.json", "fp4kit_manifest.json"}
    assert verify(destination, source).clean


def test_other_commands_read_a_file(source: Path) -> None:
    quantized = source.with_name("q.safetensors")
    convert(source, quantized, format="modelopt")
    assert identify_checkpoint(quantized, source).layers
    assert not reconcile(quantized, None).repairs
    assert compare_checkpoints(quantized, quantized).equal
    assert [*inspect_checkpoint(quantized).layers] == ["blocks.0.qkv"]


def test_identify_names_comfy_kitchen_or_the_recorded_recipe_first(source: Path) -> None:
    for recipe in ("nvfp4-comfy-kitchen", "mxfp8-comfy-kitchen", "mxfp8-te"):
        path = source.with_name(f"{recipe}.safetensors")
        convert(source, path, recipe, format="comfy")
        recorded = identify_checkpoint(path, source)
        assert recorded.recipe == recipe and recorded.is_clean and len(recorded.recipes) > 2
        path.write_bytes(path.read_bytes().replace(b"fp4kit.recipe", b"fp4kit.other "))
        own = identify_checkpoint(path, source)
        assert own.recipe == f"{recipe.partition('-')[0]}-comfy-kitchen" and {*own.recipes} == {*recorded.recipes}
        assert own.short_sentence.startswith(f"{own.recipe} (ComfyUI) or ")


def test_what_the_config_would_say_is_printed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source.with_name("q.safetensors")), "--format", "modelopt"]) == 0
    assert '"quant_algo": "W4A16_NVFP4"' in capsys.readouterr().out
    assert main(["convert", str(source), str(source.with_name("c.safetensors")), "--format", "comfy"]) == 0
    assert "config.json" not in capsys.readouterr().out


def test_files_that_are_refused(source: Path, tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    with refused("pass its directory"):
        open_source(tmp_path / "m" / "model.safetensors")
    with refused("a model directory becomes a directory; name one without .safetensors"):
        convert(tmp_path / "m", tmp_path / "q.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(source.read_bytes())
    with refused("pass its directory"):
        open_source(tmp_path / "model-00001-of-00002.safetensors")


def test_file_beside_another_model(source: Path, tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    beside = tmp_path / "m" / "other.safetensors"
    beside.write_bytes(source.read_bytes())
    assert [*open_source(beside).tensors] == [*open_source(source).tensors]
