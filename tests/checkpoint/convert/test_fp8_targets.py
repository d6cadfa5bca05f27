"""Test conversions to FP8, with one scale per layer or per row, in the containers of two tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from oracle import load
from synthetic import BF16, refused

import fp4kit
from fp4kit.__main__ import main
from fp4kit.checkpoint import Rules, convert_tensors
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify

TENSOR, ROWS = "fp8-modelopt", "fp8-modelopt-channel"
UP, GATE = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"
# (recipe, format, options): (container, shape of the scales of up_proj)
TARGETS: dict[tuple[str, str, tuple[tuple[str, float], ...]], tuple[str, tuple[int, ...]]] = {
    (TENSOR, "compressed-tensors", ()): ("compressed-tensors FP8", (1,)),
    (ROWS, "compressed-tensors", ()): ("compressed-tensors FP8 per row", (80, 1)),
    (ROWS, "modelopt", ()): ("modelopt FP8 per row", (80,)),
    (TENSOR, "modelopt", (("input_scale", 0.5),)): ("modelopt FP8", ()),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the small dense model once, and return its directory."""
    root = tmp_path_factory.mktemp("model") / "m"
    synthetic.dense(root)
    return root


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_bytes_verify_and_decode(model: Path, tmp_path: Path, target: Any) -> None:
    """Codes and scales are those of quantize; verify is clean, and decoded values are code * scale."""
    recipe, format, options = target
    name, shape = TARGETS[target]
    convert(model, tmp_path / "out", recipe, format=format, **dict(options))
    stored, source = load(tmp_path / "out"), oracle.arrays(load(model))
    x = source[f"{UP}.weight"]
    amax = max(float(np.abs(source[f"{one}.weight"].astype(np.float32)).max()) for one in (UP, GATE))
    q = fp4kit.quantize(x, recipe, tensor_amax=None if recipe == ROWS else np.float32(amax))
    scale = np.asarray(q.tensor_scale, np.float32)
    assert stored[f"{UP}.weight"] == ("F8_E4M3", x.shape, np.asarray(q.packed).tobytes())
    assert stored[f"{UP}.weight_scale"] == ("F32", shape, scale.tobytes())
    assert (f"{UP}.input_scale" in stored) == bool(options)
    report = verify(tmp_path / "out", model)
    assert report.clean and report.formats == (name,) and report.recipe == recipe
    assert all(layer.compared and not layer.differing for layer in report.layers)
    convert(tmp_path / "out", tmp_path / "back", format="bf16")
    codes = np.asarray(q.packed).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = (codes * (scale.reshape(-1, 1) if scale.size > 1 else scale)).astype(BF16)
    assert load(tmp_path / "back")[f"{UP}.weight"][2] == values.tobytes()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_identify_names_the_recipe(model: Path, tmp_path: Path, target: Any, capsys: Any) -> None:
    recipe, format, options = target
    convert(model, tmp_path / "out", recipe, format=format, **dict(options))
    assert main(["identify", str(tmp_path / "out"), "--source", str(model)]) == 0
    assert f"{recipe} (Model-Optimizer) made 14 layers" in capsys.readouterr().out


