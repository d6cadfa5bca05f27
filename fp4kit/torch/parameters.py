"""Describe the parameters of a PyTorch model, and parametrize them with fake quantization: FakeQuantized for one
parameter, ServedWeight for the values that a converted checkpoint serves. A tensor scale covers all layers that loaders
fuse, so the amax of a weight is the largest of its group. State dicts keep their names, order and values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fp4kit.arrays.imports import is_distributed
from fp4kit.qat import ParameterKind, QatPlan, TrainedWeight
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.torch.adapters import FakeQuantizing
from fp4kit.torch.functions import fake_quantize
from fp4kit.training.settings import FakeQuantSettings, naming

Renamed = Callable[[str, torch.Tensor], tuple[str, ...]]


def renaming_of(model: torch.nn.Module) -> Renamed:
    """Return a function that takes (name in the model, parameter) and returns its names in the checkpoint."""
    library = sys.modules.get("transformers.core_model_loading")
    convert = getattr(library, "revert_weight_conversion", None)

    def renamed(name: str, parameter: torch.Tensor) -> tuple[str, ...]:
        if convert is None or not hasattr(model, "save_pretrained"):
            return (name,)
        try:
            return tuple(convert(model, {name: torch.empty_like(parameter, device="meta")})) or (name,)
        except (KeyError, ValueError, RuntimeError):  # a conversion that needs other parameters as well
            return (name,)

    return renamed


_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (full name, module, name within the module) for every parameter, such as ("0.weight", model[0],
    "weight").
    """
    holders: Iterator[Any] = (m.parametrizations for m in model.modules() if parametrize.is_parametrized(m))
    skipped = {id(part) for holder in holders for part in holder.modules()}  # they would yield parameters twice
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) in skipped:
            continue
        leaves = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
        parametrizations: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
        yield from ((f"{prefix}.{leaf}" if prefix else leaf, module, leaf) for leaf in (*leaves, *parametrizations))


def held_tensor(module: torch.nn.Module, leaf: str) -> torch.Tensor:
    """Return the tensor of a module's parameter `leaf`, to read its shape, dtype and device."""
    if not parametrize.is_parametrized(module, leaf):
        return module._parameters[leaf]  # type: ignore[return-value]
    parametrizations: Any = module.parametrizations
    one = parametrizations[leaf]
    return one.original if one.is_tensor else getattr(module, leaf)


def config_of(model: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return the content of config.json for a model of transformers or Diffusers, as a mapping; None for other
    models.
    """
    config: Any = getattr(getattr(model, "module", model), "config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return config if isinstance(config, Mapping) else None


def weights_of(model: torch.nn.Module) -> list[TrainedWeight]:
    """Return the description of every parameter of a model."""
    renamed, found = renaming_of(model), {}
    for name, module, leaf in parameters_of(model):
        if (id(module), leaf) not in found:
            parameter = held_tensor(module, leaf)
            saved = renamed(name, parameter) if parameter.ndim > 1 else (name,)
            shape, kind, axis = tuple(parameter.shape), _kind(name, module, leaf, parameter), -1
            if kind == "convolution":
                shape = shape[0], parameter[0].numel()
            elif kind == "stack" and _is_transposed(module):
                shape, axis = (shape[0], shape[2], shape[1]), -2
            dtype, saved_name = str(parameter.dtype).removeprefix("torch."), saved[0] if len(saved) == 1 else name
            found[id(module), leaf] = TrainedWeight(name, saved_name, shape, dtype, kind, axis, module, leaf)
    return list(found.values())


def _kind(name: str, module: torch.nn.Module, leaf: str, parameter: torch.Tensor) -> ParameterKind:
    """Return the kind of a parameter: "convolution", "embedding", "conv1d", "stack" or "matrix"."""
    if leaf == "weight" and isinstance(module, _CONVOLUTIONS) and parameter.ndim > 2:
        return "convolution"
    if leaf == "weight" and isinstance(module, _EMBEDDINGS):
        return "embedding"
    if leaf == "weight" and is_conv1d(module):
        return "conv1d"
    return "stack" if parameter.ndim == 3 and "experts" in name.split(".") else "matrix"


def is_conv1d(module: torch.nn.Module) -> bool:
    """Return whether a module is Conv1D of transformers, the linear layer of GPT-2, whose weight is (in, out)."""
    return any(
        one.__name__ == "Conv1D" and one.__module__ == "transformers.pytorch_utils" for one in type(module).mro()
    )


def _is_transposed(module: torch.nn.Module) -> bool:
    """Return whether a module stores its stacks of experts as (E, K, N), not as (E, N, K)."""
    stated = getattr(module, "is_transposed", None)
    if isinstance(stated, bool):
        return stated
    gate_up, down = (
        held_tensor(module, leaf) if leaf in module._parameters or parametrize.is_parametrized(module, leaf) else None
        for leaf in ("gate_up_proj", "down_proj")
    )
    if gate_up is None or down is None or gate_up.ndim != 3 or down.ndim != 3:
        return False
    (_, a, b), (_, c, d) = gate_up.shape, down.shape
    return not (a == 2 * d and b == c) and (b == 2 * c and a == d)


_MARK = "_fp4kit_state_hooks"


def keep_names(module: torch.nn.Module, leaf: str, order: tuple[str, ...]) -> None:
    """Add hooks to a module, so that its state dict does not change when its parameter `leaf` is parametrized."""
    hooks = _StateHooks(leaf, order)
    save = module._register_state_dict_hook(hooks.save)
    before = module.register_load_state_dict_pre_hook(hooks.load)
    after = module.register_load_state_dict_post_hook(hooks.rename_missing)
    module.__dict__.setdefault(_MARK, {})[leaf] = order, save, before, after


def release_names(module: torch.nn.Module, leaf: str) -> None:
    """Remove the hooks of keep_names for the parameter `leaf`, and restore the order of the module's parameters."""
    order, *hooks = module.__dict__.get(_MARK, {}).pop(leaf, ((),))
    for hook in hooks:
        hook.remove()
    for name in order:
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)


