"""Compare what the config files of a checkpoint declare about quantization with its tensors. Each entry that concerns
quantization becomes an Item, which is refused if the entry is unknown or contradicts the tensors. METHODS has the known
entries of each ``quant_method``, with a check (EntryCheck) of their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase, translate
from glob import escape
from typing import Any, NamedTuple

from fp4kit.arguments import is_one_of
from fp4kit.checkpoint.containers.configs import DECLARATIONS, EXCLUSIONS, KEYS, declared, sections, with_declaration
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, Config, Container
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


class _Layers(NamedTuple):
    """The layers of a checkpoint: module name -> container, and the names of the unquantized layers."""

    forms: Mapping[str, Container]
    plain: Collection[str] = ()

    def other_kinds(self, allowed: Collection[str]) -> str:
        """Return text that lists the kinds of quantized layers that are not in ``allowed``, or "" if there are none."""
        first = {form.kind: name for name, form in reversed([*self.forms.items()])}
        return ", ".join(f"{kind} ({name})" for kind, name in sorted(first.items()) if kind not in allowed)

    def sizes(self, *kinds: str) -> list[int]:
        """Return the sorted block widths of the layers in containers of some kinds."""
        return sorted({form.group_size for form in self.forms.values() if form.kind in kinds})


# A check yields reasons to refuse the value of one config entry, given the layers of the checkpoint. A reason is a
# predicate, such as "is 5, which fp4kit does not know"; the caller adds the name of the entry. The first reason that is
# true counts. If there is none, the entry is accepted.
Reasons = Iterator[Any]
EntryCheck = Callable[[Any, _Layers], Reasons]


def first_reason(reasons: Iterable[Any]) -> str:
    """Return the first of several reasons that is true; "" if none is. Later ones are not computed."""
    return next(filter(None, reasons), "")


def brief(value: Any) -> str:
    """Return a value as JSON text for a message."""
    text = shown(json.dumps(value, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown(value: Any) -> str:
    return f"is {brief(value)}, which fp4kit does not know"


def _no_object(value: Any) -> str:
    return "" if isinstance(value, Mapping) else f"is {brief(value)}, where an object is needed"


def _any(value: Any, layers: _Layers) -> Reasons:
    yield ""


def _only(*allowed: Any) -> EntryCheck:
    """Return a check that accepts the given values and refuses all others. Types must agree too: 1 is not True."""

    def check_value(value: Any, layers: _Layers) -> Reasons:
        if not any(value == one and type(value) is type(one) for one in allowed):
            yield f"is {brief(value)}, which is not supported; known is {' or '.join(map(brief, allowed))}"

    return check_value


def _layers_of(**known: Callable[[Container], bool]) -> EntryCheck:
    """Return a check for an entry that names a format (a key of ``known``), which some layers must have."""

    def check_value(value: Any, layers: _Layers) -> Reasons:
        yield from _only(*known)(value, layers)
        if not any(map(known[value], layers.forms.values())):
            yield f"is {brief(value)}, but there are only layers of {layers.other_kinds(())}"

    return check_value


def _kv_scheme(value: Any, layers: _Layers) -> Reasons:
    yield value is not None and not isinstance(value, Mapping) and f"is {brief(value)}; needs null or an object"


_FP8_KINDS, _MX_KINDS = ("fp8", "fp8 rows", "fp8 tensor"), ("nvfp4", "mxfp4", "mxfp8")
# Model-Optimizer's name of an algorithm, in capitals -> the kinds of containers that store its layers.
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "NVFP4_SVD"), ("nvfp4",)),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), ("mxfp4",)),
    "MXFP8": ("mxfp8",),
    "FP8": ("fp8 tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8 rows",),
    "FP8_PB_WO": ("fp8", "fp8 tensor"),
}


def _algorithm(value: Any, layers: _Layers) -> Reasons:
    name = str(value).upper()
    if name == "MIXED_PRECISION":
        return
    yield name not in _ALGORITHMS and _unknown(value)
    if name == "W4A8_NVFP4_FP8" and {*layers.sizes("nvfp4")} - {32}:
        yield f"is {brief(value)}, which has blocks of 32, but the tensors have blocks of 16"
    yield from _other_layers(value, _ALGORITHMS[name], layers)


def _other_layers(value: Any, allowed: Collection[str], layers: _Layers) -> Reasons:
    other = layers.other_kinds(allowed)
    yield other and f"is {brief(value)}, but there are layers of {other}"


def _quantized_layers(value: Any, layers: _Layers) -> Reasons:
    yield _no_object(value)
    for name, entry in value.items():
        algorithm = str(entry.get("quant_algo", "")) if isinstance(entry, Mapping) else ""
        kinds = _ALGORITHMS.get(algorithm.upper(), ())
        yield not kinds and f"has {shown(name)} as {brief(entry)}, which fp4kit does not know"
        extra = sorted(
            {k for k in entry if entry[k] is not None}
            - {"quant_algo", "group_size", "has_zero_point", "pre_quant_scale"}
        )
        yield extra and f"has the key {shown(extra[0])} for {shown(name)}, which fp4kit does not know"
        form = layers.forms.get(name)
        if form is not None and form.kind not in kinds:
            yield f"declares {shown(name)} as {algorithm}, but its tensors are {form}"


def _group_size(value: Any, layers: _Layers) -> Reasons:
    sizes = layers.sizes(*_MX_KINDS)
    if value is not None and sizes and value not in sizes:
        yield f"is {brief(value)}, but the tensors have blocks of {', '.join(map(str, sizes))}"


def _mxfp4_block_size(value: Any, layers: _Layers) -> Reasons:
    sizes = layers.sizes("mxfp4")
    if value is not None and value not in sizes:
        has = f"MXFP4 layers have blocks of {sizes[0]}" if sizes else "there is no MXFP4 layer"
        yield f"is {brief(value)}, but {has}"


def _block_size(value: Any, layers: _Layers) -> Reasons:
    blocks = [list(form.block) for form in layers.forms.values() if form.kind in ("fp8", "mxfp8")]
    if value is not None and blocks and value not in blocks:
        yield f"is {brief(value)}, but the tensors have blocks of {sorted({*map(tuple, blocks)})}"


# Config groups, of compressed-tensors and Model-Optimizer ------------------------------------------------------------

_SCHEME: dict[str, EntryCheck] = {
    "num_bits": _only(4, 8),
    "type": _only("float"),
    "symmetric": _only(True, None),
    "strategy": _only("tensor_group", "group", "tensor", "channel", "block", "token", None),
    "actorder": _only(None, "static", "weight", False),
    "block_structure": _only(None, [128, 128], [64, 64], [32, 32]),
    **dict.fromkeys(("group_size", "dynamic", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"), _any),
}
_FORMATS = {
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("mxfp8",),
    "float-quantized": _FP8_KINDS,
    "naive-quantized": _FP8_KINDS,
}
_GROUP_KEYS = "weights input_activations output_activations targets format has_zero_point pre_quant_scale".split()


def _format(value: Any, layers: _Layers) -> Reasons:
    if value not in ("mixed-precision", None, "dense"):
        yield not is_one_of(value, _FORMATS) and _unknown(value)
        yield from _other_layers(value, _FORMATS[value], layers)


def _groups(value: Any, layers: _Layers) -> Reasons:
    yield from _known_groups(value, layers)
    yield from _targets(list(value.values()), layers)


def _known_groups(value: Any, layers: _Layers) -> Reasons:
    yield _no_object(value)
    for name, group in value.items():
        why = first_reason(_group(group, layers))
        yield why and f"has {shown(name)}, {why}"


def _group(group: Any, layers: _Layers) -> Reasons:
    why = _no_object(group)
    yield why and f"which {why}"
    unknown = [key for key, one in group.items() if key not in _GROUP_KEYS and one is not None]
    yield unknown and f"with the key {shown(unknown[0])}, which fp4kit does not know"
    form, targets, scheme = (group.get(key) for key in ("format", "targets", "weights"))
    if form is not None and not is_one_of(form, _FORMATS):
        yield f"with the format {brief(form)}, which fp4kit does not know"
    if targets is not None and not is_list_of_names(targets):
        yield f"whose targets are {brief(targets)}; a list of names and patterns is needed"
    if scheme is not None:
        why = first_reason(_scheme(scheme, layers))
        yield why and f"whose scheme of weights {why}"


def _scheme(value: Any, layers: _Layers) -> Reasons:
    yield _no_object(value)
    for key, one in value.items():
        why = first_reason(_SCHEME[key](one, layers)) if key in _SCHEME else "is not known" * (one is not None)
        yield why and f"has {shown(key)}, which {why}"


def is_list_of_names(value: Any) -> bool:
    """Return whether a value is a list of strings, each a name or a valid regular expression ("re:...")."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return False
    return all(_compiled(one[3:]) is not None for one in value if one.startswith("re:"))


