"""Name layers that do not fit their neighbors: in size, in what is stored beside their codes, or in their container.
Peers are layers of one role, whose names differ only in the numbers of layers and experts. The container does not
define the peers, because the loss of a tensor may change it: an AWQ layer without its factors per column looks like
plain NVFP4. All findings are warnings, because merged models may differ in this way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fp4kit.checkpoint.containers.configs import KEYS, sections
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, INPUT_SCALE, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.contract.schema import EXPERT_LEAVES
from fp4kit.storage.files import listed, shown
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, TensorEntry

# Sizes ----------------------------------------------------------------------------------------------------------------
# Codes of FP8 layers with one scale, and codes under padded scales, fit their scales even if rows or columns are
# missing. But the axes of neighboring layers have equal lengths. If lengths differ, the layer with the rarer length is
# named.

Entries = Mapping[str, TensorEntry]  # tensor name -> header entry
_N, _K = 0, 1
# Other names of layers -> the names that _AXES uses.
_OTHER_NAMES = {
    **EXPERT_LEAVES,
    **{"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"},
    **{"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"},
}
# Axes of one length -> the layers of one module that have them: (name, axis). Models whose values have another length
# than keys have the config key v_head_dim.
_AXES = {
    "intermediate size": (("gate_proj", _N), ("up_proj", _N), ("down_proj", _K)),
    "hidden size of the MLP": (("gate_proj", _K), ("up_proj", _K), ("down_proj", _N)),
    "hidden size of attention": (("q_proj", _K), ("k_proj", _K), ("v_proj", _K), ("o_proj", _N)),
    "size of keys and values": (("k_proj", _N), ("v_proj", _N)),
    "rank of queries": (("q_a_proj", _N), ("q_b_proj", _K)),
}


class Misfit(NamedTuple):
    """A layer with an axis whose length does not fit the neighboring layers of its module.

    Attributes:
        weight: the layer.
        axis: 0 for rows, 1 for columns.
        needed: the length that the other layers require.
        others: the names of those layers.
    """

    weight: Weight
    axis: int
    needed: int
    others: tuple[str, ...]

    @property
    def text(self) -> str:
        """The misfit as a sentence: the layer and its shape, the length that is needed, and what to do."""
        what = ("rows", "columns")[self.axis]
        return (
            f"{shown(self.weight.name)} {list(self.weight.shape)}: has {self.weight.shape[self.axis]} {what}, but"
            f" {' and '.join(self.others)} need {self.needed}; take the layer from another copy of the model"
        )


def misfits(weights: Iterable[Weight], config: Mapping[str, Any]) -> list[Misfit]:
    """Return one Misfit for each axis of a layer whose length does not fit the neighboring layers; [] if all fit."""
    # Layers that would fit if they were transposed are left out, because other checks name them.
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    modules: dict[str, dict[str, Weight]] = defaultdict(dict)
    for weight in weights:
        parent, _, leaf = weight.name.rpartition(".")
        if len(weight.shape) == 2:
            modules[parent].setdefault(_OTHER_NAMES.get(leaf, leaf), weight)
    found = [misfit for layers in modules.values() for misfit in _misfits_of(layers, config)]
    needed: dict[str, dict[int, int]] = defaultdict(dict)
    for one in found:
        needed[one.weight.name].setdefault(one.axis, one.needed)
    return [one for one in found if not _is_transposed(one.weight.shape, needed[one.weight.name])]


def _is_transposed(shape: tuple[int, ...], needed: Mapping[int, int]) -> bool:
    """Return whether both axes of a layer have wrong lengths, and exchanging the axes would make both right."""
    return shape == (needed.get(_K), needed.get(_N))


def _misfits_of(layers: Mapping[str, Weight], config: Mapping[str, Any]) -> Iterator[Misfit]:
    """Yield the misfits of the layers of one module."""
    # In addition, q_proj must have as many rows as o_proj has columns, or twice as many.
    for what, axes in _AXES.items():
        if what == "size of keys and values" and "v_head_dim" in config:
            continue
        present = [(name, axis, layers[name]) for name, axis in axes if name in layers]
        lengths = Counter(weight.shape[axis] for _, axis, weight in present)
        if what.startswith("hidden"):
            declared = config.get("hidden_size")
            lengths.update([declared] if isinstance(declared, int) and declared in lengths else [])
        if len(lengths) < 2:
            continue
        usual = max(lengths, key=lambda length: (lengths[length], length))
        others = tuple(name for name, axis, weight in present if weight.shape[axis] == usual)
        yield from (Misfit(w, axis, usual, others) for _, axis, w in present if w.shape[axis] != usual)
    query, output = layers.get("q_proj"), layers.get("o_proj")
    if query is not None and output is not None and "v_head_dim" not in config:
        needed = output.shape[_K]
        if query.shape[_N] not in (needed, 2 * needed):  # a gate of the output doubles the rows
            yield Misfit(query, _N, needed, ("o_proj",))


def bias_of(weight: Weight, tensors: Entries) -> TensorEntry | None:
    """Return the header entry of a layer's bias, the tensor LAYER.bias or LAYER_bias; None if it has none."""
    names = (f"{weight.name}.bias", f"{weight.name}_bias")
    return next((tensors[name] for name in names if name in tensors), None)


