"""How each weight that is selected gets into the form that is written; those that share a tensor scale go one way."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import QUANTIZE, REQUANTIZE, action_of
from fp4kit.checkpoint.plan.request import Request
from fp4kit.storage.errors import CheckpointError, shown


def actions_of(
    selected: Mapping[str, Weight], groups: Mapping[str, Collection[str]], form: Container, request: Request
) -> dict[str, str]:
    """Tensor -> action, one of those of jobs.

    groups: of tensors that share a tensor scale, by name. Codes are kept only where the whole group keeps its own.
    Raises CheckpointError for a loss that was not asked for.
    """
    found = {name: action_of(weight.container, form) for name, weight in selected.items()}
    mixed: dict[str, str] = {}
    for group, names in groups.items():
        _check_dtypes(group, [selected[name] for name in names], request)
        if len({found[name] for name in names}) > 1:
            mixed |= {name: group for name in names if found[name] != QUANTIZE}
    found |= dict.fromkeys(mixed, REQUANTIZE)
    lossy = next((name for name, action in found.items() if action == REQUANTIZE), None)
    if lossy is not None and not request.requantize:
        raise CheckpointError(_loss(selected[lossy], form, mixed.get(lossy)))
    return found


def _loss(weight: Weight, form: Container, group: str | None) -> str:
    why = f"{form} would have other values"
    if group is not None:
        why = f"shares a tensor scale with layers that are stored otherwise: {shown(group)}"
    way_out = "say --requantize for that, or start from the unquantized release"
    return f"{shown(weight.name)}: is {weight.container} already, and {why}; {way_out}"


def _check_dtypes(group: str, weights: Collection[Weight], request: Request) -> None:
    """Raise CheckpointError where the rule of the recipe gives the members of a group different scales."""
    dtypes = sorted({weight.dtype if weight.container is None else "F32" for weight in weights})
    if len(dtypes) > 1 and request.recipe.tensor_rule == "compressed_tensors":
        raise CheckpointError(
            f"{shown(group)}: shares a tensor scale, which {request.recipe.id} rounds to the dtype of each:"
            f" {', '.join(dtypes)}; use another recipe"
        )
