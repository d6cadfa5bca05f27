"""Decide what a conversion does with each weight of a model. A plan is made from these decisions. A selected weight is
one to convert. A group is a set of layers that share a tensor scale, because loaders fuse them. A piece is the unit of
work: some rows of one matrix of a weight (see model/layers.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.config_entries import IGNORED, Item, declared_unquantized
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.containers.table import (
    COLUMN_SCALE,
    COMFY_OLD,
    COMFY_OLD_E5M2,
    INPUT_SCALE,
    LOW_RANK_A,
    TAG,
    Container,
)
from fp4kit.checkpoint.convert.fp8_to_mxfp8 import check_carried
from fp4kit.checkpoint.convert.powers_of_two import check_rescaled
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.model_files import Source, is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.weights import (
    Q8_0,
    Located,
    Piece,
    Weight,
    WeightRotation,
    cast_of,
    layer_names,
    part_names,
)
from fp4kit.checkpoint.plan.expert_stacks import ExpertStack, expert_stacks
from fp4kit.checkpoint.plan.gguf import check_gguf
from fp4kit.checkpoint.plan.input_rotation import rotated_weights
from fp4kit.checkpoint.plan.job import (
    CARRY,
    MERGE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    RESCALE,
    action_of,
    is_rounded,
    target_of,
)
from fp4kit.checkpoint.plan.kv_b_proj import SplitLayer, split_layers
from fp4kit.checkpoint.plan.kv_cache import kv_cache_of
from fp4kit.checkpoint.plan.layer_checks import check_layers
from fp4kit.checkpoint.plan.mixture import LayerQuantization
from fp4kit.checkpoint.plan.request import Request, check_input_scale, experts_only, is_deepseek_v4
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection.selection import (
    AS_IN_SOURCE,
    Candidate,
    Decision,
    candidate,
    check,
    decide,
    is_stored_quantized,
    model_facts,
)
from fp4kit.recipes import Recipe
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import TensorEntry

_NO_CODES = Decision(False, "not quantized in the --codes model", True)


def _as_in_source(declared: bool) -> Decision:
    """Return the decision on a layer that stays unquantized because the source has it so beside quantized layers."""
    return replace(AS_IN_SOURCE, reason=f"unquantized, as the source {'declares' if declared else 'stores it'}")


class PlanFacts:
    """The decisions about the weights of one source model that follow from the user's request.

    A plan is made from the attributes. The key of a weight is the name of the tensor with its values or codes.

    Attributes:
        source, request: the model to convert, and what the user asked for.
        config: the content of the model's config.json.
        weights: tensor name -> weight of the source, except weights that go into ``restored``. With --codes, some
            weights have codes of another model.
        items: the items of the source: everything that may concern quantization (see model/items.py).
        left_out: the names of tensors that are not written, such as ignored ones and scales without a layer.
        mixture: the recipe and the container of every layer.
        form: the container to write; with several containers, that of layers that no pattern matches. None for
            unquantized output.
        restored: tensor name -> layer or stack of experts that is put together from several weights.
        split: the entries of ``restored`` for kv_b_proj layers.
        absorbed: the names of all tensors that go into ``restored``.
        kv_cache: the quantized KV cache of the source.
        decisions: tensor name -> whether the tensor is converted, and why.
        as_in_source: layer -> True if the source declares that it is unquantized, False if it only stores it so. These
            are the layers that stay unquantized only because the source, which has quantized layers, has them so.
        selected: tensor name -> weight, for the weights to convert.
        forms: container -> the selected weights to write in it. Empty for unquantized output.
        input_scaled: the names of the containers whose layers get input scales.
        has_input_scale: True if layers in the container ``form`` get input scales.
        groups: output module -> name of its group.
        actions: tensor name -> one of the actions in job.py, for the selected weights. Empty for unquantized output.
        input_amaxes: output layer -> amax of its inputs, for input scales computed from activations.

    Raises:
        CheckpointError: if the source cannot be converted with this request.
    """

    def __init__(
        self,
        source: Source,
        request: Request,
        weights: Mapping[str, Weight],
        items: tuple[Item, ...],
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.source, self.request = source, request
        self.config = source.config
        self.items = items
        self.left_out = {item.name for item in items if item.group == IGNORED} | left_out
        self.left_out |= {item.name for item in items if item.why in closed_world.LEFT_OUT}
        self.mixture = request.mixture_for(self.config)
        self.form = self.mixture.default.form
        for_mlx = self.form is not None and self.form.format == mlx.FORMAT
        self.split = {} if for_mlx else split_layers(source.tensors, weights)
        self.restored: dict[str, SplitLayer | ExpertStack] = {**self.split}
        if self.form is None:
            self.restored |= expert_stacks(weights, self.config)
        self.absorbed = part_names(weight for one in self.restored.values() for weight in one.weights)
        self.weights = {name: weight for name, weight in weights.items() if name not in self.absorbed}
        self.kv_cache = kv_cache_of(source)
        if not self.kv_cache.is_carried("" if self.form is None else self.form.format):
            self.left_out |= set(self.kv_cache.tensors)
        if self.form is None:
            names = [item.name for item in self.items if closed_world.is_scale_of_layer(item)]
            self.left_out |= set(names)
        self.as_in_source: dict[str, bool] = {}
        self.decisions = self._decisions()
        self.selected = {
            name: weight
            for name, weight in self.weights.items()
            if name in self.decisions and self.decisions[name].converted
        }
        if request.rotation is not None:
            self._rotate(request.rotation)
        if self.form is not None:
            check_layers(self.selected, self.others())
        self.forms = self._forms()
        self.form = next(iter(self.forms)) if len(self.forms) == 1 else self.form
        self.input_scaled = frozenset(form.name for form, own in self.forms.items() if self._has_input_scale(form, own))
        self.has_input_scale = self.form is not None and self.form.name in self.input_scaled
        self._check_engine()
        for form in self.forms:
            check_input_scale(form, form.name in self.input_scaled)
        self._check_recipes()
        self.groups = self._groups()
        self.actions = self._actions()
        self.input_amaxes = self._input_amaxes()
        carried = [self.selected[tensor] for tensor, action in self.actions.items() if action == CARRY]
        if carried and not request.requantize:
            check_carried(carried)
        rescaled = [self.selected[tensor] for tensor, action in self.actions.items() if action == RESCALE]
        if rescaled and not request.requantize:
            choices = [self.mixture.of(weight.name) for weight in rescaled]
            check_rescaled((w, _written(one), one.recipe) for w, one in zip(rescaled, choices, strict=True))

    def _decisions(self) -> dict[str, Decision]:
        """Decide for each tensor whether to convert it, and return the decisions by tensor name."""
        if self.form is None:
            changes = {name: w.container is not None or w.update is not None for name, w in self.weights.items()}
            return {name: Decision(converted, "already unquantized") for name, converted in changes.items()}
        wishes = self.request.wishes
        if experts_only(self.form) and wishes.preset != "experts":
            wishes = replace(wishes, preset="experts")
        found = self._candidates()
        decisions: dict[str, Decision] = {}
        by_block: dict[int, list[Candidate]] = defaultdict(list)
        for one in found:
            form = self.form_of(one.module)
            assert form is not None
            by_block[form.row_multiple].append(one)
        for block, alike in by_block.items():
            decisions |= decide(alike, wishes, block)
        decisions = {one.name: decisions[one.name] for one in found}
        if self.request.codes:
            without = [name for name, one in decisions.items() if one.converted and not self.has_codes(name)]
            decisions |= dict.fromkeys(without, _NO_CODES)
        if experts_only(self.form):
            alone = Decision(False, f"not a routed expert; {self.form} stores nothing else", True)
            others = {one.name for one in found if one.kind != "routed expert"}
            decisions = {name: alone if one.converted and name in others else one for name, one in decisions.items()}
        check(found, wishes, decisions)
        names = {one.name: one.module for one in found if decisions[one.name] == AS_IN_SOURCE}
        declared = declared_unquantized(self.source, [*names.values()])
        self.as_in_source = {module: module in declared for module in names.values()}
        return decisions | {name: _as_in_source(self.as_in_source[module]) for name, module in names.items()}

    def _candidates(self) -> list[Candidate]:
        """Return all tensors of the source as the selection rules see them, without scales and other parts of
        weights.
        """
        facts = model_facts(self.config)
        parts = (part_names(self.weights.values()) - set(self.weights)) | self.absorbed
        entries = {name: entry for name, (_, entry) in self.source.tensors.items() if name not in parts}
        found = [self._candidate(name, entry, facts) for name, entry in entries.items()]
        if self.request.codes or not any(map(is_stored_quantized, found)):
            return found
        return [replace(one, model=facts) for facts in [replace(facts, is_quantized=True)] for one in found]

    def _candidate(self, name: str, entry: TensorEntry, facts: Any) -> Candidate:
        """Return a Candidate, which describes a tensor to the selection rules."""
        # If requantizing is allowed, the dtype of a weight in Q8_0 is described as that of a container, so that the
        # rules let it be quantized.
        weight = self.weights.get(name)
        if weight is None:
            return candidate(name, entry.dtype, entry.shape, facts)
        dtype = f"gguf {Q8_0}" if weight.dtype == Q8_0 and self.request.requantize else weight.dtype
        return Candidate(name, weight.name, dtype, weight.shape, facts)

    def _rotate(self, rotation: WeightRotation) -> None:
        """Set the rotation of the selected weights that --hadamard-only allows, in ``selected`` and ``weights``."""
        facts = model_facts(self.config)
        found = {name: self._candidate(name, self.source.tensors[name][1], facts) for name in self.selected}
        self.selected = self.selected | rotated_weights(self.selected, found, rotation, self.request.hadamard_only)
        self.weights |= self.selected

    def form_of(self, module: str) -> Container | None:
        """Return the container to write for a layer of the source; None for unquantized output."""
        return self.mixture.of(module).form

    def others(self) -> dict[str, TensorEntry]:
        """Return the tensors to copy that store no weight, such as biases: name -> header entry."""
        taken = part_names(self.weights.values()) | self.absorbed | self.left_out | set(self.kv_cache.tensors)
        return {name: entry for name, (_, entry) in self.source.tensors.items() if name not in taken}

    def has_codes(self, name: str) -> bool:
        """Return whether a weight has codes that are copied from another model (--codes)."""
        return name in self.weights and bool(self.weights[name].members)

    def stays_quantized(self, weight: Weight) -> bool:
        """Return whether a quantized layer that is not selected stays as it is."""
        form = weight.container
        for_comfy = self.form is not None and self.form.format == comfy.FORMAT
        if form is not None and for_comfy and (TAG in form.suffixes or form.is_cast):
            return True
        return is_deepseek_v4(self.config) and experts_only(self.form)

    def cast_of(self, place: Located) -> Weight | None:
        """Return a tensor beside the weights of a model that was cast to FP8 as a weight (see weights.cast_of)."""
        return cast_of(place, self.weights.values()) if place.entry.dtype.startswith("F8") else None

    def _check_engine(self) -> None:
        """Raise CheckpointError if the only engine that reads the output format could not load the selected layers."""
        # Only GGUF (llama.cpp), MLX and ComfyUI output is checked, because other formats have several engines.
        shapes = {weight.name: weight.shape for weight in self.selected.values()}
        if is_gguf_config(self.config):
            check_gguf(self.source, self.form, shapes)
        elif self.form is not None and self.form.format == mlx.FORMAT:
            mlx.check(self.config, shapes)
        elif self.form is not None and self.form.format == comfy.FORMAT:
            comfy.check(self.form, shapes)

    def _check_recipes(self) -> None:
        """Raise CheckpointError if a pattern of --recipe is unused, or would give fused layers different recipes."""
        if not self.request.recipes:
            return
        modules = [weight.name for weight in self.selected.values()]
        rest = {name: one.reason for name, one in self.decisions.items() if not one.converted and name in self.weights}
        if not self.request.follows_layers:
            self.mixture.check_patterns(modules, {self.weights[name].name: why for name, why in rest.items()})
        self.mixture.check_fused(
            {
                name: weight.name
                for weight in self.selected.values()
                for name in layer_names(weight, self.form_of(weight.name), self.config)
            }
        )

    def _forms(self) -> dict[Container, dict[str, Weight]]:
        """Return the selected weights by output container, {container: {tensor name: weight}}."""
        found: dict[Container, dict[str, Weight]] = defaultdict(dict)
        for name, weight in self.selected.items():
            form = self.form_of(weight.name)
            if form is not None:
                found[form][name] = weight
        return found

    def _groups(self) -> dict[str, str]:
        """Return a dict from output module to the name of its group, for the modules that share a tensor scale."""
        scaled = [
            (form, weight) for form, own in self.forms.items() if form.has_tensor_scale for weight in own.values()
        ]
        modules = [name for form, weight in scaled for name in layer_names(weight, form, self.config)]
        alone = fused_layers.missing_gated_halves(modules, [weight.name for weight in self.weights.values()])
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        return fused_layers.shared_amax_groups(modules)

    def _actions(self) -> dict[str, str]:
        """Return the action for each selected weight, by tensor name; {} if the output is unquantized."""
        if self.form is None:
            return {}
        groups: dict[str, set[str]] = defaultdict(set)
        for tensor, weight in self.selected.items():
            for name in layer_names(weight, self.form, self.config):
                if name in self.groups:
                    groups[self.groups[name]].add(tensor)
        choices = {tensor: self.mixture.of(weight.name) for tensor, weight in self.selected.items()}
        return _actions_of(self.selected, groups, choices, self.request.requantize)

    def _has_input_scale(self, form: Container, own: Mapping[str, Weight]) -> bool:
        """Return whether the layers of a container get input scales."""
        if not form.has_tensor_scale:
            return False
        if self.request.gives_input_scales:
            return True
        same = [w for w in own.values() if w.container is not None and w.container.kind == form.kind]
        have = [weight for weight in same if INPUT_SCALE in weight.parts and not _is_unused_input_scale(weight)]
        if have and len(have) < len(own):
            without = next(name for name, weight in own.items() if weight not in have)
            raise CheckpointError(
                f"{shown(without)}: has no input scale, but {len(have)} of {len(own)} layers have one;"
                " --activations FILE or --input-scale X writes one for those without, --keep leaves them as they are"
            )
        return bool(have)

    def _input_amaxes(self) -> dict[str, np.float32]:
        """Return a dict from output layer to the amax of its inputs, for input scales computed from activations."""
        if self.request.activations is None or self.form is None:
            return {}
        columns = {
            name: weight.shape[-1]
            for tensor, weight in self.selected.items()
            if self._gets_input_scale(weight) and not self._keeps_input_scale(tensor)
            for name in layer_names(weight, self.form, self.config)
        }
        if self.selected and not columns:
            raise CheckpointError(
                "activations: every layer keeps its codes and its own input scale; leave the activations out"
            )
        return self.request.activations.of_layers(columns)

    def _gets_input_scale(self, weight: Weight) -> bool:
        """Return whether the output container of a weight gets input scales; False for unquantized output."""
        form = self.form_of(weight.name)
        return form is not None and form.name in self.input_scaled

    def _keeps_input_scale(self, tensor: str) -> bool:
        """Return whether a selected weight keeps both its codes and its own input scale."""
        return self.actions[tensor] in (RENAME, MERGE) and INPUT_SCALE in self.selected[tensor].parts

    @property
    def matrix_holder(self) -> Weight | None:
        """The weight beside which the rotation matrix is stored: the first selected weight with a rotation, or None."""
        return next((weight for weight in self.selected.values() if weight.rotation), None)

    def without_input_scale(self, weight: Weight, piece: Piece) -> bool:
        """Return whether the layer of ``piece`` gets no input scale, because it is an expert that saw no token."""
        measured = self.request.activations is not None and piece.module not in self.input_amaxes
        return measured and self._gets_input_scale(weight) and not self._keeps_input_scale(weight.tensor)


def _is_unused_input_scale(weight: Weight) -> bool:
    """Return whether a layer has ComfyUI's older ``scale_input`` of 1, which ComfyUI ignores."""
    if weight.dtype not in (COMFY_OLD.name, COMFY_OLD_E5M2.name):
        return False
    with Readers() as readers:
        return bool(scalar_of(readers, weight, INPUT_SCALE) == 1)