def test_verify_finds_a_changed_byte(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", ROWS, format="modelopt")
    checkpoint = inspect_checkpoint(tmp_path / "out")
    file, entry = checkpoint.tensors[f"{UP}.weight_scale"]
    with file.path.open("r+b") as stream:
        stream.seek(entry.start + 5)
        stream.write(b"\x01")
    report = verify(tmp_path / "out", model)
    assert {layer.name for layer in report.layers if layer.differing} == {UP}


def test_configs(model: Path, tmp_path: Path) -> None:
    """The configs declare one scale per layer or channel, and how inputs are quantized."""

    def config(recipe: str, format: str, **options: Any) -> dict[str, Any]:
        out = tmp_path / f"{recipe}-{format}-{len(options)}"
        convert(model, out, recipe, format=format, **options)
        found: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
        return found

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    for recipe, strategy in ((TENSOR, "tensor"), (ROWS, "channel")):
        found = config(recipe, "compressed-tensors")
        (group,) = found["config_groups"].values()
        assert found["format"] == group["format"] == "float-quantized"
        assert group["weights"] == {**fp8, "strategy": strategy, "dynamic": False}
        assert group["input_activations"] == {**fp8, "strategy": "token", "dynamic": True}
    (group,) = config(TENSOR, "compressed-tensors", input_scale=1.0)["config_groups"].values()
    assert group["input_activations"] == {**fp8, "strategy": "tensor", "dynamic": False}
    assert config(ROWS, "modelopt")["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert config(TENSOR, "modelopt", input_scale=1.0)["quant_algo"] == "FP8"


def test_the_default_format(model: Path, tmp_path: Path) -> None:
    assert convert(model, tmp_path / "out", ROWS).plan.format_name == "compressed-tensors FP8 per row"


def test_modelopt_needs_input_scales(model: Path, tmp_path: Path) -> None:
    with refused("input scale: Model-Optimizer's FP8 layers have one"):
        convert(model, tmp_path / "out", TENSOR, format="modelopt")
    with refused("input scale: fp8-modelopt-channel has no input scale"):
        convert(model, tmp_path / "out", ROWS, format="modelopt", input_scale=1.0)


@pytest.mark.parametrize("format", ["mlx", "comfy", "gpt-oss", "sglang-mxfp8"])
def test_formats_without_fp8(model: Path, tmp_path: Path, format: str) -> None:
    with refused("fp8"):
        convert(model, tmp_path / "out", ROWS, format=format)


def test_renames_keep_codes_and_scales(model: Path, tmp_path: Path) -> None:
    """Between the two tools' containers, codes and float32 scales are kept; verify still knows the recipe."""
    convert(model, tmp_path / "ct", ROWS, format="compressed-tensors")
    report = convert(tmp_path / "ct", tmp_path / "mo", ROWS, format="modelopt")
    assert report.actions["rename"] == 14
    ct, mo = load(tmp_path / "ct"), load(tmp_path / "mo")
    assert mo[f"{UP}.weight"] == ct[f"{UP}.weight"] and mo[f"{UP}.weight_scale"][2] == ct[f"{UP}.weight_scale"][2]
    assert verify(tmp_path / "mo", model).clean
    with refused("is already quantized as compressed-tensors FP8 per row"):
        convert(tmp_path / "ct", tmp_path / "x", TENSOR, format="compressed-tensors")


def test_scales_of_16_bits(tmp_path: Path) -> None:
    """compressed-tensors rounds values to the dtype of its scales, so 16-bit scales keep their dtype, or are refused.

    Model-Optimizer does not round, so its container cannot hold such a layer without a change of values.
    """
    codes = np.arange(64 * 32, dtype=np.uint8).reshape(64, 32) & 0x3F
    scales = np.exp(synthetic.random("s", (64, 1), 1.0, np.dtype(np.float32))).astype(BF16)
    tensors = {"mlp.down_proj.weight": codes.view(ml_dtypes.float8_e4m3fn), "mlp.down_proj.weight_scale": scales}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }
    path.write_text(json.dumps(config))
    convert(tmp_path / "m", tmp_path / "ct", ROWS, format="compressed-tensors")
    assert load(tmp_path / "ct")["mlp.down_proj.weight_scale"] == ("BF16", (64, 1), scales.tobytes())
    for one in ("m", "ct"):
        convert(tmp_path / one, tmp_path / f"{one}-bf16", format="bf16")
    assert load(tmp_path / "m-bf16") == load(tmp_path / "ct-bf16")
    with refused("is already quantized as compressed-tensors FP8 per row"):
        convert(tmp_path / "m", tmp_path / "mo", ROWS, format="modelopt")


def test_zeros_and_infinities(tmp_path: Path) -> None:
    """Rows and layers of zeros have scales that every engine can use; an infinity is refused by default."""
    x = synthetic.random("w", (32, 64))
    x[3] = 0
    tensors = {"mlp.down_proj.weight": x, "mlp.o_proj.weight": np.zeros((32, 64), BF16)}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    for recipe in (TENSOR, ROWS):
        convert(tmp_path / "m", tmp_path / recipe, recipe, format="compressed-tensors")
        assert verify(tmp_path / recipe, tmp_path / "m").clean
        stored = oracle.arrays(load(tmp_path / recipe))
        for name in ("down_proj", "o_proj"):
            assert (stored[f"mlp.{name}.weight_scale"] >= np.finfo(np.float32).tiny).all()
    x[0, 0] = np.inf
    synthetic.write_model(tmp_path / "inf", {"model_type": "llama"}, tensors)
    with refused("1 of 2048 values are NaN or infinite"):
        convert(tmp_path / "inf", tmp_path / "x", ROWS)
    convert(tmp_path / "inf", tmp_path / "y", ROWS, nonfinite="saturate")
    assert verify(tmp_path / "y", tmp_path / "inf").errors == 0


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_tensors_in_memory(model: Path, tmp_path: Path, target: Any) -> None:
    """convert_tensors yields what convert writes."""
    recipe, format, options = target
    convert(model, tmp_path / "out", recipe, format=format, **dict(options))
    config = json.loads((model / "config.json").read_text())
    rules = Rules.of(recipe, format=format, config=config, **dict(options))
    found = dict(convert_tensors(oracle.arrays(load(model)).items(), rules))
    stored = load(tmp_path / "out")
    assert {name: x.tobytes() for name, x in found.items()} == {name: data for name, (_, _, data) in stored.items()}
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        name: shape for name, (_, shape, _) in stored.items()
    }
