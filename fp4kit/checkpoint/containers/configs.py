"""Write the quantization configs that belong to each output format, as the original producer writes them. The exclusion
list names the layers that loaders must treat as unquantized. A config group describes how the layers that match its
targets are quantized.

Sources:
  modelopt: Model-Optimizer 0.47, modelopt/torch/export quant_utils.py and convert_hf_config.py.
  compressed-tensors: compressed-tensors 0.20, as its own QuantizationConfig writes it.
  fp8: transformers 5.23, FineGrainedFP8Config.
  sglang-mxfp8: SGLang 0.5.23, fp8.py.
  gpt-oss: transformers 5.23, Mxfp4Config.
  deepseek-v4: the config of the DeepSeek-V4 release.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.containers.table import (
    CT_FP8,
    CT_FP8_BLOCKS,
    CT_FP8_ROWS,
    CT_MXFP4,
    CT_MXFP8,
    CT_NVFP4,
    DEEPSEEK_V4,
    DEEPSEEK_V4_NVFP4,
    FP8_BLOCKS,
    GPT_OSS,
    MODELOPT_AWQ,
    MODELOPT_FP8,
    MODELOPT_FP8_ROWS,
    MODELOPT_MXFP8,
    MODELOPT_NVFP4,
    SGLANG_MXFP8,
)

FORMATS = ("modelopt", "compressed-tensors", "fp8", "sglang-mxfp8", "gpt-oss", "deepseek-v4", "bf16")
ALL_FORMATS = (*FORMATS, "mlx", "comfy")  # the modules in loaders/ cover FORMATS only
# The containers that a conversion with one of FORMATS can write.
WRITTEN = (
    MODELOPT_NVFP4,
    MODELOPT_MXFP8,
    MODELOPT_FP8,
    MODELOPT_FP8_ROWS,
    CT_NVFP4,
    CT_MXFP4,
    CT_MXFP8,
    CT_FP8,
    CT_FP8_ROWS,
    CT_FP8_BLOCKS,
    FP8_BLOCKS,
    SGLANG_MXFP8,
    GPT_OSS,
    DEEPSEEK_V4,
    DEEPSEEK_V4_NVFP4,
)


# how Model-Optimizer declares NVFP4 layers with one factor per column
_AWQ: dict[str, Any] = {"quant_algo": "NVFP4_AWQ", "has_zero_point": False, "pre_quant_scale": True}
# format whose configs can declare layers in several containers -> the name of such a checkpoint in messages
MIXED = {"compressed-tensors": "compressed-tensors mixed-precision", "modelopt": "modelopt MIXED_PRECISION"}


def quant_algo(form: Container, has_input_scale: bool) -> str:
    """Return the value of Model-Optimizer's config entry ``quant_algo`` for a container, such as "NVFP4"."""
    # NVFP4 without input scales is "W4A16_NVFP4", because loaders of plain NVFP4 always read ``input_scale``.
    if form.name == MODELOPT_FP8_ROWS.name:
        return "FP8_PER_CHANNEL_PER_TOKEN"
    name = form.name.removeprefix("modelopt ")
    return "W4A16_NVFP4" if name == "NVFP4" and not has_input_scale else name


def container_id(form: Container, has_input_scale: bool) -> str:
    """Return the name that the modules in fp4kit/checkpoint/loaders use for a container."""
    return f"modelopt {quant_algo(form, has_input_scale)}" if form.format == "modelopt" else form.name


def compressed_format(name: str) -> str:
    """Return the ``format`` that compressed-tensors declares for the layers of one of its containers."""
    is_fp8 = name in (CT_FP8.name, CT_FP8_ROWS.name, CT_FP8_BLOCKS.name)
    return "float-quantized" if is_fp8 else name.removeprefix("compressed-tensors ")


def _producer() -> dict[str, str]:
    """Return the entry ``producer`` of a config in Model-Optimizer's format."""
    return {"name": "modelopt", "version": f"fp4kit-{__version__}"}


