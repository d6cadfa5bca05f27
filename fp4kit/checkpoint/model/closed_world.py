"""Account for everything in a checkpoint that may concern quantization, so that nothing is silently ignored. Each such
tensor, config key and metadata entry is an item. An item is understood (fp4kit uses it, or it agrees with the tensors),
carried (known not to change the decoded weights), doubtful (read in the likely way, with a warning), refused (unknown,
or contradicts the tensors) or ignored (it would be doubtful or refused, but the user named it with ``--ignore``).

Reading is closed-world: an entry that fp4kit does not know is refused, not skipped. No command computes values while an
item is refused. A conversion copies or replaces carried items.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import with_article
from fp4kit.checkpoint.containers import config_entries, table
from fp4kit.checkpoint.containers.config_entries import CARRIED, DOUBTFUL, IGNORED, REFUSED, UNDERSTOOD, Item, brief
from fp4kit.checkpoint.containers.configs import declared, sections
from fp4kit.checkpoint.containers.table import CODES, CONTAINERS, SCALES, TAG, TENSOR_SCALE, Container
from fp4kit.checkpoint.model import weights as stored
from fp4kit.checkpoint.model.doubts import lacking, named_twice, role_of
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import COMFY_METADATA, Tensors, Weight, looks_quantized
from fp4kit.checkpoint.selection.names import adapter_trouble
from fp4kit.storage.files import (
    BLOCKED,
    FLOAT_DTYPES,
    CheckpointError,
    SafetensorsFile,
    TensorEntry,
    listed,
    parse_object,
    shown,
    similar_glob,
)
from fp4kit.storage.gguf_file import GgufFile


def items_of(
    model: Source, weights: Mapping[str, Weight], ignore: Collection[str] = (), more: Iterable[Item] = ()
) -> tuple[Item, ...]:
    """Return every item of an opened model, refused ones included: of its tensors, its configs, its metadata, and
    ``more``.
    """
    tensors, config, hf_quant_config = model.tensors, model.config, model.hf_quant_config or {}
    by_name = {weight.name: weight for weight in weights.values()}
    found = [
        *_tensor_items(tensors, weights, config),
        *(_refused(by_name[name].located.entry, why) for name, why in named_twice(by_name)),
        *(Item(UNDERSTOOD, "tensor", name, entry.note) for name, (_, entry) in tensors.items() if entry.note),
        *_scales_of_casts(weights.values()),
        *_fused_experts(weights.values(), config),
    ]
    if stored.any_quantized(weights.values()):  # otherwise the plan refuses declarations (see check_declared)
        found += config_entries.config_items(config, weights)
        found += config_entries.hf_quant_items(hf_quant_config, config, weights)
        found += _metadata_items(tensors, weights)
    known = {item.name for item in found if item.group == REFUSED}
    found += [item for item in more if item.name not in known]
    return tuple(
        item._replace(group=IGNORED)
        if item.group in (DOUBTFUL, REFUSED) and any(fnmatchcase(item.name, pattern) for pattern in ignore)
        else item
        for item in found
    )


def check_model(
    model: Source, weights: Mapping[str, Weight], ignore: Collection[str] = (), more: Iterable[Item] = ()
) -> tuple[Item, ...]:
    """Return every item (tensor, config key or metadata entry) of a model, after checking that none is refused."""
    items = items_of(model, weights, ignore, more)
    check(items, ignore)
    return items


def check_integers(items: Iterable[Item]) -> None:
    """Raise CheckpointError if a tensor is in a type of llama.cpp that fp4kit cannot decode, such as Q4_K."""
    found = [item.subject for item in items if item.why == INTEGERS]
    if found:
        why = "in a type of llama.cpp that fp4kit does not decode; convert the GGUF file of the unquantized model"
        raise CheckpointError(f"{listed(found)}: {why}")


def check(items: Collection[Item], ignore: Collection[str] = ()) -> None:
    """Raise CheckpointError if an item is refused, or if a glob in ``ignore`` is useless; otherwise do nothing."""
    # A glob is useless if it matches no item that would be refused without it.
    refused = refused_in(items, ignore)
    if refused:
        raise CheckpointError(refusal(refused))


def refused_in(items: Collection[Item], ignore: Collection[str] = ()) -> list[Item]:
    """Return the refused items. Raise CheckpointError if a glob in ``ignore`` is useless (see check)."""
    for pattern in ignore:
        if not any(item.group == IGNORED and fnmatchcase(item.name, pattern) for item in items):
            names = [item.name for item in items if item.group in (IGNORED, REFUSED)]
            near = similar_glob(pattern, names) or (f"names are such as {shown(names[0])}; " if names else "")
            raise CheckpointError(f"--ignore {shown(pattern)}: matches nothing that is refused; {near}leave it out")
    return [item for item in items if item.group == REFUSED]


def refusal(refused: list[Item]) -> str:
    """Return the error message for refused items."""
    lines = reasons(refused)
    rest = [f"{len(lines) - 4} more kinds, listed by fp4kit inspect"] if len(lines) > 4 else []
    names = f"NAME, such as {shlex.quote(shown(refused[0].name))},"
    return "; ".join([*lines[:4], *rest]) + f"; --ignore {names} leaves one out at your own risk"


def reasons(refused: Iterable[Item]) -> list[str]:
    """Return one text per reason of refused items: the first items, the number of other items, and the reason."""
    by_reason: dict[str, list[str]] = {}
    for item in refused:
        by_reason.setdefault(item.why, []).append(item.subject)
    return [f"{listed(names)}: {shown(why)}" for why, names in by_reason.items()]


# Tensors -------------------------------------------------------------------------------------------------------------

# Last part of a tensor's name, after the name of its layer -> why the tensor does not change the decoded weight.
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
# Last part of a tensor's name, after the name of its layer -> why the decoded weight would be wrong without the tensor.
_REFUSED_TENSORS = {
    "pre_quant_scale": "multiplies the columns of the weight (AWQ), which is not supported for this format",
    **dict.fromkeys(
        (f"{prefix}svdquant_lora_{part}" for prefix in ("weight_quantizer._", "") for part in "ab"),
        "low-rank part of the weight (SVDQuant), whose other parts are missing or do not fit",
    ),
    "weight_zero_point": "zero points, which no 4-bit float format has",
    "weight_g_idx": "an order of the columns, which is not supported",
    "g_idx": "an order of the columns, which is not supported",
    "qzeros": "zero points, which no 4-bit float format has",
    "biases": "offsets of an integer format (MLX affine), which is not supported",
    **dict.fromkeys(
        ("left_trans", "right_trans", "clip_ratio"), "transforms the inputs of the layer (FlatQuant), not supported"
    ),
}
# Matches the last part of a tensor's name if the tensor may transform weights or inputs of layers.
_TRANSFORMS = re.compile(
    r"\w*(hadamard|rotation)\w*|R[1-4]|smooth(quant|ing)?_(scale|scales|factor|factors)|\w*pre_quant_scale|act_scales?"
    r"|mul_scale"
)


def _refused(entry: TensorEntry, why: str, group: str = REFUSED) -> Item:
    return Item(group, "tensor", entry.name, why, f"{entry.dtype} {list(entry.shape)}")


def _tensor_items(tensors: Tensors, weights: Mapping[str, Weight], config: Mapping[str, Any]) -> Iterator[Item]:
    """Yield an item for each tensor that concerns quantization."""
    quantized = {weight.name: weight for weight in weights.values() if weight.container is not None}
    parts = {place.entry.name: (weight, part) for weight in quantized.values() for part, place in weight.parts.items()}
    plain = {weight.name: weight for weight in weights.values() if weight.container is None}
    tagged, types = stored.comfy_layers(tensors), declared(config)
    unread = {name: entry for name, (_, entry) in tensors.items() if name not in parts}
    foreign = ForeignLayers(unread, str(types.get("quant_method", "")))
    for name, (file, entry) in tensors.items():
        leaf = name.rpartition(".")[2]
        owner = plain.get(name.removesuffix(".input_scale").removesuffix(".scale_input"))
        if name in parts:
            weight, part = parts[name]
            understood = Item(UNDERSTOOD, "tensor", name, f"{_PART_NAMES.get(part, part)} of {weight.dtype}")
            yield _tag_item(weight, tagged) if part == TAG else understood
        elif adapter := adapter_trouble(name):
            yield _refused(entry, adapter)
        elif owner is not None and owner.name != name and quantized and entry.dtype in FLOAT_DTYPES:
            yield _refused(entry, STRAY, DOUBTFUL)
        elif leaf == "scaled_fp8" and any(one.dtype in _OLD for one in quantized.values()):
            yield Item(UNDERSTOOD, "tensor", name, MARKER)
        elif types.get(name) in config_entries.ATTENTION_TYPES:
            yield Item(CARRIED, "tensor", name, ATTENTION)
        elif (above := layer_above(name, quantized)) is not None:
            yield _beside(stored.Located(file, entry), above[1], above[0])
        elif is_attention_scale(name):
            is_integer = _is_integer(entry)
            yield _refused(entry, _NO_INTEGERS) if is_integer else Item(CARRIED, "tensor", name, _CARRIED_TENSORS[leaf])
        elif quantized and _TRANSFORMS.fullmatch(name.removesuffix(".weight").rpartition(".")[2]):
            yield _refused(entry, "may transform weights or the inputs of quantized layers, which is not supported")
        elif stored.cast_of(stored.Located(file, entry), quantized.values()) is not None:
            yield Item(UNDERSTOOD, "tensor", name, "cast to FP8, so that the codes are the values")
        elif entry.dtype in BLOCKED:
            yield from [_refused(entry, INTEGERS, CARRIED)] * (entry.dtype not in ("Q8_0", "MXFP4", "NVFP4"))
        elif why := foreign.why(name):
            yield _refused(entry, why)


# A matrix of FP8 that has lost its scale has values near 100; trained weights are below 1.
_MOST_OF_CASTS, _SAMPLED = 8.0, 1 << 16


def _scales_of_casts(weights: Iterable[Weight]) -> Iterator[Item]:
    """Yield a refused item for each of some layers without scales whose codes are too large to be values."""
    casts = [weight for weight in weights if weight.container is not None and weight.container.is_cast]
    with Readers() as readers:
        for weight in casts[:: max(len(casts) // 8, 1)]:
            count = min(weight.located.entry.nbytes, _SAMPLED)
            values = weight.form.element.values[readers.bytes(weight.located, 0, count)].astype(np.float64)
            size = float(np.sqrt(np.mean(np.square(values[np.isfinite(values)])))) if count else 0.0
            if size > _MOST_OF_CASTS:
                why = (
                    f"8-bit floats without scales, whose root mean square of {size:.3g} is too large for weights; their"
                    " scales are missing; take the file from another copy"
                )
                yield _refused(weight.located.entry, why)


def _fused_experts(weights: Iterable[Weight], config: Mapping[str, Any]) -> Iterator[Item]:
    """Yield a refused item for each stack in vLLM's form of experts that does not have the shapes of its model."""
    found = {weight.name: weight for weight in weights if weight.dtype == table.VLLM_EXPERTS.name}
    sizes = [section["hidden_size"] for _, section in sections(config) if isinstance(section.get("hidden_size"), int)]
    for name, weight in found.items():
        pair = [found.get(f"{name.rpartition('.')[0]}.{one}") for one in ("w13", "w2")]
        shapes = [one.shape for one in pair if one is not None and len(one.shape) == 3]
        fits = weight in pair and len(shapes) == 2
        if fits:
            (experts, rows, hidden), (_, _, inner) = shapes
            fits = shapes[1] == (experts, hidden, inner) and rows == 2 * inner and hidden in (sizes or [hidden])
        if not fits or stored.is_interleaved(config):
            why = (
                "vLLM's fused form of experts, but w13_weight [E, 2I, H/2] and w2_weight [E, H, I/2] do not have the"
                " sizes of this model, or its order of rows is not known; convert the unquantized release of the model"
            )
            yield _refused(weight.located.entry, why)


