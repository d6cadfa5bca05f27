"""Name layers that differ from the other layers of their kind in what is stored beside their codes.

A kind is all quantized layers whose names differ only in numbers, such as the q_proj of every decoder layer. Tools
store equal tensors for all layers of a kind. If one layer lacks a tensor, or has a scale in another dtype, the tensor
was probably lost, or its bytes were reinterpreted. These are warnings, because merged models may differ in this way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp4kit.checkpoint.containers.container import COLUMN_SCALE, INPUT_SCALE, LOW_RANK_A, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.storage.errors import listed, shown
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, TensorEntry

_NUMBER = re.compile(r"\d+")
# part of a layer -> what it is called
_OPTIONAL = {COLUMN_SCALE: "pre_quant_scale", LOW_RANK_A: "low-rank part", INPUT_SCALE: "input scale"}
_SCALES = {SCALES: "scales", TENSOR_SCALE: "tensor scale", COLUMN_SCALE: "pre_quant_scale"}


def unlike_layers(weights: Iterable[Weight], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield a warning for each tensor that some layers of a kind lack, and for each dtype that few layers have.

    Args:
        weights: the weights of a model.
        tensors: name -> header entry, for the tensors of the model.
    """
    quantized = [weight for weight in weights if weight.container is not None]
    kinds: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    formats: dict[str, list[Weight]] = defaultdict(list)
    for weight in quantized:
        assert weight.container is not None
        kinds[_NUMBER.sub("*", weight.name), weight.container.kind].append(weight)
        formats[weight.container.name].append(weight)
    yield from _lacking([*kinds.values()], tensors)
    for layers in formats.values():
        yield from _dtypes(layers)


def _lacking(kinds: Sequence[Sequence[Weight]], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield a warning for each tensor that some layers of a kind have and others lack.

    Args:
        kinds: the layers of each kind.
        tensors: name -> header entry, for the tensors of the model.
    """
    for layers in kinds:
        have = {what: {layer.name for layer in layers if part in layer.parts} for part, what in _OPTIONAL.items()}
        have["bias"] = {layer.name for layer in layers if bias_of(layer, tensors) is not None}
        for what, names in have.items():
            without = [layer.name for layer in layers if layer.name not in names]
            if names and without:
                yield (
                    f"{listed(without)}: no {what}, but {len(names):,} of {len(layers):,} layers of this kind have one;"
                    " if it was lost, the model computes other values; take the layers from another copy of the model"
                )


def _dtypes(layers: Sequence[Weight]) -> Iterator[str]:
    """Yield a warning for each part whose dtype differs between layers of one container and is a float dtype."""
    for part, what in _SCALES.items():
        dtypes = {layer.name: layer.parts[part].entry.dtype for layer in layers if part in layer.parts}
        counts = Counter(dtypes.values())
        if len(counts) < 2 or not {*counts} <= {*FLOAT_DTYPES}:
            continue
        usual = counts.most_common(1)[0][0]
        for dtype in (dtype for dtype in counts if dtype != usual):
            names = [name for name, own in dtypes.items() if own == dtype]
            yield (
                f"{listed(names)}: {what} in {dtype}, but in {usual} in {counts[usual]:,} of {len(dtypes):,} layers of"
                " this format; if the numbers were not converted, values are wrong; run fp4kit verify with --source"
            )


def bias_of(weight: Weight, tensors: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return the header entry of a layer's bias; None if it has none. A stack of experts may have a bias too.

    Args:
        weight: the layer.
        tensors: name -> header entry, for the tensors of the model.
    """
    names = (f"{weight.name}.bias", f"{weight.name}_bias")
    return next((tensors[name] for name in names if name in tensors), None)


def unfit_biases(weights: Iterable[Weight], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield a warning per layer whose bias is not one number per row of the layer.

    Args:
        weights: the weights of a model.
        tensors: name -> header entry, for the tensors of the model.
    """
    for weight in weights:
        bias, rows = bias_of(weight, tensors), weight.shape[:-1]
        if bias is None or (tuple(bias.shape) == rows and bias.dtype in FLOAT_DTYPES):
            continue
        yield (
            f"{shown(weight.name)} {list(weight.shape)}: has {rows[-1]} rows, but its bias is {bias.dtype}"
            f" {list(bias.shape)}; take the layer from another copy of the model"
        )
