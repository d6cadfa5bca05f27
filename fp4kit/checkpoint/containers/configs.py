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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.containers.engines import Finding, finding
from fp4kit.checkpoint.containers.table import (
    CONTAINERS,
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
    Container,
)

KEYS = ("quantization_config", "compression_config")
# The entries that list unquantized layers, in the configs of all tools.
EXCLUSIONS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers")


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, content) for a config and for each config nested in it, at any depth."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and key not in KEYS and isinstance(value, Mapping):
            yield from ((f"{key}.{path}", section) for path, section in sections(value))


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first nonempty object under one of KEYS in config.json and its nested configs; {} if there is none."""
    values = (section.get(key) for _, section in sections(config) for key in KEYS)
    return next((value for value in values if isinstance(value, Mapping) and value), {})


def with_declaration(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the config with the checkpoint's declaration of its quantization under the key ``quantization_config``."""
    # If config.json declares a quantization, that is used; otherwise the declaration in hf_quant_config.json.
    found = declared(config)
    other = (found or hf_quant_config or {}).get("quantization")
    if isinstance(other, Mapping):
        found = {"quant_method": "modelopt", **other, "ignore": other.get("exclude_modules") or []}
    elif config.get("quantization_config"):
        return config
    return {**config, "quantization_config": found} if found else config


def without_declarations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of config.json, and of the configs nested in it, without the entries that declare quantization."""
    return _without(config, (*KEYS, "quantization", "expert_dtype"))


def _without(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of a config without the given keys."""
    return {
        key: _without(value, keys if key == "text_config" else KEYS)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in keys
    }


def entries(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all entries that the config files of a checkpoint declare about its quantization."""
    for found in (declared(config), hf_quant_config or {}):
        inner = found.get("quantization")
        yield from found.items() if found is not hf_quant_config else ()
        yield from inner.items() if isinstance(inner, Mapping) else ()


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


KINDS = ("nvfp4", "mxfp4", "mxfp8", "fp8 tensor", "fp8 rows", "fp8")
_SYNTAX = {
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "fp8": "names",
    "sglang-mxfp8": "dotted",
    "gpt-oss": "mxfp4",
}


@dataclass(frozen=True)
class LoaderContainer:
    """Describe one container that engines load.

    id: the unique name, such as "modelopt NVFP4".
    format: the value of ``--format`` that writes it.
    kind: the kind of the recipes that it stores, such as "nvfp4"; None for unquantized weights.
    group_size: the number of elements that share a block scale; None for unquantized weights, and for
        FP8 with one scale per layer or per row.
    syntax: the syntax of its exclusion list, such as "modelopt"; see ``exclusions.exclusion_list``. None if it has no
        list.
    """

    id: str
    format: str
    kind: str | None
    group_size: int | None = None
    syntax: str | None = None


def _declared() -> dict[str, LoaderContainer]:
    """Return a dict from id to container, for the containers that FORMATS write."""
    ids = [(container_id(MODELOPT_NVFP4, False), MODELOPT_NVFP4)]
    ids += [(container_id(form, True), form) for form in CONTAINERS if form.format in FORMATS]
    found = {
        id: LoaderContainer(id, form.format, form.kind, form.group_size or None, _SYNTAX.get(form.format))
        for id, form in ids
    }
    return found | {"bf16": LoaderContainer("bf16", "bf16", None)}


LOADED = _declared()
# Mixtures: checkpoints whose layers have several of LOADED, as their configs call them.
MIXTURES = {name: LoaderContainer(name, format, "mixed", None, _SYNTAX[format]) for format, name in MIXED.items()}


def loaded_container(format: str, kind: str, *, input_scale: bool = False) -> LoaderContainer | None:
    """Return the container in which ``format`` stores recipes of ``kind``, or None if it cannot store them."""
    for name, value, allowed in (("format", format, FORMATS), ("recipe kind", kind, KINDS)):
        if value not in allowed:
            raise ValueError(f"container: {name} {value!r}; one of {', '.join(allowed)} is needed")
    if input_scale and (format, kind) == ("modelopt", "nvfp4"):
        return LOADED["modelopt NVFP4"]
    return next((each for each in LOADED.values() if each.format == format and each.kind in (kind, None)), None)


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
    used = LOADED[container].format
    needed = _METHODS.get(used)
    method = str(quantization_config(config).get("quant_method", ""))
    matches = method.lower().startswith("modelopt") if used == "modelopt" else method == needed
    if needed and not matches:
        text = f"quantization_config.quant_method is {method!r}; {needed!r} is needed"
        yield finding(_READER.get(used, "vLLM"), "error", _CONFIG, text)


# Model-Optimizer's container -> other quant_algo values whose layers have the tensors of this container, and perhaps
# further tensors.
_CONTAINERS_LIKE = {
    "NVFP4": ("NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"),
    "W4A16_NVFP4": ("NVFP4_AWQ", "NVFP4_SVD"),
    "mxfp4": ("W4A8_MXFP4_FP8",),
}
KNOWN_TO = {"vLLM": (), "SGLang": ("NVFP4_AWQ",)}  # engine -> the algorithms of _CONTAINERS_LIKE that it loads


def _require_modelopt(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of a Model-Optimizer config that does not fit the tensors."""
    section = quantization_config(config)
    algo, needed = section.get("quant_algo"), container.removeprefix("modelopt ")
    text = f"quantization_config.quant_algo is {algo!r}; the tensors are {needed!r}"
    if str(algo).upper() in _CONTAINERS_LIKE.get(needed, ()):  # an algorithm that stores such tensors, such as AWQ
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
    size, needed = section.get("group_size"), LOADED[container].group_size
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


def _require_compressed_tensors(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
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


def _require_fp8(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each entry of an fp8 config that does not fit: the block size and the activation scheme."""
    section, size = quantization_config(config), LOADED[container].group_size
    for key, needed in (("weight_block_size", [size, size]), ("activation_scheme", "dynamic")):
        if section.get(key) != needed:
            text = f"quantization_config.{key} is {section.get(key)!r}; {needed!r} is needed"
            yield finding("vLLM", "error", _CONFIG, text)


def _require_gpt_oss(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the ``model_type`` of config.json is not "gpt_oss", or if there is none."""
    if config.get("model_type") != "gpt_oss":
        text = f"model_type is {config.get('model_type')!r}; blocks and scales are read only for 'gpt_oss'"
        yield finding("vLLM", "error", _CONFIG, text)


def _require_deepseek_v4(container: str, config: Mapping[str, Any]) -> Iterator[Finding]:
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
    if LOADED[container].kind == "nvfp4" and algo != "NVFP4":
        yield finding("vLLM", "error", _CONFIG, f"quantization_config.moe_quant_algo is {algo!r}; 'NVFP4' is needed")


_CHECKS = {
    "modelopt": _require_modelopt,
    "compressed-tensors": _require_compressed_tensors,
    "fp8": _require_fp8,
    "gpt-oss": _require_gpt_oss,
    "deepseek-v4": _require_deepseek_v4,
}


def _nested(container: str, config: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if hf_quant_config.json lacks entries, and one for each entry that contradicts config.json."""
    section = _section(nested, "quantization")
    needed = ("kv_cache_quant_algo", "exclude_modules")
    keys = (*needed, "group_size") if LOADED[container].kind == "nvfp4" else needed
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


def config_findings(
    container: str, config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, tensors: Collection[str]
) -> list[Finding]:
    """Return a finding for each entry of a checkpoint's configs that an engine would reject or misread."""
    used = LOADED[container].format
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
