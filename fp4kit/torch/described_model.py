"""Describe the parameters of a PyTorch model for a plan of fake-quantized training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from fp4kit.qat.plan import ParameterKind, TrainedWeight
from fp4kit.torch.saved_names import renaming_of

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class ParameterPlace(NamedTuple):
    """The place of a parameter in a model: the module that holds it, and its name there.

    Attributes:
        module: the module that holds it.
        leaf: the name of the parameter in the module.
        weight: the names, shape, dtype and kind of the parameter, from which the plan decides.
        transposed: True for a stack of experts that is stored as (E, K, N).
    """

    module: torch.nn.Module
    leaf: str
    weight: TrainedWeight
    transposed: bool = False


def parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (full name, module, name within the module) for every parameter, such as ("0.weight", model[0],
    "weight").
    """
    parametrizing_modules = {
        id(part) for module in model.modules() if parametrize.is_parametrized(module) for part in _holders(module)
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) in parametrizing_modules:
            continue
        leaves = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
        parametrizations: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
        yield from ((f"{prefix}.{leaf}" if prefix else leaf, module, leaf) for leaf in (*leaves, *parametrizations))


def _holders(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that PyTorch adds to `module` to hold its parametrizations."""
    # parameters_of skips these modules, so that it yields each parametrized parameter once.
    found: Any = module.parametrizations
    return found.modules()


def held(module: torch.nn.Module, leaf: str) -> torch.Tensor:
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


def places_of(model: torch.nn.Module) -> list[ParameterPlace]:
    """Return a ParameterPlace for every parameter of a model."""
    renamed, found = renaming_of(model), {}
    for name, module, leaf in parameters_of(model):
        if (id(module), leaf) not in found:
            parameter = held(module, leaf)
            saved = renamed(name, parameter) if parameter.ndim > 1 else (name,)
            found[id(module), leaf] = _place(name, saved[0] if len(saved) == 1 else name, module, leaf, parameter)
    return list(found.values())


def _place(name: str, saved: str, module: torch.nn.Module, leaf: str, parameter: torch.Tensor) -> ParameterPlace:
    """Return the ParameterPlace of one parameter."""
    shape, kind, transposed = tuple(parameter.shape), _kind(name, module, leaf, parameter), False
    if kind == "convolution":
        shape = shape[0], parameter[0].numel()
    elif kind == "stack":
        transposed = _is_transposed(module)
        shape = (shape[0], shape[2], shape[1]) if transposed else shape
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterPlace(module, leaf, TrainedWeight(name, saved, shape, dtype, kind), transposed)


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
        held(module, leaf) if leaf in module._parameters or parametrize.is_parametrized(module, leaf) else None
        for leaf in ("gate_up_proj", "down_proj")
    )
    if gate_up is None or down is None or gate_up.ndim != 3 or down.ndim != 3:
        return False
    (_, a, b), (_, c, d) = gate_up.shape, down.shape
    return not (a == 2 * d and b == c) and (b == 2 * c and a == d)
