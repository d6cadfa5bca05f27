"""Apply a plan of fake-quantized training to a PyTorch model, and undo it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.utils import parametrize

from fp4kit.arguments import as_flag, is_one_of
from fp4kit.arrays.imports import is_distributed
from fp4kit.checkpoint.selection.names import adapter_tensor
from fp4kit.qat.plan import QatChoice, QatPlan, layer_of, make_plan
from fp4kit.qat.table import QuantizedNames
from fp4kit.recipes import Recipe
from fp4kit.recipes.serialization import to_spec
from fp4kit.torch.adapter_layers import (
    FakeQuantizing,
    adapter_layers_around,
    adapters_of,
    attach,
    fake_quantizing,
    pending,
    restore,
)
from fp4kit.torch.described_model import ParameterPlace, config_of, parameters_of, places_of
from fp4kit.torch.fake_quantized import FakeQuantized
from fp4kit.torch.operators import check_fake
from fp4kit.torch.served_inputs import Inputs, add_hook, remove_hook
from fp4kit.torch.served_weight import Form, ServedWeight, parts_of
from fp4kit.torch.state_names import keep_names, release_names
from fp4kit.training.settings import naming

OP = "fake_quantize_model"
Kept = Literal["original", "quantized"]


def fake_quantize_served(
    model: torch.nn.Module,
    recipe: str | Recipe,
    format: str | None,
    patterns: Mapping[str, Collection[str]],
    config: Any,
    pass_through: bool,
    inputs: tuple[Any, Any],
    adapters: Any = "base",
    served_dtype: Any = None,
) -> QuantizedNames:
    """Implement fake_quantize_model for a recipe."""
    pass_through, adapters = as_flag(OP, "pass_through", pass_through), adapters_of(OP, adapters)
    _check_not_fsdp(model)
    config = config_of(model) if config is None else config
    places = {place.weight.name: place for place in places_of(model)}
    choice = QatChoice.of(OP, recipe, format, config, served_dtype, **patterns)
    plan = make_plan(OP, [place.weight for place in places.values()], choice)
    forms = {name: _form(places[name], plan, pass_through, adapters == "merged") for name in plan.names}
    for name, form in forms.items():
        _check(places[name], form, plan)
    layers = adapter_layers_around(OP, model, {id(places[name].module): name for name in plan.names}, adapters)
    if adapters == "merged":
        _check_all_merged(places, plan, layers)
        plan = _naming_merged(plan, places, layers)
    quantized_inputs = Inputs.of(OP, [places[name] for name in plan.names], *inputs)
    _register(places, forms, plan)
    for layer, base in layers:
        attach(layer, fake_quantizing(base))
    for place, hook in quantized_inputs.hooks.items():
        add_hook(places[place].module, hook)
    return QuantizedNames(plan, quantized_inputs.layers)


def _check_all_merged(
    places: Mapping[str, ParameterPlace], plan: QatPlan, layers: Sequence[tuple[torch.nn.Module, torch.nn.Module]]
) -> None:
    """Raise TypeError if a parameter to fake-quantize has an adapter that no adapter layer of PEFT merges into it."""
    merged = {id(base) for _, base in layers}
    adapted = {}
    for place in places.values():
        found = adapter_tensor(place.weight.saved)
        if found is not None:
            adapted[found.layer] = found.kind, place.weight.name
    for name in plan.names:
        kind, tensor = adapted.get(layer_of(places[name].weight), ("", ""))
        if kind and id(places[name].module) not in merged:
            raise TypeError(
                f"{OP}: adapters='merged' needs LoRA layers of PEFT, and {tensor} ({kind}) is not merged into {name};"
                f" pass adapters='base', or exclude=({name!r},)"
            )


def _naming_merged(
    plan: QatPlan, places: Mapping[str, ParameterPlace], layers: Sequence[tuple[torch.nn.Module, torch.nn.Module]]
) -> QatPlan:
    """Return the plan with "with its adapter merged" in the reason of each parameter whose layer has an adapter."""
    merged = {id(base) for _, base in layers}
    rows = (
        replace(row, reason=f"{row.reason}, with its adapter merged")
        if row.quantized and id(places[row.name].module) in merged
        else row
        for row in plan.rows
    )
    return replace(plan, rows=tuple(rows))


def _register(places: Mapping[str, ParameterPlace], forms: Mapping[str, Form], plan: QatPlan) -> None:
    """Register a ServedWeight on each parameter to fake-quantize, and hooks that keep its name in state dicts."""
    orders: dict[int, list[str]] = defaultdict(list)
    for place in places.values():
        orders[id(place.module)].append(place.leaf)
    for name, form in forms.items():
        place = places[name]
        group = [(places[member].module, places[member].leaf) for member in plan.members(name)]
        if not parametrize.is_parametrized(place.module, place.leaf):
            keep_names(place.module, place.leaf, tuple(orders[id(place.module)]))
        parametrize.register_parametrization(place.module, place.leaf, ServedWeight(name, form, group), unsafe=True)


def _form(place: ParameterPlace, plan: QatPlan, pass_through: bool, merged: bool) -> Form:
    """Return the Form (recipe, axis, gradient) by which a plan fake-quantizes the parameter at a place of the model."""
    axis = -2 if place.transposed else -1
    served = None if plan.served_dtype is None else getattr(torch, plan.served_dtype)
    dtype = _parameter(place).dtype
    return Form(to_spec(plan.recipe), place.weight.kind, axis, plan.shares, pass_through, dtype, merged, served)


def _check(place: ParameterPlace, form: Form, plan: QatPlan) -> None:
    """Raise ValueError or TypeError if the parameter at a place of the model cannot be fake-quantized."""
    name, shape = place.weight.name, place.weight.shape
    for part in parts_of(place.module, place.leaf):
        if isinstance(part, (ServedWeight, FakeQuantized)):
            raise ValueError(
                f"{OP}: {name} is already fake-quantized; leave it out with exclude=, or call"
                " fp4kit.torch.remove_fake_quantization first"
            )
    parameter = _parameter(place)
    matrix = torch.empty(shape, dtype=parameter.dtype, device="meta")
    amax = torch.empty(shape[:1] if form.kind == "stack" else (), device="meta") if form.shares else None
    with naming(name):
        check_fake("fake_quantize", matrix, form.recipe, -1, (amax, None), ("nearest", None), (None, True))
    if is_distributed(parameter):
        _check_shards(name, parameter, place, plan.recipe)


def _parameter(place: ParameterPlace) -> Any:
    """Return the tensor that the module of a place stores for its parameter, without applying parametrizations."""
    found = parametrize.is_parametrized(place.module, place.leaf)
    held: Any = place.module.parametrizations if found else place.module._parameters
    return (
        (held[place.leaf].original if held[place.leaf].is_tensor else held[place.leaf].original0)
        if found
        else held[place.leaf]
    )


def _check_shards(name: str, parameter: Any, place: ParameterPlace, recipe: Recipe) -> None:
    """Raise ValueError if the shards of a DTensor do not suit the recipe."""
    columns = parameter.ndim - (2 if place.transposed else 1)
    rows = parameter.ndim - (1 if place.transposed else 2)
    needed = {columns: recipe.block_size, rows: recipe.block_rows}
    for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if placement.is_partial():
            raise ValueError(f"{OP}: {name} is a DTensor of partial sums; needs a sharded or replicated one")
        if placement.is_replicate() or ranks == 1:
            continue
        dim = placement.dim % parameter.ndim
        whole_row = dim == columns and recipe.tensor_scaling == "row"
        multiple = needed.get(dim, 1)
        if whole_row or -(-parameter.shape[dim] // ranks) % multiple:
            raise ValueError(
                f"{OP}: {name} has {parameter.shape[dim]} elements along axis {dim}, sharded over {ranks} ranks; a"
                f" shard must hold whole {'rows' if whole_row else f'blocks of {multiple}'}; shard another axis, or"
                f" leave it out with exclude=({name!r},)"
            )


def _check_not_fsdp(model: torch.nn.Module) -> None:
    """Raise TypeError if fully_shard was already called on the model or on a part of it."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # PyTorch before 2.6
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if name is not None:
        raise TypeError(
            f"{OP}: {name or 'the model'} is sharded by fully_shard; call parallelize_module first, then"
            " fake_quantize_model, then fully_shard, which gathers a parameter before it is quantized"
        )


