"""Declare quantization in the config files of a checkpoint (config.json, hf_quant_config.json): find declarations,
write them as the original producers do, and check that they say what engines require. An exclusion list names the
layers that loaders must treat as unquantized. A config group describes the layers that match its targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fp4kit import __version__
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.engines import Issue, finding
from fp4kit.checkpoint.containers.table import CONTAINERS, MODELOPT_NVFP4, Config, Container

# Find declarations --------------------------------------------------------------------------------------------------
# Most tools write ``quantization_config`` at the top level of config.json. Multimodal models may have it in a nested
# config. Older versions of compressed-tensors wrote ``compression_config``, those of Model-Optimizer only
# hf_quant_config.json.

KEYS = ("quantization_config", "compression_config")
# The entries that list unquantized layers, in the configs of all tools.
EXCLUSIONS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers")


def sections(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield (path, content) for a config and for each config nested in it, at any depth."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and key not in KEYS and isinstance(value, Mapping):
            yield from ((f"{key}.{path}", section) for path, section in sections(value))


def declared(config: Config) -> Config:
    """Return the first nonempty object under one of KEYS in config.json and its nested configs; {} if there is none."""
    values = (section.get(key) for _, section in sections(config) for key in KEYS)
    return next((value for value in values if isinstance(value, Mapping) and value), {})


def with_declaration(config: Config, hf_quant_config: Config | None) -> Config:
    """Return the config with the checkpoint's declaration of its quantization under the key ``quantization_config``."""
    # If config.json declares a quantization, that is used; otherwise the declaration in hf_quant_config.json.
    found = declared(config)
    other = (found or hf_quant_config or {}).get("quantization")
    if isinstance(other, Mapping):
        found = {"quant_method": "modelopt", **other, "ignore": other.get("exclude_modules") or []}
    elif config.get("quantization_config"):
        return config
    return {**config, "quantization_config": found} if found else config


def without_declarations(config: Config) -> dict[str, Any]:
    """Return a copy of config.json, and of the configs nested in it, without the entries that declare quantization."""
    return _without(config, (*KEYS, "quantization", "expert_dtype"))


def _without(config: Config, keys: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: _without(value, keys if key == "text_config" else KEYS)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in keys
    }


def entries(config: Config, hf_quant_config: Config | None) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all entries that the config files of a checkpoint declare about its quantization."""
    for found in (declared(config), hf_quant_config or {}):
        inner = found.get("quantization")
        yield from found.items() if found is not hf_quant_config else ()
        yield from inner.items() if isinstance(inner, Mapping) else ()


def _section(config: Config, key: str) -> Config:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def quantization_config(config: Config) -> Config:
    """Return the entry ``quantization_config`` of config.json, or {} if there is none or it is not an object."""
    return _section(config, "quantization_config")


def _groups(config: Config) -> list[Config]:
    found = _section(quantization_config(config), "config_groups").values()
    return [group for group in found if isinstance(group, Mapping)]


def _inputs(config: Config) -> list[Config]:
    return [_section(group, "input_activations") for group in _groups(config)]


# Write declarations -------------------------------------------------------------------------------------------------

_AWQ: dict[str, Any] = {"quant_algo": "NVFP4_AWQ", "has_zero_point": False, "pre_quant_scale": True}
_PRODUCER = {"name": "modelopt", "version": f"fp4kit-{__version__}"}
# format whose configs can declare layers in several containers -> the name of such a checkpoint in messages
MIXED = {"compressed-tensors": "compressed-tensors mixed-precision", "modelopt": "modelopt MIXED_PRECISION"}


def quant_algo(form: Container, has_input_scale: bool) -> str:
    """Return the value of Model-Optimizer's config entry ``quant_algo`` for a container, such as "NVFP4"."""
    # NVFP4 without input scales is "W4A16_NVFP4", because loaders of plain NVFP4 always read ``input_scale``.
    if form.name == table.MODELOPT_FP8_ROWS.name:
        return "FP8_PER_CHANNEL_PER_TOKEN"
    name = form.name.removeprefix("modelopt ")
    return "W4A16_NVFP4" if name == "NVFP4" and not has_input_scale else name


