"""Check that the configs of a quantized checkpoint (config.json, hf_quant_config.json) declare what engines require. A
container, such as "modelopt NVFP4", is a way to store quantized layers as tensors. A finding is a fault that one engine
would meet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.containers.configs import compressed_format
from fp4kit.checkpoint.loaders.containers import CONTAINERS
from fp4kit.checkpoint.loaders.engines import Finding, finding

_METHODS = {
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "sglang-mxfp8": "mxfp8",
    "gpt-oss": "mxfp4",
}
_READER = {"sglang-mxfp8": "SGLang"}  # format -> the engine that requires its quant_method; vLLM for other formats
_CONFIG, _HF = "config.json", "hf_quant_config.json"


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under ``key`` of a config, or {} if there is none or it is not an object."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry ``quantization_config`` of config.json, or {} if there is none or it is not an object."""
    return _section(config, "quantization_config")


def groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the objects in ``config_groups`` of a config.json; [] if there are none. Other values are left out."""
    found = quantization_config(config).get("config_groups")
    return [group for group in found.values() if isinstance(group, Mapping)] if isinstance(found, Mapping) else []


_WITH_INPUT_SCALES = (
    "compressed-tensors nvfp4-pack-quantized",
    "compressed-tensors FP8",
    "compressed-tensors FP8 per row",
)


def has_static_inputs(container: str, config: Mapping[str, Any]) -> bool:
    """Return whether the config of compressed-tensors requires the checkpoint to store input scales."""
    inputs = [_section(group, "input_activations") for group in groups(config)]
    stored = any(each and each.get("dynamic") is not True for each in inputs)
    return stored and container in _WITH_INPUT_SCALES


def _method(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the config does not declare the ``quant_method`` with which engines load this container."""
    used = CONTAINERS[container].format
    needed = _METHODS.get(used)
    method = str(quantization_config(config).get("quant_method", ""))
    matches = method.lower().startswith("modelopt") if used == "modelopt" else method == needed
    if needed and not matches:
        text = f"quantization_config.quant_method is {method!r}; {needed!r} is needed"
        yield finding(_READER.get(used, "vLLM"), "error", _CONFIG, text)


# Model-Optimizer's container -> other quant_algo values whose layers have the tensors of this container, and perhaps
# further tensors.
_STORED_LIKE = {
    "NVFP4": ("NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"),
    "W4A16_NVFP4": ("NVFP4_AWQ", "NVFP4_SVD"),
    "mxfp4": ("W4A8_MXFP4_FP8",),
}
KNOWN_TO = {"vLLM": (), "SGLang": ("NVFP4_AWQ",)}  # engine -> the algorithms of _STORED_LIKE that it loads


