"""Find the names that the parameters of a PyTorch model have in the checkpoint that the model is saved as.

transformers renames and splits parameters when it saves a model: a stack of experts in memory becomes one tensor per
expert in the file, for example. The conversion itself is applied to tensors without data, to learn the names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

Renamed = Callable[[str, torch.Tensor], tuple[str, ...]]


def renaming_of(model: torch.nn.Module) -> Renamed:
    """Return a function that takes (name in the model, parameter) and returns the parameter's names in the
    checkpoint.
    """
    library = sys.modules.get("transformers.core_model_loading")
    convert = getattr(library, "revert_weight_conversion", None)
    if convert is None or not hasattr(model, "save_pretrained"):
        return lambda name, parameter: (name,)
    return lambda name, parameter: _converted(convert, model, name, parameter)


def _converted(
    convert: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    model: torch.nn.Module,
    name: str,
    parameter: torch.Tensor,
) -> tuple[str, ...]:
    """Return the names that ``convert``, transformers' conversion of a state dict, gives to one parameter."""
    try:
        return tuple(convert(model, {name: torch.empty_like(parameter, device="meta")})) or (name,)
    except (KeyError, ValueError, RuntimeError):  # a conversion that needs other parameters as well
        return (name,)
