"""Make the plan of a conversion: decide what happens to each tensor of a model, and check the user's request. Nothing
is converted or written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp4kit.checkpoint.containers.config_entries import DOUBTFUL, check_declared, lost_column_scales
from fp4kit.checkpoint.containers.configs import with_declaration
from fp4kit.checkpoint.convert.journal import identity
from fp4kit.checkpoint.findings import findings_of_plan, lines_of
from fp4kit.checkpoint.model import closed_world, transforms
from fp4kit.checkpoint.model import model_files as side_files
from fp4kit.checkpoint.model.model_files import DIFFUSERS_INDEX, INDEX, is_gguf_config, open_source
from fp4kit.checkpoint.model.statistics import doubts_of, reference_of, sampled_magnitudes
from fp4kit.checkpoint.model.weights import any_quantized, weights_of
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.plan.adapter import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.plan.borrowed_codes import (
    borrow_codes,
    check_values_agree,
    recorded_recipe,
)
from fp4kit.checkpoint.plan.default_recipe import DEFAULTS, with_defaults
from fp4kit.checkpoint.plan.kv_cache import cache_troubles
from fp4kit.checkpoint.plan.layer_checks import all_doubts, missing_experts, wide_floats
from fp4kit.checkpoint.plan.output_files import parts_of
from fp4kit.checkpoint.plan.plan import Plan, ShardPlan
from fp4kit.checkpoint.plan.plan_facts import PlanFacts
from fp4kit.checkpoint.plan.plan_tensors import recorded, shard_plan
from fp4kit.checkpoint.plan.plan_warnings import decoded_layers, exclusions_of, unmeasured
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request
from fp4kit.checkpoint.plan.scale_search import SEARCH_RECIPE, ScaleSearch
from fp4kit.checkpoint.plan.source_declarations import carried, declaration_warnings, outcomes_of
from fp4kit.checkpoint.selection import names as wrapper_names
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.files import CheckpointError, shown


def make_plan(
    source: str | Path,
    recipe_id: str | Recipe | None = None,
    *,
    format: str | None = None,
    wishes: Wishes | None = None,
    input_scale: float | None = None,
    requantize: bool = False,
    nonfinite: str = "error",
    codes: str | Path | None = None,
    search: ScaleSearch | None = None,
    activations: Activations | None = None,
    ignore: Iterable[str] = (),
    split_max_size: int | None = None,
    recipes: Iterable[tuple[str, str | Recipe]] = (),
    hadamard: int | None = None,
    hadamard_seed: int | None = None,
    hadamard_only: Iterable[str] = (),
    adapter: str | Path | None = None,
    adapter_scales: str = ADAPTER_SCALES[0],
    allow_loss: bool = False,
) -> Plan:
    """Return the plan to convert a model. Nothing is written.

    In most cases, only headers and JSON files are read. Some arguments need more: column weights and importance
    matrices of ``search`` are checked, and a few rows of ``codes`` are compared with the source. Block scales are read
    if FP8 becomes MXFP8, because they must be powers of two.

    Args:
        source: a model directory, a safetensors file, or a GGUF file. A GGUF file is converted to a GGUF file.
        recipe_id: the recipe for newly quantized tensors, or its id. None follows the source: if it is quantized, the
            recipe of its own container, with which its layers keep their codes; otherwise, or if ``format`` cannot
            store them, the first recipe that ``format`` can store, beginning with nvfp4-te. With ``search``, None is
            the recipe for searched scales.
        format: the output format: "modelopt", "compressed-tensors", "fp8", "sglang-mxfp8", "gpt-oss", "deepseek-v4",
            "mlx", "comfy", or "bf16" to decode all layers. None chooses the format of a quantized source if it can
            store the recipe, otherwise the format that most engines can load for this recipe and model. A GGUF file is
            converted to a GGUF file, for which only None and "bf16" are allowed.
        wishes: which layers to quantize; None for the default, all linear layers.
        input_scale: a positive float32 activation scale to write for every layer; None to write none. With it, the
            checkpoint is NVFP4 (4-bit activations) instead of W4A16_NVFP4 (16-bit activations). Use 1.0 for loaders
            that need the scale but ignore its value. For measured scales, pass ``activations`` instead.
        requantize: True to allow changing the values of layers that are already quantized. If False, their values are
            kept, with one exception: some values of an MXFP4 layer may change if it becomes NVFP4 and its scale
            exponents are too far apart. The report of the conversion names such layers.
        nonfinite: what to do with NaN and infinity: "error" raises CheckpointError during the conversion, "keep"
            follows the recipe, and "saturate" replaces infinity with the largest finite magnitude and NaN with 0.
        codes: the path of a quantized version of the model, whose codes are copied instead of quantizing the source's
            own values. It must be a directory if the source is a GGUF file, and a GGUF file otherwise. ``recipe_id``
            still determines the container to write. Layers that are unquantized in ``codes`` stay unquantized.
        search: how to search the scale with the smallest error for every block, for example ScaleSearch.of("mse",
            column_weights). Needs nvfp4-modelopt-static, nvfp4-modelopt-static-4over6, nvfp4-gguf or mxfp4-gguf, and
            the format modelopt, compressed-tensors or GGUF. None leaves the block scales to the recipe.
        activations: measured activations, from which every layer gets its own input scale, for example
            Activations.of(["activations.safetensors"]). A layer that keeps its codes also keeps its own input scale, if
            it has one. None if there are no measured activations.
        ignore: globs of tensors, config keys and metadata entries. fp4kit refuses a model with entries that it does not
            know; those that match a glob are left out of the output instead. Every glob must match such an entry.
        split_max_size: write a GGUF model as several files, each with at most this many bytes of tensors, as
            llama-gguf-split does. None writes one file.
        recipes: (pattern, recipe) pairs for layers that get a recipe other than ``recipe_id``, for example
            [("*.down_proj", "nvfp4-te-2d")]. Patterns match whole module names of the source, as in Wishes.only. The
            first pattern that matches a layer decides. Every pattern must decide about a quantized layer.
        hadamard: the size of a Hadamard transform, 16 to 512, by which every layer W is rotated before it is quantized:
            fp4kit.hadamard(W, hadamard). The config declares that engines must rotate the inputs of these layers alike.
            Needs the format compressed-tensors. None rotates no layer.
        hadamard_seed: the seed of random signs for this transform, fp4kit.hadamard(W, hadamard, seed=hadamard_seed);
            None for no signs.
        hadamard_only: globs of the names of the layers to rotate. Other layers are quantized without a rotation. Every
            glob must match a layer. () rotates all layers that are quantized.
        adapter: the directory of a LoRA adapter, as PEFT saves it. Its updates are added to the weights before they are
            quantized. A quantized layer with an update is quantized again, even without ``requantize``; all other
            layers keep their codes. None adds nothing.
        adapter_scales: how such a quantized layer gets its block scales, if the output can hold its codes:

            - "nearest" keeps the tensor scale, and gives every block the scale of the source or the one that the recipe
              computes, whichever has the smaller squared error.
            - "base" keeps all scales.
            - "new" computes all scales by the recipe, also for layers that share the tensor scale with such a layer.

            If merged values exceed what the tensor scale can hold, "nearest" and "base" act like "new" for the layers
            that share it.
        allow_loss: True to convert even if the scales of quantized layers of the source are certainly wrong, and to
            write layers that lose their values: most blocks become zero though the source is not, or the error is far
            above that of the format. If False, each is an error.

    Returns:
        The plan, for ``execute``.

    Raises:
        CheckpointError: if the source cannot be converted, no engine loads the format, a pattern matches nothing, a
            gate has no up projection, or nothing is left to convert.
        ValueError: if no recipe has an id that is given.
        TypeError: if a recipe is neither an id nor a Recipe.
    """
    if recipe_id is None and search is not None:
        recipe_id = SEARCH_RECIPE
    request = Request(
        recipe(DEFAULTS[0] if recipe_id is None else recipe_id),
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
        hadamard=hadamard,
        hadamard_seed=hadamard_seed,
        hadamard_only=tuple(hadamard_only),
        adapter=None if adapter is None else LoraAdapter.of(adapter),
        adapter_scales=adapter_scales,
        allow_loss=allow_loss,
    )
    if adapter is not None and codes is not None:
        raise CheckpointError("--adapter: codes of another model have no update; leave --codes out")
    if hadamard is not None and codes is not None:
        raise CheckpointError(f"--hadamard {hadamard}: the codes of another model cannot be rotated; leave --codes out")
    model = open_source(Path(source))
    weights = weights_of(model.tensors, model.config)
    closed_world.check_no_adapter(model.tensors, request.ignore)
    wrapper_names.check(model.tensors)
    if request.adapter is not None:
        if is_gguf_config(model.config):
            raise CheckpointError(
                "--adapter: is not merged into a GGUF file; merge it into the model, then make the file"
            )
        weights = request.adapter.attach(weights, model.config)
    if codes is None and request.format == UNQUANTIZED:
        weights, items, matrices = transforms.undo(model, weights, request.ignore)
        if not any_quantized(weights.values()):
            closed_world.check_integers(items)
        check_declared(model, weights)
        return _plan(PlanFacts(model, request, weights, items, matrices))
    items = closed_world.check_model(model, weights, request.ignore)
    check_declared(model, weights)
    given = recipe_id is not None
    if codes is None:
        request = with_defaults(request, model.config, weights.values(), recorded_recipe(model), given)
        return _plan(PlanFacts(model, request, weights, items))
    donor = open_source(Path(codes))
    donors = weights_of(donor.tensors, donor.config)
    closed_world.check_model(donor, donors)
    request = with_defaults(request, model.config, donors.values(), recorded_recipe(donor), given)
    taken = borrow_codes(weights, model, donor)
    request = replace(request, codes=identity(donor), made_by=recorded_recipe(donor))
    plan = _plan(PlanFacts(model, request, taken, items))
    check_values_agree([tensor.name for tensor in plan.converted], weights, taken)
    return plan


def _plan(facts: PlanFacts) -> Plan:
    """Return the plan that follows from the decisions about a model, with all warnings."""
    if not facts.selected and not facts.restored:
        raise CheckpointError(
            "0 tensors to convert: nothing in the source is quantized, so there is nothing to decode; use another"
            " format than bf16"
        )
    shards = tuple(shard_plan(facts, file, *recorded(facts)) for file in facts.source.files)
    if is_gguf_config(facts.config):
        shards = (_joined(shards),)
    if facts.request.split_max_size is not None:
        parts_of(shards[0].outputs, {}, facts.request.split_max_size)  # raises if the limit is too small
    _check_outputs(shards)
    search = facts.request.search
    found = () if search is None else search.check_layers(tensor for shard in shards for tensor in shard.tensors)
    ignore, warnings = exclusions_of(facts)
    warnings += found
    names = {file.name for file in facts.source.files} | {INDEX, DIFFUSERS_INDEX}
    auxiliary = side_files.scan(facts.source.root, names, keeps_layers=False)
    own = [file.name for file in facts.source.files]
    others = side_files.other_weights(facts.source.root, own, facts.config) if facts.source.ignored else ()
    warnings += tuple(f"{shown(name)}: {why}; it is not converted" for name, why in others)
    warnings += unmeasured(facts, shards)
    form, has_scale = facts.form, facts.has_input_scale
    format = "" if form is None else form.format
    declared = with_declaration(facts.config, facts.source.hf_quant_config)
    warnings += tuple(all_doubts(facts.weights.values(), declared, facts.source.tensors))
    warnings += tuple(missing_experts(weight.name for weight in facts.weights.values()))
    warnings += tuple(wide_floats(facts.others()) if facts.form is not None else ())
    warnings += tuple(closed_world.lost_tensor_scales(facts.weights.values()))
    told = (item for item in facts.items if item.group == DOUBTFUL or item.why == closed_world.INTEGERS)
    warnings += tuple(closed_world.reasons(told))
    warnings += _doubtful_magnitudes(facts)
    if any_quantized(facts.weights.values()):
        lost = lost_column_scales(facts.config, facts.source.hf_quant_config, facts.weights)
        warnings += (lost,) if lost else ()
    if facts.kv_cache.is_carried(format):
        found_troubles = cache_troubles(facts.source.tensors)
        warnings += tuple(f"{shown(name)}: {why}" for _, name, why in found_troubles)
    outcomes = outcomes_of(facts)
    warnings += tuple(declaration_warnings(outcomes, len(facts.kv_cache.tensors)))
    plan = Plan(
        facts.source,
        facts.request,
        form,
        has_scale,
        shards,
        ignore,
        warnings,
        auxiliary,
        facts.items,
        facts.kv_cache if facts.kv_cache.is_carried(format) else None,
        facts.input_amaxes,
        facts.input_scaled,
        facts.as_in_source,
        decoded_layers(facts),
        outcomes,
        carried(facts),
    )
    issues = tuple(issue for issue in findings_of_plan(plan) if issue.text not in warnings)
    return replace(plan, findings=issues, warnings=(*warnings, *(text for _, text in lines_of(issues))))


def _doubtful_magnitudes(facts: PlanFacts) -> tuple[str, ...]:
    """Return warnings about scales of the source whose magnitudes are wrong."""
    weights = [*facts.weights.values()]
    if not any_quantized(weights):
        return ()
    found = [*doubts_of(sampled_magnitudes(weights), reference_of(weights))]
    certain = next((doubt for doubt in found if doubt.severity == "error"), None)
    if certain is not None and not facts.request.allow_loss:
        raise CheckpointError(f"{certain.line}; --allow-loss converts the model as it is")
    return tuple(doubt.line for doubt in found)


def _joined(shards: tuple[ShardPlan, ...]) -> ShardPlan:
    """Return one plan for a split GGUF model, with the tensors of all its files."""
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