INTEGERS = "in a type of llama.cpp that fp4kit does not decode; it stays as it is"
STRAY = "a scale of inputs beside a layer that is not quantized; it is left out"
MARKER = "marks a file of ComfyUI with layers in scaled FP8; the scales say the same"
ATTENTION = "scale of the KV cache or of attention"
_NO_INTEGERS = "a scale of attention or the KV cache, which must be a float"
ZEROS = "offsets, all of which are zero; they are left out"
LEFT_OUT = (MARKER, STRAY, ZEROS)  # why tensors are not written
_OLD = (table.COMFY_OLD.name, table.COMFY_OLD_E5M2.name)
_PART_NAMES = {
    table.CODES: "codes",
    table.SCALES: "block scales",
    TENSOR_SCALE: "tensor scale",
    table.COLUMN_SCALE: "factor per column",
    table.OUTER_SCALE: "outer scales",
    table.LOW_RANK_A: "low-rank part of the weight",
    table.LOW_RANK_B: "low-rank part of the weight",
    "input_scale": "scale of the inputs",
}


def is_attention_scale(name: str) -> bool:
    """Return whether a tensor has the name of a scale of the KV cache or of attention, such as "attn.k_scale"."""
    return name.rpartition(".")[2] in ("k_scale", "v_scale", "q_scale", "prob_scale")