def remove_fake_quantization(model: torch.nn.Module, *, keep: Kept = "original") -> list[str]:
    """Undo fake_quantize_model, so that parameters and inputs of layers are no longer fake-quantized.

    Parametrizations of other classes stay. A FakeQuantized that you registered yourself is removed too.

    Args:
        model: the model, which is changed in place.
        keep: "original" keeps the trained parameters, as the same objects that the optimizer holds. "quantized"
            overwrites them with their fake-quantized values.

    Returns:
        The names of the parameters that were fake-quantized; [] if there were none.

    Raises:
        TypeError: model is not a module.
        ValueError: keep is unknown; or keep is "quantized", and a parameter has further parametrizations, or an adapter
            that is fake-quantized with it and not yet merged.

    Examples:
        >>> import fp4kit.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> fp4kit.torch.fake_quantize_model(model, "nvfp4-te")
        ['0.weight']
        >>> fp4kit.torch.remove_fake_quantization(model)
        ['0.weight']
    """
    op = "remove_fake_quantization"
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{op}: model is {model!r:.60}; needs a Module")
    if not is_one_of(keep, ("original", "quantized")):
        raise ValueError(f'{op}: keep is {keep!r:.60}; needs "original" or "quantized"')
    found = list(_fake_quantized(model))
    if keep == "quantized":
        _check_alone(op, found)
    values: list[Any] = [None] * len(found)
    if keep == "quantized":  # all before the first is removed, because the weights of a group need each other
        with torch.no_grad():
            values = [getattr(module, leaf).clone() for _, module, leaf, _ in found]
    for (_, module, leaf, part), value in zip(found, values, strict=True):
        _remove(module, leaf, part)
        if value is not None:
            with torch.no_grad():
                module._parameters[leaf].copy_(value)  # type: ignore[union-attr]
    restore(model, [part for *_, part in found if isinstance(part, FakeQuantizing)])
    for module in model.modules():
        remove_hook(module)
    return [name for name, *_ in found]


