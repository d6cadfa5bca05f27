"""Test that swapped nibbles are recognised by the sizes of columns, and that sound layers cause no warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic
from changed_bytes import change
from together import together

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.model.doubtful_codes import SWAPPED_NIBBLES, swapped_layers
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify

SIZE = 256
LAYERS = {"self_attn.q_proj": (SIZE, SIZE), "mlp.gate_proj": (384, SIZE), "mlp.up_proj": (384, SIZE)}
FORMS = {"nvfp4-modelopt": "modelopt", "mxfp4-ocp": "compressed-tensors", "mxfp4-mlx-cpu": "mlx"}
FOREIGN = Path(__file__).parents[2] / "data" / "foreign"


def model(root: Path, strength: float, seed: int = 0) -> Path:
    """Write a model whose columns follow the weight of the norm before them, as in trained models; return `root`.

    strength: the share of a column's size that follows the norm; 0 for columns of equal size.
    """
    rng = np.random.default_rng(seed)
    norm = np.exp(0.5 * rng.standard_normal(SIZE))
    tensors = {"model.layers.0.input_layernorm.weight": norm.astype(synthetic.BF16)}
    for name, shape in LAYERS.items():
        noise = np.exp(0.5 * (1 - strength) * rng.standard_normal(SIZE)) if strength else 1.0
        x = rng.standard_normal(shape) * norm**-strength * noise * 0.02
        tensors[f"model.layers.0.{name}.weight"] = x.astype(synthetic.BF16)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    synthetic.write_model(root, config, tensors)
    return root


def named(root: Path) -> set[str]:
    """Return the layers of a checkpoint that seem to have swapped nibbles. verify and convert must name them, too."""
    found = inspect_checkpoint(root)
    names = {weight.name: weight.tensor for weight in swapped_layers(found.weights.values(), found.tensors)}
    issues = [issue for issue in verify(root).issues if issue.text == SWAPPED_NIBBLES]
    assert {issue.subject for issue in issues} == set(names) and {issue.severity for issue in issues} <= {"warning"}
    doubts = convert(root, root.with_name(f"{root.name}-bf16"), format="bf16").doubts
    assert {text for text in doubts if SWAPPED_NIBBLES in text} == {f"{t}: {SWAPPED_NIBBLES}" for t in names.values()}
    return set(names)


@pytest.mark.parametrize("recipe", FORMS)
def test_swapped_nibbles_are_named(recipe: str, tmp_path: Path) -> None:
    """One layer, or all: the norm tells the order of the columns."""
    convert(model(tmp_path / "s", 0.8), tmp_path / "m", recipe, format=FORMS[recipe])
    assert named(tmp_path / "m") == set()
    end = "weight_packed" if FORMS[recipe] == "compressed-tensors" else "weight"
    change(tmp_path / "m", f"up_proj.{end}", lambda codes: codes << 4 | codes >> 4, np.uint8)
    (tmp_path / "m-bf16").rename(tmp_path / "sound")
    assert named(tmp_path / "m") == {"model.layers.0.mlp.up_proj"}
    for name in ("q_proj", "gate_proj"):
        change(tmp_path / "m", f"{name}.{end}", lambda codes: codes << 4 | codes >> 4, np.uint8)
    (tmp_path / "m-bf16").rename(tmp_path / "one")
    assert named(tmp_path / "m") == {f"model.layers.0.{name}" for name in LAYERS}


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_sound_layers_cause_no_warning(strength: float, seed: int, tmp_path: Path) -> None:
    convert(model(tmp_path / "s", strength, seed), tmp_path / "m", "nvfp4-te", format="modelopt")
    found = inspect_checkpoint(tmp_path / "m")
    assert swapped_layers(found.weights.values(), found.tensors) == []


@together("folder", [path.name for path in sorted(FOREIGN.iterdir()) if path.is_dir()])
def test_files_of_other_tools_cause_no_warning(folder: str) -> None:
    found = inspect_checkpoint(FOREIGN / folder)
    assert swapped_layers(found.weights.values(), found.tensors) == []