def _actions_of(
    selected: Mapping[str, Weight],
    groups: Mapping[str, Collection[str]],
    choices: Mapping[str, LayerQuantization],
    requantize: bool,
) -> dict[str, str]:
    """Return the action for each weight to convert (one of those in job.py), by tensor name."""
    # If weights that share a tensor scale would get different actions, the quantized ones among them are requantized.
    # If an adapter is merged into some of them, and the others would keep their codes, all get the action "merge".
    forms = {name: _written(choices[name]) for name in selected}
    found = {name: action_of(weight, target_of(weight.container, forms[name])) for name, weight in selected.items()}
    mixed: dict[str, str] = {}
    for group, names in groups.items():
        for name in names:
            _check_dtypes(group, [selected[one] for one in names], choices[name].recipe)
        actions = {found[name] for name in names}
        if MERGE in actions and actions <= {MERGE, RENAME} and not any(is_rounded(selected[name]) for name in names):
            found |= dict.fromkeys(names, MERGE)
        elif len(actions) > 1:
            mixed |= {name: group for name in names if found[name] != QUANTIZE}
    found |= dict.fromkeys(mixed, REQUANTIZE)
    wanted = {name for name in found if selected[name].update is not None}
    for name in sorted(wanted):
        _check_factors(selected[name], forms[name])
    wanted |= {name for names in groups.values() if wanted & {*names} for name in names}
    lossy = next((name for name, action in found.items() if action == REQUANTIZE and name not in wanted), None)
    if lossy is not None and not requantize:
        raise CheckpointError(_loss(selected[lossy], forms[lossy], mixed.get(lossy)))
    return found