def lost_tensor_scales(weights: Iterable[Weight]) -> Iterator[str]:
    """Yield a warning about NVFP4 layers without a tensor scale if most layers have one, or the reverse."""
    # Only layers of GGUF, torchao and mlx-lm are counted, because these formats allow NVFP4 layers without a tensor
    # scale.
    # Stacks of mlx-lm are counted with stacks only, because mlx-lm stores tensor scales for experts and for no other
    # layers.
    pairs = ((weight, weight.container) for weight in weights)
    nvfp4 = ((weight, form) for weight, form in pairs if form is not None and form.kind == "nvfp4")
    found = [weight for weight, form in nvfp4 if form.in_blocks or form.method == "torchao" or form.format == "mlx"]
    kinds: dict[str, list[Weight]] = defaultdict(list)  # all stacks of mlx-lm, all other layers, then each role
    for weight in found:
        kinds["stacks" if weight.dtype.startswith("mlx") and len(weight.shape) > 2 else ""].append(weight)
    for weight in found:
        kinds[role_of(weight.name)].append(weight)
    named: set[str] = set()
    for role, kind in kinds.items():
        have = {weight.name: TENSOR_SCALE in weight.parts for weight in kind}
        count = sum(have.values())
        rare = {name for name, has in have.items() if has == (2 * count < len(have))}
        if not named & rare and not (role in ("", "stacks") and 2 * count == len(have)):
            named |= rare
            end = "values are wrong; run fp4kit verify with --source"
            yield from lacking("tensor scale", have, "NVFP4 layers", "a ", end)


