"""Test directories of Diffusers: reading, and which layers stay unquantized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify

ALL = Wishes(only=("*",))
# {class of the model: (modules that are quantized, modules that stay unquantized)}
MODULES = {
    "FluxTransformer2DModel": (
        ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_out"],
        [
            "transformer_blocks.0.norm1_context.linear",
            "single_transformer_blocks.0.norm.linear",
            "norm_out.linear",
            "proj_out",
            "x_embedder",
            "context_embedder",
            "time_text_embed.timestep_embedder.linear_1",
        ],
    ),
    "QwenImageTransformer2DModel": (
        ["transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.txt_mlp.net.0.proj"],
        ["transformer_blocks.0.img_mod.1", "transformer_blocks.0.txt_mod.1", "img_in", "txt_in", "proj_out"],
    ),
    "WanTransformer3DModel": (
        ["blocks.0.attn2.to_k", "blocks.0.ffn.net.0.proj"],
        ["condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1", "proj_out"],
    ),
    "HunyuanVideoTransformer3DModel": (
        ["transformer_blocks.0.ff_context.net.2", "single_transformer_blocks.0.proj_mlp"],
        ["context_embedder.token_refiner.refiner_blocks.0.attn.to_q", "context_embedder.proj_in", "proj_out"],
    ),
    "LTXVideoTransformer3DModel": (
        ["transformer_blocks.0.attn1.to_q", "transformer_blocks.0.ff.net.0.proj"],
        ["proj_in", "time_embed.linear", "caption_projection.linear_1", "proj_out"],
    ),
    "SD3Transformer2DModel": (
        ["transformer_blocks.0.attn.add_q_proj", "transformer_blocks.0.ff_context.net.2"],
        ["transformer_blocks.0.norm1.linear", "context_embedder", "norm_out.linear", "proj_out"],
    ),
}


def _write(folder: Path, name: str, modules: list[str], shards: int = 1) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": name}))
    tensors = {f"{module}.weight": synthetic.random(module, (32, 64)) for module in modules}
    if shards == 1:
        synthetic.write_file(folder / "diffusion_pytorch_model.safetensors", tensors)
        return
    weight_map = {}
    for i in range(shards):
        file = f"diffusion_pytorch_model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        synthetic.write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", MODULES)
def test_layers_of_known_classes(tmp_path: Path, name: str) -> None:
    quantized, kept = MODULES[name]
    _write(tmp_path / "m", name, quantized + kept)
    plan = make_plan(tmp_path / "m", "nvfp4-te", wishes=ALL)
    assert sorted(tensor.name for tensor in plan.converted) == sorted(f"{module}.weight" for module in quantized)
    assert any("no engine is known to load" in text for text in plan.warnings)


def test_refused_without_only(tmp_path: Path) -> None:
    _write(tmp_path / "m", "FluxTransformer2DModel", MODULES["FluxTransformer2DModel"][0])
    for format in (None, "modelopt", "compressed-tensors", "comfy"):
        with refused("no engine is known to load quantized weights of Diffusers models"):
            make_plan(tmp_path / "m", "nvfp4-te", format=format)
    _write(tmp_path / "other", "NewTransformer2DModel", ["blocks.0.attn.to_q", "proj_out"])
    with refused("_class_name NewTransformer2DModel: it is not known which layers"):
        make_plan(tmp_path / "other", "nvfp4-te")
    plan = make_plan(tmp_path / "other", "nvfp4-te", wishes=Wishes(only=("blocks.*",)))
    assert [tensor.name for tensor in plan.converted] == ["blocks.0.attn.to_q.weight"]


def test_shards_and_index_keep_their_names(tmp_path: Path) -> None:
    quantized, kept = MODULES["FluxTransformer2DModel"]
    _write(tmp_path / "m", "FluxTransformer2DModel", quantized + kept, shards=2)
    assert open_source(tmp_path / "m").has_index
    convert(tmp_path / "m", tmp_path / "o", "nvfp4-te", wishes=ALL)
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert "diffusion_pytorch_model.safetensors.index.json" in names
    assert "model.safetensors.index.json" not in names
    report = verify(tmp_path / "o", tmp_path / "m")
    assert report.clean and len(report.layers) == len(quantized)
    assert ["no engine is known" in issue.text for issue in report.issues] == [True]
    convert(tmp_path / "o", tmp_path / "d", format="bf16")
    assert np.array_equal(sorted(open_source(tmp_path / "d").tensors), sorted(open_source(tmp_path / "m").tensors))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "m", "FluxTransformer2DModel", MODULES["FluxTransformer2DModel"][0], shards=2)
    (tmp_path / "m" / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with refused("diffusion_pytorch_model-00002-of-00002.safetensors: is missing"):
        open_source(tmp_path / "m")


def test_variants_beside_the_model_are_not_read(tmp_path: Path) -> None:
    _write(tmp_path / "m", "FluxTransformer2DModel", MODULES["FluxTransformer2DModel"][0])
    whole = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    whole.with_name("diffusion_pytorch_model.fp16.safetensors").write_bytes(whole.read_bytes())
    assert [file.name for file in open_source(tmp_path / "m").files] == [whole.name]


def test_single_files_of_original_releases(tmp_path: Path) -> None:
    """In a single file of FLUX without a config, modulation, input and output layers stay unquantized.

    This holds with and without the prefix that ComfyUI gives to names.
    """
    quantized = ["double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.2", "single_blocks.0.linear1"]
    kept = ["double_blocks.0.img_mod.lin", "single_blocks.0.modulation.lin", "final_layer.linear", "img_in", "txt_in"]
    kept += ["final_layer.adaLN_modulation.1", "time_in.in_layer", "vector_in.in_layer", "guidance_in.out_layer"]
    for prefix in ("", "model.diffusion_model."):
        tensors = {f"{prefix}{name}.weight": synthetic.random(name, (32, 64)) for name in quantized + kept}
        synthetic.write_file(tmp_path / "m.safetensors", tensors)
        plan = make_plan(tmp_path / "m.safetensors", "nvfp4-te", format="comfy")
        assert {tensor.name for tensor in plan.converted} == {f"{prefix}{name}.weight" for name in quantized}
        assert plan.warnings == ()
