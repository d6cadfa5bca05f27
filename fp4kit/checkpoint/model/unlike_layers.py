"""Name layers that differ from their peers in what is stored beside their codes, or in their container. Peers are
layers of one role: their names differ only in the numbers of layers and experts, such as the q_proj of every decoder
layer. A container is the way in which a format stores a layer. It does not define the peers, because the loss of a
tensor may change it: an AWQ layer without its factors per column looks like plain NVFP4. All findings are warnings,
because merged models may differ in this way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.containers.container import COLUMN_SCALE, INPUT_SCALE, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.model.declarations import KEYS, sections
from fp4kit.checkpoint.model.layer_sizes import bias_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.storage.errors import listed
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, TensorEntry

# A number before a dot. A number at the end of a name tells modules of a Sequential apart, as in img_mlp.0 and .2.
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
# part of a layer whose dtype is compared -> what it is called
_SCALES = {
    SCALES: "scales",
    TENSOR_SCALE: "tensor scale",
    COLUMN_SCALE: "pre_quant_scale",
    INPUT_SCALE: "input scale",
}
_SELF_DESCRIBED = ("gguf", "comfy")  # producers whose files state the format of each tensor
# entries that give formats to single layers, by Model-Optimizer, Quark, auto-round and torchao
_PER_LAYER = ("quantized_layers", "layer_quant_config", "extra_config", "module_fqn_to_config", "fqn_to_config")


def role_of(name: str) -> str:
    """Return the role of a layer: its name with "*" in place of the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def unlike_layers(
    weights: Iterable[Weight], tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> Iterator[str]:
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
                found = [*_lacking(what, {name: what in own for name, own in leaves.items()}, "layers of this kind")]
                partly |= bool(found) and what.startswith("input")
                yield from found
        if len(families) > 1 and not is_mixed:
            yield from _other_containers(families)
    for alike in _grouped(layers, _family):
        if not is_mixed and not partly:
            have = {layer.name: INPUT_SCALE in layer.parts for layer in alike}
            yield from _lacking("input scale", have, f"layers in {alike[0].dtype}")
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
    form = layer.container
    assert form is not None
    return form.producer, form.kind, form.block


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


def _leaves(layer: Weight, beside: Mapping[str, set[str]], tensors: Mapping[str, TensorEntry]) -> set[str]:
    """Return the last parts of the names of the tensors in a layer's module, such as {"weight", "weight_scale"}."""
    scale = layer.parts.get(TENSOR_SCALE)
    found = beside.get(layer.name, set()) - ({scale.entry.name.rpartition(".")[2]} if scale else set())
    return found | ({"bias"} if bias_of(layer, tensors) is not None else set())


def _lacking(what: str, have: Mapping[str, bool], peers: str) -> Iterator[str]:
    """Yield a warning if some layers have a tensor and others lack it."""
    names, without = [name for name, has in have.items() if has], [name for name, has in have.items() if not has]
    end = "the model computes other values; take the layers from another copy of the model"
    if 0 < len(without) <= len(names):
        counts = f"{len(names):,} of {len(have):,} {peers} have one"
        yield f"{listed(without)}: no {what}, but {counts}; if it was lost, {end}"
    elif names and without:
        counts = f"{len(without):,} of {len(have):,} {peers} have none"
        yield f"{listed(names)}: has {what}, but {counts}; if it belongs to another layer, {end}"


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