def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _targets(groups: list[Config], layers: _Layers) -> Reasons:
    """Yield a reason if config groups contradict the tensors of a layer."""
    # Every quantized layer must be a target of at least one group whose format and scheme fit it.
    if not any("targets" in group for group in groups):
        return
    for name, form in layers.forms.items():
        matching = [group for group in groups if any(_hits(target, name) for target in group.get("targets") or ())]
        yield not matching and f"names no target for {shown(name)}, whose tensors are {form}"
        if not any(_fits(group, form) for group in matching):
            yield f"declares {_declared_by(matching[0])} for {shown(name)}, but its tensors are {form}"


def _fits(group: Config, form: Container) -> bool:
    """Return whether the format and the scheme of a config group may describe the layers of a container."""
    declared, scheme = group.get("format"), group.get("weights") or {}
    if declared is not None and form.kind not in _FORMATS[declared]:
        return False
    return scheme.get("num_bits", form.element.bits) == form.element.bits and _has_blocks_of(scheme, form)


def _has_blocks_of(scheme: Config, form: Container) -> bool:
    return form.kind not in _MX_KINDS or scheme.get("group_size") in (None, -1, 0, form.group_size)


def _declared_by(group: Config) -> str:
    """Return the format, num_bits and group_size that a config group declares, for a message."""
    scheme = group.get("weights") or {}
    words = [", ".join(_FORMATS[group["format"]])] if group.get("format") else []
    words += [f"num_bits {scheme['num_bits']}"] if "num_bits" in scheme else []
    words += [f"group_size {scheme['group_size']}"] if scheme.get("group_size") else []
    return " with ".join([words[0], " and ".join(words[1:])] if len(words) > 1 else words) or "nothing"