def container_id(form: Container, has_input_scale: bool) -> str:
    """Return the name that the modules in fp4kit/checkpoint/loaders use for a container."""
    return f"modelopt {quant_algo(form, has_input_scale)}" if form.format == "modelopt" else form.name


def compressed_format(name: str) -> str:
    """Return the ``format`` that compressed-tensors declares for the layers of one of its containers."""
    name = name.removeprefix("compressed-tensors ")
    return "float-quantized" if name.startswith("FP8") else name


def declarations(
    form: Container, ignore: Sequence[str], has_input_scale: bool, own: Config, layers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs of a converted model: (``quantization_config`` of config.json, hf_quant_config.json)."""
    row, listed = DECLARATIONS[form.format], list(ignore)
    written = row.written if isinstance(row.written, dict) else row.written(form, listed, has_input_scale)
    declared = {**written, **{key: list(ignore) for key in row.lists}, "fp4kit": dict(own)}
    if form is table.DEEPSEEK_V4_NVFP4:
        return _deepseek_v4_nvfp4(form, declared, layers)
    if form.format != "modelopt":
        return declared, None
    quantization: dict[str, Any] = {"quant_algo": quant_algo(form, has_input_scale), "kv_cache_quant_algo": None}
    if form.group_size:
        quantization["group_size"] = form.group_size
    return declared, {"producer": _PRODUCER, "quantization": {**quantization, "exclude_modules": list(ignore)}}


def mixed_declarations(
    layers: Mapping[Container, Sequence[str]], ignore: Sequence[str], scaled: Collection[str], own: Config
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs of a model with layers in several containers of compressed-tensors or of Model-Optimizer."""
    if next(iter(layers)).format == "compressed-tensors":
        compressed = {
            f"group_{i}": {**_compressed_group(form, form.name in scaled), "targets": _targets(names)}
            for i, (form, names) in enumerate(layers.items())
        }
        first = _write_compressed_tensors(next(iter(layers)), list(ignore), False)
        return {**first, "config_groups": compressed, "format": "mixed-precision", "fp4kit": dict(own)}, None
    groups: dict[str, Any] = {}
    algorithms: dict[str, dict[str, Any]] = {}
    for i, (form, names) in enumerate(layers.items()):
        has_input_scale = form.name in scaled
        entry: dict[str, Any] = {"quant_algo": quant_algo(form, has_input_scale)}
        entry |= {"group_size": form.group_size} if form.group_size else {}
        entry |= _AWQ if form is table.MODELOPT_AWQ else {}
        algorithms |= {name: dict(entry) for name in names}
        groups[f"group_{i}"] = {**_modelopt_group(form, has_input_scale), "targets": sorted(names)}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict(sorted(algorithms.items()))}
    declared = {"config_groups": groups, "ignore": [], **mixed, "producer": _PRODUCER, "quant_method": "modelopt"}
    beside = {"producer": _PRODUCER, "quantization": {"kv_cache_quant_algo": None, **mixed}}
    return {**declared, "fp4kit": dict(own)}, beside


def _targets(names: Sequence[str]) -> list[str]:
    """Return the targets by which a config group of compressed-tensors names its layers, sorted."""
    found = set()
    for name in names:
        cut = name.rfind(".experts.")
        found.add(name if cut < 0 else f"re:{re.escape(name[: cut + len('.experts.')])}.*")
    return sorted(found)


