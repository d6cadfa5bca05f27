"""Account for everything that a checkpoint stores beside its quantized layers, so that nothing is ignored in silence.

Reading is closed-world. Each tensor under a quantized layer, each config key that concerns quantization and each entry
of the safetensors metadata is an *item* of one of four groups:

- understood: what fp4kit reads depends on it, or it was compared with the tensors and agrees.
- carried: it is known not to change the decoded weights. A conversion copies or replaces it.
- refused: fp4kit does not know it, or it contradicts the tensors. No command computes values while there is one.
- ignored: it would be refused, but the user named it with ``--ignore``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from fp4kit.checkpoint.containers.container import (
    CODES,
    COLUMN_SCALE,
    CONTAINERS,
    SCALES,
    TAG,
    TENSOR_SCALE,
    Container,
)
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import COMFY_METADATA, Weight, comfy_layers, looks_quantized
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.gguf_file import is_gguf
from fp4kit.storage.json_object import parse_object
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

UNDERSTOOD, CARRIED, REFUSED, IGNORED = "understood", "carried", "refused", "ignored"
Tensors = Mapping[str, tuple[SafetensorsFile, TensorEntry]]


class Item(NamedTuple):
    """Describe one thing that a checkpoint stores beside its quantized layers, and what reading makes of it.

    group: UNDERSTOOD, CARRIED, REFUSED or IGNORED.
    place: "tensor", the name of a config file, or "metadata".
    name: the tensor's name, or the path of the key, such as "quantization_config.transform_config".
    why: the reason for the group, in words for the user.
    what: dtype and shape of a tensor; "" for other items.
    """

    group: str
    place: str
    name: str
    why: str
    what: str = ""

    @property
    def subject(self) -> str:
        """The item's name, with dtype and shape if it is a tensor, and with its place if it is not."""
        if self.what:
            return f"{self.name} ({self.what})"
        return self.name if self.place == "tensor" else f"{self.place}: {self.name}"


class Model(Protocol):
    """Describe what ``items_of`` reads of an opened model: a Source or a Checkpoint."""

    @property
    def tensors(self) -> Tensors:
        """A map from tensor name to (its file, its header entry)."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The content of config.json; None if there is no such file."""

    @property
    def hf_quant_config(self) -> Mapping[str, Any] | None:
        """The content of hf_quant_config.json; None if there is no such file."""


def items_of(model: Model, weights: Mapping[str, Weight], ignore: Iterable[str] = ()) -> tuple[Item, ...]:
    """Return every item of an opened model (see account). weights: the weights that weights_of finds in it."""
    return account(model.tensors, weights, model.config, model.hf_quant_config, ignore)


def check_model(model: Model, weights: Mapping[str, Weight], ignore: Iterable[str] = ()) -> tuple[Item, ...]:
    """Return every item of an opened model. Raise CheckpointError if one is refused (see check)."""
    patterns = tuple(ignore)
    items = items_of(model, weights, patterns)
    check(items, patterns)
    return items


def account(
    tensors: Tensors,
    weights: Mapping[str, Weight],
    config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
    ignore: Iterable[str] = (),
) -> tuple[Item, ...]:
    """Return every item of a checkpoint: first its tensors, then its configs, then its metadata.

    tensors, weights: all tensors of the checkpoint, and the weights that weights_of finds in them.
    config, hf_quant_config: the contents of config.json and hf_quant_config.json; None if a file is missing.
    ignore: globs of names, as given with ``--ignore``. Refused items that match one become IGNORED.
    """
    patterns = tuple(ignore)
    found = [
        *_tensor_items(tensors, weights),
        *_config_items(config or {}, weights),
        *_hf_quant_items(hf_quant_config or {}, weights),
        *_metadata_items(tensors, weights),
    ]
    return tuple(
        item._replace(group=IGNORED)
        if item.group == REFUSED and any(fnmatchcase(item.name, pattern) for pattern in patterns)
        else item
        for item in found
    )


