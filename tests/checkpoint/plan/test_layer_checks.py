"""Test that layers are not quantized if a reader could not read the result, or if the axes of a stack are unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import Rules, convert, convert_tensors, make_plan
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify

O_PROJ, EXPERTS = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts"


def model(root: Path, tensors: synthetic.Tensors) -> Path:
    """Write a model of experts with the given tensors, and return its directory."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1}
    synthetic.write_model(root, {**config}, tensors)
    return root


def stacks(gate_up: tuple[int, ...], down: tuple[int, ...]) -> synthetic.Tensors:
    """Return two stacks of experts of the given shapes."""
    shapes = {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}
    return {name: synthetic.random(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["weight_quantizer._amax", "input_quantizer._pre_quant_scale", "_extra_state"])
def test_unknown_tensors_beside_a_layer_to_quantize(name: str, tmp_path: Path) -> None:
    """State of quantizers beside an unquantized layer is refused by name; --keep leaves the layer as it is."""
    tensors = synthetic.dense(tmp_path / "plain") | {f"{O_PROJ}.{name}": np.ones(4, np.float32)}
    root = model(tmp_path / "m", tensors)
    with refused(
        f"{O_PROJ}.{name} (F32 [4]): lies beside a layer to quantize, and is not known; leave the layer as it"
    ):
        make_plan(root)
    make_plan(root, wishes=Wishes(keep=(O_PROJ,)))
    make_plan(
        model(tmp_path / "bias", synthetic.dense(tmp_path / "other") | {f"{O_PROJ}.bias": np.ones(64, np.float32)})
    )


@pytest.mark.parametrize(
    ("gate_up", "down"), [((4, 96, 64), (4, 64, 48)), ((4, 64, 96), (4, 48, 64)), ((4, 64, 64), (4, 64, 32))]
)
def test_stacks_that_fit(gate_up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path) -> None:
    make_plan(model(tmp_path / "m", stacks(gate_up, down)), "nvfp4-te", format="compressed-tensors")


@pytest.mark.parametrize(
    ("gate_up", "down"), [((4, 64, 96), (4, 64, 48)), ((4, 96, 64), (3, 64, 48)), ((4, 96, 64), (4, 64, 96))]
)
def test_stacks_that_do_not_fit(gate_up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path) -> None:
    """One transposed stack, a missing expert or another intermediate size: the axes are not known."""
    root = model(tmp_path / "m", stacks(gate_up, down))
    text = f"{EXPERTS}.gate_up_proj {[*gate_up]}, {EXPERTS}.down_proj {[*down]}: the shapes of these stacks"
    with refused(text):
        make_plan(root, "nvfp4-te", format="compressed-tensors")
    rules = Rules.of("nvfp4-te", format="compressed-tensors", config={"model_type": "qwen3_moe"})
    with refused(text):
        list(convert_tensors(stacks(gate_up, down).items(), rules))


def test_missing_experts_and_float64_are_named(tmp_path: Path) -> None:
    """A gap in the numbers of experts, and matrices in float64, give warnings."""
    tensors = synthetic.moe(tmp_path / "plain")
    sound = make_plan(tmp_path / "plain", format="modelopt").warnings
    assert not any("has expert" in text or "F64" in text for text in sound)
    gap = {name: x for name, x in tensors.items() if ".experts.2." not in name}
    synthetic.DTYPE_NAMES.setdefault(np.dtype("f8"), "F64")
    gap[f"{O_PROJ}.weight"] = tensors[f"{O_PROJ}.weight"].astype(np.float64)
    warnings = make_plan(model(tmp_path / "m", gap), format="modelopt").warnings
    assert any("mlp.experts: has expert 3, but not 2; engines leave missing experts" in text for text in warnings)
    assert any(text.startswith(f"{O_PROJ}.weight: stay F64, because only F32, F16 and BF16") for text in warnings)


def test_scales_that_are_multiplied_twice_are_doubted(tmp_path: Path) -> None:
    tensors = synthetic.dense(tmp_path / "plain")
    tiny = {name: x * synthetic.BF16.type(2.0**-20) if O_PROJ in name else x for name, x in tensors.items()}
    convert(model(tmp_path / "m", tiny), tmp_path / "q", "nvfp4-te", format="modelopt")
    (doubt,) = convert(tmp_path / "q", tmp_path / "out", format="bf16").doubts
    assert doubt.startswith(f"{O_PROJ}.weight: its scales allow only values up to")


def test_transposed_layers_are_named(tmp_path: Path) -> None:
    """A down projection stored as [K, N] gives a warning in convert and verify; a square layer cannot be told."""
    tensors = synthetic.dense(tmp_path / "plain")
    down, square = "model.layers.0.mlp.down_proj.weight", f"{O_PROJ}.weight"
    turned = {name: np.ascontiguousarray(x.T) if name in (down, square) else x for name, x in tensors.items()}
    text = "model.layers.0.mlp.down_proj: seems to be stored transposed"
    for number, (found, expected) in enumerate(((tensors, 0), (turned, 1))):
        config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": synthetic.HIDDEN}
        root = tmp_path / str(number)
        synthetic.write_model(root, config, found)
        assert sum(warning.startswith(text) for warning in make_plan(root).warnings) == expected
        assert sum(issue.text.startswith(text) for issue in verify(root).issues) == expected