def awq_declarations(declared: Config, beside: Config | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return Model-Optimizer's two configs for NVFP4, changed to declare AWQ (layers with a factor per column)."""
    config = {key: value for key, value in declared.items() if key != "config_groups"}
    config |= {"quant_algo": _AWQ["quant_algo"]}
    if beside is None:
        return config, None
    return config, {**beside, "quantization": {**beside["quantization"], **_AWQ}}


def _modelopt_group(form: Container, has_input_scale: bool) -> dict[str, Any]:
    """Return the config group of Model-Optimizer for the layers of one container, without the entry ``targets``."""
    one: dict[str, Any] = {"dynamic": False, "num_bits": form.element.bits, "type": "float"}
    one |= {"group_size": form.group_size} if form.group_size else {}
    weights = {**one, "strategy": "channel"} if form.name == table.MODELOPT_FP8_ROWS.name else dict(one)
    inputs = {"input_activations": one} if has_input_scale or form.kind in ("mxfp8", "fp8 rows") else {}
    return {**inputs, "weights": weights}


def _write_modelopt(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    # Model-Optimizer 0.47, modelopt/torch/export quant_utils.py and convert_hf_config.py
    config: dict[str, Any] = {}
    if form in (MODELOPT_NVFP4, table.MODELOPT_FP8):
        config["config_groups"] = {"group_0": {**_modelopt_group(form, has_input_scale), "targets": ["Linear"]}}
    algo = quant_algo(form, has_input_scale)
    return {**config, "ignore": ignore, "quant_algo": algo, "producer": _PRODUCER, "quant_method": "modelopt"}


def _write_compressed_tensors(form: Container, ignore: list[str], has_input_scale: bool) -> dict[str, Any]:
    # as compressed-tensors 0.20 writes its own QuantizationConfig
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
    common: dict[str, Any] = {"num_bits": form.element.bits, "type": "float", "symmetric": True}
    inputs: dict[str, Any] | None = None
    if form.kind in ("fp8 tensor", "fp8 rows"):
        weights = {**common, "strategy": "channel" if form.kind == "fp8 rows" else "tensor", "dynamic": False}
        inputs = {**common, "strategy": "token", "dynamic": True}
        if has_input_scale:
            inputs = {**common, "strategy": "tensor", "dynamic": False}
    elif form.kind == "fp8":
        weights = {**common, "strategy": "block", "block_structure": list(form.block), "dynamic": False}
        inputs = {**common, "strategy": "group", "group_size": form.group_size, "dynamic": True}
    else:
        common |= {"group_size": form.group_size, "strategy": "tensor_group" if form is table.CT_NVFP4 else "group"}
        scales = {"scale_dtype": "torch.float8_e4m3fn" if form is table.CT_NVFP4 else "torch.uint8"}
        weights = {**common, "dynamic": False, **scales}
        if form is table.CT_MXFP8 or (form is table.CT_MXFP4 and has_input_scale):
            # vLLM supports MXFP8 only with dynamic activations, and MXFP4 has no scale of inputs to store.
            inputs = {**common, "dynamic": True, **scales}
        elif has_input_scale:
            inputs = {**common, "dynamic": "local", **scales, "observer": "static_minmax"}
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": compressed_format(form.name),
    }


_TILES = [128, 128]
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": _TILES}
_SGLANG_MXFP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "mxfp8", "weight_block_size": [1, 32]}
_SGLANG_MXFP8["scale_fmt"] = "ue8m0"
_DEEPSEEK_V4: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
_DEEPSEEK_V4 |= {"activation_scheme": "dynamic", "weight_block_size": _TILES}