def _written(choice: LayerQuantization) -> Container:
    """Return ``choice.form``, the container to write for a layer. An assertion fails for unquantized output (None)."""
    assert choice.form is not None
    return choice.form


def _check_factors(weight: Weight, form: Container) -> None:
    """Raise CheckpointError for a weight with an update whose format scales columns or adds a matrix of its own."""
    factors = {COLUMN_SCALE, LOW_RANK_A} & weight.parts.keys()
    if factors and weight.container is not None and weight.container.kind == form.kind:
        raise CheckpointError(
            f"{shown(weight.name)}: is stored as {weight.container}, with factors into which no adapter is merged; use"
            " --format bf16, or merge the adapter into the unquantized release"
        )


def _loss(weight: Weight, form: Container, group: str | None) -> str:
    """Return the error message for a weight that would have to be requantized although that is not allowed."""
    why = f"quantizing it as {form} would change its values"
    if group is not None:
        why = f"it shares a tensor scale with layers that are stored differently: {shown(group)}"
    way_out = "use --requantize to allow that, or convert the unquantized release"
    return f"{shown(weight.name)}: is already quantized as {weight.container}, and {why}; {way_out}"


def _check_dtypes(group: str, weights: Collection[Weight], recipe: Recipe) -> None:
    """Raise CheckpointError if weights cannot share a tensor scale because their dtypes differ."""
    # Only recipes of compressed-tensors can cause this, because they round the tensor scale to the dtype of the weight.
    dtypes = sorted({weight.dtype if weight.container is None else "F32" for weight in weights})
    if len(dtypes) > 1 and recipe.tensor_rule == "compressed_tensors":
        raise CheckpointError(
            f"{shown(group)}: these layers share a tensor scale, but {recipe.id} rounds it to each layer's"
            f" dtype ({', '.join(dtypes)}); use another recipe"
        )
