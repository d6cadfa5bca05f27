"""Make the JSON files that a conversion writes: config.json, hf_quant_config.json and the index of the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.containers.configs import (
    awq_declarations,
    declarations,
    mixed_declarations,
    without_declarations,
)
from fp4kit.checkpoint.containers.configs import declared as declared_in
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.containers.table import MODELOPT_AWQ
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.model_files import CONFIG, DIFFUSERS_INDEX, HF_QUANT_CONFIG, INDEX
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.plan.source_declarations import RECORDED, producer_of
from fp4kit.checkpoint.selection.names import PARTLY_CARRIED
from fp4kit.checkpoint.selection.selection import DIFFUSERS_CLASS


def configs(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return a dict from file name to JSON content, for the index and configs that engines need to load the result."""
    found: dict[str, dict[str, Any]] = {}
    if plan.source.has_index or len(plan.files) > 1:
        weight_map = {output.name: file.name for file in plan.files for output in file.outputs}
        name = INDEX if DIFFUSERS_CLASS not in plan.source.config else DIFFUSERS_INDEX
        found[name] = {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}
    config = _without_float8(without_declarations(plan.source.config))
    if plan.form is None:
        return found | {CONFIG: config}
    if plan.form.format == comfy.FORMAT:  # ComfyUI reads tags in the safetensors file, and no entry of config.json
        return found | {CONFIG: config}
    own: dict[str, Any] = {
        "version": __version__,
        **({"recipe": plan.recorded} if plan.recorded else {}),
        **({"recipes": plan.recorded_patterns} if plan.recorded_patterns else {}),
        **({"codes": "carried"} if plan.carries_codes else {}),
        **({"codes": PARTLY_CARRIED} if plan.carries_some_codes else {}),
    }
    producer = producer_of(plan.source)
    own |= {RECORDED: producer} if producer else {}
    if plan.request.search is not None:
        own["scale_search"] = plan.request.search.words.removeprefix("searched by ")
    if plan.form.format == mlx.FORMAT:
        config["quantization"] = mlx.declaration(plan.form)
        return found | {CONFIG: {**config, "quantization_config": {**config["quantization"], "fp4kit": own}}}
    if plan.form.format == "deepseek-v4":
        config["expert_dtype"] = "fp4"
    if plan.is_mixed:
        declared, beside = mixed_declarations(plan.layers_of_forms, plan.ignore, plan.input_scaled, own)
    else:
        layers = plan.layers_of_forms.get(plan.form, [])
        declared, beside = declarations(plan.form, plan.ignore, plan.has_input_scale, own, layers)
    if plan.form.format == "deepseek-v4":  # layers in FP8 stay as they are
        tiles = declared_in(plan.source.config).get("weight_block_size")
        declared |= {"weight_block_size": tiles} if tiles else {}
    if MODELOPT_AWQ in plan.layers_of_forms and not plan.is_mixed:
        declared, beside = awq_declarations(declared, beside)
    declared, beside = _with_carried(plan, declared, beside)
    if plan.rotated_layers:
        rotation = plan.request.rotation
        assert rotation is not None
        transform = transforms.declaration(rotation, plan.rotated_layers, plan.other_modules)
        declared = {**declared, transforms.KEY: transform}
    config["quantization_config"] = declared
    return found | {CONFIG: config} | ({HF_QUANT_CONFIG: beside} if beside is not None else {})


def _without_float8(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config, and of the configs nested in it, in which the dtype of a model in FP8 is bfloat16."""
    return {
        key: _without_float8(value)
        if key.endswith("_config") and isinstance(value, Mapping)
        else "bfloat16"
        if key in ("dtype", "torch_dtype") and str(value).removeprefix("torch.").startswith("float8")
        else value
        for key, value in config.items()
    }


def _with_carried(
    plan: Plan, declared: dict[str, Any], beside: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs with the KV cache and the entries that are carried over from the source (Plan.carried)."""
    settings = {key: value for key, value in plan.carried.items() if key != "input_activations"}
    nested = dict(settings)
    declared = {**declared, **settings}
    if plan.kv_cache is not None and plan.form is not None:
        scheme, algorithm = plan.kv_cache.declaration(plan.form.format)
        declared["kv_cache_scheme"] = scheme
        declared |= {"kv_cache_quant_algo": algorithm} if scheme is None and algorithm is not None else {}
        nested["kv_cache_quant_algo"] = algorithm
    if "input_activations" in plan.carried:
        inputs = {"input_activations": plan.carried["input_activations"]}
        declared["config_groups"] = {name: {**one, **inputs} for name, one in declared["config_groups"].items()}
    if beside is not None and nested:
        beside = {**beside, "quantization": {**beside["quantization"], **nested}}
    return declared, beside