def _deepseek_v4_nvfp4(
    form: Container, declared: dict[str, Any], layers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both configs of a DeepSeek-V4 model with FP8 layers and NVFP4 experts."""
    one = {"quant_algo": "NVFP4", "group_size": form.group_size}
    expert_modules = sorted({name.partition(".experts.")[0] + ".experts" for name in layers})
    ignore = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
    half = {"dynamic": False, "num_bits": form.element.bits, "type": "float", "group_size": form.group_size}
    mixed: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    mixed |= {"group_size": form.group_size, "quantized_layers": dict.fromkeys(expert_modules, one)}
    groups = {"group_0": {"input_activations": half, "weights": half, "targets": ["Linear"]}}
    more = {"config_groups": groups, "ignore": ignore, "producer": _PRODUCER}
    found = {**declared, "moe_quant_algo": "NVFP4", **mixed, **more}
    return found, {"producer": _PRODUCER, "quantization": {**mixed, "exclude_modules": ignore}}


# Check what engines require -----------------------------------------------------------------------------------------

_CONFIG, _HF = "config.json", "hf_quant_config.json"


def has_static_inputs(container: str, config: Config) -> bool:
    """Return whether the config of compressed-tensors requires the checkpoint to store input scales."""
    form = LOADED[container].form
    stores = form is not None and form.format == "compressed-tensors" and table.INPUT_SCALE in form.suffixes
    if form is None or not stores or form.kind == "fp8":
        return False
    inputs = _inputs(config)
    return any(each and each.get("dynamic") is not True for each in inputs)


def keeps_inputs(config: Config) -> bool:
    """Return whether a config declares that the inputs of its quantized layers stay unquantized."""
    return ignored_scales(config) == _UNQUANTIZED or quantization_config(config).get("quant_algo") == "W4A16_NVFP4"


def is_weight_only(config: Config) -> bool:
    """Return whether a config has groups of layers, and none of them declares quantized inputs."""
    return bool(inputs := _inputs(config)) and not any(inputs)


def ignored_scales(config: Config) -> str:
    """Return what a config of compressed-tensors declares instead of stored input scales; "" if it may use them."""
    inputs = _inputs(config)
    if quantization_config(config).get("quant_method") != "compressed-tensors" or not inputs:
        return ""
    if not any(inputs):
        return _UNQUANTIZED
    is_dynamic = all(each.get("dynamic") is True for each in inputs if each)
    return "quantization_config declares that engines compute the scales of inputs (dynamic: true)" * is_dynamic


_UNQUANTIZED = "quantization_config declares unquantized inputs (input_activations)"


def _needs(config: Config, **needed: Any) -> Iterator[Issue]:
    """Yield a finding for each key of ``quantization_config`` that does not have the value that vLLM needs."""
    for key, value in needed.items():
        found = quantization_config(config).get(key)
        if found != value:
            text = f"quantization_config.{key} is {found!r}; {value!r} is needed"
            yield finding("vLLM", "error", _CONFIG, text)


# Model-Optimizer's container -> other quant_algo values whose layers have the tensors of this container, and perhaps
# further tensors.
_STORED_LIKE = {
    "NVFP4": ("NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"),
    "W4A16_NVFP4": ("NVFP4_AWQ", "NVFP4_SVD"),
    "mxfp4": ("W4A8_MXFP4_FP8",),
}
_KNOWN_TO = {"vLLM": (), "SGLang": ("NVFP4_AWQ",)}  # engine -> the algorithms of _STORED_LIKE that it loads


def _require_modelopt(container: str, form: Container, config: Config) -> Iterator[Issue]:
    section = quantization_config(config)
    algo, needed = section.get("quant_algo"), container.removeprefix("modelopt ")
    if str(algo).upper() in _STORED_LIKE.get(needed, ()):  # an algorithm that stores such tensors, such as AWQ
        for engine in ("vLLM", "SGLang"):
            if str(algo).upper() not in _KNOWN_TO[engine]:
                yield finding(engine, "warning", _CONFIG, f"fails: it does not know quant_algo {algo!r}")
        return
    text = f"quantization_config.quant_algo is {algo!r}; the tensors are {needed!r}"
    if str(algo).upper() != needed.upper():
        yield finding("vLLM", "error", _CONFIG, text)
    if algo != needed:
        yield finding("SGLang", "error", _CONFIG, text)  # SGLang compares case-sensitively
    if container == "modelopt NVFP4" and is_weight_only(config):
        text = "no group has input_activations: the engine treats NVFP4 as W4A16_NVFP4 and ignores input_scale"
        yield finding("vLLM", "warning", _CONFIG, text)
    size, group_size = section.get("group_size"), form.group_size or None
    if size is not None and size != group_size:
        for engine in ("vLLM", "SGLang"):
            text = f"quantization_config.group_size is {size!r}; the tensors have {group_size}"
            yield finding(engine, "error", _CONFIG, text)


def is_mixed(config: Config) -> bool:
    """Return whether a config.json declares Model-Optimizer's MIXED_PRECISION, which has an algorithm per layer."""
    declared = quantization_config(config)
    method = str(declared.get("quant_method", "")).lower()
    return method.startswith("modelopt") and str(declared.get("quant_algo", "")).upper() == "MIXED_PRECISION"


def unlisted_layers(config: Config, layers: Iterable[str]) -> Iterator[str]:
    """Yield the quantized layers that a MIXED_PRECISION config does not list, so that engines miss them."""
    listed = set(_section(quantization_config(config), "quantized_layers"))
    for name in layers:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in listed for count in range(1, len(parts) + 1)):
            yield name


