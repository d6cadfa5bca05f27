"""Write small models whose MLPs are quantized and whose attention layers are not, one per container and tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import oracle
import synthetic
from synthetic import random

from fp4kit.checkpoint import Wishes, convert
from fp4kit.storage.files import read_header

ATTENTION = tuple(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo")
MLP = tuple(f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up", "down"))
KEPT = Wishes(keep=("*self_attn*",))
FOREIGN = Path(__file__).parents[2] / "data" / "foreign"


def llama(root: Path) -> None:
    """Write an unquantized Llama of one layer, whose matrices are 128x128."""
    names = ("model.embed_tokens", "lm_head", *ATTENTION, *MLP)
    tensors = {f"{name}.weight": random(name, (128, 128), 0.05) for name in names}
    tensors |= {"model.norm.weight": np.ones(128, synthetic.BF16)}
    config: dict[str, object] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    synthetic.write_model(root, {**config, "hidden_size": 128, "intermediate_size": 128}, tensors)


def declare(model: Path, **entries: Any) -> None:
    """Change entries of ``quantization_config`` in config.json; an entry of None removes the key."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    declared = {**config["quantization_config"], **entries}
    config["quantization_config"] = {key: value for key, value in declared.items() if value is not None}
    path.write_text(json.dumps(config))


def converted(root: Path, recipe: str, format: str, **options: Any) -> Path:
    """Convert the Llama with its attention layers kept, and return the directory."""
    llama(root / "plain")
    convert(root / "plain", root / "m", recipe, format=format, wishes=KEPT, **options)
    return root / "m"


def beside(root: Path) -> Path:
    """Return NVFP4 of Model-Optimizer that only hf_quant_config.json declares, with globs."""
    model = converted(root, "nvfp4-modelopt", "modelopt")
    path = model / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["exclude_modules"] = ["lm_head", "model.layers.0.self_attn*"]
    path.write_text(json.dumps(content))
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    return model


def mixed(root: Path, format: str) -> Path:
    """Return a model whose gate and up are NVFP4, and whose down projection is FP8 per row."""
    return converted(root, "nvfp4-modelopt", format, recipes=[("*.down_proj", "fp8-modelopt-channel")])


def quark(root: Path) -> Path:
    """Return MXFP4 as Quark writes it: the tensors of compressed-tensors as .weight and .weight_scale."""
    model = converted(root, "mxfp4-ocp", "compressed-tensors")
    tensors = oracle.arrays(oracle.load(model))
    tensors = {name.replace(".weight_packed", ".weight"): x for name, x in tensors.items()}
    synthetic.write_file(model / "model.safetensors", tensors)
    config = json.loads((model / "config.json").read_text())
    scheme = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
    declared: dict[str, Any] = {"quant_method": "quark", "exclude": ["lm_head", *ATTENTION], "algo_config": None}
    config["quantization_config"] = declared | {"global_quant_config": {"weight": scheme, "input_tensors": None}}
    (model / "config.json").write_text(json.dumps(config))
    return model


def auto_round(root: Path) -> Path:
    """Return MXFP4 as AutoRound writes it: the tensors of compressed-tensors under its own declaration."""
    model = converted(root, "mxfp4-ocp", "compressed-tensors")
    config = json.loads((model / "config.json").read_text())
    scheme = {"bits": 4, "data_type": "mx_fp", "group_size": 32, "sym": True}
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:llm_compressor",
        **scheme,
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in ATTENTION},
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


def torchao(root: Path) -> Path:
    """Return a model of torchao whose attention layers are replaced by unquantized ones."""
    (source,) = FOREIGN.glob("torchao--MXFP4")
    root.mkdir()
    for path in source.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    (file,) = root.glob("*.safetensors")
    metadata = {key: text for key, text in read_header(file).metadata.items() if "self_attn" not in key}
    tensors = oracle.arrays(oracle.load(root))
    names = {name.partition("._weight")[0]: x for name, x in tensors.items() if "self_attn" in name and "qdata" in name}
    tensors = {name: x for name, x in tensors.items() if not ("self_attn" in name and "._weight" in name)}
    for name, codes in names.items():
        tensors[f"{name}.weight"] = random(name, (codes.shape[0], 2 * codes.shape[1]), 0.05)
    synthetic.write_file(file, tensors, metadata)
    return root


def gpt_oss(root: Path) -> Path:
    synthetic.gpt_oss_mxfp4(root)
    return root


def gguf(root: Path, recipe: str) -> Path:
    root.mkdir()
    gguf_files.write_model(root / "plain.gguf")
    kept = Wishes(keep=("*.attn_*", "*_exps"))
    convert(root / "plain.gguf", root / "m.gguf", recipe, wishes=kept)
    return root / "m.gguf"


def comfy(root: Path, recipe: str) -> Path:
    llama(root / "plain")
    convert(root / "plain", root / "m", recipe, format="comfy", wishes=KEPT)
    return root / "m"


_WRITTEN = {
    "modelopt NVFP4": ("nvfp4-modelopt", "modelopt", {"input_scale": 0.01}),
    "modelopt W4A16_NVFP4": ("nvfp4-modelopt", "modelopt", {}),
    "modelopt MXFP8": ("mxfp8-te", "modelopt", {}),
    "modelopt FP8": ("fp8-modelopt", "modelopt", {"input_scale": 0.01}),
    "modelopt FP8 per row": ("fp8-modelopt-channel", "modelopt", {}),
    "compressed-tensors NVFP4": ("nvfp4-compressed-tensors", "compressed-tensors", {}),
    "compressed-tensors NVFP4 W4A4": ("nvfp4-compressed-tensors", "compressed-tensors", {"input_scale": 0.01}),
    "compressed-tensors MXFP4": ("mxfp4-ocp", "compressed-tensors", {}),
    "compressed-tensors MXFP8": ("mxfp8-te", "compressed-tensors", {}),
    "compressed-tensors FP8": ("fp8-modelopt", "compressed-tensors", {}),
    "compressed-tensors FP8 per row": ("fp8-modelopt-channel", "compressed-tensors", {}),
    "compressed-tensors FP8 128x128": ("fp8-transformers-block", "compressed-tensors", {}),
    "fp8 128x128": ("fp8-transformers-block", "fp8", {}),
    "sglang-mxfp8": ("mxfp8-te", "sglang-mxfp8", {}),
    "mlx nvfp4": ("nvfp4-mlx-cpu", "mlx", {}),
    "mlx mxfp4": ("mxfp4-mlx-cpu", "mlx", {}),
    "mlx mxfp8": ("mxfp8-mlx-cpu", "mlx", {}),
}
SOURCES: dict[str, Callable[[Path], Path]] = {
    name: partial(converted, recipe=recipe, format=format, **options)
    for name, (recipe, format, options) in _WRITTEN.items()
}
SOURCES |= {
    "modelopt, hf_quant_config.json alone": beside,
    "modelopt MIXED_PRECISION": partial(mixed, format="modelopt"),
    "compressed-tensors mixed-precision": partial(mixed, format="compressed-tensors"),
    "quark MXFP4": quark,
    "auto-round MXFP4": auto_round,
    "torchao MXFP4": torchao,
    "gpt-oss": gpt_oss,
    "comfy nvfp4": partial(comfy, recipe="nvfp4-comfy-kitchen"),
    "comfy mxfp8": partial(comfy, recipe="mxfp8-te"),
    "gguf NVFP4": partial(gguf, recipe="nvfp4-gguf"),
    "gguf MXFP4": partial(gguf, recipe="mxfp4-gguf"),
}