def check_no_adapter(tensors: Tensors, ignore: Collection[str] = ()) -> None:
    """Raise CheckpointError if a tensor belongs to an adapter, such as LoRA."""
    found = [
        _refused(entry, adapter_trouble(name))
        for name, (_, entry) in tensors.items()
        if adapter_trouble(name) and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if found:
        raise CheckpointError(refusal(found))


def layer_above(name: str, layers: Mapping[str, Weight]) -> tuple[Weight, str] | None:
    """Find the layer whose name is the beginning of a tensor's name, to tell which layer the tensor may concern."""
    for module, rest in _cuts(name, "."):
        if module in layers:
            return layers[module], rest
    parent, _, leaf = name.rpartition(".")
    for head, rest in _cuts(leaf, "_"):
        found = layers.get(f"{parent}.{head}")
        if found is not None and (len(found.shape) == 3 or rest in _REFUSED_TENSORS):
            return found, rest
    return None


def _cuts(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before and after each mark in a text, from the last mark to the first."""
    at = text.rfind(mark)
    while at > 0:
        yield text[:at], text[at + 1 :]
        at = text.rfind(mark, 0, at)


_SCALES_OF_LAYERS = ("input_scale", "input_global_scale", "output_scale")


def is_scale_of_layer(item: Item) -> bool:
    """Return whether an item is a carried tensor that holds the input scale or output scale of a layer."""
    # A conversion to unquantized output leaves these tensors out, because a decoded layer has no such scales.
    leaf = item.name.rpartition(".")[2]
    return item.group == CARRIED and item.place == "tensor" and leaf in _SCALES_OF_LAYERS


def is_known_beside(rest: str, entry: TensorEntry) -> bool:
    """Return whether a tensor that is named after a quantized layer is known not to change the decoded weight."""
    is_usual = len(entry.shape) < 2 and entry.dtype in FLOAT_DTYPES
    return rest in _CARRIED_TENSORS and not _is_integer(entry) and (rest not in _SCALES_OF_LAYERS or is_usual)


def _is_integer(entry: TensorEntry) -> bool:
    """Return whether a tensor holds integers or booleans."""
    return entry.dtype.startswith(("U", "I", "BOOL"))


def _beside(place: stored.Located, rest: str, weight: Weight) -> Item:
    """Return the item for a tensor that is named after a quantized layer but is not one of its codes or scales."""
    # The item is REFUSED, with the reason, unless the tensor is known not to change the weights.
    entry = place.entry
    if rest == "weight_offset" and entry.dtype in FLOAT_DTYPES:  # msmodelslim writes zeros beside FP8 codes
        with Readers() as readers:
            is_zero = not readers.array(place).any()
        return Item(UNDERSTOOD, "tensor", entry.name, ZEROS) if is_zero else _refused(entry, "offsets, not all zero")
    if is_known_beside(rest, entry):
        return Item(CARRIED, "tensor", entry.name, _CARRIED_TENSORS[rest])
    return _refused(entry, _REFUSED_TENSORS.get(rest, f"not known beside a layer of {weight.dtype}"))


# ComfyUI -------------------------------------------------------------------------------------------------------------

_COMFY_KEYS = ("format", "group_size", "orig_dtype", "orig_shape", "full_precision_matrix_mult", "params")
_NO_ROTATION = ("convrot", "convrot_groupsize")  # rotate the weights, unless they are false, 0 or null
_TAG_FORMATS = {form.tag_format for form in CONTAINERS if TAG in form.suffixes}
_NIBBLES = (
    "files with this tag exist in two orders of nibbles, and this file does not say which order it has; it is read as"
    " ComfyUI reads it, with the even element in the high nibble"
)


def _comfy_verdict(weight: Weight, entry: Any) -> tuple[str, str]:
    """Return (group, reason) of the item for what ComfyUI's tag or metadata says about a layer."""
    if why := config_entries.first_reason(_comfy_trouble(weight, entry)):
        return REFUSED, why
    unsaid = weight.form.high_first and "orig_shape" not in entry and "orig_dtype" not in entry
    return (DOUBTFUL, _NIBBLES) if unsaid else (UNDERSTOOD, "")


def _tag_item(weight: Weight, tagged: Mapping[str, Any]) -> Item:
    """Return the item for a layer's tensor ``.comfy_quant``: refused if it contradicts the layer, otherwise
    understood.
    """
    place = weight.parts[TAG]
    with Readers() as readers:
        text = readers.array(place).tobytes()
    group, why = _comfy_verdict(weight, tagged.get(weight.name) or parse_object(text, shown(place.entry.name)))
    return Item(group, "tensor", place.entry.name, why or "tag of ComfyUI")


def _comfy_trouble(weight: Weight, entry: Any) -> config_entries.Reasons:
    """Yield reasons to refuse what ComfyUI's tag or metadata says about a layer."""
    if not isinstance(entry, Mapping):
        yield f"{shown(json.dumps(entry))}, where an object with the key format is needed"
    unknown = [
        key
        for key in entry
        if key not in _COMFY_KEYS and not (key in _NO_ROTATION and not entry[key]) and entry[key] is not None
    ]
    yield unknown and f"has the key {shown(unknown[0])}, which fp4kit does not know"
    name, shape = entry.get("format"), entry.get("orig_shape")
    yield name not in _TAG_FORMATS and f"is ComfyUI's {shown(str(name))}, a format that fp4kit does not read"
    if name != weight.form.tag_format:
        yield f"declares {shown(str(name))}, but the tensors are {weight.dtype}"
    if shape is not None and shape != list(weight.shape):
        what = f"declares the shape {brief(shape)}, but the tensors hold {list(weight.shape)}"
        yield f"{what}; padded layers are not supported"


# Metadata ------------------------------------------------------------------------------------------------------------


# Parts of the keys of metadata entries that may concern how weights are stored. Unknown entries with such keys are
# refused.
_CONCERNS_WEIGHTS = re.compile(
    r"quant|scale|[fm]p4|fp8|rotat|hadamard|transform(?!er)|permut|swizzl|nibble|interleav|pack(ed|ing)|smooth|svd|awq"
)


def _metadata_items(tensors: Tensors, weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield an item for each metadata entry of the checkpoint's safetensors files."""
    quantized = {weight.name: weight for weight in weights.values() if weight.container is not None}
    files = {file.path: file for file, _ in tensors.values()}
    yield from _without_class(files.values(), quantized)
    entries = {pair for file in files.values() if not isinstance(file, GgufFile) for pair in file.metadata.items()}
    for key, text in sorted(entries):
        if key == COMFY_METADATA:
            yield from _comfy_metadata(text, quantized)
            continue
        group, why = CARRIED, "does not concern quantization"
        if key.removesuffix(".weight") in quantized or key in tensors:
            trouble = config_entries.first_reason(_torchao_trouble(text, quantized.get(key.removesuffix(".weight"))))
            group, why = (REFUSED, trouble) if trouble else (UNDERSTOOD, "agrees with the tensors")
        elif key == "format" or key.startswith("fp4kit"):
            group, why = CARRIED if key == "format" else UNDERSTOOD, "the library that wrote the file"
        elif _CONCERNS_WEIGHTS.search(key.lower()):
            group, why = REFUSED, f"is {brief(text)}, an entry that fp4kit does not know"
        yield Item(group, "metadata", key, why)


def describes_stored_layers(key: str, tensors: Tensors, quantized: Collection[str]) -> bool:
    """Return whether a metadata entry says how layers are stored, as ComfyUI and torchao write them."""
    # A conversion does not copy such entries, because it stores the layers differently.
    return key == COMFY_METADATA or key in tensors or key.removesuffix(".weight") in quantized


def _comfy_metadata(text: str, quantized: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield the items of ComfyUI's metadata, which describes the quantized layers of a file."""
    content = parse_object(text.encode(), f"metadata {COMFY_METADATA}")
    unknown = [key for key in content if key not in ("format_version", "layers")]
    if unknown or content.get("format_version", "1.0") != "1.0":
        what = f"has {brief(content.get('format_version'))} {unknown}"
        yield Item(REFUSED, "metadata", COMFY_METADATA, f"{what}, which fp4kit does not know")
    layers = content.get("layers")
    for name, entry in layers.items() if isinstance(layers, Mapping) else ():
        weight = quantized.get(name)
        if weight is None:
            why = "names a layer that is missing or is not quantized"
            yield Item(REFUSED, "metadata", f"{COMFY_METADATA}.{name}", why)
        elif TAG not in weight.parts:
            group, why = _comfy_verdict(weight, entry)
            yield Item(group, "metadata", f"{COMFY_METADATA}.{name}.comfy_quant", why or "agrees")
    yield Item(UNDERSTOOD, "metadata", COMFY_METADATA, "agrees with the tensors")


# Name of an element dtype in the metadata of torchao -> the kind of container that stores such layers.
_TORCHAO_DTYPES = {"float4_e2m1fn_x2": "mxfp4", "float8_e4m3fn": "mxfp8"}


def _torchao_trouble(text: str, weight: Weight | None) -> config_entries.Reasons:
    """Yield reasons to refuse a metadata entry that torchao writes per tensor: its class and its fields, as JSON."""
    try:
        content = json.loads(text)
        kind, data = content.get("_type"), content.get("_data") or {}
        swizzled = data.get("is_swizzled_scales")
    except (ValueError, AttributeError):
        yield f"is {brief(text)}, an entry that fp4kit does not know"
        return
    if kind not in ("Tensor", "MXTensor", "NVFP4Tensor"):
        yield f"is {with_article(brief(kind))} of torchao, which fp4kit does not know"
    if kind != "Tensor" and swizzled is None:
        yield "does not say whether scales are swizzled; only swizzled ones are supported"
    if kind != "Tensor" and swizzled is not True:
        yield "declares scales that are not swizzled, which is not supported"
    form = None if weight is None else weight.container
    if form is None or form.method != "torchao":
        return
    size, dtype = data.get("block_size", form.group_size), data.get("elem_dtype")
    element = str(dtype.get("_data") if isinstance(dtype, Mapping) else dtype).removeprefix("torch.")
    kinds = ("nvfp4",) if kind == "NVFP4Tensor" else tuple(_TORCHAO_DTYPES.values()) if dtype is None else ()
    kinds = kinds or (_TORCHAO_DTYPES.get(element, element),)
    if form.kind not in kinds or size != form.group_size:
        yield f"declares {' or '.join(kinds)} in blocks of {brief(size)}, but the tensors are {form}"


def _without_class(files: Iterable[SafetensorsFile], quantized: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield a refused item for each layer of torchao without a metadata entry."""
    keys = {key for file in files if not isinstance(file, GgufFile) for key in file.metadata}
    for name, weight in quantized.items():
        form = weight.container
        if form is not None and form.method == "torchao" and not {name, f"{name}.weight"} & keys:
            why = "has no entry of torchao, which would say whether its block scales are swizzled, as fp4kit reads them"
            yield Item(REFUSED, "metadata", f"{name}.weight", why)


# Formats that fp4kit does not read ------------------------------------------------------------------------------------
# FOREIGN has one row per format. It is recognized by the names, dtypes and shapes of a layer's tensors, and by the
# declared quant_method. A layer that fits no row is described by its tensors. A part is one tensor of a layer; its
# suffix is what follows the layer's name.

Parts = Mapping[str, TensorEntry]  # suffix -> tensor
_RELEASE = "convert the unquantized release of the model"
_BITSANDBYTES = f"save the model after model.dequantize() of transformers, or {_RELEASE}"
_COPY = "take the file from another copy of the model"
_BYTES, _WORDS, _FLOATS = ("U8", "I8"), ("I32", "U32"), ("F32", "BF16", "F16")


class Foreign(NamedTuple):
    """One format of another tool.

    Attributes:
        what: the name of the format, and what is peculiar about it.
        parts: suffix -> possible dtypes, for the parts that a layer must have; () for any dtype. The first part is
            looked up, so it should be the least usual one.
        fits: a further condition on the parts and the name of the layer.
        methods: the values of quant_method that must be declared; () if the tensors suffice.
        advice: what the user can do.
    """

    what: str
    parts: Mapping[str, tuple[str, ...]]
    fits: Callable[[Parts, str], bool] = lambda parts, module: True
    methods: tuple[str, ...] = ()
    advice: str = _RELEASE


def _is_gptq(parts: Parts, module: str) -> bool:
    # Packed integers run along K: there are as many columns as scales per group.
    return parts[".qweight"].shape[-1:] == parts[".scales"].shape[-1:]


def _is_int4(parts: Parts, module: str) -> bool:
    # Each byte of the codes holds elements of two rows: codes [N/2, K], scales [N, ...].
    return parts[".weight_scale"].shape[:1] == tuple(2 * rows for rows in parts[".weight"].shape[:1])


def _is_mxfp6(parts: Parts, module: str) -> bool:
    # The codes have 24 bytes (32 elements of 6 bits) per scale.
    scales = parts[".weight_scale"].shape
    return bool(scales) and parts[".weight"].shape == (*scales[:-1], scales[-1] * 24)


def _is_output_stack(parts: Parts, module: str) -> bool:
    # A stack of packed codes [E, K, N/2] has one scale byte per 32 elements along N.
    codes = parts[""].shape
    return len(codes) == 3 and parts["_weight_scale"].shape == (*codes[:-1], codes[-1] // 16)


FOREIGN = (
    Foreign(
        "that of fp4kit.save",
        {".packed": ()},
        lambda parts, module: any(name in parts for name in (".block_scale", ".tensor_scale")),
        advice="fp4kit.load reads it",
    ),
    Foreign("bitsandbytes NF4", {".weight.quant_state.bitsandbytes__nf4": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes FP4", {".weight.quant_state.bitsandbytes__fp4": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes, 4 bits", {".weight.absmax": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes INT8", {".SCB": ()}, advice=_BITSANDBYTES),
    Foreign("FP-Quant, whose weights are rotated", {".forward_hadamard_matrix": ()}),
    Foreign("SVDQuant of Nunchaku", {".wscales": ()}),
    Foreign("SVDQuant of Nunchaku, NVFP4", {".wcscales": ()}),
    Foreign("HQQ", {".W_q": ()}),
    Foreign("EXL2", {".q_weight": ()}),
    Foreign("EXL3", {".trellis": ()}),
    Foreign("quanto", {".weight._data": ()}),
    Foreign("AQLM", {".codebooks": (), ".codes": ()}),
    Foreign("VPTQ", {".centroids.weight": ()}),
    Foreign("VPTQ", {".centroids": (), ".indices": ()}),
    Foreign("QuIP#", {".Qidxs": ()}),
    Foreign("SpQR", {".dense_weights": (), ".row_offsets": ()}),
    Foreign("HIGGS", {".tables2": (), ".scales": ()}),
    Foreign("HIGGS", {".tables": (), ".scales": ()}),
    Foreign("QQQ", {".s_channel": (), ".B": _WORDS}),
    Foreign("Marlin, repacked GPTQ integers", {".B": _WORDS, ".s": _FLOATS}),
    Foreign("TensorRT-LLM", {".weights_block_scaling_factor": ()}),
    Foreign("TensorRT-LLM", {".weights_block_scaling_factor_interleaved": ()}),
    Foreign("TensorRT-LLM", {".weights_scaling_factor": ()}),
    Foreign("sparse weights of compressed-tensors", {".bitmask": _BYTES}),
    Foreign("GPTQ integers", {".g_idx": (), ".qweight": _WORDS}),
    Foreign("GPTQ integers", {".qweight": _WORDS, ".scales": _FLOATS}, _is_gptq),
    Foreign("AWQ integers", {".qweight": _WORDS, ".scales": _FLOATS}),
    Foreign("GPTQ or AWQ integers", {".qweight": _WORDS}),
    Foreign("GPTQ or AWQ integers", {".qzeros": ()}),
    Foreign("MLX affine integers", {".biases": (), ".scales": ()}),
    Foreign("packed integers of compressed-tensors", {".weight_packed": ("I32",)}),
    Foreign("integers of torchao with zero points", {"._weight_zero_point": ()}),
    Foreign("EETQ", {".weight_scales": _FLOATS, ".weight": _BYTES}),
    Foreign(
        "BitNet, four ternary weights per byte", {".weight_scale": _FLOATS, ".weight": _BYTES}, methods=("bitnet",)
    ),
    Foreign("INT4 of Model-Optimizer", {".weight_scale": _FLOATS, ".weight": ("U8",)}, _is_int4),
    Foreign("integers of msmodelslim", {".deq_scale": (), ".weight": ("I8",)}),
    Foreign("integers of msmodelslim", {".weight_offset": _FLOATS, ".weight": ("I8",)}),
    Foreign("INT8 of compressed-tensors or Model-Optimizer", {".weight_scale": _FLOATS, ".weight": ("I8",)}),
    Foreign("MXFP6", {".weight_scale": ("U8",), ".weight": ("U8",)}, _is_mxfp6),
    Foreign(
        "MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis",
        {"_weight_scale": ("U8",), "": ("U8",)},
        _is_output_stack,
    ),
    Foreign(
        "vLLM's fused form of experts, w13_weight and w2_weight",
        {"_weight_scale": (), "_weight": ()},
        lambda parts, module: module.endswith((".w13", ".w2")),
        advice="it is read if quant_method is mxfp4, w13_weight is [E, 2I, H/2] and w2_weight is [E, H, I/2], with one"
        f" scale byte per 32 elements; otherwise {_RELEASE}",
    ),
    Foreign("a ComfyUI format other than nvfp4, mxfp8, FP8 and int8_tensorwise", {".comfy_quant": ()}),
    Foreign(
        "8-bit floats without scales, which are a cast only if nothing declares or has scales",
        {".weight": ("F8_E4M3", "F8_E5M2")},
        lambda parts, module: len(parts) == 1,
        advice=f"if the scales were lost, {_COPY}",
    ),
)
MARKS = tuple(dict.fromkeys(next(iter(row.parts)) for row in FOREIGN))  # suffixes by which rows are looked up
# Further suffixes of parts.
_OTHERS = (
    *(".block_scale", ".tensor_scale", ".tensor_amax"),
    *(".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", ".weight_format", ".SCB_2"),
    *(".backward_hadamard_matrix", ".act_global_scale", ".weight_global_scale", ".weight._scale", ".scale", ".zero"),
    *(".suh", ".svh", ".zeros", ".codes", ".indices", ".res_centroids", ".activation_global_scaling_factor", ".alpha"),
    *(".activation_scaling_factor", ".prequant_scaling_factor", ".smooth_factor", ".proj_down", ".proj_up", ".s_group"),
    *(".q_scale", ".q_scale_max", ".q_groups", ".q_perm", ".q_invperm", ".in_perm", ".row_offsets", ".col_vals"),
    *(
        ".scale_bias",
        ".quant_bias",
        ".input_offset",
        ".weight_zero_point",
        ".meta",
        ".weight_shape",
        ".weight_g_idx",
        ".input_scale",
        ".output_scale",
        "_weight",
    ),
)
_OF_CONTAINERS = {suffix for form in CONTAINERS for suffix in form.suffixes.values()}
_SUFFIXES = {suffix for row in FOREIGN for suffix in row.parts}.union(_OTHERS, _OF_CONTAINERS) - {""}
_UNDERSCORED = tuple(sorted((suffix for suffix in _SUFFIXES if suffix[0] == "_"), key=len, reverse=True))
_BY_LEAF: dict[str, list[str]] = defaultdict(list)  # last component -> suffixes that end with it, the longest first
for _one in sorted(_SUFFIXES, key=len, reverse=True):
    _BY_LEAF[_one.rpartition(".")[2]].append(_one)
_BY_MARK = {mark: tuple(row for row in FOREIGN if next(iter(row.parts)) == mark) for mark in MARKS}


def split(name: str) -> tuple[str, str]:
    """Split the name of a tensor into the name of its layer and the suffix of the part."""
    parent, _, leaf = name.rpartition(".")
    for suffix in (*_BY_LEAF.get(leaf, ()), *_UNDERSCORED):
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], suffix
    return (parent, f".{leaf}") if parent else (name, "")


class ForeignLayers:
    """Give the reasons why the layers of a checkpoint that belong to no container are not read.

    Args:
        tensors: tensor name -> entry, for the tensors that belong to no layer that fp4kit reads.
        method: the declared quant_method; "" if there is none.
    """

    def __init__(self, tensors: Mapping[str, TensorEntry], method: str = "") -> None:
        self._layers: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
        for name, entry in tensors.items():
            module, suffix = split(name)
            self._layers[module][suffix] = entry
        for name in tensors.keys() & self._layers.keys():  # stacks, whose codes have the name of the layer
            self._layers[name][""] = tensors[name]
        self._method = method
        self._texts: dict[tuple[tuple[str, str], ...], str] = {}

    def row_of(self, name: str) -> Foreign | None:
        """Return the format of the layer to which a tensor belongs; None if no row fits."""
        module, _ = self._split(name)
        parts = self._layers[module]
        rows = (row for mark in parts for row in _BY_MARK.get(mark, ()) if self._fits(row, parts, module))
        return min(rows, key=FOREIGN.index, default=None)

    def _split(self, name: str) -> tuple[str, str]:
        return (name, "") if name in self._layers else split(name)

    def why(self, name: str) -> str:
        """Return the reason to refuse a tensor; "" if it is no part of a quantized layer."""
        module, suffix = self._split(name)
        parts = self._layers[module]
        row = None if suffix == ".bias" else self.row_of(name)
        what = "packed weights or scales in a format that fp4kit does not read in models"
        if row is not None:
            return f"{what} ({row.what}); {row.advice}"
        is_plain = suffix == ".bias" or (suffix == ".weight" and parts[suffix].dtype in FLOAT_DTYPES)
        if is_plain or not any(map(looks_quantized, parts.values())):
            return ""
        # The container that the layer nearly fits, and the one tensor that keeps it from fitting.
        near = next((text for form in CONTAINERS for text in _misfits(form, parts, module)), "")
        if near:
            return f"{what} ({near}); {_COPY}, or {_RELEASE}"
        # Layers with equal suffixes and dtypes share the description of the first, so that they are reported together.
        key = tuple((suffix, entry.dtype) for suffix, entry in sorted(parts.items()))
        found = ", ".join(
            f"{suffix.removeprefix('.') or shown(module.rpartition('.')[2])} {e.dtype} {list(e.shape)}"
            for suffix, e in parts.items()
        )
        declared = f", quant_method {shown(repr(self._method))}" if self._method else ""
        return self._texts.setdefault(key, f"{what} (found: {shown(found)}{declared}); {_RELEASE}")

    def _fits(self, row: Foreign, parts: Parts, module: str) -> bool:
        has = all(end in parts and (not dtypes or parts[end].dtype in dtypes) for end, dtypes in row.parts.items())
        return has and (not row.methods or self._method in row.methods) and row.fits(parts, module)


def _misfits(form: Container, parts: Parts, module: str) -> Iterator[str]:
    """Yield what keeps a layer from being read as a container, if it is near."""
    codes = parts.get(form.suffixes[CODES])
    others = {table.TAG, table.COLUMN_SCALE, table.LOW_RANK_A, table.OUTER_SCALE} & set(form.suffixes)
    if form.in_blocks or form.is_cast or others:
        return
    has_tensor_scale = form.suffixes.get(TENSOR_SCALE) in parts
    if codes is None:
        if has_tensor_scale and form.suffixes.get(SCALES) in parts:
            yield f"scales of {form}, but {shown(module + form.suffixes[CODES])} is missing"
        return
    if codes.dtype != form.codes_dtype:
        return
    shape = form.shape_of(codes.shape)
    if shape is None or SCALES not in form.suffixes:
        return
    specs = form.specs(shape, form.suffixes.get(table.INPUT_SCALE) in parts)
    scales = parts.get(form.suffixes[SCALES])
    if scales is None:
        if has_tensor_scale or form.suffixes[CODES] not in (".weight", ""):
            yield f"codes of {form}, but {shown(module + form.suffixes[SCALES])} is missing"
        return
    if scales.dtype != specs[SCALES][0] and scales.shape not in form.shapes_of_scales(shape):
        return
    if TENSOR_SCALE in form.suffixes and form.suffixes[TENSOR_SCALE] not in parts:
        if scales.dtype == specs[SCALES][0] and scales.shape in form.shapes_of_scales(shape):
            yield f"{form}, but {shown(module + form.suffixes[TENSOR_SCALE])} is missing"
        return
    for part, (dtype, needed) in specs.items():
        entry = parts.get(form.suffixes[part])
        if entry is not None and (entry.dtype, entry.shape) != (dtype, needed):
            name = shown(module + form.suffixes[part])
            yield f"{form} needs {dtype} {list(needed)}, but {name} is {entry.dtype} {list(entry.shape)}"
            return