def _hits(target: str, name: str) -> bool:
    """Return whether a target of a config group names a layer: a pattern, a name, the end or the start of a name, or a
    class.
    """
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return f".{name}".endswith(f".{target}") or f"{name}.".startswith(f"{target}.") or _is_class(target)


def _is_class(target: str) -> bool:
    """Return whether a target of a config group is the name of a class, such as Linear."""
    return target[:1].isupper() and "." not in target


def _transform(value: Any, layers: _Layers) -> Reasons:
    if value and value != {"config_groups": {}}:
        yield (
            "declares rotations of the weights, which are not undone here; fp4kit convert --format bf16 undoes Hadamard"
            " transforms of inputs; otherwise use a checkpoint without transforms"
        )


def _dense(value: Any, layers: _Layers) -> Reasons:
    form = value.get("format") if isinstance(value, Mapping) else value
    if form and form != "dense":
        yield f"declares the sparse format {brief(form)}, which is not supported"


def _listed(value: Any, layers: _Layers) -> Reasons:
    """Yield reasons to refuse a list of unquantized layers."""
    if value is None:
        return
    yield not is_list_of_names(value) and f"is {brief(value)}; a list of names and patterns is needed"
    for pattern in value:
        glob = pattern if "*" in pattern else escape(pattern)
        expression = pattern[3:] if pattern.startswith("re:") else translate(glob)
        for name in filter(re.compile(expression).match, layers.forms):
            yield f"declares with {brief(pattern)} that {shown(name)} is unquantized, but it is quantized"


# Quark and auto-round -------------------------------------------------------------------------------------------------


def _quark_algorithms(value: Any, layers: _Layers) -> Reasons:
    # GPTQ, AWQ and smoothing are accepted, because they change only which values are stored.
    for one in value if isinstance(value, list) else [value] if value else []:
        name = str(one.get("name", "")) if isinstance(one, Mapping) else str(one)
        if not name.startswith(("gptq", "awq", "smooth", "autosmoothquant")):
            yield f"has {brief(one)}, which may rotate the weights and is not supported"


