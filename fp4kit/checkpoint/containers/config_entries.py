"""Define items. An item is a tensor, config key or metadata entry of a checkpoint that may concern quantization,
together with the decision whether fp4kit knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase, translate
from typing import Any, NamedTuple

from fp4kit.arguments import is_one_of
from fp4kit.checkpoint.containers.configs import EXCLUSIONS, KEYS, declared, sections, with_declaration
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, Container
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, MSMODELSLIM, Source
from fp4kit.checkpoint.model.weights import Weight, any_quantized
from fp4kit.storage.files import CheckpointError, shown

UNDERSTOOD, CARRIED, DOUBTFUL, REFUSED, IGNORED = "understood", "carried", "doubtful", "refused", "ignored"


class Item(NamedTuple):
    """Describe one tensor, config key or metadata entry of a checkpoint, and the group that it belongs to.

    Attributes:
        group: UNDERSTOOD (fp4kit uses it, or it agrees with the tensors), CARRIED (it does not change the decoded
            weights), DOUBTFUL, REFUSED or IGNORED (see the head of closed_world.py).
        place: where the item is: "tensor", the name of a config file, or "metadata".
        name: the tensor's name, or the path of the key, such as "quantization_config.transform_config".
        why: why the item belongs to this group, in words for the user.
        what: dtype and shape of a tensor, such as "U8 [64, 32]", if they help to find the fault; otherwise "".
    """

    group: str
    place: str
    name: str
    why: str
    what: str = ""

    @property
    def subject(self) -> str:
        """The item's name for messages: "NAME (WHAT)" if ``what`` is not empty."""
        if self.what:
            return f"{self.name} ({self.what})"
        return self.name if self.place == "tensor" else f"{self.place}: {self.name}"


# A check decides on the value of one config entry: (value, layers of the checkpoint) -> the reason to refuse the entry,
# or "" to accept it. The reason is a predicate, such as "is 5, which fp4kit does not know"; the caller adds the name of
# the entry.
EntryCheck = Callable[[Any, "_Layers"], str]


class _Layers(NamedTuple):
    """The quantized layers of a checkpoint, against which config entries are checked.

    Attributes:
        forms: module name -> container.
        plain: the names of the unquantized layers.
    """

    forms: Mapping[str, Container]
    plain: Collection[str] = ()


def _any(value: Any, layers: _Layers) -> str:
    """Accept every value of a config entry: return "". This is a check, whose arguments are not used here."""
    return ""


def _only(*allowed: Any) -> EntryCheck:
    """Return a check that accepts the given values and refuses all others. Types must agree too: 1 is not True."""

    def check_value(value: Any, layers: _Layers) -> str:
        if any(value == one and type(value) is type(one) for one in allowed):
            return ""
        return f"is {brief(value)}, which is not supported; known is {' or '.join(brief(one) for one in allowed)}"

    return check_value


