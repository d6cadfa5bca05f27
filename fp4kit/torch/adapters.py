"""Make adapters of PEFT, such as LoRA, and fake quantization fit together.

An adapter layer is a module of PEFT that holds the layer that it changes as ``base_layer``. Here the base layer is
fake-quantized. PEFT merges an adapter by writing to base_layer.weight, which reads as a new tensor while the weight is
fake-quantized, so that a merge would be lost. The functions here take the place of methods of the adapter layer.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from fp4kit.arguments import a_type, explains_calls, is_one_of
from fp4kit.arrays.imports import is_distributed
from fp4kit.checkpoint.convert.job import Survival
from fp4kit.checkpoint.convert.rows import keeps, merged, survival_of_merge
from fp4kit.checkpoint.model.slabs import Readers, UpdateRows, read_update
from fp4kit.checkpoint.plan.other_models import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.ops.quantize import dequantize
from fp4kit.quantized.container import Quantized

Adapters = Literal["base", "merged"]
# The layers of LoRA in PEFT whose merged weight is W + scale * B A.
_LORA_LAYERS = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")


def adapters_of(op: str, given: Any) -> Adapters:
    """Return the argument ``adapters``. Raises ValueError if it is unknown."""
    if not is_one_of(given, get_args(Adapters)):
        raise ValueError(f'{op}: adapters is {given!r:.60}; needs "base" or "merged"')
    return given


class FakeQuantizing(torch.nn.Module):
    """The base class of parametrizations that fake-quantize a parameter: it knows the adapter layers around the layer.

    Attributes:
        name: the name of the parameter.
        merged_adapters: True if the weight with its adapter is fake-quantized; False if the adapter stays apart.
        adapter_layers: the adapter layer whose base layer has the parameter, as a tuple; () if there is none.
        is_paused: True while PEFT reads and writes the parameter itself.
    """

    name: str
    merged_adapters = False
    adapter_layers: tuple[torch.nn.Module, ...] = ()  # in a tuple, so that PyTorch does not register it as a child
    is_paused = False

    def __init__(self) -> None:
        super().__init__()
        watch_registrations()

    def with_adapter(self, w: Tensor) -> Tensor:
        """Return the weight w with the active adapters, as merging them would store it.

        Return w itself if there is nothing to merge. Raises ValueError or TypeError for adapters that cannot be merged.
        """
        if not self.merged_adapters:
            return w
        for layer in self.adapter_layers:
            w = _merged(layer, w, self.name)
        return w


def fake_quantizing(module: torch.nn.Module) -> list[FakeQuantizing]:
    """Return the parametrizations by which the parameters of a module itself are fake-quantized."""
    held: Any = module.__dict__.get("_modules", {}).get("parametrizations")
    return [part for leaf in held or () for part in held[leaf] if isinstance(part, FakeQuantizing)]


def adapter_layers_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """Return (name, adapter layer, innermost base layer) for every module of a model that has a base layer."""
    return [
        (name, layer, _innermost(layer.base_layer))
        for name, layer in model.named_modules()
        if isinstance(layer._modules.get("base_layer"), torch.nn.Module)
    ]


def _innermost(layer: Any) -> torch.nn.Module:
    while isinstance(layer._modules.get("base_layer"), torch.nn.Module):
        layer = layer.base_layer
    return layer


def attach(layer: Any, parts: Sequence[FakeQuantizing]) -> None:
    """Replace methods of an adapter layer whose base layer is fake-quantized by ``parts``."""
    for part in parts:
        part.adapter_layers = (layer,)
    methods = _MERGED if parts[0].merged_adapters else _APART
    for name, method in methods.items():
        if callable(getattr(type(layer), name, None)):
            layer.__dict__[name] = MethodType(method, layer)


def restore(model: torch.nn.Module, parts: Iterable[FakeQuantizing]) -> None:
    """Give adapter layers their own methods back: those of a model, and those around its parameters ``parts``."""
    for layer in (*(layer for _, layer, _ in adapter_layers_of(model)), *(x for p in parts for x in p.adapter_layers)):
        for name in _MERGED:
            method = getattr(layer.__dict__.get(name), "__func__", None)
            if method is not None and method in (_MERGED[name], _APART.get(name)):
                del layer.__dict__[name]


def adapter_layers_around(
    op: str, model: torch.nn.Module, names: Mapping[int, str], adapters: Adapters
) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return (adapter layer, base layer) for every adapter layer of a model around a layer to fake-quantize."""
    found = [(layer, base) for _, layer, base in adapter_layers_of(model) if id(base) in names]
    layer: Any
    for layer, base in found:
        name = names[id(base)]
        _check_parameter_adapter(op, layer, name)
        if getattr(layer, "merged", False):
            raise ValueError(f"{op}: an adapter is merged into {name}; call unmerge_adapter() of the PEFT model first")
        if adapters == "merged":
            _check_kind(op, layer, name)
            _check_mergeable(op, layer, [*layer.lora_A, *layer.lora_embedding_A], name)
            if isinstance(layer.base_layer._modules.get("base_layer"), torch.nn.Module):
                raise TypeError(f"{op}: {name} has an adapter around another adapter; {_OTHERS}")
    return found