def check(items: Iterable[Item], ignore: Iterable[str] = ()) -> None:
    """Raise CheckpointError if an item is refused, or if a pattern of ``--ignore`` matches no item that needs it."""
    found = tuple(items)
    for pattern in ignore:
        if not any(item.group == IGNORED and fnmatchcase(item.name, pattern) for item in found):
            raise CheckpointError(f"--ignore {shown(pattern)}: matches nothing that is refused; leave it out")
    refused = [item for item in found if item.group == REFUSED]
    if refused:
        raise CheckpointError(refusal(refused))


def refusal(refused: list[Item]) -> str:
    """Return the error message for refused items: the first of each reason by name, and how many more there are."""
    by_reason: dict[str, list[str]] = {}
    for item in refused:
        by_reason.setdefault(item.why, []).append(item.subject)
    lines = []
    for why, names in list(by_reason.items())[:4]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{shown(names[0])}{more}: {shown(why)}")
    rest = len(by_reason) - len(lines)
    lines += [f"{rest} more kinds, listed by fp4kit inspect"] if rest > 0 else []
    return "; ".join(lines) + "; --ignore NAME leaves one out at your own risk"


# Tensors -------------------------------------------------------------------------------------------------------------

# Name of a tensor after its layer's name -> why it does not change the decoded weight.
_CARRIED_TENSORS = {
    "bias": "added to the layer's output",
    "k_scale": "scale of the KV cache",
    "v_scale": "scale of the KV cache",
    "q_scale": "scale of the attention's queries",
    "prob_scale": "scale of the attention's probabilities",
    "output_scale": "scale of the layer's output",
    "input_scale": "scale of the layer's inputs",
    "input_global_scale": "scale of the layer's inputs",
}
# Name of a tensor after its layer's name -> why the decoded weight would be wrong without it.
_REFUSED_TENSORS = {
    "pre_quant_scale": "multiplies the columns of the weight (AWQ), which is not supported for this format",
    "weight_quantizer._svdquant_lora_a": "low-rank part of the weight (SVDQuant), which is not supported",
    "weight_quantizer._svdquant_lora_b": "low-rank part of the weight (SVDQuant), which is not supported",
    "weight_zero_point": "zero points, which no 4-bit float format has",
    "weight_g_idx": "an order of the columns, which is not supported",
    "g_idx": "an order of the columns, which is not supported",
    "qzeros": "zero points, which no 4-bit float format has",
    "biases": "offsets of an integer format (MLX affine), which is not supported",
}
_ADAPTERS = (
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "lora_down",
    "lora_up",
)
_ADAPTER_LEAVES = ("dora_scale", "hada_w1_a", "hada_w2_a", "lokr_w1", "lokr_w2", "oft_diag", "oft_blocks")


