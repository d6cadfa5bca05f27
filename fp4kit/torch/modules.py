"""Fake-quantize the parameters of modules: a parametrization, and a function that applies it as settings say."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.utils import parametrize

from fp4kit.arrays.imports import is_distributed
from fp4kit.recipes import Recipe
from fp4kit.recipes.to_string import to_spec
from fp4kit.torch.functions import fake_quantize
from fp4kit.torch.operators import check_fake
from fp4kit.training.settings import EXPERT_WEIGHTS, FakeQuantSettings, naming


class FakeQuantized(torch.nn.Module):
    """Parametrize a parameter so that the layer reads it fake-quantized, while the optimizer updates the original.

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
        _check_kind("FakeQuantized", "settings", settings, FakeQuantSettings)
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

        It is fake_quantize(w) with blocks along the last axis, or w itself if the settings do not include the
        parameter. Raises as fake_quantize does.
        """
        return w if self._spec is None else fake_quantize(w, self._spec, pass_through=self.settings.pass_through)


def fake_quantize_model(model: torch.nn.Module, settings: FakeQuantSettings) -> list[str]:
    """Fake-quantize every parameter of a model that the settings include, by a parametrization.

    Afterwards layer.weight is the fake-quantized parameter, and layer.parametrizations.weight.original is the trained
    one. Tied parameters are quantized under each of their names that the settings match, and stay tied. A module with
    several names is quantized if the settings match one of its names.

    Args:
        model: a torch.nn.Module, which is changed in place.
        settings: a FakeQuantSettings.

    Returns:
        The names of the parameters that are now fake-quantized; [] if the settings have no recipe. A module with
        several names is listed once, under the first that matches.

    Warns:
        UserWarning: one of the wildcards in settings.parameters matches no parameter, but another one does. The two
        spellings of expert weights that FakeQuantSettings.from_environment uses never warn.
        UserWarning: a parameter with less than two dimensions, such as a bias or the weight of a norm, is quantized.

    Raises:
        TypeError: model is not a module, or settings is not a FakeQuantSettings.
        TypeError: a parameter is a DTensor. Call fully_shard afterwards.
        ValueError: the settings have a recipe, but include no parameter of the model.
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
    places = list(_parameters(model))
    matching = [place for place in places if settings.is_quantized(place[0])]
    if settings.recipe is not None:
        _check_patterns([name for name, _, _ in places], settings, bool(matching))
    selected = list({(id(module), leaf): (name, module, leaf) for name, module, leaf in reversed(matching)}.values())[
        ::-1
    ]
    recipe = settings.resolved
    for name, module, leaf in selected:
        _check_not_sharded(name, module, leaf)
        _check(name, module, leaf)
        with _naming_the_way_out(name), naming(name):
            check_fake(
                "fake_quantize",
                getattr(module, leaf),
                to_spec(recipe),
                -1,
                (None, None),
                ("nearest", None),
                (None, True),
            )
    _warn_of_vectors([name for name, module, leaf in selected if getattr(module, leaf).ndim < 2])
    for name, module, leaf in selected:
        parametrize.register_parametrization(module, leaf, FakeQuantized(settings, name))
    return [name for name, _, _ in selected]


def _check_not_sharded(name: str, module: torch.nn.Module, leaf: str) -> None:
    """Raise TypeError if a module's parameter is a DTensor, as fully_shard makes it.

    name: the parameter's full name in the model, for the error.
    leaf: its name in `module`.
    """
    if is_distributed(module._parameters.get(leaf)):
        raise TypeError(
            f"fake_quantize_model: {name} is a DTensor; call fake_quantize_model before fully_shard, which then gathers"
            " the parameter before it is quantized"
        )


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
    """Yield the modules that PyTorch adds to `module` to hold its parametrizations.

    _parameters skips these modules, so that it yields each parametrized parameter once.
    """
    found: Any = module.parametrizations
    return found.modules()