def pending(part: FakeQuantizing) -> bool:
    """Return whether the values of a fake-quantized parameter contain an adapter that is not merged into it."""
    return part.merged_adapters and any(_active(layer) for layer in part.adapter_layers)


@cache
def watch_registrations() -> None:
    """From now on, notice if a fake-quantized layer becomes the base layer of an adapter, or ceases to be one."""
    register_module_module_registration_hook(_registered)


def _registered(parent: torch.nn.Module, name: str, child: Any) -> None:
    """Adapt to the place that a fake-quantized layer gets in a model, as a hook of the registration of submodules."""
    if not isinstance(child, torch.nn.Module):
        return
    if name == "base_layer":
        parts = fake_quantizing(_innermost(child))
        if parts:
            _check_parameter_adapter("get_peft_model", parent, parts[0].name)
            if any(part.adapter_layers and part.merged_adapters for part in parts):
                raise ValueError(f"get_peft_model: {parts[0].name} has an adapter layer already; {_OTHERS}")
            attach(parent, parts)
        return
    parts = fake_quantizing(child)
    if parts and name == "original_module":
        raise ValueError(
            f"get_peft_model: modules_to_save names {parts[0].name}, which is fake-quantized; call get_peft_model"
            " first, then fp4kit.torch.fake_quantize_model"
        )
    for part in parts:
        part.adapter_layers = ()  # unload() puts the base layer in the place of the adapter layer


_OTHERS = "to train with its adapter apart, pass adapters='base' to fp4kit.torch.fake_quantize_model"


def _check_parameter_adapter(op: str, layer: torch.nn.Module, name: str) -> None:
    """Raise TypeError for PEFT's adapter of a parameter (target_parameters), which parametrizes the parameter
    itself.
    """
    # PEFT 0.21 does not remove this parametrization if the parameter has others, and would add the adapter again in
    # each call.
    if type(layer).__name__ == "ParamWrapper":
        raise TypeError(
            f"{op}: {name} has an adapter by target_parameters of PEFT, which is not supported for fake-quantized"
            " parameters; use target_modules, or leave the parameter out with exclude="
        )


def _active(layer: Any) -> list[str]:
    """Return the names of the adapters that the forward pass of a LoRA layer adds to its base layer."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def _check_kind(op: str, layer: Any, name: str) -> None:
    """Raise TypeError unless an adapter layer is one of PEFT's layers with LoRA."""
    kind = type(layer)
    if not (kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in _LORA_LAYERS):
        raise TypeError(
            f"{op}: {name} has an adapter of {kind.__module__}.{kind.__name__}, not LoRA of PEFT; {_OTHERS}"
        )


def _check_mergeable(op: str, layer: Any, adapters: Sequence[str], name: str) -> None:
    """Raise TypeError or ValueError unless merging a LoRA layer gives W + scale * B A, also in training."""
    _check_kind(op, layer, name)
    for adapter in adapters:
        what = f"{op}: adapter {adapter!r} of {name}"
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        kind = type(variant).__name__ if variant is not None else ""
        kind = "DoRA" if getattr(layer, "use_dora", {}).get(adapter) else kind
        if kind:
            raise TypeError(f"{what} is {kind}, not W + scale * B A; {_OTHERS}")
        if getattr(layer, "lora_bias", {}).get(adapter):
            raise TypeError(f"{what} has lora_bias=True, which changes the bias; {_OTHERS}")
        dropout = getattr(layer.lora_dropout[adapter], "p", 0) if adapter in layer.lora_dropout else 0
        if dropout:
            raise ValueError(
                f"{what} has lora_dropout={dropout}, which a merged weight cannot have; pass lora_dropout=0 to"
                f" LoraConfig, or {_OTHERS}"
            )


def _merged(layer: Any, w: Tensor, name: str) -> Tensor:
    """Return w with the active adapters of a LoRA layer, bit for bit as its method merge stores it."""
    if layer.disable_adapters or layer.merged:
        return w
    _check_kind("fake_quantize_model", layer, name)  # only LoRA layers can tell which adapters are active
    adapters = _active(layer)
    _check_mergeable("fake_quantize_model", layer, adapters, name)
    if is_distributed(w):
        raise TypeError(
            f"fake_quantize_model: {name} is a DTensor; its adapter cannot be merged in training; {_OTHERS}"
        )
    # merge runs outside of autocast
    with nullcontext() if w.is_meta else torch.autocast(w.device.type, enabled=False):
        for adapter in adapters:
            with _paused(layer):  # convolutions read the shape of the weight
                delta = layer.get_delta_weight(adapter)
            if adapter in layer.lora_embedding_A:
                delta = delta.to(w.dtype)  # PEFT adds these in the dtype of the weight, others before they are rounded
            w = (w + delta).to(w.dtype)
    return w