def declarations(
    form: Container, ignore: Sequence[str], has_input_scale: bool, own: Mapping[str, Any], layers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs of a converted model: (``quantization_config`` of config.json, hf_quant_config.json)."""
    declared = {**_MAKERS[form.format](form, list(ignore), has_input_scale), "fp4kit": dict(own)}
    if form is DEEPSEEK_V4_NVFP4:
        return _deepseek_v4_nvfp4(form, declared, layers)
    if form.format != "modelopt":
        return declared, None
    quantization: dict[str, Any] = {"quant_algo": quant_algo(form, has_input_scale), "kv_cache_quant_algo": None}
    if form.group_size:
        quantization["group_size"] = form.group_size
    return declared, {"producer": _producer(), "quantization": {**quantization, "exclude_modules": list(ignore)}}


def mixed_declarations(
    layers: Mapping[Container, Sequence[str]], ignore: Sequence[str], scaled: Collection[str], own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs of a model with layers in several containers of compressed-tensors or of Model-Optimizer."""
    if next(iter(layers)).format == "compressed-tensors":
        compressed = {
            f"group_{i}": {**_compressed_group(form, form.name in scaled), "targets": _targets(names)}
            for i, (form, names) in enumerate(layers.items())
        }
        first = _compressed_tensors(next(iter(layers)), list(ignore), False)
        return {**first, "config_groups": compressed, "format": "mixed-precision", "fp4kit": dict(own)}, None
    groups: dict[str, Any] = {}
    algorithms: dict[str, dict[str, Any]] = {}
    for i, (form, names) in enumerate(layers.items()):
        has_input_scale = form.name in scaled
        entry: dict[str, Any] = {"quant_algo": quant_algo(form, has_input_scale)}
        entry |= {"group_size": form.group_size} if form.group_size else {}
        entry |= _AWQ if form is MODELOPT_AWQ else {}
        algorithms |= dict.fromkeys(names, entry)
        groups[f"group_{i}"] = {**_modelopt_group(form, has_input_scale), "targets": sorted(names)}
    listed = {name: dict(algorithms[name]) for name in sorted(algorithms)}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    declared = {"config_groups": groups, "ignore": [], **mixed, "producer": _producer(), "quant_method": "modelopt"}
    beside = {"producer": _producer(), "quantization": {"kv_cache_quant_algo": None, **mixed}}
    return {**declared, "fp4kit": dict(own)}, beside


def _targets(names: Sequence[str]) -> list[str]:
    """Return the targets by which a config group of compressed-tensors names its layers, sorted."""
    found = set()
    for name in names:
        cut = name.rfind(".experts.")
        found.add(name if cut < 0 else f"re:{re.escape(name[: cut + len('.experts.')])}.*")
    return sorted(found)


def _modelopt_group(form: Container, has_input_scale: bool) -> dict[str, Any]:
    """Return the config group of Model-Optimizer for the layers of one container, without the entry ``targets``."""
    one: dict[str, Any] = {"dynamic": False, "num_bits": form.element.bits, "type": "float"}
    one |= {"group_size": form.group_size} if form.group_size else {}
    weights = {**one, "strategy": "channel"} if form.name == MODELOPT_FP8_ROWS.name else dict(one)
    inputs = {"input_activations": one} if has_input_scale or form.kind in ("mxfp8", "fp8 rows") else {}
    return {**inputs, "weights": weights}


def awq_declarations(
    declared: Mapping[str, Any], beside: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return Model-Optimizer's two configs for NVFP4, changed to declare AWQ (layers with a factor per column)."""
    config = {key: value for key, value in declared.items() if key != "config_groups"} | {
        "quant_algo": _AWQ["quant_algo"]
    }
    if beside is None:
        return config, None
    return config, {**beside, "quantization": {**beside["quantization"], **_AWQ}}


def _modelopt(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of Model-Optimizer for layers in one container."""
    config: dict[str, Any] = {}
    if form in (MODELOPT_NVFP4, MODELOPT_FP8):
        one = {"dynamic": False, "num_bits": form.element.bits, "type": "float"}
        one |= {"group_size": form.group_size} if form.group_size else {}
        kinds = ("input_activations", "weights") if has_input_scale else ("weights",)
        config["config_groups"] = {"group_0": {**{kind: dict(one) for kind in kinds}, "targets": ["Linear"]}}
    algo = quant_algo(form, has_input_scale)
    return {**config, "ignore": ignore, "quant_algo": algo, "producer": _producer(), "quant_method": "modelopt"}


def _compressed_tensors(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of compressed-tensors, with one config group for all Linear layers."""
    group = _compressed_group(form, has_input_scale)
    return {
        "config_groups": {"group_0": group},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": group["format"],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore,
    }


def _compressed_group(form: Container, has_input_scale: bool) -> dict[str, Any]:
    """Return the config group of compressed-tensors for the layers of one container."""
    if form.kind in ("fp8 tensor", "fp8 rows"):
        fp8 = {"num_bits": form.element.bits, "type": "float", "symmetric": True}
        weights = {**fp8, "strategy": "channel" if form is CT_FP8_ROWS else "tensor", "dynamic": False}
        inputs: dict[str, Any] | None = {**fp8, "strategy": "token", "dynamic": True}
        if has_input_scale:
            inputs = {**fp8, "strategy": "tensor", "dynamic": False}
        return _group_of(form, weights, inputs)
    if form is CT_FP8_BLOCKS:
        fp8 = {"num_bits": form.element.bits, "type": "float", "symmetric": True}
        weights = {**fp8, "strategy": "block", "block_structure": list(form.block), "dynamic": False}
        return _group_of(form, weights, {**fp8, "strategy": "group", "group_size": form.group_size, "dynamic": True})
    strategy = "tensor_group" if form is CT_NVFP4 else "group"
    scale_dtype = "torch.float8_e4m3fn" if form is CT_NVFP4 else "torch.uint8"
    common = {"num_bits": form.element.bits, "type": "float", "symmetric": True, "group_size": form.group_size}
    common |= {"strategy": strategy}
    weights = {**common, "dynamic": False, "scale_dtype": scale_dtype}
    inputs = (
        {**common, "dynamic": "local", "scale_dtype": scale_dtype, "observer": "static_minmax"}
        if has_input_scale
        else None
    )
    if form is CT_MXFP8:  # vLLM supports MXFP8 only with dynamic activations
        inputs = {**common, "dynamic": True, "scale_dtype": scale_dtype}
    return _group_of(form, weights, inputs)


def _group_of(form: Container, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a config group of compressed-tensors with the given schemes."""
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": compressed_format(form.name),
    }


def _sglang_mxfp8(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` that SGLang reads for MXFP8."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "mxfp8",
        "weight_block_size": [1, form.group_size],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ignore,
    }


def _fp8(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of FP8 in 128x128 blocks, as the releases of DeepSeek-V3 and Qwen3 have it."""
    # The exclusion list is written under two names, because some engines read one name and some the other.
    scheme = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(form.block)}
    return {"quant_method": "fp8", **scheme, "ignored_layers": ignore, "modules_to_not_convert": list(ignore)}


def _gpt_oss(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers reads for gpt-oss."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": ignore}


def _deepseek_v4(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of the DeepSeek-V4 release, a constant."""
    scheme = {"fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quant_method": "fp8", **scheme}


def _deepseek_v4_nvfp4(
    form: Container, declared: dict[str, Any], layers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both configs of a DeepSeek-V4 model with FP8 layers and NVFP4 experts."""
    one = {"quant_algo": "NVFP4", "group_size": form.group_size}
    expert_modules = sorted({name.partition(".experts.")[0] + ".experts" for name in layers})
    ignore = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
    half = {"dynamic": False, "num_bits": form.element.bits, "type": "float", "group_size": form.group_size}
    mixed: dict[str, Any] = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": form.group_size,
    }
    mixed |= {"quantized_layers": {name: one for name in expert_modules}}
    groups = {"group_0": {"input_activations": half, "weights": half, "targets": ["Linear"]}}
    found = {
        **declared,
        "moe_quant_algo": "NVFP4",
        **mixed,
        "config_groups": groups,
        "ignore": ignore,
        "producer": _producer(),
    }
    return found, {"producer": _producer(), "quantization": {**mixed, "exclude_modules": ignore}}


# format -> the function that returns its quantization_config
_MAKERS = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "sglang-mxfp8": _sglang_mxfp8,
    "gpt-oss": _gpt_oss,
    "deepseek-v4": _deepseek_v4,
}
