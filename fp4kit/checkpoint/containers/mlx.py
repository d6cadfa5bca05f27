"""MLX directories: the form of a recipe, what mlx-lm declares, and the models that it loads as they are written here.

Names stay those of Hugging Face: mlx-lm brings them into its own when it loads (sanitize of each model), and takes a
layer for quantized where it finds ``.scales``. That works where it moves nothing, or stacks scales of experts as it
stacks their weights. Source: mlx-lm 0.32.2 utils.py load_model, infer_quant_config, models/*.py; run with qwen3 and
mixtral, else read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.containers.container import MLX_GLOBAL, MLX_MXFP4, MLX_MXFP8, MLX_NVFP4, Container
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.errors import CheckpointError, shown

FORMAT, ENGINE = MLX_MXFP4.format, "mlx-lm 0.32.2"
FORMS = (MLX_MXFP4, MLX_NVFP4, MLX_MXFP8)
_EXPERTS, _TAKES_GLOBAL = "experts", "switch_mlp"
_DENSE = {  # moves no tensor of a linear layer
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
_STACKING = {"deepseek", "deepseek_v2", "dots1", "exaone_moe", "glm4_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe"}
_LOSING = {"ernie4_5_moe", "mellum", "qwen3_moe"}  # stacks the weights of experts, not their scales


def form_for(recipe: Recipe) -> Container:
    """The form of the codes and scales of a recipe. Raises CheckpointError for one that has no place in layers of
    mlx-lm.
    """
    form = next((known for known in FORMS if known.stores(recipe)), None)
    if form is None:
        usable = ", ".join(id for id, known in RECIPES.items() if any(form.stores(known) for form in FORMS))
        why = (
            "a tensor scale, which linear layers of mlx-lm have not" if MLX_GLOBAL.stores(recipe) else "no place in mlx"
        )
        raise CheckpointError(f"recipe {recipe.id}: has {why}; use one of {usable}")
    return form


def declaration(form: Container) -> dict[str, Any]:
    """``quantization`` of config.json."""
    return {"group_size": form.group_size, "bits": form.element.bits, "mode": form.kind}


def check(form: Container | None, config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Raise CheckpointError for modules that mlx-lm would not find again, by their names."""
    if form is None or form.format != FORMAT:
        return
    kind = str(config.get("model_type", ""))
    if kind in _LOSING:
        lost = [name for name in modules if _EXPERTS in name.split(".")]
        if lost:
            why = f"{ENGINE} stacks the weights of experts of {kind}, and not their scales"
            raise CheckpointError(f"{shown(lost[0])}: {why}; leave them out with --keep '*.experts.*'")
    elif kind not in _DENSE | _STACKING:
        usable = ", ".join(sorted(_DENSE | _STACKING | _LOSING))
        raise CheckpointError(
            f"model_type {shown(repr(kind))}: how {ENGINE} loads its layers is not known here; --format mlx writes"
            f" {usable}"
        )


def troubles(config: Mapping[str, Any], layers: Mapping[str, Container]) -> Iterator[tuple[str, str]]:
    """Yield (module, what mlx-lm does) for what it would trip over in a directory of quantized layers."""
    declared = config.get("quantization")
    if not isinstance(declared, Mapping):
        yield "config.json", "there is no quantization, so that no layer is taken for quantized and weights do not fit"
        declared = {}
    for name, form in layers.items():
        own = declared.get(name)
        if own is False or (isinstance(own, Mapping) and declaration(form).items() - own.items()):
            yield name, f"config.json says of it {own}, and its tensors are {declaration(form)}"
        elif form is MLX_GLOBAL and _TAKES_GLOBAL not in name.split("."):
            yield name, "has a global_scale, which it reads of experts alone (switch_mlp)"
