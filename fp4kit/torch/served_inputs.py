"""Fake-quantize the inputs of linear layers in training, dynamically or with calibrated amaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4kit.arguments import as_float32
from fp4kit.arrays.imports import is_distributed
from fp4kit.calibration.collector import Collector
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.serialization import from_spec, to_spec
from fp4kit.torch.described_model import ParameterPlace
from fp4kit.torch.functions import fake_quantize
from fp4kit.torch.served_weight import largest

_HANDLE = "_fp4kit_input_hook"


class InputHook:
    """Fake-quantize the inputs with which a layer is called, as a forward pre-hook of PyTorch.

    The inputs are the first positional argument or, without positional arguments, the argument called `input`.

    Args:
        recipe: the recipe as the string that recipes.to_string.to_spec returns.
        amax: the calibrated amax of the inputs, from which the tensor scale follows; None to compute it in each call.
    """

    def __init__(self, recipe: str, amax: float | None) -> None:
        self.recipe, self.amax = recipe, amax

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return (args, kwargs) of the layer's forward, in which fake-quantized inputs replace the inputs."""
        if args:
            return (self._values(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self._values(kwargs["input"])}

    def _values(self, x: Any) -> torch.Tensor:
        """Return x fake-quantized."""
        if not is_distributed(x):
            return fake_quantize(x, self.recipe, tensor_amax=self.amax)
        amax: Any = self.amax
        if amax is None and from_spec(self.recipe).tensor_scaling == "tensor":
            amax = largest(x, False)
        values = fake_quantize(x.to_local(), self.recipe, tensor_amax=amax)
        shape = {"shape": x.shape, "stride": x.stride()}
        return type(x).from_local(values, x.device_mesh, x.placements, run_check=False, **shape)


@dataclass(frozen=True)
class Inputs:
    """The hooks that fake-quantize the inputs of linear layers.

    Attributes:
        hooks: {name of a layer's weight: hook of the layer}.
        layers: the names of these layers, as a checkpoint names them.
    """

    hooks: Mapping[str, InputHook]
    layers: tuple[str, ...]

    @classmethod
    def of(cls, op: str, places: Sequence[ParameterPlace], recipe: str | Recipe | None, amaxes: Any) -> Inputs:
        """Return Inputs with one hook per torch.nn.Linear in `places`, or without hooks if the recipe is None."""
        if recipe is None:
            if amaxes is not None:
                raise TypeError(f"{op}: input_amaxes are given without activations; pass activations='nvfp4-te' too")
            return cls({}, ())
        r = recipe_of(op, recipe)
        linear = [p for p in places if p.leaf == "weight" and isinstance(p.module, torch.nn.Linear)]
        if not linear:
            raise ValueError(f"{op}: activations={r.id!r}, but no torch.nn.Linear is fake-quantized; leave it out")
        layers = {p.weight.saved.removesuffix(".weight"): int(p.weight.shape[-1]) for p in linear}
        found: Mapping[str, Any] = {} if amaxes is None else _amaxes(op, r, amaxes).of_layers(layers)
        names = {p.weight.name: p.weight.saved.removesuffix(".weight") for p in linear}
        spec = to_spec(r)
        hooks = {name: InputHook(spec, float(found[of]) if of in found else None) for name, of in names.items()}
        return cls(hooks, tuple(layers))


def _amaxes(op: str, recipe: Recipe, given: Any) -> Activations:
    """Return the amaxes of layer inputs that a caller passes as a Collector, or as a mapping from layer name to
    amax.
    """
    if recipe.tensor_scaling != "tensor":
        raise ValueError(f"{op}: input_amaxes are given, but {recipe.id} has no tensor scale; leave them out")
    if isinstance(given, Collector):
        return Activations.of(given)
    if not isinstance(given, Mapping):
        raise TypeError(f"{op}: input_amaxes is {type(given).__name__}; needs a Collector, or a dict of layer -> amax")
    need = "needs a number >= 0"
    amaxes = {name: as_float32(op, f"input_amaxes[{name!r}]", amax, need) for name, amax in given.items()}
    for name, amax in amaxes.items():
        if not amax >= 0:
            raise ValueError(f"{op}: input_amaxes[{name!r}] is {amax}; {need}")
    return Activations({str(name): amax for name, amax in amaxes.items()}, {})


def add_hook(module: torch.nn.Module, hook: InputHook) -> None:
    """Register a hook that fake-quantizes the inputs of a layer. It replaces a hook that add_hook registered before."""
    remove_hook(module)
    object.__setattr__(module, _HANDLE, module.register_forward_pre_hook(hook, with_kwargs=True))


def remove_hook(module: torch.nn.Module) -> None:
    """Undo add_hook. Does nothing if the layer does not fake-quantize its inputs."""
    handle = module.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
