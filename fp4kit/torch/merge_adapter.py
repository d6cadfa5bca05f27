"""Define merge_adapter, which merges a LoRA adapter into quantized weights in memory."""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fp4kit.checkpoint.convert import merge_rows
from fp4kit.checkpoint.model.slabs import Readers, UpdateRows, read_update
from fp4kit.checkpoint.plan.adapter import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.plan.job import Survival
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.ops.quantize import dequantize
from fp4kit.quantized.container import Quantized

_OP = "merge_adapter"


class MergedAdapter(NamedTuple):
    """The result of merge_adapter.

    Attributes:
        weights: the quantized weights under the names that were given. A weight without an update is the given object,
            unless it shares a tensor scale that is new.
        survival: name -> how much of the update is left, for the weights with an update. ``share`` is 1 if the update
            survived and 0 if it vanished; ``relative_error``, ``changed`` and ``codes`` say more.
    """

    weights: dict[str, Quantized]
    survival: dict[str, Survival]


def merge_adapter(
    weights: Mapping[str, Quantized],
    adapter: Any,
    *,
    scales: Literal["nearest", "base", "new"] = "nearest",
) -> MergedAdapter:
    """Merge a LoRA adapter into quantized weights, and say how much of it survives rounding.

        merged = quantize(dequantize(q) + s (B A))    in float32, by the recipe of q

    For a checkpoint on disk, use ``fp4kit convert BASE OUT --adapter DIR``. It computes the same codes, except that it
    decodes weights as engines do: value * (block_scale * tensor_scale), which may differ from dequantize in the last
    bit.

    Args:
        weights: name of a layer -> its weight (N, K), quantized along K, as NumPy arrays or tensors on any device. The
            names are those of modules or parameters, such as "model.layers.0.mlp.down_proj.weight". Give all layers of
            the model, because layers that a server fuses (q, k and v; gate and up) share one tensor scale.
        adapter: a model of PEFT, whose active adapter is merged and which is not changed, or the directory of an
            adapter that PEFT saved.
        scales: how a weight with an update gets its scales.

            - "nearest" keeps the tensor scale, and gives every block the block scale of the weight or the one that the
              recipe computes, whichever has the smaller squared error. No block moves away from the merged values.
            - "base" keeps all scales.
            - "new" computes all scales by the recipe. Weights that share the tensor scale are quantized again.

            If merged values exceed what the tensor scale can hold by more than a rounding error, "nearest" and "base"
            act like "new" for the weights that share it.

    Returns:
        A MergedAdapter. Its arrays are of the library and on the device of the given ones. New weights have no
        tensor_amax, unless their tensor scale is new.

    Raises:
        ValueError: scales is unknown, or a weight with an update is not a matrix quantized along its last axis with
            linear scales.
        TypeError: a weight is not a Quantized, or adapter is neither a model of PEFT nor a path.
        CheckpointError: the adapter is not LoRA, cannot be merged as W + s (B A), or fits no weight or several.

    Numerics: B A is computed in float32, as PEFT does, and added in float32 to the decoded weight.
    Source: peft 0.21 tuners/lora/layer.py get_delta_weight.
    """
    if scales not in ADAPTER_SCALES:
        raise ValueError(f"{_OP}: scales is {scales!r}; use one of {', '.join(ADAPTER_SCALES)}")
    wrong = next((name for name, q in weights.items() if not isinstance(q, Quantized)), None)
    if wrong is not None:
        raise TypeError(f"{_OP}: {wrong} is a {type(weights[wrong]).__name__}; needs a Quantized of fp4kit.quantize")
    with tempfile.TemporaryDirectory() as folder:
        found = LoraAdapter.of(_directory(adapter, Path(folder)))
        names = {name: name.removesuffix(".weight") for name in weights}
        with Readers() as readers:
            updates = {name: read_update(readers, found.updates[layer]) for layer, name in found.matched(names).items()}
    for name, update in updates.items():
        _check(name, weights[name], update)
    groups = shared_amax_groups([names[name] for name, q in weights.items() if q.recipe.tensor_scaling == "tensor"])
    members: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        members[groups.get(names[name], name)].append(name)
    result, survival = dict(weights), {}
    for group in members.values():
        if not any(name in updates for name in group):
            continue
        host = {name: weights[name].to("numpy") for name in group}
        plain = {name: dequantize(q, np.float32) for name, q in host.items()}
        whole = {name: updates[name].added_to(x) if name in updates else x for name, x in plain.items()}
        largest = np.float32(max(np.abs(x).max(initial=0) for x in whole.values()))
        for name, q in host.items():
            if name not in updates and scales != "new" and merge_rows.keeps(q, largest):
                continue
            made = merge_rows.merged(q, whole[name], scales, largest)
            result[name] = _like(made, weights[name])
            if name in updates:
                survival[name] = merge_rows.survival_of_merge(q, plain[name], updates[name].delta, made)
    return MergedAdapter(result, survival)


def _directory(adapter: Any, folder: Path) -> Path:
    """Return the directory of an adapter. The adapter of a PEFT model is saved in ``folder`` first."""
    if isinstance(adapter, (str, Path)):
        return Path(adapter)
    active = getattr(adapter, "active_adapters", None)
    if not hasattr(adapter, "peft_config") or not hasattr(adapter, "save_pretrained") or active is None:
        kind = type(adapter).__name__
        raise TypeError(f"{_OP}: adapter is a {kind}; needs a model of PEFT or the path of an adapter")
    if len(active) != 1:
        raise ValueError(f"{_OP}: {len(active)} adapters are active; activate one with set_adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter.save_pretrained(folder, selected_adapters=active, save_embedding_layers=False)
    return folder if active[0] == "default" else folder / active[0]


def _check(name: str, q: Quantized, update: UpdateRows) -> None:
    """Raise ValueError unless an update can be added to a quantized weight."""
    shape = (update.b.shape[0], update.a.shape[1])
    if tuple(q.shape) != shape:
        raise ValueError(
            f"{_OP}: {name} is {tuple(q.shape)}, but its update is {shape}; needs the model of the adapter"
        )
    if q.axis != len(q.shape) - 1 or q.scale_layout != "linear":
        raise ValueError(
            f"{_OP}: {name} is quantized along axis {q.axis} with {q.scale_layout} scales; needs axis 1, linear"
        )


def _like(made: Quantized, given: Quantized) -> Quantized:
    """Return a Quantized of NumPy arrays in the library and on the device of another one."""
    if isinstance(given.packed, np.ndarray):
        return made
    library = type(given.packed).__module__.partition(".")[0]
    return made.to(library).to(given.packed.device) if library == "torch" else made.to(library)