class _StateHooks:
    """Hooks of a module that give its parametrized parameter its plain name, such as "weight", in state dicts."""

    def __init__(self, leaf: str, order: tuple[str, ...]) -> None:
        self._leaf, self._order, self._prefix = leaf, order, ""
        self._held = f"parametrizations.{leaf}.original"  # the name under which PyTorch stores the parameter

    def save(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Rename the parameter in ``state`` in place. The module's own entries keep their usual order."""
        if prefix + self._held not in state:
            return
        state[prefix + self._leaf] = state.pop(prefix + self._held)
        own = {prefix + name for name in self._order}
        moved = [name for name in state if name in own]
        later = [name for name in state if name.startswith(prefix) and name not in own]
        for name in (*sorted(moved, key=[prefix + one for one in self._order].index), *later):
            state[name] = state.pop(name)

    def load(self, module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename the parameter in ``state`` in place, if it has its plain name."""
        self._prefix = prefix
        if prefix + self._leaf in state:
            state[prefix + self._held] = state.pop(prefix + self._leaf)

    def rename_missing(self, module: Any, incompatible: Any) -> None:
        """Give the parameter its plain name in incompatible.missing_keys after the loading."""
        held, missing = self._prefix + self._held, incompatible.missing_keys
        missing[:] = [self._prefix + self._leaf if name == held else name for name in missing]


class FakeQuantized(FakeQuantizing):
    """A parametrization that lets a layer read a fake-quantized parameter, while the optimizer updates the original.

    Register it with torch.nn.utils.parametrize.register_parametrization(layer, "weight", FakeQuantized(settings,
    "layer.weight")). Remove it with remove_parametrizations(layer, "weight", leave_parametrized=...).

    Args:
        settings: a FakeQuantSettings: the recipe, its block size and the kind of gradient.
        name: the name of the parameter. If the settings do not include it, the parameter is read unchanged.

    Raises:
        TypeError: settings is not a FakeQuantSettings; or it has a recipe, and name is not a string.

    Examples:
        >>> FakeQuantized(FakeQuantSettings("mxfp4"), "weight")(torch.full((1, 32), 0.3))[0, 0].item()
        0.25
    """

    def __init__(self, settings: FakeQuantSettings, name: str) -> None:
        super().__init__()
        check_kind("FakeQuantized", "settings", settings, FakeQuantSettings)
        self.settings, self.name = settings, name
        recipe = settings.resolved
        self._spec = to_spec(recipe) if recipe is not None and settings.is_quantized(name) else None

    def extra_repr(self) -> str:
        """Return the text that print(model) shows: the name, the recipe and pass_through.

        The recipe is None if the parameter is read unchanged.
        """
        return f"{self.name!r}, {self._spec}, pass_through={self.settings.pass_through}"

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """Return the weight that the layer computes with.

        The result is fake_quantize(w) with blocks along the last axis, or w itself if the settings do not include the
        parameter. Raises what fake_quantize raises.
        """
        if self._spec is None or self.is_paused:
            return w
        return fake_quantize(w, self._spec, pass_through=self.settings.pass_through)


def check_kind(op: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless the argument `name` of the function `op` is an instance of kind."""
    if isinstance(value, kind):
        return
    text = f"{op}: {name} is {value!r:.60}; needs a {kind.__name__}"
    if kind is FakeQuantSettings and isinstance(value, (str, Recipe)):
        text += f"; pass fp4kit.torch.FakeQuantSettings({getattr(value, 'id', value)!r}, parameters=('*.weight',))"
    raise TypeError(text)


class ServedWeight(FakeQuantizing):
    """A parametrization that gives a layer, in place of its weight, the values that a converted checkpoint will serve.

    The optimizer still updates the original weight.

    Args:
        weight: the parameter, with its decision in the plan.
        plan: the plan, whose recipe decodes values as the loaders of the checkpoint do.
        pass_through: True if the gradient passes unchanged; False if it is set to 0 where |w| > amax.
        merged_adapters: True to fake-quantize the weight with its active LoRA adapter, as the merged weight is served.
    """

    def __init__(self, weight: TrainedWeight, plan: QatPlan, pass_through: bool, merged_adapters: bool) -> None:
        super().__init__()
        self.name, self.pass_through, self.merged_adapters = weight.name, pass_through, merged_adapters
        self._kind, self._axis, self._dtype = weight.kind, weight.axis, getattr(torch, weight.dtype)
        self._recipe, self._shares, self.contract = to_spec(plan.recipe_of(weight)), plan.shares, plan.contract
        self._served_dtype = None if plan.served_dtype is None else getattr(torch, plan.served_dtype)
        # a list of tuples, so that PyTorch registers none of these modules as a child
        self._group = [(one.name, one.module, one.leaf) for one in plan.members(weight)]

    def extra_repr(self) -> str:
        """Return the text that print(model) shows: name, recipe, and the number of weights that share one amax."""
        return f"{self.name!r}, {from_spec(self._recipe).id}, one amax for {len(self._group)}"

    def forward(self, w: Tensor) -> Tensor:
        """Return the weight that the layer computes with: the values that a loader of the checkpoint decodes."""
        if self.is_paused:
            return w
        w = self.with_adapter(w)
        amaxes = self._amaxes(w) if self._shares else {}
        if not is_distributed(w):
            return self._values(w, amaxes)
        sharded: Any = w
        values = self._values(sharded.to_local(), amaxes)
        return type(sharded).from_local(
            values, sharded.device_mesh, sharded.placements, run_check=False, shape=w.shape, stride=w.stride()
        )

    def _values(self, w: Tensor, amaxes: dict[str, Tensor]) -> Tensor:
        """Return the served values of the plain tensor w."""
        if not w.numel():
            return w
        matrix = w.flatten(1) if self._kind == "convolution" else w
        amax = reduce(torch.maximum, amaxes.values()) if amaxes else None
        given = None if amax is None else torch.where(amax == 0, 1, amax)  # zeros have no usable scale; they stay zeros
        with naming(self.name, amaxes):
            values = fake_quantize(
                matrix, self._recipe, axis=self._axis, tensor_amax=given, pass_through=self.pass_through
            )
        if self._served_dtype not in (None, values.dtype):
            values = _Rounded.apply(values, self._served_dtype)
        return values.view(w.shape)

    def _amaxes(self, w: Tensor) -> dict[str, Tensor]:
        """Return the largest magnitude of w and of each other weight of its group: float32 (), or (E,) for a stack of
        experts.
        """
        stack, is_cast = self._kind == "stack", self._dtype != w.dtype
        found = {self.name: largest(w, stack)}
        for name, module, leaf in self._group:
            if not any(part is self for part in parts_of(module, leaf)):
                with torch.no_grad():
                    other = largest(unquantized(module, leaf), stack)
                found[name] = other.to(w.dtype).float() if is_cast else other
        return found


class _Rounded(torch.autograd.Function):
    """Round a tensor to another dtype, and keep its own dtype. The gradient passes straight through."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def parts_of(module: torch.nn.Module, leaf: str) -> Sequence[torch.nn.Module]:
    """Return the parametrizations of the parameter `leaf` of a module, in order; () if it has none."""
    if not parametrize.is_parametrized(module, leaf):
        return ()
    parametrizations: Any = module.parametrizations
    return list(parametrizations[leaf])


def unquantized(module: torch.nn.Module, leaf: str) -> Tensor:
    """Return the parameter `leaf` of a module before it is fake-quantized by a ServedWeight."""
    parts = parts_of(module, leaf)
    if not parts:
        return module._parameters[leaf]  # type: ignore[return-value]
    originals: Any = module.parametrizations
    held = originals[leaf]
    values = (held.original,) if held.is_tensor else tuple(getattr(held, f"original{i}") for i in range(held.ntensors))
    for part in parts:
        if isinstance(part, ServedWeight):
            return part.with_adapter(values[0])
        values = (part(*values),)
    return values[0]


def largest(w: Tensor, stack: bool) -> Tensor:
    """Return the largest |w| as float32 ()."""
    # If w is a DTensor, all its ranks must call this function together.
    w = w.detach()
    if not is_distributed(w):
        return _local_amax(w, stack)
    sharded: Any = w
    found = _local_amax(sharded.to_local(), stack)
    # Reduce the bits without sign: they are ordered as the amaxes, and those of NaN are the largest. For floats, it
    # depends on the backend whether NaN propagates.
    bits = found.view(torch.int32) & 0x7FFFFFFF
    for dim, placement in enumerate(sharded.placements):
        if not placement.is_replicate() and not (stack and placement.is_shard(0)):
            torch.distributed.all_reduce(
                bits, op=torch.distributed.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim)
            )
    return bits.view(torch.float32)


def _local_amax(w: Tensor, stack: bool) -> Tensor:
    """Return the largest |w| of a plain tensor as float32 ()."""
    rows = w.flatten(1) if stack else w.reshape(1, -1)
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0] if stack else (), dtype=torch.float32)
    low, high = rows.aminmax(dim=1)
    found = torch.maximum(-low, high).float()
    return found if stack else found[0]