# dtype in quark's configs -> the kinds of containers that store weights of this dtype; all others are refused
_QUARK_DTYPES = {"fp4": ("mxfp4", "nvfp4"), "mxfp4": ("mxfp4",), "fp8_e4m3": (*_FP8_KINDS, "mxfp8")}


def _quark_layers(value: Any, layers: _Layers) -> Reasons:
    of_names, of_types = found = [value.get(key) or {} for key in ("layer_quant_config", "layer_type_quant_config")]
    for wrong in found:
        if not isinstance(wrong, Mapping):
            yield f"has the entry {brief(wrong)} for layers, where an object is needed"
    for name, form in layers.forms.items():
        specs = [spec for pattern, spec in of_names.items() if fnmatchcase(name, pattern) or pattern == name]
        specs = specs or [*of_types.values(), value.get("global_quant_config")]
        weights = [one for spec in specs if isinstance(spec, Mapping) for one in [_quark_weight(spec)] if one]
        if weights and not any(_quark_fits(one, form) for one in weights):
            declared = {key: weights[0][key] for key in ("dtype", "group_size", "block_size") if weights[0].get(key)}
            yield f"declares {brief(declared)} for {shown(name)}, but its tensors are {form}"


def _quark_weight(spec: Config) -> Config | None:
    """Return the scheme of weights in an entry of quark's config, or None if the entry has no such object."""
    found = spec.get("weight")
    if isinstance(found, list) and found:
        blocks = (one for one in found if isinstance(one, Mapping) and _has_fp8_scales(one))
        found = next(blocks, found[-1])
    return found if isinstance(found, Mapping) else None


def _has_fp8_scales(scheme: Config) -> bool:
    """Return whether a scheme of quark declares block scales in FP8, as NVFP4 has them."""
    return str(scheme.get("scale_format", "")).startswith(("float8", "fp8"))


def _quark_fits(scheme: Config, form: Container) -> bool:
    dtype = scheme.get("mx_element_dtype") or scheme.get("dtype")
    if dtype is not None and form.kind not in _QUARK_DTYPES.get(str(dtype), ()):
        return False
    if form.kind == "fp8" and scheme.get("block_size") not in (None, list(form.block)):
        return False
    return not (form.kind == "mxfp4" and _has_fp8_scales(scheme)) and _has_blocks_of(scheme, form)


# (data_type of auto-round without suffixes such as _rceil, bits) -> the kinds of containers that store such layers
_AUTO_ROUND_KINDS = {
    ("mx_fp", 4): ("mxfp4",),
    ("mx_fp", 8): ("mxfp8",),
    ("nv_fp", 4): ("nvfp4",),
    ("fp", 8): _FP8_KINDS,
    ("fp", 4): ("nvfp4", "mxfp4"),
}


def _auto_round_layers(value: Any, layers: _Layers) -> Reasons:
    extra = value.get("extra_config") or {}
    yield not isinstance(extra, Mapping) and f"has the extra_config {brief(extra)}, where an object is needed"
    for key, one in extra.items():
        if not isinstance(one, Mapping):
            yield f"has {shown(key)} as {brief(one)} in extra_config, where an object is needed"
    for name, form in layers.forms.items():
        patterns = ((key, _compiled(key)) for key in extra)
        own = [extra[key] for key, pattern in patterns if key == name or (pattern and pattern.search(name))]
        entries = [{**value, **one} for one in own] + ([] if name in extra else [value])
        if not any(_auto_round_fits(entry, form) for entry in entries):
            declared = {key: entries[0].get(key) for key in ("bits", "data_type", "group_size")}
            yield f"declares {brief(declared)} for {shown(name)}, but its tensors are {form}"


def _auto_round_fits(entry: Config, form: Container) -> bool:
    bits, data_type = entry.get("bits"), str(entry.get("data_type", ""))
    known = next((name for name in ("mx_fp", "nv_fp", "fp") if data_type.startswith(name)), None)
    if known is None:
        return bits in (None, form.element.bits)
    kinds = _AUTO_ROUND_KINDS.get((known, bits), ()) if isinstance(bits, int) else ()
    return (bits is None or form.kind in kinds) and _has_blocks_of(entry, form)


# The known entries of each quant_method ------------------------------------------------------------------------------

_Entry = tuple[str, str, EntryCheck]


