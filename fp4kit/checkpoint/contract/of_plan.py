"""Make the contract that a conversion writes beside its manifest. A contract describes how a model is quantized: its
settings are the recipe of the weights, patterns of layers with other recipes, and settings of the server, such as the
recipe of activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp4kit.checkpoint.model.weights import WeightRotation, weights_of
from fp4kit.checkpoint.plan.job import COPY, DEQUANTIZE
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.selection.names import fused_groups, split_module
from fp4kit.contract.schema import Contract
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.stochastic import HADAMARD_BLOCK

SERVER = ("activations", "input_scales", "kv_cache", "kv_layout", "unit")  # settings of the server, not of a checkpoint


def contract_of_plan(plan: Plan) -> Contract:
    """Return the contract of the checkpoint that a plan writes."""
    recipe, patterns = _recorded(plan), plan.recorded_patterns
    has_static = plan.has_input_scale and all(form.name in plan.input_scaled for form in plan.layers_of_forms)
    unknown = [name for name in SERVER if name != "input_scales" or not has_static]
    if plan.form is not None and (recipe is None or any(id not in RECIPES for _, id in patterns)):
        unknown += ["weights", "patterns"] if patterns else ["weights"]
        recipe, patterns = None, []
    rotation = plan.request.rotation
    if rotation is not None and plan.request.hadamard_only:  # a contract states one transform for all layers
        rotation = None
        unknown += ["hadamard", "hadamard_signs"]
    converted = {piece.module for tensor in plan.converted for piece in tensor.pieces if piece.form is not None}
    search = plan.request.search
    return Contract(
        weights=recipe,
        patterns=tuple((pattern, RECIPES[id]) for pattern, id in patterns),
        excluded=tuple(_unquantized(plan)),
        shared_amax=shared_leaves(converted) if _shares(plan) else (),
        input_scales="static" if has_static else None,
        hadamard=None if rotation is None else rotation.size,
        hadamard_signs=signs_of(rotation),
        scale_search=None if search is None else search.words.removeprefix("searched by "),
        container=plan.format_name,
        unknown=tuple(unknown),
    )


def signs_of(rotation: WeightRotation | None) -> str | None:
    """Return the signs of a rotation (Hadamard transform) as text of "+" and "-", for a contract; None if it has
    none.
    """
    if rotation is not None and not rotation.signs and rotation.size == HADAMARD_BLOCK:
        return "+" * rotation.size
    return None if rotation is None else rotation.signs or None


def _recorded(plan: Plan) -> Recipe | None:
    """Return the recipe that made the written codes."""
    if plan.form is None or plan.carries_some_codes:
        return None
    if plan.recorded == plan.recipe.id:
        return plan.recipe
    return RECIPES.get(plan.recorded)


def _unquantized(plan: Plan) -> Iterator[str]:
    """Yield the names of the unquantized layers that a plan copies, and of those that it decodes beside quantized
    ones.
    """
    weights = weights_of(plan.source.tensors, plan.source.config)
    for tensor in plan.tensors:
        is_matrix = tensor.name.endswith(".weight") and len(tensor.shape) > 1
        if tensor.action == COPY and (is_matrix or tensor.name in weights):
            yield tensor.name.removesuffix(".weight")
        elif tensor.action == DEQUANTIZE and plan.form is not None:
            yield from (piece.module for piece in tensor.pieces)


def _shares(plan: Plan) -> bool:
    """Return whether a plan gives some layers that loaders fuse, such as q, k and v, one shared tensor amax."""
    return plan.form is not None and any(tensor.group for tensor in plan.converted)


def shared_leaves(modules: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of leaf names, such as (gate_proj, up_proj), that loaders fuse among the layers ``modules``."""
    found: dict[tuple[str, ...], set[str]] = {}
    for (_, fusion), members in fused_groups(modules).items():
        if len(members) > 1:
            found.setdefault(fusion.members, set()).update(split_module(member)[1] for member in members)
    return tuple(tuple(leaf for leaf in order if leaf in leaves) for order, leaves in found.items())