def declared_for(kind: str, container: str, config: Config) -> Config:
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
    found = declared.get("config_groups")
    if declared.get("format") != "mixed-precision" or not isinstance(found, Mapping):
        return config
    form = compressed_format(container)
    own = {n: each for n, each in found.items() if isinstance(each, Mapping) and each.get("format") == form}
    written = (one for one in CONTAINERS if one.name == container and one.format == "compressed-tensors")
    strategy = next((_compressed_group(one, False)["weights"]["strategy"] for one in written), None)
    fitting_groups = {n: each for n, each in own.items() if _section(each, "weights").get("strategy") == strategy}
    more = {"format": form, "config_groups": fitting_groups or own}
    return {**config, "quantization_config": {**declared, **more}}


def _require_compressed_tensors(container: str, form: Container, config: Config) -> Iterator[Issue]:
    needed_format = compressed_format(container)
    if (found := quantization_config(config).get("format")) != needed_format:
        text = f"quantization_config.format is {found!r}; the tensors are {needed_format!r}"
        yield finding("vLLM", "error", _CONFIG, text)
    if not _groups(config):
        yield finding("vLLM", "error", _CONFIG, "quantization_config has no config_groups; no layer would be quantized")
    written = _compressed_group(form, False)["weights"]
    keys = ("strategy", "num_bits", "group_size", "block_structure", "type", "symmetric")
    needed = {key: written[key] for key in keys if key in written}
    for group in _groups(config):
        own = _section(group, "weights")
        wrong = [f"{key} is {own.get(key)!r} ({value!r})" for key, value in needed.items() if own.get(key) != value]
        if wrong:
            text = f"weights of config_groups: {', '.join(wrong)}: does not describe the tensors (values in brackets)"
            yield finding("vLLM", "error", _CONFIG, text)


def _require_fp8(container: str, form: Container, config: Config) -> Iterator[Issue]:
    yield from _needs(config, weight_block_size=list(form.block), activation_scheme="dynamic")


def _require_gpt_oss(container: str, form: Container, config: Config) -> Iterator[Issue]:
    if config.get("model_type") != "gpt_oss":
        text = f"model_type is {config.get('model_type')!r}; blocks and scales are read only for 'gpt_oss'"
        yield finding("vLLM", "error", _CONFIG, text)


def _require_deepseek_v4(container: str, form: Container, config: Config) -> Iterator[Issue]:
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
    if form.kind == "nvfp4":
        yield from _needs(config, moe_quant_algo="NVFP4")


class _Declaration(NamedTuple):
    """How the configs of one output format declare quantization.

    Attributes:
        written: ``quantization_config``, or a function that returns it: (container, exclusion list, has input scales).
        lists: the keys under which ``quantization_config`` has the exclusion list, if ``written`` does not add them.
        require: (name for engines, container, config.json) -> faults of entries that do not fit the tensors.
        method: the ``quant_method`` with which engines load the format; "" if ``require`` checks it.
        reader: the engine that requires this method.
    """

    written: dict[str, Any] | Callable[[Container, list[str], bool], dict[str, Any]]
    lists: tuple[str, ...] = ()
    require: Callable[[str, Container, Config], Iterator[Issue]] = lambda container, form, config: iter(())
    method: str = ""
    reader: str = "vLLM"