def unfit_biases(weights: Iterable[Weight], tensors: Entries) -> Iterator[str]:
    """Yield a warning for each layer whose bias is not a float vector with one element per row of the layer."""
    for weight in weights:
        bias, rows = bias_of(weight, tensors), weight.shape[:-1]
        if bias is None or (tuple(bias.shape) == rows and bias.dtype in FLOAT_DTYPES):
            continue
        yield (
            f"{shown(weight.name)} {list(weight.shape)}: has {rows[-1]} rows, but its bias is {bias.dtype}"
            f" {list(bias.shape)}; take the layer from another copy of the model"
        )


def tied_head(weights: Iterable[Weight], config: Mapping[str, Any]) -> str:
    """Return a warning if lm_head is quantized although the config ties it to the embedding; "" otherwise."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    if not any(section.get("tie_word_embeddings") is True for section in sections):
        return ""
    name = next((w.name for w in weights if w.container is not None and w.name.rpartition(".")[2] == "lm_head"), "")
    return name and (
        f"{shown(name)}: is quantized, but tie_word_embeddings in config.json is true, so engines ignore it and use"
        " embed_tokens; set tie_word_embeddings to false, or remove the layer"
    )


# Other name of layers -> their names. If a module has layers under both, it is not known which one a reader takes.
_ROLES: dict[str, tuple[str, ...]] = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
_ROLES |= {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
# Layer of a single expert -> the stack of all experts that holds it too.
_STACKED = (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))


def named_twice(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason to refuse it) for every layer that a module also has under another name."""
    known = dict.fromkeys(names)
    leaves: dict[str, dict[str, None]] = defaultdict(dict)
    for name in known:
        parent, _, leaf = name.rpartition(".")
        leaves[parent][leaf] = None
    for parent, own in leaves.items():
        for other, one in ((other, one) for other, ones in _ROLES.items() for one in ones):
            if one in own and other in own:
                yield f"{parent}.{other}", _why_twice(f"{parent}.{one}")
        holder, _, number = parent.rpartition(".")
        stacks = leaves.get(holder, {}) if number.isdigit() and holder.endswith("experts") else {}
        for one, stack in _STACKED:
            if one in own and stack in stacks:
                yield f"{holder}.{stack}", _why_twice(f"{parent}.{one}")


def _why_twice(other: str) -> str:
    """Return the reason, for a message, to refuse a layer that is stored a second time under the name ``other``."""
    return f"is stored beside {shown(other)}, another name of the same part of the model; remove one of them"


# A number before a dot. A number at the end of a name tells modules of a Sequential apart, as in img_mlp.0 and .2.
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
# part of a layer whose dtype is compared -> what it is called
_SCALES = {SCALES: "scales", TENSOR_SCALE: "tensor scale", COLUMN_SCALE: "pre_quant_scale", INPUT_SCALE: "input scale"}
_SELF_DESCRIBED = ("gguf", "comfy")  # producers whose files state the format of each tensor
# entries that give formats to single layers, by Model-Optimizer, Quark, auto-round and torchao
_PER_LAYER = ("quantized_layers", "layer_quant_config", "extra_config", "module_fqn_to_config", "fqn_to_config")


def role_of(name: str) -> str:
    """Return the role of a layer: its name with "*" in place of the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def unlike_layers(weights: Iterable[Weight], tensors: Entries, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each way in which layers differ from their peers (see the head of this file)."""
    layers = [weight for weight in weights if weight.container is not None]
    beside: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        parent, _, leaf = name.rpartition(".")
        beside[parent].add(leaf)
    is_mixed = declares_mixture(config)
    partly = False
    for peers in _grouped(layers, lambda layer: role_of(layer.name)):
        families = _grouped(peers, _family)
        for alike in families:
            leaves = {layer.name: _leaves(layer, beside, tensors) for layer in alike}
            for what in sorted(set().union(*leaves.values())):
                found = [*lacking(what, {name: what in own for name, own in leaves.items()}, "layers of this kind")]
                partly |= bool(found) and what.startswith("input")
                yield from found
        if len(families) > 1 and not is_mixed:
            yield from _other_containers(families)
    for alike in _grouped(layers, _family):
        if not is_mixed and not partly:
            have = {layer.name: INPUT_SCALE in layer.parts for layer in alike}
            yield from lacking("input scale", have, f"layers in {alike[0].dtype}")
        for part, what in _SCALES.items():
            yield from _dtypes(what, {w.name: w.parts[part].entry.dtype for w in alike if part in w.parts})
        biases = ((w.name, bias_of(w, tensors)) for w in alike)
        yield from _dtypes("bias", {name: bias.dtype for name, bias in biases if bias is not None})