def _kv_scheme(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``kv_cache_scheme``, or "" to accept it: null, or an object, which is carried."""
    return "" if value is None or isinstance(value, Mapping) else f"is {brief(value)}; needs null or an object"


def brief(value: Any) -> str:
    """Return a value as JSON text for a message."""
    text = shown(json.dumps(value, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


# Model-Optimizer's name of an algorithm, in capitals -> the kinds of containers that store its layers.
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "NVFP4_AWQ": ("nvfp4",),
    "W4A8_NVFP4_FP8": ("nvfp4",),
    "NVFP4_SVD": ("nvfp4",),
    "MXFP4": ("mxfp4",),
    "W4A8_MXFP4_FP8": ("mxfp4",),
    "MXFP8": ("mxfp8",),
    "FP8": ("fp8 tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8 rows",),
    "FP8_PB_WO": ("fp8", "fp8 tensor"),
}
_MIXED = "MIXED_PRECISION"


def _algorithm(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse Model-Optimizer's ``quant_algo``, or "" to accept it."""
    name = str(value).upper()
    if name == _MIXED:
        return ""
    if name not in _ALGORITHMS:
        return f"is {brief(value)}, which fp4kit does not know"
    sizes = {form.group_size for form in layers.forms.values() if form.kind == "nvfp4"}
    if name == "W4A8_NVFP4_FP8" and sizes - {32}:
        return f"is {brief(value)}, which has blocks of 32, but the tensors have blocks of 16"
    other = _kinds_beside(_ALGORITHMS[name], layers)
    return f"is {brief(value)}, but there are layers of {other}" if other else ""


def _kinds_beside(allowed: Collection[str], layers: _Layers) -> str:
    """Return text that lists the kinds of quantized layers that are not in ``allowed``, or "" if there are none."""
    first = {form.kind: name for name, form in reversed([*layers.forms.items()])}
    return ", ".join(f"{kind} ({name})" for kind, name in sorted(first.items()) if kind not in allowed)


def _quantized_layers(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse Model-Optimizer's ``quantized_layers``, or "" to accept it."""
    if not isinstance(value, Mapping):
        return f"is {brief(value)}, where an object is needed"
    for name, entry in value.items():
        algorithm = str(entry.get("quant_algo", "")) if isinstance(entry, Mapping) else ""
        kinds = _ALGORITHMS.get(algorithm.upper())
        if kinds is None:
            return f"has {shown(name)} as {brief(entry)}, which fp4kit does not know"
        extra = sorted(set(entry) - {"quant_algo", "group_size", "has_zero_point", "pre_quant_scale"})
        if extra:
            return f"has the key {shown(extra[0])} for {shown(name)}, which fp4kit does not know"
        form = layers.forms.get(name)
        if form is not None and form.kind not in kinds:
            return f"declares {shown(name)} as {algorithm}, but its tensors are {form}"
    return ""


def _group_size(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse a ``group_size`` (the number of elements per block), or "" to accept it."""
    sizes = sorted({form.block[1] for form in layers.forms.values() if form.kind in _MX_KINDS})
    if value is None or not sizes or value in sizes:
        return ""
    return f"is {brief(value)}, but the tensors have blocks of {', '.join(map(str, sizes))}"


def _mxfp4_block_size(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse MiMo's ``mxfp4_block_size``, or "" to accept it: null or that of the MXFP4 layers."""
    sizes = sorted({form.group_size for form in layers.forms.values() if form.kind == "mxfp4"})
    if value is None or value in sizes:
        return ""
    has = f"MXFP4 layers have blocks of {sizes[0]}" if sizes else "there is no MXFP4 layer"
    return f"is {brief(value)}, but {has}"


def _block_size(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``weight_block_size``, or "" to accept it."""
    blocks = {form.block for form in layers.forms.values() if form.kind in ("fp8", "mxfp8")}
    if value is None or not blocks or (isinstance(value, list) and tuple(value) in blocks):
        return ""
    return f"is {brief(value)}, but the tensors have blocks of {sorted(blocks)}"


def _expert_dtype(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse DeepSeek's ``expert_dtype``, or "" to accept it."""
    bits = {"fp4": 4, "fp8": 8}.get(str(value))
    if bits is None:
        return f'is {brief(value)}, which is not supported; known is "fp4" or "fp8"'
    return "" if any(form.element.bits == bits for form in layers.forms.values()) else _no_such_layer(value, layers)


def _store_dtype(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse MiMo's ``store_dtype``, or "" to accept it: "mxfp4", if some layer is stored so."""
    if value != "mxfp4":
        return f'is {brief(value)}, which is not supported; known is "mxfp4"'
    return "" if any(form.kind == "mxfp4" for form in layers.forms.values()) else _no_such_layer(value, layers)


def _no_such_layer(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse an entry that declares layers of a format that the checkpoint does not have."""
    return f"is {brief(value)}, but there are only layers of {_kinds_beside((), layers)}"


_SCHEME: dict[str, EntryCheck] = {
    "num_bits": _only(4, 8),
    "type": _only("float"),
    "symmetric": _only(True, None),
    "group_size": _any,
    "strategy": _only("tensor_group", "group", "tensor", "channel", "block", "token", None),
    "dynamic": _any,
    "scale_dtype": _any,
    "zp_dtype": _any,
    "observer": _any,
    "observer_kwargs": _any,
    "actorder": _only(None, "static", "weight", False),
    "block_structure": _only(None, [128, 128], [64, 64], [32, 32]),
}


def _scheme(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse the scheme of weights in a config group, or "" to accept it."""
    if not isinstance(value, Mapping):
        return f"is {brief(value)}, where an object is needed"
    for key, one in value.items():
        why = _SCHEME[key](one, layers) if key in _SCHEME else "is not known"
        if why:
            return f"has {shown(key)}, which {why}"
    return ""


def _describes(scheme: Mapping[str, Any], form: Container) -> bool:
    """Return whether a scheme of weights in a config group fits layers of a container."""
    if scheme.get("num_bits", form.element.bits) != form.element.bits:
        return False
    return form.kind not in _MX_KINDS or scheme.get("group_size") in (None, -1, 0, form.group_size)


_MX_KINDS = ("nvfp4", "mxfp4", "mxfp8")
_FORMATS = {
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("mxfp8",),
    "float-quantized": ("fp8", "fp8 rows", "fp8 tensor"),
    "naive-quantized": ("fp8", "fp8 rows", "fp8 tensor"),
}


def _format(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse the ``format`` of compressed-tensors, or "" to accept it."""
    if value in ("mixed-precision", None, "dense"):
        return ""
    if not is_one_of(value, _FORMATS):
        return f"is {brief(value)}, which fp4kit does not know"
    other = _kinds_beside(_FORMATS[value], layers)
    return f"is {brief(value)}, but there are layers of {other}" if other else ""


_GROUP_KEYS = (
    "weights",
    "input_activations",
    "output_activations",
    "targets",
    "format",
    "has_zero_point",
    "pre_quant_scale",
)


def _groups(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``config_groups`` of compressed-tensors or Model-Optimizer, or "" to accept it."""
    return _known_groups(value, layers) or _targets(list(value.values()), layers)


def _known_groups(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``config_groups`` because a group is unknown or malformed, or "" to accept it."""
    if not isinstance(value, Mapping):
        return f"is {brief(value)}, where an object is needed"
    for name, group in value.items():
        why = _group(group, layers)
        if why:
            return f"has {shown(name)}, {why}"
    return ""


def _group(group: Any, layers: _Layers) -> str:
    """Return the reason to refuse one config group because it is unknown or malformed; "" to accept it."""
    if not isinstance(group, Mapping):
        return f"which is {brief(group)}, where an object is needed"
    unknown = [key for key in group if key not in _GROUP_KEYS]
    if unknown:
        return f"with the key {shown(unknown[0])}, which fp4kit does not know"
    form = group.get("format")
    if form is not None and not is_one_of(form, _FORMATS):
        return f"with the format {brief(form)}, which fp4kit does not know"
    targets = group.get("targets")
    if targets is not None and not _is_list_of_names(targets):
        return f"whose targets are {brief(targets)}; a list of names and patterns is needed"
    why = _scheme(group["weights"], layers) if group.get("weights") is not None else ""
    return f"whose scheme of weights {why}" if why else ""


def _is_list_of_names(value: Any) -> bool:
    """Return whether a value is a list of strings, each a name or a valid regular expression ("re:...")."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return False
    return all(_compiled(one[3:]) is not None for one in value if one.startswith("re:"))


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Compile a regular expression and return it; return None if ``pattern`` is not valid."""
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _targets(groups: list[Mapping[str, Any]], layers: _Layers) -> str:
    """Return the reason to refuse config groups that contradict the tensors of a layer; "" if all layers agree."""
    # Every quantized layer must be a target of at least one group whose format and scheme fit it.
    if not any("targets" in group for group in groups):
        return ""
    for name, form in layers.forms.items():
        matching = [group for group in groups if _matches(group, name)]
        if not matching:
            return f"names no target for {shown(name)}, whose tensors are {form}"
        if not any(_fits(group, form) for group in matching):
            return f"declares {_declared_by(matching[0])} for {shown(name)}, but its tensors are {form}"
    return ""


def _fits(group: Mapping[str, Any], form: Container) -> bool:
    """Return whether a config group may describe the layers of a container."""
    # The format and the scheme of weights that the group declares must fit the container.
    declared, scheme = group.get("format"), group.get("weights")
    of_format = declared is None or form.kind in _FORMATS[declared]
    return of_format and (scheme is None or _describes(scheme, form))


def _declared_by(group: Mapping[str, Any]) -> str:
    """Return the format, num_bits and group_size that a config group declares, for a message."""
    scheme = group.get("weights") or {}
    words = [", ".join(_FORMATS[group["format"]])] if group.get("format") else []
    words += [f"num_bits {scheme['num_bits']}"] if "num_bits" in scheme else []
    words += [f"group_size {scheme['group_size']}"] if scheme.get("group_size") else []
    return " with ".join([words[0], " and ".join(words[1:])] if len(words) > 1 else words) or "nothing"


def _matches(group: Mapping[str, Any], name: str) -> bool:
    """Return whether a config group applies to a layer."""
    for target in group.get("targets") or ():
        if target.startswith("re:"):
            if re.match(target[3:], name):
                return True
        elif target == name or name.endswith(f".{target}") or name.startswith(f"{target}.") or _is_class(target):
            return True
    return False


def _is_class(target: str) -> bool:
    """Return whether a target of a config group is the name of a class, such as Linear."""
    return target[:1].isupper() and "." not in target


def _transform(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``transform_config``, or "" if it is null, is empty or has no transform."""
    if not value or value == {"config_groups": {}}:
        return ""
    return (
        "declares rotations of the weights, which are not undone here; fp4kit convert --format bf16 undoes Hadamard"
        " transforms of inputs; otherwise use a checkpoint without transforms"
    )


def _dense(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``sparsity_config``, or "" if it declares no format or the format "dense"."""
    form = value.get("format") if isinstance(value, Mapping) else value
    return "" if not form or form == "dense" else f"declares the sparse format {brief(form)}, which is not supported"


def _quark_algorithms(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse ``algo_config`` of quark, or "" to accept it."""
    # GPTQ, AWQ and smoothing are accepted, because they change only which values are stored.
    for one in value if isinstance(value, list) else [value] if value else []:
        name = str(one.get("name", "")) if isinstance(one, Mapping) else str(one)
        if not name.startswith(("gptq", "awq", "smooth", "autosmoothquant")):
            return f"has {brief(one)}, which may rotate the weights and is not supported"
    return ""


def _listed(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse a list of unquantized layers, or "" to accept it."""
    if value is None:
        return ""
    if not _is_list_of_names(value):
        return f"is {brief(value)}; a list of names and patterns is needed"
    for pattern in value:
        excluded = next((name for name in layers.forms if _excludes(pattern, name)), None)
        if excluded is not None:
            return f"declares with {brief(pattern)} that {shown(excluded)} is unquantized, but it is quantized"
    return ""


def _excludes(pattern: str, name: str) -> bool:
    """Return whether an entry of a list of unquantized layers matches the name of a layer."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern) if "*" in pattern else name == pattern


# Name of a dtype in quark's configs -> the kinds of containers that store weights of this dtype. All other dtypes are
# refused.
_QUARK_DTYPES = {
    "fp4": ("mxfp4", "nvfp4"),
    "mxfp4": ("mxfp4",),
    "fp8_e4m3": ("fp8", "fp8 rows", "fp8 tensor", "mxfp8"),
}


def _quark_layers(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse quark's config because it contradicts the tensors of a layer, or "" to accept it."""
    of_names, of_types = found = [value.get(key) or {} for key in ("layer_quant_config", "layer_type_quant_config")]
    if wrong := next((one for one in found if not isinstance(one, Mapping)), None):
        return f"has the entry {brief(wrong)} for layers, where an object is needed"
    for name, form in layers.forms.items():
        specs = [spec for pattern, spec in of_names.items() if fnmatchcase(name, pattern) or pattern == name]
        specs = specs or [*of_types.values(), value.get("global_quant_config")]
        weights = [one for spec in specs if isinstance(spec, Mapping) for one in [_quark_weight(spec)] if one]
        if weights and not any(_quark_fits(one, form) for one in weights):
            declared = {key: weights[0][key] for key in ("dtype", "group_size", "block_size") if weights[0].get(key)}
            return f"declares {brief(declared)} for {shown(name)}, but its tensors are {form}"
    return ""


def _quark_weight(spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the scheme of weights in an entry of quark's config, or None if the entry has no such object."""
    found = spec.get("weight")
    if isinstance(found, list) and found:
        blocks = (one for one in found if isinstance(one, Mapping) and _has_fp8_scales(one))
        found = next(blocks, found[-1])
    return found if isinstance(found, Mapping) else None


def _has_fp8_scales(scheme: Mapping[str, Any]) -> bool:
    """Return whether a scheme of quark declares block scales in FP8, as NVFP4 has them."""
    return str(scheme.get("scale_format", "")).startswith(("float8", "fp8"))


def _quark_fits(scheme: Mapping[str, Any], form: Container) -> bool:
    """Return whether dtype and group_size in a scheme of quark fit layers of a container."""
    dtype = scheme.get("mx_element_dtype") or scheme.get("dtype")
    if dtype is not None and form.kind not in _QUARK_DTYPES.get(str(dtype), ()):
        return False
    if form.kind == "fp8" and scheme.get("block_size") not in (None, list(form.block)):
        return False
    if form.kind == "mxfp4" and _has_fp8_scales(scheme):
        return False
    return form.kind not in _MX_KINDS or scheme.get("group_size") in (None, -1, 0, form.group_size)


# (data_type of auto-round without suffixes such as _rceil, bits) -> the kinds of containers that store such layers.
_AUTO_ROUND_KINDS = {
    ("mx_fp", 4): ("mxfp4",),
    ("mx_fp", 8): ("mxfp8",),
    ("nv_fp", 4): ("nvfp4",),
    ("fp", 8): ("fp8", "fp8 rows", "fp8 tensor"),
    ("fp", 4): ("nvfp4", "mxfp4"),
}


def _auto_round_layers(value: Any, layers: _Layers) -> str:
    """Return the reason to refuse auto-round's config because it contradicts the tensors of a layer; "" to accept
    it.
    """
    extra = value.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        return f"has the extra_config {brief(extra)}, where an object is needed"
    wrong = next((key for key, one in extra.items() if not isinstance(one, Mapping)), None)
    if wrong is not None:
        return f"has {shown(wrong)} as {brief(extra[wrong])} in extra_config, where an object is needed"
    for name, form in layers.forms.items():
        own = [one for key, one in extra.items() if _names_layer(key, name)]
        entries = [{**value, **one} for one in own] + ([] if name in extra else [value])
        if not any(_auto_round_fits(entry, form) for entry in entries):
            declared = {key: entries[0].get(key) for key in ("bits", "data_type", "group_size")}
            return f"declares {brief(declared)} for {shown(name)}, but its tensors are {form}"
    return ""


def _names_layer(key: str, name: str) -> bool:
    """Return whether a key of auto-round's ``extra_config`` matches a layer."""
    pattern = _compiled(key)
    return key == name or (pattern is not None and pattern.search(name) is not None)


def _auto_round_fits(entry: Mapping[str, Any], form: Container) -> bool:
    """Return whether bits, data_type and group_size of auto-round fit layers of a container."""
    bits, data_type = entry.get("bits"), str(entry.get("data_type", ""))
    known = next((name for name in ("mx_fp", "nv_fp", "fp") if data_type.startswith(name)), None)
    if known is None:
        return bits in (None, form.element.bits)
    kinds = _AUTO_ROUND_KINDS.get((known, bits), ()) if isinstance(bits, int) else ()
    if bits is not None and form.kind not in kinds:
        return False
    return form.kind not in _MX_KINDS or entry.get("group_size") in (None, -1, 0, form.group_size)


# For each quant_method, the known keys of quantization_config: key -> (group of the item, reason, check of the value).
# The keys in _COMMON are known for every method.
_IS_NAME = "names the method; the tensors decide"
_LISTED = "names of unquantized layers; the tensors show the same"
_ACTIVATIONS = "concerns activations"
_HISTORY = "how the checkpoint was made"
_KV = "concerns the KV cache"
_Entry = tuple[str, str, EntryCheck]
_COMMON: dict[str, _Entry] = {
    "quant_method": (UNDERSTOOD, _IS_NAME, _any),
    "fp4kit": (UNDERSTOOD, "fp4kit's record of a conversion", _any),
    "producer": (CARRIED, _HISTORY, _any),
    "provider": (CARRIED, _HISTORY, _any),
    "version": (CARRIED, _HISTORY, _any),
    "kv_cache_scheme": (CARRIED, _KV, _kv_scheme),
    "kv_cache_quant_algo": (CARRIED, _KV, _any),
    "ignore": (CARRIED, _LISTED, _listed),
    "exclude": (CARRIED, _LISTED, _listed),
    "exclude_modules": (CARRIED, _LISTED, _listed),
    "modules_to_not_convert": (CARRIED, _LISTED, _listed),
    "ignored_layers": (CARRIED, _LISTED, _listed),
    "group_size": (UNDERSTOOD, "agrees with the tensors", _group_size),
    "activation_scheme": (CARRIED, _ACTIVATIONS, _any),
    "weight_block_size": (UNDERSTOOD, "agrees with the tensors", _block_size),
    "fmt": (UNDERSTOOD, "agrees with the tensors", _only("e4m3", "float8_e4m3fn")),
    "scale_fmt": (CARRIED, "how scales were rounded", _any),
    "dequantize": (CARRIED, "what a loader does", _any),
    "config_groups": (UNDERSTOOD, "agrees with the tensors", _groups),
}
_MODELOPT: dict[str, _Entry] = {
    "quant_algo": (UNDERSTOOD, "agrees with the tensors", _algorithm),
    "moe_quant_algo": (UNDERSTOOD, "agrees with the tensors", _only("NVFP4", "MXFP4")),
    "quantized_layers": (UNDERSTOOD, "agrees with the tensors", _quantized_layers),
    "has_zero_point": (UNDERSTOOD, "no zero points", _only(False)),
    "pre_quant_scale": (UNDERSTOOD, "the tensors decide", _any),
    # Entries of TensorRT-LLM's and older configs, which are often null.
    "awq_block_size": (UNDERSTOOD, "agrees with the tensors", _group_size),
    "smoothquant_val": (CARRIED, _ACTIVATIONS, _any),
    "clamp_val": (CARRIED, _ACTIVATIONS, _any),
    "use_meta_recipe": (CARRIED, _ACTIVATIONS, _any),
    "mamba_ssm_cache_dtype": (CARRIED, "concerns the state of Mamba layers", _any),
}
METHODS: dict[str, dict[str, _Entry]] = {
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "modelopt_mixed": _MODELOPT,
    "compressed-tensors": {
        "format": (UNDERSTOOD, "agrees with the tensors", _format),
        "quantization_status": (UNDERSTOOD, "the tensors are compressed", _only("compressed", "frozen")),
        "global_compression_ratio": (CARRIED, _HISTORY, _any),
        "sparsity_config": (UNDERSTOOD, "no sparsity", _dense),
        "transform_config": (UNDERSTOOD, "no transforms", _transform),
        "run_compressed": (CARRIED, "what a loader does", _any),
    },
    # In DeepSeek-V4, these entries concern only the experts in NVFP4, not its layers in FP8 and MXFP4. Layers are
    # therefore not compared with them.
    "fp8": {
        **_MODELOPT,
        "expert_dtype": (UNDERSTOOD, "agrees with the tensors", _expert_dtype),
        "store_dtype": (UNDERSTOOD, "agrees with the tensors", _store_dtype),
        "mxfp4_block_size": (UNDERSTOOD, "agrees with the tensors", _mxfp4_block_size),
        **{key: (CARRIED, _LISTED, _any) for key in ("ignore", "exclude_modules")},
        "config_groups": (UNDERSTOOD, "agrees with the tensors", _known_groups),
    },
    "mxfp8": {},
    "mxfp4": {},
    "quark": {
        "algo_config": (UNDERSTOOD, "no rotations", _quark_algorithms),
        "global_quant_config": (CARRIED, "the tensors decide", _any),
        "layer_quant_config": (CARRIED, "the tensors decide", _any),
        "layer_type_quant_config": (CARRIED, "the tensors decide", _any),
        "export": (CARRIED, _HISTORY, _any),
        "quant_mode": (CARRIED, _HISTORY, _any),
        "softmax_quant_spec": (CARRIED, _ACTIVATIONS, _any),
        "kv_cache_quant_config": (CARRIED, _KV, _any),
        "kv_cache_post_rope": (CARRIED, _KV, _any),
        "log_severity_level": (CARRIED, _HISTORY, _any),
    },
    "auto-round": {
        **{
            f"act_{key}": (CARRIED, _ACTIVATIONS, _any) for key in ("bits", "data_type", "dynamic", "group_size", "sym")
        },
        "autoround_version": (CARRIED, _HISTORY, _any),
        "bits": (UNDERSTOOD, "agrees with the tensors", _only(4, 8)),
        "data_type": (
            UNDERSTOOD,
            "agrees with the tensors",
            _only("mx_fp", "nv_fp", "mx_fp_rceil", "fp", "mx_fp4", "nv_fp4"),
        ),
        "sym": (UNDERSTOOD, "no zero points", _only(True)),
        "packing_format": (UNDERSTOOD, "names as compressed-tensors", _only("auto_round:llm_compressor")),
        "block_name_to_quantize": (CARRIED, _HISTORY, _any),
        "to_quant_block_names": (CARRIED, _HISTORY, _any),
        "enable_quanted_input": (CARRIED, _HISTORY, _any),
        "extra_config": (CARRIED, "the tensors decide", _any),
        "static_attention_granularity": (CARRIED, _ACTIVATIONS, _any),
        "static_kv_granularity": (CARRIED, _KV, _any),
        **{
            key: (CARRIED, _HISTORY, _any)
            for key in (
                "iters",
                "nsamples",
                "seqlen",
                "lr",
                "minmax_lr",
                "batch_size",
                "low_gpu_mem_usage",
                "damp_percent",
            )
        },
    },
    "torchao": {
        "quant_type": (CARRIED, "the tensors decide", _any),
        "quant_type_kwargs": (CARRIED, "the tensors decide", _any),
        "include_input_output_embeddings": (CARRIED, _HISTORY, _any),
        "untie_embedding_weights": (CARRIED, _HISTORY, _any),
    },
}


# quant_method -> a check of the whole config, for methods in which several entries together describe a layer.
_WHOLE: dict[str, EntryCheck] = {"quark": _quark_layers, "auto-round": _auto_round_layers}


# Unknown keys of config.json that may concern how weights are stored. They are refused.
_DECLARES = re.compile(
    r"quant|rotation|hadamard|(\w+_)?(quant|rotation|hadamard|smoothquant|sparsity)"
    r"_(config|cfg|args|params|method|algo|algorithm|scheme|matrix|matrices)"
)


def config_items(config: Mapping[str, Any], weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each entry of config.json that concerns quantization (see closed_world.py)."""
    layers = _layers(weights)
    for prefix, section in sections(config):
        for key, value in section.items():
            if not value:
                continue
            of_mlx = isinstance(value, Mapping) and "bits" in value and "quant_method" not in value
            if key in KEYS and not of_mlx:
                yield from _declared(value, f"{prefix}{key}", layers)
            elif key in KEYS or (key == "quantization" and prefix in ("", "text_config.")):
                of_tensorrt = isinstance(value, Mapping) and "quant_algo" in value
                yield from (_declared if of_tensorrt else _mlx_items)(value, f"{prefix}{key}", layers)
            elif _DECLARES.fullmatch(key):
                yield Item(REFUSED, CONFIG, f"{prefix}{key}", f"is {brief(value)}, an entry that fp4kit does not know")


def _layers(weights: Mapping[str, Weight]) -> _Layers:
    """Return the quantized layers among ``weights``, against which config entries are checked."""
    plain = {w.name for w in weights.values() if w.container is None}
    return _Layers({w.name: w.container for w in weights.values() if w.container is not None}, plain)


def _declared(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield an item for each key of a ``quantization_config``."""
    if not isinstance(value, Mapping):
        yield Item(REFUSED, CONFIG, path, f"is {brief(value)}, where an object is needed")
        return
    nested = value.get("quantization")
    if isinstance(nested, Mapping) and "quant_algo" in nested:  # the content of hf_quant_config.json
        yield from _entries(nested, f"{path}.quantization", CONFIG, {**_COMMON, **_MODELOPT}, layers)
        value = {key: one for key, one in value.items() if key != "quantization"} | {"quant_method": "modelopt"}
    method = str(value.get("quant_method", "modelopt" if "quant_algo" in value else "compressed-tensors"))
    if method == MSMODELSLIM:
        yield from _description(value, layers)
        return
    if method not in METHODS:
        yield Item(REFUSED, CONFIG, f"{path}.quant_method", f"is {brief(method)}, which fp4kit does not know")
        return
    yield from _entries(value, path, CONFIG, {**_COMMON, **METHODS[method]}, layers)
    why = _WHOLE[method](value, layers) if method in _WHOLE else ""
    if why:
        yield Item(REFUSED, CONFIG, path, why)


# What msmodelslim calls a kind of layers, such as "W4A4_MXFP4".
_MX_TYPE = re.compile(r"W([48])A\d+_MXFP[48]?")


def _description(value: Mapping[str, Any], layers: _Layers) -> Iterator[Item]:
    """Yield the items of msmodelslim's description: a refused one per layer that it contradicts, and one for the
    file.
    """
    file, seen = str(value.get("file")), set()
    for key, one in value.items():
        module = key.rpartition(".")[0]
        form = layers.forms.get(module)
        match = _MX_TYPE.fullmatch(str(one))
        if module in layers.plain and match and key.endswith(".weight"):
            yield Item(REFUSED, file, key, f"is {brief(one)}, but {shown(module)} is not quantized")
        if form is None or module in seen:
            continue
        kind = match and f"mxfp{match[1]}"
        if kind != form.kind and not (str(one) == "FLOAT" and key.endswith(".bias")):
            seen.add(module)
            yield Item(REFUSED, file, key, f"is {brief(one)}, but the tensors of {shown(module)} are {form}")
    sizes = value.get("group_size")
    why = _group_size(sizes, layers) if sizes else ""
    yield Item(REFUSED if why else UNDERSTOOD, file, "group_size" if why else "types", why or "agrees with the tensors")


def _entries(
    value: Mapping[str, Any], path: str, place: str, known: Mapping[str, _Entry], layers: _Layers
) -> Iterator[Item]:
    """Yield an item for each key of a JSON object in a config file."""
    for key, one in value.items():
        name = f"{path}.{key}"
        if key not in known:
            yield Item(REFUSED, place, name, f"is {brief(one)}, an entry that fp4kit does not know")
            continue
        group, reason, check_value = known[key]
        why = check_value(one, layers)
        yield Item(REFUSED if why else group, place, name, why or reason)


def _mlx_items(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield the items of MLX's ``quantization``, which holds a default scheme and entries of single layers."""
    if not isinstance(value, Mapping):
        yield Item(REFUSED, CONFIG, path, f"is {brief(value)}, where an object is needed")
        return
    default = {key: value[key] for key in ("group_size", "bits", "mode") if key in value}
    for name, form in layers.forms.items():
        own = value.get(name, default)
        says = (own.get("group_size"), own.get("bits"), own.get("mode")) if isinstance(own, Mapping) else own
        if says != (form.group_size, form.element.bits, form.kind):
            why = f"declares {brief(says)} for {shown(name)}, but its tensors are {form}"
            yield Item(REFUSED, CONFIG, path, why)
            return
    for key, one in value.items():
        if key == "fp4kit":
            continue
        if key not in default and key not in layers.forms and isinstance(one, Mapping):
            yield Item(REFUSED, CONFIG, f"{path}.{key}", "declares a quantized layer that the checkpoint does not have")
        elif key not in default and key not in layers.forms and one is not False:
            yield Item(REFUSED, CONFIG, f"{path}.{key}", f"is {brief(one)}, an entry that fp4kit does not know")
    yield Item(UNDERSTOOD, CONFIG, path, "agrees with the tensors")


def lost_column_scales(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, weights: Mapping[str, Weight]
) -> str:
    """Return a warning if the config declares Model-Optimizer's AWQ, but no layer has factors per column; ""
    otherwise.
    """
    entry = declared(with_declaration(config, hf_quant_config))
    groups = entry.get("config_groups")
    has_groups = isinstance(groups, Mapping) and all(isinstance(group, Mapping) for group in groups.values())
    flags = [entry, *(groups.values() if isinstance(groups, Mapping) and has_groups else ())]
    says = str(entry.get("quant_algo", "")).upper() == "NVFP4_AWQ" or any(one.get("pre_quant_scale") for one in flags)
    if not says or not weights or any(COLUMN_SCALE in weight.parts for weight in weights.values()):
        return ""
    return (
        "NVFP4_AWQ is declared, but no layer has a pre_quant_scale: all of them were folded into other layers, or they"
        " were lost and values are wrong; run fp4kit verify with --source"
    )


def hf_quant_items(
    content: Mapping[str, Any], config: Mapping[str, Any], weights: Mapping[str, Weight]
) -> Iterator[Item]:
    """Yield an item for each entry of hf_quant_config.json."""
    known = {**_COMMON, **(METHODS["fp8"] if declared(config).get("quant_method") == "fp8" else _MODELOPT)}
    layers = _layers(weights)
    for key, value in content.items():
        if key == "quantization" and isinstance(value, Mapping):
            yield from _entries(value, key, HF_QUANT_CONFIG, known, layers)
        elif key == "producer":
            yield Item(CARRIED, HF_QUANT_CONFIG, key, _HISTORY)
        else:
            yield Item(REFUSED, HF_QUANT_CONFIG, key, f"is {brief(value)}, an entry that fp4kit does not know")


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if a config file declares quantization although no tensor is quantized."""
    why = "" if any_quantized(weights.values()) else unfulfilled(source.config, source.hf_quant_config)
    if why:
        raise CheckpointError(why)


def unfulfilled(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> str:
    """Return the error message for config files that declare quantization, for a model without quantized tensors."""
    return next(_declarations(config, hf_quant_config), "")


def _declarations(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield an error message per config entry or file that declares quantization."""
    what = "but no tensor is quantized; remove this entry or file from the source"
    for prefix, section in sections(config):
        for key in KEYS:
            value = section.get(key)
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and method == MSMODELSLIM:
                yield f"{value['file']}: describes quantized weights, {what}"
            elif method is not None and not is_one_of(method, METHODS):
                yield (
                    f"{CONFIG}: {prefix}{key} declares quant_method {shown(repr(method))}, which fp4kit does not read;"
                    " convert the unquantized release of the model"
                )
            elif value:
                yield f"{CONFIG}: has {prefix}{key}, {what}"
    if hf_quant_config is not None:
        yield f"{HF_QUANT_CONFIG}: exists, {what}"


def declared_unquantized(source: Source, names: Iterable[str]) -> set[str]:
    """Return those of the names of unquantized layers that the config files of a model declare unquantized."""
    entries = [declared(source.config), source.config.get("quantization"), source.hf_quant_config]
    entries += [one.get("quantization") for one in entries if isinstance(one, Mapping)]
    found = [one for one in entries if isinstance(one, Mapping)]
    tests = [test for one in found for test in _tests(one)]
    return {name for name in names if any(test(name) for test in tests)}


def _tests(entry: Mapping[str, Any]) -> Iterator[Callable[[str], bool]]:
    """Yield functions that say of an unquantized layer whether one entry of a config file declares it unquantized."""
    excluded = [pattern for key in EXCLUSIONS for pattern in _texts(entry.get(key))]
    if excluded:
        yield _matcher(excluded)
    quantized = entry.get("quantized_layers")
    if isinstance(quantized, Mapping) and quantized:
        among = _matcher(quantized)
        yield lambda name: not among(name)
    groups = entry.get("config_groups")
    groups = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    targets = [target for group in groups for target in _texts(group.get("targets"))]
    if targets and not any(target[:1].isupper() and "." not in target for target in targets):  # no class, as Linear is
        targeted = _matcher(targets)
        yield lambda name: not targeted(name)
    extra = entry.get("extra_config")
    own = extra.items() if isinstance(extra, Mapping) else ()
    plain = [name for name, one in own if isinstance(one, Mapping) and one.get("bits") in (16, 32)]
    if plain:  # auto-round
        yield _matcher(plain)
    yield lambda name: entry.get(name) is False  # mlx-lm


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a list of names and patterns names a layer or a module that contains it."""
    paths, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:") or "*" in pattern:
            try:
                expressions.append(re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)))
            except re.error:
                continue
        else:
            paths.add(pattern)

    def names(layer: str) -> bool:
        parts = layer.split(".")
        spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return any(span in paths for span in spans) or any(one.match(layer) for one in expressions)

    return names
