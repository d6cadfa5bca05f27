"""Decide what a conversion does with each weight of a model, and with what the model declares beside its weights. A
selected weight is one to convert. A group is a set of layers that share a tensor scale, because loaders fuse them. A
piece is the unit of work: some rows of one matrix of a weight (see checkpoint/model/weights.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.config_entries import IGNORED, Item, attention_types, brief, declared_unquantized
from fp4kit.checkpoint.containers.configs import EXCLUSIONS, declared, entries
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.convert import job
from fp4kit.checkpoint.convert.rows import check_carried, check_folded, check_rescaled
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.model_files import Source, is_deepseek_v4, is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.weights import Q8_0, Piece, Weight, any_quantized, layer_names, part_names
from fp4kit.checkpoint.plan.gguf_model import GGUF, GgufModel
from fp4kit.checkpoint.plan.layer_recipes import (
    check_gguf,
    check_input_scale,
    check_scales,
    experts_only,
    rotated_weights,
)
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.plan.source_layers import check_layers, expert_stacks, kv_cache_of, split_layers
from fp4kit.checkpoint.selection import selection
from fp4kit.checkpoint.selection.names import missing_gated_halves, shared_amax_groups
from fp4kit.storage.files import CheckpointError, TensorEntry, listed, shown


class PlanFacts:
    """The decisions about the weights of one source model that follow from the user's request.

    The key of a weight is the name of the tensor with its values or codes. Plan describes further attributes.

    Attributes:
        weights: tensor name -> weight of the source, except weights that go into ``restored``. With --codes, some
            weights have codes of another model.
        left_out: the names of tensors that are not written, such as ignored ones and scales without a layer.
        mixture: the recipe and the container of every layer.
        restored: tensor name -> layer or stack of experts that is put together from several weights.
        split: the entries of ``restored`` for kv_b_proj layers.
        absorbed: the names of all tensors that go into ``restored``.
        decisions: tensor name -> whether the tensor is converted, and why.
        selected: tensor name -> weight, for the weights to convert.
        forms: container -> the selected weights to write in it. Empty for unquantized output.
        groups: output module -> name of its group.
        actions: tensor name -> one of the actions in job.py, for the selected weights. Empty for unquantized output.
        keeps_layers: True if every selected weight keeps the codes that it has, of the source or of the --codes model.
        gguf: the GGUF file that a model directory becomes; None for other output.
    """

    def __init__(
        self,
        source: Source,
        request: Request,
        weights: Mapping[str, Weight],
        items: tuple[Item, ...],
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.source, self.request, self.config, self.items = source, request, source.config, items
        self._model = selection.model_facts(self.config)
        self.mixture = request.mixture_for(self.config)
        self.form = self.mixture.default.form
        self.split = {} if self.format == mlx.FORMAT else split_layers(source.tensors, weights)
        self.restored = self.split | ({} if self.form is not None else expert_stacks(weights, self.config))
        self.absorbed = part_names(weight for one in self.restored.values() for weight in one.weights)
        self.weights = {name: weight for name, weight in weights.items() if name not in self.absorbed}
        self.kv_cache = kv_cache_of(source)
        self.left_out = left_out | {item.name for item in items if self._leaves_out(item)}
        self.left_out |= set() if self.kv_cache.is_carried(self.format) else {*self.kv_cache.tensors}
        self.as_in_source: dict[str, bool] = {}
        self.decisions = self._decisions()
        chosen = {name for name, one in self.decisions.items() if one.converted}
        self.selected = {name: weight for name, weight in self.weights.items() if name in chosen}
        if request.rotation is not None:
            found = {name: self._candidate(name, source.tensors[name][1]) for name in self.selected}
            self.selected |= rotated_weights(self.selected, found, request.rotation, request.hadamard_only)
            self.weights |= self.selected
        self.forms: dict[table.Container, dict[str, Weight]] = defaultdict(dict)
        if self.form is not None:
            check_layers(self.selected, self.others())
            for name, weight in self.selected.items():
                self.forms[self.form_of(weight.name)][name] = weight
        self.form = next(iter(self.forms)) if len(self.forms) == 1 else self.form
        self.input_scaled = frozenset(form.name for form, own in self.forms.items() if self._has_input_scale(form, own))
        self.has_input_scale = self.form is not None and self.form.name in self.input_scaled
        is_new = self.form is not None and self.format == GGUF and not is_gguf_config(self.config)
        self.gguf = GgufModel(source, self.weights, next(iter(self.forms)).kind) if is_new else None
        self._check_engine()
        for form in self.forms:
            check_input_scale(form, form.name in self.input_scaled)
        self._check_recipes()
        self.groups = self._groups()
        self.actions = {} if self.form is None else self._actions()
        self.keeps_layers = {*self.actions.values()} == {job.RENAME}
        self.input_amaxes = self._input_amaxes()
        carried = self._with_action(job.CARRY)
        if carried and not request.requantize:
            check_carried(carried)
        folds = self._with_action(job.FOLD)
        if folds and not request.requantize:
            check_folded(folds)
        rescaled = self._with_action(job.RESCALE)
        if rescaled and not request.requantize:
            check_rescaled((w, self.form_of(w.name), self.mixture.of(w.name).recipe) for w in rescaled)

    @property
    def format(self) -> str:
        """The output format, such as "modelopt"; "" for unquantized output, and for a GGUF file."""
        return "" if self.form is None else self.form.format

    @property
    def carries_codes(self) -> bool:
        """True if every quantized layer of the output keeps the codes of the source, so that no new codes are computed.

        False if the output has no quantized layer, or if codes are copied from another model (--codes).
        """
        return self.keeps_layers and not self.request.codes

    def _with_action(self, action: str) -> list[Weight]:
        return [self.selected[tensor] for tensor, own in self.actions.items() if own == action]

    def _leaves_out(self, item: Item) -> bool:
        of_layer = self.form is None and closed_world.is_scale_of_layer(item)
        return item.group == IGNORED or item.why in closed_world.LEFT_OUT or of_layer

    def _decisions(self) -> dict[str, selection.Decision]:
        """Decide for each tensor whether to convert it, and return the decisions by tensor name."""
        if self.form is None:
            changes = {name: w.container is not None or w.update is not None for name, w in self.weights.items()}
            return {name: selection.Decision(converted, "already unquantized") for name, converted in changes.items()}
        wishes = self.request.wishes
        if experts_only(self.form) and wishes.preset != "experts":
            wishes = replace(wishes, preset="experts")
        found = self._candidates()
        by_block: dict[int, list[selection.Candidate]] = defaultdict(list)
        for one in found:
            by_block[self.form_of(one.module).row_multiple].append(one)
        unordered = {
            name: one
            for block, alike in by_block.items()
            for name, one in selection.decide(alike, wishes, block).items()
        }
        decisions = {one.name: unordered[one.name] for one in found}
        without = selection.Decision(False, "not quantized in the --codes model", True)
        alone = selection.Decision(False, f"not a routed expert; {self.form} stores nothing else", True)
        for one in found:
            if decisions[one.name].converted and self.request.codes and not self.has_codes(one.name):
                decisions[one.name] = without
            elif decisions[one.name].converted and experts_only(self.form) and one.kind != "routed expert":
                decisions[one.name] = alone
        if self.format == GGUF and not is_gguf_config(self.config):
            decisions |= {one.name: kept for one in found if (kept := self._as_stored(one, decisions[one.name]))}
        selection.check(found, wishes, decisions)
        names = {one.name: one.module for one in found if decisions[one.name] == selection.AS_IN_SOURCE}
        declared = declared_unquantized(self.source, [*names.values()])
        self.as_in_source = {module: module in declared for module in names.values()}
        for name, module in names.items():
            why = f"unquantized, as the source {'declares' if module in declared else 'stores it'}"
            decisions[name] = replace(selection.AS_IN_SOURCE, reason=why)
        return decisions

    def _as_stored(self, one: selection.Candidate, usual: selection.Decision) -> selection.Decision | None:
        """Return another decision about a quantized layer of a model directory that becomes a GGUF file, or None."""
        weight = self.weights.get(one.name)
        if weight is None or weight.container is None or one.module in self.request.wishes.keep:
            return None
        if usual.converted and weight.container.element.bits == 8 and not self.request.requantize:
            return selection.Decision(False, f"llama.cpp has no type for {weight.container}")
        keeps = weight.container.same_codes(self.form_of(weight.name))
        is_head = (
            usual.reason.startswith(selection.OUTPUT_HEAD)
            and weight.shape[-1] % self.form_of(weight.name).row_multiple == 0
        )
        return selection.Decision(True, f"{usual.reason}, quantized in the source") if keeps and is_head else None

    def _candidates(self) -> list[selection.Candidate]:
        """Return all tensors of the source as the selection rules see them, without scales and other parts of
        weights.
        """
        parts = (part_names(self.weights.values()) - set(self.weights)) | self.absorbed
        found = [self._candidate(name, entry) for name, (_, entry) in self.source.tensors.items() if name not in parts]
        if self.request.codes or not any(map(selection.is_stored_quantized, found)):
            return found
        model = replace(self._model, is_quantized=True)
        return [replace(one, model=model) for one in found]

    def _candidate(self, name: str, entry: TensorEntry) -> selection.Candidate:
        """Return a Candidate, which describes a tensor to the selection rules."""
        # If requantizing is allowed, the dtype of a weight in Q8_0 is described as that of a container, so that the
        # rules let it be quantized.
        weight = self.weights.get(name)
        if weight is None:
            return selection.candidate(name, entry.dtype, entry.shape, self._model)
        dtype = f"gguf {Q8_0}" if weight.dtype == Q8_0 and self.request.requantize else weight.dtype
        return selection.Candidate(name, weight.name, dtype, weight.shape, self._model)

    def form_of(self, module: str) -> table.Container:
        """Return the container to write for a layer of the source, if the output is quantized."""
        form = self.mixture.of(module).form
        assert form is not None
        return form

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
        if form is not None and self.format == comfy.FORMAT and (table.TAG in form.suffixes or form.is_cast):
            return True
        return is_deepseek_v4(self.config) and experts_only(self.form)

    def _check_engine(self) -> None:
        """Raise CheckpointError if the only engine that reads the output format could not load the selected layers."""
        # Only GGUF (llama.cpp), MLX and ComfyUI output is checked, because other formats have several engines.
        shapes = {weight.name: weight.shape for weight in self.selected.values()}
        if is_gguf_config(self.config):
            check_gguf(self.source, self.form, shapes)
        elif self.gguf is not None:
            modules = {self.gguf.module(weight) for weight in self.selected.values()}
            biases = {
                f"{self.gguf.module(one)}.bias"
                for name, one in self.weights.items()
                if f"{one.name}.bias" in self.source.tensors
            }
            check_scales(self.gguf.architecture, self.form, modules, biases)
        elif self.format == mlx.FORMAT:
            mlx.check(self.config, shapes)
        elif self.form is not None and self.format == comfy.FORMAT:
            comfy.check(self.form, shapes)

    def _check_recipes(self) -> None:
        """Raise CheckpointError if a pattern of --recipe is unused, or would give fused layers different recipes."""
        if not self.request.recipes:
            return
        if not self.request.follows_layers:
            rest = {
                self.weights[name].name: one.reason
                for name, one in self.decisions.items()
                if not one.converted and name in self.weights
            }
            self.mixture.check_patterns([weight.name for weight in self.selected.values()], rest)
        layers = ((self.form_of(weight.name), weight) for weight in self.selected.values())
        self.mixture.check_fused({n: weight.name for form, weight in layers for n in self._names(form, weight)})

    def _names(self, form: table.Container | None, weight: Weight) -> tuple[str, ...]:
        return layer_names(weight, form, self.config)

    def _groups(self) -> dict[str, str]:
        """Return a dict from output module to the name of its group, for the modules that share a tensor scale."""
        if self.gguf is not None:  # llama.cpp fuses no layers
            return {}
        scaled = ((form, own) for form, own in self.forms.items() if form.has_tensor_scale)
        modules = [name for form, own in scaled for weight in own.values() for name in self._names(form, weight)]
        present = [weight.name for weight in self.weights.values()]
        dtypes = {name: entry.dtype for name, (_, entry) in self.source.tensors.items()}
        alone = missing_gated_halves(modules, present, dtypes)
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        return shared_amax_groups(modules)

    def _actions(self) -> dict[str, str]:
        """Return the action for each selected weight (one of those in job.py), by tensor name."""
        # If weights that share a tensor scale would get different actions, the quantized ones among them are
        # requantized. If an adapter is merged into some of them, and the others would keep their codes, all get the
        # action "merge".
        selected = self.selected
        groups: dict[str, set[str]] = defaultdict(set)
        for tensor, weight in selected.items():
            for name in self._names(self.form, weight):
                if name in self.groups:
                    groups[self.groups[name]].add(tensor)
        forms = {name: self.form_of(weight.name) for name, weight in selected.items()}
        found = {
            name: job.action_of(weight, job.target_of(weight.container, forms[name]))
            for name, weight in selected.items()
        }
        mixed: dict[str, str] = {}
        for group, names in groups.items():
            self._check_dtypes(group, [selected[name] for name in names])
            actions = {found[name] for name in names}
            if (
                job.MERGE in actions
                and actions <= {job.MERGE, job.RENAME}
                and not any(job.is_rounded(selected[name]) for name in names)
            ):
                found |= dict.fromkeys(names, job.MERGE)
            elif len(actions) > 1:
                mixed |= {name: group for name in names if found[name] != job.QUANTIZE}
        found |= dict.fromkeys(mixed, job.REQUANTIZE)
        updated = {name for name in found if selected[name].update is not None}
        for name in sorted(updated):
            _check_factors(selected[name], forms[name])
        updated |= {name for names in groups.values() if updated & names for name in names}
        lossy = next((name for name, action in found.items() if action == job.REQUANTIZE and name not in updated), None)
        if lossy is not None and not self.request.requantize:
            why = f"quantizing it as {forms[lossy]} would change its values"
            if lossy in mixed:
                why = f"it shares a tensor scale with layers that are stored differently: {shown(mixed[lossy])}"
            raise CheckpointError(
                f"{shown(selected[lossy].name)}: is already quantized as {selected[lossy].container}, and {why};"
                " use --requantize to allow that, or convert the unquantized release"
            )
        return found

    def _check_dtypes(self, group: str, weights: Collection[Weight]) -> None:
        """Raise CheckpointError if weights cannot share a tensor scale because their dtypes differ."""
        # Only recipes of compressed-tensors can cause this, because they round the tensor scale to the dtype of the
        # weight.
        dtypes = sorted({weight.dtype if weight.container is None else "F32" for weight in weights})
        recipes = (self.mixture.of(weight.name).recipe for weight in weights)
        recipe = next((one for one in recipes if one.tensor_rule == "compressed_tensors"), None)
        if len(dtypes) > 1 and recipe is not None:
            raise CheckpointError(
                f"{shown(group)}: these layers share a tensor scale, but {recipe.id} rounds it to each layer's"
                f" dtype ({', '.join(dtypes)}); use another recipe"
            )

    def _has_input_scale(self, form: table.Container, own: Mapping[str, Weight]) -> bool:
        """Return whether the layers of a container get input scales."""
        if not form.has_tensor_scale or self.request.gives_input_scales:
            return form.has_tensor_scale
        have = [
            weight
            for weight in own.values()
            if weight.container is not None
            and weight.container.kind == form.kind
            and table.INPUT_SCALE in weight.parts
            and not _is_unused_input_scale(weight)
        ]
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
            for weight in self.selected.values()
            if self._gets_new_input_scale(weight)
            for name in self._names(self.form, weight)
        }
        if self.selected and not columns:
            raise CheckpointError(
                "activations: every layer keeps its codes and its own input scale; leave the activations out"
            )
        return self.request.activations.of_layers(columns)

    def gets_input_scale(self, weight: Weight) -> bool:
        """Return whether the output container of a weight gets input scales; False for unquantized output."""
        return self.form is not None and self.form_of(weight.name).name in self.input_scaled

    def _gets_new_input_scale(self, weight: Weight) -> bool:
        """Return whether a selected weight gets an input scale other than its own."""
        return self.gets_input_scale(weight) and not (
            self.actions[weight.tensor] in (job.RENAME, job.MERGE) and table.INPUT_SCALE in weight.parts
        )

    def without_input_scale(self, weight: Weight, piece: Piece) -> bool:
        """Return whether the layer of ``piece`` gets no input scale, because it is an expert that saw no token."""
        measured = self.request.activations is not None and piece.module not in self.input_amaxes
        return measured and self._gets_new_input_scale(weight)


def _is_unused_input_scale(weight: Weight) -> bool:
    """Return whether a layer has ComfyUI's older ``scale_input`` of 1, which ComfyUI ignores."""
    if weight.dtype not in (table.COMFY_OLD.name, table.COMFY_OLD_E5M2.name):
        return False
    with Readers() as readers:
        return bool(scalar_of(readers, weight, table.INPUT_SCALE) == 1)


