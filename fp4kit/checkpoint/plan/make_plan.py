"""Make the plan of a conversion: decide what happens to each tensor of a model, and check what was asked for.

A piece is a unit of work: some rows of one matrix of a weight (see model/layers.py). A group is a set of layers that
share a tensor scale, because loaders fuse them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit import __version__
from fp4kit.checkpoint.containers import comfy, mlx
from fp4kit.checkpoint.containers.configs import container_id
from fp4kit.checkpoint.containers.container import (
    INPUT_SCALE,
    SCALES,
    TENSOR_SCALE,
    Container,
)
from fp4kit.checkpoint.containers.ggml_names import PATTERNS, RECIPE, SCALE_SEARCH, VERSION
from fp4kit.checkpoint.convert import fp8_to_mxfp8
from fp4kit.checkpoint.convert.journal import identity
from fp4kit.checkpoint.loaders import exclusions, requirements, support
from fp4kit.checkpoint.loaders.containers import CONTAINERS
from fp4kit.checkpoint.loaders.missing_tensors import consequence
from fp4kit.checkpoint.model import closed_world, side_files, transforms, wrapper_names
from fp4kit.checkpoint.model.config_items import lost_column_scales
from fp4kit.checkpoint.model.declared_quantization import check_declared
from fp4kit.checkpoint.model.items import IGNORED, Item
from fp4kit.checkpoint.model.layers import Piece, layer_names, pieces, unquantized_pieces
from fp4kit.checkpoint.model.model_files import DIFFUSERS_INDEX, INDEX, Source, open_source
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.weights import Q8_0, Weight, is_interleaved, located, part_names, weights_of
from fp4kit.checkpoint.plan import gguf, kv_cache, layer_checks, scale_search
from fp4kit.checkpoint.plan.actions import actions_of
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.plan.borrowed_codes import (
    borrow_codes,
    check_values_agree,
    recorded_patterns,
    recorded_recipe,
)
from fp4kit.checkpoint.plan.expert_stacks import ExpertStack, expert_stacks
from fp4kit.checkpoint.plan.job import (
    CARRY,
    CAST,
    COPY,
    DEQUANTIZE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    SEARCHED,
    is_rounded,
    target_of,
)
from fp4kit.checkpoint.plan.kv_b_proj import SplitLayer, split_layers
from fp4kit.checkpoint.plan.output_files import parts_of
from fp4kit.checkpoint.plan.plan import Plan, ShardPlan, TensorPlan
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request, check_input_scale, experts_only, is_deepseek_v4
from fp4kit.checkpoint.selection import diffusers_classes, fused_layers
from fp4kit.checkpoint.selection.name_rules import UNSUPPORTED_STACK, Candidate, candidate, model_facts
from fp4kit.checkpoint.selection.selection import Decision, Wishes, check, decide, no_multiple
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

# Action -> the words that describe it in TensorPlan.reason.
_WORDS = {
    QUANTIZE: "quantized",
    RENAME: "same codes",
    CAST: "same codes where exponents allow",
    CARRY: "same codes where scales are powers of two",
    REQUANTIZE: "decoded and quantized again",
    DEQUANTIZE: "decoded",
}


_NO_CODES = Decision(False, "not quantized in the --codes model", True)


def make_plan(
    source: str | Path,
    recipe_id: str | Recipe = "nvfp4-te",
    *,
    format: str | None = None,
    wishes: Wishes | None = None,
    input_scale: float | None = None,
    requantize: bool = False,
    nonfinite: str = "error",
    codes: str | Path | None = None,
    search: scale_search.ScaleSearch | None = None,
    activations: Activations | None = None,
    ignore: Iterable[str] = (),
    split_max_size: int | None = None,
    recipes: Iterable[tuple[str, str | Recipe]] = (),
) -> Plan:
    """Return the plan to convert a model. Nothing is written.

    In most cases, only headers and JSON files are read. Some arguments need more: column weights and importance
    matrices of ``search`` are checked, and a few rows of ``codes`` are compared with the source. Block scales are read
    if FP8 becomes MXFP8, because they must be powers of two.

    Args:
        source: a model directory, a safetensors file, or a GGUF file. A GGUF file is converted to a GGUF file.
        recipe_id: the recipe for newly quantized tensors, or its id.
        format: the output format: "modelopt", "compressed-tensors", "sglang-mxfp8", "gpt-oss", "deepseek-v4", "mlx", or
            "bf16" to decode all layers. None chooses the format that most engines can load for this recipe and model.
        wishes: which layers to quantize; None for the default, all linear layers.
        input_scale: a positive float32 activation scale to write for every layer; None to write none. It makes the
            checkpoint NVFP4 (4-bit activations) instead of W4A16_NVFP4 (16-bit activations). The value 1.0 suits
            loaders that ignore it. For measured scales, pass ``activations`` instead.
        requantize: True to allow changing the values of layers that are already quantized. If False, their values are
            kept, with one exception: some values of an MXFP4 layer may change if it becomes NVFP4 and its scale
            exponents are too far apart. The report of the conversion names such layers.
        nonfinite: what to do with NaN and infinity: "error" raises, "keep" follows the recipe, "saturate" replaces
            infinities by the largest finite magnitude and NaN by 0.
        codes: the path of a quantized version of the model, whose codes are copied instead of quantizing the source's
            own values. It must be a directory if the source is a GGUF file, and a GGUF file otherwise. ``recipe_id``
            still determines the container to write. Layers that are unquantized in ``codes`` stay unquantized.
        search: how to search, for every block, the scale of smallest error, for example
            ScaleSearch.of("mse", column_weights). Needs nvfp4-modelopt-static, nvfp4-gguf or mxfp4-gguf, and the format
            modelopt, compressed-tensors or GGUF. None computes block scales from the block's amax.
        activations: measured activations, from which every layer gets its own input scale, for example
            Activations.of(["activations.safetensors"]). A layer that keeps its codes also keeps its own input scale, if
            it has one. None measures nothing.
        ignore: globs of tensors, config keys and metadata entries that fp4kit does not know, and that are therefore
            refused. Those that match are left out of the output instead. Every glob must match one of them.
        split_max_size: write a GGUF model as several files, each with at most this many bytes of tensors, as
            llama-gguf-split does. None writes one file.
        recipes: (pattern, recipe) pairs for layers that get another recipe than ``recipe_id``, for example
            [("*.down_proj", "nvfp4-te-2d")]. Patterns match whole module names of the source, as in Wishes.only. The
            first pattern that matches a layer decides. Every pattern must decide about a quantized layer.

    Returns:
        The plan, for ``execute``.

    Raises:
        CheckpointError: if the source cannot be converted, no engine loads the format, a pattern matches nothing, a
            gate has no up projection, or nothing is left to convert.
        ValueError: if no recipe has an id that is given.
        TypeError: if a recipe is neither an id nor a Recipe.
    """
    request = Request(
        recipe(recipe_id),
        format,
        wishes or Wishes(),
        input_scale,
        requantize,
        nonfinite,
        search=search,
        activations=activations,
        ignore=tuple(ignore),
        split_max_size=split_max_size,
        recipes=tuple((pattern, recipe(one)) for pattern, one in recipes),
    )
    model = open_source(Path(source))
    weights = weights_of(model.tensors, model.config)
    closed_world.check_no_adapter(model.tensors, request.ignore)
    wrapper_names.check(model.tensors)
    if codes is None and request.format == UNQUANTIZED:
        weights, items, matrices = transforms.undo(model, weights, request.ignore)
        check_declared(model, weights)
        return _Planner(model, request, weights, items, matrices).plan()
    items = closed_world.check_model(model, weights, request.ignore)
    check_declared(model, weights)
    if codes is None:
        return _Planner(model, request, weights, items).plan()
    donor = open_source(Path(codes))
    closed_world.check_model(donor, weights_of(donor.tensors, donor.config))
    taken = borrow_codes(weights, model, donor)
    request = replace(request, codes=identity(donor), made_by=recorded_recipe(donor))
    plan = _Planner(model, request, taken, items).plan()
    check_values_agree([tensor.name for tensor in plan.converted], weights, taken)
    return plan


class _Planner:
    """Make the plan to convert one source model with the options of one request.

    weights: tensor name -> weight of the source. With --codes, some weights have codes of another model.
    items: what the source stores beside its quantized layers. Ignored tensors are not written.
    left_out: the names of other tensors that are not written.

    Raises CheckpointError if the source cannot be converted with this request.
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
        self.mixture = request.mixture_for(self.config)
        self.form = self.mixture.default.form
        for_mlx = self.form is not None and self.form.format == mlx.FORMAT
        self.split = {} if for_mlx else split_layers(source.tensors, weights)
        self.restored: dict[str, SplitLayer | ExpertStack] = {**self.split}
        if self.form is None:
            self.restored |= expert_stacks(weights, self.config)
        self.absorbed = part_names(weight for one in self.restored.values() for weight in one.weights)
        self.weights = {name: weight for name, weight in weights.items() if name not in self.absorbed}
        self.kv_cache = kv_cache.kv_cache_of(source)
        if not self.kv_cache.is_carried("" if self.form is None else self.form.format):
            self.left_out |= set(self.kv_cache.tensors)
        if self.form is None:
            names = [item.name for item in self.items if closed_world.is_scale_of_layer(item)]
            self.left_out |= set(names)
        self.decisions = self._decisions()
        self.selected = {
            name: weight
            for name, weight in self.weights.items()
            if name in self.decisions and self.decisions[name].converted
        }
        if self.form is not None:
            layer_checks.check(self.selected, self._others())
        self.forms = self._forms()
        self.form = next(iter(self.forms)) if len(self.forms) == 1 else self.form
        self.input_scaled = frozenset(form.name for form, own in self.forms.items() if self._has_input_scale(form, own))
        self.has_input_scale = self.form is not None and self.form.name in self.input_scaled
        mlx.check(self.form, self.config, [weight.name for weight in self.selected.values()])
        comfy.check(self.form, {weight.name: weight.shape for weight in self.selected.values()})
        gguf.check(self.source, self.form, [weight.name for weight in self.selected.values()])
        for form in self.forms:
            check_input_scale(form, form.name in self.input_scaled)
        self._check_recipes()
        self.groups = self._groups()
        self.actions = self._actions()
        self.input_amaxes = self._input_amaxes()
        if not request.requantize:
            fp8_to_mxfp8.check(self.selected[tensor] for tensor, action in self.actions.items() if action == CARRY)

    def _decisions(self) -> dict[str, Decision]:
        """Return tensor name -> the decision whether it is converted, for all weights and all other tensors.

        A weight is listed under the name of the tensor with its values or codes. Its other tensors, such as scales,
        are not listed. For unquantized output, only weights are listed.

        Raises CheckpointError if the user's patterns do not fit the tensors (see selection.check).
        """
        if self.form is None:
            return {name: Decision(w.container is not None, "already unquantized") for name, w in self.weights.items()}
        wishes = self.request.wishes
        if experts_only(self.form) and wishes.preset != "experts":
            wishes = replace(wishes, preset="experts")
        facts = model_facts(self.config)
        parts = (part_names(self.weights.values()) - set(self.weights)) | self.absorbed
        found = [
            self._candidate(name, entry, facts) for name, (_, entry) in self.source.tensors.items() if name not in parts
        ]
        decisions: dict[str, Decision] = {}
        by_block: dict[int, list[Candidate]] = defaultdict(list)
        for one in found:
            form = self._form_of(one.module)
            assert form is not None
            by_block[form.row_multiple].append(one)
        for block, alike in by_block.items():
            decisions |= decide(alike, wishes, block)
        decisions = {one.name: decisions[one.name] for one in found}
        if self.request.codes:
            without = [name for name, one in decisions.items() if one.converted and not self._has_codes(name)]
            decisions |= dict.fromkeys(without, _NO_CODES)
        if experts_only(self.form):
            alone = Decision(False, f"not a routed expert; {self.form} stores nothing else", True)
            others = {one.name for one in found if one.kind != "routed expert"}
            decisions = {name: alone if one.converted and name in others else one for name, one in decisions.items()}
        check(found, wishes, decisions)
        return decisions

    def _kept_metadata(self, file: SafetensorsFile) -> dict[str, str]:
        """Return the metadata of a source file without the entries that say how its layers are stored."""
        quantized = {weight.name for weight in self.weights.values() if weight.container is not None}
        tensors = self.source.tensors
        return {
            key: text
            for key, text in file.metadata.items()
            if not closed_world.describes_stored_layers(key, tensors, quantized)
        }

    def _others(self) -> dict[str, TensorEntry]:
        """Return the tensors of the source that store no weight and are not left out, by name."""
        taken = part_names(self.weights.values()) | self.absorbed | self.left_out | set(self.kv_cache.tensors)
        return {name: entry for name, (_, entry) in self.source.tensors.items() if name not in taken}

    def _form_of(self, module: str) -> Container | None:
        """Return the container to write for a layer of the source; None for unquantized output."""
        return self.mixture.of(module).form

    def _check_recipes(self) -> None:
        """Raise CheckpointError if a pattern of --recipe is unused, or would give fused layers different recipes."""
        if not self.request.recipes:
            return
        modules = [weight.name for weight in self.selected.values()]
        rest = {name: one.reason for name, one in self.decisions.items() if not one.converted and name in self.weights}
        self.mixture.check_patterns(modules, {self.weights[name].name: why for name, why in rest.items()})
        self.mixture.check_fused(
            {
                name: weight.name
                for weight in self.selected.values()
                for name in layer_names(weight, self._form_of(weight.name), self.config)
            }
        )

    def _has_codes(self, name: str) -> bool:
        """Return whether the tensor ``name`` is a weight with codes that are borrowed from another model (--codes)."""
        return name in self.weights and bool(self.weights[name].members)

    def _candidate(self, name: str, entry: TensorEntry, facts: Any) -> Candidate:
        """Return the description of a tensor on which the selection rules decide.

        If requantizing is allowed, a weight in Q8_0 is described as float32, so that the rules let it be quantized.

        entry: the tensor's dtype and shape; those of the weight are used if it is one.
        facts: the facts about the model, from model_facts.
        """
        weight = self.weights.get(name)
        if weight is None:
            return candidate(name, entry.dtype, entry.shape, facts)
        dtype = "F32" if weight.dtype == Q8_0 and self.request.requantize else weight.dtype
        return Candidate(name, weight.name, dtype, weight.shape, facts)

    def _forms(self) -> dict[Container, dict[str, Weight]]:
        """Return container -> the selected weights to write in it; {} for unquantized output.

        Weights that stay unquantized are left out. An AWQ layer that keeps its codes counts as a layer of
        Model-Optimizer's NVFP4.
        """
        found: dict[Container, dict[str, Weight]] = defaultdict(dict)
        for name, weight in self.selected.items():
            form = self._form_of(weight.name)
            if form is not None:
                found[form][name] = weight
        return found

    def _has_input_scale(self, form: Container, own: Mapping[str, Weight]) -> bool:
        """Return whether the layers of a container get an input scale: from the user, or their own if all have one.

        Return False if the container has no tensor scale. Input scales of formats other than the output's, such as FP8
        for NVFP4, do not count, because they are for activations of that format.

        form: the container. own: the weights to write in it.

        Raises CheckpointError if the user gives none and only some of the layers to convert have one.
        """
        if not form.has_tensor_scale:
            return False
        if self.request.gives_input_scales:
            return True
        same = [w for w in own.values() if w.container is not None and w.container.kind == form.kind]
        have = [weight for weight in same if INPUT_SCALE in weight.parts]
        if have and len(have) < len(own):
            without = next(name for name, weight in own.items() if weight not in have)
            raise CheckpointError(
                f"{shown(without)}: has no input scale, but {len(have)} of {len(own)} layers have one;"
                " --activations FILE or --input-scale X writes one for those without, --keep leaves them as they are"
            )
        return bool(have)

    def _input_amaxes(self) -> dict[str, np.float32]:
        """Return output layer -> amax of its inputs, for the layers whose input scale is computed from activations.

        Return {} if the user gives no activations. Layers that keep their codes and their own input scale are left out.
        Experts that saw no token are left out if Activations.unseen is "none".

        Raises CheckpointError if no layer needs the activations, or if a layer was not measured.
        """
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
        """Return whether a weight's container gets input scales."""
        form = self._form_of(weight.name)
        return form is not None and form.name in self.input_scaled

    def _keeps_input_scale(self, tensor: str) -> bool:
        """Return whether a weight keeps its codes and has an input scale of its own, which it also keeps.

        tensor: the name of the tensor with the weight's values or codes.
        """
        return self.actions[tensor] == RENAME and INPUT_SCALE in self.selected[tensor].parts

    def _without_input_scale(self, weight: Weight, piece: Piece) -> bool:
        """Return whether the layer of ``piece`` gets no input scale, because it is an expert that saw no token.

        weight: the source weight of the layer. Return False if the user gives no activations.
        """
        measured = self.request.activations is not None and piece.module not in self.input_amaxes
        return measured and self._gets_input_scale(weight) and not self._keeps_input_scale(weight.tensor)

    def _groups(self) -> dict[str, str]:
        """Return output module -> name of its group, for all modules that share a tensor scale with other modules.

        Return {} if the output container has no tensor scale.

        Raises CheckpointError if a gate projection has no up projection beside it.
        """
        scaled = [
            (form, weight) for form, own in self.forms.items() if form.has_tensor_scale for weight in own.values()
        ]
        modules = [name for form, weight in scaled for name in layer_names(weight, form, self.config)]
        alone = fused_layers.missing_gated_halves(modules, [weight.name for weight in self.weights.values()])
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        return fused_layers.shared_amax_groups(modules)

    def plan(self) -> Plan:
        """Return the plan.

        Raises CheckpointError if nothing is converted, if two output tensors have the same name, or if a scale search
        does not fit the layers.
        """
        if not self.selected and not self.restored:
            raise CheckpointError(
                "0 tensors to convert: nothing in the source is quantized, so there is nothing to decode; use another"
                " format than bf16"
            )
        shards = tuple(self._shard(file, *self._recorded()) for file in self.source.files)
        if gguf.is_gguf_config(self.config):
            shards = (_joined(shards),)
        if self.request.split_max_size is not None:
            parts_of(shards[0].outputs, {}, self.request.split_max_size)  # raises if the limit is too small
        _check_outputs(shards)
        found = scale_search.check_layers(self.request.search, (tensor for shard in shards for tensor in shard.tensors))
        ignore, warnings = self._exclusions()
        warnings += found
        names = {file.name for file in self.source.files} | {INDEX, DIFFUSERS_INDEX}
        auxiliary = side_files.scan(self.source.root, names, keeps_layers=False)
        warnings += self._unmeasured(shards)
        form, has_scale = self.form, self.has_input_scale
        format = "" if form is None else form.format
        warnings += tuple(self._different_tensor_scales())
        warnings += tuple(layer_checks.all_doubts(self.weights.values(), self.config, self.source.tensors))
        warnings += tuple(layer_checks.missing_experts(weight.name for weight in self.weights.values()))
        warnings += tuple(layer_checks.wide_floats(self._others()) if self.form is not None else ())
        warnings += tuple(closed_world.lost_tensor_scales(self.weights.values()))
        lost = lost_column_scales(self.config, self.source.hf_quant_config, self.weights)
        warnings += (lost,) if lost else ()
        if self.kv_cache.is_carried(format):
            found_troubles = kv_cache.troubles(self.source.tensors)
            warnings += tuple(f"{shown(name)}: {why}" for _, name, why in found_troubles)
        warnings += tuple(kv_cache.warnings(self.kv_cache, format, "bf16" if form is None else str(form)))
        return Plan(
            self.source,
            self.request,
            form,
            has_scale,
            shards,
            ignore,
            warnings,
            auxiliary,
            self.items,
            self.kv_cache if self.kv_cache.is_carried(format) else None,
            self.input_amaxes,
            self.input_scaled,
        )

    def _different_tensor_scales(self) -> Iterator[str]:
        """Yield a warning about fused layers whose parts keep codes and tensor scales that differ, if there are any.

        The tensor scales of the source are read, because vLLM uses one of them for the whole fused layer. Experts in
        stacks are not checked.
        """
        if self.form is None or self.form.format not in ("modelopt", "compressed-tensors"):
            return
        # Engines encode FP8 layers anew with the largest scale of a fused layer, so scales of FP8 may differ.
        stored: dict[str, set[float]] = defaultdict(set)
        with Readers() as readers:
            for tensor, weight in self.selected.items():
                kept = self.actions[tensor] == RENAME and len(weight.shape) == 2 and TENSOR_SCALE in weight.parts
                kept = kept and weight.container is not None and weight.container.scale is not None
                if kept and weight.name in self.groups:
                    stored[self.groups[weight.name]].add(float(scalar_of(readers, weight, TENSOR_SCALE)))
        names = [group for group, scales in stored.items() if len(scales) > 1]
        if names:
            yield (
                f"{len(names)} fused layers have parts with different tensor scales ({listed(names)}); vLLM uses one"
                " for all parts, so values would be wrong; run fp4kit reconcile on the result"
            )

    def _unmeasured(self, shards: Iterable[ShardPlan]) -> tuple[str, ...]:
        """Return a warning that names the experts without an input scale; () if every layer has one.

        shards: the plans of all output files.
        """
        converted = (tensor for shard in shards for tensor in shard.tensors if tensor.name in self.selected)
        pairs = [
            (piece.module, piece.form)
            for tensor in converted
            for piece in tensor.pieces
            if piece.form is not None and self._without_input_scale(self.selected[tensor.name], piece)
        ]
        if not pairs:
            return ()
        names, form = [name for name, _ in pairs], pairs[0][1]
        found = (
            f"{engine}: {consequence(engine, container_id(form, True), names[0], form.suffixes[INPUT_SCALE])}"
            for engine in ("vLLM", "SGLang")
        )
        return (
            f"{len(names)} experts saw no token and get no input scale ({listed(names)}); {'; '.join(found)};"
            " --unseen-experts layer gives them one",
        )

    def _recorded(self) -> tuple[str, list[list[str]]]:
        """Return the id of the recipe and the [pattern, recipe id] pairs to record in the output files.

        The id is "" for unquantized output or an unknown recipe. The pairs are [] if there are none.
        """
        if self.form is None:
            return "", []
        if set(self.actions.values()) == {RENAME} and not self.request.codes:
            return recorded_recipe(self.source), recorded_patterns(self.source)
        return self.request.recorded, [[pattern, one.id] for pattern, one in self.request.recipes]

    def _shard(self, file: SafetensorsFile, recorded: str, patterns: list[list[str]]) -> ShardPlan:
        """Return the plan for the tensors of one source file, and the metadata of the output file.

        recorded: the id of the recipe to record in the metadata; "" to record none.
        patterns: the [pattern, recipe id] pairs to record.
        """
        parts = (part_names(self.weights.values()) - set(self.weights)) | self.left_out
        parts |= self.absorbed - set(self.restored)
        tensors = tuple(self._tensor(file, entry) for entry in file.entries if entry.name not in parts)
        own = {**({RECIPE: recorded} if recorded else {}), VERSION: __version__}
        if patterns:
            own[PATTERNS] = json.dumps({"recipes": patterns})
        if gguf.is_gguf_config(self.config) and self.request.search is not None:
            own[SCALE_SEARCH] = self.request.search.words.removeprefix("searched by ")
        taken_over = {} if gguf.is_gguf_config(self.config) else {"format": "pt", **self._kept_metadata(file)}
        taken_over.pop(PATTERNS, None)
        if self.form is not None and self.form.format == mlx.FORMAT:
            taken_over["format"] = mlx.FORMAT
        return ShardPlan(file.name, tensors, {**taken_over, **own})

    def _tensor(self, file: SafetensorsFile, entry: TensorEntry) -> TensorPlan:
        """Return the plan for one tensor of a file, or for the weight whose values or codes the tensor holds.

        A selected weight is converted. Any other quantized weight is decoded, or stays in its container for
        DeepSeek-V4. All other tensors are copied.
        """
        if entry.name in self.restored:
            return self._restored(entry.name)
        weight = self.weights.get(entry.name)
        if weight is not None and entry.name in self.selected:
            return self._converted(weight)
        reason = self.decisions[entry.name].reason if entry.name in self.decisions else "not a weight"
        weight = None if self._has_codes(entry.name) else weight  # not converted: its own values are copied
        if weight is not None and weight.container is not None and not self._stays_quantized():
            return self._decoded(weight, f"{reason}; decoded, because the output has another container")
        if weight is not None and weight.container is not None:
            return self._copied_whole(weight, reason)
        renamed = ""
        if self.form is not None and entry.name in self.kv_cache.tensors:
            renamed, reason = self.kv_cache.name(entry.name, self.form.format), "scale of the KV cache"
        place = located(file, entry)
        return TensorPlan(entry.name, entry.dtype, entry.shape, COPY, reason, entry.nbytes, (), place, renamed=renamed)

    def _restored(self, tensor: str) -> TensorPlan:
        """Return the plan to write a layer or stack unquantized that is put together from several weights.

        tensor: the name of the first of them, under which it is in ``restored``.
        """
        one = self.restored[tensor]
        nbytes = sum(weight.nbytes for weight in one.weights)
        return TensorPlan(tensor, one.dtype, one.shape, DEQUANTIZE, one.reason, nbytes, tuple(one.pieces()))

    def _stays_quantized(self) -> bool:
        """Return whether quantized layers that are not converted stay in their containers. Otherwise they are decoded.

        True only for DeepSeek-V4, whose loaders expect FP8 layers beside the converted experts.
        """
        return is_deepseek_v4(self.config) and experts_only(self.form)

    def _copied_whole(self, weight: Weight, reason: str) -> TensorPlan:
        """Return the plan to write a quantized weight unchanged, in its own container.

        reason: why the weight is not converted.
        """
        assert weight.container is not None
        found = pieces(weight, weight.container, self.config, INPUT_SCALE in weight.parts)
        why = f"{reason}; as it is"
        return TensorPlan(weight.tensor, weight.dtype, weight.shape, RENAME, why, weight.nbytes, tuple(found))

    def _decoded(self, weight: Weight, reason: str) -> TensorPlan:
        """Return the plan to decode a weight to BF16. A stack is written in the axis order that its model type uses.

        reason: why the weight is decoded, for the user.
        """
        transposed = len(weight.shape) == 3 and (weight.transposed or is_interleaved(self.config))
        found = tuple(unquantized_pieces(weight, "BF16", transposed))
        return TensorPlan(weight.tensor, weight.dtype, weight.shape, DEQUANTIZE, reason, weight.nbytes, found)

    def _converted(self, weight: Weight) -> TensorPlan:
        """Return the plan for a selected weight: convert it, or decode it if the output is unquantized."""
        if self.form is None:
            return self._decoded(weight, f"{weight.dtype}: decoded")
        action, form = self.actions[weight.tensor], self._form_of(weight.name)
        assert form is not None
        has_input_scale = form.name in self.input_scaled
        form = target_of(weight.container, form) if action == RENAME else form
        found = tuple(
            replace(piece, outputs=tuple(output for output in piece.outputs if output.part != INPUT_SCALE))
            if self._without_input_scale(weight, piece)
            else piece
            for piece in pieces(weight, form, self.config, has_input_scale)
        )
        if action == RENAME and is_rounded(weight):
            found = tuple(_with_scales_of(weight, piece) for piece in found)
        groups = {piece.module: self.groups[piece.module] for piece in found if piece.module in self.groups}
        shared = f"; shares its tensor scale: {next(iter(groups.values()))}" if groups else ""
        made_by = self.mixture.of(weight.name).recipe
        words = _WORDS[action] + (f" by {made_by.id}" if self.request.recipes and action in SEARCHED else "")
        words += scale_search.words_of(self.request.search, action, made_by)
        reason = f"{self.decisions[weight.tensor].reason}: {words}{shared}"
        facts = (weight.tensor, weight.dtype, weight.shape, action, reason, weight.nbytes, found)
        return TensorPlan(*facts, group=groups, recipe=made_by)

    def _actions(self) -> dict[str, str]:
        """Return tensor name -> the action that brings the weight into the output container, for all selected weights.

        Return {} if the output is unquantized.
        """
        if self.form is None:
            return {}
        groups: dict[str, set[str]] = defaultdict(set)
        for tensor, weight in self.selected.items():
            for name in layer_names(weight, self.form, self.config):
                if name in self.groups:
                    groups[self.groups[name]].add(tensor)
        choices = {tensor: self.mixture.of(weight.name) for tensor, weight in self.selected.items()}
        return actions_of(self.selected, groups, choices, self.request.requantize)

    def _rows_of_other_length(self) -> list[str]:
        """Return warnings about layers that stay unquantized because their rows do not consist of whole blocks.

        Layers of equal row length and dtype share a warning. Return [] if there are no such layers.
        """
        assert self.form is not None
        rows: dict[str, list[str]] = defaultdict(list)
        for name, weight in self.weights.items():
            found, form = self.decisions.get(name), self._form_of(weight.name)
            assert form is not None
            length = no_multiple(weight.shape, form.row_multiple)
            if found is not None and found.reason == length:
                dtype = "BF16" if weight.container is not None else self.source.tensors[name][1].dtype
                rows[f"{length}; {{}} {dtype}"].append(weight.name)
        return [
            f"{_several(names)}: {why.format('it stays' if len(names) == 1 else 'they stay')}"
            for why, names in rows.items()
        ]

    def _restored_layers(self) -> list[str]:
        """Return a warning that names the kv_b_proj layers that stay unquantized, or [] if there are none."""
        names = [layer.name for layer in self.split.values()]
        why = "put together from mlx-lm's embed_q and unembed_out, whose blocks run along another axis"
        return [f"{_several(names)}: {why}; unquantized in the output"] if names else []

    def _exclusions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (exclusion list, warnings about layers that loaders may treat wrongly).

        The exclusion list names the unquantized layers that loaders would expect to be quantized. It is () if the
        output is unquantized or its format has no such list. Quantized layers that stay in their containers are not
        listed.
        """
        if self.form is None:
            family, names = support.family_of(self.config), [weight.name for weight in self.weights.values()]
            return (), tuple(shown(str(found)) for found in requirements.split_experts("bf16", family, names))
        quantized = [
            w for name, w in self.weights.items() if name in self.selected or (w.container and self._stays_quantized())
        ]
        converted = [name for weight in quantized for name in layer_names(weight, self.form, self.config)]
        stay = {weight.tensor for weight in quantized}
        kept = [name for name, found in self.decisions.items() if found.listed and name not in stay]
        modules = [self.weights[name].name if name in self.weights else name.removesuffix(".weight") for name in kept]
        declared = CONTAINERS.get(container_id(self.form, self.has_input_scale))
        modules += [layer.name for layer in self.split.values()]
        warnings = [shown(line) for line in fused_layers.partly_converted(modules, set(converted))]
        warnings += _kept_stacks(self.decisions) + self._restored_layers()
        ids = [container_id(form, form.name in self.input_scaled) for form in self.forms]
        warnings += support.mixture_warnings(ids)
        for form in self.forms:
            rows = {w.name: w.shape[-2] for w in quantized if self._form_of(w.name) is form}
            warnings += [shown(str(found)) for found in requirements.partial_blocks(container_id(form, False), rows)]
        warnings += [*self._rows_of_other_length(), *filter(None, [diffusers_classes.warning(self.config)])]
        listless = len(self.forms) > 1 and self.form.format == "modelopt"  # only layers that are listed are quantized
        if declared is None or declared.syntax is None or listless:
            return (), tuple(warnings)
        subtrees = sorted({found.subtree for found in self.decisions.values() if found.subtree is not None})
        ignore = exclusions.exclusion_list(declared.syntax, modules, subtrees, converted)
        warnings += [shown(str(found)) for found in exclusions.check(declared.id, ignore, modules, converted)]
        separate = requirements.split_experts(declared.id, support.family_of(self.config), converted)
        warnings += [shown(str(found)) for found in separate]
        return ignore, tuple(warnings)


def _with_scales_of(weight: Weight, piece: Piece) -> Piece:
    """Return a piece that writes scales in the dtype in which its weight stores them.

    Decoded values are rounded to this dtype, so that it must be kept.
    """
    kept = {part: weight.parts[part].entry.dtype for part in (SCALES, TENSOR_SCALE) if part in weight.parts}
    return replace(piece, outputs=tuple(replace(one, dtype=kept.get(one.part, one.dtype)) for one in piece.outputs))


def _several(layers: list[str]) -> str:
    """Return text that names layers in a warning: the only name, or the number of layers and the first few names."""
    return shown(layers[0]) if len(layers) == 1 else f"{len(layers)} layers ({listed(layers)})"


def _kept_stacks(decisions: Mapping[str, Decision]) -> list[str]:
    """Return a list with one warning about the stacks of experts that stay unquantized because of their names.

    Return [] if there are no such stacks.

    decisions: tensor name -> the decision whether it is converted.
    """
    kept = [name for name, found in decisions.items() if found.reason.startswith(UNSUPPORTED_STACK)]
    return (
        [f"{_several(kept)}: kept unquantized, because expert stacks of such names are not supported"] if kept else []
    )


def _joined(shards: tuple[ShardPlan, ...]) -> ShardPlan:
    """Return the plan for one file that holds the tensors of all files of a split GGUF model.

    Name and metadata are those of the first file.

    shards: the plans of the files, at least one.
    """
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    return ShardPlan(shards[0].name, tensors, shards[0].metadata)


def _check_outputs(shards: Iterable[ShardPlan]) -> None:
    """Raise CheckpointError if two output tensors have the same name, in one file or in two."""
    seen: set[str] = set()
    for output in (output for shard in shards for output in shard.outputs):
        if output.name in seen:
            raise CheckpointError(
                f"{shown(output.name)}: two tensors would be written under this name; rename one in the source"
            )
        seen.add(output.name)
