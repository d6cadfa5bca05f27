"""Check whether unquantized layers can be quantized, before a plan quantizes them.

A layer is rejected if fp4kit could not read the quantized layer again, because its module has a tensor that fp4kit does
not know. It is also rejected if the shapes of stacks of experts leave open which axis of the weight is which.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.model import unlike_layers as layer_sizes
from fp4kit.checkpoint.model.closed_world import is_known_beside, layer_above
from fp4kit.checkpoint.model.unlike_layers import unlike_layers
from fp4kit.checkpoint.model.weights import Weight, any_quantized
from fp4kit.storage.files import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import TensorEntry

# Leaf name of a stack that holds gate and up -> leaf name of the stack of down projections in the same module.
_PAIRS = {"gate_up_proj": "down_proj", "w13": "w2"}


def check_layers(selected: Mapping[str, Weight], others: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError if a layer must not be quantized, because the result could not be read or would be
    wrong.
    """
    plain = {weight.name: weight for weight in selected.values() if weight.container is None}
    _check_stacks(plain)
    for name, entry in others.items():
        above = layer_above(name, plain)
        if above is not None and not is_known_beside(above[1], entry):
            raise CheckpointError(
                f"{shown(name)} ({entry.dtype} {list(entry.shape)}): lies beside a layer to quantize, and is not known;"
                f" leave the layer as it is with --keep '{shown(above[0].name)}', or remove the tensor from the source"
            )


def _check_stacks(plain: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if the shapes of the gate_up stack and the down stack of a module do not fit together."""
    shapes = {name: weight.shape for name, weight in plain.items()}
    for name in plain:
        trouble = stacks_trouble(name, shapes)
        if trouble:
            raise CheckpointError(trouble)


def stacks_trouble(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return an error message if the shapes of a stack of experts and of its counterpart do not fit; "" if they do."""
    parent, _, leaf = name.rpartition(".")
    pair = next(((a, b) for a, b in _PAIRS.items() if leaf in (a, b)), None)
    both = () if pair is None else tuple(shapes.get(f"{parent}.{one}", ()) for one in pair)
    if pair is None or any(len(shape) != 3 for shape in both):
        return ""
    (experts, rows, columns), down = both
    if down == (experts, columns, rows // 2):
        return ""
    words = ", ".join(f"{shown(parent)}.{one} {list(shape)}" for one, shape in zip(pair, both, strict=True))
    return (
        f"{words}: the shapes of these stacks of experts do not fit together, read as [E, N, K]; [E, 2I, H] and"
        " [E, H, I] are needed; one of them may be transposed; repair the source, or keep both unquantized"
    )


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.")


def missing_experts(names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each module in which the number of an expert is missing: one below the largest number."""
    found: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_EXPERT.match, names)):
        found[match[1]].add(int(match[2]))
    for module, numbers in found.items():
        missing = sorted(set(range(max(numbers))) - numbers)
        if missing:
            yield (
                f"{shown(module)}: has expert {max(numbers)}, but not {listed([str(number) for number in missing])};"
                " engines leave missing experts at random values"
            )


def wide_floats(others: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield one warning that names all matrices in float64, which are not quantized."""
    names = [name for name, one in others.items() if one.dtype == "F64" and name.endswith(".weight") and one.shape[1:]]
    if names:
        yield f"{listed(names)}: stay F64, because only F32, F16 and BF16 are quantized; convert them first"


# Leaf names of layers that read the hidden state, and of layers that write it.
_READS, _WRITES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def all_doubts(
    weights: Iterable[Weight], config: Mapping[str, Any], tensors: Mapping[str, tuple[object, TensorEntry]]
) -> Iterator[str]:
    """Yield all warnings about layers that seem wrong: damaged layers, transposed layers, and a tied output head."""
    weights = [*weights]
    yield from doubtful_layers(weights, config, tensors)
    yield from filter(None, [layer_sizes.tied_head(weights, config)])


def doubtful_layers(
    weights: Iterable[Weight], config: Mapping[str, Any], tensors: Mapping[str, tuple[object, TensorEntry]]
) -> Iterator[str]:
    """Yield warnings about layers that seem to lack rows, columns or tensors, or to be stored transposed."""
    weights = [*weights]
    cut = layer_sizes.misfits(weights, config)
    yield from (misfit.text for misfit in cut)
    entries = {name: entry for name, (_, entry) in tensors.items()}
    yield from layer_sizes.unfit_biases(weights, entries)
    if any_quantized(weights):
        yield from unlike_layers(weights, entries, config)
    names = {misfit.weight.name for misfit in cut}
    yield from transposed_layers((weight for weight in weights if weight.name not in names), config)


def transposed_layers(weights: Iterable[Weight], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one warning that names all layers that seem to be stored as [K, N]."""
    # The config's hidden_size must be the length of the last axis if the layer reads the hidden state, and of the first
    # axis if it writes it.
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("hidden_size")
    names = []
    for weight in weights:
        leaf = weight.name.rpartition(".")[2]
        if len(weight.shape) == 2 and ".layers." in weight.name and leaf in _READS + _WRITES:
            own, other = weight.shape[::-1] if leaf in _READS else weight.shape
            names += [weight.name] if other == size != own else []
    if names:
        yield (
            f"{listed(names)}: seems to be stored transposed, because only its other axis has hidden_size {size};"
            " engines expect [outputs, inputs]"
        )
