"""Write MLX directories: choose the container, declare it in config.json, and check that mlx-lm can load the model.
config.json declares quantized layers under ``quantization``: a default entry, and entries of single layers by name.

Tensors keep their Hugging Face names. When mlx-lm loads a model, the ``sanitize`` method of the model's class renames
and stacks them. After that, mlx-lm treats a layer as quantized if it finds ``.scales`` beside the weight. A model type
can therefore be written in two cases only: its ``sanitize`` leaves the tensors of linear layers alone, or it moves the
scales of experts together with their weights.

Source: mlx-lm 0.32.2, utils.py (load_model, infer_quant_config) and models/*.py. Tested by loading qwen3 and mixtral;
for the other model types, the lists below are from reading the code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.containers.table import MLX_GLOBAL, MLX_MXFP4, MLX_MXFP8, MLX_NVFP4, Container
from fp4kit.recipes import RECIPES, Recipe, several
from fp4kit.storage.files import CheckpointError, shown

FORMAT, ENGINE = MLX_MXFP4.format, "mlx-lm 0.32.2"
FORMS = (MLX_MXFP4, MLX_NVFP4, MLX_MXFP8)
_EXPERTS, _TAKES_GLOBAL = "experts", "switch_mlp"
_DENSE = {  # model types for which mlx-lm's sanitize method moves no tensor of a linear layer
    "apertus",
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "internlm3",
    "llama",
    "mimo",
    "minicpm",
    "ministral3",
    "mistral",
    "nanbeige",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
}
# Model types for which mlx-lm's sanitize method stacks the scales of experts as it stacks their weights.
_STACKING = {"deepseek", "deepseek_v2", "dots1", "exaone_moe", "glm4_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe"}
# Model types for which mlx-lm's sanitize method stacks the weights of experts, but drops their scales.
_LOSING = {"ernie4_5_moe", "mellum", "qwen3_moe"}


def form_for(recipe: Recipe) -> Container:
    """Return the MLX container that stores a recipe's codes and scales."""
    form = next((candidate for candidate in FORMS if candidate.stores(recipe)), None)
    if form is None:
        usable = several([id for id, r in RECIPES.items() if any(form.stores(r) for form in FORMS)], recipe)
        why = (
            "has a tensor scale, which linear layers of mlx-lm do not support"
            if MLX_GLOBAL.stores(recipe)
            else "cannot be stored by mlx-lm"
        )
        raise CheckpointError(f"recipe {recipe.id}: {why}; use one of {usable}")
    return form


def declaration(form: Container) -> dict[str, Any]:
    """Return the object that declares one of MLX's containers in config.json, under the key ``quantization``."""
    return {"group_size": form.group_size, "bits": form.element.bits, "mode": form.kind}


def check(config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Raise CheckpointError unless mlx-lm is known to load a model correctly once ``modules`` are quantized."""
    kind = str(config.get("model_type", ""))
    if kind in _LOSING:
        lost = [name for name in modules if _EXPERTS in name.split(".")]
        if lost:
            why = f"{ENGINE} would drop the scales of the experts of {kind} models"
            raise CheckpointError(f"{shown(lost[0])}: {why}; keep them unquantized with --keep '*.experts.*'")
    elif kind not in _DENSE | _STACKING:
        usable = ", ".join(sorted(_DENSE | _STACKING | _LOSING))
        raise CheckpointError(
            f"model_type {shown(repr(kind))}: not supported by --format mlx, because fp4kit does not know how"
            f" {ENGINE} loads it; supported are {usable}"
        )


def troubles(config: Mapping[str, Any], layers: Mapping[str, Container]) -> Iterator[tuple[str, str]]:
    """Yield (module or file, fault as text) for each reason why mlx-lm would reject a directory or load it wrongly."""
    declared = config.get("quantization")
    if not isinstance(declared, Mapping):
        yield "config.json", "has no quantization entry, so mlx-lm loads no layer as quantized and rejects the weights"
        declared = {}
    for name, form in layers.items():
        own = declared.get(name)
        is_other = isinstance(own, Mapping) and any(own.get(key) != one for key, one in declaration(form).items())
        if own is False or is_other:
            yield name, f"config.json declares {own}, but its tensors are {declaration(form)}"
        elif form is MLX_GLOBAL and _TAKES_GLOBAL not in name.split("."):
            yield name, "has a global_scale, which mlx-lm reads only for experts (switch_mlp)"
