"""Test fp4kit.open_checkpoint: layers read from files equal fp4kit.quantize of their sources, and errors name the way
out.
"""

from __future__ import annotations

import json
import re

import gguf_files
import ml_dtypes
import numpy as np
import pytest
import synthetic
from safetensors.numpy import save_file

import fp4kit
from fp4kit.checkpoint import QuantizedLayers, Wishes, convert
from fp4kit.checkpoint.containers.table import container
from fp4kit.checkpoint.model import inspect
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.storage.files import CheckpointError

FORMATS = (
    ("nvfp4-te", "modelopt"),
    ("nvfp4-modelopt", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("nvfp4-mlx-cpu", "mlx"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
    ("fp8-modelopt", "compressed-tensors"),
    ("fp8-modelopt-channel", "modelopt"),
)


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_a_layer_equals_its_source_quantized(tmp_path, recipe, format) -> None:
    """Codes, scales and values equal those of quantize. The layer shares its tensor scale with no other layer."""
    tensors = synthetic.moe(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen3_moe"}))
    convert(tmp_path / "m", tmp_path / "q", recipe, format=format, wishes=Wishes(keep=("*.experts.*",)))
    name = "model.layers.0.self_attn.o_proj"
    read, wanted = fp4kit.open_checkpoint(tmp_path / "q")[name], fp4kit.quantize(tensors[f"{name}.weight"], recipe)
    assert read.recipe == fp4kit.recipe(recipe) and read.shape == wanted.shape
    for part in ("packed", "block_scale"):
        assert np.array_equal(getattr(read, part), getattr(wanted, part)), part
    if wanted.tensor_scale is not None:
        assert np.array_equal(read.tensor_scale.reshape(-1), wanted.tensor_scale.reshape(-1))
    assert np.array_equal(read.dequantize(np.float32), wanted.dequantize(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_divisors_of_weights_of_every_dtype(tmp_path, dtype) -> None:
    """The values are those of the source, quantized: decoding divides by the stored divisor, not by its reciprocal."""
    rng = np.random.default_rng(0)
    source = {
        f"layers.{i}.weight": (rng.standard_normal((32, 64)) * rng.uniform(0.01, 1)).astype(dtype) for i in range(24)
    }
    save_file(source, tmp_path / "w.safetensors")
    convert(tmp_path / "w.safetensors", tmp_path / "q", "nvfp4-compressed-tensors", format="compressed-tensors")
    layers = fp4kit.open_checkpoint(tmp_path / "q")
    for name, x in source.items():
        read, wanted = layers[name.removesuffix(".weight")], fp4kit.quantize(x, "nvfp4-compressed-tensors")
        assert read.dtype in (dtype, ml_dtypes.bfloat16)  # bfloat16 may happen to represent the divisor
        assert np.array_equal(read.dequantize(np.float32), wanted.dequantize(np.float32))
    assert any(q.tensor_amax is not None for q in layers.values()) == (dtype == np.float32)


@pytest.mark.parametrize("name", [*synthetic.MODELS, *synthetic.QUANTIZED])
def test_every_layer_decodes_as_the_converter_decodes_it(tmp_path, name) -> None:
    """The order of two products may differ, so that values may differ by the rounding of float32."""
    if name in synthetic.QUANTIZED:
        synthetic.QUANTIZED[name](tmp_path / "q")
    else:
        synthetic.MODELS[name](tmp_path / "m")
        convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers, weights = fp4kit.open_checkpoint(tmp_path / "q"), inspect_checkpoint(tmp_path / "q").layers
    assert list(layers) == list(weights) and len(layers) == len(weights) > 0
    for key, weight in weights.items():
        if weight.container.block[0] > 1:
            odd, powers = weight.shape[-1] % 128 != 0, weight.container.scale is not None
            if odd or powers:
                with synthetic.refused("no recipe has the blocks of" if powers else "is not a multiple of 128, which"):
                    layers[key]
                continue
        with Readers() as readers:
            parts = [values_of(weight, slab) for e in range(weight.experts) for slab in slabs(readers, weight, e)]
        wanted = np.concatenate(parts).astype(np.float32).reshape(weight.shape)
        np.testing.assert_allclose(layers[key].dequantize(np.float32), wanted, rtol=2.0**-22)


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("modelopt NVFP4_AWQ", ["tensor_scale", "column_scale"], "is multiplied by a factor per column"),
        ("modelopt NVFP4", [], "its tensor scale is missing, so its values are unknown"),
        ("modelopt NVFP4", ["tensor_scale"], "K = 40 is not a multiple of 16, which nvfp4-te needs"),
    ],
)
def test_layers_that_a_quantized_cannot_hold(name, parts, text) -> None:
    weight = Weight("a", "a.weight", (32, 40), container(name), dict.fromkeys(parts))
    with synthetic.refused(f"a: {text}"):
        inspect._read(weight, fp4kit.recipe("nvfp4-te"))


def test_gguf_files_and_recipes_of_the_caller(tmp_path) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "nvfp4-gguf")
    layers = fp4kit.open_checkpoint(tmp_path / "q.gguf")
    assert layers[next(iter(layers))].recipe.id == "nvfp4-gguf"
    name = next(iter(layers))
    with synthetic.refused("cannot store mxfp4-ocp; give another recipe"):
        fp4kit.open_checkpoint(tmp_path / "q.gguf", "mxfp4-ocp")[name]


def test_nothing_is_read_before_a_lookup(tmp_path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers = fp4kit.open_checkpoint(tmp_path / "q")
    for path in (tmp_path / "q").glob("*.safetensors"):
        path.unlink()
    assert len(layers) > 0 and isinstance(layers, QuantizedLayers)
    with pytest.raises((CheckpointError, OSError)):
        layers[next(iter(layers))]


def test_unknown_names_list_similar_ones(tmp_path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers, name = fp4kit.open_checkpoint(tmp_path / "q"), "model.layers.0.mlp.down_proj"
    assert name in layers and f"{name}.weight" not in layers
    assert repr(layers) == f"QuantizedLayers({str(tmp_path / 'q')!r}: {len(layers)} layers, modelopt NVFP4)"
    for wrong, text in (
        (f"{name}.weight", f"use {name!r}"),
        ("model.layers.0.mlp.down", f"layers are such as {name}"),
        ("model.norm", "is not quantized in"),
        ("lm_head", "is not quantized in"),
        ("x", "is no layer of"),
    ):
        with pytest.raises(KeyError, match=re.escape(text)):
            layers[wrong]
    with pytest.raises(KeyError, match="which has no quantized layers"):
        fp4kit.open_checkpoint(tmp_path / "m")["lm_head"]
    with synthetic.refused("does not exist"):
        fp4kit.open_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="nvfp4-te"):
        fp4kit.open_checkpoint(tmp_path / "q", "nvfp4_te")
