"""Fake quantization of module parameters: a parametrization, and a function that applies it as settings say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from fp4kit.recipes.to_string import to_spec
from fp4kit.torch.functions import fake_quantize
from fp4kit.torch.operators import check_fake
from fp4kit.training.settings import FakeQuantSettings, naming


class FakeQuantized(torch.nn.Module):
    """Parametrize a parameter so that the layer reads it fake-quantized, while the optimizer updates the original.

    Register it with torch.nn.utils.parametrize.register_parametrization(layer, "weight", FakeQuantized(settings,
    "layer.weight")). Remove it with remove_parametrizations(layer, "weight", leave_parametrized=...).

    Args:
        settings: a FakeQuantSettings: the recipe, its block size and the kind of gradient.
        name: the name of the parameter. If the settings do not include it, the parameter is read unchanged.

    Raises:
        TypeError: settings is not a FakeQuantSettings.

    Examples:
        >>> FakeQuantized(FakeQuantSettings("mxfp4"), "weight")(torch.full((1, 32), 0.3))[0, 0].item()
        0.25
    """

    def __init__(self, settings: FakeQuantSettings, name: str) -> None:
        super().__init__()
        _check_kind("FakeQuantized", "settings", settings, FakeQuantSettings)
        self.settings, self.name = settings, name
        recipe = settings.resolved
        self._spec = to_spec(recipe) if recipe is not None and settings.is_quantized(name) else None

    def extra_repr(self) -> str:
        """Return the text that print(model) shows."""
        return f"{self.name!r}, {self._spec}, pass_through={self.settings.pass_through}"

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """Return the weight that the layer computes with.

        It is fake_quantize(w), or w itself if the settings do not include the parameter.
        """
        return w if self._spec is None else fake_quantize(w, self._spec, pass_through=self.settings.pass_through)


def fake_quantize_model(model: torch.nn.Module, settings: FakeQuantSettings) -> list[str]:
    """Fake-quantize every parameter of a model that the settings include, by a parametrization.

    Afterwards layer.weight is the fake-quantized parameter, and layer.parametrizations.weight.original is the trained
    one. Tied parameters are quantized under each of their names that the settings match, and stay tied. A module with
    several names is quantized if the settings match one of them.

    Args:
        model: a torch.nn.Module, which is changed in place.
        settings: a FakeQuantSettings.

    Returns:
        The names of the parameters.

    Raises:
        TypeError: model is not a module, or settings is not a FakeQuantSettings.
        ValueError: a parameter is already fake-quantized.
        TypeError, ValueError: as for fake_quantize, with the parameter's name in front. After any error the model is
            unchanged.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 2))
        >>> fake_quantize_model(model, FakeQuantSettings("mxfp4", parameters=("0.weight",)))
        ['0.weight']
    """
    _check_kind("fake_quantize_model", "model", model, torch.nn.Module)
    _check_kind("fake_quantize_model", "settings", settings, FakeQuantSettings)
    matching = [place for place in _parameters(model) if settings.is_quantized(place[0])]
    selected = list({(id(module), leaf): (name, module, leaf) for name, module, leaf in reversed(matching)}.values())[
        ::-1
    ]
    recipe = settings.resolved
    for name, module, leaf in selected:
        _check(name, module, leaf)
        with naming(name):
            check_fake(
                "fake_quantize",
                getattr(module, leaf),
                to_spec(recipe),
                -1,
                (None, None),
                ("nearest", None),
                (None, True),
            )
    for name, module, leaf in selected:
        parametrize.register_parametrization(module, leaf, FakeQuantized(settings, name))
    return [name for name, _, _ in selected]


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (full name, module, name within the module) of every parameter.

    A parametrized parameter has the name under which it is read. A module in several places is yielded under each of
    its names.
    """
    parametrizing_modules = {
        id(part) for module in model.modules() if parametrize.is_parametrized(module) for part in _parts(module)
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) in parametrizing_modules:
            continue
        leaves = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
        parametrizations: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
        yield from ((f"{prefix}.{leaf}" if prefix else leaf, module, leaf) for leaf in (*leaves, *parametrizations))


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that hold the parametrizations of a module."""
    found: Any = module.parametrizations
    return found.modules()


def _check_kind(op: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless value is an instance of kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{op}: {name} is {value!r:.60}; needs a {kind.__name__}")


def _check(name: str, module: torch.nn.Module, leaf: str) -> None:
    """Raise ValueError if a parameter is already fake-quantized."""
    if not parametrize.is_parametrized(module, leaf):
        return
    parametrizations: Any = module.parametrizations
    if any(isinstance(part, FakeQuantized) for part in parametrizations[leaf]):
        raise ValueError(
            f"fake_quantize_model: {name} is already fake-quantized; leave it out of the settings, or remove the"
            " parametrization first with torch.nn.utils.parametrize.remove_parametrizations"
        )
