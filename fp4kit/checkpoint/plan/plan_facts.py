"""Decide what a conversion does with each weight of a model. A plan is made from these decisions. A selected weight is
one to convert. A group is a set of layers that share a tensor scale, because loaders fuse them. A piece is the unit of
work: some rows of one matrix of a weight (see checkpoint/model/weights.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.config_entries import IGNORED, Item, brief, declared_unquantized
from fp4kit.checkpoint.containers.configs import EXCLUSIONS, entries
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
from fp4kit.checkpoint.convert.job import (
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
from fp4kit.checkpoint.convert.rows import check_carried, check_rescaled
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.model_files import Source, is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.weights import (
    Q8_0,
    Located,
    Piece,
    Weight,
    WeightRotation,
    any_quantized,
    cast_of,
    layer_names,
    part_names,
)
from fp4kit.checkpoint.plan.layer_recipes import LayerQuantization, check_gguf
from fp4kit.checkpoint.plan.request import Request, check_input_scale, experts_only, is_deepseek_v4, rotated_weights
from fp4kit.checkpoint.plan.source_layers import (
    ExpertStack,
    SplitLayer,
    check_layers,
    expert_stacks,
    kv_cache_of,
    split_layers,
)
from fp4kit.checkpoint.selection.names import missing_gated_halves, shared_amax_groups
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
        items: the items of the source: everything that may concern quantization (see containers/config_entries.py).
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
        alone = missing_gated_halves(modules, [weight.name for weight in self.weights.values()])
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        return shared_amax_groups(modules)

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


KEPT, CONVERTED, DECODED, LOST = "kept", "converted", "decoded", "lost"
# entry of a config -> the formats whose configs have the entry too
SETTINGS = {
    "mamba_ssm_cache_dtype": ("modelopt",),
    "scale_fmt": ("fp8", "sglang-mxfp8", "deepseek-v4"),
    "smoothquant_val": (),
    "clamp_val": (),
    "use_meta_recipe": (),
    "softmax_quant_spec": (),
    "static_attention_granularity": (),
}
_OTHER_CACHES = ("kv_cache_quant_config", "kv_cache_post_rope", "static_kv_granularity")
_PRODUCER = ("producer", "provider", "version", "autoround_version")
RECORDED = "source_producer"  # the key of fp4kit's record that holds the producer of the source
_EIGHT_BITS = ("fp8", "fp8 rows", "fp8 tensor", "mxfp8")
_BY_TENSORS = ("mlx", "comfy", "gguf")  # engines of these formats see by its tensors whether a layer is quantized
_NO_INPUTS = "unquantized layers have unquantized inputs"


class Declared(NamedTuple):
    """The result for a declaration: ``outcome`` is KEPT, CONVERTED, DECODED or LOST, ``why`` a clause for the user."""

    name: str
    outcome: str
    why: str

    @property
    def line(self) -> str:
        """The outcome as a line for the user."""
        verb = "are" if self.name.endswith("s") else "is"
        return f"the source's {self.name} {verb} {'left out' if self.outcome == DECODED else self.outcome}: {self.why}"


class Declaration(NamedTuple):
    """One kind of thing that a source can declare.

    name: its name in messages.
    keys: the entries of config files that declare it.
    outcome: a function from the decisions about a model to (outcome, reason), or None if it is not declared.
    """

    name: str
    keys: tuple[str, ...]
    outcome: Callable[[PlanFacts], tuple[str, str] | None]


def outcomes_of(facts: PlanFacts) -> tuple[Declared, ...]:
    """Return what becomes of each declaration of a source; () if no layer of the source is quantized."""
    if not any_quantized(facts.weights.values()) and not facts.restored:
        return ()
    found = ((one.name, one.outcome(facts)) for one in DECLARATIONS)
    return tuple(Declared(name, *outcome) for name, outcome in found if outcome is not None)


def value_of(source: Source, key: str) -> Any:
    """Return the first value under a key in what config.json and hf_quant_config.json declare that says something."""
    return next(
        (value for name, value in entries(source.config, source.hf_quant_config) if name == key and value), None
    )


def _format(facts: PlanFacts) -> str:
    return "" if facts.form is None else facts.form.format


def _exclusions(facts: PlanFacts) -> tuple[str, str] | None:
    if not any(value_of(facts.source, key) for key in (*EXCLUSIONS, "quantized_layers")):
        return None
    if facts.form is None:
        return DECODED, "no layer is quantized"
    if _format(facts) in _BY_TENSORS:
        return CONVERTED, "the engine sees by the tensors which layers are quantized"
    return CONVERTED, "written in the syntax of the output format"


def _kv_cache(facts: PlanFacts) -> tuple[str, str] | None:
    cache = facts.kv_cache
    if not (cache.scheme or cache.algorithm):
        return None
    return _of_cache(facts)


def _kv_scales(facts: PlanFacts) -> tuple[str, str] | None:
    return _of_cache(facts) if facts.kv_cache.tensors else None


def _of_cache(facts: PlanFacts) -> tuple[str, str]:
    format = _format(facts)
    if facts.kv_cache.is_carried(format):
        same = format == facts.kv_cache.format
        return (KEPT, "the format is the same") if same else (CONVERTED, "written as the output format spells it")
    return LOST, facts.kv_cache.reason(format, "bf16" if facts.form is None else str(facts.form))


def _other_caches(facts: PlanFacts) -> tuple[str, str] | None:
    found = [key for key in _OTHER_CACHES if value_of(facts.source, key)]
    if not found:
        return None
    return LOST, f"fp4kit does not convert {' and '.join(found)}"


def _input_scales(facts: PlanFacts) -> tuple[str, str] | None:
    have = [weight for weight in facts.weights.values() if INPUT_SCALE in weight.parts]
    if not have:
        return None
    if facts.form is None:
        return DECODED, _NO_INPUTS
    lost = [weight for weight in have if weight.tensor not in facts.selected or not _gets(facts, weight.name)]
    if not lost:
        return (CONVERTED, "replaced by those given") if facts.request.gives_input_scales else (KEPT, "as they are")
    left = f"{len(lost)} of {len(have)}" if len(lost) < len(have) else f"all {len(have)}"
    return LOST, f"{left} belong to layers that have none in the output ({shown(lost[0].name)})"


def _gets(facts: PlanFacts, module: str) -> bool:
    """Return whether the layer's container in the output has input scales."""
    form = facts.form_of(module)
    return form is not None and form.name in facts.input_scaled