def _tensor_items(tensors: Tensors, weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each tensor that is a part of a quantized layer, lies under one, or looks like a part."""
    quantized = {weight.name: weight for weight in weights.values() if weight.container is not None}
    parts = {place.entry.name: (weight, part) for weight in quantized.values() for part, place in weight.parts.items()}
    tagged = comfy_layers(tensors)
    for name, (file, entry) in tensors.items():
        if name in parts:
            weight, part = parts[name]
            yield (
                _tag_item(weight, file, tagged)
                if part == TAG
                else Item(UNDERSTOOD, "tensor", name, f"{_PART_NAMES.get(part, part)} of {weight.dtype}")
            )
            continue
        adapter = adapter_trouble(name)
        if adapter:
            yield Item(REFUSED, "tensor", name, adapter, f"{entry.dtype} {list(entry.shape)}")
            continue
        above = _layer_above(name, quantized)
        if above is not None:
            weight, rest = above
            yield _beside(name, rest, entry, weight)
        elif rest_of_kv(name):
            yield Item(CARRIED, "tensor", name, _CARRIED_TENSORS[name.rpartition(".")[2]])
        elif looks_quantized(entry):
            what = f"{entry.dtype} {list(entry.shape)}"
            yield Item(REFUSED, "tensor", name, _unknown_format(name, tensors), what)


_PART_NAMES = {
    CODES: "codes",
    SCALES: "block scales",
    TENSOR_SCALE: "tensor scale",
    COLUMN_SCALE: "factor per column",
    "input_scale": "scale of the inputs",
}


def rest_of_kv(name: str) -> bool:
    """Return whether a tensor is a scale of the KV cache or of attention. Such scales belong to no linear layer."""
    return name.rpartition(".")[2] in ("k_scale", "v_scale", "q_scale", "prob_scale")


def adapter_trouble(name: str) -> str:
    """Return why a tensor of an adapter, such as LoRA, is refused; "" for other tensors."""
    pieces = name.split(".")
    if any(piece in _ADAPTERS for piece in pieces) or pieces[-1] in _ADAPTER_LEAVES:
        return "a tensor of an adapter (LoRA), not of a model; merge the adapter into its model first"
    return ""


def _layer_above(name: str, quantized: Mapping[str, Weight]) -> tuple[Weight, str] | None:
    """Return (the quantized layer that a tensor lies under, the rest of the tensor's name); None if there is none.

    Tensors beside a stack of experts share the stack's name up to an underscore.
    """
    at = name.rfind(".")
    while at > 0:
        if name[:at] in quantized:
            return quantized[name[:at]], name[at + 1 :]
        at = name.rfind(".", 0, at)
    parent, _, leaf = name.rpartition(".")
    at = leaf.rfind("_")
    while at > 0:
        module = f"{parent}.{leaf[:at]}"
        if module in quantized and len(quantized[module].shape) == 3:
            return quantized[module], leaf[at + 1 :]
        at = leaf.rfind("_", 0, at)
    return None


def _beside(name: str, rest: str, entry: TensorEntry, weight: Weight) -> Item:
    """Return the item for a tensor that lies under a quantized layer but is not one of its parts."""
    if rest in _CARRIED_TENSORS and not (rest == "input_scale" and len(entry.shape) > 1):
        return Item(CARRIED, "tensor", name, _CARRIED_TENSORS[rest])
    known = _REFUSED_TENSORS.get(rest, f"not known beside a layer of {weight.dtype}")
    return Item(REFUSED, "tensor", name, known, f"{entry.dtype} {list(entry.shape)}")


def _unknown_format(name: str, tensors: Tensors) -> str:
    """Return why a tensor that looks quantized belongs to no layer, and what is known about its format."""
    known = _recognised(name, tensors)
    what = "packed weights or scales in a format that fp4kit does not know"
    return f"{what}{f' ({known})' if known else ''}; convert the unquantized release of the model"


def _recognised(name: str, tensors: Tensors) -> str:
    """Return what is known about the layer of a tensor that belongs to no container; "" if nothing is.

    It is a format that fp4kit does not read, or what keeps the layer from being read as the nearest container.
    """
    module = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
    has = {suffix: tensors[module + suffix][1] for suffix in _SUFFIXES if module + suffix in tensors}
    if ".biases" in has and ".scales" in has:
        return "MLX affine integers"
    if ".qzeros" in has or ".qweight" in has:
        return "GPTQ or AWQ integers"
    if ".weight_packed" in has and has[".weight_packed"].dtype == "I32":
        return "packed integers of compressed-tensors"
    if name.endswith("_weight_scale") and _blocks_along_outputs(name.removesuffix("_weight_scale"), tensors):
        return "MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis"
    scale = has.get(".weight_scale")
    if scale is not None and ".weight" in has and has[".weight"].dtype == "U8" and scale.dtype in ("F32", "BF16"):
        return "INT4 of Model-Optimizer"
    if scale is not None and ".weight" in has and _is_mxfp6(has[".weight"], scale):
        return "MXFP6"
    if ".comfy_quant" in has:
        return "a ComfyUI format other than nvfp4, mxfp8 and float8_e4m3fn"
    return _nearest_container(module, tensors)


def _is_mxfp6(codes: TensorEntry, scales: TensorEntry) -> bool:
    """Return whether a matrix of packed codes has 24 bytes per scale byte: 32 elements of 6 bits."""
    rows_and_columns = (*scales.shape[:-1], scales.shape[-1] * 24) if scales.shape else ()
    return (codes.dtype, scales.dtype) == ("U8", "U8") and codes.shape == rows_and_columns


def _blocks_along_outputs(stack: str, tensors: Tensors) -> bool:
    """Return whether a stack of packed experts [E, K, N/2] has one scale byte per 32 elements of its output axis N."""
    if stack not in tensors:
        return False
    codes, scales = tensors[stack][1], tensors[f"{stack}_weight_scale"][1]
    shape = (*codes.shape[:-1], codes.shape[-1] // 16) if codes.shape else ()
    return (codes.dtype, scales.dtype) == ("U8", "U8") and len(codes.shape) == 3 and scales.shape == shape


def _nearest_container(module: str, tensors: Tensors) -> str:
    """Return what a layer lacks to be one of a container that has the same codes and scales; "" if none is near."""
    best = ""
    for container in CONTAINERS:
        names = {part: module + suffix for part, suffix in container.suffixes.items()}
        if names[CODES] not in tensors or container.in_blocks or {TAG, COLUMN_SCALE} & set(names):
            continue
        missing = [names[part] for part in (SCALES, TENSOR_SCALE) if part in names and names[part] not in tensors]
        shape = container.shape_of(tensors[names[CODES]][1].shape)
        if tensors[names[CODES]][1].dtype != container.codes_dtype or shape is None:
            continue
        if SCALES in names and names[SCALES] in tensors:
            scales = tensors[names[SCALES]][1]
            usual = container.specs(shape)[SCALES]
            if missing and scales.dtype == usual[0] and scales.shape in container.shapes_of_scales(shape):
                return f"{container}, but {missing[0]} is missing"
            if not missing and scales.dtype == usual[0] and not best:
                best = f"{container} has scales of shape {list(usual[1])}, but {names[SCALES]} is {list(scales.shape)}"
        elif missing and SCALES in names and not best:
            best = f"{container}, but {missing[0]} is missing"
    return best


_SUFFIXES = (
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_scale",
    ".weight_zero_point",
    ".weight",
    ".scales",
    ".biases",
    ".qweight",
    ".qzeros",
    ".input_scale",
    ".comfy_quant",
    ".pre_quant_scale",
)


# ComfyUI -------------------------------------------------------------------------------------------------------------

_COMFY_KEYS = ("format", "group_size", "orig_dtype", "orig_shape", "full_precision_matrix_mult", "params")
_COMFY_KINDS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "float8_e4m3fn": "fp8 tensor"}
_NIBBLES = (
    "files with this tag exist in two orders of nibbles, and this one does not tell which it has; with --ignore"
    " '*.comfy_quant' it is read as ComfyUI's loader reads it, with the even element in the high nibble"
)


def _tag_item(weight: Weight, file: SafetensorsFile, tagged: Mapping[str, Any]) -> Item:
    """Return the item for the tensor ``.comfy_quant`` of a layer, whose content is compared with the layer's tensors.

    tagged: layer -> its entry in ComfyUI's metadata, which replaces the tensor's content; None without an entry.
    """
    place = weight.parts[TAG]
    with Readers() as readers:
        text = readers.array(place).tobytes()
    why = _comfy_trouble(weight, tagged.get(weight.name) or parse_object(text, shown(place.entry.name)))
    return Item(REFUSED if why else UNDERSTOOD, "tensor", place.entry.name, why or "tag of ComfyUI")


def _comfy_trouble(weight: Weight, entry: Any) -> str:
    """Return why a layer's entry in ComfyUI's tag or metadata is refused; "" if it agrees with the tensors."""
    assert weight.container is not None
    if not isinstance(entry, Mapping):
        return f"{shown(json.dumps(entry))}, where an object with the key format is needed"
    unknown = [key for key in entry if key not in _COMFY_KEYS]
    if unknown:
        return f"has the key {shown(unknown[0])}, which is not known"
    if _COMFY_KINDS.get(str(entry.get("format"))) != weight.container.kind:
        return f"declares {shown(str(entry.get('format')))}, but the tensors are {weight.dtype}"
    shape = entry.get("orig_shape")
    if shape is not None and list(shape) != list(weight.shape):
        return f"declares the shape {shape}, but the tensors hold {list(weight.shape)}; padded layers are not supported"
    if weight.container.high_first and "orig_shape" not in entry and "orig_dtype" not in entry:
        return _NIBBLES
    return ""


# Configs -------------------------------------------------------------------------------------------------------------

Check = Callable[[Any, "_Layers"], str]  # (value, layers) -> why it is refused; "" if it is not


class _Layers(NamedTuple):
    """Hold what the checks of config entries compare with: the containers of the quantized layers, by module name."""

    forms: Mapping[str, Container]

    @property
    def kinds(self) -> set[str]:
        """The kinds of all quantized layers, such as {"nvfp4", "fp8 tensor"}."""
        return {form.kind for form in self.forms.values()}


def _any(value: Any, layers: _Layers) -> str:
    """Return "": every value of the config entry is accepted."""
    return ""


def _only(*allowed: Any) -> Check:
    """Return a check that accepts the given values and refuses all others."""

    def check_value(value: Any, layers: _Layers) -> str:
        if any(value == one and type(value) is type(one) for one in allowed):
            return ""
        return f"is {_brief(value)}, which is not supported; known is {' or '.join(_brief(one) for one in allowed)}"

    return check_value


def _brief(value: Any) -> str:
    """Return a JSON value as text of at most 60 characters."""
    text = shown(json.dumps(value, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


# Algorithm of Model-Optimizer, in capitals -> the kinds of layers that it stores.
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
    """Return why Model-Optimizer's ``quant_algo`` is unknown or contradicts the tensors; "" if it agrees."""
    name = str(value).upper()
    if name == _MIXED:
        return ""
    if name not in _ALGORITHMS:
        return f"is {_brief(value)}, which is not known"
    other = sorted(layers.kinds - set(_ALGORITHMS[name]))
    return f"is {_brief(value)}, but there are layers of {', '.join(other)}" if other and layers.forms else ""


def _quantized_layers(value: Any, layers: _Layers) -> str:
    """Return why an entry of ``quantized_layers`` is unknown or contradicts its layer's tensors; "" if all agree."""
    if not isinstance(value, Mapping):
        return f"is {_brief(value)}, where an object is needed"
    for name, entry in value.items():
        algorithm = str(entry.get("quant_algo", "")) if isinstance(entry, Mapping) else ""
        kinds = _ALGORITHMS.get(algorithm.upper())
        if kinds is None:
            return f"has {shown(name)} as {_brief(entry)}, which is not known"
        extra = sorted(set(entry) - {"quant_algo", "group_size", "has_zero_point", "pre_quant_scale"})
        if extra:
            return f"has the key {shown(extra[0])} for {shown(name)}, which is not known"
        form = layers.forms.get(name)
        if form is not None and form.kind not in kinds:
            return f"declares {shown(name)} as {algorithm}, but its tensors are {form}"
    return ""


def _group_size(value: Any, layers: _Layers) -> str:
    """Return why a declared group size contradicts the blocks of the layers; "" if it agrees."""
    sizes = {form.block[1] for form in layers.forms.values() if form.kind in ("nvfp4", "mxfp4", "mxfp8")}
    if value is None or not sizes or value in sizes:
        return ""
    return f"is {_brief(value)}, but the tensors have blocks of {', '.join(map(str, sorted(sizes)))}"


def _block_size(value: Any, layers: _Layers) -> str:
    """Return why ``weight_block_size`` contradicts the blocks of the layers; "" if it agrees."""
    blocks = {form.block for form in layers.forms.values() if form.kind in ("fp8", "mxfp8")}
    if value is None or not blocks or (isinstance(value, list) and tuple(value) in blocks):
        return ""
    return f"is {_brief(value)}, but the tensors have blocks of {sorted(blocks)}"


_SCHEME: dict[str, Check] = {
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
    "block_structure": _only(None, [128, 128]),
}


def _scheme(value: Any, layers: _Layers) -> str:
    """Return what is unknown in the scheme of weights of a config group; "" if all of it is known."""
    if not isinstance(value, Mapping):
        return f"is {_brief(value)}, where an object is needed"
    for key, one in value.items():
        why = _SCHEME[key](one, layers) if key in _SCHEME else "is not known"
        if why:
            return f"has {shown(key)}, which {why}"
    return ""


_FORMATS = {
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("mxfp8",),
    "float-quantized": ("fp8", "fp8 rows", "fp8 tensor"),
    "naive-quantized": ("fp8", "fp8 rows", "fp8 tensor"),
}


def _format(value: Any, layers: _Layers) -> str:
    """Return why the declared format of compressed-tensors is unknown or contradicts the tensors; "" if it agrees."""
    if value in ("mixed-precision", None, "dense"):
        return ""
    if value not in _FORMATS:
        return f"is {_brief(value)}, which is not known"
    other = sorted(layers.kinds - set(_FORMATS[value]))
    return f"is {_brief(value)}, but there are layers of {', '.join(other)}" if other else ""


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
    """Return what is unknown or wrong in the config groups of compressed-tensors or Model-Optimizer; "" if nothing is.

    Checked are the keys, the schemes of weights, and the targets. Schemes of activations may be anything.
    """
    if not isinstance(value, Mapping):
        return f"is {_brief(value)}, where an object is needed"
    for name, group in value.items():
        unknown = [key for key in group if key not in _GROUP_KEYS] if isinstance(group, Mapping) else [name]
        if unknown:
            return f"has {shown(name)} with the key {shown(unknown[0])}, which is not known"
        form = group.get("format")
        if form is not None and form not in _FORMATS:
            return f"has {shown(name)} with the format {_brief(form)}, which is not known"
        why = _scheme(group["weights"], layers) if group.get("weights") is not None else ""
        if why:
            return f"has {shown(name)}, whose scheme of weights {why}"
    return _targets(list(value.values()), layers)


def _targets(groups: list[Mapping[str, Any]], layers: _Layers) -> str:
    """Return which layer is stored in another format than its config group declares; "" if none is.

    Groups are compared only if there are several and each has a format. A layer that several groups match must fit one
    of them.
    """
    if not all(group.get("format") for group in groups) or len(groups) < 2:
        return ""
    for name, form in layers.forms.items():
        kinds = {kind for group in groups if _matches(group, name) for kind in _FORMATS[group["format"]]}
        if form.kind not in kinds:
            says = ", ".join(sorted(kinds)) or "nothing"
            return f"declares {says} for {shown(name)}, but its tensors are {form}"
    return ""


def _matches(group: Mapping[str, Any], name: str) -> bool:
    """Return whether a config group names a layer: by its class Linear, by its name, or by a pattern ("re:...")."""
    for target in group.get("targets") or ():
        pattern = str(target)
        if pattern in ("Linear", name) or name.endswith(f".{pattern}"):
            return True
        if pattern.startswith("re:") and re.match(pattern[3:], name):
            return True
    return False


def _transform(value: Any, layers: _Layers) -> str:
    """Return why ``transform_config`` is refused: stored weights would be rotated. Return "" if it has no transform."""
    if not value or value == {"config_groups": {}}:
        return ""
    return "declares rotations of the weights, which are not undone here; use a checkpoint without transforms"


def _dense(value: Any, layers: _Layers) -> str:
    """Return why ``sparsity_config`` is refused: it has a format of its own. Return "" for dense weights."""
    form = value.get("format") if isinstance(value, Mapping) else value
    return "" if not form or form == "dense" else f"declares the sparse format {_brief(form)}, which is not supported"


def _quark_algorithms(value: Any, layers: _Layers) -> str:
    """Return why ``algo_config`` of quark is refused: it may rotate the weights. Return "" for other algorithms.

    Algorithms such as GPTQ and AWQ change only which values are stored.
    """
    for one in value if isinstance(value, list) else [value] if value else []:
        name = str(one.get("name", "")) if isinstance(one, Mapping) else str(one)
        if not name.startswith(("gptq", "awq", "smooth", "autosmoothquant")):
            return f"has {_brief(one)}, which may rotate the weights and is not supported"
    return ""


# {quant_method: {key: (group, why, check)}}
_IS_NAME = "names the method; the tensors decide"
_LISTED = "names of unquantized layers; the tensors show the same"
_ACTIVATIONS = "concerns activations"
_HISTORY = "how the checkpoint was made"
_KV = "concerns the KV cache"
_Entry = tuple[str, str, Check]
_COMMON: dict[str, _Entry] = {
    "quant_method": (UNDERSTOOD, _IS_NAME, _any),
    "fp4kit": (UNDERSTOOD, "fp4kit's record of a conversion", _any),
    "producer": (CARRIED, _HISTORY, _any),
    "provider": (CARRIED, _HISTORY, _any),
    "version": (CARRIED, _HISTORY, _any),
    "kv_cache_scheme": (CARRIED, _KV, _any),
    "kv_cache_quant_algo": (CARRIED, _KV, _any),
    "ignore": (CARRIED, _LISTED, _any),
    "exclude": (CARRIED, _LISTED, _any),
    "exclude_modules": (CARRIED, _LISTED, _any),
    "modules_to_not_convert": (CARRIED, _LISTED, _any),
    "ignored_layers": (CARRIED, _LISTED, _any),
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
}
_METHODS: dict[str, dict[str, _Entry]] = {
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
    "fp8": _MODELOPT,
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


def _config_items(config: Mapping[str, Any], weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each entry of config.json that concerns quantization.

    A checkpoint without quantized layers has none: check_declared refuses a config that declares some.
    """
    layers = _layers(weights)
    if not layers.forms:
        return
    text = config.get("text_config")
    for prefix, section in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in ("quantization_config", "compression_config", "quantization"):
            value = section.get(key)
            if key == "quantization" or (
                isinstance(value, Mapping) and "bits" in value and "quant_method" not in value
            ):
                yield from _mlx_items(value, f"{prefix}{key}", layers) if value else ()
            elif value:
                yield from _declared(value, f"{prefix}{key}", layers)


def _layers(weights: Mapping[str, Weight]) -> _Layers:
    """Return the containers of all quantized layers, by module name."""
    return _Layers({w.name: w.container for w in weights.values() if w.container is not None})


def _declared(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield an item for each key of a ``quantization_config``, by the table of its ``quant_method``."""
    if not isinstance(value, Mapping):
        yield Item(REFUSED, CONFIG, path, f"is {_brief(value)}, where an object is needed")
        return
    method = str(value.get("quant_method", "modelopt" if "quant_algo" in value else "compressed-tensors"))
    if method not in _METHODS:
        yield Item(REFUSED, CONFIG, f"{path}.quant_method", f"is {_brief(method)}, which is not known")
        return
    yield from _entries(value, path, CONFIG, {**_COMMON, **_METHODS[method]}, layers)


def _entries(
    value: Mapping[str, Any], path: str, place: str, known: Mapping[str, _Entry], layers: _Layers
) -> Iterator[Item]:
    """Yield an item for each key of a JSON object.

    path: the path of the object, with which the names of the items begin. place: the file that holds it.
    known: key -> (group, reason, check). A key that is not in it is refused, and so is a value that its check refuses.
    """
    for key, one in value.items():
        name = f"{path}.{key}"
        if key not in known:
            yield Item(REFUSED, place, name, f"is {_brief(one)}, an entry that is not known")
            continue
        group, reason, check_value = known[key]
        why = check_value(one, layers)
        yield Item(REFUSED if why else group, place, name, why or reason)


def _mlx_items(value: Any, path: str, layers: _Layers) -> Iterator[Item]:
    """Yield the items of MLX's ``quantization``: for the default scheme, and for entries of single layers.

    path: the path of ``quantization`` in config.json.
    """
    if not isinstance(value, Mapping):
        yield Item(REFUSED, CONFIG, path, f"is {_brief(value)}, where an object is needed")
        return
    default = {key: value[key] for key in ("group_size", "bits", "mode") if key in value}
    for name, form in layers.forms.items():
        own = value.get(name, default)
        says = (own.get("group_size"), own.get("bits"), own.get("mode")) if isinstance(own, Mapping) else own
        if says != (form.group_size, form.element.bits, form.kind):
            why = f"declares {_brief(says)} for {shown(name)}, but its tensors are {form}"
            yield Item(REFUSED, CONFIG, path, why)
            return
    for key, one in value.items():
        if key == "fp4kit":
            continue
        if key not in default and key not in layers.forms and isinstance(one, Mapping):
            yield Item(REFUSED, CONFIG, f"{path}.{key}", "declares a quantized layer that is not there")
        elif key not in default and key not in layers.forms and one is not False:
            yield Item(REFUSED, CONFIG, f"{path}.{key}", f"is {_brief(one)}, an entry that is not known")
    yield Item(UNDERSTOOD, CONFIG, path, "agrees with the tensors")


def _hf_quant_items(content: Mapping[str, Any], weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each entry of hf_quant_config.json."""
    layers = _layers(weights)
    for key, value in content.items() if layers.forms else ():
        if key == "quantization" and isinstance(value, Mapping):
            yield from _entries(value, key, HF_QUANT_CONFIG, {**_COMMON, **_MODELOPT}, layers)
        elif key == "producer":
            yield Item(CARRIED, HF_QUANT_CONFIG, key, _HISTORY)
        else:
            yield Item(REFUSED, HF_QUANT_CONFIG, key, f"is {_brief(value)}, an entry that is not known")


# Metadata ------------------------------------------------------------------------------------------------------------


def _metadata_items(tensors: Tensors, weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each entry of the files' safetensors metadata. GGUF metadata is not looked at here."""
    quantized = {weight.name: weight for weight in weights.values() if weight.container is not None}
    if not quantized:
        return
    files = {file.path: file for file, _ in tensors.values()}
    entries = {(key, text) for file in files.values() if not is_gguf(file.path) for key, text in file.metadata.items()}
    for key, text in sorted(entries):
        if key == COMFY_METADATA:
            yield from _comfy_metadata(text, quantized)
        elif key.removesuffix(".weight") in quantized or key in tensors:
            yield _torchao_item(key, text)
        elif key == "format" or key.startswith("fp4kit"):
            yield Item(UNDERSTOOD if key != "format" else CARRIED, "metadata", key, "the library that wrote the file")
        elif any(word in key.lower() for word in ("quant", "scale", "fp4", "fp8", "rotat", "hadamard")):
            yield Item(REFUSED, "metadata", key, f"is {_brief(text)}, an entry that is not known")
        else:
            yield Item(CARRIED, "metadata", key, "does not concern quantization")


def _comfy_metadata(text: str, quantized: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield the items of ComfyUI's metadata: one for all layers that agree, and one for each that does not."""
    content = parse_object(text.encode(), f"metadata {COMFY_METADATA}")
    unknown = [key for key in content if key not in ("format_version", "layers")]
    if unknown or content.get("format_version", "1.0") != "1.0":
        yield Item(
            REFUSED, "metadata", COMFY_METADATA, f"has {_brief(content.get('format_version'))} {unknown}, not known"
        )
    layers = content.get("layers")
    for name, entry in layers.items() if isinstance(layers, Mapping) else ():
        weight = quantized.get(name)
        if weight is None:
            yield Item(
                REFUSED, "metadata", f"{COMFY_METADATA}.{name}", "names a layer that is not there or not quantized"
            )
        elif TAG not in weight.parts:
            why = _comfy_trouble(weight, entry)
            yield Item(
                REFUSED if why else UNDERSTOOD, "metadata", f"{COMFY_METADATA}.{name}.comfy_quant", why or "agrees"
            )
    yield Item(UNDERSTOOD, "metadata", COMFY_METADATA, "agrees with the tensors")


def _torchao_item(key: str, text: str) -> Item:
    """Return the item for the metadata entry that torchao writes per tensor: its class, as JSON."""
    try:
        content = json.loads(text)
        data = content.get("_data") or {}
        known = content.get("_type") in ("Tensor", "MXTensor", "NVFP4Tensor")
        swizzled = data.get("is_swizzled_scales", True) is True
    except (ValueError, AttributeError):
        return Item(REFUSED, "metadata", key, f"is {_brief(text)}, an entry that is not known")
    if not known:
        return Item(REFUSED, "metadata", key, f"is a {_brief(content.get('_type'))} of torchao, which is not known")
    if not swizzled:
        return Item(REFUSED, "metadata", key, "declares scales that are not swizzled, which is not supported")
    return Item(UNDERSTOOD, "metadata", key, "agrees with the tensors")
