"""Test that every converted model is equal to its own contract, in each format and by each recipe."""

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.recipes import RECIPES

SHAPES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (128, 256)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (256, 256)),
}
FORMATS = ("modelopt", "compressed-tensors", "fp8", "sglang-mxfp8", "mlx", "comfy")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the directory of an unquantized model whose layers have different amaxes, and one only zeros."""
    folder, rng = tmp_path_factory.mktemp("model") / "source", np.random.default_rng(0)
    tensors = {}
    for i in range(3):
        for leaf, shape in SHAPES.items():
            x = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 1))
            tensors[f"model.layers.{i}.{leaf}.weight"] = x.astype(synthetic.BF16)
    tensors["model.layers.1.mlp.down_proj.weight"][...] = 0
    synthetic.write_model(folder, {"model_type": "llama", "torch_dtype": "bfloat16"}, tensors)
    return folder


def assert_equals_its_contract(source, out, format, recipe):
    convert(source, out, recipe, format=format)
    found = fp4kit.parity(fp4kit.Contract.of(out), out, weights=source)
    assert found.equal and found.layers, f"{format}, {recipe}: {found}"
    return len(found.layers)


@pytest.mark.parametrize(
    ("format", "recipe"),
    [
        ("modelopt", "nvfp4-modelopt"),
        ("compressed-tensors", "nvfp4-compressed-tensors"),
        ("compressed-tensors", "nvfp4-modelopt"),
        ("compressed-tensors", "nvfp4-comfy-kitchen"),
        ("compressed-tensors", "fp8-modelopt-channel"),
        ("mlx", "nvfp4-mlx-cpu-global"),
        ("comfy", "nvfp4-comfy-kitchen"),
    ],
)
def test_a_converted_model_equals_its_contract(source, tmp_path, format, recipe):
    assert assert_equals_its_contract(source, tmp_path / "out", format, recipe) == 3 * len(SHAPES)


@pytest.mark.parametrize("format", exhaustive(FORMATS))
def test_converted_models_equal_their_contracts(source, tmp_path, format):
    count = 0
    for recipe in RECIPES:
        try:
            assert_equals_its_contract(source, tmp_path / recipe, format, recipe)
        except CheckpointError:  # the format cannot hold this recipe
            continue
        count += 1
    assert count


@pytest.mark.parametrize("format", ["compressed-tensors", *exhaustive(("modelopt", "mlx", "comfy"))])
@pytest.mark.parametrize("model", synthetic.MODELS)
def test_models_of_each_structure(tmp_path, model, format):
    """A format that cannot hold a structure, or a recipe, refuses it; compressed-tensors holds all of them."""
    synthetic.MODELS[model](tmp_path / "source")
    recipe = "nvfp4-mlx-cpu-global" if format == "mlx" else "nvfp4-modelopt"
    try:
        assert_equals_its_contract(tmp_path / "source", tmp_path / "out", format, recipe)
    except CheckpointError:
        assert format != "compressed-tensors"