@contextmanager
def _naming_the_way_out(parameter: str) -> Iterator[None]:
    """Append to every ValueError raised in the with block how to exclude the parameter from the settings.

    Advice to pad the array is removed from the message. Other exceptions pass unchanged.
    """
    try:
        yield
    except ValueError as error:
        text = str(error).partition("; pad with fp4kit.layouts.pad")[0]
        hint = f"leave the parameter out with FakeQuantSettings(..., exclude=({parameter!r},))"
        raise ValueError(f"{text}; {hint}") from None


def _check_patterns(names: list[str], settings: FakeQuantSettings, any_selected: bool) -> None:
    """Raise ValueError if the settings select no parameter; warn about each wildcard that matches none of the names.

    The two wildcards of EXPERT_WEIGHTS never warn.

    names: the names of all parameters of the model.
    any_selected: whether the settings select any parameter of the model.
    """
    unused = [p for p in settings.parameters if not any(fnmatchcase(name, p) for name in names)]
    if not any_selected:
        state = f"none matches parameters={settings.parameters!r}"
        if len(unused) < len(settings.parameters):
            state = f"exclude={settings.exclude!r} leaves out all that match parameters={settings.parameters!r}"
        raise ValueError(
            f"fake_quantize_model: the settings include no parameter of the model: {state}; "
            f"{_similar(names, unused)}; correct the wildcards, or pass FakeQuantSettings() to quantize nothing"
        )
    for pattern in unused:
        if pattern not in EXPERT_WEIGHTS:
            warnings.warn(
                f"fake_quantize_model: no parameter matches {pattern!r}, so it quantizes nothing; "
                f"{_similar(names, [pattern])}",
                stacklevel=3,
            )


def _warn_of_vectors(names: list[str]) -> None:
    """Warn if `names` is not empty: these parameters have less than two dimensions and are about to be quantized.

    Inference engines leave biases and the weights of norms unquantized, so the settings are probably wrong.
    """
    if names:
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"fake_quantize_model: quantizes parameters with less than two dimensions: {shown}; engines leave"
            " biases and norms unquantized; leave them out with FakeQuantSettings(..., exclude=...)",
            stacklevel=3,
        )


def _similar(names: list[str], patterns: list[str]) -> str:
    """Return text for an error message: up to three parameter names, those most similar to the wildcards first.

    names: the names of all parameters.
    patterns: the wildcards that matched none of them.
    """
    near = [name for pattern in patterns for name in difflib.get_close_matches(pattern, names, n=3, cutoff=0)]
    shown = list(dict.fromkeys([*near, *names]))[:3]
    return f"its parameters are {', '.join(map(repr, shown))}" + (", ..." if len(names) > len(shown) else "")


def _check_kind(op: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless the argument `name` of the function `op` is an instance of kind.

    For a recipe in place of a FakeQuantSettings, the message says how to make the settings.
    """
    if isinstance(value, kind):
        return
    text = f"{op}: {name} is {value!r:.60}; needs a {kind.__name__}"
    if kind is FakeQuantSettings and isinstance(value, (str, Recipe)):
        text += f"; pass fp4kit.torch.FakeQuantSettings({getattr(value, 'id', value)!r}, parameters=('*.weight',))"
    raise TypeError(text)


def _check(name: str, module: torch.nn.Module, leaf: str) -> None:
    """Raise ValueError if the parameter `leaf` of a module is already fake-quantized. `name` is its full name.

    A parameter with other parametrizations only, or with none, passes.
    """
    if not parametrize.is_parametrized(module, leaf):
        return
    parametrizations: Any = module.parametrizations
    if any(isinstance(part, FakeQuantized) for part in parametrizations[leaf]):
        raise ValueError(
            f"fake_quantize_model: {name} is already fake-quantized; leave it out of the settings, or remove the"
            " parametrization first with torch.nn.utils.parametrize.remove_parametrizations"
        )