def _modelopt(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of a Model-Optimizer config that does not fit the tensors."""
    section = quantization_config(config)
    algo, needed = section.get("quant_algo"), container.removeprefix("modelopt ")
    text = f"quantization_config.quant_algo is {algo!r}; the tensors are {needed!r}"
    if str(algo).upper() in _STORED_LIKE.get(needed, ()):  # an algorithm that stores such tensors, such as AWQ
        for engine in ("vLLM", "SGLang"):
            if str(algo).upper() not in KNOWN_TO[engine]:
                yield finding(engine, "warning", _CONFIG, f"fails: it does not know quant_algo {algo!r}")
        return
    if str(algo).upper() != needed.upper():
        yield finding("vLLM", "error", _CONFIG, text)
    if algo != needed:
        yield finding("SGLang", "error", _CONFIG, text)  # SGLang compares case-sensitively
    inputs = [_section(group, "input_activations") for group in groups(config)]
    if container == "modelopt NVFP4" and inputs and not any(inputs):
        text = (
            "no group of config_groups has input_activations: the engine treats NVFP4 as W4A16_NVFP4 and ignores"
            " input_scale"
        )
        yield finding("vLLM", "warning", _CONFIG, text)
    yield from _group_size(container, section)


def _group_size(container: str, section: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for vLLM and one for SGLang if the config declares a group size that is not the container's."""
    size, needed = section.get("group_size"), CONTAINERS[container].group_size
    if size is not None and size != needed:
        for engine in ("vLLM", "SGLang"):
            yield finding(
                engine, "error", _CONFIG, f"quantization_config.group_size is {size!r}; the tensors have {needed}"
            )


def is_mixed(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json declares Model-Optimizer's MIXED_PRECISION, which has an algorithm per layer."""
    declared = quantization_config(config)
    method = str(declared.get("quant_method", "")).lower()
    return method.startswith("modelopt") and str(declared.get("quant_algo", "")).upper() == "MIXED_PRECISION"


def unlisted_layers(config: Mapping[str, Any], layers: Iterable[str]) -> Iterator[str]:
    """Yield the quantized layers that a MIXED_PRECISION config does not list, so that engines miss them."""
    listed = set(_section(quantization_config(config), "quantized_layers"))
    for name in layers:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in listed for count in range(1, len(parts) + 1)):
            yield name


def declared_for(kind: str, container: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a mixed checkpoint's config.json with only the declarations for the layers of one container."""
    declared = quantization_config(config)
    layers = declared.get("quantized_layers")
    if isinstance(layers, Mapping) and is_mixed(config):
        algorithms = {str(each.get("quant_algo")) for each in layers.values() if isinstance(each, Mapping)}
        needed = container.removeprefix("modelopt ")
        fitting = sorted(one for one in algorithms if one == needed or one.upper().endswith(kind.upper()))
        fitting.sort(key=lambda one: one != needed)
        if fitting:
            return {**config, "quantization_config": {**declared, "quant_algo": fitting[0]}}
    form = compressed_format(container)
    found = declared.get("config_groups")
    if declared.get("format") == "mixed-precision" and isinstance(found, Mapping):
        own = {n: each for n, each in found.items() if isinstance(each, Mapping) and each.get("format") == form}
        strategy = _CT_WEIGHTS.get(container, {}).get("strategy")
        fitting_groups = {n: each for n, each in own.items() if _section(each, "weights").get("strategy") == strategy}
        own = fitting_groups or own
        return {**config, "quantization_config": {**declared, "format": form, "config_groups": own}}
    return config


_CT_WEIGHTS: dict[str, dict[str, Any]] = {
    "compressed-tensors nvfp4-pack-quantized": {"strategy": "tensor_group", "num_bits": 4, "group_size": 16},
    "compressed-tensors mxfp4-pack-quantized": {"strategy": "group", "num_bits": 4, "group_size": 32},
    "compressed-tensors mxfp8-quantized": {"strategy": "group", "num_bits": 8, "group_size": 32},
    "compressed-tensors FP8": {"strategy": "tensor", "num_bits": 8},
    "compressed-tensors FP8 per row": {"strategy": "channel", "num_bits": 8},
    "compressed-tensors FP8 128x128": {"strategy": "block", "num_bits": 8, "block_structure": [128, 128]},
}


def _compressed_tensors(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of a compressed-tensors config that does not fit the tensors."""
    needed_format = compressed_format(container)
    if (found := quantization_config(config).get("format")) != needed_format:
        yield finding(
            "vLLM", "error", _CONFIG, f"quantization_config.format is {found!r}; the tensors are {needed_format!r}"
        )
    needed = {**_CT_WEIGHTS[container], "type": "float", "symmetric": True}
    if not groups(config):
        yield finding("vLLM", "error", _CONFIG, "quantization_config has no config_groups; no layer would be quantized")
    for group in groups(config):
        weights = _section(group, "weights")
        wrong = [
            f"{key} is {weights.get(key)!r} ({value!r})" for key, value in needed.items() if weights.get(key) != value
        ]
        if wrong:
            text = f"weights of config_groups: {', '.join(wrong)}: does not describe the tensors (values in brackets)"
            yield finding("vLLM", "error", _CONFIG, text)


def _fp8(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of an fp8 config that does not fit: the block size and the activation scheme."""
    section, size = quantization_config(config), CONTAINERS[container].group_size
    for key, needed in (("weight_block_size", [size, size]), ("activation_scheme", "dynamic")):
        if section.get(key) != needed:
            text = f"quantization_config.{key} is {section.get(key)!r}; {needed!r} is needed"
            yield finding("vLLM", "error", _CONFIG, text)


def _gpt_oss(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the ``model_type`` of config.json is not "gpt_oss", or if there is none."""
    if config.get("model_type") != "gpt_oss":
        text = f"model_type is {config.get('model_type')!r}; blocks and scales are read only for 'gpt_oss'"
        yield finding("vLLM", "error", _CONFIG, text)


def _deepseek_v4(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of a DeepSeek-V4 config that does not fit the tensors."""
    method, model_type = quantization_config(config).get("quant_method"), config.get("model_type")
    if model_type == "deepseek_v41":
        yield finding("vLLM", "warning", _CONFIG, "model_type is 'deepseek_v41', which was not tried with this engine")
    for key, value, needed in (
        ("model_type", "deepseek_v4" if model_type == "deepseek_v41" else model_type, "deepseek_v4"),
        ("quantization_config.quant_method", method, "fp8"),
        ("expert_dtype", config.get("expert_dtype", "fp4"), "fp4"),
    ):
        if value != needed:
            yield finding("vLLM", "error", _CONFIG, f"{key} is {value!r}; {needed!r} is needed")
    algo = quantization_config(config).get("moe_quant_algo")
    if CONTAINERS[container].kind == "nvfp4" and algo != "NVFP4":
        yield finding("vLLM", "error", _CONFIG, f"quantization_config.moe_quant_algo is {algo!r}; 'NVFP4' is needed")


_CHECKS = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gpt-oss": _gpt_oss,
    "deepseek-v4": _deepseek_v4,
}


def _nested(container: str, config: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if hf_quant_config.json lacks entries, and one for each entry that contradicts config.json."""
    section = _section(nested, "quantization")
    needed = ("kv_cache_quant_algo", "exclude_modules")
    keys = (*needed, "group_size") if CONTAINERS[container].kind == "nvfp4" else needed
    missing = [key for key in keys if key not in section]
    if missing:
        yield finding("vLLM", "error", _HF, f"quantization lacks {', '.join(missing)}; loading fails without it")
    outer = quantization_config(config)
    pairs = (("quant_algo", "quant_algo"), ("exclude_modules", "ignore"))
    for key, other in pairs:
        nested_value, config_value = section.get(key), outer.get(other)
        if nested_value is not None and config_value is not None and nested_value != config_value:
            text = f"quantization.{key} differs from {other} in {_CONFIG}; which one is used depends on the engine"
            yield finding("vLLM", "warning", _HF, text)


def _kv_cache(config: Mapping[str, Any], nested: Mapping[str, Any], tensors: Collection[str]) -> Iterator[Finding]:
    """Yield a finding if a config declares an FP8 KV cache, but the checkpoint has neither a k_scale nor a v_scale."""
    scheme = _section(quantization_config(config), "kv_cache_scheme")
    declared = scheme.get("num_bits") == 8 or _section(nested, "quantization").get("kv_cache_quant_algo") == "FP8"
    if declared and not any(name.endswith((".k_scale", ".v_scale")) for name in tensors):
        yield finding("vLLM", "warning", _CONFIG, "an FP8 KV cache is declared, but no k_scale or v_scale is stored")


def findings(
    container: str, config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, tensors: Collection[str]
) -> list[Finding]:
    """Return a finding for each entry of a checkpoint's configs that an engine would reject or misread."""
    used = CONTAINERS[container].format
    found = list(_method(container, config))
    if used in _CHECKS:
        found.extend(_CHECKS[used](container, config))
    # Model-Optimizer writes hf_quant_config.json for its own containers and for DeepSeek-V4 with NVFP4 experts.
    if hf_quant_config is not None and (used == "modelopt" or container == "deepseek-v4 nvfp4"):
        found.extend(_nested(container, config, hf_quant_config))
    elif hf_quant_config is not None:
        text = f"belongs to another format; {used} checkpoints have no such file; remove it"
        found.append(finding("vLLM", "warning", _HF, text))
    found.extend(_kv_cache(config, hf_quant_config or {}, tensors))
    return found