def _check_factors(weight: Weight, form: table.Container) -> None:
    """Raise CheckpointError for a weight with an update whose format scales columns or adds a matrix of its own."""
    factors = {table.COLUMN_SCALE, table.LOW_RANK_A} & weight.parts.keys()
    if factors and weight.container is not None and weight.container.kind == form.kind:
        raise CheckpointError(
            f"{shown(weight.name)}: is stored as {weight.container}, with factors into which no adapter is merged; use"
            " --format bf16, or merge the adapter into the unquantized release"
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
RECORDED = "source_producer"  # the key of fp4kit's record that holds the producer of the source
_PRODUCER = ("producer", "provider", "version", "autoround_version")
_EIGHT_BITS = {"fp8", "fp8 rows", "fp8 tensor", "mxfp8"}
_FLOAT_SCALES = _EIGHT_BITS - {"mxfp8"}
_UNQUANTIZED = "no layer is quantized"
_NO_INPUTS = "unquantized layers have unquantized inputs"


class Declared(NamedTuple):
    """The result for a declaration: ``outcome`` is KEPT, CONVERTED, DECODED or LOST, ``why`` a clause for the user."""

    name: str
    outcome: str
    why: str

    @property
    def line(self) -> str:
        """The outcome as a line for the user."""
        verb = "are" if self.name.partition(" of ")[0].endswith("s") else "is"
        return f"the source's {self.name} {verb} {'left out' if self.outcome == DECODED else self.outcome}: {self.why}"


class Declaration(NamedTuple):
    """One kind of thing that a source can declare.

    name: its name in messages.
    keys: the entries of config files that declare it.
    outcome: a function from the decisions about a model, and what was found, to (outcome, reason).
    find: a function from the decisions to what is declared, None if it is not; by default, a dict of ``keys``.
    decoded: why it is left out of unquantized output; "" if ``outcome`` says what becomes of it there.
    """

    name: str
    keys: tuple[str, ...]
    outcome: Callable[[PlanFacts, Any], tuple[str, str]]
    find: Callable[[PlanFacts], Any] | None = None
    decoded: str = ""

    def of(self, facts: PlanFacts) -> Declared | None:
        """Return what becomes of the declaration; None if the source has none."""
        found = (_named(facts.source, self.keys) or None) if self.find is None else self.find(facts)
        if found is None:
            return None
        if facts.form is None and self.decoded:
            return Declared(self.name, DECODED, self.decoded)
        return Declared(self.name, *self.outcome(facts, found))


def outcomes_of(facts: PlanFacts) -> tuple[Declared, ...]:
    """Return what becomes of each declaration of a source; () if no layer of the source is quantized."""
    if not any_quantized(facts.weights.values()) and not facts.restored:
        return ()
    return tuple(filter(None, (one.of(facts) for one in DECLARATIONS)))


def value_of(source: Source, key: str) -> Any:
    """Return the first value under a key in what config.json and hf_quant_config.json declare that says something."""
    return next(
        (value for name, value in entries(source.config, source.hf_quant_config) if name == key and value), None
    )


def _named(source: Source, keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key in keys if (value := value_of(source, key))}


def _exclusions(facts: PlanFacts, found: Any) -> tuple[str, str]:
    if facts.format in ("mlx", "comfy", "gguf"):
        return CONVERTED, "the engine sees by the tensors which layers are quantized"
    return CONVERTED, "written in the syntax of the output format"


def _of_cache(facts: PlanFacts, found: Any) -> tuple[str, str]:
    if not facts.kv_cache.is_carried(facts.format):
        return LOST, facts.kv_cache.reason(facts.format, "bf16" if facts.form is None else str(facts.form))
    same = facts.format == facts.kv_cache.format
    return (KEPT, "the format is the same") if same else (CONVERTED, "written as the output format spells it")


def _other_caches(facts: PlanFacts, found: Mapping[str, Any]) -> tuple[str, str]:
    return LOST, f"fp4kit does not convert {' and '.join(found)}"


def _stored_input_scales(facts: PlanFacts) -> list[Weight] | None:
    return [weight for weight in facts.weights.values() if table.INPUT_SCALE in weight.parts] or None


def _input_scales(facts: PlanFacts, have: list[Weight]) -> tuple[str, str]:
    lost = [weight for weight in have if weight.tensor not in facts.selected or not facts.gets_input_scale(weight)]
    if not lost:
        return (CONVERTED, "replaced by those given") if facts.request.gives_input_scales else (KEPT, "as they are")
    left = f"{len(lost)} of {len(have)}" if len(lost) < len(have) else f"all {len(have)}"
    return LOST, f"{left} belong to layers that have none in the output ({shown(lost[0].name)})"


def _objects(values: Any) -> list[Mapping[str, Any]]:
    """Return the objects among the values of an object; [] for anything else."""
    return [one for one in values.values() if isinstance(one, Mapping)] if isinstance(values, Mapping) else []


def declared_inputs(source: Source) -> bool | None:
    """Return whether a source declares that engines quantize the inputs of its layers; None if it does not say."""
    groups = _objects(value_of(source, "config_groups"))
    if groups:  # Model-Optimizer leaves the entry out where inputs are unquantized.
        return any(one.get("input_activations") for one in groups)
    quark = _objects({"": value_of(source, "global_quant_config")})
    quark += (one for key in _QUARK_LAYERS for one in _objects(value_of(source, key)))
    if quark:
        return any(one.get("input_tensors") for one in quark)
    bits = value_of(source, "act_bits")
    if isinstance(bits, int):
        return bits < 16
    if value_of(source, "activation_scheme"):
        return True
    return {"FP8_PB_WO": False, "W4A16_NVFP4": False}.get(str(value_of(source, "quant_algo")).upper())


_QUARK_LAYERS = ("layer_quant_config", "layer_type_quant_config")


def _inputs(facts: PlanFacts, declared: bool) -> tuple[str, str]:
    kinds = {form.kind for form in facts.forms} | {
        weight.container.kind
        for tensor, weight in facts.weights.items()
        if weight.container is not None and tensor not in facts.selected and facts.stays_quantized(weight)
    }
    makes = bool(kinds & _EIGHT_BITS) or bool(facts.input_scaled)
    if _carried_inputs(facts) or makes == declared:
        return KEPT, "declared alike"
    if not facts.keeps_layers:
        return CONVERTED, "that of the new recipe"
    if declared:
        return LOST, f"engines of {facts.form} quantize inputs only by input scales, and the output has none"
    if facts.request.gives_input_scales:
        return CONVERTED, "input scales are given"
    return LOST, f"the source leaves inputs unquantized, but engines of {facts.form} quantize them to 8 bits"


def _carried_inputs(facts: PlanFacts) -> dict[str, Any]:
    """Return the scheme of inputs in the only config group of a source, if the output repeats it; otherwise {}."""
    forms = [*facts.forms]
    if len(forms) != 1 or forms[0].kind == "nvfp4" or forms[0].format != "compressed-tensors":
        return {}
    if not facts.carries_codes or facts.input_scaled:
        return {}
    groups = value_of(facts.source, "config_groups")
    if str(value_of(facts.source, "quant_method")) != "compressed-tensors" or not isinstance(groups, Mapping):
        return {}
    found = _objects(groups)
    if len(groups) != 1 or not found or "input_activations" not in found[0]:
        return {}
    scheme = found[0]["input_activations"]
    is_static = isinstance(scheme, Mapping) and not scheme.get("dynamic")
    return {} if is_static else {"input_activations": scheme}


def carried(facts: PlanFacts) -> dict[str, Any]:
    """Return the entries of the source's declaration that the output repeats (see Plan.carried)."""
    # The format of scales holds for the output only if all scales are kept.
    kept = {key: value for key, value in _named(facts.source, SETTINGS).items() if facts.format in SETTINGS[key]}
    if not facts.keeps_layers:
        kept.pop("scale_fmt", None)
    return kept | _carried_inputs(facts)


def _settings(facts: PlanFacts, found: Mapping[str, Any]) -> tuple[str, str]:
    if facts.form is None:
        return DECODED, f"{', '.join(found)} concerns quantized layers"
    again = carried(facts)
    lost = [key for key in found if key not in again]
    # Only scale_fmt says that float scales, if they are kept, are powers of two.
    if lost == ["scale_fmt"] and not (facts.keeps_layers and any(form.kind in _FLOAT_SCALES for form in facts.forms)):
        return CONVERTED, "scale_fmt: the container of the output says it"
    if not lost:
        return KEPT, ", ".join(found)
    return LOST, f"configs of {facts.format} have no entry {lost[0]}, which is {brief(found[lost[0]])}"


def _transform_groups(facts: PlanFacts) -> Any:
    found = value_of(facts.source, "transform_config")
    return (found.get("config_groups") or None) if isinstance(found, Mapping) else None


def _transforms(facts: PlanFacts, found: Any) -> tuple[str, str]:
    return DECODED, "undone"  # every other format refuses a source with transforms


def _sizes(facts: PlanFacts, found: Any) -> tuple[str, str]:
    return (KEPT, "as stored") if facts.keeps_layers else (CONVERTED, "those of the new container")


def producer_of(source: Source) -> dict[str, Any]:
    """Return what a source says about the tool that made it; {} if nothing, or if fp4kit made it from no other."""
    own = value_of(source, "fp4kit")
    if isinstance(own, Mapping):
        before = own.get(RECORDED)
        return dict(before) if isinstance(before, Mapping) else {}
    found = _named(source, _PRODUCER)
    beside = source.hf_quant_config.get("producer") if isinstance(source.hf_quant_config, Mapping) else None
    return found if "producer" in found or not beside else {**found, "producer": beside}


def _producer(facts: PlanFacts, found: Any) -> tuple[str, str]:
    if facts.format in ("comfy", "gguf"):
        return CONVERTED, _NAMES_FP4KIT
    return KEPT, f"in fp4kit's record, as {RECORDED}"


_NAMES_FP4KIT = "fp4kit's record in the file names fp4kit"
DECLARATIONS = (
    Declaration("list of unquantized layers", (*EXCLUSIONS, "quantized_layers"), _exclusions, decoded=_UNQUANTIZED),
    Declaration(
        "quantized KV cache",
        ("kv_cache_scheme", "kv_cache_quant_algo", "kv_quant_type", "kv_cache_type"),
        _of_cache,
        lambda facts: facts.kv_cache.scheme or facts.kv_cache.algorithm or None,
    ),
    Declaration("scales of the KV cache", (), _of_cache, lambda facts: facts.kv_cache.tensors or None),
    Declaration(
        "KV cache of another tool",
        ("kv_cache_quant_config", "kv_cache_post_rope", "static_kv_granularity"),
        _other_caches,
    ),
    Declaration(
        "quantized attention or communication",
        (),
        lambda facts, found: (LOST, f"no output declares {listed([f'{k} {brief(v)}' for k, v in found.items()])}"),
        lambda facts: attention_types(declared(facts.source.config)) or None,
    ),
    Declaration("input scales", (), _input_scales, _stored_input_scales, _NO_INPUTS),
    Declaration(
        "scheme of inputs",
        (
            "activation_scheme",
            "global_quant_config",
            *_QUARK_LAYERS,
            *(f"act_{key}" for key in ("bits", "data_type", "dynamic", "group_size", "sym")),
        ),
        _inputs,
        lambda facts: declared_inputs(facts.source),
        _NO_INPUTS,
    ),
    Declaration("transforms", ("transform_config",), _transforms, _transform_groups),
    Declaration(
        "group sizes",
        ("group_size", "weight_block_size", "config_groups", "awq_block_size"),
        _sizes,
        decoded=_UNQUANTIZED,
    ),
    Declaration("producer", _PRODUCER, _producer, lambda facts: producer_of(facts.source) or None, _NAMES_FP4KIT),
    Declaration("settings for engines", tuple(SETTINGS), _settings),
)


def declaration_warnings(found: Iterable[Declared], cache_tensors: int) -> Iterator[str]:
    """Yield one warning per declaration that is lost. The KV cache and its scales share a warning."""
    lost = {one.name: one for one in found if one.outcome == LOST}
    scales = lost.pop("scales of the KV cache", None)
    cache = lost.pop("quantized KV cache", scales)
    if cache is not None:
        many = f" and its {cache_tensors} scales are" if cache_tensors else " is"
        yield f"the quantized KV cache of the source{many} left out: {cache.why}"
    yield from (one.line for one in lost.values())