def _fake_quantized(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    """Yield (name, module, name within the module, parametrization) for every fake-quantized parameter of a model."""
    seen = set()
    for name, module, leaf in parameters_of(model):
        for part in parts_of(module, leaf):
            if isinstance(part, (ServedWeight, FakeQuantized)) and id(part) not in seen:
                seen.add(id(part))
                yield name, module, leaf, part


def _check_alone(op: str, found: Sequence[tuple[str, torch.nn.Module, str, torch.nn.Module]]) -> None:
    """Raise ValueError if a fake-quantized parameter has further parametrizations and thus cannot be overwritten."""
    for name, module, leaf, part in found:
        if isinstance(part, FakeQuantizing) and pending(part):
            raise ValueError(
                f"{op}: the values of {name} contain its adapter; call merge_adapter() or merge_and_unload() of the"
                ' PEFT model first, or use keep="original"'
            )
        if len(parts_of(module, leaf)) > 1:
            raise ValueError(f'{op}: {name} has other parametrizations too; remove them first, or use keep="original"')


def _remove(module: torch.nn.Module, leaf: str, part: torch.nn.Module) -> None:
    """Remove the parametrization `part` of a module's parameter `leaf`, and the hooks that keep its name."""
    parts = parts_of(module, leaf)
    _own_class(module)
    if len(parts) == 1:
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=False)
    else:
        held: Any = module.parametrizations
        del held[leaf][[one is part for one in parts].index(True)]
    release_names(module, leaf)


def _own_class(module: torch.nn.Module) -> None:
    """Give a parametrized module a class of its own."""
    # PyTorch removes the property of a parameter from the class, so that copies would lose the parameter.
    shared = type(module)
    own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, own)