@contextmanager
def _stored_weights(layer: Any) -> Iterator[None]:
    """Let the base layer of an adapter layer read as its stored weight, so that PEFT can read and change it in
    place.
    """
    parts = fake_quantizing(_innermost(layer.base_layer))
    if parts and bool(getattr(parametrize, "_cache_enabled", 0)):
        raise RuntimeError(
            f"merge: {parts[0].name} is cached; leave torch.nn.utils.parametrize.cached() before adapters are changed"
        )
    with _paused(layer):
        yield


@contextmanager
def _paused(layer: Any) -> Iterator[None]:
    parts = fake_quantizing(_innermost(layer.base_layer))
    before = [part.is_paused for part in parts]
    for part in parts:
        part.is_paused = True
    try:
        yield
    finally:
        for part, paused in zip(parts, before, strict=True):
            part.is_paused = paused


def _forward(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an adapter layer by its base layer alone, whose weight contains the active adapters."""
    if not fake_quantizing(layer.base_layer):  # the parametrization was removed
        return type(layer).forward(layer, x, *args, **kwargs)
    if kwargs.pop("adapter_names", None) is not None:
        raise ValueError(f"adapter_names: adapters of single samples cannot be merged; {_OTHERS}")
    kwargs.pop("alora_offsets", None)
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    _attached(layer)
    return layer.base_layer(x, *args, **kwargs)


def _attached(layer: Any) -> FakeQuantizing:
    """Return the parametrization of the base layer, which must know the adapter layer."""
    for part in fake_quantizing(layer.base_layer):
        if any(one is layer for one in part.adapter_layers):
            return part
    raise RuntimeError(
        f"{type(layer).__name__}: its base layer was put into another module, so its adapter is not in the weight; call"
        " fp4kit.torch.remove_fake_quantization, then fake_quantize_model"
    )


def _merge(layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """Merge adapters into the stored weight, with the rounding of the forward pass."""
    if not fake_quantizing(layer.base_layer):
        type(layer).merge(layer, safe_merge, adapter_names)
        return
    part = _attached(layer)
    _check_mergeable("merge", layer, layer.active_adapters if adapter_names is None else adapter_names, part.name)
    if safe_merge:
        with torch.no_grad(), _stored_weights(layer):
            if not torch.isfinite(_merged(layer, layer.base_layer.weight, part.name)).all():
                raise ValueError(f"merge: the merged {part.name} contains NaN or infinity")
    with _stored_weights(layer):  # with safe_merge, PEFT would round the adapter before it is added
        type(layer).merge(layer, safe_merge=False, adapter_names=adapter_names)


def _refuse_to_merge(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Raise ValueError, because the model trains with an FP4 base and an adapter apart from it."""
    parts = fake_quantizing(_innermost(layer.base_layer))
    if not parts:
        type(layer).merge(layer, *args, **kwargs)
        return
    name = parts[0].name
    raise ValueError(
        f"merge: {name} is fake-quantized with adapters='base', so the model trains for an FP4 base with its adapter"
        " apart in 16 bits, and merged weights would be rounded to FP4; to serve merged weights, train with"
        " fake_quantize_model(..., adapters='merged'); to merge nevertheless, call"
        " fp4kit.torch.remove_fake_quantization first"
    )


def _in_place(method: str) -> Callable[..., Any]:
    """Return a method that calls the adapter layer's own one while its base layer reads as the stored weight."""

    def call(layer: Any, *args: Any, **kwargs: Any) -> None:
        with _stored_weights(layer):
            getattr(type(layer), method)(layer, *args, **kwargs)

    return call


# Some initializations of a new adapter (update_layer), such as PiSSA, read and change the stored weight.
_APART = {"merge": _refuse_to_merge, **{name: _in_place(name) for name in ("unmerge", "update_layer")}}
_MERGED: dict[str, Callable[..., Any]] = {**_APART, "forward": _forward, "merge": _merge}


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


@explains_calls
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
        raise TypeError(f"{_OP}: {wrong} is {a_type(weights[wrong])}; needs a Quantized of fp4kit.quantize")
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
            if name not in updates and scales != "new" and keeps(q, largest):
                continue
            made = merged(q, whole[name], scales, largest)
            result[name] = _like(made, weights[name])
            if name in updates:
                survival[name] = survival_of_merge(q, plain[name], updates[name].delta, made)
    return MergedAdapter(result, survival)


def _directory(adapter: Any, folder: Path) -> Path:
    """Return the directory of an adapter. The adapter of a PEFT model is saved in ``folder`` first."""
    if isinstance(adapter, (str, Path)):
        return Path(adapter)
    active = getattr(adapter, "active_adapters", None)
    if not hasattr(adapter, "peft_config") or not hasattr(adapter, "save_pretrained") or active is None:
        raise TypeError(f"{_OP}: adapter is {a_type(adapter)}; needs a model of PEFT or the path of an adapter")
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
