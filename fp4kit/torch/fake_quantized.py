"""Define FakeQuantized, a parametrization that fake-quantizes a single parameter."""

from __future__ import annotations

from typing import Any

import torch

from fp4kit.recipes import Recipe
from fp4kit.recipes.serialization import to_spec
from fp4kit.torch.adapter_layers import FakeQuantizing
from fp4kit.torch.functions import fake_quantize
from fp4kit.training.settings import FakeQuantSettings


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