def declares_mixture(config: Mapping[str, Any]) -> bool:
    """Return whether a config gives formats to single layers or to groups of layers, so that layers may differ."""
    for _, section in sections(config):
        mlx = section.get("quantization")  # mlx-lm's entry has one entry per layer that differs
        if isinstance(mlx, Mapping) and any(isinstance(value, Mapping) for value in mlx.values()):
            return True
        if any(_has_formats_per_layer(section.get(key)) for key in KEYS):
            return True
    return False


def _has_formats_per_layer(declared: Any) -> bool:
    """Return whether a declaration has, at any depth, one of _PER_LAYER or several ``config_groups``."""
    if not isinstance(declared, Mapping):
        return False
    groups = declared.get("config_groups")
    if any(declared.get(key) for key in _PER_LAYER) or (isinstance(groups, Mapping) and len(groups) > 1):
        return True
    return any(map(_has_formats_per_layer, declared.values()))


def _family(layer: Weight) -> Hashable:
    """Return what containers have in common that differ only in optional parts, such as factors per column."""
    return layer.form.producer, layer.form.kind, layer.form.block


def _grouped(layers: Iterable[Weight], key: Callable[[Weight], Hashable]) -> list[list[Weight]]:
    """Return the layers in groups of equal keys, in the order in which the keys first occur."""
    found: dict[Hashable, list[Weight]] = defaultdict(list)
    for layer in layers:
        found[key(layer)].append(layer)
    return list(found.values())


def _other_containers(families: list[list[Weight]]) -> Iterator[str]:
    """Yield a warning for each rare container among peers."""
    forms = [family[0].container for family in families]
    if any(form is None or form.producer in _SELF_DESCRIBED for form in forms):
        return
    usual, *others = sorted(families, key=len, reverse=True)
    total = sum(map(len, families))
    for family in others:
        yield (
            f"{listed([layer.name for layer in family])}: {family[0].dtype}, but {len(usual):,} of {total:,} layers of"
            f" this kind are {usual[0].dtype}, and no config declares a mixture; take the layers from another copy of"
            " the model"
        )


def _leaves(layer: Weight, beside: Mapping[str, set[str]], tensors: Entries) -> set[str]:
    """Return the last parts of the names of the tensors in a layer's module, such as {"weight", "weight_scale"}."""
    scale = layer.parts.get(TENSOR_SCALE)
    found = beside.get(layer.name, set()) - ({scale.entry.name.rpartition(".")[2]} if scale else set())
    return found | ({"bias"} if bias_of(layer, tensors) is not None else set())


_OTHER_VALUES = "the model computes other values; take the layers from another copy of the model"


def lacking(what: str, have: Mapping[str, bool], peers: str, a: str = "", end: str = _OTHER_VALUES) -> Iterator[str]:
    """Yield a warning if some layers have a tensor and others lack it. a: the article of ``what``, if it has one."""
    names, without = [name for name, has in have.items() if has], [name for name, has in have.items() if not has]
    if 0 < len(without) <= len(names):
        counts = f"{len(names):,} of {len(have):,} {peers} have one"
        yield f"{listed(without)}: no {what}, but {counts}; if it was lost, {end}"
    elif names and without:
        counts = f"{len(without):,} of {len(have):,} {peers} have none"
        yield f"{listed(names)}: has {a}{what}, but {counts}; if it belongs to another layer, {end}"


def _dtypes(what: str, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each float dtype other than the usual one, which is the dtype that most layers have."""
    counts = Counter(dtypes.values())
    if len(counts) < 2 or not {*counts} <= {*FLOAT_DTYPES}:
        return
    usual = counts.most_common(1)[0][0]
    for dtype in (dtype for dtype in counts if dtype != usual):
        names = [name for name, own in dtypes.items() if own == dtype]
        yield (
            f"{listed(names)}: {what} in {dtype}, but in {usual} in {counts[usual]:,} of {len(dtypes):,} layers of this"
            " format; if the numbers were not converted, values are wrong; run fp4kit verify with --source"
        )