def _known(*rows: tuple[str, str, str, EntryCheck]) -> dict[str, _Entry]:
    """Return key -> (group of the item, reason, check of the value), from rows (keys, group, reason, check)."""
    return {key: (group, reason, check) for keys, group, reason, check in rows for key in keys.split()}


_AGREES, _DECIDES = "agrees with the tensors", "the tensors decide"
_IS_NAME = "names the method; the tensors decide"
_LISTED = "names of unquantized layers; the tensors show the same"
_ACTIVATIONS, _KV = "concerns activations", "concerns the KV cache"
_HISTORY, _LOADER = "how the checkpoint was made", "what a loader does"
_COMMON = _known(  # for every method
    ("quant_method", UNDERSTOOD, _IS_NAME, _any),
    ("fp4kit", UNDERSTOOD, "fp4kit's record of a conversion", _any),
    ("producer provider version", CARRIED, _HISTORY, _any),
    ("kv_cache_scheme", CARRIED, _KV, _kv_scheme),
    ("kv_cache_quant_algo", CARRIED, _KV, _any),
    (" ".join(EXCLUSIONS), CARRIED, _LISTED, _listed),
    ("group_size", UNDERSTOOD, _AGREES, _group_size),
    ("activation_scheme", CARRIED, _ACTIVATIONS, _any),
    ("weight_block_size", UNDERSTOOD, _AGREES, _block_size),
    ("fmt", UNDERSTOOD, _AGREES, _only("e4m3", "float8_e4m3fn")),
    ("scale_fmt", CARRIED, "how scales were rounded", _any),
    ("dequantize", CARRIED, _LOADER, _any),
    ("config_groups", UNDERSTOOD, _AGREES, _groups),
)
_MODELOPT = _known(
    ("quant_algo", UNDERSTOOD, _AGREES, _algorithm),
    ("moe_quant_algo", UNDERSTOOD, _AGREES, _only("NVFP4", "MXFP4")),
    ("quantized_layers", UNDERSTOOD, _AGREES, _quantized_layers),
    ("has_zero_point", UNDERSTOOD, "no zero points", _only(False)),
    ("pre_quant_scale", UNDERSTOOD, _DECIDES, _any),
    # Entries of TensorRT-LLM's and older configs, which are often null.
    ("awq_block_size", UNDERSTOOD, _AGREES, _group_size),
    ("smoothquant_val clamp_val use_meta_recipe", CARRIED, _ACTIVATIONS, _any),
    ("mamba_ssm_cache_dtype", CARRIED, "concerns the state of Mamba layers", _any),
)
METHODS: dict[str, dict[str, _Entry]] = {
    **{row.method: {} for row in DECLARATIONS.values() if row.method},
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _MODELOPT),
    "compressed-tensors": _known(
        ("format", UNDERSTOOD, _AGREES, _format),
        ("quantization_status", UNDERSTOOD, "the tensors are compressed", _only("compressed", "frozen")),
        ("global_compression_ratio", CARRIED, _HISTORY, _any),
        ("sparsity_config", UNDERSTOOD, "no sparsity", _dense),
        ("transform_config", UNDERSTOOD, "no transforms", _transform),
        ("run_compressed", CARRIED, _LOADER, _any),
    ),
    # In DeepSeek-V4, entries of Model-Optimizer concern only the experts in NVFP4, not its layers in FP8 and MXFP4.
    # Layers are therefore not compared with them.
    "fp8": _MODELOPT
    | _known(
        (
            "expert_dtype",
            UNDERSTOOD,
            _AGREES,
            _layers_of(fp4=lambda form: form.element.bits == 4, fp8=lambda form: form.element.bits == 8),
        ),
        ("store_dtype", UNDERSTOOD, _AGREES, _layers_of(mxfp4=lambda form: form.kind == "mxfp4")),
        ("mxfp4_block_size", UNDERSTOOD, _AGREES, _mxfp4_block_size),
        ("ignore exclude_modules", CARRIED, _LISTED, _any),
        ("config_groups", UNDERSTOOD, _AGREES, _known_groups),
    ),
    "quark": _known(
        ("algo_config", UNDERSTOOD, "no rotations", _quark_algorithms),
        ("global_quant_config layer_quant_config layer_type_quant_config", CARRIED, _DECIDES, _any),
        ("export quant_mode log_severity_level", CARRIED, _HISTORY, _any),
        ("softmax_quant_spec", CARRIED, _ACTIVATIONS, _any),
        ("kv_cache_quant_config kv_cache_post_rope", CARRIED, _KV, _any),
    ),
    "auto-round": _known(
        ("bits", UNDERSTOOD, _AGREES, _only(4, 8)),
        ("data_type", UNDERSTOOD, _AGREES, _only("mx_fp", "nv_fp", "mx_fp_rceil", "fp", "mx_fp4", "nv_fp4")),
        ("sym", UNDERSTOOD, "no zero points", _only(True)),
        ("packing_format", UNDERSTOOD, "names as compressed-tensors", _only("auto_round:llm_compressor")),
        ("extra_config", CARRIED, _DECIDES, _any),
        ("act_bits act_data_type act_dynamic act_group_size act_sym", CARRIED, _ACTIVATIONS, _any),
        ("static_attention_granularity", CARRIED, _ACTIVATIONS, _any),
        ("static_kv_granularity", CARRIED, _KV, _any),
        ("autoround_version block_name_to_quantize to_quant_block_names enable_quanted_input", CARRIED, _HISTORY, _any),
        ("iters nsamples seqlen lr minmax_lr batch_size low_gpu_mem_usage damp_percent", CARRIED, _HISTORY, _any),
    ),
    "torchao": _known(
        ("quant_type quant_type_kwargs", CARRIED, _DECIDES, _any),
        ("include_input_output_embeddings untie_embedding_weights", CARRIED, _HISTORY, _any),
    ),
}
# quant_method -> a check of the whole config, for methods in which several entries together describe a layer.
_WHOLE: dict[str, EntryCheck] = {"quark": _quark_layers, "auto-round": _auto_round_layers}