def declared_inputs(source: Source) -> bool | None:
    """Return whether a source declares that engines quantize the inputs of its layers; None if it does not say."""
    groups = value_of(source, "config_groups")
    found = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    # Model-Optimizer leaves the entry out where inputs are unquantized.
    if found:
        return any(one.get("input_activations") for one in found)
    specs = [value_of(source, "global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        layers = value_of(source, key)
        specs += layers.values() if isinstance(layers, Mapping) else []
    quark = [one for one in specs if isinstance(one, Mapping)]
    if quark:
        return any(one.get("input_tensors") for one in quark)
    bits = value_of(source, "act_bits")
    if isinstance(bits, int):
        return bits < 16
    if value_of(source, "activation_scheme"):
        return True
    return {"FP8_PB_WO": False, "W4A16_NVFP4": False}.get(str(value_of(source, "quant_algo")).upper())


def _inputs(facts: PlanFacts) -> tuple[str, str] | None:
    declared = declared_inputs(facts.source)
    if declared is None:
        return None
    if facts.form is None:
        return DECODED, _NO_INPUTS
    kinds = {form.kind for form in facts.forms} | {
        weight.container.kind
        for tensor, weight in facts.weights.items()
        if weight.container is not None and tensor not in facts.selected and facts.stays_quantized(weight)
    }
    makes = bool(kinds & {*_EIGHT_BITS}) or bool(facts.input_scaled)
    if carries_inputs(facts) or makes == declared:
        return KEPT, "declared alike"
    if set(facts.actions.values()) != {RENAME}:
        return CONVERTED, "that of the new recipe"
    if declared:
        return LOST, f"engines of {facts.form} quantize inputs only by input scales, and the output has none"
    if facts.request.gives_input_scales:
        return CONVERTED, "input scales are given"
    return LOST, f"the source leaves inputs unquantized, but engines of {facts.form} quantize them to 8 bits"


def carries_inputs(facts: PlanFacts) -> bool:
    """Return whether the scheme of inputs in the config groups of the source is copied (see output_configs.py)."""
    ((form, _),) = facts.forms.items() if len(facts.forms) == 1 else ((None, None),)
    same = form is not None and form.kind != "nvfp4" and form.format == "compressed-tensors"
    method = str(value_of(facts.source, "quant_method"))
    kept = set(facts.actions.values()) == {RENAME} and not facts.request.codes
    return same and method == "compressed-tensors" and kept and not facts.input_scaled and bool(_scheme(facts.source))


def _scheme(source: Source) -> list[Any]:
    """Return the scheme of inputs in the only config group of a source, in a list; [] if there are other groups."""
    groups = value_of(source, "config_groups")
    found = [*groups.values()] if isinstance(groups, Mapping) else []
    if len(found) != 1 or not isinstance(found[0], Mapping) or "input_activations" not in found[0]:
        return []
    scheme = found[0]["input_activations"]
    is_static = isinstance(scheme, Mapping) and not scheme.get("dynamic")
    return [] if is_static else [scheme]


def carried(facts: PlanFacts) -> dict[str, Any]:
    """Return the entries of the source's declaration that the output repeats (see Plan.carried)."""
    format = _format(facts)
    found: dict[str, Any] = {}
    for key, formats in SETTINGS.items():
        value = value_of(facts.source, key)
        if value is not None and format in formats and _holds(facts, key):
            found[key] = value
    if facts.form is not None and carries_inputs(facts):
        found["input_activations"] = _scheme(facts.source)[0]
    return found


def _holds(facts: PlanFacts, key: str) -> bool:
    """Return whether a setting is true of the output too: the format of scales is, only if all scales are kept."""
    return key != "scale_fmt" or set(facts.actions.values()) == {RENAME}


def _needs_scale_format(facts: PlanFacts) -> bool:
    """Return whether the output has float scales of the source, so that only scale_fmt says that they are powers."""
    kept = set(facts.actions.values()) == {RENAME}
    return kept and any(form.kind in ("fp8", "fp8 rows", "fp8 tensor") for form in facts.forms)


def _settings(facts: PlanFacts) -> tuple[str, str] | None:
    found = {key: value for key in SETTINGS if (value := value_of(facts.source, key)) is not None}
    if not found:
        return None
    if facts.form is None:
        return DECODED, f"{', '.join(found)} concerns quantized layers"
    lost = {key: value for key, value in found.items() if key not in carried(facts)}
    if set(lost) == {"scale_fmt"} and not _needs_scale_format(facts):
        return CONVERTED, "scale_fmt: the container of the output says it"
    if not lost:
        return KEPT, ", ".join(found)
    key, value = next(iter(lost.items()))
    return LOST, f"configs of {facts.form.format} have no entry {key}, which is {brief(value)}"


def _transforms(facts: PlanFacts) -> tuple[str, str] | None:
    found = value_of(facts.source, "transform_config")
    if not isinstance(found, Mapping) or not found.get("config_groups"):
        return None
    return DECODED, "undone"  # every other format refuses a source with transforms


def _sizes(facts: PlanFacts) -> tuple[str, str] | None:
    found = any(value_of(facts.source, key) for key in ("group_size", "weight_block_size", "awq_block_size"))
    if not found and not value_of(facts.source, "config_groups"):
        return None
    if facts.form is None:
        return DECODED, "no layer is quantized"
    kept = set(facts.actions.values()) == {RENAME}
    return (KEPT, "as stored") if kept else (CONVERTED, "those of the new container")


def producer_of(source: Source) -> dict[str, Any]:
    """Return what a source says about the tool that made it; {} if nothing, or if fp4kit made it from no other."""
    own = value_of(source, "fp4kit")
    if isinstance(own, Mapping):
        before = own.get(RECORDED)
        return dict(before) if isinstance(before, Mapping) else {}
    found = {key: value for key in _PRODUCER if (value := value_of(source, key))}
    if (
        "producer" not in found
        and isinstance(source.hf_quant_config, Mapping)
        and source.hf_quant_config.get("producer")
    ):
        found["producer"] = source.hf_quant_config["producer"]
    return found


def _producer(facts: PlanFacts) -> tuple[str, str] | None:
    if not producer_of(facts.source):
        return None
    if facts.form is None or _format(facts) in ("comfy", "gguf"):
        return DECODED if facts.form is None else CONVERTED, "fp4kit's record in the file names fp4kit"
    return KEPT, f"in fp4kit's record, as {RECORDED}"


DECLARATIONS = (
    Declaration("list of unquantized layers", (*EXCLUSIONS, "quantized_layers"), _exclusions),
    Declaration("quantized KV cache", ("kv_cache_scheme", "kv_cache_quant_algo"), _kv_cache),
    Declaration("scales of the KV cache", (), _kv_scales),
    Declaration("KV cache of another tool", _OTHER_CACHES, _other_caches),
    Declaration("input scales", (), _input_scales),
    Declaration(
        "scheme of inputs",
        (
            "activation_scheme",
            "global_quant_config",
            "layer_quant_config",
            "layer_type_quant_config",
            *(f"act_{key}" for key in ("bits", "data_type", "dynamic", "group_size", "sym")),
        ),
        _inputs,
    ),
    Declaration("transforms", ("transform_config",), _transforms),
    Declaration("group sizes", ("group_size", "weight_block_size", "config_groups", "awq_block_size"), _sizes),
    Declaration("producer", _PRODUCER, _producer),
    Declaration("settings for engines", tuple(SETTINGS), _settings),
)


def declaration_warnings(found: Iterator[Declared] | tuple[Declared, ...], cache_tensors: int) -> Iterator[str]:
    """Yield one warning per declaration that is lost. The KV cache and its scales share a warning."""
    lost = {one.name: one for one in found if one.outcome == LOST}
    cache = lost.pop("quantized KV cache", None)
    scales = lost.pop("scales of the KV cache", None)
    if cache is not None or scales is not None:
        why = (cache or scales or next(iter(lost.values()))).why
        many = f" and its {cache_tensors} scales are" if cache_tensors else " is"
        yield f"the quantized KV cache of the source{many} left out: {why}"
    yield from (one.line for one in lost.values())
