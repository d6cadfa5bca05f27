"""Name layers that differ from the other layers of their kind in what is stored beside their codes. A kind is all
quantized layers that are stored in one format and whose names differ only in numbers, such as the q_proj of every
decoder layer.

Tools store equal tensors for all layers of a kind. If one layer lacks a tensor, or has a scale in another dtype, the
tensor was probably lost, or its bytes were reinterpreted. The findings are warnings, not errors, because merged models
may differ in this way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp4kit.checkpoint.containers.container import COLUMN_SCALE, INPUT_SCALE, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.model.layer_sizes import bias_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.storage.errors import listed
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, TensorEntry

_NUMBER = re.compile(r"\d+")
# part of a layer whose dtype is compared -> what it is called
_SCALES = {
    SCALES: "scales",
    TENSOR_SCALE: "tensor scale",
    COLUMN_SCALE: "pre_quant_scale",
    INPUT_SCALE: "input scale",
}


def unlike_layers(weights: Iterable[Weight], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield a warning for each tensor that only some layers of a kind have, and for each rare dtype of a scale or bias.

    Dtypes are compared among the layers of one container. Tensor scales are left out of the first check, because some
    formats store them for some layers only (see closed_world.lost_tensor_scales).

    Args:
        weights: the weights of a model.
        tensors: name -> header entry, for the tensors of the model.
    """
    kinds: dict[tuple[str, str, str], list[Weight]] = defaultdict(list)
    formats: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        if (form := weight.container) is not None:
            kinds[_NUMBER.sub("*", weight.name), form.kind, form.format].append(weight)
            formats[form.name].append(weight)
    beside: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        parent, _, leaf = name.rpartition(".")
        beside[parent].add(leaf)
    for layers in kinds.values():
        yield from _lacking(layers, {layer.name: _leaves(layer, beside, tensors) for layer in layers})
    for layers in formats.values():
        for part, what in _SCALES.items():
            yield from _dtypes(what, {w.name: w.parts[part].entry.dtype for w in layers if part in w.parts})
        biases = ((w.name, bias_of(w, tensors)) for w in layers)
        yield from _dtypes("bias", {name: bias.dtype for name, bias in biases if bias is not None})


def _leaves(layer: Weight, beside: Mapping[str, set[str]], tensors: Mapping[str, TensorEntry]) -> set[str]:
    """Return the last parts of the names of the tensors in a layer's module, such as {"weight", "weight_scale"}.

    The tensor scale is left out. For a stack of experts whose bias is called STACK_bias, the set has "bias".

    Args:
        layer: the layer.
        beside: module name -> last parts of the names of its tensors.
        tensors: name -> header entry, for the tensors of the model.
    """
    scale = layer.parts.get(TENSOR_SCALE)
    found = beside.get(layer.name, set()) - ({scale.entry.name.rpartition(".")[2]} if scale else set())
    return found | ({"bias"} if bias_of(layer, tensors) is not None else set())


def _lacking(layers: Sequence[Weight], leaves: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield a warning for each tensor that some layers of a kind have and others lack.

    The warning names the minority, which may be the layers with the tensor or those without it. If both are equally
    many, it names those without it.

    Args:
        layers: the layers of one kind.
        leaves: layer name -> last parts of the names of its tensors.
    """
    for what in sorted(set().union(*leaves.values())):
        have = [layer.name for layer in layers if what in leaves[layer.name]]
        without = [layer.name for layer in layers if what not in leaves[layer.name]]
        total, end = len(layers), "the model computes other values; take the layers from another copy of the model"
        if 0 < len(without) <= len(have):
            counts = f"{len(have):,} of {total:,} layers of this kind have one"
            yield f"{listed(without)}: no {what}, but {counts}; if it was lost, {end}"
        elif without:
            counts = f"{len(without):,} of {total:,} layers of this kind have none"
            yield f"{listed(have)}: has {what}, but {counts}; if it belongs to another layer, {end}"


def _dtypes(what: str, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each float dtype other than the usual one, which is the dtype that most layers have.

    Of two equally frequent dtypes, the first in ``dtypes`` is the usual one. Yield nothing if all layers have one
    dtype, or if the tensor is not a float in some layer, for example bytes.

    Args:
        what: the tensor whose dtypes are compared, in words.
        dtypes: layer name -> dtype of this tensor, for the layers of one container.
    """
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