# Sources: transformers 5.23, FineGrainedFP8Config and Mxfp4Config; SGLang 0.5.23, fp8.py; configs of the releases of
# DeepSeek-V3, DeepSeek-V4 and Qwen3. The list of "fp8" has two names, because some engines read one and some the other.
_LISTS = ("ignored_layers", "modules_to_not_convert")
DECLARATIONS = {
    "modelopt": _Declaration(_write_modelopt, (), _require_modelopt, "modelopt"),
    "compressed-tensors": _Declaration(
        _write_compressed_tensors, (), _require_compressed_tensors, "compressed-tensors"
    ),
    "fp8": _Declaration(_FP8, _LISTS, _require_fp8, "fp8"),
    "sglang-mxfp8": _Declaration(_SGLANG_MXFP8, _LISTS[1:], method="mxfp8", reader="SGLang"),
    "gpt-oss": _Declaration({"quant_method": "mxfp4"}, _LISTS[1:], _require_gpt_oss, "mxfp4"),
    "deepseek-v4": _Declaration(_DEEPSEEK_V4, (), _require_deepseek_v4),
}
FORMATS = (*DECLARATIONS, "bf16")
ALL_FORMATS = (*FORMATS, "mlx", "comfy", "gguf")  # the modules in loaders/ cover FORMATS only
# The containers that a conversion with one of FORMATS can write. No engine loads Model-Optimizer's MXFP4.
_UNREAD = table.MODELOPT_MXFP4
WRITTEN = tuple(one for format in FORMATS for one in CONTAINERS if one.format == format and one != _UNREAD)
KINDS = ("nvfp4", "mxfp4", "mxfp8", "fp8 tensor", "fp8 rows", "fp8")


class LoaderContainer(NamedTuple):
    """Describe one container that engines load.

    Attributes:
        id: the unique name, such as "modelopt NVFP4".
        format: the value of ``--format`` that writes it.
        kind: the kind of the recipes that it stores, such as "nvfp4"; None for unquantized weights.
        form: the container; None for unquantized weights and mixtures.
        syntax: the syntax of its exclusion list, such as "modelopt"; None if it has no list.
    """

    id: str
    format: str
    kind: str | None
    form: Container | None = None
    syntax: str | None = None


def _loaded() -> Iterator[LoaderContainer]:
    for form in CONTAINERS:
        for has_input_scale in (False, True) if form is MODELOPT_NVFP4 else (True,) if form.format in FORMATS else ():
            id = container_id(form, has_input_scale)
            yield LoaderContainer(id, form.format, form.kind, form, form.syntax or None)
    yield LoaderContainer("bf16", "bf16", None)


LOADED = {one.id: one for one in _loaded()}
# Mixtures: checkpoints whose layers have several of LOADED, as their configs call them.
MIXTURES = {name: LoaderContainer(name, format, "mixed", None, format) for format, name in MIXED.items()}


def loaded_container(format: str, kind: str, *, input_scale: bool = False) -> LoaderContainer | None:
    """Return the container in which ``format`` stores recipes of ``kind``, or None if it cannot store them."""
    for name, value, allowed in (("format", format, FORMATS), ("recipe kind", kind, KINDS)):
        if value not in allowed:
            raise ValueError(f"container: {name} {value!r}; one of {', '.join(allowed)} is needed")
    if input_scale and (format, kind) == ("modelopt", "nvfp4"):
        return LOADED["modelopt NVFP4"]
    return next((each for each in LOADED.values() if each.format == format and each.kind in (kind, None)), None)


def _nested(form: Container, config: Config, nested: Config) -> Iterator[Issue]:
    """Yield a finding if hf_quant_config.json lacks entries, and one for each entry that contradicts config.json."""
    section = _section(nested, "quantization")
    needed = ("kv_cache_quant_algo", "exclude_modules", *(("group_size",) if form.kind == "nvfp4" else ()))
    missing = [key for key in needed if key not in section]
    if missing:
        yield finding("vLLM", "error", _HF, f"quantization lacks {', '.join(missing)}; loading fails without it")
    for key, other in (("quant_algo", "quant_algo"), ("exclude_modules", "ignore")):
        values = section.get(key), quantization_config(config).get(other)
        if None not in values and values[0] != values[1]:
            text = f"quantization.{key} differs from {other} in {_CONFIG}; which one is used depends on the engine"
            yield finding("vLLM", "warning", _HF, text)


