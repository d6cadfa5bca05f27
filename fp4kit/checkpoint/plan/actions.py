"""Choose, for each weight to convert, the action that brings it into the output container (see the list in job.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import QUANTIZE, REQUANTIZE, action_of, target_of
from fp4kit.checkpoint.plan.mixture import LayerQuantization
from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError, shown


def actions_of(
    selected: Mapping[str, Weight],
    groups: Mapping[str, Collection[str]],
    choices: Mapping[str, LayerQuantization],
    requantize: bool,
) -> dict[str, str]:
    """Choose one of the actions in job.py for each weight to convert. Return a dict from tensor name to action.

    If weights that share a tensor scale would get different actions, the quantized ones among them are requantized.

    Args:
        selected: the weights to convert, by the name of the tensor with their values or codes.
        groups: group name -> the tensor names of the weights that share a tensor scale.
        choices: the recipe and the container of each weight to convert, by the same names.
        requantize: True to allow requantizing.

    Raises:
        CheckpointError: in one of these cases:

            - A weight would be requantized, but ``requantize`` is False.
            - Weights that share a tensor scale have different dtypes, and the recipe rounds the scale to the dtype (see
              _check_dtypes).
    """
    forms = {name: _written(choices[name]) for name in selected}
    found = {name: action_of(weight, target_of(weight.container, forms[name])) for name, weight in selected.items()}
    mixed: dict[str, str] = {}
    for group, names in groups.items():
        for name in names:
            _check_dtypes(group, [selected[one] for one in names], choices[name].recipe)
        if len({found[name] for name in names}) > 1:
            mixed |= {name: group for name in names if found[name] != QUANTIZE}
    found |= dict.fromkeys(mixed, REQUANTIZE)
    lossy = next((name for name, action in found.items() if action == REQUANTIZE), None)
    if lossy is not None and not requantize:
        raise CheckpointError(_loss(selected[lossy], forms[lossy], mixed.get(lossy)))
    return found


def _written(choice: LayerQuantization) -> Container:
    """Return the container of a choice, which must be quantized."""
    assert choice.form is not None
    return choice.form


def _loss(weight: Weight, form: Container, group: str | None) -> str:
    """Return the error message for a weight that would have to be requantized although that is not allowed.

    Args:
        weight: the weight, which is quantized.
        form: the container to write.
        group: the name of the group of weights that share a tensor scale, if the group is the reason; otherwise None.
    """
    why = f"quantizing it as {form} would change its values"
    if group is not None:
        why = f"it shares a tensor scale with layers that are stored differently: {shown(group)}"
    way_out = "use --requantize to allow that, or convert the unquantized release"
    return f"{shown(weight.name)}: is already quantized as {weight.container}, and {why}; {way_out}"


def _check_dtypes(group: str, weights: Collection[Weight], recipe: Recipe) -> None:
    """Raise CheckpointError if weights cannot share a tensor scale because their dtypes differ.

    Only recipes of compressed-tensors can fail, because they round the tensor scale to the dtype of the weight. A
    quantized weight counts as float32.

    Args:
        group: the name of the group of weights that share the tensor scale, for the error message.
        weights: the weights of the group.
        recipe: the recipe of the weights.
    """
    dtypes = sorted({weight.dtype if weight.container is None else "F32" for weight in weights})
    if len(dtypes) > 1 and recipe.tensor_rule == "compressed_tensors":
        raise CheckpointError(
            f"{shown(group)}: these layers share a tensor scale, but {recipe.id} rounds it to each layer's"
            f" dtype ({', '.join(dtypes)}); use another recipe"
        )
