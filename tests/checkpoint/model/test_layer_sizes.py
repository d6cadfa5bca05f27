"""Test that layers which lack rows or columns, tied heads that are quantized, and layers under two names are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import synthetic
from synthetic import refused
from together import together

from fp4kit.__main__ import main
from fp4kit.checkpoint import make_plan
from fp4kit.checkpoint.containers.config_entries import REFUSED
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.unlike_layers import misfits, named_twice
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.verify.verify import verify

E4M3, FOREIGN = np.dtype(ml_dtypes.float8_e4m3fn), Path(__file__).parents[2] / "data" / "foreign"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
CONFIG = {"model_type": "llama", "hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}}
SHAPES = {
    **{f"{ATTENTION}.{name}": shape for name, shape in (("q_proj", (96, 64)), ("o_proj", (64, 96)))},
    **{f"{ATTENTION}.{name}": (32, 64) for name in ("k_proj", "v_proj")},
    **{f"{MLP}.{name}": (128, 64) for name in ("gate_proj", "up_proj")},
    f"{MLP}.down_proj": (64, 128),
}


def fp8(shapes: dict[str, tuple[int, ...]]) -> synthetic.Tensors:
    """Return FP8 layers of the given shapes with one scale per layer, as compressed-tensors stores them."""
    found: synthetic.Tensors = {}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = synthetic.random(name, shape, 100.0, E4M3)
        found[f"{name}.weight_scale"] = np.array([0.001], np.float32)
    return found


def texts(root: Path) -> list[str]:
    """Return the warnings of a plan to decode a model. verify must give those about sizes, too."""
    plan = [text for text in make_plan(root, format="bf16").warnings if "another copy of the model" in text]
    found = [issue for issue in verify(root).issues if "another copy of the model" in issue.text]
    assert [issue.text for issue in found] == plan and {issue.severity for issue in found} <= {"warning"}
    return plan


@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_are_cut(layer: str, axis: int, tmp_path: Path) -> None:
    """FP8 codes fit their scale whatever rows or columns are missing; the neighbours show which layer lacks some."""
    shape = tuple(size - 16 * (i == axis) for i, size in enumerate(SHAPES[layer]))
    synthetic.write_model(tmp_path / "m", CONFIG, fp8(SHAPES | {layer: shape}))
    (text,) = texts(tmp_path / "m")
    blamed = f"{ATTENTION}.q_proj {[*SHAPES[f'{ATTENTION}.q_proj']]}" if layer.endswith("o_proj") and axis else ""
    what = ("rows", "columns")[axis]
    assert text.startswith(blamed or f"{layer} {[*shape]}: has {shape[axis]} {what}, but ")


@pytest.mark.parametrize(
    ("layer", "shape", "config"),
    [
        (f"{ATTENTION}.q_proj", (192, 64), {}),  # with a gate of the output
        (f"{ATTENTION}.v_proj", (16, 64), {"v_head_dim": 8}),
        (f"{ATTENTION}.o_proj", (64, 48), {"v_head_dim": 8}),
        (f"{ATTENTION}.k_proj", (32, 64), {"text_config": {"hidden_size": 64}}),
    ],
)
def test_sizes_that_models_have(layer: str, shape: tuple[int, ...], config: dict[str, Any], tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {**CONFIG, **config}, fp8(SHAPES | {layer: shape}))
    assert texts(tmp_path / "m") == []


def test_inspect_names_layers_that_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_model(tmp_path / "m", CONFIG, fp8(SHAPES | {f"{MLP}.up_proj": (112, 64)}))
    (text,) = texts(tmp_path / "m")
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [text]
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert f"warning: {MLP}.up_proj [112, 64]:" in capsys.readouterr().out


def test_a_transposed_layer_is_not_called_cut() -> None:
    shapes = SHAPES | {f"{MLP}.gate_proj": (64, 128)}
    weights = [Weight(name, f"{name}.weight", shape, None, {}) for name, shape in shapes.items()]
    assert misfits(weights, CONFIG) == []


def test_other_names_of_layers() -> None:
    """Layers of Mixtral and of GGUF files are compared as well."""
    for names in (("w1", "w3", "w2"), ("ffn_gate", "ffn_up", "ffn_down")):
        shapes = zip(names, ((128, 64), (112, 64), (64, 128)), strict=True)
        weights = [Weight(f"blk.0.{name}", f"blk.0.{name}.weight", shape, None, {}) for name, shape in shapes]
        assert [misfit.weight.name for misfit in misfits(weights, {})] == [f"blk.0.{names[1]}"]


def test_biases_of_another_length(tmp_path: Path) -> None:
    for count, expected in ((64, 0), (48, 1)):
        tensors = fp8(SHAPES) | {f"{ATTENTION}.o_proj.bias": np.zeros(count, np.float32)}
        synthetic.write_model(tmp_path / str(count), CONFIG, tensors)
        found = texts(tmp_path / str(count))
        assert len(found) == expected and all(
            f"{ATTENTION}.o_proj [64, 96]: has 64 rows, but" in text for text in found
        )


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_head_that_is_tied(nested: bool, tmp_path: Path) -> None:
    """convert warns of a quantized lm_head that engines ignore, and verify calls it an error."""
    tied = {"tie_word_embeddings": True}
    tensors = fp8({**SHAPES, "lm_head": (32, 64)})
    config = {**CONFIG, **({"text_config": tied} if nested else tied)}
    synthetic.write_model(tmp_path / "m", config, tensors)
    text = "lm_head: is quantized, but tie_word_embeddings in config.json is true"
    assert any(warning.startswith(text) for warning in make_plan(tmp_path / "m", format="bf16").warnings)
    (issue,) = (issue for issue in verify(tmp_path / "m").issues if issue.text.startswith(text))
    assert (issue.severity, issue.subject) == ("error", "config.json")
    synthetic.write_model(tmp_path / "untied", CONFIG | {"tie_word_embeddings": False}, tensors)
    synthetic.write_model(tmp_path / "plain", config, fp8(SHAPES) | {"lm_head.weight": synthetic.random("h", (32, 64))})
    for name in ("untied", "plain"):
        assert not any(text in issue.text for issue in verify(tmp_path / name).issues)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("e.0.w1", "e.0.gate_proj"), ["e.0.w1"]),
        (("e.0.w2", "e.0.down_proj", "e.0.w3", "e.0.up_proj"), ["e.0.w2", "e.0.w3"]),
        (("mlp.gate_up_proj", "mlp.up_proj"), ["mlp.gate_up_proj"]),
        (("a.qkv_proj", "a.k_proj"), ["a.qkv_proj"]),
        (("mlp.experts.down_proj", "mlp.experts.3.down_proj"), ["mlp.experts.down_proj"]),
        (("mlp.experts.down_proj", "mlp.experts.3.gate_proj"), []),
        (("e.0.w1", "e.1.gate_proj", "e.0.w2", "e.1.up_proj"), []),
    ],
)
def test_names_of_one_layer(names: tuple[str, ...], named: list[str]) -> None:
    assert [name for name, _ in named_twice(names)] == named


@pytest.mark.parametrize("is_quantized", [False, True])
def test_layers_under_two_names_are_refused(is_quantized: bool, tmp_path: Path) -> None:
    """w1 and gate_proj of one expert: convert, verify and inspect name the layer. Without one of them, all is well."""
    names = [f"{MLP}.experts.0.{name}" for name in ("w1", "w3", "w2", "gate_proj")]
    shapes = {name: (64, 64) for name in names}
    tensors = fp8(shapes) if is_quantized else {f"{n}.weight": synthetic.random(n, s) for n, s in shapes.items()}
    config = CONFIG if is_quantized else {"model_type": "mixtral"}
    synthetic.write_model(tmp_path / "m", config, tensors)
    text = f"is stored beside {MLP}.experts.0.gate_proj, another name of the same part of the model; remove one of them"
    with refused(text):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="bf16" if is_quantized else "compressed-tensors")
    assert any(text in issue.text for issue in verify(tmp_path / "m").issues if issue.severity == "error")
    assert [item.name for item in inspect_checkpoint(tmp_path / "m").items if item.group == REFUSED] == [
        f"{MLP}.experts.0.w1.weight"
    ]
    sound = {name: x for name, x in tensors.items() if "gate_proj" not in name}
    synthetic.write_model(tmp_path / "sound", config, sound)
    make_plan(tmp_path / "sound", "mxfp4-ocp", format="bf16" if is_quantized else "compressed-tensors")


@together("folder", [path.name for path in sorted(FOREIGN.iterdir()) if path.is_dir()])
def test_files_of_other_tools_fit(folder: str) -> None:
    model = inspect_checkpoint(FOREIGN / folder)
    assert misfits(model.weights.values(), model.config or {}) == []


@pytest.mark.parametrize("name", [*synthetic.MODELS, *synthetic.QUANTIZED])
def test_sound_models_fit(name: str, tmp_path: Path) -> None:
    {**synthetic.MODELS, **synthetic.QUANTIZED}[name](tmp_path / "m")
    model = inspect_checkpoint(tmp_path / "m")
    assert misfits(model.weights.values(), model.config or {}) == []