def config_findings(
    container: str, config: Config, hf_quant_config: Config | None, tensors: Collection[str]
) -> Iterator[Issue]:
    """Yield a finding for each entry of a checkpoint's configs that an engine would reject or misread."""
    used, form = LOADED[container].format, LOADED[container].form
    declared, nested = quantization_config(config), hf_quant_config or {}
    if form is not None:
        row, method = DECLARATIONS[used], str(declared.get("quant_method", ""))
        fits = method.lower().startswith("modelopt") if used == "modelopt" else method == row.method
        if row.method and not fits:
            text = f"quantization_config.quant_method is {method!r}; {row.method!r} is needed"
            yield finding(row.reader, "error", _CONFIG, text)
        yield from row.require(container, form, config)
    # Model-Optimizer writes hf_quant_config.json for its own containers and for DeepSeek-V4 with NVFP4 experts.
    if hf_quant_config is not None and form is not None and (used == "modelopt" or form is table.DEEPSEEK_V4_NVFP4):
        yield from _nested(form, config, hf_quant_config)
    elif hf_quant_config is not None:
        text = f"belongs to another format; {used} checkpoints have no such file; remove it"
        yield finding("vLLM", "warning", _HF, text)
    has_fp8_cache = _section(declared, "kv_cache_scheme").get("num_bits") == 8
    has_fp8_cache |= _section(nested, "quantization").get("kv_cache_quant_algo") == "FP8"
    if has_fp8_cache and not any(name.endswith((".k_scale", ".v_scale")) for name in tensors):
        yield finding("vLLM", "warning", _CONFIG, "an FP8 KV cache is declared, but no k_scale or v_scale is stored")


# Compare configs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigDifference:
    """One entry of a config or of metadata that differs between checkpoints a and b.

    place: the name of the config file. For metadata, it is ``__metadata__``, followed by the files that differ. The
        files are left out if the names of the files differ between a and b.
    key: the key of the entry; ``outer.inner`` in nested objects; "" if the whole file is missing.
    kind: "missing" (only in a), "extra" (only in b) or "value".
    a, b: the values of the entry; None where it does not exist.
    """

    place: str
    key: str
    kind: Literal["missing", "extra", "value"]
    a: Any = None
    b: Any = None

    @property
    def detail(self) -> str:
        """A short text that says what differs."""
        if self.kind != "value":
            return _brief(self.a if self.kind == "missing" else self.b)
        if isinstance(self.a, list) and isinstance(self.b, list):
            return _entries(self.a, self.b)
        return f"{_brief(self.a)} and {_brief(self.b)}"


def differences_of(place: str, prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ConfigDifference]:
    """Yield the differences of two JSON objects, in the order of their keys."""
    for name in sorted({*a, *b}):
        key = f"{prefix}{name}"
        if name not in b:
            yield ConfigDifference(place, key, "missing", a=a[name])
        elif name not in a:
            yield ConfigDifference(place, key, "extra", b=b[name])
        elif isinstance(a[name], dict) and isinstance(b[name], dict):
            yield from differences_of(place, f"{key}.", a[name], b[name])
        elif _text(a[name]) != _text(b[name]):
            yield ConfigDifference(place, key, "value", a[name], b[name])


def _text(value: Any) -> str:
    """Return a value as JSON text with sorted keys. Values with equal texts are equal in type and content."""
    return json.dumps(value, sort_keys=True)


def _brief(value: Any) -> str:
    """Return a value as JSON text, or "N entries" for an object or list whose JSON text is over 40 characters long."""
    # Strings and numbers are never shortened.
    if isinstance(value, (dict, list)) and len(_text(value)) > 40:
        return f"{len(value)} entries"
    return _text(value)


def _entries(a: list[Any], b: list[Any]) -> str:
    """Describe the difference of two lists as text: how many entries only one of them has, with an example."""
    one, other = ([_text(value) for value in values] for values in (a, b))
    only_a, only_b = sorted(set(one) - set(other)), sorted(set(other) - set(one))
    if not only_a and not only_b:
        return f"{len(a)} and {len(b)} entries, which differ in number or order"
    parts = ((only_a, "only in a"), (only_b, "only in b"))
    return "; ".join(f"{len(names)} entries {where}, such as {names[0]}" for names, where in parts if names)