# Unknown keys of config.json that may concern how weights are stored. They are refused.
_DECLARES = re.compile(
    r"quant|rotation|hadamard|(\w+_)?(quant|rotation|hadamard|smoothquant|sparsity)"
    r"_(config|cfg|args|params|method|algo|algorithm|scheme|matrix|matrices)"
)


def config_items(config: Config, weights: Mapping[str, Weight]) -> Iterator[Item]:
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
                yield _unknown_entry(CONFIG, f"{prefix}{key}", value)


def _layers(weights: Mapping[str, Weight]) -> _Layers:
    plain = {w.name for w in weights.values() if w.container is None}
    return _Layers({w.name: w.container for w in weights.values() if w.container is not None}, plain)


def _unknown_entry(place: str, name: str, value: Any) -> Item:
    if value is None:  # tools write the optional entries of their newest version so
        return Item(UNDERSTOOD, place, name, "is null, so that it declares nothing")
    return Item(REFUSED, place, name, f"is {brief(value)}, an entry that fp4kit does not know")


def _declared(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield an item for each key of a ``quantization_config``."""
    if why := _no_object(value):
        yield Item(REFUSED, CONFIG, path, why)
        return
    nested = value.get("quantization")
    if isinstance(nested, Mapping) and "quant_algo" in nested:  # the content of hf_quant_config.json
        yield from _entries(nested, f"{path}.quantization", CONFIG, _MODELOPT, layers)
        value = {key: one for key, one in value.items() if key != "quantization"} | {"quant_method": "modelopt"}
    method = str(value.get("quant_method", "modelopt" if "quant_algo" in value else "compressed-tensors"))
    if method == MSMODELSLIM:
        yield from _description(value, layers)
        return
    if method not in METHODS:
        yield Item(REFUSED, CONFIG, f"{path}.quant_method", _unknown(method))
        return
    yield from _entries(value, path, CONFIG, METHODS[method], layers)
    if method in _WHOLE and (why := first_reason(_WHOLE[method](value, layers))):
        yield Item(REFUSED, CONFIG, path, why)


# What msmodelslim calls a type of layers, such as "W4A4_MXFP4", if fp4kit reads it -> the end of the container's name.
_MX_TYPE = re.compile(r"W([48])A\d+_MXFP[48]?(_DUALSCALE|_SVD)?")
_MX_ENDS = {None: "", "_DUALSCALE": " dual scale", "_SVD": " with low rank"}
ATTENTION_TYPES = ("C8", "FAQuant")  # types of tensors that hold scales of the KV cache, and of attention
_TYPE_OF_ATTENTION = re.compile(r"(.+\.)?quant_type|(fa|reduce)_quant_type")
# Entries of the description that are no tensors -> why they do not change the decoded weights.
_DESCRIBED = {
    **dict.fromkeys(("quant_method", "file", "version", "model_quant_type", "group_size"), "agrees with the tensors"),
    **dict.fromkeys(("kv_quant_type", "kv_cache_type"), "declares a quantized KV cache, not weights"),
    "optional": "names files with rotations that are merged into the weights",
}


def attention_types(declared: Config) -> dict[str, Any]:
    """Return the entries of msmodelslim's description that declare quantized attention or communication."""
    known = ("model_quant_type", "kv_quant_type")
    found = {key: one for key, one in declared.items() if _TYPE_OF_ATTENTION.fullmatch(key) and key not in known}
    return {key: one for key, one in found.items() if not isinstance(one, dict)}  # torchao's quant_type is an object


def _container_of_type(kind: str) -> str | None:
    """Return the name of the container of a type of msmodelslim; None if fp4kit does not read the type."""
    if kind == "WFP8AFP8_DYNAMIC":
        return f"{MSMODELSLIM} FP8 per row"
    match = _MX_TYPE.fullmatch(kind)
    return match and f"{MSMODELSLIM} mxfp{match[1]}{_MX_ENDS[match[2]]}"


def _description(value: Config, layers: _Layers) -> Iterator[Item]:
    """Yield the items of msmodelslim's description: one per entry that is refused, and one for all others."""
    file, told = (
        str(value.get("file", CONFIG)),
        {**_DESCRIBED, **dict.fromkeys(attention_types(value), "declares no weights")},
    )
    seen = set()
    for key, one in value.items():
        module, _, leaf = key.rpartition(".")
        form, kind = layers.forms.get(module), str(one)
        wanted = _container_of_type(kind)
        if key in told:
            continue
        if key == "metadata" and isinstance(one, Mapping):
            why = one and f"is {brief(one)}; rotations of the inputs of layers are not supported"
        elif not isinstance(one, str) or not module:
            why = _unknown(one)
        elif form is None:
            known = wanted or kind in ("FLOAT", *ATTENTION_TYPES)
            why = f"is {brief(one)}, a type of weights that fp4kit does not read" if not known else ""
            why = why or (
                f"is {brief(one)}, but {shown(module)} is not quantized" if wanted and leaf == "weight" else ""
            )
        else:
            beside = kind in ATTENTION_TYPES or (kind == "FLOAT" and leaf != "weight")
            why = (
                ""
                if beside or wanted == form.name
                else f"is {brief(one)}, but the tensors of {shown(module)} are {form}"
            )
        if why and module not in seen:
            seen.add(module or key)
            yield Item(REFUSED, file, key, why)
    sizes = value.get("group_size")
    why = first_reason(_group_size(sizes, layers)) if sizes else ""
    yield Item(REFUSED if why else UNDERSTOOD, file, "group_size" if why else "types", why or _AGREES)


def _entries(value: Config, path: str, place: str, known: Mapping[str, _Entry], layers: _Layers) -> Iterator[Item]:
    """Yield an item for each key of a JSON object in a config file, whose known keys are in ``known`` or _COMMON."""
    for key, one in value.items():
        entry = known.get(key) or _COMMON.get(key)
        if entry is None:
            yield _unknown_entry(place, f"{path}.{key}", one)
            continue
        group, reason, check_value = entry
        why = first_reason(check_value(one, layers))
        yield Item(REFUSED if why else group, place, f"{path}.{key}", why or reason)


def _mlx_items(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield the items of MLX's ``quantization``, which holds a default scheme and entries of single layers."""
    if why := _no_object(value):
        yield Item(REFUSED, CONFIG, path, why)
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
        if key == "fp4kit" or key in default or key in layers.forms:
            continue
        if isinstance(one, Mapping):
            yield Item(REFUSED, CONFIG, f"{path}.{key}", "declares a quantized layer that the checkpoint does not have")
        elif one is not False:
            yield _unknown_entry(CONFIG, f"{path}.{key}", one)
    yield Item(UNDERSTOOD, CONFIG, path, _AGREES)


def hf_quant_items(content: Config, config: Config, weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each entry of hf_quant_config.json."""
    known = METHODS["fp8"] if declared(config).get("quant_method") == "fp8" else _MODELOPT
    for key, value in content.items():
        if key == "quantization" and isinstance(value, Mapping):
            yield from _entries(value, key, HF_QUANT_CONFIG, known, _layers(weights))
        elif key == "producer":
            yield Item(CARRIED, HF_QUANT_CONFIG, key, _HISTORY)
        else:
            yield _unknown_entry(HF_QUANT_CONFIG, key, value)


def lost_column_scales(config: Config, hf_quant_config: Config | None, weights: Mapping[str, Weight]) -> str:
    """Return a warning if the config declares Model-Optimizer's AWQ, but no layer has factors per column; else ""."""
    entry = declared(with_declaration(config, hf_quant_config))
    groups = entry.get("config_groups")
    found = [*groups.values()] if isinstance(groups, Mapping) else []
    flags = [entry, *(found if all(isinstance(group, Mapping) for group in found) else ())]
    says = str(entry.get("quant_algo", "")).upper() == "NVFP4_AWQ" or any(one.get("pre_quant_scale") for one in flags)
    if not says or not weights or any(COLUMN_SCALE in weight.parts for weight in weights.values()):
        return ""
    return (
        "NVFP4_AWQ is declared, but no layer has a pre_quant_scale: all of them were folded into other layers, or they"
        " were lost and values are wrong; run fp4kit verify with --source"
    )


# Declarations without quantized tensors, and layers that are declared unquantized -------------------------------------


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if a config file declares quantization although no tensor is quantized."""
    why = "" if any_quantized(weights.values()) else unfulfilled(source.config, source.hf_quant_config)
    if why:
        raise CheckpointError(why)


def unfulfilled(config: Config, hf_quant_config: Config | None) -> str:
    """Return the error message for config files that declare quantization, for a model without quantized tensors."""
    return next(_declarations(config, hf_quant_config), "")


def _declarations(config: Config, hf_quant_config: Config | None) -> Iterator[str]:
    what = "but no tensor is quantized; remove this entry or file from the source"
    for prefix, section in sections(config):
        for key in KEYS:
            value = section.get(key)
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and method == MSMODELSLIM:
                yield f"{value.get('file', CONFIG)}: describes quantized weights, {what}"
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
    found, layers = set(), [*names]
    entries = [declared(source.config), source.config.get("quantization"), source.hf_quant_config]
    entries += [one.get("quantization") for one in entries if isinstance(one, Mapping)]
    for unquantized, patterns in (both for one in entries if isinstance(one, Mapping) for both in _layer_lists(one)):
        if patterns:
            is_named = _matcher(patterns)
            found |= {name for name in layers if is_named(name) == unquantized}
    return found


def _layer_lists(entry: Config) -> Iterator[tuple[bool, list[str]]]:
    """Yield (True if they are unquantized, names and patterns) for each list of layers in one entry of a config."""
    yield True, [pattern for key in EXCLUSIONS for pattern in _texts(entry.get(key))]
    quantized, groups, extra = (
        one if isinstance(one, Mapping) else {}
        for one in map(entry.get, ("quantized_layers", "config_groups", "extra_config"))
    )
    yield False, [*quantized]
    schemes = [one for one in groups.values() if isinstance(one, Mapping)]
    targets = [target for scheme in schemes for target in _texts(scheme.get("targets"))]
    yield False, [] if any(map(_is_class, targets)) else targets
    yield True, [name for name, one in extra.items() if isinstance(one, Mapping) and one.get("bits") in (16, 32)]
    yield True, [f"re:{re.escape(name)}$" for name, one in entry.items() if one is False]  # mlx-lm


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a list of names and patterns names a layer or a module that contains it."""
    paths, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:") or "*" in pattern:
            expression = _compiled(pattern[3:] if pattern.startswith("re:") else translate(pattern))
            expressions += [expression] if expression else []
        else:
            paths.add(pattern)

    def names(layer: str) -> bool:
        parts = layer.split(".")
        spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return any(span in paths for span in spans) or any(one.match(layer) for one in expressions)

    return names
