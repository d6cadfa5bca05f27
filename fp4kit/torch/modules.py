"""Provide fake_quantize_model and remove_fake_quantization: apply a plan that follows the converter, or settings of
the user, to a PyTorch model, and undo it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils import parametrize

from fp4kit.arguments import as_flag, explains_calls, is_one_of, warn
from fp4kit.arrays.imports import is_distributed
from fp4kit.checkpoint.selection.names import adapter_tensor
from fp4kit.checkpoint.selection.selection import CONV1D, NO_OTHER_LAYER
from fp4kit.contract.engines import Serving
from fp4kit.contract.schema import ServedDtype
from fp4kit.lazy import FUNCTIONS
from fp4kit.qat import QatChoice, QatPlan, QuantizedNames, TrainedWeight, engine_of, make_plan, similar
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import to_spec
from fp4kit.reference.tensor_rules import UNKNOWN, static_amax
from fp4kit.storage.files import counted
from fp4kit.torch import adapters as peft_layers
from fp4kit.torch import parameters as stored
from fp4kit.torch.adapters import Adapters, FakeQuantizing, fake_quantizing
from fp4kit.torch.inputs import add_hook, input_hooks, line_of_inputs, remove_hook
from fp4kit.torch.operators import check_fake
from fp4kit.torch.parameters import FakeQuantized, ServedWeight, check_kind, parts_of
from fp4kit.training.settings import EXPERT_WEIGHTS, FakeQuantSettings, naming
from fp4kit.types import RecipeId


@explains_calls
def fake_quantize_model(
    model: torch.nn.Module,
    recipe: RecipeId | Recipe | FakeQuantSettings | None = None,
    *,
    format: str | None = None,
    parameters: Collection[str] = ("*",),
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    activations: RecipeId | Recipe | None = None,
    input_amaxes: Any = None,
    input_global_scales: Mapping[str, Any] | None = None,
    pass_through: bool = True,
    config: Any = None,
    adapters: Adapters = "base",
    served_dtype: ServedDtype | torch.dtype | None = None,
    settings: FakeQuantSettings | None = None,
    engine: str | None = None,
    scheme: str | None = None,
    route: str | None = None,
    inputs: Any = None,
) -> list[str]:
    """Fake-quantize the weights of a model, so that it trains with the values that the converted checkpoint serves.

    Afterwards layer.weight holds the values that a loader decodes after `fp4kit convert`. The optimizer updates
    layer.parametrizations.weight.original, and gradients pass straight through. state_dict and load_state_dict keep
    the names that the model had. model.save_pretrained therefore writes an ordinary checkpoint.

    These weights are fake-quantized, provided that their rows consist of whole blocks:

    - those that `fp4kit convert` quantizes: linear layers and stacks of experts. Embeddings, output heads, routers and
      vision towers stay unquantized.
    - torch.nn.Conv1d, Conv2d and Conv3d, if the model has no config, and neither `format` nor `engine` is given. Blocks
      run along the flattened filter. Otherwise they stay unquantized, as in `fp4kit convert`, except those that
      `parameters` names without wildcards.

    Layers that engines fuse (q, k and v; gate and up; w1 and w3) share one tensor amax, as in the converter.

    Tensors of adapters, such as LoRA, are never quantized. `adapters` says how the model will be served. PEFT's
    get_peft_model may be called before or after this function.

    For a model that is sharded over ranks, the order of calls is parallelize_module, fake_quantize_model, fully_shard.

    Args:
        model: a torch.nn.Module, which is changed in place.
        recipe: a recipe id or a Recipe; or a FakeQuantSettings, with which no other option is allowed. With settings,
            each parameter that they include has an amax of its own and is decoded as the recipe decodes, not as the
            loaders of a format do.
        format: the --format of `fp4kit convert`, such as "compressed-tensors" or "modelopt", whose loaders decode the
            values; None for the format that convert chooses for the recipe and the model.
        parameters: wildcards (fnmatch) of parameter names. Other parameters stay unquantized.
        exclude: wildcards of parameters that stay unquantized; use --keep for them in convert.
        include: wildcards of parameters that are quantized although they would stay unquantized, such as embeddings.
        activations: a recipe for the inputs of the torch.nn.Linear layers whose weights are quantized; None leaves
            inputs unquantized. The inputs of stacks of experts and of convolutions are never quantized.
        input_amaxes: a Collector of fp4kit.torch.collect, or a dict of layer -> amax, from which the tensor scales of
            inputs follow; None computes the amax of the inputs in each call.
        input_global_scales: a dict of layer -> the divisor that a checkpoint of compressed-tensors stores for its
            inputs, input_global_scale, in place of input_amaxes. Engines use the divisor itself, which need not follow
            from an amax.
        pass_through: True to use incoming gradients unchanged; False to set them to 0 where |w| > the tensor amax. This
            amax is that of w or of the layers that are fused with it, so only a weight with NaN gets zeros.
        config: the content of config.json; None for that of model.config. Names and model type decide which layers the
            converter quantizes.
        adapters: "base" to serve the FP4 base and the adapter in 16 bits: the base is fake-quantized, and merging
            raises an error. "merged" to serve the merged FP4 model: a layer computes with the fake-quantized
            W + scale * B A, and gradients reach A, B and, if it is trained, W. This needs LoRA layers of PEFT without
            dropout. Other adapters that change a quantized weight, such as DoRA, are rejected.
        served_dtype: the dtype to which loaders decode the weights, such as "bfloat16". The decoded values are rounded
            once to this dtype, and kept in the dtype of the parameter. None for the dtype of the parameter.
        settings: a FakeQuantSettings, in place of `recipe`.
        engine, scheme, route: the engine that will serve the model, such as "transformers" and "nvfp4-w4a4", as in
            fp4kit.serving. They determine recipe, activations and served_dtype, which must be None. If the engine loads
            several formats, such as vLLM, pass the `format` to which you will convert.
        inputs: with an engine that reads stored input scales: a Collector of fp4kit.torch.collect, a dict of layer ->
            amax, as input_amaxes, or the path of a checkpoint that stores them, such as that of an earlier conversion.

    Returns:
        The names of the parameters that are now fake-quantized; [] for settings without a recipe. print() of the result
        shows a table of all parameters with the reason why each is quantized or not, and how inputs are quantized.

    Warns:
        UserWarning: some layers of a fused layer are quantized, and others are not.
        UserWarning: vLLM or SGLang quantizes the inputs of stacks of experts, which stay unquantized here.
        UserWarning: a convolution is quantized although `format` or `engine` is given, so the served values differ.
        UserWarning: with settings, a wildcard of settings.parameters matches no parameter, or a parameter with fewer
            than two dimensions is quantized.

    Raises:
        TypeError: an argument has the wrong type, or the model is sharded by fully_shard.
        TypeError: settings come with a recipe or another option, or input_amaxes or input_global_scales without
            activations. Or an engine comes with an option that it determines.
        ValueError: a wildcard matches no parameter, or no parameter is left to quantize. The message lists names.
        ValueError: fp4kit.servings() has no such engine, scheme or route; or inputs are missing, or not used by it; or
            the engine is known to reject or misread such a model.
        ValueError: the recipe or the format is unknown, the format cannot store the recipe, or a parameter is already
            fake-quantized or does not fit the recipe. After any error the model is unchanged.
        ValueError: activations are given, but no torch.nn.Linear is quantized, or input_amaxes has no amax for one of
            them. Or an entry of input_amaxes is negative or NaN.
        ValueError: input_amaxes and input_global_scales are both given, or activations take no divisor. Or a layer has
            no divisor, or one that is not a positive float32 number.
        ValueError: a shard of a DTensor would hold parts of blocks, or a weight is stored transposed by Conv1D of
            transformers, as in GPT-2.
        ValueError: include names a tensor of an adapter, an adapter is merged already, or adapters or served_dtype is
            unknown. Or a parameter's dtype cannot hold values of served_dtype.
        TypeError: adapters is "merged", and an adapter of a quantized parameter cannot be merged.

    Exact:
        The values equal, bit for bit, what a loader decodes from the converted checkpoint if it computes in float32 and
        rounds once. For "compressed-tensors" this is value * (scale / divisor), and otherwise value * (scale *
        tensor_scale). In bfloat16 and float16 these values are rounded once, also by served_dtype. A recipe with the
        decode rule of another loader keeps it: fp8_compressed_tensors rounds FP8 scales to the dtype of the values
        first, and compressed_tensors_bfloat16 and stored_divisor_bfloat16 round values to bfloat16 first.

        With adapters="merged", they are those
        of the checkpoint that merge_and_unload() of PEFT gives. A layer of zeros is read as zeros with their signs. A
        weight that contains NaN cannot be converted. If the recipe has a tensor scale, reading this weight, or one that
        shares its tensor amax, raises ValueError on the CPU.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
        >>> names = fake_quantize_model(model, "nvfp4-te")
        >>> names
        ['0.weight', '2.weight']
        >>> print(names)
        2 of 4 parameters fake-quantized by nvfp4-te; values as served from --format compressed-tensors
        inputs of layers stay unquantized
            count parameter shape   reason
        yes 1     0.weight  48 x 32 linear layer
        yes 1     2.weight  16 x 48 linear layer
        no  1     0.bias    48      not a weight
        no  1     2.bias    16      not a weight
        note: in float32; loaders usually decode to bfloat16; served_dtype="bfloat16" trains with these values
    """
    check_kind(OP, "model", model, torch.nn.Module)
    if settings is not None:
        check_kind(OP, "settings", settings, FakeQuantSettings)
        if recipe is not None:
            raise TypeError(f"{OP}: recipe and settings are both given; needs one of them")
    if engine is not None or scheme is not None or route is not None or inputs is not None:
        replaced: dict[str, Any] = {
            "recipe": recipe,
            "settings": settings,
            "format": format,
            "activations": activations,
        }
        replaced |= {"input_amaxes": input_amaxes, "served_dtype": served_dtype}
        row = engine_of(OP, engine, scheme, route, input_global_scales if inputs is None else inputs, replaced)
        activations, recipe = row.activations, row.loaded
        if isinstance(inputs, (str, Path)):
            inputs, input_global_scales = _stored_scales(inputs, row)
        input_amaxes = inputs
    else:
        row = None
    given = recipe if settings is None else settings
    if isinstance(given, FakeQuantSettings):
        options = {"format": format, "activations": activations, "input_amaxes": input_amaxes, "config": config}
        options |= {"input_global_scales": input_global_scales}
        options |= {"adapters": adapters != "base", "served_dtype": served_dtype}
        patterns = {"parameters": parameters != ("*",), "exclude": exclude != (), "include": include != ()}
        flags = {**patterns, "pass_through": not as_flag(OP, "pass_through", pass_through)}
        wrong = ", ".join(name for name, value in {**options, **flags}.items() if value not in (None, False))
        if wrong:
            raise TypeError(f"{OP}: {wrong} cannot be given with a FakeQuantSettings; pass a recipe instead")
        return _by_settings(model, given)
    if not isinstance(given, (str, Recipe)):
        raise TypeError(f"{OP}: recipe is {given!r:.60}; needs a recipe id, such as 'nvfp4-te', or a Recipe")
    pass_through, adapters = as_flag(OP, "pass_through", pass_through), peft_layers.adapters_of(OP, adapters)
    _check_not_fsdp(model)
    config = stored.config_of(model) if config is None else config
    wildcards = {"parameters": parameters, "exclude": exclude, "include": include}
    if row is not None:
        choice = QatChoice.of_engine(OP, row, config, **wildcards)
    else:
        choice = QatChoice.of(OP, given, format, config, served_dtype, **wildcards)
    return _by_plan(model, choice, pass_through, (activations, input_amaxes, input_global_scales), adapters)


def _stored_scales(path: str | Path, row: Serving) -> tuple[dict[str, float] | None, dict[str, Any] | None]:
    """Return the input scales that a checkpoint stores, as (layer -> amax, None) or (None, layer -> divisor)."""
    recipe, scales = row.activations, getattr(FUNCTIONS["parity.open"](path)[1], "input_scales", {})
    if recipe is None or not scales:
        raise ValueError(f"{OP}: inputs={str(path)!r:.60} stores no input scales; give a Collector or a dict")
    if all(one.divides for one in scales.values()):
        return None, {layer: one.value for layer, one in scales.items()}
    amaxes = {layer: static_amax(one.value, recipe, np.dtype(np.float32), one.divides) for layer, one in scales.items()}
    wrong = next((layer for layer, amax in amaxes.items() if amax == UNKNOWN), None)
    if wrong is not None:
        raise ValueError(f"{OP}: no amax gives the stored input scale of {wrong}; give a Collector or a dict")
    return {layer: float(amax) for layer, amax in amaxes.items()}, None


def _by_settings(model: torch.nn.Module, settings: FakeQuantSettings) -> list[str]:
    """Fake-quantize each parameter that the settings include, one at a time, and return the names of these
    parameters.
    """
    places = list(stored.parameters_of(model))
    matching = [place for place in places if settings.is_quantized(place[0])]
    if settings.recipe is not None:
        _check_patterns([name for name, _, _ in places], settings, bool(matching))
        _check_adapters([name for name, _, _ in matching], settings)
    matching = [place for place in matching if adapter_tensor(place[0]) is None]
    by_place = {(id(module), leaf): (name, module, leaf) for name, module, leaf in reversed(matching)}
    selected = [*by_place.values()][::-1]
    for name, module, leaf in selected:
        if is_distributed(module._parameters.get(leaf)):
            raise TypeError(
                f"{OP}: {name} is a DTensor; call fake_quantize_model before fully_shard, which then gathers the"
                " parameter before it is quantized"
            )
        if any(isinstance(part, FakeQuantized) for part in parts_of(module, leaf)):
            raise ValueError(
                f"{OP}: {name} is already fake-quantized; leave it out of the settings, or remove the parametrization"
                " first with torch.nn.utils.parametrize.remove_parametrizations"
            )
        try:
            with naming(name):
                check_fake("fake_quantize", getattr(module, leaf), to_spec(settings.resolved), -1)
        except ValueError as error:
            text = str(error).partition("; pad with fp4kit.layouts.pad")[0]
            hint = f"leave the parameter out with FakeQuantSettings(..., exclude=({name!r},))"
            raise ValueError(f"{text}; {hint}") from None
    transposed = [name for name, module, leaf in selected if leaf == "weight" and stored.is_conv1d(module)]
    if transposed:
        way_out = "to leave it unquantized, pass exclude=" if len(transposed) < len(selected) else NO_OTHER_LAYER
        raise ValueError(f"{OP}: {transposed[0]} is stored transposed; {CONV1D}; {way_out}")
    layers = peft_layers.adapter_layers_around(OP, model, {id(module): name for name, module, _ in selected}, "base")
    vectors = [name for name, module, leaf in selected if getattr(module, leaf).ndim < 2]
    if vectors:
        shown = ", ".join(map(repr, vectors[:3])) + (f" and {len(vectors) - 3} more" if len(vectors) > 3 else "")
        warn(
            f"{OP}: quantizes parameters with less than two dimensions: {shown}; engines leave biases and norms"
            " unquantized; leave them out with FakeQuantSettings(..., exclude=...)",
        )
    for name, module, leaf in selected:
        parametrize.register_parametrization(module, leaf, FakeQuantized(settings, name))
    for layer, base in layers:
        peft_layers.attach(layer, fake_quantizing(base))
    return [name for name, _, _ in selected]


def _check_patterns(names: list[str], settings: FakeQuantSettings, any_selected: bool) -> None:
    """Raise ValueError if the settings select no parameter; warn about each wildcard that matches none of the names."""
    unused = [p for p in settings.parameters if not any(fnmatchcase(name, p) for name in names)]
    if not any_selected:
        state = f"none matches parameters={settings.parameters!r}"
        if len(unused) < len(settings.parameters):
            state = f"exclude={settings.exclude!r} leaves out all that match parameters={settings.parameters!r}"
        raise ValueError(
            f"{OP}: the settings include no parameter of the model: {state}; "
            f"{similar(names, unused)}; FakeQuantSettings() quantizes nothing"
        )
    for pattern in unused:
        if pattern not in EXPERT_WEIGHTS:
            warn(
                f"{OP}: no parameter matches {pattern!r}, so it quantizes nothing; {similar(names, [pattern])}",
            )


def _check_adapters(names: list[str], settings: FakeQuantSettings) -> None:
    """Raise ValueError if all parameters that a wildcard of the settings matches are tensors of adapters."""
    for pattern in settings.parameters:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if matches and all(map(adapter_tensor, matches)):
            raise ValueError(
                f"{OP}: parameters={pattern!r} matches only tensors of adapters, such as {matches[0]}, which are"
                " never quantized; leave the wildcard out"
            )


OP = "fake_quantize_model"
Kept = Literal["original", "quantized"]


def _by_plan(
    model: torch.nn.Module,
    choice: QatChoice,
    pass_through: bool,
    inputs: tuple[Any, Any, Any],
    adapters: Adapters,
) -> QuantizedNames:
    """Implement fake_quantize_model for a recipe."""
    weights = stored.weights_of(model)
    plan = make_plan(choice, weights)
    for weight in plan.selected:
        _check(weight, plan)
    names = {id(weight.module): weight.name for weight in plan.selected}
    layers = peft_layers.adapter_layers_around(OP, model, names, adapters)
    if adapters == "merged":
        plan = _with_adapters(plan, {id(base) for _, base in layers})
    hooks = input_hooks(OP, plan.selected, *inputs)
    orders: dict[int, list[str]] = defaultdict(list)
    for weight in weights:
        orders[id(weight.module)].append(weight.leaf)
    for weight in plan.selected:
        part = ServedWeight(weight, plan, pass_through, adapters == "merged")
        if not parametrize.is_parametrized(weight.module, weight.leaf):
            stored.keep_names(weight.module, weight.leaf, tuple(orders[id(weight.module)]))
        parametrize.register_parametrization(weight.module, weight.leaf, part, unsafe=True)
    for layer, base in layers:
        peft_layers.attach(layer, fake_quantizing(base))
    for weight, hook in hooks:
        add_hook(weight.module, hook)
    stacks = sum(weight.kind == "stack" for weight in plan.selected)
    if hooks and stacks and choice.serving is not None and choice.serving.engine in ("vLLM", "SGLang"):
        warn(
            f"{OP}: the inputs of {counted(stacks, 'stack')} of experts stay unquantized, although"
            f" {choice.serving.engine} quantizes them, so these layers are trained with other values",
        )
    layers_of_inputs = tuple(dict.fromkeys(weight.saved.removesuffix(".weight") for weight, _ in hooks))
    return QuantizedNames(plan, layers_of_inputs, line_of_inputs(hooks, stacks))


def _with_adapters(plan: QatPlan, merged: Collection[int]) -> QatPlan:
    """Return a plan whose reasons say which parameters have adapters; ``merged`` are the ids of layers with one.

    Raise TypeError if a parameter to fake-quantize has an adapter that no adapter layer of PEFT merges into it.
    """
    adapted, rows = {}, []
    for row in plan.rows:
        found = adapter_tensor(row.saved)
        if found is not None:
            adapted[found.layer] = found.kind, row.name
    for row in plan.rows:
        if row.quantized and id(row.module) in merged:
            row = replace(row, reason=f"{row.reason}, with its adapter merged")
        elif row.quantized and row.layer in adapted:
            kind, tensor = adapted[row.layer]
            raise TypeError(
                f"{OP}: adapters='merged' needs LoRA layers of PEFT, and {tensor} ({kind}) is not merged into"
                f" {row.name}; pass adapters='base', or exclude=({row.name!r},)"
            )
        rows.append(row)
    return replace(plan, rows=tuple(rows))


def _check(weight: TrainedWeight, plan: QatPlan) -> None:
    """Raise ValueError or TypeError if a parameter cannot be fake-quantized."""
    for part in parts_of(weight.module, weight.leaf):
        if isinstance(part, (ServedWeight, FakeQuantized)):
            raise ValueError(
                f"{OP}: {weight.name} is already fake-quantized; leave it out with exclude=, or call"
                " fp4kit.torch.remove_fake_quantization first"
            )
    parameter = stored.held_tensor(weight.module, weight.leaf)
    matrix = torch.empty(weight.shape, dtype=parameter.dtype, device="meta")
    amax = torch.empty(weight.shape[:1] if weight.kind == "stack" else (), device="meta") if plan.shares else None
    with naming(weight.name):
        check_fake("fake_quantize", matrix, to_spec(plan.recipe), -1, amax)
    if is_distributed(parameter):
        _check_shards(weight, parameter, plan.recipe)


def _check_shards(weight: TrainedWeight, parameter: Any, recipe: Recipe) -> None:
    """Raise ValueError if the shards of a DTensor do not suit the recipe."""
    name, columns = weight.name, parameter.ndim + weight.axis
    rows = parameter.ndim - (1 if weight.axis == -2 else 2)
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


@explains_calls
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
    peft_layers.restore(model, [part for *_, part in found if isinstance(part, FakeQuantizing)])
    for module in model.modules():
        remove_hook(module)
    return [name for name, *_ in found]


def _fake_quantized(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    """Yield (name, module, name within the module, parametrization) for every fake-quantized parameter of a model."""
    seen = set()
    for name, module, leaf in stored.parameters_of(model):
        for part in parts_of(module, leaf):
            if isinstance(part, (ServedWeight, FakeQuantized)) and id(part) not in seen:
                seen.add(id(part))
                yield name, module, leaf, part


def _check_alone(op: str, found: Sequence[tuple[str, torch.nn.Module, str, torch.nn.Module]]) -> None:
    """Raise ValueError if a fake-quantized parameter has further parametrizations and thus cannot be overwritten."""
    for name, module, leaf, part in found:
        if isinstance(part, FakeQuantizing) and peft_layers.pending(part):
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
    stored.release_names(module, leaf)


def _own_class(module: torch.nn.Module) -> None:
    """Give a parametrized module a class of its own."""
    # PyTorch removes the property of a parameter from the class, so that copies would lose the parameter.
    shared = type(module)
    own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, own)
